"""The state of running requests as arrays indexed by slot, so that a step handles all requests without a loop."""

from __future__ import annotations

import numpy as np

from .request import Request
from .step import IN_FLIGHT

NO_STOP, MANY_STOPS = -1, -2  # values of `Columns.stop` for no stop token, and for more than one
NEVER = 2**62  # value of `Columns.guess_from` for no guesses: more tokens than any request has


class Columns:
    """Each array has one entry per slot. The entries of a free slot are meaningless."""

    def __init__(self, slots: int, max_model_len: int) -> None:
        self.tokens = np.zeros((slots, max_model_len), np.int32)
        self.num_tokens = np.zeros(slots, np.int64)  # known tokens and placeholders of tokens in flight
        self.num_computed = np.zeros(slots, np.int64)  # computed tokens, those of steps in flight included
        self.num_published = np.zeros(slots, np.int64)  # tokens whose blocks are in the prefix cache
        self.reach = np.zeros(slots, np.int64)  # tokens the block tables have room for
        self.max_len = np.zeros(slots, np.int64)
        self.prompt_len = np.zeros(slots, np.int64)
        self.stop = np.zeros(slots, np.int64)  # the one stop token, NO_STOP or MANY_STOPS
        self.handle = np.zeros(slots, np.int64)
        self.frontend = np.zeros(slots, np.int64)
        self.key = np.zeros(slots, np.uint64)
        self.home = np.zeros(slots, np.int64)  # see `Request.home`
        self.alive = np.zeros(slots, bool)
        self.silent = np.zeros(slots, bool)  # no output token was sent yet
        self.excluded = np.zeros(slots, bool)  # joins no step with others: no credit, or on trial after a crash
        self.granted = np.zeros(slots, np.int64)  # tokens to compute in the step being planned
        self.looks_back = np.zeros(slots, bool)  # waits while its last token is in flight, see `Request.looks_back`
        self.plain = np.zeros(slots, bool)  # see `Request.is_plain`
        self.patient = np.zeros(slots, bool)
        self.scored = np.zeros(slots, bool)  # prompt rows need logits, see `Request.num_scored`
        self.guessed = np.zeros(slots, np.int64)  # guesses among the tokens granted or in flight; the request waits
        self.trust = np.zeros(slots, np.int64)  # most guesses in one step, at least 1
        self.guess_from = np.full(slots, NEVER)  # token count from which it speculates, and waits for each step's end

    def fill(self, request: Request, cached: int) -> None:
        """Fill in the row of a request that got a slot. cached: its tokens found in the prefix cache."""
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
        self.home[slot] = request.home
        self.alive[slot] = True
        self.silent[slot] = not request.started
        self.looks_back[slot] = request.looks_back
        self.plain[slot], self.patient[slot] = request.is_plain, request.patient
        self.scored[slot] = request.wants_scores
        self.excluded[slot] = False
        self.guessed[slot], self.guess_from[slot] = 0, NEVER

    def num_computable(self, slots: np.ndarray) -> np.ndarray:
        """How many tokens the requests at `slots` (int64 ``[n]``) may compute, placeholders included. The final token
        of a request is sampled and never computed."""
        most: np.ndarray = np.minimum(self.num_tokens[slots], self.max_len[slots] - 1)
        return most

    def last_in_flight(self, slots: np.ndarray) -> np.ndarray:
        """Whether the last of the `num_computable` tokens is a placeholder (bool ``[n]``)."""
        last: np.ndarray = self.tokens[slots, self.num_computable(slots) - 1] == IN_FLIGHT
        return last

    def num_known(self, slot: int) -> int:
        """The number of tokens without placeholders."""
        known = int(self.num_tokens[slot])
        while known and self.tokens[slot, known - 1] == IN_FLIGHT:
            known -= 1
        return known

    def advance(self, slots: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mark the next `counts` tokens of `slots` as computed. Returns these tokens, concatenated, and which requests
        sample a new token. Each new token gets a placeholder at once."""
        starts = self.num_computed[slots]
        ends = starts + counts
        samples = ends == self.num_tokens[slots]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        token_ids = self.tokens[np.repeat(slots, counts), np.repeat(starts, counts) + within]
        self.num_computed[slots] = ends
        sampled = slots[samples]
        at = self.num_tokens[sampled]  # all known tokens are computed: the new token goes behind them
        self.tokens[sampled, at] = IN_FLIGHT
        self.num_tokens[sampled] = at + 1
        return token_ids, samples
