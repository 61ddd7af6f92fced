"""Reads a model's output as it comes: content, reasoning and tool calls, by a format of response_formats.py.

Any split of an output into pieces gives the same result: each decision depends only on the text up to the character
that decides it. What is no call of the format is content. A call begins once its arguments do; from then on its text is
arguments, also where the output ends too early. Whitespace around reasoning and between calls belongs to the format.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ...ipc.params import is_text
from .response_formats import CallForm, ReasoningFormat, ToolFormat


class Piece(NamedTuple):
    """A part of a message. The pieces of one completion, in order, make up the message: text is appended."""

    kind: Literal["content", "reasoning", "tool"]
    text: str = ""  # more content, more reasoning, or more of the arguments of a call, which are JSON
    call: int = 0  # number of the call
    id: str = ""  # of the call; set in its first piece only, like the name
    name: str = ""


_MORE, _FAIL = -1, -2  # in place of an end: the text so far does not decide; it does not match
_PLACE = re.compile(r"\$[A-Z]+|~|\s+")
_CLASSES = {
    "$NAME": re.compile(r"[\w.\-/]{1,128}"),
    "$ID": re.compile(r"[\w\-]{1,128}"),
    "$NUMBER": re.compile(r"\d{1,9}"),
}
_MOST_VAIN = 1 << 20  # characters of values that are no calls, because marks inside of each may begin further ones
_COMMITS = ("$JSON", "$PARAMS")  # with one of these a call begins
_SPACE = re.compile(r"\s*")
_JSON_MARKS = re.compile(r'["\\{}\[\]]')
_QUOTES = re.compile(r"[\"'\\{}()\[\]]")
_PYTHON_BEGIN = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(.*)?)?", re.DOTALL)  # a beginning of any length


@functools.cache
def elements(template: str) -> tuple[str, ...]:
    """A template's literals and places; any whitespace is ``~``."""
    parts, at = [], 0
    for found in _PLACE.finditer(template):
        parts += [template[at : found.start()], "~" if found.group()[0] != "$" else found.group()]
        at = found.end()
    return tuple(part for part in (*parts, template[at:]) if part)


class _Nesting:
    """Where a JSON value or a Python list ends, fed in pieces."""

    def __init__(self, marks: re.Pattern[str] = _JSON_MARKS) -> None:
        self._marks, self._depth, self._quote, self._escaped, self.seen = marks, 0, "", -1, 0
        self.read: tuple[int, Any] | None = None  # its end, and the calls in it

    def end(self, text: str) -> int:
        """The end of the value in the text, of which `seen` characters were seen before, or `_MORE`."""
        for found in self._marks.finditer(text, self.seen):
            at, mark = found.start(), found.group()
            if at == self._escaped:
                continue
            if self._quote:
                if mark == "\\":
                    self._escaped = at + 1
                elif mark == self._quote:
                    self._quote = ""
            elif mark in "\"'":
                self._quote = mark
            elif mark in "{[(":
                self._depth += 1
            elif mark in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        self.seen = len(text)
        return _MORE

    def drop(self, count: int) -> None:
        """The first characters of the text are gone."""
        self.seen -= count
        self._escaped -= count


class _Candidate(NamedTuple):
    """What a mark in the output may begin."""

    parts: tuple[str, ...]
    form: CallForm | None = None  # none: reasoning or a dropped mark
    reasoning: bool = False
    leads: bool = False


class _Plan(NamedTuple):
    candidates: tuple[_Candidate, ...]
    marks: re.Pattern[str] | None  # begins of those that may stand anywhere
    tail: re.Pattern[str] | None  # a part of such a begin, at the end of a text


