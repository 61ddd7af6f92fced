"""A whole model as one native call: what decoder.h does, given weights, caches and steps."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from .. import host_memory
from ..contract import CLAMPED, LayerCache, RowScores, each_expert
from ..decoder_contract import (
    NF4,
    AttentionMixer,
    DecodeSteps,
    Experts,
    GatedMLP,
    LayerTensors,
    Linear,
    Mixture,
    Norm,
    PackedWeight,
)
from ..lazy_weight import LazyWeight, Leaf, Matrix, UnlikeError
from ..reference.reference_backend import ReferenceBackend
from .choice import NO_TENSOR, NOT_SCORED, choice_words, scoring
from .mixer import NO_MIXER, NO_NORM, Form, in_fp32, mixer_words, norm_words
from .weights import GATE, PackedExperts, PanelWeight, give_back_rest, linear, pack, pack_quantized

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}  # dtypes.h
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, CLAMPED: 3}  # fused.h
# of decoder.h
PHASES = "norm qkv heads attention mixer output gate_up down experts head choice".split()

# structs of decoder.h, in words of 64 bits
_LINEAR = struct.Struct("=6q")
_MIXTURE = struct.Struct("=10qd3q")  # of experts.h, without the router
_LAYER = struct.Struct("=11qd")
_CACHE = struct.Struct("=10q")
_DECODER = struct.Struct("=3q")
_STEP = struct.Struct("=15q")
_REPEAT = struct.Struct("=16q3d32q")  # of repeat.h
_NO_LINEAR = (0,) * 6
_reference = ReferenceBackend()
_HEAD_BITS = 8  # of a quantized output layer, which bears fewer bits badly


class NativeDecoder:
    """See `decoder_contract.Decoder`. Takes the memory of the weights over: the tensors given are empty afterwards."""

    runs_steps = True

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[LayerTensors],
        norm: Norm,
        head: Linear,
        bits: int | None = None,
    ) -> None:
        """bits: 8, 4, `NF4` or `INT8_ROWS`, of weights that are to be quantized; None: they stay as they are."""
        self._library = library
        for name in ("new", "forget", "bind", "bind_states", "run", "repeat", "phases"):
            getattr(library, f"mainspring_decoder_{name}").argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        library.mainspring_decoder_repeat.restype = ctypes.c_int64
        library.mainspring_decoder_new.argtypes = [ctypes.c_char_p]
        library.mainspring_decoder_new.restype = ctypes.c_void_p
        library.mainspring_decoder_phases.restype = ctypes.POINTER(ctypes.c_int64 * len(PHASES))
        self._handle = None
        self._run = library.mainspring_decoder_run
        self._held: list[Any] = [norm]  # what C++ has addresses of
        self.weights: dict[int, PanelWeight | PackedExperts | _Copy] = {}
        self._bits = bits
        self._dtype, self._vocab = head.weight.dtype, head.weight.shape[0]
        packed = [self._layer(layer) for layer in layers]
        words = _DECODER.pack(DTYPES[self._dtype], len(norm.weight), len(layers)) + self._norm(norm)
        words += self._linear(head, None if bits in (None, NF4) else _HEAD_BITS) + b"".join(packed)
        give_back_rest()
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

    def bind_states(self, states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._states = list(states)
        addresses = [tensor.data_ptr() for pair in states for tensor in pair]
        self._library.mainspring_decoder_bind_states(self._handle, struct.pack(f"={len(addresses)}q", *addresses))

    def move(self, ids: Mapping[int, int]) -> None:
        self.weights = {ids.get(key, key): weight for key, weight in self.weights.items()}

    def give_back(self) -> None:
        for weight in self.weights.values():
            for memory in weight.memory if isinstance(weight, PackedExperts) else [weight.memory]:
                host_memory.give_back(memory)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        packed = self.weights[id(weight)]
        if isinstance(packed, _Copy):  # the gate of a shared expert, in fp32
            return (x.float() * packed.memory).sum(-1, keepdim=True).to(x.dtype)
        assert isinstance(packed, PanelWeight)
        kept = None if bias is None else self.weights.get(id(bias))
        return linear(self._library, x, packed, bias if kept is None else kept.unpack())

    def experts(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, experts: Experts) -> torch.Tensor:
        first, second = (self.weights[id(weight)] for weight in experts[:2])
        assert isinstance(first, PackedExperts)
        assert isinstance(second, PackedExperts)

        def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
            biases = [None, None] if experts.biases is None else [bias[expert] for bias in experts.biases]
            gate_up = linear(self._library, rows, first.panels[expert], biases[0])
            inner = _reference.act_and_mul(gate_up, experts.activation)
            return linear(self._library, inner, second.panels[expert], biases[1])

        return each_expert(x, chosen, shares, len(first.panels), compute)

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kinds: Sequence[tuple[Any, torch.Tensor, torch.Tensor]],
        kind_of_layer: Sequence[int],
        angles: Sequence[torch.Tensor],
        wanted: torch.Tensor,
        sequences: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        out = torch.empty(len(wanted), self._vocab, dtype=self._dtype)
        shared = [w for plan, blocks, rows in kinds for w in (plan.handle, blocks.data_ptr(), rows.data_ptr())]
        tables = [w for table in angles for w in (table.data_ptr(), table.shape[1])]
        arrays = [(ctypes.c_int64 * len(words))(*words) for words in (shared, kind_of_layer, tables)]
        addresses, threads = [tensor.data_ptr() for tensor in sequences], torch.get_num_threads()
        self._run(
            self._handle,
            _STEP.pack(
                len(hidden), hidden.data_ptr(), positions.data_ptr(), len(wanted), wanted.data_ptr(), out.data_ptr(),
                threads, *map(ctypes.addressof, arrays),
                len(sequences[1]) if sequences else 0, *(addresses or (0, 0, 0)), threads,
            ),
        )  # fmt: skip
        return out

    def repeat(self, steps: DecodeSteps, most: int) -> tuple[torch.Tensor, list[RowScores], bool]:
        chosen, stopped = torch.empty(most, len(steps.ids), dtype=torch.int64), ctypes.c_int64(0)
        found, table = scoring([(rows, min(count, self._vocab)) for rows, count in steps.scored], most)
        made = self._make(steps, most, chosen.data_ptr(), ctypes.addressof(stopped), scored=table)
        of_made = [
            RowScores(*(column[: made * len(rows)] for column in one))
            for (rows, _), one in zip(steps.scored, found, strict=True)
        ]
        return chosen[:made], of_made, bool(stopped.value)

    def logits(self, steps: DecodeSteps) -> torch.Tensor:
        logits = torch.empty(len(steps.ids), self._vocab, dtype=self._dtype)
        self._make(steps, 1, logits=logits.data_ptr())
        return logits

    def _make(
        self,
        steps: DecodeSteps,
        most: int,
        chosen: int = 0,
        stopped: int = 0,
        logits: int = 0,
        scored: np.ndarray = NOT_SCORED,
    ) -> int:
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
                table, *rows, first, second, steps.scale, logits, *NO_TENSOR, *choice.words,
                0, 0, 0, len(scored) // most, scored.ctypes.data,
                len(steps.stops), steps.stops.ctypes.data, steps.interrupt.ctypes.data, chosen, stopped,
                0 if steps.state_slots is None else steps.state_slots.data_ptr(),
            ),
        )  # fmt: skip
        return made

    def seconds(self) -> dict[str, float]:
        """Spent in each phase since the decoder was made."""
        spent = self._library.mainspring_decoder_phases(self._handle, None).contents
        return {name: ns * 1e-9 for name, ns in zip(PHASES, spent, strict=True)}

    def _layer(self, layer: LayerTensors) -> bytes:
        mixer, gated, activation, mlp = layer.mixer, False, 0, bytes(2 * _LINEAR.size)
        mixture = bytes(_LINEAR.size + _MIXTURE.size)
        dense = layer.mlp
        if isinstance(layer.mlp, Mixture):
            mixture, dense, activation = (
                self._mixture(layer.mlp),
                layer.mlp.shared,
                ACTIVATIONS[layer.mlp.experts.activation],
            )
        if dense is not None:
            assert isinstance(dense, GatedMLP)
            gate_up, down, name = dense
            gated, activation = gate_up.weight.shape[0] % (2 * GATE) == 0, ACTIVATIONS[name]
            mlp = self._linear(gate_up, self._bits, gated) + self._linear(down, self._bits)
        if isinstance(mixer, AttentionMixer):
            first, head_norms, recurrence = mixer.qkv, (mixer.query_norm, mixer.key_norm), NO_MIXER
            attention = (
                *mixer.sizes, mixer.key_dim, mixer.value_dim, mixer.gates, -1 if mixer.rotary is None else mixer.rotary,
                mixer.interleaved, 0 if mixer.sinks is None else self._hold(mixer.sinks, in_fp32).data_ptr(),
            )  # fmt: skip
        else:
            first, head_norms, attention = mixer.projection, (None, None), (0,) * 9
            recurrence = mixer_words(mixer, self._hold, self._held)
        norms = layer.input_norm, *head_norms, layer.mixer_norm, layer.mlp_norm, layer.output_norm
        return b"".join([
            *map(self._norm, norms), self._linear(first, self._bits), self._linear(layer.output, self._bits), mlp,
            _LAYER.pack(*attention, activation, gated, layer.multiplier), bytes(_CACHE.size), recurrence, mixture,
        ])  # fmt: skip

    def _mixture(self, mixture: Mixture) -> bytes:
        """`MixtureOf`. The router is not quantized."""
        gate_up, down, _, biases = mixture.experts
        transposed = biases is not None
        gated = not transposed and down.shape[2] % GATE == 0
        places = [[bias[e].data_ptr() for bias in biases] if biases else [0, 0] for e in range(len(down))]
        experts = self._experts(gate_up, gated, transposed), self._experts(down, False, transposed)
        words = b"".join(
            _LINEAR.pack(*panel.words(), bias)
            for panels, of_expert in zip(zip(*experts, strict=True), places, strict=True)
            for panel, bias in zip(panels, of_expert, strict=True)
        )
        self._held.append(biases)
        self._held.append(held := ctypes.create_string_buffer(words, len(words)))
        shared_gate, correction = (
            0 if tensor is None else self._hold(tensor, in_fp32).data_ptr()
            for tensor in (mixture.shared_gate, mixture.correction)
        )
        weight, rule = mixture.router.weight, mixture.routing
        if rule.precise:  # few products, for which it stays as it is
            weight = _plain(weight)
            self._held.append(weight)
            router = _LINEAR.pack(0, weight.data_ptr(), *weight.shape, 0, 0)
        else:
            router = self._linear(mixture.router, None)
        return router + _MIXTURE.pack(
            ctypes.addressof(held), rule.top_k, rule.normalise, rule.widened, gated, shared_gate,
            rule.sigmoid, rule.precise, rule.groups, rule.kept, rule.scale, correction, *map(_widest, experts),
        )  # fmt: skip

    def _experts(self, weight: torch.Tensor, gated: bool, transposed: bool) -> list[PanelWeight]:
        if isinstance(weight, LazyWeight) and weight.turned == transposed:
            panels = [self._pack_matrix(matrix, weight.dtype, self._bits, gated) for matrix in weight.matrices]
        else:  # no copy where they are transposed: fusing has turned them
            laid = (each.T.contiguous() if transposed else each for each in _plain(weight))
            panels = [pack(self._library, each, gated, release=True, bits=self._bits) for each in laid]
        self.weights[id(weight)] = PackedExperts(panels, transposed)
        _empty(weight)
        return panels

    def _hold(self, tensor: torch.Tensor, form: Form) -> torch.Tensor:
        copy = self.weights[id(tensor)] = _Copy(tensor, form)
        return copy.memory

    def _norm(self, norm: Norm | None) -> bytes:
        if norm is None:
            return NO_NORM
        self._held.append(norm)
        return norm_words(norm)

    def _linear(self, linear: Linear, bits: int | None, gated: bool = False) -> bytes:
        weight, bias = linear
        packed = self.weights.get(id(weight))
        if not isinstance(packed, PanelWeight):
            packed = self.weights[id(weight)] = self._pack(weight, bits, gated)
            _empty(weight)
        if bias is not None and gated:
            bias = self._hold(bias, _interleaved)
        self._held.append(bias)
        return _LINEAR.pack(*packed.words(), 0 if bias is None else bias.data_ptr())

    def _pack(self, weight: torch.Tensor, bits: int | None, gated: bool) -> PanelWeight:
        if isinstance(weight, LazyWeight) and not weight.turned:
            with suppress(UnlikeError):  # it then becomes a plain one
                return self._pack_matrix(weight.matrices[0], weight.dtype, bits, gated)
        return pack(self._library, _plain(weight), gated, release=True, bits=bits)

    def _pack_matrix(self, matrix: Matrix, dtype: torch.dtype, bits: int | None, gated: bool) -> PanelWeight:
        if not matrix.has_integers:
            return pack(self._library, matrix.values(dtype), gated, release=True, bits=bits)
        if isinstance(matrix, Leaf) and not gated:
            packed = matrix.take(dtype)
            assert isinstance(packed, PanelWeight)
        else:
            packed = pack_quantized(self._library, matrix.read(), dtype, gated)
        for leaf in matrix.leaves():
            leaf.forget()
        return packed


def _widest(experts: Sequence[PanelWeight]) -> int:
    """The expert whose rows of x take the most memory when they are packed: NF4 and FP4 may occur together."""
    return next((at for at, panel in enumerate(experts) if panel.kind == NF4), 0)


def _empty(weight: torch.Tensor) -> None:
    """Free the memory of a weight that is packed."""
    if isinstance(weight, LazyWeight):
        weight.forget()
    else:
        weight.data = torch.empty(0, dtype=weight.dtype)


def _plain(weight: torch.Tensor) -> torch.Tensor:
    return weight.values() if isinstance(weight, LazyWeight) else weight.detach()


def _packed(weight: PackedWeight) -> tuple[int, ...]:
    assert isinstance(weight, PanelWeight)
    return weight.words()


def cache_view(side: torch.Tensor) -> tuple[int, ...]:
    """CacheView of a layer's keys or values."""
    return side.data_ptr(), *side.stride()[:3]


class _Copy:
    """A parameter that stays as it is, and its copy in the form in which C++ reads it."""

    def __init__(self, parameter: torch.Tensor, form: Form) -> None:
        self._parameter, self._form = parameter, form
        self.memory = form(parameter.detach())

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.unpack()[ids]

    def unpack(self) -> torch.Tensor:
        return self._parameter.detach().clone()

    def lazy(self) -> torch.Tensor:
        return self._parameter

    def replace(self, value: torch.Tensor) -> None:
        self._parameter.detach().copy_(value)
        self.memory.copy_(self._form(self._parameter.detach()))


def _interleaved(bias: torch.Tensor) -> torch.Tensor:
    """A bias ``[gate; up]`` with `GATE` numbers of either side by side."""
    return bias.view(2, -1, GATE).transpose(0, 1).flatten()
