"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..engine.chat_methods import chat_prompt as conversation_prompt
from ..engine.request.outputs import CompletionOutput, RequestOutput
from ..engine.request.prompts import Prompt, TokensPrompt, with_processor_kwargs
from ..engine.text.chat_template import template_messages
from .bodies import ChatBody, form_of, sampling_params
from .exchange import Answer, Events, Request, answer, event, json_of
from .failures import HttpError
from .logprobs import chat_logprobs
from .reader import MessageReader, delta_of, read_whole
from .reading import Reading
from .service import Service, finish_reason, made, new_id, usage_of

if TYPE_CHECKING:
    from ..engine.async_llm_engine import AsyncLLMEngine
    from ..engine.request.request_stream import RequestStream


class Conversation(msgspec.Struct):
    """A chat request that was sent, for the APIs that are made of one.

    Args:
        model: the name to answer with.
        readers: what makes the reader of a completion; None: its text is content.
    """

    id: str
    model: str
    created: int
    body: ChatBody
    stream: Any  # RequestStream
    readers: Callable[[], MessageReader] | None
    tokenizer: Any  # Tokenizer, or None

    @property
    def echoed(self) -> str:
        """What an answer begins with: with `echo`, the last message, if it is the model's and a text."""
        last = self.body.messages[-1] if self.body.echo else {}
        content = last.get("content")
        return content if last.get("role") == "assistant" and isinstance(content, str) else ""

    def logprobs(self, one: CompletionOutput) -> dict[str, Any]:
        """The log probabilities of an output's tokens."""
        top, as_ids = self.body.top_logprobs or 0, bool(self.body.return_tokens_as_token_ids)
        return chat_logprobs(one.token_ids, one.logprobs or (), top, self.tokenizer, as_ids)


class ChatApi:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: Request, body: ChatBody) -> Answer | Events:
        talk = await self.begin(request, body)
        if body.stream:
            return Events(_events(request, talk))
        return answer(await _whole(request, talk))

    async def begin(self, request: Request, body: ChatBody, prefix: str = "chatcmpl") -> Conversation:
        """Make the prompt of a conversation and send its request.

        Raises:
            HttpError: no such model.
            MainspringError: as `AsyncLLMEngine.generate`, or the template refuses the conversation.
        """
        model, lora = self._service.model(body.model)
        self._service.check_template(body.chat_template)
        engine = await request.tenant.engine()
        if body.functions:
            raise HttpError(400, "functions is the older form of tools, and not supported: give tools", "functions")
        if body.top_logprobs and not body.logprobs:
            raise HttpError(400, "top_logprobs needs logprobs", "top_logprobs")
        if body.stream and body.prompt_logprobs is not None:
            raise HttpError(400, "prompt_logprobs of a chat can't be streamed", "prompt_logprobs")
        talk_id = new_id(prefix) if body.request_id is None else f"{prefix}-{body.request_id}"

        tokenization = {"add_special_tokens": bool(body.add_special_tokens)}  # the template writes them itself

        def make() -> tuple[RequestStream, Reading]:
            if body.truncate_prompt_tokens is None:
                self._check_lengths(engine, body)
            prompt = chat_prompt(engine, body)
            text = prompt if isinstance(prompt, str) else cast(TokensPrompt, prompt).get("prompt")
            asked = form_of(body)
            reading = self._service.readings.of(engine, body, text, asked)
            more: dict[str, Any] = {"structured_outputs": reading.form or asked}
            if reading.show_special:
                more |= {"skip_special_tokens": False, "spaces_between_special_tokens": False}
            limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            limit = engine.generation_config.get("max_new_tokens") if limit is None else limit
            count = (body.top_logprobs or 0) if body.logprobs else None
            params = sampling_params(engine, body, max_tokens=limit, logprobs=count, **more)
            if isinstance(prompt, dict) and "multi_modal_data" in prompt:
                stream = engine.generate(
                    prompt,  # its media are prepared first, which takes time
                    params,
                    talk_id,
                    lora_request=lora,
                    priority=body.priority,
                    tokenization_kwargs=tokenization,
                    trace_headers=self._service.traced(engine, request),
                )
                return stream, reading
            ready = self._service.prepared(
                engine,
                request,
                talk_id,
                prompt,
                params,
                tokenization,
                priority=body.priority,
                lora=lora,
                own_params=True,
            )
            return engine.generate(ready, request_id=talk_id), reading

        stream, reading = await made(request, make, engine.engine_core.model.encoder_input)
        await stream.begin()
        return Conversation(talk_id, model, int(time.time()), body, stream, reading.reader, engine.tokenizer)

    def _check_lengths(self, engine: AsyncLLMEngine, body: ChatBody) -> None:
        """Refuse a user's message that can't fit before the template is rendered: no template leaves it out, and each
        copy that it makes of a long one holds up the worker's streams."""
        for message in body.messages:
            if message.get("role") == "user" and isinstance(text := message.get("content"), str):
                self._service.check_length(engine, text)


