"""Statistics of an engine: metrics, a periodic log line, and stat loggers of the user.

docs/metrics.md lists the metrics. Only prometheus.py, which serves them, needs the library of Prometheus.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

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

# name → help text, and the field of `Stats` that holds the value, if there is one; DISTRIBUTIONS are the histograms
GAUGES = {
    "num_requests_running": ("Requests being computed.", "num_running"),
    "num_requests_waiting": ("Requests that wait for a place.", "num_waiting"),
    "kv_cache_usage_perc": ("Share of the KV cache's blocks in use, 0 to 1.", "kv_cache_usage"),
    "encoder_cache_bytes": ("Memory of what was encoded of media.", "encoder_bytes"),
    "frontends_connected": ("Frontends of the core.", "frontends_connected"),
    "core_epoch": ("Which start of the core this is.", "epoch"),
    "lora_requests_info": ("LoRA adapters that run; the labels name them, and those that requests wait for.", ""),
    "engine_sleep_state": ("1 for the state that the engine is in.", ""),
}
COUNTERS = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    "prefix_cache_hits": ("Of these, found.", "prefix_hits"),
    "prefix_cache_host_hits": ("Of these, found in host memory.", "host_hits"),
    "encoder_cache_queries": ("Media items that requests named.", "encoder_queries"),
    "encoder_cache_hits": ("Of these, encoded already.", "encoder_hits"),
    "encoded_items": ("Media items encoded.", "encoded_items"),
    "encoder_seconds": ("Time that encoding took.", "encoder_seconds"),
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
OF_SUPERVISOR = {"core_epoch", "core_restarts", "requests_quarantined"}  # known while there is no core
HELP = {name: str(entry[0]) for name, entry in {**GAUGES, **COUNTERS, **DISTRIBUTIONS}.items()}
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level


class Metric(msgspec.Struct, frozen=True):
    """One metric: no other has the same name and labels."""

    name: str
    labels: dict[str, str]

    def renamed(self, name: str) -> Self:
        return msgspec.structs.replace(self, name=name)


class Counter(Metric, frozen=True):
    value: int | float


class Gauge(Metric, frozen=True):
    value: float


class Vector(Metric, frozen=True):
    """Several counters in a list. No metric has this type so far."""

    values: list[int]


class Histogram(Metric, frozen=True):
    """`buckets`: upper bound → how many of the `count` observations are not above it; the last bound is ``+Inf``."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(
    stats: Stats, measured: Measured, model: str | None, restarts: int | None = None, max_loras: int = 0
) -> list[Metric]:
    """Every metric, from the statistics of a core and the counts of requests.

    Args:
        model: for the label `model_name`.
        restarts: of the core; None: not known here.
        max_loras: adapters that may run at once.
    """
    labels = {"model_name": model or "", "engine": str(stats.core)}

    def gauge(name: str, value: float, **more: str) -> Gauge:
        return Gauge(PREFIX + name, {**labels, **more}, value)

    def counter(name: str, value: int | float, **more: str) -> Counter:
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
    """Statistics of one message from the core to this frontend. Times in seconds."""

    iteration_timestamp: float  # monotonic
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0  # of requests that got their first token
    num_preempted_reqs: int = 0  # of the requests that have ended
    finished_requests: list[Ended] = []
    time_to_first_tokens_iter: list[float] = []
    inter_token_latencies_iter: list[float] = []  # one for each token after a request's first


class StatLoggerBase(ABC):
    """Receives the statistics of an engine."""

    @abstractmethod
    def __init__(self, vllm_config: EngineConfig, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self, scheduler_stats: Stats | None, iteration_stats: IterationStats | None, engine_idx: int = 0
    ) -> None:
        """Called for each message from the core, with the core's statistics and those of the message."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """Called once, when the engine is ready."""

    def log(self) -> None:  # noqa: B027  # a logger may have nothing to log
        """Called every `LOG_SECONDS` while there are requests, and by `do_log_stats`."""


StatLoggers = Mapping[str, StatLoggerBase] | Sequence[Callable[[EngineConfig, int], StatLoggerBase]]


class LoggingStatLogger(StatLoggerBase):
    """The periodic log line, at level INFO: this frontend's throughput since the last line and the core's state."""

    def __init__(self, vllm_config: EngineConfig, engine_index: int = 0) -> None:
        self._index = engine_index
        self._stats: dict[int, Stats] = {}  # the latest, by number of the core
        self._queries = self._hits = 0  # of the prefix cache, at the last line
        self._prompt = self._generation = 0
        self._since = self._heard = time.monotonic()

    def record(
        self, scheduler_stats: Stats | None, iteration_stats: IterationStats | None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self._stats[engine_idx] = scheduler_stats
        if iteration_stats is not None:
            now = iteration_stats.iteration_timestamp
            if now - self._heard > LOG_SECONDS:  # do not count an idle time into the throughput
                self._since, self._prompt, self._generation = now, 0, 0
            self._heard = now
            self._prompt += iteration_stats.num_prompt_tokens
            self._generation += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Nothing to do: the core logs that it is ready."""

    def log(self) -> None:
        now, told = time.monotonic(), self._stats.values()
        seconds = max(now - self._since, 1e-6)
        queries, hits = sum(one.prefix_queries for one in told), sum(one.prefix_hits for one in told)
        if queries < self._queries:  # a core has died
            self._queries = self._hits = 0
        new, found = queries - self._queries, hits - self._hits
        logger.info(
            "Engine %03d: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            self._index,
            self._prompt / seconds,
            self._generation / seconds,
            sum(one.num_running for one in told),
            sum(one.num_waiting for one in told),
            100 * sum(one.kv_cache_usage for one in told) / max(1, len(told)),
            100 * found / new if new else 0.0,
        )
        self._since, self._prompt, self._generation, self._queries, self._hits = now, 0, 0, queries, hits


