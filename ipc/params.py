"""What a user asks of one request, range-checked with messages that name the field, the value and the limit."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from .errors import InvalidArgumentError, suggests_names

MAX_SEED = 2**63 - 1


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
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None  # none: 64 random bits, fixed when the request is added
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # none: up to max_model_len
    min_tokens: int = 0
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    cache_salt: str | None = None  # requests share cached prefixes only with requests of the same salt

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.validate()

    def clone(self) -> SamplingParams:
        """A copy that shares nothing mutable."""
        return copy.deepcopy(self)

    def validate(self) -> None:
        """Check every field again: fields may have been assigned since construction."""
        _integer("n", self.n, 1, 16384)
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
            raise InvalidArgumentError(f"min_tokens is {self.min_tokens} but max_tokens is only {self.max_tokens}")
        for text in _listed("stop", self.stop):
            if not isinstance(text, str) or not text:
                raise InvalidArgumentError(f"stop holds {text!r}; every stop string must be a non-empty str")
        for token in _listed("stop_token_ids", self.stop_token_ids):
            _integer("stop_token_ids", token, 0, None)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.stop and not self.detokenize:
            raise InvalidArgumentError("stop strings need detokenize=True; use stop_token_ids without it")
        if self.output_kind not in tuple(RequestOutputKind):
            raise InvalidArgumentError(f"output_kind is {self.output_kind!r}; it must be a RequestOutputKind")
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise InvalidArgumentError(f"cache_salt is {self.cache_salt!r}; it must be a non-empty str")


_FLAGS = [field.name for field in fields(SamplingParams) if field.type == "bool"]


def _listed(name: str, value: Any) -> Iterable[Any]:
    if not isinstance(value, (list, tuple)):
        raise InvalidArgumentError(f"{name} is {value!r}; it must be a list")
    return value


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"{name} is {value!r}; it must be an int")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidArgumentError(f"{name} is {value}; it must be {limit}")


def _number(name: str, value: Any, low: float, high: float | None, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgumentError(f"{name} is {value!r}; it must be a number")
    inside = math.isfinite(value) and (value > low if low_open else value >= low) and (high is None or value <= high)
    if not inside:
        least = f"above {low:g}" if low_open else f"at least {low:g}"
        limit = least if high is None else f"{least} and at most {high:g}"
        raise InvalidArgumentError(f"{name} is {value}; it must be {limit}")
