"""A stand-in for the flashinfer package on CPU tensors: the same calls, the same requirements, and asynchronous copies.

It checks what FlashInfer's kernels need but do not all check themselves (dtypes, shapes, strides, alignment, page
numbers), computes with the reference backend, and reads every number from the same place as a kernel: index arrays from
the wrapper's buffers when a kernel runs, the work list from the copy of the page-locked buffer that ``plan`` filled.
That copy is made when a kernel is launched; with `hold` it stays in progress until `finish`, and writing the
page-locked memory before then fails. `FlashInferDouble.graph` records launches and the torch operations around them,
and runs them again over the same memory, without the Python code in between. It implements the rules of FA2's
scheduler: tile sizes, splits of keys, and the use of the workspaces.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mainspring.kernels.contract import AttentionSpec, LayerCache, PagedBatch
from mainspring.kernels.reference.reference_backend import ReferenceBackend

NUM_MULTIPROCESSORS = 132
LOG2_E = math.log2(math.e)
HALF = (torch.float16, torch.bfloat16)
DIMS = (64, 128, 256)
REFERENCE = ReferenceBackend()


class Call(NamedTuple):
    """One recorded call of the package."""

    name: str  # such as "BatchDecodeWithPagedKVCacheWrapper.plan"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wrapper: Any  # the object, for a method


class _Copy(NamedTuple):
    """An asynchronous copy of page-locked memory."""

    pages: torch.Tensor
    target: torch.Tensor
    was: torch.Tensor  # its content when the copy was requested

    def check(self) -> None:
        n = len(self.was)
        assert torch.equal(self.pages[:n], self.was), "page-locked memory was rewritten before its copy was done"


class Graph(TorchDispatchMode):
    """Records the launches made while it is active."""

    def __init__(self, before: Callable[[], None]) -> None:
        """`before`: performs the pending copies when the graph is launched."""
        super().__init__()
        self._before = before
        self._launched: list[Callable[[], None]] = []
        self._in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._in_kernel:

            def again() -> None:
                new = func(*args, **kwargs)
                if isinstance(new, torch.Tensor) and new.data_ptr() != out.data_ptr():
                    out.copy_(new)

            self._launched.append(again)
        return out

    def kernel(self, run: Callable[[], None]) -> None:
        self._in_kernel = True
        run()
        self._in_kernel = False
        self._launched.append(run)

    def replay(self) -> None:
        self._before()
        for launch in self._launched:
            launch()


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of the double or of a wrapper so that its calls are recorded."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        double = self if isinstance(self, FlashInferDouble) else self._double
        name = function.__name__ if double is self else f"{type(self).__name__}.{function.__name__}"
        double.calls.append(Call(name, args, kwargs, None if double is self else self))
        return function(self, *args, **kwargs)

    return call


# ---------------------------------------------------------------------------------------------------------- FA2's plan


class Schedule(NamedTuple):
    """How FA2's scheduler splits work (attention/scheduler.cuh)."""

    tile: int
    programs: int  # with work, for each KV head
    padded: int  # launched
    split: bool
    float_bytes: int
    int_bytes: int


