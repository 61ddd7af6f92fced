"""Log probabilities of the chosen (or the prompt's) tokens, and of the likeliest tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..plan.step import Scores
from .device import Device, Tokens


class Scoring(NamedTuple):
    """`Scores` that are being copied to the host."""

    rows: np.ndarray
    token_ids: Tokens
    logprobs: Tokens
    ranks: Tokens

    def wait(self) -> Scores:
        return Scores(self.rows, self.token_ids.wait(), self.logprobs.wait(), self.ranks.wait())


def score(logprobs: torch.Tensor, tokens: torch.Tensor, counts: np.ndarray, device: Device) -> list[Scoring]:
    """Start to copy the log probabilities of `tokens` to the host, each with those of the likeliest tokens.

    Rows are processed by their count. So the choice among tokens of equal probability depends on the row alone, and not
    on the other rows of the step.

    Args:
        logprobs: fp32 ``[n, vocab]``.
        tokens: int64 ``[n]``.
        counts: how many of the likeliest tokens each row asks for, ``[n]``.
    """
    found = []
    for count in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == count)
        everyone = len(rows) == len(counts)
        index = None if everyone else device.bring(torch.from_numpy(rows))
        mine, own = (logprobs, tokens) if index is None else (logprobs[index], tokens[index])
        own_logprob = mine.gather(1, own.unsqueeze(1))
        ranks = (mine > own_logprob).sum(1, dtype=torch.int32) + 1
        largest, ids = mine.topk(min(count, mine.shape[1]))
        token_ids = torch.cat([own.unsqueeze(1), ids], 1).int()
        arrays = (device.download(a) for a in (token_ids, torch.cat([own_logprob, largest], 1), ranks))
        found.append(Scoring(rows, *arrays))
    return found
