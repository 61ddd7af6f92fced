"""A step of one suspect alone, see features/suspects.py."""

from __future__ import annotations

import numpy as np

from ..features.suspects import Suspects
from ..memory.cache_manager import CacheManager
from .cut import Cut
from .need import Need
from .preemption import Preemption
from .request import Request
from .room import Room
from .running import Running


class Trial:
    def __init__(
        self,
        suspects: Suspects,
        running: Running,
        kv: CacheManager,
        need: Need,
        cut: Cut,
        room: Room,
        preemption: Preemption,
    ) -> None:
        self._suspects, self._running, self._rows, self._kv = suspects, running, running.rows, kv
        self._need, self._cut, self._room, self._preemption = need, cut, room, preemption

    def plan(self, suspect: Request) -> tuple[np.ndarray, np.ndarray]:
        """Let `suspect` have the next step; no step is in flight. If it lacks room, others are preempted.

        Returns:
            its slot and the number of tokens to compute (int64 ``[1]`` each).
        """
        rows = self._rows
        rows.granted[:] = 0
        self._room.take_promise()
        if suspect.slot < 0:
            self._seat(suspect)
        slot = np.array([suspect.slot])
        rows.held_up[slot] = False
        need = self._cut.of(slot, self._need.of(slot))
        rows.held_up[slot] = True
        while not self._room.extend(suspect.slot, int((rows.num_computed[slot] + need)[0])):
            self._preemption.preempt_victim()
        self._suspects.step, self._suspects.have_turn = self._running.next_step, False
        return slot, need

    def _seat(self, suspect: Request) -> None:
        if not self._running.free_slots:
            self._preemption.preempt_victim()
        self._suspects.begin(suspect)
        cached = self._kv.find_prefix(suspect)
        while self._kv.room_needed(suspect, cached, 0)[0] > self._kv.pool.num_free:
            self._preemption.preempt_victim()
        self._running.seat(suspect, cached)
