"""Engines in turn over the same token ids: medians, our ratio pair by pair, and the distance to the physical limit.

    python benchmarks/compare.py --engines mainspring,transformers --workloads batch-110m --rounds 3

Rounds go A B C A B C …, each run in a fresh process. Before each, the machine's bf16 matrix rate and memory read
bandwidth are measured, because those of a shared machine move from minute to minute.

A peer runs in the virtual environment .bench/peers/NAME (make it with pip; `make_models.py --forms` makes the model
forms it needs), or else in this one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from driver import ENGINES
from report import CACHE, MODELS, publish, table
from workloads import WORKLOADS, asks

HERE = Path(__file__).resolve().parent
MEASURE_MACHINE = """
import json, time, torch
def best(run, times=15):
    run()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
rows = torch.randn(1024, 1024, dtype=torch.bfloat16)
weights = [torch.randn(6144, 1024, dtype=torch.bfloat16) for _ in range(8)]
flops = 8 * 2 * 1024 * 1024 * 6144 / best(lambda: [torch.nn.functional.linear(rows, w) for w in weights])
big = torch.randn(64 << 20)
print(json.dumps([flops, 4 * big.numel() / best(lambda: big.sum())]))
"""


class Machine(NamedTuple):
    flops: float  # bf16 multiply-adds, twice, a second
    bytes_s: float  # read from memory


def measure_machine() -> Machine:
    done = subprocess.run([sys.executable, "-c", MEASURE_MACHINE], capture_output=True, text=True, check=True)
    return Machine(*json.loads(done.stdout))


def least_seconds(workload_name: str, machine: Machine) -> float:
    """What no bf16 engine can beat: every multiply-add at the matrix rate, or every weight read once for each token of
    the longest output. Attention itself is left out, so the true limit is a little higher."""
    workload = WORKLOADS[workload_name]
    c: dict[str, Any] = json.loads((MODELS / workload.model / "config.json").read_text())
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    attention = c["hidden_size"] * head_dim * 2 * (c["num_attention_heads"] + c["num_key_value_heads"])
    layers = c["num_hidden_layers"] * (attention + 3 * c["hidden_size"] * c["intermediate_size"])
    head = c["hidden_size"] * c["vocab_size"]
    asked = asks(workload, c["vocab_size"])
    tokens = sum(len(ask.prompt) + ask.output_tokens - 1 for ask in asked)
    tokens -= (workload.requests - 1) * workload.shared_prefix
    sampled = sum(ask.output_tokens for ask in asked)
    steps = max(ask.output_tokens for ask in asked)
    return float(
        max(2 * (layers * tokens + head * sampled) / machine.flops, steps * 2 * (layers + head) / machine.bytes_s)
    )


def run(engine: str, workload_name: str) -> dict[str, Any] | None:
    """One fresh process; None, and a line that says why, if it failed."""
    own = CACHE / "peers" / engine / "bin" / "python"
    python = own if own.exists() else Path(sys.executable)
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        model = MODELS / WORKLOADS[workload_name].model
        command = [str(python), str(HERE / "driver.py"), engine, workload_name, str(model), result.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = Path(result.name).read_text()
    if done.returncode or not text:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        print(f"{workload_name}: {engine} did not run: {why}", file=sys.stderr, flush=True)
        return None
    measured: dict[str, Any] = json.loads(text)
    return measured


HEAD = ["engine", "ready s", "first token s", "time s", "output tok/s", "all tok/s", "of limit", "ours is faster by"]


def cells(engine: str, runs: dict[int, dict[str, Any]], ours: dict[int, dict[str, Any]]) -> list[str]:
    """One engine's row of the table: medians over rounds."""

    def middle(key: str) -> float:
        return median(run[key] for run in runs.values())

    pairs = [theirs["time_s"] / ours[number]["time_s"] for number, theirs in runs.items() if number in ours]
    return [
        engine,
        f"{middle('ready_s'):.1f}",
        f"{middle('first_s'):.1f}",
        f"{middle('time_s'):.2f}",
        f"{middle('output_tok_s'):,.0f}",
        f"{middle('total_tok_s'):,.0f}",
        f"{middle('of_limit'):.0%}",
        f"{median(pairs):.2f}×" if pairs else "",
    ]


def compare(workload_name: str, engines: list[str], rounds: int, log: Path | None) -> str:
    """The table of one workload."""
    results: dict[str, dict[int, dict[str, Any]]] = {engine: {} for engine in engines}
    machines: list[Machine] = []
    for number in range(rounds):
        for engine in engines:
            machines.append(measure_machine())
            measured = run(engine, workload_name)
            if measured is None:
                continue
            measured["of_limit"] = least_seconds(workload_name, machines[-1]) / measured["time_s"]
            results[engine][number] = measured
            if log:
                with log.open("a") as file:
                    print(json.dumps({"round": number, **measured, **machines[-1]._asdict()}), file=file)
    rows = [cells(engine, runs, results.get("mainspring", {})) for engine, runs in results.items() if runs]
    rows.sort(key=lambda row: float(row[3]))
    rate, read = (median(values) for values in zip(*machines, strict=True))
    return (
        f"**{workload_name}**, median of {rounds} rounds, on {rate / 1e9:,.0f} GFLOP/s bf16 and "
        f"{read / 1e9:.0f} GB/s of reads:\n\n" + table(HEAD, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="mainspring,transformers", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--workloads", default="batch-110m", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--log", type=Path, help="append every result to this file, as JSON lines")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    args = parser.parse_args()
    tables = [
        compare(workload, args.engines.split(","), args.rounds, args.log) for workload in args.workloads.split(",")
    ]
    publish("compare", "\n\n".join(tables), args.write)


if __name__ == "__main__":
    main()
