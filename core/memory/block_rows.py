"""What a request needs of the tokens of a cached prefix beside their keys and values: a row for each token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

MOST_HIT_BYTES = 32 << 20  # rows of one hit, because they are sent in one message


class BlockRows:
    """The rows of the tokens of full blocks, by the digest of the prefix that ends with the block. They are kept for as
    many blocks as can be cached; the least recently used ones go first."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._size, self._most = block_size, num_blocks
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

    def put(self, digest: bytes, rows: np.ndarray) -> None:
        """Keep the rows of a block, ``[block size, ...]``."""
        self._rows[digest] = rows
        self._rows.move_to_end(digest)
        if len(self._rows) > self._most:
            self._rows.popitem(last=False)

    def get(self, digests: Sequence[bytes]) -> list[np.ndarray]:
        """The rows of consecutive blocks, which are all here."""
        for digest in reversed(digests):  # the end of a prefix is of no use without its beginning
            self._rows.move_to_end(digest)
        return [self._rows[digest] for digest in digests]

    def usable(self, digests: Sequence[bytes], num_known: int, most: int) -> int:
        """Blocks of the longest hit, at `most`, of a request that has these digests. It needs no rows of its first
        `num_known` tokens."""
        room = MOST_HIT_BYTES
        for block in range(num_known // self._size, most):
            rows = self._rows.get(digests[block])
            if rows is None or rows.nbytes > room:
                return block
            room -= rows.nbytes
        return most

    def clear(self) -> None:
        self._rows.clear()
