"""The counters of a core, over the requests of all its frontends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from ..ipc.messages import FinishReason, Latency
from ..ipc.meter import Ended, Meter
from .plan.request import Request


class CoreMeter(Meter):
    """The scheduler's meter. The server and the core set the public attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 1
        self.requests_recovered = 0
        self.requests_quarantined = 0
        self.malformed_frames: Callable[[], int] = lambda: 0

    def request_ended(self, request: Request, reason: FinishReason, num_tokens: int, now: float) -> None:
        """Count a request that ended. num_tokens: tokens of its prompt and output together."""
        first, prompt = request.first_token_at, request.prompt_len
        ended = Ended(reason, now - request.arrival, prompt, num_tokens - prompt)
        if first is not None:
            admitted = request.admitted_at or first
            queued, prefill, decode = admitted - request.arrival, first - admitted, now - first
            ended = ended._replace(queued_time=queued, prefill_time=prefill, decode_time=decode)
        self.ended(ended)


class Latest(deque[float]):
    """The latest observations, in seconds."""

    def percentiles(self) -> Latency:
        return Latency(*np.percentile([*self], (50, 95, 99)).tolist()) if self else Latency()
