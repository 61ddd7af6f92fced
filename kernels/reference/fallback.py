"""The reference kernels in the place of another backend's, for a step that it does not take."""

from __future__ import annotations

import torch

from ..contract import Backend, LayerCache
from .attention_plan import AttentionPlan
from .reference_backend import ReferenceBackend


class ReferenceFallback(ReferenceBackend):
    """Attention over a cache that the `usual` backend lays out and writes, so that its next step finds what it expects.

    The reference reads any strides; elements that the usual backend adds to a head (`Backend.cache_dim`) are left out.
    """

    def __init__(self, usual: Backend, device: torch.device) -> None:
        super().__init__(deterministic=device.type != "cuda")
        self.append = usual.append  # type: ignore[method-assign]

    def run(
        self, plan: AttentionPlan, query: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Backend.run`."""
        keys, values = cache.keys[..., : plan.spec.key_dim], cache.values[..., : plan.spec.value_dim]
        return super().run(plan, query, LayerCache(keys, values), sinks)
