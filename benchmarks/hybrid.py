"""Models with recurrent state: their speed beside other engines, what a conversation computes, and the time of a token
after short and long contexts.

    python benchmarks/hybrid.py [--rounds 3] [--write]

Two models have the layers of Qwen3.5, of which three of four keep a state, a third those of Mamba 2 alone. llama.cpp
runs in the environment of `peers.py`, on files of `make_models.py --forms gguf`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from pathlib import Path
from statistics import median

import torch

from bars import Bar, add_arguments, conclude
from compare import engine_versions, play, ratios
from mainspring import EngineArgs, LLMEngine, SamplingParams
from make_models import save
from report import CACHE
from resume import Log

SINGLES, BATCHES = (tuple(f"{kind}-hybrid-{size}" for size in ("110m", "0.6b")) for kind in ("single", "batch"))
PLAN = {
    **{workload: ["mainspring", "llamacpp"] for workload in SINGLES},
    **{workload: ["mainspring", "llamacpp", "transformers"] for workload in BATCHES},
}
TURNS, ASKED, ANSWERED = 8, 150, 50  # of a conversation: turns, and tokens of a question and of an answer
SHORT, LONG = 1_000, 30_000  # tokens of context
STEPS, ROUNDS = 64, 5  # timed after each context


def speed(rounds: int) -> list[Bar]:
    log = Log(CACHE / "hybrid.jsonl")
    played = play(PLAN, rounds, log)
    bars = []
    for workload, found in played.items():
        for engine in PLAN[workload][1:]:
            least = 4.0 if engine == "transformers" else 2.0 if workload in BATCHES else 1.0
            pairs = ratios(found, engine)
            spread = f"{median(pairs):.2f}× ({min(pairs):.2f} to {max(pairs):.2f})" if pairs else "not run"
            bars.append(
                Bar(
                    f"{workload}: faster than {engine} by ({least:.2f}×)",
                    spread,
                    bool(pairs) and median(pairs) >= least,
                )
            )
    print(engine_versions([one for found in played.values() for one in found]))
    return bars


def make_engine(model: Path, length: int) -> LLMEngine:
    args = EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=length, max_num_seqs=4, kv_cache_memory_bytes=1 << 30
    )
    return LLMEngine.from_engine_args(args, enable_multiprocessing=False)


def answer(engine: LLMEngine, prompt: list[int], tokens: int) -> tuple[list[float], list[int], int]:
    """Seconds between tokens, the tokens, and the prompt's tokens that were in the cache."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine.add_request("it", {"prompt_token_ids": prompt}, params)
    at, outputs = [], []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        at.append(time.perf_counter())
    last = outputs[-1]
    return [b - a for a, b in itertools.pairwise(at)], list(last.outputs[0].token_ids), last.num_cached_tokens or 0


def conversation() -> list[Bar]:
    engine, r = make_engine(save("qwen3.5-110m"), 4_096), random.Random(1)
    text: list[int] = []
    computed = 0
    for _ in range(TURNS):
        text += [r.randrange(100, 30_000) for _ in range(ASKED)]
        _, tokens, cached = answer(engine, text, ANSWERED)
        computed += len(text) - cached + ANSWERED
        text += tokens
    runner = engine.engine_core.core.worker.runner
    states = runner.model.states
    in_states = sum(tensor.nbytes for tensor in states.pool.values())
    snapshots = engine.engine_core.core.scheduler.state.kv.recurrent.snapshots.num_blocks - 1
    share = snapshots * states.state_bytes / (runner.pool.nbytes + in_states)
    return [
        Bar(
            f"{TURNS} turns of {ASKED + ANSWERED} tokens compute, for each new token (1.20)",
            f"{computed / len(text):.2f} ({computed:,} of {len(text):,})",
            computed <= 1.2 * len(text),
        ),
        Bar(
            "memory of snapshots, of that for blocks and states (25%)",
            f"{share:.0%}: {snapshots} snapshots of {states.state_bytes / 1e6:.1f} MB",
            share <= 0.25,
        ),
    ]


def growth() -> list[Bar]:
    engine, r = make_engine(save("mamba2-110m"), LONG + STEPS), random.Random(2)
    prompts = {length: [r.randrange(100, 30_000) for _ in range(length)] for length in (SHORT, LONG)}
    times: dict[int, list[float]] = {length: [] for length in prompts}
    for number in range(1 + ROUNDS):  # in the first one, prompts are computed
        for length, prompt in prompts.items():
            seconds, *_ = answer(engine, prompt, STEPS)
            if number:
                times[length].append(median(seconds))
    pairs = [after / before for before, after in zip(times[SHORT], times[LONG], strict=True)]
    ratio = median(pairs)
    return [
        Bar(
            f"Mamba 2: a token after {LONG:,} tokens, of one after {SHORT:,} (0.90 to 1.10)",
            f"{ratio:.2f}× ({1e3 * median(times[LONG]):.2f} ms and {1e3 * median(times[SHORT]):.2f} ms)",
            0.9 <= ratio <= 1.1,
        )
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3, help="of each workload (default: %(default)s)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    bars = [*conversation(), *growth(), *speed(args.rounds)]
    return conclude(bars, {"section": "hybrid"}, args, "performance.md")


if __name__ == "__main__":
    sys.exit(main())
