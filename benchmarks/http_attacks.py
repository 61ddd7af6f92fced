"""Sends hostile HTTP requests to a server beside a stream, and measures the gaps between the stream's tokens.

    python benchmarks/http_attacks.py --runs 3

Each attack is repeated beside a process that burns as much CPU time as the attacker used, and the server's worker more
than for the stream alone (see attacks.py). The stream comes through the same worker. Bars: each request gets a status
4xx or a closed connection, no core and no worker dies, the stream is exact, and the 99th percentile of its gaps is at
most twice that beside burning.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil

from attacks import CLOSED, Beside, Victim, attack_beside
from bars import Bar, add_arguments, conclude
from daemon import Daemon
from http_server import HttpServer

MIB = 1 << 20
CHAT = "/v1/chat/completions"
TOKENS = 600  # of each answer of the stream
CONNECTIONS = 100  # that are slow at the same time
PAUSE_SECONDS = 0.05  # between the bytes of a slow client
PIPELINED = 500
NOT_READ = "answers not read"
START = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n".encode()
LARGE, CHUNKED = b"content-length: 104857600\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"
PART = b"a" * MIB  # of a large body


def post(body: bytes) -> bytes:
    return START + f"content-length: {len(body)}\r\n\r\n".encode() + body


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


def asked(content: str, **options: Any) -> bytes:
    return post(json.dumps({"messages": [{"role": "user", "content": content}], **options}).encode())


# ---------------------------------------------------------------------- attacks: each ends when `until` has come

Attack = Callable[[int, float], Counter[str]]


def _read(connection: socket.socket) -> str:
    """The status of the next answer, which is read to its end, or `CLOSED`."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in data:
            if not (part := connection.recv(65536)):
                return CLOSED
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head)
        left = (int(found[1]) if found else 0) - len(body)
        while left > 0 and (part := connection.recv(65536)):
            left -= len(part)
        return head.split()[1].decode()
    return CLOSED


def _again(*parts: bytes) -> Attack:
    """Sends the parts on a connection of its own, again and again, and reads one answer."""

    def attack(port: int, until: float) -> Counter[str]:
        answers: Counter[str] = Counter()
        while time.monotonic() < until:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                with contextlib.suppress(ConnectionError):  # closed before all was sent
                    for part in parts:
                        connection.sendall(part)
                answers[_read(connection)] += 1
        return answers

    return attack


def _pipelined(port: int, until: float) -> Counter[str]:
    answers: Counter[str] = Counter()
    while time.monotonic() < until:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(get("/nothing") * PIPELINED)
            data = b""
            while data.count(b"HTTP/1.1 ") < PIPELINED and (part := connection.recv(1 << 20)):
                data += part
            answers.update(status.decode() for status in re.findall(rb"HTTP/1.1 (\d+)", data))
    return answers


def _half_closed(port: int, until: float) -> Counter[str]:
    answers: Counter[str] = Counter()
    while time.monotonic() < until:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(asked("Tell me a story.", max_tokens=400, stream=True)[:-10])
            connection.shutdown(socket.SHUT_WR)
            answers[_read(connection)] += 1
    return answers


def _slow_uploads(port: int, until: float) -> Counter[str]:
    """Bodies of 100,000 bytes that come byte by byte, on many connections."""
    answers: Counter[str] = Counter()
    head = START + b"content-length: 100000\r\n\r\n"
    opened: list[socket.socket] = []
    while time.monotonic() < until:
        while len(opened) < CONNECTIONS:
            opened.append(socket.create_connection(("127.0.0.1", port)))
            opened[-1].sendall(head)
        for one in opened[:]:
            one.setblocking(False)
            try:
                one.send(b"[")
                one.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            except ConnectionError:
                answers[CLOSED] += 1
            else:
                one.setblocking(True)
                answers[_read(one)] += 1
            opened.remove(one)
            one.close()
        time.sleep(PAUSE_SECONDS)
    for one in opened:
        one.close()
    return answers


def _slow_readers(port: int, until: float) -> Counter[str]:
    """Many long answers on many connections, whose bytes nobody reads."""
    answers: Counter[str] = Counter()
    while time.monotonic() < until:
        opened = []
        for _ in range(CONNECTIONS):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            connection.sendall(get("/openapi.json") * 20)
            opened.append(connection)
            answers[NOT_READ] += 20
        time.sleep(max(0.0, min(1.0, until - time.monotonic())))
        for one in opened:
            one.close()
    return answers


