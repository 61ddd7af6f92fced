"""`LLMEngine`: add requests, step, collect outputs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..compat.forms import refuse_unsupported, resolve_add_request, takes_older_forms
from ..compat.members import EngineMembers, UsageContext
from ..compat.missing import knows_members
from ..ipc.adapters import LoRARequest
from ..ipc.config import EngineConfig
from ..ipc.errors import EngineDeadError, EngineStartError, MainspringError, NotSupportedError, shown, wire_text
from ..ipc.params import SamplingParams
from ..ipc.pooling_params import PoolingParams
from ..ipc.processor_names import stay_here
from .args import EngineArgs
from .engine_methods import EngineMethods
from .frontend import Frontend
from .observe.metrics import StatLoggers
from .request.input_processor import EngineCoreRequest
from .request.output_processor import send_round
from .request.outputs import PoolingRequestOutput, RequestOutput
from .request.prompts import Prompt

if TYPE_CHECKING:
    from ..ipc.client import CoreClient


def make_client(config: EngineConfig, multiprocess: bool) -> CoreClient:
    """Start a core and connect to it. Torch and transformers are imported here only for a core in this process."""
    if multiprocess:
        from ..ipc.sync_client import SyncClient

        return SyncClient.launch(config)
    if config.parallel_config.num_cores > 1:
        raise NotSupportedError("data_parallel_size is above 1, but the core is to run in this process")
    from ..core.loop import EngineCore
    from ..ipc.inproc_client import InprocClient

    try:
        core = EngineCore(config)
    except MainspringError:
        raise
    except Exception as error:  # as from a core in another process
        raise EngineStartError(wire_text(error)) from error
    return InprocClient(core)


@knows_members("LLMEngine")
class LLMEngine(EngineMethods, EngineMembers, Frontend["CoreClient"]):
    """A frontend with a core of its own, in a process of its own unless `multiprocess_mode` is False.

    The configuration may also come part by part, by position or keyword: see compat/forms.py.

    Methods may be called from several threads. If several threads call `step`, each output goes to one of them. In a
    forked child every method raises `WrongProcessError`, except those that only show the configuration.

    Args:
        vllm_config: from `EngineArgs.create_engine_config`.
        executor_class: only None; `distributed_executor_backend` chooses the executor.
        log_stats: whether statistics are collected.
        aggregate_engine_logging, usage_context, mm_registry, use_cached_outputs: without effect.
        stat_loggers: further receivers of statistics: name → logger, or factories ``(vllm_config, engine_index)``.
        multiprocess_mode: False: the core runs in this process, one iteration for each `step`.
        placement_group: of Ray, for `distributed_executor_backend="ray"`; a bundle for each rank.
        engine_use_ray: let the core run in an actor of Ray.

    Raises:
        MainspringError: the model is not found, not supported, or the core did not start.
    """

    DO_VALIDATE_OUTPUT: ClassVar[bool] = False  # whether `step` checks the type of its outputs

    @takes_older_forms
    def __init__(
        self,
        vllm_config: EngineConfig,
        executor_class: None = None,
        log_stats: bool = True,
        aggregate_engine_logging: bool = False,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: StatLoggers | None = None,
        mm_registry: Any = None,
        use_cached_outputs: bool = False,
        multiprocess_mode: bool = True,
        placement_group: Any = None,
        engine_use_ray: bool = False,
    ) -> None:
        refuse_unsupported(executor_class=executor_class)
        where = (placement_group, engine_use_ray)
        self._start(vllm_config, lambda config: make_client(config, multiprocess_mode), log_stats, stat_loggers, *where)

    def _open(self, client: CoreClient, *more: Any) -> None:
        super()._open(client, *more)
        self._ready: list[RequestOutput] = []  # last outputs of aborted requests, for the next step()
        self._stepping = threading.Lock()  # held by the one thread that waits for outputs

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: StatLoggers | None = None,
        enable_multiprocessing: bool | None = None,
    ) -> Self:
        """An engine for these arguments; `enable_multiprocessing=False` puts the core into this process. So does None
        if `logits_processors` has a class of a script or notebook, which no other process can import."""
        config = engine_args.create_engine_config()
        if enable_multiprocessing is None:
            enable_multiprocessing = not stay_here(config.model_config.logits_processors)
        return cls(
            config,
            log_stats=not engine_args.disable_log_stats,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            multiprocess_mode=enable_multiprocessing,
        )

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: StatLoggers | None = None,
        disable_log_stats: bool = False,
    ) -> Self:
        """An engine for this configuration, with its core in a separate process."""
        return cls(vllm_config, log_stats=not disable_log_stats, usage_context=usage_context, stat_loggers=stat_loggers)

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | EngineCoreRequest | None = None,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        **older: Any,
    ) -> str:
        """Queue a request; its outputs come from `step`. The older call forms work too: see compat/forms.py.

        Args:
            request_id: the caller's name for it, unique among the unfinished ones.
            prompt: text, token ids, a `TextPrompt`, `TokensPrompt` or `EmbedsPrompt`, or what
                `input_processor.process_inputs` gave (its own id then wins).
            params: never changed. `PoolingParams`: `step` brings one `PoolingRequestOutput`.
            arrival_time: seconds; None: `time.monotonic()` now.
            lora_request: the LoRA adapter to use. It is loaded while others go on, if it is not there yet.
            tokenization_kwargs: ``add_special_tokens`` for a prompt that is text.
            priority: lower values first, under `scheduling_policy="priority"`.
            prompt_text: shown as the prompt in outputs.

        Returns:
            The request's id.

        Raises:
            InvalidRequestError: it can't be served as it stands; others are not affected.
            EngineDeadError: the core is gone.
        """
        self._check_process()
        slots = (arrival_time, lora_request, tokenization_kwargs, trace_headers, priority, prompt_text)
        request = self._make_request(resolve_add_request(request_id, prompt, params, slots, older))
        with self._lock:
            _, messages, tensors = self._register(request)
            send: Callable[..., None] = self.engine_core.add_request
            if processors := request.params.logits_processors:  # the core is in this process
                send = partial(send, processors=processors)
            if request.data_parallel_rank is not None:
                send = partial(send, rank=request.data_parallel_rank)
            try:
                for message in messages:
                    send(message, tensors)
                if request.media is not None:
                    self._media.deliver(request.media, request.data_parallel_rank or 0)
            except BaseException:
                self._end_requests([request.request_id])
                raise
        return request.request_id

    def abort_request(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End one or several requests; the next `step` gives each a last output with finish reason ``abort``.
        Unknown ids are ignored; `internal` is without effect, for ids are the user's own.
        """
        self._check_process()
        ids = [request_id] if isinstance(request_id, (str, int)) else request_id
        with self._lock:
            self._ready += self._end_requests(map(str, ids))

    def step(self) -> list[RequestOutput]:
        """The next outputs; ``[]`` at once if nothing is in flight. In-process it runs one iteration, otherwise it
        waits for the core, which never waits for it.

        Raises:
            EngineDeadError: the core is gone, and the unfinished requests with it.
        """
        self._check_process()
        with self._stepping:
            with self._lock:
                if self._ready or not len(self.output_processor):
                    ready, self._ready = self._ready, []
                    return self._validated(ready)
            try:
                outputs = self.engine_core.get_outputs()
            except EngineDeadError as error:
                with self._lock:
                    self.output_processor.forget(error, time.monotonic())
                raise
            if outputs is None:
                return []
            with self._lock:
                processed = self.output_processor.process(outputs, time.monotonic())
                self._abort_in_core(processed.aborts)
                ready, self._ready = self._ready, []
                ready += [state.output() for state in processed.changed]
                with contextlib.suppress(EngineDeadError):  # the next step() raises it
                    for message, source in processed.adds:
                        send_round(self.engine_core.add_request, message, source.data_parallel_rank)
                        if source.media is not None:
                            self._media.deliver(source.media, source.data_parallel_rank or 0)
                return self._validated(ready)

    def _validated(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        for output in outputs if self.DO_VALIDATE_OUTPUT else ():
            if not isinstance(output, RequestOutput | PoolingRequestOutput):
                raise TypeError(f"step gives {type(output).__name__}, {shown(output)}; it must be a RequestOutput")
        return outputs

    def _end_requests(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Abort requests, here and in the core. Returns their last outputs, which `step` then does not return."""
        with self._lock:
            ended = self.output_processor.abort(request_ids, time.monotonic())
            self._abort_in_core(ended.aborts)
            return [state.output() for state in ended.changed]

    def _abort_in_core(self, handles: list[int]) -> None:
        if handles:
            with contextlib.suppress(EngineDeadError):  # the next step() raises it; these have ended anyway
                self.engine_core.abort(handles)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to give."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests whose last output `step` has not given yet."""
        self._check_process()
        with self._lock:
            return len(self.output_processor) + len(self._ready)

    def do_log_stats(self, *ignored: Any, **also: Any) -> None:
        """Let the stat loggers speak now, also while nothing is in flight. Older arguments are without effect.

        Raises:
            InvalidArgumentError: there are no statistics, because of `disable_log_stats`.
        """
        self._statistics().log()

    def do_log_stats_with_interval(self) -> None:
        """As `do_log_stats`, if they have not for `LOG_SECONDS`. An engine that is at work does it by itself."""
        self._statistics().log_with_interval()
