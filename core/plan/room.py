"""Blocks for running requests, and room for new ones where another frontend has more than its share."""

from __future__ import annotations

import numpy as np

from ..memory.cache_manager import CacheManager
from .fair_share import FairShare, Frontend
from .preemption import Preemption
from .request import Request
from .running import Running


class Room:
    """Finds blocks, by preemption if need be.

    Blocks of a preempted request come back when the steps in flight have retired. Until then they are promised to the
    request that they were taken for.
    """

    def __init__(self, running: Running, kv: CacheManager, fair: FairShare, preemption: Preemption) -> None:
        self._running, self._rows, self._kv, self._fair = running, running.rows, kv, fair
        self._preemption = preemption
        self._promised: Request | None = None

    def take_promise(self) -> Request | None:
        """The request that the blocks on their way are promised to; the promise ends."""
        promised, self._promised = self._promised, None
        return promised

    def free_for(self, frontend: Frontend) -> int:
        """Free blocks that requests of this frontend may take."""
        return self._kv.pool.num_free - self._reserved(frontend)

    def _reserved(self, frontend: Frontend) -> int:
        promised = self._promised
        others = promised is not None and not promised.finished and promised.frontend != frontend.id
        return frontend.kept + (promised.room if promised is not None and others else 0)

    def extend(self, slot: int, num_tokens: int, ahead: int = 0) -> bool:
        """Let the block tables of a running request reach `num_tokens`, and `ahead`, if that is more, where no window
        gives blocks up. False if there are too few blocks."""
        request, computed = self._running.requests[slot], int(self._rows.num_computed[slot])
        leave = self._reserved(self._fair.of(request.frontend))
        if not self._kv.extend(request, computed, num_tokens, leave, ahead):
            return False
        self._rows.reach[slot] = -(-num_tokens // self._kv.block_size) * self._kv.block_size
        return True

    def allocate(self, slots: np.ndarray) -> set[int]:
        """Let the block tables at `slots` reach what this step computes, with preemptions where the pool has too few
        blocks.

        Returns:
            the frontends whose requests lacked blocks, and those whose requests were preempted. None of them gets a new
            request in this step, which could take the blocks that running requests wait for.
        """
        rows, lacking = self._rows, set()
        ends = rows.num_computed + rows.granted
        edges = slots[ends[slots] > rows.reach[slots]].tolist()
        for slot in sorted(edges, key=lambda slot: self._fair.rank(self._running.requests[slot])):
            while rows.alive[slot] and not self.extend(slot, int(ends[slot])):
                lacking.add(int(rows.frontend[slot]))
                if self._kv.num_on_the_way:  # they come back when a step retires
                    rows.granted[slot] = 0
                    break
                lacking.add(self._preemption.preempt_victim().frontend)
        return lacking

    def make(self, frontend: Frontend, request: Request, promised: bool) -> bool:
        """Preempt requests of frontends over their share for `request`, whose `frontend` is under its share.

        Returns:
            whether there is room now. If the room is there only when the steps in flight have retired, it is promised.
        """
        running, gave = self._running, False
        while True:
            slots = 1 - len(running.free_slots) - running.num_coming_slots
            if slots <= 0 and request.room <= self.free_for(frontend) + self._kv.num_on_the_way:
                break
            # A request that got its slot in this very step keeps it; the next step begins with the least served.
            giver = self._preemption.giver(request, slots > 0, but=running.admitted)
            if giver is None:
                return False
            self._preemption.preempt(giver)
            gave = True
        if running.in_flight and (gave or promised) and self._promised is None:
            self._promised = request
        return gave and not running.in_flight
