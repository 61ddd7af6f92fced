"""The state of a daemon for others: notifications to systemd, and health checks over HTTP."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..ipc.errors import AddressInUseError

logger = logging.getLogger(__name__)

_STATUS_SECONDS = 10.0
_OWN_DESCRIPTORS = 24  # that the process needs beside its health checks
_CHECK_DESCRIPTORS = 10  # of one health check: its connection, and the sockets that ask the core
_MAX_CHECKS = 32  # at once


def notify(state: str) -> None:
    """Send lines such as ``READY=1`` to systemd, if it has started this process (sd_notify(3))."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.connect("\0" + path[1:] if path.startswith("@") else path)
            out.sendall(state.encode())


@contextlib.contextmanager
def heartbeat(status: Callable[[], str]) -> Iterator[None]:
    """Send `status` to systemd periodically, as often as its watchdog expects a sign of life.

    A timer signal does it, because its handler runs in the main thread: if that hangs, the notifications stop.
    """
    watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    limit = int(os.environ.get("WATCHDOG_USEC", 0)) / 1e6 if watched else 0.0
    period = limit / 2 or _STATUS_SECONDS
    if os.environ.get("NOTIFY_SOCKET"):
        signal.signal(signal.SIGALRM, lambda *_: notify(f"WATCHDOG=1\nSTATUS={status()}"))
        signal.setitimer(signal.ITIMER_REAL, period, period)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def probes(host: str, port: int, ready: Callable[[], bool]) -> Iterator[int]:
    """Answer GET /healthz with 200, and /readyz with 200 or 503. Yields the port, which for 0 is a free one.

    Raises:
        AddressInUseError: the port can't be opened.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # seconds for a request to come

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            code = {"/healthz": 200, "/readyz": 200 if ready() else 503}.get(path, 404)
            body = {200: b"ok\n", 503: b"not ready\n", 404: b"ask for /healthz or /readyz\n"}[code]
            self.send_response(code)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            logger.debug(format, *args)

    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    slots = threading.Semaphore(max(1, min(_MAX_CHECKS, (descriptors - _OWN_DESCRIPTORS) // _CHECK_DESCRIPTORS)))

    class Server(ThreadingHTTPServer):
        """Closes connections for which there are no descriptors: libzmq aborts a process that has none left."""

        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def verify_request(self, *_: object) -> bool:
            return slots.acquire(blocking=False)

        def process_request_thread(self, *args: Any) -> None:
            try:
                super().process_request_thread(*args)
            finally:
                slots.release()

    try:
        server = Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        why = f"{getattr(error, 'strerror', error)}; choose another"
        raise AddressInUseError(f"http_port is {port}, where nobody can listen on {host}: {why}") from None
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="mainspring-http", daemon=True)
    thread.start()
    bound = int(server.server_address[1])
    logger.info("health checks at http://%s:%d/healthz and /readyz", host, bound)
    try:
        yield bound
    finally:
        server.shutdown()
        server.server_close()
