"""Give a model the positions of its rows, also a model whose forward takes none.

Such a model counts its rows from 0 in an embedding of positions. That module takes `position_ids`, which the model
leaves out, so they are set at the module's call. A model without such a module may need no positions at all (ALiBi).
Whether it got the right ones shows when its logits are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def takes_positions(module: nn.Module | type[nn.Module]) -> bool:
    """Whether the module's forward has a parameter `position_ids`."""
    return "position_ids" in inspect.signature(module.forward).parameters


def longest_sequence(config: PreTrainedConfig, asked: bool = False) -> int | None:
    """The number of tokens that a model has positions for; None: its config has no limit. asked: the largest
    `max_model_len`. It is larger with `dynamic` rotary frequencies, which a long `max_model_len` changes."""
    names = ("max_position_embeddings", "max_target_positions", "max_seq_len")
    limit = next((limit for name in names if isinstance(limit := getattr(config, name, None), int)), None)
    rope = getattr(config, "rope_parameters", None) or {}
    if limit is None or rope.get("rope_type") not in (("yarn", "dynamic") if asked else ("yarn",)):
        return limit
    original = rope.get("original_max_position_embeddings") or limit  # some configs name only this length
    return max(limit, int(original * rope["factor"]))


def receivers(model: nn.Module) -> list[nn.Module] | None:
    """The modules inside `model` that are to be given positions; None: the model's own forward takes them."""
    return None if takes_positions(model) else [module for module in model.modules() if takes_positions(module)]


@contextmanager
def positions_given(to: list[nn.Module] | None, positions: torch.Tensor) -> Iterator[dict[str, Any]]:
    """In this context, the modules `to` (of `receivers`) get these positions, ``[1, tokens]`` or, with several axes,
    ``[axes, 1, tokens]``. The value holds the arguments for the model's own forward."""
    if to is None:
        yield {"position_ids": positions}
        return

    def give(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        at = list(inspect.signature(module.forward).parameters).index("position_ids")
        if len(args) > at:
            return (*args[:at], positions.view(args[at].shape), *args[at + 1 :]), kwargs
        given = kwargs.get("position_ids")
        if given is None and isinstance(module, PreTrainedModel):
            return args, {**kwargs, "position_ids": positions}
        # rows of a table of positions are added to those of the tokens, so one axis is enough where none was given
        return args, {**kwargs, "position_ids": positions.view(-1) if given is None else positions.view(given.shape)}

    with ExitStack() as stack:
        for module in to:
            stack.enter_context(module.register_forward_pre_hook(give, with_kwargs=True))
        yield {}
