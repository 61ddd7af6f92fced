"""What the scheduler hands the executor: one step's rows, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..memory.block_tables import TableUpdate
from ..memory.host_cache import NO_COPIES, Copies
from ..memory.recurrent_state import NO_STATE_COPIES, StateCopies
from .request import Request

PROMPT_LOGITS = 64  # rows of a step, beside those that sample, that have logits, where prompts may be cut; or one each
IN_FLIGHT = -1  # a token id that an earlier step, not retired yet, is about to sample


class PromptPart(NamedTuple):
    """Consecutive rows of a step whose logits are also wanted, for the log probabilities of a prompt's next tokens."""

    request: Request
    start: int  # in the prompt, of the token that the first row's logits are about
    num_rows: int
    row: int  # the first, counted in `token_ids`


class Step(NamedTuple):
    """One step. Row ``r`` computes tokens ``starts[r] : starts[r] + counts[r]`` of the request at ``slots[r]``."""

    id: int
    slots: np.ndarray  # int32 [rows]
    starts: np.ndarray  # int32 [rows]
    counts: np.ndarray  # int32 [rows], at least 1
    token_ids: np.ndarray  # int32 [sum of counts]; IN_FLIGHT: what was sampled last at this slot
    samples: np.ndarray  # bool [rows]: the row's last token brings logits, and one new token
    admitted: list[Request]  # got their slot since the last step
    tables: TableUpdate
    keys: np.ndarray  # uint64 [rows], of the requests, for the journal
    positions: np.ndarray  # int64 [rows]: where in its request's output the next token to come stands
    solo: bool  # the one row is of a suspect
    before: dict[int, np.ndarray]  # int32, by slot: prompt and output so far, of requests that sample and look back
    scored: list[PromptPart]
    guessed: np.ndarray  # int64 [rows]: so many of the row's last tokens are guesses; each brings a token more
    copies: Copies = NO_COPIES  # between pool and host, before anything is computed
    states: StateCopies = NO_STATE_COPIES  # between slots of recurrent state

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.size)

    def choices(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each token that the step chooses, in the order of their positions: the row it is for, and how many tokens
        before the end of that row its logits stand (both int64)."""
        rows = np.flatnonzero(self.samples)
        if not self.guessed.any():
            return rows, np.zeros_like(rows)
        each = self.guessed[rows] + 1
        ends = np.cumsum(each)
        return np.repeat(rows, each), np.repeat(ends, each) - 1 - np.arange(int(ends[-1]))
