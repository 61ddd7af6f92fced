"""The core with a real model, in this process: properties that the scheduler's stand-in model can't show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from mainspring import EngineArgs, LLMEngine, SamplingParams

PROMPT = [7, 45, 101, 3, 88, 12, 250, 6, 31, 77, 140, 9, 64, 200, 18, 5, 90]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    path = tiny.make("llama", tmp_path_factory.mktemp("llama"))
    args = EngineArgs(model=str(path), max_model_len=128, skip_tokenizer_init=True, max_num_batched_tokens=16)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
        yield engine


def run(engine: LLMEngine, *requests: tuple[object, SamplingParams]) -> list[list[list[int]]]:
    """Token ids of every completion of every request."""
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
    tokens: dict[int, list[list[int]]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = [list(completion.token_ids) for completion in output.outputs]
    return [tokens[i] for i in range(len(requests))]


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "detokenize": False, "ignore_eos": True, **fields})


def test_prompt_embeddings_give_what_their_tokens_give(engine: LLMEngine) -> None:
    model = engine.engine_core.core.worker.model
    embeds = model.embed(torch.tensor(PROMPT)).numpy()
    alone, together = (
        run(engine, (PROMPT, params())),
        run(
            engine, ({"prompt_embeds": embeds}, params()), (PROMPT[:5], params()), ({"prompt_embeds": embeds}, params())
        ),
    )
    assert together[0] == together[2] == alone[0]
    other = run(engine, ({"prompt_embeds": np.roll(embeds, 1, axis=0)}, params()))
    assert other != alone


def test_embeddings_of_the_wrong_width_are_refused(engine: LLMEngine) -> None:
    with pytest.raises(ValueError, match="hidden"):
        engine.add_request("wide", {"prompt_embeds": np.zeros((3, 5), np.float32)}, params())


def test_no_stop_token_comes_before_min_tokens(engine: LLMEngine) -> None:
    [[free]] = run(engine, (PROMPT, params()))
    stop = free[2]
    [[stopped], [held]] = run(
        engine,
        (PROMPT, params(stop_token_ids=[stop])),
        (PROMPT, params(stop_token_ids=[stop], min_tokens=6)),
    )
    assert stopped == free[: free.index(stop) + 1]
    assert stop not in held[:6]
    assert len(held) >= 6


def test_top_k_of_one_and_a_tiny_top_p_are_greedy_and_a_seed_repeats(engine: LLMEngine) -> None:
    [[greedy], [k], [p], [a], [b], [c]] = run(
        engine,
        (PROMPT, params()),
        (PROMPT, params(temperature=1.0, top_k=1, seed=5)),
        (PROMPT, params(temperature=1.0, top_p=1e-6, seed=6)),
        (PROMPT, params(temperature=1.0, seed=7)),
        (PROMPT, params(temperature=1.0, seed=7)),
        (PROMPT, params(temperature=1.0, seed=8)),
    )
    assert greedy == k == p
    assert a == b != c


def test_completions_of_one_request_differ_and_are_those_of_the_same_seed(engine: LLMEngine) -> None:
    [three], [again] = (
        run(engine, (PROMPT, params(n=3, temperature=1.0, seed=1))),
        run(engine, (PROMPT, params(n=3, temperature=1.0, seed=1))),
    )
    assert three == again
    assert len({tuple(tokens) for tokens in three}) == 3


def test_salted_requests_share_no_cached_prefix_with_others(engine: LLMEngine) -> None:
    prompt = [*range(40, 80)]
    hits = []
    for salt in (None, None, "tenant a", "tenant a", "tenant b"):
        engine.add_request("x", prompt, params(cache_salt=salt, max_tokens=1))
        while engine.has_unfinished_requests():
            hits += [output.num_cached_tokens for output in engine.step()]
    assert hits == [0, 32, 0, 32, 0]


@pytest.mark.parametrize("disabled", [False, True])
def test_outputs_carry_statistics_unless_disabled(disabled: bool, tmp_path: Path) -> None:
    args = EngineArgs(model=str(tiny.make("llama", tmp_path)), skip_tokenizer_init=True, disable_log_stats=disabled)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
        engine.add_request("x", PROMPT, params())
        outputs = engine.engine_core.get_outputs()
    assert outputs is not None
    assert (outputs.stats is None) == disabled


def test_dummy_weights_serve(tmp_path: Path) -> None:
    path = tiny.make("gpt2", tmp_path)
    with LLMEngine.from_engine_args(
        EngineArgs(model=str(path), skip_tokenizer_init=True, load_format="dummy", seed=3), enable_multiprocessing=False
    ) as dummy:
        [[tokens]] = run(dummy, (PROMPT, params()))
    assert len(tokens) == 12
