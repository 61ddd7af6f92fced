"""How a feature takes part in planning: the hooks that the scheduler's stages call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...ipc.messages import Logprobs
from .columns import Columns
from .outbox import RoutedRows
from .request import Request
from .step import PromptPart, StepPlan, StepResult

NO_LIMIT = 2**62  # more tokens than a request has


class Feature:
    """Something that only some requests use: adapters, guesses, scores of a prompt.

    Each method is a hook, and does nothing unless a feature overrides it. `cap` and `fill` are called once a step with
    arrays of slots. The others are called for one request when it comes, waits, is considered for a slot, or leaves.
    No hook is called for each token, and a hook that no feature overrides costs nothing.

    Blocks for keys and values are counted by the KV cache manager. A feature with another kind of room, such as places
    for adapters, refuses in `may_run` while none is free, takes one in `got_slot` and gives it back in `left_slot`.

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

    def got_slot(self, request: Request) -> None:
        """A request got its slot. The feature fills in its columns."""

    def left_slot(self, request: Request) -> None:
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

    def prompt_scores(self, plan: StepPlan, result: StepResult) -> list[tuple[int, Logprobs]]:
        """Log probabilities of prompts to be sent, each with its frontend."""
        return []

    def routed(self, plan: StepPlan, result: StepResult, alive: np.ndarray, ends: np.ndarray) -> list[RoutedRows]:
        """Experts of tokens to be sent. `alive` (bool ``[rows]``): rows whose requests still run; they are computed up
        to `ends` (int64 ``[rows]``), and their full blocks are published."""
        return []

    def stats(self) -> dict[str, Any]:
        """Fields of `Stats`."""
        return {}


class Features:
    """The features of one scheduler: for each hook, the methods of the features that override it."""

    def __init__(self, rows: Columns) -> None:
        self._rows = rows
        self.added: list[Callable[[Request], None]] = []
        self.keeps: list[Callable[[Request], bool]] = []
        self.may_run: list[Callable[[Request, int, bool], bool]] = []
        self.cap: list[Callable[[np.ndarray, np.ndarray], None]] = []
        self.most: list[Callable[[Request, int], int]] = []
        self.fill: list[Callable[[np.ndarray, int, Callable[[int, int], bool]], None]] = []
        self.got_slot: list[Callable[[Request], None]] = []
        self.left_slot: list[Callable[[Request], None]] = []
        self.ended: list[Callable[[Request], None]] = []
        self.prompt_parts: list[Callable[[np.ndarray, np.ndarray, np.ndarray], list[PromptPart]]] = []
        self.accept: list[Callable[[StepPlan, StepResult, np.ndarray, np.ndarray, np.ndarray], None]] = []
        self.prompt_scores: list[Callable[[StepPlan, StepResult], list[tuple[int, Logprobs]]]] = []
        self.routed: list[Callable[[StepPlan, StepResult, np.ndarray, np.ndarray], list[RoutedRows]]] = []
        self.stats: list[Callable[[], dict[str, Any]]] = []

    def attach(self, feature: Feature) -> None:
        """Add a feature, before any request is added. Its methods are called after those of earlier features."""
        feature.attach(self._rows)
        for hook, methods in vars(self).items():
            if isinstance(methods, list) and getattr(type(feature), hook) is not getattr(Feature, hook):
                methods.append(getattr(feature, hook))
