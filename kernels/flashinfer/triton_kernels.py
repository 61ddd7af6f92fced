# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def"
"""Triton kernels for what no library has: the keyed Gumbel choice, a matrix product that treats each row alike, norm
and rotation of heads at once, and a gated activation that spreads a row over the GPU.

For CUDA alone: Triton comes with torch's CUDA builds. Written for Triton 3.4 and later. Where a kernel's code looks
roundabout, it is so that a row's bits do not depend on the other rows or on their number; whatever varies from step to
step is no compile-time constant, and nothing is fused into one rounding that would be two elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # without CUDA this module, like any other, can be imported, and nobody calls it
    triton = None

_SPLIT = 4096
"""Tokens that one program looks at: 32 programs for a row of Llama 3, so that few rows fill the GPU as well."""

_ACTIVATED = 1024  # columns that one program activates
_HEADS = 4  # that one program normalises and rotates


def _jit(do_not_specialize: Sequence[str] = ()) -> Callable[[Any], Any]:
    return triton.jit(do_not_specialize=list(do_not_specialize)) if triton is not None else lambda kernel: kernel


@_jit()
def _mix(x, between):
    """MurmurHash3's finaliser on uint32; see gumbel.py, which this equals bit for bit."""
    x ^= x >> 16
    x = (x * 0x85EBCA6B) ^ between
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@_jit()
def keyed_bits(seed, position, tokens):
    """gumbel.py's `keyed_hash` for one row: int64 scalars seed and position, int32 tokens → uint32."""
    low, high, place = seed.to(tl.uint32), (seed >> 32).to(tl.uint32), position.to(tl.uint32)
    first = _mix(_mix(_mix(low, 0) ^ high, 0) + place * 0x9E3779B1, 0)
    second = _mix(_mix(_mix(high + 0x165667B1, 0) ^ low, 0) ^ (place * 0x27D4EB2F), 0)
    return _mix(first + _mix(tokens.to(tl.uint32) * 0x27D4EB2F, 0), second)


@_jit()
def noise_of_bits(bits):
    """uint32 → standard Gumbel noise, fp32: from the uniforms that gumbel.py takes, so equal up to ulps of log.

    Triton's language has no log1p. ``log(1 - u)`` is the log of the rounded ``1 - u``, plus what the rounding took:
    ``lost`` is exact, and next to it the logarithm's slope is 1 as nearly as fp32 can tell.
    """
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    rest = 1.0 - uniform
    lost = (1.0 - rest) - uniform
    return -tl.log(-(tl.log(rest) + lost))


@_jit()
def _choose_in_part(scores, sampled, seeds, positions, best, vocab, row_stride, SPLIT: tl.constexpr):
    """The best of `SPLIT` tokens of one row, as one int64 that orders by value, then by lower token id."""
    parts = tl.cdiv(vocab, SPLIT)
    row = tl.program_id(0) // parts
    tokens = tl.program_id(0) % parts * SPLIT + tl.arange(0, SPLIT)
    # What lies beyond the vocabulary loses also where all are -inf: its token ids are higher.
    values = tl.load(scores + row.to(tl.int64) * row_stride + tokens, mask=tokens < vocab, other=float("-inf"))
    values = values.to(tl.float32)
    if sampled is not None:  # noqa: SIM102  # decided as it is compiled
        if tl.load(sampled + row):
            values += noise_of_bits(keyed_bits(tl.load(seeds + row), tl.load(positions + row), tokens))
    # As integers, floats of one sign are in order. NaN is the largest, as for torch.argmax; -0 equals 0.
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    bits = tl.where(values != values, 0x7FFFFFFF, bits)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tl.store(best + tl.program_id(0), tl.max((order.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64), axis=0))


@_jit()
def _choose_among_parts(best, chosen, parts, WIDTH: tl.constexpr):
    """The token id in the largest of a row's int64."""
    row = tl.program_id(0)
    part = tl.minimum(tl.arange(0, WIDTH), parts - 1)
    largest = tl.max(tl.load(best + row.to(tl.int64) * parts + part), axis=0)
    tl.store(chosen + row, 0x7FFFFFFF - (largest & 0x7FFFFFFF))


