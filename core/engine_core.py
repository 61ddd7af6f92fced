"""The core's one loop: schedule, execute, sample, update. It knows frontends by number and text not at all."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, get_args

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
from ..ipc.messages import AddRequest, FrontendStatus, Latency, ModelFacts, Outputs, Stats
from ..ipc.params import MAX_BAD_WORDS, MAX_BIAS, MAX_SEED
from ..ipc.structured import MAX_SPEC_BYTES, Kind
from ..ipc.tokenizer_files import digest_of, read_files
from . import limits
from .executor import Executor, executor_for
from .kv_cache import KVCacheManager
from .metrics import CoreMeter
from .pooling_executor import PoolingExecutor
from .profiler import Profiler
from .request import Request
from .scheduler import PauseMode, Scheduler
from .step import PROMPT_LOGITS, Step
from .structured import Follower, Grammar, GrammarCompiler

logger = logging.getLogger(__name__)

COMPILING_SECONDS = 0.005  # between two looks whether a grammar is compiled, where there is nothing else to do
MAX_LOGPROBS = 24 << 20  # of all rows of a step: 8 bytes each, in one message of at most 256 MiB
MAX_ARGUMENT_BYTES = 64 << 10  # of a utility call
ADMIN_METHODS = frozenset(
    {"reset_prefix_cache", "pause_generation", "resume_generation", "start_profile", "stop_profile"}
)


class _Connection(NamedTuple):
    name: str
    session: bytes
    admin: bool
    salt: bytes  # of its prefix cache


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
        self.model: ModelFacts = msgspec.structs.replace(self.executor.facts(), files_digest=files)
        self._pooling = self.executor if isinstance(self.executor, PoolingExecutor) else None
        config = self.config
        cache = config.cache_config
        kv = KVCacheManager(
            self.executor.layout.groups, cache.block_size, self.executor.num_blocks, cache.enable_prefix_caching
        )
        budget, longest = config.scheduler_config.max_num_batched_tokens, self.executor.max_model_len
        if not config.scheduler_config.enable_chunked_prefill and budget < longest:
            raise InvalidArgumentError(
                f"max_num_batched_tokens is {budget}, less than max_model_len, {longest}: without chunked prefill a "
                "prompt must fit in one step"
            )
        self.scheduler = Scheduler(
            config.scheduler_config,
            kv,
            self._most_tokens,
            log_stats=not config.observability_config.disable_log_stats,
            suspects=suspects,
            on_suspects=journal.set_suspects if journal else lambda keys: None,
        )
        self.on_paused: Callable[[bool], None] = lambda paused: None  # told when that changes
        self.num_duplicates = 0  # requests under a handle that was in use
        self._journal = journal
        self._quarantined = quarantined or {}
        self.meter.requests_quarantined = len(self._quarantined)
        self._connections: dict[int, _Connection] = {}
        self._draining = False
        overlap = config.scheduler_config.async_scheduling
        self._depth = 2 if (self.executor.asynchronous if overlap is None else overlap) else 1  # steps in flight
        self._in_flight: deque[tuple[Step, Any]] = deque()
        self._compiling = 0  # requests that wait for their grammar
        self._compiled: SimpleQueue[tuple[Request, Future[Grammar]]] = SimpleQueue()
        self._failed: tuple[Step, str] | None = None  # out of memory, and why; none is launched after it
        self._profiler = Profiler()
        self._methods: dict[str, Callable[..., Any]] = {
            "ping": lambda: None,
            "reset_prefix_cache": self.scheduler.reset_prefix_cache,
            "explain_model": self.executor.explain,
            "stats": self.stats,
            "tokenizer_files": lambda: read_files(model, download_dir),
            "pause_generation": self.pause,
            "resume_generation": self.resume,
            "is_paused": lambda: self.paused,
            "start_profile": self._profiler.start,
            "stop_profile": self._profiler.stop,
        }
        logger.info(
            "ready in %.1f s: %d KV blocks of %d tokens", time.monotonic() - started, kv.pool.num_blocks, kv.block_size
        )

    @property
    def _most_tokens(self) -> int:
        """Of a request, prompt and output; after a prompt that is pooled nothing comes."""
        return self.executor.max_model_len + (self._pooling is not None)

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
        self._connections[frontend] = _Connection(name, session, admin, salt)
        self.scheduler.fair.register(frontend, weight)

    def disconnect(self, frontend: int) -> None:
        """Abort whatever the frontend has left."""
        if self._connections.pop(frontend, None):
            self.scheduler.remove_frontend(frontend)

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
            embeds = None if message.prompt_embeds is None else read_tensor(message.prompt_embeds, tensors)
            self._check(message, embeds)
            now = time.monotonic()
            arrival = now - min(max(0.0, message.age_s), now)
            request = Request(message, frontend, arrival, self._most_tokens, embeds, key, connection.salt, processors)
            if self._pooling and message.pooling:
                request.keeps_rows = self._pooling.keeps_rows(message.pooling, request.prompt_len)
            limits.check(self.config.scheduler_config, self.scheduler.fair, request, message.resumed)
            grammar = self._grammars.submit(*request.sampling.grammar) if request.sampling.grammar else None
        except Exception as error:  # one request's trouble, which must not become everybody's
            self.scheduler.refuse(frontend, message.handle, error)
            return
        self.meter.requests_recovered += bool(message.output_token_ids)
        self.scheduler.add(request, ready=grammar is None)
        if grammar is not None:
            self._compiling += 1
            grammar.add_done_callback(lambda done: self._compiled.put((request, done)))

    def abort(self, frontend: int, handles: Sequence[int]) -> None:
        self.scheduler.abort(frontend, handles)

    def call(self, method: str, args: msgspec.Raw, frontend: int = 0) -> msgspec.Raw:
        """A utility call, from the fixed table, by `frontend`; if that is not connected, by the process itself.

        Raises:
            NotPermittedError: the method changes the engine for everyone, and the frontend may not.
            MainspringError: no such method, or what it raised.
        """
        function = self._methods.get(method)
        if function is None:
            raise NotSupportedError(f"the core has no method {method!r:.80}; it has {', '.join(sorted(self._methods))}")
        connection = self._connections.get(frontend)
        if method in ADMIN_METHODS and connection is not None and not connection.admin:
            raise NotPermittedError(
                f"{method} changes the engine for everyone: connect to the daemon's admin address, or have this "
                "client's key listed with `admin` among the allowed keys"
            )
        if len(args) > MAX_ARGUMENT_BYTES:
            raise InvalidRequestError(f"{method} was called with {len(args)} bytes; the limit is {MAX_ARGUMENT_BYTES}")
        return encode_value(function(*decode_value(args, list)))

    # ------------------------------------------------------------------ for everyone

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Compute nothing more until `resume`; requests that come wait.

        Args:
            mode: what becomes of those that are here: ``abort`` ends them, ``keep`` leaves them as they are, ``wait``
                lets those that have begun to run go on to their end.
            clear_cache: forget cached prefixes.

        Raises:
            InvalidArgumentError: no such mode.
        """
        if mode not in get_args(PauseMode):
            raise InvalidArgumentError(f"mode is {mode!r}; it must be one of {', '.join(get_args(PauseMode))}")
        self.scheduler.pause(mode, clear_cache)
        self.on_paused(True)

    def resume(self) -> None:
        """Undo `pause`."""
        self.scheduler.resume()
        self.on_paused(False)

    @property
    def paused(self) -> bool:
        return self.scheduler.paused is not None

    def drain(self) -> None:
        """From now on queue no requests, but finish those that are here. May be called in a signal handler."""
        self._draining = True

    @property
    def drained(self) -> bool:
        """Whether nothing that was accepted is unfinished."""
        return self._draining and not (self.scheduler.fair.num_requests or self.scheduler.has_work or self._in_flight)

    # ------------------------------------------------------------------ how it is

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
        """Queue the requests whose grammars are ready. With nothing else to do, wait a moment for one."""
        busy = bool(self.scheduler.has_work or self._in_flight)
        while True:
            try:
                request, future = self._compiled.get(not busy, COMPILING_SECONDS)
            except Empty:
                return
            self._compiling, busy = self._compiling - 1, True
            if (error := future.exception()) is not None:
                self.scheduler.fail(request, error if isinstance(error, Exception) else RuntimeError(str(error)))
            else:
                request.follower = Follower(future.result().matcher())
                self.scheduler.queue(request)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        model = self.config.model_config
        text = read_files(model, self.config.load_config.download_dir).get("tokenizer.json") if model.model else None
        if text is None or not self.model.eos_token_ids:
            lacks = "tokenizer.json" if text is None else "end-of-sequence token"
            raise NotSupportedError(f"structured outputs need a {lacks}, which this checkpoint does not have")
        return GrammarCompiler(text.decode(), self.model.vocab_size, self.model.eos_token_ids)

    def _check(self, message: AddRequest, embeds: np.ndarray | None) -> None:
        """What a well-behaved frontend has checked before."""
        ids, sampling, limit = message.prompt_token_ids, message.sampling, self.executor.max_model_len
        if not ids:
            raise InvalidRequestError("the prompt is empty")
        if (message.pooling is None) != (self._pooling is None):
            wanted = "tokens" if message.pooling is None else f"{message.pooling.task:.80}"
            raise InvalidRequestError(
                f"the request is for {wanted}, and this model can {', '.join(self.model.tasks) or 'generate'}"
            )
        if message.pooling and message.output_token_ids:
            raise InvalidRequestError("a pooling request has no output tokens")
        if len(ids) + len(message.output_token_ids) >= self._most_tokens:
            raise InvalidRequestError(f"the prompt has {len(ids)} tokens; max_model_len is {limit}, output included")
        for name in ("bad_words", "stop_token_ids", "allowed_token_ids", "logit_bias"):
            given, most = len(getattr(sampling, name)), MAX_BAD_WORDS if name == "bad_words" else self.model.vocab_size
            if given > most:
                raise InvalidRequestError(f"{name} has {given} entries; the limit is {most}")
        for tokens in (
            ids,
            message.output_token_ids,
            sampling.stop_token_ids,
            list(sampling.logit_bias),
            sampling.allowed_token_ids,
            *sampling.bad_words,
        ):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.model.vocab_size:
                token = min(tokens) if min(tokens) < 0 else max(tokens)
                raise InvalidRequestError(f"token id {token} is outside the vocabulary of {self.model.vocab_size}")
        if not (0 <= sampling.temperature < 3e38 and 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1):
            raise InvalidRequestError("temperature, top_p or min_p is out of range")
        sums = (sampling.presence_penalty, sampling.frequency_penalty, *sampling.logit_bias.values())
        small, large = 1 / MAX_BIAS, MAX_BIAS
        if not all(abs(value) <= large for value in sums) or not small <= sampling.repetition_penalty <= large:
            raise InvalidRequestError(f"a penalty or a logit_bias is not a number up to {large:g}")
        if sampling.grammar and (len(sampling.grammar) != 2 or sampling.grammar[0] not in get_args(Kind)):
            raise InvalidRequestError(f"a grammar is a kind and a text; kinds are {', '.join(get_args(Kind))}")
        if sampling.grammar and len(sampling.grammar[1]) > MAX_SPEC_BYTES:
            raise InvalidRequestError(
                f"the grammar has {len(sampling.grammar[1])} characters; the limit is {MAX_SPEC_BYTES}"
            )
        most = self.config.model_config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            if most >= 0 and getattr(sampling, name) > most:
                raise InvalidRequestError(f"{name} asks for more than max_logprobs, {most}")
            seats = self.config.scheduler_config.max_num_seqs
            if min(getattr(sampling, name), self.model.vocab_size) > MAX_LOGPROBS // (seats + PROMPT_LOGITS):
                raise InvalidRequestError(
                    f"{name} asks for more than a step's outputs can carry for all of max_num_seqs, {seats}: lower that"
                )
        if embeds is not None and sampling.prompt_logprobs >= 0:
            raise InvalidRequestError("prompt_logprobs need token ids, but the prompt is embeddings")
        integers = [sampling.max_tokens - 1, sampling.top_k, sampling.min_tokens]
        integers += [sampling.logprobs + 1, sampling.prompt_logprobs + 1]
        if not all(0 <= value < 2**62 for value in integers) or not -MAX_SEED - 1 <= sampling.seed <= MAX_SEED:
            raise InvalidRequestError("an integer of the sampling parameters is out of range")
        if len(message.output_token_ids) >= sampling.max_tokens:
            raise InvalidRequestError(
                f"{len(message.output_token_ids)} output tokens are there already; max_tokens is {sampling.max_tokens}"
            )
        if embeds is not None and not self.executor.accepts_embeddings:
            raise NotSupportedError(
                "this model needs more of a prompt than its embeddings: prompt_embeds can't be used"
            )
        if embeds is not None and embeds.shape != (len(ids), self.model.hidden_size):
            raise InvalidRequestError(
                f"prompt_embeds has shape {list(embeds.shape)}; it must be [{len(ids)}, {self.model.hidden_size}]"
            )


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
        cache_config=replace(config.cache_config, num_gpu_blocks=executor.num_blocks, num_cpu_blocks=0),
    )
