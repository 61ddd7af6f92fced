"""What requests cost that ask for more than greedy decoding: the same model and prompts, once for each kind of request.

The core has a process of its own. All kinds take turns, a few steps each, with requests that are prefilled and of the
same length, so that a change of the machine's speed meets all of them. A ratio is the median over the rounds of the
time of greedy steps, divided by the time of steps of that kind next to them.

    python benchmarks/choices.py [--model FOLDER] [--requests 1,32] [--rounds 30]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import Any

from bars import Bar, add_arguments, conclude
from mainspring import EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
from make_models import save
from report import table

LIMIT = 0.95  # of the speed of greedy decoding
PROMPT = 64  # tokens
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain sampling": {"temperature": 1.0},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k, top-p and min-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "5 log probabilities": {"logprobs": 5},
    "JSON schema": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
}
BARS = ("top-p", "penalties", "5 log probabilities", "JSON schema")


def make_engine(model: str) -> LLMEngine:
    args = EngineArgs(
        model=model,
        max_model_len=2048,
        max_num_seqs=64,
        dtype="bfloat16",
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False,
    )
    return LLMEngine.from_engine_args(args)


def add(engine: LLMEngine, kind: str, requests: int, tokens: int) -> None:
    numbers = random.Random(1)
    for i in range(requests):
        prompt = [numbers.randrange(100, engine.engine_core.model.vocab_size - 100) for _ in range(PROMPT)]
        options = {"temperature": 0.0, "seed": i, **KINDS[kind]}
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **options)
        engine.add_request(f"{kind} {i}", {"prompt_token_ids": prompt}, params)


def measure(engine: LLMEngine, requests: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step, for each kind and round."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(1 + rounds):
        for kind in KINDS if turn % 2 else reversed(KINDS):
            add(engine, kind, requests, steps + 40)
            known = [0] * requests
            run_to(engine, known, 6)
            began, before = time.perf_counter(), sum(known)
            run_to(engine, known, 6 + steps)
            took = (time.perf_counter() - began) / (sum(known) - before) * requests
            assert engine.has_unfinished_requests(), f"{kind}: the requests ended early"
            for i in range(requests):
                engine.abort_request([f"{kind} {i}"])
            while engine.has_unfinished_requests():
                engine.step()
            times[kind] += [took] if turn else []  # the first round warms up
    return times


def run_to(engine: LLMEngine, known: list[int], tokens: int) -> None:
    """Run until each request has so many tokens, or its end. known: how many each has; brought up to date."""
    while engine.has_unfinished_requests() and min(known) < tokens:
        for out in engine.step():
            index = int(out.request_id.rpartition(" ")[2])
            known[index] = len(out.outputs[0].token_ids)
            if out.finished:
                known[index] = max(known[index], tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; default: llama-110m with random weights")
    parser.add_argument("--requests", default="1,32")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=32, help="timed steps of a kind in a round")
    add_arguments(parser)
    args = parser.parse_args()
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    engine = make_engine(args.model or str(save("llama-110m")))
    bars, rows, details = [], [], {}
    for requests in map(int, args.requests.split(",")):
        times = measure(engine, requests, args.rounds, args.steps)
        for kind, mine in times.items():
            ratio = statistics.median(greedy / own for greedy, own in zip(times["greedy"], mine, strict=True))
            milliseconds = 1e3 * statistics.median(mine)
            rows.append([kind, str(requests), f"{milliseconds:.2f}", f"{ratio:.2f}"])
            details[f"{kind}, {requests}"] = {"ms": milliseconds, "ratio": ratio}
            if kind in BARS:
                name = f"{kind}, {requests} request{'s' * (requests > 1)}: speed of greedy, at least {LIMIT}"
                bars.append(Bar(name, f"{ratio:.2f}", ratio >= LIMIT))
    engine.shutdown()
    more = table(["kind", "requests", "ms a step", "of greedy's speed"], rows)
    return conclude(bars, {"kinds": details}, args, "performance.md", more)


if __name__ == "__main__":
    sys.exit(main())
