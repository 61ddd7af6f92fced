"""`LLMEngine`: add requests, step, collect outputs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..ipc.config import CacheConfig, EngineConfig, ModelConfig, ObservabilityConfig, ParallelConfig, SchedulerConfig
from ..ipc.errors import DuplicateRequestError, EngineDeadError, InvalidRequestError, WrongProcessError
from ..ipc.params import SamplingParams
from .args import EngineArgs
from .call_forms import refuse_unsupported, resolve_add_request
from .clients import make_client
from .input_processor import EngineCoreRequest, InputProcessor, core_messages
from .model_files import checkpoint_folder, eos_token_ids, generation_config
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .prompts import Prompt
from .tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from ..ipc.client import CoreClient

logger = logging.getLogger(__name__)


class UsageContext(StrEnum):
    """Who uses the engine. Nothing is reported anywhere; accepted because vLLM's signatures have it."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class LLMEngine:
    """A frontend with a core of its own, in a process of its own unless `multiprocess_mode` is False.

    Methods may be called from several threads; `step` in several threads shares the outputs out among them. In a forked
    child every method raises `WrongProcessError`.

    Args:
        vllm_config: from `EngineArgs.create_engine_config`.
        executor_class: only None; `distributed_executor_backend` chooses the executor.
        log_stats: whether statistics are collected.
        aggregate_engine_logging, usage_context, mm_registry, use_cached_outputs: without effect.
        stat_loggers: only None so far.
        multiprocess_mode: False: the core runs in this process, one iteration for each `step`.

    Raises:
        MainspringError: the model is not found, not supported, or the core did not start.
    """

    def __init__(
        self,
        vllm_config: EngineConfig,
        executor_class: None = None,
        log_stats: bool = True,
        aggregate_engine_logging: bool = False,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: None = None,
        mm_registry: Any = None,
        use_cached_outputs: bool = False,
        multiprocess_mode: bool = True,
    ) -> None:
        refuse_unsupported(executor_class=executor_class, stat_loggers=stat_loggers)
        model = vllm_config.model_config
        load = vllm_config.load_config
        folder = checkpoint_folder(str(model.model), model.revision, load.download_dir)
        self.tokenizer = _tokenizer(model, folder, load.download_dir)
        self.generation_config = generation_config(folder, model)
        self.engine_core: CoreClient = make_client(vllm_config, multiprocess_mode)
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self.engine_core, self._pid)
        self.vllm_config = self.engine_core.config
        self.log_stats = log_stats
        eos = set(eos_token_ids(self.generation_config) or self.engine_core.model.eos_token_ids)
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            eos.add(self.tokenizer.eos_token_id)
        self.input_processor = InputProcessor(self.tokenizer, self.engine_core.model, eos)
        self.output_processor = OutputProcessor(self.tokenizer)
        self._handles = itertools.count(1)
        self._ready: list[RequestOutput] = []  # outputs of what ended here, for the next step()
        self._lock = threading.RLock()  # guards the state; never held while waiting for the core
        self._stepping = threading.Lock()  # one thread at a time waits for outputs

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: None = None,
        enable_multiprocessing: bool | None = None,
    ) -> Self:
        """An engine for these arguments; `enable_multiprocessing=False` puts the core into this process."""
        return cls(
            engine_args.create_engine_config(),
            log_stats=not engine_args.disable_log_stats,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            multiprocess_mode=enable_multiprocessing is not False,
        )

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: None = None,
        disable_log_stats: bool = False,
    ) -> Self:
        """An engine for this configuration, with its core in a separate process."""
        return cls(vllm_config, log_stats=not disable_log_stats, usage_context=usage_context, stat_loggers=stat_loggers)

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | EngineCoreRequest | None = None,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        **older: Any,
    ) -> str:
        """Queue a request; its outputs come from `step`. The older call forms work too: see call_forms.py.

        Args:
            request_id: the caller's name for it, unique among the unfinished ones.
            prompt: text, token ids, a `TextPrompt`, `TokensPrompt` or `EmbedsPrompt`, or what
                `input_processor.process_inputs` gave (its own id then wins).
            params: never changed.
            arrival_time: seconds; None: `time.monotonic()` now.
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
        slots = (arrival_time, lora_request, tokenization_kwargs, trace_headers, priority)
        call = resolve_add_request(request_id, prompt, params, slots, prompt_text, older)
        if isinstance(call.prompt, EngineCoreRequest):
            request = call.prompt
            if request.request_id != call.request_id:
                logger.warning("request_id %r: the prepared request keeps its own, %r", request_id, request.request_id)
        else:
            request = self.input_processor.process_inputs(
                call.request_id,
                call.prompt,
                call.params,
                call.arrival_time,
                call.tokenization_kwargs,
                call.priority,
                call.prompt_text,
            )
        with self._lock:
            if request.request_id in self.output_processor:
                raise DuplicateRequestError(f"request_id {request.request_id!r} is still running; ids must be unique")
            messages = core_messages(request, self._handles)
            self.output_processor.add(request, [message.handle for message in messages], time.monotonic())
            tensors = () if request.embeds is None else (request.embeds.array,)
            try:
                for message in messages:
                    self.engine_core.add_request(message, tensors)
            except BaseException:
                self.output_processor.forget([request.request_id])
                raise
        return request.request_id

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End one or several requests; the next `step` gives each a last output with finish reason ``abort``.
        Unknown ids are ignored.
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
                    return ready
            try:
                outputs = self.engine_core.get_outputs()
            except EngineDeadError:
                with self._lock:
                    self.output_processor.forget()
                raise
            if outputs is None:
                return []
            with self._lock:
                processed = self.output_processor.process(outputs, time.monotonic())
                self._abort_in_core(processed.aborts)
                ready, self._ready = self._ready, []
                return ready + processed.outputs

    def _end_requests(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Abort, here and in the core; what `step` would have given is returned instead."""
        with self._lock:
            ended = self.output_processor.abort(request_ids, time.monotonic())
            self._abort_in_core(ended.aborts)
            return ended.outputs

    def _abort_in_core(self, handles: list[int]) -> None:
        if handles:
            with contextlib.suppress(EngineDeadError):  # for the next step() to say; these have ended anyway
                self.engine_core.abort(handles)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to give."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests whose last output `step` has not given yet."""
        with self._lock:
            return len(self.output_processor) + len(self._ready)

    # ------------------------------------------------------------------ the engine

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    @property
    def observability_config(self) -> ObservabilityConfig:
        return self.vllm_config.observability_config

    def get_model_config(self) -> ModelConfig:
        """The model's configuration, as the core filled it in (`max_model_len`, `dtype`)."""
        return self.vllm_config.model_config

    def get_cache_config(self) -> CacheConfig:
        """The cache's configuration, as the core filled it in (`num_gpu_blocks`)."""
        return self.vllm_config.cache_config

    def get_scheduler_config(self) -> SchedulerConfig:
        return self.vllm_config.scheduler_config

    def get_parallel_config(self) -> ParallelConfig:
        return self.vllm_config.parallel_config

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            InvalidRequestError: there is none, because of `skip_tokenizer_init`.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("there is no tokenizer; this engine has skip_tokenizer_init=True")
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False if running requests stood in the way."""
        self._check_process()
        return bool(self.engine_core.call("reset_prefix_cache"))

    def shutdown(self) -> None:
        """End the core. Twice is once; also done when the engine is collected or the interpreter ends."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise WrongProcessError(
                f"this engine belongs to process {self._pid}, from which this one was forked; make one of its own here"
            )


def _close(client: CoreClient, pid: int) -> None:
    if os.getpid() == pid:  # a forked child inherits the finalizer, but not the core
        client.close()


def _tokenizer(model: ModelConfig, folder: Path, download_dir: str | None) -> Tokenizer | None:
    if model.skip_tokenizer_init:
        return None
    if model.tokenizer is not None:
        folder = checkpoint_folder(model.tokenizer, model.tokenizer_revision, download_dir)
    return load_tokenizer(folder, model.tokenizer_mode, model.trust_remote_code)
