"""The planner's view of memory: block tables with a prefix cache, over all kinds of layers of a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from ..plan.request import Request
from .block_pool import NULL_BLOCK, Key
from .block_rows import BlockRows
from .block_tables import BlockTables
from .host_cache import ON_HOST, HostCache
from .recurrent_state import RecurrentState
from .updates import NO_COPIES, NO_STATE_COPIES, Copies, LayerGroup, StateCopies


class CacheManager(BlockTables):
    """Finds cached prefixes, and gives requests memory for what they compute behind them.

    What the kinds of layers differ in is theirs: a prefix is a hit if it is usable for every kind, a prompt may be cut
    where every kind allows it, and a rejected guess takes a request back as far as any kind needs. A model has at most
    one group of recurrent layers, because a state slot has its place in each of them.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_size: int,
        num_blocks: int,
        prefix_caching: bool,
        host_blocks: int = 0,
    ) -> None:
        super().__init__(groups, block_size, num_blocks)
        self.host = HostCache(host_blocks) if host_blocks else None
        if self.host is not None:
            self.pool.on_evict = self.host.evicted
        self.recurrent = next((kind for kind in self.kinds if isinstance(kind, RecurrentState)), None)
        self.least_cut = max((group.chunk for group in groups), default=1)  # tokens a step must be able to compute
        self._prefix_caching = prefix_caching
        self.rows: BlockRows | None = None
        self._coming: dict[bytes, Request] = {}  # by digest: the running request that has to compute this block

    def keep_rows(self) -> BlockRows | None:
        """From now on a prefix is a hit only if the rows of its blocks are in what is returned; None without a prefix
        cache. Called before any request is looked up."""
        if self._prefix_caching:
            self.rows = BlockRows(self.block_size, self.pool.num_blocks + (self.host.num_slots if self.host else 0))
        return self.rows

    # ------------------------------------------------------------------ prefix cache

    def find_prefix(self, request: Request) -> int:
        """Let the tables of a waiting request list the blocks of the longest cached prefix; returns its length in
        tokens. The request does not own them before `take_prefix`. At least the last token stays to be computed, so
        that no shared block is ever written."""
        request.tables = [[] for _ in self.kinds]
        if not self._prefix_caching:
            return 0
        most = request.most_cached // self.block_size
        if self.recurrent is not None and self.recurrent.prompts_only:  # others may have its output as their prompt
            most = min(most, request.prompt_len // self.block_size)
        request.extend_digests(request.tokens, most * self.block_size, self.block_size)
        if self.rows is not None:
            most = self.rows.usable(request.digests, request.num_routed, most)
        found = [
            kind.look_up(request, most, lambda name, group=group: self._find((group, name)))  # type: ignore[misc]
            for group, kind in enumerate(self.kinds)
        ]
        blocks = self._longest_usable(found, most)
        while (outside := request.cut_at_span(0, blocks * self.block_size)) < blocks * self.block_size:
            blocks = self._longest_usable(found, outside // self.block_size)
        request.tables = [kind.table(cached, blocks) for kind, cached in zip(self.kinds, found, strict=True)]
        request.num_cached_blocks = blocks
        if self.recurrent is not None:
            request.branch = self.block_size * self._longest_usable(found, most, but=self.recurrent)
        return blocks * self.block_size

    def _longest_usable(
        self, found: Sequence[Sequence[int | None]], most: int, but: RecurrentState | None = None
    ) -> int:
        """Blocks of the longest prefix that is usable for all kinds `but` one."""
        kinds = [(kind, cached) for kind, cached in zip(self.kinds, found, strict=True) if kind is not but]
        while (blocks := min((kind.usable(cached, most) for kind, cached in kinds), default=most)) < most:
            most = blocks
        return most

    def take_prefix(self, request: Request, waited_for: bool = True) -> None:
        """Give a request that just got its slot the blocks that `find_prefix` just listed. Other requests may wait for
        the blocks that it computes (see `coming_from`) if it is to be `waited_for`."""
        for table in request.tables:
            self.pool.touch(block for block in table if block > NULL_BLOCK)
        if self.host is not None:
            self._load_prefix(request, self.host)
        self.blocks_used[request.frontend] += self.num_listed(request)
        if self.recurrent is not None:
            self.recurrent.begin(request, request.num_cached_blocks)
        elif self._prefix_caching and waited_for:
            self._coming.update(dict.fromkeys(request.digests[request.num_cached_blocks :], request))

    def room_needed(self, request: Request, num_tokens: int, per_step: int) -> tuple[int, int]:
        """What it takes to admit a request that `find_prefix` just looked up: free blocks (cached ones that no request
        uses, new ones as `blocks_needed` counts them, and those to load into), and blocks that it then holds."""
        new, prefix = self.blocks_needed(request, num_tokens, per_step), self.num_listed(request)
        listed = (block for table in request.tables for block in table if block != NULL_BLOCK)
        unused = sum(block == ON_HOST or self.pool.is_free(block) for block in listed)
        return new + unused, new + prefix

    def prefix_grew(self, request: Request) -> bool:
        """Whether more of a waiting request's prefix may be cached than when it was looked up last."""
        n = request.num_cached_blocks
        if n >= min(len(request.digests), request.most_cached // self.block_size):
            return False
        if self.recurrent is not None:
            return self.recurrent.may_have_grown(request)
        return self._find((0, request.digests[n])) is not None

    def coming_from(self, request: Request, block: int) -> Request | None:
        """The running request that computes this block of a waiting request, or has computed it. With recurrent layers
        there is none: the waiting request could continue only where the running one takes a snapshot."""
        most = min(len(request.digests), request.most_cached // self.block_size)
        return self._coming.get(request.digests[block]) if block < most else None

    def ends_cached(self, request: Request, blocks: int) -> bool:
        """Whether a prefix of `blocks` blocks is a hit, given that a running request has published it: blocks that a
        window needs may have been given up before."""
        return all(
            self._find((group, name)) is not None
            for group, kind in enumerate(self.kinds)
            for name in kind.names(request)[kind.first_to_check(blocks) : blocks]
        )

    def publish(self, request: Request, first: int, last: int) -> None:
        """Let blocks `first` to `last` (exclusive) be found: they are full, and their step has succeeded."""
        if not self._prefix_caching:
            return
        if self.recurrent is not None and self.recurrent.prompts_only:
            last = min(last, request.prompt_len // self.block_size)
        for group, (kind, table) in enumerate(zip(self.kinds, request.tables, strict=True)):
            if table and (columns := kind.columns_to_publish(request, first, last)):
                names = kind.names(request)
                for i in columns:
                    if table[i] != NULL_BLOCK:
                        self.pool.publish(table[i], (group, names[i]))
        if self.recurrent is not None:
            self.recurrent.publish(request, last)

    def free(self, request: Request) -> None:
        super().free(request)
        if self.recurrent is not None:
            self.recurrent.free(request)
        for digest in request.digests[request.num_cached_blocks :] if self._coming else ():
            if self._coming.get(digest) is request:
                del self._coming[digest]

    def reset_cache(self, pool: bool = True, host: bool = True) -> None:
        """Forget all prefixes in the pool, on the host, or both."""
        if pool:
            if self.rows is not None:
                self.rows.clear()
            self.pool.reset_cache()
            if self.recurrent is not None:
                self.recurrent.snapshots.reset_cache()
        if host:
            for cache in (self.host, None if self.recurrent is None else self.recurrent.host):
                if cache is not None:
                    cache.reset()

    def _find(self, key: Key) -> int | None:
        """The block that holds this prefix, or `ON_HOST`."""
        block = self.pool.find(key)
        return ON_HOST if block is None and self.host is not None and key in self.host else block

    # ------------------------------------------------------------------ host memory

    def num_on_host(self, request: Request) -> int:
        """Tokens of the prefix that `find_prefix` just found whose blocks have to be loaded; all of them if it is the
        state."""
        if self.recurrent is not None and self.recurrent.is_on_host(request, request.num_cached_blocks):
            return request.num_cached_blocks * self.block_size
        return len({i for t in request.tables for i, b in enumerate(t) if b == ON_HOST}) * self.block_size

    def take_copies(self) -> Copies:
        """The copies between pool and host that the next step makes."""
        return NO_COPIES if self.host is None else self.host.take_copies()

    def _load_prefix(self, request: Request, host: HostCache) -> None:
        """Take blocks for the part of its prefix that is on the host. The next step loads them before it computes
        anything, so they can be found from now on."""
        found = [
            (group, i, (group, names[i]))
            for group, (kind, table) in enumerate(zip(self.kinds, request.tables, strict=True))
            if ON_HOST in table
            for names in [kind.names(request)]
            for i, block in enumerate(table)
            if block == ON_HOST
        ]
        slots = [host.pin(key) for *_, key in found]  # before others are evicted to the host
        for (group, i, key), slot, block in zip(found, slots, self.pool.take(len(found)), strict=True):
            request.tables[group][i] = block
            host.load(slot, block)
            self.pool.publish(block, key)

    # ------------------------------------------------------------------ chunking, speculation, state

    def cut(self, request: Request, start: int, count: int) -> int:
        """How many of the next `count` tokens of a request, from position `start`, a step may compute so that it stops
        where all kinds allow it; maybe 0."""
        while any((cut := kind.cut(request, start, count)) < count for kind in self.kinds):
            count = cut
        return count

    def roll_back(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Guesses of the requests at `slots` were rejected. The step computed tokens from `starts`, of which those
        before `ends` are accepted. Returns how many tokens count as computed now; the rest is computed again."""
        for kind in self.kinds:
            ends = np.minimum(ends, kind.roll_back(slots, starts, ends))
        return ends

    def steps_before_snapshot(self, computed: np.ndarray) -> int:
        """How many steps requests with so many computed tokens (int64 ``[rows]``) can make, each of a token, before one
        after which a state of them may be due to be kept."""
        if self.recurrent is None or not self._prefix_caching:
            return sys.maxsize
        return self.recurrent.steps_before_snapshot(computed)

    def take_state_copies(
        self, running: Mapping[int, Request], slots: np.ndarray, ends: np.ndarray, guessed: np.ndarray
    ) -> StateCopies:
        """The copies between state slots that a step makes. Its rows compute the tokens of the `running` requests at
        `slots` up to `ends`, of which the last `guessed` are guesses (int64 ``[rows]``)."""
        if self.recurrent is None:
            return NO_STATE_COPIES
        return self.recurrent.take_copies(running, slots, ends, guessed, self._prefix_caching)
