"""See what a model's modules are called with, in one forward pass over a few random tokens.

Attention is stood in for by one in which a token sees itself alone. Then no cache is needed, and no row of the pass has
any business with another: what still depends on the other rows is the model's own doing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...kernels.interface import ROW_MULTIPLE

STAND_IN = "mainspring_row_local"
SEED = 20240229


def _row_local(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Each token's output is its own value. ``[1, heads, rows, dim]`` → ``[1, rows, heads, dim]``."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(STAND_IN, _row_local)


@contextmanager
def row_local_attention(model: PreTrainedModel) -> Iterator[None]:
    """Set the stand-in attention on `model` for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(STAND_IN)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def random_ids(model: PreTrainedModel, rows: int) -> torch.Tensor:
    """The same random tokens each time, int64 ``[rows]``."""
    embeddings: Any = model.get_input_embeddings()
    return torch.randint(embeddings.weight.shape[0], (rows,), generator=torch.Generator().manual_seed(SEED)).to(
        model.device
    )


@torch.no_grad()
def run_rows(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Final hidden states ``[rows, hidden]`` of these tokens, int64 ``[rows]`` each, without the output layer."""
    outputs = model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    hidden: torch.Tensor = outputs[0][0]
    return hidden


def shared_inputs(model: PreTrainedModel) -> dict[str, list[tuple[str, ...]]]:
    """Linear layers side by side in one module that are given the very same tensor.

    → module path → groups of child names, in the order of their calls. A layer counts when the pass called it exactly
    once, and a group when its tensor still held the same values at the last call.
    """
    calls: dict[str, list[tuple[str, torch.Tensor]]] = {}
    values: dict[int, torch.Tensor] = {}
    changed: set[int] = set()

    def watch(parent: str, child: str, linear: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            (x,) = args
            calls.setdefault(parent, []).append((child, x))  # kept alive, so that an identity means one tensor
            if not torch.equal(values.setdefault(id(x), x.clone()), x):
                changed.add(id(x))

        return linear.register_forward_pre_hook(before)

    with ExitStack() as stack:
        for path, module in model.named_modules():
            parent, _, child = path.rpartition(".")
            if is_plain_linear(module):
                stack.callback(watch(parent, child, module).remove)
        stack.enter_context(row_local_attention(model))
        positions = torch.arange(ROW_MULTIPLE, device=model.device)
        run_rows(model, random_ids(model, ROW_MULTIPLE), positions)

    groups: dict[str, list[tuple[str, ...]]] = {}
    for parent, made in calls.items():
        names = [child for child, _ in made]
        by_input: dict[int, list[str]] = {}
        for child, x in made:
            if names.count(child) == 1 and id(x) not in changed:
                by_input.setdefault(id(x), []).append(child)
        found = [tuple(children) for children in by_input.values() if len(children) > 1]
        if found:
            groups[parent] = found
    return groups


def is_plain_linear(module: nn.Module) -> bool:
    """An ``nn.Linear`` and nothing more: no forward of its own, no hook, no parametrization."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
    )
