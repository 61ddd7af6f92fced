"""The gain from host memory behind the KV cache: requests with texts that together are twice the size of the pool.

The texts are used in turn, so each is evicted before it is used again. Engines with and without `kv_offloading_size`
take turns in one run; the medians of the rounds after the first, in which nothing is cached, are compared. Both must
give the same tokens.

    python benchmarks/offload.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from mainspring import LLM, SamplingParams
from make_models import save
from report import publish, table

BLOCK_SIZE = 16
BLOCK_BYTES = 12 * 2 * 768 * 2 * BLOCK_SIZE  # of llama-110m, in bf16
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)


def rounds(texts: int, length: int, count: int) -> list[list[dict[str, Any]]]:
    r = random.Random(0)
    bodies = [[r.randrange(100, 31_000) for _ in range(length)] for _ in range(texts)]
    return [
        [{"prompt_token_ids": body + [r.randrange(100, 31_000) for _ in range(16)]} for body in bodies]
        for _ in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a llama-110m (default: made)")
    parser.add_argument("--texts", type=int, default=16, help="number of texts (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1_024, help="tokens of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds over all texts (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args()
    blocks = args.texts * args.length // BLOCK_SIZE
    settings = {
        "model": args.model or str(save("llama-110m")),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": args.length + 64,
        "max_num_batched_tokens": 1_024,
        "max_num_seqs": 4,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": blocks // 2,
    }
    engines = {
        "without": LLM(**settings),
        "kv_offloading_size": LLM(**settings, kv_offloading_size=1.25 * blocks * BLOCK_BYTES / 2**30),
    }
    asked = rounds(args.texts, args.length, args.rounds)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for prompts in asked:
        tokens = {}
        for name, llm in engines.items():
            began = time.perf_counter()
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
            seconds[name].append(time.perf_counter() - began)
            tokens[name] = [list(output.outputs[0].token_ids) for output in outputs]
        if len({str(each) for each in tokens.values()}) > 1:
            raise SystemExit("the tokens differ")
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    found = {}
    for name, llm in engines.items():
        counters = {m.name.partition(":")[2]: m for m in llm.get_metrics()}
        kinds = ("prefix_cache_queries", "prefix_cache_hits", "prefix_cache_host_hits")
        found[name] = {kind: counters[kind].value for kind in kinds}  # type: ignore[attr-defined]
        llm.llm_engine.shutdown()
    ratio = medians["without"] / medians["kv_offloading_size"]
    rows = [
        [
            name,
            f"{seconds[name][0]:.2f} s",
            f"{medians[name]:.2f} s",
            f"{found[name]['prefix_cache_hits'] / found[name]['prefix_cache_queries']:.0%}",
            f"{found[name]['prefix_cache_host_hits'] / found[name]['prefix_cache_queries']:.0%}",
        ]
        for name in engines
    ]
    head = ["engine", "first round", "later rounds, median", "prompt tokens found", "in host memory"]
    said = f"{args.texts} texts of {args.length} tokens, a pool of half of that: {ratio:.2f} times as fast."
    publish("offload", f"{table(head, rows)}\n\n{said}", args.write)
    if args.json:
        result = {"seconds": seconds, "medians": medians, "found": found, "ratio": ratio, "settings": settings}
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
