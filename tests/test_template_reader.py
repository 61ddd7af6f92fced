"""TemplateReader: outputs by the response template of a checkpoint, fed in any pieces, without a loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from mainspring.engine.text.response_reader import joined
from mainspring.engine.text.template_reader import TemplateReader

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
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PROMPT = "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n"


def read(parts: Sequence[str], prompt: str = PROMPT) -> list[tuple[str, str, str]]:
    reader = TemplateReader(TEMPLATE, (), prompt, lambda: "0" * 24)
    pieces = [piece for part in parts for piece in reader.read(part, [1])]
    found = joined([*pieces, *reader.end()])
    assert reader.has_calls == any(piece.kind == "tool" for piece in found)
    return [(piece.kind, piece.name, piece.text) for piece in found]


CALL = ("tool", "weather", '{"city": "Oslo"}')


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
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>',
            [("tool", "weather", '{"city": "\\ud800"}')],
        ),
        *(
            (text, [("content", "", text)])
            for text in (
                '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
                '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>',
            )
        ),
    ],
)
def test_an_output_is_read_alike_in_any_pieces(text: str, expected: list[tuple[str, str, str]]) -> None:
    assert read([text]) == expected
    assert read(list(text)) == expected
    assert read([text[at : at + 5] for at in range(0, len(text), 5)]) == expected


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
