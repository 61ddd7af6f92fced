"""Readings: which reader and which grammar a conversation gets, by the chat template, the tools and the options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken

from mainspring.engine.text.response_reader import ResponseReader
from mainspring.engine.text.template_reader import TemplateReader
from mainspring.ipc.structured import StructuredOutputsParams
from mainspring.web.bodies import ChatBody
from mainspring.web.reading import Reading, Readings
from test_template_reader import TEMPLATE
from tool_models import TEMPLATE as CHAT
from tool_models import WEATHER

ASK = [{"role": "user", "content": "Rain?"}]
TOOLS = [{"type": "function", "function": WEATHER}]
LOOSE = [{"type": "function", "function": {"name": "now"}}]
ANSWER = StructuredOutputsParams(json={"type": "object"})


def engine(template: str = CHAT, special: tuple[str, ...] = (), shipped: Any = None) -> Any:
    return SimpleNamespace(
        tokenizer=SimpleNamespace(
            get_chat_template=lambda name, with_tools: template,
            added_tokens_decoder={at: AddedToken(text, special=True) for at, text in enumerate(special, 100)},
            chats_in_tokens=False,
            response_template=shipped,
        ),
        input_processor=SimpleNamespace(eos_token_ids={101}, model=SimpleNamespace(eos_token_ids=[101])),
    )


def reading(
    of: Any = None,
    options: tuple[str, str] = ("auto", "auto"),
    prompt: str = "",
    form: StructuredOutputsParams | None = None,
    **body: Any,
) -> Reading:
    readings = Readings(*options)
    readings.prepare(of or engine())
    return readings.of(of or engine(), ChatBody(messages=ASK, **body), prompt, form)


def kinds(found: Reading, text: str) -> list[str]:
    assert found.reader is not None
    reader = found.reader()
    return [piece.kind for piece in [*reader.read(text, [1]), *reader.end()]]


def test_a_template_without_marks_needs_no_reader() -> None:
    assert reading(engine("{{ messages }}")) == Reading()
    assert reading(engine("{{ messages }}"), tools=LOOSE) == Reading()
    assert reading(options=("none", "none"), tools=LOOSE) == Reading()


def test_the_options_name_other_forms_than_the_template() -> None:
    found = reading(options=("kimi_k2", "none"), tools=LOOSE)
    text = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert kinds(found, f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>") == ["tool"]
    assert kinds(found, "<think>a</think>") == ["content"]


def test_reasoning_may_be_kept_back() -> None:
    text = "<think>So.</think>Yes."
    assert kinds(reading(), text) == ["reasoning", "content"]
    assert kinds(reading(include_reasoning=False), text) == ["content"]
    assert reading(continue_final_message=True).reader is None


def test_a_model_that_may_call_once_is_heard_once() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for parallel, calls in ((True, [0, 1]), (None, [0, 1]), (False, [0])):
        found = reading(tools=LOOSE, parallel_tool_calls=parallel)
        assert found.reader is not None
        reader = found.reader()
        pieces = [*reader.read(f"So.\n{call}\n{call}\nDone.", [1]), *reader.end()]
        assert "".join(piece.text for piece in pieces if piece.kind == "content") == "So.\nDone."
        assert [piece.call for piece in pieces if piece.id] == calls
        assert sorted({piece.call for piece in pieces if piece.kind == "tool"}) == calls


def test_special_tokens_are_shown_where_they_are_marks() -> None:
    assert not reading(tools=LOOSE).show_special
    assert reading(engine(special=("<tool_call>",)), tools=LOOSE).show_special
    assert not reading(engine(special=("<|im_end|>",)), tools=LOOSE).show_special


@pytest.mark.parametrize("special", [(), ("</think>",)])
def test_a_required_call_comes_after_reasoning(special: tuple[str, ...]) -> None:
    found = reading(engine(special=special), prompt="<think>\n", tools=TOOLS, tool_choice="required")
    assert found.form is not None
    assert ("think: /(?s:.*)/ <[100]>" in str(found.form.grammar)) == bool(special)
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    assert kinds(found, f"So.</think>{call}") == ["reasoning", "tool"]


def test_a_call_ends_where_a_token_ends_the_output() -> None:
    of = engine(special=("<|channel|>", "<|call|>"))  # the second one ends it
    found = reading(of, ("gpt_oss", "gpt_oss"), tools=TOOLS, tool_choice="required")
    assert found.form is not None
    grammar = str(found.form.grammar)
    assert '<[100]> "commentary to=functions.weather <|constrain|>json<|message|>"' in grammar
    assert "call|>" not in grammar
    assert "[101]" not in grammar
    assert found.show_special


def test_a_form_of_the_answer_comes_after_reasoning() -> None:
    for prompt in ("", "<think>\n"):
        found = reading(form=ANSWER, prompt=prompt)
        assert found.form is not None
        thought = "So.</think>" if prompt else "<think>So.</think>"
        assert kinds(found, thought + "{}") == ["reasoning", "content"]
    assert reading(form=ANSWER, prompt="<think>\n\n</think>\n\n").form is None  # it is over: as the request has it
    marked = reading(engine(special=("</think>",)), form=ANSWER, prompt="<think>\n")
    assert marked.form is not None
    assert "<[100]>" in str(marked.form.grammar)


def test_a_grammar_of_the_request_has_no_reasoning_before_it() -> None:
    form = StructuredOutputsParams(grammar='start: "a"')
    assert reading(form=form, prompt="<think>\n") == Reading()
    assert reading(form=form).form is None


def test_a_required_call_wins_over_a_form_of_the_answer() -> None:
    free = reading(form=ANSWER, tools=TOOLS).form
    assert free is not None
    assert "weather" not in str(free.grammar)
    assert reading(form=ANSWER, tools=TOOLS, tool_choice="required").form is not None
    assert reading(engine("{{ messages }}"), tools=TOOLS, tool_choice="required").form is not None


def test_a_response_template_of_the_checkpoint_is_used() -> None:
    ships = engine("{{ messages }}", shipped=TEMPLATE)
    for body in ({}, {"tools": LOOSE}):
        found = reading(ships, **body)
        assert found.reader is not None
        assert isinstance(found.reader(), TemplateReader)
    assert kinds(reading(ships), "<think>So.</think>Yes.")[:2] == ["reasoning", "content"]
    for other in (
        reading(ships, ("hermes", "auto"), tools=LOOSE),
        reading(ships, tools=TOOLS, tool_choice="required"),
    ):
        assert other.reader is not None
        assert isinstance(other.reader(), ResponseReader)


def test_a_wrong_response_template_is_left_out() -> None:
    assert reading(engine("{{ messages }}", shipped={"fields": 3})) == Reading()


def test_a_response_template_is_left_out_where_its_parser_has_other_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils.chat_parsing import ResponseParser

    monkeypatch.delattr(ResponseParser, "_process")
    assert reading(engine("{{ messages }}", shipped=TEMPLATE)) == Reading()
