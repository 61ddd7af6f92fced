"""Correctness and speed on a GPU, in one command: `make gpu-check`.

    python benchmarks/gpu_check.py --kernels-dir FOLDER --continue FILE  # everything, in two runs of 9 minutes
    python benchmarks/gpu_check.py --only correctness,start --output DIR
    python benchmarks/gpu_check.py --rehearse                            # the program itself, on a CPU
    python benchmarks/gpu_check.py --page DIR/gpu_check.json             # an earlier run's tables onto docs/gpu.md

Each part runs in a separate process: a failure does not affect other parts, and its memory is free for the next. After
each part the results so far are in DIR/gpu_check.json and DIR/gpu_check.txt. A run starts no part that may not end in
time. With --continue, FILE keeps the results for each commit and GPU: the next run measures only the parts that are not
finished, and its tables have the results of all runs. docs/gpu.md explains each bar; the parts are in gpu_models.py and
gpu_speed.py, except the start, which is here.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from report import CACHE, ROOT, fill, table

if importlib.util.find_spec("mainspring") is None:
    raise SystemExit("mainspring can't be imported: install it, or put a link of that name to it on PYTHONPATH")
import gpu_models
import gpu_ranks
import gpu_speed
import resume
from gpu_models import Bar, Say, Setup

PAGE = ROOT / "docs" / "gpu.md"
SECTIONS = ("correctness", "kernels", "engine", "start", "ranks")
UNKNOWN = "not measured yet"
MINUTES = 9.0  # time of one run, so that it fits into a GPU lease of 10 minutes
OVERHEAD_SECONDS = 20.0  # time of a run besides its parts: imports, the GPU's name, ending processes
REHEARSAL = "CPU rehearsal"
REHEARSAL_FACTOR = 10  # factor on all time limits in a rehearsal, for slow CPUs


class Part(NamedTuple):
    section: str
    seconds: float  # time limit, including imports


# In the order in which they run: the most important first, because the time may run out.
PARTS = {
    "embedded": Part("correctness", 100),
    "exact": Part("correctness", 70),
    "half": Part("correctness", 70),
    "deterministic": Part("correctness", 80),
    "kernels": Part("kernels", 90),
    "ranks": Part("ranks", 80),
    "llama-3.1-8b": Part("engine", 80),
    "start": Part("start", 80),
    "qwen3-0.6b": Part("engine", 80),
    "transformers": Part("engine", 80),
    "kills": Part("correctness", 90),
    "qwen3-30b-a3b": Part("engine", 100),
}

# ------------------------------------------------------------------ start

START_SECONDS = 20.0
START = """
import json, sys, time
began = float(sys.argv[1])
from mainspring import LLM, SamplingParams
llm = LLM(**json.loads(sys.argv[2]))
ready = time.time() - began
llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
print(json.dumps({"ready": ready, "first": time.time() - began}))
llm.shutdown()
"""
START_PARTS = """
import json, sys, time
began = float(sys.argv[1])
import torch, transformers
from mainspring import EngineArgs
from mainspring.core.worker import runner, worker
from mainspring.core.loop import EngineCore
spent = {"imports": time.time() - began}
memory = []
def free():
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else 0
def watch(owner, name, part):
    call = getattr(owner, name)
    def timed(*args, **kwargs):
        started, before = time.time(), free()
        try:
            return call(*args, **kwargs)
        finally:
            spent[part] = time.time() - started
            if part == "graphs":
                memory.append(before - free())
    setattr(owner, name, timed)
