"""A recurrent mixer as mixer.h reads it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch

from ..decoder_contract import Norm, RecurrenceTensors
from .weights import DTYPES

FORMS = {"gated_delta": 1, "mamba2": 2}
_NORM = struct.Struct("=3q2d")
_MIXER = struct.Struct("=14q3q2d3qd3q")
NO_NORM, NO_MIXER = bytes(_NORM.size), bytes(_MIXER.size)

Form = Callable[[torch.Tensor], torch.Tensor]


def taps(weight: torch.Tensor) -> torch.Tensor:
    """Weight of a convolution, ``[channels, 1, width]`` → ``[width, channels]``."""
    return weight.float().squeeze(1).t().contiguous()


def rate(decay: torch.Tensor) -> torch.Tensor:
    return -decay.float().exp()


def in_fp32(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous()


def norm_words(norm: Norm) -> bytes:
    """`NormOf`. The norm must outlive it."""
    return _NORM.pack(norm.weight.data_ptr(), DTYPES[norm.weight.dtype], len(norm.weight), norm.eps, norm.offset)


def mixer_words(
    mixer: RecurrenceTensors,
    hold: Callable[[torch.Tensor, Form], torch.Tensor],
    held: list[Any],
    states: tuple[int, int] = (0, 0),
) -> bytes:
    """`MixerOf`. `hold` gives a tensor in another form, which must outlive the words, as must the mixer and what is
    appended to `held`. states: addresses of the convolution's and of the scan's."""

    def address(tensor: torch.Tensor | None, form: Form) -> int:
        return 0 if tensor is None else hold(tensor, form).data_ptr()

    runs = (ctypes.c_int64 * (2 * len(mixer.columns)))(*(number for run in mixer.columns for number in run))
    held += [mixer, runs]
    weight, bias = mixer.conv
    norm = mixer.norm.weight
    return _MIXER.pack(
        FORMS[mixer.form], mixer.groups, mixer.heads, mixer.key_dim, mixer.value_dim, weight.shape[-1],
        len(mixer.columns), ctypes.addressof(runs), address(weight, taps), address(bias, in_fp32), mixer.silu,
        address(mixer.decay, rate), address(mixer.decay_bias, in_fp32), address(mixer.skip, in_fp32),
        norm.data_ptr(), DTYPES[norm.dtype], len(norm), mixer.norm.eps, mixer.norm.offset,
        mixer.norm_size, mixer.gate_first, mixer.gate == "sigmoid", mixer.scale, mixer.l2norm, *states,
    )  # fmt: skip


def numbers_of_row(mixer: RecurrenceTensors) -> int:
    """fp32 numbers that a row takes while it is mixed: `MixerOf::numbers`."""
    return 2 * sum(length for _, length in mixer.columns) + mixer.heads * mixer.value_dim
