"""The layout of the block pool: the place of each layer's keys and values in a block.

Layers with equal KV heads, dimensions and window form a group, and a request has one block table per group. Blocks of
all groups have the same size in bytes, so that one pool serves all groups. A block holds `block_size` tokens of
`layers_per_block` layers. If more layers than that have equal shapes, they form several groups. The planner gets the
groups as plain data (core/memory/layer_kinds.py) and does not know the places of layers within a block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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


class LayerShape(NamedTuple):
    """What a layer keeps of each token. Layers of one shape can be in one group."""

    heads: int
    key_dim: int  # padded
    value_dim: int  # padded; 0: of latents
    index_dim: int
    window: int | None  # the widest of all calls that read the layer's keys and values

    @property
    def order(self) -> tuple[int, ...]:
        return (*self[:4], -1 if self.window is None else self.window)


def shapes_of(
    calls: Sequence[AttentionSpec], sources: Sequence[int], cache_dims: Callable[[AttentionSpec], tuple[int, int]]
) -> list[LayerShape]:
    """Of each layer, see `plan_layout`."""
    found = []
    for call, spec in enumerate(calls):
        if sources[call] == call:
            windows = [other.window for other, source in zip(calls, sources, strict=True) if source == call]
            window = None if None in windows else max(w for w in windows if w is not None)
            key, value = cache_dims(spec)
            found.append(LayerShape(spec.num_kv_heads, key, 0 if spec.latent else value, spec.index_dim, window))
    return found


def plan_layout(
    calls: Sequence[AttentionSpec],
    sources: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    cache_dims: Callable[[AttentionSpec], tuple[int, int]] = lambda spec: (spec.key_dim, spec.value_dim),
    heads_first: bool = False,
    most: Mapping[LayerShape, int] | None = None,
) -> KVLayout:
    """Group the layers and place them in blocks of `dtype`.

    Args:
        sources: for each attention call, the index of the call whose keys and values it reads; for most calls its own.
        cache_dims: the padded dimensions of a key head and of a value head that the backend needs.
        heads_first: the order that the backend needs, see `KVLayout`.
        most: for each shape, the most layers that a stage of a pipeline has. Blocks have room for as many, and groups
            are the same in every stage.
    """
    own = [call for call, source in enumerate(sources) if call == source]
    specs = [calls[call] for call in own]
    shapes = shapes_of(calls, sources, cache_dims)
    dims = [(shape.key_dim, shape.value_dim) for shape in shapes]
    counts = Counter(shapes) if most is None else {shape: most[shape] for shape in sorted(most, key=lambda s: s.order)}

    def elements(shape: LayerShape) -> int:
        return block_size * (shape.heads * (shape.key_dim + shape.value_dim) + shape.index_dim)

    def cost(layers_per_block: int) -> float:
        """Cache elements per token of context in all groups, plus 2% per group for the work on its block table."""
        block = layers_per_block * max(map(elements, counts))
        groups = sum(-(-count // layers_per_block) for count in counts.values())
        return block * groups * (1 + 0.02 * groups)

    if not counts:
        return KVLayout(block_size, dtype, 0, (), (), (), (), (), heads_first)
    candidates = {d for n in counts.values() for d in range(1, n + 1) if n % d == 0}
    layers_per_block = min(sorted(candidates, reverse=True), key=cost)

    groups, offsets, largest = [], [(0, 0, 0)] * len(specs), 0
    for shape, count in counts.items():
        layers = [layer for layer, its in enumerate(shapes) if its == shape]
        for i in range(0, count, layers_per_block):
            part, size = layers[i : i + layers_per_block], min(layers_per_block, count - i)
            token_bytes = size * elements(shape) // block_size * dtype.itemsize
            name: Literal["full", "windowed"] = "full" if shape.window is None else "windowed"
            groups.append(LayerGroup(name, tuple(part), token_bytes, shape.window))
            at = 0
            for layer in part:
                values = at + block_size * shape.key_dim * (1 if heads_first else shape.heads)
                end = at + elements(shape)
                offsets[layer] = at, values, end - block_size * shape.index_dim
                at = end
            largest = max(largest, size * elements(shape))
    # A block's length is a multiple of every head dimension, so that backends can view the pool as rows of one head.
    unit = math.lcm(*(dim for shape in counts for dim in (shape.key_dim, shape.value_dim) if dim))
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
