"""The time of a step on a workload: the model, kernel by kernel, and the code around it.

Core and frontend run in one process and one thread, so that their times add up. The codec, which is not used
in-process, is timed on the outputs of each step: encode as in the core, decode as in the frontend.

If the model is one native call, its phases are timed inside it. The table also has the lower bound of each: its
multiply-adds at the machine's matrix rate, or its weights and its part of the KV cache read once a step at the
machine's bandwidth, whichever takes longer, step by step.

    python benchmarks/profile_step.py --workloads batch-110m,single-110m
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from msgspec.structs import replace

from compare import Machine, measure_machine
from mainspring import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from mainspring.core.loop import EngineCore
from mainspring.core.plan.step import StepPlan
from mainspring.core.worker.generation_worker import GenerationWorker
from mainspring.ipc import codec
from mainspring.ipc.inproc_client import InprocClient
from report import MODELS, publish, table
from workloads import WORKLOADS, Ask, asks

LIMIT = 0.05  # maximum share of scheduler, codec and client in a step with many rows
BYTES = 2  # bytes of a weight, and of an element of the KV cache
PHASES = {  # the phases in kernels/native/decoder.h
    "norm": "norms of rows",
    "qkv": "product: query, key, value",
    "heads": "norms of heads, RoPE, append to the cache",
    "attention": "attention",
    "mixer": "recurrent mixer",
    "output": "product: output, added to the residual, norm",
    "gate_up": "product: gate and up, activation",
    "down": "product: down, added to the residual, norm",
    "experts": "router and experts, added to the residual, norm",
    "head": "product: logits",
    "choice": "choice of tokens, in calls of several steps",
}


class Clock:
    """Seconds spent in named parts."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, part: str) -> None:
        """From now on count the time in `owner.method` as time of `part`."""
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent[part] += time.perf_counter() - began

        setattr(owner, method, timed)


def watch_codec(core: EngineCore, clock: Clock) -> None:
    """Encode and decode every step's outputs, and count that as the codec's time."""
    step = core.step

    def step_and_encode() -> Any:
        outputs = step()
        began = time.perf_counter()
        for message in outputs.values():
            codec.decode(codec.encode(message, codec.NO_INSTANCE, 1))
        clock.spent["codec"] += time.perf_counter() - began
        return outputs

    core.step = step_and_encode  # type: ignore[method-assign]


