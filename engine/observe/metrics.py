"""What an engine tells of itself: metrics, a log line now and then, and whatever else listens to its statistics.

docs/metrics.md lists the metrics. Prometheus' library is needed only where they are served: prometheus.py.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidArgumentError, shown
from ...ipc.messages import Measured, Outputs, Stats
from ...ipc.meter import DISTRIBUTIONS, FINISH_REASONS, Ended, Meter

if TYPE_CHECKING:
    from ..request.request_state import RequestState

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0  # between two log lines
PREFIX = "mainspring:"

# name → what it says, and which field of `Stats` has it, if one does; DISTRIBUTIONS are the histograms
GAUGES = {
    "num_requests_running": ("Requests being computed.", "num_running"),
    "num_requests_waiting": ("Requests that wait for a place.", "num_waiting"),
    "kv_cache_usage_perc": ("Share of the KV cache's blocks in use, 0 to 1.", "kv_cache_usage"),
    "frontends_connected": ("Frontends of the core.", "frontends_connected"),
    "core_epoch": ("Which start of the core this is.", "epoch"),
    "lora_requests_info": ("LoRA adapters that run; the labels name them, and those that requests wait for.", ""),
    "engine_sleep_state": ("1 for the state that the engine is in.", ""),
}
COUNTERS = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    "prefix_cache_hits": ("Of these, found.", "prefix_hits"),
    "prefix_cache_host_hits": ("Of these, found in host memory.", "host_hits"),
    "num_preemptions": ("Requests that had to make room.", "num_preemptions"),
    "prompt_tokens": ("Tokens of prompts of requests that have begun.", ""),
    "generation_tokens": ("Tokens chosen.", ""),
    "request_success": ("Requests that have ended, by finish reason.", ""),
    "requests_recovered": ("Requests gone on with that an earlier core or connection began.", "requests_recovered"),
    "spec_decode_num_draft_tokens": ("Tokens guessed, and checked by the model.", "draft_tokens"),
    "spec_decode_num_accepted_tokens": ("Of these, right ones.", "accepted_tokens"),
    "requests_quarantined": ("Requests that are refused, for cores died of them.", "requests_quarantined"),
    "malformed_frames": ("Frames from frontends that were dropped.", "malformed_frames"),
    "core_restarts": ("Restarts of the core; told by a daemon.", ""),
}
OF_SUPERVISOR = {"core_epoch", "core_restarts", "requests_quarantined"}  # they outlive a core
HELP = {name: str(entry[0]) for name, entry in {**GAUGES, **COUNTERS, **DISTRIBUTIONS}.items()}
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level


class Metric(msgspec.Struct, frozen=True):
    """One value, or several that belong together. A name and its labels are there once."""

    name: str
    labels: dict[str, str]


class Counter(Metric, frozen=True):
    value: int


class Gauge(Metric, frozen=True):
    value: float


class Vector(Metric, frozen=True):
    """Counters in a row. None of today's metrics is one."""

    values: list[int]


