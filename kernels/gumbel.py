"""The keyed Gumbel choice: a random draw that depends on seed, position and token id alone.

The index of the largest ``logit / T + g``, with g standard Gumbel noise, is a draw from ``softmax(logits / T)`` (Gumbel
1954; Maddison et al., "A* Sampling", 2014). Here g comes from an integer hash, the same on every device, so there is no
random state to carry, to save or to lose.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))  # of MurmurHash3's 32-bit finaliser, as int32
_POSITION, _TOKEN = 0x9E3779B1 - (1 << 32), 0x27D4EB2F


def mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finaliser on int32 lanes; products wrap, shifts fill with zeros."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _MULTIPLIERS[0]
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * _MULTIPLIERS[1]
    return x ^ ((x >> 16) & 0xFFFF)


def keyed_hash(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 ``[rows, vocab]`` of int64 seeds and positions ``[rows]``: seed, position and token id each pass through
    two rounds of `mix`."""
    row = mix(_low(seeds)) ^ _low(seeds >> 32)
    row = mix(mix(row) + _low(positions) * _POSITION)
    tokens = mix(torch.arange(vocab_size, dtype=torch.int32, device=seeds.device) * _TOKEN)
    return mix(row.unsqueeze(1) + tokens)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, fp32 ``[rows, vocab]``, always finite.

    ``u = (hash + 1/2) / 2**32`` is fine-grained near 0, so it stands for the upper tail: ``-log(-log(1 - u))``.
    """
    hashed = keyed_hash(seeds, positions, vocab_size).to(torch.int64) & 0xFFFFFFFF
    uniform = (hashed.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def keyed_choice(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A draw from ``softmax(scores)`` for each row: fp32 ``[rows, vocab]``, int64 ``[rows]`` twice → int64 ``[rows]``."""
    return torch.argmax(scores + gumbel_noise(seeds, positions, scores.shape[1]), dim=-1)


def _low(x: torch.Tensor) -> torch.Tensor:
    """The lower 32 bits of int64, as int32."""
    x = x & 0xFFFFFFFF
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)