def least_seconds(config: Any, steps: list[StepPlan], machine: Machine) -> dict[str, float]:
    """The lower bound of each phase that multiplies, over all steps."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * dim, config.num_key_value_heads * dim
    weights = {
        "qkv": hidden * (queries + 2 * keys),
        "output": queries * hidden,
        "gate_up": 2 * hidden * config.intermediate_size,
        "down": config.intermediate_size * hidden,
        "head": hidden * config.vocab_size,
    }

    def least(flops: float, read: float) -> float:
        return float(max(flops / machine.flops, BYTES * read / machine.bytes_s))

    spent: defaultdict[str, float] = defaultdict(float)
    for step in steps:
        for phase, size in weights.items():
            rows = int(step.samples.sum()) if phase == "head" else step.num_tokens
            spent[phase] += least(2.0 * rows * size, size) * (1 if phase == "head" else config.num_hidden_layers)
        starts, counts = step.starts.astype(float), step.counts.astype(float)
        seen = (counts * starts + counts * (counts + 1) / 2).sum()  # keys, summed over all rows
        spent["attention"] += least(4 * queries * seen, 2 * keys * (starts + counts).sum()) * config.num_hidden_layers
    return dict(spent)


def profile(workload_name: str, options: dict[str, Any]) -> tuple[str, float]:
    """A table, and the share of all parts except the model."""
    workload = WORKLOADS[workload_name]
    engine_args = EngineArgs(
        model=str(MODELS / workload.model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2_048, **options
    )
    machine = measure_machine()
    engine = LLMEngine.from_engine_args(engine_args, enable_multiprocessing=False)
    client = engine.engine_core
    assert isinstance(client, InprocClient)
    core = client.core
    assert isinstance(core, EngineCore)
    worker = core.worker
    assert isinstance(worker, GenerationWorker)
    runner = worker.runner

    def serve(requests: list[Ask], tag: str) -> int:
        for number, ask in enumerate(requests):
            params = SamplingParams(
                temperature=0,
                max_tokens=ask.output_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(f"{tag} {number}", {"prompt_token_ids": ask.prompt}, params)
        before = core.stats().num_steps
        while engine.has_unfinished_requests():
            engine.step()
        return core.stats().num_steps - before

    serve(asks(workload, core.model.vocab_size, seed=1)[:2], "first")  # warm-up: buffers grow, memory is touched
    decoder = worker.model.whole.decoder if worker.model.whole else None
    before = decoder.seconds() if decoder else {}
    clock, steps_run = Clock(), []
    execute, repeat = runner.execute, runner.repeat

    def remember(plan: StepPlan) -> Any:
        steps_run.append(plan)
        return execute(plan)

    def remember_each(plan: StepPlan, interrupt: np.ndarray) -> Any:
        begun = repeat(plan, interrupt)

        def make(most: int) -> Any:
            began = time.perf_counter()
            tokens, scores, stopped = begun.make(most)
            clock.spent["forward"] += time.perf_counter() - began
            steps_run.extend(replace(plan, starts=plan.starts + step) for step in range(len(tokens)))
            return tokens, scores, stopped

        return SimpleNamespace(make=make)  # greedy requests have no rules

    runner.execute = remember  # type: ignore[method-assign]
    runner.repeat = remember_each  # type: ignore[method-assign]
    clock.watch(runner, "execute", "forward")
    clock.watch(runner, "repeat", "forward")
    if decoder:  # the native calls themselves: their phases leave out the waits between them
        clock.watch(decoder, "_run", "native")
        clock.watch(decoder._library, "mainspring_decoder_repeat", "native")
    clock.watch(runner, "sample", "sampling")
    for method in ("schedule", "update"):
        clock.watch(core.scheduler, method, "scheduler")
    watch_codec(core, clock)
    clock.watch(core, "step", "core")

    began = time.perf_counter()
    steps = serve(asks(workload, core.model.vocab_size), "asked")
    total = time.perf_counter() - began
    engine.shutdown()

    spent, parts = clock.spent, {}
    if decoder:
        phases = {phase: after - before[phase] for phase, after in decoder.seconds().items()}
        parts = {PHASES[phase]: s for phase, s in phases.items() if s}
        parts["between the phases of a native call: embedding, plan, waits"] = spent["native"] - sum(phases.values())
        parts["before and after a native call: inputs, first embedding and plan"] = spent["forward"] - spent["native"]
    else:
        parts["model: forward"] = spent["forward"]
    model = spent["forward"] + spent["sampling"]
    parts |= {
        "sampling": spent["sampling"],
        "scheduler": spent["scheduler"],
        "codec, both ends": spent["codec"],
        "client and output processor": total - spent["core"],
        "the core's loop around them": spent["core"] - model - spent["scheduler"] - spent["codec"],
    }
    config = worker.model.model.config
    least = {PHASES[phase]: s for phase, s in least_seconds(config, steps_run, machine).items()}
    rows = []
    for part, s in parts.items():
        bound = [f"{least[part]:.3f}", f"{least[part] / s:.0%}"] if part in least and decoder else ["", ""]
        rows.append([part, f"{s:.3f}", f"{1e3 * s / steps:.3f}", f"{s / total:.2%}", *bound])
    if decoder:
        tokens = sum(ask.output_tokens for ask in asks(workload, core.model.vocab_size))
        between = total - spent["native"]
        rows.append(["**between native calls, a token**", "", f"{1e3 * between / tokens:.3f}", "", "", ""])
    around = total - model
    rows.append(["**all but the model**", f"{around:.3f}", "", f"**{around / total:.2%}**", "", ""])
    rows.append(
        [
            "**all**",
            f"{total:.3f}",
            f"{1e3 * total / steps:.3f}",
            "",
            f"{sum(least.values()):.3f}",
            f"**{sum(least.values()) / total:.0%}**",
        ]
    )
    head = ["part", "s", "ms a step", "share", "at least s", "reached"]
    return (
        f"**{workload_name}**, {steps} steps in {total:.1f} s, core and frontend in one process, on "
        f"{machine.flops / 1e9:,.0f} GFLOP/s of matrix products and {machine.bytes_s / 1e9:.0f} GB/s of reads:\n\n"
        + table(head, rows)
    ), around / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="batch-110m", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--options", type=json.loads, default={}, help="more of the engine's, as JSON")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    args = parser.parse_args()
    found = {workload: profile(workload, args.options) for workload in args.workloads.split(",")}
    publish("profile", "\n\n".join(text for text, _ in found.values()), args.write)
    for workload, (_, around) in found.items():
        if around > LIMIT and WORKLOADS[workload].requests > 1:
            raise SystemExit(f"{workload}: {around:.1%} of a step is spent around the model; the limit is {LIMIT:.0%}")


if __name__ == "__main__":
    main()
