"""Ranks on other machines, as a core sees them: a `RankAgent` on each machine offers ranks, and the `RankGate` of the
core takes as many as the core needs.

Between the two goes the stream of bytes that a core and a rank process write to each other, over ZeroMQ on TCP with
CURVE. All machines of an engine share one key: functions of the user are pickled in that stream, so each side trusts
the other. A message is its kind and one frame. It does not matter how the stream is cut into messages.
"""

from __future__ import annotations

import collections
import logging
import os
import signal
import socket
import threading
import time
from typing import Any

import msgspec
import zmq

from .. import __version__
from .access import Access
from .errors import ConnectError, EngineDeadError, EngineStartError
from .transport import Endpoints, Socket, Waker, bind_router

logger = logging.getLogger(__name__)

OFFER, DATA, END, REFUSED = b"O", b"D", b"E", b"R"  # kinds of messages
CHUNK_BYTES = 1 << 20  # of the stream, in one message
MAX_PENDING_BYTES = 8 << 20  # that wait for a reader; then no more is received
MACHINE_TIMEOUT = 10.0  # seconds without an answer from a machine after which it is lost
JOIN_SECONDS = 600.0  # that a core waits for ranks
SAY_SECONDS = 10.0  # interval of the log lines that say so
FULL_SECONDS = 0.001  # after which a full queue to a machine is tried again
PROBES_S = (0.05, 1.0)  # seconds after a lost connection at which probes are sent to find out whose it was
END_SECONDS = 5.0  # that an agent has to tell how its rank ended


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What an agent tells a core."""

    version: str  # of Mainspring
    machine: str
    index: int  # of the rank among those of its machine; also of its GPU
    of: int  # ranks that its machine offers


class Stream:
    """One end of a socket pair, without waiting: what the other end does not read yet is kept."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._pending: collections.deque[memoryview] = collections.deque()
        self.pending_bytes = 0

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def is_full(self) -> bool:
        return self.pending_bytes > MAX_PENDING_BYTES

    def write(self, data: Any = b"") -> None:
        """Write `data` after what is pending. Nothing is raised if the other end is gone: `read` tells that."""
        if data:
            self._pending.append(memoryview(data))
            self.pending_bytes += len(data)
        while self._pending:
            try:
                sent = self._end.send(self._pending[0])
            except BlockingIOError:
                return
            except OSError:
                self._pending.clear()
                self.pending_bytes = 0
                return
            self.pending_bytes -= sent
            if sent == len(self._pending[0]):
                self._pending.popleft()
            else:
                self._pending[0] = self._pending[0][sent:]

    def read(self) -> bytes | None:
        """What the other end has written; None if that is nothing, empty if it is gone."""
        try:
            return self._end.recv(CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        self._end.close()


class RemoteRank:
    """A rank process on another machine. It has the methods of a `Popen` that a core uses.

    Attributes:
        end: the core's end of the stream. It ends when the process has ended, or its machine is lost.
    """

    def __init__(self, gate: RankGate, agent: bytes, offer: Offer) -> None:
        self.agent, self.offer = agent, offer
        self.end, theirs = socket.socketpair()
        self.stream = Stream(theirs)
        self.held: tuple[bytes, bytes] | None = None  # a message that did not fit into the queue to the machine
        self.trouble = ""  # why nothing is known about its end
        self.returncode: int | None = None
        self._gate = gate
        self._ended = threading.Event()

    @property
    def events(self) -> int:
        """What to poll the stream for. It is not read while a message is held."""
        return (0 if self.held else zmq.POLLIN) | (zmq.POLLOUT if self.stream.pending_bytes else 0)

    def kill(self) -> None:
        self._gate.let_go(self)

    def wait(self, timeout: float | None = None) -> int:
        """How it ended. An agent that does not tell it in time is lost, which counts as SIGKILL."""
        self._ended.wait(END_SECONDS if timeout is None else timeout)
        return -signal.SIGKILL if self.returncode is None else self.returncode

    def has_ended(self, returncode: int | None, trouble: str = "") -> None:
        self.returncode, self.trouble = returncode, trouble
        self._ended.set()
        self.stream.close()


class RankGate:
    """Where a core takes in ranks of other machines. A thread of it carries the streams.

    Args:
        address: to listen at, ``tcp://HOST:PORT``.
        secret_key: which all machines share.

    Raises:
        AddressInUseError: another process listens there.
        InvalidArgumentError: the address can't be opened.
    """

    def __init__(self, address: str, secret_key: str) -> None:
        self.address = address
        self._context: zmq.Context[Socket] = zmq.Context()
        self._access = Access(self._context, Endpoints(address, secret_key=secret_key, allowed_keys=os.devnull))
        self._router = bind_router(self._context, address, MACHINE_TIMEOUT, secret_key, zmq.EVENT_DISCONNECTED)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._waker = Waker()
        self._changed = threading.Condition()  # guards what follows
        self._offers: dict[bytes, Offer] = {}  # by the agent's id
        self._taken: dict[bytes, RemoteRank] = {}
        self._released: set[RemoteRank] = set()  # those whose agents are to be told to end them
        self._closing = False
        self._probes: list[float] = []  # when to send probes
        self._thread = threading.Thread(target=self._run, name="mainspring-rank-gate", daemon=True)
        self._thread.start()

    def take(self, count: int, seconds: float = JOIN_SECONDS) -> list[RemoteRank]:
        """Wait until `count` ranks are offered, and take them: those of one machine together, in order.

        Raises:
            EngineStartError: there are fewer after so many seconds.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            enough = lambda: self._closing or len(self._offers) >= count  # noqa: E731
            while not self._changed.wait_for(enough, min(SAY_SECONDS, max(0.0, deadline - time.monotonic()))):
                found = f"{len(self._offers)} of {count} ranks of other machines have joined at {self.address}"
                if time.monotonic() >= deadline:
                    raise EngineStartError(
                        f"{found} after {seconds:.0f} s; start `mainspring rank --join {self.address}` there"
                    )
                logger.warning("%s so far", found)
            if self._closing:
                raise EngineDeadError("the engine was shut down")
            first = {offer.machine: place for place, offer in reversed([*enumerate(self._offers.values())])}
            order = sorted(self._offers.items(), key=lambda item: (first[item[1].machine], item[1].index))[:count]
            ranks = []
            for agent, offer in order:
                del self._offers[agent]
                rank = self._taken[agent] = RemoteRank(self, agent, offer)
                ranks.append(rank)
        self._waker.wake()
        return ranks

    def let_go(self, rank: RemoteRank) -> None:
        """Let the agent end the process."""
        with self._changed:
            self._released.add(rank)
        self._waker.wake()

    def close(self) -> None:
        """Let all agents go. A second call does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._waker.wake()
        self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._closing:
            with self._changed:
                taken, released = list(self._taken.values()), self._released
                self._released = set()
            for rank in released:
                self._send(rank.agent, END)
            poller = zmq.Poller()
            for one in (self._router, self._monitor, self._access.zap, self._waker.fd):
                poller.register(one, zmq.POLLIN)
            for rank in taken:
                poller.register(rank.stream.fileno(), rank.events)
            waits = [max(0.0, at - time.monotonic()) for at in self._probes]
            waits += [FULL_SECONDS for rank in taken if rank.held]
            found = dict(poller.poll(1 + int(1000 * min(waits)) if waits else None))
            self._waker.clear()
            self._access.authenticate()
            for rank in taken:
                if found.get(rank.stream.fileno(), 0) & zmq.POLLOUT:
                    rank.stream.write()
                self._carry_down(rank)
            self._receive()
            if self._monitor in found:
                self._monitor.recv_multipart()
                now = time.monotonic()
                first = min([*self._probes, now + PROBES_S[0]])  # not delayed by further disconnections
                self._probes = [first, now + PROBES_S[1]]
            self._find_lost()
        for agent in [*self._taken, *self._offers]:
            self._send(agent, END)
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close(linger=1000)
        if self._access.zap is not None:
            self._access.zap.close(linger=0)
        for rank in self._taken.values():
            rank.has_ended(None, "with its core")
        self._context.term()

    def _carry_down(self, rank: RemoteRank) -> None:
        if rank.held is None and (data := rank.stream.read()) is not None:
            rank.held = (DATA if data else END, data)
        if rank.held is not None and self._send(rank.agent, *rank.held):
            kind, rank.held = rank.held[0], None
            if kind == END:
                self._end(rank.agent, None, "with its link")

    def _receive(self) -> None:
        while True:
            try:
                agent, kind, *rest = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            sender, body = agent.bytes, rest[0].buffer if rest else memoryview(b"")
            rank = self._taken.get(sender)
            if kind.bytes == OFFER:
                self._take_offer(sender, body)
            elif kind.bytes == DATA and rank is not None:
                rank.stream.write(body)
            elif kind.bytes == END and rank is not None:
                self._end(sender, msgspec.msgpack.decode(body, type=int))

    def _take_offer(self, agent: bytes, body: memoryview) -> None:
        try:
            offer = msgspec.msgpack.decode(body, type=Offer)
            if offer.version != __version__:
                raise ConnectError(f"this core is of Mainspring {__version__}, and the rank of {offer.version}")
        except (msgspec.ValidationError, msgspec.DecodeError, ConnectError) as error:
            self._send(agent, REFUSED, str(error).encode())
            return
        logger.info("rank %d of %s has joined", offer.index, offer.machine)
        with self._changed:
            self._offers[agent] = offer
            self._changed.notify_all()

    def _find_lost(self) -> None:
        """Send probes after a lost connection, because libzmq does not tell which one it was."""
        due = [at for at in self._probes if at <= time.monotonic()]
        self._probes = self._probes[len(due) :]
        for agent in [*self._taken, *self._offers] if due else ():
            self._send(agent, b"")

    def _send(self, agent: bytes, kind: bytes, body: bytes = b"") -> bool:
        """False if the queue to this machine is full."""
        try:
            self._router.send_multipart([agent, kind, body], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            self._end(agent, None, "because the connection to its machine was lost")
        return True

    def _end(self, agent: bytes, returncode: int | None, trouble: str = "") -> None:
        with self._changed:
            self._offers.pop(agent, None)
            rank = self._taken.pop(agent, None)
        if rank is not None:
            rank.has_ended(returncode, trouble and f"{trouble} ({rank.offer.machine})")
