"""Routes of pooling models: embeddings, scores, reranking, classes, and what the pooler gives."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ..engine.chat_methods import chat_prompt
from ..engine.pooling_methods import cosine, entry_prompt, late_interaction, pair_prompt, score_entries
from ..engine.request.prompts import has_media, with_processor_kwargs
from ..engine.text.chat_media import plain_prompt
from ..ipc.errors import ModelNotFoundError
from ..ipc.pooling_params import PoolingParams
from .bodies import listed_inputs
from .exchange import Answer, Request, answer, json_of
from .failures import HttpError
from .service import Service, made, new_id

if TYPE_CHECKING:
    import numpy as np

    from ..engine.async_llm_engine import AsyncLLMEngine
    from ..engine.request.outputs import PoolingOutput, PoolingRequestOutput
    from ..ipc.config import ModelConfig

MAX_INPUTS = 2048  # of one request, as OpenAI has it
MAX_TOKENS = 1 << 22  # of one request
LARGE_DATA = 16 << 10  # numbers of vectors, which take about 1 ms as JSON; more are worked on in a thread
MEDIA_AT_ONCE = 8  # prompts with media of one request that are prepared or computed at a time

Input = str | list[str | int | list[int]]
Encoding = Literal["float", "base64"]


class PoolingBody(msgspec.Struct, kw_only=True):
    """The fields that all these requests have."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    user: str | None = None
    add_special_tokens: bool | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    encoding_format: Encoding | None = None


class InputBody(PoolingBody, kw_only=True):
    """Of /v1/embeddings, /pooling and /classify: one or several inputs, or a conversation, which is one."""

    input: Input | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    dimensions: int | None = None
    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None


class Content(msgspec.Struct):
    """An entry of a score: parts of a message, which may be media; or a text, as Cohere's API has it."""

    content: list[dict[str, Any]] | None = None
    text: str | None = None


Entries = str | Content | list[str | Content]


class ScoreBody(PoolingBody, kw_only=True):
    text_1: Entries | None = None
    text_2: Entries | None = None
    queries: Entries | None = None
    documents: Entries | None = None
    items: Entries | None = None
    data_1: Entries | None = None
    data_2: Entries | None = None


class RerankBody(PoolingBody, kw_only=True):
    query: str | Content
    documents: Entries
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None


