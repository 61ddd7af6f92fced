"""What the handlers of a worker share: the models by name, and how requests are made and followed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..ipc.adapters import LoRARequest
from ..ipc.params import SamplingParams
from ..ipc.pooling_params import PoolingParams
from .failures import HttpError

if TYPE_CHECKING:
    from ..engine.async_llm_engine import AsyncLLMEngine
    from ..engine.request.input_processor import EngineCoreRequest
    from ..engine.request.outputs import RequestOutput
    from .counters import Counters
    from .exchange import Request
    from .reading import Readings
    from .served_adapters import ServedAdapters
    from .tenants import Tenants

T = TypeVar("T")

_USUAL_TOKEN = 16  # characters; a text with fewer for each token that fits is encoded without further questions
LARGE_BODY = 16 << 10  # bytes; from here on prompts are made in a thread, because other streams would wait meanwhile


class Service:
    """Args:
    name: what the model is called. Requests may also name it by the last part of a path.
    adapters: models of their own in requests.
    readings: how answers to conversations are read.
    trusts_templates: whether requests may bring chat templates.
    aliases: further names of the model.
    """

    def __init__(
        self,
        tenants: Tenants,
        counters: Counters,
        name: str,
        adapters: ServedAdapters,
        readings: Readings,
        trusts_templates: bool = False,
        aliases: Sequence[str] = (),
    ) -> None:
        self.tenants, self.counters = tenants, counters
        self.name, self.adapters, self.readings = name, adapters, readings
        self._trusts_templates = trusts_templates
        self.names = list(dict.fromkeys((name, *aliases)))
        self._short_name = name.rstrip("/").rpartition("/")[2]
        self.created = int(time.time())
        self._longest_token: int | None = None  # characters

    def is_base(self, asked: str) -> bool:
        """Whether this names the model itself."""
        return asked in (*self.names, self._short_name)

    def model(self, asked: str | None) -> tuple[str, LoRARequest | None]:
        """The name to answer with, and the adapter.

        Raises:
            HttpError: there is no such model.
        """
        if not asked or asked in self.names:
            return self.name, None
        if asked == self._short_name:
            return asked, None
        if (adapter := self.adapters.all().get(asked)) is not None:
            return asked, adapter
        raise HttpError(404, f"the model {asked!r} does not exist", "model", "model_not_found")

    def prepared(
        self,
        engine: AsyncLLMEngine,
        request: Request,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        tokenization_kwargs: Mapping[str, Any],
        *,
        priority: int = 0,
        lora: LoRARequest | None = None,
        own_params: bool = False,
    ) -> EngineCoreRequest:
        """A checked request; `own_params` as `InputProcessor.process_inputs` has it. Other streams wait, see `made`."""
        if isinstance(prompt, str) and params.truncate_prompt_tokens is None:
            self.check_length(engine, prompt)
        return engine.input_processor.process_inputs(
            request_id,
            prompt,
            params,
            tokenization_kwargs=tokenization_kwargs,
            priority=priority,
            trace_headers=self.traced(engine, request),
            lora_request=lora,
            own_params=own_params,
        )

    def traced(self, engine: AsyncLLMEngine, request: Request) -> dict[str, str] | None:
        """The headers of the trace that a request belongs to, if traces are sent."""
        return None if engine.output_processor.tracer is None else request.trace_headers

    def check_template(self, given: str | None) -> None:
        """Refuse a chat template that a request brings: it can loop for hours, and all streams of the worker wait.

        Raises:
            HttpError: such templates are not trusted.
        """
        if given is not None and not self._trusts_templates:
            why = "chat_template is refused; --trust-request-chat-template lets the server render those of requests"
            raise HttpError(400, why, "chat_template")

    def check_length(self, engine: AsyncLLMEngine, text: str) -> None:
        """Refuse a text that can't fit, whatever its tokens are, because to encode it would take seconds.

        Raises:
            HttpError: it has more characters than the most tokens of the longest kind.
        """
        most, tokenizer = engine.engine_core.model.max_model_len, engine.tokenizer
        if tokenizer is None or len(text) <= most * _USUAL_TOKEN:
            return
        if self._longest_token is None:
            self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        if len(text) > most * max(self._longest_token, _USUAL_TOKEN):
            raise HttpError(
                400,
                f"the prompt has {len(text)} characters, but the limit is {most} tokens",
                code="context_length_exceeded",
            )


async def made(request: Request, make: Callable[[], T], takes_long: bool = False) -> T:
    """What `make` returns. For a large request, or if it takes long, it runs in a thread."""
    if not takes_long and request.size < LARGE_BODY:
        return make()
    threads = request.tenant.threads
    await threads.acquire()
    task = asyncio.ensure_future(asyncio.to_thread(make))

    def ended(_: object) -> None:
        threads.release()  # not before: a thread goes on when its client has left
        if not task.cancelled():
            task.exception()  # nobody may be there to hear of it

    task.add_done_callback(ended)
    return await asyncio.shield(task)


def new_id(prefix: str) -> str:
    return f"{prefix}-{os.urandom(16).hex()}"


async def together(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """The outputs of several streams as they come, each with the number of its stream. All are closed at the end."""
    if len(streams) == 1:
        stream = streams[0]
        try:
            async for output in stream:
                yield 0, output
        finally:
            await _close(stream)
        return
    waiting = {asyncio.ensure_future(_next(stream)): at for at, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at = waiting.pop(task)
                if (one := task.result()) is not None:
                    yield at, one
                    waiting[asyncio.ensure_future(_next(streams[at]))] = at
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await _close(stream)


async def _next(stream: AsyncIterator[T]) -> T | None:
    return await anext(stream, None)


async def _close(stream: Any) -> None:
    if (close := getattr(stream, "aclose", None)) is not None:
        await close()


def finish_reason(output_reason: str) -> str:
    """A finish reason in OpenAI's words. A request that was aborted on the server's side has failed.

    Raises:
        HttpError: it was aborted.
    """
    if output_reason in ("abort", "error"):
        raise HttpError(503, "the request was ended by the server before it was complete", retry_after=1)
    return output_reason


def usage_of(outputs: Sequence[RequestOutput], num_generated: int, num_reasoning: float = 0) -> dict[str, Any]:
    """The tokens of a request, whose prompts are those of these outputs."""
    prompt = sum(len(output.prompt_token_ids or ()) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": num_generated,
        "total_tokens": prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": round(num_reasoning)},
    }
