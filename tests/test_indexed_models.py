"""Models whose attention sees keys that an index selects: exact in any batch, and which keys they see."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import references
import tiny
from mainspring import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from mainspring.core.model.learn import verify
from mainspring.core.model.load.loader import page
from mainspring.core.model.run.indexed import KEY_MULTIPLE, Indexers, parts_of
from mainspring.ipc.errors import UnsupportedModelError
from mainspring.kernels.contract import PagedBatch
from test_exact import SETTINGS, requests
from test_latents import model_of
from tiers import fast_only

REQUESTS = requests(tiny.VOCAB_SIZE)
EACH = fast_only(("deepseek_v32",), tiny.INDEXED)


def serve(path: Path, reqs: list[tuple[list[int], int]], how: dict[str, Any] | None = None, **options: Any) -> Any:
    """Greedy tokens of all requests at once, and statistics."""
    with LLMEngine.from_engine_args(
        EngineArgs(str(path), **{**SETTINGS, **options}), enable_multiprocessing=False
    ) as engine:
        for i, (prompt, n) in enumerate(reqs):
            params = SamplingParams(
                **{"temperature": 0, "max_tokens": n, "ignore_eos": True, "detokenize": False, **(how or {})}
            )
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        return run(engine, len(reqs)), engine.engine_core.core.scheduler.stats()


def run(engine: LLMEngine, count: int) -> list[list[int]]:
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
    return [list(found[str(i)].outputs[0].token_ids) for i in range(count)]


@pytest.mark.parametrize("architecture", EACH)
def test_greedy_tokens_equal_generate(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path / "few")
    got, stats = serve(path, REQUESTS, num_gpu_blocks_override=20)
    assert got == references.greedy(path, REQUESTS)
    assert stats.prefix_hits > 0
    assert stats.chunked_prefills > 0
    assert stats.mixed_steps > 0
    assert stats.num_preemptions > 0
    every = tiny.make(architecture, tmp_path / "all", index_topk=128)
    different = sum(a != b for a, b in zip(got, references.greedy(every, REQUESTS), strict=True))
    assert different > len(REQUESTS) // 2, "too few keys were left out to show an error"


@pytest.mark.parametrize("architecture", EACH)
def test_rejected_guesses_leave_no_trace(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = [(prompt, 40) for prompt, _ in REQUESTS[5:9]]
    few = {"allowed_token_ids": [7, 8]}  # so few that some guesses are right
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    expected, _ = serve(path, reqs, few)
    got, stats = serve(path, reqs, few, speculative_config=guesses)
    assert got == expected
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("architecture", tiny.INDEXED)
def test_requests_die_with_the_core_and_go_on(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = [(prompt, 40) for prompt, _ in REQUESTS[:8]]
    found: dict[str, RequestOutput] = {}
    with LLMEngine.from_engine_args(EngineArgs(str(path), **SETTINGS), enable_multiprocessing=True) as engine:
        for i, (prompt, n) in enumerate(reqs):
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        supervisor: Any = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
            first = found.get("0")
            if not supervisor.launch.restarts and first is not None and len(first.outputs[0].token_ids) > 5:
                os.kill(supervisor.core_pid, signal.SIGKILL)
                while not supervisor.launch.restarts:
                    time.sleep(0.01)
    assert supervisor.launch.restarts
    assert [list(found[str(i)].outputs[0].token_ids) for i in range(len(reqs))] == references.greedy(path, reqs)
