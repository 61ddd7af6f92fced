"""The core's loop: plan a step, launch it, take in its result. Frontends are numbers here, and there is no text."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..ipc.codec import Frame, read_tensor
from ..ipc.config import EngineConfig
from ..ipc.errors import (
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from ..ipc.journal import Journal, Phase, request_key
from ..ipc.messages import AddRequest, DesiredState, FrontendStatus, ModelFacts, News, Outputs
from ..ipc.request_check import RequestCheck, check_embeds_values
from ..ipc.tokenizer_files import check_tokenizer, digest_of, read_files
from .calls import Caller, call_method
from .features.adapters import Adapters, Wait
from .features.encoder_cache import EncoderCache
from .features.moved import MovedRequests
from .features.pipeline import Pipeline
from .features.routed_experts import RoutedExperts
from .features.speculation import speculation_of
from .lifecycle import Lifecycle
from .memory.cache_manager import CacheManager
from .memory.home_caches import HomeCaches
from .methods import methods_of
from .plan import request_limits
from .plan.control import (
    CheckSampling,
    DropFunctions,
    DropGrammar,
    PendingStep,
    PrepareGrammar,
    ReleaseMemory,
    Worker,
    WorkerFacts,
)
from .plan.request import Request
from .plan.scheduler import Scheduler
from .plan.step import PROMPT_LOGITS, Step
from .waits import Waits

logger = logging.getLogger(__name__)

MAX_AGE_S = 3600.0  # seconds; a request of a larger age is placed in the queue as if it had this one
ITSELF = Caller(0, b"", True)  # the core's own process, which needs no permission
MAX_CALLS = 256  # calls of one frontend that wait for their answers
_READER = ThreadPoolExecutor(1, "mainspring-embeds")  # reads prompt embeddings, which may have hundreds of MB
MAX_LOGPROBS = 24 << 20  # entries in one step: at 8 bytes each they fit in a message of at most 256 MiB


class _Connection(NamedTuple):
    name: str
    session: bytes
    salt: bytes  # hashed into the keys of its cached prefixes; empty: frontends share the prefix cache
    caller: Caller


class EngineCore:
    """A loaded model, its scheduler and its frontends. Not thread-safe: one thread drives it.

    Args:
        journal: gets the requests of each step before the step is launched.
        suspects: keys of requests that may have crashed a core, each with an output position. Such a request runs alone
            in its steps until it has produced the token at that position.
        quarantined: keys of requests to refuse, each with the reason.
        over: epochs of other cores of the group that have ended, see `MovedRequests`.

    Raises:
        MainspringError: the model can't be loaded or served.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_worker: Callable[[EngineConfig], Worker] | None = None,
        journal: Journal | None = None,
        suspects: Mapping[int, int] | None = None,
        quarantined: Mapping[int, str] | None = None,
        over: Mapping[int, int] | None = None,
    ) -> None:
        started = time.monotonic()
        files = _checked_files(config)  # before the weights are read, which takes long
        self.worker = (make_worker or _local_worker)(config)
        self.collective_rpc = self.worker.run_method
        if journal:
            journal.set_phase(Phase.CAPTURING)
        self.worker.warm_up()
        facts = self.worker.facts
        self.config = config = _filled_in(config, facts)
        cache, scheduler = config.cache_config, config.scheduler_config
        budget, longest = scheduler.max_num_batched_tokens, facts.max_model_len
        if not scheduler.enable_chunked_prefill and budget < longest:
            raise InvalidArgumentError(
                f"max_num_batched_tokens is {budget}, less than max_model_len, {longest}: without chunked prefill a "
                "prompt must fit in one step"
            )
        make_cache = partial(
            CacheManager,
            facts.groups,
            cache.block_size,
            facts.num_blocks,
            cache.enable_prefix_caching,
            facts.num_host_blocks,
        )
        kv = make_cache() if facts.homes == 1 else HomeCaches(facts.homes, make_cache)
        if facts.homes > 1:  # so that one long prompt does not let the others wait
            share = -(-budget // facts.homes)
            chunk = min(share, scheduler.long_prefill_token_threshold or share)
            scheduler = msgspec.structs.replace(scheduler, long_prefill_token_threshold=chunk)
        self._most_tokens = longest + (facts.pooling is not None)  # a pooled prompt has no output token
        self.scheduler = Scheduler(
            scheduler,
            kv,
            self._most_tokens,
            speculation_of(config.speculative_config),
            log_stats=not config.observability_config.disable_log_stats,
            suspects=suspects,
            on_suspects=journal.set_suspects if journal else lambda keys: None,
        )
        self.scheduler.state.on_end = self._drop_what_it_named
        self.media: EncoderCache | None = None
        if facts.media is not None:
            suspected = self.scheduler.state.suspects.keys
            self.media = EncoderCache(
                facts.media, config.multimodal_config, scheduler.max_num_batched_tokens, suspected, self.worker.control
            )
            self.scheduler.serve_media(self.media)
        if config.model_config.enable_return_routed_experts:
            assert isinstance(kv, CacheManager), "the worker records no experts where ranks have requests of their own"
            self.scheduler.attach(RoutedExperts(kv))
        if facts.stages > 1:
            self.scheduler.attach(Pipeline(facts.stages, self.scheduler.state.running, self.scheduler.fair))
        self.on_state: Callable[[DesiredState], None] = lambda state: None
        self.on_model: Callable[[ModelFacts], None] = lambda model: None
        self.num_duplicates = 0  # requests dropped because their handle was in use
        self._journal = journal
        self._quarantined = dict(quarantined or {})
        self._moved = MovedRequests(over or {})
        self.stats, self.meter = self.scheduler.stats, self.scheduler.meter
        self.latencies = self.meter.latencies
        self.meter.requests_quarantined = len(self._quarantined)
        self._connections: dict[int, _Connection] = {}
        self._unanswered: defaultdict[int, set[Future[Any]]] = defaultdict(set)  # calls that need steps, by frontend
        self._draining = False
        self._depth = facts.depth(scheduler.async_scheduling)  # steps in flight
        self._most_steps = facts.most_steps if self._depth == 1 else 1  # of one plan
        self._in_flight: deque[tuple[Step, PendingStep]] = deque()
        self._hand_out: Callable[[dict[int, Outputs]], None] = lambda outputs: None
        self.waits = Waits()  # for grammars that are compiled, adapters that are read, calls that need steps
        self._next_grammar = 1
        self.adapters = Adapters(config.lora_config, self.worker, self.scheduler, self.waits.then)
        self.adapters.on_held = self._tell_state
        model_facts = msgspec.structs.replace(facts.model, files_digest=files)
        if (taken := facts.media) is not None:
            model_facts = msgspec.structs.replace(
                model_facts, media=taken.modalities, encoder_input=taken.encoder_input
            )
        scored = PROMPT_LOGITS if scheduler.enable_chunked_prefill else scheduler.max_num_batched_tokens
        self._checks = RequestCheck(
            model_facts,
            config,
            facts.accepts_embeddings,
            MAX_LOGPROBS // (scheduler.max_num_seqs + scored),
        )
        self.lifecycle = Lifecycle(
            self.scheduler,
            self.worker,
            model_facts,
            lambda: bool(self._in_flight),
            self._tell_state,
            lambda model: self.on_model(model),
            self.waits.then,
        )
        if self.media is not None:
            self.lifecycle.on_stale = self.media.reset_encoded
        self.methods = methods_of(self)
        logger.info(
            "ready in %.1f s: %d KV blocks of %d tokens", time.monotonic() - started, kv.num_blocks, kv.block_size
        )

    # ------------------------------------------------------------------ frontends

    def connect(
        self, frontend: int, weight: float = 1.0, session: bytes = b"", name: str = "", admin: bool = True
    ) -> None:
        """Register a frontend.

        Args:
            weight: the frontend's weight in fair sharing.
            session: names the frontend across connections; the keys of its requests are derived from it.
            admin: whether it may call methods that change the engine for all frontends.
        """
        salt = blake2b(session, digest_size=16).digest() if self.config.service_config.salt_per_frontend else b""
        caller = Caller(frontend, session or b"frontend %d" % frontend, admin)
        self._connections[frontend] = _Connection(name, session, salt, caller)
        self.adapters.set_gone(caller.owner, False)
        self.scheduler.fair.register(frontend, weight)

    def disconnect(self, frontend: int) -> None:
        """Forget a frontend, and abort its requests and calls."""
        if connection := self._connections.pop(frontend, None):
            self.lifecycle.forget(frontend)
            self.adapters.set_gone(connection.caller.owner, True)
            self.scheduler.remove_frontend(frontend)
            for call in list(self._unanswered.pop(frontend, ())):
                call.cancel()
            self.lifecycle.advance()

    def set_credit(self, frontend: int, given: bool) -> None:
        """Note whether the frontend reads its messages. The core computes nothing for a frontend that does not."""
        if frontend in self._connections:
            self.scheduler.set_credit(frontend, given)

    def add_request(
        self,
        frontend: int,
        message: AddRequest,
        tensors: Sequence[Frame] = (),
        processors: Sequence[Callable[..., Any]] = (),
    ) -> None:
        """Queue a request. A request that can't be served ends at once with an error. While the core drains, a new
        request is ignored and left to the next core. A request whose handle is in use is dropped, because an answer
        would end the first request of that handle."""
        connection = self._connections[frontend]
        if self._in_use(frontend, message.handle):
            return
        key = request_key(connection.session, message.handle)
        request: Request | None = None
        try:
            self._check_quarantine(key)
            if self._draining:
                return
            self.lifecycle.check()
            embeds = None if message.prompt_embeds is None else read_tensor(message.prompt_embeds, tensors)
            self._checks.check(message)
            now = time.monotonic()
            arrival = now - min(max(0.0, message.age_s), MAX_AGE_S)
            request = Request(message, frontend, arrival, self._most_tokens, key, connection.salt)
            request.timed = not message.age_s > MAX_AGE_S
            limits = self.config.scheduler_config
            cores = max(self.config.parallel_config.num_cores, 2 if message.moved_from else 1)
            request_limits.check(limits, self.scheduler.fair, request, message.resumed, cores)
            waits = self._prepare(request, message, connection.caller.owner)
            if message.prompt_embeds is not None and embeds is not None:
                dtypes = message.prompt_embeds.dtype, self.model.dtype
                read = _READER.submit(_digest_of_embeds, request, embeds, *dtypes)
                waits.append((read, partial(request.use_embeds, embeds, b"embeds")))
            if self.media is not None:
                waits += self.media.prepare(request, message.media)
            if (released := self._moved.hold(message.moved_from, request)) is not None:
                waits.append((released, lambda _: self._check_quarantine(key)))
            if processors:
                request.functions = self.worker.lend_functions(processors)
        except Exception as error:  # an error of this request must not end the core
            if request is not None:
                self._drop_what_it_named(request)
            self.scheduler.refuse(frontend, message.handle, error)
            return
        self.meter.requests_recovered += bool(message.output_token_ids)
        self.scheduler.add(request, ready=not waits)
        self.waits.give_all(request, waits, self._go_on)

    def _check_quarantine(self, key: int) -> None:
        """Raises `RequestFailedError` for a request of which cores died."""
        if reason := self._quarantined.get(key):
            raise RequestFailedError(reason)

    def hear(self, news: News) -> None:
        """Take in what the supervisor tells of the other cores of the group."""
        self._quarantined.update(news.quarantined)
        self.meter.requests_quarantined = len(self._quarantined)
        if news.suspects or news.harmless:
            self.scheduler.state.suspects.add(news.suspects, news.harmless)
        if self._journal:
            self._journal.set_heard(news.number)
        self._moved.end(news.over)

    def _prepare(self, request: Request, message: AddRequest, owner: bytes) -> list[Wait]:
        """Check the pooling of a request, and begin to read its adapters and to compile its grammar. Returns what is
        not ready yet."""
        if (pooling := self.worker.facts.pooling) and message.pooling:
            pooling.check(message.pooling, request.prompt_len)
            request.keeps_rows = pooling.keeps_rows(message.pooling)
        if self.config.model_config.logits_processors:
            self.worker.control(CheckSampling(request.sampling))
            request.processed = True
        waits = self.adapters.prepare(request, message, owner)
        if request.sampling.grammar:
            kind, text = request.sampling.grammar
            compiled = self.worker.control(PrepareGrammar(self._next_grammar, kind, text, request.frontend))
            request.grammar, self._next_grammar = self._next_grammar, self._next_grammar + 1
            waits.append((compiled, lambda _: None))
        return waits

    def check_request(self, caller: Caller, values: Any) -> Future[None]:
        """Prepare the grammar and the adapters of a request that may follow, and compute nothing. values: the fields of
        an `AddRequest`. The future gets the error that the request would end with.

        Raises:
            MainspringError: the request can't be served, whatever its grammar and adapters hold.
        """
        try:
            message = msgspec.convert(values, AddRequest)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"a request is given wrongly: {error}") from None
        self._checks.check(message, complete=False)
        request, checked = Request(message, caller.frontend, 0.0, self._most_tokens), Future[None]()
        checked.add_done_callback(lambda _: self._drop_what_it_named(request))
        try:
            waits = self._prepare(request, message, caller.owner)
        except Exception:
            self._drop_what_it_named(request)
            raise

        def settle(request: Request, error: Exception | None) -> None:
            if not checked.done():  # it is done if the other wait failed, or if the frontend has left
                checked.set_exception(error) if error else checked.set_result(None)

        if not waits:
            settle(request, None)
        self.waits.give_all(request, waits, settle)
        return checked

    def _go_on(self, request: Request, error: Exception | None) -> None:
        if error:
            self.scheduler.fail(request, error)
        else:
            self.scheduler.queue(request)

    def refuse(self, frontend: int, handle: int, error: Exception) -> None:
        """End a request that is not accepted. One whose handle is in use is dropped, as in `add_request`."""
        if not self._in_use(frontend, handle):
            self.scheduler.refuse(frontend, handle, error)

    def _in_use(self, frontend: int, handle: int) -> bool:
        if handle not in self.scheduler.fair.of(frontend).requests:
            return False
        self.num_duplicates += 1
        logger.debug("dropped a second request %d of frontend %d", handle, frontend)
        return True

    def _drop_what_it_named(self, request: Request) -> None:
        """A request has ended: the worker drops its grammar, its functions, and adapters not read yet."""
        self.adapters.leave(request)
        if request.grammar:
            self.worker.control(DropGrammar(request.grammar))
        if request.functions:
            self.worker.control(DropFunctions(request.functions))

    def abort(self, frontend: int, handles: Sequence[int]) -> None:
        self.scheduler.abort(frontend, handles)

    def call(
        self, method: str, args: msgspec.Raw, frontend: int = 0, arrays: Iterable[np.ndarray] = ()
    ) -> msgspec.Raw | Future[Any]:
        """See `call_method`. If no such frontend is connected, the call is for the process itself.

        Raises:
            OverloadedError: too many calls of this frontend are not answered yet.
        """
        if len(self._unanswered.get(frontend, ())) >= MAX_CALLS:
            raise OverloadedError(f"{MAX_CALLS} calls of this frontend wait for their answers; that is the limit")
        connection = self._connections.get(frontend)
        caller = ITSELF if connection is None else connection.caller
        answer = call_method(self.methods, caller, method, args, arrays)
        if isinstance(answer, Future):
            self._unanswered[frontend].add(answer)
            answer.add_done_callback(self._unanswered[frontend].discard)
        return answer

    # ------------------------------------------------------------------ for everyone

    def restore(self, state: DesiredState) -> None:
        """Take over the state that users had set in the previous core."""
        self.adapters.restore(state.adapters)  # before sleep is restored, because reading adapters needs the weights
        self.lifecycle.restore(state)

    def _tell_state(self) -> None:
        self.on_state(msgspec.structs.replace(self.lifecycle.state, adapters=self.adapters.held()))

    @property
    def phase(self) -> str:
        """``asleep`` or ``paused``; empty if the core serves."""
        return "asleep" if self.lifecycle.sleeping else "paused" if self.lifecycle.state.paused else ""

    @property
    def error(self) -> EngineDeadError | None:
        """Why the core can compute nothing any more."""
        return self.worker.error

    def close(self) -> None:
        """End the core's other processes, if it has any. It can make no step afterwards."""
        self.worker.close()

    def drain(self) -> None:
        """From now on accept no requests, and finish the present ones. A signal handler may call this."""
        self._draining = True

    @property
    def drained(self) -> bool:
        """Whether `drain` was called and all accepted requests have ended."""
        return self._draining and not (self.scheduler.fair.num_requests or self.scheduler.has_work or self._in_flight)

    # ------------------------------------------------------------------ how it is

    @property
    def model(self) -> ModelFacts:
        return self.lifecycle.model

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

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work or self.lifecycle.is_due or bool(self._in_flight or self.waits)

    def hand_out(self, give: Callable[[dict[int, Outputs]], None]) -> None:
        """From now on `step` gives the outputs of steps to `give` while it goes on with further ones of the same plan.
        Without this a plan of several steps is made only of requests that are patient."""
        self._hand_out, self.scheduler.state.hands_out = give, True

    def step(self) -> dict[int, Outputs]:
        """Launch steps until enough are in flight, take in the oldest, and return the output messages by frontend.
        Calls of `pause` and `sleep` are answered in a step without outputs, so that no output follows the answer."""
        outputs = self._step()
        if not outputs:
            self.lifecycle.advance()
        return outputs

    def _step(self) -> dict[int, Outputs]:
        if self.waits:
            self._moved.look()
            if self.media is not None:
                self.media.items.look()
            self.waits.take(busy=bool(self.scheduler.has_work or self._in_flight))
        # what is ready is looked for between plans only
        self.scheduler.state.most_steps = 1 if self.waits else self._most_steps
        span, began = self.worker.span, time.monotonic()
        while len(self._in_flight) < self._depth and not (self._in_flight and self._in_flight[-1][1].lacks_memory):
            with span("schedule"):
                step = self.scheduler.schedule()
            if step is None:
                break
            if self._journal:
                # Any of the steps may kill the core, so a request on trial has to get past the last one.
                positions = step.output_index + step.plan.num_steps - 1
                self._journal.launched(step.plan.id, step.keys, positions, step.solo)
            self._in_flight.append((step, self.worker.launch(step.plan)))
        if not self._in_flight:
            return self.scheduler.take_notices()
        step, pending = self._in_flight.popleft()
        while True:
            with span("wait"):
                result = pending.wait()
            with span("update"):
                outputs = self.scheduler.update(step, result)
            if not result.more:
                break
            self._hand_out(outputs)
        self.scheduler.state.step_seconds = (time.monotonic() - began) / (result.first + result.num_steps)
        if lack := result.lack:
            logger.warning("out of memory in a step of %d tokens, retried in parts: %s", step.plan.num_tokens, lack)
            self.worker.control(ReleaseMemory())
        if self._journal:
            self._journal.retired(step.plan.id)
        return outputs


