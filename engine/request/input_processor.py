"""Turns a prompt and its parameters into a checked request, and a request into one message for each completion."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ...ipc.adapters import LoRARequest, PromptAdapterRequest
from ...ipc.config import ENCODER_TEXT
from ...ipc.errors import InvalidRequestError, MainspringError, NotSupportedError, shown, unknown_argument
from ...ipc.messages import AddRequest, Pooling, Sampling, Tensor
from ...ipc.params import RequestOutputKind, SamplingParams, is_text
from ...ipc.pooling_params import PoolingParams
from ...ipc.processor_names import packed
from ...ipc.structured import trace_spec
from .prompt_media import PromptMedia, done, following
from .prompts import ParsedPrompt, parse_prompt

if TYPE_CHECKING:
    from ...ipc.codec import Array
    from ...ipc.media_client import MediaClient
    from ...ipc.request_check import RequestCheck
    from ..text.tokenizer import Tokenizer
    from .late_chunking import LateChunkingMetadata
    from .prompt_media import RequestMedia


ALL_TOKENS = 2**31 - 1
_TOKENIZATION = ["add_special_tokens", "padding", "max_length"]
_BY_TYPE: dict[Any, Callable[[Any], Any]] = {  # type of a field of `Sampling` → its value from the user's
    float: float,
    int: int,
    bool: bool,
    list[int]: lambda tokens: [int(token) for token in tokens or ()],
    dict[int, float]: lambda values: {int(token): float(value) for token, value in (values or {}).items()},
}
_MADE = {  # fields of `Sampling` that `core_message` computes; the others are copied from the field of the same name
    "max_tokens", "seed", "top_k", "stop_token_ids", "logprobs", "prompt_logprobs", "bad_words", "grammar",
    "extra_args",
}  # fmt: skip
_COPIED = {name: _BY_TYPE[kind] for name, kind in Sampling.__annotations__.items() if name not in _MADE}


@dataclass(slots=True)  # to make a frozen one takes three times as long
class EngineCoreRequest:
    """A request that was checked and is ready to be sent. `add_request` takes it in place of a prompt."""

    request_id: str
    prompt: str | None  # text, if known
    prompt_token_ids: list[int]  # zeros under embeddings
    params: SamplingParams  # a copy, with `max_tokens` and `seed` decided
    eos_token_ids: frozenset[int]  # the tokenizer's token that ends this request and is no stop reason
    arrival_time: float
    priority: int = 0
    cache_salt: str = ""
    embeds: Array | None = None  # [tokens, hidden size]
    bad_words: list[list[int]] = field(default_factory=list)  # each as token ids
    grammar: list[str] = field(default_factory=list)  # kind and text of its structured outputs
    trace_headers: Mapping[str, str] | None = None  # of the trace that the request belongs to
    lora_request: LoRARequest | None = None
    prompt_adapter_request: PromptAdapterRequest | None = None
    pooling: PoolingParams | None = None  # of a request to a pooling model; `params` are then without effect
    chunking: LateChunkingMetadata | None = None  # of a request with late chunking
    second: int = 0  # index of the second text's first token in a pair of texts; 0: one text
    extra_args: bytes | None = None  # for the core's logits processors; None: it has none
    data_parallel_rank: int | None = None  # number of the core that gets it; None: any
    media: RequestMedia | None = None  # images and the like; prompt_token_ids then has placeholders
    message: AddRequest | None = field(default=None, compare=False)  # if it was made; it has no handle yet


class InputProcessor:
    """Makes requests of prompts.

    Args:
        tokenizer: None with `skip_tokenizer_init`: prompts must be token ids or embeddings.
        check: the facts and limits of the core that gets the requests.
        eos_token_ids: tokens that end every request that does not ignore them, beside the tokenizer's.
        stream_interval: the default of requests that set none.
        media: prepares images and the like; None: no prompt may have any.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        check: RequestCheck,
        eos_token_ids: Iterable[int],
        stream_interval: int = 1,
        media: PromptMedia | None = None,
    ) -> None:
        self._media = media or PromptMedia(check.config.multimodal_config, [], _no_client)
        self._request_check, self.model = check, check.model
        self._stream_interval = stream_interval
        self.salt = ""  # is put before the salt of each request
        self._models_tokenizer, self._models_eos = tokenizer, frozenset(eos_token_ids)
        self.use_tokenizer(tokenizer)

    def use_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Use this tokenizer from now on."""
        self.tokenizer, models = tokenizer, self._models_tokenizer
        eos = self._own_eos = None if tokenizer is None else tokenizer.eos_token_id
        found = self._models_eos if eos is None else self._models_eos | {eos}
        self.eos_token_ids = frozenset(int(token) for token in found if 0 <= int(token) < self.model.vocab_size)
        # the core compiles structured outputs for the model's vocabulary
        self._fits_grammars = tokenizer is models or bool(
            tokenizer and models and tokenizer.get_vocab() == models.get_vocab()
        )

    def process_inputs(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        data_parallel_rank: int | None = None,
        own_params: bool = False,
    ) -> EngineCoreRequest:
        """A checked request. Arguments as `LLMEngine.add_request`, in their newest form; `data_parallel_rank`: the
        number of the core that gets it; `own_params`: `params` were made for this request alone just now, so they are
        neither checked again nor copied.

        Raises:
            InvalidRequestError: the core can't serve it. The message names field, value and limit.
            NotSupportedError: it needs a feature that the core does not have.
        """
        pooling = params.clone() if isinstance(params, PoolingParams) else None
        if pooling is not None:
            pooling.validate()
            pooling.task = pooling.task or cast(Any, next(iter(self.model.tasks), None))
            params = SamplingParams(max_tokens=1, seed=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params is {shown(params)}; it must be a SamplingParams")
        if not is_text(request_id):
            raise InvalidRequestError(f"request_id is {shown(request_id)}; it must be a str of whole characters")
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
            raise InvalidRequestError(f"priority is {shown(priority)}; it must be an int of 64 bits")
        if tokenization_kwargs is not None and not isinstance(tokenization_kwargs, Mapping):
            raise InvalidRequestError(f"tokenization_kwargs is {shown(tokenization_kwargs)}; it must be a dict")
        if not own_params:
            params.validate()
            params = params.clone()
        self.check_adapters(lora_request, prompt_adapter_request)
        parsed = self.parse(prompt)
        if pooling is None and isinstance(prompt, Mapping) and prompt.get("token_type_ids") is not None:
            raise InvalidRequestError("token_type_ids are for pooling models, but this request is to generate tokens")
        if parsed.embeds is not None and params.use_beam_search:
            raise InvalidRequestError("use_beam_search needs a prompt of token ids, but this one is embeddings")
        processed = bool(self._request_check.config.model_config.logits_processors)
        if parsed.given and prompt_adapter_request is not None:
            raise NotSupportedError("prompt_adapter_request is not supported for a prompt with media")
        if processed and params.use_beam_search:  # each of its rounds has the beam so far as its prompt
            raise NotSupportedError("use_beam_search is not supported by an engine with logits_processors")
        if self.tokenizer is None and params.stop:
            raise InvalidRequestError("stop strings need a tokenizer; this engine has skip_tokenizer_init=True")
        virtual = prompt_adapter_request.prompt_adapter_num_virtual_tokens if prompt_adapter_request else 0
        limit = max(1, self.model.max_model_len - virtual - (pooling is None))  # tokens of the longest prompt
        keep = (pooling or params).truncate_prompt_tokens
        keep = limit if keep == -1 else keep
        if (begun := self.prepare_media(parsed, tokenization_kwargs)) is not None:
            parsed = begun.result()
        token_ids = self._prompt_token_ids(parsed, tokenization_kwargs or {}, keep, pooling is not None)
        chunking = None
        if pooling is not None and pooling.late_chunking_params is not None:
            if pooling.task != "token_embed":
                raise InvalidRequestError(f"late_chunking_params is for token_embed, and the task is {pooling.task}")
            from .late_chunking import chunks_of

            special = (tokenization_kwargs or {}).get("add_special_tokens", True)
            size = pooling.late_chunking_params.chunk_size
            chunking = chunks_of(parsed.text, token_ids, size, self.tokenizer, special)
        form = params.structured_outputs or params.guided_decoding
        if form is not None and not self._fits_grammars:
            raise NotSupportedError(
                "structured outputs are compiled for the model's own vocabulary, and the tokenizer that was set has "
                "another one; leave them out, or set a tokenizer with the model's vocabulary"
            )
        spec: tuple[str, str] | None = None if form is None else form.spec()
        if params.trace_decode_token_ids is not None:
            spec, params.ignore_eos = trace_spec(params.trace_decode_token_ids), True
            params.max_tokens, params.stop, params.stop_token_ids = len(params.trace_decode_token_ids), [], []
        room = max(1, self.model.max_model_len - virtual - len(token_ids))
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        params.stream_interval = params.stream_interval or self._stream_interval
        params.seed = int.from_bytes(os.urandom(8), "big", signed=True) if params.seed is None else params.seed
        # as in vLLM, a token that ends the request is its stop reason, unless it is the tokenizer's EOS token
        ends = frozenset() if params.ignore_eos or pooling else self.eos_token_ids
        params.stop_token_ids = sorted(ends.difference([self._own_eos]).union(params.stop_token_ids or ()))
        request = EngineCoreRequest(
            request_id=request_id,
            prompt=prompt_text if prompt_text is not None else parsed.text,
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=ends.intersection([self._own_eos]),
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=self.salt + (parsed.cache_salt or params.cache_salt or ""),
            embeds=parsed.embeds,
            bad_words=self._tokenized(params.bad_words or ()),
            grammar=list(spec or ()),
            trace_headers=trace_headers,
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
            pooling=pooling,
            chunking=chunking,
            second=parsed.second,
            extra_args=packed(params.extra_args) if processed else None,
            data_parallel_rank=data_parallel_rank,
            media=parsed.media,
        )
        message = core_message(request, 0)
        self._request_check.check(message)
        if own_params and params.width == 1:  # else it may change, or is one of several
            request.message = message
        return request

    def parse(self, prompt: Any) -> ParsedPrompt:
        """`parse_prompt`, with what an encoder reads as the media of the prompt."""
        parsed = parse_prompt(prompt)
        if parsed.explicit and not self.model.encoder_input:
            raise NotSupportedError("a prompt has encoder_prompt, but this model is no encoder-decoder model")
        if ENCODER_TEXT in self.model.media and parsed.given is None and parsed.embeds is None:
            from .media_inputs import GivenMedia

            read = parsed.text if parsed.token_ids is None else parsed.token_ids
            return parsed._replace(given=GivenMedia(None, None, {}, read), text="", token_ids=None)
        return parsed

    def prepare_media(
        self, prompt: Any, tokenization_kwargs: Mapping[str, Any] | None = None
    ) -> Future[ParsedPrompt] | None:
        """Begin to prepare a prompt with media. The result is for `process_inputs`, in place of the prompt. None: it
        has no media, or they are prepared.

        Raises: as `process_inputs`; the future, too.
        """
        if isinstance(prompt, EngineCoreRequest) or not (
            isinstance(prompt, ParsedPrompt | Mapping) or self.model.encoder_input
        ):
            return None
        parsed = self.parse(prompt)
        if parsed.given is None or parsed.media is not None:
            return None
        inputs, special = self._media.inputs(parsed.given), _adds_special_tokens(tokenization_kwargs or {})
        if not inputs:
            return done(parsed._replace(given=None))
        if self.model.lone_media and (parsed.text or parsed.token_ids or len(inputs) != 1):
            raise InvalidRequestError(
                "a prompt of this model is a text or one media item, not both: leave the text empty, and give one item "
                "for each prompt"
            )
        source: str | list[int]
        if parsed.token_ids is not None:
            source = parsed.token_ids
        elif (
            self._checked_text(parsed.text or "") is self._models_tokenizer
            and self._request_check.config.model_config.tokenizer is None
        ):
            source = parsed.text or ""  # which the checkpoint's processor tokenizes
        else:
            source = self.encode(parsed.text or "", special and not self.model.encoder_input)
        asked = self._media.prepare(source, inputs, parsed.given.kwargs, special)
        return following(asked, lambda media: parsed._replace(media=media))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; none of an empty one.

        Raises:
            InvalidRequestError: there is no tokenizer, or the text is not valid Unicode.
        """
        tokenizer = self._checked_text(text)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []

    def _checked_text(self, text: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError("a prompt is text, but skip_tokenizer_init=True; give prompt_token_ids")
        if not is_text(text):
            raise InvalidRequestError(f"the prompt is {shown(text)}, which holds half a surrogate pair")
        return self.tokenizer

    def check_adapters(self, lora: object, prompt_adapter: object = None) -> None:
        """Raise for an adapter that the core does not serve, or that is not one."""
        self._request_check.check_adapters(lora, prompt_adapter)
        for name, value, kind in (
            ("lora_request", lora, LoRARequest),
            ("prompt_adapter_request", prompt_adapter, PromptAdapterRequest),
        ):
            if value is not None and not isinstance(value, kind):
                raise InvalidRequestError(f"{name} is {shown(value)}; it must be a {kind.__name__}")

    def _tokenized(self, bad_words: Iterable[str]) -> list[list[int]]:
        """The tokens of each word, and those of the word after a space where they are as many but begin differently."""
        found = []
        for word in bad_words:
            if self.tokenizer is None:
                raise InvalidRequestError("bad_words need a tokenizer; this engine has skip_tokenizer_init=True")
            bare, spaced = (
                self.tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " ")
            )
            found += [bare] if bare[:1] == spaced[:1] or len(bare) != len(spaced) else [bare, spaced]
        return [tokens for tokens in found if tokens]

    def _prompt_token_ids(
        self, parsed: ParsedPrompt, tokenization_kwargs: Mapping[str, Any], keep: int | None, pooled: bool
    ) -> list[int]:
        """The prompt's token ids; of more than `keep` the last ones, or, of a prompt that is `pooled`, the first."""
        special = _adds_special_tokens(tokenization_kwargs)
        if parsed.embeds is not None:
            if keep is not None:
                raise InvalidRequestError(
                    "truncate_prompt_tokens needs a prompt of token ids, but this one is embeddings"
                )
            return [0] * len(parsed.embeds.values)
        if parsed.media is not None:
            token_ids = parsed.media.prepared.token_ids
            if keep is not None and len(token_ids) > keep:
                raise InvalidRequestError(
                    f"the prompt has {len(token_ids)} tokens with its media, and truncate_prompt_tokens is {keep}; "
                    "prompts with media are not truncated"
                )
            return token_ids
        if parsed.token_ids is not None:
            token_ids = parsed.token_ids
        elif pooled and keep is not None and parsed.text:
            token_ids = self._checked_text(parsed.text).encode_first(parsed.text, special, keep)
        else:
            token_ids = self.encode(parsed.text or "", special)
        if tokenization_kwargs.get("padding") or tokenization_kwargs.get("max_length") is not None:
            token_ids = self._padded(token_ids, tokenization_kwargs, pooled)
        if keep is None:
            return token_ids
        return token_ids[:keep] if pooled else token_ids[-keep:]

    def _padded(self, token_ids: list[int], tokenization_kwargs: Mapping[str, Any], pooled: bool) -> list[int]:
        """A text's token ids with padding tokens behind them, as some encoders were trained."""
        wanted, length = tokenization_kwargs.get("padding"), tokenization_kwargs.get("max_length")
        length = self.model.max_model_len if length is None else length
        pad = None if self.tokenizer is None else self.tokenizer.pad_token_id
        longest = self.model.max_model_len
        if wanted != "max_length" or type(length) is not int or length > longest or not pooled or pad is None:
            raise InvalidRequestError(
                f"padding is {shown(wanted)}, and max_length {shown(length)}; they must be 'max_length' and an int up "
                f"to max_model_len, {longest}, for a pooling model whose tokenizer has a padding token"
            )
        return token_ids + [pad] * (length - len(token_ids))


