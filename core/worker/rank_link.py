"""What the leading rank and another one send each other, over a pair of sockets that no other process has.

A frame is its kind, its length and its body. Down go a `RankLaunch`, then plans and questions in the order in which the
planner made them; up come an answer to each question, and why the rank ends. User functions, and the values that they
take and return, are pickled. This is the only place where anything is: both ends belong to one core, and what a
frontend sends is decoded to plain values before it comes here.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidRequestError, shown
from ...ipc.messages import Sampling
from ..plan.step import NewSequence, StepPlan

LOADED, READY = 1, 2  # numbers of the answers that a starting rank gives unasked: its libraries, then its model
FIRST_QUESTION = 3
NO_SAMPLING = Sampling(1)
_HEAD = struct.Struct("<BQ")
LINK_BYTES = 1 << 17  # that a link holds at least while the other end does not read
_JOINED_BYTES = 1 << 16  # up to so many bytes of a body, head and body are one system call


class Kind(IntEnum):
    LAUNCH = 0
    PLAN = 1  # has no answer
    CONTROL = 2  # a question: a control record
    CALL = 3  # a question: see `MethodCalls.run`
    ANSWER = 4
    FAILED = 5  # the rank ends


class RankLaunch(msgspec.Struct):
    """The first message to a rank."""

    config: EngineConfig
    rank: int
    size: int
    local_rank: int  # among the ranks of its machine; also the number of its GPU
    num_local: int  # ranks of its machine
    store: str  # see `RankGroup`
    parent_pid: int  # 0: whatever process has started it
    journal_fd: int  # -1: none
    crash_fd: int  # -1: none
    import_path: list[str]
    decisions: msgspec.Raw


class Answer(NamedTuple):
    number: int  # of the question
    error: str  # its name on the wire; empty: none
    text: str
    value: Any


class Failure(NamedTuple):
    """Why a rank ends."""

    error: str  # its name on the wire
    text: str
    trace: str


class RankLink:
    """One end. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, body: bytes) -> None:
        """Raises OSError if the other end is gone."""
        head = _HEAD.pack(kind, len(body))
        with self._lock:
            if len(body) <= _JOINED_BYTES:
                self._socket.sendall(head + body)
            else:
                self._socket.sendall(head)
                self._socket.sendall(body)

    def receive(self) -> tuple[Kind, bytearray] | None:
        """The next frame, or None at the end."""
        head = self._read(_HEAD.size)
        if head is None:
            return None
        kind, length = _HEAD.unpack(head)
        body = self._read(length)
        return None if body is None else (Kind(kind), body)

    def end(self) -> None:
        """The other end receives no more."""
        with contextlib.suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytearray | None:
        data = bytearray(length)
        view, got = memoryview(data), 0
        while got < length:
            try:
                count = self._socket.recv_into(view[got:])
            except ConnectionError:
                return None
            if not count:
                return None
            got += count
        return data


def packed(number: int, value: Any) -> bytes:
    """A question or an answer. With cloudpickle it may hold functions of no module, such as lambdas.

    Raises:
        InvalidRequestError: it holds what can't go to another process.
    """
    try:
        return number.to_bytes(8, "little") + _dumps(value)
    except Exception as error:  # each type fails in its own way
        raise InvalidRequestError(
            f"each rank is a process of its own, and this can't be sent to or from one: {error!s:.200}; functions must "
            "be defined in a module that ranks can import, or cloudpickle be installed"
        ) from error


def _dumps(value: Any) -> bytes:
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle.dumps(value)
    data: bytes = cloudpickle.dumps(value)
    return data


def unpacked(body: bytearray) -> tuple[int, Any]:
    return int.from_bytes(body[:8], "little"), pickle.loads(memoryview(body)[8:])


def answer_of(body: bytearray) -> Answer:
    """The answer in a frame, or an error in its place: objects of a user's class may be written and not be read."""
    try:
        return Answer(*unpacked(body)[1])
    except Exception as error:
        number = int.from_bytes(body[:8], "little")
        return Answer(number, InvalidRequestError.__name__, f"what it returns can't be read here: {shown(error)}", None)


def for_rank(plan: StepPlan) -> StepPlan:
    """The plan without what only the rank that chooses tokens needs."""
    if not plan.admitted:
        return plan
    return msgspec.structs.replace(plan, admitted=[_bare(sequence) for sequence in plan.admitted])


def _bare(sequence: NewSequence) -> NewSequence:
    return msgspec.structs.replace(
        sequence, tokens=sequence.tokens[:0], sampling=NO_SAMPLING, grammar=0, functions=(), speculates=False
    )
