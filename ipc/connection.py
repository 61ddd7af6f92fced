"""One frontend's session with one core: handshake, frames out, messages in. What both clients are made of."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

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
        self.closed = False
        self._farewell = ""
        hello = Hello(PROTOCOL_VERSION, core.token, client_name or f"pid {self._pid}", weight)
        self._socket.send_multipart(codec.encode(hello, codec.NO_INSTANCE, 0))
        ready = self._await_ready()
        self._instance_id, self._epoch = ready.instance_id, ready.epoch
        self.model = ready.model
        self.config = msgspec.json.decode(ready.config, type=EngineConfig)

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
        return self._next_call

    def receive(self) -> bool:
        """Take in all that is there, without waiting. Whether anything was."""
        self.check_process()
        found = False
        while not self.closed and (message := self._receive_one()) is not None:
            found = True
            match message:
                case Outputs():
                    self.outputs.append(message)
                case UtilityResult():
                    self.results[message.call_id] = message
                case Bye():
                    self._farewell = message.reason
                case _:
                    self.dropped_frames += 1
        return found

    def dead_error(self) -> EngineDeadError | None:
        """The error to raise, if the core is gone."""
        if self.closed:
            return EngineDeadError("the engine was shut down")
        if self.core.watch.ended():
            reason = f": {self._farewell}" if self._farewell else ""
            return EngineDeadError(f"the core (pid {self.core.pid}) ended {self.core.exit_text()}{reason}")
        return None

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise WrongProcessError(
                f"this engine belongs to process {self._pid}; process {os.getpid()}, forked from it, must make its own"
            )

    def close(self) -> None:
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        self._socket.close(linger=0)
        self._context.term()
        self.core.close()

    def _send(self, message: Any, tensors: Sequence[np.ndarray] = ()) -> None:
        self.check_process()
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

    def _await_ready(self) -> Ready:
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
