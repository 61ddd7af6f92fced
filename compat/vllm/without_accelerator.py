"""On a machine without an accelerator `torch.accelerator.empty_cache` raises an error, though scripts call it after
each engine. In their processes it does nothing there, as `torch.cuda.empty_cache` does."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_MODULE = "torch.accelerator.memory"


class WithoutAccelerator(MetaPathFinder):
    """Finds that module of torch, and changes the function when it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _MODULE else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            empty_cache = module.empty_cache

            @functools.wraps(empty_cache)
            def tolerant() -> None:
                if sys.modules["torch"].accelerator.is_available():
                    empty_cache()

            module.empty_cache = tolerant  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