@functools.lru_cache(maxsize=64)
def _plan(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> _Plan:
    found = []
    if reasoning is not None:
        found += [_Candidate((mark,), None, True, not reasoning.anywhere) for mark in reasoning.opens]
    if tools is not None:
        found += [
            _Candidate(elements(f"{form.start}~{form.call}".removeprefix("~")), form, False, form.leads)
            for form in tools.forms
        ]
        found += [_Candidate(elements(mark)) for mark in tools.dropped]
    begins = sorted({one.parts[0] for one in found if not one.leads}, key=len, reverse=True)
    if not begins:
        return _Plan(tuple(found), None, None)
    return _Plan(tuple(found), re.compile("|".join(map(re.escape, begins))), _tail(tuple(begins)))


@functools.lru_cache(maxsize=64)
def _tail(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the longest end of a text that may become one of the marks."""
    return re.compile(
        "|".join(re.escape(mark[:size]) + r"\Z" for mark in marks for size in range(len(mark) - 1, 0, -1))
    )


class ResponseReader:
    """One output.

    Args:
        tools: None: tool calls are content.
        reasoning: None: reasoning is content.
        schemas: the functions of the request and the JSON schemas of their parameters.
        prompt: the end of the prompt, which may have opened the reasoning.
        make_id: a call's random part, of at least 24 letters and digits.
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        schemas: Mapping[str, Any] | None = None,
        prompt: str = "",
        make_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._plan = _plan(tools, reasoning)
        self._tools, self._reasoning, self._schemas, self._make_id = tools, reasoning, schemas or {}, make_id
        self._text = ""  # not decided so far
        self._final = False
        self._leads = True  # nothing but reasoning so far
        self._strip = False  # leading whitespace is dropped
        self._passed = 0  # characters of `_text` that begin nothing, or do not end the open parameter
        self._form: CallForm | None = None  # of the newest call
        self._ending: tuple[str, ...] = ()  # the parts of the newest call after its arguments
        self._nesting = _Nesting()
        self._values: dict[tuple[str, int], _Nesting] = {}  # place and position in `_text` → value that is not taken
        self._num_vain = 0  # characters of values that are no calls
        self._num_arguments = 0
        self._name = ""  # the newest call's function
        self.num_calls = 0
        self.num_reasoning_tokens = 0.0  # of text that holds more than reasoning, a share by characters
        self._state: Callable[[], Iterator[Piece] | None] = self._content
        if reasoning is not None and starts_in_reasoning(reasoning, prompt):
            self._state, self._strip = self._in_reasoning, True

    def read(self, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
        """More of the output: the pieces that are decided by it."""
        reasoning = self._state == self._in_reasoning
        size = -len(self._text) if reasoning else 0  # characters of reasoning in `text`: those held back count no more
        whole, self._text = self._text, ""  # a local variable that alone has its text appends to it without a copy
        whole += text
        self._text = whole
        found: list[Piece] = []
        pieces: Iterator[Piece] | None = iter(())
        while pieces is not None:
            reasoning, before = self._state == self._in_reasoning, len(self._text)
            if (pieces := self._state()) is not None:
                found += pieces
                before -= len(self._text)
            size += before if reasoning else 0
        self.num_reasoning_tokens += len(token_ids) * (size / len(text) if text else reasoning)
        return joined(found)

    def end(self) -> list[Piece]:
        """The rest, when the output has ended."""
        self._final = True
        return self.read("")

    @property
    def has_calls(self) -> bool:
        return self.num_calls > 0

    # ------------------------------------------------------------------ states: pieces, or None: more text is needed

    def _content(self) -> Iterator[Piece] | None:
        text = self._text
        if self._strip:
            text = self._text = text.lstrip()
        if not text:
            return None
        self._strip = False
        if self._leads:  # candidates that must be first, after whitespace
            begin = len(text) - len(text.lstrip())
            if begin == len(text) and not self._final:
                return None
            chosen = self._choose(begin, leading=True)
            if chosen is None:
                return None
            if chosen:
                return self._begin(begin, *chosen)
            self._leads = False
        plan = self._plan
        found = plan.marks.search(text, self._passed) if plan.marks else None
        if found:
            chosen = self._choose(found.start(), leading=False)
            if chosen is None:
                return self._shown(len(text[: found.start()].rstrip()))
            if chosen:
                return self._begin(found.start(), *chosen)
            self._passed = found.start() + 1
            return iter(())
        if self._final:
            return self._shown(len(text))
        part = plan.tail.search(text, self._passed) if plan.tail else None
        sure = len(text[: part.start()] if part else text)
        return self._shown(len(text[:sure].rstrip()) if plan.marks else sure)

    def _shown(self, end: int) -> Iterator[Piece] | None:
        """Show the text up to there as content."""
        if not end:
            return None
        shown, self._text, self._leads = self._text[:end], self._text[end:], False
        self._passed = max(0, self._passed - end)
        self._values.clear()
        return iter((Piece("content", shown),))

    def _choose(self, at: int, leading: bool) -> tuple[_Candidate, int, dict[str, Any]] | tuple[()] | None:
        """What begins there, its end and its parts; empty: nothing does; None: more text is needed."""
        for candidate in self._plan.candidates:
            if candidate.leads and not leading:
                continue
            captured: dict[str, Any] = {}
            end = self._match(candidate.parts, at, captured)
            if end == _MORE and not self._final:
                return None
            if end >= 0 and (not candidate.leads or candidate.form is None or self._known(captured)):
                return candidate, end, captured
        return ()

    def _known(self, captured: dict[str, Any]) -> bool:
        names = [name for name, _ in captured["$PYTHON"]] if "$PYTHON" in captured else [captured["$NAME"]]
        return all(name in self._schemas for name in names)

    def _begin(self, at: int, candidate: _Candidate, end: int, captured: dict[str, Any]) -> Iterator[Piece]:
        before = self._text[:at]
        if not candidate.form:
            self._take(end)
            self._strip = True
            if candidate.reasoning:
                self._state = self._in_reasoning
        self._leads = self._leads and candidate.reasoning
        if before.strip():
            yield Piece("content", before.rstrip())
        if candidate.form:
            yield from self._call(candidate.form, candidate.parts, end, captured)

    def _in_reasoning(self) -> Iterator[Piece] | None:
        assert self._reasoning is not None
        text = self._text
        if self._strip:
            text = self._text = text.lstrip()
        if not text:
            return None
        self._strip = False
        close = self._reasoning.close
        if (at := text.find(close)) >= 0:
            shown, self._strip, self._state = text[:at].rstrip(), True, self._content
            self._take(at + len(close))
            return iter((Piece("reasoning", shown),) if shown else ())
        part = None if self._final else _tail((close,)).search(text)
        end = len((text[: part.start()] if part else text).rstrip())
        if self._final:
            self._text = text[:end]
        if not end:
            return None
        shown = text[:end]
        self._take(end)
        return iter((Piece("reasoning", shown),))

    def _call(self, form: CallForm, parts: tuple[str, ...], end: int, captured: dict[str, Any]) -> Iterator[Piece]:
        """The call or calls whose arguments begin, or which are complete."""
        self._form = form
        self._take(end)
        if "$PYTHON" in captured or "$CALL" in captured:
            self._state = self._after
            for name, arguments in captured.get("$PYTHON") or [(captured["$NAME"], captured["$CALL"])]:
                yield self._named(name, captured)
                yield Piece("tool", arguments, self.num_calls - 1)
            return
        at = next(at for at, part in enumerate(parts) if part in _COMMITS)
        self._ending, self._num_arguments, self._nesting = parts[at + 1 :], 0, _Nesting()
        self._state = self._in_json if parts[at] == "$JSON" else self._in_params
        self._name = captured["$NAME"]
        yield self._named(captured["$NAME"], captured)

    def _named(self, name: str, captured: dict[str, Any]) -> Piece:
        assert self._tools is not None
        index, self.num_calls = self.num_calls, self.num_calls + 1
        made = self._tools.call_id.format(name=name, index=index, random=self._make_id())
        return Piece("tool", "", index, captured.get("$ID") or made, name)

    def _in_json(self) -> Iterator[Piece] | None:
        if not self._text:
            return None
        end = self._nesting.end(self._text)
        if end >= 0:
            self._state = self._in_ending
        shown = self._text[:end] if end >= 0 else self._text
        self._take(len(shown))
        self._nesting.drop(len(shown))
        return iter((Piece("tool", shown, self.num_calls - 1),))

    def _in_params(self) -> Iterator[Piece] | None:
        assert self._form is not None
        begin = _space(self._text, 0)
        more = False
        for param in self._form.params:
            key, value, end = self._param(param, begin)
            if end >= 0:
                self._take(end)
                return iter((self._argument(key, value),))
            more = more or end == _MORE
            if end == _MORE and self._final and key is not None:  # the output ends in a value
                self._take(len(self._text))
                self._state = self._content
                text = as_json(_coerced(value, self._schema(key)))
                return iter((self._argument(key, value, text.removesuffix('"')),))
        end = self._match(self._ending, 0, {})
        if (more or end == _MORE) and not self._final:
            return None
        self._state = self._in_ending if end != _MORE and not more else self._content
        if self._final and (more or end == _MORE):
            self._take(len(self._text))  # a part of a mark
            return None
        closing = "}" if self._num_arguments else "{}"
        return iter((Piece("tool", closing, self.num_calls - 1),))

    def _param(self, template: str, at: int) -> tuple[str | None, str, int]:
        """The key and the value there, and the end; the key is None if there is none."""
        parts = elements(template)
        value_at = parts.index("$VALUE")
        captured: dict[str, Any] = {}
        at = self._match(parts[:value_at], at, captured, trailing=False)
        if at < 0:
            return None, "", at
        close = next(part for part in parts[value_at + 1 :] if part != "~")
        end = self._text.find(close, max(at, self._passed))
        if end < 0 and not self._final:
            self._passed = max(0, len(self._text) - len(close) + 1)
            return captured["$KEY"], "", _MORE
        value = self._text[at : end if end >= 0 else len(self._text)]
        if "\n$VALUE" in template:
            value = value.removeprefix("\n")
        if end < 0:
            part = _tail((close,)).search(value)
            return captured["$KEY"], value[: part.start()] if part else value, _MORE
        if "$VALUE\n" in template:
            value = value.removesuffix("\n")
        return captured["$KEY"], value, end + len(close)

    def _schema(self, key: str) -> Any:
        return (self._schemas.get(self._name) or {}).get("properties", {}).get(key)

    def _argument(self, key: str | None, value: str, written: str | None = None) -> Piece:
        assert key is not None
        text = as_json(_coerced(value, self._schema(key))) if written is None else written
        opening = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        return Piece("tool", f"{opening}{json.dumps(key, ensure_ascii=False)}: {text}", self.num_calls - 1)

    def _in_ending(self) -> Iterator[Piece] | None:
        end = self._match(self._ending, 0, {})
        if end == _MORE and not self._final:
            return None
        self._state = self._after
        parts = self._ending
        while end == _FAIL and parts:  # what is there of it
            parts = parts[:-1]
            end = self._match(parts, 0, {}) if parts[-1:] != ("~",) else _FAIL
        self._take(len(self._text) if end == _MORE else max(end, 0))
        return iter(())

    def _after(self) -> Iterator[Piece] | None:
        """After a call: the next one of its run, or the run's end."""
        assert self._form is not None
        assert self._tools is not None
        if not self._text.strip() and not self._final:
            return None
        for form in self._tools.forms:
            if (form.start, form.between, form.end) == (self._form.start, self._form.between, self._form.end):
                captured: dict[str, Any] = {}
                parts = elements(f"{form.between}~{form.call}")
                end = self._match(parts, 0, captured)
                if end == _MORE and not self._final:
                    return None
                if end >= 0 and (not form.leads or self._known(captured)):
                    return self._call(form, parts, end, captured)
        end = self._match(elements(f"~{self._form.end}") if self._form.end else (), 0, {})
        if end == _MORE and not self._final:
            return None
        self._state = self._content
        self._take(len(self._text) if end == _MORE or not self._text.strip() else max(end, 0))
        return iter(())

    # ------------------------------------------------------------------ matching

    def _take(self, count: int) -> None:
        self._text, self._passed = self._text[count:], 0
        self._values.clear()

    def _match(self, parts: Sequence[str], at: int, captured: dict[str, Any], trailing: bool = True) -> int:
        """The end of the parts in the text from there, up to the place where a call begins; `_MORE` or `_FAIL`."""
        text = self._text
        for part in parts:
            if part == "~":
                at = _space(text, at) if trailing or part is not parts[-1] else at
            elif part in _COMMITS:
                return at if part == "$PARAMS" or text.startswith("{", at) else _MORE if at >= len(text) else _FAIL
            elif part in _CLASSES or part == "$KEY":
                found = (_CLASSES.get(part) or _KEY).match(text, at)
                if found is None or found.end() == len(text):
                    return _MORE if at >= len(text) or found else _FAIL
                captured[part], at = found.group(), found.end()
            elif part in ("$CALL", "$PYTHON"):
                at = self._value(part, at, captured)
                if at < 0:
                    return at
            elif text.startswith(part, at):
                at += len(part)
            else:
                return _MORE if part.startswith(text[at : at + len(part)]) else _FAIL
        return at

    def _value(self, place: str, at: int, captured: dict[str, Any]) -> int:
        """The end of a value that is read whole."""
        text = self._text
        if at >= len(text):
            return _MORE
        begins = _PYTHON_BEGIN.fullmatch(text, at) if place == "$PYTHON" else text[at] == "{"
        if not begins or self._num_vain > _MOST_VAIN:
            return _FAIL
        if (nesting := self._values.get((place, at))) is None:
            nesting = self._values[place, at] = _Nesting(_QUOTES if place == "$PYTHON" else _JSON_MARKS)
            nesting.seen = at
        if nesting.read is None:
            end = nesting.end(text)
            if end < 0:
                self._num_vain += len(text) - at if self._final else 0
                return _MORE
            nesting.read = end, _python_calls(text[at:end]) if place == "$PYTHON" else _json_call(text[at:end])
            self._num_vain += end - at if nesting.read[1] is None else 0
        end, found = nesting.read
        if found is None:
            return _FAIL
        if place == "$PYTHON":
            captured[place] = found
        else:
            captured["$NAME"], captured[place] = found
        return end


_KEY = re.compile(r"[^<>\"\n]{1,256}")


def joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces, with each that continues the one before as a part of it."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and not piece.id and (runs[-1][0].kind, runs[-1][0].call) == (piece.kind, piece.call):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [run[0]._replace(text="".join(piece.text for piece in run)) if len(run) > 1 else run[0] for run in runs]


def starts_in_reasoning(reasoning: ReasoningFormat, prompt: str) -> bool:
    """Whether the output after a prompt begins with reasoning."""
    end = prompt[-256:].rstrip()
    return end.endswith(reasoning.opens) or (reasoning.implied and not end.endswith(reasoning.close))


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _json_call(text: str) -> tuple[str, str] | None:
    """The name and the arguments of a call in JSON."""
    try:
        value = json.loads(text)
        value = value.get("function", value) if isinstance(value, dict) else value
        if not isinstance(value, dict) or not is_text(name := value.get("name")):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        return (name, as_json(arguments)) if isinstance(arguments, dict) else None
    except (ValueError, RecursionError):
        return None


def _python_calls(text: str) -> list[tuple[str, str]] | None:
    """The names and arguments of a list of calls, whose arguments are literals by keyword."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        found = []
        for call in calls:
            if not isinstance(call, ast.Call) or call.args:
                return None
            values = {str(word.arg): _literal(word.value) for word in call.keywords if word.arg is not None}
            if len(values) < len(call.keywords):
                return None
            found.append((ast.unparse(call.func), as_json(values)))
        return found or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """A literal, with JSON's names for None, True and False, too."""
    names = {"null": None, "true": True, "false": False}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key) if key else "": _literal(one) for key, one in zip(node.keys, node.values, strict=True)
        }
    return ast.literal_eval(node)


_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def _coerced(text: str, schema: Any) -> Any:
    """A parameter's value, which is written as text, by its schema. Text that does not fit it stays text."""
    types = schema_types(schema)
    if types == {"string"}:
        return text
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        value = json.loads(word)
        as_json(value)
    except (ValueError, RecursionError):
        return text
    fits = [one for name in types for one in _TYPES.get(name, ())]
    if not types or type(value) in fits:
        return value
    return int(value) if isinstance(value, float) and "integer" in types and value.is_integer() else text


def as_json(value: Any) -> str:
    """A value as JSON. Half a surrogate pair, which no text can have, stays an escape.

    Raises:
        ValueError: it holds a number that JSON does not have.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_text(text) else json.dumps(value)


def schema_types(schema: Any) -> set[str]:
    """The types that a schema names; empty: any."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    found = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    for union in ("anyOf", "oneOf", "allOf"):
        for one in union_of if isinstance(union_of := schema.get(union), list) else ():
            found |= schema_types(one)
    if not found and isinstance(words := schema.get("enum"), list) and all(isinstance(word, str) for word in words):
        found = {"string"}
    return found
