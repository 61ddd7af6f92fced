"""Do the stages of a pipeline compute at the same time? Each waits a fixed time for each row of its steps.

The tiny model's own work is small beside these waits, so the numbers say what the planner makes of stages, also on a
machine with few cores: a model that takes 40 ms a row, divided evenly. (Fewer than eight rows take as long as eight.)

    python benchmarks/pipeline.py            # print the table
    python benchmarks/pipeline.py --write    # and put it into docs/scaling.md
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from mainspring import LLM, SamplingParams
from report import DOCS, publish, table

ROW_SECONDS = 0.04  # of the whole model
TOKENS = 8
STAGES, REQUESTS = (1, 2, 4), (1, 8, 32, 64)


class Waiting:
    """An extension of workers."""

    def wait_in_steps(self, seconds: float, stages: int) -> None:
        """Each step waits in front of the layers of this stage, when it has what the stage before computed."""
        from mainspring.core.model.run.paged_model import PagedModel
        from mainspring.core.parallel.stages import Stages

        owner, name = (Stages, "enter") if stages > 1 else (PagedModel, "forward")
        own = getattr(owner, name)

        def waiting(first: Any, rows: Any, *more: Any) -> Any:
            out = own(first, rows, *more)
            time.sleep(seconds * (rows.shape[-2] if stages > 1 else len(rows)))
            return out

        setattr(owner, name, waiting)


def rates(folder: Path, stages: int) -> list[float]:
    """Tokens per second for each number of requests."""
    found = []
    with LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=max(REQUESTS),
        attention_backend="reference",  # which makes no several steps in one call
        pipeline_parallel_size=stages,
        worker_extension_cls="pipeline.Waiting",
    ) as llm:
        llm.collective_rpc("wait_in_steps", args=(ROW_SECONDS / stages, stages))
        for count in REQUESTS:
            prompts = [{"prompt_token_ids": [2 + number, 3, 5]} for number in range(count)]
            params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
            began = time.monotonic()
            llm.generate(prompts, params, use_tqdm=False)
            found.append(count * TOKENS / (time.monotonic() - began))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, here)
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=8,
            num_attention_heads=4,
            architectures=["LlamaForCausalLM"],
            dtype="float32",
        )
        config.save_pretrained(folder)
        rows = [[str(stages), *(f"{rate:,.0f}" for rate in rates(Path(folder), stages))] for stages in STAGES]
    text = table(["stages", *(f"{count} request{'s' * (count > 1)}" for count in REQUESTS)], rows)
    publish(
        "pipeline",
        f"Tokens/s of a model that takes {1000 * ROW_SECONDS:g} ms a row:\n\n{text}",
        args.write,
        DOCS / "scaling.md",
    )


if __name__ == "__main__":
    main()
