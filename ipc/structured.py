"""Parameters of structured outputs: a JSON schema, a regular expression, a list of choices, a grammar or tags."""

from __future__ import annotations

import copy
import json as codec
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from .errors import InvalidArgumentError, shown, suggests_names

MAX_SPEC_BYTES = 256 << 10  # largest text of a schema or grammar on the wire
WHITESPACE = r"[ \n\r\t]{1,40}"  # allowed between parts of JSON; limited, because some models never end a run of it
OPTIONS_KEY = "x-guidance"  # the schema's key for llguidance's options, such as the whitespace between parts

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]
TOKENS = "tokens"  # the kind on the wire whose text is the whole output: token ids, separated by commas


@suggests_names
@dataclass
class StructuredOutputsParams:
    """The form that a whole answer must have: exactly one of the first six fields, under the names of vLLM.

    `json` is a JSON schema, as text, dict or pydantic model class; `regex` is matched against the whole answer; an
    answer under `choice` is one of the strings; `grammar` is in Lark's or GBNF's notation (the EBNF with ``root ::=``);
    `json_object` asks for any JSON object; `structural_tag` is JSON with ``structures`` (``begin``, ``schema``,
    ``end``) and ``triggers``, between which the text is free.

    Raises:
        InvalidArgumentError: a value is out of range, or not exactly one form is given. The message names the fields.
        UnknownArgumentError: no such field.
    """

    json: str | dict[str, Any] | type | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None  # False means the same as None
    disable_fallback: bool = False  # ignored, because there is only one implementation
    disable_any_whitespace: bool = False  # no whitespace between the parts of JSON
    disable_additional_properties: bool = False  # for objects whose schema lists properties and has no own setting
    whitespace_pattern: str | None = None  # regular expression for the whitespace between the parts of JSON
    structural_tag: str | None = None
    backend: str | None = None  # ignored; a field of the older GuidedDecodingParams

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field again: fields may have been assigned since construction."""
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            have = " and ".join(given) or "none"
            raise InvalidArgumentError(f"{have} of {', '.join(_FORMS)} is given; structured outputs take exactly one")
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern", "backend"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidArgumentError(f"{name} is {shown(value)}; it must be a non-empty str")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(f"{name} is {shown(getattr(self, name))}; it must be True or False")
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise InvalidArgumentError(f"json_object is {shown(self.json_object)}; it must be True, False or None")
        if self.choice is not None:
            if not isinstance(self.choice, (list, tuple)) or not self.choice:
                raise InvalidArgumentError(f"choice is {shown(self.choice)}; it must be a list of at least one str")
            for text in self.choice:
                if not isinstance(text, str) or not text:
                    raise InvalidArgumentError(f"choice holds {shown(text)}; every choice must be a non-empty str")
        if self.json is None and not self.json_object:
            for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
                if getattr(self, name):
                    raise InvalidArgumentError(f"{name} is given with {given[0]}; it needs json or json_object")
        if self.disable_any_whitespace and self.whitespace_pattern:
            raise InvalidArgumentError("whitespace_pattern is given with disable_any_whitespace; choose one")
        self.spec()

    def spec(self) -> tuple[Kind, str]:
        """The form as it is sent: its kind and its text.

        Raises:
            InvalidArgumentError: the schema or the tags are not JSON, or the text is longer than `MAX_SPEC_BYTES`.
        """
        kind, text = self._spec()
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"{kind} holds half a surrogate pair at {error.start}: it is no text") from error
        if size > MAX_SPEC_BYTES:
            raise InvalidArgumentError(f"{kind} comes to {size} bytes; the limit is {MAX_SPEC_BYTES}")
        return kind, text

    def _spec(self) -> tuple[Kind, str]:
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", codec.dumps(list(dict.fromkeys(self.choice)), ensure_ascii=False)
        if self.grammar is not None:
            return "grammar", self.grammar
        if self.structural_tag is not None:
            _loads("structural_tag", self.structural_tag)
            return "structural_tag", self.structural_tag
        schema = {"type": "object"} if self.json is None else _schema(self.json)
        if self.disable_additional_properties:
            schema = copy.deepcopy(schema)
            _close(schema)
        how: dict[str, Any] = {"whitespace_pattern": self.whitespace_pattern or WHITESPACE}
        if self.disable_any_whitespace:
            how = {"whitespace_flexible": False}
        schema = {OPTIONS_KEY: how, **schema}
        try:
            return "json", codec.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"json is a schema that can't be written as JSON: {error}") from error


GuidedDecodingParams = StructuredOutputsParams  # its older name

_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_FLAGS = [field.name for field in fields(StructuredOutputsParams) if field.type == "bool"]


def trace_spec(token_ids: Sequence[int]) -> tuple[str, str]:
    """The form of an output that consists of these tokens and nothing else, as it is sent.

    Raises:
        InvalidArgumentError: one is no token id.
    """
    ids = [int(token) for token in token_ids]
    if not all(0 <= token < 2**31 for token in ids):
        raise InvalidArgumentError(f"trace_decode_token_ids is {shown(token_ids)}; it must be token ids")
    return TOKENS, ",".join(map(str, ids))


def trace_of(text: str) -> list[int]:
    """The token ids in the text of a form of kind `TOKENS`.

    Raises:
        InvalidArgumentError: it is no list of token ids.
    """
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 11 for part in parts):
        raise InvalidArgumentError(f"tokens is {shown(text)}; it must be token ids, separated by commas")
    return [int(part) for part in parts]


def _schema(given: str | dict[str, Any] | type) -> dict[str, Any]:
    """The schema as a dict."""
    if isinstance(given, type) and callable(described := getattr(given, "model_json_schema", None)):
        found = described()
    elif isinstance(given, str):
        found = _loads("json", given)
    else:
        found = given
    if not isinstance(found, dict):
        raise InvalidArgumentError(
            f"json is {shown(given)}; it must be a JSON schema (an object) as str or dict, or a pydantic model class"
        )
    return found


def _loads(name: str, text: str) -> Any:
    try:
        return codec.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{name} is no JSON: {error}") from error


def _close(schema: Any) -> None:
    """Set ``additionalProperties: false``, in place, in every object that lists properties and has no own setting."""
    if isinstance(schema, dict):
        if ("properties" in schema or "patternProperties" in schema) and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
        for value in list(schema.values()):
            _close(value)
    elif isinstance(schema, list):
        for value in schema:
            _close(value)
