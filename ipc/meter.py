"""Counters and histograms of requests and steps. A core counts for all frontends, a frontend for its own requests."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple, get_args

from .messages import Distribution, FinishReason, Measured

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = tuple(float(4**n) for n in range(11))

# name → help text, upper bounds of the buckets
DISTRIBUTIONS: dict[str, tuple[str, tuple[float, ...]]] = {
    "iteration_tokens_total": ("Tokens of a step, of prompts and of outputs.", _TOKENS),
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a request.", _SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", _SECONDS),
    "request_queue_time_seconds": ("From a request's arrival to its first step.", _SECONDS),
    "request_prefill_time_seconds": ("From a request's first step to its first token.", _SECONDS),
    "request_decode_time_seconds": ("From a request's first token to its end.", _SECONDS),
    "request_prompt_tokens": ("Tokens of an ended request's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of an ended request's output.", _TOKENS),
}
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


class Ended(NamedTuple):
    """The measurements of a request that has ended, in seconds. The last three are None without a first token, and the
    times that begin with the request's arrival are None if its arrival is not known."""

    finish_reason: FinishReason
    e2e_latency: float | None
    num_prompt_tokens: int
    num_generation_tokens: int
    queued_time: float | None = None
    prefill_time: float | None = None
    decode_time: float | None = None


class Meter:
    """Counts since it was made. Its methods are called per step and at the begin and end of a request, but not per
    token, because that would cost too much."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.ends = dict.fromkeys(FINISH_REASONS, 0)
        self._counts = {name: [0] * (len(bounds) + 1) for name, (_, bounds) in DISTRIBUTIONS.items()}
        self._sums = dict.fromkeys(DISTRIBUTIONS, 0.0)

    def stepped(self, num_tokens: int) -> None:
        """Count a step that computed `num_tokens`."""
        self._observe("iteration_tokens_total", num_tokens)

    def brought(self, num_tokens: int, num_firsts: int, gap: float | None) -> None:
        """Count output tokens that arrived together.

        Args:
            num_firsts: how many of them are the first token of a request.
            gap: seconds since the previous tokens.
        """
        self.generation_tokens += num_tokens
        if gap is not None and num_tokens > num_firsts:
            self._observe("inter_token_latency_seconds", gap, num_tokens - num_firsts)

    def began(self, num_prompt_tokens: int, seconds: float | None) -> None:
        """Count a request's first token, which came `seconds` after the request's arrival; None: not known."""
        self.prompt_tokens += num_prompt_tokens
        self._observe("time_to_first_token_seconds", seconds)

    def ended(self, request: Ended) -> None:
        """Count a request that has ended."""
        self.ends[request.finish_reason] += 1
        self._observe("e2e_request_latency_seconds", request.e2e_latency)
        self._observe("request_prompt_tokens", request.num_prompt_tokens)
        self._observe("request_generation_tokens", request.num_generation_tokens)
        self._observe("request_queue_time_seconds", request.queued_time)
        self._observe("request_prefill_time_seconds", request.prefill_time)
        self._observe("request_decode_time_seconds", request.decode_time)

    def measured(self) -> Measured:
        """All counters and histograms so far."""
        distributions = [
            Distribution(name, [*bounds], [*self._counts[name]], self._sums[name])
            for name, (_, bounds) in DISTRIBUTIONS.items()
        ]
        return Measured(self.prompt_tokens, self.generation_tokens, [*self.ends.values()], distributions)

    def _observe(self, name: str, value: float | None, times: int = 1) -> None:
        if value is None:
            return
        self._counts[name][bisect_left(DISTRIBUTIONS[name][1], value)] += times
        self._sums[name] += value * times
