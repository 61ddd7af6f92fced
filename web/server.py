"""`mainspring serve`: the listening socket, the workers that share it, and the core, its own or a daemon's."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..ipc.config import EngineConfig
from ..ipc.connection import ask_status
from ..ipc.errors import AddressInUseError, ConnectError, EngineStartError, NotSupportedError
from ..ipc.transport import ipc_address, make_runtime_dir, readable, remove_runtime_dir
from .counters import shared_file
from .serve_options import ServeOptions
from .served_adapters import adapters_file

logger = logging.getLogger(__name__)

_BACKLOG = 2048  # connections that wait to be accepted
_SETTLED_SECONDS = 5.0  # a worker that dies sooner is started again after a pause
_PAUSE_SECONDS = 1.0
_END_SECONDS = 5.0  # beyond drain_timeout, until a worker that does not end is killed
_LOOK_SECONDS = 5.0  # between two looks at the core while workers start, and the longest that it may take to answer


def serve(options: ServeOptions, engine: EngineConfig | dict[str, Any], on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. For the main thread.

    Args:
        engine: the configuration of the own core, or with `options.connect` the options of the frontends.
        on_ready: called once, with the URL, when requests are taken.

    Raises:
        NotSupportedError: the packages of the extra `serve` are missing.
        AddressInUseError: the port can't be opened.
        MainspringError: as `mainspring.serve.daemon.serve`; or the daemon does not answer.
    """
    try:
        from .worker import Order, run, set_up_logs
    except ImportError as error:
        raise NotSupportedError(f'{error.name} is not installed: pip install "mainspring[serve]"') from error

    def ready() -> None:
        on_ready(url)
        if os.environ.get("NOTIFY_SOCKET"):
            from ..serve.health import notify

            notify("READY=1")

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(options))
        counters = stack.enter_context(shared_file(options.workers))
        url = _url(options, listener)
        settings: dict[str, Any]
        if isinstance(engine, EngineConfig):
            model = engine.model_config
            settings = {"tokenizer_mode": model.tokenizer_mode, "skip_tokenizer_init": model.skip_tokenizer_init}
        else:
            settings = dict(engine)
        name = settings.pop("served_model_name", None)
        adapters = stack.enter_context(adapters_file(options.lora_modules or ()))
        files = counters.fileno(), adapters.fileno(), listener.detach()
        order = Order(options, options.connect or "", settings, name, 0, options.workers, *files)
        if options.workers > 1:
            order.folder = make_runtime_dir()
            stack.callback(remove_runtime_dir, order.folder)
        if options.connect is not None and options.workers == 1:
            set_up_logs(options, "serve")
            run(order, ready)
            return
        set_up_logs(options, "serve")
        if options.connect is not None:
            pool = _Pool(order)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: pool.stop())
            with pool:
                ready()
                pool.wait()
            return
        assert isinstance(engine, EngineConfig)
        folder = order.folder or make_runtime_dir()
        stack.callback(remove_runtime_dir, folder)
        order.address = ipc_address(folder)
        _with_core(order, engine, folder, lambda: on_ready(url))


def _with_core(order: Any, config: EngineConfig, folder: str, on_ready: Callable[[], None]) -> None:
    """Run a core in the way of a daemon, and workers beside it. The workers end before it."""
    from ..serve.daemon import serve as serve_daemon  # imported here, because a server beside a daemon does not need it
    from ..serve.daemon_options import DaemonOptions

    daemon = DaemonOptions(listen=order.address, drain_timeout=order.options.drain_timeout)
    pools: list[_Pool] = []

    def started(_: str) -> None:
        stop_core = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def stop(*_: Any) -> None:
            for number, handler in stop_core.items():
                signal.signal(number, handler)  # a second signal ends the core at once
            pool.stop()

        def ended() -> None:
            if pool.stopping:
                os.kill(os.getpid(), signal.SIGTERM)

        def look() -> None:
            """Nobody starts the core again before this function returns, and workers would wait for it."""
            try:
                ask_status(order.address, _LOOK_SECONDS)
            except ConnectError:
                raise EngineStartError("the core has ended while the server's workers started") from None

        pool = _Pool(order, ended, look)
        for number in stop_core:
            signal.signal(number, stop)
        pools.append(pool)
        pool.__enter__()
        on_ready()

    try:
        serve_daemon(daemon, config, started, folder)
    finally:
        for pool in pools:
            pool.__exit__()


