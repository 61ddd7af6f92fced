"""What attention over latents saves: memory of a token, and time of a decoding step over a long context.

The model has DeepSeek-V3's attention (128 heads, latents of 512 numbers) in few layers, and random weights. One engine
caches latents, the other keys and values, as it would if the backend knew no latents. They take turns in one process.

    python benchmarks/latents.py [--context 8000] [--write]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from unittest import mock

import torch
from transformers import DeepseekV3Config

from bars import Bar, add_arguments, conclude
from mainspring import EngineArgs, LLMEngine, SamplingParams
from mainspring.kernels.native.native_backend import NativeBackend

STEPS = 8  # timed in each round
ROUNDS = 3
LAYERS = 2


def config() -> DeepseekV3Config:
    """V3's attention; its experts are left out, because they are the same in both engines."""
    return DeepseekV3Config(
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS,
        hidden_size=1024,
        intermediate_size=2048,
        vocab_size=4096,
        max_position_embeddings=65_536,
        architectures=["DeepseekV3ForCausalLM"],
        dtype="bfloat16",
    )


def make_engine(folder: str, context: int, *, latents: bool) -> LLMEngine:
    args = EngineArgs(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=context + 4 * STEPS,
        num_gpu_blocks_override=context // 16 + 2 * STEPS,
        block_size=16,
    )
    with mock.patch.object(NativeBackend, "caches_latents", return_value=latents):
        return LLMEngine.from_engine_args(args, enable_multiprocessing=False)


def times(engine: LLMEngine, prompt: list[int]) -> tuple[float, list[float], list[int]]:
    """Seconds to the first token, seconds of each later step, and the tokens."""
    params = SamplingParams(temperature=0, max_tokens=STEPS + 1, ignore_eos=True, detokenize=False)
    engine.add_request("it", {"prompt_token_ids": prompt}, params)
    at, tokens = [time.perf_counter()], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            at.append(time.perf_counter())
            tokens = list(output.outputs[0].token_ids)
    return at[1] - at[0], [later - before for before, later in itertools.pairwise(at[1:])], tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--context", type=int, default=8_000, help="tokens of the prompt (default: %(default)s)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        config().save_pretrained(folder)
        engines = {
            name: make_engine(folder, args.context, latents=name == "latents") for name in ("latents", "keys, values")
        }
    r = random.Random(1)
    prompt = [r.randrange(4096) for _ in range(args.context)]
    firsts, steps = {}, {name: [] for name in engines}
    for _ in range(1 + ROUNDS):  # in the first one, prompts are computed
        for name, engine in engines.items():
            first, later, _ = times(engine, prompt)
            firsts.setdefault(name, first)
            steps[name].append(statistics.median(later))
    bytes_per_token = {
        name: engine.engine_core.core.worker.runner.pool[0].nbytes / 16 for name, engine in engines.items()
    }
    ratios = [a / b for a, b in zip(steps["keys, values"], steps["latents"], strict=True)]
    less = bytes_per_token["keys, values"] / bytes_per_token["latents"]
    bars = [
        Bar(
            "cache bytes of a token: latents against keys and values (1/10)",
            f"{bytes_per_token['latents']:,.0f} B against {bytes_per_token['keys, values']:,.0f} B in {LAYERS} layers: "
            f"1/{less:.0f}",
            less >= 10,
        ),
        Bar(
            f"a step after {args.context:,} tokens, faster by (2.00×)",
            f"{statistics.median(ratios):.2f}× ({1e3 * statistics.median(steps['latents']):.1f} ms against "
            f"{1e3 * statistics.median(steps['keys, values']):.1f} ms)",
            statistics.median(ratios) >= 2,
        ),
        Bar(
            f"a prompt of {args.context:,} tokens",
            f"{firsts['latents']:.1f} s against {firsts['keys, values']:.1f} s",
            None,
        ),
    ]
    return conclude(bars, {"section": "latents"}, args, "performance.md")


if __name__ == "__main__":
    sys.exit(main())
