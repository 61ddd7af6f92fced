"""TemplateReader: outputs by the response template of a checkpoint, fed in any pieces, without a loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.engine.text.response_reader import joined
from mainspring.engine.text.template_reader import TemplateReader
from tiers import examples

# in the form of the templates that checkpoints ship
TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
# a call's mark that is a pattern, and lists of calls
LISTS: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {"open": "<calls>", "close_pattern": r"</calls>\s*", "repeats": True, "content": "json"},
        "content": {"content": "text"},
    },
}
# every part has marks, and text between parts is nothing
CHANNELS: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PROMPT = "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n"


def read(parts: Sequence[str], prompt: str = PROMPT, template: dict[str, Any] = TEMPLATE) -> list[tuple[str, str, str]]:
    reader = TemplateReader(template, (), prompt, lambda: "0" * 24)
    pieces = [piece for part in parts for piece in reader.read(part, [1])]
    found = joined([*pieces, *reader.end()])
    assert reader.has_calls == any(piece.kind == "tool" for piece in found)
    return [(piece.kind, piece.name, piece.text) for piece in found]


CALL = ("tool", "weather", '{"city": "Oslo"}')
T = ("reasoning", "", "t")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It rains.", [("content", "", "It rains.")]),
        (
            f"<think>\nRain?\n</think>\n\nLet me look.\n{WEATHER}\n{WEATHER}",
            [("reasoning", "", "Rain?"), ("content", "", "Let me look."), CALL, CALL],
        ),
        ("<tool_call>\n{no json}\n</tool_call> So.", [("content", "", "<tool_call>\n{no json}\n</tool_call> So.")]),
        ('A.\n<tool_call>\n{"name": "wea', [("content", "", 'A.\n<tool_call>\n{"name": "wea')]),
        (f"<tool_call>[1]</tool_call>{WEATHER}", [("content", "", "<tool_call>[1]</tool_call>"), CALL]),
        ("<think>So", [("reasoning", "", "So")]),
        ("<think>t</think><tool_call>[1]</tool_call>", [T, ("content", "", "<tool_call>[1]</tool_call>")]),
        (f"{WEATHER}\n<tool_call>[1]</tool_call>", [CALL, ("content", "", "\n<tool_call>[1]</tool_call>")]),
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>',
            [("tool", "weather", '{"city": "\\ud800"}')],
        ),
        *(
            (text, [("content", "", text)])
            for text in (
                '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
                '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>',
                f"<tool_call>{'[' * 3000}</tool_call>",
                f"A.{' ' * 1000}<tool_call>[1]</tool_call>",
            )
        ),
    ],
)
def test_an_output_is_read_alike_in_any_pieces(text: str, expected: list[tuple[str, str, str]]) -> None:
    assert read([text]) == expected
    assert read(list(text)) == expected
    assert read([text[at : at + 5] for at in range(0, len(text), 5)]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A.\n<calls>[1, 2]</calls> So.", [("content", "", "A.\n<calls>[1, 2]</calls> So.")]),
        (
            'A.\n<calls>[{"name": "weather"}, 2]</calls> So.',
            [("content", "", 'A.\n<calls>[{"name": "weather"}, 2]</calls> So.')],
        ),
        (
            'A.\n<calls>{</calls><calls>[{"name": "weather"}]</calls>B.',
            [("content", "", "A.\n<calls>{</calls>"), ("tool", "weather", "{}"), ("content", "", "B.")],
        ),
    ],
)
def test_a_list_of_calls_is_read_as_a_whole(text: str, expected: list[tuple[str, str, str]]) -> None:
    assert read([text], template=LISTS) == expected
    assert read(list(text), template=LISTS) == expected


def test_an_answer_without_any_part_is_content() -> None:
    assert read(["Hel", "lo."], template=CHANNELS) == [("content", "", "Hello.")]
    text = "<|channel|>final<|message|>Hello.<|return|>"
    assert read(["<|start|>", text, "."], template=CHANNELS) == [("content", "", "Hello.")]


_MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<calls>", "</calls>", WEATHER, "[1]", "{}"),
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    *('[{"name": "now"}]', "<|channel|>commentary to=functions.now json<|message|>", "<|channel|>", " " * 600),
)
_FRAGMENTS = st.sampled_from(_MARKS) | st.text(alphabet=' \n<>|{}"a1é', max_size=6)


@settings(max_examples=examples(600), deadline=None)
@given(
    st.sampled_from([TEMPLATE, LISTS, CHANNELS]),
    st.lists(_FRAGMENTS, max_size=10).map("".join),
    st.lists(st.integers(0, 300), max_size=8),
    st.sampled_from([PROMPT, PROMPT + "<think>", PROMPT + "A <tool", PROMPT + "<tool_call>?</tool_call>", ""]),
)
def test_any_split_of_any_text_gives_the_same_and_loses_nothing(
    template: dict[str, Any], text: str, cuts: list[int], prompt: str
) -> None:
    whole = read([text], prompt, template)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert read([text[begin:end] for begin, end in pairwise(places)], prompt, template) == whole
    assert read(list(text), prompt, template) == whole
    if template is not CHANNELS and prompt == PROMPT and not any(kind == "tool" for kind, _, _ in whole):
        assert _letters("".join(text for _, _, text in whole)) == _letters(text)


def _letters(text: str) -> str:
    """Without what belongs to the form: whitespace, and marks of reasoning and content."""
    text = "".join(text.split())
    for mark in ("<think>", "</think>", "<|im_end|>"):
        text = text.replace(mark, "")
    return text


def test_the_prompt_may_hold_a_part_in_another_form() -> None:
    assert read(["Yes."], PROMPT + "<tool_call>no json</tool_call>") == [("content", "", "Yes.")]


def test_an_answer_that_the_prompt_has_begun_goes_on_with_its_whitespace() -> None:
    assert read([" world."], PROMPT + "Hello") == [("content", "", " world.")]
    assert read(["b."], PROMPT + "a <") == [("content", "", "b.")]


def _work(monkeypatch: pytest.MonkeyPatch, parts: Sequence[str]) -> tuple[int, int]:
    """The characters that the parser copies and those that it searches, at least."""
    from transformers.utils.chat_parsing import ResponseParser

    copied = searched = 0
    scan = ResponseParser._scan

    def counted(self: Any, *args: Any) -> Any:
        nonlocal copied, searched
        copied += len(self._buffer)
        searched += len(self._buffer) - self._pos
        return scan(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(ResponseParser, "_scan", counted)
        read(parts)
    return copied, searched


@pytest.mark.parametrize("size", [4, 100_000])
@pytest.mark.parametrize("text", ["It rains. ", "<think>a</think>b\n", "<tool_call>[1]</tool_call>"])
def test_the_work_grows_as_the_answer(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = text * 100, text * 400
    one, four = (
        _work(monkeypatch, [some[at : at + size] for at in range(0, len(some), size)]) for some in (short, long)
    )
    assert four[0] < 6 * one[0]


def test_a_long_run_of_whitespace_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, four = (_work(monkeypatch, ["    "] * count) for count in (500, 2000))
    assert four[1] < 6 * one[1]


def test_the_prompt_may_have_opened_the_reasoning() -> None:
    assert read(["So.</think>Yes."], PROMPT + "<think>\n") == [("reasoning", "", "So."), ("content", "", "Yes.")]


def test_tokens_of_reasoning_are_counted() -> None:
    reader = TemplateReader(TEMPLATE, (), PROMPT + "<think>\n")
    for text, ids in (("So.", [1, 2]), ("</think>", [3]), ("Yes.", [4])):
        reader.read(text, ids)
    assert reader.num_reasoning_tokens == 3


def test_tokens_of_reasoning_are_counted_alike_in_a_whole_text() -> None:
    text = "<think>\nRain?</think>Yes, it rains."
    for size in (1, 100):
        reader = TemplateReader(TEMPLATE, (), PROMPT)
        for at in range(0, len(text), size):
            reader.read(text[at : at + size], range(len(text[at : at + size])))  # each character is a token
        assert round(reader.num_reasoning_tokens) == len("\nRain?</think>")


def test_arguments_are_cast_by_the_schema() -> None:
    fields = {
        "tool_calls": {
            "open_pattern": r"<function=(?P<name>[^>\n]+)>",
            "close": "</function>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    }
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    reader = TemplateReader({"fields": fields, "start_anchor": "<a>"}, tools)
    pieces = [*reader.read("<function=weather><parameter=days>\n2\n</parameter></function>"), *reader.end()]
    assert json.loads("".join(piece.text for piece in pieces)) == {"days": 2}
