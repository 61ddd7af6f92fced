"""The core's side of the protocol.

One I/O thread owns the ROUTER sockets. It decodes and encodes messages while the main thread computes (torch releases
the interpreter lock). Two queues connect the threads. The inbox is bounded: if the main thread does not keep up,
libzmq's queues fill, and then the senders wait. libzmq reads from all peers in turn, so one frontend's flood does not
delay the others.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np
import zmq

from . import codec
from .access import Access
from .config import ServiceConfig
from .connection_limits import MONITORED, ConnectionLimits
from .errors import (
    InvalidRequestError,
    MainspringError,
    OverloadedError,
    ProtocolError,
    printable,
    wire_name,
    wire_text,
)
from .inbox import Credit, Event, Inbox, Undecoded
from .intake import FIRST_BYTES, FIRST_FRAME_BYTES, SMALL_BODY_BYTES, BodyLimits, Turns, first_integer, name_of_list
from .messages import (
    KINDS,
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Bye,
    CoreStatus,
    Fault,
    Hello,
    Listening,
    Measured,
    Probe,
    Ready,
    Refused,
    Status,
    StatusCall,
    UtilityCall,
    UtilityResult,
)
from .siblings import NewsReader
from .transport import MAX_MESSAGE_BYTES, MAX_PATH_BYTES, Endpoints, Waker, bind, bind_router, ipc_path, places

logger = logging.getLogger(__name__)

MAX_BACKLOG_BYTES = 16 << 20  # unread messages of one frontend, above which it is disconnected
MAX_EARLY = 1000  # Hellos kept while the model loads
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0  # range of the weight that a frontend may ask for
MAX_NAME = 100  # characters of a frontend's name
SESSION_BYTES = 16  # length of a session id
FRAMES_A_TURN = 256  # messages received from one socket before others get their turn
FAREWELL_MS = 500  # longest wait for the last frames to be sent before the sockets are closed
_BACKLOG_POLL_MS = 10  # interval between attempts to send to a slow frontend
_FAREWELL_S = 1.0  # seconds between attempts to send Bye to a frontend that was disconnected
_SOCKET_FILES_S = 1.0  # seconds between checks that the files of the Unix sockets exist
_PROBES_S = (0.05, 1.0)  # seconds after a lost connection at which probes are sent to find out whose it was

Origin = tuple[int, bytes]  # number of the socket, routing id of the peer


@dataclass(eq=False, slots=True)
class _Peer:
    """A connected frontend."""

    origin: Origin
    number: int
    session: bytes
    name: str
    admin: bool
    backlog: deque[list[Any]] = field(default_factory=deque)  # messages that wait because libzmq's queue is full
    backlog_bytes: int = 0
    slow_since: float | None = None


class CoreServer:
    """Listens from the start on. Before `announce` it only answers status calls.

    Args:
        endpoints: where to listen, and which frontends may connect.
        instance_id, epoch: written in every header; frames with others are dropped.
        status: the answer to status calls until the first `publish`.
        news_fd: where the supervisor's `News` come from; -1: nowhere.
        cores: of the group; a frontend is told of them in `Ready`.

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
        news_fd: int = -1,
        cores: Sequence[Listening] = (),
    ) -> None:
        self._endpoints, self._service = endpoints, service
        self._news, self._news_fd = NewsReader(news_fd) if news_fd >= 0 else None, news_fd
        self.cores = cores  # set before `announce`
        self.failed_start = ""  # as in `News`
        self._instance_id, self._epoch, self._status = instance_id, epoch, Status(status)
        self._inbox = Inbox()
        self._turns: Turns[list[zmq.Frame]] = Turns()
        self._decoded = 0  # bytes that the last message took
        self._stalled = False  # messages wait until the main thread has taken some, or has begun its next step
        self._outbox: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._peers: dict[int, _Peer] = {}
        self._by_origin: dict[Origin, _Peer] = {}
        self._numbers: set[int] = set()  # frontends' numbers in use, until released
        self._early: dict[Origin, list[zmq.Frame]] = {}  # Hellos received while the model loads
        self._dropped: dict[Origin, list[Any]] = {}  # disconnected frontends, and the Bye that they have not got so far
        self._next_farewell = 0.0
        self._probes: list[float] = []
        self._ready: Ready | None = None
        self._limits: BodyLimits | None = None  # set with the first `Ready`
        self.malformed_frames = 0
        self._waker = Waker()
        self._farewell: Bye | None = None
        self._stopping = False
        self._context = zmq.Context()
        self._access = Access(self._context, endpoints)
        self._addresses = [*filter(None, (endpoints.address, endpoints.admin_address))]
        # A connection over tcp may be an administrator's, and its frames hold weights.
        limited = not endpoints.token and ipc_path(endpoints.address) is not None
        self._frame_bytes = [FIRST_FRAME_BYTES if limited else MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES]  # by socket
        try:
            self._routers = [
                bind_router(
                    self._context, address, service.frontend_timeout, endpoints.secret_key, MONITORED, frame_bytes
                )
                for address, frame_bytes in zip(self._addresses, self._frame_bytes, strict=False)
            ]
        except BaseException:  # a context that is collected while sockets are open waits for ever
            self._context.destroy(linger=0)
            raise
        self._monitors = [router.get_monitor_socket(MONITORED) for router in self._routers]
        self._connections = ConnectionLimits(self._monitors)
        self._missing: set[str] = set()  # addresses whose socket file is gone and could not be made again
        self._next_check = time.monotonic() if ipc_path(endpoints.address) else math.inf
        self._thread = threading.Thread(target=self._run, name="mainspring-io", daemon=True)
        self._thread.start()

    def announce(self, ready: Ready) -> None:
        """Answer every accepted Hello with `ready` from now on, and send it to frontends that have got another one."""
        self._limits = BodyLimits(ready.model)
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

    def send(self, frontend: int, message: Any) -> None:
        """Queue a message. A message to a frontend that has left is dropped."""
        self._outbox.put((frontend, message))
        self._waker.wake()

    def release(self, frontend: int) -> None:
        """Let the number of a frontend that has left be used again, after all messages queued for it so far."""
        self._outbox.put((frontend, None))
        self._waker.wake()

    @property
    def messages_wait(self) -> np.ndarray:
        """int32 [1]: not 0 while messages wait, for a reader without the interpreter's lock."""
        return self._inbox.waits

    def receive(self, wait: bool) -> list[Event]:
        """The messages in the inbox. With `wait`, wait up to a second for the first."""
        self._turns.begin(wait)
        if self._stalled:
            self._waker.wake()
        events = self._inbox.take(wait)
        self._turns.idle = False
        if events and self._stalled:
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
        for one in (self._waker.fd, *self._monitors, self._access.zap, self._news_fd):
            if one not in (None, -1):
                poller.register(one, zmq.POLLIN)
        more = False
        while True:
            self._stalled = True  # set first, so that the main thread wakes us if it makes room meanwhile
            self._turns.renew()
            has_room = self._inbox.has_room and self._turns.may_receive
            self._stalled = not has_room or self._turns.next_turn is not None
            for router in self._routers:
                poller.register(router, zmq.POLLIN if has_room else 0)
            poller.poll(0 if more else self._patience())
            self._waker.clear()
            if self._stopping and self._farewell is None:
                return self._close(0)
            self._access.authenticate()
            self._read_news(poller)
            self._watch_connections()
            self._restore_socket_files()
            self._raise_frame_limit()
            if self._early and self._ready is not None:
                early, self._early = self._early, {}
                self._probes = [time.monotonic()]  # some may have left meanwhile
                for origin, frames in early.items():
                    self._take(origin, frames, _body_size(frames))
            more = self._receive_some()
            self._take_waiting()
            if self._turns.next_turn is not None:
                self._inbox.waits[0] = 1  # for the turn that begins with the next step
            self._send_all()
            self._look_after_slow_ones()
            if self._farewell is not None and self._outbox.empty():
                for peer in list(self._peers.values()):
                    self._send(peer, self._encode(self._farewell))
                return self._close(FAREWELL_MS)

    def _read_news(self, poller: zmq.Poller) -> None:
        if self._news is None:
            return
        if (news := self._news.read()) is None:  # the supervisor has ended, and this core will
            poller.unregister(self._news_fd)
            self._news = None
            return
        for one in news:
            self._inbox.put(Event(0, one))

    def _close(self, linger_ms: int) -> None:
        for router, monitor in zip(self._routers, self._monitors, strict=True):
            router.disable_monitor()
            monitor.close(linger=0)
            router.close(linger=linger_ms)
        if self._access.zap is not None:
            self._access.zap.close()
        self._context.term()

    def _patience(self) -> int | None:
        """Milliseconds until the next thing to do; None: wait for an event."""
        waits = [_BACKLOG_POLL_MS] if any(peer.backlog for peer in self._peers.values()) else []
        now = time.monotonic()
        due = [*self._probes, *([self._next_farewell] if self._dropped else []), self._next_check]
        due += [at for at in (self._connections.next_watch, self._turns.next_turn) if at is not None]
        waits += [max(1, math.ceil((at - now) * 1000)) for at in due if at < math.inf]
        return min(waits, default=None)

    # ------------------------------------------------------------------ receiving

    def _receive_some(self) -> bool:
        """Receive a bounded number of messages from each socket. Returns whether there may be more."""
        more = False
        for number, router in enumerate(self._routers):
            left = FRAMES_A_TURN
            while left and self._inbox.has_room and self._turns.may_receive:
                try:
                    identity, *frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                left -= 1
                origin = number, identity.bytes
                size = _body_size(frames)
                peer = self._by_origin.get(origin)
                if peer is None or not self._turns.must_wait(origin, size):
                    self._turns.spend(self._take(origin, frames, size))
                    continue
                if size > self._limit(peer, frames[0]):  # it is not going to be decoded
                    frames = [frames[0], zmq.Frame(bytes(frames[1].buffer[:FIRST_BYTES]))]
                self._turns.put(origin, size, _size(frames), frames)
            more = more or not left
        return more

    def _take_waiting(self) -> None:
        while self._inbox.has_room and (found := self._turns.take()) is not None:
            origin, size, frames = found
            self._turns.spend_large(self._take(origin, frames, size))

    def _take(self, origin: Origin, frames: list[zmq.Frame], size: int) -> int:
        """Handle a message with a body of `size` bytes. A `MainspringError` is sent back to its sender. Returns the
        bytes that were decoded."""
        self._decoded = 0
        try:
            self._handle(origin, frames, size)
        except MainspringError as error:
            self.malformed_frames += 1
            logger.debug("dropped a frame: %s", error)
            answer = Fault if origin in self._by_origin else Refused
            self._reply(origin, answer(wire_name(error), wire_text(error)))
        return self._decoded

    def _limit(self, peer: _Peer | None, header: zmq.Frame) -> int:
        """The largest body, in bytes, of a message with this header."""
        if peer is None or self._limits is None or len(header) < codec.HEADER_BYTES:
            return SMALL_BODY_BYTES
        return self._limits.of(codec.kind_of(header.buffer), peer.admin)

    def _handle(self, origin: Origin, frames: list[zmq.Frame], size: int) -> None:
        buffers = [frame.buffer for frame in frames]
        header = codec.read_header(buffers)
        peer, body = self._by_origin.get(origin), buffers[1]
        limit = self._limit(peer, frames[0])
        decoder = self._limits.decoder(header.kind, size) if self._limits is not None else None
        is_ours = (header.instance_id, header.epoch) == (self._instance_id, self._epoch)
        self._decoded = size if size <= limit else 0
        try:
            if size > limit:
                raise ProtocolError(f"a body of {size} bytes; the limit is {limit}")
            message = codec.read_body(header.kind, body, decoder)
        except ProtocolError as error:
            if peer is not None:
                self._turns.charge(origin, size)
            number = first_integer(body)
            what = name_of_list(str(error)) if size <= limit else "the request"
            if peer is None or not is_ours or number is None or what is None:
                raise
            if KINDS[header.kind] is AddRequest:
                reason = f"{what} is larger than this model can accept: {error}"
                self._inbox.put(Event(peer.number, Undecoded(number, reason)))
            elif KINDS[header.kind] is UtilityCall:
                name = InvalidRequestError.__name__
                self._send(peer, self._encode(UtilityResult(number, error=name, error_text=f"the call has {error}")))
            else:
                raise
            return
        if isinstance(message, Hello):
            self._connections.check(frames[0])
            if self._ready is not None:
                self._greet(origin, message, frames[0], self._ready)
            elif len(self._early) < MAX_EARLY:
                self._early[origin] = frames[:2]  # a Hello has no more
            else:
                raise OverloadedError(f"{MAX_EARLY} frontends wait for the model to load: connect again later")
            return
        if isinstance(message, StatusCall):
            self._access.admit(frames[0], message.token)
            core = msgspec.structs.replace(
                self._status.core,
                malformed_frames=self.malformed_frames,
                cores=places(self.cores, bool(origin[0]), self._status.core.core),
                failed_start=self.failed_start,
            )
            self._reply(origin, Status(core, self._status.measured))
            return
        if peer is None or not is_ours:
            raise ProtocolError("a frame from no session of this core")
        if not isinstance(message, (AddRequest, Abort, UtilityCall, Bye)):
            raise ProtocolError(f"{type(message).__name__} is not for a core")
        self._inbox.put(Event(peer.number, message, buffers[2:], size=sum(map(len, frames))))
        if isinstance(message, Bye):
            self._forget(peer)

    def _greet(self, origin: Origin, hello: Hello, frame: zmq.Frame, ready: Ready) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"this core speaks protocol version {PROTOCOL_VERSION}, the frontend {hello.protocol_version}: install "
                "the same version of Mainspring on both sides"
            )
        key = self._access.admit(frame, hello.token)
        if not MIN_WEIGHT <= hello.weight < math.inf:
            raise ProtocolError(f"weight is {hello.weight}; it must be at least {MIN_WEIGHT} and finite")
        if len(hello.session) not in (0, SESSION_BYTES):
            raise ProtocolError(
                f"session has {len(hello.session)} bytes; it must have {SESSION_BYTES}, drawn at random"
            )
        if origin in self._by_origin:
            raise ProtocolError("a second Hello on one connection")
        session = hello.session or os.urandom(SESSION_BYTES)
        if key and self._endpoints.secret_key:  # only connections with the same key are of the same session
            session = blake2b(session, key=str(frame.get("User-Id")).encode(), digest_size=SESSION_BYTES).digest()
        for before in [peer for peer in self._peers.values() if peer.session == session]:
            self._turn_out(before, "another connection took over its session")
        number = next(i for i in range(len(self._numbers) + 1) if i not in self._numbers)
        self._numbers.add(number)
        name = printable((key and key.name) or hello.client_name)[:MAX_NAME]
        admin = key.admin if key else bool(self._endpoints.token or origin[0])
        peer = self._peers[number] = self._by_origin[origin] = _Peer(origin, number, session, name, admin)
        weight = min(hello.weight, key.weight if key else MAX_WEIGHT)
        greeted = msgspec.structs.replace(hello, weight=weight, client_name=name, session=session)
        self._inbox.put(Event(number, greeted, admin=admin))
        self._send_ready(peer, ready)  # the peer may be gone already

    # ------------------------------------------------------------------ sending

    def _reply(self, origin: Origin, message: Any) -> None:
        """Send a message to any peer. If it can't be sent at once, it is dropped."""
        with contextlib.suppress(zmq.ZMQError):
            self._offer(origin, self._encode(message))

    def _encode(self, message: Any) -> list[Any]:
        return codec.encode(message, self._instance_id, self._epoch)

    def _offer(self, origin: Origin, frames: list[Any]) -> bool:
        """Give frames to libzmq. Returns False if its queue for this peer is full.

        Raises:
            zmq.ZMQError: the peer is gone.
        """
        try:
            self._routers[origin[0]].send_multipart([origin[1], *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _send_all(self) -> None:
        for peer in [peer for peer in self._peers.values() if peer.backlog]:
            while peer.backlog and self._send_now(peer, peer.backlog[0]):
                if peer.backlog:  # empty if the peer is gone
                    peer.backlog_bytes -= _size(peer.backlog.popleft())
            if not peer.backlog and peer.number in self._peers:
                peer.slow_since = None
                self._inbox.put(Event(peer.number, Credit(True)))
        with contextlib.suppress(Empty):
            while True:
                number, message = self._outbox.get_nowait()
                if message is None:
                    self._numbers.discard(number)
                elif (to := self._peers.get(number)) is not None:
                    if isinstance(message, Ready):
                        self._send_ready(to, message)
                    else:
                        self._send(to, self._encode(message))

    def _send_ready(self, peer: _Peer, ready: Ready) -> None:
        capabilities = ["admin"] if peer.admin else []
        socket = peer.origin[0]
        own = msgspec.structs.replace(
            ready,
            capabilities=capabilities,
            max_frame_bytes=self._frame_bytes[socket],
            cores=places(self.cores, bool(socket), ready.number),
        )
        self._send(peer, self._encode(own))

    def _send(self, peer: _Peer, frames: list[Any]) -> None:
        if not peer.backlog and self._send_now(peer, frames):
            return
        peer.backlog.append(frames)
        peer.backlog_bytes += _size(frames)
        if peer.slow_since is None:
            peer.slow_since = time.monotonic()
            self._inbox.put(Event(peer.number, Credit(False)))

    def _send_now(self, peer: _Peer, frames: list[Any]) -> bool:
        """Like `_offer`, but a peer that is gone is removed, and its frames are dropped."""
        try:
            return self._offer(peer.origin, frames)
        except zmq.ZMQError:
            self._leave(peer, "the connection is gone")
        return True

    # ------------------------------------------------------------------ lost and slow frontends

    def _watch_connections(self) -> None:
        """Send probes to all peers after a lost connection, because libzmq does not report which peer was lost."""
        now = time.monotonic()
        self._connections.watch()
        if self._connections.lost_one:
            self._connections.lost_one = False
            first = min([*self._probes, now + _PROBES_S[0]])  # not delayed by further disconnections
            self._probes = [first, now + _PROBES_S[1]]
        if any(at <= now for at in self._probes):
            self._probes = [at for at in self._probes if at > now]
            probe = self._encode(Probe())
            for peer in list(self._peers.values()):
                self._send_now(peer, probe)

    def _raise_frame_limit(self) -> None:
        """Listen anew if the model accepts larger frames than the socket. Open connections keep their limit."""
        if self._limits is None or self._limits.frame_bytes <= self._frame_bytes[0]:
            return
        self._frame_bytes[0] = self._limits.frame_bytes
        self._routers[0].setsockopt(zmq.MAXMSGSIZE, self._frame_bytes[0])
        try:
            self._listen_again(0)
        except (MainspringError, OSError) as error:
            logger.error("%s keeps its limit of %d bytes a frame: %s", self._addresses[0], FIRST_FRAME_BYTES, error)

    def _listen_again(self, number: int) -> None:
        """Make a listening Unix socket and its file anew. The file gets its name when `ConnectionLimits` knows the
        socket, because until then libzmq accepts any number of connections."""
        path = self._addresses[number].removeprefix("ipc://")
        hidden = os.path.join(os.path.dirname(path), secrets.token_hex(4))
        if len(os.fsencode(hidden)) > MAX_PATH_BYTES:
            hidden = path
        bind(self._routers[number], f"ipc://{hidden}")
        self._connections.watch()
        os.rename(hidden, path)

    def _restore_socket_files(self) -> None:
        """Bind an address again if its socket file was deleted. Connections over the deleted file remain."""
        if (now := time.monotonic()) < self._next_check:
            return
        self._next_check = now + _SOCKET_FILES_S
        for number, address in enumerate(self._addresses):
            if os.path.lexists(address.removeprefix("ipc://")):
                self._missing.discard(address)
                continue
            try:
                self._listen_again(number)
                logger.warning("the socket file of %s was deleted: it is made again", address)
            except (MainspringError, OSError) as error:
                if address not in self._missing:
                    self._missing.add(address)
                    logger.error("the socket file of %s was deleted and can't be made again: %s", address, error)

    def _look_after_slow_ones(self) -> None:
        now, limit = time.monotonic(), self._service.slow_frontend_timeout
        for peer in [peer for peer in self._peers.values() if peer.slow_since is not None]:
            if peer.backlog_bytes > MAX_BACKLOG_BYTES or now - (peer.slow_since or now) > limit:
                reason = f"left {peer.backlog_bytes} bytes unread for {now - (peer.slow_since or now):.0f} s"
                logger.warning("dropped the frontend %r, which %s", peer.name, reason)
                self._turn_out(peer, f"it {reason}")
        if self._dropped and now >= self._next_farewell:
            self._next_farewell = now + _FAREWELL_S
            for origin, bye in list(self._dropped.items()):
                with contextlib.suppress(zmq.ZMQError):
                    if not self._offer(origin, bye):
                        continue
                del self._dropped[origin]

    def _turn_out(self, peer: _Peer, reason: str) -> None:
        """End a session, and send a Bye as soon as there is room in the peer's queue."""
        self._leave(peer, reason)
        self._dropped[peer.origin] = self._encode(Bye(f"this frontend was disconnected: {reason}"))
        self._next_farewell = 0.0

    def _leave(self, peer: _Peer, reason: str) -> None:
        """End a session from the core's side."""
        self._inbox.put(Event(peer.number, Bye(reason)))
        self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        if self._peers.pop(peer.number, None) is not None:
            peer.backlog.clear()
            self._turns.forget(peer.origin)
            del self._by_origin[peer.origin]


def _body_size(frames: list[zmq.Frame]) -> int:
    return len(frames[1]) if len(frames) > 1 else 0


def _size(frames: list[Any]) -> int:
    """Bytes of memory that a waiting message takes, with the overhead of Python and libzmq."""
    return 300 + sum(len(frame) if isinstance(frame, bytes | zmq.Frame) else frame.nbytes for frame in frames)