def choose_by_key(
    scores: torch.Tensor,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    sampled: torch.Tensor | None = None,
) -> torch.Tensor:
    """gumbel.py's `keyed_choice` of the rows that are sampled, the largest score of the others; one pass, no waiting.

    Of equal sums the lowest token id wins. As with `torch.argmax`, a NaN counts as the largest.

    Args:
        scores: fp32, bf16 or fp16 ``[rows, vocab]``, divided by the temperature already; any row stride.
        seeds, positions, sampled: int64, int64 (below 2**32) and bool ``[rows]``, contiguous; None: no row is sampled.

    Returns:
        int64 ``[rows]``.
    """
    rows, vocab = scores.shape
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    chosen = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        parts = -(-vocab // _SPLIT)
        best = torch.empty(rows * parts, dtype=torch.int64, device=scores.device)
        _choose_in_part[(rows * parts,)](
            scores,
            sampled,
            seeds,
            positions,
            best,
            vocab,
            scores.stride(0),
            SPLIT=_SPLIT,
            num_warps=8,
            enable_fp_fusion=False,
        )
        _choose_among_parts[(rows,)](best, chosen, parts, WIDTH=triton.next_power_of_2(parts), num_warps=1)
    return chosen


@_jit()
def _silu_and_mul(gate_up, out, width, WIDTH: tl.constexpr):
    """`WIDTH` columns of one row."""
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row, there = tl.program_id(0).to(tl.int64), columns < width
    gate = tl.load(gate_up + 2 * row * width + columns, mask=there).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + columns, mask=there).to(tl.float32)
    tl.store(out + row * width + columns, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=there)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Contiguous ``[..., 2 * width]`` of any dtype → ``silu(gate) * up``, ``[..., width]``, rounded once.

    FlashInfer's takes one program for a row, and twice the time for a few long rows.
    """
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = out.numel() // width, triton.cdiv(width, _ACTIVATED)
        _silu_and_mul[grid](gate_up, out, width, WIDTH=_ACTIVATED, num_warps=4, enable_fp_fusion=False)
    return out


@_jit(do_not_specialize=["query_heads", "key_heads"])  # or one head would be a constant, of another type
def _norm_and_rotate(
    query, key, query_weight, key_weight, cos_sin, query_row, key_row, query_heads, key_heads, query_eps, key_eps,
    query_offset, key_offset, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """`HEADS` heads of one row's query, or of its key."""
    row, block, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, HALF)
    blocks = tl.cdiv(query_heads, HEADS)
    x, weight, count, eps, offset = query + row * query_row, query_weight, query_heads, query_eps, query_offset
    if block >= blocks:
        x, weight, count, eps, offset = key + row * key_row, key_weight, key_heads, key_eps, key_offset
        block -= blocks
    heads = block * HEADS + tl.arange(0, HEADS)
    there = (heads < count)[:, None]
    at = x + heads[:, None] * (2 * HALF) + columns[None, :]
    left = tl.load(at, mask=there, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=there, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(left * left + right * right, axis=1) / (2 * HALF) + eps)
    left = left * scale[:, None] * (tl.load(weight + columns).to(tl.float32) + offset)[None, :]
    right = right * scale[:, None] * (tl.load(weight + HALF + columns).to(tl.float32) + offset)[None, :]
    left, right = left.to(x.dtype.element_ty).to(tl.float32), right.to(x.dtype.element_ty).to(tl.float32)
    cos = tl.load(cos_sin + row * (2 * HALF) + columns)[None, :]
    sin = tl.load(cos_sin + row * (2 * HALF) + HALF + columns)[None, :]
    tl.store(at, (left * cos - right * sin).to(x.dtype.element_ty), mask=there)
    tl.store(at + HALF, (right * cos + left * sin).to(x.dtype.element_ty), mask=there)


