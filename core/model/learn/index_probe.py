"""Find a model's indexers (see indexed.py) from its own calls.

One forward pass over a few tokens, with a cache of transformers that notes which module gives it index keys. The
innermost module that runs then is an indexer, and it must return the indices that it selects. Nothing about a class
needs to be known.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ....ipc.errors import UnsupportedModelError
from ..run.indexed import Indexers
from .recurrent_probe import TOKENS, OwnCache, noted_pass


class _Noting(OwnCache):
    """Notes the innermost running module that gives index keys, with the argument it got this cache by and how many
    numbers a key has."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.running: list[tuple[nn.Module, str | None]] = []
        self.found: dict[nn.Module, tuple[str, int]] = {}

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        self.running.append((module, next((name for name, value in given.items() if value is self), None)))

    def leave(self, module: nn.Module, _: Any, out: Any) -> None:
        self.running.pop()
        if module in self.found:
            _check_indices(type(module).__name__, out)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        module, argument = self.running[-1]
        if argument is None or module in self.found or indexer_key_states.dim() != 3:
            raise UnsupportedModelError(f"{type(module).__name__} keeps index keys in a way that is not known here")
        self.found[module] = argument, indexer_key_states.shape[-1]
        return super().update_indexer(indexer_key_states, layer_idx)


def _check_indices(name: str, out: Any) -> None:
    whole = isinstance(out, torch.Tensor) and out.dtype in (torch.int32, torch.int64) and out.dim() == 3
    if not whole or out.shape[:2] != (1, TOKENS):
        raise UnsupportedModelError(f"{name} selects keys, but does not give the indices of those of each token")


@torch.inference_mode()
def learn_indexers(model: PreTrainedModel) -> Indexers | None:
    """Find the indexers of `model` and let them compute the sequences of a step; None if there are none."""
    if not any(hasattr(layer, "update_indexer") for layer in DynamicCache(config=model.config).layers):
        return None
    cache = _Noting(model.config)
    noted_pass(model, cache)
    if not cache.found:
        return None
    indexers = Indexers()
    for module, (argument, width) in cache.found.items():
        indexers.serve(module, argument, width)
    model.mainspring_indexers = indexers  # type: ignore[assignment]
    return indexers
