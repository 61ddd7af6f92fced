"""FlashInfer's kernels on an NVIDIA GPU (0.6.15; Ye et al., "FlashInfer", MLSys 2025).

partition.py says which kernel gets which rows of a step, and plan.py has the memory that the kernels' plans need.
latents.py has attention over latents. Triton computes what FlashInfer lacks (triton_kernels.py, triton_scans.py). Where
FlashInfer has no kernel (fp32, odd sizes), plain torch computes on the same device. Nothing here waits for the device.

With `deterministic`, a row's bits depend on its request alone: attention is FA2's prefill kernel for every row, one
query tile high, with keys shared out by position; matrix products are our own, which treat each row alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from .. import BackendUnavailableError
from ..contract import AttentionSpec, Backend, LayerCache, PagedBatch, Scans
from ..reference.reference_backend import FP8_LARGEST, ReferenceBackend
from ..reference.reference_scans import ReferenceScans
from . import latents, prebuilt
from .partition import DETERMINISTIC_SPLIT, QUERY_TILE, Kind
from .plan import FlashInferPlan, Planner

if TYPE_CHECKING:
    from ..decoder_contract import Experts, Norm, Routing

HALF = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
VECTOR_BYTES = 16  # what a thread reads at a time
MAX_THREADS = 1024  # in a block


class Gpu(NamedTuple):
    """What of a GPU decides which kernels run."""

    capability: tuple[int, int]
    num_multiprocessors: int


class FlashInferBackend(Backend):
    """See `contract.Backend` for what the methods promise.

    `plan` is for the dtypes that `refuses` was last asked about for that spec.
    """

    name = "flashinfer"
    heads_first = False  # its "NHD"

    def __init__(
        self,
        device: torch.device,
        deterministic: bool = False,
        kernels_dir: str | None = None,
        library: Any = None,
        gpu: Gpu | None = None,
    ) -> None:
        """Find FlashInfer, and the kernels that were compiled ahead.

        Args:
            device: a CUDA device.
            deterministic: a row's bits depend on its request alone.
            kernels_dir: where `mainspring kernels build` put them; None: the default folder, if it has any.
            library: stands in for the package, and `gpu` for the GPU, in tests.

        Raises:
            BackendUnavailableError: FlashInfer is missing or of another version, there is no GPU that it knows, or a
                kernel would have to be compiled and there is no compiler.
        """
        self._gpu = gpu or _gpu(device)
        self._library = library or _load(kernels_dir)
        self._device = device
        self.deterministic = deterministic
        self.graph_max_kv_len: int | None = DETERMINISTIC_SPLIT if deterministic else None
        hopper = self._gpu.capability[0] == 9
        self._planner = Planner(self._library, device, deterministic, self._gpu.num_multiprocessors, hopper)
        self._plain = ReferenceBackend()
        self.scans = _scans(device)
        self._kinds: dict[AttentionSpec, Kind] = {}
        self._counted = [torch.empty(0, dtype=torch.int32)]
        self._count(1 << 16)

    # ------------------------------------------------------------------ attention

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """What FlashInfer has no kernel for. Remembers the dtypes, for `plan`."""
        group, rest = divmod(spec.num_q_heads, spec.num_kv_heads)
        dim = prebuilt.head_dim(spec.key_dim)
        if spec.selects:
            return "keys that an indexer selects: no kernel here gathers them"
        if dtype not in HALF:
            return f"queries of {dtype}: FlashInfer's kernels read float16 and bfloat16; set dtype to one of them"
        if dtype == torch.bfloat16 and self._gpu.capability < (8, 0):
            return f"bfloat16 on compute capability {_dotted(self._gpu)}: it takes 8.0; set dtype='float16'"
        if kv_dtype not in (dtype, FP8):
            return f"queries of {dtype} and a cache of {kv_dtype}: set kv_cache_dtype to 'auto' or 'fp8'"
        if spec.bias is not None:
            return "a bias on its scores: FlashInfer's kernels are used without one"
        if spec.latent:
            reason = self._refuses_latents(spec, dtype, kv_dtype)
            if reason is None:
                self._kinds[spec] = Kind(spec, latents.row_dim(spec), dtype, kv_dtype)
            return reason
        if spec.key_dim != spec.value_dim:
            return (
                f"keys of {spec.key_dim} elements and values of {spec.value_dim}: FlashInfer's paged kernels take one"
            )
        if dim is None:
            return f"heads of {spec.key_dim} elements: FlashInfer's kernels take {prebuilt.HEAD_DIMS[-1]} at most"
        if rest:
            return f"{spec.num_q_heads} query heads over {spec.num_kv_heads} KV heads: they don't divide"
        if self.deterministic and group > QUERY_TILE:
            return f"{group} query heads per KV head: deterministic takes {QUERY_TILE} at most"
        if self.deterministic and self._gpu.capability < (8, 0):
            return f"compute capability {_dotted(self._gpu)}: deterministic takes 8.0"
        self._kinds[spec] = Kind(spec, dim, dtype, kv_dtype)
        return None

    def _refuses_latents(self, spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        if self.deterministic:
            return "latents: how FlashInfer shares their keys out depends on the batch, and deterministic is set"
        if self._gpu.capability < (8, 0):
            return f"latents on compute capability {_dotted(self._gpu)}: FlashInfer's kernels take 8.0"
        if kv_dtype == FP8 and (self._gpu.capability[0] != 9 or dtype != torch.bfloat16):
            return f"latents in fp8, with queries of {dtype}: FlashInfer takes them on Hopper alone, with bfloat16"
        return latents.refusal(spec, kv_dtype.itemsize)

    def prepare(self, specs: Sequence[AttentionSpec], dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        """Compile the modules that nobody has compiled ahead. Raises `prebuilt.KernelsError` where that fails."""
        kinds = (prebuilt.attention_of(spec, dtype, kv_dtype) for spec in dict.fromkeys(specs))
        prebuilt.compile_missing(prebuilt.modules_needed(kind for kind in kinds if kind))

    def cache_dims(self, spec: AttentionSpec) -> tuple[int, int]:
        """The next of 64, 128 and 256; a dimension itself where there is none. Of latents a row of both views."""
        if spec.latent:
            return latents.row_dim(spec), spec.value_dim
        key, value = (prebuilt.head_dim(dim) or dim for dim in (spec.key_dim, spec.value_dim))
        return key, value

    def append(
        self, cache: LayerCache, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Write keys and values; blocks and rows may be int32 as well, which spares a conversion for each layer.

        FlashInfer's kernel appends to requests. Here each token is one, whose only page is its block.
        """
        tokens, heads, dim = len(keys), cache.keys.shape[2], cache.keys.shape[3]
        if not tokens:
            return
        if cache.values.data_ptr() == cache.keys.data_ptr():
            self._append_latents(cache, _stored(keys, dim, cache.keys.dtype), blocks, rows)
            return
        keys, values = (_stored(x, dim, cache.keys.dtype) for x in (keys, values))
        vector = max(VECTOR_BYTES // cache.keys.itemsize, dim // 32)
        if dim not in prebuilt.HEAD_DIMS or keys.itemsize > 2 or dim // vector * heads > MAX_THREADS:
            self._plain.append(cache, keys, values, blocks, rows)
            return
        counted = self._count(tokens + 1)
        each, pairs = counted[:tokens], (cache.keys, cache.values)
        self._library.append_paged_kv_cache(keys, values, each, rows.int(), pairs, blocks.int(), counted, each)

    def _append_latents(self, cache: LayerCache, keys: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Write padded rows ``[tokens, 1, row_dim]``; where the views overlap, some numbers are written twice."""
        if keys.itemsize > 2:
            cache.keys.index_put_((blocks, rows), keys)
            return
        counted, value_dim = self._count(len(keys) + 1), cache.values.shape[-1]
        each = counted[: len(keys)]
        new, old = latents.views(keys[:, 0], value_dim), latents.views(cache.keys[:, :, 0], value_dim)
        self._library.append_paged_mla_kv_cache(*new, each, rows.int(), *old, blocks.int(), counted, each)

    def plan(
        self, spec: AttentionSpec, batch: PagedBatch, device: torch.device, turn: int = 0, graph: bool = False
    ) -> FlashInferPlan:
        """Share the rows out among FlashInfer's wrappers, and plan these.

        Raises:
            ValueError: `refuses` was not asked about this spec, or gave a reason.
            RuntimeError: the arrays of a graph do not lie where they lay.
        """
        if spec not in self._kinds:
            raise ValueError(f"{spec} is planned before refuses() was asked for which dtypes, or though it refused")
        return self._planner.plan(self._kinds[spec], batch, turn, graph)

    def forget_graphs(self) -> None:
        """Of the planner, which keeps what they read."""
        self._planner.forget_graphs()

    def run(
        self, plan: FlashInferPlan, query: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of every row of the step → ``[rows, q_heads, value_dim]``; padding rows are zero."""
        spec, dim = plan.spec, latents.DIM if plan.spec.latent else cache.keys.shape[-1]
        query = _readable(F.pad(query, (0, dim - spec.key_dim)) if dim > spec.key_dim and not spec.latent else query)
        shape = len(query), spec.num_q_heads
        out = torch.empty(*shape, dim, dtype=query.dtype, device=query.device)
        lse = None if sinks is None else torch.empty(shape, dtype=torch.float32, device=query.device)
        for wrapper, rows in plan.parts:
            parts: dict[str, Any] = (
                {"out": out[rows]} if lse is None else {"out": out[rows], "lse": lse[rows], "return_lse": True}
            )
            wrapper.run(query[rows], (cache.keys, cache.values), **parts)
        if sinks is not None and lse is not None:
            # FA2 ignores run(sinks=...). A sink s adds e^s to the sum S that the weights were divided by, and S is
            # 2^lse: so what came out is S / (S + e^s) = 1 / (1 + e^(s - lse * ln 2)) of itself.
            out.mul_(torch.sigmoid(lse * math.log(2) - sinks.float()).unsqueeze(-1))
        out[plan.num_rows :].zero_()
        return out[..., : spec.value_dim]

    # ------------------------------------------------------------------ around it

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        """RMSNorm; heads that lie apart (a part of each row of a fused projection) are read where they are."""
        if not _halves(x, weight) or offset not in (0.0, 1.0):
            return self._plain.rms_norm(x, weight, eps, offset)
        width = x.shape[-1]
        rows = x
        if x.dim() != 2:  # of the two, only the plain norm reads heads that lie apart; the other gets a copy
            rows = x.reshape(-1, width) if offset or x.is_contiguous() else x.reshape(-1, *x.shape[-2:])
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        if out.numel():
            norm = self._library.gemma_rmsnorm if offset else self._library.rmsnorm
            norm(_readable(rows), _readable(weight), eps, out)
        return out.view(x.shape)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Overwrites both arguments; the norm is of the sum before that was rounded."""
        halves = _halves(x, residual, weight) and _is_readable(x) and _is_readable(residual)
        if not halves or offset not in (0.0, 1.0):
            return self._plain.add_rms_norm(x, residual, weight, eps, offset)
        if x.numel():
            norm = self._library.gemma_fused_add_rmsnorm if offset else self._library.fused_add_rmsnorm
            norm(x.view(-1, x.shape[-1]), residual.view(-1, x.shape[-1]), _readable(weight), eps)
        return x, residual

    def rotate(self, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False) -> None:
        """FlashInfer looks angles up by position; here row t is at "position" t of a table with one row each."""
        dim, rotary_dim = query.shape[-1], cos_sin.shape[-1]
        heads = _halves(query, key) and _is_readable(query) and _is_readable(key)
        # A thread takes dim / 32 elements, 8 at least, and the angles that belong to them from one half of the table.
        if not heads or dim not in prebuilt.HEAD_DIMS or rotary_dim % 16 or not cos_sin.is_contiguous():
            self._plain.rotate(query, key, cos_sin, interleaved)
        elif len(query):
            positions = self._count(len(query))
            self._library.apply_rope_with_cos_sin_cache_inplace(
                positions, query, key, dim, cos_sin, is_neox=not interleaved
            )

    def norm_and_rotate(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        norms: tuple[Norm, Norm],
        cos_sin: torch.Tensor,
        interleaved: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Backend.norm_and_rotate`; in one kernel where whole heads of the usual sizes are rotated by halves."""
        dim = query.shape[-1]
        whole = dim in prebuilt.HEAD_DIMS and cos_sin.shape[-1] == dim
        alike = whole and all(x.stride()[1:] == (dim, 1) for x in (query, key))
        if not alike or interleaved or query.device.type != "cuda" or not cos_sin.is_contiguous():
            return super().norm_and_rotate(query, key, norms, cos_sin, interleaved)
        from .triton_kernels import norm_and_rotate

        norm_and_rotate(query, key, norms, cos_sin)
        return query, key

    def act_and_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """See `Backend.act_and_mul`."""
        width = gate_up.shape[-1] // 2
        name = f"{activation}_and_mul"
        known = activation in ("silu", "gelu", "gelu_tanh")
        # Gate and up are each read 16 bytes at a time; FlashInfer itself only asks that both together are so long.
        if not known or not _halves(gate_up) or width * gate_up.itemsize % VECTOR_BYTES:
            return self._plain.act_and_mul(gate_up, activation)
        if activation == "silu" and gate_up.device.type == "cuda":
            from .triton_kernels import silu_and_mul

            return silu_and_mul(gate_up.contiguous())
        out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
        if out.numel():
            getattr(self._library, name)(_readable(gate_up.contiguous()), out)
        return out

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """torch's own; with `deterministic` one in which a row's bits do not depend on how many there are."""
        if self.deterministic and x.device.type == "cuda":
            from .triton_kernels import row_invariant_linear

            return row_invariant_linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def route(
        self, logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Backend.route`, in one kernel where a softmax alone decides."""
        softmax = not routing.sigmoid and correction is None and routing.groups == routing.scale == 1
        if logits.device.type != "cuda" or not softmax:
            return super().route(logits, routing, correction)
        from .triton_experts import route

        return route(logits.contiguous(), routing.top_k, routing.normalise)

    def experts(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, experts: Experts) -> torch.Tensor:
        """See `Backend.experts`; each row has the same bits however many there are."""
        aligned = all(weight.is_contiguous() and weight[0, 0].nbytes % VECTOR_BYTES == 0 for weight in experts[:2])
        if x.device.type != "cuda" or not aligned or experts.biases is not None:
            return super().experts(x, chosen, shares, experts)
        from .triton_experts import compute_experts

        return compute_experts(x, chosen.contiguous(), shares.contiguous(), experts)

    # ------------------------------------------------------------------ sampling

    def mask(
        self,
        scores: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        min_p: torch.Tensor | None,
    ) -> torch.Tensor:
        """Top-k, top-p and min-p, in this order, without waiting to see which rows ask for what. Of tokens that share
        the last place of top-p all stay."""
        vocab = scores.shape[1]
        if top_k is not None:
            limits = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab).int()
            scores = self._library.top_k_mask_logits(scores.contiguous(), limits)
        if top_p is not None:
            # Sums of integers: they do not depend on the order in which threads come. softmax goes row by row.
            kept = self._library.top_p_renorm_probs(scores.softmax(-1), top_p.float(), is_deterministic=True) > 0
            kept |= scores == scores.amax(-1, keepdim=True)
            kept |= (top_p >= 1).unsqueeze(1)
            scores = torch.where(kept, scores, -torch.inf)
        if min_p is not None:
            floor = scores.amax(-1, keepdim=True) + min_p.log().unsqueeze(1)  # where it is off, minus infinity
            scores = torch.where(scores < floor, -torch.inf, scores)
        return scores

    def largest(self, scores: torch.Tensor) -> torch.Tensor:
        """By the kernel of `choose`, which cuts a row into parts: torch's is several times slower for few rows."""
        if scores.device.type != "cuda":
            return self._plain.largest(scores)
        from .triton_kernels import choose_by_key

        return choose_by_key(scores)

    def choose(
        self, scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """The keyed Gumbel choice, in one kernel."""
        if scores.device.type != "cuda":
            return self._plain.choose(scores, seeds, positions, sampled)
        from .triton_kernels import choose_by_key

        return choose_by_key(scores, seeds, positions, sampled)

    def _count(self, n: int) -> torch.Tensor:
        """0, 1, … n - 1, int32. A graph may go on reading what it was recorded with, so nothing is thrown away."""
        if len(self._counted[-1]) < n:
            self._counted.append(torch.arange(1 << (n - 1).bit_length(), dtype=torch.int32, device=self._device))
        return self._counted[-1][:n]


def _halves(*tensors: torch.Tensor) -> bool:
    """Whether all have one 16-bit dtype."""
    return tensors[0].dtype in HALF and all(t.dtype == tensors[0].dtype for t in tensors)


def _is_readable(x: torch.Tensor) -> bool:
    """Whether `x` can be read 16 bytes at a time: the last dimension is contiguous, rows and heads begin aligned."""
    if x.data_ptr() % VECTOR_BYTES:
        return False
    if x.is_contiguous():
        return True
    *strides, last = x.stride()
    steps = (stride * x.itemsize for stride, size in zip(strides, x.shape, strict=False) if size > 1)
    return last == 1 and not any(step % VECTOR_BYTES for step in steps)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a contiguous copy."""
    return x if _is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def _stored(x: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as they lie in the cache: padded with zeros, in its dtype."""
    if x.shape[-1] < dim:
        x = F.pad(x, (0, dim - x.shape[-1]))
    if x.dtype != dtype:
        x = (x.clamp(-FP8_LARGEST, FP8_LARGEST) if dtype == FP8 else x).to(dtype)
    return _readable(x)


def _scans(device: torch.device) -> Scans:
    if device.type != "cuda":
        return ReferenceScans()
    from .triton_scans import TritonScans

    return TritonScans()


def _gpu(device: torch.device) -> Gpu:
    """Raises BackendUnavailableError where there is none, or one that FlashInfer has no kernels for."""
    if torch.version.cuda is None:
        raise BackendUnavailableError(f"torch {torch.__version__} was built for CPUs: install its CUDA build")
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendUnavailableError(
            f"FlashInfer needs an NVIDIA GPU and a driver for CUDA {torch.version.cuda}; device is {str(device)!r}: "
            "see that nvidia-smi runs, or set attention_backend='reference'"
        )
    properties = torch.cuda.get_device_properties(device)
    gpu = Gpu((properties.major, properties.minor), properties.multi_processor_count)
    if gpu.capability < (7, 5):
        raise BackendUnavailableError(
            f"{properties.name} has compute capability {_dotted(gpu)} and FlashInfer needs 7.5: "
            "set attention_backend='reference'"
        )
    return gpu


def _load(kernels_dir: str | None) -> Any:
    """The package, with the kernels compiled ahead if there are any. Raises BackendUnavailableError."""
    try:
        library = prebuilt.require_flashinfer()
        if prebuilt.use(kernels_dir) is None:
            prebuilt.find_nvcc()
    except prebuilt.KernelsError as error:
        raise BackendUnavailableError(str(error)) from error
    return library


def _dotted(gpu: Gpu) -> str:
    return ".".join(map(str, gpu.capability))
