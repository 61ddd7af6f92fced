"""The vision demo gives right answers about held-out pictures through the whole engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from corpus import is_right
from mainspring import LLM, SamplingParams
from mainspring.cli.main import main
from mainspring.demo import VISION_MODEL_PATH
from pictures import Picture, Question, draw, heldout

GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(VISION_MODEL_PATH)) as llm:
        yield llm


def accuracy(llm: LLM, asked: list[tuple[Picture, Question]]) -> float:
    conversations = [
        [{"role": "user", "content": [{"type": "image", "image": draw(one)}, {"type": "text", "text": about.prompt}]}]
        for one, about in asked
    ]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    right = [is_right(about, one.outputs[0].text) for (_, about), one in zip(asked, outputs, strict=True)]
    return sum(right) / len(right)


def test_20_held_out_questions_are_at_least_90_percent_right(llm: LLM) -> None:
    assert accuracy(llm, heldout(20)) >= 0.9


@pytest.mark.slow
def test_300_held_out_questions_are_at_least_95_percent_right(llm: LLM) -> None:
    assert accuracy(llm, heldout(300)) >= 0.95


def test_a_question_without_a_picture_shares_a_batch_with_one_that_has_one(llm: LLM) -> None:
    picture, asked = heldout(1)[0]
    prompts = [{"prompt": f"<image>{asked.prompt}", "multi_modal_data": {"image": draw(picture)}}, asked.prompt]
    shown, blind = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert is_right(asked, shown.outputs[0].text)
    assert blind.outputs[0].text.strip() == "Show me a picture first."


def test_two_pictures_with_one_question_get_answers_of_their_own(llm: LLM) -> None:
    """The same text about two pictures: a prefix cache that does not tell pictures apart would give one answer."""
    digits = [picture for picture, asked in heldout(300) if asked.kind == "digits"]
    first, other = digits[0], next(one for one in digits if one.figures[0].name != digits[0].figures[0].name)
    prompts = [
        {"prompt": "<image>Which digit is shown?", "multi_modal_data": {"image": draw(one)}}
        for one in (first, other, first)
    ]
    texts = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text.strip() for prompt in prompts]
    assert texts == [first.figures[0].name, other.figures[0].name, first.figures[0].name]


def test_an_image_on_the_command_line_without_a_model_is_for_the_vision_demo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = str(VISION_MODEL_PATH / "example.png")
    assert main(["generate", "--image", example, "How many shapes are there?", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip() == "4"
