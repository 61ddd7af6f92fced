"""Grammars for tool calls: whatever a model would like to write, its output has calls that fit the tools' schemas."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

import tiny
from mainspring import LLM, SamplingParams
from mainspring.core.worker.grammar import GrammarCompiler
from mainspring.demo import MODEL_PATH
from mainspring.engine.text.response_formats import REASONING_FORMATS, TOOL_FORMATS
from mainspring.engine.text.response_reader import Piece, ResponseReader, joined
from mainspring.engine.text.tool_grammar import SpecialTokens, ToolChoice, after_reasoning, tool_choice, tool_grammar
from mainspring.ipc.errors import InvalidRequestError
from mainspring.ipc.structured import StructuredOutputsParams
from tiers import examples

TOKENIZER = (MODEL_PATH / "tokenizer.json").read_text(encoding="utf-8")
EOS = 2
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 6},
                    "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "at": {
                        "type": "object",
                        "properties": {"x": {"type": "boolean"}},
                        "required": ["x"],
                        "additionalProperties": False,
                    },
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "strict": True}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in TOOLS}


class Walk:
    """Outputs of a model that has no opinion: each token is any that the grammar allows."""

    def __init__(self, marks: Sequence[str] = (), ends: Sequence[str] = ()) -> None:
        """marks: texts that are special tokens, as are `ends`, which end an output in place of the tokenizer's own."""
        self.tokenizer = Tokenizer.from_str(TOKENIZER)
        self.tokenizer.add_special_tokens([*marks, *ends])
        ids = {text: self.tokenizer.token_to_id(text) for text in (*marks, *ends)}
        self.special = SpecialTokens({mark: ids[mark] for mark in marks}, frozenset(ends))
        self.size = self.tokenizer.get_vocab_size()
        self.eos = [ids[end] for end in ends] or [EOS]
        self.compiler = GrammarCompiler(self.tokenizer.to_str(), self.size, self.eos)

    def output(self, grammar: str, seed: int, limit: int, start: str = "") -> str:
        return self.tokenizer.decode(self.tokens(grammar, seed, limit, start), skip_special_tokens=False)

    def tokens(self, grammar: str, seed: int, limit: int, start: str = "") -> list[int]:
        chance = random.Random(seed)
        matcher = self.compiler.compile("grammar", grammar).matcher()
        row = np.empty((self.size + 31) // 32, np.int32)
        ids: list[int] = []
        for token in self.tokenizer.encode(start, add_special_tokens=False).ids:
            assert matcher.accept(token), (start, self.tokenizer.decode(ids))
            ids.append(token)
        while len(ids) < limit:
            matcher.fill(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token = self.eos[0] if self.eos[0] in allowed else chance.choice(allowed.tolist())
            if token == self.eos[0]:
                break
            assert matcher.accept(token)
            ids.append(token)
        return ids


@pytest.fixture(scope="module")
def walk() -> Walk:
    return Walk()


def calls_of(name: str, text: str, reasoning: str | None = None) -> list[Piece]:
    reader = ResponseReader(TOOL_FORMATS[name], (reasoning and REASONING_FORMATS[reasoning]) or None, SCHEMAS)
    return joined([*reader.read(text), *reader.end()])


def check(calls: list[Piece]) -> None:
    for call in calls:
        assert call.kind == "tool", call
        jsonschema.validate(json.loads(call.text), SCHEMAS[call.name])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_required_gives_a_valid_call_whatever_the_model_prefers(name: str, walk: Walk) -> None:
    form = tool_grammar(tool_choice(TOOLS, "required", False), TOOL_FORMATS[name])
    assert form is not None
    seen = set()
    for seed in range(max(30, examples(60))):
        text = walk.output(str(form.grammar), seed, 600)
        calls = calls_of(name, text)
        assert len(calls) == 1, (seed, text)
        check(calls)
        seen.add(calls[0].name)
    assert seen == set(SCHEMAS)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_parallel_calls_are_allowed_unless_the_request_says_no(name: str, walk: Walk) -> None:
    form = TOOL_FORMATS[name].forms[0]
    now = form.call.replace("~", "").replace("$NAME", "now").replace("$NUMBER", "0").replace("$JSON", "{}")
    now = now.replace("\n$PARAMS", "").replace("$PYTHON", "[now()]")
    many = f"{form.start}{now}{form.between}{now}{form.end}"
    several, single = (
        tool_grammar(tool_choice(TOOLS, "required", parallel), TOOL_FORMATS[name]) for parallel in (None, False)
    )
    assert several is not None
    assert single is not None
    if name != "pythonic":
        assert [call.name for call in calls_of(name, walk.output(str(several.grammar), 0, 600, many))] == ["now", "now"]
        with pytest.raises(AssertionError):
            walk.output(str(single.grammar), 0, 600, many)


def test_a_named_function_is_the_one_that_is_called(walk: Walk) -> None:
    choice = tool_choice(TOOLS, {"type": "function", "function": {"name": "weather"}}, None)
    form = tool_grammar(choice, TOOL_FORMATS["hermes"])
    assert form is not None
    for seed in range(examples(30)):
        calls = calls_of("hermes", walk.output(str(form.grammar), seed, 600))
        assert [call.name for call in calls] == ["weather"]
        check(calls)


@pytest.mark.parametrize("name", [name for name, one in TOOL_FORMATS.items() if not one.forms[0].leads])
def test_with_auto_the_arguments_of_strict_tools_fit(name: str, walk: Walk) -> None:
    form = tool_grammar(tool_choice(TOOLS, "auto", False), TOOL_FORMATS[name])
    assert form is not None
    whole = TOOL_FORMATS[name].forms[0]
    start = "Well, " + (whole.start + whole.call).partition("$")[0].replace("~", "")
    for seed in range(examples(30)):
        pieces = calls_of(name, walk.output(str(form.grammar), seed, 600, start))
        assert pieces[0].text.strip() == "Well,"
        check([piece for piece in pieces[1:2] if piece.kind == "tool"])
        assert pieces[1].kind == "tool"
    assert walk.output(str(form.grammar), 0, 600, "No call.").startswith("No call.")


@pytest.mark.parametrize("name", ["pythonic", "llama3_json"])
def test_with_auto_an_output_that_leads_with_a_call_fits(name: str, walk: Walk) -> None:
    form = tool_grammar(tool_choice(TOOLS, "auto", False), TOOL_FORMATS[name])
    assert form is not None
    for seed in range(examples(30)):
        check(calls_of(name, walk.output(str(form.grammar), seed, 600, "[" if name == "pythonic" else "{")))
    assert walk.output(str(form.grammar), 0, 600, "No call.").startswith("No call.")


def test_without_strict_tools_auto_is_free() -> None:
    loose = [{"type": "function", "function": {"name": "now"}}]
    assert tool_grammar(tool_choice(loose, "auto", None), TOOL_FORMATS["hermes"]) is None
    assert tool_grammar(tool_choice(TOOLS, "none", None), TOOL_FORMATS["hermes"]) is None
    assert tool_grammar(tool_choice(None, None, None), TOOL_FORMATS["hermes"]) is None


def test_reasoning_comes_before_the_call(walk: Walk) -> None:
    think = REASONING_FORMATS["qwen3"]
    choice = tool_choice(TOOLS, "required", None)
    opened = tool_grammar(choice, TOOL_FORMATS["hermes"], think, "<think>\n")
    free = tool_grammar(choice, TOOL_FORMATS["hermes"], think, "")
    assert opened is not None
    assert free is not None
    for form, start in ((opened, "So.</think>\n\n"), (free, "<think>So.</think>\n\n"), (free, "<tool_call>")):
        text = walk.output(str(form.grammar), 1, 600, start)
        calls = calls_of("hermes", ("<think>" if form is opened else "") + text, "qwen3")
        check([piece for piece in calls if piece.kind != "reasoning"])
        assert calls[-1].kind == "tool"


MARKS = sorted(
    set(re.findall(r"<[|｜][^>$]*>|</?tool_call>|\[[A-Z_]+\]|</?think>", str((TOOL_FORMATS, REASONING_FORMATS))))
)
ENDS = ["<|call|>", "<|return|>"]  # of gpt_oss


@pytest.fixture(scope="module")
def marked() -> Walk:
    """With a tokenizer whose special tokens are the marks of all formats."""
    return Walk([mark for mark in MARKS if mark not in ENDS], ENDS)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("mode", ["required", "auto"])
def test_marks_that_are_special_tokens_come_as_these_tokens(name: str, mode: str, marked: Walk) -> None:
    reasoning = REASONING_FORMATS["gpt_oss" if name == "gpt_oss" else "qwen3"]
    thought, between = f"{reasoning.opens[0]}So.{reasoning.close}", reasoning.after
    form = tool_grammar(tool_choice(TOOLS, mode, None), TOOL_FORMATS[name], reasoning, "", marked.special)
    assert form is not None
    whole = TOOL_FORMATS[name].forms[0]
    opening = "[" if name == "pythonic" else (whole.start + whole.call).partition("$")[0].replace("~", "")
    starts = ["", thought + between] if mode == "required" else [f"{thought}{between}{opening}"]
    complete = 0
    for start in starts:
        for seed in range(max(6, examples(10))):
            ids = marked.tokens(str(form.grammar), seed, 400, start)
            text = marked.tokenizer.decode(ids, skip_special_tokens=False)
            for mark, token in marked.special.ids.items():
                assert text.count(mark) == ids.count(token), (mark, text)
            reader = ResponseReader(TOOL_FORMATS[name], reasoning, SCHEMAS)
            pieces = joined([*reader.read(text), *reader.end()])
            calls = [piece for piece in pieces if piece.kind == "tool"]
            if len(ids) == 400:  # it is cut
                continue
            assert calls, text
            check(calls)
            complete += 1
            if start:
                assert pieces[0] == Piece("reasoning", "So.")
            if mode == "required":
                assert [piece.kind for piece in pieces if piece.kind != "reasoning"] == ["tool"] * len(calls)
    assert complete


@pytest.mark.parametrize(
    ("form", "begin"),
    [
        ({"json": SCHEMAS["weather"]}, "{"),
        ({"choice": ["yes", "a/b"]}, "a"),
        ({"regex": r"a/b\\/[0-9]{2}"}, "a"),
    ],
    ids=["json", "choice", "regex"],
)
@pytest.mark.parametrize(
    ("name", "with_marks"),  # a mark of gpt-oss ends the output of the tokenizer without marks
    [(name, marks) for name in REASONING_FORMATS for marks in (False, True) if marks or name != "gpt_oss"],
)
def test_a_form_of_the_answer_holds_after_reasoning_and_without(
    name: str, with_marks: bool, form: dict[str, Any], begin: str, walk: Walk, marked: Walk
) -> None:
    on, reasoning = marked if with_marks else walk, REASONING_FORMATS[name]
    opening, closing = reasoning.opens[0], reasoning.close + reasoning.after
    starts = [(opening, f"So.{closing}{reasoning.content[-1]}")]  # end of the prompt, begin of the output
    if not reasoning.implied:
        starts += [("", f"{opening}So.{closing}{reasoning.content[-1]}"), ("", reasoning.content[0] + begin)]
    for prompt, start in starts:
        made = after_reasoning(StructuredOutputsParams(**form), reasoning, prompt, on.special)
        assert made is not None
        for seed in range(examples(5)):
            text = on.output(str(made.grammar), seed, 400, start)
            reader = ResponseReader(TOOL_FORMATS["gpt_oss"] if name == "gpt_oss" else None, reasoning, {}, prompt)
            pieces = joined([*reader.read(text), *reader.end()])
            assert [piece.kind for piece in pieces] == ["reasoning", "content"][start.endswith(begin) :], text
            answer = pieces[-1].text
            if "json" in form:
                jsonschema.validate(json.loads(answer), form["json"])
            else:
                assert answer in form["choice"] if "choice" in form else re.fullmatch(form["regex"], answer)


def test_a_grammar_can_have_no_reasoning_before_it() -> None:
    form = StructuredOutputsParams(grammar='start: "a"')
    assert after_reasoning(form, REASONING_FORMATS["qwen3"], "<think>") is None


def test_text_between_marks_is_free_where_marks_are_special_tokens(marked: Walk) -> None:
    form = tool_grammar(
        tool_choice(TOOLS, "auto", None), TOOL_FORMATS["gpt_oss"], REASONING_FORMATS["gpt_oss"], "", marked.special
    )
    assert form is not None
    begin, call = "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>{"
    free = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>Hi.<|end|>"
    for text in (free, f"{free}<|start|>assistant{begin}now{call}}}", "<|channel|>final<|message|>Well, yes."):
        assert marked.output(str(form.grammar), 0, 600, text).startswith(text)
    for text in (f"{begin}then", f'{begin}now{call}"a"'):
        with pytest.raises(AssertionError):
            marked.output(str(form.grammar), 0, 600, text)


def test_a_tool_of_any_name_and_many_tools_compile(walk: Walk) -> None:
    tools = [
        {"type": "function", "function": {"name": f"tool-{at}.x", "parameters": TOOLS[0]["function"]["parameters"]}}
        for at in range(64)
    ]
    for name in TOOL_FORMATS:
        form = tool_grammar(tool_choice(tools, "required", None), TOOL_FORMATS[name])
        assert form is not None
        walk.compiler.compile("grammar", str(form.grammar))


def named(name: str, **parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([{"type": "function"}], None, "a tool is .*; it must have type 'function' and a function with a name"),
        ([{"type": "function", "function": {"name": "f", "parameters": 3}}], None, "parameters of f are 3"),
        (named("f", properties=[]), None, r"parameters of f are no JSON schema: properties is \[\]"),
        (named("f", required="a"), None, "parameters of f are no JSON schema: required is 'a'"),
        (TOOLS + TOOLS, None, "two functions of the same name"),
        (TOOLS, "some", "tool_choice is 'some'; it must be auto, none, required or a function"),
        ([], "required", "there are no tools"),
        (TOOLS, {"type": "function", "function": {"name": "f"}}, "tool_choice names 'f', which is not in tools"),
        (TOOLS, {"type": "x"}, "tool_choice is "),
    ],
)
def test_what_no_request_can_mean_is_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        tool_choice(tools, choice, None)


def test_a_schema_may_have_nulls_and_be_wrong_inside(walk: Walk) -> None:
    (tool,) = tool_choice(named("f", properties=None, required=None), "auto", None).tools
    assert tool.schema == tool_choice(named("f"), "auto", None).tools[0].schema
    tools = named("f", properties={"a": {"enum": 5}, "b": {"type": 5}})
    form = tool_grammar(tool_choice(tools, "required", None), TOOL_FORMATS["qwen3_xml"])
    assert form is not None
    walk.compiler.compile("grammar", str(form.grammar))


@pytest.mark.parametrize("name", [name for name, one in TOOL_FORMATS.items() if one.forms[0].params])
def test_a_parameter_may_be_any_text(name: str, walk: Walk) -> None:
    form = TOOL_FORMATS[name].forms[0]
    param = form.params[0].replace("$KEY", "a").replace("$VALUE", "Any <b> text,\nof 'lines'.")
    text = form.start + form.call.replace("$NAME", "f").replace("$PARAMS", param) + form.end
    made = tool_grammar(
        tool_choice(named("f", properties={"a": {"type": "string"}}), "required", None), TOOL_FORMATS[name]
    )
    assert made is not None
    assert walk.output(str(made.grammar), 0, 600, text) == text
    (call,) = calls_of(name, text)
    assert (call.name, json.loads(call.text)) == ("f", {"a": "Any <b> text,\nof 'lines'."})


def test_allowed_tools_limit_the_choice() -> None:
    allowed = [{"type": "function", "function": {"name": "now"}}]
    given = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
    found = tool_choice(TOOLS, given, True)
    assert found == ToolChoice(found.tools, "required", False)
    assert [tool.name for tool in found.tools] == ["now"]


def test_a_schema_that_xml_can_not_hold_is_refused_if_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x+$"}}}
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
    with pytest.raises(InvalidRequestError, match="the parameter a of f has pattern, which"):
        tool_grammar(tool_choice(tools, "required", None), TOOL_FORMATS["qwen3_xml"])


@pytest.mark.slow
def test_a_model_of_random_weights_always_calls(tmp_path: Path) -> None:
    llm = LLM(str(tiny.make("llama", tmp_path, tokenizer=True)))
    form = tool_grammar(tool_choice(TOOLS, "required", False), TOOL_FORMATS["hermes"])
    params = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=480, structured_outputs=form)
        for seed in range(examples(40))
    ]
    for output in llm.generate(["The weather"] * len(params), params):
        calls = calls_of("hermes", output.outputs[0].text)
        assert len(calls) == 1
        check(calls)
