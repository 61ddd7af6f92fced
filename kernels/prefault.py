"""Memory that a thread writes to before it is needed.

A system takes about as long to find and clear pages as it takes to pack weights in them; on a virtual machine whose
host has to find them first, several times as long. While a core imports torch, which nothing here does, a processor has
nothing else to do.
"""

from __future__ import annotations

import ctypes
import mmap
from threading import Thread
from typing import NamedTuple

HUGE_PAGE = 2 << 20
CHUNK_BYTES = 256 << 20  # of memory for weights that is taken at once


class _Begun(NamedTuple):
    pages: mmap.mmap
    thread: Thread


_begun: list[_Begun] = []  # at most one


def reserve(num_bytes: int) -> mmap.mmap:
    """That many bytes from any huge page's start on; of such pages, if the system has any. All are zeros."""
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def begin(num_bytes: int) -> None:
    """Begin to write zeros to the first bytes of a chunk."""
    pages = reserve(CHUNK_BYTES)
    thread = Thread(target=_write, args=(pages, num_bytes), name="mainspring-prefault", daemon=True)
    thread.start()
    _begun[:] = [_Begun(pages, thread)]


def _write(pages: mmap.mmap, num_bytes: int) -> None:
    """Holds `pages` while it writes: whoever else held them may be gone."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    ctypes.memset(address, 0, min(num_bytes, CHUNK_BYTES) + -address % HUGE_PAGE)


def take(num_bytes: int) -> mmap.mmap:
    """As `reserve`. For a chunk, it is the memory that was begun with, if there is some."""
    if num_bytes != CHUNK_BYTES or not _begun:
        return reserve(num_bytes)
    pages, thread = _begun.pop()
    thread.join()
    return pages


def drop() -> None:
    """Give back what nobody took."""
    if _begun:
        _begun.pop().thread.join()
