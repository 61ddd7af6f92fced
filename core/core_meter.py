"""The counters of a core, over the requests of all its frontends."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from ..ipc.messages import FinishReason, Latency
from ..ipc.meter import Ended, Meter
from .plan.request import Request


class CoreMeter(Meter):
    """The scheduler's statistics. The server and the core set some of the public attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.core = 1, 0
        self.requests_recovered = 0
        self.requests_quarantined = 0
        self.malformed_frames: Callable[[], int] = lambda: 0
        self.counts: Counter[str] = Counter()  # further counters of `Stats`, by field
        self._first_times: deque[float] = deque(maxlen=1000)  # seconds to the first tokens of the latest requests
        self._gaps: deque[float] = deque(maxlen=1000)  # seconds between tokens, of the latest steps
        self._last_step: float | None = None  # when tokens came, if requests have been running ever since

    def tokens_came(self, now: float, num_tokens: int, num_requests: int, num_firsts: int) -> None:
        """Count the tokens of a step for this number of requests; `num_firsts` of them are the first ones of theirs.
        Tokens that came together share the time since the step before."""
        gap = None if self._last_step is None else (now - self._last_step) * num_requests / max(1, num_tokens)
        if gap is not None and num_firsts < num_tokens:
            self._gaps.append(gap)
        if num_tokens:
            self._last_step = now
        self.brought(num_tokens, num_firsts, gap)

    def idle(self) -> None:
        """No request is running."""
        self._last_step = None

    def request_began(self, request: Request, now: float) -> None:
        """Count a request whose first token came."""
        seconds = now - request.arrival if request.timed else None
        if seconds is not None:
            self._first_times.append(seconds)
        self.began(request.prompt_len, seconds)

    def request_ended(self, request: Request, reason: FinishReason, num_tokens: int, now: float) -> None:
        """Count a request that ended. num_tokens: tokens of its prompt and output together."""
        arrival = request.arrival if request.timed else None
        phases: tuple[float | None, ...] = ()  # queue, prefill and decode
        if (first := request.first_token_at) is not None:
            admitted = request.admitted_at or first
            phases = None if arrival is None else admitted - arrival, first - admitted, now - first
        latency = None if arrival is None else now - arrival
        self.ended(Ended(reason, latency, request.prompt_len, num_tokens - request.prompt_len, *phases))

    def latencies(self) -> tuple[Latency, Latency]:
        """Time to the first token, and time between tokens, of the latest requests and steps."""
        return _percentiles(self._first_times), _percentiles(self._gaps)


def _percentiles(seconds: deque[float]) -> Latency:
    return Latency(*np.percentile([*seconds], (50, 95, 99)).tolist()) if seconds else Latency()
