"""Grammars that make an output call tools: in the form of response_formats.py, with arguments of the tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

from ...ipc.errors import InvalidRequestError, shown
from ...ipc.structured import OPTIONS_KEY, WHITESPACE, StructuredOutputsParams
from .response_formats import TOOL_FORMATS, CallForm, ReasoningFormat, ToolFormat
from .response_reader import elements, schema_types, starts_in_reasoning

Mode = Literal["auto", "none", "required"]
_MODES = get_args(Mode)

_ANY_TEXT = "/(?s:.*)/"  # no special token is a part of it
_SPACE = r"/[ \n]{0,4}/"
_EXACT = ("pattern", "format", "allOf", "not")  # keywords of strings that a grammar of plain text can't have
_LENGTHS = ("minLength", "maxLength")
_ESCAPED, _ESCAPES = re.compile(r"\\.|/|\n", re.DOTALL), {"/": r"\/", "\n": r"\n"}  # of a regex between slashes


class Tool(NamedTuple):
    name: str
    schema: dict[str, Any]  # of the parameters
    strict: bool


class ToolChoice(NamedTuple):
    """What a request says of tools.

    Args:
        tools: those that may be called.
        one: whether there may be one call at most.
    """

    tools: tuple[Tool, ...]
    mode: Mode
    one: bool

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        return {tool.name: tool.schema for tool in self.tools}


def tool_choice(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> ToolChoice:
    """Read the fields of OpenAI's chat API: `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        InvalidRequestError: they are not in the API's form, or name a tool that is not there.
    """
    known = {tool.name: tool for tool in map(_tool, tools or ())}
    if len(known) < len(tools or ()):
        raise InvalidRequestError("tools has two functions of the same name")
    names: list[Any] = list(known)
    mode, one = choice or ("auto" if known else "none"), parallel is False
    if isinstance(choice, dict):
        kind, allowed = choice.get("type"), choice.get("allowed_tools", choice)
        if kind == "function":
            names, mode, one = [_named(choice)], "required", True
        elif kind == "allowed_tools" and isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
            names, mode = [_named(tool) for tool in allowed["tools"]], allowed.get("mode", "auto")
        for name in names:
            if name not in known:
                raise InvalidRequestError(f"tool_choice names {shown(name)}, which is not in tools")
    if mode in _MODES:
        if mode == "required" and not names:
            raise InvalidRequestError("tool_choice is 'required', but there are no tools")
        return ToolChoice(tuple(known[name] for name in names), cast(Mode, mode), one)
    raise InvalidRequestError(f"tool_choice is {shown(choice)}; it must be auto, none, required or a function")


def _tool(given: Any) -> Tool:
    function = (
        given.get("function") if isinstance(given, Mapping) and given.get("type", "function") == "function" else None
    )
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise InvalidRequestError(f"a tool is {shown(given)}; it must have type 'function' and a function with a name")
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, dict):
        raise InvalidRequestError(f"the parameters of {name} are {shown(schema)}; they must be a JSON schema")
    schema = {key: value for key, value in (schema or {}).items() if value is not None}
    for key, kind in (("properties", dict), ("required", list)):
        if not isinstance(schema.get(key, kind()), kind):
            raise InvalidRequestError(f"the parameters of {name} are no JSON schema: {key} is {shown(schema[key])}")
    none: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    return Tool(name, {"type": "object", **schema} if schema else none, function.get("strict") is True)


def _named(choice: Any) -> str | None:
    """The name in a choice, which may be in a `function` of it."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


class SpecialTokens(NamedTuple):
    """The special tokens of a tokenizer, which no text encodes to: a grammar names them by their ids.

    Args:
        ids: those that may be in an output, by their text.
        ends: those that end an output.
    """

    ids: Mapping[str, int] = {}
    ends: frozenset[str] = frozenset()

    def in_text(self, text: str) -> bool:
        return any(token in text for token in (*self.ids, *self.ends))


NO_TOKENS = SpecialTokens()


