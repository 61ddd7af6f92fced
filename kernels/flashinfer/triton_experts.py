# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def"
"""The experts of a mixture, gated MLPs of which each row goes through a few, and their router, in Triton.

`route` chooses a row's experts. A *pair* is a row and one of these. Two small kernels put the pairs of a step in the
order of their experts and cut them into tiles, each of one expert. Then one kernel computes gate, up and activation of
the tiles, one the outputs, and one adds up each row's. All sizes of a launch follow from the number of rows, so a CUDA
graph may hold it, and nothing waits for the device.

A row's bits depend on that row alone, for the reasons that triton_kernels.py gives for `_TILES`. Written for Triton 3.4
and later, as that file is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..decoder_contract import Experts
from .triton_kernels import _jit, _limits

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # as in triton_kernels.py
    triton = None

_BLOCK = 128  # pairs that are put in order at a time
_FEW_PAIRS = 4096  # up to this many, each block has a program; of more, `_BLOCKS` blocks
_BLOCKS = 8
_SUMMED = 512  # columns that one program adds up
_GROUP = 8  # tiles, one below the other, that work at a time


class _Tile(NamedTuple):
    """How a product is cut up."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int  # changes no bits


_TILES = (_Tile(64, 128, 64, 4, 4), _Tile(128, 256, 64, 8, 3))
_FP32_TILE = _Tile(64, 64, 32, 4, 3)  # IEEE products on the ordinary cores


@_jit(do_not_specialize=["num_experts", "top_k"])
def _route(
    logits, chosen, shares, num_experts, top_k, row_stride,
    NORMALISE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """The likeliest experts of one row, and their probabilities."""
    row, experts, places = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS), tl.arange(0, CHOSEN)
    x = tl.load(logits + row * row_stride + experts, mask=experts < num_experts, other=float("-inf")).to(tl.float32)
    likely = tl.exp(x - tl.max(x, axis=0))
    x = tl.where(x == x, x, float("-inf"))  # argmax of NaN could be an expert that does not exist
    total, found, values = tl.sum(likely, axis=0), tl.zeros((CHOSEN,), tl.int32), tl.zeros((CHOSEN,), tl.float32)
    for place in range(top_k):
        best = tl.argmax(x, axis=0)  # the first of equal ones
        found = tl.where(places == place, best, found)
        values = tl.where(places == place, tl.sum(tl.where(experts == best, likely, 0.0), axis=0) / total, values)
        x = tl.where(experts == best, float("-inf"), x)
    if NORMALISE:
        values = values / tl.sum(values, axis=0)
    at = row * top_k + places
    tl.store(chosen + at, found.to(tl.int64), mask=places < top_k)
    tl.store(shares + at, values, mask=places < top_k)


