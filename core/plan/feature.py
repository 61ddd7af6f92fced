"""How a feature takes part in planning: the hooks that the scheduler's stages call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...ipc.messages import Logprobs
from .columns import Columns
from .request import Request
from .step import PromptPart, Step, StepPlan, StepResult

NO_LIMIT = 2**62  # more tokens than a request has


class Feature:
    """Something that only some requests use: adapters, guesses, scores of a prompt.

    Each method is a hook, and does nothing unless a feature overrides it. `cap` and `fill` are called once a step with
    arrays of slots. The others are called for one request when it comes, waits, is considered for a slot, or leaves.
    No hook is called for each token, and a hook that no feature overrides costs nothing.

    Blocks for keys and values are counted by the KV cache manager. A feature with another kind of room, such as places
    for adapters, refuses in `may_run` while none is free, takes one in `seated` and gives it back in `unseated`.

    A feature may have a budget of its own for a step, such as rows with logits, or the outputs of an encoder: `cap`
    limits running requests to it, and `most` limits what a request gets later in the same step.
    """

    _rows: Columns

    def attach(self, rows: Columns) -> None:
        """Called once, before any other hook, with the columns of the running requests."""
        self._rows = rows

    def added(self, request: Request) -> None:
        """A request was added; it may not be ready to be queued yet."""

    def keeps(self, request: Request) -> bool:
        """Whether the feature takes a request that is about to wait into a queue of its own."""
        return False

    def may_run(self, request: Request, step: int, fetch: bool) -> bool:
        """Whether a waiting request may get a slot in the step of this number. With `fetch`, the feature starts to load
        what the request lacks."""
        return True

    def cap(self, slots: np.ndarray, need: np.ndarray) -> None:
        """Lower `need`, the numbers of tokens that the requests at `slots` could compute in the step being made
        (both int64 ``[n]``). Called before anything is granted in the step, in the order of the features, and once more
        when the rest of the budget is granted."""

    def most(self, request: Request, start: int) -> int:
        """Most tokens, from `start`, that a request may compute in the step being made beside those granted so far. For
        a waiting request it is called again once its cached prefix, and so `start`, is known; the smaller answer
        counts. It must be at least 1 if nothing is granted yet, or the request could wait for ever."""
        return NO_LIMIT

    def fill(self, slots: np.ndarray, budget: int, extend: Callable[[int, int], bool]) -> None:
        """Grant guesses to the requests at `slots` (int64, all running ones) when everything else is granted.

        Args:
            budget: most tokens of the step.
            extend: lets the block tables of a slot reach a number of tokens; False if there are too few blocks.
        """

    def seated(self, request: Request) -> None:
        """A request got its slot. The feature fills in its columns."""

    def unseated(self, request: Request) -> None:
        """A request has left its slot: it was preempted, or it ends."""

    def ended(self, request: Request) -> None:
        """A request has ended, with or without a slot."""

    def prompt_parts(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> list[PromptPart]:
        """Rows of the step being launched whose logits are also wanted. The step computes `counts` tokens, from
        `starts`, of the requests at `slots` (int64 ``[rows]`` each)."""
        return []

    def accept(self, plan: StepPlan, result: StepResult, keep: np.ndarray, ends: np.ndarray, stops: np.ndarray) -> None:
        """Called for a result of a plan with guesses. Take tokens that do not count out of `keep` (bool ``[choices]``),
        and tokens computed in vain off `ends` (int64 ``[rows]``). `stops` (bool ``[choices]``): which tokens end their
        requests."""

    def brought(self, step: Step, slots: np.ndarray) -> None:
        """A step brought a token for each of `slots` (int64; one that has several tokens stands several times)."""

    def prompt_scores(self, plan: StepPlan, result: StepResult) -> list[tuple[int, Logprobs]]:
        """Log probabilities of prompts to be sent, each with its frontend."""
        return []

    def retired(self, step: Step) -> None:
        """A step was taken in, or taken back."""

    def stats(self) -> dict[str, Any]:
        """Fields of `Stats`."""
        return {}


class Features:
    """The features of one scheduler, with the same hooks."""

    def __init__(self, features: Sequence[Feature], rows: Columns) -> None:
        self._rows = rows
        self._all: list[Feature] = []
        for feature in features:
            self.attach(feature)

    def attach(self, feature: Feature) -> None:
        """Add a feature, before any request is added."""
        feature.attach(self._rows)
        self._all.append(feature)
        self._added = [one.added for one in self._with("added")]
        self._keeps = [one.keeps for one in self._with("keeps")]
        self._may_run = [one.may_run for one in self._with("may_run")]
        self._cap = [one.cap for one in self._with("cap")]
        self._most = [one.most for one in self._with("most")]
        self._fill = [one.fill for one in self._with("fill")]
        self._seated = [one.seated for one in self._with("seated")]
        self._unseated = [one.unseated for one in self._with("unseated")]
        self._ended = [one.ended for one in self._with("ended")]
        self._prompt_parts = [one.prompt_parts for one in self._with("prompt_parts")]
        self._accept = [one.accept for one in self._with("accept")]
        self._brought = [one.brought for one in self._with("brought")]
        self._prompt_scores = [one.prompt_scores for one in self._with("prompt_scores")]
        self._retired = [one.retired for one in self._with("retired")]
        self._stats = [one.stats for one in self._with("stats")]

    def _with(self, hook: str) -> list[Feature]:
        """The features that override a hook."""
        return [one for one in self._all if getattr(type(one), hook) is not getattr(Feature, hook)]

    def added(self, request: Request) -> None:
        for added in self._added:
            added(request)

    def keeps(self, request: Request) -> bool:
        return any(keeps(request) for keeps in self._keeps)

    def may_run(self, request: Request, step: int, fetch: bool) -> bool:
        return all(may_run(request, step, fetch) for may_run in self._may_run)

    def cap(self, slots: np.ndarray, need: np.ndarray) -> None:
        for cap in self._cap:
            cap(slots, need)

    def most(self, request: Request, start: int) -> int:
        return min((most(request, start) for most in self._most), default=NO_LIMIT)

    def fill(self, slots: np.ndarray, budget: int, extend: Callable[[int, int], bool]) -> None:
        for fill in self._fill:
            fill(slots, budget, extend)

    def seated(self, request: Request) -> None:
        for seated in self._seated:
            seated(request)

    def unseated(self, request: Request) -> None:
        for unseated in self._unseated:
            unseated(request)

    def ended(self, request: Request) -> None:
        for ended in self._ended:
            ended(request)

    def prompt_parts(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> list[PromptPart]:
        return [part for parts in self._prompt_parts for part in parts(slots, starts, counts)]

    def accept(self, plan: StepPlan, result: StepResult, keep: np.ndarray, ends: np.ndarray, stops: np.ndarray) -> None:
        for accept in self._accept:
            accept(plan, result, keep, ends, stops)

    def brought(self, step: Step, slots: np.ndarray) -> None:
        for brought in self._brought:
            brought(step, slots)

    def prompt_scores(self, plan: StepPlan, result: StepResult) -> list[tuple[int, Logprobs]]:
        return [one for scores in self._prompt_scores for one in scores(plan, result)]

    def retired(self, step: Step) -> None:
        for retired in self._retired:
            retired(step)

    def stats(self) -> dict[str, Any]:
        return {name: value for stats in self._stats for name, value in stats().items()}
