"""Guesses at a request's next tokens, which one step of the model then checks all at once.

A guess is accepted if, and only if, it is the token that the request's own keyed sampler chooses there, so the output
is the same with guesses and without. Guesses that were wrong leave nothing behind: their keys and values are written
over, for a token's place in the cache follows from its position.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from ..ipc.config import SpeculativeConfig
from .request import Request
from .step import Step

MOST_ROWS = 32  # tokens of a step up to which it is filled with guesses: past that a row costs what it may bring
REST = 16  # tokens without a guess, after several that were wrong
MOST_LOGPROBS = 32  # of a request that speculates: a step brings several times as many of them


class Speculation(NamedTuple):
    """How guesses are made. `guess(tokens, count)` gives at most `count` (int32) that may follow `tokens` (int32)."""

    most: int  # guesses of a request in a step
    guess: Callable[[np.ndarray, int], np.ndarray]


def speculation_of(config: SpeculativeConfig | None) -> Speculation | None:
    """What the configuration asks for."""
    if config is None:
        return None
    look = partial(look_up, longest=config.prompt_lookup_max, shortest=config.prompt_lookup_min)
    return Speculation(config.num_speculative_tokens, look if config.method == "ngram" else leave_room)


def look_up(tokens: np.ndarray, count: int, longest: int, shortest: int) -> np.ndarray:
    """What followed the last tokens where they stood before: `longest` of them or as many as were found, at least
    `shortest`; the latest such place. What it then runs into are the guesses themselves."""
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    length = 1
    while ends.size and length < longest:
        more = ends[np.searchsorted(ends, length) :]
        more = more[tokens[more - length] == tokens[last - length]]
        if not more.size:
            break
        ends, length = more, length + 1
    if not ends.size or length < shortest:
        return tokens[:0]
    found: np.ndarray = np.resize(tokens[ends[-1] + 1 :], count)
    return found


def leave_room(tokens: np.ndarray, count: int) -> np.ndarray:
    """Places for the guesses of a draft model, which writes them into the step (draft.py)."""
    return np.zeros(count, np.int32)


def may_speculate(request: Request) -> bool:
    """Whether several of its tokens can be chosen at once: what changes its logits must not depend on the tokens
    before, and the prompt must be tokens."""
    stateless = not (request.looks_back or request.is_penalised or request.embeds is not None)
    return stateless and request.sampling.logprobs <= MOST_LOGPROBS


def standing(step: Step, row: np.ndarray, back: np.ndarray, tokens: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Which of the chosen `tokens` stand, bool ``[choices]``: of each row those up to the first that is not what was
    guessed, or that `stops` the request. `row` and `back` are the step's `choices`."""
    guesses = np.append(step.token_ids, -1)[np.cumsum(step.counts)[row] - back]
    last = (back == 0) | (tokens != guesses) | stops
    before = np.cumsum(last) - last
    found: np.ndarray = before == before[np.searchsorted(row, row)]
    return found
