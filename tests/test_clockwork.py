"""Clockwork: the same request gives the same tokens alone, in a batch, chunked, after a cache hit and after preemption.

Greedy and sampled requests, on the embedded model and on random bf16 checkpoints: a Llama, one with recurrent state,
one with attention over latents, and one whose attention sees selected keys. The engines run in-process, because that
makes many engines cheap.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import tiny
from mainspring import EngineArgs, LLMEngine, SamplingParams
from mainspring.ipc.messages import Stats
from tiers import fast_only

NUM_REQUESTS = 16  # two of each kind
MAX_TOKENS = 24


@pytest.fixture(
    scope="module", params=fast_only(["llama"], ["embedded", "llama", "qwen3_next", "deepseek_v3", "deepseek_v32"])
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str | None:
    if request.param == "embedded":
        return None
    return str(tiny.make(request.param, tmp_path_factory.mktemp(request.param), dtype=torch.bfloat16))


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    """Two threads even if the suite runs with one, because the split of work between threads must not change
    results."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference(model: str | None) -> Iterator[list[list[int]]]:
    """Compute each request alone, its whole prompt in one step, nothing cached."""
    engine = make_engine(model, max_num_seqs=1, enable_prefix_caching=False)
    yield run(engine, requests(engine))
    engine.shutdown()


def make_engine(model: str | None, **settings: object) -> LLMEngine:
    args = EngineArgs(model=model, max_model_len=192, skip_tokenizer_init=True, **settings)
    return LLMEngine.from_engine_args(args, enable_multiprocessing=False)


def requests(engine: LLMEngine, count: int = NUM_REQUESTS) -> list[tuple[list[int], SamplingParams]]:
    r = random.Random(3)
    vocab = engine.engine_core.model.vocab_size
    prefix = [r.randrange(vocab) for _ in range(48)]
    out = []
    for i in range(count):
        prompt = (prefix if i % 2 else []) + [r.randrange(vocab) for _ in range(r.randint(1, 90))]
        how = (
            {"temperature": 0.0} if i % 4 < 2 else {"temperature": 0.9, "seed": i, "top_p": 0.95 if i % 8 < 4 else 1.0}
        )
        out.append((prompt, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, **how)))
    return out


def run(engine: LLMEngine, reqs: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    for i, (prompt, params) in enumerate(reqs):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    tokens: dict[int, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [tokens[i] for i in range(len(reqs))]


def stats(engine: LLMEngine) -> Stats:
    return engine.engine_core.core.scheduler.stats()


def test_sampled_outputs_differ_from_greedy_ones(reference: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in reference}) == NUM_REQUESTS
    assert all(len(tokens) == MAX_TOKENS for tokens in reference)


def test_in_a_batch(model: str | None, reference: list[list[int]]) -> None:
    engine = make_engine(model, enable_prefix_caching=False)
    assert run(engine, requests(engine)) == reference
    engine.shutdown()


def test_chunked(model: str | None, reference: list[list[int]]) -> None:
    engine = make_engine(model, enable_prefix_caching=False, max_num_batched_tokens=29)
    assert run(engine, requests(engine)) == reference
    assert stats(engine).chunked_prefills > 0
    engine.shutdown()


def test_after_a_cache_hit(model: str | None, reference: list[list[int]]) -> None:
    engine = make_engine(model)
    assert run(engine, requests(engine)) == reference
    before = stats(engine).prefix_hits
    assert run(engine, requests(engine)) == reference
    assert stats(engine).prefix_hits - before > sum(len(p) for p, _ in requests(engine)) // 2
    engine.shutdown()


def test_after_preemption(model: str | None, reference: list[list[int]]) -> None:
    engine = make_engine(model, num_gpu_blocks_override=40, max_num_seqs=16, max_num_batched_tokens=64)
    assert run(engine, requests(engine)) == reference
    assert stats(engine).num_preemptions > 0
    engine.shutdown()
