"""The core's one loop: schedule, execute, sample, update. It knows frontends by number and text not at all."""

from __future__ import annotations

import inspect
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from ..ipc.codec import Frame, decode_value, encode_value, read_tensor
from ..ipc.config import EngineConfig
from ..ipc.errors import (
    InvalidArgumentError,
    InvalidRequestError,
    NotPermittedError,
    NotSupportedError,
    OutOfMemoryError,
    RequestFailedError,
)
from ..ipc.journal import Journal, Phase, request_key
from ..ipc.messages import AddRequest, DesiredState, FrontendStatus, Latency, ModelFacts, Outputs, Stats
from ..ipc.tokenizer_files import digest_of, read_files
from .core_meter import CoreMeter
from .features.adapters import Adapters
from .features.speculation import speculation_of
from .features.standard import standard_features
from .lifecycle import Lifecycle, part_of
from .memory.kv_cache import KVCacheManager
from .plan import request_limits as limits
from .plan.request import Request
from .plan.request_check import RequestCheck
from .plan.scheduler import Scheduler
from .plan.step import Step
from .profiler import Profiler
from .work.executor import Executor, executor_for
from .work.grammar import Follower, Grammar, GrammarCompiler
from .work.pooling_executor import PoolingExecutor
from .work.rpc import make_worker

logger = logging.getLogger(__name__)

COMPILING_SECONDS = 0.005  # between two looks whether a grammar is compiled, where there is nothing else to do
MAX_ARGUMENT_BYTES = 64 << 10  # of a utility call
ADMIN_METHODS = frozenset(
    "reset_prefix_cache pause_generation resume_generation sleep wake_up update_weights collective_rpc start_profile "
    "stop_profile".split()
)
_WITH_ARRAYS = frozenset({"update_weights"})  # called with who calls, and with what arrays


class _Connection(NamedTuple):
    name: str
    session: bytes
    admin: bool
    salt: bytes  # of its prefix cache
    owner: bytes  # whose numbers of adapters are its own


