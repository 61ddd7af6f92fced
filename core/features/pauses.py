"""Pauses: nothing is computed, or only requests that have begun go on."""

from __future__ import annotations

from typing import Literal

from ..plan.fair_share import FairShare
from ..plan.feature import Feature
from ..plan.request import Request

PauseMode = Literal["keep", "wait"]


class Pauses(Feature):
    """In mode ``keep`` no step is made. In mode ``wait`` requests that have begun go on, and the others are kept out of
    the queues."""

    def __init__(self, fair: FairShare) -> None:
        self.mode: PauseMode | None = None
        self._fair = fair
        self._aside: dict[Request, None] = {}  # requests that wait for the end of the pause, in order

    def set(self, mode: PauseMode | None) -> None:
        """Begin a pause, change its mode, or end it (None)."""
        self.mode = mode
        waiting, self._aside = list(self._aside), {}
        if mode == "wait":
            for frontend in self._fair:
                while frontend.peek() is not None:
                    waiting.append(frontend.pop())
        for request in waiting:
            if not self.keeps(request):
                self._fair.push(request)

    # ------------------------------------------------------------------ hooks

    def keeps(self, request: Request) -> bool:
        if self.mode != "wait" or request.has_begun:
            return False
        self._aside[request] = None
        return True

    def may_run(self, request: Request, step: int, fetch: bool) -> bool:
        return self.mode is None or request.has_begun

    def ended(self, request: Request) -> None:
        self._aside.pop(request, None)
