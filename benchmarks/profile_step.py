"""Where a step's time goes on a workload: the model, or all that surrounds it.

Core and frontend run in one process and one thread, so that their times add up. The codec, which in-process mode does
without, is timed on the very outputs of each step: encode as in the core, decode as in the frontend.

    python benchmarks/profile_step.py --workload batch-110m
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from mainspring import EngineArgs, LLMEngine, SamplingParams
from mainspring.core.engine_core import EngineCore
from mainspring.ipc import codec
from mainspring.ipc.inproc_client import InprocClient
from report import MODELS, publish, table
from workloads import WORKLOADS, asks

LIMIT = 0.05  # the share that scheduler, codec and client may take


class Clock:
    """Seconds spent in named parts."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Count the time in `owner.method` as `part`'s, from now on."""
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent[part] += time.perf_counter() - began

        setattr(owner, method, timed)


def watch_codec(core: EngineCore, clock: Clock) -> None:
    """Put every step's outputs through the codec, and count that as its time."""
    step = core.step

    def step_and_encode() -> Any:
        outputs = step()
        began = time.perf_counter()
        for message in outputs.values():
            codec.decode(codec.encode(message, codec.NO_INSTANCE, 1))
        clock.spent["codec"] += time.perf_counter() - began
        return outputs

    core.step = step_and_encode  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="batch-110m", choices=WORKLOADS)
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    engine_args = EngineArgs(
        model=str(MODELS / workload.model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2_048
    )
    engine = LLMEngine.from_engine_args(engine_args, enable_multiprocessing=False)
    client = engine.engine_core
    assert isinstance(client, InprocClient)
    core = client.core
    assert isinstance(core, EngineCore)
    clock = Clock()
    for method in ("execute", "sample", "tokens"):
        clock.watch(core.executor, method, "model")
    for method in ("schedule", "update"):
        clock.watch(core.scheduler, method, "scheduler")
    watch_codec(core, clock)
    clock.watch(core, "step", "core")

    asked = asks(workload, core.model.vocab_size)
    for number, ask in enumerate(asked):
        params = SamplingParams(temperature=0, max_tokens=ask.output_tokens, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": ask.prompt}, params)
    began, steps = time.perf_counter(), 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    total = time.perf_counter() - began
    engine.shutdown()

    spent = clock.spent
    parts = {
        "model: forward and sampling": spent["model"],
        "scheduler": spent["scheduler"],
        "codec, both ends": spent["codec"],
        "client and output processor": total - spent["core"],
        "the core's loop around them": spent["core"] - spent["model"] - spent["scheduler"] - spent["codec"],
    }
    rows = [[part, f"{s:.3f}", f"{1e3 * s / steps:.3f}", f"{s / total:.2%}"] for part, s in parts.items()]
    around = 1 - spent["model"] / total
    rows.append(["**all but the model**", f"{total - spent['model']:.3f}", "", f"**{around:.2%}**"])
    text = f"**{args.workload}**, {steps} steps in {total:.1f} s, core and frontend in one process:\n\n"
    publish("profile", text + table(["part", "s", "ms a step", "share"], rows), args.write)
    if around > LIMIT:
        raise SystemExit(f"{around:.1%} of a step is spent around the model; the limit is {LIMIT:.0%}")


if __name__ == "__main__":
    main()
