"""The pool of KV blocks: reference counts, an LRU list of free blocks, and the map from prefix hash to block.

A block is *in use* (one reference for each request that lists it), *cached* (free, but still found by its hash) or
*free*. Taking a block takes the least recently used free one and forgets what it cached. Every operation is O(1).

Block 0 is the null block: never given out, never freed. Padding rows write there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

NULL_BLOCK = 0
Key = tuple[int, bytes]  # (KV group, digest of the prefix that ends with this block)


class BlockPool:
    """`num_blocks` blocks, the null block among them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int, Key], None] = lambda block, key: None  # told what a taken block cached
        self._refs = [0] * num_blocks
        self._key: list[Key | None] = [None] * num_blocks
        self._cached: dict[Key, int] = {}
        self._free = OrderedDict.fromkeys(range(1, num_blocks))  # the least recently used first

    @property
    def num_free(self) -> int:
        """Cached ones included."""
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def take(self, n: int) -> list[int]:
        """`n` blocks with one reference each. The caller has checked `num_free`."""
        assert n <= self.num_free, "took more blocks than are free"
        blocks = [self._free.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self._forget(block)
            self._refs[block] = 1
        return blocks

    def find(self, key: Key) -> int | None:
        """The block that holds this prefix, in use or free."""
        return self._cached.get(key)

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def touch(self, blocks: Iterable[int]) -> None:
        """One reference more for each; a free one leaves the free list."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less for each. A block without references goes to the end of the free list, so name the
        ends of prefixes first: they are then taken again before their beginnings. One without a hash is of use to
        nobody and goes to the front. Null blocks are passed over."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self._refs[block] -= 1
            assert self._refs[block] >= 0, "released a block that nobody held"
            if self._refs[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=self._key[block] is not None)

    def publish(self, block: int, key: Key) -> None:
        """Let `block` be found by `key`. Where another block holds the same prefix already, that one stays."""
        if key not in self._cached and self._key[block] is None:
            self._cached[key] = block
            self._key[block] = key

    def reset_cache(self) -> None:
        """Forget all hashes; blocks in use stay in use."""
        self._cached.clear()
        self._key = [None] * self.num_blocks

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._cached[key]
            self._key[block] = None
            self.on_evict(block, key)
