"""The words of a `Choice` of sample.h."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..contract import Choice

NO_TENSOR = (0,) * 5  # in place of scores or logits


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