def tool_grammar(
    choice: ToolChoice,
    tools: ToolFormat | None,
    reasoning: ReasoningFormat | None = None,
    prompt: str = "",
    special: SpecialTokens = NO_TOKENS,
) -> StructuredOutputsParams | None:
    """The grammar that an output must follow; None: it is free.

    ``required``: one or several calls, after reasoning if the format has some. ``auto`` with tools that are strict: the
    text is free, but each call has arguments of its schema.

    Args:
        tools: None: the model has no format of its own; required calls are then in that of Hermes.
        prompt: its end, which may have opened the reasoning.
        special: marks that are special tokens are these tokens in the output.

    Raises:
        InvalidRequestError: a schema can't be followed in this format.
    """
    free = choice.mode == "auto"
    if choice.mode == "none" or (free and (tools is None or not any(tool.strict for tool in choice.tools))):
        return None
    tools, one = tools or TOOL_FORMATS["hermes"], choice.one
    form = tools.forms[0]
    for token in special.ends:
        if token in form.call:  # the model ends its output after a call
            form, one = form._replace(call=form.call.partition(token)[0]), True
    writer = _Writer(form, special)
    writer.add("call", " | ".join(writer.call(tool, free) for tool in choice.tools))
    repeated = "" if one else f" ({writer.text(form.between)} call)*"
    run = f"{writer.text(form.start)} call{repeated} {writer.text(form.end)}"
    mark = next(iter(elements((form.start + form.call).partition("$")[0].lstrip())), "")  # with which calls begin
    if not free:
        writer.add("start", f"{_thinking(writer, reasoning, prompt)} {run}")
    elif form.leads:
        writer.add("start", rf"{_thinking(writer, reasoning, prompt)} (run | OTHER)?")
        writer.add("OTHER", r"/[^\[{<](?s:.*)/")
        writer.add("run", run)
    elif special.in_text(mark):  # text can't have the mark, so it is free, between other marks of the form
        marks = [*tools.dropped, *((*reasoning.opens, reasoning.close) if reasoning else ())]
        others = [writer.text(one) for one in marks if special.in_text(one) and not any(map(one.count, special.ends))]
        writer.add("free", f"({' | '.join(['TEXT', *others])})*")
        writer.add("TEXT", "/(?s:.+)/")
        writer.add("start", f"(free {run}){'?' if one else '*'} free")
    else:  # free text up to the mark
        writer.add(f"free[suffix={_literal(mark)}]", _ANY_TEXT)
        writer.add("rest", _ANY_TEXT)
        writer.add("first", " | ".join(writer.call(tool, free, mark) for tool in choice.tools))
        begun = f"free first{repeated} {writer.text(form.end)}"
        marked = reasoning if reasoning is not None and special.in_text(reasoning.close) else None
        writer.add("start", f"{_thinking(writer, marked, prompt)} ({begun}){'?' if one else '*'} rest")
    return StructuredOutputsParams(grammar="\n".join(writer.rules))


def after_reasoning(
    form: StructuredOutputsParams, reasoning: ReasoningFormat, prompt: str, special: SpecialTokens = NO_TOKENS
) -> StructuredOutputsParams | None:
    """The form of an answer with reasoning before it; None: this kind of form can't have any."""
    kind, text = form.spec()
    writer = _Writer(TOOL_FORMATS["hermes"].forms[0], special)
    if kind == "json":
        answer = f"%json {text}"
    elif kind == "choice":
        answer = " | ".join(map(_literals, json.loads(text)))
    elif kind == "regex":
        answer = f"/{_ESCAPED.sub(lambda found: _ESCAPES.get(found[0], found[0]), text)}/"
    else:
        return None
    content = " | ".join(map(writer.text, reasoning.content))
    writer.add("start", f"{_thinking(writer, reasoning, prompt)} {f'({content})' if content else ''} answer")
    writer.add("answer", answer)
    return StructuredOutputsParams(grammar="\n".join(writer.rules))


def _thinking(writer: _Writer, reasoning: ReasoningFormat | None, prompt: str) -> str:
    if reasoning is None:
        return ""
    writer.add_text_until("think", reasoning.close)
    writer.add("space", _SPACE)
    between = writer.text(reasoning.after)
    if starts_in_reasoning(reasoning, prompt):
        return f"think space {between}"
    often = "*" if reasoning.anywhere else "?"
    return f"(({' | '.join(map(writer.text, reasoning.opens))}) think space {between}){often}"


