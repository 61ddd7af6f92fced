"""Attacks a daemon beside a stream, and measures the gaps between the stream's tokens.

    python benchmarks/attacks.py --runs 5

Attacks: 80 connections again and again while the daemon may open 64 files; 20 requests of 15 million token ids, and
lists of 3 million bad words or stop tokens, again and again. Each run is repeated beside a process that burns as much
CPU time as the attacker did, without attacking. Bars: no core dies, the stream is exact, and the 99th percentile of its
gaps is at most twice that beside the burning process (median of the runs).
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
MAX_RATIO = 2.0
PATIENCE_MS = 120_000
PROMPT, TOKENS = [5, 6, 7, 8], 600  # of each request of the stream
_SPAWN = multiprocessing.get_context("spawn")


class Connection:
    """A frontend that sends messages as they are."""

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.socket = (context or zmq.Context.instance()).socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        hello = Hello(PROTOCOL_VERSION, b"", "attack", 1.0, os.urandom(16))
        self.socket.send_multipart(codec.encode(hello, codec.NO_INSTANCE, 0))
        self._ready: Ready | None = None

    def greet(self) -> None:
        ready = self.receive()
        if not isinstance(ready, Ready):
            raise SystemExit(f"expected a Ready, not {ready}")
        self._ready = ready

    def receive(self) -> Any:
        if not self.socket.poll(PATIENCE_MS):
            raise SystemExit("the core does not answer any more")
        return codec.decode(self.socket.recv_multipart()).message

    def encode(self, message: Any) -> list[Any]:
        assert self._ready is not None
        return codec.encode(message, self._ready.instance_id, self._ready.epoch)

    def send(self, message: Any) -> None:
        self.socket.send_multipart(self.encode(message))


# ---------------------------------------------------------------------- attacks


def connections(address: str, until: float) -> Counter[str]:
    """Open more connections than the core can have, and read the answers."""
    answers: Counter[str] = Counter()
    while time.monotonic() < until:
        with zmq.Context() as context:
            opened = [Connection(address, context).socket for _ in range(CONNECTIONS)]
            held = time.monotonic() + HOLD_SECONDS
            while time.monotonic() < held:
                time.sleep(0.01)
                for one in opened:
                    with contextlib.suppress(zmq.Again):
                        answers[KINDS[one.recv_multipart(zmq.NOBLOCK)[0][3]].__name__] += 1
            for one in opened:
                one.close()
    return answers


def requests(address: str, until: float, what: str) -> Counter[str]:
    """Send large requests that the core refuses."""
    attacker = Connection(address)
    attacker.greet()
    large = {
        "token ids": AddRequest(1, "", [5] * IDS, Sampling(1)),
        "bad words": AddRequest(1, "", [5], Sampling(1, bad_words=[[5]] * ENTRIES)),
        "stop tokens": AddRequest(1, "", [5], Sampling(1, stop_token_ids=[5] * ENTRIES)),
    }
    frames = attacker.encode(large[what])
    answers: Counter[str] = Counter()
    while time.monotonic() < until:
        for _ in range(REQUESTS):
            attacker.socket.send_multipart(frames, copy=False)
        ended = 0
        while ended < REQUESTS:
            message = attacker.receive()
            if isinstance(message, Outputs):
                ended += len(message.finished)
                answers.update(finished.error for finished in message.finished)
    return answers


def _attack(address: str, attack: str, seconds: float, pipe: Any) -> None:
    began, used = time.monotonic(), time.process_time()
    until = began + seconds
    answers = connections(address, until) if attack == "connections" else requests(address, until, attack)
    pipe.send((answers, (time.process_time() - used) / (time.monotonic() - began)))


def _burn(_: str, share: float, seconds: float, pipe: Any) -> None:
    """Use a share of a core."""
    until = time.monotonic() + seconds
    while (now := time.monotonic()) < until:
        while time.monotonic() < now + 0.01 * share:
            pass
        time.sleep(0.01 * max(0.0, 1 - share))
    pipe.send((Counter(), share))


# ---------------------------------------------------------------------- the stream


class Victim:
    """One stream after the other, each of the same prompt."""

    def __init__(self, address: str) -> None:
        self._connection = Connection(address)
        self._connection.greet()
        self._handle = 0
        self._expected = self._stream([])

    def _stream(self, gaps: list[float]) -> list[int]:
        self._handle += 1
        self._connection.send(AddRequest(self._handle, "", PROMPT, Sampling(TOKENS)))
        tokens: list[int] = []
        last = 0.0
        while True:
            message = self._connection.receive()
            if isinstance(message, Outputs):
                now = time.monotonic()
                if tokens:
                    gaps.append(now - last)
                last = now
                tokens += message.token_ids
                if message.finished:
                    return tokens

    def gaps_beside(self, target: Any, *args: Any) -> tuple[float, bool, Counter[str], float]:
        """→ the 99th percentile of the gaps while another process runs, whether all streams were exact, and what the
        process returns."""
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        gaps: list[float] = []
        exact = True
        while not ours.poll():
            if not process.is_alive() and not ours.poll(1):
                raise SystemExit("the attacker failed: see above")
            exact = self._stream(gaps) == self._expected and exact
        answers, share = ours.recv()
        process.join()
        return float(np.percentile(gaps, 99)), exact, answers, share


class Run(NamedTuple):
    beside_attack: float  # seconds
    beside_burning: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack")
    add_arguments(parser)
    args = parser.parse_args()
    bars: list[Bar] = []
    details: dict[str, Any] = {}
    for attack, descriptors in (("connections", DESCRIPTORS), ("token ids", 0), ("bad words", 0), ("stop tokens", 0)):
        with Daemon(threads=args.threads, descriptors=descriptors) as daemon:
            victim = Victim(daemon.address)
            runs: list[Run] = []
            answers: Counter[str] = Counter()
            all_exact = True
            for _ in range(args.runs):
                attacked, exact, got, share = victim.gaps_beside(_attack, daemon.address, attack, args.seconds)
                burning, also_exact, _, _ = victim.gaps_beside(_burn, daemon.address, share, args.seconds)
                runs.append(Run(attacked, burning))
                answers += got
                all_exact = all_exact and exact and also_exact
                print(f"{attack}: p99 {attacked * 1e3:.2f} ms, burning {burning * 1e3:.2f} ms; {got}", flush=True)
            deaths = daemon.deaths()
        ratio = median(run.beside_attack / run.beside_burning for run in runs)
        least, most = (median(run[at] for run in runs) * 1e3 for at in (1, 0))
        refused = answers["Refused"] if attack == "connections" else answers["InvalidRequestError"]
        bars += [
            Bar(f"{attack}: refused", f"{refused:,}", refused > 0),
            Bar("… deaths of the core (0)", str(len(deaths)), not deaths),
            Bar("… the stream's tokens", "exact" if all_exact else "not exact", all_exact),
            Bar(
                f"… p99 of its gaps, beside a burning process, ratio ({MAX_RATIO:g})",
                f"{most:.2f} ms, {least:.2f} ms, {ratio:.2f}",
                ratio <= MAX_RATIO,
            ),
        ]
        details[attack] = [run._asdict() for run in runs]
    return conclude(bars, details, args)


if __name__ == "__main__":
    sys.exit(main())
