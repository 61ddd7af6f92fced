"""Log probabilities of a prompt's tokens. Each needs a row of logits, and memory is kept for a fixed number of them."""

from __future__ import annotations

import numpy as np

from ...ipc.messages import Logprobs
from ..plan.feature import NO_LIMIT, Feature
from ..plan.request import Request
from ..plan.step import PROMPT_LOGITS, PromptPart, StepPlan, StepResult


class PromptScores(Feature):
    """Where prompts may be cut (`chunked`), the scored prompts of a step together compute at most `PROMPT_LOGITS`
    tokens, or `least` each if that is more: no fewer can be computed at once."""

    def __init__(self, chunked: bool, least: int = 1) -> None:
        self._chunked, self._least = chunked, least
        self._requests: dict[int, Request] = {}  # the running ones whose prompts are scored, by slot

    def got_slot(self, request: Request) -> None:
        if request.wants_scores:
            self._requests[request.slot] = request

    def left_slot(self, request: Request) -> None:
        self._requests.pop(request.slot, None)

    def cap(self, slots: np.ndarray, need: np.ndarray) -> None:
        if self._chunked and (scored := self._rows.scored[slots] & (need > 0)).any():
            need[scored] = np.minimum(need[scored], max(self._least, PROMPT_LOGITS // int(scored.sum())))

    def most(self, request: Request, start: int) -> int:
        rows = self._rows
        if not request.wants_scores:
            return NO_LIMIT
        if request.slot >= 0 and rows.granted[request.slot]:
            return 0
        if not self._chunked:
            return NO_LIMIT
        left = max(0, PROMPT_LOGITS - int(rows.granted[rows.scored & rows.alive].sum()))
        return left if request.slot >= 0 else max(self._least, left)  # the next step divides the rows anew

    def prompt_parts(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> list[PromptPart]:
        parts: list[PromptPart] = []
        if not self._requests or not (scored := self._rows.scored[slots]).any():
            return parts
        row_of = (np.cumsum(counts) - counts).tolist()
        for i in np.flatnonzero(scored).tolist():
            slot, start, count = int(slots[i]), int(starts[i]), int(counts[i])
            request = self._requests[slot]
            first, last = max(request.num_scored, start + 1), min(request.prompt_len, start + count + 1)
            if first < last:
                parts.append(PromptPart(slot, first, last - first, row_of[i] + first - start - 1))
        return parts

    def prompt_scores(self, plan: StepPlan, result: StepResult) -> list[tuple[int, Logprobs]]:
        found = []
        for part, scores in zip(plan.scored, result.prompt_logprobs, strict=True):
            request = self._requests.get(part.slot)
            if request is None or part.start > request.num_scored:
                continue  # this part, or an earlier one, will be computed again
            request.num_scored = max(request.num_scored, part.start + part.num_rows)
            self._rows.scored[part.slot] = request.wants_scores
            found.append((request.frontend, scores.message([], request.handle, part.start - request.num_virtual)))
        return found
