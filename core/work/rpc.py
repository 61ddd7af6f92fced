"""What `collective_rpc` calls: methods around the model on one device, a user's among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import nn

from ...ipc.errors import InvalidArgumentError, InvalidRequestError


class MethodCalls:
    """A worker's methods by name. A class of the user, named by ``worker_extension_cls``, adds its own: in these
    ``self`` is this object.

    Args:
        apply_model: calls a function with the model of transformers.
    """

    rank = local_rank = 0

    def __init__(self, apply_model: Callable[[Callable[[nn.Module], Any]], Any]) -> None:
        self._apply_model = apply_model

    def apply_model(self, func: Callable[[nn.Module], Any]) -> Any:
        """``func(model)``, with the module of transformers; what it changes of the parameters is kept. Cached prefixes
        are not forgotten: `reset_prefix_cache` does that."""
        if not callable(func):
            raise InvalidRequestError(f"func is {func!r:.80}; it must be a function")
        return self._apply_model(func)

    def run(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A method by name, or a function, which is given the worker first.

        Raises:
            InvalidRequestError: there is no such method; whatever it raises.
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


def with_extension(apply_model: Callable[[Callable[[nn.Module], Any]], Any], extension: str) -> MethodCalls:
    """The methods, with those of the class ``package.module.Class``.

    Raises:
        InvalidArgumentError: there is no such class, or it has a method of a name that is taken.
    """
    if not extension:
        return MethodCalls(apply_model)
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
    made: MethodCalls = type("Worker", (MethodCalls, more), {})(apply_model)
    return made
