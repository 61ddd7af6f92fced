"""Requests that another core of the group had before: they wait until it is known of which requests that core died."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple

from ..plan.request import Request

# Seconds after which a moved request runs, whatever the supervisor says. It reads the journal of a dead core within
# milliseconds; a core that lives so long has only lost the frontend's connection.
PATIENCE_S = 10.0


class _Held(NamedTuple):
    core: int
    epoch: int
    until: float
    request: Request | None
    released: Future[None]


class MovedRequests:
    """Args:
    over: number of a core → last epoch that has ended, with all its suspects known here.
    """

    def __init__(self, over: Mapping[int, int]) -> None:
        self._over = dict(over)
        self._held: list[_Held] = []

    def hold(self, moved_from: list[int], request: Request | None = None) -> Future[None] | None:
        """A future that is done when a request that comes from this core and epoch may run, or has ended; None: it may
        run now."""
        if len(moved_from) != 2 or self._over.get(moved_from[0], 0) >= moved_from[1]:
            return None
        core, epoch = moved_from
        self._held.append(_Held(core, epoch, time.monotonic() + PATIENCE_S, request, Future()))
        return self._held[-1].released

    def end(self, over: Mapping[int, int]) -> None:
        """These epochs are over, and the suspects of them are known."""
        self._over.update(over)
        self.look()

    def look(self) -> None:
        """Release the requests that need not wait any more."""
        now, held, self._held = time.monotonic(), self._held, []
        for one in held:
            has_ended = one.request is not None and one.request.finished
            if has_ended or self._over.get(one.core, 0) >= one.epoch or now >= one.until:
                one.released.set_result(None)
            else:
                self._held.append(one)
