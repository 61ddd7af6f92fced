"""Sends invalid frames to a daemon while real streams run on it.

    python benchmarks/fuzz.py --frames 1000000 --seed 1

Several processes send malformed, truncated, nested, oversized, replayed and out-of-order frames over connections with
and without a session, and bytes that are not ZeroMQ over bare sockets. Bars: the core and its supervisor survive, the
streams are exact, and resident memory stays within 5 MB of its value after the first tenth of the frames (medians of
each tenth).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec
import numpy as np
import psutil
import zmq

from bars import Bar, add_arguments, conclude
from daemon import Daemon, wait_for
from mainspring.ipc import codec
from mainspring.ipc.connection import ask_status
from mainspring.ipc.messages import (
    KINDS,
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Bye,
    Finished,
    Hello,
    ModelFacts,
    Outputs,
    Probe,
    Ready,
    Sampling,
    Started,
    StatusCall,
    Tensor,
    UtilityCall,
    UtilityResult,
)
from streams import Load, Reference, compare, make_specs

MB = 1_000_000
MEMORY_LIMIT = 5 * MB
SENDERS = 2
SESSIONS, STRANGERS = 3, 2  # connections of each kind, with and without a session
CORPUS = 3000  # messages that a sender draws from and mutates
SEND_SECONDS = 60.0  # seconds for the core to take a frame
WARM_TOKENS = 40_000  # of real streams, before the first frame
# A small pool, few slots and a small budget, so that the core soon has seen every shape of a step (oneDNN keeps code
# for each) and touched every block. A short queue, because some frames are valid requests that are kept. Then only the
# frames can make its memory grow.
SMALL = ["--num-gpu-blocks-override=512", "--max-num-seqs=32", "--max-num-batched-tokens=64"]
SMALL += ["--max-requests-per-frontend=16"]
# Make glibc free large blocks at once, so that resident memory is memory in use.
ENV = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_SPAWN = multiprocessing.get_context("spawn")
Frames = list[bytes]


# ---------------------------------------------------------------------- what is sent


class Corpus:
    """Invalid messages of every kind for a connection to this core."""

    def __init__(self, rng: random.Random, instance_id: bytes, epoch: int) -> None:
        self._rng, self._instance_id, self._epoch = rng, instance_id, epoch
        self.sorts: dict[str, Callable[[], Frames]] = {
            "malformed": self.garbage,
            "wrong header": self.wrong_header,
            "truncated": self.truncated,
            "mutated": self.mutated,
            "nested": self.nested,
            "oversized": self.oversized,
            "wrong values": self.wrong_values,
            "out of order": self.out_of_order,
            "replayed": self.replayed,
        }
        self._fixed = [self.valid() for _ in range(20)]

    def encode(self, message: Any, *arrays: np.ndarray) -> Frames:
        return [bytes(frame) for frame in codec.encode(message, self._instance_id, self._epoch, arrays)]

    def raw(self, kind: int, body: bytes) -> Frames:
        header = struct.pack(">2sBB8sI", b"ms", PROTOCOL_VERSION, kind, self._instance_id, self._epoch)
        return [header, body]

    def bytes(self, most: int) -> bytes:
        return self._rng.randbytes(self._rng.randint(0, most))

    def valid(self) -> Frames:
        rng = self._rng
        prompt = [rng.randrange(100, 1000) for _ in range(rng.randint(1, 12))]
        handle = rng.randrange(1, 1000)
        sampling = Sampling(rng.randint(1, 2), rng.randrange(-(2**63), 2**63), rng.choice((0.0, 1.0)))
        return self.encode(
            rng.choice(
                [
                    AddRequest(handle, "fuzz", prompt, sampling),
                    AddRequest(handle, "fuzz", prompt, sampling, output_token_ids=[5], age_s=3.0, resumed=True),
                    Abort([handle, handle + 1]),
                    UtilityCall(handle, "ping"),
                    UtilityCall(handle, "stats"),
                    StatusCall(),
                ]
            )
        )

    def garbage(self) -> Frames:
        return [self.bytes(64) for _ in range(self._rng.randint(1, 18))]

    def wrong_header(self) -> Frames:
        header, *rest = self.valid()
        changed = bytearray(header)
        for _ in range(self._rng.randint(1, 3)):
            changed[self._rng.randrange(len(changed))] = self._rng.randrange(256)
        return [bytes(changed)[: self._rng.choice((16, 16, 16, 15, 0))], *rest]

    def truncated(self) -> Frames:
        header, body, *rest = self.valid()
        return [header, body[: self._rng.randrange(len(body))], *rest][: self._rng.choice((1, 2, 2, 2))]

    def mutated(self) -> Frames:
        header, body, *rest = self.valid()
        changed = bytearray(body)
        for _ in range(self._rng.randint(1, 8)):
            changed[self._rng.randrange(len(changed))] = self._rng.randrange(256)
        return [header, bytes(changed), *rest]

    def nested(self) -> Frames:
        rng = self._rng
        deep = rng.choice((b"\x91", b"\x81\xa1a", b"\x81\x01")) * rng.choice((100, 1000, 5000, 15_000)) + b"\xc0"
        call = b"\x93\x01\xa4ping" + deep  # as arguments, which are decoded later
        return self.raw(rng.choice(list(KINDS)), deep) if rng.random() < 0.5 else self.raw(6, call)

    def oversized(self) -> Frames:
        rng = self._rng
        body = rng.choice(
            [
                b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
                b"\xdb\xff\xff\xff\xff",
                b"\x93\x01\xdf\xff\xff\xff\xff\x01",
                rng.randbytes(1000) * rng.randint(1, 50),
                msgspec.msgpack.encode([1, "long" * 20_000, [1], [1]]),
                msgspec.msgpack.encode([rng.randrange(2**62), "long", [7] * rng.randint(5000, 15_000), [1]]),
                msgspec.msgpack.encode([list(range(rng.randint(1000, 20_000)))]),
            ]
        )
        return self.raw(rng.choice(list(KINDS)), body) + [b"x" * rng.randint(0, 100)] * rng.choice((0, 0, 1, 14, 40))

    def wrong_values(self) -> Frames:
        rng, good = self._rng, Sampling(1)
        wrong = rng.choice([-1, 1 << 20, 2**62, -(2**63)])
        embeds = np.zeros((2, rng.randint(1, 8)), np.float32)
        described = rng.choice(
            [
                Tensor(rng.choice((0, 1, -1, 99)), "float32", [2, rng.choice((-1, 3, 2**60))]),
                Tensor(0, rng.choice(("float32", "object", "")), list(embeds.shape)),
                Tensor(0, "float32", [1] * 100),
            ]
        )
        handle = rng.randrange(1000, 2000)
        messages = [
            AddRequest(handle, "fuzz", [wrong], good),
            AddRequest(handle, "fuzz", [], good),
            AddRequest(handle, "fuzz", [7] * rng.choice((4096, 6000)), good),
            AddRequest(handle, "fuzz", [7], Sampling(wrong)),
            AddRequest(handle, "fuzz", [7], Sampling(0)),
            AddRequest(handle, "fuzz", [7], Sampling(1, temperature=rng.choice((-1.0, float("nan"), float("inf"))))),
            AddRequest(handle, "fuzz", [7], Sampling(1, top_p=rng.choice((0.0, -1.0, 2.0, float("nan"))))),
            AddRequest(handle, "fuzz", [7], Sampling(1, top_k=-5, min_p=7.0, min_tokens=-3)),
            AddRequest(handle, "fuzz", [7], Sampling(1, stop_token_ids=[wrong])),
            AddRequest(handle, "fuzz", [7], good, output_token_ids=[wrong] * 3, resumed=True),
            AddRequest(handle, "fuzz", [7], good, age_s=rng.choice((float("nan"), float("inf"), -1e300, 1e300))),
            AddRequest(handle, "fuzz", [7], good, priority=rng.choice((2**63 - 1, -(2**63), 2**64 - 1))),
            AddRequest(handle, "fuzz", [7], good, cache_salt="\0\ud7ff" * 99),
            Abort([-1, 2**63 - 1, *range(rng.randint(0, 100))]),
            Abort([]),
            UtilityCall(2**63, rng.choice(("__class__", "", "reset_prefix_cache", "pause_generation", "x" * 5000))),
            UtilityCall(1, rng.choice(("ping", "stats", "is_paused")), codec.encode_value([wrong, {"a": 1}])),
            UtilityCall(1, "ping", codec.encode_value("no list")),
        ]
        if rng.random() < 0.2:
            return self.encode(AddRequest(handle, "fuzz", [0, 0], good, prompt_embeds=described), embeds)
        return self.encode(rng.choice(messages))

    def out_of_order(self) -> Frames:
        """Messages with another epoch or instance, before any Hello, or of kinds that only a core sends."""
        rng = self._rng
        if rng.random() < 0.3:
            other = Corpus.__new__(Corpus)
            other._rng, other._instance_id, other._epoch = rng, rng.randbytes(8), self._epoch + rng.randint(-1, 1) & 7
            return other.valid()
        return self.encode(
            rng.choice(
                [
                    Hello(PROTOCOL_VERSION, b"", "again"),
                    Hello(rng.randrange(256), b"wrong", "x" * 300, rng.choice((-1.0, 0.0, float("nan"))), b"s"),
                    Ready(b"x" * 8, 1, ModelFacts(1, 1, 1, ""), b""),
                    Outputs([1], [1], [Started(1, 0.0, 0.0, 0)], [Finished(1, "stop")]),
                    UtilityResult(1),
                    Probe(),
                ]
            )
        )

    def replayed(self) -> Frames:
        return self._rng.choice(self._fixed)


def bare_bytes(rng: random.Random) -> bytes:
    """Bytes for a bare socket: no ZMTP, half of a greeting, or a peer that announces a frame of many gigabytes."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\0" + bytes(31)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    whole = greeting + bytes([4, len(ready)]) + ready
    huge = whole + b"\x02" + struct.pack(">Q", rng.choice((1 << 29, 1 << 40, 2**64 - 1))) + b"x" * 100
    return rng.choice([rng.randbytes(200), greeting[: rng.randrange(64)], whole, huge, whole + rng.randbytes(50)])


