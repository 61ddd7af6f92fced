"""Two checkouts side by side: what a step of plain greedy decoding takes in each, in turn, as many rounds as asked.

    python benchmarks/versus.py PATH/OF/THE/OTHER/.venv/bin/python

Both engines stand at once, each in a process of its own; one computes while the other waits. Printed is the median of
the rounds' ratios, for on a shared machine only what is done within seconds can be compared.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from report import MODELS

PROGRAM = """
import random, statistics, sys, time
from mainspring import EngineArgs, LLMEngine, SamplingParams

model, count, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
args = EngineArgs(model=model, max_num_seqs=count, max_model_len=512, kv_cache_memory_bytes=1 << 30)
engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
rng = random.Random(0)
print("ready", flush=True)
for number, _ in enumerate(sys.stdin):
    for i in range(count):
        ids = [rng.randrange(5, 30000) for _ in range(64)]
        engine.add_request(f"{number}-{i}", {"prompt_token_ids": ids}, params)
    took = []
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        took.append(time.perf_counter() - began)
    print(1e3 * statistics.median(took[len(took) // 4 :]), flush=True)
"""


class Engine:
    def __init__(self, python: str, *arguments: str) -> None:
        command = [python, "-P", "-c", PROGRAM, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "ready"

    def round(self) -> float:
        """Milliseconds of a step, the median of a round."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit("an engine ended; what it said stands above")
        return line

    def close(self) -> None:
        self.process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="the Python of an environment where the other checkout is installed")
    parser.add_argument("--model", default=str(MODELS / "llama-110m"))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    arguments = [args.model, str(args.requests), str(args.tokens)]
    engines = [Engine(python, *arguments) for python in (sys.executable, args.other)]
    pairs = []
    for number in range(args.rounds + 1):
        order = [0, 1] if number % 2 else [1, 0]
        took = {which: engines[which].round() for which in order}
        if number:  # the first warms up
            pairs.append((took[0], took[1]))
            print(f"{took[0]:8.2f} {took[1]:8.2f} ms", flush=True)
    for engine in engines:
        engine.close()
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    quarter = len(ratios) // 4
    print(
        f"a step of {args.requests}: {statistics.median(p[0] for p in pairs):.2f} ms here, "
        f"{statistics.median(p[1] for p in pairs):.2f} ms there; median of {len(pairs)} ratios "
        f"{statistics.median(ratios):.3f} (quartiles {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})"
    )


if __name__ == "__main__":
    main()
