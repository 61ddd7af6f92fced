"""Where a rank is in a pipeline, and how rows of hidden states get from stage to stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .group import RankGroup
from .numbering import number_of, rank_of


class Stages:
    """The pipeline as one of its ranks sees it.

    Args:
        world: all processes of the core, by number.
        count: of stages, at least 2.
        tensor: ranks of each stage.
    """

    def __init__(self, world: RankGroup, count: int, tensor: int = 1) -> None:
        self.world, self.count = world, count
        self.rank = rank_of(world.rank, count, tensor)
        self.index, self._of_stage = divmod(self.rank, tensor)
        self._before = number_of(self.rank - tensor, count, tensor)
        self._after = number_of(self.rank + tensor, count, tensor)
        self._tensor = tensor
        self._quiet = False
        self._seen: set[torch.dtype] = set()  # of hidden states, since the last `agree`
        self._dtype = torch.float32  # in which they are sent

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def group_of_stage(self) -> RankGroup | None:
        """The ranks of this stage; None if it is a single one. All ranks must call it."""
        if self._tensor == 1:
            return None
        return RankGroup(
            self._of_stage,
            self._tensor,
            f"stage {self.index}",
            self.world.device,
            ordered=self.world.ordered,
            within=self.world,
        )

    @contextmanager
    def silence(self) -> Iterator[None]:
        """In this context the stage computes alone: what it would receive is what its model has there, whatever that
        means."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def agree(self, dtype: torch.dtype) -> None:
        """Let hidden states be sent in `dtype`, or in fp32 if a stage has them in another one. All ranks call this when
        their models have run in silence."""
        usual = all(self.world.least([self._seen <= {dtype}]))
        self._dtype, self._seen = dtype if usual else torch.float32, set()

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """What goes into the first layer of this stage, in place of `hidden`, which has its shape."""
        self._seen.add(hidden.dtype)
        if self._quiet or self.is_first:
            return hidden
        rows = torch.empty(hidden.shape, dtype=self._dtype, device=hidden.device)
        return self.world.receive(rows, self._before).to(hidden.dtype)

    def leave(self, hidden: torch.Tensor) -> None:
        """`hidden` came out of the last layer of this stage. It may be overwritten afterwards."""
        self._seen.add(hidden.dtype)
        if not self._quiet and not self.is_last:
            rows = hidden.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
            self.world.send(rows, self._after, self.count)