def _silent(port: int, until: float) -> Counter[str]:
    """Connections that begin a request, and are dropped."""
    answers: Counter[str] = Counter()
    while time.monotonic() < until:
        opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        for one in opened:
            one.sendall(b"GET /hea")
        time.sleep(PAUSE_SECONDS)
        for one in opened:
            one.close()
        answers["dropped"] += CONNECTIONS
    return answers


ATTACKS: dict[str, Attack] = {
    "bodies of 100 MB": _again(START + LARGE, *[PART] * 100),
    "bodies of 100 MB in chunks": _again(START + CHUNKED, *[b"%x\r\n%b\r\n" % (MIB, PART)] * 100),
    "JSON of 1 MB, all brackets": _again(post(b"[" * MIB)),
    "JSON of 100,000 levels": _again(post(b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
    "prompts of 8 MB": _again(asked("word " * (8 * MIB // 5))),
    "prompts of 4 MB, as long as bodies may be": _again(asked("word " * (4 * MIB // 5))),
    "5,000 headers": _again(get("/health", *(f"x-{number}: y" for number in range(5000)))),
    "a header of 1 MB": _again(get("/health", "x: " + "y" * MIB)),
    "pipelined requests": _pipelined,
    "half-closed connections": _half_closed,
    "slow uploads": _slow_uploads,
    "slow readers": _slow_readers,
    "dropped connections": _silent,
}


class Target(NamedTuple):
    port: int
    pid: int  # of the worker
    share: float  # of a core, which the worker uses for the stream alone


def _attack(target: Target, what: str, seconds: float, pipe: Any) -> None:
    began, used = time.monotonic(), time.process_time() + cpu_of(target.pid)
    answers = ATTACKS[what](target.port, began + seconds) if what else _idle(seconds)
    ended = time.monotonic()
    share = (time.process_time() + cpu_of(target.pid) - used) / (ended - began)
    pipe.send(Beside(began, ended, max(0.0, share - target.share), answers))


def _idle(seconds: float) -> Counter[str]:
    time.sleep(seconds)
    return Counter()


def cpu_of(pid: int) -> float:
    """Seconds of CPU time that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


# ---------------------------------------------------------------------- the stream


class HttpVictim(Victim):
    """One streamed answer after the other, each to the same request, on one connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        story = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, "stream": True, "return_token_ids": True}
        self._request = asked("Tell me a story about a fox.", **story)
        self._expected = self._stream([])

    def _stream(self, gaps: list[tuple[float, float]]) -> list[int]:
        self._socket.sendall(self._request)
        data, tokens, last = b"", list[int](), 0.0
        while True:
            if not (part := self._socket.recv(65536)):
                raise SystemExit("the server has closed the stream's connection")
            data += part
            while b"\n\n" in data:
                event, _, data = data.partition(b"\n\n")
                at = event.find(b"data: ")
                if at < 0:
                    continue
                if event[at + 6 :].startswith(b"[DONE]"):
                    if len(tokens) != TOKENS:
                        raise SystemExit(f"an answer has {len(tokens)} tokens")
                    return tokens
                choices = json.loads(event[at + 6 :])["choices"]
                if ids := choices and choices[0].get("token_ids"):
                    now = time.monotonic()
                    if tokens:
                        gaps.append((last, now))
                    last = now
                    tokens += ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each attack")
    parser.add_argument("--only", choices=ATTACKS, help="this attack only")
    add_arguments(parser)
    args = parser.parse_args()
    bars: list[Bar] = []
    details: dict[str, Any] = {}
    flags = ("--body-timeout", "1", "--no-access-log")
    with (
        Daemon(threads=args.threads or 1) as daemon,
        HttpServer(daemon.folder, "--connect", daemon.address, *flags) as server,
    ):
        victim = HttpVictim(server.port)
        target = Target(server.port, server.process.pid, 0.0)
        target = target._replace(share=victim.gaps_beside(_attack, target, "", args.seconds)[2].share)
        for attack in [args.only] if args.only else ATTACKS:
            found = attack_beside(victim, args.runs, _attack, target, attack, args.seconds)
            told = ", ".join(f"{count:,} × {name}" for name, count in found.answers.items())
            fine = all(not name.isdigit() or 400 <= int(name) < 500 for name in found.answers)
            bars += [Bar(f"{attack}", told, bool(told) and fine), *found.bars()]
            details[attack] = [run._asdict() for run in found.runs]
        deaths, alive = daemon.deaths(), server.process.poll() is None
        traced = server.log.count("Traceback")
        bars += [
            Bar("deaths of the core (0)", str(len(deaths)), not deaths),
            Bar("tracebacks in the server's log, and the worker is alive", f"{traced}, {alive}", not traced and alive),
        ]
    return conclude(bars, details, args, "serving.md")


if __name__ == "__main__":
    sys.exit(main())
