"""The session of one frontend, which outlives cores and connections. Both clients are built on it.

A ledger holds all requests in flight. When the connection is lost (the core died or was restarted, or the network
broke), a new socket sends Hello under the same session, and then the whole ledger again, with the tokens that have come
so far. A core that is only silent is not taken for lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from . import codec
from .codec import Array
from .config import EngineConfig
from .errors import (
    ConnectError,
    EngineDeadError,
    InvalidArgumentError,
    MainspringError,
    OverloadedError,
    ProtocolError,
    RequestFailedError,
    check_process,
    from_wire,
)
from .keys import client_keys
from .messages import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Bye,
    CoreStatus,
    Fault,
    Finished,
    Hello,
    ModelFacts,
    Outputs,
    Ready,
    Refused,
    Status,
    StatusCall,
    Tensor,
    UtilityCall,
    UtilityResult,
)
from .transport import ipc_path, lock_holder, make_dealer, readable

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0  # longest wait for the first answer of a daemon
RECONNECT_SECONDS = 60.0  # longest wait for a lost daemon to answer again
LOAD_SECONDS = 1800.0  # longest wait for a core that listens but still loads its model
SEND_ONCE = frozenset({"collective_rpc"})  # methods with unknown side effects, never sent to a second core
CLOSE_MS = 100  # longest wait for the last frames to be sent before the socket is closed
LOST_POLL_SECONDS = 0.1  # interval between two attempts to reconnect

_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSALS
_UNLISTED = "it does not know our key; have it listed with mainspring keys allow"


class CoreOwner(Protocol):
    """The part of a supervisor or a daemon's address that a connection uses."""

    address: str
    token: bytes

    def dead_error(self) -> EngineDeadError | None:
        """The error to raise if no further core will start; None otherwise."""

    def close(self) -> None:
        """Called when the connection is closed."""


class RemoteCore:
    """The core of a daemon. A connection does not end it."""

    token = b""

    def __init__(self, address: str) -> None:
        ipc_path(address)
        self.address = address

    def dead_error(self) -> None:
        return None

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _LedgerEntry:
    """A request in flight."""

    request: AddRequest
    tensors: list[np.ndarray]
    tokens: list[int]  # all output tokens so far
    began: float
    sent: bool
    aborted: bool = False


@dataclass(slots=True)
class _Call:
    """An unanswered utility call."""

    call: UtilityCall
    arrays: list[np.ndarray]
    sent: bool = False