watch(worker, "choose_backend", "kernels found")
watch(worker, "load_model", "weights, trial run, kernels loaded")
watch(worker, "count_blocks", "profile")
watch(runner.ModelRunner, "warm_up", "graphs")
core = EngineCore(EngineArgs(**json.loads(sys.argv[2])).create_engine_config())
spent["the rest"] = time.time() - began - sum(spent.values())
print(json.dumps({"spent": spent, "graphs": core.worker.runner.graph_sizes, "bytes": sum(memory)}))
"""


def check_start(setup: Setup, say: Say) -> None:
    """From the start of a bare Python to the first token, with all default options; then the same in one process, with
    a clock around each part."""
    options = {
        "model": str(setup.config_only("llama-3.1-8b")),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        **setup.options(),
    }
    found = _in_python(START, options)
    ready = found["ready"]
    say(BARS["start"][0].name, f"{ready:.1f} s; first token {found['first']:.1f} s", setup.judge(ready < START_SECONDS))
    found = _in_python(START_PARTS, options)
    say(BARS["start"][1].name, ", ".join(f"{part} {took:.1f} s" for part, took in found["spent"].items()))
    say(BARS["start"][2].name, f"{len(found['graphs'])} graphs, {found['bytes'] / 1e9:.2f} GB, {found['graphs']}")


def _in_python(script: str, options: dict[str, Any]) -> Any:
    """The last output of a script in a new process, whose log goes to our standard error."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(began), json.dumps(options)],
        stdout=subprocess.PIPE,
        env={**os.environ, "MAINSPRING_LOG_LEVEL": "INFO"},
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------ parts, each in its own process


BARS: dict[str, list[Bar]] = {
    **gpu_models.BARS,
    **gpu_ranks.BARS,
    **gpu_speed.BARS,
    "start": [
        Bar("8B shape with dummy weights: ready, graphs included", f"< {START_SECONDS:.0f} s"),
        Bar("… where the time goes, in one process"),
        Bar("… CUDA graphs and their memory"),
    ],
}
FUNCTIONS: dict[str, Callable[[Setup, Say], None]] = {
    **gpu_models.PARTS,
    **gpu_ranks.PARTS,
    **gpu_speed.PARTS,
    "start": check_start,
}


