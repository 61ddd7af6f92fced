"""What tests of the wire share: small requests, what came of them, and a frontend that sends what it likes."""

from __future__ import annotations

import time
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
    """Tokens by handle, until `count` requests have ended."""
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
    """Of the core, which is gone."""
    return eventually(lambda: client.abort([]) or client._connection.poll_seconds is not None)


class Raw:
    """A frontend that sends what it likes, and reads when it likes."""

    def __init__(
        self, owner: StandInOwner, address: str | None = None, keys: tuple[str, str, str] | None = None
    ) -> None:
        self.owner = owner
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = make_dealer(self.context, keys)
        self.socket.connect(address or owner.address)

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

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


class Deaf(Raw):
    """Reads nothing until it is told to, and its socket holds next to nothing for it."""

    def __init__(self, owner: StandInOwner) -> None:
        self.owner = owner
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.connect(owner.address)
