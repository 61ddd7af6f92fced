"""The input arrays of a forward pass, filled by the host in each step: ids, positions, cache places, block tables.

The index of a token in its sequence determines the cache place of its keys and values. Its positions are used only for
the rotary embedding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...kernels.contract import ROW_MULTIPLE, DeviceBatch, PagedBatch, SequenceOffsets
from .device import Device, Staged
from .kv_layout import KVLayout


class Rows(NamedTuple):
    """The requests of a step. The first three arrays have one entry per request; `token_ids` has the tokens of all
    requests, concatenated."""

    slots: np.ndarray  # int64 [requests]
    starts: np.ndarray  # int64 [requests]: tokens computed in earlier steps
    counts: np.ndarray  # int64 [requests]: tokens to compute
    token_ids: np.ndarray  # [sum of counts]
    wanted: np.ndarray  # int64 [n]: the rows that need logits, each below the sum of counts
    positions: np.ndarray | None = None  # int64 [axes, sum of counts]; None: on each axis the index of the token
    reach: np.ndarray | None = None  # int32 [2, sum of counts]: the last index that a row attends to, in layers without
    # and with a window; None: its own

    def singles_first(self) -> Rows:
        """The same step, reordered so that requests with a single row come first."""
        moved = places_of_rows(self.counts)
        if moved is None:
            return self
        order = np.argsort(self.counts > 1, kind="stable")
        rows = np.empty_like(moved)
        rows[moved] = np.arange(len(moved))
        return Rows(
            self.slots[order],
            self.starts[order],
            self.counts[order],
            self.token_ids[rows],
            moved[self.wanted],
            None if self.positions is None else self.positions[:, rows],
            None if self.reach is None else self.reach[:, rows],
        )


NOBODY = Rows(*(np.array(each, np.int64) for each in ([-1], [0], [1], [0], [])))
"""A row that belongs to no request."""


def places_of_rows(counts: np.ndarray) -> np.ndarray | None:
    """The row of the forward pass that computes each row of a step, int64 ``[sum of counts]``: requests with a single
    row come first. None: the order is the same."""
    many = counts > 1
    if not (many[:-1] & ~many[1:]).any():
        return None
    rows = np.argsort(np.repeat(many, counts), kind="stable")
    places = np.empty_like(rows)
    places[rows] = np.arange(len(rows))
    return places


class Filled(NamedTuple):
    """A step whose arrays have been filled."""

    num_rows: int  # of the forward pass, padding included
    batches: list[PagedBatch]  # one for each KV group
    sequences: SequenceOffsets


class StepInputs:
    """The input arrays of a step, and the block tables from which they are made."""

    def __init__(
        self,
        device: Device,
        layout: KVLayout,
        max_num_seqs: int,
        max_model_len: int,
        max_tokens: int,
        multiple: int = ROW_MULTIPLE,
        axes: int = 1,
        stateful: bool = False,
    ) -> None:
        """multiple: the number of rows of a forward pass is a multiple of this. axes: of positions. stateful: the model
        reads the offsets of sequences on the device."""
        self._stateful = stateful
        self._multiple = multiple
        groups, columns = len(layout.groups), -(-max_model_len // layout.block_size)
        rows = self.padded(max(max_tokens, max_num_seqs))
        # Block numbers, [group, slot, column]. The last slot, also named -1, is that of padding requests: null blocks.
        self.tables = np.zeros((groups, max_num_seqs + 1, columns), np.int32)

        def staged(n: int, dtype: torch.dtype = torch.int64) -> Staged:
            return Staged(device, (n,), dtype)

        self.ids, self.row_slots = staged(rows), staged(rows)
        self._positions = Staged(device, (rows, axes), torch.int64)
        self._index = np.zeros(rows, np.int64)  # of each row's token in its sequence
        self.places = [staged(rows, torch.int32) for _ in range(groups)]  # the block of each row
        self.offsets = staged(rows, torch.int32)  # the place of each row in its block
        self.wanted = staged(rows)
        seqs = self.padded(max_num_seqs)
        self.qo_indptr, self.kv_indptr = staged(seqs + 1, torch.int32), staged(seqs + 1, torch.int32)
        self.last_page_len, self.request_slots = staged(seqs, torch.int32), staged(seqs, torch.int32)
        self.starts, self.prompts = staged(seqs, torch.int32), staged(seqs, torch.int32)
        self.prompt_lens = np.full(max_num_seqs + 1, max_model_len, np.int32)  # tokens of the prompt at each slot
        self.kv_indices = [staged(max_num_seqs * columns + seqs, torch.int32) for _ in range(groups)]
        self._block_size = layout.block_size
        self._asynchronous = device.asynchronous
        # Padding rows get the largest position. Verification pads rows in the same way, so a model whose rotary
        # frequencies depend on the positions of other rows would fail it.
        self._last_position = max_model_len - 1

    def padded(self, n: int) -> int:
        """`n` rounded up to a multiple, at least one multiple."""
        return max(1, -(-n // self._multiple)) * self._multiple

    def positions(self, count: int) -> torch.Tensor:
        """The positions of the first `count` rows, on the device: int64 ``[axes, count]``."""
        return self._positions.device[:count].T

    def fill(self, rows: Rows, turn: int, requests: int | None = None) -> Filled:
        """Write a step's arrays and send them to the device.

        Args:
            requests: pad to this number of requests of a single row each; padding requests attend to the null block.
                None: rows are padded to a multiple, and the padding belongs to no request.
        """
        slots, starts, counts, token_ids, wanted, given_positions, _ = rows
        computed, on_device = len(token_ids), self._asynchronous
        if requests is None:  # a graph computes the logits of every row
            self.wanted.host[turn][: len(wanted)] = wanted
            self.wanted.host[turn][len(wanted) : self.padded(len(wanted))] = 0
            if on_device:
                self.wanted.send(turn, self.padded(len(wanted)))
        elif more := requests - len(slots):
            nothing = np.zeros(more, np.int64)
            slots, starts = np.concatenate([slots, nothing - 1]), np.concatenate([starts, nothing])
            counts, token_ids = np.concatenate([counts, nothing + 1]), np.concatenate([token_ids, nothing])
        total, num, size = len(token_ids), len(slots), self._block_size
        count = self.padded(total) if requests is None else requests
        ids, positions, offsets = self.ids.host[turn], self._positions.host[turn], self.offsets.host[turn]
        row_slots, index = self.row_slots.host[turn], self._index[:total]
        ids[:total] = token_ids
        if total == num:
            row_slots[:total], index[:] = slots, starts
        else:
            row_slots[:total] = np.repeat(slots, counts)
            index[:] = np.arange(total) + np.repeat(starts + counts - np.cumsum(counts), counts)
        positions[:computed] = index[:computed, None] if given_positions is None else given_positions.T
        positions[computed:count] = self._last_position
        column, offsets[:total] = np.divmod(index, size)
        for group, places in enumerate(self.places):
            places.host[turn][:total] = self.tables[group, row_slots[:total], column]
        if count > total:
            for array in (self.ids, self.row_slots, self.offsets, *self.places):
                array.host[turn][total:count] = 0  # the null block
        if on_device:
            for array in (self.ids, self._positions, self.offsets, self.row_slots, *self.places):
                array.send(turn, count)

        num_blocks = -(-(starts + counts) // size)  # of each sequence
        qo_indptr, kv_indptr = self.qo_indptr.host[turn], self.kv_indptr.host[turn]
        qo_indptr[0] = kv_indptr[0] = 0
        np.cumsum(counts, out=qo_indptr[1 : num + 1])
        np.cumsum(num_blocks, out=kv_indptr[1 : num + 1])
        self.request_slots.host[turn][:num] = slots
        self.starts.host[turn][:num] = starts
        self.prompts.host[turn][:num] = self.prompt_lens[slots]
        self.last_page_len.host[turn][:num] = starts + counts - (num_blocks - 1) * size
        listed = np.arange(int(num_blocks.max())) < num_blocks[:, None]
        num_listed = int(kv_indptr[num])
        if on_device:
            self.kv_indptr.send(turn, num + 1)
            self.last_page_len.send(turn, num)
        cu_seqlens = self.qo_indptr.pages[turn][: num + 1]
        batches = []
        for group, indices in enumerate(self.kv_indices):
            indices.host[turn][:num_listed] = self.tables[group, slots, : listed.shape[1]][listed]
            twins = None
            if on_device:
                # A graph gets the whole array, because its address and length must not change.
                sent = indices.send(turn, num_listed)
                twins = DeviceBatch(
                    self.kv_indptr.device[: num + 1],
                    sent if requests is None else indices.device,
                    self.last_page_len.device[:num],
                )
            batches.append(
                PagedBatch(
                    cu_seqlens,
                    self.kv_indptr.pages[turn][: num + 1],
                    indices.pages[turn][:num_listed],
                    self.last_page_len.pages[turn][:num],
                    size,
                    int((counts == 1).sum()),
                    group,
                    twins,
                )
            )
        of_sequences = self.request_slots, self.starts, self.prompts
        copies = None
        if on_device and self._stateful:
            cu_sent = self.qo_indptr.send(turn, num + 1)
            copies = SequenceOffsets._make([cu_sent, *(array.send(turn, num) for array in of_sequences), None])
        pages = (array.pages[turn][:num] for array in of_sequences)
        return Filled(count, batches, SequenceOffsets._make([cu_seqlens, *pages, copies]))
