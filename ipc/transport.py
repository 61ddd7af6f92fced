"""Sockets and the folder they live in."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable

import msgspec
import zmq

from .config import EngineConfig
from .errors import InvalidArgumentError

MAX_PATH_BYTES = 107  # of a Unix socket, by the kernel


class CoreLaunch(msgspec.Struct):
    """What a starting core reads from its standard input, as msgpack."""

    config: EngineConfig
    address: str
    token: bytes
    instance_id: bytes
    epoch: int
    parent_pid: int
    report_fd: int  # where its `StartReport` goes
    runtime_dir: str  # removed by the core if its parent dies


def make_runtime_dir() -> str:
    """A folder for one embedded core's socket that only this user can enter."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if not (base and os.path.isdir(base) and os.access(base, os.W_OK)):
        base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="mainspring-", dir=base)


def remove_runtime_dir(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def ipc_address(folder: str) -> str:
    path = os.path.join(folder, "core.sock")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise InvalidArgumentError(
            f"socket path {path!r} has {len(os.fsencode(path))} bytes; the limit is {MAX_PATH_BYTES}: "
            "set TMPDIR or XDG_RUNTIME_DIR to a shorter folder"
        )
    return f"ipc://{path}"


def bind_router(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The core's socket. Sends never block: a peer that is gone or slow is an error to handle, not to wait for."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.MAXMSGSIZE, 1 << 30)
    router.bind(address)
    return router


def connect_dealer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A frontend's socket, new for each epoch: frames queued in an old one would reach the next core."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.connect(address)
    return dealer


class ProcessWatch:
    """Tells when a process has ended, by something that can be polled where the kernel has it (pidfd).

    Args:
        pid: the process, a parent or child of this one.
        ask: tells it where the kernel has no pidfd.
    """

    def __init__(self, pid: int, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self.fd: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.fd = os.pidfd_open(pid)

    def ended(self) -> bool:
        """Right at once; a zombie counts as ended."""
        if self.fd is not None:
            poll = select.poll()  # select() knows no descriptor above 1023
            poll.register(self.fd, select.POLLIN)
            return bool(poll.poll(0))
        return self._ask()

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Waker:
    """Wakes a thread that polls `fd`, from any other."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def __del__(self) -> None:
        os.close(self.fd)
        os.close(self._write)


def describe_exit(returncode: int) -> str:
    """How a process ended, for an error message."""
    if returncode >= 0:
        return f"with exit code {returncode}"
    try:
        return f"by signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"by signal {-returncode}"


def seconds_left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
