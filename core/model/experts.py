"""Mixtures of experts whose output for a token depends on that token alone, bit for bit.

Each expert sees as many rows as happen to choose it, and the bits of a matrix product depend on that number. Here the
rows of every expert are padded to a multiple of `ROW_MULTIPLE`, and a token's results are summed in ascending order of
the experts.

transformers keeps the experts of a layer in one three-dimensional parameter and looks up by name what runs over them
(``integrations.moe``); ours is registered there as "mainspring". Models with experts of another make, and what else has
the same trouble, are found by `fuse_watch` and cured by `fuse_rows`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...kernels.interface import ROW_MULTIPLE
from .fuse_match import TOLERANCE, difference
from .fuse_observe import SEED
from .fuse_rows import RowInvariant, make_row_invariant
from .fuse_watch import hazards

IMPLEMENTATION = "mainspring"


def clockwork_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts of one layer, in the form transformers calls: `self` holds their weights.

    hidden_states ``[tokens, hidden]``, top_k_index int64 and top_k_weights ``[tokens, k]`` → ``[tokens, hidden]``.
    Only experts that were chosen are run.
    """
    weights_in = self.gate_up_proj if self.has_gate else self.up_proj
    biases_in, biases_out = None, None
    if self.has_bias:
        biases_in = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        biases_out = self.down_proj_bias
    top_k = top_k_index.shape[-1]
    chosen, order_in_token = top_k_index.sort(dim=-1)
    gather, place, bounds = _padded_groups(chosen.flatten(), top_k, weights_in.shape[0])
    x = hidden_states[gather].to(weights_in.dtype)
    x = _each_expert(x, weights_in, biases_in, bounds, self.is_transposed)
    with RowInvariant():  # the model's own code
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
    x = _each_expert(x, self.down_proj, biases_out, bounds, self.is_transposed)
    if getattr(self, "has_post_expert_norm", False):
        x = self.post_expert_norm(x)
    weights = top_k_weights.gather(1, order_in_token)
    place = place.view(-1, top_k)
    out = torch.zeros_like(hidden_states)
    for k in range(top_k):
        out += (x[place[:, k]] * weights[:, k, None]).to(out.dtype)
    return out


def _padded_groups(
    experts: torch.Tensor, top_k: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int, int]]]:
    """Lay the (token, expert) pairs out by expert, each expert's rows padded to a multiple of `ROW_MULTIPLE`.

    experts int64 ``[pairs]``, pair ``i`` being of token ``i // top_k`` → for each laid-out row its token (padding has
    token 0), for each pair its row, and (expert, first row, end row) of the experts that have any.
    """
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=num_experts)
    padded = (counts + (ROW_MULTIPLE - 1)) // ROW_MULTIPLE * ROW_MULTIPLE
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    row_of_sorted = torch.arange(order.shape[0], device=order.device) + shift[experts[order]]
    bounds, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            bounds.append((expert, start, end))
        start = end
    gather = torch.zeros(start, dtype=torch.long, device=order.device)
    gather[row_of_sorted] = order // top_k
    place = torch.empty_like(order)
    place[order] = row_of_sorted
    return gather, place, bounds


def _each_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    biases: torch.Tensor | None,
    bounds: list[tuple[int, int, int]],
    transposed: bool,
) -> torch.Tensor:
    """Rows of each expert times its matrix, ``[experts, out, in]``, or ``[experts, in, out]`` if transposed."""
    out = x.new_empty(x.shape[0], weights.shape[2 if transposed else 1])
    for expert, start, end in bounds:
        matrix = weights[expert] if transposed else weights[expert].T
        torch.mm(x[start:end], matrix, out=out[start:end])
        if biases is not None:
            out[start:end] += biases[expert]
    return out


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, clockwork_experts)


@torch.no_grad()
def use_clockwork_experts(model: PreTrainedModel) -> list[str]:
    """Make every row of `model` independent of the others, bit for bit; → lines for ``--explain-model``.

    To be called on a loaded model in eval mode on a CPU, after `fuse_model`. Changes no parameter and no name.
    `row_dependence` tells whether anything is left.
    """
    lines = Counter[str]()
    checked: dict[tuple[Any, ...], str] = {}
    for module in model.modules():
        if not _is_experts(module):
            continue
        kind = (type(module), module.has_gate, module.has_bias, module.is_transposed)
        name = type(module).__name__
        if kind not in checked:
            checked[kind] = _disagreement(module)
        if checked[kind]:
            eager = type(module).forward.__wrapped__  # type: ignore[attr-defined]  # set by functools.wraps
            module.forward = eager.__get__(module)
            make_row_invariant(module)
            lines[f"{name} runs its own code, padded ({checked[kind]})"] += 1
        else:
            module.config._experts_implementation = IMPLEMENTATION  # type: ignore[union-attr]
            lines[f"{name} runs grouped by expert, padded"] += 1
    for path, why in hazards(model).items():
        module = model.get_submodule(path)
        make_row_invariant(module)
        lines[f"{type(module).__name__} runs row-invariant ({', '.join(sorted(why))})"] += 1
    return [f"clockwork: {count} x {what}" for what, count in lines.items()]


def _is_experts(module: nn.Module) -> bool:
    """Whether transformers looks up what runs over this module's experts."""
    return (
        hasattr(module, "is_transposed")
        and hasattr(module, "has_gate")
        and hasattr(type(module).forward, "__wrapped__")
    )


def _disagreement(module: Any) -> str:
    """Run ours and the model's own code over random rows; → why ours can't take its place, or nothing."""
    generator = torch.Generator().manual_seed(SEED)
    try:
        weight = module.down_proj
        experts, hidden = weight.shape[0], weight.shape[2 if module.is_transposed else 1]
        x = torch.randn(2 * ROW_MULTIPLE, hidden, generator=generator).to(weight.device, weight.dtype)
        scores = torch.rand(2 * ROW_MULTIPLE, experts, generator=generator).to(weight.device)
        top = scores.topk(min(2, experts))
        weights = top.values.to(weight.dtype)
        own = type(module).forward.__wrapped__(module, x, top.indices, weights)
        error, limit = difference(own, clockwork_experts(module, x, top.indices, weights)), TOLERANCE[weight.dtype]
    except Exception as failure:  # any model's code
        return f"{type(failure).__name__}: {failure}"
    return "" if error <= limit else f"grouped by expert it differs by {error:.1e}, the limit is {limit:.1e}"
