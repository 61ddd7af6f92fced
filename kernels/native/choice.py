"""The words of a `Choice` of sample.h, and memory for log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..contract import Choice, RowScores

NO_TENSOR = (0,) * 5  # in place of scores or logits
NOT_SCORED = np.empty((0, 5), np.int64)


class ChoiceWords(NamedTuple):
    """What lies between the scores and the logits."""

    words: list[int]
    held: list[torch.Tensor]  # what they have addresses of


def choice_words(choice: Choice) -> ChoiceWords:
    seeds, positions, sampled = choice.keys or (None, None, None)
    given = (sampled, seeds, positions, choice.temperature, choice.top_k, choice.top_p, choice.min_p)
    columns = [None if x is None else x.contiguous() for x in given]
    masks, penalties = ([x.contiguous() for x in what or ()] for what in (choice.masks, choice.penalties))
    words = [0 if x is None else x.data_ptr() for x in columns]
    words += (len(masks[0]), *(x.data_ptr() for x in masks)) if masks else (0,) * 3
    words += (len(penalties[0]), *(x.data_ptr() for x in penalties)) if penalties else (0,) * 5
    return ChoiceWords(words, [*(x for x in columns if x is not None), *masks, *penalties])


def scoring(groups: Sequence[tuple[np.ndarray, int]], steps: int = 1) -> tuple[list[RowScores], np.ndarray]:
    """Memory for the scores of groups of rows, in each of so many steps, and sample.h's Scoring of each row, step by
    step: int64 ``[any, 5]``. Groups: rows, int64 ``[n]``, and the number of their likeliest tokens."""
    found, tables = [], [NOT_SCORED.reshape(steps, 0, 5)]
    for rows, count in groups:
        ids = torch.empty(steps * len(rows), 1 + count, dtype=torch.int32)
        one = RowScores(ids, torch.empty(ids.shape), torch.empty(len(ids), dtype=torch.int32))
        table = np.empty((steps, len(rows), 5), np.int64)
        table[:, :, 0], table[:, :, 1] = rows, count
        for column, x in enumerate(one, 2):
            table[:, :, column] = (x.data_ptr() + np.arange(len(x)) * x.stride(0) * x.itemsize).reshape(steps, -1)
        found.append(one)
        tables.append(table)
    return found, np.concatenate(tables, axis=1).reshape(-1, 5)
