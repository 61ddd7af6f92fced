"""The kinds of layers, told apart by what they keep of a sequence, and the rules of each kind.

A kind answers the same questions for all layers that have it:

- allocation: how many blocks a request needs, and which of them it gives back;
- prefix cache: how long a cached prefix is usable, given which of its blocks are cached;
- chunking: where the computation of a prompt may stop at the end of a step;
- speculation: which tokens have to be computed again after a guess was rejected.

Keys and values lie at a place that follows from the token's position. A rejected guess is therefore overwritten by the
token that takes its position, and a prompt may be cut anywhere. Layers that keep one compressed latent vector per token
follow the rules of the full kind and differ in their bytes per token. Recurrent state is in recurrent_state.py.
"""

from __future__ import annotations

import hashlib
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

    def first_block(self, num_computed: int) -> int:
        """The first block that the query at position `num_computed` reads. A request gives back the blocks before."""
        return 0

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
        first = self.first_block(blocks * self.block_size)
        return [NULL_BLOCK] * first + [block for block in cached[first:blocks] if block is not None]

    def first_to_check(self, blocks: int) -> int:
        """The first block to look up to know whether a prefix of `blocks` blocks, which was published, is usable."""
        return self.first_block(blocks * self.block_size)

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


class FullAttention(LayerKind):
    """Keys and values, or latents, of all tokens. A prefix is usable up to the first block that is not cached."""

    def look_up(self, request: Request, most: int, find: Find) -> list[int | None]:
        cached: list[int | None] = []
        for name in request.digests[:most]:
            if (block := find(name)) is None:
                break
            cached.append(block)
        return cached

    def usable(self, cached: Sequence[int | None], most: int) -> int:
        return min(len(cached), most)

    def first_to_check(self, blocks: int) -> int:
        return blocks - 1  # earlier blocks of a published prefix are evicted later


class WindowedAttention(LayerKind):
    """Keys and values of the last `window` tokens. A prefix is usable if the blocks that the next query reaches are
    cached."""

    def __init__(self, group: LayerGroup, block_size: int) -> None:
        super().__init__(group, block_size)
        assert group.window is not None, "a windowed group has a window"
        self._window = group.window

    def first_block(self, num_computed: int) -> int:
        return max(0, num_computed - self._window + 1) // self.block_size

    def num_columns(self, num_tokens: int, ahead: int = 0) -> int:
        return -(-num_tokens // self.block_size)  # blocks taken early would be held longer than the window needs them

    def new_blocks(self, num_columns: int, num_tokens: int, per_step: int) -> int:
        within_window = -(-(self._window - 1 + per_step) // self.block_size) + 1
        return min(super().new_blocks(num_columns, num_tokens, per_step), within_window)

    def usable(self, cached: Sequence[int | None], most: int) -> int:
        blocks = min(len(cached), most)
        # Every prefix that ends behind a gap which the longest one reaches would reach that gap, too.
        while (gap := self._first_gap(cached, blocks)) is not None:
            blocks = gap
        return blocks

    def _first_gap(self, cached: Sequence[int | None], blocks: int) -> int | None:
        first = self.first_block(blocks * self.block_size)
        return next((i for i in range(first, blocks) if cached[i] is None), None)


class FixedLength(LayerKind):
    """Keys and values of something else than the sequence, as for cross-attention: filled once, before the first token,
    and never grown. Its blocks are named by that content, which is a part of the request's root. They are usable for a
    prefix of any length, or have to be filled."""

    def __init__(self, group: LayerGroup, block_size: int) -> None:
        super().__init__(group, block_size)
        self._columns = -(-group.length // block_size)

    def num_columns(self, num_tokens: int, ahead: int = 0) -> int:
        return self._columns

    def names(self, request: Request) -> Sequence[bytes]:
        return [
            hashlib.blake2b(request.root + column.to_bytes(4, "little"), digest_size=16, person=b"fixed").digest()
            for column in range(self._columns)
        ]

    def look_up(self, request: Request, most: int, find: Find) -> list[int | None]:
        cached = [find(name) for name in self.names(request)]
        return [] if None in cached else cached

    def usable(self, cached: Sequence[int | None], most: int) -> int:
        return most

    def table(self, cached: Sequence[int | None], blocks: int) -> list[int]:
        return [block for block in cached if block is not None]

    def first_to_check(self, blocks: int) -> int:
        return blocks  # none

    def columns_to_publish(self, request: Request, first: int, last: int) -> range:
        return range(self._columns if first == request.num_cached_blocks else 0)  # once