class PoolingApi:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._labels: dict[int, str] | None = None  # of the classes, as the checkpoint's config names them

    async def embeddings(self, request: Request, body: InputBody) -> Answer:
        _, outputs = await self._of_inputs(request, body, "embed")

        def entry(at: int, one: PoolingOutput) -> dict[str, Any]:
            return {"object": "embedding", "index": at, "embedding": _encoded(one.data, body.encoding_format)}

        return await self._listed(request, body, "embd", outputs, entry)

    async def pooling(self, request: Request, body: InputBody) -> Answer:
        _, outputs = await self._of_inputs(request, body, body.task)

        def entry(at: int, one: PoolingOutput) -> dict[str, Any]:
            return {"object": "pooling", "index": at, "data": _encoded(one.data, body.encoding_format)}

        return await self._listed(request, body, "pool", outputs, entry)

    async def classify(self, request: Request, body: InputBody) -> Answer:
        engine, outputs = await self._of_inputs(request, body, "classify")
        if self._labels is None:  # in a thread, because it imports transformers
            self._labels = await asyncio.to_thread(_labels, engine.model_config)
        labels = self._labels

        def entry(at: int, one: PoolingOutput) -> dict[str, Any]:
            label = labels.get(int(one.data.argmax()))
            return {"index": at, "label": label, "probs": _encoded(one.data), "num_classes": len(one.data)}

        return await self._listed(request, body, "classify", outputs, entry)

    async def score(self, request: Request, body: ScoreBody) -> Answer:
        ones = next((one for one in (body.text_1, body.queries, body.data_1) if one is not None), None)
        given = (body.text_2, body.documents, body.items, body.data_2)
        twos = next((two for two in given if two is not None), None)
        if ones is None or twos is None:
            raise HttpError(400, "give text_1 and text_2, each one entry or a list of them", "text_1")
        firsts, seconds = _entries(ones), _entries(twos)
        if len(firsts) not in (1, len(seconds)) or not seconds:
            why = f"text_1 has {len(firsts)} entries and text_2 {len(seconds)}: give one and many, or as many of both"
            raise HttpError(400, why, "text_1")
        scores, outputs = await self._scores(request, body, firsts, seconds)
        data = [{"object": "score", "index": at, "score": score} for at, score in enumerate(scores)]
        return self._list(body, "score", data, outputs)

    async def rerank(self, request: Request, body: RerankBody) -> Answer:
        documents = _entries(body.documents)
        if not documents:
            raise HttpError(400, "documents is empty", "documents")
        if body.top_n is not None and body.top_n < 0:
            raise HttpError(400, f"top_n is {body.top_n}; it must be at least 1", "top_n")
        scores, outputs = await self._scores(request, body, _entries([body.query]), documents)
        order = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n or None]
        results: list[dict[str, Any]] = []
        for at in order:
            results.append({"index": at, "relevance_score": scores[at]})
            if body.return_documents is not False:
                one = documents[at]
                results[-1]["document"] = {"text": one} if isinstance(one, str) else {"multi_modal": one["content"]}
        model, _ = self._service.model(body.model)
        return answer({"id": new_id("rerank"), "model": model, "usage": _usage(outputs), "results": results})

    # ------------------------------------------------------------------ private

    async def _of_inputs(
        self, request: Request, body: InputBody, task: Any
    ) -> tuple[AsyncLLMEngine, list[PoolingRequestOutput[PoolingOutput]]]:
        if (body.input is None) == (body.messages is None):
            raise HttpError(400, "give input or messages", "input")
        prompts: list[Any] = [] if body.input is None else listed_inputs(body.input, "input")
        if not all(prompts):
            raise HttpError(400, "an entry of input is empty", "input")
        self._service.check_template(body.chat_template)
        engine = await request.tenant.engine()
        asked = _task(engine, task)
        if body.messages is not None:
            prompts = [await made(request, lambda: _chat_prompt(engine, body))]
        return engine, await self._pooled(request, body, engine, prompts, asked, body.dimensions)

    async def _scores(
        self, request: Request, body: PoolingBody, firsts: Sequence[Any], seconds: Sequence[Any]
    ) -> tuple[list[float], list[PoolingRequestOutput[PoolingOutput]]]:
        """A score for each of `seconds`."""
        _check_number(len(seconds))
        engine = await request.tenant.engine()
        tasks = engine.engine_core.model.tasks
        firsts, seconds = ([entry_prompt(engine.tokenizer, one) for one in both] for both in (firsts, seconds))
        if "classify" in tasks:
            for one in (*firsts, *seconds):
                if isinstance(one, str) and body.truncate_prompt_tokens is None:
                    self._service.check_length(engine, one)
            tokenizer = await engine.get_tokenizer()
            both = zip([*firsts] * (len(seconds) // len(firsts)), seconds, strict=True)
            # in a thread, because a long query is encoded again for each document
            make = partial(_few_tokens, (pair_prompt(tokenizer, one, two) for one, two in both))
            pairs = await made(request, make, takes_long=True)
            outputs = await self._pooled(request, body, engine, pairs, "classify")
            return [float(one.outputs.data[0]) for one in outputs], outputs
        task = _task(engine, "embed")
        outputs = await self._pooled(request, body, engine, [*firsts, *seconds], task)
        vectors = [one.outputs.data for one in outputs]
        likeness = late_interaction if task == "token_embed" else cosine
        both = zip(vectors[: len(firsts)] * (len(seconds) // len(firsts)), vectors[len(firsts) :], strict=True)
        return await made(request, lambda: [likeness(*each) for each in both], _are_large(outputs)), outputs

    async def _pooled(
        self,
        request: Request,
        body: PoolingBody,
        engine: AsyncLLMEngine,
        prompts: Sequence[Any],
        task: Any,
        dimensions: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        _check_number(len(prompts))
        _, lora = self._service.model(body.model)
        activate = next((v for v in (body.use_activation, body.activation, body.softmax) if v is not None), None)
        params = PoolingParams(
            dimensions=dimensions,
            use_activation=body.normalize if activate is None else activate,
            task=task,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        name, special = new_id("pool"), body.add_special_tokens is not False
        options: dict[str, Any] = {"add_special_tokens": special}
        if body.padding == "max_length":
            options["padding"] = body.padding
        few = asyncio.Semaphore(MEDIA_AT_ONCE)

        def prepared(at: int, prompt: Any) -> Any:
            if has_media(prompt):
                return prompt  # they are prepared first, which takes time
            more: dict[str, Any] = {"priority": body.priority, "lora": lora}
            return self._service.prepared(engine, request, f"{name}-{at}", prompt, params, options, **more)

        def make() -> list[Any]:
            whole = with_processor_kwargs(prompts, body.mm_processor_kwargs)
            return _few_tokens(prepared(at, prompt) for at, prompt in enumerate(whole))

        async def one(at: int, ready: Any) -> PoolingRequestOutput[PoolingOutput]:
            more: dict[str, Any] = {"lora_request": lora, "priority": body.priority, "tokenization_kwargs": options}
            traced = self._service.traced(engine, request)
            async with few if has_media(ready) else contextlib.nullcontext():
                async for output in engine.encode(ready, params, f"{name}-{at}", trace_headers=traced, **more):
                    if output.finish_reason == "abort":
                        break
                    return output
            raise HttpError(503, "the request was ended by the server before it was complete", retry_after=1)

        tasks = [asyncio.ensure_future(one(at, ready)) for at, ready in enumerate(await made(request, make))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for each in tasks:
                each.cancel()

    async def _listed(
        self,
        request: Request,
        body: PoolingBody,
        prefix: str,
        outputs: Sequence[PoolingRequestOutput[PoolingOutput]],
        entry: Callable[[int, PoolingOutput], dict[str, Any]],
    ) -> Answer:
        """An answer with an entry for each output, which is made of its index and data."""

        def make() -> Answer:
            return self._list(body, prefix, [entry(at, one.outputs) for at, one in enumerate(outputs)], outputs)

        return await made(request, make, _are_large(outputs))

    def _list(
        self, body: PoolingBody, prefix: str, data: list[Any], outputs: Sequence[PoolingRequestOutput[PoolingOutput]]
    ) -> Answer:
        model, _ = self._service.model(body.model)
        return answer(
            {
                "id": new_id(prefix),
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": data,
                "usage": _usage(outputs),
            }
        )


def _check_number(count: int) -> None:
    if count > MAX_INPUTS:
        raise HttpError(400, f"there are {count} inputs; the limit is {MAX_INPUTS}", "input")


def _few_tokens(prompts: Iterable[Any]) -> list[Any]:
    """All of them, unless they have too many tokens together: a short body may ask for gigabytes."""
    found, count = [], 0
    for one in prompts:
        found.append(one)
        ids = one.get("prompt_token_ids") if isinstance(one, dict) else getattr(one, "prompt_token_ids", None)
        count += len(ids or ())
        if count > MAX_TOKENS:
            raise HttpError(400, f"the inputs have more than {MAX_TOKENS} tokens together: send fewer at once", "input")
    return found


def _labels(model: ModelConfig) -> dict[int, str]:
    """The names of the classes; none if the checkpoint is on the daemon's machine only."""
    try:
        named = getattr(model.hf_config, "id2label", None) or {}
    except ModelNotFoundError:
        return {}
    return {int(number): str(name) for number, name in named.items()}


def _task(engine: AsyncLLMEngine, task: str | None) -> str | None:
    """The task to ask for. A model whose embeddings are those of tokens gives these as embeddings.

    Raises:
        HttpError: the model does not have it.
    """
    tasks = list(engine.engine_core.model.tasks)
    if not tasks:
        raise HttpError(400, "this model generates text; it has no embeddings, scores or classes")
    if task == "embed" and tasks[0] == "token_embed":
        return "token_embed"
    if task is not None and task not in tasks:
        raise HttpError(400, f"the task is {task}, and this model can {', '.join(tasks)}")
    return task


def _entries(given: Entries) -> list[Any]:
    """Entries of a score: texts, and dicts with ``content``.

    Raises:
        HttpError: an entry has neither a text nor content.
    """

    def plain(one: str | Content) -> Any:
        found = one if isinstance(one, str) else one.text if one.content is None else {"content": one.content}
        if found is None:
            raise HttpError(400, "an entry has neither text nor content")
        return found

    return score_entries([plain(one) for one in given] if isinstance(given, list) else plain(given))


def _chat_prompt(engine: AsyncLLMEngine, body: InputBody) -> Any:
    """The prompt of a conversation. Without a chat template it is the texts and media of its messages.

    Raises:
        HttpError: there is no tokenizer.
        InvalidRequestError, NotSupportedError: the template or the model does not take the conversation.
    """
    tokenizer, messages = engine.tokenizer, body.messages
    assert messages is not None
    if tokenizer is None:
        raise HttpError(400, "this engine has no tokenizer; give input with token ids")
    if body.chat_template is None and not tokenizer.chat_template and not tokenizer.chats_in_tokens:
        return plain_prompt(messages, tokenizer.media)
    body.add_special_tokens = bool(body.add_special_tokens)  # the template writes them itself
    more: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in ("chat_template", "add_generation_prompt", "continue_final_message"):
        more[name] = getattr(body, name)
    return chat_prompt(tokenizer, messages, **more)


def _are_large(outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> bool:
    return sum(one.outputs.data.size for one in outputs) > LARGE_DATA


def _encoded(data: np.ndarray, encoding: Encoding | None = None) -> msgspec.Raw:
    """The JSON of a vector, or of one for each token, as numbers or as base64 of little-endian float32. It is made one
    vector at a time, because the event loop can't run while the encoder does, even if that is in a thread."""
    if encoding == "base64":
        return msgspec.Raw(b'"%b"' % base64.b64encode(data.astype("<f4").tobytes()))
    if data.ndim == 1:
        return msgspec.Raw(json_of(data.tolist()))
    return msgspec.Raw(b"[%b]" % b",".join(json_of(vector.tolist()) for vector in data))


def _usage(outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> dict[str, Any]:
    count = sum(len(one.prompt_token_ids) for one in outputs)
    cached = sum(one.num_cached_tokens for one in outputs)
    return {
        "prompt_tokens": count,
        "total_tokens": count,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
