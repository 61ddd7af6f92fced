"""Logits processors that are classes, as vLLM's V1 engine takes them: ``LLM(logits_processors=[A, "module:B"])``.

vLLM makes one object of the class for the whole batch. Here each request has an object of its own, which sees a batch
of one row: its request is added once, at index 0, and is never moved. A processor that treats requests apart, as all
documented ones do, cannot tell the difference.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError, shown
from ..ipc.params import SamplingParams

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


class _OfOneRequest:
    """A function for ``SamplingParams.logits_processors`` that calls an object of a class."""

    def __init__(self, kind: type[LogitsProcessor], vllm_config: Any, params: SamplingParams) -> None:
        self._kind, self._config, self._params = kind, vllm_config, params
        self._output: list[int] = []
        self._processor: LogitsProcessor | None = None

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits: Any) -> Any:
        self._output[:] = output
        update = None
        if self._processor is None:
            self._processor = self._kind(self._config, logits.device, False)
            update = BatchUpdate(1, [], [(0, self._params, list(prompt), self._output)], [])
        self._processor.update_state(update)
        return self._processor.apply(logits[None])[0]


def processor_classes(given: Sequence[type | str] | None) -> list[type[LogitsProcessor]]:
    """The classes, of which some are given as ``module:Class`` or ``module.Class``.

    Raises:
        InvalidArgumentError: there is no such class, or it lacks the methods.
    """
    found = []
    for one in given or ():
        kind: Any = one
        if isinstance(one, str):
            module, _, name = one.replace(":", ".").rpartition(".")
            try:
                kind = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError, ValueError) as error:
                raise InvalidArgumentError(
                    f"logits_processors names {one!r}, which can't be imported: {error}"
                ) from None
        if not all(callable(getattr(kind, name, None)) for name in ("update_state", "apply")):
            raise InvalidArgumentError(
                f"logits_processors holds {shown(one)}; each must be a class with update_state and apply"
            )
        found.append(kind)
    return found


def functions_of(
    kinds: Sequence[type[LogitsProcessor]], vllm_config: Any, params: SamplingParams
) -> list[Callable[..., Any]]:
    """The functions of one request.

    Raises:
        InvalidRequestError: a class refuses the parameters.
        NotSupportedError: the request has several completions, whose outputs a function could not tell apart.
    """
    for kind in kinds:
        try:
            getattr(kind, "validate_params", LogitsProcessor.validate_params)(params)
        except ValueError as error:
            raise InvalidRequestError(f"{kind.__name__} refuses the parameters: {error}") from error
    if kinds and params.width > 1:
        raise NotSupportedError("n above 1 and beams are not supported beside logits_processors of the engine")
    return [_OfOneRequest(kind, vllm_config, params) for kind in kinds]
