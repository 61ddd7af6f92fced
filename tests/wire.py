"""Helpers for tests of the protocol: small requests, their results, and a frontend that can send any frames."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import zmq

from mainspring.ipc import codec
from mainspring.ipc.messages import AddRequest, Hello, Outputs, Probe, Ready, Sampling
from mainspring.ipc.sync_client import SyncClient
from mainspring.ipc.transport import make_dealer
from stand_in_core import StandInOwner

PROMPTLY = 10.0  # seconds; on an idle machine it takes milliseconds


def request(handle: int, max_tokens: int = 3, first: int = 100) -> AddRequest:
    return AddRequest(handle, str(handle), [first], Sampling(max_tokens))


def collect(client: SyncClient, count: int, timeout: float = 30.0) -> dict[int, list[int]]:
    """Collect tokens by handle until `count` requests have ended."""
    tokens: dict[int, list[int]] = defaultdict(list)
    ended = 0
    deadline = time.monotonic() + timeout
    while ended < count:
        outputs = client.get_outputs(timeout=max(0.0, deadline - time.monotonic()))
        assert outputs is not None, f"{count - ended} requests did not end"
        take(outputs, tokens)
        ended += len(outputs.finished)
    return tokens


def take(outputs: Outputs, tokens: dict[int, list[int]]) -> None:
    for handle, token in zip(outputs.handles, outputs.token_ids, strict=True):
        tokens[handle].append(token)


def eventually(holds: Callable[[], Any], timeout: float = PROMPTLY) -> bool:
    deadline = time.monotonic() + timeout
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(holds())


def sees_the_loss(client: SyncClient) -> bool:
    """Wait until the client notices that its core has gone."""
    return eventually(lambda: client.abort([]) or client._connection.poll_seconds is not None)


class Raw:
    """A frontend that sends any frames and reads only when told to."""

    def __init__(
        self, owner: StandInOwner, address: str | None = None, keys: tuple[str, str, str] | None = None
    ) -> None:
        self.owner = owner
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = make_dealer(self.context, keys)
        self.socket.connect(address or owner.address)
        self.close = weakref.finalize(self, _close, self.socket, self.context)

    def send(self, message: Any, instance: bytes | None = None, epoch: int | None = None) -> None:
        instance = self.owner.instance_id if instance is None else instance
        self.send_frames(codec.encode(message, instance, self.owner.epoch if epoch is None else epoch))

    def send_frames(self, frames: list[Any]) -> None:
        self.socket.send_multipart(frames)

    def say_hello(self, session: bytes = b"", name: str = "raw", weight: float = 1.0) -> None:
        self.send(Hello(1, self.owner.token, name, weight, session), codec.NO_INSTANCE, 0)

    def greet(self, session: bytes = b"", name: str = "raw", weight: float = 1.0) -> Ready:
        self.say_hello(session, name, weight)
        ready = self.receive()
        assert isinstance(ready, Ready), ready
        return ready

    def receive(self, timeout: float = PROMPTLY) -> Any:
        """The next message that is not a Probe."""
        while True:
            assert self.socket.poll(int(timeout * 1000)), "no answer"
            message = codec.decode(self.socket.recv_multipart()).message
            if not isinstance(message, Probe):
                return message


def _close(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Also after a test that failed: a context that is collected while a socket is open waits for ever."""
    socket.close(linger=0)
    context.term()


class Deaf(Raw):
    """Reads nothing until told to, and its socket has very small buffers."""

    def __init__(self, owner: StandInOwner) -> None:
        self.owner = owner
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.connect(owner.address)
        self.close = weakref.finalize(self, _close, self.socket, self.context)
