"""What a user asks of one request, range-checked with messages that name the field, the value and the limit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, TypeGuard

from .errors import InvalidArgumentError, shown, suggests_names
from .structured import StructuredOutputsParams

MAX_SEED = 2**63 - 1
MAX_BAD_WORDS = 4096  # all are looked through for each token
MAX_COMPLETIONS = 16384
MAX_BIAS = 1e30  # of a bias or penalty, either way: far inside what fp32 holds


class RequestOutputKind(IntEnum):
    """How much of a completion each `RequestOutput` repeats."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output, at the end


@suggests_names
@dataclass
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Each token is ``argmax(logit / temperature + Gumbel(seed, position, token id))`` over the tokens that top-k, top-p
    and min-p leave, so the same seed gives the same tokens in any batch. `temperature` 0 is greedy.

    Raises:
        InvalidArgumentError: a value is out of range. The message names it and the limit.
        UnknownArgumentError: no such field.
    """

    n: int = 1
    best_of: int | None = None  # so many are computed, and the `n` of the largest cumulative_logprob given back
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None  # none: 64 random bits, fixed when the request is added
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None  # never written; each also with a space before it
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # none: up to max_model_len
    min_tokens: int = 0
    logprobs: int | None = None  # of each token and of the so many likeliest ones; -1: of all
    prompt_logprobs: int | None = None  # likewise, of the prompt's tokens but the first
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # keep so many of the prompt's last tokens; -1: as many as fit
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # an output for the first token, then every so many; none: the engine's
    logit_bias: dict[int, float] | None = None  # token id → what is added to its logit
    allowed_token_ids: list[int] | None = None  # no others are chosen
    structured_outputs: StructuredOutputsParams | None = None  # the form that the output must have
    guided_decoding: StructuredOutputsParams | None = None  # its older name
    logits_processors: list[Callable[..., Any]] | None = None  # see core/work/logit_rules.py
    extra_args: dict[str, Any] | None = None  # for extensions; without effect here
    cache_salt: str | None = None  # requests share cached prefixes only with requests of the same salt
    use_beam_search: bool = False  # `best_of` beams (or `n`), by sum of log probabilities; see beam_search.py
    length_penalty: float = 1.0  # of beams: the sum is divided by the length to this power
    early_stopping: bool | str = False  # of beams: end with the first `best_of` that have ended; "never" is False

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.seed = None if self.seed == -1 else self.seed  # as vLLM takes it
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        if isinstance(self.logit_bias, dict):
            self.logit_bias = _by_token(self.logit_bias)
        self.validate()

    @property
    def width(self) -> int:
        """How many completions are computed."""
        return self.best_of or self.n

    def clone(self) -> SamplingParams:
        """A copy that shares nothing mutable but `logits_processors` and `extra_args`."""
        shared = (*(self.logits_processors or ()), self.extra_args)
        return copy.deepcopy(self, {id(one): one for one in shared})

    def validate(self) -> None:
        """Check every field again: fields may have been assigned since construction."""
        _integer("n", self.n, 1, MAX_COMPLETIONS)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_COMPLETIONS)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 1 / MAX_BIAS, MAX_BIAS)
        _number("temperature", self.temperature, 0.0, None)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgumentError(
                f"min_tokens is {shown(self.min_tokens)} but max_tokens is only {self.max_tokens}"
            )
        for text in _listed("stop", self.stop):
            if not is_text(text) or not text:
                raise InvalidArgumentError(f"stop holds {shown(text)}; every stop string must be a non-empty str")
        for token in _listed("stop_token_ids", self.stop_token_ids):
            _integer("stop_token_ids", token, 0, None)
        for text in _listed("bad_words", [] if self.bad_words is None else self.bad_words):
            if not is_text(text) or not text.strip():
                raise InvalidArgumentError(f"bad_words holds {shown(text)}; every bad word must be a non-empty str")
        if len(self.bad_words or ()) > MAX_BAD_WORDS // 2:
            raise InvalidArgumentError(
                f"bad_words has {len(self.bad_words or ())} entries; the limit is {MAX_BAD_WORDS // 2}"
            )
        for name in ("logprobs", "prompt_logprobs", "truncate_prompt_tokens", "stream_interval"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), *_OPTIONAL[name])
        if self.truncate_prompt_tokens == 0:
            raise InvalidArgumentError("truncate_prompt_tokens is 0; it must be at least 1, or -1 for as many as fit")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise InvalidArgumentError(f"logit_bias is {shown(self.logit_bias)}; it must be a dict of token ids")
            for token, bias in self.logit_bias.items():
                _integer("a token of logit_bias", token, 0, None)
                _number("a value of logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if self.allowed_token_ids is not None:
            for token in _listed("allowed_token_ids", self.allowed_token_ids):
                _integer("allowed_token_ids", token, 0, None)
            if not self.allowed_token_ids:
                raise InvalidArgumentError("allowed_token_ids is empty; no token could be chosen")
        for processor in _listed("logits_processors", [] if self.logits_processors is None else self.logits_processors):
            if not callable(processor):
                raise InvalidArgumentError(f"logits_processors holds {shown(processor)}; each must be callable")
        for name in ("structured_outputs", "guided_decoding"):
            if (given := getattr(self, name)) is not None:
                if not isinstance(given, StructuredOutputsParams):
                    raise InvalidArgumentError(f"{name} is {shown(given)}; it must be a StructuredOutputsParams")
                given.validate()
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise InvalidArgumentError("guided_decoding is the older name of structured_outputs: give one of them")
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise InvalidArgumentError(f"extra_args is {shown(self.extra_args)}; it must be a dict")
        _number("length_penalty", self.length_penalty, -10.0, 10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidArgumentError(
                f"early_stopping is {shown(self.early_stopping)}; it must be True, False or 'never'"
            )
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(f"{name} is {shown(getattr(self, name))}; it must be True or False")
        if self.stop and not self.detokenize:
            raise InvalidArgumentError("stop strings need detokenize=True; use stop_token_ids without it")
        if self.output_kind not in tuple(RequestOutputKind):
            raise InvalidArgumentError(f"output_kind is {shown(self.output_kind)}; it must be a RequestOutputKind")
        if self.output_kind == RequestOutputKind.DELTA and (self.use_beam_search or self.width > self.n):
            raise InvalidArgumentError(
                "output_kind is DELTA, but the best completions are known at the end: use CUMULATIVE or FINAL_ONLY"
            )
        if self.use_beam_search:
            self._validate_beams()
        if self.cache_salt is not None and (not is_text(self.cache_salt) or not self.cache_salt):
            raise InvalidArgumentError(f"cache_salt is {shown(self.cache_salt)}; it must be a non-empty str")

    def _validate_beams(self) -> None:
        for name, value, needed in (
            ("temperature", self.temperature, 0.0),
            ("top_p", self.top_p, 1.0),
            ("top_k", max(self.top_k, 0), 0),
            ("min_p", self.min_p, 0.0),
            ("stop", self.stop, []),
            ("prompt_logprobs", self.prompt_logprobs, None),
            ("min_tokens", self.min_tokens, 0),
            ("presence_penalty", self.presence_penalty, 0.0),
            ("frequency_penalty", self.frequency_penalty, 0.0),
            ("repetition_penalty", self.repetition_penalty, 1.0),
            ("logit_bias", self.logit_bias or None, None),
            ("allowed_token_ids", self.allowed_token_ids, None),
            ("bad_words", self.bad_words or [], []),
            ("structured_outputs", self.structured_outputs or self.guided_decoding, None),
            ("logits_processors", self.logits_processors or [], []),
        ):
            if value != needed:
                raise InvalidArgumentError(f"{name} is {shown(value)}; with use_beam_search it must be {needed!r}")


@suggests_names
@dataclass
class BeamSearchParams:
    """What `LLM.beam_search` looks for: the `beam_width` continuations of the largest score, see `SamplingParams`.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # beams are ranked by the model's own probabilities: only 0 is accepted
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        _integer("beam_width", self.beam_width, 1, MAX_COMPLETIONS)
        same = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "beam_width"}
        kind = RequestOutputKind.FINAL_ONLY
        return SamplingParams(n=self.beam_width, use_beam_search=True, logprobs=0, output_kind=kind, **same)


