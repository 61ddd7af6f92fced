"""How the text of a completion becomes a message: content, reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..engine.text.response_reader import Piece


class MessageReader(Protocol):
    """Reads the text of one completion as it comes. What it does not understand is content: it never loses text."""

    def read(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """The pieces that this text completes; it may keep some text back."""

    def end(self) -> list[Piece]:
        """The rest, when the completion has ended."""

    @property
    def has_calls(self) -> bool:
        """Whether a call of a tool was read. The finish reason `stop` is then `tool_calls`."""

    @property
    def num_reasoning_tokens(self) -> float:
        """Tokens read so far that are reasoning; of text that holds more than it, a share by characters."""


def read_whole(reader: MessageReader, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """The fields of a message that is complete."""
    texts = {"content": "", "reasoning": ""}
    calls: dict[int, dict[str, Any]] = {}
    for piece in [*reader.read(text, token_ids), *reader.end()]:
        if piece.kind != "tool":
            texts[piece.kind] += piece.text
        else:
            call = calls.setdefault(
                piece.call, {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
            )
            call["function"]["arguments"] += piece.text
    found: dict[str, Any] = {"content": texts["content"] or (None if calls else "")}
    if texts["reasoning"]:
        found["reasoning"] = found["reasoning_content"] = texts["reasoning"]
    if calls:
        found["tool_calls"] = [calls[index] for index in sorted(calls)]
    return found


def delta_of(piece: Piece) -> dict[str, Any]:
    """A piece as the delta of a chunk."""
    if piece.kind == "content":
        return {"content": piece.text}
    if piece.kind == "reasoning":
        return {"reasoning": piece.text, "reasoning_content": piece.text}
    first = {"id": piece.id, "type": "function"} if piece.id else {}
    function = {"name": piece.name, "arguments": piece.text} if piece.id else {"arguments": piece.text}
    return {"tool_calls": [{"index": piece.call, **first, "function": function}]}
