"""Translate the kinds of structured output (ipc/structured.py) to Lark, the grammar notation of llguidance.

Input whose cost the library does not limit is refused here: deep references that overflow its stack, large divisors
(`multipleOf`), and large repetition counts, which make masks slow.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeGuard, get_args

from ...ipc.errors import InvalidRequestError
from ...ipc.structured import MAX_SPEC_BYTES, OPTIONS_KEY, WHITESPACE, Kind

_MAX_BYTES = {"regex": 16 << 10, "grammar": 64 << 10}  # by kind; other kinds may have MAX_SPEC_BYTES
_MAX_LINES = 2000  # lines of a grammar, to limit its rules: each takes at least one line
_MAX_REFS = 2000  # references in a schema, to limit the library's recursion
_MAX_PROPERTIES = 450  # properties of one object: each adds items to a parser row, see `_limits` in grammar.py
_MAX_STRING = 8 << 10  # characters of a string in a schema
_MAX_REPEAT = 10_000  # largest count of a repetition, because masks get slower with it
_MAX_DIVISOR = 20_000  # least common multiple of all `multipleOf`, because the library's automaton grows with it
_REFUSED_KEYS = "Unimplemented keys: "  # the library's text, before a JSON list of the keys
_OPTIONS = {"whitespace_flexible", "whitespace_pattern", "coerce_one_of"}

_REPEAT = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_LARK_REPEAT = re.compile(r"~\s*(\d+)(?:\s*\.\.\s*(\d+))?")
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?://|#).*')
_TOKEN = re.compile(r"<[^<>\s]+>")
_TOKEN_ID = re.compile(r"<\[(\d{1,9})\]>")
_ESCAPE = re.compile(r"\\[xuU]\{[^}]*\}|\\.", re.DOTALL)


def to_lark(kind: str, text: str) -> str:
    """The Lark grammar of a `StructuredOutputsParams.spec`.

    Raises:
        InvalidRequestError: there is no such kind, or the text is wrong or exceeds a limit.
    """
    if kind not in _BUILDERS:
        raise InvalidRequestError(
            f"there is no structured output of kind {kind!r:.20}; there are {', '.join(_BUILDERS)}"
        )
    size, limit = len(text.encode(errors="replace")), _MAX_BYTES.get(kind, MAX_SPEC_BYTES)
    if size > limit:
        raise InvalidRequestError(f"{kind} comes to {size} bytes; the limit is {limit}")
    try:
        return _BUILDERS[kind](text)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{kind} can't be used: {error}") from None


def named_tokens(lark: str) -> set[int]:
    """The ids of the tokens that a grammar of kind "grammar" names, each as ``<[5]>``.

    Raises:
        InvalidRequestError: it names a token in another way.
    """
    found = set()
    for named in _TOKEN.findall(_LITERAL.sub('""', lark)):
        if (by_id := _TOKEN_ID.fullmatch(named)) is None:
            raise InvalidRequestError(f"it names the token {named:.40}; its id would do, as <[5]>")
        found.add(int(by_id[1]))
    return found


def reason(text: str) -> str:
    """The library's error message, without the text of the grammar around it."""
    text = text.removesuffix("<non-verbose/>").strip()
    if (at := text.rfind("\nerror: ")) >= 0:
        text = text[at + len("\nerror: ") :]
    for mark in (" (in regex): ", "failed to compile JSON schema: "):
        text = text.rpartition(mark)[2]
    text = text.partition("\n")[0].partition("; following special tokens")[0]
    if text.startswith(_REFUSED_KEYS):
        keys = ", ".join(json.loads(text.removeprefix(_REFUSED_KEYS)))
        text = f"the schema has keys that are not supported: {keys} (docs/migrating.md lists them all)"
    if text == "NoExtensionBias":
        text = "nothing matches it"
    return text if len(text) <= 300 else text[:300] + "…"