class StatLoggerManager:
    """Collects an engine's statistics from its output processor, for `metrics` and for the stat loggers.

    Args:
        stat_loggers: loggers beside the log line, by name, or factories of loggers; one named "logging" replaces it.

    Raises:
        InvalidArgumentError: one of them is no `StatLoggerBase`.
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
        self._meters = {0: Meter()}  # by number of the core
        self._stats = {0: Stats()}
        self.meter = self._meters[0]  # of the core whose message is being processed
        self._iteration = IterationStats(time.monotonic())
        self._last_tokens: float | None = None  # when the last tokens came; None while nothing is in flight
        self._logged = self._heard = time.monotonic()
        self._tell("log_engine_initialized")

    def metrics(self) -> list[Metric]:
        return [
            metric
            for core, stats in sorted(self._stats.items())
            for metric in metrics_of(stats, self._meters[core].measured(), self._model, max_loras=self._max_loras)
        ]

    def take(self, stats: Stats | None) -> None:
        """Keep the statistics of a core. What follows is counted as this core's."""
        if stats is not None:
            self.meter = self._meters.setdefault(stats.core, Meter())  # first: `metrics` may run in another thread
            self._stats[stats.core] = stats

    def log(self) -> None:
        """Call `log` of every logger."""
        self._logged = time.monotonic()
        self._tell("log")

    def log_with_interval(self) -> None:
        """The same, if the last time was `LOG_SECONDS` ago."""
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self.log()

    # ------------------------------------------------------------------ called by the output processor

    def request_began(self, request: RequestState, now: float) -> None:
        """A completion got its first token. Only the first completion of a request counts."""
        if request.metrics.first_scheduled_time is not None:
            return
        seconds, prompt = now - request.added, len(request.source.prompt_token_ids)
        self.meter.began(prompt, seconds)
        self._iteration.num_prompt_tokens += prompt
        self._iteration.time_to_first_tokens_iter.append(seconds)

    def request_ended(self, request: RequestState, now: float) -> None:
        """All completions of a request have ended. It counts once, under the first one's finish reason."""
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

    def outputs_processed(self, outputs: Outputs, now: float, idle: bool) -> None:
        """A message was processed. `idle`: nothing is in flight any more."""
        iteration, tokens = self._iteration, len(outputs.handles)
        firsts = min(tokens, len(outputs.started))
        gap = None if self._last_tokens is None else now - self._last_tokens
        if gap is not None and tokens:  # tokens of one request that came together share the time
            gap *= len(set(outputs.handles)) / tokens
        if tokens:
            self.meter.stepped(tokens + iteration.num_prompt_tokens)
            self.meter.brought(tokens, firsts, gap)
            self._last_tokens = now
        if idle:
            self._last_tokens = None
        iteration.iteration_timestamp, iteration.num_generation_tokens = now, tokens
        iteration.inter_token_latencies_iter = [] if gap is None else [gap] * (tokens - firsts)
        self._iteration = IterationStats(now)
        self._tell("record", outputs.stats, iteration, engine_idx=outputs.stats.core if outputs.stats else 0)
        if now - self._heard > LOG_SECONDS:
            self._logged = now
        self._heard = now
        self.log_with_interval()

    def _tell(self, method: str, *arguments: Any, **named: Any) -> None:
        """Call a method of every logger. One that raises is removed, so that requests go on."""
        for name, one in list(self.stat_loggers.items()):
            try:
                getattr(one, method)(*arguments, **named)
            except Exception:
                logger.exception("the stat logger %r failed, and is told nothing more", name)
                del self.stat_loggers[name]
