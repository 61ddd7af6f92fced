"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from ..engine.request.outputs import CompletionOutput, RequestOutput
from .bodies import CompletionBody, listed_inputs, sampling_params
from .exchange import Answer, Events, Request, answer, event, json_of
from .failures import HttpError
from .logprobs import completion_logprobs
from .service import Service, finish_reason, made, new_id, together, usage_of

if TYPE_CHECKING:
    from ..engine.async_llm_engine import AsyncLLMEngine
    from ..engine.request.input_processor import EngineCoreRequest
    from ..engine.request.request_stream import RequestStream

MAX_PROMPTS = 2048  # of one request
USUAL_TOKENS = 16  # OpenAI's default of max_tokens


class _Sent:
    """A request that was sent, with one stream for each prompt."""

    def __init__(
        self,
        body: CompletionBody,
        model: str,
        echoed: Sequence[tuple[str, str]],
        streams: Sequence[RequestStream],
    ) -> None:
        self.id, self.created = new_id("cmpl"), int(time.time())
        self.body, self.model, self.echoed, self.streams = body, model, echoed, streams
        self._told: dict[int, list[Any]] = {}  # log probabilities of each prompt's tokens
        self._offsets: dict[int, int] = {}  # characters of each choice so far

    @property
    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    @property
    def only_echo(self) -> bool:
        """Whether nothing is to be generated. The core generates a token, which is dropped."""
        return self.body.max_tokens == 0

    def choice(self, number: int, output: RequestOutput, one: CompletionOutput, first: bool) -> dict[str, Any]:
        """A choice of an answer, or the part of it that an output brings; `first`: it is the choice's first part."""
        body, index = self.body, number * self.body.num_choices + one.index
        text, token_ids, entries = one.text, one.token_ids, one.logprobs
        reason = None if one.finish_reason is None else finish_reason(one.finish_reason)
        if output.prompt_logprobs is not None:
            self._told[number] = output.prompt_logprobs
        if self.only_echo:
            text, token_ids, entries = "", [], None if entries is None else []
        offset, logprobs, begin = self._offsets.get(index, 0), None, ""
        if body.echo and first:
            whole, begin = self.echoed[number]
            text = whole + text
            if entries is not None:
                ids = output.prompt_token_ids or []
                token_ids, entries = [*ids, *token_ids], [*self._told.get(number, ()), *entries]
        if entries is not None:
            as_ids = bool(body.return_tokens_as_token_ids)
            logprobs = completion_logprobs(token_ids, entries, body.logprobs or 0, offset, begin, as_ids)
        self._offsets[index] = offset + len(text)
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        choice["stop_reason"] = one.stop_reason
        if body.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = self._told.get(number)
        if body.return_token_ids:
            choice["token_ids"] = one.token_ids
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice


class CompletionApi:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: Request, body: CompletionBody) -> Answer | Events:
        sent = await self._send(request, body)
        return Events(_events(request, sent)) if body.stream else answer(await _whole(request, sent))

    async def _send(self, request: Request, body: CompletionBody) -> _Sent:
        if body.suffix:
            raise HttpError(400, "suffix is not supported: models here continue a text at its end", "suffix")
        if body.max_tokens == 0 and not body.echo:
            raise HttpError(400, "max_tokens is 0; it must be at least 1, or come with echo", "max_tokens")
        model, lora = self._service.model(body.model)
        engine = await request.tenant.engine()
        prompts = _prompts(body)
        name = body.request_id or new_id("cmpl")
        if len(prompts) * body.width > MAX_PROMPTS:
            raise HttpError(400, f"{len(prompts)} prompts with n or best_of are more than {MAX_PROMPTS} requests", "n")
        limit = USUAL_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
        scored = body.logprobs if body.echo and body.logprobs is not None else None
        tokenization = {"add_special_tokens": body.add_special_tokens is not False}

        def make() -> list[EngineCoreRequest]:
            params = sampling_params(engine, body, max_tokens=limit, logprobs=body.logprobs, prompt_logprobs=scored)
            return [
                self._service.prepared(
                    engine,
                    request,
                    f"{name}-{number}",
                    prompt,
                    params,
                    tokenization,
                    priority=body.priority,
                    lora=lora,
                    own_params=len(prompts) == 1,
                )
                for number, prompt in enumerate(prompts)
            ]

        ready = await made(request, make, engine.engine_core.model.encoder_input)
        echoed = await made(request, lambda: [_texts(engine, one) if body.echo else ("", "") for one in ready])
        streams = []
        try:
            for one in ready:
                streams.append(engine.generate(one, request_id=one.request_id))
                await streams[-1].begin()
                if len(ready) > 1:
                    await asyncio.sleep(0)  # other streams wait
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        return _Sent(body, model, echoed, streams)


