"""Whether a model and a configuration can serve a request.

A frontend calls this before it sends a request, so that its caller gets the error as an exception. The core calls the
same code for every request that arrives, because there are clients in other languages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, get_args

from .adapters import PromptAdapterRequest
from .config import MOST_ITEMS, EngineConfig
from .errors import InvalidArgumentError, InvalidRequestError, NotSupportedError, shown
from .messages import Adapter, AddRequest, ModelFacts, Pooling, Sampling
from .params import CORE_RANGES, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIAS, MIN_TEMPERATURE
from .processor_names import unpacked
from .structured import MAX_SPEC_BYTES, TOKENS, Kind, trace_of

if TYPE_CHECKING:
    import numpy as np

_GRAMMARS = (*get_args(Kind), TOKENS)
_TOKEN_FIELDS = [name for name, kind in Sampling.__annotations__.items() if kind in (list[int], dict[int, float])]


class RequestCheck(NamedTuple):
    """The facts and limits that a request is checked against. Each method raises `MainspringError` for what is wrong.

    The last two fields are known to the core only: frontends leave them at their defaults.
    """

    model: ModelFacts
    config: EngineConfig = EngineConfig()
    accepts_embeddings: bool = True
    max_carried: int = 2**31 - 1  # log probabilities of one token that fit in a step's outputs

    def check(self, message: AddRequest, complete: bool = True) -> None:
        """Check all that can be checked without the state of the core. One that is not complete has no media."""
        self._check_task(message.pooling)
        self.check_adapters(message.lora, message.prompt_adapter)
        self._check_prompt(message)
        if complete and (message.media or self.model.encoder_input):
            self._check_media(message)
        self._check_tokens(message)
        self._check_sampling(message.sampling)
        self._check_logprobs(message.sampling)
        if message.prompt_embeds is not None:
            self._check_embeds(message, message.prompt_embeds.shape)
        done, most = len(message.output_token_ids), message.sampling.max_tokens
        if done >= most:
            raise InvalidRequestError(f"{done} output tokens are there already; max_tokens is {most}")

    def check_adapters(self, lora: object, prompt_adapter: object = None) -> None:
        """Check that the core serves adapters of the kinds that are given."""
        for name, given, option in (
            ("lora_request", lora, "enable_lora"),
            ("prompt_adapter_request", prompt_adapter, "enable_prompt_adapter"),
        ):
            if given is not None and not getattr(self.config.lora_config, option):
                raise NotSupportedError(f"{name} is given, but the core serves none: start it with {option}=True")

    def _check_task(self, pooling: Pooling | None) -> None:
        tasks = self.model.tasks
        can = f"this model can {', '.join(tasks) or 'generate'}"
        if pooling is None:
            if tasks:
                raise InvalidRequestError(
                    f"the request is to generate tokens, and {can}: use embed, encode or classify"
                )
        elif not tasks:
            task = f"{pooling.task:.80}" or "pool"
            raise InvalidRequestError(f"the request is to {task}, and {can}: load it with runner='pooling'")
        elif pooling.task not in tasks:
            raise InvalidRequestError(f"the task is {pooling.task:.80}, and {can}")

    def _check_prompt(self, message: AddRequest) -> None:
        num_tokens, num_done = len(message.prompt_token_ids), len(message.output_token_ids)
        pools, longest = message.pooling is not None, self.model.max_model_len
        if not num_tokens:
            raise InvalidRequestError("the prompt is empty; it must have at least one token")
        if pools and num_done:
            raise InvalidRequestError("a pooling request has no output tokens")
        limit, beside = longest, ""
        if message.prompt_adapter is not None:
            self._check_prompt_adapter(message.prompt_adapter, message.prompt_embeds is not None)
            num_virtual = message.prompt_adapter.num_virtual_tokens
            limit, beside = longest - num_virtual, f", of which the prompt adapter's virtual tokens take {num_virtual}"
            if limit < 1 + (not pools):
                raise InvalidRequestError(
                    f"the prompt adapter has {num_virtual} virtual tokens; max_model_len is {longest}, which leaves "
                    "none for a prompt"
                )
        done = f" and {num_done} output tokens" if num_done else ""
        has = f"the prompt has {num_tokens} tokens{done}; max_model_len is {longest}{beside}"
        if pools and num_tokens > limit:
            raise InvalidRequestError(f"{has}: raise that, or give truncate_prompt_tokens")
        if not pools and num_tokens + num_done >= limit:
            raise InvalidRequestError(f"{has}, so with at least one token of output it may have at most {limit - 1}")

    def _check_media(self, message: AddRequest) -> None:
        takes, limits = self.model.media, self.config.multimodal_config.limit_mm_per_prompt
        if not takes:
            raise InvalidRequestError("the prompt has media, but this model takes text only")
        if message.prompt_embeds or message.prompt_adapter:
            raise NotSupportedError("media can't be used with prompt_embeds or a prompt adapter")
        if self.model.lone_media and len(message.media) != 1:
            raise InvalidRequestError(
                f"the prompt has {len(message.media)} media items; a prompt of this model is a text, or one item"
            )
        if self.model.encoder_input and len(message.media) != 1:
            count, kinds = len(message.media), " or ".join(takes)
            raise InvalidRequestError(
                f"the prompt has {count} inputs for this model's encoder; it must have one {kinds}"
            )
        end, num_tokens = 0, len(message.prompt_token_ids)
        for item in message.media:
            if item.modality not in takes:
                raise InvalidRequestError(f"the prompt has {item.modality:.80}; this model takes {', '.join(takes)}")
            if len(item.digest) != 16:
                raise InvalidRequestError(f"a media item's digest has {len(item.digest)} bytes; it must have 16")
            if item.offset < end or item.length < 1 or item.offset + item.length > num_tokens:
                raise InvalidRequestError(
                    f"a media item has {shown(item.length)} tokens from {shown(item.offset)} on; the prompt has "
                    f"{num_tokens}, and the item before ends at {end}"
                )
            end = item.offset + item.length
        for modality, count in Counter(item.modality for item in message.media).items():
            if count > (most := limits.get(modality, MOST_ITEMS)):
                raise InvalidRequestError(f"the prompt has {count} of {modality}; limit_mm_per_prompt allows {most}")

    def _check_prompt_adapter(self, adapter: Adapter, is_embeds: bool) -> None:
        PromptAdapterRequest(adapter.name, adapter.number, adapter.path, adapter.num_virtual_tokens)
        most = self.config.lora_config.max_prompt_adapter_token
        if most and adapter.num_virtual_tokens > most:
            raise InvalidRequestError(
                f"a prompt adapter has {adapter.num_virtual_tokens} virtual tokens; max_prompt_adapter_token is {most}"
            )
        if is_embeds or not self.accepts_embeddings:
            whose = "a prompt that is embeddings" if is_embeds else "this model"
            raise NotSupportedError(f"a prompt adapter can't be used with {whose}")

    def _check_tokens(self, message: AddRequest) -> None:
        sampling, size = message.sampling, self.model.vocab_size
        entries: dict[str, tuple[Collection[object], int]] = {
            "bad_words": (sampling.bad_words, MAX_BAD_WORDS),
            **{name: (getattr(sampling, name), size) for name in _TOKEN_FIELDS},
        }
        for name, (given, most) in entries.items():
            if len(given) > most:
                raise InvalidRequestError(f"{name} has {len(given)} entries; the limit is {most}")
        self._check_vocabulary("prompt_token_ids", message.prompt_token_ids)
        self._check_vocabulary("output_token_ids", message.output_token_ids)
        for name in _TOKEN_FIELDS:
            self._check_vocabulary(name, getattr(sampling, name))
        if (total := sum(map(len, sampling.bad_words))) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(f"bad_words has {total} tokens; the limit is {MAX_BAD_WORD_TOKENS}")
        for tokens in sampling.bad_words:
            self._check_vocabulary("bad_words", tokens)
        never = {tokens[0] for tokens in sampling.bad_words if len(tokens) == 1}
        if sampling.min_tokens:
            never.update(sampling.stop_token_ids)
        if never and never.issuperset(sampling.allowed_token_ids or range(size)):
            raise InvalidRequestError(
                "all tokens that may come are bad_words, or stop tokens that min_tokens forbids: no token is left"
            )

    def _check_vocabulary(self, name: str, token_ids: Collection[int]) -> None:
        size = self.model.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
            wrong = next(token for token in token_ids if not 0 <= token < size)
            raise InvalidRequestError(f"{name} holds {shown(wrong)}; token ids of this model go from 0 to {size - 1}")

    def _check_sampling(self, sampling: Sampling) -> None:
        for name, (least, most) in CORE_RANGES.items():
            if not least <= (value := getattr(sampling, name)) <= most:  # NaN is in no range
                raise InvalidRequestError(f"{name} is {shown(value)}; it must be from {least:g} to {most:g}")
        if 0 < sampling.temperature < MIN_TEMPERATURE:  # logits divided by it might exceed what fp32 holds
            raise InvalidRequestError(
                f"temperature is {sampling.temperature}; it must be 0 or at least {MIN_TEMPERATURE}"
            )
        if not 0 < sampling.top_p <= 1:
            raise InvalidRequestError(f"top_p is {shown(sampling.top_p)}; it must be above 0 and at most 1")
        if not all(abs(bias) <= MAX_BIAS for bias in sampling.logit_bias.values()):
            raise InvalidRequestError(f"a value of logit_bias is not a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        unpacked(sampling.extra_args)
        if sampling.grammar and (len(sampling.grammar) != 2 or sampling.grammar[0] not in _GRAMMARS):
            raise InvalidRequestError(f"a grammar is a kind and a text; kinds are {', '.join(_GRAMMARS)}")
        if sampling.grammar and (length := len(sampling.grammar[1])) > MAX_SPEC_BYTES:
            raise InvalidRequestError(f"the grammar has {length} characters; the limit is {MAX_SPEC_BYTES}")
        if sampling.grammar and sampling.grammar[0] == TOKENS:
            try:
                self._check_vocabulary("trace_decode_token_ids", trace_of(sampling.grammar[1]))
            except InvalidRequestError:
                raise
            except InvalidArgumentError as error:
                raise InvalidRequestError(str(error)) from None

    def _check_logprobs(self, sampling: Sampling) -> None:
        most, size = self.config.model_config.max_logprobs, self.model.vocab_size
        for name, wanted in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if 0 <= most < wanted:
                given = wanted if wanted < size else "all"
                raise InvalidRequestError(
                    f"{name} asks for {given} log probabilities of each token; the limit of the engine is "
                    f"max_logprobs, {most}; -1 allows all"
                )
            if min(wanted, size) > self.max_carried:
                raise InvalidRequestError(
                    f"{name} asks for more than a step's outputs can carry for all of max_num_seqs, "
                    f"{self.config.scheduler_config.max_num_seqs}: lower that, or set enable_chunked_prefill"
                )

    def _check_embeds(self, message: AddRequest, shape: Sequence[int]) -> None:
        if message.sampling.prompt_logprobs >= 0:
            raise InvalidRequestError("prompt_logprobs needs a prompt of token ids, but this one is embeddings")
        if not self.accepts_embeddings:
            raise NotSupportedError(
                "this model needs more of a prompt than its embeddings: prompt_embeds can't be used"
            )
        hidden = self.model.hidden_size
        if list(shape) != [len(message.prompt_token_ids), hidden]:
            raise InvalidRequestError(
                f"prompt_embeds has shape {list(shape)}; it must be [{len(message.prompt_token_ids)}, {hidden}], where "
                f"the model's hidden size is {hidden}"
            )


def check_embeds_values(embeds: np.ndarray, dtype: str, model_dtype: str) -> None:
    """Check that a model of `model_dtype` can represent all values of prompt embeddings: infinite values and NaN would
    spread to the logits and to cached prefixes. Takes one pass over the array on the CPU, and no wait for the device.

    Raises:
        InvalidRequestError: there is a NaN, or a value out of range.
    """
    if dtype == "bfloat16":  # came as uint16: the upper half of a float32
        embeds = (embeds.astype("uint32") << 16).view("float32")
    most = 65504.0 if model_dtype == "float16" else 3.38e38  # the largest finite number; of bfloat16 and float32
    if embeds.size and not (-most <= float(embeds.min()) and float(embeds.max()) <= most):  # NaN is in no range
        raise InvalidRequestError(f"prompt_embeds has a NaN, or a value out of the range of {model_dtype}")
