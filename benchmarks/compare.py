"""Engines in turn over the same token ids: medians, ratios within rounds, and the share of the physical limit.

    python benchmarks/compare.py --engines mainspring,transformers --workloads batch-110m --rounds 5

Rounds go A B C A B C …, each run in a fresh process. Before and after each, the machine's matrix rate and memory read
bandwidth are measured, because those of a shared machine vary from minute to minute; the means count. With `--log` a
later call continues where an earlier one stopped, and a round counts if all of its engines ran in it.

A peer runs in the virtual environment .bench/peers/NAME (`peers.py` makes it; `make_models.py --forms` makes the model
forms it needs), or else in this one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from safetensors import safe_open

from driver import ENGINES, LEVEL
from report import CACHE, MODELS, publish, table
from resume import Log
from workloads import WORKLOADS, asks

HERE = Path(__file__).resolve().parent
LIMIT_SECONDS = 1_200  # of one run
# By the name of our level.
ONEDNN_ISA = {"avx2": "AVX2", "avx512": "AVX512_CORE_VNNI", "avx512_bf16": "AVX512_CORE_BF16"}
# The matrix rate is that of the fastest product: on machines without bf16 instructions, an fp32 product.
MEASURE_MACHINE = """
import json, time, numpy, torch
def best(run, seconds=0.7):
    took, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return min(took)
rows, weights = torch.randn(1024, 1024), torch.randn(6144, 1024)
half = rows.bfloat16(), weights.bfloat16()
a, b = rows.numpy(), weights.numpy().T
products = [lambda: torch.nn.functional.linear(rows, weights), lambda: torch.nn.functional.linear(*half), lambda: a @ b]
big = torch.randn(64 << 20)
print(json.dumps([2 * 1024 * 1024 * 6144 / min(map(best, products)), 4 * big.numel() / best(lambda: big.sum())]))
"""

Run = dict[str, Any]  # the output of driver.py, `of_limit`, and the machine's rates: the mean of before and after
Round = dict[str, Run]  # by engine


class Machine(NamedTuple):
    flops: float  # floating-point operations a second (two for each multiply-add)
    bytes_s: float  # bytes read from memory a second


def environment() -> dict[str, str]:
    """Environment in which every engine chooses its own threads and downloads no files. A lower level of our kernels
    lowers the kernels of others, too."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "KMP_"))}
    lower = ONEDNN_ISA.get(os.environ.get(LEVEL, ""))
    return {**kept, "HF_HUB_OFFLINE": "1", **({"ONEDNN_MAX_CPU_ISA": lower} if lower else {})}


def measure_machine() -> Machine:
    command = [sys.executable, "-P", "-c", MEASURE_MACHINE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    return Machine(*json.loads(done.stdout))


def least_seconds(workload_name: str, machine: Machine) -> float:
    """The lower bound for a bf16 engine: every multiply-add at the matrix rate, or every weight read once for each
    token of the longest output; of a single request without its first token. Attention itself is left out, so the true
    limit is a little higher. Of a mixture, each token's experts are multiplied, and as many are read as a step's tokens
    are expected to choose if all are equally likely."""
    workload = WORKLOADS[workload_name]
    c: dict[str, Any] = json.loads((MODELS / workload.model / "config.json").read_text())
    head, layers, experts = c["hidden_size"] * c["vocab_size"], 0.0, 0
    of_all = next((c[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if c.get(key)), 1)
    chosen = c.get("num_experts_per_tok", 1) / of_all
    for file in (MODELS / workload.model).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118  # no mapping
        sizes = {name: prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) > 1}
        experts += sum(size for name, size in sizes.items() if ".experts." in name)
        layers += sum(sizes.values())
    asked = asks(workload, c["vocab_size"])
    read = layers - experts * (1 - chosen) ** len(asked)
    layers -= experts * (1 - chosen)
    steps = max(ask.output_tokens for ask in asked)
    if len(asked) == 1:
        return (steps - 1) * 2 * (read + head) / machine.bytes_s
    tokens = sum(len(ask.prompt) + ask.output_tokens - 1 for ask in asked)
    tokens -= (workload.requests - (not workload.known_prefix)) * workload.shared_prefix
    sampled = sum(ask.output_tokens for ask in asked)
    return float(
        max(2 * (layers * tokens + head * sampled) / machine.flops, steps * 2 * (read + head) / machine.bytes_s)
    )


def run(engine: str, workload_name: str) -> Run | None:
    """Run one fresh process; if it fails, print the reason and return None."""
    own = CACHE / "peers" / engine / "bin" / "python"
    python = own if own.exists() else Path(sys.executable)
    before, why = measure_machine(), ""
    with tempfile.TemporaryDirectory() as folder:
        result, said = Path(folder) / "result", Path(folder) / "said"
        model = MODELS / WORKLOADS[workload_name].model
        command = [str(python), str(HERE / "driver.py"), engine, workload_name, str(model), str(result)]
        with said.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment(), start_new_session=True)
        try:
            if code := process.wait(LIMIT_SECONDS):
                lines = said.read_text().strip().splitlines() or [f"exit code {code}"]
                why = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        except subprocess.TimeoutExpired:
            why = f"it took more than {LIMIT_SECONDS} s"
        with contextlib.suppress(ProcessLookupError):  # processes it has left behind must not slow the next run down
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        text = result.read_text() if result.exists() else ""
    if why or not text:
        print(f"{workload_name}: {engine} did not run: {why or 'no result'}", file=sys.stderr, flush=True)
        return None
    machine = Machine(*map(mean, zip(before, measure_machine(), strict=True)))
    measured: Run = {**json.loads(text), **machine._asdict()}
    bf16 = "-int" not in engine  # the limit is for bf16 weights
    took = measured["time_s"] - (measured["prompt_s"] or 0)
    measured["of_limit"] = least_seconds(workload_name, machine) / took if bf16 else None
    print(f"  {workload_name}: {engine} {measured['time_s']:.2f} s", file=sys.stderr, flush=True)
    return measured


