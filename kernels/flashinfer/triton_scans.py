# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call"
"""Recurrent scans as Triton kernels: a program has a part of one sequence's state in registers and takes the tokens one
after another, in fp32.

So a token's bits depend on the state before it and on its own row alone, not on how a text was cut: the state between
two steps is stored as it was in the registers. Nothing is fused into one rounding, and no number of rows or sequences
is a compile-time constant, so there is one kernel for a prompt and for a single token. Chunked scans, such as
FlashInfer's for the gated delta rule, compute a prompt in fewer passes, but give other bits for other cuts.

A convolution has no such order: its rows are computed side by side, and then its state.
"""

from __future__ import annotations

from typing import Any

import torch

from ..contract import Scans
from .triton_kernels import _jit

try:
    import triton
    import triton.language as tl
except ImportError:  # see triton_kernels.py
    triton = None

VALUES = 8  # columns of a state of the gated delta rule, or channels of Mamba 2, in a program of one warp
CHANNELS = 32  # of Mamba, in a program
CONV_ROWS, CONV_CHANNELS = 16, 128
OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}


@_jit(do_not_specialize=["num_rows", "num_sequences", "halvings"])
def _conv(
    x, weight, bias, state, out, starts, slots, fresh, num_rows, num_sequences, halvings,
    channels: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of rows and channels. Inputs before a sequence's first row are in its state. halvings: so many find one of
    the sequences, or that a row belongs to none."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < channels)[None, :]
    sequence = tl.zeros((ROWS,), dtype=tl.int32)  # the first one that ends behind the row
    beyond = sequence + num_sequences
    for _ in range(halvings):
        middle = (sequence + beyond) // 2
        ends = tl.load(starts + 1 + middle, mask=middle < num_sequences, other=0x7FFFFFFF)
        sequence, beyond = tl.where(ends <= rows, middle + 1, sequence), tl.where(ends <= rows, beyond, middle)
    owned = sequence < num_sequences
    first = tl.load(starts + sequence, mask=owned, other=0)
    slot = tl.load(slots + sequence, mask=owned, other=0).to(tl.int64)
    kept = owned & (tl.load(fresh + sequence, mask=owned, other=1) == 0)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        source = rows - (WIDTH - 1) + tap
        new = source >= first
        from_rows = tl.load(
            x + source.to(tl.int64)[:, None] * channels + columns[None, :],
            mask=(owned & new)[:, None] & inside,
            other=0.0,
        )
        from_state = tl.load(
            state + (slot * (WIDTH - 1) + source - first + WIDTH - 1)[:, None] * channels + columns[None, :],
            mask=(kept & (source < first))[:, None] & inside,
            other=0.0,
        )
        factor = tl.load(weight + columns * WIDTH + tap, mask=columns < channels, other=0.0).to(tl.float32)
        total += (from_rows.to(tl.float32) + from_state) * factor[None, :]
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < channels, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total = total / (1 + tl.exp(-total))
    out_at = out + rows.to(tl.int64)[:, None] * channels + columns[None, :]
    tl.store(out_at, tl.where(owned[:, None], total, 0.0), mask=(rows < num_rows)[:, None] & inside)


@_jit()
def _conv_state(
    x, state, starts, slots, fresh,
    channels: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The last ``WIDTH - 1`` inputs of a sequence, of which some may be in its state."""
    sequence = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    taps = tl.arange(0, TAPS)
    first = tl.load(starts + sequence)
    source = tl.load(starts + sequence + 1) + taps - (WIDTH - 1)
    inside = (columns < channels)[:, None] & (taps < WIDTH - 1)[None, :]
    kept = (tl.load(fresh + sequence) == 0) & (source < first)
    state += tl.load(slots + sequence).to(tl.int64) * (WIDTH - 1) * channels + columns[:, None]
    from_rows = tl.load(
        x + source.to(tl.int64)[None, :] * channels + columns[:, None],
        mask=inside & (source >= first)[None, :],
        other=0.0,
    )
    at = (source - first + WIDTH - 1)[None, :] * channels
    from_state = tl.load(state + at, mask=inside & kept[None, :], other=0.0)
    tl.debug_barrier()  # all of the state is read
    tl.store(state + taps[None, :] * channels, from_rows.to(tl.float32) + from_state, mask=inside)


@_jit()
def _gated_delta(
    q, k, v, g, beta, state, out, starts, slots, fresh, scale,
    heads: tl.constexpr, key_heads: tl.constexpr, num_keys: tl.constexpr, num_values: tl.constexpr, EACH_KEY:
    tl.constexpr, L2NORM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Some columns of the state of one head, ``[KEYS, VALUES]``."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    keys, values = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < num_keys, values < num_values
    inside = is_key[:, None] & is_value[None, :]
    first, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    place = tl.load(slots + sequence).to(tl.int64) * heads + head
    state += place * (num_keys * num_values) + keys[:, None] * num_values + values[None, :]
    held = tl.load(state, mask=inside & (tl.load(fresh + sequence) == 0), other=0.0)
    row = first.to(tl.int64)
    q += (row * key_heads + head // (heads // key_heads)) * num_keys + keys
    k += (row * key_heads + head // (heads // key_heads)) * num_keys + keys
    v += (row * heads + head) * num_values + values
    out += (row * heads + head) * num_values + values
    beta += row * heads + head
    g += (row * heads + head) * num_keys + keys if EACH_KEY else row * heads + head
    for _ in range(stop - first):
        query = tl.load(q, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(k, mask=is_key, other=0.0).to(tl.float32)
        if L2NORM:
            query = query * tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6)
            key = key * tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
        if EACH_KEY:
            held = held * tl.exp(tl.load(g, mask=is_key, other=0.0).to(tl.float32))[:, None]
        else:
            held = held * tl.exp(tl.load(g).to(tl.float32))
        value = tl.load(v, mask=is_value, other=0.0).to(tl.float32)
        change = (value - tl.sum(held * key[:, None], axis=0)) * tl.load(beta).to(tl.float32)
        held = held + key[:, None] * change[None, :]
        tl.store(out, tl.sum(held * (query * scale)[:, None], axis=0).to(out.dtype.element_ty), mask=is_value)
        q += key_heads * num_keys
        k += key_heads * num_keys
        v += heads * num_values
        out += heads * num_values
        beta += heads
        g += heads * num_keys if EACH_KEY else heads
    tl.store(state, held, mask=inside)


@_jit()
def _mamba(
    x, dt, A, B, C, D, state, out, starts, slots, fresh,
    heads: tl.constexpr, groups: tl.constexpr, channels: tl.constexpr, num_states: tl.constexpr, OWN: tl.constexpr,
    CHANNELS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Some channels of one head, ``[CHANNELS, STATES]``. OWN: each channel has its own time step and A, as in Mamba 1,
    which is one head; in Mamba 2 a head has one of each."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    some, states = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, STATES)
    is_channel, is_state = some < channels, states < num_states
    inside = is_channel[:, None] & is_state[None, :]
    first, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    place = tl.load(slots + sequence).to(tl.int64) * heads + head
    state += (place * channels + some[:, None]) * num_states + states[None, :]
    held = tl.load(state, mask=inside & (tl.load(fresh + sequence) == 0), other=0.0)
    row = first.to(tl.int64)
    x += (row * heads + head) * channels + some
    out += (row * heads + head) * channels + some
    B += (row * groups + head // (heads // groups)) * num_states + states
    C += (row * groups + head // (heads // groups)) * num_states + states
    if OWN:
        dt += row * channels + some
        rate = tl.load(A + some[:, None] * num_states + states[None, :], mask=inside, other=0.0)
        skip = tl.load(D + some, mask=is_channel, other=0.0)
    else:
        dt += row * heads + head
        rate = tl.load(A + head)
        skip = tl.load(D + head) if D is not None else 0.0
    for _ in range(stop - first):
        each = tl.load(x, mask=is_channel, other=0.0).to(tl.float32)
        if OWN:
            step = tl.load(dt, mask=is_channel, other=0.0)
            decay = tl.exp(rate * step[:, None])
        else:
            step = tl.load(dt)
            decay = tl.exp(rate * step)
        before = tl.load(B, mask=is_state, other=0.0).to(tl.float32)
        after = tl.load(C, mask=is_state, other=0.0).to(tl.float32)
        held = held * decay + (each * step)[:, None] * before[None, :]
        total = tl.sum(held * after[None, :], axis=1)
        if D is not None:
            total = total + skip * each
        tl.store(out, total.to(out.dtype.element_ty), mask=is_channel)
        x += heads * channels
        out += heads * channels
        B += groups * num_states
        C += groups * num_states
        dt += channels if OWN else heads
    tl.store(state, held, mask=inside)


class TritonScans(Scans):
    """See `contract.Scans`. All tensors are on one device and contiguous; of a step's sequences each slot belongs to
    one, or is 0 and never read."""

    def conv(self, x, weight, bias, activation, state, starts, slots, fresh):
        (rows, channels), width, sequences = x.shape, weight.shape[1], len(slots)
        out, columns = torch.empty_like(x), triton.cdiv(channels, CONV_CHANNELS)
        if not rows or not sequences:
            return out.zero_()
        weight = weight.contiguous()
        _conv[(triton.cdiv(rows, CONV_ROWS), columns)](
            x, weight, bias, state, out, starts, slots, fresh, rows, sequences, sequences.bit_length(),
            channels=channels, WIDTH=width, SILU=activation, ROWS=CONV_ROWS, COLUMNS=CONV_CHANNELS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        if width > 1:
            taps = triton.next_power_of_2(width - 1)
            _conv_state[(sequences, columns)](
                x, state, starts, slots, fresh, channels=channels, WIDTH=width, TAPS=taps, COLUMNS=CONV_CHANNELS
            )
        return out

    def gated_delta(self, q, k, v, g, beta, state, starts, slots, fresh, scale, l2norm):
        out, (heads, num_values), (key_heads, num_keys) = torch.zeros_like(v), v.shape[1:], q.shape[1:]
        if len(slots):
            _gated_delta[(len(slots), heads, triton.cdiv(num_values, VALUES))](
                q, k, v, g, beta, state, out, starts, slots, fresh, scale,
                heads=heads, key_heads=key_heads, num_keys=num_keys, num_values=num_values, EACH_KEY=g.dim() == 3,
                L2NORM=l2norm, KEYS=triton.next_power_of_2(num_keys), VALUES=VALUES, **OPTIONS,
            )  # fmt: skip
        return out

    def mamba2(self, x, dt, A, B, C, D, state, starts, slots, fresh):
        sizes = {"heads": x.shape[1], "groups": B.shape[1], "channels": x.shape[2], "num_states": B.shape[2]}
        return self._scan(x, dt, A, B, C, D, state, starts, slots, fresh, OWN=False, CHANNELS=VALUES, **sizes)

    def mamba1(self, x, dt, A, B, C, Dskip, state, starts, slots, fresh):
        sizes = {"heads": 1, "groups": 1, "channels": x.shape[1], "num_states": B.shape[1]}
        return self._scan(x, dt, A, B, C, Dskip, state, starts, slots, fresh, OWN=True, CHANNELS=CHANNELS, **sizes)

    def _scan(self, x, dt, A, B, C, D, state, starts, slots, fresh, **how):
        out = torch.zeros_like(x)
        if len(slots):
            how["STATES"] = triton.next_power_of_2(how["num_states"])
            grid = len(slots), how["heads"], triton.cdiv(how["channels"], how["CHANNELS"])
            _mamba[grid](x, dt, A.contiguous(), B, C, D, state, out, starts, slots, fresh, **how, **OPTIONS)
        return out
