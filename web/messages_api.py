"""/v1/messages: Anthropic's API, made of chat completions."""

from __future__ import annotations

import contextlib
import json as codec
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec

from ..ipc.params import is_text
from .bodies import ChatBody
from .chat import ChatApi, chat_prompt
from .exchange import Answer, Events, Request, answer, event
from .failures import HttpError
from .service import Service, made
from .turn import Turn, assistant_message

if TYPE_CHECKING:
    from ..engine.text.response_reader import Piece
    from .chat import Conversation

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# types of errors that have another name in Anthropic's API
_TYPES = {"service_unavailable_error": "overloaded_error", "internal_server_error": "api_error"}


class MessagesBody(msgspec.Struct, kw_only=True):
    """Fields of Anthropic's API, and parameters that are ours."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    seed: int | None = None
    structured_outputs: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    priority: int = 0


class MessagesApi:
    def __init__(self, service: Service, chat: ChatApi) -> None:
        self._service, self._chat = service, chat

    async def create(self, request: Request, body: MessagesBody) -> Answer | Events:
        if body.max_tokens is None or body.max_tokens < 1:
            raise HttpError(400, "max_tokens must be given, and be at least 1", "max_tokens")
        talk = await self._chat.begin(request, _chat_body(body), "msg")
        turn = Turn(request, talk)
        if body.stream:
            return Events(_events(talk, turn), b"", lambda error: event(error_object(error), "error"))
        return answer(await _whole(talk, turn))

    async def count_tokens(self, request: Request, given: MessagesBody) -> Answer:
        body = _chat_body(given)
        self._service.model(body.model)
        engine = await request.tenant.engine()

        def count() -> int:
            prompt: Any = chat_prompt(engine, body)
            if isinstance(prompt, str):
                return len(engine.input_processor.encode(prompt, False))
            if "prompt_token_ids" not in prompt:
                raise HttpError(400, "the tokens of media are known only when they are computed", "messages")
            return len(prompt["prompt_token_ids"])

        return answer({"input_tokens": await made(request, count)})


def error_object(error: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's error object, from OpenAI's."""
    kind = error["error"]["type"]
    return {"type": "error", "error": {"type": _TYPES.get(kind, kind), "message": error["error"]["message"]}}


class _Blocks:
    """The content blocks of a message, and the events of their pieces."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._kind: str | None = None  # of the open block
        self._arguments = ""

    def add(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for piece in pieces:
            if piece.kind != self._kind or piece.id:
                events += self.close()
                self._kind, self._arguments = piece.kind, ""
                block: dict[str, Any] = {"type": "text", "text": ""}
                if piece.kind == "reasoning":
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                elif piece.kind == "tool":
                    block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
                events.append({"type": "content_block_start", "index": len(self.content), "content_block": {**block}})
                self.content.append(block)
            if not piece.text:
                continue
            if piece.kind == "tool":
                self._arguments += piece.text
                delta = {"type": "input_json_delta", "partial_json": piece.text}
            else:
                name = "text" if piece.kind == "content" else "thinking"
                self.content[-1][name] += piece.text
                delta = {"type": f"{name}_delta", name: piece.text}
            events.append({"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta})
        return events

    def close(self) -> list[dict[str, Any]]:
        if self._kind is None:
            return []
        if self._kind == "tool":
            with contextlib.suppress(ValueError, RecursionError):  # cut by max_tokens; the stream has brought its text
                given = codec.loads(self._arguments or "{}")
                self.content[-1]["input"] = given if isinstance(given, dict) else {}
                if isinstance(given, dict) and not is_text(codec.dumps(given, ensure_ascii=False)):  # half a pair
                    self.content[-1]["input"] = msgspec.Raw(self._arguments.encode())
        self._kind = None
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]


def _message(talk: Conversation, content: list[dict[str, Any]], turn: Turn) -> dict[str, Any]:
    reason = None if turn.reason is None else _REASONS[turn.reason]
    if turn.stopped_by is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {
        "id": talk.id,
        "type": "message",
        "role": "assistant",
        "model": talk.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": turn.stopped_by,
        "usage": _usage(turn),
    }


def _usage(turn: Turn) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the others."""
    return {
        "input_tokens": turn.num_prompt_tokens - turn.num_cached_tokens,
        "cache_read_input_tokens": turn.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": turn.num_tokens,
    }