class Histogram(Metric, frozen=True):
    """`buckets`: upper bound → how many of the `count` observations are not above it; the last bound is ``+Inf``."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(
    stats: Stats, measured: Measured, model: str | None, restarts: int | None = None, max_loras: int = 0
) -> list[Metric]:
    """Every metric, from what a core says and what was counted of requests.

    Args:
        model: for the label `model_name`.
        restarts: of the core, where somebody has counted them.
        max_loras: adapters that may run at once.
    """
    labels = {"model_name": model or "", "engine": "0"}

    def gauge(name: str, value: float, **more: str) -> Gauge:
        return Gauge(PREFIX + name, {**labels, **more}, value)

    def counter(name: str, value: int, **more: str) -> Counter:
        return Counter(PREFIX + name, {**labels, **more}, value)

    found: list[Metric] = [gauge(name, getattr(stats, field)) for name, (_, field) in GAUGES.items() if field]
    running, waiting = ",".join(stats.running_loras), ",".join(stats.waiting_loras)
    loras = {"max_lora": str(max_loras), "running_lora_adapters": running, "waiting_lora_adapters": waiting}
    found.append(gauge("lora_requests_info", len(stats.running_loras), **loras))
    for level, state in enumerate(_SLEEP_STATES):
        found.append(gauge("engine_sleep_state", int(stats.sleep_level == level), sleep_state=state))
    found += [counter(name, getattr(stats, field)) for name, (_, field) in COUNTERS.items() if field]
    found.append(counter("prompt_tokens", measured.prompt_tokens))
    found.append(counter("generation_tokens", measured.generation_tokens))
    if restarts is not None:
        found.append(counter("core_restarts", restarts))
    for reason, ended in zip(FINISH_REASONS, measured.ended, strict=False):
        found.append(counter("request_success", ended, finished_reason=reason))
    for one in measured.distributions:
        *below, count = accumulate(one.counts)
        buckets = {str(bound): total for bound, total in zip(one.bounds, below, strict=True)}
        found.append(Histogram(PREFIX + one.name, labels, count, one.sum, {**buckets, "+Inf": count}))
    return found


class IterationStats(msgspec.Struct):
    """What one message of the core brought this frontend. Times in seconds."""

    iteration_timestamp: float  # monotonic
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0  # of requests whose first token this is
    num_preempted_reqs: int = 0  # of the requests that have ended
    finished_requests: list[Ended] = []
    time_to_first_tokens_iter: list[float] = []
    inter_token_latencies_iter: list[float] = []  # one a token that is no first one


class StatLoggerBase(ABC):
    """Somebody who listens to an engine's statistics."""

    @abstractmethod
    def __init__(self, vllm_config: EngineConfig, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self, scheduler_stats: Stats | None, iteration_stats: IterationStats | None, engine_idx: int = 0
    ) -> None:
        """Something came from the core: how it is, and what it brought."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """Said once, when the engine is ready."""

    def log(self) -> None:  # noqa: B027  # one may have nothing to say
        """Called every `LOG_SECONDS` while there are requests, and by `do_log_stats`."""


StatLoggers = Mapping[str, StatLoggerBase] | Sequence[Callable[[EngineConfig, int], StatLoggerBase]]


class LoggingStatLogger(StatLoggerBase):
    """The log line, at level INFO: speeds of this frontend since the last one, and how the core is."""

    def __init__(self, vllm_config: EngineConfig, engine_index: int = 0) -> None:
        self._index = engine_index
        self._stats = self._logged = Stats()
        self._prompt = self._generation = 0
        self._since = self._heard = time.monotonic()

    def record(
        self, scheduler_stats: Stats | None, iteration_stats: IterationStats | None, engine_idx: int = 0
    ) -> None:
        self._stats = scheduler_stats or self._stats
        if iteration_stats is not None:
            now = iteration_stats.iteration_timestamp
            if now - self._heard > LOG_SECONDS:  # idle meanwhile, which is no speed
                self._since, self._prompt, self._generation = now, 0, 0
            self._heard = now
            self._prompt += iteration_stats.num_prompt_tokens
            self._generation += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Nothing: the core says when it is ready."""

    def log(self) -> None:
        now, stats = time.monotonic(), self._stats
        seconds = max(now - self._since, 1e-6)
        same_core = self._logged.prefix_queries <= stats.prefix_queries
        before = self._logged if same_core else Stats()
        queries, hits = stats.prefix_queries - before.prefix_queries, stats.prefix_hits - before.prefix_hits
        logger.info(
            "Engine %03d: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            self._index,
            self._prompt / seconds,
            self._generation / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_cache_usage,
            100 * hits / queries if queries else 0.0,
        )
        self._since, self._logged, self._prompt, self._generation = now, stats, 0, 0


