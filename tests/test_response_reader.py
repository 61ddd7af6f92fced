"""ResponseReader: tool calls and reasoning in a model's output, for each format, fed in any pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mainspring.engine.text import response_reader
from mainspring.engine.text.response_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    VLLM_NAMES,
    ReasoningFormat,
    reasoning_format,
    tool_format,
)
from mainspring.engine.text.response_reader import (
    Piece,
    ResponseReader,
    _Nesting,
    elements,
    joined,
    schema_types,
    starts_in_reasoning,
)
from mainspring.ipc.errors import InvalidArgumentError
from tiers import examples

SCHEMAS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
WEATHER, NOW = ("weather", '{"city": "Oslo", "days": 2}'), ("now", "{}")
THINK = REASONING_FORMATS["qwen3"]

# format → texts, and what is in them: content is a str, a call its name and arguments
CASES: dict[str, list[tuple[str, list[str | tuple[str, str]]]]] = {
    "hermes": [
        (
            'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>\n'
            '<tool_call>{"name":"now","arguments":{}}</tool_call>\n',
            ["Let me look.", WEATHER, NOW],
        ),
        (
            '<tool_call>\n{"arguments": {"city": "}\\"{"}, "name": "weather"}\n</tool_call> Done.',
            [("weather", '{"city": "}\\"{"}'), " Done."],
        ),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Os', [("weather", '{"city": "Os')]),
        ('<tool_call>\n{"name": "wea', ['<tool_call>\n{"name": "wea']),
        ("a <tool_call> b </tool_call> c", ["a <tool_call> b </tool_call> c"]),
        ('<tool_call>\n{"name": "now", "arguments": {}} and more', [NOW, " and more"]),
    ],
    "qwen3_xml": [
        (
            "Hi.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
            "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            ["Hi.", WEATHER, NOW],
        ),
        (
            "<function=weather>\n<parameter=city>\na\n\nb <c>\n</parameter>\n</function>",
            [("weather", '{"city": "a\\n\\nb <c>"}')],
        ),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nOs", [("weather", '{"city": "Os')]),
        ("<function=weather><parameter=city>Oslo</parameter>?", [("weather", '{"city": "Oslo"}'), "?"]),
        ("<function=weather><parameter=days>two</parameter></function>", [("weather", '{"days": "two"}')]),
    ],
    "glm45": [
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
            [WEATHER, NOW],
        )
    ],
    "deepseek_v3": [
        (
            "Hi.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            '{"city": "Oslo", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
            "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ["Hi.", WEATHER, NOW],
        )
    ],
    "deepseek_v31": [
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo", "days": 2}'
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>Hi.",
            [WEATHER, NOW, "Hi."],
        )
    ],
    "deepseek_v32": [
        (
            '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
            'string="true">Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name="days" '
            'string="false">2</｜DSML｜parameter>\n'
            '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            [WEATHER, NOW],
        )
    ],
    "kimi_k2": [
        (
            "Hi.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
            '{"city": "Oslo", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1'
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            ["Hi.", WEATHER, NOW],
        )
    ],
    "mistral": [
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 2}[TOOL_CALLS]now{}', [WEATHER, NOW]),
        ('Hi.[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"arguments": {}, "name": "now"}]', ["Hi.", NOW, NOW]),
        ("[TOOL_CALLS] [1, 2]", ["[TOOL_CALLS] [1, 2]"]),
    ],
    "mistral_list": [('[TOOL_CALLS][{"name":"now","arguments":{}}]', [NOW])],
    "granite": [
        (
            '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}, '
            '{"arguments": {}, "name": "now"}]',
            [WEATHER, NOW],
        )
    ],
    "phi4_mini": [('Hi.<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', ["Hi.", NOW])],
    "minimax_m2": [
        (
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
            '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
            [WEATHER, NOW],
        )
    ],
    "pythonic": [
        ('[weather(city="Oslo", days=2), now()]', [WEATHER, NOW]),
        ('[weather(city="a)]", days=[1, {"x": true}])]', [("weather", '{"city": "a)]", "days": [1, {"x": true}]}')]),
        ("[now(), other()]", ["[now(), other()]"]),
        ("[1, 2]", ["[1, 2]"]),
        ('[weather(city="Os', ['[weather(city="Os']),
    ],
    "llama3_json": [
        (
            '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}; {"name": "now", "parameters": {}}',
            [WEATHER, NOW],
        ),
        ('<|python_tag|>{"name": "now", "arguments": {}}', [NOW]),
        ('{"name": "Bob", "parameters": {}}', ['{"name": "Bob", "parameters": {}}']),
        ('See {"name": "now", "parameters": {}}', ['See {"name": "now", "parameters": {}}']),
    ],
    "gpt_oss": [
        (
            "<|channel|>commentary<|message|>Hi.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
            '<|constrain|>json<|message|>{"city": "Oslo", "days": 2}<|call|>',
            ["Hi.", WEATHER],
        ),
        ("<|channel|>final<|message|>Hello.<|return|>", ["Hello."]),
        ('<|channel|>commentary to=functions.now json<|message|>{"a": 1}<|call|>', [("now", '{"a": 1}')]),
        ('<|channel|>analysis to=functions.now code<|message|>{"a": 1}<|call|>', [("now", '{"a": 1}')]),
        (' to=functions.now<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>', [("now", '{"a": 1}')]),
        (
            "<|channel|>commentary<|message|>Hi.<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
            "<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>",
            ["Hi.", NOW, NOW],
        ),
        ("to=functions.none<|channel|>x", ["to=functions.none<|channel|>x"]),
    ],
}


def read(
    name: str | None, parts: Sequence[str], reasoning: ReasoningFormat | None = None, prompt: str = ""
) -> list[Piece]:
    numbers = iter(range(10_000))
    tools = None if name is None else TOOL_FORMATS[name]
    reader = ResponseReader(tools, reasoning, SCHEMAS, prompt, lambda: f"{next(numbers):x<24}")
    pieces = [piece for part in parts for piece in reader.read(part)]
    return joined([*pieces, *reader.end()])


def shown(pieces: Sequence[Piece]) -> list[str | tuple[str, str]]:
    return [(piece.name, piece.text) if piece.kind == "tool" else piece.text for piece in pieces]


@pytest.mark.parametrize(
    ("name", "text", "expected"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_an_output_is_read_whole_by_characters_and_at_every_end_alike(
    name: str, text: str, expected: list[str | tuple[str, str]]
) -> None:
    pieces = read(name, [text])
    assert shown(pieces) == expected
    calls = [piece for piece in pieces if piece.kind == "tool"]
    assert [piece.call for piece in calls] == list(range(len(calls)))
    assert len({piece.id for piece in calls}) == len(calls)
    for end in range(0, len(text) + 1, 3):
        assert read(name, [text[:end]]) == read(name, list(text[:end])), text[:end]


def test_every_format_has_a_case_and_valid_templates() -> None:
    assert CASES.keys() == TOOL_FORMATS.keys()
    for form in (form for one in TOOL_FORMATS.values() for form in one.forms):
        parts = elements(form.call)
        assert bool(form.params) == ("$PARAMS" in parts)
        assert all("$KEY" in elements(param) and "$VALUE" in elements(param) for param in form.params)


class Counted(str):
    """Text that counts the characters that are searched or cut out."""

    work = 0

    def __add__(self, other: str) -> Counted:
        return Counted(str.__add__(self, other))

    def __radd__(self, other: str) -> Counted:
        return Counted(other + str(self))

    def __getitem__(self, key: Any) -> Counted:
        found = Counted(str.__getitem__(self, key))
        Counted.work += len(found)
        return found

    def find(self, what: str, begin: Any = 0, end: Any = None) -> int:
        found = str.find(self, what, begin, end)
        Counted.work += (len(self) if found < 0 else found) - begin
        return found


@pytest.mark.parametrize("name", [name for name, one in TOOL_FORMATS.items() if one.forms[0].params])
def test_the_work_of_a_long_parameter_grows_as_its_text(name: str) -> None:
    form = TOOL_FORMATS[name].forms[0]
    work = []
    for count in (200, 800):
        value = "for <b> in\n" * count
        param = form.params[0].replace("$KEY", "city").replace("$VALUE", value)
        text = form.start + form.call.replace("$NAME", "weather").replace("$PARAMS", param) + form.end
        Counted.work = 0
        (piece,) = read(name, [Counted(text[at : at + 4]) for at in range(0, len(text), 4)])
        work.append(Counted.work)
        assert json.loads(piece.text) == {"city": value}
    assert work[1] < 6 * work[0]


@pytest.mark.parametrize("end", ["", "}"])
def test_the_work_of_calls_that_are_none_grows_as_the_text(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = []
    end_of = _Nesting.end

    def counted(self: _Nesting, text: str) -> int:
        work[-1] += len(text) - self.seen
        return end_of(self, text)

    monkeypatch.setattr(_Nesting, "end", counted)
    for count in (500, 2000):
        work.append(0)
        text = "<tool_call>{" * count + end * count
        assert shown(read("hermes", [text])) == [text]
    assert work[1] < 6 * work[0]


def test_a_call_is_parsed_once_though_its_end_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    parse = response_reader._json_call

    def counted(text: str) -> Any:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(response_reader, "_json_call", counted)
    text = '<tool_call>{"arguments": {}, "name": "now"}' + "\n" * 50 + "</tool_call>"
    assert shown(read("hermes", list(text))) == [NOW]
    assert len(parsed) == 1


_MARKS = sorted(
    {
        part
        for one in TOOL_FORMATS.values()
        for form in one.forms
        for part in elements(form.start + form.call + form.end)
    }
    - {"$NAME", "$JSON", "$PARAMS", "$CALL", "$PYTHON", "$ID", "$NUMBER", "~"}
    | {mark for one in TOOL_FORMATS.values() for mark in one.dropped}
    | {"<think>", "</think>", "<parameter=", "</parameter>", "now", "weather", "{", "}", '"', "\\", "[", "]", "(", ")"}
)
_FRAGMENTS = st.one_of(
    st.sampled_from(_MARKS),
    st.sampled_from([text for cases in CASES.values() for text, _ in cases]),
    st.text(alphabet=' \n\\"{}[]()<>|=:,ab1é', max_size=6),
)


@settings(max_examples=examples(600), deadline=None)
@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.lists(_FRAGMENTS, max_size=8).map("".join),
    st.lists(st.integers(0, 400), max_size=8),
    st.booleans(),
)
@example("hermes", "<think>a</think><tool_call>", [3], True)
def test_any_split_of_any_text_gives_the_same_and_loses_nothing(
    name: str, text: str, cuts: list[int], reasons: bool
) -> None:
    reasoning = (REASONING_FORMATS["gpt_oss"] if name == "gpt_oss" else THINK) if reasons else None
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[begin:end] for begin, end in pairwise(places)]
    whole = read(name, [text], reasoning)
    assert read(name, parts, reasoning) == whole
    assert read(name, list(text), reasoning) == whole
    if name != "gpt_oss" and not any(piece.kind == "tool" for piece in whole):
        left = "".join(text.split())
        for piece in whole:  # all characters, but for the marks of reasoning
            for mark in ("<think>", "</think>"):
                if not left.startswith("".join(piece.text.split())):
                    left = left.removeprefix(mark)
            assert left.startswith("".join(piece.text.split()))
            left = left[len("".join(piece.text.split())) :]
        assert left in ("", "<think>", "</think>", "<think></think>") or left.startswith("</thin")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda of: st.lists(of) | st.dictionaries(st.text(), of)
)


@settings(max_examples=examples(200), deadline=None)
@given(st.data(), st.sampled_from([name for name, one in TOOL_FORMATS.items() if "$JSON" in one.forms[0].call]))
def test_calls_with_any_arguments_come_back(data: st.DataObject, name: str) -> None:
    form = TOOL_FORMATS[name].forms[0]
    calls = data.draw(
        st.lists(st.tuples(st.sampled_from(sorted(SCHEMAS)), st.dictionaries(st.text(), _JSON)), min_size=1, max_size=3)
    )
    texts = [json.dumps(arguments, ensure_ascii=data.draw(st.booleans())) for _, arguments in calls]
    written = form.between.join(
        form.call.replace("~", "").replace("$NUMBER", "0").replace("$NAME", function).replace("$JSON", text)
        for (function, _), text in zip(calls, texts, strict=True)
    )
    text = form.start + written + form.end
    size = data.draw(st.integers(1, 12))
    pieces = read(name, [text[at : at + size] for at in range(0, len(text), size)])
    assert shown(pieces) == [(function, text) for (function, _), text in zip(calls, texts, strict=True)]


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("<think>\nRain?\n</think>\n\nYes.", "", [("reasoning", "Rain?"), ("content", "Yes.")]),
        ("Rain?\n</think>\n\nYes.", "<|im_start|>assistant\n<think>\n", [("reasoning", "Rain?"), ("content", "Yes.")]),
        ("Rai", "<think>", [("reasoning", "Rai")]),
        ("A <think> is a tag.", "", [("content", "A <think> is a tag.")]),
        ("Yes.", "<think>\n\n</think>\n\n", [("content", "Yes.")]),
        ("<think>\n\n</think>\n\nYes.", "", [("content", "Yes.")]),
    ],
)
def test_reasoning_is_read(text: str, prompt: str, expected: list[tuple[str, str]]) -> None:
    for parts in ([text], list(text)):
        assert [(piece.kind, piece.text) for piece in read("hermes", parts, THINK, prompt)] == expected


def test_reasoning_that_the_output_does_not_open_is_read_where_the_format_says_so() -> None:
    implied = REASONING_FORMATS["deepseek_r1"]
    assert [piece.kind for piece in read(None, ["So.</think>Yes."], implied)] == ["reasoning", "content"]
    assert [piece.kind for piece in read(None, ["Yes."], implied, "<think></think>")] == ["content"]
    assert starts_in_reasoning(THINK, "…<think>\n")


def test_gpt_oss_reasons_between_its_messages() -> None:
    text = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>Three."
    )
    for parts in ([text], list(text)):
        found = read("gpt_oss", parts, REASONING_FORMATS["gpt_oss"])
        assert [(one.kind, one.text) for one in found] == [
            ("reasoning", "One."),
            ("content", "Wait."),
            ("reasoning", "Two."),
            ("content", "Three."),
        ]


def test_tokens_of_reasoning_are_counted() -> None:
    reader = ResponseReader(None, THINK, {}, "<think>")
    reader.read("So", [1, 2])
    reader.read("</think>", [3])
    reader.read("Yes", [4, 5])
    assert reader.num_reasoning_tokens == 3


@pytest.mark.parametrize("prompt", ["", "<think>"])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_tokens_of_reasoning_are_counted_alike_in_a_whole_text(prompt: str, size: int) -> None:
    text = ("" if prompt else "<think>") + "\nRain?\n</think>\n\nYes, it rains."
    reader = ResponseReader(None, THINK, {}, prompt)
    for at in range(0, len(text), size):
        reader.read(text[at : at + size], range(len(text[at : at + size])))  # each character is a token
    reader.end()
    assert round(reader.num_reasoning_tokens) == len("\nRain?\n</think>")


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "now"}</tool_call>', {"a": "\ud800"}),
        ("hermes", '<tool_call>{"arguments": {}, "name": "\\ud800"}</tool_call>', None),
        ("qwen3_xml", '<function=now><parameter=a>"\\ud800"</parameter></function>', {"a": "\ud800"}),
        ("qwen3_xml", "<function=now><parameter=a>[1e999]</parameter></function>", {"a": "[1e999]"}),
        ("pythonic", '[now(a="\\ud800")]', {"a": "\ud800"}),
    ],
)
def test_arguments_are_json_whatever_the_model_writes(name: str, text: str, arguments: Any) -> None:
    for parts in ([text], list(text)):
        pieces = read(name, parts)
        for piece in pieces:
            assert (piece.name + piece.text).encode()
        calls = [piece.text for piece in pieces if piece.kind == "tool"]
        assert [json.loads(one, parse_constant=lambda word: pytest.fail(word)) for one in calls] == (
            [] if arguments is None else [arguments]
        )


def test_a_schema_that_is_none_has_no_types() -> None:
    for schema in ({"type": 5}, {"anyOf": 5}, {"type": [5, None]}, {"enum": 5}):
        assert schema_types(schema) == set()


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{'<tool_call>\\n{\"name\":'}} <think>", "hermes", "qwen3"),
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3_xml", None),
        ("<tool_call>{{name}}<arg_key> </think>", "glm45", "qwen3"),
        ("<｜Assistant｜><think>\n <｜tool▁call▁begin｜> ```json", "deepseek_v3", "deepseek_r1"),
        ("<｜tool▁call▁begin｜>", "deepseek_v31", None),
        ("[TOOL_CALLS] [ARGS] [THINK]", "mistral", "mistral"),
        ("[TOOL_CALLS] [", "mistral_list", None),
        ('{"name": x, "parameters": y}', "llama3_json", None),
        ("<|start|> <|channel|> <|call|>", "gpt_oss", "gpt_oss"),
        ("{{ messages }}", None, None),
        (None, None, None),
    ],
)
def test_auto_reads_the_chat_template(template: str | None, tools: str | None, reasoning: str | None) -> None:
    assert tool_format("auto", template) == (None if tools is None else TOOL_FORMATS[tools])
    assert reasoning_format("auto", template) == (None if reasoning is None else REASONING_FORMATS[reasoning])


def test_the_document_names_all_formats() -> None:
    text = (Path(__file__).parent.parent / "docs" / "tool_calls.md").read_text()
    assert [name for name in (*TOOL_FORMATS, *REASONING_FORMATS) if f"`{name}`" not in text] == []


def test_a_format_by_name() -> None:
    assert tool_format("kimi_k2", None) is TOOL_FORMATS["kimi_k2"]
    assert tool_format("qwen3_coder", None) is TOOL_FORMATS["qwen3_xml"]
    assert reasoning_format("openai_gptoss", None) is REASONING_FORMATS["gpt_oss"]
    ours = {"tool_parser": TOOL_FORMATS, "reasoning_parser": REASONING_FORMATS}
    for option, names in VLLM_NAMES.items():
        assert not names.keys() & ours[option].keys()
        assert set(names.values()) <= ours[option].keys()
    assert tool_format("none", "<tool_call>") is None
    with pytest.raises(InvalidArgumentError, match="reasoning_parser is 'x'; it must be auto, none or one of gpt_oss,"):
        reasoning_format("x", None)
