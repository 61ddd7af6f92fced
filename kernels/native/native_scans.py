"""Recurrent scans on a CPU: what scans.h does, with the arguments of kernels/reference/reference_scans.py."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from ..contract import Scans
from ..decoder_contract import RecurrenceTensors
from .build import function
from .mixer import Form, mixer_words, numbers_of_row
from .weights import DTYPES

_MIX = struct.Struct("=11q")  # mixer.h


class NativeScans(Scans):
    """See `contract.Scans`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._convolve = function(library, "convolve", "15q")
        self._gated_delta = function(library, "gated_delta", "16qd4q")
        self._mamba = function(library, "mamba", "20q")
        self._mix = library.mainspring_mix
        self._mix.argtypes = [ctypes.c_char_p]
        self._mix.restype = None

    def conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: bool,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        fresh: torch.Tensor,
    ) -> torch.Tensor:
        x, taps = x.contiguous(), weight.float().t().contiguous()
        bias = None if bias is None else bias.float().contiguous()
        out = torch.zeros_like(x)
        self._convolve(
            *_sequences(starts, slots, fresh), DTYPES[x.dtype], *weight.shape, x.data_ptr(), x.shape[1],
            taps.data_ptr(), 0 if bias is None else bias.data_ptr(), activation, _states(state), out.data_ptr(),
        )  # fmt: skip
        return out

    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        fresh: torch.Tensor,
        scale: float,
        l2norm: bool,
    ) -> torch.Tensor:
        given = [x.float().contiguous() for x in (q, k, v, g, beta)]
        out = torch.zeros(v.shape)
        self._gated_delta(
            *_sequences(starts, slots, fresh), q.shape[1], *v.shape[1:2], *state.shape[2:],
            *(x.data_ptr() for x in given), _states(state), out.data_ptr(), scale, l2norm, g.dim() == 3,
            q.shape[1] * q.shape[2], v.shape[1] * v.shape[2],
        )  # fmt: skip
        return out.to(v.dtype)

    def mamba2(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        fresh: torch.Tensor,
    ) -> torch.Tensor:
        sizes = x.shape[1], B.shape[1], x.shape[2], state.shape[-1]
        return self._scan(sizes, x, dt, A, B, C, D, state, starts, slots, fresh)

    def mamba1(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        Dskip: torch.Tensor,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        fresh: torch.Tensor,
    ) -> torch.Tensor:
        sizes = x.shape[1], 1, 1, state.shape[-1]
        return self._scan(sizes, x, dt, A, B, C, Dskip, state, starts, slots, fresh)

    def mix(
        self,
        mixer: RecurrenceTensors,
        product: torch.Tensor,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        fresh: torch.Tensor,
    ) -> torch.Tensor:
        held: list[Any] = []

        def hold(tensor: torch.Tensor, form: Form) -> torch.Tensor:
            held.append(copy := form(tensor))
            return copy

        product = product.contiguous()
        rows = len(product)
        out = torch.empty(rows, mixer.heads * mixer.value_dim, dtype=product.dtype)
        workspace = torch.empty(rows, numbers_of_row(mixer))
        self._mix(
            mixer_words(mixer, hold, held, (_states(conv_state), _states(state)))
            + _MIX.pack(
                *_sequences(starts, slots, fresh), DTYPES[product.dtype], rows, product.data_ptr(), product.shape[1],
                out.data_ptr(), workspace.data_ptr(),
            )
        )  # fmt: skip
        return out

    def _scan(
        self,
        sizes: tuple[int, int, int, int],
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        fresh: torch.Tensor,
    ) -> torch.Tensor:
        given = [None if t is None else t.float().contiguous() for t in (x, dt, A, B, C, D)]
        out = torch.zeros(x.shape)
        self._mamba(
            *_sequences(starts, slots, fresh), *sizes, *(0 if t is None else t.data_ptr() for t in given),
            _states(state), out.data_ptr(), A.dim() == 2, sizes[0] * sizes[2], sizes[1] * sizes[3],
        )  # fmt: skip
        return out.to(x.dtype)


def _sequences(starts: torch.Tensor, slots: torch.Tensor, fresh: torch.Tensor) -> tuple[int, ...]:
    """Sequences of scans.h. The three tensors must outlive the call."""
    return len(slots), starts.data_ptr(), slots.data_ptr(), fresh.data_ptr(), torch.get_num_threads()


def _states(state: torch.Tensor) -> int:
    assert state.dtype == torch.float32, "states are fp32"
    assert state.is_contiguous(), "states lie in one piece"
    return state.data_ptr()
