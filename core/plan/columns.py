"""Running requests as columns indexed by slot: what a step needs of them, without touching an object of any."""

from __future__ import annotations

import numpy as np

from .request import Request
from .step import IN_FLIGHT

NO_STOP, MANY_STOPS = -1, -2  # in the column of stop tokens
NEVER = 2**62  # more tokens than a request has


class Columns:
    """One entry for each of `slots` slots; those of slots that nobody has mean nothing."""

    def __init__(self, slots: int, max_model_len: int) -> None:
        self.tokens = np.zeros((slots, max_model_len), np.int32)
        self.num_tokens = np.zeros(slots, np.int64)  # known ones and placeholders
        self.num_computed = np.zeros(slots, np.int64)  # launched, in steps in flight too
        self.num_published = np.zeros(slots, np.int64)  # tokens whose blocks are in the prefix cache
        self.reach = np.zeros(slots, np.int64)  # tokens the block tables have room for
        self.max_len = np.zeros(slots, np.int64)
        self.prompt_len = np.zeros(slots, np.int64)
        self.stop = np.zeros(slots, np.int64)  # the one stop token, NO_STOP or MANY_STOPS
        self.handle = np.zeros(slots, np.int64)
        self.frontend = np.zeros(slots, np.int64)
        self.key = np.zeros(slots, np.uint64)
        self.alive = np.zeros(slots, bool)
        self.silent = np.zeros(slots, bool)  # no token of it was sent yet
        self.held_up = np.zeros(slots, bool)  # in no step with others: without credit, or on trial
        self.granted = np.zeros(slots, np.int64)  # tokens to compute in the step being made
        self.looks_back = np.zeros(slots, bool)  # computes nothing while a token of it is in flight
        self.scored = np.zeros(slots, bool)  # rows of its prompt have logits, see `Request.told`
        self.guessed = np.zeros(slots, np.int64)  # of the tokens granted, or in flight; then it waits
        self.trust = np.zeros(slots, np.int64)  # most to guess at once, at least 1
        self.guess_from = np.full(slots, NEVER)  # number of tokens at which it makes guesses, and waits for its tokens

    def seat(self, request: Request, cached: int) -> None:
        """Fill in the row of a request that got its slot, and has so many tokens `cached`."""
        slot, n, stops = request.slot, len(request.tokens), request.stop_tokens
        self.tokens[slot, :n] = request.tokens
        self.num_tokens[slot] = n
        self.num_computed[slot] = self.num_published[slot] = self.reach[slot] = cached
        self.max_len[slot] = request.max_len
        self.prompt_len[slot] = request.prompt_len
        self.stop[slot] = NO_STOP if not stops else next(iter(stops)) if len(stops) == 1 else MANY_STOPS
        self.handle[slot] = request.handle
        self.frontend[slot] = request.frontend
        self.key[slot] = request.key
        self.alive[slot] = True
        self.silent[slot] = not request.started
        self.looks_back[slot] = request.looks_back
        self.scored[slot] = request.told < request.prompt_len
        self.held_up[slot] = False
        self.guessed[slot], self.guess_from[slot] = 0, NEVER

    def num_computable(self, slots: np.ndarray) -> np.ndarray:
        """Tokens of the requests at `slots` (int64 ``[n]``) that may be computed, placeholders included. The last token
        of a request is sampled, never computed."""
        most: np.ndarray = np.minimum(self.num_tokens[slots], self.max_len[slots] - 1)
        return most

    def last_in_flight(self, slots: np.ndarray) -> np.ndarray:
        """Whether the last of these tokens is a placeholder (bool ``[n]``)."""
        last: np.ndarray = self.tokens[slots, self.num_computable(slots) - 1] == IN_FLIGHT
        return last

    def num_known(self, slot: int) -> int:
        """Its tokens without placeholders."""
        known = int(self.num_tokens[slot])
        while known and self.tokens[slot, known - 1] == IN_FLIGHT:
            known -= 1
        return known

    def known_tokens(self, slot: int) -> np.ndarray:
        """A copy of these."""
        return self.tokens[slot, : self.num_known(slot)].copy()

    def advance(self, slots: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Launch the next `counts` tokens of `slots`. Returns these tokens, one request's after another's, and which
        rows sample a new one; that has its place from now on."""
        starts = self.num_computed[slots]
        ends = starts + counts
        samples = ends == self.num_tokens[slots]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        token_ids = self.tokens[np.repeat(slots, counts), np.repeat(starts, counts) + within]
        self.num_computed[slots] = ends
        sampled = slots[samples]
        at = self.num_tokens[sampled]  # a row at its full length samples its last one there
        self.tokens[sampled, at] = IN_FLIGHT
        self.num_tokens[sampled] = at + 1
        return token_ids, samples
