"""Reads a model's output by the response template that its checkpoint ships, with the parser of transformers.

Importing that takes 2 s and 60 MiB, so it is done for such checkpoints only. The parser raises where a part is not in
the template's form; such a part becomes content. Its `feed` would lose the events before an error, and its buffer keeps
all text. So `_process` is called here, with the places of the events, and what was read is cut off the buffer.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from ...ipc.params import is_text
from .response_reader import Piece, as_json, joined

_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of fields
_SHOWN = ("content", *_REASONING)
_BROKEN = (ValueError, LookupError, TypeError, RecursionError)  # raised for parts that are not in the template's form
_STEP = 256  # characters that are parsed at once, because each mark begins a search of the rest, or kept to look back


class TemplateReader:
    """One output; see `ResponseReader`.

    Args:
        template: the `response_template` of a tokenizer_config.json.
        tools: of the request, in OpenAI's form.
        prompt: its text: the parser looks for the parts of the answer that it has begun.

    Raises:
        ValueError: the template is wrong.
    """

    def __init__(
        self,
        template: dict[str, Any],
        tools: Sequence[dict[str, Any]] = (),
        prompt: str = "",
        make_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._parser: Any = ResponseParser(template, prefix="", tools=list(tools))
        self._template: Any = self._parser._spec
        self._new_parser = partial(ResponseParser, self._template, tools=list(tools))
        with contextlib.suppress(*_BROKEN):  # a part of the prompt is not in the template's form
            self._parser = self._new_parser(prefix=prompt)
        self._make_id = make_id
        self._start = len(self._parser._buffer)  # end of what was shown, or of the last part that is closed
        self._from = self._start  # where the text of the open part begins
        self._is_outside = self._template.implicit is None  # no part was opened so far
        self._failed_before = False  # the part before the open one was no part of the template
        self._field: str | None = None
        self._letters = 0  # of reasoning, in the newest text
        self.num_calls = 0
        self.num_reasoning_tokens = 0.0  # of text that holds more than reasoning, a share by characters
        for one in self._parser.initial_events:
            self._field = one["field"] if one["type"] != "region_close" else None
            self._from, self._is_outside = 0 if one.get("text", "").strip() else self._start, False

    @property
    def has_calls(self) -> bool:
        return self.num_calls > 0

    def read(self, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
        """See `ResponseReader.read`."""
        self._letters = 0
        found = [piece for at in range(0, len(text), _STEP) for piece in self._parsed(text[at : at + _STEP])]
        self.num_reasoning_tokens += len(token_ids) * (self._letters / len(text) if text else self._field in _REASONING)
        return joined(found)

    def end(self) -> list[Piece]:
        """See `ResponseReader.end`."""
        found = list(self._parsed("", ended=True))
        return joined([*found, *(self._raw(len(self._parser._buffer)) if self._is_outside else ())])

    def _parsed(self, text: str, ended: bool = False) -> Iterator[Piece]:
        parser, broken = self._parser, False
        at = len(parser._buffer)
        parser._buffer += text
        events: list[tuple[dict[str, Any], int]] = []  # each with its place: where a text begins, or where a mark ends
        placed = SimpleNamespace(append=lambda event: events.append((event, parser._pos)))
        try:
            parser._process(placed, ended)
            held = parser._buffer[parser._pos : -_STEP]
            if held.isspace():  # each further text would search all of it for a mark that begins with whitespace
                parser._accumulate(placed, held)
                parser._pos += len(held)
        except _BROKEN:
            broken = True
        end = parser._pos if broken else len(parser._buffer)
        for event, place in (*events, ({}, end)):
            self._letters += max(0, place - at) if self._field in _REASONING else 0
            at = max(at, place)
            yield from self._pieces(event, place) if event else ()
        if broken:  # what follows is parsed anew
            yield from self._raw(end)
            self._parser, self._start, self._field = self._new_parser(prefix=""), 0, None
            yield from self._parsed(parser._buffer[end:], ended)
        elif self._field in _SHOWN and self._template.fields[self._field].content == "text":
            parser._body = ""  # it was shown
        if (cut := min(self._start, parser._pos) - _STEP) > _STEP and not broken:
            parser._buffer, parser._pos = parser._buffer[cut:], parser._pos - cut
            self._start, self._from = self._start - cut, self._from - cut

    def _pieces(self, event: dict[str, Any], place: int) -> Iterator[Piece]:
        field, self._is_outside = event["field"], False
        if event["type"] == "region_open":
            self._field, self._from = field, place
            self._failed_before = self._failed_before and field in _SHOWN
        elif event["type"] == "region_chunk":
            if field in _SHOWN and not event["text"].isspace():
                begin = max(self._start, self._from)
                if kept := self._parser._buffer[begin : place + len(event["text"])].rstrip():
                    shown = kept if self._failed_before or begin > self._from else kept.lstrip()
                    self._start, self._failed_before = begin + len(kept), False
                    yield Piece("content" if field == "content" else "reasoning", shown)
        else:
            self._field = None
            if field == "tool_calls":
                yield from self._calls(event["value"], place)
            elif field not in _SHOWN:
                yield from self._raw(place)
            if field != self._template.implicit:  # that one may end where the mark of the next one does
                self._start = place

    def _raw(self, end: int) -> Iterator[Piece]:
        """A part that is not in the template's form, as content."""
        text, self._start, self._failed_before = self._parser._buffer[self._start : end], end, True
        if text:
            yield Piece("content", text)

    def _calls(self, value: Any, place: int) -> Iterator[Piece]:
        calls = [_name_and_arguments(one) for one in (value if isinstance(value, list) else [value])]
        if None in calls:
            yield from self._raw(place)
            return
        for name, arguments in filter(None, calls):
            index, self.num_calls = self.num_calls, self.num_calls + 1
            yield Piece("tool", "", index, f"call_{self._make_id():.24}", name)
            yield Piece("tool", arguments, index)


def _name_and_arguments(value: Any) -> tuple[str, str] | None:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return None
    name, given = function.get("name"), function.get("arguments", function.get("parameters", {}))
    try:
        arguments = given if isinstance(given, str) else as_json(given)
    except (ValueError, RecursionError):
        return None
    return (name, arguments) if is_text(name) and is_text(arguments) else None
