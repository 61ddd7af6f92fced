"""The session of one frontend, which outlives cores and connections. Both clients are built on it.

A ledger holds all requests in flight. When the connection is lost (the core died or was restarted, or the network
broke), a new socket sends Hello under the same session, and then the whole ledger again, with the tokens that have come
so far. A core that is only silent is not taken for lost.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from . import codec
from .codec import Array
from .config import EngineConfig
from .errors import (
    ConnectError,
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
    MainspringError,
    NotSupportedError,
    OverloadedError,
    ProtocolError,
    RequestFailedError,
    check_process,
    from_wire,
)
from .keys import client_keys
from .ledger import Entry, Ledger
from .link import UNLISTED, Link
from .media_messages import most_bytes
from .media_remote import Failed, RemoteMedia
from .messages import (
    MAX_ABORTED,
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Bye,
    CorePlace,
    Fault,
    Finished,
    Hello,
    MediaItem,
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
from .routing import check_rank
from .transport import address_at, ipc_path, lock_holder, make_dealer, readable

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0  # longest wait for the first answer of a daemon
RECONNECT_SECONDS = 60.0  # longest wait for a lost daemon to answer again
LOAD_SECONDS = 1800.0  # longest wait for a core that listens but still loads its model
# methods with unknown side effects, or for which a trainer waits; never sent to a second core
SEND_ONCE = frozenset({"collective_rpc", "init_weight_transfer_engine", "receive_weights"})
CLOSE_MS = 100  # longest wait for the last frames to be sent before the socket is closed
LOST_POLL_SECONDS = 0.1  # interval between two attempts to reconnect
HEADROOM_BYTES = 16 << 10  # that a body may grow until it is sent: the fields beside a call's arguments


class CoreOwner(Protocol):
    """What starts an embedded core again; see `EmbeddedCores`."""

    address: str
    token: bytes

    def dead_error(self) -> EngineDeadError | None:
        """The error to raise if no further core will start; None otherwise."""

    def close(self) -> None:
        """Called when the connection is closed."""


@dataclass(slots=True)
class _Call:
    """An unanswered utility call."""

    call: UtilityCall
    arrays: list[np.ndarray]
    since: float  # when it was asked, on the monotonic clock
    sent: bool = False


class Connection:
    """Not thread-safe: clients hold a lock, or stay in one event loop.

    Args:
        core: the owner of an embedded core, or the address of a daemon.
        key, server_key: for tcp: path of the own secret key, and the server's public key or its path.
        weight: the frontend's weight in fair sharing.
        name: shown by `mainspring status`.
        reconnect_timeout: seconds that a lost daemon has to answer again; after that the engine is dead.
        connect_timeout: seconds that a daemon has for its first answer.
        keys: instead of `key` and `server_key`: own public, own secret, and the server's public key.

    Raises:
        ConnectError: no daemon answers, or it refuses the key, or it has no room for a further connection.
        MainspringError: the core refused the Hello with this error.
    """

    def __init__(
        self,
        core: CoreOwner | str,
        *,
        key: str | None = None,
        server_key: str | None = None,
        weight: float = 1.0,
        name: str = "",
        reconnect_timeout: float = RECONNECT_SECONDS,
        connect_timeout: float = CONNECT_SECONDS,
        keys: tuple[str, str, str] | None = None,
    ) -> None:
        self._core = None if isinstance(core, str) else core  # None for a daemon
        self.address = core if isinstance(core, str) else core.address
        self._pid = os.getpid()
        token = self._core.token if self._core else b""
        self._hello = Hello(PROTOCOL_VERSION, token, name or f"pid {self._pid}", weight, os.urandom(16))
        self._reconnect_timeout = reconnect_timeout
        self.outputs: deque[Outputs] = deque()
        self.results: dict[int, UtilityResult] = {}
        self.dropped_frames = 0
        self.reconnections = 0
        self._ledger = Ledger()
        self._calls: dict[int, _Call] = {}
        self.call_ids = itertools.count(1)
        self.number = 0  # of the core, in its group
        self.cores: list[CorePlace] | None = None  # those that the core has told of, until somebody takes the list
        self.ready_at: float | None = None  # since when the core answers, on the monotonic clock; None: it does not
        self._ready: Ready | None = None  # from the connected core; None while the connection is lost
        self._last_ready: Ready | None = None
        self.lost_at = time.monotonic()  # when the core answered last, if it does not
        self._refused: MainspringError | None = None
        self.error: EngineDeadError | None = None  # the error to raise, if there will be no further core
        self.closed = False
        self._keys = keys or _keys(self.address, key, server_key)
        self.media: RemoteMedia | None = None  # what lets cores have the items of requests that are sent
        self._link = Link(self.address, self._keys)
        try:
            self._introduce()
            self._wait_for_ready(connect_timeout)
        except BaseException:
            self._link.close(0)
            raise

    def beside(self, number: int, address: str) -> Connection:
        """A connection to another core of the group, under the same session. Outputs and results of both come together.
        It is returned before the core has answered."""
        other = copy.copy(self)
        other.number, other.address = number, address
        other._ledger, other._calls, other._ready, other.ready_at, other.cores = Ledger(), {}, None, None, None
        other._refused = other.error = None
        other.closed, other.reconnections = False, -1  # its first connection counts as one
        other.lost_at = time.monotonic()
        other._link = Link(address, self._keys)
        other._introduce()
        return other

    def _wait_for_ready(self, connect_timeout: float) -> None:
        link = self._link
        self.receive()  # libzmq's descriptors do not tell of what came while Hello was sent
        while self._ready is None:
            readable(self.fds, LOST_POLL_SECONDS)
            self.receive()
            if (error := self._refused or self._owners_error()) is not None:
                raise error
            waited = time.monotonic() - self.lost_at
            starting = not link.trouble and (link.reached or lock_holder(self.address) is not None)
            if link.trouble == UNLISTED or waited > (LOAD_SECONDS if starting else connect_timeout):
                raise ConnectError(self._no_answer())

    def _no_answer(self) -> str:
        if self._link.trouble:
            return f"{self.address} did not let us in: {self._link.trouble}"
        if self._link.reached:
            return f"{self.address} is reached, but did not answer: check that it is a Mainspring daemon, and its log"
        return f"no daemon answers at {self.address}: start one with mainspring daemon --listen {self.address}"

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

    def open_media(self, failed: Failed) -> RemoteMedia:
        """A client of the media workers beside the core, which then gets to know of each request that is sent.

        Raises:
            NotSupportedError: there are none.
        """
        assert self._last_ready is not None
        addresses = [address_at(self.address, place) for place in self._last_ready.media]
        if not addresses:
            raise NotSupportedError(f"no media workers run beside the core at {self.address}: see media_workers")
        largest = most_bytes(self.config.multimodal_config)
        self.media = RemoteMedia(addresses, self._hello.token, self._keys, failed, largest)
        return self.media

    def fail_media(self, media: Sequence[MediaItem], error: MainspringError) -> None:
        """End the requests that wait for items that can't be delivered."""
        for handle, entry in list(self._ledger.items()):
            if entry.request.media == media and not entry.tokens:
                self._ledger.end(handle)
                if self._ready is not None:
                    self._send(Abort([handle]))
                ended = Finished(handle, "error", error=type(error).__name__, error_text=str(error))
                self.outputs.append(Outputs([], [], finished=[ended]))

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that become readable when something has changed; then call `receive` until it returns False. They
        change with a reconnection."""
        return self._link.fds

    @property
    def num_sockets(self) -> int:
        """Counts the reconnections that have replaced the descriptors. The new ones may have the old numbers."""
        return self._link.num_sockets

    @property
    def poll_seconds(self) -> float | None:
        """Seconds after which to call `receive` even if no descriptor is readable; None: no limit."""
        return None if self._ready is not None or self.error is not None else LOST_POLL_SECONDS

    # ------------------------------------------------------------------ sending

    def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = (), rank: int | None = None) -> None:
        check_rank(rank, (self.number,))
        self._check()
        given = codec.encode_arguments("add_request", request)  # raises for what could not be sent again
        self._check_sizes("the request", given, tensors)
        entry = self._ledger.add(request, tensors)
        self._send_entry(entry)

    def _send_entry(self, entry: Entry) -> None:
        if (ready := self._ready) is not None:
            self._gather(entry.message(ready.instance_id), entry.tensors)
            entry.sent_to = ready.instance_id, self.number, ready.epoch
            if entry.request.media and self.media is not None:
                self.media.sent(entry.request.media, self.number)

    def abort(self, handles: Sequence[int]) -> None:
        self._check()
        known = [handle for handle in handles if handle in self._ledger]
        for handle in known:
            self._ledger[handle].aborted = True
        if self._ready is not None:
            for start in range(0, len(known), MAX_ABORTED):
                self._gather(Abort(known[start : start + MAX_ABORTED]))
        else:
            self._end_aborted()

    def start_call(self, method: str, args: Sequence[Any], arrays: Sequence[Array] = ()) -> int:
        """Send a utility call. Its result will be in `results` under the returned id. If the core dies before it
        answers, the call is sent to the next core, unless its method is in `SEND_ONCE`."""
        self._check()
        given = codec.encode_arguments(method, list(args))
        self._check_sizes(f"the call of {method!r}", given, [array.values for array in arrays])
        tensors = [Tensor(i, array.dtype, list(array.values.shape)) for i, array in enumerate(arrays)]
        call = UtilityCall(next(self.call_ids), method, given, tensors)
        self._calls[call.call_id] = asked = _Call(call, [array.values for array in arrays], time.monotonic())
        if self._ready is not None:
            self._send_call(asked)
        return call.call_id

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

    def _gather(self, message: Any, tensors: Sequence[np.ndarray] = ()) -> None:
        assert self._ready is not None
        self._link.gather(codec.encode(message, self._ready.instance_id, self._ready.epoch, tensors), copy=not tensors)

    def _send(self, message: Any, tensors: Sequence[np.ndarray] = ()) -> None:
        self._gather(message, tensors)
        self._link.flush()

    # ------------------------------------------------------------------ receiving

    def receive(self) -> bool:
        """Send what was added and aborted, process all frames that have arrived, without waiting, and reconnect if the
        connection is lost. Returns whether anything has changed."""
        self.check_process()
        changed, link = False, self._link
        link.flush()
        while self.error is None:
            connected = self._ready is not None
            if not connected:
                link.read_events()
            came = self._take_all()
            if connected and not came:  # to read events after each message would take a third as long as the message
                link.read_events()
                came = link.lost and self._take_all()  # messages that came before the connection was lost
            changed = changed or came
            turned_away = self._ready is None and time.monotonic() - link.opened_at < LOST_POLL_SECONDS
            if not link.lost or turned_away:  # wait before the next attempt
                break
            self._reconnect()
            changed = True
        if self.error is None and self._ready is None and self._last_ready is not None:
            self.error = self._reason_to_give_up()
            changed = changed or self.error is not None
        return changed

    def _take_all(self) -> bool:
        """Take all messages that are there; whether there were some."""
        came = False
        while (message := self._receive_one()) is not None:
            came = True
            self._take(message)
        return came

    def _take(self, message: Any) -> None:
        match message:
            case Outputs():
                self._ledger.take(message)
                self.outputs.append(message)
            case UtilityResult(call_id):
                if self._calls.pop(call_id, None) is not None:
                    self.results[call_id] = message
            case Ready():
                self._resume(message)
            case Refused():
                if self._ready is not None:
                    self._link.lost = True  # the core has forgotten this session
                elif message.error == OverloadedError.__name__:
                    self._link.trouble = message.reason
                    self._link.lost = True  # the core has no room just now
                else:
                    self._refused = from_wire(message.error, message.reason)
            case Bye():
                logger.info("the core ended the session: %s", message.reason)
                self._link.trouble = message.reason
                self._link.lost = True
            case Fault():
                self.dropped_frames += 1
                logger.warning("the core dropped a message: %s: %s", message.error, message.error_text)

    def _receive_one(self) -> Any:
        """The next message of this session, or None."""
        while (frames := self._link.receive()) is not None:
            ready = self._ready
            try:
                envelope = codec.decode(frames)
            except ProtocolError as error:
                if ready is None:  # the answer to Hello is from another program or protocol version
                    self._refused = error
            else:
                if ready is None or (envelope.instance_id, envelope.epoch) == (ready.instance_id, ready.epoch):
                    return envelope.message
            self.dropped_frames += 1
        return None

    # ------------------------------------------------------------------ reconnecting

    def _introduce(self) -> None:
        self._link.send(codec.encode(self._hello, codec.NO_INSTANCE, 0))

    def _reconnect(self) -> None:
        if self._ready is not None or (self._link.reached and not self._link.trouble):  # a core was there until now
            self.lost_at = time.monotonic()
        if self._ready is not None:
            self._ready = self.ready_at = None
            self._end_aborted()
        self._link.open()
        self._introduce()

    def _resume(self, ready: Ready) -> None:
        before, again = self._last_ready, self._ready is not None
        self._ready = self._last_ready = ready
        self.number, self.cores, self.ready_at = ready.number, ready.cores, time.monotonic()
        self._link.trouble = ""
        if before is None or again:
            return
        if ready.model.fingerprint != before.model.fingerprint and ready.instance_id != before.instance_id:
            self.error = EngineDeadError(
                f"the core at {self.address} came back with another model: start the engine anew"
            )
            return
        self.reconnections += 1
        if self.media is not None and ready.media:
            self.media.move([address_at(self.address, place) for place in ready.media])
        logger.info("connected to epoch %d; %d requests are resumed", ready.epoch, len(self._ledger))
        unanswered: list[Entry | _Call] = [*self._ledger.values(), *self._calls.values()]
        for one in sorted(unanswered, key=lambda one: one.since):  # a pause aborts only what was before it
            if isinstance(one, Entry):
                self._send_entry(one)
            else:
                self._send_call(one)
        self._link.flush()

    # ------------------------------------------------------------------ for the other connections of a group

    @property
    def load(self) -> int:
        """Tokens that the requests here may take."""
        return self._ledger.cost

    @property
    def is_idle(self) -> bool:
        return not (self._ledger or self._calls)

    @property
    def open_calls(self) -> set[int]:
        """Ids of the calls without an answer."""
        return set(self._calls)

    def unanswered(self) -> Iterator[tuple[int, str, list[Any], list[Array]]]:
        """The id, method, arguments and arrays of each call without an answer."""
        for call_id, one in self._calls.items():
            pairs = zip(one.arrays, one.call.tensors, strict=True)
            arrays = [Array(values, tensor.dtype) for values, tensor in pairs]
            yield call_id, one.call.method, codec.decode_value(one.call.args, list), arrays

    @property
    def lost_since(self) -> float | None:
        """Since when the core does not answer; None: it does."""
        return None if self._ready is not None else self.lost_at

    def take_over(self, entry: Entry) -> None:
        """Go on with a request that another connection has given up."""
        self._ledger.put(entry)
        self._send_entry(entry)
        self._link.flush()

    def take_over_calls(self, other: Connection, ids: Iterable[int]) -> None:
        """Ask what another connection has asked, under the same ids."""
        for call_id in ids:
            self._calls[call_id] = asked = other._calls.pop(call_id)
            if self._ready is not None:
                self._send_call(asked)

    def give_up(self) -> list[Entry]:
        """The requests of a connection that is lost. They are forgotten here."""
        given, self._ledger = list(self._ledger.values()), Ledger()
        for entry in given:
            entry.moved_from, entry.sent_to = entry.sent_to or entry.moved_from, None
        return given

    def _end_aborted(self) -> None:
        """End aborted requests here, instead of sending them again."""
        if finished := self._ledger.end_aborted():
            self.outputs.append(Outputs([], [], finished=finished))

    def _owners_error(self) -> EngineDeadError | None:
        return None if self._core is None else self._core.dead_error()

    def _reason_to_give_up(self) -> EngineDeadError | None:
        """The error to raise if a lost connection will not come back."""
        if (error := self._owners_error()) is not None:
            return error
        if self._refused is not None:
            return EngineDeadError(f"the core does not take us back: {self._refused}")
        waited = time.monotonic() - self.lost_at
        patience = LOAD_SECONDS if self._link.reached else self._reconnect_timeout
        if self._core is not None or waited <= patience:
            return None
        why = f" ({self._link.trouble})" if self._link.trouble else ""
        return EngineDeadError(f"{self.address} has not answered for {waited:.0f} s{why}")

    # ------------------------------------------------------------------ closing

    @property
    def is_mine(self) -> bool:
        """Whether this is the process that made the connection, not one forked from it."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        check_process(self._pid)

    def close(self) -> None:
        if self.closed or not self.is_mine:
            return
        self.leave()
        self.end_core()

    def end_core(self) -> None:
        """End an embedded core."""
        if self._core is not None:
            self._core.close()

    def leave(self) -> None:
        """Disconnect. An embedded core goes on."""
        self.closed = True
        self.error = EngineDeadError("the engine was shut down")
        if self._ready is not None:
            self._send(Bye("closed"))
        self._link.close(CLOSE_MS if self._ready is not None else 0)

    def _check(self) -> None:
        self.check_process()
        if self.error is not None:
            raise self.error.with_traceback(None)  # otherwise it would keep the frames of all earlier raises

    def _check_sizes(self, what: str, body: msgspec.Raw, arrays: Sequence[np.ndarray]) -> None:
        """Raise `InvalidRequestError` for a message with a frame that would end the connection."""
        assert self._last_ready is not None
        limit = self._last_ready.max_frame_bytes
        largest = max(len(body) + HEADROOM_BYTES, *(array.nbytes for array in arrays), 0)
        if largest > limit:
            raise InvalidRequestError(
                f"{what} is too large: {largest} bytes; a frame over this connection may have {limit}"
            )


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


def ask_status(address: str, timeout: float = 2.0, *, key: str | None = None, server_key: str | None = None) -> Status:
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
