"""Log probabilities of a prompt's tokens. Each needs a row of logits, and memory is kept for a fixed number of them."""

from __future__ import annotations

import numpy as np

from ..plan.feature import NO_LIMIT, Feature
from ..plan.request import Request
from ..plan.step import PROMPT_LOGITS


class PromptScores(Feature):
    """Where prompts may be cut (`chunked`), the scored prompts of a step together compute at most `PROMPT_LOGITS`
    tokens, or one each if there are more prompts."""

    def __init__(self, chunked: bool) -> None:
        self._chunked = chunked

    def cap(self, slots: np.ndarray, need: np.ndarray) -> None:
        if self._chunked and (scored := self._rows.scored[slots] & (need > 0)).any():
            need[scored] = np.minimum(need[scored], max(1, PROMPT_LOGITS // int(scored.sum())))

    def most(self, request: Request, start: int) -> int:
        rows = self._rows
        if request.told >= request.prompt_len:
            return NO_LIMIT
        if request.slot >= 0 and rows.granted[request.slot]:
            return 0
        if not self._chunked:
            return NO_LIMIT
        left = max(0, PROMPT_LOGITS - int(rows.granted[rows.scored & rows.alive].sum()))
        return left if request.slot >= 0 else max(1, left)  # the next step divides the rows anew
