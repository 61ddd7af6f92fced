"""Answers of gpt-oss, read as openai-harmony reads them. It needs `pip install openai-harmony`, and the vocabulary that
this would download: TIKTOKEN_ENCODINGS_BASE names a folder with `o200k_base.tiktoken`. The npm package `tiktoken` has
the same table in `encoders/o200k_base.json`."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.engine.text.response_formats import REASONING_FORMATS, TOOL_FORMATS
from mainspring.engine.text.response_reader import ResponseReader, joined

harmony: Any = pytest.importorskip("openai_harmony")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("TIKTOKEN_ENCODINGS_BASE" not in os.environ, reason="openai-harmony has no vocabulary"),
]

Read = list[tuple[str, str, str]]  # kind, text, name of the function

TEXTS = st.text('ab {}"\\\n<|>é', max_size=8).map(lambda text: f"x{text}y")
MESSAGES = st.one_of(
    st.tuples(st.just("analysis"), st.just(""), st.just(""), TEXTS),
    st.tuples(st.just("commentary"), st.just(""), st.just(""), TEXTS),
    st.tuples(
        st.sampled_from(["commentary", "analysis"]),
        st.sampled_from(["weather", "a-b.c"]),
        st.sampled_from(["<|constrain|>json", "json", "code", ""]),
        st.sampled_from(['{"city": "Oslo"}', "{}", '{"a": {"b": "}"}}']),
    ),
)
LAST = st.tuples(st.just("final"), st.just(""), st.sampled_from(["", "<|constrain|>json"]), TEXTS)


@pytest.fixture(scope="module")
def encoding() -> Any:
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def ours(text: str, size: int) -> Read:
    reader = ResponseReader(TOOL_FORMATS["gpt_oss"], REASONING_FORMATS["gpt_oss"], {"weather": {}, "a-b.c": {}})
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    pieces = joined([piece for part in parts for piece in reader.read(part)] + reader.end())
    return [(piece.kind, piece.text, piece.name) for piece in pieces]


def theirs(encoding: Any, text: str) -> Read:
    """What openai-harmony reads, with texts that follow each other as one, as a message of the API has them."""
    found: Read = []
    tokens = encoding.encode(text, allowed_special="all")
    for message in encoding.parse_messages_from_completion_tokens(tokens, harmony.Role.ASSISTANT):
        of, _, name = (message.recipient or "").partition("functions.")
        name = "" if of else name  # openai-harmony takes the "json" of "final json" for a recipient
        kind = "tool" if name else "reasoning" if message.channel == "analysis" else "content"
        written = message.content[0].text
        if found and found[-1][0] == kind != "tool":
            written = found.pop()[1] + written
        found.append((kind, written, name))
    return found


@given(messages=st.lists(MESSAGES, max_size=4), last=LAST, size=st.integers(1, 40))
def test_what_harmony_writes_is_read(encoding: Any, messages: Any, last: Any, size: int) -> None:
    made = []
    for channel, name, kind, text in (*messages, last):
        message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel(channel)
        message = message.with_recipient(f"functions.{name}") if name else message
        made.append(message.with_content_type(kind) if kind else message)
    written = "".join(encoding.decode(encoding.render(message)) for message in made)
    text = written.removeprefix("<|start|>assistant")
    assert ours(text, size) == theirs(encoding, text)


@pytest.mark.parametrize(
    "text",
    [  # a model may write the recipient at either place, and leave out the constraint or the space before it
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"a": 1}<|call|>',
        '<|channel|>commentary to=functions.weather<|constrain|>json<|message|>{"a": 1}<|call|>',
        '<|channel|>commentary to=functions.weather json<|message|>{"a": 1}<|call|>',
        '<|channel|>commentary to=functions.weather<|message|>{"a": 1}<|call|>',
        '<|channel|>analysis to=functions.weather code<|message|>{"a": 1}<|call|>',
        ' to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>',
        ' to=functions.weather<|channel|>commentary<|message|>{"a": 1}<|call|>',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.weather<|channel|>commentary "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        '<|channel|>final <|constrain|>json<|message|>{"n": 1}<|return|>',
        '<|channel|>final json<|message|>{"n": 1}<|return|>',
    ],
)
def test_what_a_model_may_write_is_read(encoding: Any, text: str) -> None:
    for size in (1, 7, len(text)):
        assert ours(text, size) == theirs(encoding, text)
