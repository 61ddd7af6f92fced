"""A step's arrays in, logits and tokens out: block tables and buffers on the device, one forward over all rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..kernels.interface import ROW_MULTIPLE, AttentionSpec, Backend, PagedBatch
from .kv_layout import KVLayout
from .model.attention import StepAttention
from .model.paged_model import PagedModel
from .request import Request
from .sampler import Sampler
from .step import IN_FLIGHT, Step


class Launched(NamedTuple):
    """A forward on its way."""

    logits: torch.Tensor  # [sampling rows, vocab]
    slots: np.ndarray  # int64 [sampling rows]
    positions: np.ndarray  # int64 [sampling rows], of the tokens to come


class ModelRunner:
    """Owns what a forward needs on the device: the block pool, block tables, input buffers, last tokens by slot."""

    def __init__(
        self,
        model: PagedModel,
        layout: KVLayout,
        backend: Backend,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        max_tokens: int,
    ) -> None:
        self.model = model
        self._layout = layout
        self._backend = backend
        self._device = model.device
        # Zeroed, for rows that are masked are still multiplied by 0; untouched pages cost nothing on a CPU.
        self.pool = torch.zeros(num_blocks, layout.block_elements, dtype=layout.dtype, device=model.device)
        caches = layout.caches(self.pool)
        model.bind([caches[i] for i in layout.layer_of_call], backend)
        columns = -(-max_model_len // layout.block_size)
        self.tables = np.zeros((len(layout.groups), max_num_seqs, columns), np.int32)  # block of each slot's columns
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=model.device)
        self._embeds: dict[int, torch.Tensor] = {}  # prompt embeddings by slot
        self._sampler = Sampler(max_num_seqs, model.device)
        padded = -(-max_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
        self._ids = np.zeros(padded, np.int64)
        self._positions = np.zeros(padded, np.int64)
        self._blocks = np.zeros((len(layout.groups), padded), np.int64)
        self._rows = np.zeros(padded, np.int64)
        # Padding stands at the last position there is. It changes nothing in a model that passed verification, which
        # runs the same way: frequencies that depend on a neighbour's position would show there.
        self._last_position = max_model_len - 1
        # One plan a step for each distinct kind of call in a group; the calls of that kind share it.
        self._plans: dict[tuple[int, AttentionSpec], list[int]] = {}
        group_of = {layer: g for g, group in enumerate(layout.groups) for layer in group.layers}
        for call, spec in enumerate(model.layers):
            self._plans.setdefault((group_of[layout.layer_of_call[call]], spec), []).append(call)

    def execute(self, step: Step) -> Launched:
        """Launch the forward of `step`, up to the logits of the rows that sample."""
        for request in step.admitted:
            self._admit(request)
        group, slot, column, block = step.tables
        self.tables[group, slot, column] = block
        slots, starts, counts = (a.astype(np.int64) for a in (step.slots, step.starts, step.counts))
        last_rows = (np.cumsum(counts) - 1)[step.samples]
        logits = self.forward(slots, starts, counts, step.token_ids, last_rows)
        return Launched(logits, slots[step.samples], (starts + counts)[step.samples])

    @torch.inference_mode()
    def forward(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, token_ids: np.ndarray, rows: np.ndarray
    ) -> torch.Tensor:
        """Logits ``[len(rows), vocab]`` of chosen rows of a step, in whose arrays one entry is one request: int64
        slots, starts and counts, and the token ids of all, one after another, as in `Step`."""
        padded = self._fill_inputs(slots, starts, counts, token_ids)
        ids = self._put(self._ids[:padded])
        if (token_ids == IN_FLIGHT).any():
            at = np.flatnonzero(token_ids == IN_FLIGHT)
            ids[self._put(at)] = self._last_tokens[self._put(np.repeat(slots, counts)[at])]
        attention = self._plan(slots, starts + counts, counts, padded)
        wanted = np.zeros(max(ROW_MULTIPLE, -(-len(rows) // ROW_MULTIPLE) * ROW_MULTIPLE), np.int64)
        wanted[: len(rows)] = rows
        logits = self.model.forward(
            ids,
            self._put(self._positions[:padded]),
            attention,
            self._put(wanted),
            self._mix_embeds(ids, slots, starts, counts) if self._embeds else None,
        )
        return logits[: len(rows)]

    @torch.inference_mode()
    def sample(self, launched: Launched) -> torch.Tensor:
        """Choose the tokens of a launched step: int64 ``[sampling rows]``, on the device."""
        tokens = self._sampler.choose(launched.logits, launched.slots, launched.positions)
        self._last_tokens[self._put(launched.slots)] = tokens
        return tokens

    def _admit(self, request: Request) -> None:
        self._sampler.admit(request)
        self._embeds.pop(request.slot, None)
        if request.embeds is not None:
            embeds = torch.from_numpy(request.embeds.copy())
            if request.embeds.dtype == np.uint16:
                embeds = embeds.view(torch.bfloat16)
            self._embeds[request.slot] = embeds.to(self._device, self.model.dtype)

    def _fill_inputs(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, token_ids: np.ndarray) -> int:
        """Token ids, positions and cache places of every row; returns the number of rows, padding included."""
        total = len(token_ids)
        padded = -(-total // ROW_MULTIPLE) * ROW_MULTIPLE
        self._ids[:total] = token_ids
        self._positions[:total] = np.arange(total) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        column, self._rows[:total] = np.divmod(self._positions[:total], self._layout.block_size)
        self._blocks[:, :total] = self.tables[:, np.repeat(slots, counts), column]
        self._ids[total:padded] = self._rows[total:padded] = 0
        self._positions[total:padded] = self._last_position
        self._blocks[:, total:padded] = 0  # the null block
        return padded

    def _plan(self, slots: np.ndarray, ends: np.ndarray, counts: np.ndarray, padded: int) -> list[StepAttention]:
        size = self._layout.block_size
        num_blocks = -(-ends // size)
        qo_indptr = _indptr(counts)
        kv_indptr = _indptr(num_blocks)
        last_page_len = torch.from_numpy((ends - (num_blocks - 1) * size).astype(np.int32))
        listed = np.arange(int(num_blocks.max())) < num_blocks[:, None]
        rows = self._put(self._rows[:padded])
        places: dict[int, tuple[PagedBatch, torch.Tensor]] = {}
        attention: list[StepAttention | None] = [None] * len(self.model.layers)
        for (group, spec), calls in self._plans.items():
            if group not in places:
                indices = torch.from_numpy(self.tables[group, slots, : listed.shape[1]][listed])
                batch = PagedBatch(qo_indptr, kv_indptr, indices, last_page_len, size)
                places[group] = (batch, self._put(self._blocks[group, :padded]))
            batch, blocks = places[group]
            shared = StepAttention(self._backend.plan(spec, batch, self._device), blocks, rows)
            for call in calls:
                attention[call] = shared
        return attention  # type: ignore[return-value]  # every call has a plan

    def _mix_embeds(
        self, ids: torch.Tensor, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> torch.Tensor | None:
        """Input rows with prompt embeddings in their places; None if this step computes no such prompt."""
        rows = None
        firsts = np.cumsum(counts) - counts
        for slot, start, count, first in zip(*(a.tolist() for a in (slots, starts, counts, firsts)), strict=True):
            embeds = self._embeds.get(slot)
            if embeds is None or start >= len(embeds):
                continue
            rows = self.model.embed(ids) if rows is None else rows
            part = embeds[start : start + count]
            rows[first : first + len(part)] = part
        return rows

    def _put(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device: the buffer may be refilled at once."""
        tensor = torch.from_numpy(array)
        return tensor.clone() if self._device.type == "cpu" else tensor.to(self._device)


def _indptr(lengths: np.ndarray) -> torch.Tensor:
    out = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=out[1:])
    return torch.from_numpy(out)
