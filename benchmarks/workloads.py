"""The workloads of all engines: prompts of token ids and a fixed number of output tokens."""

from __future__ import annotations

import random
from typing import NamedTuple


class Ask(NamedTuple):
    prompt: list[int]
    output_tokens: int


class Workload(NamedTuple):
    model: str  # a name of make_models.SHAPES
    requests: int
    prompt_tokens: tuple[int, int]  # minimum and maximum, without the shared prefix
    output_tokens: tuple[int, int]
    shared_prefix: int = 0  # tokens every prompt begins with
    known_prefix: bool = False  # whether that is in the cache of an engine that has warmed up
    kv_gib: int = 1  # memory for keys, values and states, for engines that take it as an option
    warm_ups: int = 4  # runs of the whole workload before the one that is timed

    @property
    def seats(self) -> int:
        """Number of concurrent sequences, for engines that need it as an option."""
        return min(self.requests, 64)


WORKLOADS = {
    "single-110m": Workload("llama-110m", 1, (64, 64), (128, 128)),
    "single-0.6b": Workload("qwen3-0.6b", 1, (64, 64), (64, 64)),
    "batch-110m": Workload("llama-110m", 64, (32, 256), (32, 128)),
    "batch-0.6b": Workload("qwen3-0.6b", 16, (128, 256), (64, 64)),
    "prefix-110m": Workload("llama-110m", 32, (16, 48), (32, 32), shared_prefix=512),
    "known-prefix-110m": Workload("llama-110m", 32, (16, 48), (32, 32), shared_prefix=512, known_prefix=True),
    "long-110m": Workload("llama-110m", 4, (1500, 1500), (64, 64)),
    "single-mixture": Workload("qwen3-moe-0.7b", 1, (64, 64), (128, 128)),
    "single-glm4-moe": Workload("glm4-moe-0.7b", 1, (64, 64), (128, 128)),
    "single-gpt-oss": Workload("gpt-oss-0.7b", 1, (64, 64), (128, 128)),
    "single-mxfp4": Workload("gpt-oss-0.7b-mxfp4", 1, (64, 64), (128, 128)),
    "batch-mxfp4": Workload("gpt-oss-0.7b-mxfp4", 16, (32, 256), (32, 128)),
    "batch-mixture": Workload("qwen3-moe-0.7b", 16, (32, 256), (32, 128)),
    "single-hybrid-110m": Workload("qwen3.5-110m", 1, (64, 64), (128, 128)),
    "single-hybrid-0.6b": Workload("qwen3.5-0.6b", 1, (64, 64), (64, 64)),
    "batch-hybrid-110m": Workload("qwen3.5-110m", 64, (32, 256), (32, 128), warm_ups=1),  # they keep little but states
    "batch-hybrid-0.6b": Workload("qwen3.5-0.6b", 64, (32, 256), (32, 128), kv_gib=4, warm_ups=1),
}


def asks(workload: Workload, vocab_size: int, seed: int = 7) -> list[Ask]:
    """The requests of a workload. Low and high ids are not used, because special tokens may have them."""
    rng = random.Random(seed)

    def ids(count: int, rng: random.Random = rng) -> list[int]:
        return [rng.randrange(100, vocab_size - 100) for _ in range(count)]

    prefix = ids(workload.shared_prefix, random.Random(0) if workload.known_prefix else rng)
    return [
        Ask(prefix + ids(rng.randint(*workload.prompt_tokens)), rng.randint(*workload.output_tokens))
        for _ in range(workload.requests)
    ]
