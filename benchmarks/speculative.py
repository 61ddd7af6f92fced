"""The gain of speculation for repetitive text, and its cost for other text: the same requests and tokens with and
without speculation, in turn.

With greedy sampling a model with random weights soon repeats itself, which is the best case of n-gram lookup. With
temperature 1 it never repeats itself, the worst case. Besides the wall time, drafted and accepted tokens are counted.

    python benchmarks/speculative.py [--model FOLDER] [--draft FOLDER]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from bars import Bar, add_arguments, conclude
from mainspring import EngineArgs, LLMEngine, SamplingParams
from make_models import save
from report import table

LIMIT = 1.3  # speed-up, one request of repetitive text
PROMPT = 64  # tokens


def make_engine(model: str, speculative: dict[str, Any] | None) -> LLMEngine:
    args = EngineArgs(
        model=model,
        max_model_len=1024,
        max_num_seqs=64,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False,
        speculative_config=speculative,
    )
    return LLMEngine.from_engine_args(args, enable_multiprocessing=False)


def run(engine: LLMEngine, requests: int, temperature: float, tokens: int) -> tuple[float, list[Sequence[int]]]:
    """Seconds, and every request's tokens."""
    numbers, outputs = random.Random(1), {}
    for i in range(requests):
        prompt = [numbers.randrange(engine.engine_core.model.vocab_size) for _ in range(PROMPT)]
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    began = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output.outputs[0].token_ids
    return time.perf_counter() - began, [outputs[str(i)] for i in range(requests)]


def counted(engine: LLMEngine) -> tuple[int, int]:
    values = {one.name.partition(":")[2]: getattr(one, "value", 0) for one in engine.get_metrics()}
    return values["spec_decode_num_draft_tokens"], values["spec_decode_num_accepted_tokens"]


def compare(engines: Sequence[LLMEngine], requests: int, temperature: float, args: Any) -> dict[str, Any]:
    """`engines`: without and with speculation."""
    before = counted(engines[1])
    times: list[list[float]] = [[], []]
    for turn in range(1 + args.repeats):
        found = [run(engine, requests, temperature, args.tokens) for engine in engines]
        assert found[0][1] == found[1][1], "guesses changed the tokens"
        for mine, (seconds, _) in zip(times, found, strict=True):
            mine += [seconds] if turn else []  # the first one warms up
    guessed, accepted = (now - then for now, then in zip(counted(engines[1]), before, strict=True))
    plain, guessing = (requests * args.tokens / statistics.median(mine) for mine in times)
    return {
        "requests": requests,
        "temperature": temperature,
        "tokens_per_s": plain,
        "with_guesses": guessing,
        "ratio": statistics.median(a / b for a, b in zip(*times, strict=True)),
        "guessed_per_token": guessed / ((1 + args.repeats) * requests * args.tokens),
        "accepted": accepted / max(1, guessed),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a checkpoint (default: llama-110m of make_models.py)")
    parser.add_argument("--draft", help="folder of a draft model, in place of n-gram lookup")
    parser.add_argument("--guesses", type=int, default=4, help="most at once (default: %(default)s)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64], help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=256, help="of each request (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    add_arguments(parser)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = args.model or str(save("llama-110m"))
    how: dict[str, Any] = {"model": args.draft} if args.draft else {"method": "ngram"}
    engines = [make_engine(model, None), make_engine(model, {**how, "num_speculative_tokens": args.guesses})]
    rows = [compare(engines, requests, t, args) for t in (0.0, 1.0) for requests in args.requests]
    for engine in engines:
        engine.shutdown()
    head = ["requests, temperature", "tokens/s", "with guesses", "ratio", "guessed a token", "accepted"]
    shown = [
        [
            f"{row['requests']}, {row['temperature']:g}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['with_guesses']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['guessed_per_token']:.2f}",
            f"{row['accepted']:.0%}",
        ]
        for row in rows
    ]
    ratio, made = rows[0]["ratio"], "draft model" if args.draft else "n-gram lookup"
    name = f"one request of repetitive text, {made}: at least {LIMIT} times as fast"
    bars = [Bar(name, f"{ratio:.2f}", ratio >= LIMIT)]
    return conclude(bars, {"workloads": rows}, args, "performance.md", table(head, shown))


if __name__ == "__main__":
    sys.exit(main())
