"""Logits processors that are classes, as vLLM's V1 engine takes them: their bases. How they travel to the core is in
processor_names.py.

A configuration names the classes (``logits_processors``), and only the core imports them. vLLM makes one object of each
class for the whole batch. Here each request has an object of its own (core/worker/processors.py), which sees a batch of
one row: its request is added at index 0, and never moved. A processor that treats requests apart, as all documented
ones do, cannot tell the difference.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, TypeVar

from .params import SamplingParams

State = TypeVar("State")
RequestLogitsProcessor = Callable[..., Any]  # (output ids, logits) or (prompt ids, output ids, logits) → logits
AddedRequest = tuple[int, SamplingParams, Sequence[int] | None, list[int]]  # index, parameters, prompt, output so far
RemovedRequest = int


class MoveDirectionality(Enum):
    """How two rows of a batch change places."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


MovedRequest = tuple[int, int, MoveDirectionality]  # from, to


class BatchUpdate(NamedTuple):
    """What changed in a batch: first rows are removed, then added, then moved. The list with an added request's output
    grows while the request runs."""

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Base of a user's class."""

    @classmethod  # noqa: B027  # a class need not have it
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise `ValueError` for parameters that the class refuses."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token stays the same; without effect here, because all processors are always called."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`; None if no request was added."""

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """Change logits ``[rows, vocab]``, in place or not, and return them."""


def process_dict_updates(
    states: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, Sequence[int] | None, list[int]], State | None],
) -> bool:
    """Follow a batch in a dict from row to state, and return whether the dict changed. `new_state` gives the state of
    an added request, or None if it has none."""
    if batch_update is None:
        return False
    before = dict(states)
    for row in batch_update.removed:
        states.pop(row, None)
    for row, params, prompt, output in batch_update.added:
        states.pop(row, None)
        if (state := new_state(params, prompt, output)) is not None:
            states[row] = state
    for source, target, direction in batch_update.moved:
        moving, replaced = states.pop(source, None), states.pop(target, None)
        if moving is not None:
            states[target] = moving
        if replaced is not None and direction is MoveDirectionality.SWAP:
            states[source] = replaced
    return states != before


class AdapterLogitsProcessor(LogitsProcessor):
    """Base of a class that has one function for each request."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function for a request with these parameters; None: its logits stay as they are."""

    def _bound(
        self, params: SamplingParams, prompt: Sequence[int] | None, output: list[int]
    ) -> Callable[[Any], Any] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        takes_prompt = len(inspect.signature(function).parameters) == 3
        return partial(function, prompt, output) if takes_prompt else partial(function, output)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: Any) -> Any:
        for row, function in self.req_info.items():
            logits[row] = function(logits[row])
        return logits
