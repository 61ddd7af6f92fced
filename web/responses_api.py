"""/v1/responses: answers with typed events, and conversations that the server remembers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from .bodies import ChatBody, GenerateBody
from .chat import ChatApi
from .exchange import Answer, Events, Request, answer, event
from .failures import HttpError, http_error
from .forwarding import Forwarding
from .response_items import Items, chat_messages
from .response_store import ResponseStore, Stored
from .service import Service, new_id
from .turn import Turn

_BACKGROUND = 256  # responses of a tenant that may be in the background of a worker at once


class ResponseBody(GenerateBody, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    conversation: Any = None
    prompt_template: Any = msgspec.field(default=None, name="prompt")
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None


class ResponsesApi:
    def __init__(self, service: Service, chat: ChatApi, forwarding: Forwarding) -> None:
        self._service, self._chat, self._forwarding = service, chat, forwarding
        self._store = ResponseStore()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background: Counter[str] = Counter()  # of each tenant

    # ------------------------------------------------------------------ routes

    async def create(self, request: Request, body: ResponseBody) -> Answer | Events:
        before = body.previous_response_id
        if before is not None and (row := self._forwarding.elsewhere(before)) is not None:
            return await self._forwarding.ask(row, request, msgspec.json.encode(body))
        earlier = [] if before is None else self._answered(request, before)
        for name, given in (("conversation", body.conversation), ("prompt", body.prompt_template)):
            if given is not None:
                raise HttpError(400, f"{name} is not supported; give the items as input", name, "not_supported")
        if body.background and (body.stream or body.store is False):
            raise HttpError(400, "background is for responses that are stored and not streamed", "background")
        if body.background and self._background[request.tenant.name] >= _BACKGROUND:
            raise HttpError(429, f"{_BACKGROUND} responses are in the background, which is the limit", retry_after=1)
        messages, items = chat_messages(body.input)
        messages = earlier + messages
        chat = _chat_body(body, messages)
        number = self._forwarding.marked(new_id("resp"))
        talk = await self._chat.begin(request, chat, "resp")
        turn = Turn(request, talk)
        made = _Response(number, talk.model, body, Items(turn.logprobs.take))
        stored = Stored(request.tenant.name, made.shown("in_progress"), messages, items)
        if body.stream:
            return Events(self._events(made, turn, stored), b"", made.failed)
        if body.background:
            self._store.add(number, stored)
            self._background[stored.tenant] += 1
            self._tasks[number] = asyncio.ensure_future(self._in_background(made, turn, stored))
            return answer(stored.response)
        async with contextlib.aclosing(turn.pieces()) as pieces:
            async for some in pieces:
                made.items.add(some)
        self._ended(made, turn, stored)
        return answer(stored.response)

    async def get(self, request: Request, body: None) -> Answer | Events:
        if (row := self._forwarding.elsewhere(request.params["response"])) is not None:
            return await self._forwarding.ask(row, request)
        return answer(self._stored(request, request.params["response"]).response)

    async def items(self, request: Request, body: None) -> Answer | Events:
        if (row := self._forwarding.elsewhere(request.params["response"])) is not None:
            return await self._forwarding.ask(row, request)
        found = self._stored(request, request.params["response"]).items
        shown = found if request.query.get("order") == "asc" else found[::-1]
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": "", "last_id": ""}
        return answer({"object": "list", "data": shown, "has_more": False, **ends})

    async def cancel(self, request: Request, body: None) -> Answer | Events:
        number = request.params["response"]
        if (row := self._forwarding.elsewhere(number)) is not None:
            return await self._forwarding.ask(row, request)
        stored = self._stored(request, number)
        if not stored.response["background"]:
            raise HttpError(400, "only a response in the background can be cancelled")
        if (task := self._tasks.get(number)) is not None:
            task.cancel()
            await asyncio.wait([task])
            stored = self._stored(request, number)
        return answer(stored.response)

    async def delete(self, request: Request, body: None) -> Answer | Events:
        number = request.params["response"]
        if (row := self._forwarding.elsewhere(number)) is not None:
            return await self._forwarding.ask(row, request)
        self._stored(request, number)
        if (task := self._tasks.get(number)) is not None:
            task.cancel()
            await asyncio.wait([task])
        self._store.remove(request.tenant.name, number)
        return answer({"id": number, "object": "response", "deleted": True})

    # ------------------------------------------------------------------ private

    def _stored(self, request: Request, number: str) -> Stored:
        stored = self._store.get(request.tenant.name, number)
        if stored is None:
            raise HttpError(404, f"there is no response {number!r}; the server keeps the latest ones only", "id")
        return stored

    def _answered(self, request: Request, number: str) -> list[dict[str, Any]]:
        """The conversation up to an answer."""
        stored = self._stored(request, number)
        if (status := stored.response["status"]) not in ("completed", "incomplete"):
            why = f"response {number!r} is {status}, so it has no answer to go on from"
            raise HttpError(400, why, "previous_response_id")
        return stored.messages

    def _ended(self, made: _Response, turn: Turn, stored: Stored) -> list[dict[str, Any]]:
        """Close the response and store it; the events of that."""
        status = "incomplete" if turn.reason == "length" else "completed"
        events = made.items.close(status)
        stored.response = made.shown(status, turn)
        stored.messages = [*stored.messages, made.items.message()]
        if made.body.store is not False:
            self._store.add(made.number, stored)
        return events

    async def _events(self, made: _Response, turn: Turn, stored: Stored) -> AsyncIterator[bytes]:
        def written(events: list[dict[str, Any]]) -> bytes:
            return b"".join(event(made.numbered(one), one["type"]) for one in events)

        events = [{"type": f"response.{kind}", "response": stored.response} for kind in ("created", "in_progress")]
        async with contextlib.aclosing(turn.pieces()) as pieces:
            async for some in pieces:  # a request that the core refuses has none, and is answered with an error
                if events := [*events, *made.items.add(some)]:
                    yield written(events)
                    events = []
        events += self._ended(made, turn, stored)
        kind = f"response.{stored.response['status']}"
        yield written([*events, {"type": kind, "response": stored.response}])

    async def _in_background(self, made: _Response, turn: Turn, stored: Stored) -> None:
        try:
            async with contextlib.aclosing(turn.pieces()) as pieces:
                async for some in pieces:
                    made.items.add(some)
            self._ended(made, turn, stored)
        except asyncio.CancelledError:
            made.items.close("incomplete")
            stored.response = made.shown("cancelled", turn)
        except Exception as error:
            made.items.close("incomplete")
            why = {"code": "server_error", "message": http_error(error).message}
            stored.response = {**made.shown("failed", turn), "error": why}
        finally:
            del self._tasks[made.number]
            self._background[stored.tenant] -= 1
            self._store.add(made.number, stored)


class _Response:
    """A response while it is made."""

    def __init__(self, number: str, model: str, body: ResponseBody, items: Items) -> None:
        self.number, self.body, self.items = number, body, items
        self._sequence = 0
        text = body.text or {}
        self._fields: dict[str, Any] = {
            "id": number,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": bool(body.background),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "top_logprobs": body.top_logprobs or 0,
            "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            **({} if body.user is None else {"user": body.user}),
        }

    def shown(self, status: str, turn: Turn | None = None) -> dict[str, Any]:
        """The response as an object.

        Args:
            turn: of a response that has ended.
        """
        more: dict[str, Any] = {}
        if turn is not None:
            more["usage"] = {
                "input_tokens": turn.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": turn.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": turn.num_tokens,
                "output_tokens_details": {"reasoning_tokens": turn.num_reasoning_tokens},
                "total_tokens": turn.num_prompt_tokens + turn.num_tokens,
            }
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        output = list(self.items.output)
        return {**self._fields, "status": status, "error": None, "incomplete_details": cut, "output": output, **more}

    def numbered(self, one: dict[str, Any]) -> dict[str, Any]:
        self._sequence += 1
        return {**one, "sequence_number": self._sequence - 1}

    def failed(self, error: dict[str, Any]) -> bytes:
        """The event of an error object."""
        fields = {name: error["error"][name] for name in ("code", "message", "param")}
        return event(self.numbered({"type": "error", **fields}), "error")


def _chat_body(body: ResponseBody, messages: list[dict[str, Any]]) -> ChatBody:
    """The chat request that answers a request for a response."""
    shared = {name: getattr(body, name) for name in GenerateBody.__struct_fields__}
    if body.truncation not in (None, "disabled", "auto"):
        raise HttpError(400, f"truncation is {body.truncation!r}; it must be auto or disabled", "truncation")
    if (body.n or 1) != 1:
        raise HttpError(400, "a response is one answer: n must be 1", "n")
    shared["max_tokens"] = body.max_tokens if body.max_output_tokens is None else body.max_output_tokens
    form = (body.text or {}).get("format")
    if form is not None:
        if not isinstance(form, dict):
            raise HttpError(400, "text.format must be an object", "text.format")
        shared["response_format"] = {"type": form.get("type"), "json_schema": form}
    tools = []
    for tool in body.tools or ():
        if tool.get("type") != "function":
            why = f"tools has one of type {tool.get('type')!r:.40}; this server has functions only"
            raise HttpError(400, why, "tools", "not_supported")
        tools.append({"type": "function", "function": {name: tool[name] for name in tool if name != "type"}})
    logprobs = "message.output_text.logprobs" in (body.include or ())
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return ChatBody(
        **shared,
        messages=system + messages,
        tools=tools or None,
        tool_choice=body.tool_choice,  # type: ignore[arg-type]
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=(body.reasoning or {}).get("effort"),
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
