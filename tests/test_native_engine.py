"""The engine on the native kernels: every architecture of test_exact.py, token for token, and clockwork in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import references
import tiny
from mainspring.core.worker.backends import choose_backend
from mainspring.ipc.config import DeviceConfig
from mainspring.ipc.errors import InvalidArgumentError
from native_here import why_not
from test_exact import DEFAULT_BLOCKS, NUM_BLOCKS, SETTINGS, requests
from test_late_device import run
from tiers import EACH_ARCHITECTURE

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")


@pytest.mark.parametrize("architecture", EACH_ARCHITECTURE)
def test_greedy_tokens_equal_generate(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = requests(tiny.VOCAB_SIZE)
    blocks = NUM_BLOCKS.get(architecture, DEFAULT_BLOCKS)
    got, engine = run(path, reqs, num_gpu_blocks_override=blocks, attention_backend="native", **SETTINGS)
    assert got == references.greedy(path, reqs)
    stats = engine.engine_core.core.scheduler.stats()
    assert min(stats.num_preemptions, stats.prefix_hits, stats.chunked_prefills, stats.mixed_steps) > 0


def test_a_request_has_the_same_tokens_alone_chunked_and_in_a_batch(tmp_path: Path) -> None:
    path = tiny.make("qwen3", tmp_path, dtype=torch.bfloat16)
    reqs = requests(tiny.VOCAB_SIZE, seed=6)
    rest = {**SETTINGS, "attention_backend": "native"}
    alone, _ = run(path, reqs, **{**rest, "max_num_seqs": 1, "max_num_batched_tokens": 128})
    assert run(path, reqs, **rest)[0] == alone
    assert run(path, reqs, **{**rest, "max_num_batched_tokens": 7})[0] == alone


def test_on_another_device_it_says_so() -> None:
    with pytest.raises(InvalidArgumentError, match="attention_backend='native' is for CPUs, and the device is cuda:0"):
        choose_backend(DeviceConfig(attention_backend="native"), torch.device("cuda:0"))
