"""The methods that `collective_rpc` can call on a worker, those of a user's extension class included."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...ipc.errors import InvalidArgumentError, InvalidRequestError
from ..model.load.sharded_state import save_parts

Parameters = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class MethodCalls:
    """A worker's methods by name. The user's class ``worker_extension_cls`` adds its own methods; their ``self`` is
    this object.

    Args:
        apply_model: calls a function with the transformers model.
        parameters: iterates over the parameters, under the names that the transformers model gives them.
        rank: of the worker, among those that compute one model together.
    """

    rank = local_rank = 0

    def __init__(
        self, apply_model: Callable[[Callable[[nn.Module], Any]], Any], parameters: Parameters, rank: int = 0
    ) -> None:
        self._apply_model, self._parameters = apply_model, parameters
        self.rank, self.local_rank = rank, int(os.environ.get("LOCAL_RANK", "0"))  # a rank's process sets it

    def apply_model(self, func: Callable[[nn.Module], Any]) -> Any:
        """Return ``func(model)``, where `model` is the transformers module. Changes of its parameters take effect. The
        prefix cache stays: call `reset_prefix_cache` to drop it."""
        if not callable(func):
            raise InvalidRequestError(f"func is {func!r:.80}; it must be a function")
        return self._apply_model(func)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the weights into a folder on the core's machine, in files that ``load_format="sharded_state"`` reads.
        The config and the tokenizer are not written.

        Args:
            pattern: of the files' names; None: the only one there is.
            max_size: of a file, in bytes; None: 5 GiB.

        Raises:
            InvalidArgumentError: another pattern, or a folder that can't be written to.
            InvalidRequestError: the weights sleep, or are quantized.
        """
        save_parts(self._parameters(), Path(path), pattern, max_size, self.rank)

    def run(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method by name, or a function with this object as its first argument.

        Raises:
            InvalidRequestError: there is no such method. Errors of the method pass through.
        """
        if callable(method):
            return method(self, *args, **kwargs)
        named = isinstance(kwargs, dict) and all(isinstance(name, str) for name in kwargs)
        if not isinstance(args, list | tuple) or not named:
            raise InvalidRequestError("args must be a list, and kwargs a dict of names")
        found = None if not isinstance(method, str) or method.startswith("_") else getattr(self, method, None)
        if not callable(found):
            known = [name for name in dir(self) if not name.startswith("_") and callable(getattr(self, name))]
            raise InvalidRequestError(f"the worker has no method {method!r:.80}; it has {', '.join(known)}")
        return found(*args, **kwargs)


def with_extension(
    apply_model: Callable[[Callable[[nn.Module], Any]], Any], parameters: Parameters, extension: str, rank: int = 0
) -> MethodCalls:
    """The methods of a worker, extended by the class ``package.module.Class``.

    Raises:
        InvalidArgumentError: there is no such class, or one of its names exists already.
    """
    if not extension:
        return MethodCalls(apply_model, parameters, rank)
    module, _, name = extension.rpartition(".")
    try:
        more = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(f"worker_extension_cls is {extension!r}, which is not there: {error}") from error
    if not isinstance(more, type):
        raise InvalidArgumentError(f"worker_extension_cls is {extension!r}; it must be a class")
    twice = [name for name in vars(more) if not name.startswith("_") and hasattr(MethodCalls, name)]
    if twice:
        raise InvalidArgumentError(f"worker_extension_cls {extension!r} has {twice[0]!r}, which the worker has too")
    made: MethodCalls = type("Worker", (MethodCalls, more), {})(apply_model, parameters, rank)
    return made
