"""The questions that each kind of layers answers, with the answers that most kinds share.

- allocation: how many blocks a request needs, and which of them it gives back;
- prefix cache: how long a cached prefix is usable, given which of its blocks are cached;
- chunking: where the computation of a prompt may stop at the end of a step;
- speculation: which tokens have to be computed again after a guess was rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..plan.request import Request
from .block_pool import NULL_BLOCK
from .updates import LayerGroup

Find = Callable[[bytes], int | None]  # the block of one group that is cached under this name


class LayerKind:
    """The rules that most kinds share: tokens ``i * block_size`` to ``(i + 1) * block_size`` lie in column ``i`` of the
    request's block table."""

    def __init__(self, group: LayerGroup, block_size: int) -> None:
        self.block_size = block_size

    # ------------------------------------------------------------------ allocation

    def unread(self, num_computed: int) -> range:
        """The blocks that neither the query at position `num_computed` nor a later one reads. A request gives them
        back."""
        return range(0)

    def num_columns(self, num_tokens: int, ahead: int = 0) -> int:
        """Columns of a block table that reaches `num_tokens`. `ahead`: tokens for which blocks are taken early, so that
        no other request can take them."""
        return -(-max(num_tokens, ahead) // self.block_size)

    def new_blocks(self, num_columns: int, num_tokens: int, per_step: int) -> int:
        """Blocks that a table of `num_columns` lacks to reach `num_tokens`. Counts the blocks held at one time if each
        step computes at most `per_step` tokens."""
        return max(0, self.num_columns(num_tokens) - num_columns)

    # ------------------------------------------------------------------ prefix cache

    def names(self, request: Request) -> Sequence[bytes]:
        """The names of the request's full blocks in the prefix cache."""
        return request.digests

    def look_up(self, request: Request, most: int, find: Find) -> list[int | None]:
        """The cached ones among the first `most` blocks of a request. The list ends early where no longer prefix is
        usable."""
        return [find(name) for name in request.digests[:most]]

    def usable(self, cached: Sequence[int | None], most: int) -> int:
        """Blocks of the longest prefix, at most `most`, that this kind can continue from. `cached` is a result of
        `look_up`."""
        raise NotImplementedError

    def table(self, cached: Sequence[int | None], blocks: int) -> list[int]:
        """The block table of a request that continues from a usable prefix of `blocks` blocks."""
        unread = self.unread(blocks * self.block_size)
        return [NULL_BLOCK if i in unread or block is None else block for i, block in enumerate(cached[:blocks])]

    def first_to_check(self, blocks: int) -> int:
        """The first block to look up to know whether a prefix of `blocks` blocks, which was published, is usable."""
        return self.unread(blocks * self.block_size).stop

    def columns_to_publish(self, request: Request, first: int, last: int) -> range:
        """The columns of the block table to publish when blocks `first` to `last` of the sequence are full."""
        return range(first, last)

    # ------------------------------------------------------------------ chunking and speculation

    def cut(self, request: Request, start: int, count: int) -> int:
        """How many of the next `count` tokens, from position `start`, one step may compute. 0 if there is no point in
        this range at which the step may stop."""
        return count

    def roll_back(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Guesses of the requests at `slots` were rejected. The step computed tokens from `starts`, of which those
        before `ends` are accepted. Returns how many tokens count as computed after that."""
        return ends
