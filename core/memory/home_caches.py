"""The planner's view of memory where each rank keeps the keys and values of its own requests: one `CacheManager`
each.

A request's home is chosen when it is looked up, before it gets a slot, and stays the same while it runs.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from ..plan.request import Request
from .cache_manager import CacheManager
from .updates import NO_COPIES, NO_STATE_COPIES, Copies, StateCopies, TableUpdate

BOUND = 1.25  # times the mean of running requests: a home that would have more takes no further one


class HomeCaches:
    """See `CacheManager`, whose methods these are. There are no recurrent layers, and no blocks in host memory."""

    recurrent = None
    least_cut = 1

    def __init__(self, homes: int, make: Callable[[], CacheManager]) -> None:
        self._homes = [make() for _ in range(homes)]
        self.block_size, self.kinds = self._homes[0].block_size, self._homes[0].kinds
        self.blocks_used: Counter[int] = Counter()
        for home in self._homes:
            home.blocks_used = self.blocks_used
        self._running = [0] * homes

    # ------------------------------------------------------------------ how much

    @property
    def num_blocks(self) -> int:
        return sum(home.num_blocks for home in self._homes)

    @property
    def num_in_use(self) -> int:
        return sum(home.num_in_use for home in self._homes)

    def num_free(self, request: Request) -> int:
        return self._of(request).num_free(request)

    def num_coming(self, request: Request) -> int:
        return self._of(request).num_coming(request)

    # ------------------------------------------------------------------ prefix cache

    def find_prefix(self, request: Request) -> int:
        """As `CacheManager.find_prefix`. Chooses the request's home: where it has room, its longest prefix is cached,
        and fewest requests run, in this order, among those that have not many more than others."""
        most = math.ceil(BOUND * (sum(self._running) + 1) / len(self._homes))
        open_ = [home for home, running in enumerate(self._running) if running < most]
        request.home = max(open_, key=lambda home: self._fitness(request, home))
        return self._of(request).find_prefix(request)

    def _fitness(self, request: Request, home: int) -> tuple[bool, int, int, int]:
        memory = self._homes[home]
        cached = memory.find_prefix(request)
        needed, _ = memory.room_needed(request, len(request.tokens), len(request.tokens))
        free = memory.num_free(request)
        return needed <= free, cached, -self._running[home], free

    def prefix_grew(self, request: Request) -> bool:
        return True  # maybe at another home

    def take_prefix(self, request: Request, waited_for: bool = True) -> None:
        self._running[request.home] += 1
        self._of(request).take_prefix(request, waited_for)

    def room_needed(self, request: Request, num_tokens: int, per_step: int) -> tuple[int, int]:
        return self._of(request).room_needed(request, num_tokens, per_step)

    def coming_from(self, request: Request, block: int) -> Request | None:
        return self._of(request).coming_from(request, block)

    def ends_cached(self, request: Request, blocks: int) -> bool:
        return self._of(request).ends_cached(request, blocks)

    def publish(self, request: Request, first: int, last: int) -> None:
        self._of(request).publish(request, first, last)

    def reset_cache(self, pool: bool = True, host: bool = True) -> None:
        for home in self._homes:
            home.reset_cache(pool, host)

    def num_on_host(self, request: Request) -> int:
        return 0

    # ------------------------------------------------------------------ blocks

    def num_listed(self, request: Request) -> int:
        return self._of(request).num_listed(request)

    def extend(self, request: Request, num_computed: int, num_tokens: int, leave: int = 0, ahead: int = 0) -> bool:
        return self._of(request).extend(request, num_computed, num_tokens, leave, ahead)

    def show(self, request: Request) -> None:
        self._of(request).show(request)

    def free(self, request: Request) -> None:
        self._running[request.home] -= 1
        self._of(request).free(request)

    # ------------------------------------------------------------------ steps

    def cut(self, request: Request, start: int, count: int) -> int:
        return self._of(request).cut(request, start, count)

    def roll_back(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        return ends  # keys and values of rejected guesses are overwritten

    def steps_before_snapshot(self, computed: np.ndarray) -> int:
        return sys.maxsize

    def take_updates(self) -> TableUpdate:
        parts = [home.take_updates() for home in self._homes]
        return TableUpdate(*map(np.concatenate, zip(*parts, strict=True)))

    def take_copies(self) -> Copies:
        return NO_COPIES

    def take_state_copies(
        self, running: Mapping[int, Request], slots: np.ndarray, ends: np.ndarray, guessed: np.ndarray
    ) -> StateCopies:
        return NO_STATE_COPIES

    def step_launched(self, step: int) -> None:
        for home in self._homes:
            home.step_launched(step)

    def step_retired(self, step: int) -> None:
        for home in self._homes:
            home.step_retired(step)

    def _of(self, request: Request) -> CacheManager:
        return self._homes[request.home]
