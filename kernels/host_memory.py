"""Large memory on the host."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from itertools import pairwise

import torch

from . import prefault
from .prefault import HUGE_PAGE


def zeros(num_bytes: int) -> torch.Tensor:
    """uint8 ``[num_bytes]``, aligned to huge pages, and made of them if the system has any. A page takes memory when it
    is first written to; torch's own zeros take all of it at once."""
    pages = prefault.take(num_bytes)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    if not num_bytes:
        return whole[:0]
    # a tensor whose storage begins at this address: torch checks whether a storage is page-locked
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=start)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.cat(tensors)``, without a copy where one lies right behind the other, as some do in a checkpoint's file:
    the result then shares their memory, and keeps it."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    kinds = {(one.device.type, one.dtype, one.is_contiguous(), one.shape[1:]) for one in tensors}
    apart = any(one.data_ptr() + one.nbytes != after.data_ptr() for one, after in pairwise(tensors))
    if apart or kinds != {("cpu", first.dtype, True, first.shape[1:])}:
        return torch.cat(list(tensors))
    memory = (ctypes.c_char * sum(one.nbytes for one in tensors)).from_address(first.data_ptr())
    memory.owners = [one.untyped_storage() for one in tensors]  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=first.dtype).view(-1, *first.shape[1:])


def give_back(tensor: torch.Tensor) -> None:
    """Return the memory of a contiguous tensor to the system; its numbers are undefined from then on. Other processes
    can use the memory at once, which a deleted tensor does not ensure. Pages of a mapped file are read again when they
    are needed."""
    page = mmap.PAGESIZE
    begin, end = -(-tensor.data_ptr() // page) * page, (tensor.data_ptr() + tensor.nbytes) // page * page
    if 0 < begin < end and tensor.device.type == "cpu" and tensor.is_contiguous() and hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def trim() -> None:
    """Return freed memory between allocations in use to the system, if the C library can."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