class EngineCore:
    """A loaded model, its scheduler and its frontends. Not thread-safe: one thread drives it.

    Args:
        journal: told what each step computes, before it is launched.
        suspects: keys of requests that are to run in steps of their own until they have brought the token at this
            output position.
        quarantined: keys of requests that are refused, and why.

    Raises:
        MainspringError: the model can't be loaded or served.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_executor: Callable[[EngineConfig], Executor] = executor_for,
        journal: Journal | None = None,
        suspects: Mapping[int, int] | None = None,
        quarantined: Mapping[int, str] | None = None,
    ) -> None:
        started = time.monotonic()
        self.executor = make_executor(config)
        if journal:
            journal.set_phase(Phase.CAPTURING)
        self.executor.warm_up()
        self.config = _filled_in(config, self.executor)
        model, download_dir = config.model_config, config.load_config.download_dir
        files = digest_of(read_files(model, download_dir)) if model.model else ""
        facts = msgspec.structs.replace(self.executor.facts(), files_digest=files)
        self._pooling = self.executor if isinstance(self.executor, PoolingExecutor) else None
        config = self.config
        cache = config.cache_config
        kv = KVCacheManager(
            self.executor.layout.groups,
            cache.block_size,
            self.executor.num_blocks,
            cache.enable_prefix_caching,
            self.executor.num_host_blocks,
        )
        budget, longest = config.scheduler_config.max_num_batched_tokens, self.executor.max_model_len
        chunked = config.scheduler_config.enable_chunked_prefill
        if not chunked and budget < longest:
            raise InvalidArgumentError(
                f"max_num_batched_tokens is {budget}, less than max_model_len, {longest}: without chunked prefill a "
                "prompt must fit in one step"
            )
        self._most_tokens = longest + (self._pooling is not None)  # after a prompt that is pooled nothing comes
        self.scheduler = Scheduler(
            config.scheduler_config,
            kv,
            self._most_tokens,
            standard_features(chunked, speculation_of(config.speculative_config)),
            log_stats=not config.observability_config.disable_log_stats,
            suspects=suspects,
            on_suspects=journal.set_suspects if journal else lambda keys: None,
        )
        self.on_state: Callable[[DesiredState], None] = lambda state: None
        self.on_model: Callable[[ModelFacts], None] = lambda model: None
        self.num_duplicates = 0  # requests under a handle that was in use
        self._journal = journal
        self._quarantined = quarantined or {}
        self.meter.requests_quarantined = len(self._quarantined)
        self._connections: dict[int, _Connection] = {}
        self._calls: defaultdict[int, list[Future[Any]]] = defaultdict(list)  # by frontend, those that take steps
        self._draining = False
        overlap = config.scheduler_config.async_scheduling
        self._depth = 2 if (self.executor.asynchronous if overlap is None else overlap) else 1  # steps in flight
        self._in_flight: deque[tuple[Step, Any]] = deque()
        self._compiling = 0  # grammars, and adapters that are read
        self._compiled: SimpleQueue[Callable[[], None]] = SimpleQueue()  # what to do with those that are ready
        loras = self.executor.lora_limits if config.lora_config.enable_lora else None
        self.adapters = Adapters(config.lora_config, loras, facts.hidden_size, self.scheduler, self._later)
        self.adapters.on_held = self._tell_state
        self._checks = RequestCheck(
            facts,
            self._most_tokens,
            self._pooling is not None,
            self.executor.accepts_embeddings,
            self.adapters,
            config.model_config.max_logprobs,
            config.scheduler_config.max_num_seqs,
        )
        self._failed: tuple[Step, str] | None = None  # out of memory, and why; none is launched after it
        self._profiler = Profiler()
        self.lifecycle = Lifecycle(
            self.scheduler,
            self.executor,
            facts,
            lambda: bool(self._in_flight) or self._failed is not None,
            self._tell_state,
            lambda model: self.on_model(model),
        )
        self.worker = make_worker(self.executor, config.parallel_config.worker_extension_cls)
        self._methods: dict[str, Callable[..., Any]] = {
            "ping": lambda: None,
            "reset_prefix_cache": self.scheduler.reset_prefix_cache,
            "explain_model": self.executor.explain,
            "stats": self.stats,
            "tokenizer_files": lambda: read_files(model, download_dir),
            "pause_generation": self.lifecycle.pause,
            "resume_generation": self.lifecycle.resume,
            "is_paused": lambda: self.lifecycle.paused,
            "sleep": self.lifecycle.sleep,
            "wake_up": self.lifecycle.wake_up,
            "is_sleeping": lambda: self.lifecycle.sleeping,
            "update_weights": self._update_weights,
            "collective_rpc": self.collective_rpc,
            "start_profile": self._profiler.start,
            "stop_profile": self._profiler.stop,
        }
        self._methods_of_owner: dict[str, Callable[..., Any]] = {
            "add_lora": self.adapters.add,
            "remove_lora": self.adapters.remove,
            "list_loras": self.adapters.numbers,
            "pin_lora": self.adapters.pin,
        }
        logger.info(
            "ready in %.1f s: %d KV blocks of %d tokens", time.monotonic() - started, kv.pool.num_blocks, kv.block_size
        )

    # ------------------------------------------------------------------ frontends

    def connect(
        self, frontend: int, weight: float = 1.0, session: bytes = b"", name: str = "", admin: bool = True
    ) -> None:
        """Let a frontend in.

        Args:
            weight: of its share of the core.
            session: what its requests' keys are made from, the same whenever it connects anew.
            admin: whether it may change the engine for everyone.
        """
        salt = blake2b(session, digest_size=16).digest() if self.config.service_config.salt_per_frontend else b""
        owner = session or b"frontend %d" % frontend
        self._connections[frontend] = _Connection(name, session, admin, salt, owner)
        self.adapters.set_gone(owner, False)
        self.scheduler.fair.register(frontend, weight)

    def disconnect(self, frontend: int) -> None:
        """Abort whatever the frontend has left."""
        if connection := self._connections.pop(frontend, None):
            self.lifecycle.forget(frontend)
            self.adapters.set_gone(connection.owner, True)
            self.scheduler.remove_frontend(frontend)
            for call in self._calls.pop(frontend, ()):
                call.cancel()
            self.lifecycle.advance()

    def set_credit(self, frontend: int, given: bool) -> None:
        """Whether the frontend reads what it is sent; nothing is computed for one that does not."""
        if frontend in self._connections:
            self.scheduler.set_credit(frontend, given)

    def add_request(
        self,
        frontend: int,
        message: AddRequest,
        tensors: Sequence[Frame] = (),
        processors: Sequence[Callable[..., Any]] = (),
    ) -> None:
        """Queue a request. One that can't be served ends at once, with an error; while the core drains it is left to
        the next core. One under a handle that is in use is dropped: an answer would end the other."""
        connection = self._connections[frontend]
        if message.handle in self.scheduler.fair.of(frontend).requests:
            self.num_duplicates += 1
            logger.debug("dropped a second request %d of frontend %d", message.handle, frontend)
            return
        key = request_key(connection.session, message.handle)
        try:
            if reason := self._quarantined.get(key):
                raise RequestFailedError(reason)
            if self._draining:
                return
            self.lifecycle.check()
            embeds = None if message.prompt_embeds is None else read_tensor(message.prompt_embeds, tensors)
            self._checks.check(message, embeds)
            now = time.monotonic()
            arrival = now - min(max(0.0, message.age_s), now)
            request = Request(message, frontend, arrival, self._most_tokens, embeds, key, connection.salt, processors)
            if self._pooling and message.pooling:
                request.keeps_rows = self._pooling.keeps_rows(message.pooling, request.prompt_len)
            limits.check(self.config.scheduler_config, self.scheduler.fair, request, message.resumed)
            waits = self.adapters.prepare(request, message, connection.owner)
            if request.sampling.grammar:
                waits.append((self._grammars.submit(*request.sampling.grammar), partial(_follow, request)))
        except Exception as error:  # one request's trouble, which must not become everybody's
            self.scheduler.refuse(frontend, message.handle, error)
            return
        self.meter.requests_recovered += bool(message.output_token_ids)
        self.scheduler.add(request, ready=not waits)
        request.pending = len(waits)
        for future, take in waits:
            self._later(future, partial(self._give, request, take))

    def _later(self, future: Future[Any], then: Callable[[Future[Any]], None]) -> None:
        """Call `then` at the beginning of a step, once the future is done."""
        self._compiling += 1
        future.add_done_callback(lambda done: self._compiled.put(partial(then, done)))

    def _give(self, request: Request, take: Callable[[Any], None], done: Future[Any]) -> None:
        """Something that a request waited for is there."""
        request.pending -= 1
        try:
            take(done.result())
        except BaseException as error:
            self.scheduler.fail(request, error if isinstance(error, Exception) else RuntimeError(str(error)))
            return
        if not request.pending:
            self.scheduler.queue(request)

    def abort(self, frontend: int, handles: Sequence[int]) -> None:
        self.scheduler.abort(frontend, handles)

    def call(
        self, method: str, args: msgspec.Raw, frontend: int = 0, arrays: Sequence[np.ndarray] = ()
    ) -> msgspec.Raw | Future[Any]:
        """A utility call, from the fixed table, by `frontend`; if that is not connected, by the process itself. What
        takes steps to be done is a future.

        Raises:
            NotPermittedError: the method changes the engine for everyone, and the frontend may not.
            MainspringError: no such method, or what it raised.
        """
        function, connection = self._methods.get(method), self._connections.get(frontend)
        if method in self._methods_of_owner and connection is not None:
            function = partial(self._methods_of_owner[method], connection.owner)
        if function is None:
            known = ", ".join(sorted({*self._methods, *self._methods_of_owner}))
            raise NotSupportedError(f"the core has no method {method!r:.80}; it has {known}")
        if method in ADMIN_METHODS and connection is not None and not connection.admin:
            raise NotPermittedError(
                f"{method} changes the engine for everyone: connect to the daemon's admin address, or have this "
                "client's key listed with `admin` among the allowed keys"
            )
        if len(args) > MAX_ARGUMENT_BYTES:
            raise InvalidRequestError(f"{method} was called with {len(args)} bytes; the limit is {MAX_ARGUMENT_BYTES}")
        given = decode_value(args, list)
        if method in _WITH_ARRAYS:
            given = [frontend, arrays, *given]
        elif arrays:
            raise InvalidRequestError(f"{method} takes no arrays")
        try:
            inspect.signature(function).bind(*given)
        except TypeError as error:
            raise InvalidArgumentError(f"{method} was called wrongly: {error}") from None
        answer = function(*given)
        if isinstance(answer, Future) and not answer.done():
            self._calls[frontend] = [*(call for call in self._calls[frontend] if not call.done()), answer]
            return answer
        try:
            return encode_value(answer.result() if isinstance(answer, Future) else answer)
        except TypeError as error:
            raise InvalidRequestError(f"the result of {method} can't travel: {error}") from None

    # ------------------------------------------------------------------ for everyone

    def restore(self, state: DesiredState) -> None:
        """Be as users have set the core before to be."""
        self.adapters.restore(state.adapters)  # while there are weights to compare with
        self.lifecycle.restore(state)

    def _tell_state(self) -> None:
        self.on_state(msgspec.structs.replace(self.lifecycle.state, adapters=self.adapters.held()))

    def _update_weights(self, frontend: int, arrays: Sequence[np.ndarray], *args: Any) -> None:
        try:
            version, number, names, starts, last = msgspec.convert(args, tuple[str, int, list[str], list[int], bool])
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"update_weights: {error}") from None
        if not len(names) == len(starts) == len(arrays):
            raise InvalidRequestError(f"{len(names)} names, {len(starts)} places and {len(arrays)} arrays")
        parts = [part_of(*part) for part in zip(names, starts, arrays, strict=True)]
        self.lifecycle.update_weights(frontend, version, number, parts, last)

    def collective_rpc(
        self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """See `Worker.run`; a list with the result of the one worker there is."""
        return [self.worker.run(method, args, kwargs)]

    @property
    def phase(self) -> str:
        """What users have set it to; empty if it serves."""
        return "asleep" if self.lifecycle.sleeping else "paused" if self.lifecycle.paused else ""

    def drain(self) -> None:
        """From now on queue no requests, but finish those that are here. May be called in a signal handler."""
        self._draining = True

    @property
    def drained(self) -> bool:
        """Whether nothing that was accepted is unfinished."""
        return self._draining and not (self.scheduler.fair.num_requests or self.scheduler.has_work or self._in_flight)

    # ------------------------------------------------------------------ how it is

    @property
    def model(self) -> ModelFacts:
        return self.lifecycle.model

    def stats(self) -> Stats:
        return self.scheduler.stats()

    def frontends(self) -> list[FrontendStatus]:
        return [
            FrontendStatus(
                f.id,
                self._connections[f.id].name,
                f.weight,
                f.num_running,
                len(f.requests) - f.num_running,
                f.tokens_in_flight,
                f.generation_tokens,
                not f.credit,
            )
            for f in self.scheduler.fair
        ]

    @property
    def meter(self) -> CoreMeter:
        return self.scheduler.meter

    def latencies(self) -> tuple[Latency, Latency]:
        """Of the latest requests and steps: time to the first token, and between tokens."""
        return self.scheduler.first_token.percentiles(), self.scheduler.between_tokens.percentiles()

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.scheduler.has_work or bool(self._in_flight or self._compiling) or self._failed is not None

    def step(self) -> dict[int, Outputs]:
        """Launch what can be launched, take in the oldest step, and return what each frontend is to be told."""
        outputs = self._step()
        self.lifecycle.advance()
        return outputs

    def _step(self) -> dict[int, Outputs]:
        if self._compiling:
            self._take_compiled()
        span = self._profiler.span
        while self._failed is None and len(self._in_flight) < self._depth:
            with span("schedule"):
                step = self.scheduler.schedule()
            if step is None:
                break
            if self._journal:
                self._journal.launched(step.id, step.keys, step.positions, step.solo)
            try:
                with span("execute"):
                    launched = self.executor.execute(step)
                with span("sample"):
                    self._in_flight.append((step, self.executor.sample(launched)))
            except torch.OutOfMemoryError as error:
                self._failed = step, str(error).partition("\n")[0]
        if self._in_flight:
            step, sampled = self._in_flight.popleft()
            with span("wait"):
                tokens, logprobs = self.executor.tokens(sampled), self.executor.logprobs(sampled)
                pooled = self._pooling.pooled(sampled) if self._pooling else None
            with span("update"):
                outputs = self.scheduler.update(step, tokens, logprobs, pooled)
        elif self._failed:
            (step, why), self._failed = self._failed, None
            logger.warning("out of memory in a step of %d tokens, which is cut: %s", step.num_tokens, why)
            self.scheduler.undo(step, OutOfMemoryError(f"the device lacks memory for this request alone: {why}"))
            self.executor.release_memory()
            outputs = self.scheduler.take_notices()
        else:
            return self.scheduler.take_notices()
        if self._journal:
            self._journal.retired(step.id)
        return outputs

    def _take_compiled(self) -> None:
        """Queue the requests whose grammars and adapters are ready. With nothing else to do, wait a moment for one."""
        busy = bool(self.scheduler.has_work or self._in_flight)
        while True:
            try:
                take = self._compiled.get(not busy, COMPILING_SECONDS)
            except Empty:
                return
            self._compiling, busy = self._compiling - 1, True
            take()

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        model = self.config.model_config
        text = read_files(model, self.config.load_config.download_dir).get("tokenizer.json") if model.model else None
        if text is None or not self.model.eos_token_ids:
            lacks = "tokenizer.json" if text is None else "end-of-sequence token"
            raise NotSupportedError(f"structured outputs need a {lacks}, which this checkpoint does not have")
        return GrammarCompiler(text.decode(), self.model.vocab_size, self.model.eos_token_ids)


def _follow(request: Request, grammar: Grammar) -> None:
    request.follower = Follower(grammar.matcher())


def _filled_in(config: EngineConfig, executor: Executor) -> EngineConfig:
    """The configuration with what only the core knows. Without a cache a prompt is computed at once."""
    replace = msgspec.structs.replace
    facts = executor.facts()
    if not executor.layout.groups:
        whole = replace(config.scheduler_config, enable_chunked_prefill=False)
        nothing = replace(config.cache_config, enable_prefix_caching=False)
        config = replace(config, scheduler_config=whole, cache_config=nothing)
    return replace(
        config,
        model_config=replace(config.model_config, max_model_len=executor.max_model_len, dtype=facts.dtype),
        cache_config=replace(
            config.cache_config, num_gpu_blocks=executor.num_blocks, num_cpu_blocks=executor.num_host_blocks
        ),
    )
