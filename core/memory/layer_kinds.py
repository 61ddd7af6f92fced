"""The kinds of layers, told apart by what they keep of a sequence, and the rules of each kind.

layer_rules.py has the questions that a kind answers for all layers that have it. `KINDS` is the table of kinds.

Keys and values lie at a place that follows from the token's position. A rejected guess is therefore overwritten by the
token that takes its position, and a prompt may be cut anywhere. Layers that keep one compressed latent vector per token
follow the rules of the full kind and differ in their bytes per token. Recurrent state is in recurrent_state.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import takewhile

from ..plan.request import Request
from .layer_rules import Find, LayerKind
from .recurrent_state import RecurrentState
from .updates import LayerGroup


class FullAttention(LayerKind):
    """Keys and values, or latents, of all tokens. A prefix is usable up to the first block that is not cached."""

    def look_up(self, request: Request, most: int, find: Find) -> list[int | None]:
        return list(takewhile(lambda block: block is not None, map(find, request.digests[:most])))

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

    def unread(self, num_computed: int) -> range:
        return range(max(0, num_computed - self._window + 1) // self.block_size)

    def num_columns(self, num_tokens: int, ahead: int = 0) -> int:
        return -(-num_tokens // self.block_size)  # blocks taken early would be held longer than the window needs them

    def new_blocks(self, num_columns: int, num_tokens: int, per_step: int) -> int:
        within_window = -(-(self._window - 1 + per_step) // self.block_size) + 1
        return min(super().new_blocks(num_columns, num_tokens, per_step), within_window)

    def usable(self, cached: Sequence[int | None], most: int) -> int:
        blocks = min(len(cached), most)
        # Every prefix that ends behind a gap which the longest one reaches would reach that gap, too.
        while None in (read := cached[self.unread(blocks * self.block_size).stop : blocks]):
            blocks += read.index(None) - len(read)
        return blocks


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


KINDS: dict[str, Callable[[LayerGroup, int], LayerKind]] = {  # `LayerGroup.kind` → its rules
    "full": FullAttention,
    "windowed": WindowedAttention,
    "fixed": FixedLength,
    "recurrent": RecurrentState,
}


def kind_of(group: LayerGroup, block_size: int) -> LayerKind:
    """The rules of a group of layers."""
    return KINDS[group.kind](group, block_size)
