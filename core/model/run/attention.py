"""Paged attention as an attention implementation of transformers, named ``mainspring``.

The models of the library look their attention up by name and call it with query, key and value of the whole row; here
that row holds the tokens of all requests of a step. What the function needs beyond the call (which layer this is, where
the cache lies, which plan belongs to it) it finds in the `AttentionCalls` that loading set on the attention module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....kernels.contract import Backend, LayerCache, SequenceOffsets

IMPLEMENTATION = "mainspring"


class StepAttention(NamedTuple):
    """What one layer's attention needs to know about a step; layers of one KV group and one plan share the object."""

    plan: Any  # from Backend.plan
    blocks: torch.Tensor  # [tokens] int32: where each token's keys and values go; padding rows go to block 0
    rows: torch.Tensor  # [tokens] int32
    backend: Backend  # that made the plan


class AttentionCalls:
    """The attention calls of a forward pass, in order: call ``i`` uses cache ``i`` and step entry ``i``. `sequences`
    tells layers of other kinds which rows belong together.

    One object, owned by the `PagedModel` and set on every attention module of it. Counting calls instead of modules is
    what lets one module be called twice in a pass (layers with shared weights).
    """

    def __init__(self, sources: Sequence[int]) -> None:
        self.sources = list(sources)  # the call whose keys and values call i reads; itself for most
        self.caches: list[LayerCache] = []
        self.sequences = SequenceOffsets.of((), ())
        self._step: Sequence[StepAttention] = ()
        self._next = 0

    def begin(self, step: Sequence[StepAttention], sequences: SequenceOffsets) -> None:
        self._step = step
        self.sequences = sequences
        self._next = 0

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of ``[tokens, heads, dim]`` views → ``[tokens, q_heads, value_dim]``."""
        index = self._next
        self._next = index + 1
        cache, step = self.caches[index], self._step[index]
        if self.sources[index] == index:
            step.backend.append(cache, key, value, step.blocks, step.rows)
        return step.backend.run(step.plan, query, cache, sinks)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls. query ``[1, q_heads, tokens, key_dim]``, key and value likewise →
    ``[1, tokens, q_heads, value_dim]``. Scale, window and soft cap were learned in the dry run and lie in the plan."""
    calls: AttentionCalls = module.mainspring_calls  # type: ignore[assignment]
    out = calls.run(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), s_aux)
    return out.unsqueeze(0), None


# No mask function is registered beside it: transformers then builds no mask at all (masking_utils, early exit).
ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, paged_attention)


@contextmanager
def attention_set(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Let `model` look its attention up by another name for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