def norm_and_rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    norms: tuple[tuple[torch.Tensor, float, float], tuple[torch.Tensor, float, float]],
    cos_sin: torch.Tensor,
) -> None:
    """RMSNorm of each head, rounded, and then its rotation by halves, in place: one kernel instead of three.

    Args:
        query, key: ``[rows, heads, dim]`` of one dtype, dim a power of two, the heads of a row side by side.
        norms: of query and key: weight ``[dim]``, eps, and what is added to the weight.
        cos_sin: fp32 ``[rows, dim]``, contiguous: cosines, then sines.
    """
    (query_weight, query_eps, query_offset), (key_weight, key_eps, key_offset) = norms
    rows, query_heads, dim = query.shape
    if rows:
        blocks = triton.cdiv(query_heads, _HEADS) + triton.cdiv(key.shape[1], _HEADS)
        _norm_and_rotate[(rows, blocks)](
            query, key, query_weight, key_weight, cos_sin, query.stride(0), key.stride(0), query_heads, key.shape[1],
            query_eps, key_eps, query_offset, key_offset, HALF=dim // 2, HEADS=_HEADS, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip


@_jit(do_not_specialize=["num_rows"])  # or a first step with one row would compile anew
def _linear(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    num_in,
    x_stride,
    weight_stride,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile ``[ROWS, COLUMNS]`` of ``x @ weight.T + bias``."""
    # Tiles go in groups of GROUP rows of tiles, down its columns, so that those at work together share what L2 holds.
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_out, COLUMNS)
    first = tl.program_id(0) // (GROUP * column_tiles) * GROUP
    within = tl.program_id(0) % (GROUP * column_tiles)
    height = tl.minimum(row_tiles - first, GROUP)
    rows = (first + within % height) * ROWS + tl.arange(0, ROWS)
    columns = within // height * COLUMNS + tl.arange(0, COLUMNS)
    depths = tl.arange(0, DEPTH)

    # Rows that are not there cost no traffic; columns that are not there read another one's weights, unmasked.
    there = (rows < num_rows)[:, None]
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + depths[None, :]
    weight_at = weight + (columns % num_out).to(tl.int64)[None, :] * weight_stride + depths[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, num_in, DEPTH):
        if WHOLE:
            left, right = tl.load(x_at, mask=there, other=0.0), tl.load(weight_at)
        else:
            inside = depths < num_in - start
            left = tl.load(x_at, mask=there & inside[None, :], other=0.0)
            right = tl.load(weight_at, mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        x_at += DEPTH
        weight_at += DEPTH
    if bias is not None:
        total += tl.load(bias + columns % num_out).to(tl.float32)[None, :]
    out_at = out + rows.to(tl.int64)[:, None] * num_out + columns[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=there & (columns < num_out)[None, :])


class _Tile(NamedTuple):
    """How `_linear` cuts up a product."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int  # tiles of x and weight on their way at a time; changes no bits

    def programs(self, rows: int, columns: int) -> int:
        return int(triton.cdiv(rows, self.rows) * triton.cdiv(columns, self.columns))


# Which of these it is changes no bits of a row either. Each warp group of 4 warps multiplies 64 rows by all columns,
# DEPTH after DEPTH: the same instruction (wgmma m64nNk16; m16n8k16 before Hopper), fed in the same order into the same
# fp32 accumulators, and K is never split. A higher tile has two warp groups, or two such products each.
_TILES = (_Tile(256, 128, 64, 8, 4), _Tile(128, 128, 64, 8, 3), _Tile(64, 128, 64, 4, 4))
# Where each tile has a multiprocessor to itself, and must keep the memory busy: the narrowest that can be so.
_LONE_TILES = (_Tile(64, 32, 64, 4, 12), _Tile(64, 64, 64, 4, 8), _Tile(64, 128, 64, 4, 8))
_FP32_TILE = _Tile(64, 64, 32, 4, 3)  # IEEE products on the ordinary cores
_GROUP = 8


class _Limits(NamedTuple):
    num_multiprocessors: int
    shared_memory: int  # bytes a program may take
    any_tile: bool  # whether the argument at `_TILES` holds: Blackwell has one instruction for 64 rows, one for 128


@functools.cache
def _limits(device: torch.device) -> _Limits:
    if device.type != "cuda":
        return _Limits(132, 232448, True)  # Triton's interpreter: as an H200
    of = triton.runtime.driver.active.utils.get_device_properties(device.index)
    major, _ = torch.cuda.get_device_capability(device)
    return _Limits(of["multiprocessor_count"], of["max_shared_mem"], major in (8, 9))


def _tile_for(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> _Tile:
    """The highest tile that is not mostly padding and of which there are enough for all multiprocessors; else one of
    `_LONE_TILES`."""
    limits = _limits(device)
    if dtype == torch.float32:
        return _FP32_TILE
    if not limits.any_tile:
        return _fitting(_TILES[1], limits)
    lone, most = _LONE_TILES[-1], limits.num_multiprocessors
    for tile in _TILES:
        if tile.programs(rows, columns) >= most and (tile.rows < 2 * rows or tile is _TILES[-1]):
            return _fitting(tile, limits)
    return _fitting(next((tile for tile in _LONE_TILES if tile.programs(rows, columns) <= most), lone), limits)


def _fitting(tile: _Tile, limits: _Limits) -> _Tile:
    """The tile with as many stages as the shared memory holds."""
    stage = 2 * (tile.rows + tile.columns) * tile.depth
    return tile._replace(num_stages=max(1, min(tile.num_stages, (limits.shared_memory - 1024) // stage)))


def row_invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` in which a row's bits depend on that row alone, however many there are.

    Sums are fp32, in one order; the bias joins them before the only rounding.

    Args:
        x: bf16, fp16 or fp32 ``[..., in]``.
        weight: ``[out, in]`` of the same dtype, its rows contiguous.
        bias: ``[out]``, contiguous.

    Returns:
        ``[..., out]`` in the same dtype.

    Raises:
        ValueError: dtypes or shapes do not match, or the weight lies the other way round.
    """
    fits = x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])
    if not fits or x.dtype != weight.dtype or weight.stride(1) != 1:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)}, strides "
            f"{weight.stride()}; a row-invariant product takes one dtype, one inner size, contiguous rows of "
            f"the weight and a bias of {len(weight)}"
        )
    flat = x.reshape(-1, x.shape[-1])
    tile = _tile_for(len(flat), len(weight), x.dtype, x.device)
    return _linear_with(tile, flat, weight, bias).view(*x.shape[:-1], len(weight))


def _linear_with(tile: _Tile, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    num_out, num_in = weight.shape
    out = torch.empty(len(x), num_out, dtype=x.dtype, device=x.device)
    if out.numel():
        _linear[(tile.programs(len(x), num_out),)](
            x,
            weight,
            bias,
            out,
            len(x),
            num_out,
            num_in,
            x.stride(0),
            weight.stride(0),
            WHOLE=num_in % tile.depth == 0,
            PRECISION="ieee",
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            GROUP=_GROUP,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out