_OPTIONAL: dict[str, tuple[int, int | None]] = {  # limits
    "logprobs": (-1, None),
    "prompt_logprobs": (-1, None),
    "truncate_prompt_tokens": (-1, None),
    "stream_interval": (1, None),
}
_FLAGS = [field.name for field in fields(SamplingParams) if field.type == "bool"]


def is_text(value: Any) -> TypeGuard[str]:
    """Whether it is a str that can be sent: one without half a surrogate pair."""
    try:
        return isinstance(value, str) and len(value.encode()) >= 0
    except UnicodeEncodeError:
        return False


def _by_token(bias: dict[Any, Any]) -> dict[Any, Any]:
    """With ints for keys of digits, which is what JSON makes of them."""
    found = {int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key: bias[key] for key in bias}
    if len(found) < len(bias):
        raise InvalidArgumentError("logit_bias names a token twice, as a str and as an int")
    return found


def _listed(name: str, value: Any) -> Iterable[Any]:
    if not isinstance(value, (list, tuple)):
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be a list")
    return value


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be an int")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be {limit}")


def _number(name: str, value: Any, low: float, high: float | None, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be a number")
    finite = -sys.float_info.max <= value <= sys.float_info.max  # no int too large for a float either
    inside = finite and (value > low if low_open else value >= low) and (high is None or value <= high)
    if not inside:
        least = f"above {low:g}" if low_open else f"at least {low:g}"
        limit = least if high is None else f"{least} and at most {high:g}"
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be {limit}")
