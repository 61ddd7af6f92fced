"""The layout of the block pool: the place of each layer's keys and values in a block.

Layers with equal KV heads, dimensions and window form a group, and a request has one block table per group. Blocks of
all groups have the same size in bytes, so that one pool serves all groups. A block holds `block_size` tokens of
`layers_per_block` layers. If more layers than that have equal shapes, they form several groups. The planner gets the
groups as plain data (core/memory/layer_kinds.py) and does not know the places of layers within a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from ...kernels.contract import AttentionSpec, LayerCache
from ..memory.layer_kinds import kind_of
from ..memory.updates import LayerGroup


class KVLayout(NamedTuple):
    """The layout of a block."""

    block_size: int  # tokens
    dtype: torch.dtype
    block_elements: int  # elements of `dtype` per block
    groups: tuple[LayerGroup, ...]
    specs: tuple[AttentionSpec, ...]  # one per layer: an attention call with keys and values of its own
    dims: tuple[tuple[int, int], ...]  # for each layer, padded: of a key head and of a value head; of latents (key, 0)
    # of each layer's keys, values and index keys from the block's start, in elements
    offsets: tuple[tuple[int, int, int], ...]
    layer_of_call: tuple[int, ...]  # the layer that each attention call of a forward uses; calls may share a layer
    heads_first: bool = False  # True: [head][keys, values][token] within a block; False: [keys, values][token][head]

    @property
    def block_bytes(self) -> int:
        return self.block_elements * self.dtype.itemsize

    def blocks_for(self, num_tokens: int, budget: int) -> int:
        """The most blocks that one request of `num_tokens` holds, if a step computes at most `budget` tokens."""
        kinds = [kind_of(group, self.block_size) for group in self.groups]
        return sum(kind.new_blocks(0, num_tokens, budget) for kind in kinds)

    def caches(self, pool: torch.Tensor) -> list[LayerCache]:
        """Views into `pool` ``[blocks, block_elements]``, one pair of keys and values per layer."""
        blocks = pool.shape[0]
        out = []
        for spec, dims, offsets in zip(self.specs, self.dims, self.offsets, strict=True):
            rows, heads = self.block_size, spec.num_kv_heads
            pair = [
                pool.as_strided(
                    (blocks, rows, heads, dim),
                    (self.block_elements, *((dim, rows * sum(dims)) if self.heads_first else (heads * dim, dim)), 1),
                    pool.storage_offset() + at,
                )
                for dim, at in zip(dims, offsets[:2], strict=True)
                if dim
            ]
            out.append(LayerCache(pair[0], pair[0][..., : spec.value_dim]) if spec.latent else LayerCache(*pair))
        return out

    def index_keys(self, pool: torch.Tensor) -> list[torch.Tensor | None]:
        """Views into `pool`: each layer's index keys, ``[blocks, block_size, 1, index_dim]``; None: it has none."""
        return [
            pool.as_strided(
                (pool.shape[0], self.block_size, 1, spec.index_dim),
                (self.block_elements, spec.index_dim, spec.index_dim, 1),
                pool.storage_offset() + offsets[2],
            )
            if spec.index_dim
            else None
            for spec, offsets in zip(self.specs, self.offsets, strict=True)
        ]


def cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype that the option `kv_cache_dtype` stands for, in a model of `model_dtype`."""
    if name.startswith("fp8"):
        return torch.float8_e4m3fn
    return model_dtype if name == "auto" else getattr(torch, name)


def plan_layout(
    calls: Sequence[AttentionSpec],
    sources: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    cache_dims: Callable[[AttentionSpec], tuple[int, int]] = lambda spec: (spec.key_dim, spec.value_dim),
    heads_first: bool = False,
) -> KVLayout:
    """Group the layers and place them in blocks of `dtype`.

    Args:
        sources: for each attention call, the index of the call whose keys and values it reads; for most calls its own.
        cache_dims: the padded dimensions of a key head and of a value head that the backend needs.
        heads_first: the order that the backend needs, see `KVLayout`.
    """
    own = [call for call, source in enumerate(sources) if call == source]
    specs = [calls[call] for call in own]
    dims = [(key, 0 if s.latent else value) for s in specs for key, value in [cache_dims(s)]]
    kinds: dict[tuple[int, int, int, int, int | None], list[int]] = {}
    for layer, s in enumerate(specs):
        # A block stays allocated for the widest window of all calls that read it.
        windows = [call.window for call, source in zip(calls, sources, strict=True) if source == own[layer]]
        window = None if None in windows else max(w for w in windows if w is not None)
        kinds.setdefault((s.num_kv_heads, *dims[layer], s.index_dim, window), []).append(layer)

    def elements(kind: tuple[int, int, int, int, int | None]) -> int:
        return block_size * (kind[0] * (kind[1] + kind[2]) + kind[3])

    def cost(layers_per_block: int) -> float:
        """Cache elements per token of context in all groups, plus 2% per group for the work on its block table."""
        block = layers_per_block * max(map(elements, kinds))
        groups = sum(-(-len(layers) // layers_per_block) for layers in kinds.values())
        return block * groups * (1 + 0.02 * groups)

    if not specs:
        return KVLayout(block_size, dtype, 0, (), (), (), (), (), heads_first)
    counts = {len(layers) for layers in kinds.values()}
    candidates = {d for n in counts for d in range(1, n + 1) if n % d == 0}
    layers_per_block = min(sorted(candidates, reverse=True), key=cost)

    groups, offsets, largest = [], [(0, 0, 0)] * len(specs), 0
    for kind, layers in kinds.items():
        for i in range(0, len(layers), layers_per_block):
            part = layers[i : i + layers_per_block]
            token_bytes = len(part) * elements(kind) // block_size * dtype.itemsize
            name: Literal["full", "windowed"] = "full" if kind[4] is None else "windowed"
            groups.append(LayerGroup(name, tuple(part), token_bytes, kind[4]))
            at = 0
            for layer in part:
                values, end = at + block_size * kind[1] * (1 if heads_first else kind[0]), at + elements(kind)
                offsets[layer] = at, values, end - block_size * kind[3]
                at = end
            largest = max(largest, at)
    # A block's length is a multiple of every head dimension, so that backends can view the pool as rows of one head.
    unit = math.lcm(*(dim for pair in dims for dim in pair if dim))
    return KVLayout(
        block_size,
        dtype,
        -(-largest // unit) * unit,
        tuple(groups),
        tuple(specs),
        tuple(dims),
        tuple(offsets),
        tuple(own.index(source) for source in sources),
        heads_first,
    )
