"""Models with recurrent state: exact in any batch, with snapshots, preemption and guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import references
import tiny
from mainspring import LLM, SamplingParams
from mainspring.ipc.messages import Stats
from test_exact import SETTINGS, requests
from tiers import fast_only

EACH = fast_only(("qwen3_next",), tiny.RECURRENT)
BLOCKS = {"mamba2": None}  # no attention, so no blocks


def serve(
    path: Path, reqs: list[tuple[list[int], int]], fields: dict[str, Any] | None = None, **options: Any
) -> tuple[list[list[int]], Stats]:
    """Greedy tokens of all requests at once, and statistics of the core. `fields`: further sampling parameters."""
    more = {"temperature": 0, "ignore_eos": True, "detokenize": False, **(fields or {})}
    with LLM(str(path), **{**SETTINGS, **options}) as llm:
        params = [SamplingParams(max_tokens=n, **more) for _, n in reqs]
        outputs = llm.generate([p for p, _ in reqs], params, use_tqdm=False)
        stats = msgspec.convert(llm.llm_engine.engine_core.call("stats"), Stats)
    return [list(o.outputs[0].token_ids) for o in outputs], stats


@pytest.mark.parametrize("architecture", EACH)
def test_greedy_tokens_equal_generate(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = requests(tiny.VOCAB_SIZE)
    got, stats = serve(path, reqs, num_gpu_blocks_override=BLOCKS.get(architecture, 20))
    assert got == references.greedy(path, reqs)
    assert len({token for tokens in got for token in tokens}) >= 20, "outputs too uniform to show an error"
    assert stats.prefix_hits > 0
    assert stats.chunked_prefills > 0
    assert stats.mixed_steps > 0
    if architecture not in BLOCKS:
        assert stats.num_preemptions > 0
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


@pytest.mark.parametrize("architecture", EACH)
def test_rejected_guesses_leave_no_trace_in_the_state(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = [(prompt, 40) for prompt, _ in requests(tiny.VOCAB_SIZE)[5:9]]
    few = {"allowed_token_ids": [7, 8]}  # so few that some guesses are right
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    expected, _ = serve(path, reqs, few)
    got, stats = serve(path, reqs, few, speculative_config=speculative)
    assert got == expected
    assert 0 < stats.accepted_tokens < stats.draft_tokens
