"""Import transformers without what it brings along for torch.compile and for models spread over several processes:
neither is used here, and both take a large part of a core's start and memory.

transformers only marks functions that are not to be compiled, so ``torch._dynamo`` is imported when somebody asks for
more of it. That there is ``torch.distributed`` transformers is not told, for as long as its modules come in.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

_MODULES = ("transformers.modeling_utils", "transformers.masking_utils", "transformers.generation")


class _Later(ModuleType):
    """A package that runs its own code when it is first asked for what it has not: a name, or where its modules are."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        if (name.startswith("__") and name != "__path__") or spec is None or spec.loader is None:
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__path__ = list(spec.submodule_search_locations or ())
        spec.loader.exec_module(self)
        return getattr(self, name)


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """In the place of a decorator, with arguments or without."""
    return function if callable(function) else _as_it_is


def _import() -> None:
    spec = importlib.util.find_spec("torch._dynamo")
    assert spec is not None, "torch has no _dynamo"
    dynamo = torch._dynamo = sys.modules["torch._dynamo"] = importlib.util.module_from_spec(spec)
    dynamo.__class__ = _Later
    for decorator in ("disable", "allow_in_graph", "assume_constant_result"):
        setattr(dynamo, decorator, _as_it_is)
    there = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        for module in _MODULES:
            importlib.import_module(module)
    finally:
        torch.distributed.is_available = there
        if isinstance(dynamo, _Later):
            del dynamo.__path__


if "torch._dynamo" not in sys.modules and "transformers.modeling_utils" not in sys.modules:
    _import()
