"""/v1/audio/transcriptions and /v1/audio/translations: what is said in a sound."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ..ipc.media_client import MediaInput
from ..ipc.params import RequestOutputKind, SamplingParams
from .exchange import TEXT, Answer, Events, Request, answer, event
from .failures import HttpError
from .service import Service, finish_reason, new_id
from .speech import Speech, Task

if TYPE_CHECKING:
    from ..engine.async_llm_engine import AsyncLLMEngine
    from ..engine.request.outputs import RequestOutput
    from ..engine.request.request_stream import RequestStream

WINDOWS_AT_ONCE = 8  # windows of a sound that are prepared or computed at a time
NEVER = -1e30  # bias of a token that must not come: the sum is the same for any logit in fp32
_SAME = "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty".split()
_FORMATS = ("json", "text", "verbose_json")


class TranscriptionBody(msgspec.Struct, kw_only=True):
    """The fields of the form. Those that OpenAI's API does not have are vLLM's."""

    file: Annotated[Any, msgspec.Meta(extra_json_schema={"type": "string", "format": "binary"})]
    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: str = "json"
    stream: bool = False
    timestamp_granularities: list[str] = []
    include: list[str] = []
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_completion_tokens: int | None = None


class TranscriptionApi:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._speech: Speech | None = None

    async def transcribe(self, request: Request, body: TranscriptionBody) -> Answer | Events:
        return await self._answer(request, body, "transcribe")

    async def translate(self, request: Request, body: TranscriptionBody) -> Answer | Events:
        return await self._answer(request, body, "translate")

    async def _answer(self, request: Request, body: TranscriptionBody, task: Task) -> Answer | Events:
        if not isinstance(body.file, bytes):
            raise HttpError(400, "file must be a part of the form with a filename", "file")
        if body.response_format not in _FORMATS:
            text = f"response_format is {body.response_format!r:.40}; it must be one of {', '.join(_FORMATS)}"
            raise HttpError(400, f"{text}, because transcripts have no timestamps here", "response_format")
        for name in ("timestamp_granularities", "include"):
            if getattr(body, name):
                raise HttpError(400, f"{name} is not supported: a transcript here is its text alone", name)
        self._service.model(body.model)
        engine = await request.tenant.engine()
        self._speech = self._speech or Speech(engine)
        sound = _Sound(request, body, engine, self._speech, self._service.traced(engine, request))
        await sound.begin(task)
        if body.stream:
            return Events(_events(request, sound))
        text, seconds = "".join([delta async for delta in sound.deltas()]), sound.ends[-1]
        if body.response_format == "text":
            return Answer(text.encode(), headers=(TEXT,))
        found: dict[str, Any] = {"text": text, "usage": {"type": "duration", "seconds": math.ceil(seconds)}}
        if body.response_format == "verbose_json":
            language = "en" if task == "translate" else sound.language
            found |= {"task": task, "language": language, "duration": seconds}
        return answer(found)


class _Sound:
    """A sound that is transcribed, window after window.

    Attributes:
        ends: where each window ends, in seconds.
        language: its code.
        num_prompt_tokens: of the windows that were transcribed.
    """

    def __init__(
        self, request: Request, body: TranscriptionBody, engine: AsyncLLMEngine, speech: Speech, traced: Any
    ) -> None:
        self._request, self._body, self._traced = request, body, traced
        self._engine, self._speech = engine, speech
        self._id, self._prompt = new_id("transcribe"), list[int]()
        self.ends: list[float] = []
        self.language, self.num_prompt_tokens = "", 0

    async def begin(self, task: Task) -> None:
        """Have the sound decoded, and make the prompt of its windows.

        Raises:
            HttpError: the model does not know the language, or can't do the task.
            MainspringError: as `AsyncLLMEngine.generate`; above all, the sound can't be decoded.
        """
        body, known = self._body, [*self._speech.languages] or ["en"]
        given = (body.language or "").lower()
        if given and given not in known:
            raise HttpError(400, f"language is {given!r:.40}; this model knows {', '.join(known)}", "language")
        self.language = given or known[0]
        self._prompt = self._speech.prompt(task, self.language, body.prompt)  # refused before anything is decoded
        prepare = self._engine.input_processor.prepare_media
        asked = await asyncio.to_thread(prepare, self._with_window(self._prompt, 0))
        assert asked is not None
        media = (await asyncio.wrap_future(asked)).media
        assert media is not None
        self.ends = [*media.prepared.windows]
        if not given and len(known) > 1:
            self.language = await self._detected()
            self._prompt = self._speech.prompt(task, self.language, body.prompt)

    async def _detected(self) -> str:
        """The language whose token is the likeliest in the first window."""
        codes = {token: code for code, token in self._speech.languages.items()}
        params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=[*codes])
        tokens = list[int]()
        async for output in self._generate("language", self._speech.start, 0, params):
            finish_reason(output.outputs[0].finish_reason or "")
            tokens = output.outputs[0].token_ids
        return codes[tokens[0]]

    async def deltas(self) -> AsyncGenerator[str, None]:
        """The text as it comes. Some windows are computed at a time; their texts come in order.

        Raises:
            HttpError: the server has ended a request.
        """
        body, speech = self._body, self._speech
        params = SamplingParams(
            **{name: value for name in _SAME if (value := getattr(body, name)) is not None},
            max_tokens=body.max_completion_tokens,
            min_tokens=int(speech.never_empty),
            logit_bias=dict.fromkeys(speech.never, NEVER),
            output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        )
        begun: deque[tuple[RequestStream, asyncio.Task[Any]]] = deque()
        rest, is_first = iter(range(len(self.ends))), True
        try:
            for _ in self.ends:
                while len(begun) < WINDOWS_AT_ONCE and (window := next(rest, None)) is not None:
                    stream = self._generate(f"{window}", self._prompt, window, params)
                    begun.append((stream, asyncio.ensure_future(stream.begin())))
                stream, beginning = begun[0]
                await beginning
                last: RequestOutput | None = None
                async for last in stream:
                    one = last.outputs[0]
                    self._request.num_tokens += len(one.token_ids)
                    if one.finish_reason is not None:
                        finish_reason(one.finish_reason)
                    if text := one.text.lstrip() if is_first else one.text:
                        is_first = False
                        yield text
                self.num_prompt_tokens += 0 if last is None else len(last.prompt_token_ids or ())
                begun.popleft()
        finally:
            for _, beginning in begun:
                beginning.cancel()
            await asyncio.gather(*(beginning for _, beginning in begun), return_exceptions=True)
            for stream, _ in begun:
                await stream.aclose()

    def _generate(self, name: str, ids: list[int], window: int, params: SamplingParams) -> RequestStream:
        prompt = self._with_window(ids, window)
        return self._engine.generate(prompt, params, f"{self._id}-{name}", trace_headers=self._traced)

    def _with_window(self, ids: list[int], window: int) -> Any:
        sound = MediaInput("audio", self._body.file, {"window": window})
        return {"prompt_token_ids": ids, "multi_modal_data": {"audio": [sound]}}


async def _events(request: Request, sound: _Sound) -> AsyncIterator[bytes]:
    text = ""
    async with contextlib.aclosing(sound.deltas()) as deltas:
        async for delta in deltas:
            text += delta
            yield event({"type": "transcript.text.delta", "delta": delta})
    read, written = sound.num_prompt_tokens, request.num_tokens
    usage = {"type": "tokens", "input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    yield event({"type": "transcript.text.done", "text": text, "usage": usage})
