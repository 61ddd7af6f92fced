"""A decoder layer as plain data. core/model/run/stack.py recognizes it; a backend may run all layers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from .contract import LayerCache

NormT = TypeVar("NormT")
LinearT = TypeVar("LinearT")
TensorT = TypeVar("TensorT")
MLPT = TypeVar("MLPT")


class DecoderLayer(NamedTuple, Generic[NormT, LinearT, TensorT, MLPT]):
    """One layer. None stands for a norm that it does not have."""

    input_norm: NormT | None
    qkv: LinearT  # rows of all query heads, all key heads, all value heads
    sizes: Sequence[int]  # how many rows each of the three have
    key_dim: int
    value_dim: int
    query_norm: NormT | None  # over key_dim elements, or over all heads at once
    key_norm: NormT | None
    rotary: int | None  # which of the stack's rotary embeddings; None: this layer has none
    interleaved: bool
    sinks: TensorT | None  # [query heads]
    output: LinearT
    attention_norm: NormT | None  # of what attention adds
    mlp_norm: NormT | None
    mlp: MLPT
    output_norm: NormT | None  # of what the MLP adds
    multiplier: float  # of what either adds


class Norm(NamedTuple):
    weight: torch.Tensor  # [n]
    eps: float
    offset: float


class Linear(NamedTuple):
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]


class GatedMLP(NamedTuple):
    gate_up: Linear  # gate first
    down: Linear
    activation: str


# An MLP of another kind is a module, ``[1, rows, hidden]`` → the same, alone or first in a tuple.
LayerTensors = DecoderLayer[Norm, Linear, torch.Tensor, GatedMLP | nn.Module]
LayerNames = DecoderLayer[str, str, str, str]  # paths in the layer's module


class QuantizedWeight(NamedTuple):
    """A weight ``[out, in]`` of whole numbers, groups of neighbours along ``in``: ``scale * (number - zero)``."""

    numbers: torch.Tensor  # uint8 [out, in], each below 16
    scales: torch.Tensor  # fp32 [out, groups]
    zeros: torch.Tensor  # fp32 [out, groups]


class PackedWeight(Protocol):
    """A weight in the form in which a backend reads it."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``[n, in]`` of ids int64 ``[n]``: an embedding."""

    def unpack(self) -> torch.Tensor:
        """``[out, in]``; what the numbers of a quantized one stand for."""

    def replace(self, weight: torch.Tensor) -> None:
        """By another one, ``[out, in]``."""


class Decoder(Protocol):
    """All layers, the final norm and the output layer, run as a whole."""

    @property
    def weights(self) -> Mapping[int, PackedWeight]:
        """By the ``id`` of the tensor that was given."""

    def bind(self, caches: Sequence[LayerCache], sources: Sequence[int]) -> None:
        """Each layer's cache, and the layer that writes it: itself, for most."""

    def give_back(self) -> None:
        """Let the system have the memory of the weights. Nothing can be run any more."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Backend.linear`, for a weight (and a bias) that was given: a step that `run` can't serve goes through
        the layers one by one."""

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kinds: Sequence[tuple[Any, torch.Tensor, torch.Tensor]],
        kind_of_layer: Sequence[int],
        angles: Sequence[torch.Tensor],
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Embeddings ``[rows, hidden]``, which are overwritten, at int64 positions ``[rows]`` → logits
        ``[len(wanted), vocab]`` of the rows `wanted`, int64.

        A kind is a plan, and where each row's keys and values go: blocks and rows of blocks, int32 ``[rows]``. angles
        are tables fp32 ``[positions, rotary_dim]``, cosines and then sines, one for each rotary embedding.
        """
