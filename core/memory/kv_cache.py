"""Block tables: which blocks hold a request's keys and values, in each KV group."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from ..plan.request import Request
from .block_pool import NULL_BLOCK, BlockPool, Key
from .host_cache import HostCache
from .updates import NO_COPIES, Copies, KVGroup, TableUpdate

ON_HOST = -1  # in the tables of a request that waits: a block that `take_prefix` takes and loads


class KVCacheManager:
    """Gives blocks to requests, takes them back, and finds cached prefixes.

    Blocks given up while steps are in flight return to the pool when the last of those steps has retired: a kernel may
    still be reading them.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        block_size: int,
        num_blocks: int,
        prefix_caching: bool,
        host_blocks: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.host = HostCache(host_blocks) if host_blocks else None
        if self.host is not None:
            self.pool.on_evict = self.host.evicted
        self.held: Counter[int] = Counter()  # by frontend: blocks that its running requests list
        self.block_size = block_size
        self._windows = [g.window for g in groups]
        self._prefix_caching = prefix_caching
        self._coming: dict[bytes, Request] = {}  # by digest: who runs, and had to compute this block
        self._deferred: deque[tuple[int, list[int]]] = deque()  # (step to wait for, blocks)
        self.num_on_the_way = 0  # blocks that come back when a step in flight retires; shared ones stand several times
        self._newest_step: int | None = None  # in flight
        self._updates: list[tuple[int, int, int, int]] = []

    # ------------------------------------------------------------------ prefix cache

    def find_prefix(self, request: Request) -> int:
        """Let the tables of `request`, which waits, name the blocks of the longest cached prefix; returns its length in
        tokens. They are not its own before `take_prefix`. At least the last token stays to be computed, so that no
        shared block is ever written."""
        request.tables = [[] for _ in self._windows]
        if not self._prefix_caching:
            return 0
        most = request.most_cached // self.block_size
        request.extend_digests(request.tokens, most * self.block_size, self.block_size)
        found = [self._cached_blocks(group, request.digests[:most]) for group in range(len(self._windows))]
        blocks = next((n for n in range(most, 0, -1) if self._all_valid(found, n)), 0)
        for group, window in enumerate(self._windows):
            first = self._first_needed(window, blocks * self.block_size)
            request.tables[group] = [NULL_BLOCK] * first + [b for b in found[group][first:blocks] if b is not None]
        request.num_cached_blocks = blocks
        return blocks * self.block_size

    def take_prefix(self, request: Request, waited_for: bool = True) -> None:
        """Make what `find_prefix` just named its own. The rest of its blocks are `coming_from` it, if it is to be
        `waited_for`, and no longer from whom it didn't wait for itself."""
        for table in request.tables:
            self.pool.touch(b for b in table if b > NULL_BLOCK)
        if self.host is not None:
            self._load_prefix(request, self.host)
        self.held[request.frontend] += self.num_held(request)
        if self._prefix_caching and waited_for:
            self._coming.update(dict.fromkeys(request.digests[request.num_cached_blocks :], request))

    def prefix_grew(self, request: Request) -> bool:
        """Whether more of a waiting request's prefix may be cached than when it was looked up last."""
        n = request.num_cached_blocks
        return (
            n < min(len(request.digests), request.most_cached // self.block_size)
            and self._find((0, request.digests[n])) is not None
        )

    def coming_from(self, request: Request, block: int) -> Request | None:
        """Who computes this block of a waiting request, or did, and still runs."""
        most = min(len(request.digests), request.most_cached // self.block_size)
        return self._coming.get(request.digests[block]) if block < most else None

    def ends_cached(self, request: Request, blocks: int) -> bool:
        """Whether a prefix of `blocks` blocks is cached, given that a running request has published it: what windows
        need of it may have been given up before."""
        for group, window in enumerate(self._windows):
            first = blocks - 1 if window is None else self._first_needed(window, blocks * self.block_size)
            if any(self._find((group, digest)) is None for digest in request.digests[first:blocks]):
                return False
        return True

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
            block = self._find((group, digest))
            if block is None and self._windows[group] is None:
                break  # without a window, nothing after a gap is of use
            blocks.append(block)
        return blocks

    def _find(self, key: Key) -> int | None:
        """The block that holds this prefix, or `ON_HOST`."""
        block = self.pool.find(key)
        return ON_HOST if block is None and self.host is not None and key in self.host else block

    def _load_prefix(self, request: Request, host: HostCache) -> None:
        """Take blocks for those of its prefix that are on the host. The next step loads them before it computes
        anything, so they can be found from now on."""
        found = [(g, i) for g, table in enumerate(request.tables) for i, block in enumerate(table) if block == ON_HOST]
        slots = [host.pin((group, request.digests[i])) for group, i in found]  # before others are evicted to the host
        for (group, i), slot, block in zip(found, slots, self.pool.take(len(found)), strict=True):
            request.tables[group][i] = block
            host.load(slot, block)
            self.pool.publish(block, (group, request.digests[i]))

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

    def blocks_needed(self, request: Request, num_tokens: int, per_step: int) -> int:
        """New blocks for the tables to reach `num_tokens`, held at most at any one time if each step computes at most
        `per_step` tokens."""
        reach = -(-num_tokens // self.block_size)
        needed = 0
        for window, table in zip(self._windows, request.tables, strict=True):
            new = max(0, reach - len(table))
            if window is not None:
                new = min(new, -(-(window - 1 + per_step) // self.block_size) + 1)
            needed += new
        return needed

    def room_needed(self, request: Request, num_tokens: int, per_step: int) -> tuple[int, int]:
        """What it takes to admit a request that `find_prefix` just looked up: free blocks (cached ones that nobody
        uses, new ones as `blocks_needed` counts them, and those to load into), and blocks that it then holds."""
        new, prefix = self.blocks_needed(request, num_tokens, per_step), self.num_held(request)
        listed = (block for table in request.tables for block in table if block != NULL_BLOCK)
        unused = sum(block == ON_HOST or self.pool.is_free(block) for block in listed)
        return new + unused, new + prefix

    def num_held(self, request: Request) -> int:
        """Blocks that its tables list."""
        return sum(len(table) - table.count(NULL_BLOCK) for table in request.tables)

    def extend(self, request: Request, num_computed: int, num_tokens: int, leave: int = 0, ahead: int = 0) -> bool:
        """Let the tables of a running request reach `num_tokens`, giving up what lies behind the windows of the next
        query, at `num_computed`; those without a window reach `ahead`, if that is more. False, and nothing taken, if
        the pool would have fewer than `leave` blocks left."""
        self.drop_behind_windows(request, num_computed)
        ends = [-(-(num_tokens if window else max(num_tokens, ahead)) // self.block_size) for window in self._windows]
        needed = sum(max(0, end - len(table)) for end, table in zip(ends, request.tables, strict=True))
        if needed and needed + leave > self.pool.num_free:
            return False
        self.held[request.frontend] += needed
        for group, (end, table) in enumerate(zip(ends, request.tables, strict=True)):
            first = len(table)
            table += self.pool.take(max(0, end - first))
            self._updates += [(group, request.slot, i, table[i]) for i in range(first, end)]
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
            self.held[request.frontend] -= len(gone)
            self._release(gone)

    def free(self, request: Request) -> None:
        """Take back all its blocks, ends of prefixes first."""
        self.held[request.frontend] -= self.num_held(request)
        for table in request.tables:
            self._release([b for b in reversed(table) if b != NULL_BLOCK])
        request.tables = []
        for digest in request.digests[request.num_cached_blocks :] if self._coming else ():
            if self._coming.get(digest) is request:
                del self._coming[digest]

    def num_on_host(self, request: Request) -> int:
        """Tokens of the prefix that `find_prefix` just found whose keys and values have to be loaded."""
        return len({i for t in request.tables for i, b in enumerate(t) if b == ON_HOST}) * self.block_size

    def take_copies(self) -> Copies:
        """What the next step copies between pool and host."""
        return NO_COPIES if self.host is None else self.host.take_copies()

    def reset_cache(self, pool: bool = True, host: bool = True) -> None:
        """Forget all prefixes in the pool, on the host, or both."""
        if pool:
            self.pool.reset_cache()
        if host and self.host is not None:
            self.host.reset()

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
            blocks = self._deferred.popleft()[1]
            self.num_on_the_way -= len(blocks)
            self.pool.release(blocks)

    def _release(self, blocks: list[int]) -> None:
        if self._newest_step is None:
            self.pool.release(blocks)
        elif blocks:
            self._deferred.append((self._newest_step, blocks))
            self.num_on_the_way += len(blocks)
