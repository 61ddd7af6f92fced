"""The reference backend: every kernel in plain torch, on any device.

It is the oracle of the tests and what runs on a CPU without a compiler, so it is written for both: one page to read,
and clockwork. Three habits make it so:

- a reduction has one fixed order: softmax runs over tiles of `KV_TILE` keys counted from position 0 (the online softmax
  of Milakov & Gimelshein 2018, with each tile's weights relative to that tile's own largest score).
- matrix products have a number of rows at which a row has the same bits whatever the others are: a multiple of
  `ROW_MULTIPLE`, or fewer where a trial shows that it makes no difference.
- of torch's elementwise functions, those alone are used whose value does not depend on an element's place. That rules
  out fp32 `sigmoid`, `silu`, `gelu` and `exp2`: their vector code and their tail code round differently (seen, torch
  2.13, AVX-512). `exp`, `log`, `tanh` and `erf` are safe there, and what IEEE 754 rounds correctly is safe everywhere.
"""

from __future__ import annotations

import functools
import math

import torch

from ..contract import ROW_MULTIPLE, AttentionSpec, Backend, LayerCache, PagedBatch, SlopeBias
from .attention_plan import KV_TILE, MASKED, AttentionPlan, Chunk, WorkSet, plan_attention
from .gumbel import keyed_choice
from .sampling import mask_top_k_top_p_min_p

SMALLEST_PRODUCT = 16**3
"""Multiply-adds up to which torch does not give a half-precision product to oneDNN."""

ELEMENTS_AT_A_TIME = 1 << 18
"""fp32 elements that an elementwise kernel handles at a time (1 MiB): its intermediates then stay in the cache."""

FP8_LARGEST = 448.0
"""of float8_e4m3fn, which has no infinity; some versions of torch make NaN of what is larger."""


