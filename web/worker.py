"""A worker: one process that answers requests, with a connection to the core for each tenant."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import uvicorn

from ..engine.async_llm_engine import AsyncLLMEngine
from ..ipc import logs
from ..ipc.transport import readable, remove_runtime_dir
from ..serve.scale import admin_of
from .admin_api import AdminApi, LoadAdapterBody, UnloadAdapterBody
from .app import App, longest_body
from .bodies import ChatBody, CompletionBody
from .chat import ChatApi
from .completions import CompletionApi
from .counters import Counters
from .forwarding import Forwarding
from .messages_api import MessagesApi, MessagesBody, error_object
from .openapi import OpenApi
from .page import Page
from .pooling import InputBody, PoolingApi, RerankBody, ScoreBody
from .protocol import LimitedProtocol
from .reading import Readings
from .responses_api import ResponseBody, ResponsesApi
from .router import Router
from .serve_options import ServeOptions
from .served_adapters import ServedAdapters
from .service import Service
from .state_api import StateApi
from .tenants import THREADS, Tenant, Tenants, load_api_keys
from .text_api import DetokenizeBody, TextApi, TokenizeBody
from .transcriptions import TranscriptionApi, TranscriptionBody

_THREADS = 4 * THREADS  # of a worker, for what takes long
_OWN_DESCRIPTORS = 64  # of a worker beside its connections
_DESCRIPTORS_OF_TENANT = 8  # sockets of a connection to the core, and what libzmq needs
_RECONNECT_SECONDS = 3600.0  # that a worker waits for its daemon


class Order(msgspec.Struct):
    """What a worker is told when it starts.

    Args:
        address: of the daemon.
        frontend: options of `AsyncLLMEngine.connect`.
        name: what the model is called; None: as the daemon has it.
        row, rows: the worker's number, and how many there are.
        counters, adapters: descriptors of the files that all workers share.
        listener: descriptor of the listening socket.
        folder: of the sockets at which workers ask each other; empty: there is one worker.
    ready: descriptor of a pipe, which gets a byte when requests are taken; -1: there is none.
    """

    options: ServeOptions
    address: str
    frontend: dict[str, Any]
    name: str | None
    row: int
    rows: int
    counters: int
    adapters: int
    listener: int
    ready: int = -1
    folder: str = ""


class Site:
    """All objects of a worker.

    Args:
        engine: None: one on the daemon.
    """

    def __init__(self, order: Order, engine: AsyncLLMEngine | None = None) -> None:
        self._order, options = order, order.options
        keys = load_api_keys(options.api_key_file) if options.api_key_file else []
        first = Tenant("default", 1.0, False, self._connect, options.restart_wait)
        by_key = {
            one.digest: Tenant(one.name, one.weight, one.admin, self._connect, options.restart_wait) for one in keys
        }
        self._engine: AsyncLLMEngine | None = None
        self._engine = self._connect(first) if engine is None else self._with_template(engine)
        first.use(self._engine)
        self.tenants = Tenants(first, by_key)
        counters = Counters(order.counters, order.rows, order.row)
        shown = order.name or self._engine.model_config.shown_name
        readings = Readings(options.tool_parser, options.reasoning_parser)
        readings.prepare(self._engine)
        trusts = options.trust_request_chat_template
        adapters, aliases = ServedAdapters(order.adapters), options.model_aliases or ()
        self.service = Service(self.tenants, counters, shown, adapters, readings, trusts, aliases)
        self.admin = Tenant("administration", 1.0, True, self._connect_admin, options.restart_wait)
        self.forwarding = Forwarding(order.folder, order.row, order.rows)
        self.router = Router()
        self._add_routes()
        self.app = App(
            self.router,
            self.tenants,
            counters,
            longest_body(self._engine.engine_core.model) if options.max_body_bytes is None else options.max_body_bytes,
            options.body_timeout,
            options.cors_origins or (),
        )

    @property
    def _keys(self) -> dict[str, Any]:
        options = self._order.options
        return {"key": options.key, "server_key": options.server_key} if options.key or options.server_key else {}

    def _connect(self, tenant: Tenant) -> AsyncLLMEngine:
        order, first = self._order, self._engine
        beside = first if first is not None and first.dead_error is None else None
        engine = AsyncLLMEngine.connect(
            order.address,
            weight=tenant.weight,
            name=f"http {tenant.name} {os.getpid()}",
            beside=beside,
            reconnect_timeout=_RECONNECT_SECONDS,
            **order.frontend,
            **self._keys,
        )
        if order.options.api_key_file:  # how many tokens were cached would tell what others have asked
            engine.input_processor.salt = f"{tenant.name} "
        return self._with_template(engine)

    def _with_template(self, engine: AsyncLLMEngine) -> AsyncLLMEngine:
        """The engine, whose conversations are rendered as the options say."""
        options, tokenizer = self._order.options, engine.tokenizer
        given, variables = options.chat_template, options.default_chat_template_kwargs or {}
        if tokenizer is not None and (given is not None or variables):
            template = tokenizer.get_chat_template(given)  # raises if the tokenizer renders none
            tokenizer.chat_template = tokenizer.chat_template if given is None else template
            tokenizer.template_variables = variables
        return engine

    def _connect_admin(self, tenant: Tenant) -> AsyncLLMEngine:
        name = f"http {tenant.name} {os.getpid()}"
        address = admin_of(self._order.address)
        return AsyncLLMEngine.connect(address, name=name, beside=self._engine, **self._keys)

    def _add_routes(self) -> None:
        add, service = self.router.add, self.service
        chat, completions, text = ChatApi(service), CompletionApi(service), TextApi(service)
        pooling, state = PoolingApi(service), StateApi(service, self._order.address, self._keys)
        admin = AdminApi(service, self.admin)
        add("POST", "/v1/chat/completions", chat.handle, ChatBody)
        responses, messages = ResponsesApi(service, chat, self.forwarding), MessagesApi(service, chat)
        add("POST", "/v1/responses", responses.create, ResponseBody)
        add("GET", "/v1/responses/{response}", responses.get)
        add("DELETE", "/v1/responses/{response}", responses.delete)
        add("POST", "/v1/responses/{response}/cancel", responses.cancel)
        add("GET", "/v1/responses/{response}/input_items", responses.items)
        add("POST", "/v1/messages", messages.create, MessagesBody, error_form=error_object)
        add("POST", "/v1/messages/count_tokens", messages.count_tokens, MessagesBody, error_form=error_object)
        add("POST", "/v1/completions", completions.handle, CompletionBody)
        speech = TranscriptionApi(service)
        add("POST", "/v1/audio/transcriptions", speech.transcribe, TranscriptionBody, form=True)
        add("POST", "/v1/audio/translations", speech.translate, TranscriptionBody, form=True)
        add("POST", "/v1/embeddings", pooling.embeddings, InputBody)
        add("POST", "/pooling", pooling.pooling, InputBody)
        add("POST", "/classify", pooling.classify, InputBody)
        for path in ("/score", "/v1/score"):
            add("POST", path, pooling.score, ScoreBody)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            add("POST", path, pooling.rerank, RerankBody)
        add("POST", "/tokenize", text.tokenize, TokenizeBody)
        add("POST", "/detokenize", text.detokenize, DetokenizeBody)
        add("GET", "/", Page().show, access="open")
        add("GET", "/v1/models", state.models)
        add("GET", "/v1/models/{model:path}", state.model)
        for path in ("/health", "/ping"):
            add("GET", path, state.health, access="open")
        add("POST", "/ping", state.health, access="open")
        add("GET", "/metrics", state.metrics)
        add("GET", "/load", state.load)
        add("GET", "/version", state.version)
        add("GET", "/openapi.json", OpenApi(self.router).handle)
        for path, handler in (
            ("/sleep", admin.sleep),
            ("/wake_up", admin.wake_up),
            ("/reset_prefix_cache", admin.reset_prefix_cache),
            ("/reset_mm_cache", admin.reset_mm_cache),
            ("/reset_encoder_cache", admin.reset_encoder_cache),
            ("/pause", admin.pause),
            ("/resume", admin.resume),
        ):
            add("POST", path, handler, access="admin")
        add("POST", "/v1/load_lora_adapter", admin.load_adapter, LoadAdapterBody, access="admin")
        add("POST", "/v1/unload_lora_adapter", admin.unload_adapter, UnloadAdapterBody, access="admin")
        add("GET", "/is_sleeping", admin.is_sleeping, access="admin")
        add("GET", "/is_paused", admin.is_paused, access="admin")

    def close(self) -> None:
        self.tenants.close()
        self.admin.close()


class _Server(uvicorn.Server):
    """Tells when it takes requests, and ends at signals without raising them again."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        gc.collect()
        gc.freeze()  # the objects of modules and tokenizer are not searched again
        gc.set_threshold(20_000)  # a request makes hundreds of objects, and hardly a cycle
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(order: Order, on_ready: Callable[[], None], parent: int | None = None) -> None:
    """Answer requests until SIGTERM or SIGINT, and until those in flight have ended.

    Args:
        on_ready: called when requests are taken.
        parent: a pipe whose end means that the process that started this one has ended.

    Raises:
        MainspringError: the daemon does not answer.
    """
    options = order.options
    site = Site(order)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    tenants = 2 + len(load_api_keys(options.api_key_file) if options.api_key_file else ())
    LimitedProtocol.max_connections = max(16, soft - _OWN_DESCRIPTORS - _DESCRIPTORS_OF_TENANT * tenants)
    config = uvicorn.Config(
        site.app,
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, int(options.drain_timeout)),
        timeout_keep_alive=75,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )
    server = _Server(config, on_ready)

    async def serve() -> None:
        if parent is not None:
            asyncio.get_running_loop().add_reader(parent, _ended, server, parent)
        await site.forwarding.listen(site.app, server.server_state.tasks)
        await server.serve([socket.socket(fileno=order.listener)])

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve())
    finally:
        site.close()


def _ended(server: uvicorn.Server, parent: int) -> None:
    asyncio.get_running_loop().remove_reader(parent)
    server.should_exit = True


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop


def set_up_logs(options: ServeOptions, process: str) -> None:
    """Log lines of this process; those of the access log are JSON as they are."""
    os.environ["MAINSPRING_LOG_FORMAT"] = options.log_format
    logs.set_up(process)
    access = logging.getLogger("mainspring.access")
    access.propagate = False
    access.setLevel(logging.INFO if options.access_log else logging.ERROR)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.handlers = [handler]


def main() -> None:
    """The process of a worker: it gets its `Order` as its argument, and a pipe of its parent as standard input."""
    order = msgspec.json.decode(sys.argv[1].encode(), type=Order)
    set_up_logs(order.options, f"serve-{order.row}")
    try:
        run(order, lambda: (os.write(order.ready, b"1"), None)[1], 0)
    finally:
        if readable([0], 0):  # the process that made the folder has ended
            remove_runtime_dir(order.folder)


if __name__ == "__main__":
    main()