def _digest_of_embeds(request: Request, embeds: np.ndarray, dtype: str, model_dtype: str) -> bytes:
    """The digest of prompt embeddings. Raises as `check_embeds_values`."""
    if request.finished:
        return b""
    check_embeds_values(embeds, dtype, model_dtype)
    values = np.ascontiguousarray(embeds).reshape(-1).view(np.uint8).data
    return blake2b(values, digest_size=16, person=dtype.encode()).digest()  # the same bytes may be other numbers


def _local_worker(config: EngineConfig) -> Worker:
    from .worker.make_worker import start_worker

    return start_worker(config)


def _checked_files(config: EngineConfig) -> str:
    """The digest of the files that frontends need; empty without a checkpoint."""
    model = config.model_config
    if not model.model:
        return ""
    files = read_files(model, config.load_config.download_dir)
    if not model.skip_tokenizer_init:
        check_tokenizer(files)
    return digest_of(files)


def _filled_in(config: EngineConfig, facts: WorkerFacts) -> EngineConfig:
    """The configuration with the values that the worker determined. A model without a KV cache computes each prompt in
    a single step."""
    replace = msgspec.structs.replace
    if not facts.groups:
        whole = replace(config.scheduler_config, enable_chunked_prefill=False)
        nothing = replace(config.cache_config, enable_prefix_caching=False)
        config = replace(config, scheduler_config=whole, cache_config=nothing)
    return replace(
        config,
        model_config=replace(config.model_config, max_model_len=facts.max_model_len, dtype=facts.model.dtype),
        cache_config=replace(
            config.cache_config, num_gpu_blocks=facts.num_blocks, num_cpu_blocks=facts.num_host_blocks
        ),
    )
