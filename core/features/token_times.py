"""How long requests take to their first tokens, and between later tokens."""

from __future__ import annotations

from ..core_meter import Latest
from ..plan.feature import Feature
from ..plan.request import Request


class TokenTimes(Feature):
    """The latest observations, in seconds."""

    def __init__(self) -> None:
        self.first = Latest(maxlen=1000)
        self.between = Latest(maxlen=1000)
        self._last_step: float | None = None  # when tokens came, if requests have been running ever since

    def observe(self, now: float, num_tokens: int, num_requests: int, num_firsts: int) -> float | None:
        """A step brought tokens for this number of requests; `num_firsts` of them are the first ones of theirs. Returns
        the time that each token after the first took: tokens that came together share the time."""
        gap = None if self._last_step is None else (now - self._last_step) * num_requests / max(1, num_tokens)
        if gap is not None and num_firsts < num_tokens:
            self.between.append(gap)
        if num_tokens:
            self._last_step = now
        return gap

    def unseated(self, request: Request) -> None:
        if not self._rows.alive.any():
            self._last_step = None
