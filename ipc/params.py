"""The parameters of a request. Errors of the range checks name the field, the value and the limit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, ClassVar, Self, TypeGuard

from .errors import Accepted, InvalidArgumentError, check_accepted, shown, suggests_names
from .structured import StructuredOutputsParams

MAX_SEED = 2**63 - 1
MAX_BAD_WORDS = 4096  # words after tokenization, because each step compares all of them with the output
MAX_BAD_WORD_TOKENS = 65_536  # tokens of all bad words of a request
MAX_STOPS = 1024  # stop strings of a request, because each new text is compared with all of them
MAX_STOP_LENGTH = 4096  # characters
MIN_TEMPERATURE = 0.01  # lower ones, except 0, are raised to it, as in vLLM
MAX_COMPLETIONS = 16384  # completions of one request
MAX_BIAS = 1e30  # largest absolute bias or penalty: sums of several stay finite in fp32


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
    best_of: int | None = None  # number to compute; the `n` with the largest cumulative_logprob are returned
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
    bad_words: list[str] | None = None  # never generated, neither with nor without a space before them
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # none: up to max_model_len
    min_tokens: int = 0
    logprobs: int | None = None  # number of likeliest tokens to report beside each token; -1: all
    prompt_logprobs: int | None = None  # likewise for the prompt's tokens, except the first
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # number of last prompt tokens to keep; -1: as many as fit
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # tokens between two outputs, after the first; none: the engine's
    logit_bias: dict[int, float] | None = None  # token id → number added to its logit
    allowed_token_ids: list[int] | None = None  # only these are chosen
    structured_outputs: StructuredOutputsParams | None = None  # the form that the output must have
    guided_decoding: StructuredOutputsParams | None = None  # its older name
    logits_processors: list[Callable[..., Any]] | None = None  # see core/worker/logit_rules.py
    extra_args: dict[str, Any] | None = None  # for the classes of the engine's logits_processors: plain data
    cache_salt: str | None = None  # requests share cached prefixes only with requests of the same salt
    use_beam_search: bool = False  # `best_of` beams (or `n`), by sum of log probabilities; see beam_search.py
    length_penalty: float = 1.0  # of beams: the sum is divided by the length to this power
    early_stopping: bool | str = False  # of beams: end with the first `best_of` that have ended; "never" is False
    trace_decode_token_ids: list[int] | None = None  # the output: these tokens, with the log probabilities they have

    _accepted: ClassVar[Accepted] = {  # fields of vLLM's
        "flat_logprobs": ((True, False), "another form of log probabilities"),  # theirs reads like a list of dicts, too
        "skip_clone": ((True, False), "sharing parameters"),  # which is safe: parameters are never changed
        "logprob_token_ids": ((), "log probabilities of chosen tokens; logprobs=-1 gives all"),
        "prompt_logprob_start": ((0,), "log probabilities of a part of the prompt"),
        "prompt_logprob_token_ids": ((), "log probabilities of chosen tokens; prompt_logprobs=-1 gives all"),
        "repetition_detection": ((), "ending a request that repeats itself"),
        "routed_experts_prompt_start": ((0,), "leaving the first rows of routed_experts out; cut the array"),
        "skip_reading_prefix_cache": ((False,), "computing a cached prefix again; give a cache_salt of its own"),
        "thinking_token_budget": ((-1,), "limits of a model's reasoning"),
        "watermarking": ((False,), "watermarks"),
    }

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.seed = None if self.seed == -1 else self.seed  # as vLLM takes it
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        if isinstance(self.logit_bias, dict):
            self.logit_bias = _by_token(self.logit_bias)
        self.validate()
        if self.temperature == 0:  # as in vLLM, greedy: nothing is left out
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """vLLM's second constructor, by keywords: None is the default, except of `max_tokens`, and a logit bias is at
        most 100 in size."""
        found = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
        params = cls(**found)
        if params.logit_bias:
            params.logit_bias = {token: min(100.0, max(-100.0, bias)) for token, bias in params.logit_bias.items()}
        return params

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Stop at the end-of-sequence ids of a generation config too, but for `eos_token_id`, at which a request ends
        anyway. `ignore_eos` leaves all of them out. An engine does this with its model's."""
        found = generation_config.get("eos_token_id")
        eos = {found} if isinstance(found, int) else set(found or ())
        if not self.ignore_eos and (more := eos - {eos_token_id}):
            self.stop_token_ids = sorted(more.union(self.stop_token_ids or ()))

    @property
    def width(self) -> int:
        """The number of completions to compute."""
        return self.best_of or self.n

    def __copy__(self) -> Self:
        found = object.__new__(type(self))  # a quarter of the time of the usual way, which is for any class
        vars(found).update(vars(self))
        return found

    def clone(self) -> SamplingParams:
        """A copy that shares nothing mutable but `logits_processors` and `extra_args`."""
        found = copy.copy(self)
        for name, value in vars(self).items():
            if name == "logits_processors":
                setattr(found, name, copy.copy(value))
            elif value is not None and type(value) not in _PLAIN and name != "extra_args":
                setattr(found, name, copy.deepcopy(value))
        return found

    def validate(self) -> None:
        """Check every field again: fields may have been assigned since construction."""
        check_accepted(vars(self), self._accepted)
        for name, limits in _INTEGERS.items():
            if (value := getattr(self, name)) is not None or name in ("n", "top_k", "min_tokens"):
                check_integer(name, value, *limits)
        for name, (low, high) in _NUMBERS.items():
            check_number(name, getattr(self, name), low, high, low_open=name == "top_p")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(f"{name} is {shown(getattr(self, name))}; it must be True or False")
        self._validate_lists()
        if self.best_of is not None:
            check_integer("best_of", self.best_of, self.n, MAX_COMPLETIONS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgumentError(
                f"min_tokens is {shown(self.min_tokens)} but max_tokens is only {self.max_tokens}"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidArgumentError("truncate_prompt_tokens is 0; it must be at least 1, or -1 for as many as fit")
        for name in ("structured_outputs", "guided_decoding"):
            if (given := getattr(self, name)) is not None:
                if not isinstance(given, StructuredOutputsParams):
                    raise InvalidArgumentError(f"{name} is {shown(given)}; it must be a StructuredOutputsParams")
                given.validate()
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise InvalidArgumentError("guided_decoding is the older name of structured_outputs: give one of them")
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise InvalidArgumentError(f"extra_args is {shown(self.extra_args)}; it must be a dict")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidArgumentError(
                f"early_stopping is {shown(self.early_stopping)}; it must be True, False or 'never'"
            )
        if self.stop and not self.detokenize:
            raise InvalidArgumentError("stop strings need detokenize=True; use stop_token_ids without it")
        if self.output_kind not in tuple(RequestOutputKind):
            raise InvalidArgumentError(f"output_kind is {shown(self.output_kind)}; it must be a RequestOutputKind")
        if self.output_kind == RequestOutputKind.DELTA and (self.use_beam_search or self.width > self.n):
            raise InvalidArgumentError(
                "output_kind is DELTA, but the best completions are known at the end: use CUMULATIVE or FINAL_ONLY"
            )
        if self.trace_decode_token_ids is not None:
            self._validate_trace()
        if self.use_beam_search:
            self._validate_beams()
        if self.cache_salt is not None and (not is_text(self.cache_salt) or not self.cache_salt):
            raise InvalidArgumentError(f"cache_salt is {shown(self.cache_salt)}; it must be a non-empty str")

    def _validate_lists(self) -> None:
        for name, what in (("stop", "stop string"), ("bad_words", "bad word")):
            for text in _listed(name, getattr(self, name)):
                if not is_text(text) or not (text if name == "stop" else text.strip()):
                    raise InvalidArgumentError(f"{name} holds {shown(text)}; every {what} must be a non-empty str")
        for name, most in (("stop", MAX_STOPS), ("bad_words", MAX_BAD_WORDS // 2)):
            if (count := len(getattr(self, name) or ())) > most:
                raise InvalidArgumentError(f"{name} has {count} entries; the limit is {most}")
        if (longest := max(map(len, self.stop or ()), default=0)) > MAX_STOP_LENGTH:
            raise InvalidArgumentError(f"stop holds a text of {longest} characters; the limit is {MAX_STOP_LENGTH}")
        for name in ("stop_token_ids", "allowed_token_ids", "trace_decode_token_ids"):
            for token in _listed(name, getattr(self, name)):
                check_integer(name, token, 0, None)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidArgumentError("allowed_token_ids is empty; no token could be chosen")
        for processor in _listed("logits_processors", self.logits_processors):
            if not callable(processor):
                raise InvalidArgumentError(f"logits_processors holds {shown(processor)}; each must be callable")
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict):
            raise InvalidArgumentError(f"logit_bias is {shown(self.logit_bias)}; it must be a dict of token ids")
        for token, bias in (self.logit_bias or {}).items():
            check_integer("a token of logit_bias", token, 0, None)
            check_number("a value of logit_bias", bias, -MAX_BIAS, MAX_BIAS)

    def _validate_trace(self) -> None:
        if not self.trace_decode_token_ids:
            raise InvalidArgumentError("trace_decode_token_ids is empty; it must have at least one token id")
        for name in (
            "structured_outputs",
            "guided_decoding",
            "bad_words",
            "prompt_logprobs",
            "use_beam_search",
            "allowed_token_ids",
        ):
            if getattr(self, name) not in (None, [], False):
                raise InvalidArgumentError(f"{name} is given with trace_decode_token_ids; give one of them")
        if self.width != 1:
            raise InvalidArgumentError(f"n is {self.width} with trace_decode_token_ids, which has one output")

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
    """The parameters of `LLM.beam_search`, which finds the `beam_width` continuations with the largest score.

    See `SamplingParams` for the fields.

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
        check_integer("beam_width", self.beam_width, 1, MAX_COMPLETIONS)
        same = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "beam_width"}
        kind = RequestOutputKind.FINAL_ONLY
        return SamplingParams(n=self.beam_width, use_beam_search=True, logprobs=0, output_kind=kind, **same)


_INTEGERS: dict[str, tuple[int, int | None]] = {  # field → smallest and largest value a user may set
    "n": (1, MAX_COMPLETIONS),
    "top_k": (-1, 2**31 - 1),
    "seed": (-MAX_SEED - 1, MAX_SEED),
    "max_tokens": (1, None),
    "min_tokens": (0, None),
    "logprobs": (-1, None),
    "prompt_logprobs": (-1, None),
    "truncate_prompt_tokens": (-1, None),
    "stream_interval": (1, None),
}
_NUMBERS: dict[str, tuple[float, float | None]] = {
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1 / MAX_BIAS, MAX_BIAS),
    "temperature": (0.0, None),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "length_penalty": (-10.0, 10.0),
}
CORE_RANGES: dict[str, tuple[float, float]] = {  # field of `messages.Sampling` → what any client may send
    "max_tokens": (1, 2**62),
    "seed": (-MAX_SEED - 1, MAX_SEED),
    "temperature": (0.0, 3e38),  # what fp32 holds
    "top_k": (0, 2**62),
    "min_p": (0.0, 1.0),
    "min_tokens": (0, 2**62),
    "presence_penalty": (-MAX_BIAS, MAX_BIAS),
    "frequency_penalty": (-MAX_BIAS, MAX_BIAS),
    "repetition_penalty": (1 / MAX_BIAS, MAX_BIAS),
    "logprobs": (-1, 2**62),
    "prompt_logprobs": (-1, 2**62),
}
_PLAIN = frozenset({int, float, str, bool, RequestOutputKind})  # types of values that can't be changed
_FLAGS = [field.name for field in fields(SamplingParams) if field.type == "bool"]


def is_text(value: Any) -> TypeGuard[str]:
    """Whether `value` is a str that UTF-8 can encode, which a lone surrogate prevents."""
    try:
        return isinstance(value, str) and len(value.encode()) >= 0
    except UnicodeEncodeError:
        return False


def _by_token(bias: dict[Any, Any]) -> dict[Any, Any]:
    """Convert keys that are strings of digits to ints, because JSON objects have only string keys."""
    found = {int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key: bias[key] for key in bias}
    if len(found) < len(bias):
        raise InvalidArgumentError("logit_bias names a token twice, as a str and as an int")
    return found


def _listed(name: str, value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be a list")
    return value


def check_integer(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be an int")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be {limit}")


def check_number(name: str, value: Any, low: float, high: float | None, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be a number")
    finite = -sys.float_info.max <= value <= sys.float_info.max  # no int too large for a float either
    inside = finite and (value > low if low_open else value >= low) and (high is None or value <= high)
    if not inside:
        least = f"above {low:g}" if low_open else f"at least {low:g}"
        limit = least if high is None else f"{least} and at most {high:g}"
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be {limit}")
