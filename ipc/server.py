"""The core's end of the wire.

One I/O thread owns the ROUTER socket: it decodes what comes in and encodes what goes out, while the main thread
computes (torch lets go of the interpreter lock). Between the two stand two queues.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import zmq

from . import codec
from .errors import MainspringError, ProtocolError, wire_name
from .messages import PROTOCOL_VERSION, Bye, Hello, Ready, Refused
from .transport import ProcessWatch, Waker, bind_router

logger = logging.getLogger(__name__)

_BACKLOG_POLL_MS = 10
_PARENT_POLL_MS = 500


class Event(NamedTuple):
    """Something that came in: `message` of `frontend`; a `Hello` is a frontend's first, a `Bye` its last."""

    frontend: int
    message: Any
    tensors: Sequence[codec.Frame]


class _Peer(NamedTuple):
    identity: bytes
    backlog: deque[list[Any]]  # sends that found the pipe full


class CoreServer:
    """Listens at once, and watches its parent; answers from `announce` on.

    Args:
        address: where to listen.
        instance_id, epoch: stamped on every frame; others are dropped.
        token: what a Hello must hold.
        parent: watched; when it ends `on_parent_end` is called, in the I/O thread.
    """

    def __init__(
        self,
        address: str,
        instance_id: bytes,
        epoch: int,
        token: bytes,
        parent: ProcessWatch | None = None,
        on_parent_end: Callable[[], None] | None = None,
    ) -> None:
        self._context = zmq.Context()
        self._router = bind_router(self._context, address)
        self._instance_id, self._epoch, self._token = instance_id, epoch, token
        self._parent, self._on_parent_end = parent, on_parent_end
        self._inbox: SimpleQueue[Event] = SimpleQueue()
        self._outbox: SimpleQueue[tuple[int, Any, Sequence[np.ndarray]]] = SimpleQueue()
        self._peers: dict[int, _Peer] = {}
        self._frontends: dict[bytes, int] = {}
        self._numbers: set[int] = set()  # of frontends, until released
        self._ready: Ready | None = None
        self.malformed_frames = 0
        self._waker = Waker()
        self._farewell: Bye | None = None
        self._thread = threading.Thread(target=self._run, name="mainspring-io", daemon=True)
        self._thread.start()

    def announce(self, ready: Ready) -> None:
        """Begin to answer: every accepted Hello with `ready`."""
        self._ready = ready
        self._waker.wake()

    def stop(self, reason: str = "") -> None:
        """Send what is queued, say goodbye to every frontend, and close."""
        self._farewell = Bye(reason)
        self._waker.wake()
        self._thread.join(timeout=5)

    def send(self, frontend: int, message: Any, tensors: Sequence[np.ndarray] = ()) -> None:
        """Queue a message. To a frontend that has left it goes nowhere."""
        self._outbox.put((frontend, message, tensors))
        self._waker.wake()

    def release(self, frontend: int) -> None:
        """The number of a frontend that has left may be given to another: all that was sent to it lies before this."""
        self._outbox.put((frontend, None, ()))
        self._waker.wake()

    def receive(self, wait: bool) -> list[Event]:
        """All that has come in; with `wait`, at least one."""
        events: list[Event] = []
        with contextlib.suppress(Empty):
            if wait:
                events.append(self._inbox.get(timeout=1.0))  # bounded, so that signals are seen
            while True:
                events.append(self._inbox.get_nowait())
        return events

    # ------------------------------------------------------------------ the I/O thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:  # without this thread the core would be deaf; whoever waits for it sees it end
            logger.critical("the I/O thread failed", exc_info=True)
            os._exit(1)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        if self._parent and self._parent.fd is not None:
            poller.register(self._parent.fd, zmq.POLLIN)
        while True:
            if any(p.backlog for p in self._peers.values()):
                timeout: int | None = _BACKLOG_POLL_MS
            else:
                timeout = _PARENT_POLL_MS if self._parent and self._parent.fd is None else None
            poller.poll(timeout)
            if self._parent and self._parent.ended() and self._on_parent_end:
                self._on_parent_end()
            self._waker.clear()
            if self._ready is not None:
                poller.register(self._router, zmq.POLLIN)
                self._receive_all()
            self._send_all()
            if self._farewell is not None and self._outbox.empty():
                for frontend in list(self._peers):
                    self._send(frontend, codec.encode(self._farewell, self._instance_id, self._epoch))
                self._router.close(linger=500)
                self._context.term()
                return

    def _receive_all(self) -> None:
        while True:
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._handle(identity.bytes, [f.buffer for f in frames])

    def _handle(self, identity: bytes, frames: list[Any]) -> None:
        try:
            envelope = codec.decode(frames)
            if isinstance(envelope.message, Hello):
                self._greet(identity, envelope.message)
                return
            frontend = self._frontends.get(identity)
            if frontend is None or (envelope.instance_id, envelope.epoch) != (self._instance_id, self._epoch):
                raise ProtocolError("a frame from no session of this core")
            self._inbox.put(Event(frontend, envelope.message, envelope.tensors))
            if isinstance(envelope.message, Bye):
                self._forget(frontend)
        except MainspringError as error:
            self.malformed_frames += 1
            logger.debug("dropped a frame: %s", error)
            if identity not in self._frontends:
                self._reply(identity, Refused(wire_name(error), str(error)))

    def _greet(self, identity: bytes, hello: Hello) -> None:
        assert self._ready is not None
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"this core speaks protocol version {PROTOCOL_VERSION}, the frontend {hello.protocol_version}"
            )
        if not hmac.compare_digest(hello.token, self._token):
            raise ProtocolError("the session token is wrong")
        if not 0 < hello.weight < math.inf:
            raise ProtocolError(f"weight is {hello.weight}; it must be above 0 and finite")
        if identity in self._frontends:
            raise ProtocolError("a second Hello on one connection")
        frontend = next(i for i in range(len(self._numbers) + 1) if i not in self._numbers)
        self._numbers.add(frontend)
        self._peers[frontend] = _Peer(identity, deque())
        self._frontends[identity] = frontend
        self._inbox.put(Event(frontend, hello, ()))
        self._reply(identity, self._ready)

    def _reply(self, identity: bytes, message: Any) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([identity, *codec.encode(message, self._instance_id, self._epoch)], zmq.NOBLOCK)

    def _send_all(self) -> None:
        for frontend, peer in list(self._peers.items()):
            while peer.backlog and self._send_now(frontend, peer.backlog[0]):
                peer.backlog.popleft()
        with contextlib.suppress(Empty):
            while True:
                frontend, message, tensors = self._outbox.get_nowait()
                if message is None:
                    self._numbers.discard(frontend)
                    continue
                self._send(frontend, codec.encode(message, self._instance_id, self._epoch, tensors))

    def _send(self, frontend: int, frames: list[Any]) -> None:
        peer = self._peers.get(frontend)
        if peer is not None and (peer.backlog or not self._send_now(frontend, frames)):
            peer.backlog.append(frames)

    def _send_now(self, frontend: int, frames: list[Any]) -> bool:
        """False: the pipe is full. A peer that is gone is forgotten, and its frames with it."""
        peer = self._peers.get(frontend)
        if peer is None:
            return True
        try:
            self._router.send_multipart([peer.identity, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            self._inbox.put(Event(frontend, Bye("the connection is gone"), ()))
            self._forget(frontend)
        return True

    def _forget(self, frontend: int) -> None:
        peer = self._peers.pop(frontend, None)
        if peer is not None:
            peer.backlog.clear()
            del self._frontends[peer.identity]
