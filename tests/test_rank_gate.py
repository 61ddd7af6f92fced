"""Agents offer ranks to the gate of a core, and the bytes between a core and its ranks pass unchanged. The processes
here are stand-ins of a rank, which know nothing of models."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from daemons import until
from mainspring.ipc import rank_agent, rank_gate
from mainspring.ipc.errors import ConnectError, EngineStartError
from mainspring.ipc.keys import KeyPair, load_keypair, new_keypair
from mainspring.ipc.rank_agent import RankAgent
from mainspring.ipc.rank_gate import RankGate, RemoteRank
from mainspring.ipc.transport import free_port

# sends back what it gets, after its process id; ends with code 7 at the byte Q
ECHO = """
import os, socket, sys
link = socket.socket(fileno=int(sys.argv[1]))
link.sendall(os.getpid().to_bytes(4, "little"))
while data := link.recv(1 << 16):
    if data == b"Q":
        sys.exit(7)
    link.sendall(data)
"""
# reads nothing for as long as it lives, and writes nothing
DEAF = "import time; time.sleep(600)"
AGENT = """
import sys
from mainspring.ipc import rank_agent
from mainspring.ipc.keys import load_keypair
rank_agent.COMMAND = [sys.executable, "-c", sys.argv[3]]
rank_agent.run_agents(sys.argv[1], load_keypair(sys.argv[2]), int(sys.argv[4]))
"""
CORE = """
import sys, time
from mainspring.ipc.keys import load_keypair
from mainspring.ipc.rank_gate import RankGate
(rank,) = RankGate(sys.argv[1], load_keypair(sys.argv[2]).secret).take(1)
rank.end.sendall(b"!")
print(int.from_bytes(rank.end.recv(4), "little"), flush=True)
time.sleep(600)
"""
Start = Callable[..., RankAgent]


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port('127.0.0.1')}"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    new_keypair(tmp_path / "engine.key")
    return tmp_path / "engine.key"


@pytest.fixture
def keys(key_file: Path) -> KeyPair:
    return load_keypair(key_file)


@pytest.fixture
def gate(address: str, keys: KeyPair) -> Iterator[RankGate]:
    made = RankGate(address, keys.secret)
    yield made
    made.close()


@pytest.fixture
def start(address: str, keys: KeyPair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts an agent in a thread."""
    monkeypatch.setattr(rank_agent, "COMMAND", [sys.executable, "-c", ECHO])
    running: list[tuple[RankAgent, threading.Thread]] = []

    def begin(index: int = 0, machine: str = "one", keys: KeyPair = keys) -> RankAgent:
        agent = RankAgent(address, keys, index, 4, machine)
        thread = threading.Thread(target=agent.run)
        thread.start()
        running.append((agent, thread))
        return agent

    yield begin
    for agent, thread in running:
        agent.stop()
        thread.join()


def exactly(end: socket.socket, size: int) -> bytes:
    end.settimeout(30.0)
    data = bytearray()
    while len(data) < size:
        chunk = end.recv(size - len(data))
        assert chunk, "the link has ended"
        data += chunk
    return bytes(data)


def pid_of(rank: RemoteRank) -> int:
    """Begin the process, whose first bytes are its id."""
    rank.end.sendall(b"!")
    pid = int.from_bytes(exactly(rank.end, 4), "little")
    assert exactly(rank.end, 1) == b"!"
    return pid


def test_bytes_of_any_size_pass_both_ways_unchanged(gate: RankGate, start: Start) -> None:
    for index in range(2):
        start(index)
    ranks = gate.take(2, 30.0)
    generator = random.Random(seed := random.randrange(1 << 32))
    for rank in ranks:
        pid_of(rank)
    for size in (1, 100, 65_537, 1 << 20, (20 << 20) + 3):
        data = [generator.randbytes(size) for _ in ranks]
        for rank, sent in zip(ranks, data, strict=True):
            threading.Thread(target=rank.end.sendall, args=(sent,)).start()
        assert [exactly(rank.end, size) for rank in ranks] == data, f"seed {seed}, size {size}"


def test_ranks_of_one_machine_are_neighbours_in_the_order_of_their_numbers(gate: RankGate, start: Start) -> None:
    for machine, index in (("b", 1), ("a", 1), ("b", 0), ("a", 0)):
        start(index, machine)
        before = len(gate._offers)
        until(lambda before=before: len(gate._offers) > before or gate._offers)  # type: ignore[misc]
    until(lambda: len(gate._offers) == 4)
    first = next(iter(gate._offers.values())).machine
    second = "a" if first == "b" else "b"
    found = [(rank.offer.machine, rank.offer.index) for rank in gate.take(3)]
    assert found == [(first, 0), (first, 1), (second, 0)]


