"""Reads a model's output by the response template that its checkpoint ships, with the parser of transformers.

Importing that takes 2 s and 60 MiB, so it is done for such checkpoints only. The parser raises where a part is not in
the template's form; such a part becomes content. It gets one character at a time, because of a longer text the events
before an error would be lost.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...ipc.params import is_text
from .response_reader import Piece, as_json, joined

_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of fields


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
        self._template, self._make_id = template, make_id
        self._tools: list[Any] = list(tools)
        self._parser = self._new_parser(prompt)
        self._text = ""  # the output so far
        self._mark = 0  # its end that was shown, or is in the open part
        self._start = 0  # of the open part, with its opening mark
        self._space = ""  # at the end of what was shown, until more comes
        self._begins = True  # nothing of the open part was shown
        self._failed_before = False  # the part before the open one was no part of the template
        self._field: str | None = None
        self.num_calls = 0
        self.num_reasoning_tokens = 0.0  # of text that holds more than reasoning, a share by characters
        for one in self._parser.initial_events:
            self._field = one["field"] if one["type"] != "region_close" else None

    @property
    def has_calls(self) -> bool:
        return self.num_calls > 0

    def read(self, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
        """See `ResponseReader.read`."""
        found: list[Piece] = []
        letters = 0  # of reasoning
        for letter in text:
            self._text += letter
            letters += self._field in _REASONING
            try:
                events = self._parser.feed(letter)
            except ValueError:
                found += self._failed()
            else:
                found += self._pieces(events)
        self.num_reasoning_tokens += len(token_ids) * (letters / len(text) if text else self._field in _REASONING)
        return joined(found)

    def end(self) -> list[Piece]:
        """See `ResponseReader.end`."""
        try:
            return joined(list(self._pieces(self._parser.finalize()[1])))
        except ValueError:
            return list(self._failed())

    def _new_parser(self, prompt: str) -> Any:
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self._template, prefix=prompt, tools=self._tools)

    def _failed(self) -> Iterator[Piece]:
        """The part that can't be parsed, as content. What follows is parsed anew."""
        shown = self._mark if self._field in (None, "content", *_REASONING) else self._start
        text, self._mark, self._field, self._failed_before = self._text[shown:], len(self._text), None, True
        self._parser = self._new_parser("")
        if text:
            text, self._space = self._space + text, ""
            yield Piece("content", text)

    def _pieces(self, events: Sequence[dict[str, Any]]) -> Iterator[Piece]:
        for one in events:
            field = one["field"]
            if one["type"] == "region_open":
                self._field, self._start, self._begins, self._space = field, self._mark, not self._failed_before, ""
                self._failed_before = False
            elif one["type"] == "region_chunk":
                self._mark = self._text.find(one["text"], self._mark) + len(one["text"])
                if field == "content" or field in _REASONING:
                    yield from self._shown("content" if field == "content" else "reasoning", one["text"])
            else:
                self._field, self._space = None, ""
                if field == "tool_calls":
                    for value in one["value"] if isinstance(one["value"], list) else [one["value"]]:
                        yield from self._call(value)
                elif field != "content" and field not in _REASONING:
                    yield self._raw()

    def _shown(self, kind: Any, text: str) -> Iterator[Piece]:
        """Text without the whitespace around its part."""
        text = self._space + text
        if self._begins:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._begins = False
            yield Piece(kind, kept)

    def _raw(self) -> Piece:
        """A part that is closed, as content."""
        self._mark, self._failed_before = len(self._text), True
        return Piece("content", self._text[self._start :])

    def _call(self, value: Any) -> Iterator[Piece]:
        function = value.get("function", value) if isinstance(value, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        given = function.get("arguments", function.get("parameters", {})) if isinstance(function, dict) else None
        try:
            arguments = given if isinstance(given, str) else as_json(given)
        except ValueError:
            arguments = None
        if function is None or not is_text(name) or not is_text(arguments):
            yield self._raw()
            return
        index, self.num_calls = self.num_calls, self.num_calls + 1
        yield Piece("tool", "", index, f"call_{self._make_id():.24}", name)
        yield Piece("tool", arguments, index)
