"""Masks that leave the tokens a row may choose from."""

from __future__ import annotations

import torch


def mask_top_k_top_p_min_p(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """`scores` fp32 ``[rows, vocab]`` with -inf where a row's top-k, top-p or min-p drops a token, in this order.

    top_k int64 ``[rows]`` (0: off), top_p fp32 (1: off), min_p fp32 (0: off). At least one token always stays. A row
    depends on itself alone.
    """
    vocab = scores.shape[1]
    if bool((top_k > 0).any()):
        k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
        largest = scores.topk(int(k[top_k > 0].max()), dim=-1).values
        cutoff = largest.gather(1, (k.clamp(max=largest.shape[1]) - 1).unsqueeze(1))
        scores = scores.masked_fill((scores < cutoff) & (top_k > 0).unsqueeze(1), -torch.inf)
    if bool((top_p < 1).any()):
        ordered, order = scores.sort(dim=-1)
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        drop = mass <= (1 - top_p).unsqueeze(1)
        drop[:, -1] = False
        drop &= (top_p < 1).unsqueeze(1)
        scores = scores.masked_fill(drop.scatter(1, order, drop), -torch.inf)
    if bool((min_p > 0).any()):
        probabilities = scores.softmax(dim=-1)
        floor = min_p.unsqueeze(1) * probabilities.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill((probabilities < floor) & (min_p > 0).unsqueeze(1), -torch.inf)
    return scores