class _Writer:
    """Writes the rules of a Lark grammar for the calls of a form."""

    def __init__(self, form: CallForm, special: SpecialTokens) -> None:
        self._form, self._special = form, special
        self._marks = re.compile("|".join(map(re.escape, special.ids)) or r"\Z.")
        self.rules: list[str] = []
        self._count = 0

    def add(self, name: str, body: str) -> str:
        self.rules.append(f"{name}: {body}")
        return name

    def add_text_until(self, name: str, mark: str) -> str:
        """A rule for text up to a mark, the mark included."""
        if mark in self._special.ids:
            return self.add(name, f"{_ANY_TEXT} {self.text(mark)}")
        self.add(f"{name}[suffix={_literal(mark)}]", _ANY_TEXT)
        return name

    def text(self, text: str) -> str:
        """A literal, with special tokens by their ids; nothing for an empty one. Newlines before a literal are one of
        their own, because the library's lexer takes the longest: of a text that begins with "\\n" and "\\n" before
        another text, it would see only the former."""
        at, parts = 0, []
        for mark in self._marks.finditer(text):
            parts += [_literals(text[at : mark.start()]), f"<[{self._special.ids[mark.group()]}]>"]
            at = mark.end()
        return " ".join(part for part in (*parts, _literals(text[at:])) if part)

    def _new(self, body: str) -> str:
        self._count += 1
        self.add(f"r{self._count}", body)
        return f"r{self._count}"

    def call(self, tool: Tool, free: bool, begun: str = "") -> str:
        """The rule of a call.

        Args:
            free: whether tools that are not strict may have any arguments.
            begun: what of the run's first call is there already.
        """
        form, schema = self._form, tool.schema
        if free and not tool.strict and "$JSON" in form.call:
            schema = {"type": "object"}
        if form.call == "$PYTHON":
            return self._new(f'"[" {self.text(tool.name)} "(" {self._words(tool, schema)} ")]"')
        text = form.call.replace("~", "").replace("$NAME", tool.name).replace("$NUMBER", "0")
        text = (form.start + text).lstrip().removeprefix(begun) if begun else text
        before, place, after = text.partition("$JSON" if "$JSON" in text else "$PARAMS")
        if place == "$JSON":
            return self._new(f"{self.text(before)} {self._json(schema)} {self.text(after)}")
        params = " ".join(self._param(tool, name, one) for name, one in self._properties(tool, schema))
        return self._new(f"{self.text(before)} {params} {self.text(after.removeprefix(chr(10)))}")

    def _json(self, schema: dict[str, Any]) -> str:
        schema = {OPTIONS_KEY: {"whitespace_pattern": WHITESPACE}, **schema}
        return self._new("%json " + json.dumps(schema, ensure_ascii=False))

    def _properties(self, tool: Tool, schema: dict[str, Any]) -> list[tuple[str, Any]]:
        if schema.get("type") != "object" or any(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref")):
            raise InvalidRequestError(
                f"the parameters of {tool.name} are not a plain object; this model's calls can't be held to them"
            )
        found = schema.get("properties") or {}
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return [(name, {**one, **shared} if isinstance(one, dict) else {}) for name, one in found.items()]

    def _param(self, tool: Tool, name: str, schema: dict[str, Any]) -> str:
        before, _, after = self._form.params[0].partition("$VALUE")
        if schema_types(schema) != {"string"} and len(self._form.params) > 1:  # of two forms, the second is for JSON
            before, _, after = self._form.params[1].partition("$VALUE")
        rule = self._new(
            f"{self.text(before.replace('$KEY', name))} {self._value(tool, name, schema, after)} {self.text(chr(10))}"
        )
        return rule if name in tool.schema.get("required", ()) else f"{rule}?"

    def _value(self, tool: Tool, name: str, schema: dict[str, Any], after: str) -> str:
        """The value and what comes after it."""
        types = schema_types(schema)
        listed = enum if isinstance(enum := schema.get("enum"), list) else [schema.get("const")]
        if words := [word for word in listed if isinstance(word, str)]:
            return f"({' | '.join(map(_literals, words))}) {self.text(after)}"
        if types and "string" not in types:
            return f"{self._json(schema)} {self.text(after)}"
        if tool.strict and any(key in schema for key in _EXACT):
            raise InvalidRequestError(
                f"the parameter {name} of {tool.name} has {', '.join(key for key in _EXACT if key in schema)}, which "
                "this model's calls can't be held to"
            )
        if any(key in schema for key in _LENGTHS):
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            return rf"/[^<\n]{{{least},{most}}}/ {self.text(after)}"
        self._count += 1
        return self.add_text_until(f"r{self._count}", after.strip())

    def _words(self, tool: Tool, schema: dict[str, Any]) -> str:
        """Arguments by keyword."""
        given = [(name, f'{self.text(name)} "=" {self._json(one)}') for name, one in self._properties(tool, schema)]
        needed = schema.get("required", ())
        must = [text for name, text in given if name in needed]
        may = [text for name, text in given if name not in needed]
        more = [f'(", " {text})?' for text in may]
        if must:
            return " ".join([' ", " '.join(must), *more])
        ways = [" ".join([text, *more[at + 1 :]]) for at, text in enumerate(may)]
        return f"({' | '.join(ways)})?" if ways else ""


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literals(text: str) -> str:
    rest = text.lstrip("\n")
    return " ".join(_literal(part) for part in (text[: len(text) - len(rest)], rest) if part)
