"""Compare two checkouts: the throughput of this one divided by the other's on a workload, or the time to start.

    python benchmarks/versus.py PATH/OF/THE/OTHER/.venv/bin/python --workload batch-110m,single-110m,start

Both checkouts run alternately, each in its own processes: here, there, there, here, … In a round both get the same
requests, with prompts that no earlier round had, so that no round finds cached prefixes of another. The result is the
median of the rounds' ratios, because on a shared machine only runs within seconds of each other can be compared. It is
above 1 where this checkout is faster.

The other checkout may be any commit, because the programs below use only its `LLM` and `SamplingParams`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

from compare import environment
from report import MODELS
from workloads import WORKLOADS, asks

START = "start"
START_MODEL = "llama-110m"
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 2_048,
    "kv_cache_memory_bytes": 1 << 30,  # enough for the largest workload; two engines run at once
}
_SAYS = """
import json, os, sys, time
says = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever else is printed goes to stderr
import mainspring
from mainspring import LLM, SamplingParams
llm = LLM(**json.loads(sys.argv[1]))
"""
SERVING = f"""{_SAYS}
print(os.path.dirname(mainspring.__file__), file=says)
for line in sys.stdin:
    asked = json.loads(line)
    prompts = [{{"prompt_token_ids": ids}} for ids, _ in asked]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in asked]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - began
    if [len(output.outputs[0].token_ids) for output in outputs] != [n for _, n in asked]:
        sys.exit("outputs of wrong lengths")
    print(took, file=says)
"""
STARTING = f"""{_SAYS}
params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
llm.generate([{{"prompt_token_ids": [1, 2, 3]}}], params, use_tqdm=False)
print(os.path.dirname(mainspring.__file__), file=says)
"""

Measure = Callable[[int], float]
"""The number of a round → the seconds it took."""


class Process:
    """A program in the Python of one checkout, which prints its results on standard output."""

    def __init__(self, python: str, program: str, options: dict[str, Any]) -> None:
        command = [python, "-P", "-c", program, json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit("an engine ended; what it said stands above")
        return line

    def close(self) -> None:
        """Return once the process has ended."""
        self._process.communicate()


class Serving:
    """An engine of one checkout that runs from the first round to the last."""

    def __init__(self, python: str, name: str) -> None:
        self._workload = WORKLOADS[name]
        folder = MODELS / self._workload.model
        self._vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self._process = Process(python, SERVING, {**OPTIONS, "model": str(folder)})
        self.checkout = self._process.hear()

    def measure(self, number: int) -> float:
        self._process.tell(json.dumps(asks(self._workload, self._vocab_size, seed=100 + number)))
        return float(self._process.hear())

    def close(self) -> None:
        self._process.close()


class Starting:
    """From the start of a bare Python to the first token; each round starts one and ends it."""

    def __init__(self, python: str) -> None:
        self._python = python
        self.checkout = "unknown"

    def measure(self, _: int) -> float:
        began = time.perf_counter()
        process = Process(self._python, STARTING, {**OPTIONS, "model": str(MODELS / START_MODEL)})
        self.checkout = process.hear()
        took = time.perf_counter() - began
        process.close()
        return took

    def close(self) -> None:
        pass


class Pair(NamedTuple):
    """Seconds of one round in each checkout."""

    here: float
    there: float


def alternate(here: Measure, there: Measure, rounds: int) -> list[Pair]:
    """Run `rounds` rounds after a warm-up round. The checkout that runs first changes from round to round."""
    pairs = []
    for number in range(rounds + 1):
        if number % 2:
            pair = Pair(here=here(number), there=there(number))
        else:
            pair = Pair(there=there(number), here=here(number))
        if number:
            pairs.append(pair)
            print(f"{pair.here:8.3f} {pair.there:8.3f} s", flush=True)
    return pairs


def conclude(what: str, pairs: Sequence[Pair]) -> str:
    """Both checkouts do the same work in a round, so the ratio of throughputs is the inverse ratio of the times."""
    ratios = [pair.there / pair.here for pair in pairs]
    here, there = (statistics.median(times) for times in zip(*pairs, strict=True))
    return (
        f"{what}: {here:.3f} s here, {there:.3f} s there; "
        f"throughput of here over there, median of {len(pairs)} rounds: "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )


def compare(name: str, pythons: tuple[str, str], rounds: int) -> str:
    """Print one line: a workload, or the start, in both checkouts."""
    model = START_MODEL if name == START else WORKLOADS[name].model
    if not (MODELS / model).exists():
        raise SystemExit(f"there is no {MODELS / model}; make it: python benchmarks/make_models.py {model}")
    with ExitStack() as stack:
        sides = [
            stack.enter_context(closing(Starting(python) if name == START else Serving(python, name)))
            for python in pythons
        ]
        pairs = alternate(sides[0].measure, sides[1].measure, rounds)
    print(f"here: {sides[0].checkout}, there: {sides[1].checkout}", flush=True)
    return conclude("start to first token" if name == START else name, pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="the Python of an environment where the other checkout is installed")
    parser.add_argument("--workload", default="batch-110m", help=f"of {', '.join(WORKLOADS)} and {START}, with commas")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    names = args.workload.split(",")
    for name in names:
        if name not in WORKLOADS and name != START:
            parser.error(f"--workload is {name!r}; it must be of {', '.join([*WORKLOADS, START])}")
    lines = [compare(name, (sys.executable, args.other), args.rounds) for name in names]
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