async def _whole(talk: Conversation, turn: Turn) -> dict[str, Any]:
    blocks = _Blocks()
    async with contextlib.aclosing(turn.pieces()) as pieces:
        async for some in pieces:
            blocks.add(some)
    blocks.close()
    return _message(talk, blocks.content, turn)


async def _events(talk: Conversation, turn: Turn) -> AsyncGenerator[bytes, None]:
    blocks, begun = _Blocks(), False
    async with contextlib.aclosing(turn.pieces()) as pieces:
        async for some in pieces:
            events: list[dict[str, Any]] = []
            if not begun:
                begun = True
                start = {**_message(talk, [], turn), "stop_reason": None, "stop_sequence": None}
                start["usage"] = {**start["usage"], "output_tokens": 0}
                events = [{"type": "message_start", "message": start}, {"type": "ping"}]
            events += blocks.add(some)
            if events:
                yield b"".join(event(one, one["type"]) for one in events)
    end = _message(talk, [], turn)
    delta = {name: end[name] for name in ("stop_reason", "stop_sequence")}
    events = [*blocks.close(), {"type": "message_delta", "delta": delta, "usage": end["usage"]}]
    yield b"".join(event(one, one["type"]) for one in (*events, {"type": "message_stop"}))


def _chat_body(body: MessagesBody) -> ChatBody:
    """The chat request that answers a request for a message.

    Raises:
        HttpError: a block is in no known form.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _joined(body.system, "system")})
    for at, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{at}]")
    tools: list[dict[str, Any]] = []
    for tool in body.tools or ():
        if tool.get("type") not in (None, "custom"):
            raise HttpError(400, f"tools has one of type {tool['type']!r:.40}; this server runs no tools", "tools")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        more = {name: tool[name] for name in ("description", "strict") if name in tool}
        tools.append({"type": "function", "function": {**function, **more}})
    given = body.tool_choice or {}
    choice: Any = _CHOICES.get(str(given.get("type")))
    if given.get("type") == "tool":
        choice = {"type": "function", "function": {"name": given.get("name")}}
    elif given and choice is None:
        raise HttpError(400, "tool_choice must have the type auto, any, tool or none", "tool_choice")
    form = (body.output_config or {}).get("format")
    kwargs = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        kwargs = {"enable_thinking": body.thinking.get("type") != "disabled", **kwargs}
    return ChatBody(
        messages=messages,
        model=body.model,
        stream=body.stream,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        seed=body.seed,
        structured_outputs=body.structured_outputs,
        ignore_eos=body.ignore_eos,
        priority=body.priority,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=not given.get("disable_parallel_tool_use", False),
        response_format={"type": "json_schema", "json_schema": form} if isinstance(form, dict) else None,
        chat_template_kwargs=kwargs or None,
        continue_final_message=bool(messages) and messages[-1]["role"] == "assistant",
    )


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """A message as those of a chat: the results of tools come first, because they answer the message before."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system") or not isinstance(content, (str, list)):
        raise HttpError(400, f"{where} must have role user or assistant, and content, a text or a list", where)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    found: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thinking = ""
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts.append({"type": "text", "text": str(block.get("text") or "")})
        elif kind == "thinking":
            thinking += str(block.get("thinking", ""))
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use":
            calls.append(
                {"id": block.get("id"), "name": block.get("name"), "arguments": codec.dumps(block.get("input") or {})}
            )
        elif kind == "tool_result":
            text = _joined(block.get("content") or "", where)
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "image":
            source = given if isinstance(given := block.get("source"), dict) else {}
            url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            raise HttpError(400, f"{where} has a block of type {kind!r:.40}, which is not supported", where)
    if role == "assistant":
        return [assistant_message("".join(part.get("text", "") for part in parts), thinking, calls)]
    if all(part["type"] == "text" for part in parts):
        return [*found, {"role": role, "content": "\n".join(part["text"] for part in parts)}] if parts else found
    return [*found, {"role": role, "content": parts}]


def _joined(content: Any, where: str) -> str:
    """The text of text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(one, dict) and one.get("type") == "text" for one in content):
        raise HttpError(400, f"{where} must be a text or text blocks", where)
    return "\n".join(str(one.get("text", "")) for one in content)
