"""Invariant 1 for the engine's block pools: no block is lost, and none is shared by mistake."""

from __future__ import annotations

from collections.abc import Mapping

from mainspring.core.memory.block_pool import BlockPool
from mainspring.core.memory.host_cache import HostCache


def check_pool(pool: BlockPool, references: Mapping[int, int]) -> None:
    """Check the pool, given how often live requests list each block."""
    assert not any(pool._refs[b] for b in pool._free), "a free block has references"
    held = {block: count for block, count in enumerate(pool._refs) if count}
    assert held == {block: count for block, count in references.items() if count}, "references of blocks"
    assert len(pool._free) + len(held) == pool.num_blocks - 1, "a block is neither free nor in use"
    assert all(pool._key[b] == k for k, b in pool._cached.items()), "the hash map names a block that forgot it"


def check_host(host: HostCache) -> None:
    """Check host memory; call it between steps."""
    assert sorted([*host._free, *host._slots.values()]) == list(range(host.num_slots)), "slots are lost or shared"
    assert host._saves.keys() <= set(host._slots.values()), "a save without a name"
    assert set(host._loads.values()) <= host._pinned, "a slot may be taken before it is loaded"
