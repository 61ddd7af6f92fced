"""Exactness: with any batch, chunks, cached prefixes and preemptions, greedy fp32 outputs equal `model.generate`.

The tests use tiny random checkpoints of each architecture. Some have the default client, with a core in a process of
its own and the whole protocol; the others have a core in this process, which starts in a fraction of the time.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

import references
import tiny
from mainspring import LLM, SamplingParams
from mainspring.ipc.messages import Stats
from plain import serve
from tiers import EACH_ARCHITECTURE, fast_only

NUM_REQUESTS = 18  # more than max_num_seqs, so that some wait
MAX_MODEL_LEN = 128
SETTINGS = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "max_num_seqs": 16,
    "skip_tokenizer_init": True,
}
# Small enough that running requests run out of blocks, large enough for one request of max_model_len.
NUM_BLOCKS = {"gemma2": 26, "gpt_neo": 26, "gemma3": 50, "mistral": 12}
DEFAULT_BLOCKS = 20
THROUGH_THE_PROTOCOL = ("llama", "gemma2", "mixtral", "deepseek_v3")  # of the fast tier


def requests(vocab_size: int, seed: int = 1) -> list[tuple[list[int], int]]:
    """Prompts of 1 to 80 tokens, a third of them with a common beginning, and output lengths of 4 to 40."""
    r = random.Random(seed)
    prefix = [r.randrange(vocab_size) for _ in range(37)]
    lengths = [1, 15, 16, 17, 32, 80] + [r.randint(2, 60) for _ in range(18)]
    prompts = [[r.randrange(vocab_size) for _ in range(n)] for n in lengths]
    prompts[::3] = [(prefix + p)[:80] for p in prompts[::3]]
    return [(p, r.randint(4, 40)) for p in prompts[:NUM_REQUESTS]]


def through_the_protocol(
    path: Path, reqs: list[tuple[list[int], int]], **settings: Any
) -> tuple[list[list[int]], Stats]:
    """As `serve`, from a core in a process of its own."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in reqs]
    with LLM(str(path), **settings) as llm:
        outputs = llm.generate([p for p, _ in reqs], params, use_tqdm=False)
        stats = msgspec.convert(llm.llm_engine.engine_core.call("stats"), Stats)
    return [list(o.outputs[0].token_ids) for o in outputs], stats


@pytest.mark.parametrize(
    "architecture", EACH_ARCHITECTURE + fast_only((), tiny.OWN_ATTENTION) + fast_only(("deepseek_v3",), tiny.LATENT)
)
def test_greedy_tokens_equal_generate(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs, blocks = requests(tiny.VOCAB_SIZE), NUM_BLOCKS.get(architecture, DEFAULT_BLOCKS)
    ask = through_the_protocol if architecture in THROUGH_THE_PROTOCOL else serve
    got, stats = ask(path, reqs, num_gpu_blocks_override=blocks, **SETTINGS)
    assert got == references.greedy(path, reqs)
    assert len({token for tokens in got for token in tokens}) >= 20, "outputs too uniform to show an error"
    assert stats.num_preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.chunked_prefills > 0
    assert stats.mixed_steps > 0
    assert stats.generation_tokens >= sum(n for _, n in reqs)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
