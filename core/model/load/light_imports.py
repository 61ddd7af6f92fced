"""Import transformers without torch.compile, distributed models and training, which take a large part of a core's start
and memory and are not used here.

``torch._dynamo`` is imported when more of it is used than the marks that transformers puts on functions.
``torch.distributed`` is hidden while transformers is imported. Losses get functions of scipy that import it when they
are called, and torchvision one of ``torch._dynamo``. The names in all model files, which transformers reads at each
start, are kept in a file; the code of ``transformers.models``, which reads them once more, runs when it is first asked
for a name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from glob import glob
from hashlib import blake2b
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from ....kernels.native.build import cache_folder

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


class _KeepingNames(MetaPathFinder):
    """Lets `define_import_structure` of transformers find again what it once found in the model files."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _NAMES or (spec := PathFinder.find_spec(fullname, path)) is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if define := getattr(module, "define_import_structure", None):
                module.define_import_structure = partial(_names, define)  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _names(define: Callable[..., Any], module_path: Any, prefix: str | None = None) -> Any:
    """What `define` gives: by what must be installed for them, the names in each module."""
    files = sorted(glob(os.path.join(module_path, "*", "*.py")))
    if prefix != "models" or not files:  # one model's
        return define(module_path, prefix)
    file = None
    try:
        hashed = blake2b(digest_size=16)
        for found in (os.path.join(module_path, "..", "utils", "import_utils.py"), *files):
            stat = os.stat(found)
            hashed.update(f"{found} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        file = cache_folder().with_name("names") / f"{hashed.hexdigest()}.json"
        kept = msgspec.json.decode(file.read_bytes(), type=list[tuple[frozenset[str], dict[str, set[str]]]])
        return dict(kept)
    except (OSError, RuntimeError, msgspec.DecodeError):  # RuntimeError: nobody has a home
        names = define(module_path, prefix)
    if file is not None:
        with contextlib.suppress(OSError, TypeError):  # another version has another form
            keep(file, list(names.items()))
    return names


def keep(file: Path, what: Any) -> None:
    """Write it as JSON, for starts to come. Raises OSError, and TypeError for what is none."""
    data = msgspec.json.encode(what)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}")
    new.write_bytes(data)
    new.replace(file)


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
        names = _KeepingNames()
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