def _ceil(a: Any, b: Any) -> Any:
    return -(-a // b)


def tile_of(packed: int, dim: int) -> int:
    """FA2DetermineCtaTileQ, from Ampere on."""
    return 128 if packed > 64 and dim < 256 else 64 if packed > 16 else 16


def prefill_schedule(
    rows: np.ndarray,
    pages: np.ndarray,
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    graph: bool,
    window_left: int,
    fixed_split_size: int,
    disable_split_kv: bool,
) -> Schedule:
    """PrefillSplitQOKVIndptr and PrefillPlan: `rows` and `pages` of each request."""
    requests, packed = len(rows), rows * (heads[0] // heads[1])
    most = 2 * NUM_MULTIPROCESSORS // heads[1]
    if graph:
        total = int(rows.sum())
        tile = tile_of((total - requests + 1) * (heads[0] // heads[1]), dim)
        num_tiles = _ceil(total * (heads[0] // heads[1]), tile) + requests - 1
    else:
        tile = tile_of(int(packed.sum()) // requests, dim)
    seen = pages if window_left < 0 else np.minimum(_ceil(window_left + tile, page_size), pages)
    split, share = False, np.iinfo(np.int64).max
    tiles = _ceil(packed, tile)
    if fixed_split_size > 0 and not disable_split_kv:
        share = fixed_split_size
    elif not disable_split_kv:
        low, high = max(128 // page_size, 1), max(1, int(seen.max()))
        while low < high:
            middle = (low + high) // 2
            if (tiles * _ceil(np.maximum(seen, 1), middle)).sum() > most:
                low = middle + 1
            else:
                high = middle
        split, share = graph or low < max(1, int(seen.max())), low
    shares = 1 if disable_split_kv else _ceil(np.maximum(seen, 1), share)
    if fixed_split_size > 0 and not disable_split_kv:
        split = bool((shares > 1).any())
    programs = int((tiles * shares).sum())
    padded = max(most, num_tiles) if graph else programs
    if programs > padded:
        raise RuntimeError("new batch size should not exceed padded batch size")
    float_bytes = heads[0] * padded * tile * (dim + 1) * 4 if split else 0
    int_bytes = 13 * padded + 8 * requests + 4 * int(rows.sum()) + 256
    return Schedule(tile, programs, padded, split, float_bytes, int_bytes)


# ----------------------------------------------------------------------------------------------------------- wrappers


def _check_indices(tensor: torch.Tensor, size: int | None = None) -> None:
    assert tensor.dtype == torch.int32, "index arrays are int32"
    assert tensor.dim() == 1, "index arrays have one dimension"
    assert tensor.is_contiguous(), "index arrays are contiguous"
    assert size is None or len(tensor) == size, f"{len(tensor)} numbers, not {size}"


def _check_readable(x: torch.Tensor, what: str) -> None:
    assert x.stride(-1) == 1, f"{what}: the last dimension must be contiguous"
    assert x.data_ptr() % 16 == 0, f"{what}: not aligned"
    for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True):
        assert size <= 1 or stride * x.itemsize % 16 == 0, f"{what}: stride {stride} is not aligned"


class _Wrapper:
    """Common code of the two wrappers."""

    _double: FlashInferDouble
    device: torch.device
    _float_workspace_buffer: torch.Tensor
    _int_workspace_buffer: torch.Tensor
    _pin_memory_int_workspace_buffer: torch.Tensor
    _paged_kv_indptr_buf: torch.Tensor
    _paged_kv_indices_buf: torch.Tensor
    _paged_kv_last_page_len_buf: torch.Tensor
    _qo_indptr_buf: torch.Tensor | None

    def _set_up(self, workspace: torch.Tensor, kv_layout: str, graph: bool) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self._double.wrappers.append(self)
        self._serial = len(self._double.wrappers)
        self.device = workspace.device
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = torch.empty(1 << 20, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(1 << 20, dtype=torch.uint8)
        self._use_cuda_graph = graph
        self._frozen: tuple[Any, ...] | None = None  # results of the last plan

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    @recorded
    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace_buffer, int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.empty_like(int_workspace_buffer)

    def _plan_work(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        spec: AttentionSpec,
        dtypes: tuple[torch.dtype, torch.dtype],
        page_size: int,
        causal: bool,
        schedule: Schedule | None,
        lens: np.ndarray | None = None,
    ) -> None:
        """Fill the page-locked buffer with the work list and start its copy."""
        self._double.check_host(qo_indptr, kv_indptr)
        rows, pages = qo_indptr.diff().numpy().astype(np.int64), kv_indptr.diff().numpy().astype(np.int64)
        assert (rows >= 0).all()
        assert (pages > 0).all(), "each request has a page"
        if schedule is not None:
            self._double.schedules.append(schedule)
            if schedule.float_bytes > len(self._float_workspace_buffer):
                raise RuntimeError(f"Buffer overflow when allocating memory for tmp_v: {schedule}")
            if schedule.int_bytes > len(self._int_workspace_buffer):
                raise RuntimeError(f"Buffer overflow in the int workspace: {schedule}")
        form = (self._serial, len(rows), *((schedule.padded, schedule.split) if schedule else (0, 0)))
        work = torch.from_numpy(
            np.concatenate([[*form], rows, pages, *([] if lens is None else [lens])]).astype(np.int64)
        ).view(torch.uint8)
        pages_locked = self._pin_memory_int_workspace_buffer
        assert len(work) <= len(pages_locked)
        self._double.send(pages_locked, self._int_workspace_buffer, work)
        self._frozen = (form, spec, dtypes, page_size, causal)

    def _launch(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        qo_indptr: torch.Tensor | None,
    ) -> Any:
        assert self._frozen is not None, "plan comes before run"
        form, spec, (dtype, kv_dtype), page_size, _ = self._frozen
        keys, values = paged_kv_cache
        assert q.dtype == dtype, f"queries of {q.dtype}, planned for {dtype}"
        assert q.dtype in HALF, "queries have 16 bits"
        assert keys.dtype == values.dtype == kv_dtype, f"a cache of {keys.dtype}, planned for {kv_dtype}"
        assert q.shape[1:] == (spec.num_q_heads, spec.key_dim)
        _check_readable(q, "queries")
        assert keys.shape == values.shape
        assert keys.stride() == values.stride(), "k/v strides differ"
        assert keys.shape[1:] == (page_size, spec.num_kv_heads, spec.key_dim)
        for x in (keys, values):
            _check_readable(x, "cache")
        if out is None:
            out = torch.empty_like(q)
        assert out.shape == q.shape
        assert out.dtype == dtype
        assert out.is_contiguous(), "the kernel takes the output for contiguous"
        if return_lse and lse is None:
            lse = torch.empty(q.shape[:2])
        if lse is not None:
            assert lse.shape == q.shape[:2]
            assert lse.dtype == torch.float32
            assert lse.is_contiguous()
        arrays = self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf
        cache = LayerCache(keys, values)
        kernel = functools.partial(
            self._kernel, form, spec, page_size, self._int_workspace_buffer, qo_indptr, arrays, q, cache, out, lse
        )
        self._double.launch(kernel)
        return (out, lse) if return_lse else out

    def _kernel(
        self,
        form: tuple[int, ...],
        spec: AttentionSpec,
        page_size: int,
        int_workspace: torch.Tensor,
        qo_indptr: torch.Tensor | None,
        arrays: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        q: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Reads only device memory and the values fixed at launch."""
        num = form[1]
        work = int_workspace[: 8 * (len(form) + 2 * num)].clone().view(torch.int64).tolist()
        assert tuple(work[: len(form)]) == form, "the int workspace holds another plan than the one that is run"
        rows, pages = work[len(form) : len(form) + num], work[len(form) + num :]
        if qo_indptr is None:
            qo_indptr = torch.arange(num + 1, dtype=torch.int32)
        kv_indptr, kv_indices, last_page_len = (a.clone() for a in arrays)
        assert qo_indptr.diff().tolist() == rows, "qo_indptr on the device is not what was planned"
        assert kv_indptr.diff().tolist() == pages, "kv_indptr on the device is not what was planned"
        assert int(qo_indptr[0]) == int(kv_indptr[0]) == 0
        assert len(q) == int(qo_indptr[-1]), "as many queries as were planned"
        assert len(last_page_len) == num
        assert num == 0 or 1 <= int(last_page_len.min()) <= int(last_page_len.max()) <= page_size
        used = kv_indices[: int(kv_indptr[-1])]
        assert len(used) == int(kv_indptr[-1])
        assert num == 0 or 0 <= int(used.min()) <= int(used.max()) < len(cache.keys), "a page outside the cache"
        batch = PagedBatch(qo_indptr.clone(), kv_indptr, used, last_page_len, page_size)
        plan = self._double.reference_plan(spec, batch)
        out.copy_(REFERENCE.run(plan, q, cache))
        if lse is not None:
            lse.copy_(_log_sum_exp(spec, batch, q, cache.keys))


def _log_sum_exp(spec: AttentionSpec, batch: PagedBatch, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Base 2, ``[rows, q_heads]``."""
    out = torch.empty(q.shape[:2])
    group = spec.num_q_heads // spec.num_kv_heads
    edges = zip(batch.qo_indptr.unfold(0, 2, 1).tolist(), batch.kv_indptr.unfold(0, 2, 1).tolist(), strict=True)
    for ((row, row_end), (page, page_end)), last in zip(edges, batch.last_page_len.tolist(), strict=True):
        length = (page_end - page - 1) * batch.block_size + last
        of = keys[batch.kv_indices[page:page_end].long()].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->qhk", q[row:row_end].float(), of) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        distance = torch.arange(length - (row_end - row), length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (spec.window or length))
        out[row:row_end] = scores.masked_fill(hidden[:, None], -math.inf).logsumexp(-1) * LOG2_E
    return out


class _Decode(_Wrapper):
    @recorded
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        self._set_up(float_workspace_buffer, kv_layout, use_cuda_graph)
        self.use_tensor_cores = use_tensor_cores
        self._backend = backend
        self._fixed_batch_size = 0
        self._qo_indptr_buf = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            assert len(paged_kv_indptr_buffer) == self._fixed_batch_size + 1
            self._paged_kv_indptr_buf = paged_kv_indptr_buffer
            self._paged_kv_indices_buf = paged_kv_indices_buffer
            self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._planned_in_full = False

    @recorded
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        assert not deprecated_positional_args, "these are to be given by name"
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        self._double.check_host(indptr, last_page_len)
        if self._use_cuda_graph:
            assert len(last_page_len) == self._fixed_batch_size, "the batch size is fixed in a graph"
            assert len(indices) <= len(self._paged_kv_indices_buf)
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr.clone(), indices
            self._paged_kv_last_page_len_buf = last_page_len.clone()
        self._planned_in_full = True
        self._plan_cached(
            indptr, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, window_left, logits_soft_cap,
            q_data_type, kv_data_type, sm_scale, fixed_split_size, disable_split_kv,
        )  # fmt: skip

    def _plan_cached(
        self,
        indptr: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: Any,
        kv_data_type: Any,
        sm_scale: float | None,
        fixed_split_size: int | None,
        disable_split_kv: bool,
    ) -> None:
        assert head_dim in DIMS
        assert self._backend == "fa2", "pinned: fast_decode_plan and the split arguments are for fa2"
        _check_indices(indptr)
        _check_indices(last_page_len, len(indptr) - 1)
        group = num_qo_heads // num_kv_heads
        schedule = None
        qo_indptr = torch.arange(len(indptr), dtype=torch.int32)
        if self.use_tensor_cores:
            schedule = prefill_schedule(
                qo_indptr.diff().numpy().astype(np.int64),
                indptr.diff().numpy().astype(np.int64),
                (num_qo_heads, num_kv_heads),
                head_dim,
                page_size,
                self._use_cuda_graph,
                window_left,
                -1 if fixed_split_size is None else fixed_split_size,
                disable_split_kv,
            )
        else:
            assert group in (1, 2, 3, 4, 8), f"Unsupported group_size: {group}"
            assert fixed_split_size is None, "fixed_split_size is only supported by tensor core decode for now"
            assert not disable_split_kv, "dropped without tensor cores"
        assert sm_scale is not None
        spec = _spec_of(num_qo_heads, num_kv_heads, head_dim, sm_scale, window_left, logits_soft_cap)
        self._plan_work(qo_indptr, indptr, spec, (q_data_type, kv_data_type), page_size, False, schedule)

    @recorded
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        assert sinks is None, "fa2 ignores them"
        return self._launch(q, paged_kv_cache, out, lse, return_lse, None)


def _spec_of(
    q_heads: int, kv_heads: int, dim: int, scale: float, window_left: int, softcap: float | None
) -> AttentionSpec:
    window = None if window_left < 0 else window_left + 1
    return AttentionSpec(q_heads, kv_heads, dim, dim, scale, window, softcap or None)


def fast_decode_plan(
    self: _Decode,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    double = self._double
    assert self._planned_in_full, "it takes the kernel from a full plan"
    host = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    if self.use_tensor_cores:
        double.check_host(last_page_len)  # read on the host: reading it from the device would block
    if self._use_cuda_graph:
        assert len(last_page_len) == self._fixed_batch_size, "the batch size is fixed in a graph"
        assert len(indices) <= len(self._paged_kv_indices_buf)
    else:
        double.check_device(indptr, indices)
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
        self._paged_kv_last_page_len_buf = last_page_len
        if self.use_tensor_cores and double.device_memory:
            self._paged_kv_last_page_len_buf = torch.full_like(last_page_len, -1)  # a kernel can't read host memory
        else:
            double.check_device(last_page_len)
    self._plan_cached(
        host, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, window_left, logits_soft_cap,
        q_data_type, kv_data_type, sm_scale, fixed_split_size, disable_split_kv,
    )  # fmt: skip


class _Prefill(_Wrapper):
    @recorded
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._set_up(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._backend = backend
        self._fixed_batch_size = 0
        if use_cuda_graph:
            assert qo_indptr_buf is not None
            assert paged_kv_indptr_buf is not None
            assert paged_kv_indices_buf is not None
            assert paged_kv_last_page_len_buf is not None
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            self._qo_indptr_buf = qo_indptr_buf
            self._paged_kv_indptr_buf = paged_kv_indptr_buf
            self._paged_kv_indices_buf = paged_kv_indices_buf
            self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf

    @recorded
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        assert causal
        assert head_dim_qk in DIMS
        assert head_dim_vo in (None, head_dim_qk)
        assert max_sequence_kv is None, "fa2 then has no lengths: UnboundLocalError in 0.6.15"
        _check_indices(qo_indptr)
        requests = len(qo_indptr) - 1
        assert requests, "an empty batch divides by zero"
        _check_indices(paged_kv_indptr, requests + 1)
        _check_indices(paged_kv_last_page_len, requests)
        _check_indices(paged_kv_indices)
        self._double.check_host(qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        if seq_lens is not None:
            _check_indices(seq_lens, requests)
            self._double.check_host(seq_lens)
            assert torch.equal(seq_lens, lengths)
        assert (qo_indptr.diff() <= lengths).all()
        assert max_token_per_sequence in (None, int(qo_indptr.diff().max()))
        self._qo_indptr_last = int(qo_indptr[-1])
        if self._use_cuda_graph:
            assert requests == self._fixed_batch_size, "the batch size is fixed in a graph"
            assert len(paged_kv_indices) <= len(self._paged_kv_indices_buf)
            assert self._qo_indptr_buf is not None
            self._qo_indptr_buf.copy_(qo_indptr)
            self._paged_kv_indptr_buf.copy_(paged_kv_indptr)
            self._paged_kv_last_page_len_buf.copy_(paged_kv_last_page_len)
            self._paged_kv_indices_buf[: len(paged_kv_indices)].copy_(paged_kv_indices)
        else:
            self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr.clone(), paged_kv_indptr.clone()
            self._paged_kv_last_page_len_buf, self._paged_kv_indices_buf = (
                paged_kv_last_page_len.clone(),
                paged_kv_indices,
            )
        schedule = None
        if self._backend == "fa2":
            schedule = prefill_schedule(
                qo_indptr.diff().numpy().astype(np.int64),
                paged_kv_indptr.diff().numpy().astype(np.int64),
                (num_qo_heads, num_kv_heads),
                head_dim_qk,
                page_size,
                self._use_cuda_graph,
                window_left,
                fixed_split_size or -1,
                disable_split_kv,
            )
        else:
            assert fixed_split_size is None, "what is not fa2 drops it"
            assert not disable_split_kv, "what is not fa2 drops it"
            assert q_data_type == kv_data_type, "FA3 takes an fp8 cache only with fp8 queries"
        assert sm_scale is not None
        spec = _spec_of(num_qo_heads, num_kv_heads, head_dim_qk, sm_scale, window_left, logits_soft_cap)
        dtypes: Any = (q_data_type, kv_data_type)
        self._plan_work(qo_indptr, paged_kv_indptr, spec, dtypes, page_size, True, schedule)

    @recorded
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Any:
        assert sinks is None, "fa2 ignores them"
        assert len(q) == self._qo_indptr_last, "as many queries as were planned"
        return self._launch(q, paged_kv_cache, out, lse, return_lse, self._qo_indptr_buf)


class _Latents(_Wrapper):
    """BatchMLAPagedAttentionWrapper. Its kernel reads all but the page numbers from the int workspace."""

    @recorded
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._set_up(float_workspace_buffer, "NHD", use_cuda_graph)
        assert backend in ("fa2", "fa3"), "what auto takes is not known here"
        self._backend = backend
        if use_cuda_graph:
            assert qo_indptr is not None
            assert kv_indptr is not None
            assert kv_indices is not None
            assert kv_len_arr is not None
            self._arrays = qo_indptr, kv_indptr, kv_len_arr
            self._kv_indices_buf = kv_indices

    @recorded
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        assert causal
        assert (head_dim_ckv, head_dim_kpe) == LATENT_DIMS, "others are not tested by FlashInfer"
        assert kv_data_type == q_data_type or self._backend == "fa3", "FA2 takes no fp8 cache"
        _check_indices(qo_indptr)
        requests = len(qo_indptr) - 1
        assert requests, "an empty batch divides by zero"
        _check_indices(kv_indptr, requests + 1)
        _check_indices(kv_len_arr, requests)
        _check_indices(kv_indices)
        self._double.check_host(qo_indptr, kv_indptr, kv_len_arr)
        self._double.check_device(kv_indices)
        rows, pages = qo_indptr.diff().numpy().astype(np.int64), kv_indptr.diff().numpy().astype(np.int64)
        lens = kv_len_arr.numpy().astype(np.int64)
        assert (_ceil(lens, page_size) == pages).all()
        assert (rows <= lens).all()
        if self._use_cuda_graph:
            for buffer, array in zip(self._arrays, (qo_indptr, kv_indptr, kv_len_arr), strict=True):
                assert len(buffer) == len(array), "the batch size is fixed in a graph"
                buffer.copy_(array)
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices)
        else:
            self._kv_indices_buf = kv_indices
        clusters, tile, works = latent_works(rows, lens, num_heads)
        assert works <= 16384, "the lists in the int workspace overflow, unchecked"
        most = 2 * clusters * tile
        schedule = Schedule(tile, works, clusters, True, most * (2 * head_dim_ckv + 4), 9 * 4 * 16384 + 25 * 132)
        spec = AttentionSpec(num_heads, 1, head_dim_ckv + head_dim_kpe, head_dim_ckv, sm_scale, latent=True)
        self._plan_work(qo_indptr, kv_indptr, spec, (q_data_type, kv_data_type), page_size, causal, schedule, lens)

    @recorded
    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
    ) -> Any:
        assert self._frozen is not None, "plan comes before run"
        form, spec, (dtype, kv_dtype), page_size, _ = self._frozen
        scale = 1.0 if kv_dtype == torch.float8_e4m3fn else None
        assert ckv_scale == kpe_scale == scale, "scales belong to an fp8 cache"
        for x, dim in ((q_nope, 512), (q_pe, 64)):
            assert x.dtype == dtype
            assert x.dtype in HALF
            assert x.shape == (len(q_nope), spec.num_q_heads, dim)
            _check_readable(x, "queries")
        for x, dim in ((ckv_cache, 512), (kpe_cache, 64)):
            assert x.dtype == kv_dtype, f"a cache of {x.dtype}, planned for {kv_dtype}"
            assert x.shape == (len(ckv_cache), page_size, dim)
            _check_readable(x, "cache")
        assert out is not None
        assert out.shape == q_nope.shape
        assert out.dtype == dtype
        assert out.stride(-1) == 1
        assert (lse is not None) == return_lse
        if lse is not None:
            assert lse.shape == q_nope.shape[:2]
            assert lse.dtype == torch.float32
            assert lse.is_contiguous()
        kernel = functools.partial(
            self._latent_kernel, form, spec, page_size, self._int_workspace_buffer, self._kv_indices_buf,
            (q_nope, q_pe), (ckv_cache, kpe_cache), out, lse,
        )  # fmt: skip
        self._double.launch(kernel)
        return (out, lse) if return_lse else out

    def _latent_kernel(
        self,
        form: tuple[int, ...],
        spec: AttentionSpec,
        page_size: int,
        int_workspace: torch.Tensor,
        kv_indices: torch.Tensor,
        query: tuple[torch.Tensor, torch.Tensor],
        caches: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        num = form[1]
        work = int_workspace[: 8 * (len(form) + 3 * num)].clone().view(torch.int64)
        assert tuple(work[: len(form)].tolist()) == form, (
            "the int workspace holds another plan than the one that is run"
        )
        rows, pages, lens = work[len(form) :].view(3, num)
        zero = torch.zeros(1, dtype=torch.int64)
        qo_indptr, kv_indptr = (torch.cat([zero, counts.cumsum(0)]).int() for counts in (rows, pages))
        assert len(query[0]) == int(qo_indptr[-1]), "as many queries as were planned"
        used = kv_indices[: int(kv_indptr[-1])].clone()
        assert 0 <= int(used.min()) <= int(used.max()) < len(caches[0]), "a page outside the cache"
        last_page_len = (lens - (pages - 1) * page_size).int()
        batch = PagedBatch(qo_indptr, kv_indptr, used, last_page_len, page_size)
        q, keys = torch.cat(query, -1), torch.cat(caches, -1).unsqueeze(2)
        plan = self._double.reference_plan(spec, batch)
        out.copy_(REFERENCE.run(plan, q, LayerCache(keys, keys[..., : spec.value_dim])))
        if lse is not None:
            lse.copy_(_log_sum_exp(spec, batch, q, keys))


LATENT_DIMS = (512, 64)


def latent_works(rows: np.ndarray, lens: np.ndarray, heads: int) -> tuple[int, int, int]:
    """MLAPlan: clusters of programs, pairs in a cluster's tile, and the tiles with their shares of keys."""
    size = 2 if int((rows * heads).sum()) // len(rows) > 64 else 1
    clusters, tile = NUM_MULTIPROCESSORS // size, 64 * size
    ends = [
        length if i + 1 == tiles else max(min(length - n + _ceil((i + 1) * tile, heads), length), 0)
        for n, length in zip(rows.tolist(), lens.tolist(), strict=True)
        for tiles in [_ceil(n * heads, tile)]
        for i in range(tiles)
    ]
    share = max(_ceil(sum(ends), clusters), 1)
    share = next(
        (keys for most, keys in ((8, 32), (16, 64), (32, 128), (64, 192)) if share <= most), _ceil(share, 256) * 256
    )
    return clusters, tile, sum(_ceil(end, share) for end in ends)


# ------------------------------------------------------------------------------------------------------- the package


class FlashInferDouble:
    """The package. See the docstring of this file.

    Attributes:
        calls: all recorded calls.
        schedules: FA2's split of the work, for each plan.
        device_memory: tensors in GPU memory, by address; if there are any, memory of the wrong side fails.
    """

    __version__ = "0.6.15"

    def __init__(self, hold: bool = False) -> None:
        self.calls: list[Call] = []
        self.schedules: list[Schedule] = []
        self.wrappers: list[_Wrapper] = []
        self.device_memory: dict[int, torch.Tensor] = {}
        self.active_graph: Graph | None = None
        self._hold = hold
        self._asked: list[_Copy] = []  # not done
        self._held: list[_Copy] = []  # done, but the host has not waited for it
        self._plans: dict[bytes, Any] = {}
        # Weak: a class is in a cycle with itself, and its double holds a workspace of 256 MB.
        members = {"_double": weakref.proxy(self)}
        self.BatchDecodeWithPagedKVCacheWrapper = type("BatchDecodeWithPagedKVCacheWrapper", (_Decode,), members)
        self.BatchPrefillWithPagedKVCacheWrapper = type("BatchPrefillWithPagedKVCacheWrapper", (_Prefill,), members)
        self.BatchMLAPagedAttentionWrapper = type("BatchMLAPagedAttentionWrapper", (_Latents,), members)
        self.decode = SimpleNamespace(fast_decode_plan=self.fast_decode_plan)

    @property
    def fast_decode_plan(self) -> Callable[..., None]:
        double = weakref.proxy(self)

        @functools.wraps(fast_decode_plan)
        def call(*args: Any, **kwargs: Any) -> None:
            double.calls.append(Call("fast_decode_plan", args, kwargs, None))
            fast_decode_plan(*args, **kwargs)

        return call

    # Behaviour of a GPU.

    def send(self, pages: torch.Tensor, target: torch.Tensor, data: torch.Tensor) -> None:
        """Write page-locked memory and request an asynchronous copy of it."""
        busy = [copy for copy in (*self._asked, *self._held) if copy.pages.data_ptr() == pages.data_ptr()]
        assert not busy, "page-locked memory was rewritten before its copy was done"
        pages[: len(data)] = data
        self._asked.append(_Copy(pages, target, data.clone()))

    def launch(self, kernel: Callable[[], None]) -> None:
        """Launch `kernel` after all requested copies."""
        self._copy()
        if self.active_graph is None:
            kernel()
        else:
            self.active_graph.kernel(kernel)

    def _copy(self) -> None:
        for copy in self._asked:
            copy.check()
            copy.target[: len(copy.was)] = copy.pages[: len(copy.was)]
        if self._hold:
            self._held += self._asked
        self._asked = []

    def finish(self) -> None:
        """The host has waited until the GPU was done."""
        self._copy()
        for copy in self._held:
            copy.check()
        self._held = []

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Call `run`; → a graph that repeats it, and the tensor that holds its result."""
        graph = self.active_graph = Graph(self._copy)
        try:
            with graph:
                return graph, run()
        finally:
            self.active_graph = None

    def put_on_device(self, *tensors: torch.Tensor) -> None:
        """Let these tensors represent GPU memory."""
        self.device_memory |= {t.untyped_storage().data_ptr(): t for t in tensors}

    def check_host(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            here = tensor.untyped_storage().data_ptr() not in self.device_memory
            assert here, "read on the host, but on the device: that would be waited for"

    def check_device(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            there = not self.device_memory or tensor.untyped_storage().data_ptr() in self.device_memory
            assert there, "read by a kernel, but not on the device"

    def reference_plan(self, spec: AttentionSpec, batch: PagedBatch) -> Any:
        key = repr((spec, batch.block_size)).encode() + b"".join(t.numpy().tobytes() + b"|" for t in batch[:4])
        if key not in self._plans:
            self._plans = {key: REFERENCE.plan(spec, batch, torch.device("cpu"))}
        return self._plans[key]

    # Kernels.

    @recorded
    def append_paged_kv_cache(
        self,
        append_key: torch.Tensor,
        append_value: torch.Tensor,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        paged_kv_cache: Any,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_last_page_len: torch.Tensor,
        kv_layout: str = "NHD",
    ) -> None:
        keys, values = paged_kv_cache
        blocks, page_size, heads, dim = keys.shape
        tokens, requests = len(append_key), len(kv_last_page_len)
        assert tokens, "no blocks to launch"
        assert dim in DIMS
        assert keys.stride() == values.stride(), "k/v strides must be identical"
        assert dim // max(16 // keys.itemsize, dim // 32) * heads <= 1024, "more threads than a block has"
        for source, target in ((append_key, keys), (append_value, values)):
            assert source.shape == (tokens, heads, dim)
            assert source.dtype == target.dtype, "the kernel takes the keys' bits for the cache's dtype"
            _check_readable(source, "keys and values")
            _check_readable(target, "cache")
        for array, size in ((batch_indices, tokens), (positions, tokens), (kv_indptr, requests + 1)):
            _check_indices(array, size)
        _check_indices(kv_indices)
        first = kv_indptr[batch_indices.long()].long() * page_size + positions
        at, row = kv_indices[first // page_size].long(), first % page_size
        assert int(at.min()) >= 0
        assert int(at.max()) < blocks, "a page outside the cache"
        keys[at, row] = append_key
        values[at, row] = append_value

    @recorded
    def append_paged_mla_kv_cache(
        self,
        append_ckv: torch.Tensor,
        append_kpe: torch.Tensor,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        ckv_cache: torch.Tensor | None,
        kpe_cache: torch.Tensor | None,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_last_page_len: torch.Tensor,
    ) -> None:
        assert ckv_cache is not None
        assert kpe_cache is not None
        tokens, (blocks, page_size, _) = len(append_ckv), ckv_cache.shape
        assert tokens, "no blocks to launch"
        for array, size in ((batch_indices, tokens), (positions, tokens), (kv_indptr, len(kv_last_page_len) + 1)):
            _check_indices(array, size)
        _check_indices(kv_indices)
        first = kv_indptr[batch_indices.long()].long() * page_size + positions
        at, row = kv_indices[first // page_size].long(), first % page_size
        assert 0 <= int(at.min()) <= int(at.max()) < blocks, "a page outside the cache"
        for source, target, dim in ((append_ckv, ckv_cache, 512), (append_kpe, kpe_cache, 64)):
            assert source.shape == (tokens, dim)
            assert target.shape == (blocks, page_size, dim)
            assert source.stride(-1) == target.stride(-1) == 1
            assert source.dtype == target.dtype, "the kernel takes the rows' bits for the cache's dtype"
            assert source.itemsize <= 2
            target[at, row] = source

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        wide = x.float()
        return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.float() + offset)

    def _check_norm(self, x: torch.Tensor, weight: torch.Tensor, *more: torch.Tensor) -> None:
        assert x.dtype in HALF
        assert weight.shape == x.shape[-1:]
        assert x.numel(), "no blocks to launch"
        vector = math.gcd(16 // x.itemsize, x.shape[-1]) * x.itemsize
        for tensor in (x, weight, *more):
            assert tensor.dtype == x.dtype
            assert tensor.stride(-1) == 1
            assert all(s * x.itemsize % vector == 0 for s in tensor.stride()[:-1])
            assert tensor.data_ptr() % vector == 0

    @recorded
    def rmsnorm(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        out: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(input) if out is None else out
        assert input.dim() in (2, 3)
        assert out.shape == input.shape
        self._check_norm(input, weight, out)
        return out.copy_(self._norm(input, weight, eps, 0.0))

    @recorded
    def gemma_rmsnorm(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        out: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(input) if out is None else out
        assert input.dim() == 2, "csrc/norm.cu: CHECK_DIM(2, input)"
        assert out.shape == input.shape
        self._check_norm(input, weight, out)
        return out.copy_(self._norm(input, weight, eps, 1.0))

    def _fused_add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, by: float) -> None:
        assert x.dim() == 2
        assert x.shape == residual.shape
        self._check_norm(x, weight, residual)
        total = x.float() + residual.float()
        x.copy_(self._norm(total, weight, eps, by))
        residual.copy_(total)

    @recorded
    def fused_add_rmsnorm(
        self,
        input: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        enable_pdl: bool | None = None,
    ) -> None:
        self._fused_add(input, residual, weight, eps, 0.0)

    @recorded
    def gemma_fused_add_rmsnorm(
        self,
        input: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        enable_pdl: bool | None = None,
    ) -> None:
        self._fused_add(input, residual, weight, eps, 1.0)

    def _act(self, input: torch.Tensor, out: torch.Tensor | None, activation: str) -> torch.Tensor:
        width = input.shape[-1] // 2
        out = torch.empty(*input.shape[:-1], width, dtype=input.dtype) if out is None else out
        assert input.dtype in HALF
        assert input.numel(), "no blocks to launch"
        assert input.is_contiguous()
        assert out.is_contiguous()
        assert input.data_ptr() % 16 == out.data_ptr() % 16 == width * input.itemsize % 16 == 0, "misaligned"
        return out.copy_(REFERENCE.act_and_mul(input.view(-1, 2 * width), activation).view(out.shape))

    @recorded
    def silu_and_mul(
        self, input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
    ) -> torch.Tensor:
        return self._act(input, out, "silu")

    @recorded
    def gelu_and_mul(
        self, input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
    ) -> torch.Tensor:
        return self._act(input, out, "gelu")

    @recorded
    def gelu_tanh_and_mul(
        self, input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
    ) -> torch.Tensor:
        return self._act(input, out, "gelu_tanh")

    @recorded
    def apply_rope_with_cos_sin_cache_inplace(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool = True,
    ) -> None:
        assert cos_sin_cache.dtype == torch.float32
        assert cos_sin_cache.is_contiguous()
        _check_indices(positions, len(query))
        assert len(query) == len(key) > 0
        assert int(positions.max()) < len(cos_sin_cache)
        assert head_size in DIMS, "others go to a kernel that was not looked at"
        rotary_dim = cos_sin_cache.shape[1]
        assert rotary_dim <= head_size
        assert rotary_dim // 2 % 8 == 0, "a thread's elements would straddle the halves"
        heads = [x.view(len(x), -1, head_size) for x in (query, key)]
        for x in heads:
            assert x.dtype in HALF
            _check_readable(x, "queries and keys")
        REFERENCE.rotate(*heads, cos_sin_cache[positions.long()], not is_neox)

    @recorded
    def top_k_mask_logits(self, logits: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
        assert isinstance(top_k, torch.Tensor)
        assert logits.is_contiguous()
        assert top_k.shape == logits.shape[:1]
        assert int(top_k.min()) > 0
        order = logits.sort(-1, descending=True).values
        last = order.gather(1, (top_k.long().clamp(max=logits.shape[1]) - 1).unsqueeze(1))
        return torch.where(logits >= last, logits, -math.inf)

    @recorded
    def top_p_renorm_probs(
        self, probs: torch.Tensor, top_p: torch.Tensor | float, is_deterministic: bool = False
    ) -> torch.Tensor:
        assert isinstance(top_p, torch.Tensor)
        assert probs.is_contiguous()
        assert probs.dtype == top_p.dtype == torch.float32
        assert top_p.shape == probs.shape[:1]
        order = probs.sort(-1, descending=True).values
        count = (order.double().cumsum(-1) < top_p.double().unsqueeze(1)).sum(-1, keepdim=True)
        floor = order.gather(1, count.clamp(max=probs.shape[1] - 1))
        kept = torch.where(probs >= floor, probs, 0.0)
        return kept / kept.sum(-1, keepdim=True)
