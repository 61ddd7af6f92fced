"""Lets the torchvision of the package index, which is compiled for CUDA, be imported beside a torch for CPUs.

transformers' video processors use its transforms, which are Python. Importing it also describes two operators of its
compiled part, which can't be loaded then, so they are declared first; nothing calls them. `make test-video` puts this
folder on the path of all its processes.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

OPERATORS = ("nms", "qnms")
_kept: list[Any] = []  # the operators exist as long as what declared them


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        from torch import library, version

        if version.cuda is None:
            declared = library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(declared)


sys.meta_path.insert(0, _Declare())
