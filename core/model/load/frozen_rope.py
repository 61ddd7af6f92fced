"""Rotary embeddings whose frequencies depend on the length of the sequence, frozen at load.

transformers recomputes the frequencies of `dynamic` and `longrope` in each forward pass, from the largest position of
the row (modeling_rope_utils, `dynamic_rope_update`). Here a row holds many requests, so one request would change the
angles of another, and keys in the cache would be of another angle than the query. So the choice is made once, for
sequences of `max_model_len` tokens: up to the original context length the original (short) frequencies, beyond it those
that the model uses for a sequence of exactly that length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


@torch.no_grad()
def freeze_rope(model: nn.Module, max_model_len: int) -> list[str]:
    """Freeze every rotary embedding of `model` for `max_model_len`; → one line for each, for ``--explain-model``."""
    lines = []
    for name, module in model.named_modules():
        held: Any = getattr(module, "rope_type", None)
        kinds: dict[str | None, str] = held if isinstance(held, dict) else {None: held} if isinstance(held, str) else {}
        for layer_type, kind in kinds.items():
            if "dynamic" not in kind and kind != "longrope":
                continue
            arguments = {} if layer_type is None else {"layer_type": layer_type}
            # the module itself chooses its frequencies when it is given the last position of such a sequence
            last = torch.tensor([[max_model_len - 1]], device=next(module.buffers()).device)
            module(torch.zeros(1, 1, 1, device=last.device), last, **arguments)
            kinds[layer_type] = "frozen"
            where = name if layer_type is None else f"{name}, {layer_type}"
            lines.append(f"{where}: {kind} frequencies frozen for {max_model_len} tokens")
        if isinstance(held, str):
            module.rope_type = kinds[None]
    return lines