class Ahead:
    """The prompts of a batch, in order. Media of the next ones are prepared while a prompt is processed."""

    MOST = 8  # prompts, so that all media workers have something to do

    def __init__(
        self, processor: InputProcessor, prompts: Sequence[Any], tokenization_kwargs: Mapping[str, Any] | None
    ) -> None:
        self._processor, self._prompts, self._kwargs = processor, prompts, tokenization_kwargs
        self._begun: deque[Future[ParsedPrompt] | None] = deque()

    def prompt(self, at: int) -> Any:
        """Prompt number `at`, with its media prepared. Each is asked for once, in order.

        Raises: as `InputProcessor.process_inputs`.
        """
        for number in range(at + len(self._begun), min(at + self.MOST, len(self._prompts))):
            try:
                self._begun.append(self._processor.prepare_media(self._prompts[number], self._kwargs))
            except MainspringError:
                if number == at:
                    raise
                break  # it is raised when its turn has come
        begun = self._begun.popleft()
        return self._prompts[at] if begun is None else begun.result()


def _adds_special_tokens(tokenization_kwargs: Mapping[str, Any]) -> bool:
    for name, special in tokenization_kwargs.items():
        if name not in _TOKENIZATION:
            raise unknown_argument("tokenization_kwargs", name, _TOKENIZATION)
        if name == "add_special_tokens" and not isinstance(special, bool):
            raise InvalidRequestError(f"add_special_tokens is {shown(special)}; it must be True or False")
    return bool(tokenization_kwargs.get("add_special_tokens", True))


