"""`mainspring bench`: its options, and its results as a table, JSON or a picture."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from .. import __version__
from ..engine.args import EngineArgs, check_least
from ..ipc.config import EngineConfig, Section
from ..ipc.errors import InvalidArgumentError, NotSupportedError

if TYPE_CHECKING:
    import argparse

    from rich.table import Table

    from ..engine.async_llm_engine import AsyncLLMEngine
    from .bench_runs import Ask, Figures

N = TypeVar("N", int, float)


class Benchmark(Section, frozen=True, kw_only=True):
    """Options of all benchmarks. Lengths are a number of tokens, or LEAST:MOST."""

    input_len: Annotated[str, "Random tokens of each prompt: a number, or LEAST:MOST."] = "32:256"
    output_len: Annotated[str, "Tokens of each output, whatever the model would end with."] = "32:128"
    prefix_len: Annotated[int, "Random tokens before those, the same in all prompts."] = 0
    seed: Annotated[int, "Of lengths, tokens and arrivals, and of `load_format=dummy` weights."] = 0
    temperature: Annotated[float, "0: greedy."] = 0.0
    output_json: Annotated[str | None, "File for the figures, all options, machine, versions and date."] = None


class Throughput(Benchmark, frozen=True, kw_only=True):
    """All requests at once: how many tokens a second."""

    num_prompts: Annotated[int | None, "How many requests; none: all of the file, or 100 random ones."] = None
    dataset_path: Annotated[
        str | None, "Requests instead of random ones: JSON lines of `prompt` or `prompt_token_ids`, `output_tokens`."
    ] = None


class Latency(Benchmark, frozen=True, kw_only=True):
    """One batch, again and again: how long it takes."""

    input_len: Annotated[str, "Random tokens of each prompt: a number, or LEAST:MOST."] = "32"
    output_len: Annotated[str, "Tokens of each output, whatever the model would end with."] = "128"
    batch_size: Annotated[str, "Requests in the batch; several sizes like 1,4,16 are measured in turn."] = "8"
    num_iters: Annotated[int, "How often each batch is timed."] = 10
    num_iters_warmup: Annotated[int, "How often it is run before."] = 2
    output_png: Annotated[str | None, "Picture of throughput against latency."] = None


class Serve(Throughput, frozen=True, kw_only=True):
    """Requests that arrive at a rate: how long each waits for its tokens."""

    request_rate: Annotated[
        str, "Requests a second, inf: all at once; several rates like 1,2,4,inf are measured in turn."
    ] = "inf"
    burstiness: Annotated[float, "1: Poisson arrivals; below: in bursts; above: more even."] = 1.0
    output_png: Annotated[str | None, "Picture of throughput against latency."] = None


COMMANDS: dict[str, type[Benchmark]] = {"throughput": Throughput, "latency": Latency, "serve": Serve}


class Document(msgspec.Struct):
    """The saved results, with everything that is needed to measure them again."""

    benchmark: str
    date: str
    versions: dict[str, str]
    machine: dict[str, Any]
    options: Benchmark
    connect: str | None  # the daemon that was measured; versions and machine are this frontend's
    engine: EngineConfig  # as the core filled it in
    results: list[Figures]  # for each batch size or rate


def options_of(args: argparse.Namespace) -> Benchmark:
    """The options, by the flags."""
    kind = COMMANDS[args.benchmark]
    return kind(**{name: getattr(args, name) for name in kind.__struct_fields__ if hasattr(args, name)})


def run(options: Benchmark, engine: Mapping[str, Any]) -> Document:
    """Measure.

    Args:
        options: one of `COMMANDS`.
        engine: arguments of `LLM`.

    Raises:
        InvalidArgumentError: an option is wrong; known before an engine is started, as is the next.
        NotSupportedError: a picture is asked for, and matplotlib is not installed.
        MainspringError: the engine did not start, or no request could be served.
    """
    asks = _checked(options)
    if isinstance(options, Serve):
        import asyncio

        return asyncio.run(_serve(options, engine, asks))
    from ..engine.llm import LLM
    from . import bench_runs

    with LLM(**engine) as llm:
        asked = asks(llm.llm_engine.engine_core.model.vocab_size)
        if isinstance(options, Latency):
            how = options.num_iters, options.num_iters_warmup, options.temperature
            sizes = _numbers("batch_size", options.batch_size, int)
            results = [{"batch_size": size, **bench_runs.latency(llm, asked[:size], *how)} for size in sizes]
        else:
            results = [bench_runs.throughput(llm, asked, options.temperature)]
        return _document(options, engine, llm.llm_engine.vllm_config, results)


async def _serve(options: Serve, engine: Mapping[str, Any], asks: Callable[[int], list[Ask]]) -> Document:
    from . import bench_runs

    async with _async_engine(**engine) as serving:
        asked, results = asks(serving.engine_core.model.vocab_size), []
        for rate in _numbers("request_rate", options.request_rate, float):
            times = bench_runs.arrivals(len(asked), rate, options.burstiness, options.seed)
            figures = await bench_runs.serve(serving, asked, times, options.temperature)
            results.append({"request_rate": rate if math.isfinite(rate) else "inf", **figures})
        return _document(options, engine, serving.vllm_config, results)


def _async_engine(connect: str | None = None, **arguments: Any) -> AsyncLLMEngine:
    from ..engine.async_llm_engine import AsyncLLMEngine

    if connect is not None:
        return AsyncLLMEngine.connect(connect, **arguments)
    return AsyncLLMEngine.from_engine_args(EngineArgs(**arguments))


def _checked(options: Benchmark) -> Callable[[int], list[Ask]]:
    """Check all options. Returns the workload, a function of the size of the vocabulary."""
    from .bench_runs import random_asks, read_dataset

    values = msgspec.structs.asdict(options)
    for least, names in {0: "prefix_len seed num_iters_warmup temperature", 1: "num_prompts num_iters"}.items():
        for name in names.split():
            check_least(name, values.get(name), least)
    for name in ("output_json", "output_png"):
        if values.get(name) is not None and not Path(values[name]).absolute().parent.is_dir():
            raise InvalidArgumentError(f"{name} is {values[name]!r}, but there is no such folder")
    if values.get("output_png") is not None and find_spec("matplotlib") is None:
        raise NotSupportedError("output_png needs matplotlib: install it with pip install 'mainspring[bench]'")
    count, path = values.get("num_prompts"), values.get("dataset_path")
    if isinstance(options, Latency):
        count = max(_numbers("batch_size", options.batch_size, int))
    if isinstance(options, Serve):
        _numbers("request_rate", options.request_rate, float)
        if not 0 < options.burstiness < math.inf:
            raise InvalidArgumentError(f"burstiness is {options.burstiness}; it must be above 0 and finite")
    ends = _ends("input_len", options.input_len), _ends("output_len", options.output_len)
    if path is None:
        return partial(random_asks, count or 100, *ends, options.prefix_len, options.seed)
    asked = read_dataset(path, count)
    return lambda vocab_size: asked


def _numbers(name: str, text: str, kind: type[N], between: str = ",") -> list[N]:
    try:
        found = [kind(part) for part in text.split(between)]
    except ValueError:
        found = []
    if not found or not all(one > 0 for one in found):  # NaN is not
        raise InvalidArgumentError(f"{name} is {text!r}; it must be a number above 0, or several like 1{between}4")
    return found


def _ends(name: str, text: str) -> tuple[int, int]:
    found = _numbers(name, text, int, ":")
    if len(found) > 2 or found[0] > found[-1]:
        raise InvalidArgumentError(f"{name} is {text!r}; it must be a number, or LEAST:MOST")
    return found[0], found[-1]


# ---------------------------------------------------------------------- results


def _document(options: Benchmark, engine: Mapping[str, Any], config: EngineConfig, results: list[Figures]) -> Document:
    from importlib import metadata

    versions = {"mainspring": __version__, "python": platform.python_version()}
    for package in ("numpy", "torch", "transformers", "flashinfer-python"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    machine = {
        "processor": named[1] if named else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("OMP_")},
    }
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    name, connect = type(options).__name__.lower(), engine.get("connect")
    return Document(name, date, versions, machine, options, connect, config, results)


def table(document: Document) -> Table:
    """Figures under one another, results side by side."""
    from rich.table import Column, Table

    shown = Table.grid("", *(Column(justify="right") for _ in document.results), padding=(0, 2))
    for name in document.results[0]:
        values = (figures.get(name, "") for figures in document.results)
        shown.add_row(name, *(f"{value:,.2f}" if isinstance(value, float) else f"{value}" for value in values))
    return shown


def save(document: Document) -> None:
    """Write the files that the options name."""
    if document.options.output_json is not None:
        Path(document.options.output_json).write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    if isinstance(document.options, (Latency, Serve)) and document.options.output_png is not None:
        save_png(document.results, document.options.output_png)


_TITLES = {
    "ttft": "time to first token, ms",
    "tpot": "time per output token, ms",
    "e2el": "time to the end, ms",
    "latency": "time of a batch, ms",
    "latency_per_token": "time of a batch per output token, ms",
}


def save_png(results: list[Figures], path: str) -> None:
    """Throughput against latency: a panel for each latency, a point for each result."""
    from matplotlib.figure import Figure

    panels = {name: title for name, title in _TITLES.items() if all(f"median_{name}_ms" in one for one in results)}
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    speeds = [one["output_throughput"] for one in results]
    for axes, (name, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for statistic, style in (("median", "o-"), ("p99", "s--")):
            axes.plot(speeds, [one[f"{statistic}_{name}_ms"] for one in results], style, label=statistic)
        for speed, one in zip(speeds, results, strict=True):
            at, below = (speed, one[f"median_{name}_ms"]), (0, -14)
            axes.annotate(_label(one), at, below, textcoords="offset points", ha="center")
        axes.margins(0.1)
        axes.set(xlabel="output tokens/s", ylabel=title, xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png", dpi=150)


def _label(figures: Figures) -> str:
    rate = figures.get("request_rate")
    return f"batch {figures['batch_size']}" if rate is None else f"{rate:g}/s" if rate != "inf" else "all at once"
