"""Import transformers without torch.compile, distributed models and training, which take a large part of a core's start
and memory and are not used here.

``torch._dynamo`` is imported when more of it is used than the marks that transformers puts on functions.
``torch.distributed`` is hidden while transformers is imported. Losses get functions of scipy that import it when they
are called, and torchvision one of ``torch._dynamo``. The names in all model files, which transformers would read, are
looked for when transformers is first asked for a name that it has not elsewhere; so is the code of
``transformers.models``, which reads them once more.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_NAMES = "transformers.utils.import_utils"
_MARKS = "torch._dynamo._trace_wrapped_higher_order_op"  # transformers imports it
_LOSSES = "transformers.loss.loss_utils"
_FUNCTIONS = ("scipy.optimize", "torch._dynamo.utils")  # what the losses import; the second is for torchvision
_MODULES = ("transformers.modeling_utils", "transformers.masking_utils", "transformers.generation")


class _Later(ModuleType):
    """A package that runs its own code when it is first asked for what it has not: a name, or where its modules are."""

    @classmethod
    def take(cls, name: str) -> ModuleType:
        """Put one in the place of the package of this name."""
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"there is no {name}"
        package = sys.modules[name] = importlib.util.module_from_spec(spec)
        package.__class__ = cls
        return package

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        asked = ("__all__", "__path__") if spec.submodule_search_locations is not None else ()
        if name.startswith("__") and name not in asked:
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        spec.loader.exec_module(self)
        if (other := sys.modules[spec.name]) is not self:  # its code has put another in its place
            vars(self)["__getattr__"] = partial(getattr, other)
        return getattr(self, name)


class _Called(ModuleType):
    """A module of functions, in the place of one that is imported when one of them is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)


class _NamesLater(MetaPathFinder):
    """While transformers is imported: lets it read its model files for the names in them when it is first asked for a
    name that it has not elsewhere, and not at each run of its code."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _NAMES or (spec := PathFinder.find_spec(fullname, path)) is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            define, module._LazyModule = module.define_import_structure, _incomplete(module)
            module.define_import_structure = partial(_names, define)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _names(define: Any, module_path: Any, prefix: str | None = None) -> Any:
    """By what must be installed for them, the names in each module."""
    return {frozenset(): {"models": set()}} if prefix == "models" else define(module_path, prefix)


def _incomplete(module: Any) -> Any:
    """A class in the place of ``_LazyModule``, with which transformers completes its names itself."""
    define, lazy = module.define_import_structure, module._LazyModule

    class Incomplete(lazy):  # type: ignore[misc, valid-type]
        def __init__(self, name: str, *args: Any, **options: Any) -> None:
            super().__init__(name, *args, **options)
            self._is_complete = name != "transformers"
            if not self._is_complete:
                del self.__all__

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                # what is nowhere in the model files: special names, and modules, which are imported then
                special = name.startswith("__") and name != "__all__"
                if special or self._is_complete or PathFinder.find_spec(name, self.__path__):
                    raise
            names = define(Path(self.__file__).parent / "models", prefix="models")
            names[frozenset()].update(self._import_structure)
            lazy.__init__(self, self._name, self.__file__, names, self.__spec__, self._objects)
            self._is_complete = True
            return getattr(self, name)

    return Incomplete


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """In the place of a decorator, with arguments or without."""
    return function if callable(function) else _as_it_is


def _import() -> None:
    dynamo = torch._dynamo = _Later.take("torch._dynamo")
    for decorator in ("disable", "allow_in_graph", "assume_constant_result"):
        setattr(dynamo, decorator, _as_it_is)
    importlib.import_module(_MARKS)
    del dynamo.__path__  # From here on, to import another module of the package runs the package first.
    if "transformers.models" not in sys.modules:
        names = _NamesLater()
        sys.meta_path.insert(0, names)
        try:
            _Later.take("transformers.models")  # imports the package
        finally:
            sys.meta_path.remove(names)
    there, called = torch.distributed.is_available, [_Called(name) for name in _FUNCTIONS]
    torch.distributed.is_available = lambda: False
    try:
        for module in called:
            sys.modules.setdefault(module.__name__, module)
        importlib.import_module(_LOSSES)
        for module in called:
            if sys.modules[module.__name__] is module:
                del sys.modules[module.__name__]
        for name in _MODULES:
            importlib.import_module(name)
    finally:
        torch.distributed.is_available = there


if "torch._dynamo" not in sys.modules and "transformers.modeling_utils" not in sys.modules:
    _import()
