"""Steps for a pipeline of stages: as many are in flight as there are stages, of different requests.

While the last stage computes a step, the first one computes the next. A request whose token is on its way can't be in
that one, so a step leaves requests for the others.
"""

from __future__ import annotations

import numpy as np

from ..plan.columns import Columns
from ..plan.fair_share import FairShare
from ..plan.feature import NO_LIMIT, Feature
from ..plan.request import Request
from ..plan.running import Running
from ..plan.step import PromptPart


class Pipeline(Feature):
    """A step has at most its share of the requests: one in `stages`, those first that were in no step for longest. A
    long prompt, which could be in each step, leaves its place to requests that wait for one."""

    def __init__(self, stages: int, running: Running, fair: FairShare) -> None:
        self._stages, self._running, self._fair = stages, running, fair
        self._turn = 0

    def attach(self, rows: Columns) -> None:
        super().attach(rows)
        self._last = np.zeros(len(rows.alive), np.int64)  # turn of each slot's last step

    @property
    def _share(self) -> int:
        return max(1, -(-min(len(self._last), self._fair.num_requests) // self._stages))

    def cap(self, slots: np.ndarray, need: np.ndarray) -> None:
        wants, running = np.flatnonzero(need), self._running
        last = self._last[slots[wants]]
        idle = np.count_nonzero(last <= self._turn - len(running.in_flight))
        waiting = min(self._fair.num_requests - len(running.requests), len(running.free_slots))
        places = max(min(self._share, idle), self._share - waiting)
        need[wants[np.argsort(last, kind="stable")[places:]]] = 0

    def most(self, request: Request, start: int) -> int:
        if request.slot < 0 and np.count_nonzero(self._rows.granted) >= self._share:
            return 0
        return NO_LIMIT

    def got_slot(self, request: Request) -> None:
        self._rows.looks_back[request.slot] = True  # it waits for its last token
        self._last[request.slot] = self._turn

    def prompt_parts(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> list[PromptPart]:
        """A step is launched: the turn of `slots` is over."""
        self._turn += 1
        self._last[slots] = self._turn
        return []