class _Pool:
    """The workers. One that ends by itself is started again.

    Args:
        on_end: called in a thread when all have ended after `stop`.
        look: called from time to time while workers start. May raise.
    """

    def __init__(
        self, order: Any, on_end: Callable[[], None] = lambda: None, look: Callable[[], None] = lambda: None
    ) -> None:
        self._order, self._on_end, self._look = order, on_end, look
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._started: dict[int, float] = {}
        self.stopping = False
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._watch, name="mainspring-workers", daemon=True)

    def __enter__(self) -> _Pool:
        """Start all workers, and wait until they take requests.

        Raises:
            EngineStartError: one has ended before, or the core.
        """
        reader, writer = os.pipe()
        try:
            for row in range(self._order.rows):
                self._start(row, writer)
            os.close(writer)
            writer = -1
            ready = 0
            while ready < self._order.rows:
                while not readable([reader], _LOOK_SECONDS):
                    self._look()
                told = os.read(reader, 64)
                ready += len(told)
                if not told:
                    break
            if ready < self._order.rows and not self.stopping:
                raise EngineStartError("a worker of the server did not start; its log says why")
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def stop(self) -> None:
        """Let the workers finish their requests. A signal handler may call this."""
        if self._stop_at is None:
            self._stop_at = time.monotonic()
            self.stopping = True
            for process in list(self._processes.values()):
                process.terminate()

    def wait(self) -> None:
        while self._thread.is_alive():
            self._thread.join(0.5)

    def _start(self, row: int, ready: int = -1) -> None:
        order = msgspec.structs.replace(self._order, row=row, ready=ready)
        passed = [order.counters, order.adapters, order.listener, *([ready] if ready >= 0 else [])]
        command = [sys.executable, "-P", "-m", "mainspring.web.worker", msgspec.json.encode(order).decode()]
        self._started[row] = time.monotonic()
        self._processes[row] = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=passed, start_new_session=True)

    def _watch(self) -> None:
        limit, listens = self._order.options.drain_timeout + _END_SECONDS, True
        while self._processes:
            if self.stopping and listens:
                listens = False
                os.close(self._order.listener)  # as the workers do with theirs: then nobody can connect
            for row, process in list(self._processes.items()):
                if process.poll() is None:
                    continue
                del self._processes[row]
                if process.stdin is not None:
                    process.stdin.close()
                if self.stopping:
                    continue
                logger.error(
                    "worker %d (pid %d) has ended: %s; it is started again", row, process.pid, process.returncode
                )
                if time.monotonic() - self._started[row] < _SETTLED_SECONDS:
                    time.sleep(_PAUSE_SECONDS)
                if not self.stopping:
                    self._start(row)
            if self._stop_at is not None and time.monotonic() - self._stop_at > limit:
                self._kill()
            time.sleep(0.05)
        self._on_end()

    def _kill(self) -> None:
        for process in list(self._processes.values()):
            process.kill()


@contextlib.contextmanager
def _listener(options: ServeOptions) -> Iterator[socket.socket]:
    host = options.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, options.port))
        except OSError as error:
            why = f"{error.strerror}; choose another"
            raise AddressInUseError(f"port is {options.port}, where nobody can listen on {host}: {why}") from None
        listener.listen(_BACKLOG)
        listener.set_inheritable(True)
        yield listener


def _url(options: ServeOptions, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if options.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
