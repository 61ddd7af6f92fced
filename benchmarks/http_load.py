"""The HTTP server under load: processor time for a token, latency, memory, one-token completions a second, and the time
until it is ready.

The core is a stand-in without a model, which emits tokens at a set rate. The clients are raw sockets in this process.
The latency of a token is the time from the core's step to the client's bytes. It is measured under two schedules:

- spread: each stream has its own phase, so the tokens come one after another. The latency is that of one token.
- burst: all streams get their token in the same step, as from an engine whose batch they are. A token then also waits
  for those that the worker writes before it: with 256 streams half of the step's writes, at the median.

python benchmarks/http_load.py --streams 256 --rate 20
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import heapq
import io
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import msgspec
import psutil

from http_floor import LOGGED, TEXT
from mainspring.core.__main__ import handle
from mainspring.demo import MODEL_PATH
from mainspring.ipc.codec import encode_value
from mainspring.ipc.config import EngineConfig
from mainspring.ipc.messages import AddRequest, CoreStatus, Finished, ModelFacts, Outputs, Ready, Started
from mainspring.ipc.server import CoreServer
from mainspring.ipc.transport import Endpoints
from report import CACHE, DOCS, publish, table

WARM_SECONDS = 2.0
VLLM = CACHE / "peers" / "vllm" / "bin" / "python"
TIMES_VLLM = 3.0  # one-token completions, at least
BARS = {"cpu": 32.0, "memory": 80.0, "ready": 0.6, "spread_ms": 1.0}
TOKEN = 300  # that the stand-in emits; its text is `TEXT`
FIRST_LIMIT = 4000  # max_tokens of the first stream. The number names the stream to the core, so each has its own.


class RatedCore:
    """Every request gets a token each 1/rate seconds; with rate 0 as fast as it goes.

    Args:
        spread: each request has a phase of its own; else all get their token in one step.
        log: file of `LOGGED` records, one for each token.
    """

    def __init__(self, rate: float, spread: bool, log: io.RawIOBase) -> None:
        self.config, self.model = EngineConfig(), ModelFacts(1000, 64, 4096 + 1024, "float32")
        self._period, self._due, self._spread, self._log = 1 / rate if rate else 0.0, 0.0, spread, log
        self._requests: dict[tuple[int, int], list[int]] = {}  # frontend, handle → tokens so far, tokens wanted
        self._phases: list[tuple[float, tuple[int, int]]] = []  # heap: when a request gets its next token
        self._random = random.Random(0)

    def connect(self, *args: Any) -> None:
        pass

    def set_credit(self, *args: Any) -> None:
        pass

    def add_request(self, frontend: int, request: AddRequest, *args: Any) -> None:
        place = frontend, request.handle
        self._requests[place] = [0, request.sampling.max_tokens]
        if self._spread:
            heapq.heappush(self._phases, (time.monotonic() + self._random.random() * self._period, place))

    def abort(self, frontend: int, handles: Sequence[int]) -> None:
        for one in handles:
            self._requests.pop((frontend, one), None)

    def disconnect(self, frontend: int) -> None:
        self.abort(frontend, [one for owner, one in self._requests if owner == frontend])

    def call(self, *args: Any) -> msgspec.Raw:
        return encode_value(None)

    def step(self) -> dict[int, Outputs]:
        """The next outputs, when they are due."""
        due = self._phases[0][0] if self._phases else self._due
        if (left := due - time.monotonic()) > 0:
            time.sleep(min(left, 0.0005))
        now = time.monotonic()
        outputs: dict[int, Outputs] = {}
        for place in self._take_due(now):
            frontend, number = place
            progress = self._requests[place]
            out = outputs.setdefault(frontend, Outputs([], []))
            out.handles.append(number)
            out.token_ids.append(TOKEN)
            if not progress[0]:
                out.started.append(Started(number, 0.0, 0.0, 0))
            progress[0] += 1
            self._log.write(LOGGED.pack(progress[1], now))
            if progress[0] == progress[1]:
                out.finished.append(Finished(number, "length"))
                del self._requests[place]
        return outputs

    def _take_due(self, now: float) -> list[tuple[int, int]]:
        """The requests that get a token now."""
        if not self._spread:
            if not self._requests or now < self._due:
                return []
            self._due = max(self._due + self._period, now - self._period)
            return list(self._requests)
        found = []
        while self._phases and self._phases[0][0] <= now:
            due, place = heapq.heappop(self._phases)
            if place in self._requests:
                found.append(place)
                heapq.heappush(self._phases, (due + self._period, place))
        return found

    @property
    def is_idle(self) -> bool:
        return not self._requests


def run_core(address: str, rate: float, spread: bool, log: str) -> None:
    """Serve a `RatedCore`, which writes the time of each token into the file `log`."""
    with open(log, "wb", buffering=1 << 16) as file:
        core, instance = RatedCore(rate, spread, file), secrets.token_bytes(8)
        status = CoreStatus(1, os.getpid(), os.getpid(), "serving")
        server = CoreServer(Endpoints(address), instance, 1, status, core.config.service_config)
        server.announce(Ready(instance, 1, core.model, msgspec.json.encode(core.config)))
        while True:
            for event in server.receive(wait=core.is_idle):
                handle(core, server, event)  # type: ignore[arg-type]
            for frontend, message in core.step().items():
                server.send(frontend, message)
            if core.is_idle:
                file.flush()


class Client(asyncio.Protocol):
    """One connection. It counts tokens, and notes when they come."""

    def __init__(self, body: bytes, again: bool) -> None:
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self._request, self._again = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body, again
        self.tokens = self.answers = self.failed = 0
        self.times: list[float] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._again:  # answers that are not streamed, one after another
            if data.endswith(b"}"):
                self.answers += 1
                self.failed += b'"finish_reason":"length"' not in data or b'"content":"%b"' % TEXT not in data
                self._transport.write(self._request)
            return
        if count := data.count(TEXT):
            self.times += [time.monotonic()] * count
            self.tokens += count


class Figures(NamedTuple):
    cpu_us: float  # processor time of the worker for a token
    tokens_s: float
    p50_ms: float  # from the core's step to the client's bytes
    p99_ms: float
    memory_mib: float


def body_of(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Tell me a story."}], **fields}).encode()


async def streams(port: int, worker: psutil.Process, count: int, seconds: float, log: Path) -> Figures:
    loop = asyncio.get_running_loop()
    bodies = [body_of(max_tokens=FIRST_LIMIT + at, stream=True, ignore_eos=True) for at in range(count)]
    made = [functools.partial(Client, body, again=False) for body in bodies]
    clients = [await loop.create_connection(one, "127.0.0.1", port) for one in made]
    await asyncio.sleep(WARM_SECONDS)
    cpu, began = worker.cpu_times(), time.monotonic()
    before = sum(client.tokens for _, client in clients)
    await asyncio.sleep(seconds)
    after, ended = worker.cpu_times(), time.monotonic()
    tokens = sum(client.tokens for _, client in clients) - before
    used = after.user + after.system - cpu.user - cpu.system
    for transport, _ in clients:
        transport.close()
    await asyncio.sleep(0.5)  # the requests are aborted, and the core without them writes its log
    emitted = defaultdict(list)
    for limit, moment in LOGGED.iter_unpack(log.read_bytes()):
        emitted[limit].append(moment)
    late = [
        1000 * (came - gone)
        for limit, (_, client) in enumerate(clients, FIRST_LIMIT)
        for came, gone in zip(client.times, emitted[limit], strict=False)  # the last were on their way at the end
        if began < gone < ended
    ]
    memory = worker.memory_info().rss / 2**20
    return Figures(1e6 * used / tokens, tokens / (ended - began), median(late), quantiles(late, n=100)[98], memory)


async def completions(port: int, worker: psutil.Process, count: int, seconds: float) -> tuple[float, float]:
    """One-token answers a second, and the processor time for each in microseconds."""
    loop = asyncio.get_running_loop()
    body = body_of(max_tokens=1)
    clients = [(await loop.create_connection(lambda: Client(body, True), "127.0.0.1", port)) for _ in range(count)]
    await asyncio.sleep(1.0)
    cpu, began = worker.cpu_times(), time.monotonic()
    before = sum(client.answers for _, client in clients)
    await asyncio.sleep(seconds)
    after, ended = worker.cpu_times(), time.monotonic()
    answers = sum(client.answers for _, client in clients) - before
    if failed := sum(client.failed for _, client in clients):
        raise SystemExit(f"{failed} answers are no completions")
    for transport, _ in clients:
        transport.close()
    used = after.user + after.system - cpu.user - cpu.system
    return answers / (ended - began), 1e6 * used / answers


@contextlib.contextmanager
def processes(
    folder: Path, rate: float, *options: str, spread: bool = False
) -> Iterator[tuple[int, psutil.Process, float]]:
    """A stand-in core and a server beside it: the port, the worker, and the seconds until it was ready."""
    address = f"ipc://{folder}/core.sock"
    command = [sys.executable, __file__, "--core", address, "--rate", str(rate), "--log", str(folder / "log")]
    command += ["--spread"] if spread else []
    core = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while not (folder / "core.sock").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    command = [sys.executable, "-P", "-m", "mainspring.cli.main", "serve", "--connect", address, "--port", "0"]
    command += ["--tokenizer", str(MODEL_PATH), "--no-access-log", *options]
    # modules are compiled once, as where the package is installed
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(folder / "cache"), "MAINSPRING_LOG_LEVEL": "WARNING"}
    try:
        with server(command, environment) as found:
            yield found
    finally:
        core.terminate()
        core.wait()


@contextlib.contextmanager
def server(command: list[str], environment: dict[str, str]) -> Iterator[tuple[int, psutil.Process, float]]:
    """A server that says on its first line where it is ready: as `processes`."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = time.monotonic() - began
        yield int(line.split(";")[0].rpartition(":")[2]), psutil.Process(process.pid), ready
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--starts", type=int, default=3, help="for the time until it is ready")
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM's server (peers.py installs it)")
    parser.add_argument("--check", action="store_true", help="end with an error if a bar is missed")
    parser.add_argument("--write", action="store_true", help="put the table into docs/serving.md")
    parser.add_argument("--core", help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)
    parser.add_argument("--spread", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.core:
        run_core(args.core, args.rate, args.spread, args.log)
        return
    with tempfile.TemporaryDirectory(prefix="ms-") as name:
        folder, starts = Path(name), []
        for _ in range(1 + args.starts):
            with processes(folder, args.rate) as (port, worker, ready):
                starts.append(ready)
        del starts[0]  # which compiled the modules
        found = {}
        for kind in ("spread", "burst"):
            with processes(folder, args.rate, spread=kind == "spread") as (port, worker, ready):
                found[kind] = asyncio.run(streams(port, worker, args.streams, args.seconds, folder / "log"))
        with processes(folder, 0) as (port, worker, ready):
            rate, each = asyncio.run(completions(port, worker, 64, args.seconds / 2))
        command = [sys.executable, str(Path(__file__).with_name("http_floor.py")), str(args.rate), str(folder / "log")]
        with server(command, dict(os.environ)) as (port, worker, _):
            floor = asyncio.run(streams(port, worker, args.streams, args.seconds, folder / "log"))
        if args.vllm:
            command = [str(VLLM), str(Path(__file__).with_name("vllm_server.py")), str(MODEL_PATH)]
            with server(command, {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"}) as (port, worker, _):
                other, other_each = asyncio.run(completions(port, worker, 64, args.seconds / 2))
    few = f"{args.streams} streams, {args.rate:g} tokens/s each"
    memory = max(one.memory_mib for one in found.values())
    measured = {
        "cpu": found["burst"].cpu_us,
        "memory": memory,
        "ready": median(starts),
        "spread_ms": found["spread"].p50_ms,
    }
    missed = [f"{name}: {measured[name]:.2f}, bar {bar}" for name, bar in BARS.items() if measured[name] > bar]

    def against(name: str) -> str:
        verdict = "**FAIL**" if measured[name] > BARS[name] else "pass"
        return f"at most {BARS[name]:g}: {verdict}"

    rows: list[list[str]] = []
    for kind, what in (("spread", "tokens one after another"), ("burst", "all tokens in one step")):
        one = found[kind]
        rows += [
            [
                f"{few}, {what}: processor time of the worker for a token",
                f"{one.cpu_us:.1f} µs",
                against("cpu") if kind == "burst" else "",
            ],
            ["… tokens a second", f"{one.tokens_s:.0f}", ""],
            [
                "… from the core's step to the client's bytes, p50",
                f"{one.p50_ms:.2f} ms",
                against("spread_ms") if kind == "spread" else "",
            ],
            ["… p99", f"{one.p99_ms:.2f} ms", ""],
        ]
    times = found["burst"].cpu_us / floor.cpu_us
    rows += [
        [
            "the same by a bare server without an engine",
            f"{floor.cpu_us:.1f} µs, so ours takes {times:.2f}× as much",
            "",
        ],
        ["… from its step to the client's bytes, p50", f"{floor.p50_ms:.2f} ms", ""],
        ["memory of the worker after it", f"{memory:.0f} MiB", against("memory")],
        ["completions of one token a second, 64 connections", f"{rate:.0f}", ""],
        ["… processor time of the worker for one", f"{each:.0f} µs", ""],
    ]
    if args.vllm:
        # a server that waits for its core's stand-in could make more, so its processor time counts as well
        fewer = min(rate / other, other_each / each)
        if fewer < TIMES_VLLM:
            missed.append(f"of vLLM's completions: {fewer:.2f}, bar {TIMES_VLLM}")
        verdict = f"at least {TIMES_VLLM:g}, in both: {'pass' if fewer >= TIMES_VLLM else '**FAIL**'}"
        rows += [
            ["the same with vLLM's server", f"{other:.0f}, so ours makes {rate / other:.2f}× as many", verdict],
            [
                "… processor time of that server for one",
                f"{other_each:.0f} µs, {other_each / each:.2f}× as much as ours",
                "",
            ],
        ]
    rows.append(["ready beside a running core, median", f"{median(starts):.2f} s", against("ready")])
    publish("http", table(["`mainspring serve`, one worker", "", "bar"], rows), args.write, DOCS / "serving.md")
    if missed and args.check:
        raise SystemExit("; ".join(missed))


if __name__ == "__main__":
    main()
