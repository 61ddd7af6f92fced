"""Host memory for KV blocks that the pool evicts: its size, and the copies to and from it."""

from __future__ import annotations

import torch

from ...ipc.config import CacheConfig
from ...ipc.errors import InvalidArgumentError, OutOfMemoryError
from ..memory.updates import Copies
from .device import Device
from .kv_layout import KVLayout


class HostBlocks:
    """The memory of a `HostCache`, ``[slots, block_elements]``, page-locked if the device is a GPU. Only the device
    copies from and to it, in order with its other work."""

    def __init__(self, device: Device, layout: KVLayout, num_slots: int) -> None:
        self._slots = device.host_blocks((num_slots, layout.block_elements), layout.dtype)

    def copy(self, copies: Copies, pool: torch.Tensor) -> None:
        """Launch `copies` from and to `pool` ``[blocks, block_elements]``. Allocates no device memory."""
        for block, slot in copies.saves:
            self._slots[slot].copy_(pool[block], non_blocking=True)
        for block, slot in copies.loads:
            pool[block].copy_(self._slots[slot], non_blocking=True)


def offloading_bytes(cache: CacheConfig) -> int:
    """Bytes of host memory for evicted blocks, from the configuration.

    Raises:
        InvalidArgumentError: the two names of the option contradict each other, or the prefix cache is disabled.
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
    """The number of blocks of `block_bytes` that fit in `num_bytes`. free_bytes: free host memory.

    Raises:
        InvalidArgumentError: `num_bytes` is less than one block.
        OutOfMemoryError: `num_bytes` is more than `free_bytes`.
    """
    if num_bytes > free_bytes:
        raise OutOfMemoryError(
            f"kv_offloading_size is {num_bytes / 2**30:.2f} GiB; {free_bytes / 2**30:.2f} GiB of host memory are free"
        )
    if 0 < num_bytes < block_bytes:
        raise InvalidArgumentError(f"kv_offloading_size is {num_bytes} bytes; one KV block takes {block_bytes}")
    return num_bytes // block_bytes
