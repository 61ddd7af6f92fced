"""The keyed Gumbel choice: a random draw that depends on seed, position and token id alone.

The index of the largest ``logit / T + g``, with g independent standard Gumbel noise, is a draw from
``softmax(logits / T)`` (Gumbel 1954; Maddison, Tarlow & Minka, "A* Sampling", 2014). Here g comes from an integer hash,
the same on every device, so there is no random state to carry, to save or to lose.
"""

from __future__ import annotations

import torch

_ROUND_1, _ROUND_2 = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)  # MurmurHash3's 32-bit finaliser, as int32
_POSITION, _TOKEN, _SECOND = 0x9E3779B1 - (1 << 32), 0x27D4EB2F, 0x165667B1  # odd constants of xxHash32

_ELEMENTS_AT_A_TIME = 1 << 18
"""Noise is made for as many rows at a time as keeps its intermediates in the processor's cache."""


def keyed_hash(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """32 well-mixed bits for each row and token.

    Seed and position become two 32-bit words a row. The first is added to the mixed token id, the second joins between
    the two rounds of a last mix, so that rows with equal first words still differ. (With one word, one pair of rows in
    2**32 would share all its noise: an even chance among 77,000 rows.)

    Args:
        seeds: int64 ``[rows]``, any 64 bits.
        positions: int64 ``[rows]``, below 2**32.
        token_ids: int64 or int32 ``[tokens]``.

    Returns:
        int32 ``[rows, tokens]``; each input bit has passed through at least two multiplications.
    """
    low, high, position = _low_bits(seeds), _low_bits(seeds >> 32), _low_bits(positions)
    first = _mix(_mix(_mix(low.clone()) ^ high) + position * _POSITION)
    second = _mix(_mix(_mix(high + _SECOND) ^ low) ^ position * _TOKEN)
    tokens = _mix(token_ids.to(torch.int32) * _TOKEN)
    return _mix(first.unsqueeze(1) + tokens, second.unsqueeze(1))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise for each row and token: fp32 ``[rows, tokens]``, between -2.9 and 22.9. Arguments as for
    `keyed_hash`.

    A uniform u from 32 hashed bits gives ``g = -log(-log(1 - u))``. fp32 is fine-grained near u = 0, and that is where
    the large values of g, those that win, come from. `log1p` and `log` give an element the same bits wherever it lies.
    """
    hashed = keyed_hash(seeds, positions, token_ids).view(torch.uint32).to(torch.float32)
    uniform = hashed.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)  # 1 itself would give minus infinity
    return uniform.neg_().log1p_().neg_().log_().neg_()


def keyed_choice(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A draw from ``softmax(scores)`` for each row; of equal sums the lowest token id wins.

    Args:
        scores: fp32 ``[rows, vocab]``, divided by the temperature already (top-k, top-p and min-p come between); -inf
            for a token that must not be chosen. Rows at temperature 0 need no noise and do not belong here.
        seeds: int64 ``[rows]``.
        positions: int64 ``[rows]``: where the chosen token will stand.

    Returns:
        int64 ``[rows]``.
    """
    token_ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    chosen = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    step = max(1, _ELEMENTS_AT_A_TIME // scores.shape[1])
    for start in range(0, len(scores), step):
        part = slice(start, start + step)
        noise = gumbel_noise(seeds[part], positions[part], token_ids)
        torch.argmax(noise.add_(scores[part]), dim=-1, out=chosen[part])
    return chosen


def _mix(x: torch.Tensor, between: torch.Tensor | int = 0) -> torch.Tensor:
    """MurmurHash3's finaliser on int32 lanes, in place; `between` joins after the first multiplication. Products wrap;
    torch shifts in the sign, so what is shifted is masked."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _ROUND_1
    x ^= between
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= _ROUND_2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _low_bits(x: torch.Tensor) -> torch.Tensor:
    """The lower 32 bits of int64, as int32."""
    x = x & 0xFFFFFFFF
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)
