"""Clockwork at a real size: the checks of tests/test_clockwork.py on a model of make_models.py, with 1 and 2 threads.

Each way of serving 32 greedy and sampled requests must give the tokens of each request alone with 1 thread.

    python benchmarks/clockwork.py [--model qwen3.5-110m] [--quantization int8]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from bars import Bar, add_arguments, conclude
from make_models import save
from report import MODELS, ROOT

THREADS = (1, 2)
NUM_REQUESTS = 32
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "in a batch": {"enable_prefix_caching": False},
    "in chunks": {"enable_prefix_caching": False, "max_num_batched_tokens": 29},
    "after a cache hit": {},
    "after preemption": {"num_gpu_blocks_override": 40, "max_num_seqs": 16, "max_num_batched_tokens": 64},
}


def serve(model: str, settings: dict[str, Any]) -> dict[str, list[list[int]]]:
    """The tokens of each request in each way of serving, in one process whose number of threads is set by its
    environment."""
    sys.path.append(str(ROOT / "tests"))
    from test_clockwork import make_engine, requests, run, stats

    outputs = {}
    for way, own in WAYS.items():
        engine = make_engine(str(MODELS / model), **settings, **own)
        asked = requests(engine, NUM_REQUESTS)
        if way == "after a cache hit":
            run(engine, asked)
        outputs[way] = run(engine, asked)
        seen = stats(engine)
        if way == "after a cache hit" and not seen.prefix_hits:
            raise SystemExit("nothing came from the cache")
        if way == "after preemption" and not seen.num_preemptions:
            raise SystemExit("nothing was preempted")
        engine.shutdown()
    return outputs


def in_a_process(threads: int, model: str, settings: dict[str, Any]) -> dict[str, list[list[int]]]:
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, "--model", model, "--serve", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(done.stderr)
    outputs: dict[str, list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return outputs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--model", default="llama-110m")
    parser.add_argument("--quantization", help="of the weights, as the engine's option")
    parser.add_argument("--ranks", type=int, nargs="+", help="tensor_parallel_size, each with one thread a rank")
    parser.add_argument("--parts", type=int, default=0, help="sum_parts: all numbers of ranks must then agree")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        print(json.dumps(serve(args.model, args.serve)))
        return 0
    settings: dict[str, Any] = {"quantization": args.quantization} if args.quantization else {}
    save(args.model)
    if args.ranks:
        settings["sum_parts"] = args.parts
        of_ranks = {f"{n} ranks": {**settings, "tensor_parallel_size": n} for n in args.ranks}
        found = {case: in_a_process(1, args.model, given) for case, given in of_ranks.items()}
    else:
        found = {f"{n} thread{'s' * (n > 1)}": in_a_process(n, args.model, settings) for n in THREADS}
    together = not args.ranks or args.parts > 0
    alone = next(iter(found.values()))["alone"]
    same = {
        f"{way}, {case}": sum(a == b for a, b in zip(alone if together else ways["alone"], outputs, strict=True))
        for case, ways in found.items()
        for way, outputs in ways.items()
    }
    least = min(same.values())
    worst = "" if least == len(alone) else f" ({', '.join(name for name, n in same.items() if n == least)})"
    ways = f"{', '.join(WAYS)}; {' and '.join(found)}"
    of = "" if args.model == parser.get_default("model") else f" of {args.model}"
    name = f"clockwork{of}{f' with {args.quantization} weights' if args.quantization else ''}: identical {ways}"
    bars = [Bar(f"{name} (all)", f"{least} of {len(alone)} requests{worst}", least == len(alone))]
    section, page = f"clockwork {args.model}", "performance.md"
    if args.ranks:
        section, page = f"clockwork of ranks{' in parts' * (args.parts > 0)}", "scaling.md"
        bars = [bar._replace(name=f"{bar.name}{f', sums of {args.parts} parts' * (args.parts > 0)}") for bar in bars]
    return conclude(bars, {"section": section, "same": same}, args, page)


if __name__ == "__main__":
    sys.exit(main())