def play(
    plan: Mapping[str, Sequence[str]], rounds: int, log: Log, go_on: Callable[[], bool] = lambda: True
) -> dict[str, list[Round]]:
    """Run the rounds of each workload of a plan, which names its engines. A round of all workloads comes before the
    next round. An engine that failed once is left out of later rounds; no round begins once `go_on` is false."""
    played: dict[str, list[Round]] = {workload: [] for workload in plan}
    failed: set[tuple[str, str]] = set()
    for number in range(rounds):
        for workload, engines in plan.items():
            key = f"round {number} of {workload}: {' '.join(engines)}"
            known: Round | None = log.get(key)
            if known is None:
                if not go_on():
                    continue
                runs = {e: None if (workload, e) in failed else run(e, workload) for e in engines}
                failed |= {(workload, engine) for engine, found in runs.items() if found is None}
                known = {engine: found for engine, found in runs.items() if found is not None}
                if len(known) == len(engines):
                    log.keep(key, known)
            played[workload].append(known)
    return played


def ratios(rounds: Sequence[Round], theirs: str, ours: str = "mainspring") -> list[float]:
    """Their time divided by ours, for every round that has both."""
    return [r[theirs]["time_s"] / r[ours]["time_s"] for r in rounds if theirs in r and ours in r]


HEAD = ["engine", "ready s", "first token s", "time s", "output tok/s", "all tok/s", "of limit", "ours is faster by"]


def cells(engine: str, rounds: Sequence[Round]) -> list[str]:
    """One engine's row of the table: medians over rounds."""
    runs = [r[engine] for r in rounds if engine in r]

    def middle(key: str) -> float:
        return median(one[key] for one in runs)

    pairs = ratios(rounds, engine)
    return [
        engine,
        f"{middle('ready_s'):.1f}",
        f"{middle('first_s'):.1f}",
        f"{middle('time_s'):.2f}",
        f"{middle('output_tok_s'):,.0f}",
        f"{middle('total_tok_s'):,.0f}",
        "" if runs[0]["of_limit"] is None else f"{middle('of_limit'):.0%}",
        f"{median(pairs):.2f}×" if pairs else "",
    ]


def describe(workload_name: str, rounds: Sequence[Round]) -> str:
    """The table of one workload."""
    runs = [one for r in rounds for one in r.values()]
    if not runs:
        return f"**{workload_name}**: nothing ran."
    rows = [cells(engine, rounds) for engine in dict.fromkeys(one["engine"] for one in runs)]
    rows.sort(key=lambda row: float(row[3]))
    rate, read = (median(one[key] for one in runs) for key in Machine._fields)
    return (
        f"**{workload_name}**, median of {len(rounds)} rounds, on {rate / 1e9:,.0f} GFLOP/s of matrix products and "
        f"{read / 1e9:.0f} GB/s of reads:\n\n" + table(HEAD, rows)
    )


def engine_versions(rounds: Sequence[Round]) -> str:
    """One line: the versions of each engine."""
    found = {one["engine"]: one["versions"] for r in rounds for one in r.values()}
    each = [f"{e} ({', '.join(f'{p} {v}' for p, v in versions.items())})" for e, versions in sorted(found.items())]
    return f"Versions: {'; '.join(each)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="mainspring,transformers", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--workloads", default="batch-110m", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--log", type=Path, help="keep every round in this file, as JSON lines, and go on from it")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    args = parser.parse_args()
    plan = dict.fromkeys(args.workloads.split(","), args.engines.split(","))
    played = play(plan, args.rounds, Log(args.log))
    tables = [describe(workload, rounds) for workload, rounds in played.items()]
    tables.append(engine_versions([r for rounds in played.values() for r in rounds]))
    publish("compare", "\n\n".join(tables), args.write)


if __name__ == "__main__":
    main()
