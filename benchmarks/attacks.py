"""Attacks a daemon beside a stream, and measures the gaps between the stream's tokens.

    python benchmarks/attacks.py --runs 5

Attacks: 80 connections again and again while the daemon may open 64 files; 20 requests of 15 million token ids, with 3
million bad words or stop tokens, or of as many token ids as a frame may hold, again and again. An attacker whose
connection is closed makes another one at once.

The attacker first prepares its messages, and then measures the CPU time of its process, of all threads, while it
attacks. Each run is repeated beside a process that burns as much CPU time in the same number of seconds, evenly. Only
gaps from these seconds count. Bars: no core dies, the stream is exact, and the 99th percentile of its gaps is at most
twice that beside the burning process (median of the runs).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import zmq

from bars import Bar, add_arguments, conclude
from daemon import Daemon
from mainspring.ipc import codec
from mainspring.ipc.messages import (
    KINDS,
    PROTOCOL_VERSION,
    AddRequest,
    Hello,
    Outputs,
    Ready,
    Sampling,
)

DESCRIPTORS = 64  # limit of open files of the daemon whose connections are attacked
CONNECTIONS = 80
HOLD_SECONDS = 1.0  # for which the attacker keeps its connections
REQUESTS = 20  # sent at once, before the answers are read
IDS, ENTRIES = 15_000_000, 3_000_000
ATTACKS = ("connections", "token ids", "bad words", "stop tokens", "token ids in frames of the largest size")
CLOSED = "connection closed"
SLOT_SECONDS = 0.01  # of the burning process
MAX_RATIO = 2.0
PATIENCE_MS = 120_000
PROMPT, TOKENS = [5, 6, 7, 8], 600  # of each request of the stream
_SPAWN = multiprocessing.get_context("spawn")


class Connection:
    """A frontend that sends messages as they are."""

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.socket = (context or zmq.Context.instance()).socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(address)
        hello = Hello(PROTOCOL_VERSION, b"", "attack", 1.0, os.urandom(16))
        self.socket.send_multipart(codec.encode(hello, codec.NO_INSTANCE, 0))
        self.ready: Ready | None = None

    def greet(self) -> Ready:
        ready = self.receive()
        if not isinstance(ready, Ready):
            raise SystemExit(f"expected a Ready, not {ready}")
        self.ready = ready
        return ready

    def receive(self) -> Any:
        """The next message; None: the core has closed the connection."""
        poller = zmq.Poller()
        for one in (self.socket, self._monitor):
            poller.register(one, zmq.POLLIN)
        found = dict(poller.poll(PATIENCE_MS))
        if not found:
            raise SystemExit("the core does not answer any more")
        return codec.decode(self.socket.recv_multipart()).message if self.socket in found else None

    def encode(self, message: Any) -> list[Any]:
        assert self.ready is not None
        return codec.encode(message, self.ready.instance_id, self.ready.epoch)

    def send(self, message: Any) -> None:
        self.socket.send_multipart(self.encode(message))

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()


# ---------------------------------------------------------------------- attacks


class Connections:
    """Opens more connections than the core can have, and reads the answers."""

    def __init__(self, address: str, _: str) -> None:
        self._address = address

    def attack(self, until: float) -> Counter[str]:
        answers: Counter[str] = Counter()
        while time.monotonic() < until:
            with zmq.Context() as context:
                opened = [Connection(self._address, context) for _ in range(CONNECTIONS)]
                held = min(until, time.monotonic() + HOLD_SECONDS)
                while time.monotonic() < held:
                    time.sleep(0.01)
                    for one in opened:
                        with contextlib.suppress(zmq.Again):
                            answers[KINDS[one.socket.recv_multipart(zmq.NOBLOCK)[0][3]].__name__] += 1
                for one in opened:
                    one.close()
        return answers


class Requests:
    """Sends large requests that the core refuses."""

    def __init__(self, address: str, what: str) -> None:
        self._address, self._connection = address, Connection(address)
        limit = self._connection.greet().max_frame_bytes
        make = {
            "token ids": lambda: AddRequest(1, "", [5] * IDS, Sampling(1)),
            "bad words": lambda: AddRequest(1, "", [5], Sampling(1, bad_words=[[5]] * ENTRIES)),
            "stop tokens": lambda: AddRequest(1, "", [5], Sampling(1, stop_token_ids=[5] * ENTRIES)),
            "token ids in frames of the largest size": lambda: AddRequest(1, "", [5] * (limit - 1000), Sampling(1)),
        }
        self._frames = self._connection.encode(make[what]())

    def attack(self, until: float) -> Counter[str]:
        answers: Counter[str] = Counter()
        while time.monotonic() < until:
            for _ in range(REQUESTS):
                self._connection.socket.send_multipart(self._frames, copy=False)
            ended = 0
            while ended < REQUESTS:
                message = self._connection.receive()
                if message is None:
                    answers[CLOSED] += 1
                    self._connection.close()
                    self._connection = Connection(self._address)
                    self._connection.greet()
                    break
                if isinstance(message, Outputs):
                    ended += len(message.finished)
                    answers.update(finished.error for finished in message.finished)
        return answers


class Beside(NamedTuple):
    """What a process beside the stream did."""

    began: float  # seconds of the monotonic clock, which all processes share
    ended: float
    share: float  # CPU time of the process from `began` to `ended`, in cores
    answers: Counter[str]


def _attack(address: str, what: str, seconds: float, pipe: Any) -> None:
    attacker = (Connections if what == "connections" else Requests)(address, what)
    began, used = time.monotonic(), time.process_time()
    answers = attacker.attack(began + seconds)
    ended = time.monotonic()
    pipe.send(Beside(began, ended, (time.process_time() - used) / (ended - began), answers))


def _burn(_: str, share: float, seconds: float, pipe: Any) -> None:
    """Use `share` cores in each slot. CPU time that other processes took from a slot is made up for."""
    began = now = slot = time.monotonic()
    used = time.process_time()
    while now < began + seconds:
        if time.process_time() - used >= share * (now - began):
            slot = max(slot + SLOT_SECONDS, now)
            time.sleep(slot - now)
        now = time.monotonic()
    pipe.send(Beside(began, now, (time.process_time() - used) / (now - began), Counter()))


# ---------------------------------------------------------------------- the stream


class Victim:
    """One stream after the other, each of the same prompt. `longest`: the longest gap of the last `gaps_beside`, in
    seconds, which the 99th percentile does not show."""

    longest = 0.0

    def __init__(self, address: str) -> None:
        self._connection = Connection(address)
        self._connection.greet()
        self._handle = 0
        self._expected = self._stream([])

    def _stream(self, gaps: list[tuple[float, float]]) -> list[int]:
        """→ its tokens. Adds each gap: its begin and its end."""
        self._handle += 1
        self._connection.send(AddRequest(self._handle, "", PROMPT, Sampling(TOKENS)))
        tokens: list[int] = []
        last = 0.0
        while True:
            message = self._connection.receive()
            if message is None:
                raise SystemExit("the core has closed the stream's connection")
            if isinstance(message, Outputs):
                now = time.monotonic()
                if tokens:
                    gaps.append((last, now))
                last = now
                tokens += message.token_ids
                if message.finished:
                    return tokens

    def gaps_beside(self, target: Any, *args: Any) -> tuple[float, bool, Beside]:
        """→ the 99th percentile of the gaps while another process runs, whether all streams were exact, and what the
        process returns."""
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        gaps: list[tuple[float, float]] = []
        exact = True
        while not ours.poll():
            if not process.is_alive() and not ours.poll(1):
                raise SystemExit("the attacker failed: see above")
            exact = self._stream(gaps) == self._expected and exact
        beside: Beside = ours.recv()
        process.join()
        during = [end - begin for begin, end in gaps if begin < beside.ended and end > beside.began]
        self.longest = max(during)
        return float(np.percentile(during, 99)), exact, beside


class Run(NamedTuple):
    beside_attack: float  # seconds
    beside_burning: float
    longest_beside_attack: float  # seconds
    longest_beside_burning: float
    attacker_share: float  # cores
    burner_share: float


class Found(NamedTuple):
    """Of all runs of an attack."""

    runs: list[Run]
    answers: Counter[str]
    exact: bool  # all streams were

    def bars(self) -> list[Bar]:
        ratio = median(run.beside_attack / run.beside_burning for run in self.runs)
        most, least, longest, other, share, burnt = (median(column) for column in zip(*self.runs, strict=True))
        return [
            Bar("… the stream's tokens", "exact" if self.exact else "not exact", self.exact),
            Bar("… cores used by the attacker, and burnt", f"{share:.2f}, {burnt:.2f}", None),
            Bar(
                f"… p99 of the gaps, beside burning, ratio ({MAX_RATIO:g})",
                f"{most * 1e3:.2f} ms, {least * 1e3:.2f} ms, {ratio:.2f}",
                ratio <= MAX_RATIO,
            ),
            Bar("… the longest gap, beside burning", f"{longest * 1e3:.0f} ms, {other * 1e3:.0f} ms", None),
        ]


def attack_beside(victim: Victim, runs: int, target: Any, address: Any, attack: str, seconds: float) -> Found:
    """Attack in one process and then burn as much CPU time in another, again and again."""
    found = Found([], Counter(), True)
    for _ in range(runs):
        attacked, exact, attacker = victim.gaps_beside(target, address, attack, seconds)
        share, longest = attacker.share, victim.longest
        burning, also_exact, burner = victim.gaps_beside(_burn, address, share, seconds)
        found.runs.append(Run(attacked, burning, longest, victim.longest, share, burner.share))
        found.answers.update(attacker.answers)
        found = found._replace(exact=found.exact and exact and also_exact)
        print(
            f"{attack}: p99 {attacked * 1e3:.2f} ms beside the attacker ({share:.2f} cores), "
            f"{burning * 1e3:.2f} ms beside burning ({burner.share:.2f} cores); {dict(attacker.answers)}",
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack")
    parser.add_argument("--only", choices=ATTACKS, help="this attack only")
    add_arguments(parser)
    args = parser.parse_args()
    bars: list[Bar] = []
    details: dict[str, Any] = {}
    for attack in [args.only] if args.only else ATTACKS:
        with Daemon(threads=args.threads, descriptors=DESCRIPTORS if attack == "connections" else 0) as daemon:
            victim = Victim(daemon.address)
            found = attack_beside(victim, args.runs, _attack, daemon.address, attack, args.seconds)
            deaths = daemon.deaths()
        refused = {name: found.answers[name] for name in ("Refused", "InvalidRequestError", CLOSED)}
        told = ", ".join(f"{count:,} × {name}" for name, count in refused.items() if count)
        bars += [
            Bar(f"{attack}", told, bool(told)),
            Bar("… deaths of the core (0)", str(len(deaths)), not deaths),
            *found.bars(),
        ]
        details[attack] = [run._asdict() for run in found.runs]
    return conclude(bars, details, args)


if __name__ == "__main__":
    sys.exit(main())
