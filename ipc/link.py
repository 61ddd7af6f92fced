"""The socket of a frontend. It is replaced whenever the connection is lost."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from .transport import Socket, make_dealer

_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSALS
_READABLE = int(zmq.POLLIN)
UNLISTED = "it does not know our key; have it listed with mainspring keys allow"


class Link:
    """Sends and receives frames without waiting, and reads libzmq's events of the connection.

    Args:
        keys, queue: see `make_dealer`.
    """

    def __init__(self, address: str, keys: tuple[str, str, str] | None, queue: int = 0) -> None:
        self._address, self._keys, self._queue = address, keys, queue
        self._context: zmq.Context[Socket] = zmq.Context()
        self._sockets: list[Socket] = []  # the one in use, and its monitor
        self._gathered: list[tuple[Sequence[Any], bool]] = []  # arguments of `gather`
        self.fds: tuple[int, ...] = ()  # their descriptors
        self._end = weakref.finalize(self, _abandon, self._context, self._sockets, os.getpid())
        self.num_sockets = 0  # a new socket may get the file descriptors of the old one
        self.trouble = ""  # why no connection was made, or why the last one ended
        self.open()

    def open(self) -> None:
        """Replace the socket by a new one, because frames queued in the old one would reach the next core. If that
        fails, there is no socket, and the connection counts as lost."""
        self.close_socket(0)
        self._gathered.clear()
        self.opened_at = time.monotonic()
        self.reached = False  # the ZeroMQ handshake of this socket succeeded
        self.lost = False
        dealer: Socket | None = None
        try:
            dealer = make_dealer(self._context, self._keys, self._queue)
            self._sockets[:] = dealer, dealer.get_monitor_socket(_EVENTS)
        except zmq.ZMQError as error:  # the process may have too many open files; the next attempt may succeed
            if dealer is not None:
                dealer.close()
            self.trouble, self.lost = f"no socket can be made: {error.strerror}", True
            return
        dealer.connect(self._address)
        self.num_sockets += 1
        self.fds = tuple(int(socket.FD) for socket in self._sockets)

    def gather(self, frames: Sequence[Any], copy: bool = True) -> None:
        """Send a message with the next one, or at `flush`. Each time a message is sent, libzmq may have to wake its
        thread, and the core, which takes longer than the rest."""
        self._gathered.append((frames, copy))

    def send(self, frames: Sequence[Any]) -> None:
        self.gather(frames)
        self.flush()

    def flush(self) -> None:
        """Send what was gathered. libzmq queues any number of frames, except on a socket that the core has rejected:
        that one would block for ever, so the connection counts as lost."""
        if not self._gathered:
            return
        gathered, self._gathered = self._gathered, []
        if not self._sockets:
            return
        try:
            for frames, copy in gathered:
                self._sockets[0].send_multipart(frames, zmq.NOBLOCK, copy)
        except zmq.ZMQError:
            self.lost = True

    def receive(self) -> list[memoryview] | None:
        """The frames of the next message; None if there is none."""
        if not self._sockets or not _readable(self._sockets[0]):
            return None
        frames = [self._sockets[0].recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more:  # `recv_multipart` asks the socket instead, and takes half as long again
            frames.append(self._sockets[0].recv(zmq.NOBLOCK, copy=False))
        return [frame.buffer for frame in frames]

    def read_events(self) -> None:
        """Update `reached`, `lost` and `trouble`."""
        while self._sockets and _readable(self._sockets[1]):
            event = parse_monitor_message(self._sockets[1].recv_multipart(zmq.NOBLOCK))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.reached, self.trouble = True, ""
            elif event == zmq.EVENT_DISCONNECTED:
                self.lost = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.trouble = UNLISTED
            elif self.trouble != UNLISTED:
                self.trouble = "the handshake failed; check that both sides use keys, and --server-key"

    def close_socket(self, linger_ms: int) -> None:
        if self._sockets:
            dealer, monitor = self._sockets
            dealer.disable_monitor()
            monitor.close(linger=0)
            dealer.close(linger=linger_ms)
            self._sockets.clear()
            self.fds = ()

    def close(self, linger_ms: int) -> None:
        """Close for good. Waits up to `linger_ms` for the last frames to be sent."""
        self.close_socket(linger_ms)
        self._end()


def _readable(socket: Socket) -> bool:
    """Whether a message is there. To receive without one would cost an exception, at each step and each request."""
    return bool(int(socket.get(zmq.EVENTS)) & _READABLE)


def _abandon(context: zmq.Context[Socket], sockets: Sequence[Socket], pid: int) -> None:
    """Close the sockets before the context, also if `close` was never called: a context that is collected while sockets
    are open would wait for ever."""
    if os.getpid() == pid:
        for socket in sockets:
            socket.close(linger=0)
        context.term()
