"""The end of a request, whatever its reason."""

from __future__ import annotations

from collections.abc import Callable

from ...ipc.messages import Finished, FinishReason
from ..core_meter import CoreMeter
from ..features.suspects import Suspects
from .fair_share import FairShare
from .feature import Features
from .outbox import Outbox
from .request import Request
from .running import Running


class Ending:
    def __init__(
        self,
        running: Running,
        fair: FairShare,
        features: Features,
        meter: CoreMeter,
        outbox: Outbox,
        suspects: Suspects,
        clock: Callable[[], float],
        on_end: Callable[[Request], None],
    ) -> None:
        self._running, self._fair, self._features = running, fair, features
        self._meter, self._outbox, self._suspects = meter, outbox, suspects
        self._clock, self._on_end = clock, on_end

    def fail(self, request: Request, name: str, text: str) -> None:
        """End a request with the error of this name on the wire."""
        self._suspects.clear(request)
        self.finish(request, "error", error=(name, text))

    def complete(self, request: Request) -> None:
        """End a request that can have no further token."""
        self._suspects.clear(request)
        self.finish(request, "stop")

    def finish(
        self, request: Request, reason: FinishReason, stop_token: int | None = None, error: tuple[str, str] = ("", "")
    ) -> None:
        """End a request: take back what it has, count it, and tell its frontend. `error`: its name on the wire, and
        the text."""
        num_tokens = len(request.tokens)
        if request.slot >= 0:
            num_tokens = self._running.rows.num_known(request.slot)
            self._running.unseat(request)
        self._meter.request_ended(request, reason, num_tokens, self._clock())
        self._fair.end(request)
        self._features.ended(request)
        finished = Finished(request.handle, reason, stop_token, request.num_preemptions, *error)
        self._outbox.put(request.frontend, finished)
        self._on_end(request)