def _prompts(body: CompletionBody) -> list[Any]:
    """Each prompt of a body, text or token ids."""
    if body.prompt is None:
        raise HttpError(400, "prompt is missing: give a text, token ids, or a list of either", "prompt")
    prompts = listed_inputs(body.prompt, "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise HttpError(400, f"prompt has {len(prompts)} entries; the limit is {MAX_PROMPTS}", "prompt")
    return prompts


def _texts(engine: AsyncLLMEngine, ready: EngineCoreRequest) -> tuple[str, str]:
    """The text of a prompt that is echoed, and that of its first token."""
    if (tokenizer := engine.tokenizer) is None:
        return ready.prompt or "", ""
    text = tokenizer.decode(ready.prompt_token_ids) if ready.prompt is None else ready.prompt
    first = tokenizer.decode(ready.prompt_token_ids[:1])
    return text, first if text.startswith(first) else ""


async def _whole(request: Request, sent: _Sent) -> dict[str, Any]:
    last = {number: output async for number, output in together(sent.streams)}
    outputs = [last[number] for number in range(len(sent.streams))]
    choices = [
        sent.choice(number, output, one, True) for number, output in enumerate(outputs) for one in output.outputs
    ]
    generated = 0 if sent.only_echo else sum(len(one.token_ids) for output in outputs for one in output.outputs)
    request.num_tokens = generated
    return {**sent.head, "choices": choices, "usage": usage_of(outputs, generated)}


async def _events(request: Request, sent: _Sent) -> AsyncIterator[bytes]:
    """The chunks. One that is text alone is put together from a template."""
    body, options = sent.body, sent.body.stream_options
    every = options is not None and options.continuous_usage_stats and options.include_usage
    pending: dict[str, Any] = {"usage": None} if options is not None and options.include_usage else {}
    plain = body.logprobs is None and body.prompt_logprobs is None
    plain = plain and not (body.echo or body.return_token_ids or every)
    open_head = b"data: " + json_of(sent.head)[:-1] + b',"choices":[{"index":%d,"text":'
    tail = b',"logprobs":null,"finish_reason":null}]' + (b',"usage":null' if pending else b"") + b"}\n\n"
    width = body.num_choices
    starts = [open_head % index for index in range(width * len(sent.streams))]
    begun = [False] * len(starts)
    generated, last = 0, dict[int, RequestOutput]()

    def pass_on(text: str, token_ids: list[int]) -> bool:
        nonlocal generated
        if direct is None or not direct.takes_parts:
            return False
        if text:
            direct.write_part(starts[0] + json_of(text) + tail)
        generated += len(token_ids)
        request.num_tokens = generated
        return True

    direct = request.direct
    if direct is not None and plain and len(starts) == 1:
        sent.streams[0].pass_text(pass_on)
    outputs = together(sent.streams)
    try:
        async for number, output in outputs:
            last[number] = output
            for one in output.outputs:
                index = number * width + one.index
                generated += 0 if sent.only_echo else len(one.token_ids)
                request.num_tokens = generated
                if plain and one.finish_reason is None:
                    if one.text:
                        yield starts[index] + json_of(one.text) + tail
                    continue
                choice = sent.choice(number, output, one, not begun[index])
                begun[index] = True
                usage = {"usage": usage_of([*last.values()], generated)} if every else pending
                yield event({**sent.head, "choices": [choice], **usage})
        if pending:
            yield event({**sent.head, "choices": [], "usage": usage_of([*last.values()], generated)})
    finally:
        await outputs.aclose()  # type: ignore[attr-defined]
