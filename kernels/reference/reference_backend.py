"""The reference backend: every kernel in plain torch, on any device.

It is the oracle of the tests and what runs on a CPU without a compiler, so it is written for both: one page to read,
and clockwork. Three habits make it so:

- a reduction has one fixed order: softmax runs over tiles of `KV_TILE` keys counted from index 0 (the online softmax
  of Milakov & Gimelshein 2018).
- attention computes in fp32, and its matrix products have a multiple of `ROW_MULTIPLE` rows: then a row has the same
  bits whatever the others are.
- of torch's elementwise functions, those alone are used whose value does not depend on an element's place. That rules
  out fp32 `sigmoid`, `silu`, `gelu` and `exp2`: their vector code and their tail code round differently (seen, torch
  2.13, AVX-512). `exp`, `log`, `tanh` and `erf` are safe there, and what IEEE 754 rounds correctly is safe everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..contract import CLAMPED, AttentionSpec, Backend, LayerCache, PagedBatch, SlopeBias, TableBias
from .attention_plan import KV_TILE, AttentionPlan, Chunk, plan_attention
from .gumbel import keyed_choice
from .reference_scans import ReferenceScans
from .sampling import mask_top_k_top_p_min_p
from .selected_plan import SelectedPlan, chunks, plan_selected

MASKED = -1e30
"""The score of a key that a row must not see. Finite, so that a tile in which a row sees nothing yields finite sums,
which an exact zero then multiplies. Minus infinity would yield NaN."""

FP8_LARGEST = 448.0
"""of float8_e4m3fn, which has no infinity; some versions of torch make NaN of what is larger."""


class ReferenceBackend(Backend):
    """Plain torch. See `contract.Backend` for what the methods promise."""

    name = "reference"
    graph_max_kv_len: int | None = 0
    heads_first = False
    scans = ReferenceScans()

    def __init__(self, deterministic: bool = True) -> None:
        """`deterministic`: whether it is on a CPU; a GPU's matrix products depend on their number of rows."""
        self.deterministic = deterministic

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
    ) -> AttentionPlan | SelectedPlan:
        """Cut the step into tiles. Raises ValueError where the block size does not fit the tiles."""
        return plan_selected(spec, batch, device) if spec.selects else plan_attention(spec, batch, device)

    def run(
        self, plan: AttentionPlan, query: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of every row of the step → ``[rows, q_heads, value_dim]``; padding rows are zero. Elements that
        another backend adds to a head in the cache (`Backend.cache_dims`) are left out."""
        return _attention(plan.spec, plan.chunks, query, cache, sinks)

    def run_selected(
        self,
        plan: SelectedPlan,
        query: torch.Tensor,
        cache: LayerCache,
        selected: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`run` over selected keys, gathered for each row."""
        return _attention(plan.spec, chunks(plan, selected), query, cache, sinks)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        """RMSNorm (Zhang & Sennrich 2019) over the last dimension, in fp32."""
        wide = x.float().contiguous()
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (wide * scale * (weight.float() + offset)).to(x.dtype)

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
        """See `Backend.act_and_mul`."""
        if activation == CLAMPED:
            gate, up = gate_up.float().unflatten(-1, (-1, 2)).unbind(-1)
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            out: torch.Tensor = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            return out.to(gate_up.dtype)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; the reference backend knows {', '.join(ACTIVATIONS)}")
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def _attention(
    spec: AttentionSpec,
    parts: Iterable[Chunk],
    query: torch.Tensor,
    cache: LayerCache,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    cache = LayerCache(cache.keys[..., : spec.key_dim], cache.values[..., : spec.value_dim])
    out = query.new_zeros(len(query), spec.num_q_heads, spec.value_dim)
    for chunk in parts:
        out[chunk.query_rows, chunk.heads] = _attend(spec, chunk, query, cache, sinks).to(out.dtype)
    return out


def _attend(
    spec: AttentionSpec, chunk: Chunk, query: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The lines of a chunk → fp32 ``[items, kv_heads, lines, value_dim]``."""
    lines = query[chunk.query_rows, chunk.heads].float().contiguous()  # [items, kv_heads, lines, key_dim]
    # Per line: the largest score so far, the sum of exp(score - largest), and the same sum weighted with the values.
    largest = lines.new_full((*lines.shape[:3], 1), MASKED)
    total = torch.zeros_like(largest)
    weighted = lines.new_zeros(*lines.shape[:3], spec.value_dim)
    for tile in chunk.tiles:
        keys, values = (_heads_first(side[tile.blocks, tile.rows]) for side in cache)
        scores = _product(lines, keys.mT) * spec.scale
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        if spec.bias is not None:
            keys_at = torch.arange(tile.start, tile.start + KV_TILE, device=lines.device)
            scores += _bias(spec.bias, chunk.heads, (chunk.indices[:, None, :, None] - keys_at).abs())
        if tile.hidden is not None:
            scores.masked_fill_(tile.hidden, MASKED)
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        keep, weights = _exp(before - largest), _exp(scores - largest)
        total = total * keep + weights.sum(-1, keepdim=True)
        weighted = weighted * keep + _product(weights, values)
    if sinks is not None:
        sink = sinks.float()[chunk.heads].unsqueeze(-1)
        before, largest = largest, torch.maximum(largest, sink)
        keep = _exp(before - largest)
        total, weighted = total * keep + _exp(sink - largest), weighted * keep
    return weighted / total


def _heads_first(gathered: torch.Tensor) -> torch.Tensor:
    """``[items, KV_TILE, kv_heads, dim]`` → fp32 ``[items, kv_heads, KV_TILE, dim]``, contiguous."""
    return gathered.transpose(1, 2).float().contiguous()


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right`` for each item and KV head."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).view(*left.shape[:-1], right.shape[-1])


def _bias(bias: SlopeBias | TableBias, heads: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """For query heads ``[kv_heads, lines]`` and distances int64 ``[items, 1, lines, KV_TILE]``: fp32 ``[items,
    kv_heads, lines, KV_TILE]``."""
    if isinstance(bias, SlopeBias):
        return distances.float() * -torch.tensor(bias.slopes, device=heads.device)[heads].unsqueeze(-1)
    table = torch.tensor(bias.table, device=heads.device)
    return table[heads.unsqueeze(-1), distances.clamp(max=table.shape[1] - 1)]


def _exp(x: torch.Tensor) -> torch.Tensor:
    """e**x in place, for x up to 0; exactly 0 from -80 down, where a weight adds nothing to a sum that holds a 1.
    Without the clamp a masked score would cost as much as twelve others: what underflows is computed one at a time."""
    return torch.threshold_(x.clamp_min_(-80).exp_(), 2e-35, 0.0)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / ((-x).exp() + 1)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * (((x * math.sqrt(0.5)).erf() + 1) * 0.5)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    inner = (x * x * 0.044715 + 1) * x * math.sqrt(2 / math.pi)
    return x * ((inner.tanh() + 1) * 0.5)


ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}
"""fp32 → fp32 (GELU: Hendrycks & Gimelshein 2016, exact and in its tanh form)."""
