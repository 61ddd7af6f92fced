"""Which rows of a step go to which of FlashInfer's wrappers, and the memory these plan in.

A wrapper's ``plan`` fills a page-locked buffer and copies it to the device on the current stream, without waiting; its
kernels read the copy. So a *lane* (a wrapper with such buffers of its own) belongs to one KV group and one kind of
attention, and has a page-locked buffer for each of two turns. The large workspace, for the partial results of requests
whose keys are shared out, serves all lanes: they run one after the other on one stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..contract import AttentionSpec, DeviceBatch, PagedBatch
from . import latents
from .partition import (
    DETERMINISTIC_SPLIT,
    QUERY_TILE,
    Ints,
    Kind,
    Pieces,
    cut_into_pieces,
    kv_lengths,
    two_launches,
)

TURNS = 2

FLOAT_WORKSPACE = 256 << 20
"""Bytes, once, for partial results. FlashInfer's usual 128 MiB overflows with 64 query heads over 8 KV heads of 128."""

INT_WORKSPACE = 4 << 20
"""Bytes, on the device and for each turn in page-locked memory, of a lane. The work list of 65,536 rows takes 1.4 MB;
FA3's, which has one for each query head, 4 MB for 1,100 requests with 128."""

GRAPH_INT_WORKSPACE = 128 << 10
"""The same for a lane of a CUDA graph: 13 bytes for each program and 12 for each request, some 2,000 of both."""


class Part(NamedTuple):
    """Rows of a step that one wrapper computes."""

    wrapper: Any
    rows: slice


class FlashInferPlan(NamedTuple):
    """One step's attention for the layers of one spec and group."""

    spec: AttentionSpec
    num_rows: int  # query rows that belong to requests; rows beyond are padding
    parts: list[Part]


class _Lists(NamedTuple):
    """What a prefill wrapper is planned for: `kv_lens` keys of each request, and the rest as in `PagedBatch`."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor  # on the device
    last_page_len: torch.Tensor
    kv_lens: Ints


class _Lane:
    """A wrapper, and the memory it plans in."""

    def __init__(
        self, wrapper: Any, float_workspace: torch.Tensor, int_bytes: int, buffers: DeviceBatch | None
    ) -> None:
        device = float_workspace.device
        self.wrapper = wrapper
        self.planned = False
        self.buffers = buffers  # that the wrapper reads, in a graph
        # Zeroed, and never shared: a graph without shared-out keys launches more programs than there is work, and those
        # too many do what the rest of the buffer says, which FlashInfer does not write: zeros, so the first one's work
        # again. Another lane's numbers would send them anywhere.
        self._pages = [
            torch.zeros(int_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(TURNS)
        ]
        wrapper.reset_workspace_buffer(float_workspace, torch.zeros(int_bytes, dtype=torch.uint8, device=device))

    def take(self, turn: int) -> Any:
        """The wrapper, to be planned in this turn's page-locked buffer."""
        self.wrapper._pin_memory_int_workspace_buffer = self._pages[turn]
        return self.wrapper


