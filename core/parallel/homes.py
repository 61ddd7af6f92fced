"""Attention in data parallel beside expert parallel: each rank keeps the keys and values of its own requests, and has
some of the experts of each layer.

A step is one for all ranks, and each knows from its plan how many rows every other one has. Layers without experts
compute a rank's own rows; experts compute the rows of all ranks. At the end every rank gets all rows that need logits,
of which each computes its columns. A rank without a row in a step computes one that belongs to no request.

Outside of a step, while a model is loaded and checked, all ranks compute the same rows, and nothing here takes part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from .group import RankGroup


class Homes:
    """The ranks as homes of requests, as one of them sees them."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.rows: Sequence[int] | None = None  # of each rank's forward pass; None: all have the same rows
        self._wanted: Sequence[int] = ()  # of each rank's rows, those that need logits

    @contextmanager
    def step(self, rows: Sequence[int], wanted: Sequence[int]) -> Iterator[None]:
        """In this context the ranks compute a step, with so many rows each."""
        self.rows, self._wanted = rows, wanted
        try:
            yield
        finally:
            self.rows = None

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks that need logits: ``[..., wanted rows of this one, n]`` → ``[..., of all, n]``."""
        if self.rows is None or self.group.quiet:
            return x
        flat = self.group.gather_rows(x.reshape(-1, x.shape[-1]), self._wanted)
        return flat.view(*x.shape[:-2], len(flat), x.shape[-1])


class HomePart(NamedTuple):
    """A rank's part of a step."""

    mine: np.ndarray  # bool [requests]: those that are at home here
    tokens: np.ndarray  # bool [tokens]: the same for each of their tokens
    wanted: np.ndarray  # int64 [n]: the rows that need logits, counted among this rank's tokens
    num_tokens: list[int]  # of each rank
    num_wanted: list[int]  # of each rank


def part_of(rank: int, size: int, homes: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> HomePart:
    """The part of `rank` in a step. homes, counts: int64 ``[requests]``. wanted: int64 ``[n]``, rows of the step."""
    home_of_row, mine = np.repeat(homes, counts), homes == rank
    tokens = home_of_row == rank
    home_of_wanted = home_of_row[wanted]
    return HomePart(
        mine,
        tokens,
        (np.cumsum(tokens) - 1)[wanted[home_of_wanted == rank]],
        np.bincount(home_of_row, minlength=size).tolist(),
        np.bincount(home_of_wanted, minlength=size).tolist(),
    )


def places_of_wanted(homes: np.ndarray, counts: np.ndarray, wanted: np.ndarray, padded: Sequence[int]) -> np.ndarray:
    """Where `Homes.collect` puts each of a step's wanted rows, int64 ``[n]``. padded: rows that each rank collects."""
    home = np.repeat(homes, counts)[wanted]
    first = np.concatenate([[0], np.cumsum(padded)[:-1]])
    order = np.argsort(home, kind="stable")
    within = np.empty_like(order)
    starts = np.searchsorted(home[order], np.arange(len(padded)))
    within[order] = np.arange(len(order)) - starts[home[order]]
    places: np.ndarray = first[home] + within
    return places
