"""Recurrent state: one fixed amount of memory per request, which each token changes.

A state slot holds the state of one sequence in all recurrent layers. Block tables have no part in it. Slots are
numbered so that the worker can find them without a table:

- 0: the initial state. It is only read, by a request that begins at position 0.
- ``1 + slot``: the running state of the request at `slot`.
- ``1 + slots + slot``: a backup of that state, from before a step that verifies guesses, where there are guesses.
- all further ones: snapshots for the prefix cache, allocated like blocks and evicted in the same order.

A snapshot that is evicted is saved to host memory, and loaded into a new one when a request begins there.

A state cannot be cut back to an earlier token, so a prefix is usable only where a snapshot was taken, and a rejected
guess takes the request back to the backup. Snapshots are sparse because a state is as large as the keys and values of
many tokens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from ..plan.request import Request
from .block_pool import BlockPool, Key
from .host_cache import ON_HOST, HostCache
from .layer_rules import Find, LayerKind
from .updates import NO_COPIES, NO_STATE_COPIES, LayerGroup, StateCopies

INITIAL_STATE = 0
SNAPSHOT = 0  # in keys of the pool of snapshots, in place of a group: one group of a model is recurrent


class RecurrentState(LayerKind):
    """The planner's side of recurrent state. A prefix is usable if there is a snapshot at its end.

    A prompt is cut where a snapshot is due: at its last full block, where the cached keys and values of another request
    end (`Request.branch`), and every `snapshot_every` tokens. While a request decodes, its newest snapshot replaces the
    one before and is cached when the request leaves its slot. Kernels that compute a prompt in chunks give other bits
    than token by token, so with chunks there are no snapshots of decoded tokens; nor are there if the model computes a
    generated token otherwise (`LayerGroup.prompts_only`).
    """

    def __init__(self, group: LayerGroup, block_size: int) -> None:
        super().__init__(group, block_size)
        self.snapshots = BlockPool(1 + group.snapshots)
        self._slots, self._chunk = group.slots, group.chunk
        self._generated = group.chunk == 1 and not group.prompts_only  # whether states behind the prompt are cached
        self.prompts_only = group.prompts_only
        self._before_snapshots = num_states(group) - 1 - group.snapshots
        self._unit = math.lcm(block_size, group.chunk)  # tokens; snapshots of prompts are taken at its multiples
        self._every = max(1, group.snapshot_every // self._unit) * self._unit
        self._taken: dict[Request, list[tuple[int, int]]] = {}  # (tokens, snapshot), of steps that have not retired
        self._newest: dict[Request, tuple[int, int]] = {}  # the same, of the last one behind the prompt
        self._restores: dict[int, int] = {}  # state slot → the one to copy from
        self._held: list[int] = []  # snapshots to copy from: not to be evicted before the next step is made
        self.host: HostCache | None = None  # its loads and saves name state slots
        if group.host_snapshots:
            self.host = HostCache(group.host_snapshots)
            self.snapshots.on_evict = self._save

    # ------------------------------------------------------------------ allocation

    def num_columns(self, num_tokens: int, ahead: int = 0) -> int:
        return 0

    def begin(self, request: Request, blocks: int) -> None:
        """A request that continues from a usable prefix of `blocks` blocks got its slot."""
        source, target = INITIAL_STATE, 1 + request.slot
        if blocks:
            snapshot = self._find(key := self._key(request, blocks))
            assert snapshot is not None, "a prefix without a snapshot was taken for usable"
            if snapshot == ON_HOST:
                snapshot = self._load(key, target)
            elif self.snapshots.is_free(snapshot):  # else it is held already
                self.snapshots.touch([snapshot])
                self._held.append(snapshot)
            if self.host is None:
                self._let_go()
            source = target if snapshot is None else self._place(snapshot)
        self._restores.pop(target, None)
        if source != target:
            self._restores[target] = source

    def free(self, request: Request) -> None:
        """A request leaves its slot."""
        self.snapshots.release(snapshot for _, snapshot in self._taken.pop(request, ()))
        if request in self._newest:
            tokens, snapshot = self._newest.pop(request)
            self._cache(request, tokens, snapshot)

    # ------------------------------------------------------------------ prefix cache

    def look_up(self, request: Request, most: int, find: Find) -> list[int | None]:
        return [self._find((SNAPSHOT, name)) for name in request.digests[:most]]

    def usable(self, cached: Sequence[int | None], most: int) -> int:
        return next((blocks for blocks in range(min(len(cached), most), 0, -1) if cached[blocks - 1] is not None), 0)

    def table(self, cached: Sequence[int | None], blocks: int) -> list[int]:
        return []

    def may_have_grown(self, request: Request) -> bool:
        """Whether there is a snapshot behind the prefix that was usable when the request was looked up last."""
        known, tokens = len(request.digests), request.num_cached_blocks * self.block_size
        while (tokens := self._next_due(request, tokens)) // self.block_size <= known and tokens < request.prompt_len:
            if self._find(self._key(request, tokens // self.block_size)) is not None:
                return True
        return False

    def is_on_host(self, request: Request, blocks: int) -> bool:
        """Whether the state after the first `blocks` blocks has to be loaded."""
        return blocks > 0 and self._find(self._key(request, blocks)) == ON_HOST

    def publish(self, request: Request, blocks: int) -> None:
        """The first `blocks` blocks of a request are computed, in steps that have succeeded."""
        taken = self._taken.get(request, [])
        while taken and taken[0][0] <= blocks * self.block_size:
            tokens, snapshot = taken.pop(0)
            if tokens <= request.prompt_len:
                self._cache(request, tokens, snapshot)
                continue
            if request in self._newest:
                self.snapshots.release([self._newest[request][1]])
            self._newest[request] = tokens, snapshot

    def _cache(self, request: Request, tokens: int, snapshot: int) -> None:
        self.snapshots.publish(snapshot, self._key(request, tokens // self.block_size))
        self.snapshots.release([snapshot])

    def _key(self, request: Request, blocks: int) -> Key:
        return SNAPSHOT, request.digests[blocks - 1]

    def _find(self, key: Key) -> int | None:
        """The snapshot that holds this prefix, or `ON_HOST`."""
        snapshot = self.snapshots.find(key)
        return ON_HOST if snapshot is None and self.host is not None and key in self.host else snapshot

    # ------------------------------------------------------------------ host memory

    def _load(self, key: Key, target: int) -> int | None:
        """Let the next step load a state into a snapshot, which can be found from now on. If no snapshot is free, let
        it load the state to `target`, and return None."""
        assert self.host is not None
        slot = self.host.pin(key)  # before another snapshot is evicted to the host
        if not self.snapshots.num_free:
            self.host.load(slot, target)
            return None
        (snapshot,) = self.snapshots.take(1)
        self._held.append(snapshot)
        self.host.load(slot, self._place(snapshot))
        self.snapshots.publish(snapshot, key)
        return snapshot

    def _save(self, snapshot: int, key: Key) -> None:
        """The pool of snapshots forgets `key`."""
        assert self.host is not None
        self.host.evicted(self._place(snapshot), key)

    def _let_go(self) -> None:
        """Allow what was held to be evicted, as the most recently used."""
        self.snapshots.release(self._held)
        self._held = []

    # ------------------------------------------------------------------ chunking and speculation

    def cut(self, request: Request, start: int, count: int) -> int:
        if start >= request.prompt_len:
            return count
        end = start + count
        if (due := self._next_due(request, start)) < request.prompt_len:
            end = min(end, due)
        if end < request.prompt_len:
            end -= end % self._chunk
        return max(0, end - start)

    def roll_back(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        self._restores.update((1 + slot, 1 + self._slots + slot) for slot in slots.tolist())
        return starts

    def _next_due(self, request: Request, start: int) -> int:
        """The first position behind `start` at which a prompt gets a snapshot."""
        due = (start // self._every + 1) * self._every
        for tokens in (request.branch, request.prompt_len - 1, request.prompt_len):
            at = tokens // self._unit * self._unit
            if start < at < due:
                due = at
        return due

    # ------------------------------------------------------------------ a step

    def take_copies(
        self, running: Mapping[int, Request], slots: np.ndarray, ends: np.ndarray, guessed: np.ndarray, caching: bool
    ) -> StateCopies:
        """The copies of a step that is being launched. Its rows compute the tokens of the requests at `slots` up to
        `ends`, of which the last `guessed` are guesses (int64 ``[rows]``)."""
        guessing = slots[guessed > 0]
        snapshots = []
        for row in np.flatnonzero((ends % self.block_size == 0) & (guessed == 0)).tolist() if caching else ():
            request, end = running[int(slots[row])], int(ends[row])
            if self._is_due(request, end) and self.snapshots.num_free:
                (snapshot,) = self.snapshots.take(1)
                self._taken.setdefault(request, []).append((end, snapshot))
                snapshots.append((1 + request.slot, self._place(snapshot)))
        self._let_go()  # not earlier: a snapshot that has not been loaded must not be evicted
        host = NO_COPIES if self.host is None else self.host.take_copies()
        if not (self._restores or guessing.size or snapshots or host is not NO_COPIES):
            return NO_STATE_COPIES
        restores, self._restores = [(source, target) for target, source in self._restores.items()], {}
        return StateCopies(
            _columns(restores),
            np.stack([1 + guessing, 1 + self._slots + guessing]).astype(np.int32),
            _columns(snapshots),
            host,
        )

    def steps_before_snapshot(self, computed: np.ndarray) -> int:
        """See `CacheManager.steps_before_snapshot`."""
        steps = int((self.block_size - 1 - computed % self.block_size).min())
        return steps if self._keeps_generated or not steps else sys.maxsize

    @property
    def _keeps_generated(self) -> bool:
        """Whether states behind the prompt are kept. Prompts go first: half of the snapshots are theirs."""
        return self._generated and self.snapshots.num_free + len(self._held) > self.snapshots.num_blocks // 2

    def _is_due(self, request: Request, end: int) -> bool:
        """Whether to take a snapshot after the first `end` tokens, whole blocks of them, if nobody has it."""
        if end > request.prompt_len:
            return self._keeps_generated
        if self._next_due(request, end - 1) != end:
            return False
        blocks = end // self.block_size
        return len(request.digests) < blocks or self.snapshots.find(self._key(request, blocks)) is None

    def _place(self, snapshot: int) -> int:
        """The state slot of a snapshot, which is counted from 1."""
        return self._before_snapshots + snapshot


def num_states(group: LayerGroup) -> int:
    """State slots of a group: the initial state, running states, backups and snapshots."""
    return 1 + group.slots * (2 if group.backups else 1) + group.snapshots


def _columns(copies: list[tuple[int, int]]) -> np.ndarray:
    return np.array(copies, np.int32).reshape(-1, 2).T
