"""A whole model as one native call: what decoder.h does, given weights, caches and steps."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import host_memory
from ..contract import LayerCache
from ..decoder_contract import (
    NF4,
    DecodeSteps,
    GatedMLP,
    LayerTensors,
    Linear,
    Norm,
    PackedWeight,
    QuantizedWeight,
)
from .choice import NO_TENSOR, choice_words
from .weights import GATE, PanelWeight, linear, pack, pack_quantized

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}  # dtypes.h
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}  # fused.h
PHASES = ("norm", "qkv", "heads", "attention", "output", "gate_up", "down", "head", "choice")  # decoder.h

# structs of decoder.h, in words of 64 bits
_NORM = struct.Struct("=3q2d")
_LINEAR = struct.Struct("=6q")
_LAYER = struct.Struct("=10qd")
_CACHE = struct.Struct("=10q")
_DECODER = struct.Struct("=3q")
_STEP = struct.Struct("=10q")
_REPEAT = struct.Struct("=16q3d31q")  # of repeat.h
_NO_LINEAR = (0,) * 6
_HEAD_BITS = 8  # of a quantized output layer, which bears fewer bits badly


class NativeDecoder:
    """See `decoder.Decoder`. Takes the memory of the weights over: the tensors given are empty afterwards."""

    runs_steps = True

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[LayerTensors],
        norm: Norm,
        head: Linear,
        bits: int | None = None,
        quantized: Mapping[int, QuantizedWeight] | None = None,
    ) -> None:
        """bits: 8, 4, `NF4` or `INT8_ROWS`, of weights that are to be quantized; None: they stay as they are.
        quantized: weights that are, by the ``id`` of the tensor that stands for them."""
        self._library = library
        for name in ("new", "forget", "bind", "run", "repeat", "phases"):
            getattr(library, f"mainspring_decoder_{name}").argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        library.mainspring_decoder_repeat.restype = ctypes.c_int64
        library.mainspring_decoder_new.argtypes = [ctypes.c_char_p]
        library.mainspring_decoder_new.restype = ctypes.c_void_p
        library.mainspring_decoder_phases.restype = ctypes.POINTER(ctypes.c_int64 * len(PHASES))
        self._handle = None
        self._run = library.mainspring_decoder_run
        self._held: list[Any] = [norm]  # what C++ has addresses of
        self.weights: dict[int, PanelWeight | _InterleavedBias] = {}
        self._bits, self._quantized = bits, quantized or {}
        self._dtype, self._vocab = norm.weight.dtype, head.weight.shape[0]
        packed = [self._layer(layer) for layer in layers]
        words = _DECODER.pack(DTYPES[self._dtype], len(norm.weight), len(layers)) + self._norm(norm)
        words += self._linear(head, None if bits in (None, NF4) else _HEAD_BITS) + b"".join(packed)
        del self._quantized
        self._handle = library.mainspring_decoder_new(words)

    def __del__(self) -> None:
        if self._handle is not None:
            self._library.mainspring_decoder_forget(self._handle, None)

    def bind(self, caches: Sequence[LayerCache], sources: Sequence[int]) -> None:
        words = []
        for i, (cache, source) in enumerate(zip(caches, sources, strict=True)):
            views = *cache_view(cache.keys), *cache_view(cache.values)
            words.append(_CACHE.pack(*views, DTYPES[cache.keys.dtype], source == i))
        self._caches = list(caches)
        self._library.mainspring_decoder_bind(self._handle, b"".join(words))

    def give_back(self) -> None:
        for weight in self.weights.values():
            host_memory.give_back(weight.memory)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        packed = self.weights[id(weight)]
        assert isinstance(packed, PanelWeight)
        kept = None if bias is None else self.weights.get(id(bias))
        return linear(self._library, x, packed, bias if kept is None else kept.unpack())

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kinds: Sequence[tuple[Any, torch.Tensor, torch.Tensor]],
        kind_of_layer: Sequence[int],
        angles: Sequence[torch.Tensor],
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        out = torch.empty(len(wanted), self._vocab, dtype=self._dtype)
        shared = [w for plan, blocks, rows in kinds for w in (plan.handle, blocks.data_ptr(), rows.data_ptr())]
        tables = [w for table in angles for w in (table.data_ptr(), table.shape[1])]
        arrays = [(ctypes.c_int64 * len(words))(*words) for words in (shared, kind_of_layer, tables)]
        self._run(
            self._handle,
            _STEP.pack(
                len(hidden), hidden.data_ptr(), positions.data_ptr(), len(wanted), wanted.data_ptr(), out.data_ptr(),
                torch.get_num_threads(), *map(ctypes.addressof, arrays),
            ),
        )  # fmt: skip
        return out

    def repeat(self, steps: DecodeSteps, most: int) -> tuple[torch.Tensor, bool]:
        chosen, stopped = torch.empty(most, len(steps.ids), dtype=torch.int64), ctypes.c_int64(0)
        made = self._make(steps, most, chosen.data_ptr(), ctypes.addressof(stopped))
        return chosen[:made], bool(stopped.value)

    def logits(self, steps: DecodeSteps) -> torch.Tensor:
        logits = torch.empty(len(steps.ids), self._vocab, dtype=self._dtype)
        self._make(steps, 1, logits=logits.data_ptr())
        return logits

    def _make(self, steps: DecodeSteps, most: int, chosen: int = 0, stopped: int = 0, logits: int = 0) -> int:
        weight = steps.embedding.weight
        table, rows = (
            (weight.data_ptr(), _NO_LINEAR) if isinstance(weight, torch.Tensor) else (0, (*_packed(weight), 0))
        )
        first, second = (*steps.embedding.scales, 1.0, 1.0)[:2]
        kinds = [w for plan, blocks in steps.kinds for w in (plan.handle, blocks.data_ptr(), blocks.shape[1])]
        tables = [w for table in steps.angles for w in (table.data_ptr(), table.shape[1])]
        arrays = [(ctypes.c_int64 * len(words))(*words) for words in (kinds, steps.kind_of_layer, tables)]
        choice = choice_words(steps.choice)
        made: int = self._library.mainspring_decoder_repeat(
            self._handle,
            _REPEAT.pack(
                len(steps.ids), torch.get_num_threads(), most, steps.ids.data_ptr(), steps.positions.data_ptr(),
                len(steps.kinds), *map(ctypes.addressof, arrays),
                table, *rows, first, second, steps.scale, logits, *NO_TENSOR, *choice.words, *NO_TENSOR,
                len(steps.stops), steps.stops.ctypes.data, steps.interrupt.ctypes.data, chosen, stopped,
            ),
        )  # fmt: skip
        return made

    def seconds(self) -> dict[str, float]:
        """Spent in each phase since the decoder was made."""
        spent = self._library.mainspring_decoder_phases(self._handle, None).contents
        return {name: ns * 1e-9 for name, ns in zip(PHASES, spent, strict=True)}

    def _layer(self, layer: LayerTensors) -> bytes:
        assert isinstance(layer.mlp, GatedMLP)
        norms = [
            layer.input_norm, layer.query_norm, layer.key_norm, layer.attention_norm, layer.mlp_norm, layer.output_norm
        ]  # fmt: skip
        gate_up, down, activation = layer.mlp
        gated = gate_up.weight.shape[0] % (2 * GATE) == 0
        sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
        self._held.append(sinks)
        linears = self._linear(layer.qkv, self._bits), self._linear(layer.output, self._bits)
        mlp = self._linear(gate_up, self._bits, gated), self._linear(down, self._bits)
        return b"".join([
            *map(self._norm, norms), *linears, *mlp,
            _LAYER.pack(
                *layer.sizes, layer.key_dim, layer.value_dim, -1 if layer.rotary is None else layer.rotary,
                layer.interleaved, 0 if sinks is None else sinks.data_ptr(), ACTIVATIONS[activation], gated,
                layer.multiplier,
            ),
            bytes(_CACHE.size),
        ])  # fmt: skip

    def _norm(self, norm: Norm | None) -> bytes:
        if norm is None:
            return bytes(_NORM.size)
        self._held.append(norm)
        return _NORM.pack(norm.weight.data_ptr(), DTYPES[norm.weight.dtype], len(norm.weight), norm.eps, norm.offset)

    def _linear(self, linear: Linear, bits: int | None, gated: bool = False) -> bytes:
        weight, bias = linear
        packed = self.weights.get(id(weight))
        if not isinstance(packed, PanelWeight):
            packed = self.weights[id(weight)] = self._pack(weight, bits, gated)
            weight.data = torch.empty(0, dtype=weight.dtype)
        if bias is not None and gated:
            copy = self.weights[id(bias)] = _InterleavedBias(bias)
            bias = copy.memory
        self._held.append(bias)
        return _LINEAR.pack(*packed.words(), 0 if bias is None else bias.data_ptr())

    def _pack(self, weight: torch.Tensor, bits: int | None, gated: bool) -> PanelWeight:
        given = self._quantized.get(id(weight))
        if given is not None:
            host_memory.give_back(weight)
            return pack_quantized(self._library, given, weight.dtype, gated)
        return pack(self._library, weight, gated, release=True, bits=bits)


def _packed(weight: PackedWeight) -> tuple[int, ...]:
    assert isinstance(weight, PanelWeight)
    return weight.words()


def cache_view(side: torch.Tensor) -> tuple[int, ...]:
    """CacheView of a layer's keys or values."""
    return side.data_ptr(), *side.stride()[:3]


class _InterleavedBias:
    """A bias ``[gate; up]`` with `GATE` numbers of either side by side."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.memory = bias.view(2, -1, GATE).transpose(0, 1).flatten()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.unpack()[ids]

    def unpack(self) -> torch.Tensor:
        return self.memory.view(-1, 2, GATE).transpose(0, 1).flatten()

    def replace(self, bias: torch.Tensor) -> None:
        self.memory.copy_(_InterleavedBias(bias).memory)
