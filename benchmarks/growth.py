"""How a step's time grows with the context and with the batch, and whether it has a cliff.

A time is a cliff if it lies more than 25% above the straight line between its neighbours', or if it grew, from the one
before it, by over 25% more than in proportion. The model is llama-110m, taught to accept 32k positions; each prompt
continues the one before it, which the prefix cache still has. Steps are timed in one process, core and frontend.

    python benchmarks/growth.py [--longest 8192]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bars import Bar, add_arguments, conclude
from report import CACHE, DOCS, MODELS, table

SLACK = 1.25
STEPS = 16  # timed for each point; their median counts
PASSES = 3  # passes over all points, of which the fastest counts, because other programs can only slow a step down
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BATCH_PROMPT = 32
SHORTEST = 128


class Point(NamedTuple):
    x: float
    seconds: float


def cliffs(points: Sequence[Point], slack: float = SLACK) -> list[float]:
    """Cliffs, by the rule above; `points` in ascending order."""
    found = {b.x for a, b in pairwise(points) if b.seconds > slack * a.seconds * b.x / a.x}
    for a, b, c in zip(points, points[1:], points[2:], strict=False):
        line = a.seconds + (b.x - a.x) / (c.x - a.x) * (c.seconds - a.seconds)
        if b.seconds > slack * line:
            found.add(b.x)
    return sorted(found)


def measure(longest: int) -> dict[str, list[Point]]:
    """`context`: of one sequence's decoding step. `batch`: of a step that decodes that many. `prompt`: of each prompt
    token, at the middle of the stretch that was computed."""
    from mainspring import EngineArgs, LLMEngine, SamplingParams

    args = EngineArgs(
        model=str(MODELS / "llama-110m"),
        skip_tokenizer_init=True,
        hf_overrides={"max_position_embeddings": longest + 2 * STEPS},
        max_model_len=longest + 2 * STEPS,
        kv_cache_memory_bytes=(longest + 256 * (BATCH_PROMPT + 3 * STEPS)) * 12 * 2 * 768 * 2,
    )
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
    vocab = engine.engine_core.model.vocab_size
    rng, count = random.Random(5), 0

    def ids(length: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(length)]

    def step_times(prompts: list[list[int]], tokens: int) -> tuple[float, list[float]]:
        """Seconds to the first token, and those of every later step in which all requests got one."""
        nonlocal count
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            engine.add_request(str(count := count + 1), {"prompt_token_ids": prompt}, params)
        began = before = time.perf_counter()
        first, times, got_before = None, [], 0
        while engine.has_unfinished_requests():
            got = len(engine.step())
            now = time.perf_counter()
            if got and first is None:
                first = now - began
            if got == got_before == len(prompts):
                times.append(now - before)
            before, got_before = now, got
        assert first is not None
        return first, times

    prompt = ids(longest)
    step_times([ids(200)], 8)
    lengths = [SHORTEST << n for n in range((longest // SHORTEST).bit_length())]
    context, batch, prefill = defaultdict(list), defaultdict(list), []
    for _ in range(PASSES):
        for known, length in pairwise([0, *lengths]):
            first, times = step_times([prompt[:length]], 1 + STEPS)
            context[length].append(median(times))
            if len(prefill) < len(lengths):  # later points find the rest in the prefix cache
                prefill.append(Point((known + length) / 2, first / (length - known)))
    for _ in range(PASSES):
        for size in BATCHES:
            _, times = step_times([ids(BATCH_PROMPT) for _ in range(size)], size * BATCH_PROMPT // 2_048 + STEPS)
            batch[size].append(median(times))
    engine.shutdown()
    best = ([Point(x, min(times)) for x, times in found.items()] for found in (context, batch))
    return dict(zip(("context", "batch", "prompt"), (*best, prefill), strict=True))


TITLES = {
    "context": ("tokens before it", "ms for a token, one sequence"),
    "batch": ("sequences", "ms for a step that decodes all"),
    "prompt": ("tokens before it", "ms for a token of a prompt"),
}


def draw(measured: dict[str, list[Point]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, 3), measured.items(), strict=True):
        axes.plot([p.x for p in points], [1e3 * p.seconds for p in points], "o-")
        axes.set(yscale="log", xlabel=TITLES[name][0], title=TITLES[name][1])
        axes.set_xscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=100)
    print(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--longest", type=int, default=32_768)
    args = parser.parse_args()
    measured = measure(args.longest)
    bars = []
    for name, points in measured.items():
        found = cliffs(points)
        ends = " to ".join(f"{1e3 * p.seconds:.3g} at {p.x:g}" for p in (points[0], points[-1]))
        jumps = f"; cliffs at {', '.join(f'{x:g}' for x in found)}" if found else ""
        bar = f"{TITLES[name][1]}, by {TITLES[name][0]}"
        once = name == "prompt"  # measured once, so a cliff is not reported
        bars.append(Bar(bar, ends + jumps, None) if once else Bar(f"{bar} (no cliff)", ends + jumps, not found))
    tables = ["![the three tables below as curves](growth.png)"]
    for name, points in measured.items():
        head = [TITLES[name][0], *(f"{p.x:g}" for p in points)]
        tables.append(table(head, [[TITLES[name][1], *(f"{1e3 * p.seconds:.3g}" for p in points)]]))
    draw(measured, (DOCS if args.write else CACHE) / "growth.png")
    return conclude(bars, {"points": measured}, args, "performance.md", "\n\n".join(tables))


if __name__ == "__main__":
    sys.exit(main())
