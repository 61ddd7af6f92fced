"""Attention over latents (DeepSeek's multi-head latent attention).

A linear layer, the *expansion*, makes the keys and values of all heads from one vector of a token, its latent. Of a
key, the last dimensions may come from elsewhere and be the same for all heads. The cache holds the latent and these
shared dimensions, as a single key head, whose first dimensions are the value too. With a head's parts K and V of the
expansion, a score is ``q·(K c) = (Kᵀ q)·c`` and a weighted sum of values is V times that of the latents: so queries
and outputs are multiplied, in place of all keys and values of the context (DeepSeek-AI 2024, 2405.04434, 2.1.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Expansion(NamedTuple):
    """How the keys and values of an attention module are made."""

    linear: nn.Linear  # [heads * (own + value_dim), rank]: each head's part of its key, then its value
    heads: int
    own: int  # dimensions of a key that come from the latent; those behind are the same for all heads


class LatentAttention:
    """Takes the place of an expansion's forward. While `serving()`, nothing is expanded: `attend` then computes the
    attention over the latents that the expansion was given last.

    Also an `Elsewhere`: it keeps the parts of the expansion's weight, whose tensor it leaves empty. They are buffers of
    the layer, so that they sleep and change their dtype with the model, and keep their memory, which CUDA graphs read.
    """

    def __init__(self, expansion: Expansion, serving: Callable[[], bool]) -> None:
        self.linear, self._heads, self._own = expansion
        self._serving = serving
        self._latents: torch.Tensor | None = None  # [tokens, rank]
        self._of_keys, self._of_values = self._parts(self.linear.weight.detach())
        self.linear.register_buffer("mainspring_keys", self._of_keys, persistent=False)
        self.linear.register_buffer("mainspring_values", self._of_values, persistent=False)
        self.linear.weight = nn.Parameter(self._of_keys.new_empty(0), requires_grad=False)
        self.linear.forward = self._keep  # type: ignore[method-assign]

    def _parts(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of keys ``[heads, own, rank]``, and of values ``[heads, value_dim, rank]``."""
        parts = weight.view(self._heads, -1, weight.shape[1])
        return parts[:, : self._own].clone(), parts[:, self._own :].clone()

    def replace(self, weight: torch.Tensor) -> None:
        for kept, part in zip((self._of_keys, self._of_values), self._parts(weight), strict=True):
            kept.copy_(part)

    def unpack(self) -> torch.Tensor:
        return torch.cat((self._of_keys, self._of_values), 1).flatten(0, 1)

    def _keep(self, input: torch.Tensor) -> torch.Tensor:
        if not self._serving():
            return F.linear(input, self.unpack())
        self._latents = input.reshape(-1, self.linear.in_features)
        return input.new_zeros(()).expand(*input.shape[:-1], self.linear.out_features)  # no one reads it

    def attend(self, query: torch.Tensor, key: torch.Tensor, run: Attend) -> torch.Tensor:
        """query ``[tokens, heads, key_dim]`` and the model's keys, likewise, of which only the shared dimensions mean
        anything; run: attention over a single head → ``[tokens, heads, value_dim]``."""
        latents, own = self._latents, self._own
        if latents is None:
            raise RuntimeError(f"{type(self.linear).__name__} was not called before the attention that it is for")
        self._latents = None
        absorbed = torch.bmm(query[..., :own].transpose(0, 1), self._of_keys).transpose(0, 1)
        keys = torch.cat((latents, key[:, 0, own:]), -1).unsqueeze(1)
        out = run(torch.cat((absorbed, query[..., own:]), -1), keys, keys[..., : latents.shape[1]])
        return torch.bmm(out.transpose(0, 1), self._of_values.transpose(1, 2)).transpose(0, 1)
