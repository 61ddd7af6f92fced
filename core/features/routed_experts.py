"""Which experts computed each token of a request, for training that repeats the routing.

The rows of a step are sent with its outputs, and the planner keeps none of them, but for those of cached blocks: a
request that takes a prefix from the cache is sent the rows of the tokens that it does not compute. Each row is sent
once, also if its token is computed again after a preemption.
"""

from __future__ import annotations

import numpy as np

from ..memory.block_rows import MOST_HIT_BYTES
from ..memory.cache_manager import CacheManager
from ..plan.feature import Feature
from ..plan.outbox import RoutedRows
from ..plan.request import Request
from ..plan.step import StepPlan, StepResult


class RoutedExperts(Feature):
    """Needs a worker whose results have `StepResult.experts`."""

    def __init__(self, kv: CacheManager) -> None:
        self._kv, self._cached = kv, kv.keep_rows()
        self._requests: dict[int, Request] = {}  # the running ones, by slot
        self._tails: dict[int, np.ndarray] = {}  # by slot: rows of the tokens behind the last full block
        self._hits: dict[int, list[np.ndarray]] = {}  # by slot: rows of cached blocks, to be sent with the next result
        self._hit_bytes = 0  # of all `_hits`

    def may_run(self, request: Request, step: int, fetch: bool) -> bool:
        return self._hit_bytes < MOST_HIT_BYTES  # a hit may have as many again, and a message must not be too large

    def got_slot(self, request: Request) -> None:
        slot, size = request.slot, self._kv.block_size
        self._requests[slot] = request
        cached = int(self._rows.num_computed[slot])
        if self._cached is not None and cached > request.num_routed:
            self._hits[slot] = self._cached.get(request.digests[request.num_routed // size : cached // size])
            self._hit_bytes += sum(rows.nbytes for rows in self._hits[slot])

    def left_slot(self, request: Request) -> None:
        del self._requests[request.slot]
        self._tails.pop(request.slot, None)
        self._take_hits(request.slot)

    def routed(self, plan: StepPlan, result: StepResult, alive: np.ndarray, ends: np.ndarray) -> list[RoutedRows]:
        found: list[RoutedRows] = []
        if not plan.slots.size:  # a step that only encodes media
            return found
        experts = result.experts
        assert experts is not None, "the worker does not record experts"
        firsts = np.cumsum(plan.counts) - plan.counts
        for i in np.flatnonzero(alive).tolist():
            slot, start, end, first = int(plan.slots[i]), int(plan.starts[i]), int(ends[i]), int(firsts[i])
            request, rows = self._requests[slot], experts[first : first + end - start]
            if self._cached is not None:
                self._keep(request, start, rows)
                if hits := self._take_hits(slot):
                    rows = np.concatenate([*hits, rows])
            known = request.num_routed
            if known < end:
                at = known - request.num_virtual
                found.append(RoutedRows(request.frontend, request.handle, at, rows[len(rows) - (end - known) :]))
                request.num_routed = end
        return found

    def _take_hits(self, slot: int) -> list[np.ndarray]:
        hits = self._hits.pop(slot, [])
        self._hit_bytes -= sum(rows.nbytes for rows in hits)
        return hits

    def _keep(self, request: Request, start: int, rows: np.ndarray) -> None:
        """Keep `rows` of the request's tokens from `start` on beside its blocks, as soon as these are full."""
        assert self._cached is not None
        size, slot = self._kv.block_size, request.slot
        if (tail := self._tails.get(slot)) is not None:
            start, rows = start - len(tail), np.concatenate([tail, rows])
        for at in range(0, len(rows) - size + 1, size):
            block = (start + at) // size
            digest = request.digests[block]
            if digest not in self._cached or self._kv.pool.find((0, digest)) == request.tables[0][block]:
                self._cached.put(digest, rows[at : at + size].copy())
        self._tails[slot] = rows[len(rows) // size * size :].copy()
