"""Logits processors that are classes, as vLLM's V1 engine takes them: their base, and the names by which they travel.

A configuration names the classes (``logits_processors``), and only the core imports them. vLLM makes one object of each
class for the whole batch. Here each request has an object of its own (core/worker/processors.py), which sees a batch of
one row: its request is added at index 0, and never moved. A processor that treats requests apart, as all documented
ones do, cannot tell the difference.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from .errors import InvalidArgumentError, InvalidRequestError, shown
from .messages import Sampling
from .params import SamplingParams

MAX_EXTRA_ARGS_BYTES = 64 << 10  # of a request's `extra_args`, because each waiting request keeps them
_plain = msgspec.msgpack.Decoder(dict[str, Any])

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


HERE = "__main__"  # the module whose classes no other process can import
only_here = False  # no other process can import any class: `python -m mainspring.compat.vllm` sets it


def names_of(given: Sequence[type | str] | None) -> list[str]:
    """Names under which a core imports the classes: ``module:Class``. Those that are given as names are not imported.

    Raises:
        InvalidArgumentError: one is neither a name nor a class at the top level of a module.
    """
    if isinstance(given, str) or not isinstance(given, Sequence | None):
        raise InvalidArgumentError(f"logits_processors is {shown(given)}; it must be a list of classes or their names")
    return [one if isinstance(one, str) else _name_of(one) for one in given or ()]


def _name_of(kind: Any) -> str:
    if not is_processor(kind):
        raise InvalidArgumentError(
            f"logits_processors holds {shown(kind)}; each must be a class with update_state and apply, or its name"
        )
    name = f"{kind.__module__}:{kind.__qualname__}"
    found = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        raise InvalidArgumentError(
            f"logits_processors holds {shown(kind)}, which is not {name!r}: define the class at the top level of a "
            "module, because the core imports it by its name"
        )
    return name


def stay_here(names: Sequence[str]) -> bool:
    """Whether only a core in this process can import one of the classes: that of a script or notebook."""
    return any(only_here or parts_of(name)[0] == HERE for name in names)


def parts_of(name: str) -> tuple[str, str]:
    """The module and the class of a name, ``module:Class`` or ``module.Class``."""
    module, _, kind = name.partition(":") if ":" in name else name.rpartition(".")
    return module, kind


def is_processor(kind: Any) -> bool:
    """Whether a value is a class with the methods of `LogitsProcessor`, from which it need not be derived."""
    return isinstance(kind, type) and all(callable(getattr(kind, name, None)) for name in ("update_state", "apply"))


def packed(extra_args: Mapping[str, Any] | None) -> bytes:
    """``SamplingParams.extra_args`` as `Sampling.extra_args`.

    Raises:
        InvalidRequestError: they hold more than plain data.
    """
    if not extra_args:
        return b""
    try:
        return msgspec.msgpack.encode(extra_args)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"extra_args hold what can't go to the core: {error!s:.200}") from None


def unpacked(extra_args: bytes) -> dict[str, Any]:
    """The reverse of `packed`.

    Raises:
        InvalidRequestError: too long, or not a msgpack map with names as keys.
    """
    if len(extra_args) > MAX_EXTRA_ARGS_BYTES:
        raise InvalidRequestError(f"extra_args take {len(extra_args)} bytes; the limit is {MAX_EXTRA_ARGS_BYTES}")
    try:
        return _plain.decode(extra_args) if extra_args else {}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"extra_args are not a map with names as keys: {error}") from None


def params_of(sampling: Sampling) -> SamplingParams:
    """The parameters that a processor sees: those that travel to the core. The number of completions, stop strings,
    bad words and the form of the output have their defaults; `stop_token_ids` hold the end-of-sequence tokens, too."""
    params = SamplingParams()
    for name in msgspec.structs.asdict(sampling).keys() & vars(params).keys() - {"bad_words"}:
        setattr(params, name, getattr(sampling, name))
    params.logprobs = None if sampling.logprobs < 0 else sampling.logprobs
    params.prompt_logprobs = None if sampling.prompt_logprobs < 0 else sampling.prompt_logprobs
    params.logit_bias, params.allowed_token_ids = sampling.logit_bias or None, sampling.allowed_token_ids or None
    params.extra_args = unpacked(sampling.extra_args) or None
    return params
