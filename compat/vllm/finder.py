"""Modules with vLLM's names. Each name in them is imported from ours when it is first used."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ...ipc.errors import MissingNameError, NotSupportedError
from .names import PLACES, refusal

_PACKAGE = __package__.removesuffix(".compat.vllm")


class MissingImportError(NotSupportedError, ModuleNotFoundError):
    """The same in an import. Also an `ImportError`, as guarded imports need."""


def offered(theirs: str, name: str) -> Any:
    """Ours for a name in vLLM's module `theirs`.

    Raises:
        MissingNameError: there is none.
    """
    place = PLACES[theirs].get(name)
    if place is None:
        raise MissingNameError(refusal(f"{theirs}.{name}".lstrip(".")))
    module = f"{_PACKAGE}.{place.module}" if place.module else _PACKAGE
    return getattr(importlib.import_module(module), place.name)


class _Module(ModuleType):
    def __init__(self, name: str, theirs: str) -> None:
        super().__init__(name, "Names of vLLM, as Mainspring has them.")
        self.__all__ = sorted(PLACES[theirs])
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        if f"{self._theirs}.{name}".lstrip(".") in PLACES:
            return importlib.import_module(f"{self.__name__}.{name}")
        return offered(self._theirs, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


class Finder(MetaPathFinder, Loader):
    """Finds the modules of the table under the name `root`, and refuses all others under it.

    Each module counts as a package: then ``from vllm.outputs import Unknown`` asks the finder for
    ``vllm.outputs.Unknown``, whose refusal the caller sees.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._root and not fullname.startswith(f"{self._root}."):
            return None
        theirs = self._theirs(fullname)
        if theirs not in PLACES:
            raise MissingImportError(refusal(theirs))
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name, self._theirs(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are found when they are used."""

    def _theirs(self, fullname: str) -> str:
        return fullname.removeprefix(self._root).lstrip(".")
