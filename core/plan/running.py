"""The requests that have a slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from ..memory.cache_manager import CacheManager
from .columns import Columns
from .fair_share import FairShare
from .feature import Features
from .request import Request


class Running:
    """Running requests, as objects and as columns, and the free slots.

    A slot that a request leaves while steps are in flight is free again when the last of these steps has retired,
    because the steps still name it.

    Args:
        counts: counters of `Stats`, by name.
    """

    def __init__(
        self,
        rows: Columns,
        kv: CacheManager,
        fair: FairShare,
        features: Features,
        counts: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.rows = rows
        self.requests: dict[int, Request] = {}  # by slot, in order of admission
        self.order = np.zeros(0, np.int64)  # the keys of `requests`
        self.free_slots = list(range(len(rows.alive) - 1, -1, -1))
        self.admitted: list[Request] = []  # since the last step was launched
        self.released: list[int] = []  # slots that became free since then; some may be taken again
        self.next_step = 0
        self.in_flight: list[int] = []  # numbers of the steps that were launched and have not retired
        self._freed: list[tuple[int, int]] = []  # (step to wait for, slot)
        self._kv, self._fair, self._features, self._counts, self._clock = kv, fair, features, counts, clock

    @property
    def num_coming_slots(self) -> int:
        """Slots that are free when steps in flight have retired."""
        return len(self._freed)

    def seat(self, request: Request, cached: int) -> None:
        """Give a request a slot, and the `cached` tokens that `find_prefix` has just found for it."""
        slot = request.slot = self.free_slots.pop()
        self.requests[slot] = request
        self.order = np.fromiter(self.requests, np.int64, len(self.requests))
        self.rows.seat(request, cached)
        self._features.seated(request)
        self._fair.of(request.frontend).running[slot] = request
        if request.admitted_at is None:
            request.admitted_at = self._clock()
            request.num_cached_tokens = cached
            self._counts["prefix_queries"] += len(request.tokens)
            self._counts["prefix_hits"] += cached
            self._counts["host_hits"] += self._kv.num_on_host(request)
        before = self._kv.coming_from(request, request.num_cached_blocks)
        # If `before` has published the next block and the cache does not have it, the cache can't keep it, so that
        # another request would wait for it in vain.
        self._kv.take_prefix(request, waited_for=before is None or self.rows.num_published[before.slot] <= cached)
        self._kv.show(request)
        self.admitted.append(request)

    def unseat(self, request: Request) -> None:
        """Take back a request's slot and blocks."""
        slot = request.slot
        self._kv.free(request)
        del self.requests[slot], self._fair.of(request.frontend).running[slot]
        self.order = np.fromiter(self.requests, np.int64, len(self.requests))
        self.rows.alive[slot] = False
        self.rows.granted[slot] = 0
        self._features.unseated(request)
        request.slot = -1
        if request in self.admitted:
            self.admitted.remove(request)
        if self.in_flight:
            self._freed.append((self.in_flight[-1], slot))
        else:
            self._free(slot)

    def launch(self) -> tuple[int, list[Request], list[int]]:
        """A step is launched: its number, the requests that got slots since the last one, and the slots that became
        free since then and that no request has now."""
        number, admitted = self.next_step, self.admitted
        released = [slot for slot in self.released if slot in self.free_slots]
        self.admitted, self.released = [], []
        self.next_step += 1
        self.in_flight.append(number)
        return number, admitted, released

    def retire(self, step: int) -> None:
        """The oldest step in flight is taken in, or taken back."""
        assert self.in_flight[0] == step, "steps are taken in in the order they were launched"
        self.in_flight.pop(0)
        self._kv.step_retired(step)
        while self._freed and self._freed[0][0] <= step:
            self._free(self._freed.pop(0)[1])

    def _free(self, slot: int) -> None:
        self.free_slots.append(slot)
        self.released.append(slot)
