"""The items of /v1/responses: input items as messages of a chat, and pieces of an answer as output items and events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine.text.response_reader import Piece
from .failures import HttpError
from .service import new_id
from .turn import assistant_message

Event = dict[str, Any]
_TEXT_PART: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


class Items:
    """The output of a response. The item that is written last is open until another kind of piece comes.

    Args:
        logprobs_of: gives the log probabilities of the tokens of the next part of content or reasoning.
    """

    def __init__(self, logprobs_of: Callable[[str], list[Any]] = lambda text: []) -> None:
        self.output: list[dict[str, Any]] = []
        self._kind: str | None = None  # of the open item
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._calls: list[dict[str, Any]] = []
        self._logprobs_of = logprobs_of
        self._logprobs: list[Any] = []  # of the open item

    def add(self, pieces: list[Piece]) -> list[Event]:
        """More of the answer; its events, without numbers."""
        events: list[Event] = []
        for piece in pieces:
            if piece.kind != self._kind or piece.id:
                events += self.close("completed")
                events += self._open(piece)
            item = self.output[-1]
            if piece.kind == "tool":
                if piece.text:
                    item["arguments"] += piece.text
                    self._calls[-1]["arguments"] += piece.text
                    events.append(self._event("response.function_call_arguments.delta", delta=piece.text))
                continue
            item["content"][0]["text"] += piece.text
            self._texts[piece.kind].append(piece.text)
            logprobs = self._logprobs_of(piece.text)
            if piece.kind == "content":
                self._logprobs += logprobs
                events.append(self._event("response.output_text.delta", True, delta=piece.text, logprobs=logprobs))
            else:
                events.append(self._event("response.reasoning_text.delta", True, delta=piece.text))
        return events

    def close(self, status: str) -> list[Event]:
        """Close the open item."""
        if self._kind is None:
            return []
        item = self.output[-1]
        item["status"] = status
        if self._kind == "tool":
            more = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event("response.function_call_arguments.done", **more)]
        else:
            if self._kind == "content":
                item["content"][0]["logprobs"] = self._logprobs
            part = dict(item["content"][0])
            events = [
                self._event("response.output_text.done", True, text=part["text"], logprobs=self._logprobs)
                if self._kind == "content"
                else self._event("response.reasoning_text.done", True, text=part["text"]),
                self._event("response.content_part.done", True, part=part),
            ]
        self._kind = None
        at = len(self.output) - 1
        return [*events, {"type": "response.output_item.done", "output_index": at, "item": _copy(item)}]

    def message(self) -> dict[str, Any]:
        """The output as a message of a chat."""
        return assistant_message("".join(self._texts["content"]), "".join(self._texts["reasoning"]), self._calls)

    def _open(self, piece: Piece) -> list[Event]:
        self._kind, self._logprobs = piece.kind, []
        item: dict[str, Any]
        part: dict[str, Any] = {}
        if piece.kind == "tool":
            self._calls.append({"id": piece.id, "name": piece.name, "arguments": ""})
            item = {"id": new_id("fc"), "type": "function_call", "call_id": piece.id, "name": piece.name}
            item |= {"arguments": "", "status": "in_progress"}
        elif piece.kind == "content":
            part = dict(_TEXT_PART)
            item = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
        item["status"] = "in_progress"
        at = len(self.output)
        events = [{"type": "response.output_item.added", "output_index": at, "item": _copy(item)}]
        self.output.append(item)
        if part:
            item["content"] = [part]
            events.append(self._event("response.content_part.added", True, part=dict(part)))
        return events

    def _event(self, kind: str, in_part: bool = False, **fields: Any) -> Event:
        place = {"content_index": 0} if in_part else {}
        at = len(self.output) - 1
        return {"type": kind, "item_id": self.output[-1]["id"], "output_index": at, **place, **fields}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is now."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def chat_messages(given: str | list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Input items as messages of a chat, and the items with ids.

    Raises:
        HttpError: an item is in no known form.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    items = []
    reasoning = ""
    for at, item in enumerate(given):
        kind = item.get("type") or ("message" if "role" in item else None)
        named = {"id": new_id("msg" if kind == "message" else "item"), "status": "completed"}
        shown = {**named, **item, "type": kind}
        if kind == "message":
            role, content = item.get("role"), item.get("content")
            if role not in ("user", "assistant", "system", "developer") or not isinstance(content, (str, list)):
                raise HttpError(400, f"input[{at}] must have a role and content, a text or a list", "input")
            if role == "assistant":
                _of_model(messages, reasoning)["content"] += _text(content)
                reasoning = ""
            else:
                messages.append({"role": "system" if role == "developer" else role, "content": content})
            parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
            if role == "assistant":
                given_parts = [{"text": content}] if isinstance(content, str) else content
                parts = [{**_TEXT_PART, **part} if isinstance(part, dict) else part for part in given_parts]
            shown |= {"content": parts}
        elif kind == "function_call":
            name, arguments = item.get("name"), item.get("arguments")
            if not isinstance(name, str) or not isinstance(arguments, str):
                raise HttpError(400, f"input[{at}] must have call_id, name and arguments, which are texts", "input")
            call = {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}
            _of_model(messages, reasoning).setdefault("tool_calls", []).append(call)
            reasoning = ""
        elif kind == "function_call_output":
            output = item.get("output")
            parts = output if isinstance(output, list) else [{"text": output}]
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
                raise HttpError(400, f"input[{at}] must have output, a text or a list of texts", "input")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(parts)})
        elif kind == "reasoning":
            reasoning += _text(item.get("content") or item.get("summary") or [])
        else:
            raise HttpError(400, f"input[{at}] is an item of type {kind!r:.40}, which is not supported", "input")
        items.append(shown)
    return messages, items


def _of_model(messages: list[dict[str, Any]], reasoning: str = "") -> dict[str, Any]:
    """The last message, if it is of the model; otherwise a new one."""
    if not messages or messages[-1]["role"] != "assistant" or (reasoning and messages[-1].get("reasoning_content")):
        messages.append(assistant_message("", "", []))
    if reasoning:
        messages[-1]["reasoning_content"] = reasoning
    return messages[-1]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", part.get("refusal", ""))) for part in parts if isinstance(part, dict))