class Connection:
    """Not thread-safe: clients hold a lock, or stay in one event loop.

    Args:
        core: the owner of the core, a daemon or the supervisor of an embedded core.
        key, server_key: for tcp: path of the own secret key, and the server's public key or its path.
        weight: the frontend's weight in fair sharing.
        name: shown by `mainspring status`.
        reconnect_timeout: seconds that a lost daemon has to answer again; after that the engine is dead.
        connect_timeout: seconds that a daemon has for its first answer.

    Raises:
        ConnectError: no daemon answers, or it refuses the key.
        MainspringError: the core refused the Hello with this error.
    """

    def __init__(
        self,
        core: CoreOwner,
        *,
        key: str | None = None,
        server_key: str | None = None,
        weight: float = 1.0,
        name: str = "",
        reconnect_timeout: float = RECONNECT_SECONDS,
        connect_timeout: float = CONNECT_SECONDS,
    ) -> None:
        self._core = core
        self._pid = os.getpid()
        self._keys = _keys(core.address, key, server_key)
        self._hello = Hello(PROTOCOL_VERSION, core.token, name or f"pid {self._pid}", weight, os.urandom(16))
        self._reconnect_timeout = reconnect_timeout
        self.outputs: deque[Outputs] = deque()
        self.results: dict[int, UtilityResult] = {}
        self.dropped_frames = 0
        self.reconnections = 0
        self._ledger: dict[int, _LedgerEntry] = {}
        self._calls: dict[int, _Call] = {}
        self._next_call = 0
        self._ready: Ready | None = None  # from the connected core; None while the connection is lost
        self._last_ready: Ready | None = None
        self._lost_at = time.monotonic()
        self._reached = False  # the ZeroMQ handshake of this socket succeeded
        self._lost = False
        self._opened_at = 0.0
        self.num_sockets = 0  # a new socket may get the file descriptors of the old one
        self._refused: MainspringError | None = None
        self._trouble = ""
        self._dead: EngineDeadError | None = None
        self.closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []  # the one in use, and its monitor
        self._end = weakref.finalize(self, _abandon, self._context, self._sockets, self._pid)
        self._open()
        try:
            self._wait_for_ready(connect_timeout)
        except BaseException:
            self._end()
            raise

    @classmethod
    def connect(cls, address: str, **options: Any) -> Self:
        """Connect to a daemon. `options` are the keyword arguments of the class."""
        return cls(RemoteCore(address), **options)

    def _wait_for_ready(self, connect_timeout: float) -> None:
        while self._ready is None:
            readable(self.fds, LOST_POLL_SECONDS)
            self.receive()
            if self._refused is not None:
                raise self._refused
            if (error := self._dead or self._core.dead_error()) is not None:
                raise error
            waited = time.monotonic() - self._lost_at
            if self._trouble == _UNLISTED:
                raise ConnectError(self._no_answer())
            starting = not self._trouble and (self._reached or lock_holder(self._core.address) is not None)
            if waited > (LOAD_SECONDS if starting else connect_timeout):
                raise ConnectError(self._no_answer())

    def _no_answer(self) -> str:
        address = self._core.address
        if self._trouble:
            return f"{address} did not let us in: {self._trouble}"
        if self._reached:
            return f"{address} is reached, but did not answer: check that it is a Mainspring daemon, and its log"
        return f"no daemon answers at {address}: start one with mainspring daemon --listen {address}"

    # ------------------------------------------------------------------ facts about the core

    @property
    def model(self) -> ModelFacts:
        assert self._last_ready is not None
        return self._last_ready.model

    @property
    def config(self) -> EngineConfig:
        """The configuration as the core completed it."""
        assert self._last_ready is not None
        return msgspec.json.decode(self._last_ready.config, type=EngineConfig)

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that become readable when something has changed; then call `receive` until it returns False. They
        change with a reconnection."""
        return () if self.closed else (int(self._socket.FD), int(self._monitor.FD))

    @property
    def poll_seconds(self) -> float | None:
        """Seconds after which to call `receive` even if no descriptor is readable; None: no limit."""
        return None if self._ready is not None or self.closed or self._dead else LOST_POLL_SECONDS

    # ------------------------------------------------------------------ sending

    def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = ()) -> None:
        self._check()
        copies = [tensor.copy() for tensor in tensors]  # because the caller may change the arrays
        began = time.monotonic() - request.age_s
        entry = _LedgerEntry(request, copies, list(request.output_token_ids), began, request.resumed)
        codec.encode_arguments(
            "add_request", request
        )  # raises for what can't be encoded, so that the ledger can always be sent again
        self._ledger[request.handle] = entry
        if self._ready is not None:
            self._send_entry(entry)

    def abort(self, handles: Sequence[int]) -> None:
        self._check()
        known = [handle for handle in handles if handle in self._ledger]
        for handle in known:
            self._ledger[handle].aborted = True
        if self._ready is not None:
            self._send(Abort(known))
        else:
            self._end_aborted()

    def start_call(self, method: str, args: Sequence[Any], arrays: Sequence[Array] = ()) -> int:
        """Send a utility call. Its result will be in `results` under the returned id. If the core dies before it
        answers, the call is sent to the next core, unless its method is in `SEND_ONCE`."""
        self._check()
        given = codec.encode_arguments(method, list(args))
        self._next_call += 1
        tensors = [Tensor(i, array.dtype, list(array.values.shape)) for i, array in enumerate(arrays)]
        call = UtilityCall(self._next_call, method, given, tensors)
        self._calls[self._next_call] = asked = _Call(call, [array.values for array in arrays])
        if self._ready is not None:
            self._send_call(asked)
        return self._next_call

    def _send_call(self, asked: _Call) -> None:
        """Send a call to the connected core. A call of a `SEND_ONCE` method that was sent before fails instead."""
        call = asked.call
        if not (asked.sent and call.method in SEND_ONCE):
            asked.sent = True
            self._send(call, asked.arrays)
            return
        text = f"the connection was lost before {call.method!r} was answered; it may have been done"
        self.results[call.call_id] = UtilityResult(call.call_id, error=RequestFailedError.__name__, error_text=text)
        del self._calls[call.call_id]

    def end_call(self, call_id: int) -> None:
        """Forget a call. If its answer still comes, it is dropped."""
        self._calls.pop(call_id, None)
        self.results.pop(call_id, None)

    def _send_entry(self, entry: _LedgerEntry) -> None:
        request = entry.request
        if entry.sent or entry.tokens:
            age = time.monotonic() - entry.began
            request = msgspec.structs.replace(request, output_token_ids=entry.tokens, age_s=age, resumed=True)
        entry.sent = True
        self._send(request, entry.tensors)

    def _send(self, message: Any, tensors: Sequence[np.ndarray] = ()) -> None:
        assert self._ready is not None
        self._put(codec.encode(message, self._ready.instance_id, self._ready.epoch, tensors), copy=not tensors)

    def _put(self, frames: Sequence[Any], copy: bool = True) -> None:
        """Send without waiting. libzmq queues any number of frames, except on a socket that the core has rejected: that
        one would block for ever, so the connection counts as lost."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy)
        except zmq.Again:
            self._lost = True

    # ------------------------------------------------------------------ receiving

    def receive(self) -> bool:
        """Process all frames that have arrived, without waiting, and reconnect if the connection is lost. Returns
        whether anything has changed."""
        self.check_process()
        changed = False
        while not self.closed and self._dead is None:
            self._lost = self._look_at_socket() or self._lost
            while (message := self._receive_one()) is not None:
                changed = True
                self._lost = self._take(message) or self._lost
            turned_away = self._ready is None and time.monotonic() - self._opened_at < LOST_POLL_SECONDS
            if not self._lost or turned_away:  # wait before the next attempt
                break
            self._reopen()
            changed = True
        if not self.closed and self._dead is None and self._ready is None:
            changed = self._give_up() or changed
        return changed

    def _take(self, message: Any) -> bool:
        """Process a message. Returns whether the connection is lost because of it."""
        match message:
            case Outputs(handles, token_ids):
                for handle, token in zip(handles, token_ids, strict=True):
                    if (entry := self._ledger.get(handle)) is not None:
                        entry.tokens.append(token)
                for finished in message.finished:
                    self._ledger.pop(finished.handle, None)
                self.outputs.append(message)
            case UtilityResult(call_id):
                if self._calls.pop(call_id, None) is not None:
                    self.results[call_id] = message
            case Ready():
                self._resume(message)
            case Refused():
                if self._ready is not None or message.error == OverloadedError.__name__:
                    return True  # the core has forgotten this session, or has no room just now
                self._refused = from_wire(message.error, message.reason)
            case Bye():
                logger.info("the core ended the session: %s", message.reason)
                self._trouble = message.reason
                return True
            case Fault():
                self.dropped_frames += 1
                logger.warning("the core dropped a message: %s: %s", message.error, message.error_text)
        return False

    def _receive_one(self) -> Any:
        """The next message of this session, or None."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            try:
                envelope = codec.decode([f.buffer for f in frames])
            except ProtocolError as error:
                self.dropped_frames += 1
                if self._ready is None:  # the answer to Hello is from another program or protocol version
                    self._refused = error
                continue
            ready = self._ready
            if ready is None or (envelope.instance_id, envelope.epoch) == (ready.instance_id, ready.epoch):
                return envelope.message
            self.dropped_frames += 1

    def _look_at_socket(self) -> bool:
        """Read libzmq's events of the connection. Returns whether it was lost."""
        lost = False
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return lost
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._reached, self._trouble = True, ""
            elif event == zmq.EVENT_DISCONNECTED:
                lost = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._trouble = _UNLISTED
            elif self._trouble != _UNLISTED:
                self._trouble = "the handshake failed; check that both sides use keys, and --server-key"

    # ------------------------------------------------------------------ reconnecting

    def _open(self) -> None:
        self._socket = make_dealer(self._context, self._keys)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._sockets[:] = self._socket, self._monitor
        self._socket.connect(self._core.address)
        self.num_sockets += 1
        self._opened_at = time.monotonic()
        self._reached = self._lost = False
        self._put(codec.encode(self._hello, codec.NO_INSTANCE, 0))

    def _reopen(self) -> None:
        if self._ready is not None or self._reached:  # a core was there until now
            self._lost_at = time.monotonic()
        if self._ready is not None:
            self._ready = None
            self._end_aborted()
        self._close_socket(0)
        self._open()

    def _resume(self, ready: Ready) -> None:
        before, again = self._last_ready, self._ready is not None
        self._ready = self._last_ready = ready
        self._trouble = ""
        if before is None or again:
            return
        if ready.model.fingerprint != before.model.fingerprint and ready.instance_id != before.instance_id:
            self._dead = EngineDeadError(
                f"the core at {self._core.address} came back with another model: start the engine anew"
            )
            return
        self.reconnections += 1
        logger.info("connected to epoch %d; %d requests are resumed", ready.epoch, len(self._ledger))
        for entry in self._ledger.values():
            self._send_entry(entry)
        for asked in list(self._calls.values()):
            self._send_call(asked)

    def _end_aborted(self) -> None:
        """End aborted requests here, instead of sending them again."""
        ended = [handle for handle, entry in self._ledger.items() if entry.aborted]
        if ended:
            for handle in ended:
                del self._ledger[handle]
            self.outputs.append(Outputs([], [], finished=[Finished(handle, "abort") for handle in ended]))

    def _give_up(self) -> bool:
        """Set `_dead` if a lost connection will not come back. Returns whether that is so."""
        if self._last_ready is None:
            return False  # see `_wait_for_ready`
        waited = time.monotonic() - self._lost_at
        self._dead = self._core.dead_error()
        if self._dead is None and self._refused is not None:
            self._dead = EngineDeadError(f"the core does not take us back: {self._refused}")
        patience = LOAD_SECONDS if self._reached else self._reconnect_timeout
        if self._dead is None and isinstance(self._core, RemoteCore) and waited > patience:
            why = f" ({self._trouble})" if self._trouble else ""
            self._dead = EngineDeadError(f"{self._core.address} has not answered for {waited:.0f} s{why}")
        return self._dead is not None

    # ------------------------------------------------------------------ closing

    def dead_error(self) -> EngineDeadError | None:
        """The error to raise, if there will be no further core."""
        return EngineDeadError("the engine was shut down") if self.closed else self._dead

    @property
    def is_mine(self) -> bool:
        """Whether this is the process that made the connection, not one forked from it."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        check_process(self._pid)

    def close(self) -> None:
        if self.closed or not self.is_mine:
            return
        self.closed = True
        if self._ready is not None:
            self._send(Bye("closed"))
        self._close_socket(CLOSE_MS if self._ready is not None else 0)
        self._end()
        self._core.close()

    def _check(self) -> None:
        self.check_process()
        if (error := self.dead_error()) is not None:
            raise error

    def _close_socket(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)


def _abandon(context: zmq.Context[zmq.Socket[bytes]], sockets: Sequence[zmq.Socket[bytes]], pid: int) -> None:
    """Close the sockets before the context, also if `close` was never called: a context that is collected while sockets
    are open would wait for ever."""
    if os.getpid() == pid:
        for socket in sockets:
            socket.close(linger=0)
        context.term()


def _keys(address: str, key: str | None, server_key: str | None) -> tuple[str, str, str] | None:
    if ipc_path(address) is None:
        return client_keys(key, server_key)
    if key is not None or server_key is not None:
        raise InvalidArgumentError(f"keys are for tcp, but the address is {address}: leave them out")
    return None


def result_of(answer: UtilityResult) -> Any:
    """The value of a utility call. Raises its error, if it has one."""
    if answer.error:
        raise from_wire(answer.error, answer.error_text)
    return codec.decode_value(answer.result)


def ask_status(
    address: str, timeout: float = 2.0, *, key: str | None = None, server_key: str | None = None
) -> CoreStatus:
    """The status of the core at `address`; see `ask`."""
    return ask(address, timeout, key=key, server_key=server_key).core


def ask(address: str, timeout: float = 2.0, *, key: str | None = None, server_key: str | None = None) -> Status:
    """The status of the core at `address`, also while its model loads, and its measurements.

    Raises:
        ConnectError: no answer came within `timeout` seconds.
    """
    with zmq.Context() as context:
        keys = _keys(address, key, server_key)
        socket = make_dealer(context, keys)
        try:
            socket.connect(address)
            with contextlib.suppress(zmq.Again):  # rejected already: no answer will come
                socket.send_multipart(codec.encode(StatusCall(), codec.NO_INSTANCE, 0), zmq.NOBLOCK)
            if socket.poll(int(timeout * 1000)):
                message = codec.decode(socket.recv_multipart()).message
                if isinstance(message, Status):
                    return message
                if isinstance(message, Refused):
                    raise from_wire(message.error, message.reason)
        finally:
            socket.close(linger=0)
    raise ConnectError(f"no daemon answers at {address}{', or it does not know our key' if keys else ''}")
