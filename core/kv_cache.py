"""Block tables: which blocks hold a request's keys and values, in each KV group."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .block_pool import NULL_BLOCK, BlockPool
from .kv_layout import KVGroup
from .request import Request


class TableUpdate(NamedTuple):
    """Block table entries that changed, for the runner's copy: all int32, of one length."""

    group: np.ndarray
    slot: np.ndarray
    column: np.ndarray
    block: np.ndarray


class KVCacheManager:
    """Gives blocks to requests, takes them back, and finds cached prefixes.

    Blocks given up while steps are in flight return to the pool when the last of those steps has retired: a kernel may
    still be reading them.
    """

    def __init__(self, groups: Sequence[KVGroup], block_size: int, num_blocks: int, prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._windows = [g.window for g in groups]
        self._prefix_caching = prefix_caching
        self._deferred: deque[tuple[int, list[int]]] = deque()  # (step to wait for, blocks)
        self._newest_step: int | None = None  # in flight
        self._updates: list[tuple[int, int, int, int]] = []

    # ------------------------------------------------------------------ prefix cache

    def find_prefix(self, request: Request) -> int:
        """Give `request`, whose tables are empty, the blocks of the longest cached prefix, touched; returns its length
        in tokens. At least the last token stays to be computed, so that no shared block is ever written."""
        request.tables = [[] for _ in self._windows]
        if not self._prefix_caching:
            return 0
        most = (len(request.tokens) - 1) // self.block_size
        request.extend_digests(request.tokens, most * self.block_size, self.block_size)
        found = [self._cached_blocks(group, request.digests[:most]) for group in range(len(self._windows))]
        blocks = next((n for n in range(most, 0, -1) if self._all_valid(found, n)), 0)
        for group, window in enumerate(self._windows):
            first = self._first_needed(window, blocks * self.block_size)
            table = [NULL_BLOCK] * first + [b for b in found[group][first:blocks] if b is not None]
            self.pool.touch(table[first:])
            request.tables[group] = table
        return blocks * self.block_size

    def publish(self, request: Request, first: int, last: int) -> None:
        """Let blocks `first` to `last` (exclusive) be found: they are full, and their step has succeeded."""
        if self._prefix_caching:
            for group, table in enumerate(request.tables):
                for i in range(first, last):
                    if table[i] != NULL_BLOCK:
                        self.pool.publish(table[i], (group, request.digests[i]))

    def _cached_blocks(self, group: int, digests: list[bytes]) -> list[int | None]:
        blocks: list[int | None] = []
        for digest in digests:
            block = self.pool.find((group, digest))
            if block is None and self._windows[group] is None:
                break  # without a window, nothing after a gap is of use
            blocks.append(block)
        return blocks

    def _all_valid(self, found: list[list[int | None]], blocks: int) -> bool:
        """Whether a prefix of `blocks` blocks is there in every group, as far back as its window reaches."""
        for window, cached in zip(self._windows, found, strict=True):
            first = self._first_needed(window, blocks * self.block_size)
            if len(cached) < blocks or (window is not None and None in cached[first:blocks]):
                return False
        return True

    def _first_needed(self, window: int | None, num_computed: int) -> int:
        """The first block that the query at position `num_computed` can see."""
        return 0 if window is None else max(0, num_computed - window + 1) // self.block_size

    # ------------------------------------------------------------------ allocation

    def blocks_needed(self, request: Request, num_tokens: int, per_step: int | None = None) -> int:
        """New blocks it takes for the tables to reach `num_tokens`: at once, or held at most at any one time if each
        step computes at most `per_step` tokens."""
        reach = -(-num_tokens // self.block_size)
        needed = 0
        for window, table in zip(self._windows, request.tables, strict=True):
            new = max(0, reach - len(table))
            if window is not None and per_step is not None:
                new = min(new, -(-(window - 1 + per_step) // self.block_size) + 1)
            needed += new
        return needed

    def extend(self, request: Request, num_computed: int, num_tokens: int) -> bool:
        """Let the tables of a running request reach `num_tokens`, giving up what lies behind the windows of the next
        query, at `num_computed`. False, and nothing taken, if the pool has too few blocks."""
        self.drop_behind_windows(request, num_computed)
        if self.blocks_needed(request, num_tokens) > self.pool.num_free:
            return False
        reach = -(-num_tokens // self.block_size)
        for group, table in enumerate(request.tables):
            first = len(table)
            table += self.pool.take(max(0, reach - first))
            self._updates += [(group, request.slot, i, table[i]) for i in range(first, reach)]
        return True

    def show(self, request: Request) -> None:
        """Note the whole of the tables for the runner: the request just got its slot."""
        for group, table in enumerate(request.tables):
            self._updates += [(group, request.slot, i, block) for i, block in enumerate(table)]

    def drop_behind_windows(self, request: Request, num_computed: int) -> None:
        for group, window in enumerate(self._windows):
            if window is None:
                continue
            table, i = request.tables[group], self._first_needed(window, num_computed) - 1
            gone = []
            while i >= 0 and i < len(table) and table[i] != NULL_BLOCK:
                gone.append(table[i])
                table[i] = NULL_BLOCK
                self._updates.append((group, request.slot, i, NULL_BLOCK))
                i -= 1
            self._release(gone)

    def free(self, request: Request) -> None:
        """Take back all its blocks, ends of prefixes first."""
        for table in request.tables:
            self._release(table[::-1])
        request.tables = []

    def take_updates(self) -> TableUpdate:
        """Table changes since the last call."""
        columns = np.array(self._updates, dtype=np.int32).reshape(-1, 4).T
        self._updates = []
        return TableUpdate(*columns)

    # ------------------------------------------------------------------ steps in flight

    def step_launched(self, step: int) -> None:
        self._newest_step = step

    def step_retired(self, step: int) -> None:
        if self._newest_step == step:
            self._newest_step = None
        while self._deferred and self._deferred[0][0] <= step:
            self.pool.release(self._deferred.popleft()[1])

    @property
    def blocks_on_the_way(self) -> bool:
        """Whether steps in flight still hold blocks that nobody else wants."""
        return bool(self._deferred)

    def _release(self, blocks: list[int]) -> None:
        if self._newest_step is None:
            self.pool.release(blocks)
        elif blocks:
            self._deferred.append((self._newest_step, blocks))
