"""Weights of linear layers in the form the native kernels read (native/linear.h): panels, plain or quantized.

Quantized, groups of weights along a row, or all of them, share a scale: w = scale * (q - zero), where the zero is the
middle of 8 bits, and of 4 bits each group's own; or, of 4 bits, w = scale * codebook[q].
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from .. import host_memory
from ..decoder_contract import FP4, INT8_ROWS, NF4, QuantizedWeight
from ..lazy_weight import SHORTEST, SHORTEST_CODED, LazyWeight, Unpacked
from ..prefault import CHUNK_BYTES
from .build import function

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # dtypes.h, and the kinds of plain weights
GROUPS = (128, 64, 32)  # the first that divides a row's length; a row that none divides ends in zeros
GATE = 16  # rows of gate, then as many of up: linear.h
LONGEST_ROW = 1 << 17  # values in a group: the sum of so many products of 8 bits fits in 32
FP4_KIND = 6  # of a weight whose codebook is `FP4`: weights.h
_ROW_MAJOR = 2  # in the place of `gated`: not packed

_PANEL = 32  # rows of a weight that are packed together: linear.h
_PIECE_BYTES = 16 << 20  # of a weight that is packed at once
_ALONE = 16_384  # numbers of rows that are read sooner than others are woken


class PanelWeight(NamedTuple):
    """``[out_features, in_features]`` in panels."""

    kernels: ctypes.CDLL
    memory: torch.Tensor  # uint8
    kind: int  # one of DTYPES; 8 or 4: the bits of a quantized weight; NF4: 4 bits with any codebook; FP4_KIND
    out_features: int
    in_features: int
    group: int  # values of a row that share a scale; 0: not quantized
    dtype: torch.dtype  # of the rows it takes and gives
    gated: bool  # rows of gate and rows of up in turn, `GATE` of each

    def words(self) -> tuple[int, int, int, int, int]:
        """The fields of a `Weight` of weights.h."""
        return self.kind, self.memory.data_ptr(), self.out_features, self.in_features, self.group

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of these numbers, int64 ``[n]``, → ``[n, in_features]``: an embedding. They must be in range."""
        ids = ids.contiguous()
        out = torch.empty(len(ids), self.in_features, dtype=self.dtype)
        threads = torch.get_num_threads() if out.numel() > _ALONE else 1
        self._call("rows", ids.data_ptr(), len(ids), out.data_ptr(), DTYPES[self.dtype], threads)
        return out

    def unpack(self) -> torch.Tensor:
        """``[out_features, in_features]``, as it was before, or as near as its quantization is."""
        return self.rows(torch.arange(self.out_features))

    def lazy(self) -> LazyWeight:
        return LazyWeight([Unpacked((self.out_features, self.in_features), self)], self.dtype)

    def give_back(self) -> None:
        """Return its memory to the system."""
        host_memory.give_back(self.memory)

    def replace(self, weight: torch.Tensor, release: bool = False) -> None:
        """By another one, ``[out_features, in_features]``. `release`: see `pack`."""
        if self.kind == FP4_KIND:
            self._pack_numbers(rounded_to_fp4(weight, self.group))
            return
        name, dtype, threads = "quantize" if self.group else "pack", _kind(weight), torch.get_num_threads()
        rows = self.out_features if self.group == 0 else -(-self.out_features // _PANEL) * _PANEL  # of its memory
        step = rows if self.gated else _PIECE_BYTES // (_PANEL * weight[0].nbytes) * _PANEL + _PANEL
        for start in range(0, rows, step):
            part = weight.detach()[start : start + step]
            own = part.contiguous()
            memory = self.memory[start * len(self.memory) // rows :]
            self._replace(memory=memory, out_features=len(part))._call(name, own.data_ptr(), dtype, threads)
            if release:
                host_memory.give_back(part)

    def _pack_numbers(self, weight: QuantizedWeight) -> None:
        q, scales, more, codebook = weight
        if self.kind == FP4_KIND:
            scales, more = scales / 2, torch.full_like(scales, 12)
        elif codebook is not None:
            more = codebook
        q, scales = q.contiguous(), scales.float().contiguous()
        more = None if more is None else more.float().contiguous()
        at = 0 if more is None else more.data_ptr()
        self._call("pack_quantized", q.data_ptr(), scales.data_ptr(), at, torch.get_num_threads())

    def _call(self, name: str, *arguments: int) -> None:
        _call(self.kernels, name, *self.words(), self.gated, *arguments)


class PackedExperts(NamedTuple):
    """``[experts, out_features, in_features]``, or transposed ``[experts, in_features, out_features]``, each expert's
    in panels of its own."""

    panels: list[PanelWeight]
    transposed: bool

    @property
    def memory(self) -> list[torch.Tensor]:
        return [each.memory for each in self.panels]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Those experts: int64 ``[n]``."""
        experts = torch.stack([self.panels[i].unpack() for i in ids.tolist()])
        return experts.transpose(1, 2).contiguous() if self.transposed else experts

    def unpack(self) -> torch.Tensor:
        """As it was before, or as near as its quantization is."""
        return self.rows(torch.arange(len(self.panels)))

    def lazy(self) -> torch.Tensor:
        matrices = [panel.lazy().matrices[0] for panel in self.panels]
        return LazyWeight(matrices, self.panels[0].dtype, stacked=True, turned=self.transposed)

    def replace(self, weight: torch.Tensor) -> None:
        """By others, in the same form."""
        for panel, each in zip(self.panels, weight.transpose(1, 2) if self.transposed else weight, strict=True):
            panel.replace(each)


def pack(
    library: ctypes.CDLL, weight: torch.Tensor, gated: bool = False, release: bool = False, bits: int | None = None
) -> PanelWeight:
    """A copy of `weight` ``[out, in]`` in panels: of the same size, or rounded to 8 or 4 `bits` or NF4, group by
    group, or to `INT8_ROWS`.

    gated: its rows are all of gate, then all of up, as many of each, a multiple of `GATE`. release: the memory of
    `weight` is given back to the system on the way, so that there are never two whole ones; what it then holds is
    undefined.
    Raises ValueError where rows are not as they should be, or the dtype is none of `DTYPES`.
    """
    kind, columns = _kind(weight), weight.shape[1]
    group = 0 if bits is None else next((g for g in GROUPS if columns % g == 0), GROUPS[-1])
    if bits == NF4:
        group = 64 if columns % 64 == 0 else 32  # blocks have 64, but not rows of 96
        if columns % group:
            raise ValueError(f"rows of {columns} values; for NF4 it must be a multiple of {group}")
    if bits == INT8_ROWS:
        bits, group = 8, -(-columns // GROUPS[-1]) * GROUPS[-1]
        if group > LONGEST_ROW:
            raise ValueError(f"rows of {columns} values; with one scale for a row it must be at most {LONGEST_ROW}")
    packed = _allocate(library, weight, bits or kind, group, weight.dtype, gated)
    packed.replace(weight, release)
    return packed


def pack_quantized(
    library: ctypes.CDLL, weight: QuantizedWeight, dtype: torch.dtype, gated: bool = False
) -> PanelWeight:
    """A weight that is quantized already, with fp16 scales and zeros where it has no codebook; `dtype` is that of the
    rows it is to take. Raises ValueError where a group is no multiple of 32, with a codebook of 16, and otherwise as
    `pack`."""
    q, scales, zeros, codebook = weight
    group, shortest = q.shape[1] // scales.shape[1], SHORTEST if codebook is None else SHORTEST_CODED
    if group * scales.shape[1] != q.shape[1] or group % shortest:
        raise ValueError(f"{q.shape[1]} values in {scales.shape[1]} groups; a group must be a multiple of {shortest}")
    kind = NF4 if codebook is not None else 8 if zeros is None else 4
    if not gated and group % SHORTEST == 0 and _fits_fp4(weight):
        kind = FP4_KIND
    packed = _allocate(library, q, kind, group, dtype, gated)
    packed._pack_numbers(weight)
    return packed


def rounded_to_fp4(weight: torch.Tensor, group: int) -> QuantizedWeight:
    """The nearest numbers of `FP4`; the scale of each group is the smallest power of 2 that leaves none beyond them."""
    grouped = weight.float().unflatten(1, (-1, group))
    least = torch.tensor(2.0**-23)  # whose half fp16 has
    scales = torch.exp2((grouped.abs().amax(-1) / FP4[7]).maximum(least).log2().ceil()).clamp_max(2.0**16)
    steps = torch.tensor(FP4[:8])
    size = torch.bucketize((grouped.abs() / scales[..., None]).contiguous(), (steps[1:] + steps[:-1]) / 2)
    return QuantizedWeight((size + 8 * (grouped < 0)).flatten(1).byte(), scales, None, torch.tensor(FP4))


def _fits_fp4(weight: QuantizedWeight) -> bool:
    """Whether its codebook is `FP4`, and half of each scale fits in fp16. A group of zeros may have any scale."""
    if weight.codebook is None or not torch.equal(weight.codebook, torch.tensor(FP4)):
        return False
    halves = weight.scales / 2
    misfits = halves.half().float() != halves
    return not bool((weight.numbers.view(*halves.shape, -1)[misfits] & 7).any())


def linear(
    library: ctypes.CDLL, x: torch.Tensor, weight: PanelWeight | torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias`` for ``[..., in]`` of the weight's dtype, rounded once. A row's bits depend on nothing but
    the row, the weight and the bias: not on whether the weight, ``[out, in]``, is packed before or as it is used."""
    if isinstance(weight, torch.Tensor):
        weight = weight.contiguous()
        words = (_kind(weight), weight.data_ptr(), *weight.shape, 0, _ROW_MAJOR)
        gated = False
    else:
        gated = weight.gated
        words = (*weight.words(), gated)
    out_features, in_features = words[2:4]
    flat = readable(x.reshape(-1, in_features))
    if bias is not None:
        bias = bias.view(2, -1, GATE).transpose(0, 1).reshape(-1) if gated else bias.contiguous()
    out = torch.empty(len(flat), out_features, dtype=weight.dtype)
    _call(
        library, "linear", *words, flat.data_ptr(), flat.stride(0), len(flat), 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), DTYPES[weight.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if gated:
        out = out.view(len(flat), out_features // (2 * GATE), 2, GATE).transpose(1, 2).flatten(1)
    return out.view(*x.shape[:-1], out_features)


def readable(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied if its last dimension is not contiguous; the other strides may be any."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _call(library: ctypes.CDLL, name: str, *words: int) -> None:
    function(library, f"weight_{name}", f"{len(words)}q")(*words)


def _kind(weight: torch.Tensor) -> int:
    if weight.dtype not in DTYPES or weight.device.type != "cpu":
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"a weight of {weight.dtype} on {weight.device}; the native kernels pack {known} on a CPU")
    return DTYPES[weight.dtype]


def _allocate(
    library: ctypes.CDLL, weight: torch.Tensor, kind: int, group: int, dtype: torch.dtype, gated: bool
) -> PanelWeight:
    rows, columns = weight.shape
    if gated and rows % (2 * GATE):
        raise ValueError(f"{rows} rows of gate and up; each must have a multiple of {GATE}")
    size = function(library, "weight_bytes", "5q", ctypes.c_int64)(kind, 0, rows, columns, group)
    return PanelWeight(library, _memory.take(size), kind, rows, columns, group, dtype, gated)


class _Memory:
    """Weights lie one after another in large pieces of memory, so that huge pages fit and none is half empty. A piece
    is given back when the last weight in it is gone."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """64-byte aligned; zeros, real only once written to."""
        if size > len(self._free):
            self._free = host_memory.zeros(max(size, CHUNK_BYTES))
        taken, self._free = self._free[:size], self._free[-(-size // 64) * 64 :]
        return taken

    def give_back_rest(self) -> None:
        """Let what is left take no memory until it is written to, as if `prefault` had not done so."""
        host_memory.give_back(self._free)


_memory = _Memory()
give_back_rest = _memory.give_back_rest
