"""The attention plan of the reference backend for queries that see selected keys only.

Each row is an item of its own (see attention_plan.py), and its tiles are cut from the list of its selected keys. A row
that has selected all the keys it may see meets the tiles that it meets without a selection, and has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ..contract import ROW_MULTIPLE, AttentionSpec, PagedBatch
from .attention_plan import CHUNK_ELEMENTS, KV_TILE, Chunk, Ints, Tile


class SelectedPlan(NamedTuple):
    """One step's attention for the layers of one spec. The rows are ordered by their index, so that the rows of a chunk
    have selected about as many keys."""

    spec: AttentionSpec
    block_size: int
    lengths: Ints  # [rows]: keys that each row may see, ascending
    rows: torch.Tensor  # int64 [rows]
    own: torch.Tensor  # int64 [rows]: index of each row in its sequence
    owner: torch.Tensor  # int64 [rows]: the request of each row
    tables: torch.Tensor  # int64 [requests, columns]: blocks


def plan_selected(spec: AttentionSpec, batch: PagedBatch, device: torch.device) -> SelectedPlan:
    """Find the request and the index of each row."""
    qo_indptr, num_blocks = batch.qo_indptr.numpy().astype(np.int64), np.diff(batch.kv_indptr.numpy())
    kv_len = (num_blocks - 1) * batch.block_size + batch.last_page_len.numpy()
    owner = np.repeat(np.arange(len(kv_len)), np.diff(qo_indptr))
    own = (kv_len - qo_indptr[1:])[owner] + np.arange(qo_indptr[-1])
    tables = np.zeros((len(num_blocks), int(num_blocks.max(initial=0))), np.int64)
    tables[np.arange(tables.shape[1]) < num_blocks[:, None]] = batch.kv_indices.numpy()
    order = np.argsort(own, kind="stable")
    on_device = (torch.from_numpy(x).to(device) for x in (order, own[order], owner[order], tables))
    return SelectedPlan(spec, batch.block_size, own[order] + 1, *on_device)


def chunks(plan: SelectedPlan, selected: torch.Tensor) -> Iterator[Chunk]:
    """The chunks of a layer. selected: see `Backend.run_selected`."""
    spec, kv_heads = plan.spec, plan.spec.num_kv_heads
    group = spec.num_q_heads // kv_heads
    line = torch.arange(-(-group // ROW_MULTIPLE) * ROW_MULTIPLE, device=selected.device)
    heads = torch.arange(kv_heads, device=selected.device)[:, None] * group + line % group
    size = max(1, CHUNK_ELEMENTS // (kv_heads * KV_TILE * max(spec.key_dim, spec.value_dim, len(line))))
    for start in range(0, len(plan.lengths), size):
        part = slice(start, start + size)
        rows, own, tables = plan.rows[part], plan.own[part, None], plan.tables[plan.owner[part]]
        count = -(-min(int(plan.lengths[part][-1]), selected.shape[1]) // KV_TILE) * KV_TILE
        keys = selected[rows, :count].long()
        keys = F.pad(keys, (0, count - keys.shape[1]), value=torch.iinfo(torch.int32).max)
        hidden, keys = keys > own, torch.minimum(keys, own)  # what is hidden is replaced by a key that may be read
        blocks, places = tables.gather(1, keys // plan.block_size), keys % plan.block_size
        tiles = [
            Tile(first, blocks[:, tile], places[:, tile], hidden[:, None, None, tile])
            for first in range(0, count, KV_TILE)
            for tile in [slice(first, first + KV_TILE)]
        ]
        yield Chunk(rows[:, None, None].expand(-1, 1, len(line)), heads, own.expand(-1, len(line)), tiles)