def run_part(part: str, setup: Setup, tell: Callable[[dict[str, Any]], None]) -> None:
    """Run a part and report its bars one by one, and the reason if it ends early."""
    limits = {bar.name: bar.limit for bar in BARS[part]}
    told: set[str] = set()

    def say(name: str, measured: str, passed: bool | None = None) -> None:
        assert name in limits, f"part {part!r} has no bar {name!r}"
        assert name not in told, f"part {part!r} says twice {name!r}"
        told.add(name)
        tell({"name": name, "limit": limits[name], "measured": measured, "passed": passed})

    try:
        FUNCTIONS[part](setup, say)
    except Exception as error:  # an error in a part is a failed bar and does not end the program
        traceback.print_exc()
        tell({"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})


def commit() -> str:
    """The commit that is measured; with a digest of the sources if they differ from it, or if git can't tell."""
    try:
        head, changes = (
            subprocess.run(["git", *words.split()], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in ("rev-parse HEAD", "status --porcelain --untracked-files=no")
        )
    except (OSError, subprocess.CalledProcessError):
        head, changes = "no commit", "unknown"
    programs = "gpu_check.py", "gpu_models.py", "gpu_speed.py"
    return f"{head}, sources {resume.hash_sources(*programs).hexdigest()}" if changes else head


def gpu_name(rehearse: bool) -> str:
    """The GPU's name, queried in another process, because CUDA takes GPU memory in the process that initialises it."""
    if rehearse:
        return REHEARSAL
    ask = "import torch; print(torch.cuda.get_device_name(0))"
    return subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def machine() -> str:
    """The GPU and the relevant versions, in one line."""
    import mainspring

    def of(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"no {package}"

    where = REHEARSAL
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        where = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {properties.multi_processor_count} SMs"
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            where += f", driver {subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]}"
    packages = ", ".join(map(of, ("torch", "transformers", "flashinfer-python", "triton")))
    return (
        f"{where}; Mainspring {mainspring.__version__}, Python {platform.python_version()}, CUDA {torch.version.cuda}, "
        f"{packages}"
    )


def _child(args: argparse.Namespace) -> int:
    """Run one part in this process; write its results to a file, line by line."""
    gpu_models.quiet()
    with tempfile.TemporaryDirectory() as folder, args.findings.open("a") as file:

        def tell(found: dict[str, Any]) -> None:
            file.write(json.dumps(found) + "\n")
            file.flush()
            if "measured" in found:
                print(f"  {found['name']}: {found['measured']}{_verdict(found)}", flush=True)

        tell({"machine": machine()})
        device = torch.device("cpu" if args.rehearse else "cuda:0")
        run_part(args.part, Setup(device, args.kernels_dir, Path(folder), args.rehearse), tell)
    return 0


def _verdict(bar: dict[str, Any]) -> str:
    limit = f" ({bar['limit']})" if bar["limit"] else ""
    return limit + {True: "  pass", False: "  FAIL", None: ""}[bar["passed"]]


def run_in_process(name: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """All bars of a part. Bars it did not reach are not measured, and fail if they have a limit."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        findings = Path(folder) / "findings"
        findings.touch()
        command = [sys.executable, __file__, "--part", name, "--findings", str(findings)]
        command += ["--rehearse"] if args.rehearse else []
        command += ["--kernels-dir", args.kernels_dir] if args.kernels_dir else []
        process = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, start_new_session=True)
        try:
            code = process.wait(seconds)
            why = f"the part ended with code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"cut off after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also cores that it started
            process.wait()
        found = [json.loads(line) for line in findings.read_text().splitlines()]
    why = next((each["error"] for each in found if "error" in each), why)
    measured = {each["name"]: each for each in found if "measured" in each}
    bars = [measured.get(bar.name) or _unmeasured(bar, why) for bar in BARS[name]]
    part = {"section": PARTS[name].section, "seconds": round(time.monotonic() - began, 1), "error": why, "bars": bars}
    return {**part, "machine": next((each["machine"] for each in found if "machine" in each), "unknown")}


def _unmeasured(bar: Bar, why: str) -> dict[str, Any]:
    measured = f"not measured: {why}" if why else UNKNOWN
    return {"name": bar.name, "limit": bar.limit, "measured": measured, "passed": False if bar.limit and why else None}


# ------------------------------------------------------------------ results


def section_table(section: str, parts: dict[str, Any]) -> str:
    """Every bar of a section, in the order of the parts."""
    verdict = {True: "pass", False: "**FAIL**", None: ""}
    rows = []
    for name, part in PARTS.items():
        if part.section == section:
            bars = parts[name]["bars"] if name in parts else [_unmeasured(bar, "") for bar in BARS[name]]
            rows += [[bar["name"], bar["limit"], bar["measured"], verdict[bar["passed"]]] for bar in bars]
    return table(["bar", "limit", "measured", ""], [[cell.replace("|", "\\|") for cell in row] for row in rows])


def _text(result: dict[str, Any]) -> str:
    done = dict.fromkeys((s for s in SECTIONS if any(s == p["section"] for p in result["parts"].values())), 0.0)
    for part in result["parts"].values():
        done[part["section"]] += part["seconds"]
    pieces = [f"{'REHEARSAL on a CPU: the numbers mean nothing. ' if result['rehearsal'] else ''}{_stamp(result)}"]
    for section, seconds in done.items():
        pieces.append(f"## {section}, {seconds:.0f} s\n\n{section_table(section, result['parts'])}")
    pieces.append(f"{result['seconds']:.0f} s in all")
    return "\n\n".join(pieces) + "\n"


def _stamp(result: dict[str, Any]) -> str:
    return f"`{result['command']}`, {result['date']}, {result['machine']}."


def save(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "gpu_check.txt").write_text(_text(result))


class Kept:
    """The file of --continue: a list of results, one for each commit and GPU. Without a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._results: list[dict[str, Any]] = json.loads(path.read_text()) if path and path.exists() else []

    def find(self, result: dict[str, Any]) -> dict[str, Any]:
        """The kept results for the commit and the GPU of `result`; `result` itself if there are none."""
        same = (each for each in self._results if all(each[key] == result[key] for key in ("commit", "gpu")))
        return next(same, result)

    def keep(self, result: dict[str, Any]) -> None:
        if not self._path:
            return
        if result not in self._results:
            self._results.append(result)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(f"{self._path.name}.new")
        unfinished.write_text(json.dumps(self._results, indent=1) + "\n")
        unfinished.replace(self._path)  # at once: a run may be killed at any moment


def put_on_page(result: dict[str, Any]) -> None:
    """Write the sections of `result` to the page; other sections are unchanged."""
    if result["rehearsal"]:
        raise SystemExit("these are a rehearsal's numbers, which are not for the page")
    for section in SECTIONS:
        if any(part["section"] == section for part in result["parts"].values()):
            fill(PAGE, section, f"{section_table(section, result['parts'])}\n\n{_stamp(result)}")


# ------------------------------------------------------------------ the command


def no_gpu() -> str:
    """The reason why there is no GPU; empty if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built for CPUs"
    return "" if torch.cuda.is_available() else "torch finds no NVIDIA GPU with a working driver here"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"sections ({', '.join(SECTIONS)}) or parts ({', '.join(PARTS)})")
    parser.add_argument("--output", type=Path, default=CACHE / "gpu_check", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--kernels-dir", metavar="DIR", help="what `mainspring kernels build` made")
    parser.add_argument("--minutes", type=float, help=f"most time for this run (default: {MINUTES:g})")
    parser.add_argument("--continue", type=Path, metavar="FILE", dest="kept", help="go on from the runs kept there")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, over toys: is the program itself in order?")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/gpu.md")
    parser.add_argument("--page", type=Path, metavar="JSON", help="measure nothing; put this run's tables there")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.minutes is None:
        args.minutes = MINUTES * (REHEARSAL_FACTOR if args.rehearse else 1)
    if args.kernels_dir:
        args.kernels_dir = str(Path(args.kernels_dir).expanduser().absolute())
    asked = [name for name in args.only.split(",") if name] or list(SECTIONS)
    for name in asked:
        if name not in SECTIONS and name not in PARTS:
            parser.error(f"--only is {name!r}; it must be of {', '.join([*SECTIONS, *PARTS])}")
    args.names = [name for name, part in PARTS.items() if name in asked or part.section in asked]
    if args.write and args.rehearse:
        parser.error("--write is given beside --rehearse, whose numbers are not for the page")
    return args


def measure(args: argparse.Namespace, result: dict[str, Any], kept: Kept) -> None:
    """Run the requested unfinished parts for which the run has time, and add them to `result`. Parts that were started
    before and did not finish come last, so that a part that always fails does not block others."""
    began, spent_before = time.monotonic(), result["seconds"]
    deadline = began + 60 * args.minutes - OVERHEAD_SECONDS
    for name in sorted(unfinished(args, result), key=lambda name: name in result["parts"]):
        part = PARTS[name]
        seconds = part.seconds * (REHEARSAL_FACTOR if args.rehearse else 1)
        elapsed = time.monotonic() - began
        if began + elapsed + seconds > deadline:
            continue  # a shorter one may still fit
        print(f"\n{part.section}: {name}, {elapsed:.0f} s since the start", flush=True)
        found = run_in_process(name, args, seconds)
        print(f"  {found['seconds']:.0f} s{'; ' + found['error'] if found['error'] else ''}", flush=True)
        result["machine"] = found.pop("machine")
        result["parts"][name] = found
        result["seconds"] = round(spent_before + time.monotonic() - began, 1)
        save(result, args.output)
        kept.keep(result)


def unfinished(args: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """Requested parts that have not finished: not started, cut off, or ended by an error."""
    return [name for name in args.names if name not in result["parts"] or result["parts"][name]["error"]]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.page:
        put_on_page(json.loads(args.page.read_text()))
        return 0
    if not args.rehearse and (why := no_gpu()):
        print(f"gpu-check was skipped: {why}")
        return 0
    if args.part:
        return _child(args)
    words = [word for word in (sys.argv[1:] if arguments is None else arguments) if word != "--write"]
    kept = Kept(args.kept)
    result = kept.find(
        {"commit": commit(), "gpu": gpu_name(args.rehearse), "machine": "unknown", "seconds": 0.0, "parts": {}}
    )
    result |= {
        "program": "gpu_check",
        "command": shlex.join(["python", "benchmarks/gpu_check.py", *words]),
        "date": str(datetime.date.today()),
        "rehearsal": args.rehearse,
    }
    if done := [name for name in args.names if name not in unfinished(args, result)]:
        print(f"finished by earlier runs: {', '.join(done)}", flush=True)
    measure(args, result, kept)
    save(result, args.output)
    print(f"\n{_text(result)}\n{args.output / 'gpu_check.json'}", flush=True)
    if args.write:
        put_on_page(result)
    left = unfinished(args, result)
    if left:
        hint = "run the same command again" if args.kept else "give --continue FILE, and run it again"
        print(f"not finished: {', '.join(left)}; {hint}", flush=True)
    failed = any(bar["passed"] is False for part in result["parts"].values() for bar in part["bars"])
    return int(bool(left) or failed)


if __name__ == "__main__":
    sys.exit(main())
