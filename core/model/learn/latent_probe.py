"""Find the attention calls whose keys and values a linear layer makes from latents.

One forward pass over a few tokens: if a head's key, up to some dimension, and its value are the numbers that a linear
layer gave, and the rest of the key is the same for all heads, then the layer is an expansion. No class or module name
is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ....kernels.contract import AttentionSpec, Backend
from ..run.latents import Expansion
from .fuse_observe import is_plain_linear
from .probe import AttentionCall, dry_run

PROBE = "mainspring_latents"


def learn_latents(model: PreTrainedModel, calls: Sequence[AttentionCall], backend: Backend) -> list[AttentionCall]:
    """The same calls; those over latents that `backend` caches with their expansions, and with a single head of keys. A
    latent that takes as much memory as the keys and values does not count."""
    wanted = {call.module: call.spec for call in calls if not call.repeats and _candidates(call.module, call.spec)}
    if not wanted:
        return list(calls)
    watch = _Watch(wanted)
    with ExitStack() as stack:
        for module, spec in wanted.items():
            for linear in _candidates(module, spec):
                stack.callback(linear.register_forward_hook(partial(watch.note, module)).remove)
        dry_run(model, PROBE, watch.attend, None)
    times = [call.module for call in calls]
    found = []
    for call in calls:
        expansion = watch.found.get(call.module)
        if expansion is not None and times.count(call.module) == 1:
            spec = _of_latents(call.spec, expansion)
            if backend.caches_latents(spec, model.dtype):
                call = call._replace(expansion=expansion, spec=spec)
        found.append(call)
    return found


def _candidates(module: nn.Module, spec: AttentionSpec) -> list[nn.Linear]:
    """The linear layers of an attention module that have the shape of an expansion."""
    linears = [each for each in module.modules() if isinstance(each, nn.Linear) and is_plain_linear(each)]
    return [each for each in linears if "bias" not in dict(each.named_parameters()) and _own(each, spec)]


def _own(linear: nn.Linear, spec: AttentionSpec) -> int:
    """The dimensions of a key that such a layer makes; 0: it is none."""
    heads, size = spec.num_kv_heads, spec.key_dim + spec.value_dim
    own = linear.out_features // heads - spec.value_dim
    fits = linear.out_features % heads == 0 and 0 < own < spec.key_dim
    return own if fits and linear.in_features + spec.key_dim - own < heads * size else 0


def _of_latents(spec: AttentionSpec, expansion: Expansion) -> AttentionSpec:
    rank = expansion.linear.in_features
    return spec._replace(num_kv_heads=1, key_dim=rank + spec.key_dim - expansion.own, value_dim=rank, latent=True)


class _Watch:
    """Compares what linear layers give with what the attention gets."""

    def __init__(self, specs: dict[nn.Module, AttentionSpec]) -> None:
        self._specs = specs
        self._given: dict[nn.Module, list[tuple[nn.Linear, torch.Tensor]]] = {}
        self.found: dict[nn.Module, Expansion] = {}

    def note(self, module: nn.Module, linear: nn.Linear, _: Any, out: torch.Tensor) -> None:
        self._given.setdefault(module, []).append((linear, out))

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        tokens, heads = key.shape[2], key.shape[1]
        for linear, out in self._given.pop(module, []):
            own, of_heads = _own(linear, self._specs[module]), out.reshape(tokens, heads, -1).transpose(0, 1)
            shared = key[0, :, :, own:]
            same = torch.equal(key[0, :, :, :own], of_heads[..., :own]) and torch.equal(value[0], of_heads[..., own:])
            if same and torch.equal(shared, shared[:1].expand_as(shared)):
                self.found[module] = Expansion(linear, heads, own)
        return query.new_zeros(1, tokens, query.shape[1], value.shape[3]), None
