"""`Frontend`, the base class of `LLMEngine` and `AsyncLLMEngine`: a client of the core, the input processor and the
output processor."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

import msgspec

from ..compat.forms import Call
from ..compat.members import FrontendMembers
from ..ipc.config import EngineConfig, ModelConfig, ObservabilityConfig, StructuredOutputsConfig
from ..ipc.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
    NotSupportedError,
    check_process,
    unknown_argument,
)
from ..ipc.messages import AddRequest, Stats
from ..ipc.tokenizer_files import cached_folder, checkpoint_folder
from .args import FIELDS, check_url, checked, typed
from .observe.metrics import StatLoggerBase, StatLoggerManager, StatLoggers
from .placement import place
from .request.input_processor import EngineCoreRequest, InputProcessor, core_messages
from .request.output_processor import OutputProcessor
from .request.prompt_media import PromptMedia
from .request.request_state import RequestState
from .text.model_files import eos_token_ids, generation_config
from .text.tokenizer import Tokenizer, as_tokenizer, load_tokenizer, media_tokens

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np

    from ..ipc.async_client import AsyncClient
    from ..ipc.client import CoreClient
    from ..ipc.connection import Connection, CoreOwner
    from ..ipc.cores import Cores
    from ..ipc.inproc_client import InprocClient
    from ..ipc.media_client import MediaClient

logger = logging.getLogger(__name__)


ModelFiles = tuple[Tokenizer | None, dict[str, Any]]  # the parts of a checkpoint that a frontend reads
C = TypeVar("C", bound="CoreClient | AsyncClient")
_CONNECTION = ("key", "server_key", "weight", "name", "connect_timeout", "reconnect_timeout")
CONNECT_OPTIONS = (*_CONNECTION, "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "otlp_traces_endpoint")


def read_files(model: ModelConfig, folder: Path, download_dir: str | None = None) -> ModelFiles:
    """Tokenizer and generation config of a checkpoint. The configuration may name another folder for the tokenizer."""
    found, place = generation_config(folder, model), folder
    if model.skip_tokenizer_init:
        return None, found
    if model.tokenizer is not None:
        place = checkpoint_folder(model.tokenizer, model.tokenizer_revision, download_dir)
    tokenizer = load_tokenizer(place, model.tokenizer_mode, model.trust_remote_code)
    tokenizer.media = media_tokens(folder, tokenizer)
    return tokenizer, found


def open_media(client: Any) -> MediaClient:
    """What prepares media for a core: in this process, if the core is here, too."""
    if client.in_process:
        from ..media.local import LocalMedia

        return LocalMedia(client.config, client.call)
    return cast("MediaClient", client.media())


class Frontend(FrontendMembers, Generic[C]):
    """A client of a core, with the processors of inputs and outputs. It ends at `shutdown`, when it is collected as
    garbage, or with the interpreter.
    """

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        otlp_traces_endpoint: str | None = None,
        beside: Self | None = None,
        **options: Any,
    ) -> Self:
        """An engine on a running daemon. Only the tokenizer is loaded here; the daemon sends its files.

        Args:
            address: ``ipc://PATH`` or ``tcp://HOST:PORT``, as `mainspring daemon` prints it when it is ready.
            tokenizer: folder or Hugging Face id of another tokenizer.
            tokenizer_mode, skip_tokenizer_init: as in `EngineArgs`.
            otlp_traces_endpoint: where traces of this frontend's requests are sent; None: to the daemon's endpoint;
                an empty str: nowhere.
            beside: another engine on the same daemon, whose tokenizer this one shares.
            options: ``key`` and ``server_key`` for a daemon with keys; ``weight``, this frontend's share among those
                that compete; ``name``, shown by `mainspring status`; ``connect_timeout`` and ``reconnect_timeout``,
                seconds.

        Raises:
            ConnectError: no daemon answers there, or it does not let this frontend in.
            UnknownArgumentError: there is no such option.
        """
        for name in options:
            if name not in _CONNECTION:
                raise unknown_argument("connect", name, CONNECT_OPTIONS)
        typed(FIELDS["tokenizer_mode"], tokenizer_mode)
        check_url("otlp_traces_endpoint", otlp_traces_endpoint or None)
        from ..ipc.client import connect  # imports zmq, which `import mainspring` must not
        from ..ipc.sync_client import SyncClient

        connection = connect(address, **options)
        try:
            config, elsewhere = connection.config, tokenizer is not None or skip_tokenizer_init
            has_files = bool(connection.model.files_digest) or not elsewhere
            theirs = msgspec.structs.replace(
                config.model_config,
                tokenizer=tokenizer,
                tokenizer_revision=None,
                tokenizer_mode=tokenizer_mode,
                skip_tokenizer_init=skip_tokenizer_init,
                trust_remote_code=False,  # code that comes from a daemon is never run here
                # a folder named there would be on the daemon's machine
                generation_config="auto" if has_files and config.model_config.generation_config != "none" else "none",
            )
            digest, folder = connection.model.files_digest, Path()
            if beside is not None:
                files = beside.tokenizer, beside.generation_config
            else:
                if has_files:
                    folder = cached_folder(digest, lambda: SyncClient(connection).call("tokenizer_files"))
                files = read_files(theirs, folder)
            engine = cls.__new__(cls)
            told = config.observability_config
            engine._open(cls._client(connection), files, not told.disable_log_stats, None, None, otlp_traces_endpoint)
            if otlp_traces_endpoint is None and told.otlp_traces_endpoint:
                try:
                    engine._trace(told.otlp_traces_endpoint)
                except NotSupportedError as error:
                    logger.warning("the daemon's %s", error)
        except BaseException:
            connection.close()
            raise
        return engine

    @classmethod
    def _client(cls, connection: Connection | Cores) -> C:
        from ..ipc.sync_client import SyncClient

        return cast(C, SyncClient(connection))

    @classmethod
    def _client_of(cls, core: CoreOwner, **options: Any) -> C:
        from ..ipc.client import connect

        return cls._client(connect(core, **options))

    def _start(
        self,
        config: EngineConfig,
        launch: Callable[[EngineConfig], C],
        log_stats: bool,
        loggers: StatLoggers | None,
        placement_group: Any = None,
        engine_use_ray: bool = False,
    ) -> None:
        """A constructor, with a core that `launch` starts, in the place that the rest asks for."""
        config = checked(config)
        model, download_dir, told = config.model_config, config.load_config.download_dir, config.observability_config
        folder = checkpoint_folder(str(model.model), model.revision, download_dir)
        files = read_files(model, folder, download_dir)  # before a core is started in vain
        placement = place(config, placement_group, engine_use_ray)
        try:
            client = placement.client(launch, self._client_of)
        except BaseException:
            placement.close()
            raise
        shown = (told.metrics_port, told.otlp_traces_endpoint)
        self._open(client, files, log_stats, loggers, *shown, placement.close)

    def _open(
        self,
        client: C,
        files: ModelFiles,
        log_stats: bool,
        stat_loggers: StatLoggers | None = None,
        metrics_port: int | None = None,
        traces: str | None = None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """The second half of a constructor: everything that needs the client. end: called when the client is closed."""
        from ..ipc.request_check import RequestCheck  # imported here to keep `import mainspring` fast

        self.engine_core = client
        self._pid = os.getpid()
        self._closing = contextlib.ExitStack()
        self._closing.callback(end)
        self._closing.callback(client.close)
        self._finalizer = weakref.finalize(self, _in_process, self._pid, self._closing.close)
        self._lock = threading.RLock()  # guards the state; never held while waiting for the core
        self._warned_of_trace_headers = False  # warn once that trace headers have no effect
        self.vllm_config = client.config  # as the core filled it in: `max_model_len`, `num_gpu_blocks`, …
        self.log_stats = log_stats
        tokenizer, self.generation_config = files
        eos = eos_token_ids(self.generation_config) or client.model.eos_token_ids
        check = RequestCheck(client.model, client.config)
        interval = client.config.scheduler_config.stream_interval
        # the client, not the engine: an engine that is not used any more is collected
        self._media = PromptMedia(client.config.multimodal_config, client.model.media, partial(open_media, client))
        self._closing.callback(self._media.close)
        if tokenizer is not None:
            tokenizer.media = {modality: tokenizer.media.get(modality, "") for modality in client.model.media}
        self.input_processor = InputProcessor(tokenizer, check, eos, interval, self._media)
        self._handles = itertools.count(1)
        self.output_processor = OutputProcessor(tokenizer, self._handles)
        self.output_processor.on_media_end = self._media.sweep
        self.logger_manager: StatLoggerManager | None = None
        self.metrics_port: int | None = None  # where metrics are served
        try:
            if log_stats and not self.observability_config.disable_log_stats:
                self.logger_manager = StatLoggerManager(self.vllm_config, stat_loggers)
                self.output_processor.statistics = self.logger_manager
            if metrics_port is not None:
                from .observe.prometheus import serve_metrics

                self.metrics_port, stop = serve_metrics("127.0.0.1", metrics_port, self._statistics().metrics)
                self._closing.callback(stop)
            if traces:
                self._trace(traces)
        except BaseException:
            self.shutdown()
            raise

    def _trace(self, endpoint: str) -> None:
        """Send traces of requests to `endpoint`."""
        try:
            from .observe.tracing import Tracer
        except ImportError as error:
            raise NotSupportedError(
                f"otlp_traces_endpoint is {endpoint!r}, but OpenTelemetry is not installed: "
                'pip install "mainspring[tracing]"'
            ) from error
        tracer = self.output_processor.tracer = Tracer(endpoint, self.model_config.shown_name)
        self._closing.callback(tracer.close)

    def _make_request(self, call: Call) -> EngineCoreRequest:
        """Turn a call into a checked request."""
        prompt, rank = call["prompt"], call["data_parallel_rank"]
        if isinstance(prompt, EngineCoreRequest):
            if prompt.request_id != call["request_id"]:
                given = call["request_id"]
                logger.warning("request_id %r: the prepared request keeps its own, %r", given, prompt.request_id)
            headers = call["trace_headers"] or prompt.trace_headers
            rank = prompt.data_parallel_rank if rank is None else rank
            if (headers, rank) == (prompt.trace_headers, prompt.data_parallel_rank):
                return prompt  # a copy would take longer than all else here
            return replace(prompt, trace_headers=headers, data_parallel_rank=rank)
        return self.input_processor.process_inputs(**call)

    def _register(self, request: EngineCoreRequest) -> tuple[RequestState, list[AddRequest], Sequence[np.ndarray]]:
        """Expect outputs of a request. Returns its state, the messages to send, and the arrays of each message."""
        self._check_functions(request)
        self._check_id(request.request_id)
        if request.trace_headers and self.output_processor.tracer is None and not self._warned_of_trace_headers:
            self._warned_of_trace_headers = True
            logger.warning("trace_headers have no effect, for otlp_traces_endpoint is not set; this is said once")
        messages = core_messages(request, self._handles)
        state = self.output_processor.add(request, [message.handle for message in messages], time.monotonic())
        return state, messages, () if request.embeds is None else (request.embeds.values,)

    def _check_functions(self, request: EngineCoreRequest) -> None:
        if request.params.logits_processors:
            self._core_here(
                "logits_processors are functions, which cannot go to another process", "logit_bias, or bad_words"
            )

    def _check_id(self, request_id: str) -> None:
        if request_id in self.output_processor:
            raise DuplicateRequestError(f"request_id {request_id!r} is still running; ids must be unique")

    def _statistics(self) -> StatLoggerManager:
        self._check_process()
        if self.logger_manager is None:
            raise InvalidArgumentError(
                "this engine keeps no statistics: disable_log_stats is True, or log_stats False; make one without that"
            )
        return self.logger_manager

    @property
    def _engine(self) -> Frontend[Any]:
        return self

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the core. With a blocking client the answer is there at once, so nothing is awaited."""
        self._enter()
        answer = self.engine_core.call(method, *args, **options)
        return await answer if inspect.isawaitable(answer) else answer

    async def _answer(self, asked: Future[None]) -> None:
        """Wait for a future that another thread sets. With a blocking client nothing is awaited."""
        asked.result()

    def _take_stats(self, stats: Any) -> None:
        """Keep statistics that did not come with an output."""
        if self.logger_manager is not None:
            for one in stats if isinstance(stats[0], list) else [stats]:  # of several cores there is a list
                self.logger_manager.take(msgspec.convert(one, Stats))

    def _core_here(
        self, why: str, instead: str = "give collective_rpc the name of a method of worker_extension_cls"
    ) -> InprocClient:
        """The client of a core in this process.

        Raises:
            NotSupportedError: the core is in another process; the message names two ways out.
        """
        if not self.engine_core.in_process:
            use = "use LLMEngine.from_engine_args(…, enable_multiprocessing=False), or"
            raise NotSupportedError(f"{why}: {use} {instead}")
        return cast("InprocClient", self.engine_core)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with `skip_tokenizer_init`. Another one may be set, see `LLM.set_tokenizer`."""
        return self.input_processor.tokenizer

    @tokenizer.setter
    def tokenizer(self, given: Any) -> None:
        self._check_process()
        tokenizer = as_tokenizer(given)
        with self._lock:
            if unfinished := len(self.output_processor):
                raise InvalidRequestError(f"{unfinished} requests are unfinished; set a tokenizer when they have ended")
            if self.tokenizer is not None:
                tokenizer.media = self.tokenizer.media
            self.input_processor.use_tokenizer(tokenizer)
            self.output_processor.use_tokenizer(tokenizer)

    @property
    def stat_loggers(self) -> dict[str, StatLoggerBase]:
        """The stat loggers by name; empty if the engine keeps no statistics."""
        return {} if self.logger_manager is None else self.logger_manager.stat_loggers

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    @property
    def structured_outputs_config(self) -> StructuredOutputsConfig:
        return self.vllm_config.structured_outputs_config

    @property
    def renderer(self) -> InputProcessor:
        """What makes token ids of prompts: its `tokenizer` and `process_inputs`."""
        return self.input_processor

    @property
    def model_executor(self) -> Any:
        """What runs the model.

        Raises:
            NotSupportedError: the core is in another process, and the worker with it.
        """
        return cast(Any, self._core_here("model_executor lives in the core's process", "collective_rpc")).core.worker

    @property
    def observability_config(self) -> ObservabilityConfig:
        return self.vllm_config.observability_config

    def shutdown(self) -> None:
        """Disconnect from the core. A core that belongs to this engine ends. A second call does nothing."""
        if os.getpid() == self._pid:
            with self._lock:
                self.output_processor.end_traces(EngineDeadError("the engine was shut down"), time.monotonic())
        self._finalizer()

    def _enter(self) -> None:
        """Check that the engine may be called here."""
        self._check_process()

    def _check_process(self) -> None:
        check_process(self._pid)


def _in_process(pid: int, close: Callable[[], None]) -> None:
    if os.getpid() == pid:  # a forked child inherits finalizers, but the objects belong to its parent
        close()
