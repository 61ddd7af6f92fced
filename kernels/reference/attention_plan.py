"""The attention plan of the reference backend: which query rows meet which keys, and in what order.

The rows of a step are cut into *items*: up to `QUERY_TILE` neighbouring rows of one request, or the one row of a
request that decodes. The keys are cut into tiles of `KV_TILE`, counted from index 0 of the request, so a tile means
the same whichever step looks at it. Items that see about as many keys form a *chunk*. The items of a chunk meet one
tile after another, in ascending order; an item that sees nothing of a tile meets it too, and nothing comes of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..contract import ROW_MULTIPLE, AttentionSpec, PagedBatch

KV_TILE = 64
"""Keys per tile. Part of the result's bits: sums are formed tile by tile."""

QUERY_TILE = 64
"""Most rows per item. Not part of the bits: the rows of an item never meet."""

CHUNK_ELEMENTS = 1 << 19
"""Most fp32 elements (2 MiB) of keys, of values and of scores that a chunk of several items works on at a time."""

Ints = npt.NDArray[np.int64]


class Tile(NamedTuple):
    """`KV_TILE` keys of each item of a chunk."""

    start: int  # index of the first key in its sequence
    blocks: torch.Tensor  # int64 [items, KV_TILE]: where the keys lie
    rows: torch.Tensor  # int64 [items, KV_TILE]
    hidden: torch.Tensor | None  # bool [items, 1, lines, KV_TILE]: what a line must not see; None: it sees every key


class Chunk(NamedTuple):
    """Items that are computed together. A *line* is one row and one of the query heads that share a KV head. The number
    of lines is a multiple of `ROW_MULTIPLE`; those too many repeat the item's last row."""

    query_rows: torch.Tensor  # int64 [items, 1, lines]
    heads: torch.Tensor  # int64 [kv_heads, lines]: the query head of each line
    indices: torch.Tensor  # int64 [items, lines]: index of each line's row in its sequence
    tiles: list[Tile]


class AttentionPlan(NamedTuple):
    """One step's attention for the layers of one spec."""

    spec: AttentionSpec
    chunks: list[Chunk]


def plan_attention(spec: AttentionSpec, batch: PagedBatch, device: torch.device) -> AttentionPlan:
    """Cut a step into chunks: those of single rows, and those of items of several rows.

    Raises:
        ValueError: the block size is not a power of two up to `KV_TILE`, or a row's reach lies before its own index or
            behind its request's last key.
    """
    if batch.block_size < 1 or KV_TILE % batch.block_size:
        raise ValueError(
            f"block_size is {batch.block_size}; the reference backend needs a power of two up to {KV_TILE}"
        )
    qo_indptr, kv_indptr = batch.qo_indptr.numpy().astype(np.int64), batch.kv_indptr.numpy().astype(np.int64)
    num_rows = np.diff(qo_indptr)
    kv_len = (np.diff(kv_indptr) - 1) * batch.block_size + batch.last_page_len.numpy()
    own = np.repeat(kv_len - qo_indptr[1:], num_rows) + np.arange(qo_indptr[-1])  # index of each row in its sequence
    reach = own if batch.reach is None else batch.reach.numpy().astype(np.int64)
    if len(reach) != len(own) or (reach < own).any() or (reach >= np.repeat(kv_len, num_rows)).any():
        raise ValueError("a row's reach must be the index of a key of its request, its own or a later one")

    group = spec.num_q_heads // spec.num_kv_heads
    chunks = []
    for requests in (np.flatnonzero(num_rows == 1), np.flatnonzero(num_rows > 1)):
        height = min(QUERY_TILE, int(num_rows[requests].max(initial=1)))
        line = np.arange(-(-height * group // ROW_MULTIPLE) * ROW_MULTIPLE)
        heads = torch.from_numpy(np.arange(spec.num_kv_heads)[:, None] * group + line % group).to(device)
        items = [(row, r) for r in requests.tolist() for row in range(qo_indptr[r], qo_indptr[r + 1], height)]
        items.sort(key=lambda item: int(own[item[0]]))
        size = max(1, CHUNK_ELEMENTS // (spec.num_kv_heads * KV_TILE * max(spec.key_dim, spec.value_dim, len(line))))
        for start in range(0, len(items), size):
            first_row, owner = np.array(items[start : start + size]).T
            rows = first_row[:, None] + np.minimum(line // group, height - 1)
            rows = np.minimum(rows, qo_indptr[owner + 1][:, None] - 1)
            tiles = _tiles(spec, batch, own[rows], reach[rows], kv_indptr[owner], device)
            query_rows, indices = (torch.from_numpy(x).to(device) for x in (rows[:, None], own[rows]))
            chunks.append(Chunk(query_rows, heads, indices, tiles))
    return AttentionPlan(spec, chunks)


def _tiles(
    spec: AttentionSpec, batch: PagedBatch, own: Ints, reach: Ints, table_start: Ints, device: torch.device
) -> list[Tile]:
    """The tiles that any item sees, given own index and reach of its lines ``[items, lines]`` and the place where its
    block table starts."""
    own, reach = own[:, :, None], reach[:, :, None]
    last = reach.max(axis=1)
    first = np.zeros_like(last) if spec.window is None else np.maximum(own.min(axis=1) - spec.window + 1, 0)
    tiles = []
    for start in range(int(first.min()) // KV_TILE * KV_TILE, int(last.max()) + 1, KV_TILE):
        keys = np.arange(start, start + KV_TILE)
        hidden = keys > reach
        if spec.window is not None:
            hidden |= keys <= own - spec.window
        # A key that no line of the item may see is replaced by one that some line does see, before it is masked: what
        # lies in the null block, or behind the end of the last block, is never read, whatever it holds.
        readable = np.clip(keys, first, last)
        blocks = batch.kv_indices.numpy()[table_start[:, None] + readable // batch.block_size].astype(np.int64)
        at, rows = (torch.from_numpy(x).to(device) for x in (blocks, readable % batch.block_size))
        mask = torch.from_numpy(hidden[:, None]).to(device) if hidden.any() else None
        tiles.append(Tile(start, at, rows, mask))
    return tiles
