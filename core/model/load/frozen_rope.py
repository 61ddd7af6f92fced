"""Rotary embeddings whose frequencies depend on the length of the sequence, frozen at load.

transformers recomputes the frequencies of `dynamic` and `longrope` in each forward pass, from the largest position of
the row (modeling_rope_utils, `dynamic_rope_update`). Here a row holds many requests, so one request would change the
angles of another, and keys in the cache would be of another angle than the query. So the choice is made once, for
sequences of `max_model_len` tokens: up to the original context length the original (short) frequencies, beyond it those
that the model uses for a sequence of exactly that length.
"""

from __future__ import annotations

import torch
from torch import nn


def freeze_rope(model: nn.Module, max_model_len: int) -> list[str]:
    """Freeze every rotary embedding of `model` for `max_model_len`; → one line for each, for ``--explain-model``."""
    lines = []
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            if _depends_on_length(kinds):
                _update(module, max_model_len)
                module.rope_type = "frozen"
                lines.append(f"{name}: {kinds} frequencies frozen for {max_model_len} tokens")
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if _depends_on_length(kind):
                    _update(module, max_model_len, layer_type=layer_type)
                    kinds[layer_type] = "frozen"
                    lines.append(f"{name}, {layer_type}: {kind} frequencies frozen for {max_model_len} tokens")
    return lines


def _depends_on_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _update(module: nn.Module, length: int, **kwargs: str) -> None:
    """Let the module itself choose its frequencies, by showing it the last position of a sequence of that length."""
    device = next(module.buffers()).device
    x = torch.zeros(1, 1, 1, device=device)
    with torch.no_grad():
        module(x, torch.tensor([[length - 1]], device=device), **kwargs)
