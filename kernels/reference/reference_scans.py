"""Recurrent scans over the rows of several sequences, in plain torch: what the kernels have to compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..contract import Scans


def _tokens(
    starts: torch.Tensor, slots: torch.Tensor, fresh: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """The first token of all sequences, then their second ones, ...: rows, slots, and which begin with zeros."""
    first, counts = starts[:-1].long(), (starts[1:] - starts[:-1]).long()
    for nth in range(int(counts.max()) if len(counts) else 0):
        there = counts > nth
        yield first[there] + nth, slots[there].long(), fresh[there] if nth == 0 else None


def _states(state: torch.Tensor, slots: torch.Tensor, fresh: torch.Tensor | None) -> torch.Tensor:
    held = state[slots]
    if fresh is not None:
        held[fresh] = 0
    return held


class ReferenceScans(Scans):
    """See `contract.Scans`."""

    def conv(self, x, weight, bias, activation, state, starts, slots, fresh):  # type: ignore[no-untyped-def]
        out, width = torch.zeros_like(x), weight.shape[1]
        w, b = weight.float(), None if bias is None else bias.float()
        for rows, at, new in _tokens(starts, slots, fresh):
            window = torch.cat([_states(state, at, new), x[rows].float()[:, None]], 1)
            total = window[:, 0] * w[:, 0]
            for tap in range(1, width):
                total = total + window[:, tap] * w[:, tap]
            total = total if b is None else total + b
            if activation:
                total = total.to(x.dtype).float()
                total = total / (1 + torch.exp(-total))
            out[rows] = total.to(x.dtype)
            state[at] = window[:, 1:]
        return out

    def gated_delta(self, q, k, v, g, beta, state, starts, slots, fresh, scale, l2norm):  # type: ignore[no-untyped-def]
        heads = v.shape[1]
        q, k = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
        if l2norm:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, values, b, decay = q * scale, v.float(), beta.float(), g.float().exp()
        decay = decay[..., None, None] if decay.dim() == 2 else decay[..., None]
        out = torch.zeros_like(values)
        for rows, at, new in _tokens(starts, slots, fresh):
            held = _states(state, at, new) * decay[rows]
            delta = (values[rows] - (held * k[rows][..., None]).sum(-2)) * b[rows][..., None]
            held = held + k[rows][..., None] * delta[..., None, :]
            out[rows] = (held * q[rows][..., None]).sum(-2)
            state[at] = held
        return out.to(v.dtype)

    def mamba2(self, x, dt, A, B, C, D, state, starts, slots, fresh):  # type: ignore[no-untyped-def]
        heads = x.shape[1]
        B, C = (y.float().repeat_interleave(heads // y.shape[1], 1)[:, :, None] for y in (B, C))
        decay, dx = torch.exp(A * dt)[..., None, None], (x.float() * dt[..., None])[..., None]
        out = torch.zeros_like(x, dtype=torch.float32)
        for rows, at, new in _tokens(starts, slots, fresh):
            held = _states(state, at, new) * decay[rows] + dx[rows] * B[rows]
            out[rows] = (held * C[rows]).sum(-1)
            state[at] = held
        return (out if D is None else out + D[:, None] * x.float()).to(x.dtype)

    def mamba1(self, x, dt, A, B, C, Dskip, state, starts, slots, fresh):  # type: ignore[no-untyped-def]
        decay, dx = torch.exp(A * dt[..., None]), (dt * x.float())[..., None]
        out = torch.zeros_like(x, dtype=torch.float32)
        for rows, at, new in _tokens(starts, slots, fresh):
            held = _states(state, at, new) * decay[rows] + dx[rows] * B[rows].float()[:, None]
            out[rows] = (held * C[rows].float()[:, None]).sum(-1)
            state[at] = held
        return (out + Dskip * x.float()).to(x.dtype)
