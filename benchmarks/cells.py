"""The arithmetic of a large installation: how many frontends, connections and messages a number of GPUs needs.

    python benchmarks/cells.py --gpus 1000 --streams 1000000 --write

Nothing of this size was run. The processor time of a frontend for a token is measured here, with the embedded model;
the rest is multiplication, and `--help` names what it assumes.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from typing import NamedTuple

from bars import Bar, add_arguments, conclude
from mainspring import AsyncLLMEngine, EngineArgs, SamplingParams
from mainspring.ipc.params import RequestOutputKind
from report import table

STREAMS, TOKENS = 64, 200  # of the measurement
TOKEN_BYTES = 10  # of a token on the wire, its share of the message included (`make bench-ipc`)


class Cell(NamedTuple):
    """One of the independent parts of an installation."""

    gpus: int
    streams: float
    frontends: int
    connections: int  # of frontends with cores
    messages_s: float  # that cores send, in a second
    messages_s_frontend: float  # that one frontend receives


def frontend_seconds() -> float:
    """Processor time of this process for one token of a stream, its core being another process."""

    async def run() -> float:
        engine = AsyncLLMEngine.from_engine_args(EngineArgs(max_num_seqs=STREAMS))
        wanted = SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )

        async def read(number: int) -> int:
            prompt = {"prompt_token_ids": [5 + number % 50] * 8}
            return sum([len(out.outputs[0].token_ids) async for out in engine.generate(prompt, wanted, str(number))])

        await read(-1)
        began = time.process_time()
        tokens = await asyncio.gather(*(read(number) for number in range(STREAMS)))
        took = time.process_time() - began
        engine.shutdown()
        return took / sum(tokens)

    return asyncio.run(run())


def cell_of(gpus: int, streams: float, rate: float, token_s: float, gpus_a_core: int, load: float) -> Cell:
    """A cell of `gpus`, whose `streams` get `rate` tokens a second each. A step brings a stream one token, so a core
    sends each frontend `rate` messages a second."""
    cores = gpus // gpus_a_core
    frontends = math.ceil(streams * rate * token_s / load)
    return Cell(gpus, streams, frontends, frontends * cores, frontends * cores * rate, cores * rate)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--gpus-a-core", type=int, default=1)
    parser.add_argument("--load", type=float, default=0.7, help="share of a processor core that a frontend may use")
    parser.add_argument("--cells", type=int, nargs="+", default=[16, 64, 256, 1000], help="GPUs of a cell")
    add_arguments(parser)
    args = parser.parse_args()
    token_s = frontend_seconds()
    rows = []
    for gpus in args.cells:
        cell = cell_of(gpus, args.streams * gpus / args.gpus, args.rate, token_s, args.gpus_a_core, args.load)
        rows.append(
            [
                f"{gpus:,}",
                f"{args.gpus / gpus:.1f}",
                f"{cell.streams:,.0f}",
                f"{cell.frontends:,}",
                f"{cell.connections:,}",
                f"{cell.messages_s:,.0f}",
                f"{cell.messages_s_frontend:,.0f}",
                f"{gpus / args.gpus:.1%}",
            ]
        )
    tokens_s = args.streams * args.rate
    bars = [
        Bar("a frontend's processor time for a token of a stream", f"{token_s * 1e6:.1f} µs", None),
        Bar("tokens a second of all streams", f"{tokens_s:,.0f}", None),
        Bar("… as bytes from cores to frontends", f"{tokens_s * TOKEN_BYTES / 1e6:,.0f} MB/s", None),
        Bar("processor cores of all frontends", f"{math.ceil(tokens_s * token_s / args.load):,}", None),
    ]
    heads = [
        "GPUs of a cell",
        "cells",
        "streams",
        "frontends",
        "connections",
        "messages/s",
        "… of a frontend",
        "lost with a cell",
    ]
    return conclude(bars, {"section": "cells"}, args, "scaling.md", table(heads, rows))


if __name__ == "__main__":
    sys.exit(main())
