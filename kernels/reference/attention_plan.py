"""The attention plan of the reference backend: which query rows meet which keys, and in what order.

The rows of a step are cut into *items*: up to ``query_tile`` neighbouring rows of one request (one row for a request
that decodes). The keys are cut into tiles of `KV_TILE` positions, counted from position 0 of the request, so a tile
means the same thing whichever step looks at it. A *pair* is one item and one tile it can see; a step's work is the list
of its pairs. They are listed wave by wave (the first visible tile of every item, then the second, …) with the items
sorted by how many tiles they see, so that the items of a wave are always a prefix of the items, and each item meets its
tiles in ascending order. Chunks of neighbouring pairs, small enough for the processor's cache, are computed together.

All of it is index arithmetic on whole arrays: no Python loop runs over requests, rows or pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..contract import AttentionSpec, PagedBatch

KV_TILE = 64
"""Key positions per tile. Part of the result's bits: sums are formed tile by tile. 64 beat 128 on an AVX-512 CPU, where
a step's tiles then stay in the cache and a short request wastes less of its last one."""

MAX_QUERY_TILE = 64
"""Most rows per item. Not part of the bits: the rows of an item never meet."""

MASKED = -1e30
"""Added to the score of a key a row must not see. Finite, so that a tile in which a row sees nothing yields finite
rubbish that the combination multiplies by an exact zero, where minus infinity would yield NaN."""

CHUNK_KEYS = 1 << 21
CHUNK_SCORES = 1 << 19
"""Most elements of keys, of values and of scores that one chunk of pairs holds: in bf16 4 MiB, 4 MiB and 2 MiB."""

Ints = npt.NDArray[np.int64]


class Segment(NamedTuple):
    """The part of a chunk that lies in one wave: each of its pairs has another item, and the items are neighbours."""

    items: slice  # into the set's items
    pairs: slice  # into the chunk's pairs


class Chunk(NamedTuple):
    """Neighbouring pairs that are computed together."""

    pairs: slice  # into the set's pairs
    items: slice | torch.Tensor  # the item of each pair; a slice where the chunk is one segment
    segments: list[Segment]  # in ascending order of tile for every item
    mask: torch.Tensor | None  # fp32 [pairs, 1, query_tile, 1, KV_TILE], 0 or MASKED; None: every row sees every key
    query_indices: torch.Tensor | None  # int64 [pairs, query_tile], in their sequences; None: scores have no bias
    key_indices: torch.Tensor | None  # int64 [pairs, KV_TILE]


