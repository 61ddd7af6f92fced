"""The objects of the user's classes of logits processors, one of each class for each request."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from operator import attrgetter

import torch

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidArgumentError, InvalidRequestError
from ...ipc.logits_processors import BatchUpdate, LogitsProcessor
from ...ipc.messages import Sampling
from ...ipc.processor_names import HERE, is_processor, params_of, parts_of
from ..plan.step import NewSequence

_Objects = list[LogitsProcessor]


class Processors:
    """The classes that the configuration names, and their objects that no request uses.

    Raises:
        InvalidArgumentError: a class can't be imported.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.classes = load_classes(names)
        self._config, self._device = EngineConfig(), torch.device("cpu")
        self._idle: list[_Objects] = []

    def start(self, config: EngineConfig, device: torch.device) -> None:
        """Make the first objects.

        Raises:
            InvalidArgumentError: a constructor failed.
        """
        self._config, self._device = config, device
        try:
            self._idle = [self.take()]
        except Exception as error:
            raise InvalidArgumentError(
                f"logits_processors: the object of a class can't be made: {type(error).__name__}: {error}"
            ) from error

    def check(self, sampling: Sampling) -> None:
        """Raise `InvalidRequestError` if a class refuses the parameters of a request."""
        for kind in self.classes:
            try:
                if (validate := getattr(kind, "validate_params", None)) is not None:
                    validate(params_of(sampling))
            except Exception as error:
                raise InvalidRequestError(f"{kind.__name__} refuses the parameters: {error}") from error

    def take(self) -> _Objects:
        """An object of each class, with an empty batch. Those of an ended request are used again, because a
        constructor may be slow."""
        if self._idle:
            return self._idle.pop()
        return [kind(self._config, self._device, False) for kind in self.classes]

    def give_back(self, objects: _Objects) -> None:
        """The request of these objects has ended."""
        try:
            for one in objects:
                one.update_state(BatchUpdate(0, [0], [], []))
        except Exception:  # the next request gets new objects
            return
        self._idle.append(objects)


class ProcessedSequence:
    """A sequence in its slot, and its objects."""

    def __init__(self, sequence: NewSequence, processors: Processors) -> None:
        self._sequence, self._processors = sequence, processors
        self._objects: _Objects | None = None  # None: not made yet, or one has failed
        self._output: list[int] = []  # grows in place: the objects keep it

    def apply(self, tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The changed logits: fp32 ``[1, vocab]``, like `logits`, which may be changed, too. tokens: virtual tokens,
        prompt and output so far."""
        sequence, objects, update = self._sequence, self._objects, None
        self._objects = None
        self._output.extend(tokens[sequence.prompt_len + len(self._output) :])
        if objects is None:
            objects = self._processors.take()
            by_embeds = sequence.embeds is not None and not sequence.num_virtual
            prompt = None if by_embeds else list(tokens[sequence.num_virtual : sequence.prompt_len])
            update = BatchUpdate(1, [], [(0, params_of(sequence.sampling), prompt, self._output)], [])
        shape = logits.shape
        for one in objects:
            one.update_state(update)
            logits = one.apply(logits).view(shape)
        self._objects = objects
        return logits

    def release(self) -> None:
        """The sequence has left its slot."""
        if self._objects is not None:
            self._processors.give_back(self._objects)


def load_classes(names: Sequence[str]) -> list[type[LogitsProcessor]]:
    """Import the classes, given as ``module:Class`` or ``module.Class``.

    Raises:
        InvalidArgumentError: a module can't be imported, there is no such class in it, or it lacks the methods.
    """
    found = []
    for name in names:
        module, path = parts_of(name)
        try:
            kind = attrgetter(path)(import_module(module))
        except Exception as error:  # also errors that the module raises
            why = f"{type(error).__name__}: {error}"
            if module == HERE:
                why = "a class of a script needs a module of its own, or the core in the script's process"
            raise InvalidArgumentError(f"logits_processors names {name!r}, which can't be imported: {why}") from error
        if not is_processor(kind):
            raise InvalidArgumentError(f"logits_processors names {name!r}, no class with update_state and apply")
        found.append(kind)
    return found
