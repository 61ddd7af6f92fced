"""Kill the core again and again under HTTP streams, and compare their tokens with those of an undisturbed run.

    python benchmarks/http_kills.py --kills 20 --streams 64

A daemon with the embedded model serves one server, and `streams` clients ask for one long answer after another, until
the last kill; each kill (SIGKILL) comes at a random moment while at least half of the answers in flight have tokens.
Every answer must then be that of the same request on the same daemon without kills: the same tokens and text. Bars: all
answers are complete and equal, and no connection breaks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from statistics import median
from typing import Any

from bars import Bar, add_arguments, conclude
from daemon import Daemon
from http_server import HttpServer

TOKENS = 400  # of each answer
SETTLED = (0.1, 1.0)  # seconds between the first token after a kill and the next kill
ANIMALS = "fox owl bear mouse frog rabbit duck goat".split()
Answer = tuple[str, list[int]]  # the text and the token ids


def body_of(number: int) -> bytes:
    """The request with this number. Odd ones are greedy, the others are sampled."""
    options: dict[str, Any] = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}
    story = f"Tell me story {number} about a {ANIMALS[number % len(ANIMALS)]}."
    more = {"max_tokens": TOKENS, "stream": True, "ignore_eos": True, "return_token_ids": True}
    return json.dumps({"messages": [{"role": "user", "content": story}], **options, **more}).encode()


class Load:
    """Streams on a connection each.

    Attributes:
        answers: by the number of their request.
        in_flight: numbers of requests → tokens that have come.
        last_token: when the latest one came.
        broken: what went wrong.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.answers: dict[int, Answer] = {}
        self.in_flight: dict[int, int] = {}
        self.last_token = 0.0
        self.broken: list[str] = []

    async def ask(self, number: int) -> None:
        """One request, with its answer."""
        text, ids, self.in_flight[number] = "", [], 0
        body = body_of(number)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(head.encode() + body)
            done = False
            async for line in reader:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.broken.append(f"{number}: {event['error']['message']}")
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                    ids += choice.get("token_ids") or []
                    self.in_flight[number], self.last_token = len(ids), time.monotonic()
            writer.close()
            if not done:
                self.broken.append(f"{number}: the connection ended early")
        except OSError as error:
            self.broken.append(f"{number}: {error!r}")
        del self.in_flight[number]
        self.answers[number] = text, ids

    async def run(self, numbers: list[int], streams: int) -> None:
        """Answers to these requests, `streams` at a time."""
        waiting = iter(numbers)

        async def one() -> None:
            for number in waiting:
                await self.ask(number)

        await asyncio.gather(*(one() for _ in range(streams)))


async def disturbed(
    load: Load, daemon: Daemon, kills: int, streams: int, rng: random.Random
) -> tuple[list[float], list[int]]:
    """Streams until the last kill: the seconds from each kill to the next token, and the streams that each one met."""
    ended = asyncio.Event()
    numbers = iter(range(1 << 30))

    async def one() -> None:
        while not ended.is_set():
            await load.ask(next(numbers))

    tasks = [asyncio.ensure_future(one()) for _ in range(streams)]
    pauses, met = [], []
    try:
        for _ in range(kills):
            while sum(count > 0 for count in load.in_flight.values()) < streams // 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(rng.uniform(*SETTLED))
            status = await asyncio.to_thread(daemon.status)
            met.append(len(load.in_flight))
            killed = time.monotonic()
            os.kill(status.core_pid, signal.SIGKILL)
            await asyncio.to_thread(daemon.served_again, status.epoch)
            while load.last_token <= killed + 0.05:  # what was on its way at the kill does not count
                await asyncio.sleep(0.005)
            pauses.append(load.last_token - killed)
        ended.set()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return pauses, met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    add_arguments(parser)
    args = parser.parse_args()
    with (
        Daemon(f"--max-num-seqs={args.streams}", f"--max-restarts={args.kills}", threads=args.threads) as daemon,
        HttpServer(daemon.folder, "--connect", daemon.address, "--no-access-log") as server,
    ):
        load, quiet = Load(server.port), Load(server.port)
        pauses, met = asyncio.run(disturbed(load, daemon, args.kills, args.streams, random.Random(args.seed)))
        deaths = len(daemon.deaths())
        asyncio.run(quiet.run(sorted(load.answers), args.streams))
        assert len(daemon.deaths()) == deaths, "the core died in the undisturbed run"
    different = [number for number, found in load.answers.items() if found != quiet.answers[number]]
    short = [number for number, (_, ids) in quiet.answers.items() if len(ids) != TOKENS]
    for line in [*load.broken, *quiet.broken][:10]:
        print(line, file=sys.stderr)
    bars = [
        Bar("kills of the core", str(deaths), deaths == args.kills),
        Bar("streams in flight at a kill, least", str(min(met)), min(met) >= args.streams // 2),
        Bar("answers", str(len(load.answers)), None),
        Bar("answers that broke off or failed", str(len(load.broken)), not load.broken),
        Bar(f"answers without kills that have not {TOKENS} tokens", str(len(short)), not (short or quiet.broken)),
        Bar("answers that differ from those without kills", str(len(different)), not different),
        Bar("from a kill to the next token, median", f"{median(pauses):.1f} s", None),
        Bar("… longest", f"{max(pauses):.1f} s", None),
    ]
    return conclude(bars, {"pauses": pauses, "different": different}, args, "serving.md")


if __name__ == "__main__":
    sys.exit(main())