class WorkSet:
    """Items of one size and their pairs, sorted and chunked.

    Attributes:
        query_rows: int64 ``[items * query_tile]``: the query row in each place of each item. Places past the end of a
            request repeat its last row, so they compute, and later write, what that row does.
        chunks: all pairs, in order.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        batch: PagedBatch,
        requests: Ints,
        query_tile: int,
        chunk_pairs: int,
        device: torch.device,
    ) -> None:
        """Plan the rows of ``requests`` (indices into the batch) in items of ``query_tile`` rows."""
        self._spec = spec
        self._device = device
        self.query_tile = query_tile
        qo_indptr, kv_indptr = batch.qo_indptr.numpy().astype(np.int64), batch.kv_indptr.numpy().astype(np.int64)
        num_rows = np.diff(qo_indptr)[requests]
        kv_len = (np.diff(kv_indptr)[requests] - 1) * batch.block_size + batch.last_page_len.numpy()[requests]

        items_per_request = -(-num_rows // query_tile)
        owner = np.repeat(np.arange(len(requests)), items_per_request)
        first_row = (np.arange(len(owner)) - _starts(items_per_request)[owner]) * query_tile
        last_row = np.minimum(first_row + query_tile, num_rows[owner]) - 1
        chunk_start = (kv_len - num_rows)[owner]  # index of the request's first query row in its sequence
        places = np.minimum(first_row[:, None] + np.arange(query_tile), last_row[:, None])
        rows = qo_indptr[requests[owner]][:, None] + places  # [items, query_tile], and so are the next two
        own = chunk_start[:, None] + places
        reach = own if batch.reach is None else batch.reach.numpy().astype(np.int64)[rows]
        oldest_visible = np.zeros_like(chunk_start)
        if spec.window is not None:
            oldest_visible = np.maximum(chunk_start + first_row - spec.window + 1, 0)
        last_visible = reach.max(axis=1)
        first_tile = oldest_visible // KV_TILE
        num_tiles = last_visible // KV_TILE - first_tile + 1

        order = np.argsort(-num_tiles, kind="stable")
        owner, num_tiles, first_tile = owner[order], num_tiles[order], first_tile[order]
        oldest_visible, last_visible, rows = oldest_visible[order], last_visible[order], rows[order]
        self._own, self._reach = own[order], reach[order]
        self.num_items = len(order)
        self.query_rows = self._tensor(rows.reshape(-1))

        # Wave j holds the items that see more than j tiles: the prefix of that length.
        wave_sizes = np.searchsorted(-num_tiles, -np.arange(num_tiles[0]), side="left")
        wave_starts = _starts(wave_sizes)
        wave = np.repeat(np.arange(len(wave_sizes)), wave_sizes)
        item = np.arange(len(wave)) - wave_starts[wave]
        keys = (first_tile[item] + wave)[:, None] * KV_TILE + np.arange(KV_TILE)  # [pairs, KV_TILE]

        # A key that no row of the item may see is replaced by one that some row does see, before it is masked: what
        # lies in the null block, or behind the end of the last block, is never read, whatever it holds.
        readable = np.clip(keys, oldest_visible[item][:, None], last_visible[item][:, None])
        table_start = kv_indptr[requests[owner]][item]
        self._blocks = batch.kv_indices.numpy()[table_start[:, None] + readable // batch.block_size].astype(np.int64)
        self._offsets = readable % batch.block_size
        self._row_indices: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self.chunks = list(self._cut(chunk_pairs, wave_starts, item, keys))

    def _cut(self, chunk_pairs: int, wave_starts: Ints, item: Ints, keys: Ints) -> Iterator[Chunk]:
        """The pairs in chunks of ``chunk_pairs``, each with its segments and its mask."""
        for start in range(0, len(item), chunk_pairs):
            pairs = slice(start, min(start + chunk_pairs, len(item)))
            first_wave, end_wave = np.searchsorted(wave_starts, (pairs.start, pairs.stop - 1), side="right")
            edges = [pairs.start, *wave_starts[first_wave:end_wave].tolist(), pairs.stop]
            segments = []
            for begin, end in pairwise(edges):
                first_item = int(item[begin])
                segments.append(Segment(slice(first_item, first_item + end - begin), slice(begin - start, end - start)))
            items = segments[0].items if len(segments) == 1 else self._tensor(item[pairs])
            mask = self._mask(keys[pairs], item[pairs])
            if self._spec.bias is None:
                yield Chunk(pairs, items, segments, mask, None, None)
            else:
                yield Chunk(
                    pairs, items, segments, mask, self._tensor(self._own[item[pairs]]), self._tensor(keys[pairs])
                )

    def _mask(self, keys: Ints, item: Ints) -> torch.Tensor | None:
        """What to add to the scores of pairs with keys at indices ``[pairs, KV_TILE]``, or None where nothing is hidden
        (most of a long prompt: its masks would not fit into memory)."""
        hidden = keys[:, None, :] > self._reach[item][:, :, None]
        if self._spec.window is not None:
            hidden |= keys[:, None, :] <= self._own[item][:, :, None] - self._spec.window
        if not hidden.any():
            return None
        return self._tensor(np.where(hidden, np.float32(MASKED), np.float32(0))[:, None, :, None, :])

    def row_indices(self, block_stride: int, offset_stride: int, head_stride: int) -> list[torch.Tensor]:
        """For each chunk, where its keys (or values) lie: int32 ``[pairs * kv_heads * KV_TILE]``, in the unit of the
        strides. Layers share one layout, so this is computed for the first and remembered."""
        strides = (block_stride, offset_stride, head_stride)
        if strides not in self._row_indices:
            tokens = self._blocks * block_stride + self._offsets * offset_stride
            rows = tokens[:, None, :] + (np.arange(self._spec.num_kv_heads) * head_stride)[:, None]
            if rows.max(initial=0) >= 2**31:
                raise ValueError(f"the KV pool has {rows.max()} rows; the reference backend can address 2**31")
            rows = rows.astype(np.int32)
            self._row_indices[strides] = [self._tensor(rows[chunk.pairs].reshape(-1)) for chunk in self.chunks]
        return self._row_indices[strides]

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


class AttentionPlan(NamedTuple):
    """One step's attention for the layers of one spec."""

    spec: AttentionSpec
    num_rows: int  # query rows that belong to requests; rows beyond are padding
    sets: list[WorkSet]


def plan_attention(spec: AttentionSpec, batch: PagedBatch, device: torch.device) -> AttentionPlan:
    """Cut a step into its work: a set of single rows, and a set of items of several rows.

    Raises:
        ValueError: the block size is not a power of two up to `KV_TILE`, or a row's reach lies before its own index or
            behind its request's last key.
    """
    if batch.block_size < 1 or KV_TILE % batch.block_size:
        raise ValueError(
            f"block_size is {batch.block_size}; the reference backend needs a power of two up to {KV_TILE}"
        )
    num_rows = np.diff(batch.qo_indptr.numpy())
    if batch.reach is not None:
        _check_reach(batch, num_rows)
    longest = int(num_rows.max(initial=0))
    sets = []
    for query_tile, requests in (
        (1, np.flatnonzero(num_rows == 1)),
        (min(MAX_QUERY_TILE, 1 << (longest - 1).bit_length()), np.flatnonzero(num_rows > 1)),
    ):
        if len(requests):
            keys = spec.num_kv_heads * max(spec.key_dim, spec.value_dim) * KV_TILE
            scores = spec.num_q_heads * query_tile * KV_TILE
            chunk_pairs = max(1, min(CHUNK_KEYS // keys, CHUNK_SCORES // scores))
            sets.append(WorkSet(spec, batch, requests, query_tile, chunk_pairs, device))
    return AttentionPlan(spec, int(batch.qo_indptr[-1]), sets)


def _check_reach(batch: PagedBatch, num_rows: npt.NDArray[np.int32]) -> None:
    assert batch.reach is not None
    last = (np.diff(batch.kv_indptr.numpy()) - 1) * batch.block_size + batch.last_page_len.numpy() - 1
    from_end = np.repeat(batch.qo_indptr.numpy()[1:], num_rows) - 1 - np.arange(int(batch.qo_indptr[-1]))
    reach, last = batch.reach.numpy(), np.repeat(last, num_rows)
    if len(reach) != len(last) or (reach < last - from_end).any() or (reach > last).any():
        raise ValueError("a row's reach must be the index of a key of its request, its own or a later one")


def _starts(counts: Ints) -> Ints:
    """Where each of several runs of the given lengths begins, if they lie end to end."""
    return np.cumsum(counts) - counts
