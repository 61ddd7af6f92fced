"""Top-k, top-p and min-p: which tokens a row may choose from.

What stays is what transformers' `TopKLogitsWarper`, `TopPLogitsWarper` and `MinPLogitsWarper` leave, in this order (of
equal scores at the edge of top-p, which bf16 logits often have, theirs keeps arbitrary ones, this the lowest ids). Only
rows that ask for a feature pay for it, and none sorts the vocabulary unless its top-p mass needs thousands of
tokens.
"""

from __future__ import annotations

import torch

_TOP_P_CANDIDATES = (256, 4096)
"""How many of its largest scores a row looks at for its top-p mass before it sorts all of them."""

_SUM_WIDTH = 1024


def mask_top_k_top_p_min_p(
    scores: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, min_p: torch.Tensor | None
) -> torch.Tensor:
    """The scores with -inf in place of the tokens that a row's top-k, top-p or min-p drops.

    A row's result depends on that row alone. At least one token stays. Which rows ask for what is decided where the
    limits lie: on the CPU, the call does not wait for the device unless a row uses top-p.

    Args, the last three None where no row asks for it:
        scores: fp32 ``[rows, vocab]``, after the temperature; not changed.
        top_k: int64 ``[rows]``. The k largest stay, and all that equal the last of them; 0 or less: off.
        top_p: fp32 ``[rows]``. The fewest largest that hold this much probability stay; 1: off.
        min_p: fp32 ``[rows]``. What is at least min_p times as likely as the likeliest stays; 0: off.

    Returns:
        fp32 ``[rows, vocab]``; `scores` itself where nothing is on.
    """
    if top_k is not None and len(rows := ((top_k > 0) & (top_k < scores.shape[1])).nonzero().flatten()):
        limits = top_k[rows]
        on, last = rows.to(scores.device), (limits - 1).to(scores.device)
        largest = scores[on].topk(int(limits.max()), dim=-1).values
        scores = _drop_below(scores, on, largest.gather(1, last.unsqueeze(1)))
    if top_p is not None and len(rows := (top_p < 1).nonzero().flatten()):
        on = rows.to(scores.device)
        scores = scores.index_copy(0, on, _top_p(scores[on], top_p[rows].to(scores.device)))
    if min_p is not None and len(rows := (min_p > 0).nonzero().flatten()):
        on = rows.to(scores.device)
        ratio = min_p[rows].to(scores.device).log().unsqueeze(1)
        scores = _drop_below(scores, on, scores[on].amax(-1, keepdim=True) + ratio)
    return scores


def _drop_below(scores: torch.Tensor, rows: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
    """Scores with -inf where those of ``rows`` ``[n]`` lie below their floor ``[n, 1]``."""
    floor = scores.new_full((len(scores), 1), -torch.inf).index_copy_(0, rows, floors)
    return torch.where(scores < floor, -torch.inf, scores)


def _top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Top-p of rows that all ask for it. A token stays while those ranked before it hold less than ``top_p``."""
    vocab = scores.shape[1]
    peak = scores.amax(-1, keepdim=True)
    total = _row_sums((scores - peak).clamp_min_(-80).exp_())  # what underflows would be slow, and adds nothing
    floor, num_kept = torch.empty_like(peak), torch.ones_like(peak, dtype=torch.int64)
    open_rows = torch.arange(len(scores), device=scores.device)
    for candidates in (*(n for n in _TOP_P_CANDIDATES if n < vocab), vocab):
        some = scores[open_rows]
        largest = some.topk(candidates, dim=-1).values if candidates < vocab else some.sort(descending=True).values
        mass = (largest - peak[open_rows]).exp_().div_(total[open_rows]).cumsum(-1, dtype=torch.float64)
        needed = top_p[open_rows].unsqueeze(1)
        count = (mass[:, :-1] < needed).sum(-1, keepdim=True) + 1  # the first token always stays
        floor[open_rows], num_kept[open_rows] = largest.gather(1, count - 1), count
        open_rows = open_rows[mass[:, -1] < top_p[open_rows]]
        if not len(open_rows):
            break

    # Of scores equal to the smallest that stays, only as many as needed stay: those of the lowest token ids.
    kept = scores >= floor
    surplus = kept.sum(-1, keepdim=True) - num_kept
    if tied := surplus.flatten().nonzero().flatten().tolist():
        equal = scores[tied] == floor[tied]
        kept[tied] &= ~equal | (equal.cumsum(-1) <= equal.sum(-1, keepdim=True) - surplus[tied])
    return torch.where(kept, scores, -torch.inf)


def _row_sums(x: torch.Tensor) -> torch.Tensor:
    """``x.sum(-1, keepdim=True)``, the same bits for a row alone as among others: torch splits one long row between
    threads (seen at 128256 columns), where it gives several rows one thread each."""
    columns = x.shape[1]
    whole = torch.nn.functional.pad(x, (0, -columns % _SUM_WIDTH))
    return whole.view(len(x), -1, _SUM_WIDTH).sum(-1).sum(-1, keepdim=True)
