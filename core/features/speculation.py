"""Guesses at a request's next tokens, which one step of the model then checks all at once.

A guess is accepted if, and only if, it is the token that the request's own keyed sampler chooses there, so the output
is the same with guesses and without. Guesses that were wrong leave nothing behind: their keys and values are written
over, for a token's place in the cache follows from its position.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...ipc.config import SpeculativeConfig
from ..plan.feature import Feature
from ..plan.request import Request
from ..plan.step import IN_FLIGHT, MOST_GUESS_ROWS, StepPlan, StepResult, with_guesses

REST = 16  # tokens without a guess, after several that were wrong


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
    """Places for the guesses of a draft model, which the worker makes (draft.py)."""
    return np.zeros(count, np.int32)


def accepted(plan: StepPlan, result: StepResult, row: np.ndarray, back: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Which of the chosen tokens count, bool ``[choices]``: of each row those up to the first that is not what was
    guessed, or that `stops` the request. `row` and `back` are the plan's `choices`."""
    token_ids = plan.token_ids if result.guesses is None else with_guesses(plan, result.guesses)
    guesses = np.append(token_ids, -1)[np.cumsum(plan.counts)[row] - back]
    last = (back == 0) | (result.tokens != guesses) | stops
    before = np.cumsum(last) - last
    found: np.ndarray = before == before[np.searchsorted(row, row)]
    return found


class Guesses(Feature):
    """Puts guesses into the rows of running requests, behind their own tokens.

    A request with guesses in flight computes nothing until they are checked. Where a step has room for guesses, a
    request that is to make some waits for its own tokens in flight too, because guesses follow known tokens.

    Args:
        roll_back: how far the layers' memory goes back after a rejection, see `CacheManager.roll_back`.
    """

    def __init__(
        self, speculation: Speculation, roll_back: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    ) -> None:
        self._speculation, self._roll_back = speculation, roll_back
        self._num_made = self._num_right = 0

    def got_slot(self, request: Request) -> None:
        if request.may_speculate:
            self._rows.trust[request.slot], self._rows.guess_from[request.slot] = self._speculation.most, 0

    def cap(self, slots: np.ndarray, need: np.ndarray) -> None:
        rows = self._rows
        waits: np.ndarray = rows.guessed[slots] > 0
        if np.count_nonzero(rows.alive) < MOST_GUESS_ROWS:
            waits |= rows.guess_from[slots] <= rows.num_tokens[slots]
        if waits.any():
            need[waits & rows.last_in_flight(slots)] = 0

    def fill(self, slots: np.ndarray, budget: int, extend: Callable[[int, int], bool]) -> None:
        """Fill what is left of a small step with guesses of requests whose tokens are all known, for this step alone,
        as far as there are free blocks."""
        rows = self._rows
        room = min(budget, MOST_GUESS_ROWS) - int(rows.granted.sum())
        if room <= 0:
            return
        known = rows.tokens[slots, rows.num_tokens[slots] - 1] != IN_FLIGHT
        ready = known & ~rows.silent[slots] & (rows.granted[slots] == 1)
        ready &= rows.num_computed[slots] + 1 == rows.num_tokens[slots]
        able = slots[ready & (rows.guess_from[slots] <= rows.num_tokens[slots])].tolist()
        share = -(-room // max(1, len(able)))
        for slot in able:
            start = int(rows.num_tokens[slot])
            count = min(int(rows.trust[slot]), share, room, int(rows.max_len[slot]) - 1 - start)
            guess = self._speculation.guess(rows.tokens[slot, :start], count) if count > 0 else ()
            end = start + len(guess)
            if end > rows.reach[slot] and not extend(slot, end):
                end = int(rows.reach[slot])
            count = end - start
            if count > 0:
                rows.tokens[slot, start:end] = guess[:count]
                rows.num_tokens[slot], rows.guessed[slot] = end, count
                rows.granted[slot] += count
                room -= count

    def accept(self, plan: StepPlan, result: StepResult, keep: np.ndarray, ends: np.ndarray, stops: np.ndarray) -> None:
        """A request whose guesses were wrong makes fewer guesses from now on."""
        row, back = plan.choices()
        keep &= accepted(plan, result, row, back, stops)
        brought = np.bincount(row[keep], minlength=len(plan.slots))
        rows, guessing = self._rows, np.flatnonzero((plan.guessed > 0) & (brought > 0))
        slots, right = plan.slots[guessing].astype(np.int64), brought[guessing] - 1
        ends[guessing] += right - plan.guessed[guessing]
        rows.num_tokens[slots], rows.guessed[slots] = ends[guessing] + 1, 0
        rejected = guessing[right < plan.guessed[guessing]]
        ends[rejected] = self._roll_back(plan.slots[rejected], plan.starts[rejected], ends[rejected])
        rows.num_computed[slots] = ends[guessing]
        trust = np.minimum(np.maximum(rows.trust[slots] // 2, 2 * right), self._speculation.most)
        rows.guess_from[slots[trust == 0]] = rows.num_tokens[slots[trust == 0]] + REST
        rows.trust[slots] = np.maximum(trust, 1)
        self._num_made += int(plan.guessed[guessing].sum())
        self._num_right += int(right.sum())

    def stats(self) -> dict[str, Any]:
        return {"draft_tokens": self._num_made, "accepted_tokens": self._num_right}
