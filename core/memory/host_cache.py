"""The prefix cache's second tier: what the pool forgets is kept in host memory, and comes back when it is asked for."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch

from ...ipc.config import CacheConfig
from ...ipc.errors import InvalidArgumentError, OutOfMemoryError
from ..work.device import Device
from ..work.kv_layout import KVLayout
from .block_pool import Key


class Copies(NamedTuple):
    """Whole blocks to copy before a step computes anything, all saves first. Each is (block of the pool, host slot)."""

    saves: list[tuple[int, int]]
    loads: list[tuple[int, int]]


NO_COPIES = Copies([], [])


class HostCache:
    """Which prefix lies in which of `num_slots` host slots, and what the next step has to copy.

    A block is saved when the pool evicts it, for until the next step it still holds what it held, unless it is here
    already. What is loaded stays here too, so that it is not copied again when it is evicted once more. The least
    recently used goes first. Every operation is O(1), but for those that pass slots of which the next step loads.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._free = list(range(num_slots - 1, -1, -1))
        self._saves: dict[int, int] = {}  # slot → block
        self._loads: dict[int, int] = {}  # block → slot
        self._pinned: set[int] = set()  # slots that the next step loads from

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def pin(self, key: Key) -> int:
        """The slot of a prefix that is here; it stays as it is until the next step."""
        self._slots.move_to_end(key)
        self._pinned.add(slot := self._slots[key])
        return slot

    def load(self, slot: int, block: int) -> None:
        """Let the next step copy a pinned slot to `block`."""
        self._loads[block] = slot

    def evicted(self, block: int, key: Key) -> None:
        """The pool forgets `key`. Its block may not have been loaded yet."""
        self._loads.pop(block, None)
        if key in self._slots:
            self._slots.move_to_end(key)
        elif (slot := self._free.pop() if self._free else self._oldest()) is not None:
            self._slots[key] = slot
            self._saves[slot] = block

    def take_copies(self) -> Copies:
        """Those due since the last call, for the step that is being launched."""
        self._pinned.clear()
        if not (self._saves or self._loads):
            return NO_COPIES
        copies = Copies([(block, slot) for slot, block in self._saves.items()], list(self._loads.items()))
        self._saves, self._loads = {}, {}
        return copies

    def reset(self) -> None:
        """Forget everything. Not while a step is being made."""
        assert not self._loads, "what a request was given is not loaded yet"
        self._slots.clear()
        self._saves.clear()
        self._pinned.clear()
        self._free = list(range(self.num_slots - 1, -1, -1))

    def _oldest(self) -> int | None:
        """A slot to use anew, which loses its name; none if the next step loads from every one."""
        for key, slot in self._slots.items():
            if slot not in self._pinned:
                del self._slots[key]
                return slot
        return None


class HostBlocks:
    """The memory of the slots, ``[slots, block_elements]``, page-locked for a GPU. The host itself reads and writes
    none of it: copies are work of the device, in order with its other work."""

    def __init__(self, device: Device, layout: KVLayout, num_slots: int) -> None:
        self._slots = device.host_blocks((num_slots, layout.block_elements), layout.dtype)

    def copy(self, copies: Copies, pool: torch.Tensor) -> None:
        """Launch `copies` from and to `pool` ``[blocks, block_elements]``. Takes no memory of the device."""
        for block, slot in copies.saves:
            self._slots[slot].copy_(pool[block], non_blocking=True)
        for block, slot in copies.loads:
            pool[block].copy_(self._slots[slot], non_blocking=True)


def offloading_bytes(cache: CacheConfig) -> int:
    """Host memory that cached blocks may take.

    Raises:
        InvalidArgumentError: the two names of the option contradict each other, or nothing is cached.
    """
    size, older = cache.kv_offloading_size, cache.swap_space
    if size is not None and older is not None and size != older:
        raise InvalidArgumentError(
            f"kv_offloading_size is {size} and swap_space, its older name, is {older}: give one of them"
        )
    num_bytes = int((size or older or 0) * 2**30)
    if num_bytes and not cache.enable_prefix_caching:
        name = "kv_offloading_size" if size else "swap_space"
        raise InvalidArgumentError(f"{name} is {size or older}, but without enable_prefix_caching nothing is cached")
    return num_bytes


def count_slots(num_bytes: int, block_bytes: int, free_bytes: int) -> int:
    """Blocks of `block_bytes` that `num_bytes` of host memory hold, of which `free_bytes` are free.

    Raises:
        InvalidArgumentError: not even one.
        OutOfMemoryError: there is not as much memory.
    """
    if num_bytes > free_bytes:
        raise OutOfMemoryError(
            f"kv_offloading_size is {num_bytes / 2**30:.2f} GiB; {free_bytes / 2**30:.2f} GiB of host memory are free"
        )
    if 0 < num_bytes < block_bytes:
        raise InvalidArgumentError(f"kv_offloading_size is {num_bytes} bytes; one KV block takes {block_bytes}")
    return num_bytes // block_bytes