def chat_prompt(engine: AsyncLLMEngine, body: ChatBody) -> Prompt:
    """The prompt of a conversation: text, with its media if there are some, or tokens if the tokenizer can encode
    conversations only.

    Raises:
        InvalidRequestError: there is no template, or it refuses the conversation.
        NotSupportedError: the model takes no media of that kind.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise HttpError(400, "this engine has no tokenizer; use /v1/completions with token ids")
    more: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        more.setdefault("reasoning_effort", body.reasoning_effort)
    begins = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    more |= {
        "tools": None if body.tool_choice == "none" else body.tools,
        "documents": body.documents,
        "chat_template": body.chat_template,
        "add_generation_prompt": begins,
        "continue_final_message": bool(body.continue_final_message),
    }
    found = conversation_prompt(tokenizer, template_messages(body.messages), **more)
    return cast(Prompt, with_processor_kwargs([found], body.mm_processor_kwargs)[0])


async def _whole(request: Request, talk: Conversation) -> dict[str, Any]:
    """The answer that is not streamed."""
    last: RequestOutput | None = None
    async for output in cast("RequestStream", talk.stream):
        last = output
    assert last is not None
    choices, generated, reasoned = [], 0, 0.0
    for one in last.outputs:
        message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
        message |= {"reasoning": None, "reasoning_content": None}
        reader = None if talk.readers is None else talk.readers()
        if reader is not None:
            message |= read_whole(reader, one.text, one.token_ids)
            reasoned += reader.num_reasoning_tokens
        if talk.echoed:
            message["content"] = talk.echoed + (message["content"] or "")
        reason = _reason(talk.body, one, reader)
        choice = {"index": one.index, "message": message, "logprobs": None, "finish_reason": reason}
        choice |= _details(talk.body, one)
        if one.logprobs is not None:
            choice["logprobs"] = talk.logprobs(one)
        choices.append(choice)
        generated += len(one.token_ids)
    request.num_tokens = generated
    return {
        "id": talk.id,
        "object": "chat.completion",
        "created": talk.created,
        "model": talk.model,
        "choices": choices,
        "usage": usage_of([last], generated, reasoned),
        **_prompt_ids(talk.body, last),
        **({} if talk.body.prompt_logprobs is None else {"prompt_logprobs": last.prompt_logprobs}),
    }


def _details(body: ChatBody, one: CompletionOutput) -> dict[str, Any]:
    """Fields of a choice that OpenAI's API does not have."""
    found: dict[str, Any] = {"stop_reason": one.stop_reason}
    if body.return_token_ids:
        found["token_ids"] = one.token_ids
    return found


def _prompt_ids(body: ChatBody, output: RequestOutput) -> dict[str, Any]:
    return {"prompt_token_ids": output.prompt_token_ids} if body.return_token_ids else {}