# ---------------------------------------------------------------------- who sends it


class _Sender:
    """One process's connections."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self._address, self._rng = address, rng
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.answers: Counter[str] = Counter()
        self.lost_sessions = 0
        # The first connections have a session.
        self._sockets = [self._wait_for_ready() for _ in range(SESSIONS)] + [self._socket() for _ in range(STRANGERS)]
        instance_id, epoch = self._instance
        corpus = Corpus(rng, instance_id, epoch)
        sorts = list(corpus.sorts)
        self._corpus = [(sort, corpus.sorts[sort]()) for sort in rng.choices(sorts, k=CORPUS)]

    def _socket(self) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDTIMEO, int(SEND_SECONDS * 1000))
        made.connect(self._address)
        return made

    def _wait_for_ready(self) -> zmq.Socket[bytes]:
        made = self._socket()
        hello = Hello(PROTOCOL_VERSION, b"", "fuzz", 1.0, os.urandom(16))
        made.send_multipart(codec.encode(hello, codec.NO_INSTANCE, 0))
        if not made.poll(SEND_SECONDS * 1000):
            raise SystemExit("the core does not greet any more")
        ready = codec.decode(made.recv_multipart()).message
        assert isinstance(ready, Ready), ready
        self._instance = ready.instance_id, ready.epoch
        return made

    def send(self, count: int) -> Counter[str]:
        """Send `count` frames; → the number of each kind."""
        rng = self._rng
        sent: Counter[str] = Counter()
        for at in range(count):
            if at % 2000 == 0:
                self._bare()
                sent["no ZeroMQ"] += 1
                continue
            sort, frames = rng.choice(self._corpus)
            rng.choice(self._sockets).send_multipart(frames, copy=True)
            sent[sort] += 1
            if at % 50 == 0:
                self._read(rng.randrange(len(self._sockets)))
        # One connection says Bye and continues. So requests that were accepted by accident do not accumulate.
        self._sockets[rng.randrange(SESSIONS)].send_multipart(codec.encode(Bye("fuzz"), *self._instance))
        return sent

    def _read(self, number: int) -> None:
        """Read the messages of a connection. Reconnect one that has lost its session or got one by accident."""
        kinds: Counter[str] = Counter()
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._sockets[number].recv_multipart(zmq.NOBLOCK)
                kinds[KINDS[frames[0][3]].__name__] += 1
        self.answers += kinds
        if number < SESSIONS and (kinds["Refused"] or kinds["Bye"]):
            self.lost_sessions += 1
            self._sockets[number].close()
            self._sockets[number] = self._wait_for_ready()
        elif number >= SESSIONS and kinds["Ready"]:
            self._sockets[number].close()
            self._sockets[number] = self._socket()

    def _bare(self) -> None:
        with socket.socket(socket.AF_UNIX) as bare, contextlib.suppress(OSError):
            bare.settimeout(5)
            bare.connect(self._address.removeprefix("ipc://"))
            bare.sendall(bare_bytes(self._rng))
            if self._rng.random() < 0.5:
                bare.recv(100)


def _send(address: str, number: int, seed: int, frames: int, counts: Any, pipe: Any) -> None:
    sender = _Sender(address, random.Random(f"{seed} {number}"))
    sent: Counter[str] = Counter()
    while counts[number] < frames:
        batch = sender.send(min(2000, frames - counts[number]))
        sent += batch
        counts[number] += batch.total()
    pipe.send((sent, sender.answers, sender.lost_sessions))


# ---------------------------------------------------------------------- what comes of it


class Memory:
    """Resident bytes of some processes over time."""

    def __init__(self, **pids: int) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self.samples: list[tuple[int, dict[str, int]]] = []  # (frames, bytes by name)

    def look(self, frames: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it crashed, which another bar reports
            self.samples.append((frames, {name: one.memory_info().rss for name, one in self._processes.items()}))

    def bar(self, name: str, frames: int) -> Bar:
        """Compare the median of each later tenth of the frames with that of the second. Medians, because messages in
        queues are no growth."""
        tenths = [
            [found[name] for sent, found in self.samples if tenth <= sent * 10 / frames < tenth + 1 + (tenth == 9)]
            for tenth in range(1, 10)
        ]
        first, *later = [median(tenth) for tenth in tenths if tenth]
        off = max((value - first for value in later), key=abs, default=0.0)
        peak = max(max(tenth) for tenth in tenths if tenth) - first
        measured = f"{first / MB:.1f} MB, then {off / MB:+.1f} MB at most (single samples {peak / MB:+.1f} MB)"
        return Bar(f"resident memory of the {name} from the first 10% on (±5 MB)", measured, abs(off) <= MEMORY_LIMIT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, help="default: a new one, printed")
    add_arguments(parser)
    args = parser.parse_args()
    args.seed = int.from_bytes(os.urandom(4), "big") if args.seed is None else args.seed
    print(f"seed {args.seed}", flush=True)
    specs = make_specs(60, random.Random(args.seed), tokens=(20, 200))
    reference = Reference(specs)
    reference.learn_all()
    with (
        Daemon(*SMALL, threads=args.threads, env=ENV) as daemon,
        Load(daemon.address, specs, ("sync", "async"), streams=4, seed=args.seed) as load,
    ):
        before = daemon.status()
        memory = Memory(core=before.core_pid, supervisor=before.supervisor_pid)
        wait_for(lambda: load.tokens() > WARM_TOKENS, "the streams are warm")
        began = time.monotonic()
        sent, answers, lost = _run(daemon, args, memory)
        seconds = time.monotonic() - began
        time.sleep(2.0)
        memory.look(args.frames)
        after = ask_status(daemon.address, 10.0).core
        records, unfinished = load.finish()
        deaths = daemon.deaths(lines=15)
    print("\n".join(deaths))
    tally = compare(records, reference)
    reference.close()
    lives = (after.core_pid, after.supervisor_pid, after.restarts) == (before.core_pid, before.supervisor_pid, 0)
    bars = [
        Bar("frames sent", f"{sent.total():,}, {sent.total() / seconds:,.0f} a second", sent.total() >= args.frames),
        *(Bar(f"… {sort}", f"{count:,}", None) for sort, count in sent.most_common()),
        Bar("… dropped by the core as malformed", f"{after.malformed_frames - before.malformed_frames:,}", None),
        Bar("crashes (0)", f"{after.restarts}", lives),
        Bar("real streams beside", tally.describe(), tally.exact and not unfinished),
        memory.bar("core", args.frames),
        memory.bar("supervisor", args.frames),
    ]
    samples = [[frames, found] for frames, found in memory.samples]
    details = {"seed": args.seed, "answers": answers, "lost_sessions": lost, "samples": samples}
    return conclude(bars, details, args)


def _run(daemon: Daemon, args: argparse.Namespace, memory: Memory) -> tuple[Counter[str], Counter[str], int]:
    """Send all frames, and sample the memory meanwhile."""
    counts = _SPAWN.RawArray("q", SENDERS)
    pipes, processes = [], []
    for number in range(SENDERS):
        ours, theirs = _SPAWN.Pipe()
        share = args.frames // SENDERS + (number < args.frames % SENDERS)
        process = _SPAWN.Process(
            target=_send, args=(daemon.address, number, args.seed, share, counts, theirs), daemon=True
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    shown = 0
    while any(process.is_alive() for process in processes) and not all(pipe.poll() for pipe in pipes):
        memory.look(sum(counts))
        if sum(counts) * 10 // args.frames > shown:
            shown = sum(counts) * 10 // args.frames
            now = memory.samples[-1][1]
            print(
                f"{shown * 10}%: core {now['core'] / MB:.1f} MB, supervisor {now['supervisor'] / MB:.1f} MB", flush=True
            )
        time.sleep(0.5)
    sent: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    lost = 0
    for pipe in pipes:
        if not pipe.poll(1):
            raise SystemExit("a sender failed: see above")
        one_sent, one_answers, one_lost = pipe.recv()
        sent, answers, lost = sent + one_sent, answers + one_answers, lost + one_lost
    return sent, answers, lost


if __name__ == "__main__":
    sys.exit(main())