class ReferenceBackend(Backend):
    """Plain torch. See `contract.Backend` for what the methods promise."""

    name = "reference"
    graph_max_kv_len: int | None = 0
    heads_first = False

    def __init__(self, deterministic: bool = True) -> None:
        """`deterministic`: whether it is on a CPU; a GPU's matrix products depend on their number of rows."""
        self.deterministic = deterministic
        self._workspaces: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._exact_unpadded: dict[tuple[int, int, int, torch.dtype, torch.device], bool] = {}

    def takes(self, batch: PagedBatch) -> bool:
        """Every step."""
        return True

    def append(
        self, cache: LayerCache, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Write the keys and values of this step's tokens to their rows of the cache, in its dtype."""
        for target, source in ((cache.keys, keys), (cache.values, values)):
            if target.dtype == torch.float8_e4m3fn:
                source = source.clamp(-FP8_LARGEST, FP8_LARGEST)
            target.index_put_((blocks, rows), source.to(target.dtype))

    def plan(
        self, spec: AttentionSpec, batch: PagedBatch, device: torch.device, turn: int = 0, graph: bool = False
    ) -> AttentionPlan:
        """Cut the step into tiles. Raises ValueError where the block size does not fit the tiles."""
        return plan_attention(spec, batch, device)

    def run(
        self, plan: AttentionPlan, query: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of every row of the step → ``[rows, q_heads, value_dim]``; padding rows are zero."""
        spec = plan.spec
        out = query.new_empty(len(query), spec.num_q_heads, spec.value_dim)
        out[plan.num_rows :] = 0
        for work in plan.sets:
            out[work.query_rows] = self._attend(spec, work, query, cache, sinks)
        return out

    def _attend(
        self, spec: AttentionSpec, work: WorkSet, query: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """The rows of one work set → ``[items * query_tile, q_heads, value_dim]``, in the set's order.

        ``group`` query heads share a KV head, and the places of an item times its group are the ``width`` rows of one
        matrix product per KV head. On a CPU about half of a decode step's time goes to gathering keys and values.
        """
        items, kv_heads, group = work.num_items, spec.num_kv_heads, spec.num_q_heads // spec.num_kv_heads
        width = work.query_tile * group
        padded = self._product_rows(width, spec.key_dim, spec.value_dim, query.dtype, query.device)
        rows = self._workspace("rows", (items, kv_heads, padded, spec.key_dim), query.dtype, query.device)
        places = query.index_select(0, work.query_rows)
        places = places.view(items, work.query_tile, kv_heads, group, spec.key_dim).transpose(1, 2)
        rows[:, :, :width] = places.reshape(items, kv_heads, width, spec.key_dim)

        # Per row: the largest score so far, the sum of exp(score - largest), and the same sum weighted with the values.
        state = items, kv_heads, width
        largest = query.new_full((*state, 1), MASKED, dtype=torch.float32)
        total = torch.zeros_like(largest)
        weighted = self._workspace("weighted", (*state, spec.value_dim), torch.float32, query.device).zero_()

        key_rows, key_indices = _rows_of(cache.keys, work)
        value_rows, value_indices = _rows_of(cache.values, work)
        for chunk, key_index, value_index in zip(work.chunks, key_indices, value_indices, strict=True):
            keys = self._gather(key_rows, key_index, query.dtype)
            scores = self._scores(spec, work, chunk, rows, keys)
            tile_largest = scores.amax(-1, keepdim=True)
            weights = _exp(scores.sub_(tile_largest))
            tile_total = weights.sum(-1, keepdim=True)
            values = self._gather(value_rows, value_index, query.dtype)
            tile_weighted = self._weigh(weights, values, padded)

            for at, of in chunk.segments:
                new_largest = torch.maximum(largest[at], tile_largest[of])
                keep, take = _exp(largest[at] - new_largest), _exp(tile_largest[of] - new_largest)
                largest[at] = new_largest
                total[at] = total[at] * keep + tile_total[of] * take
                weighted[at].mul_(keep).add_(tile_weighted[of].mul_(take))

        if sinks is not None:
            sink = sinks.float().view(kv_heads, 1, group).expand(-1, work.query_tile, -1).reshape(kv_heads, width, 1)
            new_largest = torch.maximum(largest, sink)
            keep = _exp(largest - new_largest)
            total = total * keep + _exp(sink - new_largest)
            weighted.mul_(keep)
        attended = weighted.div_(total).to(query.dtype)
        attended = attended.view(items, kv_heads, work.query_tile, group, spec.value_dim).transpose(1, 2)
        return attended.reshape(-1, spec.num_q_heads, spec.value_dim)

    def _scores(
        self, spec: AttentionSpec, work: WorkSet, chunk: Chunk, rows: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Scaled, capped and masked scores of a chunk: fp32 ``[pairs, kv_heads, width, KV_TILE]``, in a workspace.

        ``rows`` are those of all items, ``[items, kv_heads, padded, key_dim]``; ``keys`` those of the chunk's pairs.
        """
        rows = rows[chunk.items] if isinstance(chunk.items, slice) else rows.index_select(0, chunk.items)
        pairs, kv_heads, padded, key_dim = rows.shape
        group = spec.num_q_heads // kv_heads
        width = work.query_tile * group
        product = self._workspace("scores product", (pairs * kv_heads, padded, KV_TILE), rows.dtype, rows.device)
        torch.bmm(rows.view(-1, padded, key_dim), keys.transpose(1, 2), out=product)
        scores = self._workspace("scores", (pairs, kv_heads, width, KV_TILE), torch.float32, rows.device)
        scores.copy_(product.view(pairs, kv_heads, padded, KV_TILE)[:, :, :width])
        if spec.softcap is None:
            scores.mul_(spec.scale)
        else:
            scores.mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
        apart = scores.view(pairs, kv_heads, work.query_tile, group, KV_TILE)
        if chunk.query_indices is not None and chunk.key_indices is not None:
            distances = (chunk.query_indices[:, :, None] - chunk.key_indices[:, None, :]).abs_()
            apart.add_(_bias(spec, distances))
        if chunk.mask is not None:
            apart.add_(chunk.mask)
        return scores

    def _weigh(self, weights: torch.Tensor, values: torch.Tensor, padded: int) -> torch.Tensor:
        """Each tile's values times fp32 weights ``[pairs, kv_heads, width, KV_TILE]`` → fp32, ``value_dim`` last."""
        pairs, kv_heads, width, _ = weights.shape
        left = self._workspace("weights", (pairs, kv_heads, padded, KV_TILE), values.dtype, values.device)
        left[:, :, :width] = weights  # the rows below keep what they held; nobody looks at theirs
        product = self._workspace(
            "values product", (pairs * kv_heads, padded, values.shape[-1]), values.dtype, values.device
        )
        torch.bmm(left.view(-1, padded, KV_TILE), values, out=product)
        return product.view(pairs, kv_heads, padded, -1)[:, :, :width].to(torch.float32, copy=True)

    def _gather(self, rows: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cache rows ``index`` → ``[pairs * kv_heads, KV_TILE, dim]`` of ``dtype``, in a workspace that the next call
        overwrites."""
        out = self._workspace("gathered", (len(index), rows.shape[1]), rows.dtype, rows.device)
        torch.index_select(rows, 0, index, out=out)
        if rows.dtype != dtype:
            out = self._converted(out, dtype)
        return out.view(-1, KV_TILE, rows.shape[1])

    def _converted(self, gathered: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same numbers in another dtype, in a workspace. fp8 is looked up, two numbers at a time, which takes a
        fourteenth of torch's own conversion on a CPU; it is exact either way."""
        out = self._workspace("converted", gathered.shape, dtype, gathered.device)
        if gathered.dtype != torch.float8_e4m3fn:
            return out.copy_(gathered)
        table = _fp8_pairs(dtype, gathered.device)
        pairs = gathered.view(-1).view(torch.uint16)
        index = self._workspace("fp8 pairs", pairs.shape, torch.int32, pairs.device).copy_(pairs)
        torch.index_select(table, 0, index, out=out.view(-1).view(table.dtype))
        return out

    def _workspace(self, use: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised memory that is kept from call to call: fresh megabytes would cost a page fault per 4 KiB."""
        key, size = (use, dtype, device), math.prod(shape)
        if key not in self._workspaces or self._workspaces[key].numel() < size:
            self._workspaces[key] = torch.empty(size, dtype=dtype, device=device)
        return self._workspaces[key][:size].view(shape)

    def _product_rows(self, width: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> int:
        """How many rows to give a matrix product of ``width`` rows: a multiple of `ROW_MULTIPLE`, but in half precision
        no more than there are, where a trial on this machine gives each row the bits it has among 64. (On AVX-512 it
        does, and saves a sixth of a decode step. fp32 products choose among too many kernels for a trial to tell.)"""
        if dtype.itemsize == 2:  # smaller products than this go to other code (torch 2.13), wherever one stands alone
            width = max(width, SMALLEST_PRODUCT // (min(key_dim, value_dim) * KV_TILE) + 1)
        trial = (width, key_dim, value_dim, dtype, device)
        if width < ROW_MULTIPLE and dtype.itemsize == 2 and trial not in self._exact_unpadded:
            tiles = torch.empty(KV_TILE, key_dim).T, torch.empty(KV_TILE, value_dim)
            self._exact_unpadded[trial] = all(_rows_agree(width, tile, dtype, device) for tile in tiles)
        return width if self._exact_unpadded.get(trial) else -(-width // ROW_MULTIPLE) * ROW_MULTIPLE

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        """RMSNorm (Zhang & Sennrich 2019) over the last dimension, in fp32."""
        width = x.shape[-1]
        factor = weight.float() + offset
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        step = max(1, ELEMENTS_AT_A_TIME // width)
        for source, target in zip(
            torch.split(x.reshape(-1, width), step), torch.split(out.view(-1, width), step), strict=True
        ):
            wide = source.float().contiguous()
            mean_square = wide.square().mean(-1, keepdim=True)
            target.copy_(wide * mean_square.add_(eps).rsqrt_() * factor)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the rounded sum, and the sum."""
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps, offset), total

    def rotate(self, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False) -> None:
        """RoPE (Su et al. 2021), in fp32."""
        half = cos_sin.shape[-1] // 2
        cos, sin = cos_sin[:, None, None].split(half, dim=-1)
        for heads in (query, key):
            pairs = heads[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
            if interleaved:
                pairs = pairs.transpose(-1, -2)
            wide = pairs.float()
            turned, across = wide * cos, wide * sin
            turned[..., 0, :].sub_(across[..., 1, :])
            turned[..., 1, :].add_(across[..., 0, :])
            pairs.copy_(turned)

    def mask(
        self,
        scores: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        min_p: torch.Tensor | None,
    ) -> torch.Tensor:
        """Top-k, top-p and min-p, in this order; see sampling.py."""
        return mask_top_k_top_p_min_p(scores, top_k, top_p, min_p)

    def choose(
        self, scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """The largest score, with noise in rows that are sampled; see gumbel.py."""
        chosen = scores.argmax(-1)
        if len(rows := sampled.nonzero().flatten()):
            chosen[rows] = keyed_choice(scores[rows], seeds[rows], positions[rows])
        return chosen

    def act_and_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """A gated MLP's activation, in fp32. Raises ValueError for an activation that is not one of the three."""
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; the reference backend knows {', '.join(ACTIVATIONS)}")
        width = gate_up.shape[-1] // 2
        out = torch.empty((len(gate_up), width), dtype=gate_up.dtype, device=gate_up.device)
        step = max(1, ELEMENTS_AT_A_TIME // width)
        for source, target in zip(torch.split(gate_up, step), torch.split(out, step), strict=True):
            gate, up = source[:, :width].to(torch.float32, copy=True), source[:, width:]
            target.copy_(ACTIVATIONS[activation](gate).mul_(up))
        return out


@functools.cache
def _fp8_pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """All pairs of fp8 numbers in ``dtype``, each pair as one integer, in the order of the two bytes read as one."""
    pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float8_e4m3fn)
    return pairs.to(dtype).view(torch.int32 if dtype.itemsize == 2 else torch.int64).to(device)


def _rows_agree(rows: int, like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``rows`` rows times a matrix with the shape and strides of ``like`` have the bits they have among 64."""
    generator = torch.Generator().manual_seed(rows)
    right = torch.empty_like(like.expand(64, -1, -1)).normal_(generator=generator).to(device, dtype)
    left = torch.randn(64, 64, len(like), generator=generator).to(device, dtype)
    among = torch.bmm(left, right)[:, :rows]
    few = left[:, :rows].contiguous()
    return all(
        torch.equal(torch.bmm(few[at : at + batch], right[at : at + batch]), among[at : at + batch])
        for batch in (1, 2, 12, 64)
        for at in range(0, 64, batch)
    )


def _bias(spec: AttentionSpec, distances: torch.Tensor) -> torch.Tensor:
    """Of scores at distances int64 ``[pairs, query_tile, KV_TILE]``: fp32 ``[pairs, kv_heads, query_tile, group,
    KV_TILE]``."""
    if isinstance(spec.bias, SlopeBias):
        slopes = torch.tensor(spec.bias.slopes, device=distances.device)
        of_heads = distances.float() * -slopes[:, None, None, None]
    else:
        assert spec.bias is not None
        table = torch.tensor(spec.bias.table, device=distances.device)
        of_heads = table[:, distances.clamp(max=table.shape[1] - 1)]
    # [q_heads, pairs, query_tile, KV_TILE]: query head h reads KV head h // group
    pairs, query_tile, keys = distances.shape
    return of_heads.view(spec.num_kv_heads, -1, pairs, query_tile, keys).permute(2, 0, 3, 1, 4)


def _exp(x: torch.Tensor) -> torch.Tensor:
    """e**x in place, for x up to 0; exactly 0 from -80 down, where a weight adds nothing to a sum that holds a 1.
    Without the clamp a masked score would cost as much as twelve others: what underflows is computed one at a time."""
    return torch.threshold_(x.clamp_min_(-80).exp_(), 2e-35, 0.0)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x.div_(x.neg().exp_().add_(1))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x.mul_((x * math.sqrt(0.5)).erf_().add_(1).mul_(0.5))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    inner = (x * x).mul_(0.044715).add_(1).mul_(x).mul_(math.sqrt(2 / math.pi))
    return x.mul_(inner.tanh_().add_(1).mul_(0.5))


ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}
"""fp32 → fp32, in place (GELU: Hendrycks & Gimelshein 2016, exact and in its tanh form)."""


def _rows_of(cache: torch.Tensor, work: WorkSet) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A cache view ``[blocks, block_size, kv_heads, dim]`` as rows of ``dim`` elements, and the rows of each chunk.

    A row starts at every multiple of the strides' common divisor. Where that is less than ``dim`` the rows overlap,
    which does a reader no harm, so that any layout of the pool will do.
    """
    strides = cache.stride()[:3]
    unit = math.gcd(*strides)
    last = sum((size - 1) * stride for size, stride in zip(cache.shape, strides, strict=False))
    rows = torch.as_strided(cache, (last // unit + 1, cache.shape[-1]), (unit, 1), cache.storage_offset())
    return rows, work.row_indices(*(stride // unit for stride in strides))