def _no_client() -> MediaClient:
    raise NotSupportedError("this input processor takes no media")


def core_messages(request: EngineCoreRequest, handles: Iterable[int]) -> list[AddRequest]:
    """One message for each completion, each with its own handle; of a beam search the first beam's."""
    if request.message is not None:
        return [msgspec.structs.replace(request.message, handle=handle) for handle in itertools.islice(handles, 1)]
    width = 1 if request.params.use_beam_search else request.params.width
    numbered = zip(range(width), handles, strict=False)
    return [core_message(request, handle, index=index) for index, handle in numbered]


def check_message(request: EngineCoreRequest) -> AddRequest | None:
    """The message for the core's method ``check_request``, with only what the core checks; None: there is nothing."""
    adapters, processed = request.lora_request or request.prompt_adapter_request, request.extra_args is not None
    if not (request.grammar or request.pooling or adapters or processed):
        return None
    whole = core_message(replace(request, second=0), 0)
    sampling, pooling = Sampling(1, grammar=whole.sampling.grammar), whole.pooling
    if processed:  # of a request that is not greedy the seed differs from prompt to prompt
        none: Any = {"seed": 0, "stop_token_ids": [], "logit_bias": {}, "allowed_token_ids": [], "bad_words": []}
        sampling = msgspec.structs.replace(whole.sampling, **none)
    return AddRequest(0, "", [0], sampling, pooling=pooling, lora=whole.lora, prompt_adapter=whole.prompt_adapter)


