"""Every bar that the CPU path has to pass, with pass or fail (`make bench-cpu`).

    python benchmarks/cpu.py --rounds 5 --minutes 60 --write
    python benchmarks/cpu.py --quick

The page has a section for each kind of processor, by the name of its native kernels. MAINSPRING_NATIVE_LEVEL lowers a
processor to an older kind, for the other engines as well (except llama.cpp). Then only the section of that kind is
written: those that all kinds share (growth, perplexities, a step by kernel) stay as they are.

All measurements are kept in a log, .bench/cpu-LEVEL.jsonl; the same command continues from there while the sources of
the package are the same. Other engines run in the environments of `peers.py`, on model files written by
`make_models.py --forms`.

Memory is the peak resident memory of the core process (VmHWM, which includes shared memory, libraries and mapped
files), minus the weights in the checkpoint's format and minus the KV cache, in which every block was used. A quantized
checkpoint is also resident as a mapped file while it is read, so of one it is the peak of private memory (RssAnon).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import growth
from bars import Bar, conclude, put_on_page
from compare import Round, describe, engine_versions, environment, play, ratios
from driver import LEVEL
from mainspring.kernels.native.build import choose_level
from make_models import save
from report import CACHE, DOCS, MODELS
from resume import Log
from workloads import WORKLOADS, asks

HERE = Path(__file__).resolve().parent
BATCHES = ("batch-110m", "batch-0.6b", "long-110m", "prefix-110m", "known-prefix-110m")
PLAN: dict[str, list[str]] = {
    "single-110m": ["mainspring", "openvino", "llamacpp"],
    "single-0.6b": ["mainspring", "mainspring-int8", "mainspring-int4", "openvino", "llamacpp"],
    **{workload: ["mainspring", "openvino"] for workload in BATCHES},
}
# in separate rounds, because it takes more than a minute to start
VLLM = {workload: ["mainspring", "vllm"] for workload in BATCHES}
ORDER = (*BATCHES, "single-110m", "single-0.6b")
NAMES = {"openvino": "OpenVINO", "vllm": "vLLM", "llamacpp": "llama.cpp"}
MORE_THAN_OPENVINO = {("avx512", "batch-110m"): 1.4, ("avx512", "batch-0.6b"): 1.4}  # by level; 1.25 for others
OF_LIMIT = {"batch-110m": 0.6, "batch-0.6b": 0.7, "single-110m": 0.9, "single-0.6b": 0.9}
MB = 1e6
# smaller than the batches need
KV_BYTES = {"llama-110m": 256 << 20, "qwen3-0.6b": 512 << 20, "gpt-oss-0.7b-mxfp4": 32 << 20}
START = """
import sys
from mainspring import LLM, SamplingParams
llm = LLM(model=sys.argv[1])
llm.generate(["Once"], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
print("first token", flush=True)
"""
IMPORT = "import torch, transformers; from transformers import AutoModelForCausalLM"  # a core's, too
START_RATIO = {"llama-110m": 1.5, "qwen3-0.6b": 2.2}  # of that import, for the time to the first token


def attempt(name: str, measure: Callable[[], list[Bar]]) -> list[Bar]:
    """Run a measurement; if it fails, its bar counts as missed and the others are still measured."""
    try:
        return measure()
    except (Exception, SystemExit) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return [Bar(name, (f"{error}".strip().splitlines() or [repr(error)])[-1][:200], False)]


# ---------------------------------------------------------------------- speed


def at_least(name: str, bar: float, found: Sequence[float], unit: str = "×") -> Bar:
    """The median, rounded as printed, must be `bar` or more."""

    def show(value: float) -> str:
        return f"{value:.0%}" if unit == "%" else f"{value:.2f}{unit}"

    if not found:
        return Bar(f"{name} ({show(bar)})", "did not run", False)
    spread = f" ({show(min(found))} to {show(max(found))} in {len(found)} rounds)" if len(found) > 1 else ""
    passed = round(median(found), 2) >= bar
    return Bar(f"{name} ({show(bar)})", show(median(found)) + spread, passed)


def speed(workload: str, engines: Sequence[str], rounds: Sequence[Round]) -> list[Bar]:
    bars = []
    for theirs in engines:
        if theirs in NAMES:
            least = {"openvino": MORE_THAN_OPENVINO.get((choose_level().name, workload), 1.25), "vllm": 2.0}
            bar = least[theirs] if workload in BATCHES else 1.0
            bars.append(at_least(f"{workload}: against {NAMES[theirs]}", bar, ratios(rounds, theirs)))
    if workload in OF_LIMIT:
        shares = [r["mainspring"]["of_limit"] for r in rounds if "mainspring" in r]
        bars.append(at_least(f"{workload}: of the limit", OF_LIMIT[workload], shares, "%"))
    for ours, bar in (("mainspring-int8", 1.7), ("mainspring-int4", 2.5)):
        if ours in engines:
            faster = ratios(rounds, "mainspring", ours)
            bars.append(at_least(f"{workload}: {ours.partition('-')[2]} against our bf16", bar, faster))
    return bars


# ---------------------------------------------------------------------- start


def seconds_to_import() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-c", IMPORT], check=True, env=environment())
    return time.perf_counter() - began


def seconds_to_first_token(model: str, cache: Path | None = None, python: str = sys.executable) -> float:
    """Seconds from the start of a process to its first token; `cache`: a folder for what a first start leaves behind,
    initially empty."""
    env = {**environment(), **({"MAINSPRING_CACHE": str(cache)} if cache else {})}
    command = [python, "-P", "-c", START, str(MODELS / model)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout
        for line in process.stdout:
            if line == "first token\n":
                took = time.perf_counter() - began
                process.communicate()
                return took
        raise SystemExit(process.communicate()[1])


def first_time(model: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        took = seconds_to_first_token(model, Path(folder))
        if not list(Path(folder).rglob("*.so")):
            raise SystemExit("no kernels were compiled: is there a compiler?")
    return took


def start_cached(log: Log, model: str, runs: int) -> list[Bar]:
    def measure() -> tuple[float, float]:
        return seconds_to_import(), seconds_to_first_token(model)

    if log.get(f"start of {model} 0") is None:
        measure()  # now the kernels are compiled and the files are in the page cache
    found = [log.once(f"start of {model} {n}", measure) for n in range(runs)]
    ratio, bar = median(took / importing for importing, took in found), START_RATIO[model]
    importing, took = (median(column) for column in zip(*found, strict=True))
    text = f"{ratio:.2f}× ({took:.2f} s; the import takes {importing:.2f} s)"
    return [Bar(f"{model}: start to first token, of the import of torch and transformers ({bar}×)", text, ratio <= bar)]


def start_installed(log: Log, python: str, runs: int) -> list[Bar]:
    """The first start of an installed wheel, which brings its kernels along, and later ones."""

    def measure() -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder:
            first, later = (seconds_to_first_token("llama-110m", Path(folder), python) for _ in range(2))
        return first, later

    seconds_to_first_token("llama-110m", python=python)
    found = [log.once(f"first start of a wheel {n}", measure) for n in range(runs)]
    ratio = median(first / later for first, later in found)
    text = f"{ratio:.2f}× ({median(first for first, _ in found):.2f} s)"
    return [Bar("llama-110m: first start of an installed wheel, of a later one (1.2×)", text, ratio <= 1.2)]


def start_uncached(log: Log) -> list[Bar]:
    took = log.once("first start", lambda: first_time("llama-110m"))
    return [Bar("… the very first time, kernels not compiled yet (30 s)", f"{took:.1f} s", took < 30)]


# ---------------------------------------------------------------------- memory


class Memory(NamedTuple):
    """Bytes."""

    peak: float  # peak resident memory
    private: float  # peak of what is neither shared nor of a file
    settled: float  # resident at the end
    files: float  # of that, libraries and mapped files
    weights: float  # size of the weights in the checkpoint
    kv: float


def memory(model: str, quantization: str | None) -> Memory:
    import psutil

    from mainspring import LLM, SamplingParams

    workload = WORKLOADS["batch-" + model.rpartition("-")[2]]
    vocab = json.loads((MODELS / model / "config.json").read_text())["vocab_size"]
    asked = [ask for seed in (1, 2) for ask in asks(workload, vocab, seed)]
    options = {"quantization": quantization} if quantization else {}
    kv = KV_BYTES[model]
    seen: dict[int, list[float]] = {}  # of each child, what is private now and then
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            for each in psutil.Process().children():
                with suppress(OSError, IndexError):  # it has ended
                    seen.setdefault(each.pid, []).append(of_status(each.pid, "RssAnon")[0])

    threading.Thread(target=watch, daemon=True).start()
    with LLM(
        model=str(MODELS / model), skip_tokenizer_init=True, max_model_len=1_024, kv_cache_memory_bytes=kv, **options
    ) as llm:
        core = next(
            each for each in psutil.Process().children(recursive=True) if "mainspring.core" in " ".join(each.cmdline())
        )
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": ask.prompt} for ask in asked], params, use_tqdm=False)
        peak, settled, files = of_status(core.pid, "VmHWM", "VmRSS", "RssFile")
        ended.set()
    weights = sum(file.stat().st_size for file in (MODELS / model).glob("*.safetensors"))
    return Memory(peak, max(seen[core.pid]), settled, files, weights, kv)


def of_status(pid: int, *keys: str) -> list[float]:
    """Bytes by these names of a process' status."""
    status = Path(f"/proc/{pid}/status").read_text()
    return [1024.0 * int(re.findall(rf"{key}:\s+(\d+) kB", status)[0]) for key in keys]


def memory_bars(log: Log, model: str, quantization: str | None = None) -> list[Bar]:
    found = Memory(*log.once(f"memory of {model}, {quantization}", lambda: memory(model, quantization)))
    by_private = model.endswith("mxfp4")
    over = (found.private if by_private else found.peak) - found.weights - found.kv
    text = (
        f"{found.peak / MB:,.0f} MB at most (private {found.private / MB:,.0f}), {found.settled / MB:,.0f} at the end: "
        f"KV {found.kv / MB:,.0f}, libraries and files {found.files / MB:,.0f}"
    )
    if quantization:
        return [Bar(f"{model} in {quantization}: memory", text, None)]
    text = f"{over / MB:,.0f} MB: {text}, weights {found.weights / MB:,.0f}"
    kind = "private memory" if by_private else "memory"
    return [Bar(f"{model}: {kind} beside weights and KV (400 MB)", text, over < 400 * MB)]


# ---------------------------------------------------------------------- other programs


def program(log: Log, name: str, *arguments: str) -> dict[str, Any]:
    """The result of a program that ends with `bars.conclude`."""

    def measure() -> dict[str, Any]:
        path = CACHE / f"{name}.json"
        path.unlink(missing_ok=True)
        command = [sys.executable, str(HERE / f"{name}.py"), *arguments, "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
        if not path.exists():
            raise SystemExit(f"{name}.py has no result: {done.stderr.strip()[-1000:]}")
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    found: dict[str, Any] = log.once(" ".join([name, *arguments]), measure)
    return found


def bars_of(result: dict[str, Any]) -> list[Bar]:
    return [Bar(**bar) for bar in result["bars"]]


def profile(write: bool) -> list[Bar]:
    """Its tables have a separate section on the page."""
    command = [sys.executable, str(HERE / "profile_step.py"), "--workloads", "batch-110m,single-110m,single-0.6b"]
    command += ["--write"] * write
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    print(done.stdout, flush=True)
    around = re.search(r"all but the model.*\*\*([\d.]+)%", done.stdout)
    if around is None:
        raise SystemExit(done.stderr)
    return [Bar("batch-110m: scheduler, codec and client in a step (5%)", f"{around[1]}%", float(around[1]) < 5)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm-rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=0, help="begin no round after these; 0: all rounds")
    parser.add_argument("--quick", action="store_true", help="1 round without vLLM, contexts up to 4,096")
    parser.add_argument("--installed", help="the Python of an environment with the wheel: its first start is measured")
    parser.add_argument("--log", type=Path, default=CACHE / f"cpu-{choose_level().name}.jsonl")
    parser.add_argument("--json", type=Path, help="default: .bench/cpu.json")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    args = parser.parse_args()
    began, log = time.monotonic(), Log(args.log)
    write_shared = args.write and not os.environ.get(LEVEL)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for model in KV_BYTES:
        save(model)
    longest = ["--longest", "4096"] if args.quick else []
    others: list[tuple[str, Callable[[], list[Bar]]]] = [
        *(
            (f"{model}: process start to first token", partial(start_cached, log, model, 1 if args.quick else 5))
            for model in START_RATIO
        ),
        ("… the very first time", lambda: start_uncached(log)),
        *((f"{model}: memory", partial(memory_bars, log, model)) for model in KV_BYTES),
        *(
            (f"qwen3-0.6b in {bits}: memory", partial(memory_bars, log, "qwen3-0.6b", bits))
            for bits in ("int8", "int4")
        ),
        ("perplexity of quantized weights", lambda: bars_of(program(log, "quantized"))),
        ("clockwork", lambda: bars_of(program(log, "clockwork"))),
        ("growth", lambda: bars_of(program(log, "growth", *longest))),
        ("a step by kernel", lambda: profile(write_shared)),
    ]
    if args.installed:
        runs = 1 if args.quick else 5
        others.append(("first start of a wheel", lambda: start_installed(log, args.installed, runs)))
    after = [bar for name, measure in others for bar in attempt(name, measure)]
    enough = began + 60 * args.minutes if args.minutes else math.inf
    bars: list[Bar] = []
    played: dict[str, list[Round]] = {workload: [] for workload in ORDER}
    for plan, rounds in ((PLAN, 1 if args.quick else args.rounds), (VLLM, 0 if args.quick else args.vllm_rounds)):
        for workload, found in play(plan, rounds, log, lambda: time.monotonic() < enough).items():
            played[workload] = played[workload] + found
    for workload in ORDER:
        engines = dict.fromkeys([*PLAN[workload], *VLLM.get(workload, ())])
        bars += speed(workload, list(engines), played[workload])
    bars += after
    tables = [describe(workload, played[workload]) for workload in ORDER]
    tables.append(engine_versions([r for rounds in played.values() for r in rounds]))
    if write_shared:
        for result in filter(None, (log.get("quantized"), log.get(" ".join(["growth", *longest])))):
            put_on_page(result)
            if "points" in result:
                points = {name: [growth.Point(*each) for each in found] for name, found in result["points"].items()}
                growth.draw(points, DOCS / "growth.png")
    return conclude(bars, {"section": f"cpu {choose_level().name}"}, args, "performance.md", "\n\n".join(tables))


if __name__ == "__main__":
    sys.exit(main())
