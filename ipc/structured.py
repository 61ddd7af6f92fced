"""Structured outputs: the form of an answer as a JSON schema, regular expression, list of choices, grammar or tags."""

from __future__ import annotations

import copy
import json as codec
from dataclasses import dataclass, fields
from typing import Any, Literal

from .errors import InvalidArgumentError, shown, suggests_names

MAX_SPEC_BYTES = 256 << 10
WHITESPACE = r"[ \n\r\t]{1,40}"  # between the parts of JSON; limited, because some models would never end it
OPTIONS_KEY = "x-guidance"  # the key in a schema for llguidance's options

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]


@suggests_names
@dataclass
class StructuredOutputsParams:
    """The form that a whole answer must have: exactly one of the first six fields, under the names of vLLM.

    `json` is a JSON schema, as text, dict or pydantic model class; `regex` is matched against the whole answer; an
    answer under `choice` is one of the strings; `grammar` is in Lark's or GBNF's notation (the EBNF with ``root ::=``);
    `json_object` asks for any JSON object; `structural_tag` is JSON with ``structures`` (``begin``, ``schema``,
    ``end``) and ``triggers``, between which the text is free.

    Raises:
        InvalidArgumentError: a value is out of range, or not exactly one form is asked for; the message names fields.
        UnknownArgumentError: no such field.
    """

    json: str | dict[str, Any] | type | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None  # False is as None
    disable_fallback: bool = False  # without effect: there is one implementation, and nothing to fall back to
    disable_any_whitespace: bool = False  # JSON without any between its parts
    disable_additional_properties: bool = False  # of objects whose schema lists properties and does not say
    whitespace_pattern: str | None = None  # regex of what may stand between the parts of JSON
    structural_tag: str | None = None
    backend: str | None = None  # without effect, as disable_fallback; a field of the older GuidedDecodingParams

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
            InvalidArgumentError: the schema or the tags are no JSON, or the text is longer than `MAX_SPEC_BYTES`.
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
    """Forbid unlisted properties, in place, in every schema that lists some."""
    if isinstance(schema, dict):
        if ("properties" in schema or "patternProperties" in schema) and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
        for value in list(schema.values()):
            _close(value)
    elif isinstance(schema, list):
        for value in schema:
            _close(value)
