"""One frontend's session with one core: handshake, frames out, messages in. What both clients are made of."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np
import zmq

from . import codec
from .config import EngineConfig
from .errors import EngineDeadError, EngineStartError, ProtocolError, WrongProcessError, from_wire
from .launch import CoreProcess
from .messages import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Bye,
    Hello,
    Outputs,
    Ready,
    Refused,
    UtilityCall,
    UtilityResult,
)
from .transport import connect_dealer

HANDSHAKE_SECONDS = 60.0
WATCH_SECONDS = 1.0  # how often the core's life is looked at where the kernel has no pidfd
LAST_WORDS_SECONDS = 0.02  # for what a core sent before it ended to come out of libzmq's own thread


class Connection:
    """Not thread-safe; its owner sees to that. Nothing is sent before READY has come."""

    def __init__(self, core: CoreProcess, client_name: str = "", weight: float = 1.0) -> None:
        self.core = core
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._socket = connect_dealer(self._context, core.address)
        self.outputs: deque[Outputs] = deque()
        self.results: dict[int, UtilityResult] = {}
        self.dropped_frames = 0
        self._next_call = 0
        self._open_calls: set[int] = set()
        self.closed = False
        self._core_ended = False
        self._farewell = ""
        try:
            ready = self._greet(client_name, weight)
        except BaseException:
            self._close_socket()
            raise
        self._instance_id, self._epoch = ready.instance_id, ready.epoch
        self.model = ready.model
        self.config = msgspec.json.decode(ready.config, type=EngineConfig)

    @classmethod
    def launch(cls, config: EngineConfig) -> Self:
        """With a core of one's own.

        Raises:
            MainspringError: the core did not start.
        """
        core = CoreProcess(config)
        try:
            return cls(core)
        except BaseException:
            core.close()
            raise

    @property
    def fd(self) -> int:
        """Becomes readable when the socket's state has changed; after that, `receive` until it brings nothing."""
        return int(self._socket.getsockopt(zmq.FD))

    def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = ()) -> None:
        self._send(request, tensors)

    def abort(self, handles: Sequence[int]) -> None:
        self._send(Abort(list(handles)))

    def start_call(self, method: str, args: Sequence[Any]) -> int:
        """Send a utility call; its result will stand in `results` under the id returned."""
        self._next_call += 1
        self._send(UtilityCall(self._next_call, method, codec.encode_value(list(args))))
        self._open_calls.add(self._next_call)
        return self._next_call

    def end_call(self, call_id: int) -> None:
        """Nobody waits for this call any more; an answer that still comes is dropped."""
        self._open_calls.discard(call_id)
        self.results.pop(call_id, None)

    def receive(self) -> bool:
        """Take in all that is there, without waiting. Whether anything was."""
        self.check_process()
        self._look_for_end()
        found = False
        while not self.closed and (message := self._receive_one()) is not None:
            found = True
            match message:
                case Outputs():
                    self.outputs.append(message)
                case UtilityResult(call_id):
                    if call_id in self._open_calls:
                        self.results[call_id] = message
                case Bye():
                    self._farewell = message.reason
                case _:
                    self.dropped_frames += 1
        return found

    def dead_error(self) -> EngineDeadError | None:
        """The error to raise, if the core is gone: known from the last `receive`, so that what the core sent before it
        ended is taken in first."""
        if self.closed:
            return EngineDeadError("the engine was shut down")
        if self._core_ended:
            reason = f": {self._farewell}" if self._farewell else ""
            return EngineDeadError(f"the core (pid {self.core.pid}) ended {self.core.exit_text()}{reason}")
        return None

    @property
    def is_mine(self) -> bool:
        """Whether this is the process that made the connection, not one forked from it."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        if not self.is_mine:
            raise WrongProcessError(
                f"this engine belongs to process {self._pid}; process {os.getpid()}, forked from it, must make its own"
            )

    def close(self) -> None:
        if self.closed or not self.is_mine:
            return
        self.closed = True
        self._close_socket()
        self.core.close()

    def _close_socket(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def _look_for_end(self) -> None:
        if not self.closed and not self._core_ended and self.core.watch.ended():
            self._core_ended = True
            time.sleep(LAST_WORDS_SECONDS)

    def _send(self, message: Any, tensors: Sequence[np.ndarray] = ()) -> None:
        self.check_process()
        self._look_for_end()
        if (error := self.dead_error()) is not None:
            raise error
        self._socket.send_multipart(codec.encode(message, self._instance_id, self._epoch, tensors), copy=not tensors)

    def _receive_one(self) -> Any:
        """The next message of this session, or None."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            try:
                envelope = codec.decode([f.buffer for f in frames])
            except ProtocolError:
                self.dropped_frames += 1
                continue
            if (envelope.instance_id, envelope.epoch) == (self._instance_id, self._epoch):
                return envelope.message
            self.dropped_frames += 1

    def _greet(self, client_name: str, weight: float) -> Ready:
        hello = Hello(PROTOCOL_VERSION, self.core.token, client_name or f"pid {self._pid}", weight)
        self._socket.send_multipart(codec.encode(hello, codec.NO_INSTANCE, 0))
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        while time.monotonic() < deadline:
            if self._socket.poll(100):
                message = codec.decode(self._socket.recv_multipart()).message
                if isinstance(message, Ready):
                    return message
                if isinstance(message, Refused):
                    raise from_wire(message.error, message.reason)
            if self.core.watch.ended():
                raise EngineStartError(f"the core ended {self.core.exit_text()} before it answered")
        raise EngineStartError(f"the core did not answer within {HANDSHAKE_SECONDS:.0f} s")


def result_of(answer: UtilityResult) -> Any:
    """The value of a utility call, or its error raised."""
    if answer.error:
        raise from_wire(answer.error, answer.error_text)
    return codec.decode_value(answer.result)
