"""Limits on the connections of a core, so that its process never runs out of file descriptors.

libzmq 4.3.5 accepts every connection, and it aborts the process when accept() on a Unix socket finds no free
descriptor. libzmq offers no limit. So its listening sockets are registered with EPOLLONESHOT: libzmq accepts one
connection, and the next one only when `ConnectionLimits` has counted it and has enabled the listening socket again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import re
import resource
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq

from .errors import OverloadedError
from .transport import Socket

logger = logging.getLogger(__name__)

MONITORED = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED

OWN_DESCRIPTORS = 24  # of the limit, beside a quarter of it: files, pipes and sockets of the core itself
SPARE = 8  # connections above the limit that are open at once, to answer them with `Refused`
ACCEPT_S = 0.005  # seconds between two connections that are accepted, because each takes time from the main thread
REFUSED_S = 1.0  # seconds after which a connection above the limit is closed
WARNING_S = 10.0  # seconds between two warnings
ATTACH_S = 1.0  # seconds for libzmq's thread to register a listening socket
_EVENT = struct.Struct("=Hi")  # of a monitor: the event, the descriptor
_EPOLL_EVENT = struct.Struct("=IQ" if platform.machine() == "x86_64" else "@IQ")  # the kernel packs it on x86-64 only
_EPOLL_CTL_MOD = 3
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class ConnectionLimits:
    """Counts the connections of all sockets. Used by one thread.

    Args:
        monitors: of the listening sockets, for the events `MONITORED`, opened before the sockets are bound.

    Attributes:
        total: connections of all peers.
        per_peer: connections of one peer: a process on this machine, or another machine.
        lost_one: whether a connection was lost. The caller resets it.
    """

    def __init__(self, monitors: Sequence[Socket]) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.total = max(2, descriptors * 3 // 4 - OWN_DESCRIPTORS - SPARE)
        self.per_peer = self.total // 2
        self.lost_one = False
        self._next_warning = self._next_accept = 0.0
        self._monitors = monitors
        self._listeners: dict[int, tuple[int, int] | None] = {}  # descriptor → its `_registration`
        self._disabled: set[int] = set()  # listeners that may have accepted a connection since they were enabled
        self._peers: dict[int, str] = {}  # descriptor of a connection → its peer
        self._counts: Counter[str] = Counter()  # connections by peer
        self._refused: dict[int, tuple[float, str]] = {}  # connections above a limit → when to close them, the reason
        self.watch()

    def check(self, frame: zmq.Frame) -> None:
        """Raise `OverloadedError` if the connection that a frame came from is above a limit."""
        self.watch()  # the connection may be newer than the last call
        if found := self._refused.get(int(frame.get(zmq.SRCFD))):
            raise OverloadedError(found[1])

    @property
    def next_watch(self) -> float | None:
        """When `watch` must be called even without an event of a monitor."""
        accept = [self._next_accept] if self._disabled and self._has_room else []
        return min([*accept, *(at for at, _ in self._refused.values())], default=None)

    @property
    def _has_room(self) -> bool:
        return len(self._peers) < self.total + SPARE

    def watch(self) -> None:
        """Count connections that came and went, close refused ones, and let libzmq accept the next one if there is
        room."""
        for monitor in self._monitors:
            with contextlib.suppress(zmq.Again):
                while True:
                    event, fd = _EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
                    if event == zmq.EVENT_LISTENING:
                        self._listeners[fd] = _registration(fd)
                        self._disabled.add(fd)
                        _set_events(fd, self._listeners[fd], 0)
                    elif event == zmq.EVENT_ACCEPT_FAILED:  # the second number is the error, no descriptor
                        self._disabled.update(self._listeners)
                    elif event == zmq.EVENT_ACCEPTED:
                        self._disabled.update(self._listeners)
                        self._next_accept = time.monotonic() + ACCEPT_S
                        self._add(fd)
                    else:
                        self._remove(fd)
                        self.lost_one = True
        now = time.monotonic()
        for fd in [fd for fd, (at, _) in self._refused.items() if at <= now]:
            self._refused[fd] = (now + REFUSED_S, self._refused[fd][1])
            with contextlib.suppress(OSError), _borrowed(fd) as connection:
                connection.shutdown(socket.SHUT_RDWR)  # libzmq then closes it
        if self._disabled and self._has_room and now >= self._next_accept:
            for fd in self._disabled:
                _set_events(fd, self._listeners[fd], select.EPOLLIN | select.EPOLLONESHOT)
            self._disabled.clear()

    def _add(self, fd: int) -> None:
        self._remove(fd)
        peer = self._peers[fd] = _peer_of(fd)
        self._counts[peer] += 1
        if self._counts[peer] > self.per_peer:
            found = f"{peer} has {self.per_peer}"
        elif len(self._peers) > self.total:
            found = f"this core has {self.total}"
        else:
            return
        now = time.monotonic()
        reason = f"{found} connections, the limit: close some, or raise the core's limit of open files"
        self._refused[fd] = (now + REFUSED_S, reason)
        if now >= self._next_warning:
            self._next_warning = now + WARNING_S
            logger.warning("refused a connection of %s: %s", peer, reason)

    def _remove(self, fd: int) -> None:
        self._refused.pop(fd, None)
        if (peer := self._peers.pop(fd, None)) is not None:
            self._counts[peer] -= 1
            if not self._counts[peer]:
                del self._counts[peer]


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A descriptor of libzmq as a socket. It stays open afterwards."""
    borrowed = socket.socket(fileno=fd)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _peer_of(fd: int) -> str:
    with contextlib.suppress(OSError), _borrowed(fd) as connection:  # it may be closed already
        if connection.family == socket.AF_UNIX:
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return f"process {_CREDENTIALS.unpack(found)[0]}"
        return f"host {connection.getpeername()[0]}"
    return "an unknown peer"


def _registration(fd: int) -> tuple[int, int] | None:
    """The epoll descriptor of libzmq's thread that waits for `fd`, and the value that it registered with `fd`. None
    where the kernel does not tell; connections are then counted, but nothing keeps libzmq from accepting more."""
    deadline = time.monotonic() + ATTACH_S
    while time.monotonic() < deadline:
        for link in Path("/proc/self/fd").glob("*"):
            with contextlib.suppress(OSError):
                if os.readlink(link).endswith("[eventpoll]"):
                    info = Path("/proc/self/fdinfo", link.name).read_text()
                    if found := re.search(rf"^tfd: +{fd} .*data: +([0-9a-f]+)", info, re.MULTILINE):
                        return int(link.name), int(found[1], 16)
        if not os.path.isdir("/proc/self/fdinfo"):
            break
    logger.warning("the number of connections can't be limited on this system")
    return None


def _set_events(fd: int, registration: tuple[int, int] | None, events: int) -> None:
    """Set the events of a listener for which libzmq's thread waits."""
    if registration is not None:
        event = _EPOLL_EVENT.pack(events, registration[1])
        ctypes.CDLL(None).epoll_ctl(registration[0], _EPOLL_CTL_MOD, fd, event)