def core_message(
    request: EngineCoreRequest, handle: int, beam: Sequence[int] | None = None, index: int = 0, age_s: float = 0.0
) -> AddRequest:
    """The message for completion `index` of a request, or for the next token of a `beam` of a request that was first
    sent `age_s` seconds ago."""
    params, embeds = request.params, None  # a value may be of a subclass of int, float or str, which msgpack refuses
    if request.embeds is not None:
        embeds = Tensor(0, request.embeds.dtype, list(request.embeds.values.shape))
    assert params.max_tokens is not None
    assert params.seed is not None
    stops = sorted(int(token) for token in request.eos_token_ids.union(params.stop_token_ids or ()))
    logprobs, prompt_logprobs, max_tokens = params.logprobs, params.prompt_logprobs, params.max_tokens
    if params.use_beam_search:
        logprobs, max_tokens, stops = 2 * params.width, 1, []
    elif params.width > params.n and logprobs is None:
        logprobs = 0  # needed to rank the completions
    return AddRequest(
        handle=handle,
        request_id=request.request_id,
        prompt_token_ids=[*request.prompt_token_ids, *(beam or ())],  # a copy: callers get the request's in outputs
        sampling=Sampling(
            max_tokens=int(max_tokens),
            seed=int(params.seed) if params.width == 1 else child_seed(params.seed, index),
            top_k=int(max(params.top_k, 0)),
            stop_token_ids=stops,
            **{name: convert(getattr(params, name)) for name, convert in _COPIED.items()},
            logprobs=_count(logprobs),
            prompt_logprobs=_count(prompt_logprobs if index == 0 else None),
            bad_words=request.bad_words,
            grammar=[str.__str__(text) for text in request.grammar],
            extra_args=request.extra_args or b"",
        ),
        priority=int(request.priority),
        cache_salt=str.__str__(request.cache_salt),
        prompt_embeds=embeds,
        pooling=_pooling(request),
        age_s=age_s,
        resumed=beam is not None,
        lora=None if request.lora_request is None else request.lora_request.message,
        prompt_adapter=None if request.prompt_adapter_request is None else request.prompt_adapter_request.message,
        patient=params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop,
        media=[] if request.media is None else request.media.prepared.media,
    )


def _pooling(request: EngineCoreRequest) -> Pooling | None:
    if (params := request.pooling) is None:
        return None
    activate = params.activate if request.chunking is None else False
    return Pooling(str.__str__(params.task or ""), int(params.dimensions or 0), activate, request.second)


def _count(logprobs: int | None) -> int:
    """As on the wire: -1 for none, a number larger than any vocabulary for all."""
    return -1 if logprobs is None else ALL_TOKENS if logprobs < 0 else int(min(logprobs, ALL_TOKENS))


def child_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of several: the first 8 bytes of BLAKE2b over both as signed 64-bit big-endian."""
    from hashlib import blake2b  # imported here because it is slow to import and rarely needed

    digest = blake2b(int(seed).to_bytes(8, "big", signed=True) + index.to_bytes(8, "big", signed=True), digest_size=8)
    return int.from_bytes(digest.digest(), "big", signed=True)
