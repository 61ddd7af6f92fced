"""What a step costs the first rank beside its forward pass, and the bytes that each other rank is sent for it.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --requests 256 --ranks 1 2 --steps 50

A tiny random model decodes. "plan" is the scheduler, "tell" is to write the plan to the other ranks, "sample" the
choice of tokens, "take in" the rest of the step. These are processor time of the first rank's main thread, so they do
not depend on what else the machine does. "forward" is the time that passes in the forward pass, with its sums.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from mainspring import EngineArgs, LLMEngine, SamplingParams
from report import ROOT, publish, table

PROMPT = 16  # tokens
PARTS = ("plan", "tell", "sample", "take in")


class Clock:
    """Seconds of each part of a step, by wrapping the functions that do it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)  # processor time
        self.passed: dict[str, float] = defaultdict(float)
        self.sent = 0  # bytes to one rank

    def time(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any) -> Any:
            began, work_began = time.perf_counter(), time.thread_time()
            try:
                return function(*args)
            finally:
                self.passed[part] += time.perf_counter() - began
                self.spent[part] += time.thread_time() - work_began

        setattr(owner, name, timed)

    def count(self, link: Any) -> None:
        send = link.send

        def counted(kind: Any, body: bytes) -> None:
            self.sent += len(body)
            send(kind, body)

        link.send = counted


def measure(model: Path, ranks: int, requests: int, steps: int) -> tuple[dict[str, float], float]:
    """Milliseconds of each part of a decode step, and bytes that a rank is sent for one: medians."""
    args = EngineArgs(
        str(model),
        tensor_parallel_size=ranks,
        max_num_seqs=requests,
        max_num_batched_tokens=max(2048, 2 * requests),
        max_model_len=256,
        num_gpu_blocks_override=1 + requests * 8,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    clock, found, sent = Clock(), defaultdict(list), []
    with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
        core: Any = engine.engine_core.core  # type: ignore[attr-defined]
        local = core.worker.local if ranks > 1 else core.worker
        clock.time(core.scheduler, "schedule", "plan")
        clock.time(local, "on_plan", "tell")
        clock.time(local.runner, "execute", "forward")
        clock.time(local.runner, "sample", "sample")
        if ranks > 1:
            clock.count(core.worker._ranks._links[1])
        core._most_steps = 1  # as several ranks do it
        params = SamplingParams(temperature=0.0, max_tokens=steps + 20, ignore_eos=True, detokenize=False)
        for number in range(requests):
            engine.add_request(str(number), {"prompt_token_ids": [2 + number % 300] * PROMPT}, params)
        while core.scheduler.stats().num_running < requests:
            core.step()
        for _ in range(steps):
            clock.spent.clear()
            clock.passed.clear()
            clock.sent, began = 0, time.thread_time()
            core.step()
            clock.spent["take in"] = time.thread_time() - began - sum(clock.spent.values())
            for part in PARTS:
                found[part].append(1e3 * clock.spent[part])
            found["forward"].append(1e3 * clock.passed["forward"])
            sent.append(clock.sent)
    return {part: median(values) for part, values in found.items()}, median(sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--write", action="store_true", help="put the table into its place in docs/performance.md")
    args = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))
    import tiny

    rows = []
    with tempfile.TemporaryDirectory(prefix="mainspring-ranks-") as folder:
        model = tiny.make("llama", Path(folder) / "model", num_attention_heads=4, num_key_value_heads=4)
        for requests in args.requests:
            for ranks in args.ranks:
                spent, sent = measure(model, ranks, requests, args.steps)
                beside = sum(spent[part] for part in PARTS)
                parts = [f"{spent[part]:.2f}" for part in PARTS]
                rows.append(
                    [f"{requests:,}", str(ranks), f"{beside:.2f}", *parts, f"{spent['forward']:.1f}", f"{sent:,.0f}"]
                )
                print(*rows[-1], sep="  ", flush=True)
    head = [
        "requests",
        "ranks",
        "beside the forward pass, ms",
        *(f"{part}, ms" for part in PARTS),
        "forward, ms",
        "bytes",
    ]
    publish("ranks", table(head, rows), args.write)


if __name__ == "__main__":
    main()