class Planner:
    """All lanes of a device."""

    def __init__(
        self, library: Any, device: torch.device, deterministic: bool, num_multiprocessors: int, hopper: bool
    ) -> None:
        self._library = library
        self._device = device
        self._deterministic = deterministic
        self._programs = 2 * num_multiprocessors  # FA2 shares keys out until there are as many
        self._hopper = hopper
        self._float_workspace: torch.Tensor | None = None
        self._lanes: dict[tuple[Kind, int, str, int], _Lane] = {}  # by kind, KV group, what for, and which of these
        self._graph_plans: dict[tuple[Kind, int, int], FlashInferPlan] = {}

    def plan(self, kind: Kind, batch: PagedBatch, turn: int, graph: bool) -> FlashInferPlan:
        """Share the rows out and plan each wrapper; see `contract.Backend.plan`."""
        requests = len(batch.last_page_len)
        on_device = batch.on_device or DeviceBatch(batch.kv_indptr, batch.kv_indices, batch.last_page_len)
        if graph:
            return self._plan_graph(kind, batch, on_device, turn)
        if not requests:
            parts = []
        elif kind.spec.latent:
            parts = list(self._plan_latents(kind, batch, on_device, turn))
        elif self._deterministic:
            pieces, room = cut_into_pieces(batch, kind), FLOAT_WORKSPACE // kind.partial_bytes(1, QUERY_TILE) - 1
            parts = list(self._plan_pieces(kind, batch, on_device, turn, pieces, pieces.chunks, room))
        else:
            singles = batch.num_single
            if 0 < singles < requests and not two_launches(kind, kv_lengths(batch)[:singles]):
                singles = 0
            parts = [self._plan_decode(kind, batch, on_device, turn, singles)] if singles else []
            if singles < requests:
                parts.append(self._plan_prefill(kind, batch, on_device, turn, singles))
        return FlashInferPlan(kind.spec, int(batch.qo_indptr[-1]), parts)

    def _plan_decode(self, kind: Kind, batch: PagedBatch, on_device: DeviceBatch, turn: int, requests: int) -> Part:
        """The first requests, of one row each."""
        lane = self._lane(kind, batch.group, "decode", 0)
        host = batch._replace(kv_indptr=batch.kv_indptr[: requests + 1], last_page_len=batch.last_page_len[:requests])
        twins = DeviceBatch(
            on_device.kv_indptr[: requests + 1],
            on_device.kv_indices[: int(host.kv_indptr[-1])],
            on_device.last_page_len[:requests],
        )
        self._plan_rows(kind, lane, host, twins, turn)
        return Part(lane.wrapper, slice(0, requests))

    def _plan_rows(
        self, kind: Kind, lane: _Lane, host: PagedBatch, twins: DeviceBatch, turn: int, graph: bool = False
    ) -> None:
        """Plan a decode wrapper. In full the first time; then without what that does once more: it copies arrays to the
        device that are there already, and looks for the longest request with Python's ``max`` over a tensor."""
        wrapper = lane.take(turn)
        spec = kind.spec
        shape = spec.num_q_heads, spec.num_kv_heads, kind.dim, host.block_size
        options = dict(kind.common)
        if kind.tensor_cores():
            tiles = self._programs // spec.num_kv_heads
            if graph:  # reserves for each request, however short
                requests = len(host.last_page_len)
                tiles = max(tiles, -(-requests * kind.group // kind.decode_tile) + requests - 1)
            options["disable_split_kv"] = kind.partial_bytes(tiles, kind.decode_tile) > FLOAT_WORKSPACE
        if not lane.planned:
            wrapper.plan(host.kv_indptr, twins.kv_indices, host.last_page_len, *shape, **options)
            lane.planned = True
            return
        plan = self._library.fast_decode_plan
        if graph:  # the wrapper keeps the buffers it was made with, which hold the twins
            plan(wrapper, host.kv_indptr, twins.kv_indices, host.last_page_len, *shape, **options)
            return
        options["global_override_indptr_cpu"] = host.kv_indptr
        if not kind.tensor_cores():
            plan(wrapper, twins.kv_indptr, twins.kv_indices, twins.last_page_len, *shape, **options)
            return
        # For tensor cores it reads last_page_len on the host, and would wait for the device to hand it over.
        plan(wrapper, twins.kv_indptr, twins.kv_indices, host.last_page_len, *shape, **options)
        wrapper._paged_kv_last_page_len_buf = twins.last_page_len

    def _plan_prefill(self, kind: Kind, batch: PagedBatch, on_device: DeviceBatch, turn: int, skipped: int) -> Part:
        """All requests but the first ones, which have one row each."""
        lane = self._lane(kind, batch.group, "prefill", 0)
        qo_indptr, kv_indptr, last_page_len = batch.qo_indptr, batch.kv_indptr, batch.last_page_len
        kv_indices = on_device.kv_indices[int(kv_indptr[skipped]) : int(kv_indptr[-1])]
        if skipped:
            qo_indptr = self._page_locked(qo_indptr.numpy()[skipped:] - int(qo_indptr[skipped]))
            kv_indptr = self._page_locked(kv_indptr.numpy()[skipped:] - int(kv_indptr[skipped]))
            last_page_len = self._page_locked(last_page_len.numpy()[skipped:])
        options: dict[str, Any] = {}
        if self._backend(kind) == "fa2":  # FA3 would drop it; it shares no request's keys out
            tiles = self._programs // kind.spec.num_kv_heads
            options["disable_split_kv"] = kind.partial_bytes(tiles, kind.prefill_tile) > FLOAT_WORKSPACE
        lists = _Lists(qo_indptr, kv_indptr, kv_indices, last_page_len, kv_lengths(batch)[skipped:])
        self._plan_many(kind, lane, turn, batch.block_size, lists, options)
        return Part(lane.wrapper, slice(skipped, int(batch.qo_indptr[-1])))

    def _plan_latents(self, kind: Kind, batch: PagedBatch, on_device: DeviceBatch, turn: int) -> Iterator[Part]:
        """All requests at once; where the plan's lists have no room for them, in pieces."""
        rows, heads = np.diff(batch.qo_indptr.numpy().astype(np.int64)), kind.spec.num_q_heads
        room = latents.MOST_WORKS - self._programs
        if int(latents.works(rows, heads).sum()) > room:
            pieces = cut_into_pieces(batch, kind, max(1, room // 2 * latents.TILE // heads))
            works = latents.works(pieces.rows, heads)
            yield from self._plan_pieces(kind, batch, on_device, turn, pieces, works, room)
            return
        lane = self._lane(kind, batch.group, "pieces", 0)
        kv_indices = on_device.kv_indices[: int(batch.kv_indptr[-1])]
        lists = _Lists(batch.qo_indptr, batch.kv_indptr, kv_indices, batch.last_page_len, kv_lengths(batch))
        self._plan_many(kind, lane, turn, batch.block_size, lists, {})
        yield Part(lane.wrapper, slice(0, int(batch.qo_indptr[-1])))

    def _plan_pieces(
        self,
        kind: Kind,
        batch: PagedBatch,
        on_device: DeviceBatch,
        turn: int,
        pieces: Pieces,
        costs: Ints,
        room: int,
    ) -> Iterator[Part]:
        """All requests in pieces: as many at a time as have room together, where they share something out."""
        programs = np.cumsum(costs)
        start = row = lanes = 0
        while start < len(programs):
            stop = len(programs)
            if costs[start:].max() > 1:
                before = int(programs[start - 1]) if start else 0
                stop = max(start + 1, int(np.searchsorted(programs, before + room, side="right")))
            these = Pieces(*(column[start:stop] for column in pieces))
            lane = self._lane(kind, batch.group, "pieces", lanes)
            kv_indptr = _indptr(these.num_pages)
            lists = _Lists(
                self._page_locked(_indptr(these.rows)),
                self._page_locked(kv_indptr),
                self._pages_of(these, kv_indptr, on_device),
                self._page_locked(these.kv_len - (these.num_pages - 1) * batch.block_size),
                these.kv_len,
            )
            self._plan_many(kind, lane, turn, batch.block_size, lists, _fixed_split(batch))
            rows = int(these.rows.sum())
            yield Part(lane.wrapper, slice(row, row + rows))
            start, row, lanes = stop, row + rows, lanes + 1

    def _pages_of(self, pieces: Pieces, kv_indptr: Ints, on_device: DeviceBatch) -> torch.Tensor:
        """The pages of all pieces, put together on the device: those of one request have most in common."""
        shift = self._on_device(pieces.first_page - kv_indptr[:-1])
        total = int(kv_indptr[-1])
        shift = torch.repeat_interleave(shift, self._on_device(pieces.num_pages), output_size=total)
        places = torch.arange(total, dtype=torch.int32, device=self._device).add_(shift)
        return on_device.kv_indices.index_select(0, places)

    def _plan_many(
        self, kind: Kind, lane: _Lane, turn: int, block_size: int, lists: _Lists, options: dict[str, Any]
    ) -> None:
        """Plan a prefill wrapper. FlashInfer copies the lengths to the device from wherever they lie: from page-locked
        memory, without waiting. (Its ``max_sequence_kv`` would spare it a look for the longest, but FA2 then fails.)"""
        if kind.spec.latent:
            kv_lens = self._page_locked(lists.kv_lens)
            lane.take(turn).plan(*lists[:3], kv_lens, block_size, (kind.dtype, kind.kv_dtype))
            return
        lane.take(turn).plan(
            *lists[:4],
            kind.spec.num_q_heads,
            kind.spec.num_kv_heads,
            kind.dim,
            block_size,
            causal=True,
            seq_lens=self._page_locked(lists.kv_lens),
            max_token_per_sequence=int(np.diff(lists.qo_indptr.numpy()).max()),
            **kind.common,
            **options,
        )
        lane.planned = True

    def _plan_graph(self, kind: Kind, batch: PagedBatch, on_device: DeviceBatch, turn: int) -> FlashInferPlan:
        """Requests of one row each, in a lane for this number of them; → the same object each time.

        Raises:
            RuntimeError: the arrays on the device do not lie where a graph would read them.
        """
        requests = len(batch.last_page_len)
        lane = self._lane(kind, batch.group, "graph", requests, on_device)
        assert lane.buffers is not None
        if any(b.data_ptr() != array.data_ptr() for b, array in zip(lane.buffers, on_device, strict=True)):
            raise RuntimeError(f"the arrays of a graph of {requests} requests moved; they must stay where they were")
        twins = on_device._replace(kv_indices=on_device.kv_indices[: int(batch.kv_indptr[-1])])
        if self._deterministic or kind.spec.latent:
            qo_indptr, kv_indptr, _, last_page_len, *_ = batch
            lists = _Lists(qo_indptr, kv_indptr, twins.kv_indices, last_page_len, kv_lengths(batch))
            self._plan_many(kind, lane, turn, batch.block_size, lists, _fixed_split(batch))
        else:
            self._plan_rows(kind, lane, batch, twins, turn, graph=True)
        key = kind, batch.group, requests
        if key not in self._graph_plans:
            self._graph_plans[key] = FlashInferPlan(kind.spec, requests, [Part(lane.wrapper, slice(0, requests))])
        return self._graph_plans[key]

    def forget_graphs(self) -> None:
        """See `Backend.forget_graphs`."""
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.buffers is None}
        self._graph_plans.clear()

    def _backend(self, kind: Kind) -> str:
        """For prefill. ``auto`` takes FA3 on Hopper, which knows no fixed shares, and not this cache."""
        return "auto" if self._hopper and not self._deterministic and kind.kv_dtype == kind.dtype else "fa2"

    def _lane(self, kind: Kind, group: int, use: str, which: int, buffers: DeviceBatch | None = None) -> _Lane:
        key = kind, group, use, which
        if key not in self._lanes:
            if self._float_workspace is None:
                self._float_workspace = torch.zeros(FLOAT_WORKSPACE, dtype=torch.uint8, device=self._device)
            wrapper = self._wrapper(kind, use, self._float_workspace, buffers)
            int_bytes = INT_WORKSPACE if buffers is None else GRAPH_INT_WORKSPACE
            if kind.spec.latent:
                int_bytes = latents.INT_WORKSPACE
            self._lanes[key] = _Lane(wrapper, self._float_workspace, int_bytes, buffers)
        return self._lanes[key]

    def _wrapper(self, kind: Kind, use: str, workspace: torch.Tensor, buffers: DeviceBatch | None) -> Any:
        library = self._library
        if kind.spec.latent:
            return self._latent_wrapper(kind.spec, workspace, buffers)
        if use in ("prefill", "pieces"):
            return library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=self._backend(kind))
        if buffers is None:
            return library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=kind.tensor_cores(), backend="fa2"
            )
        if not self._deterministic:
            return library.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=kind.tensor_cores(),
                paged_kv_indptr_buffer=buffers.kv_indptr,
                paged_kv_indices_buffer=buffers.kv_indices,
                paged_kv_last_page_len_buffer=buffers.last_page_len,
                backend="fa2",
            )
        return library.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=torch.arange(len(buffers.kv_indptr), dtype=torch.int32, device=self._device),
            paged_kv_indptr_buf=buffers.kv_indptr,
            paged_kv_indices_buf=buffers.kv_indices,
            paged_kv_last_page_len_buf=buffers.last_page_len,
            backend="fa2",
        )

    def _latent_wrapper(
        self, spec: AttentionSpec, workspace: torch.Tensor, buffers: DeviceBatch | None
    ) -> latents.LatentWrapper:
        wrapper = self._library.BatchMLAPagedAttentionWrapper
        backend = "fa3" if self._hopper else "fa2"
        if buffers is None:
            return latents.LatentWrapper(wrapper(workspace, backend=backend), spec)
        requests = len(buffers.last_page_len)
        inner = wrapper(
            workspace,
            use_cuda_graph=True,
            qo_indptr=torch.empty(requests + 1, dtype=torch.int32, device=self._device),
            kv_indptr=buffers.kv_indptr,
            kv_indices=buffers.kv_indices,
            kv_len_arr=torch.empty(requests, dtype=torch.int32, device=self._device),
            backend=backend,
        )
        return latents.LatentWrapper(inner, spec)

    def _page_locked(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """An int32 copy that can be sent to the device without waiting. torch's allocator hands such memory out again
        only when copies out of it are done."""
        tensor = torch.from_numpy(array.astype(np.int32))
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _on_device(self, array: Ints) -> torch.Tensor:
        return self._page_locked(array).to(self._device, non_blocking=True)


def _fixed_split(batch: PagedBatch) -> dict[str, Any]:
    return {"fixed_split_size": DETERMINISTIC_SPLIT // batch.block_size}


def _indptr(lengths: Ints) -> Ints:
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out
