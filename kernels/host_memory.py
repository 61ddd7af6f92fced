"""Large memory on the host."""

from __future__ import annotations

import ctypes
import mmap

import torch

HUGE_PAGE = 2 << 20


def zeros(num_bytes: int) -> torch.Tensor:
    """uint8 ``[num_bytes]``, aligned to huge pages, in which it lies where the system has them. It takes memory only
    where it is written to, and torch's own zeros take all of it at once."""
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    if not num_bytes:
        return whole[:0]
    # one whose storage begins there: torch asks whether that is page-locked
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=start)


def give_back(tensor: torch.Tensor) -> None:
    """Let the system have the memory of a contiguous tensor, whose numbers are undefined from then on. Unlike what is
    freed, it is free at once and for everybody; the pages of a mapped file are read again where they are needed."""
    page = mmap.PAGESIZE
    begin, end = -(-tensor.data_ptr() // page) * page, (tensor.data_ptr() + tensor.nbytes) // page * page
    if begin < end and tensor.device.type == "cpu" and tensor.is_contiguous() and hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def trim() -> None:
    """Let the system have what was freed and lies between what is in use, where the C library can."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