class StatLoggerManager:
    """An engine's statistics: told by its output processor, kept for `metrics`, passed on to loggers.

    Args:
        stat_loggers: more loggers beside the log line, by name, or made here; one called "logging" stands in its place.

    Raises:
        InvalidArgumentError: one is no logger.
    """

    def __init__(self, config: EngineConfig, stat_loggers: StatLoggers | None = None) -> None:
        self._model, lora = config.model_config.shown_name, config.lora_config
        self._max_loras = lora.max_loras if lora.enable_lora else 0
        if stat_loggers is not None and not isinstance(stat_loggers, Mapping):
            stat_loggers = {str(at): make(config, 0) for at, make in enumerate(stat_loggers)}
        self.stat_loggers: dict[str, StatLoggerBase] = {"logging": LoggingStatLogger(config), **(stat_loggers or {})}
        for name, one in self.stat_loggers.items():
            if not isinstance(one, StatLoggerBase):
                raise InvalidArgumentError(f"stat_loggers: {name!r} is {shown(one)}; it must be a StatLoggerBase")
        self.meter = Meter()
        self.stats = Stats()
        self._iteration = IterationStats(time.monotonic())
        self._last_tokens: float | None = None  # since when more are awaited
        self._logged = self._heard = time.monotonic()
        self._tell("log_engine_initialized")

    def metrics(self) -> list[Metric]:
        return metrics_of(self.stats, self.meter.measured(), self._model, max_loras=self._max_loras)

    def log(self) -> None:
        """Let every logger say what it has to say."""
        self._logged = time.monotonic()
        self._tell("log")

    def log_with_interval(self) -> None:
        """The same, if it is time."""
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self.log()

    # ------------------------------------------------------------------ told by the output processor

    def begins(self, request: RequestState, now: float) -> None:
        """A first token of it came; only the first completion's counts."""
        if request.metrics.first_scheduled_time is not None:
            return
        seconds, prompt = now - request.added, len(request.source.prompt_token_ids)
        self.meter.began(prompt, seconds)
        self._iteration.num_prompt_tokens += prompt
        self._iteration.time_to_first_tokens_iter.append(seconds)

    def ended(self, request: RequestState, now: float) -> None:
        """All its completions have ended; it counts as one, under the first one's finish reason."""
        metrics, completions = request.metrics, request.completions
        reason, prompt = completions[0].finish_reason, len(request.source.prompt_token_ids)
        assert reason is not None
        ended = Ended(reason, now - request.added, prompt, sum(len(one.token_ids) for one in completions))
        if metrics.first_token_time is not None and metrics.first_scheduled_time is not None:
            prefill = metrics.first_token_time - metrics.first_scheduled_time
            decode = max(0.0, now - metrics.first_token_time)
            ended = ended._replace(queued_time=metrics.time_in_queue, prefill_time=prefill, decode_time=decode)
        self.meter.ended(ended)
        self._iteration.num_preempted_reqs += metrics.num_preemptions
        self._iteration.finished_requests.append(ended)

    def took_in(self, outputs: Outputs, now: float, idle: bool) -> None:
        """A whole message was processed; `idle`: nothing is in flight any more. The log line, if it is time."""
        iteration, tokens = self._iteration, len(outputs.handles)
        firsts = min(tokens, len(outputs.started))
        gap = None if self._last_tokens is None else now - self._last_tokens
        if gap is not None and tokens:  # those of one request that came together share the time
            gap *= len(set(outputs.handles)) / tokens
        if tokens:
            self.meter.stepped(tokens + iteration.num_prompt_tokens)
            self.meter.brought(tokens, firsts, gap)
            self._last_tokens = now
        if idle:
            self._last_tokens = None
        self.stats = outputs.stats or self.stats
        iteration.iteration_timestamp, iteration.num_generation_tokens = now, tokens
        iteration.inter_token_latencies_iter = [] if gap is None else [gap] * (tokens - firsts)
        self._iteration = IterationStats(now)
        self._tell("record", outputs.stats, iteration, engine_idx=0)
        if now - self._heard > LOG_SECONDS:
            self._logged = now
        self._heard = now
        self.log_with_interval()

    def _tell(self, method: str, *arguments: Any, **named: Any) -> None:
        """A logger that fails is heard once and left out from then on: requests go on without it."""
        for name, one in list(self.stat_loggers.items()):
            try:
                getattr(one, method)(*arguments, **named)
            except Exception:
                logger.exception("the stat logger %r failed, and is told nothing more", name)
                del self.stat_loggers[name]
