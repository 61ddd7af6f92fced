"""Block tables: which blocks of the pool hold what the layers of each group keep of a request."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from ..plan.request import Request
from .block_pool import NULL_BLOCK, BlockPool
from .layer_kinds import kind_of
from .updates import LayerGroup, TableUpdate


class BlockTables:
    """Gives blocks to requests and takes them back, by the rules of each group's kind.

    Blocks given up while steps are in flight return to the pool when the last of those steps has retired, because a
    kernel may still be reading them.
    """

    def __init__(self, groups: Sequence[LayerGroup], block_size: int, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.kinds = [kind_of(group, block_size) for group in groups]
        self.block_size = block_size
        self.blocks_used: Counter[int] = Counter()  # by frontend: blocks that its running requests list
        self.num_on_the_way = 0  # blocks that come back when a step in flight retires; shared ones count several times
        self._deferred: deque[tuple[int, list[int]]] = deque()  # (step to wait for, blocks)
        self._newest_step: int | None = None  # in flight
        self._updates: list[tuple[int, int, int, int]] = []

    # ------------------------------------------------------------------ how many

    @property
    def num_blocks(self) -> int:
        """Blocks that can be given out."""
        return self.pool.num_blocks - 1

    @property
    def num_in_use(self) -> int:
        return self.pool.num_in_use

    def num_free(self, request: Request) -> int:
        """Blocks that this request may have, cached ones included."""
        return self.pool.num_free

    def num_coming(self, request: Request) -> int:
        """The same of those that come back when a step in flight retires."""
        return self.num_on_the_way

    def blocks_needed(self, request: Request, num_tokens: int, per_step: int) -> int:
        """New blocks for the tables to reach `num_tokens`, as many as are held at one time if each step computes at
        most `per_step` tokens."""
        pairs = zip(self.kinds, request.tables, strict=True)
        return sum(kind.new_blocks(len(table), num_tokens, per_step) for kind, table in pairs)

    def num_listed(self, request: Request) -> int:
        """Blocks that the tables of a request list."""
        return sum(len(table) - table.count(NULL_BLOCK) for table in request.tables)

    # ------------------------------------------------------------------ allocation

    def extend(self, request: Request, num_computed: int, num_tokens: int, leave: int = 0, ahead: int = 0) -> bool:
        """Let the tables of a running request reach `num_tokens`, or `ahead` where a kind takes blocks early, and give
        up the blocks that the next query, at `num_computed`, does not read. False, and nothing taken, if the pool would
        have fewer than `leave` blocks left."""
        self._drop_unread(request, num_computed)
        ends = [kind.num_columns(num_tokens, ahead) for kind in self.kinds]
        needed = sum(max(0, end - len(table)) for end, table in zip(ends, request.tables, strict=True))
        if needed and needed + leave > self.pool.num_free:
            return False
        self.blocks_used[request.frontend] += needed
        for group, (end, table) in enumerate(zip(ends, request.tables, strict=True)):
            first = len(table)
            table += self.pool.take(max(0, end - first))
            self._updates += [(group, request.slot, i, table[i]) for i in range(first, end)]
        return True

    def show(self, request: Request) -> None:
        """Send the whole of the tables to the worker: the request just got its slot."""
        for group, table in enumerate(request.tables):
            self._updates += [(group, request.slot, i, block) for i, block in enumerate(table)]

    def _drop_unread(self, request: Request, num_computed: int) -> None:
        for group, (kind, table) in enumerate(zip(self.kinds, request.tables, strict=True)):
            unread, gone = kind.unread(num_computed), []
            for i in range(min(unread.stop, len(table)) - 1, unread.start - 1, -1):
                if table[i] == NULL_BLOCK:  # those before were given back earlier
                    break
                gone.append(table[i])
                table[i] = NULL_BLOCK
                self._updates.append((group, request.slot, i, NULL_BLOCK))
            if gone:
                self.blocks_used[request.frontend] -= len(gone)
                self._release(gone)

    def free(self, request: Request) -> None:
        """Take back all blocks of a request, ends of prefixes first."""
        self.blocks_used[request.frontend] -= self.num_listed(request)
        for table in request.tables:
            self._release([block for block in reversed(table) if block != NULL_BLOCK])
        request.tables = []
        # another pool's request may get the slot in the same step, and its entries may come first
        self._updates = [update for update in self._updates if update[1] != request.slot]

    # ------------------------------------------------------------------ steps

    def take_updates(self) -> TableUpdate:
        """Table changes since the last call."""
        columns = np.array(self._updates, dtype=np.int32).reshape(-1, 4).T
        self._updates = []
        return TableUpdate(*columns)

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
