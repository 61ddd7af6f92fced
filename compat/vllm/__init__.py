"""vLLM's names for code that was written for vLLM: ``import mainspring.compat.vllm as vllm``.

``python -m mainspring.compat.vllm SCRIPT`` runs a script in which ``import vllm`` means this. `names.py` lists what is
offered.
"""

import importlib
import sys
from typing import Any

from .finder import Finder, offered
from .names import PLACES

sys.meta_path.append(Finder(__name__))  # for this package's modules only, and after those that are files

__all__ = sorted(PLACES[""])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    return importlib.import_module(f".{name}", __name__) if name in PLACES else offered("", name)
