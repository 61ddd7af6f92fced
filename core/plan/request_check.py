"""Whether a request can be served with this model and configuration: what a good frontend has checked before."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, get_args

import numpy as np

from ...ipc.errors import InvalidRequestError, NotSupportedError
from ...ipc.messages import AddRequest, ModelFacts, Sampling
from ...ipc.params import MAX_BAD_WORDS, MAX_BIAS, MAX_SEED
from ...ipc.structured import MAX_SPEC_BYTES, Kind
from ..features.adapters import Adapters
from .step import PROMPT_LOGITS

MAX_LOGPROBS = 24 << 20  # of all rows of a step: 8 bytes each, in one message of at most 256 MiB


class RequestCheck(NamedTuple):
    """Each method raises `MainspringError` for what is wrong."""

    model: ModelFacts
    most_tokens: int  # of a request, prompt and output
    pools: bool  # it gives vectors
    accepts_embeddings: bool
    adapters: Adapters
    max_logprobs: int
    max_num_seqs: int

    def check(self, message: AddRequest, embeds: np.ndarray | None) -> None:
        self._check_prompt(message)
        self._check_tokens(message)
        self._check_sampling(message.sampling)
        self._check_logprobs(message.sampling)
        if embeds is not None:
            self._check_embeds(message, embeds)
        done, most = len(message.output_token_ids), message.sampling.max_tokens
        if done >= most:
            raise InvalidRequestError(f"{done} output tokens are there already; max_tokens is {most}")

    def _check_prompt(self, message: AddRequest) -> None:
        ids, num_virtual, virtual = message.prompt_token_ids, 0, ""
        if not ids:
            raise InvalidRequestError("the prompt is empty")
        if (message.pooling is not None) != self.pools:
            wanted = "tokens" if message.pooling is None else f"{message.pooling.task:.80}"
            can = ", ".join(self.model.tasks) or "generate"
            raise InvalidRequestError(f"the request is for {wanted}, and this model can {can}")
        if message.pooling and message.output_token_ids:
            raise InvalidRequestError("a pooling request has no output tokens")
        if message.prompt_adapter is not None:
            self.adapters.check_prompt_adapter(message.prompt_adapter)
            num_virtual = message.prompt_adapter.num_virtual_tokens
            virtual = f" and {num_virtual} virtual ones before them"
            if message.prompt_embeds is not None or not self.accepts_embeddings:
                whose = "a prompt that is embeddings" if message.prompt_embeds is not None else "this model"
                raise NotSupportedError(f"a prompt adapter can't be used with {whose}")
        if num_virtual + len(ids) + len(message.output_token_ids) >= self.most_tokens:
            limit = self.model.max_model_len
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens{virtual}; max_model_len is {limit}, output included"
            )

    def _check_tokens(self, message: AddRequest) -> None:
        sampling, size = message.sampling, self.model.vocab_size
        named: dict[str, tuple[Collection[object], int]] = {
            "bad_words": (sampling.bad_words, MAX_BAD_WORDS),
            "stop_token_ids": (sampling.stop_token_ids, size),
            "allowed_token_ids": (sampling.allowed_token_ids, size),
            "logit_bias": (sampling.logit_bias, size),
        }
        for name, (given, most) in named.items():
            if len(given) > most:
                raise InvalidRequestError(f"{name} has {len(given)} entries; the limit is {most}")
        lists = [message.prompt_token_ids, message.output_token_ids, sampling.stop_token_ids]
        lists += [list(sampling.logit_bias), sampling.allowed_token_ids, *sampling.bad_words]
        for tokens in filter(None, lists):
            if not 0 <= min(tokens) <= max(tokens) < size:
                token = min(tokens) if min(tokens) < 0 else max(tokens)
                raise InvalidRequestError(f"token id {token} is outside the vocabulary of {size}")
        never = {tokens[0] for tokens in sampling.bad_words if len(tokens) == 1}
        if sampling.allowed_token_ids and never.issuperset(sampling.allowed_token_ids):
            raise InvalidRequestError("allowed_token_ids are all bad_words: no token is left")

    def _check_sampling(self, sampling: Sampling) -> None:
        if not (0 <= sampling.temperature < 3e38 and 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1):
            raise InvalidRequestError("temperature, top_p or min_p is out of range")
        sums = (sampling.presence_penalty, sampling.frequency_penalty, *sampling.logit_bias.values())
        small, large = 1 / MAX_BIAS, MAX_BIAS
        if not all(abs(value) <= large for value in sums) or not small <= sampling.repetition_penalty <= large:
            raise InvalidRequestError(f"a penalty or a logit_bias is not a number up to {large:g}")
        if sampling.grammar and (len(sampling.grammar) != 2 or sampling.grammar[0] not in get_args(Kind)):
            raise InvalidRequestError(f"a grammar is a kind and a text; kinds are {', '.join(get_args(Kind))}")
        if sampling.grammar and (length := len(sampling.grammar[1])) > MAX_SPEC_BYTES:
            raise InvalidRequestError(f"the grammar has {length} characters; the limit is {MAX_SPEC_BYTES}")
        integers = [sampling.max_tokens - 1, sampling.top_k, sampling.min_tokens]
        integers += [sampling.logprobs + 1, sampling.prompt_logprobs + 1]
        if not all(0 <= value < 2**62 for value in integers) or not -MAX_SEED - 1 <= sampling.seed <= MAX_SEED:
            raise InvalidRequestError("an integer of the sampling parameters is out of range")

    def _check_logprobs(self, sampling: Sampling) -> None:
        most, seats = self.max_logprobs, self.max_num_seqs
        for name, wanted in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if 0 <= most < wanted:
                raise InvalidRequestError(f"{name} asks for more than max_logprobs, {most}")
            if min(wanted, self.model.vocab_size) > MAX_LOGPROBS // (seats + PROMPT_LOGITS):
                raise InvalidRequestError(
                    f"{name} asks for more than a step's outputs can carry for all of max_num_seqs, {seats}: lower that"
                )

    def _check_embeds(self, message: AddRequest, embeds: np.ndarray) -> None:
        if message.sampling.prompt_logprobs >= 0:
            raise InvalidRequestError("prompt_logprobs need token ids, but the prompt is embeddings")
        if not self.accepts_embeddings:
            raise NotSupportedError(
                "this model needs more of a prompt than its embeddings: prompt_embeds can't be used"
            )
        shape = [len(message.prompt_token_ids), self.model.hidden_size]
        if list(embeds.shape) != shape:
            raise InvalidRequestError(f"prompt_embeds has shape {list(embeds.shape)}; it must be {shape}")