class _SchemaCheck:
    """Refuses schemas for which the library would take too much time or memory. It is used as an `object_pairs_hook`
    of the JSON parser, so that it also sees repeated keys."""

    def __init__(self) -> None:
        self._refs, self._divisor = 0, 1

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in pairs:
            if key == "$ref":
                self._refs += 1
                if self._refs > _MAX_REFS:
                    raise InvalidRequestError(f"the schema has more than {_MAX_REFS} references ($ref)")
            elif key == "multipleOf" and isinstance(value, (int, float)):
                self._divide(value)
            elif key == "pattern" and isinstance(value, str):
                _check_repeats(value)
            elif key in ("properties", "patternProperties") and isinstance(value, dict):
                if len(value) > _MAX_PROPERTIES:
                    raise InvalidRequestError(f"{key} has {len(value)} entries; the limit is {_MAX_PROPERTIES}")
                if key == "patternProperties":
                    for pattern in value:
                        _check_repeats(pattern)
            for text in (key, *(value if isinstance(value, list) else [value])):
                if isinstance(text, str) and len(text) > _MAX_STRING:
                    raise InvalidRequestError(
                        f"the schema has a string of {len(text)} characters; the limit is {_MAX_STRING}"
                    )
        return dict(pairs)

    def _divide(self, value: float) -> None:
        digits = abs(Decimal(str(value))).normalize()
        if not digits.is_finite() or len(digits.as_tuple().digits) > 20:
            raise InvalidRequestError(f"multipleOf is {value}; it must have at most 20 digits")
        significand = int("".join(map(str, digits.as_tuple().digits)))
        self._divisor = math.lcm(self._divisor, significand or 1)
        if self._divisor > _MAX_DIVISOR:
            raise InvalidRequestError(
                f"the least common multiple of all multipleOf is {self._divisor}; the limit is {_MAX_DIVISOR}"
            )


def _read_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_SchemaCheck())
    except RecursionError:
        raise InvalidRequestError("it is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"it is no JSON: {error}") from None


def _check_repeats(text: str, repeat: re.Pattern[str] = _REPEAT) -> None:
    for found in repeat.finditer(_ESCAPE.sub("", text)):
        for count in found.groups():
            if count and (len(count) > 9 or int(count) > _MAX_REPEAT):
                raise InvalidRequestError(f"something is repeated {count:.20} times; the limit is {_MAX_REPEAT}")


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"the schema is {schema!r:.80}; it must be a JSON object")
    options = schema.get(OPTIONS_KEY, {})
    if not isinstance(options, dict) or not options.keys() <= _OPTIONS:
        raise InvalidRequestError(f"{OPTIONS_KEY} is {options!r:.80}; it may hold {', '.join(sorted(_OPTIONS))}")


def _from_json(text: str) -> str:
    _check_schema(_read_json(text))
    return "start: %json " + text


def _from_regex(text: str) -> str:
    from llguidance import regex_to_lark

    _check_repeats(text)
    return f"start: /{regex_to_lark(text, '')}/"


def _from_choice(text: str) -> str:
    choices = _read_json(text)
    if not _filled(choices, str):
        raise InvalidRequestError(f"it is {choices!r:.80}; it must be a list of strings")
    if len(max(choices, key=len)) > _MAX_STRING:
        raise InvalidRequestError(f"a choice has more than {_MAX_STRING} characters")
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))


def _from_grammar(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    lines = text.count("\n") + text.count("\r")
    if lines > _MAX_LINES:
        raise InvalidRequestError(f"it has {lines} lines; the limit is {_MAX_LINES}")
    _check_repeats(text)
    _check_repeats(text, _LARK_REPEAT)
    decoder = json.JSONDecoder(object_pairs_hook=_SchemaCheck())
    for found in re.finditer(r"%(?:json|regex|llguidance)\s*", text):
        try:
            _check_schema(decoder.raw_decode(text, found.end())[0])
        except (json.JSONDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"what follows {found.group().strip()} is no JSON: {error}") from None
    if _GBNF.search(text):
        try:
            text = gbnf_to_lark(text)
        except RecursionError:
            raise InvalidRequestError("it is nested too deeply") from None
        except Exception as error:  # the converter raises plain `Exception`
            raise InvalidRequestError(reason(str(error))) from None
    return text


def _from_structural_tag(text: str) -> str:
    from llguidance import StructTag

    value = _read_json(text)
    value = value if isinstance(value, dict) else {}
    triggers, structures = value.get("triggers"), value.get("structures")
    if not _filled(triggers, str) or not _filled(structures, dict) or "" in triggers:
        raise InvalidRequestError("it must have triggers, a list of strings, and structures, a list of objects")
    tags = []
    for number, tag in enumerate(structures):
        begin, schema, end = (tag.get(key) for key in ("begin", "schema", "end"))
        if not isinstance(begin, str) or not isinstance(end, str):
            raise InvalidRequestError(f"structures[{number}] must have begin and end, strings, and schema, an object")
        _check_schema(schema)
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidRequestError(f"structures[{number}] begins with {begin!r:.80}, which no trigger begins")
        schema = {OPTIONS_KEY: {"whitespace_pattern": WHITESPACE}, **tag["schema"]}
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


_BUILDERS: dict[str, Callable[[str], str]] = {
    "json": _from_json,
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
    "structural_tag": _from_structural_tag,
}
assert set(_BUILDERS) == set(get_args(Kind))


def _filled(value: Any, of: type) -> TypeGuard[list[Any]]:
    """Whether `value` is a non-empty list whose elements are all of type `of`."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, of) for one in value)