def test_how_a_process_ended_is_told_and_its_rank_is_offered_again(gate: RankGate, start: Start) -> None:
    start()
    (rank,) = gate.take(1, 30.0)
    pid_of(rank)
    rank.end.sendall(b"Q")
    assert rank.end.recv(1) == b""
    assert (rank.wait(), rank.trouble) == (7, "")
    (rank,) = gate.take(1, 30.0)
    os.kill(pid_of(rank), signal.SIGKILL)
    assert rank.end.recv(1) == b""
    assert (rank.wait(), rank.trouble) == (-signal.SIGKILL, "")
    (rank,) = gate.take(1, 30.0)
    pid = pid_of(rank)
    rank.kill()
    assert rank.end.recv(1) == b""
    assert rank.wait() == -signal.SIGKILL
    until(lambda: not psutil.pid_exists(pid))
    assert gate.take(1, 30.0)


def test_a_closed_link_ends_the_process(gate: RankGate, start: Start) -> None:
    start()
    (rank,) = gate.take(1, 30.0)
    pid = pid_of(rank)
    rank.end.close()
    until(lambda: not psutil.pid_exists(pid))
    assert gate.take(1, 30.0)


def test_the_next_core_at_the_address_gets_the_rank(address: str, keys: KeyPair, start: Start) -> None:
    start()
    for _ in range(3):
        gate = RankGate(address, keys.secret)
        (rank,) = gate.take(1, 30.0)
        pid = pid_of(rank)
        gate.close()
        assert rank.end.recv(1) == b""
        until(lambda pid=pid: not psutil.pid_exists(pid))  # type: ignore[misc]


def test_the_process_of_a_core_that_is_killed_ends(address: str, keys: KeyPair, key_file: Path, start: Start) -> None:
    start()
    core = subprocess.Popen([sys.executable, "-P", "-c", CORE, address, str(key_file)], stdout=subprocess.PIPE)
    assert core.stdout is not None
    pid = int(core.stdout.readline())
    core.kill()
    core.communicate()
    until(lambda: not psutil.pid_exists(pid))
    gate = RankGate(address, keys.secret)
    try:
        assert pid_of(gate.take(1, 30.0)[0]) != pid
    finally:
        gate.close()


def test_a_lost_machine_ends_its_ranks_and_its_processes(gate: RankGate, address: str, key_file: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-P", "-c", AGENT, address, str(key_file), ECHO, "2"])
    try:
        ranks = gate.take(2, 30.0)
        assert [rank.offer.index for rank in ranks] == [0, 1]
        pids = [pid_of(rank) for rank in ranks]
        agent.kill()
        for rank in ranks:
            assert rank.end.recv(1) == b""
            assert rank.wait() == -signal.SIGKILL
            assert "the connection to its machine was lost" in rank.trouble
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    finally:
        agent.kill()
        agent.wait()


def test_only_the_shared_key_is_let_in(gate: RankGate, start: Start, tmp_path: Path) -> None:
    other = new_keypair(tmp_path / "other.key")
    start(0, "stranger", other)
    mixed = KeyPair(other.public, other.secret)
    start(1, "stranger", mixed)
    start(2, "known")
    (rank,) = gate.take(1, 30.0)
    assert rank.offer.machine == "known"
    with pytest.raises(EngineStartError, match=r"0 of 1 ranks .* joined at tcp://.* `mainspring rank --join tcp://"):
        gate.take(1, 0.5)


def test_a_client_that_knows_the_public_key_needs_the_secret_one(gate: RankGate, keys: KeyPair, tmp_path: Path) -> None:
    other = new_keypair(tmp_path / "other.key")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.curve_publickey, dealer.curve_secretkey = other.public.encode(), other.secret.encode()
        dealer.curve_serverkey = keys.public.encode()
        dealer.connect(gate.address)
        dealer.send_multipart([rank_gate.OFFER, b""])
        assert not dealer.poll(1000)  # not even a refusal
    assert not gate._offers


def test_another_version_is_refused(
    gate: RankGate, address: str, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_agent, "__version__", "0.0.1")
    with pytest.raises(ConnectError, match=r"this core is of Mainspring .*, and the rank of 0\.0\.1"):
        RankAgent(address, keys).run()


def test_what_a_process_does_not_read_is_not_piled_up(
    gate: RankGate, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_agent, "COMMAND", [sys.executable, "-c", DEAF])
    agent = start()
    (rank,) = gate.take(1, 30.0)
    rank.end.settimeout(3.0)
    with pytest.raises(TimeoutError):
        rank.end.sendall(bytes(600 << 20))  # libzmq's queues hold 200 of the largest messages, 1 MiB each
    assert agent._stream is not None
    assert agent._stream.pending_bytes <= rank_gate.MAX_PENDING_BYTES + rank_gate.CHUNK_BYTES
