"""The core's side of the protocol.

One I/O thread owns the ROUTER sockets. It decodes and encodes messages while the main thread computes (torch releases
the interpreter lock). Two queues connect the threads. The inbox is bounded: if the main thread does not keep up,
libzmq's queues fill, and then the senders wait. libzmq reads from all peers in turn, so one frontend's flood does not
delay the others.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
from zmq.utils import z85

from . import codec
from .config import ServiceConfig
from .errors import (
    ConnectError,
    MainspringError,
    NotPermittedError,
    OverloadedError,
    ProtocolError,
    wire_name,
    wire_text,
)
from .keys import AllowedKey, load_allowed
from .messages import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Bye,
    CoreStatus,
    Fault,
    Hello,
    Measured,
    Probe,
    Ready,
    Refused,
    Status,
    StatusCall,
    UtilityCall,
)
from .transport import Endpoints, ProcessWatch, Socket, Waker, bind_router

logger = logging.getLogger(__name__)

MAX_INBOX = 1024  # messages in the inbox
MAX_INBOX_BYTES = 64 << 20
MAX_BACKLOG_BYTES = 16 << 20  # unread messages of one frontend, above which it is disconnected
MAX_EARLY = 1000  # Hellos kept while the model loads
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0  # range of the weight that a frontend may ask for
MAX_BODY_BYTES = 16 << 20  # body of a frontend's message: small, because it may grow many times when it is decoded
SESSION_BYTES = 16  # length of a session id
FRAMES_A_TURN = 256  # messages received from one socket before others get their turn
FAREWELL_MS = 500  # longest wait for the last frames to be sent before the sockets are closed
_BACKLOG_POLL_MS = 10  # interval between attempts to send to a slow frontend
_PARENT_POLL_MS = 500  # interval between checks of the parent process, if the kernel has no pidfd
_FAREWELL_S = 1.0  # seconds between attempts to send Bye to a frontend that was disconnected
_PROBES_S = (0.05, 1.0)  # seconds after a lost connection at which probes are sent to find out whose it was

Origin = tuple[int, bytes]  # number of the socket, routing id of the peer


class Credit(NamedTuple):
    """Made by the server, not received: whether a frontend reads its messages."""

    given: bool


class Event(NamedTuple):
    """A received `message` of a `frontend`. Its first one is a `Hello`, its last one a `Bye`."""

    frontend: int
    message: Any
    tensors: Sequence[codec.Frame] = ()
    admin: bool = False  # of a Hello
    size: int = 0


class _Peer:
    """A connected frontend."""

    def __init__(self, origin: Origin, number: int, hello: Hello) -> None:
        self.origin = origin
        self.number = number
        self.session = hello.session
        self.name = hello.client_name
        self.backlog: deque[list[Any]] = deque()  # messages that wait because libzmq's queue is full
        self.backlog_bytes = 0
        self.slow_since: float | None = None
        self.capabilities: list[str] = []


class CoreServer:
    """Listens and watches its parent from the start on. Before `announce` it only answers status calls.

    Args:
        endpoints: where to listen, and which frontends may connect.
        instance_id, epoch: written in every header; frames with others are dropped.
        status: the answer to status calls until the first `publish`.
        parent: the process to watch. When it ends, the I/O thread calls `on_parent_end`.

    Raises:
        MainspringError: an address can't be opened.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        instance_id: bytes,
        epoch: int,
        status: CoreStatus,
        service: ServiceConfig,
        parent: ProcessWatch | None = None,
        on_parent_end: Callable[[], None] | None = None,
    ) -> None:
        self._endpoints, self._service = endpoints, service
        self._instance_id, self._epoch, self._status = instance_id, epoch, Status(status)
        self._own_key = zmq.curve_public(endpoints.secret_key.encode()).decode() if endpoints.secret_key else ""
        self._parent, self._on_parent_end = parent, on_parent_end
        self._inbox: SimpleQueue[Event] = SimpleQueue()
        self._put = self._put_bytes = self._taken = self._taken_bytes = 0  # counters, each written by one thread only
        self._stalled = False  # the inbox is full: read nothing until the main thread has taken messages
        self._outbox: SimpleQueue[tuple[int, Any, Sequence[np.ndarray]]] = SimpleQueue()
        self._peers: dict[int, _Peer] = {}
        self._by_origin: dict[Origin, _Peer] = {}
        self._by_session: dict[bytes, _Peer] = {}
        self._numbers: set[int] = set()  # frontends' numbers in use, until released
        self._early: dict[Origin, list[zmq.Frame]] = {}  # Hellos received while the model loads
        self._dropped: dict[Origin, Bye] = {}  # disconnected frontends that have not got their Bye so far
        self._next_farewell = 0.0
        self._probes: list[float] = []
        self._ready: Ready | None = None
        self.malformed_frames = 0
        self._waker = Waker()
        self._farewell: Bye | None = None
        self._stopping = False
        self._context = zmq.Context()
        self._zap: Socket | None = None  # where libzmq asks whether a key is allowed
        if endpoints.secret_key:
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind("inproc://zeromq.zap.01")
        self._routers = [
            bind_router(self._context, address, service.frontend_timeout, endpoints.secret_key)
            for address in (endpoints.address, endpoints.admin_address)
            if address
        ]
        self._monitors = [router.get_monitor_socket(zmq.EVENT_DISCONNECTED) for router in self._routers]
        self._thread = threading.Thread(target=self._run, name="mainspring-io", daemon=True)
        self._thread.start()

    def announce(self, ready: Ready) -> None:
        """Answer every accepted Hello with `ready` from now on, and send it to frontends that have got another one."""
        before, self._ready = self._ready, ready
        for number in list(self._numbers) if before is not None else ():
            self.send(number, ready)
        self._waker.wake()

    def publish(self, status: CoreStatus, measured: Measured = Measured()) -> None:  # noqa: B008  # frozen
        """Set the answer to status calls."""
        self._status = Status(status, measured)

    def stop(self, reason: str | None) -> None:
        """Send all queued messages and a Bye to every frontend, then close. Without a reason, close at once."""
        self._farewell = None if reason is None else Bye(reason)
        self._stopping = True
        self._waker.wake()
        self._thread.join(timeout=5)

    def send(self, frontend: int, message: Any, tensors: Sequence[np.ndarray] = ()) -> None:
        """Queue a message. A message to a frontend that has left is dropped."""
        self._outbox.put((frontend, message, tensors))
        self._waker.wake()

    def release(self, frontend: int) -> None:
        """Let the number of a frontend that has left be used again, after all messages queued for it so far."""
        self._outbox.put((frontend, None, ()))
        self._waker.wake()

    def receive(self, wait: bool) -> list[Event]:
        """The messages in the inbox. With `wait`, wait up to a second for the first."""
        events: list[Event] = []
        with contextlib.suppress(Empty):
            if wait:
                events.append(self._inbox.get(timeout=1.0))  # bounded, so that Python can run signal handlers
            while len(events) < MAX_INBOX:
                events.append(self._inbox.get_nowait())
        if events:
            self._taken += len(events)
            self._taken_bytes += sum(event.size for event in events)
            if self._stalled:
                self._waker.wake()
        return events

    # ------------------------------------------------------------------ the I/O thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:  # without this thread the core is unreachable: end it, so that the supervisor restarts it
            logger.critical("the I/O thread failed", exc_info=True)
            os._exit(1)

    def _serve(self) -> None:
        poller = zmq.Poller()
        parent_fd = self._parent.fd if self._parent else None
        for one in (self._waker.fd, *self._monitors, *([parent_fd] if parent_fd is not None else []), self._zap):
            if one is not None:
                poller.register(one, zmq.POLLIN)
        more = False
        while True:
            self._stalled = (
                True  # set before the test for room, so that the main thread wakes us if it makes room in between
            )
            self._stalled = not self._has_room
            for router in self._routers:
                poller.register(router, 0 if self._stalled else zmq.POLLIN)
            poller.poll(0 if more else self._patience())
            if self._parent and self._parent.ended() and self._on_parent_end:
                self._on_parent_end()
            self._waker.clear()
            if self._stopping and self._farewell is None:
                return self._close(0)
            if self._zap is not None:
                self._authenticate(self._zap)
            self._watch_connections()
            if self._early and self._ready is not None:
                early, self._early = self._early, {}
                self._probes = [time.monotonic()]  # some may have left meanwhile
                for origin, frames in early.items():
                    self._take(origin, frames)
            more = self._receive_some()
            self._send_all()
            self._look_after_slow_ones()
            if self._farewell is not None and self._outbox.empty():
                for peer in list(self._peers.values()):
                    self._send(peer, codec.encode(self._farewell, self._instance_id, self._epoch))
                return self._close(FAREWELL_MS)

    def _close(self, linger_ms: int) -> None:
        for router, monitor in zip(self._routers, self._monitors, strict=True):
            router.disable_monitor()
            monitor.close(linger=0)
            router.close(linger=linger_ms)
        if self._zap is not None:
            self._zap.close()
        self._context.term()

    def _patience(self) -> int | None:
        """Milliseconds until the next thing to do; None: wait for an event."""
        waits = [_PARENT_POLL_MS] if self._parent and self._parent.fd is None else []
        if any(p.backlog for p in self._peers.values()):
            waits.append(_BACKLOG_POLL_MS)
        now = time.monotonic()
        due = [*self._probes, *([self._next_farewell] if self._dropped else [])]
        waits += [max(1, math.ceil((at - now) * 1000)) for at in due]
        return min(waits, default=None)

    @property
    def _has_room(self) -> bool:
        return self._put - self._taken < MAX_INBOX and self._put_bytes - self._taken_bytes < MAX_INBOX_BYTES

    def _hand_in(self, event: Event) -> None:
        self._put += 1
        self._put_bytes += event.size
        self._inbox.put(event)

    # ------------------------------------------------------------------ receiving

    def _receive_some(self) -> bool:
        """Receive a bounded number of messages from each socket. Returns whether there may be more."""
        more = False
        for number, router in enumerate(self._routers):
            left = FRAMES_A_TURN
            while left and self._has_room:
                try:
                    identity, *frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                left -= 1
                self._take((number, identity.bytes), frames)
            more = more or not left
        return more

    def _take(self, origin: Origin, frames: list[zmq.Frame]) -> None:
        """Handle a message. A `MainspringError` is sent back to its sender."""
        try:
            self._handle(origin, frames)
        except MainspringError as error:
            self.malformed_frames += 1
            logger.debug("dropped a frame: %s", error)
            answer = Fault if origin in self._by_origin else Refused
            self._reply(origin, answer(wire_name(error), wire_text(error)))

    def _handle(self, origin: Origin, frames: list[zmq.Frame]) -> None:
        if len(frames) > 1 and len(frames[1]) > MAX_BODY_BYTES:
            raise ProtocolError(f"a body of {len(frames[1])} bytes; the limit is {MAX_BODY_BYTES}")
        envelope = codec.decode([f.buffer for f in frames])
        message = envelope.message
        if isinstance(message, Hello):
            if self._ready is not None:
                self._greet(origin, message, frames[0], self._ready)
            elif len(self._early) < MAX_EARLY:
                self._early[origin] = frames
            else:
                raise OverloadedError(f"{MAX_EARLY} frontends wait for the model to load: connect again later")
            return
        if isinstance(message, StatusCall):
            self._admit(frames[0], message.token)
            core = msgspec.structs.replace(self._status.core, malformed_frames=self.malformed_frames)
            self._reply(origin, Status(core, self._status.measured))
            return
        peer = self._by_origin.get(origin)
        if peer is None or (envelope.instance_id, envelope.epoch) != (self._instance_id, self._epoch):
            raise ProtocolError("a frame from no session of this core")
        if not isinstance(message, (AddRequest, Abort, UtilityCall, Bye)):
            raise ProtocolError(f"{type(message).__name__} is not for a core")
        self._hand_in(Event(peer.number, message, envelope.tensors, size=sum(map(len, frames))))
        if isinstance(message, Bye):
            self._forget(peer)

    def _greet(self, origin: Origin, hello: Hello, frame: zmq.Frame, ready: Ready) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"this core speaks protocol version {PROTOCOL_VERSION}, the frontend {hello.protocol_version}: install "
                "the same version of Mainspring on both sides"
            )
        key = self._admit(frame, hello.token)
        limit = key.weight if key else MAX_WEIGHT
        if not MIN_WEIGHT <= hello.weight < math.inf:
            raise ProtocolError(f"weight is {hello.weight}; it must be at least {MIN_WEIGHT} and finite")
        if len(hello.session) not in (0, SESSION_BYTES):
            raise ProtocolError(
                f"session has {len(hello.session)} bytes; it must have {SESSION_BYTES}, drawn at random"
            )
        if origin in self._by_origin:
            raise ProtocolError("a second Hello on one connection")
        if hello.session and (before := self._by_session.get(hello.session)):
            self._leave(before, "the same session connected anew")
        number = next(i for i in range(len(self._numbers) + 1) if i not in self._numbers)
        self._numbers.add(number)
        peer = _Peer(origin, number, hello)
        self._peers[number] = self._by_origin[origin] = peer
        if hello.session:
            self._by_session[hello.session] = peer
        admin = key.admin if key else bool(self._endpoints.token or origin[0])
        name = key.name if key else hello.client_name
        greeted = msgspec.structs.replace(
            hello,
            weight=min(hello.weight, limit),
            client_name=name[:100],
            session=hello.session or os.urandom(SESSION_BYTES),
        )
        self._hand_in(Event(number, greeted, admin=admin))
        peer.capabilities = [*ready.capabilities, *(["admin"] if admin else [])]
        ready = msgspec.structs.replace(ready, capabilities=peer.capabilities)
        self._send(peer, codec.encode(ready, self._instance_id, self._epoch))  # the peer may be gone already

    # ------------------------------------------------------------------ access control

    def _admit(self, frame: zmq.Frame, token: bytes) -> AllowedKey | None:
        """Check the sender of a frame: its user on a Unix socket, its token for an embedded core, its key over tcp.
        Returns the entry in the list of allowed keys, if there is a list."""
        if not hmac.compare_digest(token, self._endpoints.token):
            raise ConnectError("the session token is wrong: this core belongs to another process")
        if self._zap is not None:
            key = self._allowed(str(frame.get("User-Id")).encode())
            if key is None:
                raise NotPermittedError("this key is not among the allowed keys any more")
            return key
        with contextlib.suppress(zmq.ZMQError):
            where, *ids = str(frame.get("Peer-Address")).rsplit(":", 3)
            if where == "localhost" and len(ids) == 3 and int(ids[0]) not in (os.getuid(), 0):
                raise NotPermittedError(
                    f"user {ids[0]} may not use this core, which belongs to user {os.getuid()}: connect over tcp with "
                    "a key that its owner allows"
                )
        return None

    def _allowed(self, key: bytes) -> AllowedKey | None:
        if key.decode() == self._own_key:  # the daemon itself, for a status call
            return AllowedKey("daemon")
        return load_allowed(self._endpoints.allowed_keys).get(key.decode())

    def _authenticate(self, zap: Socket) -> None:
        """Answer libzmq's authentication request for a public key (RFC 27, ZAP)."""
        with contextlib.suppress(zmq.Again):
            version, call, _, _, _, _, *credentials = zap.recv_multipart(zmq.NOBLOCK)
            key = z85.encode(credentials[0]) if credentials else b""
            allowed = False
            try:
                allowed = self._allowed(key) is not None
            except MainspringError as error:
                logger.error("nobody is let in: %s", error)
            if not allowed:
                logger.warning("refused a connection with the key %s", key.decode())
            code, text = (b"200", b"OK") if allowed else (b"400", b"unknown key")
            zap.send_multipart([version, call, code, text, key if allowed else b"", b""])

    # ------------------------------------------------------------------ sending

    def _reply(self, origin: Origin, message: Any) -> None:
        """Send a message to any peer. If it can't be sent at once, it is dropped."""
        with contextlib.suppress(zmq.ZMQError):
            frames = codec.encode(message, self._instance_id, self._epoch)
            self._routers[origin[0]].send_multipart([origin[1], *frames], zmq.NOBLOCK)

    def _send_all(self) -> None:
        for peer in [peer for peer in self._peers.values() if peer.backlog]:
            while peer.backlog and self._send_now(peer, peer.backlog[0]):
                if peer.backlog:  # empty if the peer is gone
                    peer.backlog_bytes -= _size(peer.backlog.popleft())
            if not peer.backlog and peer.number in self._peers:
                peer.slow_since = None
                self._hand_in(Event(peer.number, Credit(True)))
        with contextlib.suppress(Empty):
            while True:
                number, message, tensors = self._outbox.get_nowait()
                if message is None:
                    self._numbers.discard(number)
                elif (to := self._peers.get(number)) is not None:
                    if isinstance(message, Ready):
                        message = msgspec.structs.replace(message, capabilities=to.capabilities)
                    self._send(to, codec.encode(message, self._instance_id, self._epoch, tensors))

    def _send(self, peer: _Peer, frames: list[Any]) -> None:
        if not peer.backlog and self._send_now(peer, frames):
            return
        peer.backlog.append(frames)
        peer.backlog_bytes += _size(frames)
        if peer.slow_since is None:
            peer.slow_since = time.monotonic()
            self._hand_in(Event(peer.number, Credit(False)))

    def _send_now(self, peer: _Peer, frames: list[Any]) -> bool:
        """False if libzmq's queue is full. A peer that is gone is removed, and its frames are dropped."""
        try:
            self._routers[peer.origin[0]].send_multipart([peer.origin[1], *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            self._leave(peer, "the connection is gone")
        return True

    # ------------------------------------------------------------------ lost and slow frontends

    def _watch_connections(self) -> None:
        """Send probes to all peers after a lost connection, because libzmq does not report which peer was lost."""
        now = time.monotonic()
        for monitor in self._monitors:
            with contextlib.suppress(zmq.Again):
                while True:
                    monitor.recv_multipart(zmq.NOBLOCK)
                    soonest = min(
                        [*self._probes, now + _PROBES_S[0]]
                    )  # further disconnections do not delay the first probe
                    self._probes = [soonest, now + _PROBES_S[1]]
        if any(at <= now for at in self._probes):
            self._probes = [at for at in self._probes if at > now]
            probe = codec.encode(Probe(), self._instance_id, self._epoch)
            for peer in list(self._peers.values()):
                self._send_now(peer, probe)

    def _look_after_slow_ones(self) -> None:
        now, limit = time.monotonic(), self._service.slow_frontend_timeout
        for peer in [peer for peer in self._peers.values() if peer.slow_since is not None]:
            if peer.backlog_bytes > MAX_BACKLOG_BYTES or now - (peer.slow_since or now) > limit:
                reason = f"left {peer.backlog_bytes} bytes unread for {now - (peer.slow_since or now):.0f} s"
                logger.warning("dropped the frontend %r, which %s", peer.name, reason)
                self._leave(peer, reason)
                self._dropped[peer.origin] = Bye(f"this frontend was disconnected: it {reason}")
        if self._dropped and now >= self._next_farewell:
            self._next_farewell = now + _FAREWELL_S
            for origin, bye in list(self._dropped.items()):
                try:
                    frames = codec.encode(bye, self._instance_id, self._epoch)
                    self._routers[origin[0]].send_multipart([origin[1], *frames], zmq.NOBLOCK)
                except zmq.Again:
                    continue
                except zmq.ZMQError:
                    pass
                del self._dropped[origin]

    def _leave(self, peer: _Peer, reason: str) -> None:
        """End a session from the core's side."""
        self._hand_in(Event(peer.number, Bye(reason)))
        self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        if self._peers.pop(peer.number, None) is not None:
            peer.backlog.clear()
            del self._by_origin[peer.origin]
            if self._by_session.get(peer.session) is peer:
                del self._by_session[peer.session]


def _size(frames: list[Any]) -> int:
    """Bytes of memory that a waiting message takes, with the overhead of Python and libzmq."""
    return 300 + sum(len(frame) if isinstance(frame, bytes) else frame.nbytes for frame in frames)
