"""Which rows of a step each FlashInfer kernel gets, and, where bits must not depend on the batch, in which pieces.

All of it is index arithmetic on whole arrays, on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..contract import AttentionSpec, PagedBatch
from ..reference.attention_plan import KV_TILE

DETERMINISTIC_SPLIT = 8192
"""Keys of one program where bits must not depend on the batch: counted from a request's first, so that how they are
shared out depends on a row's position alone."""

QUERY_TILE = 16
"""FA2's smallest tile of (query row, query head) pairs of one KV head. FlashInfer takes it for a batch whose requests
have no more of these on average."""

LARGEST_TILE = 128

CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)  # query heads per KV head that the decode kernel without tensor cores knows

TWO_LAUNCHES_FROM_BYTES = 8 << 20
TWO_LAUNCHES_FROM_KEYS = 1024

Ints = npt.NDArray[np.int64]


class Kind(NamedTuple):
    """What a wrapper is made for: what FlashInfer compiles, but for the kernel, and what its runs have in common."""

    spec: AttentionSpec
    dim: int  # of a head in the cache: 64, 128 or 256
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.spec.num_q_heads // self.spec.num_kv_heads

    @property
    def common(self) -> dict[str, Any]:
        """Arguments that all wrappers' ``plan`` take. FlashInfer counts the keys left of a query, without its own."""
        spec = self.spec
        return {
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.softcap or 0.0,
            "sm_scale": spec.scale,
            "q_data_type": self.dtype,
            "kv_data_type": self.kv_dtype,
        }

    def tensor_cores(self) -> bool:
        """Whether rows that decode go to FA2's kernel, for tensor cores, instead of the one that needs none.

        They must where the other knows no such group, and should where keys lie behind a window, which it would read
        and mask. It multiplies the keys it loaded with the group's queries one after the other: on an H200 the
        kernel for tensor cores is faster for groups of four at all lengths, and slower for groups of two up to some
        1,000 keys. An fp8 cache halves the time to load; that is then taken to be the shorter part (not measured).
        """
        return (
            self.group not in CUDA_CORE_GROUPS
            or self.group >= 4
            or self.spec.window is not None
            or self.kv_dtype != self.dtype
        )

    @property
    def decode_tile(self) -> int:
        """Pairs in a tile where each request has one row."""
        return QUERY_TILE if self.group <= QUERY_TILE else 64 if self.group <= 64 else self.prefill_tile

    @property
    def prefill_tile(self) -> int:
        """Most pairs in a tile."""
        return LARGEST_TILE if self.dim < 256 else LARGEST_TILE // 2

    def partial_bytes(self, tiles: int, tile: int) -> int:
        """What FA2 reserves for the partial results of so many tiles, each with `tile` pairs of every KV head."""
        return self.spec.num_q_heads * tiles * tile * (self.dim + 1) * 4


def two_launches(kind: Kind, kv_lens: Ints) -> bool:
    """The cost rule: whether rows that decode, seeing so many keys each, get a launch of their own beside a prefill.

    A second launch takes a layer some 5 µs. In the prefill kernel a tile of 64 to 128 rows is all but empty with one
    row in it, and its keys pass at about a third of the memory's speed: 8 MiB of them lose those 5 µs (at 4 TB/s). FA3
    shares no request's keys out, so one program reads all of them, some 1,024 in 5 µs.
    """
    spec = kind.spec
    seen = kv_lens if spec.window is None else np.minimum(kv_lens, spec.window)
    read = int(seen.sum()) * spec.num_kv_heads * 2 * kind.dim * kind.kv_dtype.itemsize
    return read > TWO_LAUNCHES_FROM_BYTES or int(seen.max()) > TWO_LAUNCHES_FROM_KEYS


class Pieces(NamedTuple):
    """Requests cut so that the bits of a row depend on its position alone. All int64 ``[pieces]``."""

    rows: Ints
    first_page: Ints  # where its pages begin in the batch's kv_indices
    num_pages: Ints
    kv_len: Ints  # counted from the beginning of its first page
    chunks: Ints  # programs that share its keys out


def cut_into_pieces(batch: PagedBatch, kind: Kind, step: int | None = None) -> Pieces:
    """Pieces of `step` rows, or that fill one query tile, each a request of its own that ends with its own last row.

    They are cut at positions that are multiples of their size, a power of two: so of a piece's rows none sees a tile,
    or a share, of keys that another does not. FA2 counts the tiles of a window from the first key that the first row
    of a request sees; there each row is a piece, and pages before its window are left out (as many as fill whole tiles
    of the reference backend: through FlashInfer's stand-in, a row then has the bits it has with all its pages).
    """
    size = batch.block_size
    qo_indptr, kv_indptr = batch.qo_indptr.numpy().astype(np.int64), batch.kv_indptr.numpy().astype(np.int64)
    end = kv_lengths(batch)
    start = end - np.diff(qo_indptr)
    window = kind.spec.window
    if step is None:
        step = 1 if window is not None else 1 << ((QUERY_TILE // kind.group).bit_length() - 1)
    first = start // step
    count = -(-end // step) - first
    owner = np.repeat(np.arange(len(count)), count)
    cut = (first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)) * step
    begin, stop = np.maximum(cut, start[owner]), np.minimum(cut + step, end[owner])
    skipped = np.zeros_like(begin)
    if window is not None:
        skipped = np.maximum(begin - window + 1, 0) // KV_TILE * KV_TILE // size
    num_pages = -(-stop // size) - skipped
    shared = num_pages if window is None else np.minimum(num_pages, -(-(window - 1 + QUERY_TILE) // size))
    return Pieces(
        stop - begin,
        kv_indptr[:-1][owner] + skipped,
        num_pages,
        stop - skipped * size,
        -(-shared // (DETERMINISTIC_SPLIT // size)),
    )


def kv_lengths(batch: PagedBatch) -> Ints:
    """Keys of each request."""
    pages = np.diff(batch.kv_indptr.numpy().astype(np.int64))
    lengths: Ints = (pages - 1) * batch.block_size + batch.last_page_len.numpy()
    return lengths