def route(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `contract.Backend.route`. Of experts that are equally likely, the first is chosen."""
    rows, num_experts = logits.shape
    chosen = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    shares = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if rows:
        _route[(rows,)](
            logits, chosen, shares, num_experts, top_k, logits.stride(0), NORMALISE=normalise,
            EXPERTS=triton.next_power_of_2(num_experts), CHOSEN=triton.next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
    return chosen, shares


@_jit()
def _read_pairs(chosen, first, num_pairs, num_experts, COUNT: tl.constexpr):
    """Numbers of pairs, and the expert of each; `num_experts` for those that are not there."""
    pairs = first + tl.arange(0, COUNT)
    return pairs, tl.load(chosen + pairs, mask=pairs < num_pairs, other=num_experts).to(tl.int32)


@_jit(do_not_specialize=["num_pairs", "num_experts"])
def _count_pairs(chosen, counts, num_pairs, num_experts, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """How many pairs of each expert a chunk has."""
    _, expert = _read_pairs(chosen, tl.program_id(0) * CHUNK, num_pairs, num_experts, CHUNK)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), tl.histogram(expert, EXPERTS).to(tl.int32))


@_jit(do_not_specialize=["num_pairs", "num_experts", "chunks", "most_tiles"])
def _order_pairs(
    chosen, counts, order, tiles, num_pairs, num_experts, chunks, most_tiles,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Put a chunk's pairs in their places: by expert, and among those of one expert as they come.

    order: the pair in each place. tiles, int32 ``[3 * most_tiles + 1]``: the expert of each tile, its first place, the
    place after the expert's last; and the number of tiles. Each program writes some of it.
    """
    chunk, experts = tl.program_id(0), tl.arange(0, EXPERTS)
    total, before = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for other in range(chunks):
        count = tl.load(counts + other * EXPERTS + experts)
        total += count
        before += tl.where(other < chunk, count, 0)
    total = tl.where(experts < num_experts, total, 0)  # without the pairs that fill the last chunk
    starts = tl.cumsum(total, axis=0) - total

    free = starts + before  # the next place of each expert
    for first in range(chunk * CHUNK, chunk * CHUNK + CHUNK, BLOCK):
        pairs, expert = _read_pairs(chosen, first, num_pairs, num_experts, BLOCK)
        earlier = (expert[:, None] == expert[None, :]) & (pairs[None, :] < pairs[:, None])
        place = tl.gather(free, expert, axis=0) + tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(order + place, pairs, mask=pairs < num_pairs)
        if CHUNK > BLOCK:
            free += tl.histogram(expert, EXPERTS).to(tl.int32)

    of_expert = (total + ROWS - 1) // ROWS
    first = tl.cumsum(of_expert, axis=0) - of_expert
    for tile in range(chunk, tl.max(of_expert, axis=0), chunks):
        there = tile < of_expert
        tl.store(tiles + first + tile, experts, mask=there)
        tl.store(tiles + most_tiles + first + tile, starts + tile * ROWS, mask=there)
        tl.store(tiles + 2 * most_tiles + first + tile, starts + total, mask=there)
    if chunk == 0:
        tl.store(tiles + 3 * most_tiles, tl.sum(of_expert, axis=0))


@_jit()
def _activated(gate, activation: tl.constexpr):
    if activation == "silu":
        return gate / (1.0 + tl.exp(-gate))
    if activation == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-2.0 * inner))  # tanh, by the exponential


@_jit(do_not_specialize=["most_tiles", "top_k"])
def _expert_product(
    x, weight, out, order, tiles, most_tiles, top_k, num_out, num_in, x_stride,
    ACTIVATION: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile ``[ROWS, COLUMNS]`` of the products of pairs with their experts' weights, whose descriptor `weight` is.

    With an activation: of rows of x, which are gathered, with gate and up; its output lies in the order of `order`.
    Without: of such an output; the result lies in the order of the pairs.
    """
    column_tiles = tl.cdiv(num_out, COLUMNS)
    group = tl.program_id(0) // (GROUP * column_tiles) * GROUP
    within = tl.program_id(0) % (GROUP * column_tiles)
    height = tl.minimum(most_tiles - group, GROUP)
    tile, column = group + within % height, within // height * COLUMNS
    if tile >= tl.load(tiles + 3 * most_tiles):
        return
    columns = column + tl.arange(0, COLUMNS)
    places = tl.load(tiles + most_tiles + tile) + tl.arange(0, ROWS)
    here = places < tl.load(tiles + 2 * most_tiles + tile)
    pairs = tl.load(order + places, mask=here, other=0)
    if ACTIVATION is not None:
        rows, kept, weight_rows = pairs // top_k, places, 2 * num_out
    else:
        rows, kept, weight_rows = places, pairs, num_out

    depths, there = tl.arange(0, DEPTH), here[:, None]
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + depths[None, :]
    first = tl.load(tiles + tile) * weight_rows + column  # columns that are not there read another one's weights
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    total_up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, num_in, DEPTH):
        if WHOLE:
            left = tl.load(x_at, mask=there, other=0.0)
        else:
            left = tl.load(x_at, mask=there & (depths < num_in - start)[None, :], other=0.0)
        total = tl.dot(left, weight.load([first, start]).T, total, input_precision=PRECISION)
        if ACTIVATION is not None:
            right = weight.load([first + num_out, start]).T
            total_up = tl.dot(left, right, total_up, input_precision=PRECISION)
        x_at += DEPTH
    if ACTIVATION is not None:
        dtype = out.dtype.element_ty
        gate, up = total.to(dtype).to(tl.float32), total_up.to(dtype).to(tl.float32)
        total = _activated(gate, ACTIVATION) * up
    out_at = out + kept.to(tl.int64)[:, None] * num_out + columns[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=there & (columns < num_out)[None, :])


@_jit(do_not_specialize=["top_k"])
def _add_up(outputs, shares, out, top_k, width, WIDTH: tl.constexpr):
    """`WIDTH` columns of one row: the sum of its experts' outputs, each times its share, in their order."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there, total = columns < width, tl.zeros((WIDTH,), tl.float32)
    for i in range(top_k):
        pair = row * top_k + i
        output = tl.load(outputs + pair * width + columns, mask=there).to(tl.float32)
        total += tl.load(shares + pair).to(tl.float32) * output
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=there)


