"""`AsyncLLMEngine`: many requests at once in an asyncio program, each an async iterator of its outputs."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

from ..compat.forms import Call, resolve_add_request, resolve_engine, resolve_generate, takes_vllm_fields
from ..compat.members import EngineMembers, UsageContext
from ..compat.missing import knows_members
from ..ipc.adapters import LoRARequest
from ..ipc.config import EngineConfig, FieldInfo
from ..ipc.errors import EngineDeadError, InvalidRequestError, NotSupportedError, shown, suggests_names
from ..ipc.media_client import PreparedPrompt
from ..ipc.messages import MediaItem
from ..ipc.params import SamplingParams
from ..ipc.pooling_params import PoolingParams
from .args import FIELDS, EngineArgs, add_flags
from .engine_methods import AsyncEngineMethods, coroutine
from .frontend import Frontend
from .llm_engine import LLMEngine
from .observe.metrics import StatLoggers
from .request.input_processor import EngineCoreRequest
from .request.outputs import PoolingOutput, PoolingRequestOutput
from .request.prompt_media import RequestMedia, done
from .request.prompts import Prompt, has_media
from .request.request_state import RequestState
from .request.request_stream import RequestStream

if TYPE_CHECKING:
    import argparse
    from concurrent.futures import Future

    from ..ipc.async_client import AsyncClient
    from ..ipc.connection import Connection
    from ..ipc.cores import Cores

logger = logging.getLogger(__name__)


@takes_vllm_fields
@suggests_names
@dataclass
class AsyncEngineArgs(EngineArgs):
    """`EngineArgs`, and whether each request is logged (level INFO). `disable_log_requests` is the older name, and
    wins.
    """

    enable_log_requests: bool = False
    disable_log_requests: bool = False

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser, async_args_only: bool = False) -> argparse.ArgumentParser:
        """As `EngineArgs.add_cli_args`, and a flag for each of the two; with `async_args_only` only for the two."""
        own = ("enable_log_requests", "Log each request."), ("disable_log_requests", "Log none; the older name, wins.")
        more = (FieldInfo("", name, bool, False, doc, False) for name, doc in own)
        add_flags(parser, more if async_args_only else (*FIELDS.values(), *more))
        return parser


def _as_generator(method: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    """A method that gives a stream, as an asynchronous generator."""

    async def generate(self: AsyncLLMEngine, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        stream = method(self, *args, **kwargs)
        async for output in await stream if inspect.iscoroutine(stream) else stream:
            yield output

    generate.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return generate


@knows_members("AsyncLLM")
class AsyncLLMEngine(AsyncEngineMethods, Frontend["AsyncClient"]):
    """A frontend for one event loop, the first one it is used from, with a core of its own in another process.

    It may be made with no loop running; making it blocks until the core is ready. The newest call is
    ``AsyncLLMEngine(vllm_config, executor_class, log_stats, ...)``; older ones are resolved in compat/forms.py. As an
    actor of Ray (``ray.remote(AsyncLLMEngine)``) it gives streams as generators.

    Args:
        args, kwargs: `vllm_config`, or its parts; `executor_class`: only None. `stat_loggers`: as `LLMEngine`'s.
            `usage_context`, `mm_registry`, `use_cached_outputs`, `aggregate_engine_logging`: without effect.
        log_requests: log each request, at level INFO.
        max_log_len: most characters of a prompt in the log.
        start_engine_loop: without effect: outputs are read from the first request on.

    Raises:
        MainspringError: the model is not found, not supported, or the core did not start.
        WrongEventLoopError: (all coroutines) the engine belongs to another loop.
        WrongProcessError: (all methods but those that only show the configuration) it belongs to another process.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__ray_actor_class__" in vars(cls):  # the subclass that Ray makes for an actor
            for name in ("generate", "add_request", "encode"):
                setattr(cls, name, _as_generator(getattr(cls, name)))

    def __init__(
        self,
        *args: Any,
        log_requests: bool = False,
        max_log_len: int | None = None,
        start_engine_loop: bool = True,
        **kwargs: Any,
    ) -> None:
        from ..ipc.async_client import AsyncClient

        config, log_stats, stat_loggers, *ray = resolve_engine(type(self).__name__, args, kwargs)
        if config.parallel_config.distributed_executor_backend == "external_launcher":
            raise NotSupportedError(
                'distributed_executor_backend is "external_launcher", which is for LLM and LLMEngine'
            )
        self._start(config, AsyncClient.launch, log_stats, stat_loggers, *ray)
        self._log_requests, self._max_log_len = log_requests, max_log_len

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: StatLoggers | None = None,
    ) -> Self:
        """An engine for these arguments."""
        log_requests = isinstance(engine_args, AsyncEngineArgs) and (
            engine_args.enable_log_requests and not engine_args.disable_log_requests
        )
        config, log_stats = engine_args.create_engine_config(), not engine_args.disable_log_stats
        return cls(config, log_stats=log_stats, stat_loggers=stat_loggers, log_requests=log_requests)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: StatLoggers | None = None,
        enable_log_requests: bool = False,
        disable_log_stats: bool = False,
    ) -> Self:
        """An engine for this configuration."""
        log_stats = not disable_log_stats
        return cls(vllm_config, log_stats=log_stats, stat_loggers=stat_loggers, log_requests=enable_log_requests)

    @classmethod
    def _client(cls, connection: Connection | Cores) -> AsyncClient:
        from ..ipc.async_client import AsyncClient

        return AsyncClient(connection)

    def _open(self, client: AsyncClient, *more: Any) -> None:
        super()._open(client, *more)
        self._log_requests, self._max_log_len = False, None
        from .request.output_reader import OutputReader

        self._reader = OutputReader(client, self.output_processor)

    # ------------------------------------------------------------------ requests

    def generate(
        self,
        prompt: Prompt | EngineCoreRequest | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *positional: Any,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        **older: Any,
    ) -> RequestStream:
        """A request, as an async iterator of its outputs; see `RequestStream`. Nothing is sent before the first is
        asked for.

        Args: as `LLMEngine.add_request`; the forms by position are in compat/forms.py.

        Raises (while iterating):
            InvalidRequestError: it can't be served as it stands.
            OverloadedError: a limit of the core is reached; the same request may be accepted later.
            RequestFailedError: the core gave up on it.
            EngineDeadError: the core is gone for good.
        """
        more = positional or older or trace_headers
        if isinstance(prompt, EngineCoreRequest) and prompt.request_id == request_id and not more:  # nothing to resolve
            return RequestStream(self._reader, request_id, partial(self._send, prompt))
        slots = (None, lora_request, tokenization_kwargs, trace_headers, priority, prompt_text)
        return self._stream(resolve_generate(prompt, sampling_params, request_id, positional, slots, older))

    async def add_request(
        self,
        request_id: str,
        prompt: Prompt | EngineCoreRequest | None = None,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        **older: Any,
    ) -> RequestStream:
        """Send a request now; its outputs are the stream's. Arguments and errors as `LLMEngine.add_request`."""
        slots = (arrival_time, lora_request, tokenization_kwargs, trace_headers, priority, prompt_text)
        stream = self._stream(resolve_add_request(request_id, prompt, params, slots, older))
        await stream.begin()
        return stream

    def encode(
        self,
        prompt: Prompt | EngineCoreRequest,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """What a pooling model makes of a prompt, as an async iterator of one output. Arguments and errors as
        `generate`; `truncate_prompt_tokens` is for parameters that say nothing of it."""
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(f"pooling_params is {shown(params)}; it must be a PoolingParams")
        if truncate_prompt_tokens is not None and params.truncate_prompt_tokens is None:
            params = replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
        slots = (None, lora_request, tokenization_kwargs, trace_headers, priority, None)
        call = resolve_add_request(cast(str, request_id), prompt, params, slots, {}, "encode")
        return cast("AsyncIterator[PoolingRequestOutput[PoolingOutput]]", self._stream(call))

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End one or several requests: each stream yields one last output with finish reason ``abort``. Unknown ids are
        ignored; `internal` is without effect.
        """
        self._enter()
        await self._reader.end(map(str, [request_id] if isinstance(request_id, (str, int)) else request_id))

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until none of this engine's requests is in flight.

        Raises:
            TimeoutError: some still are after so many seconds.
        """
        self._enter()
        try:
            await self._reader.drained(drain_timeout)
        except TimeoutError:
            left = len(self.output_processor)
            raise TimeoutError(f"{left} requests are still in flight after drain_timeout={drain_timeout} s") from None

    # ------------------------------------------------------------------ the engine

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine can serve no more; None while it can, also while a core that died is being restarted."""
        return self.engine_core.error

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        """As `errored`."""
        return self.errored

    async def is_tracing_enabled(self) -> bool:
        """Whether traces of this engine's requests are sent to a collector."""
        self._enter()
        return self.output_processor.tracer is not None

    def get_num_unfinished_requests(self) -> int:
        """Requests in flight of this engine."""
        return len(self.output_processor) + self._reader.num_preparing

    def get_num_queued_tokens(self) -> int:
        """Prompt tokens of this engine's requests that have no first token so far."""
        return self.output_processor.num_queued_tokens

    async def check_health(self) -> None:
        """Nothing, if requests can be served.

        Raises:
            EngineDeadError: `dead_error`.
        """
        self._enter()
        if (error := self.dead_error) is not None:
            raise error.with_traceback(None)

    get_tokenizer = coroutine(LLMEngine.get_tokenizer)
    get_supported_tasks = coroutine(LLMEngine.get_supported_tasks)
    get_metrics = coroutine(LLMEngine.get_metrics)
    get_vllm_config = coroutine(EngineMembers.get_vllm_config)
    get_model_config = coroutine(EngineMembers.get_model_config)
    get_cache_config = coroutine(EngineMembers.get_cache_config)
    get_scheduler_config = coroutine(EngineMembers.get_scheduler_config)
    get_parallel_config = coroutine(EngineMembers.get_parallel_config)
    get_decoding_config = coroutine(EngineMembers.get_decoding_config)
    get_lora_config = coroutine(EngineMembers.get_lora_config)
    do_log_stats = coroutine(LLMEngine.do_log_stats)
    do_log_stats_with_interval = coroutine(LLMEngine.do_log_stats_with_interval)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()
        await self._reader.ended()

    # ------------------------------------------------------------------ private

    def _enter(self) -> None:
        super()._enter()
        self._reader.enter()

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        answer = await super()._call(method, *args, **options)
        await self._reader.caught_up()  # so that after a pause no stream yields anything
        return answer

    async def _answer(self, asked: Future[None]) -> None:
        await asyncio.wrap_future(asked)

    def _stream(self, call: Call) -> RequestStream:
        return RequestStream(self._reader, call["request_id"], partial(self._add, call))

    async def _add(self, call: Call) -> RequestState:
        self._enter()
        if has_media(call["prompt"]) or self.input_processor.model.encoder_input:
            self._check_id(call["request_id"])
            prompt, kwargs, prepare = call["prompt"], call["tokenization_kwargs"], self.input_processor.prepare_media
            begin = lambda: prepare(prompt, kwargs) or done(prompt)  # noqa: E731
            if (prepared := await self._reader.prepared(call["request_id"], begin)) is None:
                return self._aborted(call)
            call = {**call, "prompt": prepared}
        return await self._send(self._make_request(call))

    async def _send(self, request: EngineCoreRequest) -> RequestState:
        self._enter()
        if self._log_requests:
            tokens, prompt = len(request.prompt_token_ids), (request.prompt or "")[: self._max_log_len]
            logger.info("request %s: %d tokens, %r, %s", request.request_id, tokens, prompt, request.params)
        state, messages, tensors = self._register(request)
        await self._reader.send(state, messages, tensors)
        if request.media is not None:
            self._media.deliver(request.media, request.data_parallel_rank or 0)
        return state

    def _aborted(self, call: Call) -> RequestState:
        """A request that was aborted while its media were prepared: it has ended, and its prompt has no tokens."""
        item = MediaItem(bytes(16), self.input_processor.model.media[0], 0, 1)  # in place of those that it lacks
        media = RequestMedia(PreparedPrompt([0], [item]), (), deque())
        parsed = self.input_processor.parse(call["prompt"])._replace(given=None, media=media)
        request = self._make_request({**call, "prompt": parsed})
        state, *_ = self._register(replace(request, prompt_token_ids=[], media=None))
        self._reader.aborted(state)
        return state


AsyncLLM = AsyncLLMEngine  # its later name
