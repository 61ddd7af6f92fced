"""A core's connections never use up its descriptors: those above the limits are refused, and
others are not affected."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from mainspring.ipc import codec, connection_limits
from mainspring.ipc.connection import Connection
from mainspring.ipc.errors import ConnectError
from mainspring.ipc.messages import Ready, Refused, Status, StatusCall
from stand_in_core import StandInOwner, stand_in
from wire import Raw, eventually, request

DESCRIPTORS = 64
TOTAL, PER_PEER = 16, 8  # of a core with that limit


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInOwner]:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (DESCRIPTORS, DESCRIPTORS))
    monkeypatch.setattr(connection_limits, "REFUSED_S", 0.2)
    with stand_in() as owner:
        yield owner


def connected(stack: contextlib.ExitStack, owner: StandInOwner, count: int) -> list[Raw]:
    return [stack.enter_context(contextlib.closing(Raw(owner))) for _ in range(count)]


def open_connections(owner: StandInOwner) -> int:
    return len(owner.server._connections._peers)


def test_connections_of_one_process_above_its_limit_are_refused_with_the_reason(owner: StandInOwner) -> None:
    with contextlib.ExitStack() as stack:
        answers = []
        for raw in connected(stack, owner, PER_PEER + 3):
            raw.say_hello()
            answers.append(raw.receive())
        refused = [answer for answer in answers if isinstance(answer, Refused)]  # any: they connect in any order
        assert [type(answer) for answer in answers].count(Ready) == PER_PEER
        assert [one.error for one in refused] == ["OverloadedError"] * 3
        assert f"process {os.getpid()} has {PER_PEER} connections, the limit" in refused[0].reason


def test_connections_of_all_processes_together_are_limited(
    owner: StandInOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "_peer_of", str)  # each descriptor is another peer
    with contextlib.ExitStack() as stack:
        answers = []
        for raw in connected(stack, owner, TOTAL + 2):
            raw.say_hello()
            answers.append(raw.receive())
        refused = [answer for answer in answers if isinstance(answer, Refused)]
        assert [type(answer) for answer in answers].count(Ready) == TOTAL
        assert len(refused) == 2
        assert f"this core has {TOTAL} connections" in refused[0].reason


def test_a_burst_is_never_accepted_beyond_the_spare_connections(
    owner: StandInOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The silent connections are accepted one by one, and those above the limit are closed."""
    before = len(os.listdir("/proc/self/fd"))
    path = owner.address.removeprefix("ipc://")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(80)]
        for one in silent:
            one.settimeout(30)
            one.connect(path)
        most = 0
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            most = max(most, len(os.listdir("/proc/self/fd")) - before - len(silent))
        assert PER_PEER < most <= TOTAL + connection_limits.SPARE + 1  # one more to list the folder
        assert open_connections(owner) >= PER_PEER
    assert eventually(lambda: open_connections(owner) == 0)


def test_connections_are_accepted_at_a_limited_rate(owner: StandInOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "ACCEPT_S", 0.1)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        for raw in connected(stack, owner, 4):
            raw.greet()
    assert time.monotonic() - began >= 0.3


def test_a_refused_connection_is_closed_and_makes_room(owner: StandInOwner) -> None:
    with contextlib.ExitStack() as stack:
        raws = connected(stack, owner, PER_PEER)
        for raw in raws:
            raw.greet()
        [above] = connected(stack, owner, 1)
        monitor = above.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        above.say_hello()
        assert isinstance(above.receive(), Refused)
        assert monitor.poll(10_000)
        above.socket.disable_monitor()
        monitor.close()
        above.close()
        raws[0].close()
        assert eventually(lambda: open_connections(owner) < PER_PEER)
        [again] = connected(stack, owner, 1)
        again.greet()


def test_a_client_above_the_limit_waits_for_room_and_then_says_why_it_has_none(owner: StandInOwner) -> None:
    with contextlib.ExitStack() as stack:
        raws = connected(stack, owner, PER_PEER)
        for raw in raws:
            raw.greet()
        with pytest.raises(ConnectError, match=f"has {PER_PEER} connections, the limit"):
            Connection(owner, connect_timeout=0.5)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(Connection, owner, connect_timeout=30.0)
            raws[0].close()
            waiting.result().close()


def test_a_refused_connection_disturbs_no_other_and_gets_the_status(owner: StandInOwner) -> None:
    with contextlib.ExitStack() as stack:
        first, *_ = raws = connected(stack, owner, PER_PEER)
        for raw in raws:
            raw.greet()
        [above] = connected(stack, owner, 1)
        above.send(StatusCall(owner.token), codec.NO_INSTANCE, 0)
        assert isinstance(above.receive(), Status)
        first.send(request(0, max_tokens=1))
        assert first.receive().token_ids == [100]


class Monitor:
    """Gives the events of a listening socket, as libzmq does."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.events:
            raise zmq.Again
        return [struct.pack("=Hi", *self.events.pop(0)), b""]


def test_a_connection_that_could_not_be_accepted_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[int] = []
    monkeypatch.setattr(connection_limits, "_registration", lambda fd: (fd, 0))
    monkeypatch.setattr(connection_limits, "ACCEPT_S", 0.0)
    monkeypatch.setattr(connection_limits, "_set_events", lambda fd, _, events: events and enabled.append(fd))
    listener, other, monitor = 1000, errno.ECONNABORTED, Monitor()
    limits = connection_limits.ConnectionLimits([monitor])  # type: ignore[list-item]
    for event in ((zmq.EVENT_LISTENING, listener), (zmq.EVENT_ACCEPTED, other), (zmq.EVENT_ACCEPT_FAILED, other)):
        assert connection_limits.MONITORED & event[0]
        monitor.events.append(event)
        limits.watch()
    assert enabled == [listener] * 3
    assert set(limits._peers) == {other}, "the number of an error is no descriptor"


def test_without_proc_connections_are_still_counted_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (DESCRIPTORS, DESCRIPTORS))
    monkeypatch.setattr(connection_limits, "_registration", lambda _: None)
    with stand_in() as owner, contextlib.ExitStack() as stack:
        answers = Counter[str]()
        for raw in connected(stack, owner, PER_PEER + 2):
            raw.say_hello()
            answers[type(raw.receive()).__name__] += 1
        assert answers == {"Ready": PER_PEER, "Refused": 2}


ATTACKED = """
import resource, sys, time
sys.path.insert(0, sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from stand_in_core import stand_in
with stand_in(address=sys.argv[2]) as owner:
    print("ready", flush=True)
    sys.stdin.read()
    print(owner.server._thread.is_alive(), flush=True)
"""


def test_a_process_with_few_descriptors_survives_many_connections(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core.sock"
    command = [sys.executable, "-P", "-c", ATTACKED, str(Path(__file__).parent), address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attacked:
        assert attacked.stdout is not None
        assert attacked.stdout.readline() == "ready\n"
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                one = stack.enter_context(socket.socket(socket.AF_UNIX))
                one.settimeout(0.05)  # the kernel's queue is full: nobody accepts any more
                with contextlib.suppress(TimeoutError, BlockingIOError):
                    one.connect(str(tmp_path / "core.sock"))
            time.sleep(0.5)
            assert attacked.poll() is None
        out, _ = attacked.communicate(timeout=30)
    assert (out, attacked.returncode) == ("True\n", 0)
