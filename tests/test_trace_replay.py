"""Requests whose output is given (`trace_decode_token_ids`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

import plain
import tiny
from mainspring import LLMEngine, SamplingParams
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError

PROMPT = {"prompt_token_ids": list(range(5, 25))}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    model = tiny.make("llama", tmp_path_factory.mktemp("model"))
    with plain.make_engine(model, skip_tokenizer_init=True) as engine:
        yield engine


def complete(engine: LLMEngine, **params: Any) -> Any:
    engine.add_request("r", PROMPT, SamplingParams(detokenize=False, logprobs=2, **params))
    return plain.collect(engine)["r"][-1].outputs[0]


def test_the_output_is_the_trace_with_the_models_own_log_probabilities(engine: LLMEngine) -> None:
    free = complete(engine, temperature=0.0, max_tokens=6, ignore_eos=True)
    eos = engine.engine_core.model.eos_token_ids[0]
    trace = [*free.token_ids[:3], eos, (free.token_ids[4] + 1) % 50]
    found = complete(engine, trace_decode_token_ids=trace, stop_token_ids=trace[:1], max_tokens=2)
    assert found.token_ids == trace
    assert found.finish_reason == "length"
    assert found.logprobs[:3] == free.logprobs[:3], "as without a trace, as long as the tokens are the same"
    ranks = [at[token].rank for at, token in zip(found.logprobs, trace, strict=True)]
    assert ranks[:3] == [1, 1, 1]
    assert ranks[3] > 1
    assert all(math.isfinite(at[token].logprob) for at, token in zip(found.logprobs, trace, strict=True))
    assert sum(at[token].logprob for at, token in zip(found.logprobs, trace, strict=True)) == pytest.approx(
        found.cumulative_logprob
    )


def test_a_trace_that_does_not_fit_is_cut(engine: LLMEngine) -> None:
    longest = engine.model_config.max_model_len or 0
    found = complete(engine, trace_decode_token_ids=[7] * 5000)
    assert found.token_ids == [7] * (longest - 20)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"trace_decode_token_ids": []}, "trace_decode_token_ids is empty"),
        ({"trace_decode_token_ids": [-1]}, "a value of trace_decode_token_ids is -1|trace_decode_token_ids"),
        ({"trace_decode_token_ids": [1], "n": 2}, "n is 2"),
        ({"trace_decode_token_ids": [1], "bad_words": ["a"]}, "bad_words is given with"),
        ({"trace_decode_token_ids": [1], "allowed_token_ids": [2]}, "allowed_token_ids is given with"),
    ],
)
def test_what_contradicts_a_trace_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        SamplingParams(**params)


def test_tokens_outside_the_vocabulary_are_refused(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="trace_decode_token_ids holds 100000"):
        complete(engine, trace_decode_token_ids=[100_000])