def compute_experts(x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, experts: Experts) -> torch.Tensor:
    """See `contract.Backend.experts`. All tensors contiguous but x, whose rows may lie apart."""
    gate_up, down, activation, _ = experts
    rows, top_k = chosen.shape
    num_experts, hidden, inner = down.shape
    pairs = rows * top_k
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if not pairs:
        return out.zero_()
    tile = _tile_for(pairs / num_experts, x.dtype)
    chunk, width = _BLOCK if pairs <= _FEW_PAIRS else _BLOCK * _BLOCKS, triton.next_power_of_2(num_experts + 1)
    chunks = triton.cdiv(pairs, chunk)
    most_tiles = min(num_experts, pairs) + pairs // tile.rows
    counts = torch.empty(chunks, width, dtype=torch.int32, device=x.device)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    tiles = torch.empty(3 * most_tiles + 1, dtype=torch.int32, device=x.device)
    _count_pairs[(chunks,)](chosen, counts, pairs, num_experts, CHUNK=chunk, EXPERTS=width)
    _order_pairs[(chunks,)](
        chosen, counts, order, tiles, pairs, num_experts, chunks, most_tiles,
        ROWS=tile.rows, CHUNK=chunk, BLOCK=_BLOCK, EXPERTS=width,
    )  # fmt: skip
    activated = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    outputs = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    for source, weight, result, act in ((x, gate_up, activated, activation), (activated, down, outputs, None)):
        num_out, num_in = result.shape[1], weight.shape[2]
        columns = tile.columns // (1 if act is None else 2)
        read = TensorDescriptor.from_tensor(weight.view(-1, num_in), [columns, tile.depth])
        stage = 2 * (tile.rows + tile.columns) * tile.depth
        _expert_product[(most_tiles * triton.cdiv(num_out, columns),)](
            source, read, result, order, tiles, most_tiles, top_k, num_out, num_in, source.stride(0),
            ACTIVATION=act, WHOLE=num_in % tile.depth == 0, PRECISION="ieee",
            ROWS=tile.rows, COLUMNS=columns, DEPTH=tile.depth, GROUP=_GROUP,
            num_warps=tile.num_warps,
            num_stages=max(1, min(tile.num_stages, (_limits(x.device).shared_memory - 1024) // stage)),
        )  # fmt: skip
    _add_up[rows, triton.cdiv(hidden, _SUMMED)](
        outputs, shares, out, top_k, hidden, WIDTH=_SUMMED, enable_fp_fusion=False
    )
    return out


def _tile_for(rows_of_expert: float, dtype: torch.dtype) -> _Tile:
    """Higher tiles for many rows; the bits of a row are the same in each."""
    if dtype == torch.float32:
        return _FP32_TILE
    return _TILES[rows_of_expert > 96]