def _reason(body: ChatBody, one: CompletionOutput, reader: MessageReader | None) -> str:
    """The finish reason of a choice. As in OpenAI's API, a call of the function that `tool_choice` names is no reason
    of its own."""
    assert one.finish_reason is not None
    reason, asked = finish_reason(one.finish_reason), body.tool_choice
    if reason != "stop" or reader is None or not reader.has_calls:
        return reason
    return "stop" if isinstance(asked, dict) and asked.get("type") == "function" else "tool_calls"


async def _events(request: Request, talk: Conversation) -> AsyncIterator[bytes]:
    """The chunks. One that is text alone is put together from a template."""
    body, readers = talk.body, talk.readers
    options = body.stream_options
    every = options is not None and options.continuous_usage_stats and options.include_usage
    head: dict[str, Any] = {
        "id": talk.id,
        "object": "chat.completion.chunk",
        "created": talk.created,
        "model": talk.model,
    }
    pending: dict[str, Any] = {"usage": None} if options is not None and options.include_usage else {}
    open_head = b"data: " + json_of(head)[:-1] + b',"choices":[{"index":%d,"delta":{"content":'
    tail = b'},"finish_reason":null}]' + (b',"usage":null' if pending else b"") + b"}\n\n"
    plain = readers is None and not body.logprobs and not body.return_token_ids and not every
    own = [readers() for _ in range(body.num_choices)] if readers is not None else []
    starts = [open_head % index for index in range(body.num_choices)]
    begun = [False] * body.num_choices
    generated, last = 0, cast("RequestOutput | None", None)

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": reason, **more}
        usage = {"usage": usage_of([last], generated)} if every and last is not None else pending
        beside = _prompt_ids(body, last) if "role" in delta and last is not None else {}
        return event({**head, "choices": [choice], **usage, **beside})

    def pass_on(text: str, token_ids: list[int]) -> bool:
        nonlocal generated
        if not (begun[0] and direct is not None and direct.takes_parts):
            return False
        if not own:
            part = starts[0] + json_of(text) + tail if text else b""
        else:
            part = b"".join(chunk(0, delta_of(piece)) for piece in own[0].read(text, token_ids))
        if part:
            direct.write_part(part)
        generated += len(token_ids)
        request.num_tokens = generated
        return True

    stream, direct = cast("RequestStream", talk.stream), request.direct
    if direct is not None and body.num_choices == 1 and not (body.logprobs or body.return_token_ids or every):
        stream.pass_text(pass_on)
    try:
        async for output in stream:
            last = output
            for one in output.outputs:
                index = one.index
                generated += len(one.token_ids)
                request.num_tokens = generated
                if not begun[index]:
                    begun[index] = True
                    yield chunk(index, {"role": "assistant", "content": talk.echoed})
                if plain:
                    if one.text:
                        yield starts[index] + json_of(one.text) + tail
                else:
                    for delta, more in _deltas(talk, one, own):
                        yield chunk(index, delta, **more)
                if one.finish_reason is not None:
                    reason = _reason(body, one, own[index] if own else None)
                    yield chunk(index, {}, reason, stop_reason=one.stop_reason)
        if pending and last is not None:
            reasoned = sum(one.num_reasoning_tokens for one in own)
            yield event({**head, "choices": [], "usage": usage_of([last], generated, reasoned)})
    finally:
        await stream.aclose()


def _deltas(
    talk: Conversation, one: CompletionOutput, own: list[MessageReader]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The deltas of an output, and more fields of each one's choice: log probabilities and ids with the first."""
    more: dict[str, Any] = {}
    if one.logprobs:
        more["logprobs"] = talk.logprobs(one)
    if talk.body.return_token_ids:
        more["token_ids"] = one.token_ids
    if not own:
        deltas = [{"content": one.text}] if one.text or more else []
    else:
        reader = own[one.index]
        pieces = reader.read(one.text, one.token_ids)
        if one.finish_reason is not None:
            pieces = [*pieces, *reader.end()]
        deltas = [delta_of(piece) for piece in pieces] or ([{}] if more else [])
    return [(delta, more if at == 0 else {}) for at, delta in enumerate(deltas)]
