"""The embedded model gives right answers through the whole engine. An error in the KV cache would make them wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from corpus import Question, heldout_other, heldout_sums, is_right
from mainspring import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def accuracy(llm: LLM, questions: list[Question]) -> float:
    params = SamplingParams(temperature=0, max_tokens=96, stop=["\n"])
    outputs = llm.generate([q.prompt for q in questions], params, use_tqdm=False)
    return sum(is_right(q, o.outputs[0].text) for q, o in zip(questions, outputs, strict=True)) / len(questions)


@pytest.mark.slow
def test_500_held_out_sums_are_at_least_95_percent_right(llm: LLM) -> None:
    questions = heldout_sums(500)
    assert len({q.prompt for q in questions}) == 500
    assert accuracy(llm, questions) >= 0.95


@pytest.mark.slow
def test_200_other_held_out_questions_are_at_least_95_percent_right(llm: LLM) -> None:
    questions = heldout_other(200)
    assert len(questions) == 200
    assert accuracy(llm, questions) >= 0.95


@pytest.mark.slow
def test_a_story_goes_on_for_long_and_ends_by_itself(llm: LLM) -> None:
    output = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=400), use_tqdm=False)[0]
    completion = output.outputs[0]
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) > 40
