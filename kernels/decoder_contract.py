"""A decoder layer as plain data, and an object that runs all layers of a model in one call.

core/model/learn/stack_match.py recognises such layers, and core/model/run/stack.py runs them one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .contract import Choice, LayerCache, RowScores

NormT = TypeVar("NormT")
LinearT = TypeVar("LinearT")
TensorT = TypeVar("TensorT")
MLPT = TypeVar("MLPT")
AttentionT = TypeVar("AttentionT")
RecurrenceT = TypeVar("RecurrenceT")


class AttentionMixer(NamedTuple, Generic[NormT, LinearT, TensorT]):
    """A mixer that attends. A norm that it does not have is None."""

    qkv: LinearT  # rows of all query heads, all key heads, all value heads
    sizes: Sequence[int]  # rows of each of the three
    key_dim: int
    value_dim: int
    query_norm: NormT | None  # over key_dim elements, or over all heads at once
    key_norm: NormT | None
    rotary: int | None  # index of one of the stack's rotary embeddings; None: this layer has none
    interleaved: bool
    sinks: TensorT | None  # [query heads]
    gates: bool  # the rows of each query head are followed by as many whose sigmoid its output is multiplied by


class RecurrentMixer(NamedTuple, Generic[NormT, LinearT, TensorT]):
    """A mixer that keeps a state: see `contract.Scans.mix`."""

    form: str  # gated_delta or mamba2
    projection: LinearT
    columns: Sequence[Sequence[int]]  # first and length of pieces of the projection's outputs, in the order of `mix`
    groups: int  # heads of query and key; of Mamba 2, groups of B and C
    heads: int
    key_dim: int  # of Mamba 2, the numbers N of a channel's state
    value_dim: int  # of Mamba 2, the channels P of a head
    conv: LinearT  # weight [channels, 1, width]
    silu: bool  # after the convolution
    decay: TensorT  # [heads]: logarithms of what a head's decay is multiplied by, with the sign turned
    decay_bias: TensorT  # [heads]
    skip: TensorT | None  # [heads]: Mamba 2's D
    norm: NormT  # its weight is as long as the scan's output, or as one of the parts that are normalised
    norm_size: int  # numbers of the scan's output that are normalised together
    gate_first: bool  # the gate is multiplied before the norm, not after it
    gate: str  # silu or sigmoid
    scale: float  # of queries
    l2norm: bool  # of queries and keys
    layer: int  # of the state: `StateKey.layer`


class DecoderLayer(NamedTuple, Generic[NormT, AttentionT, RecurrenceT, LinearT, MLPT]):
    """One layer. A norm that the layer does not have is None."""

    input_norm: NormT | None
    mixer: AttentionT | RecurrenceT
    output: LinearT  # of the mixer
    mixer_norm: NormT | None  # of the mixer's output, before it is added
    mlp_norm: NormT | None
    mlp: MLPT | None
    output_norm: NormT | None  # of the MLP's output, before it is added
    multiplier: float  # of both outputs


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


class Experts(NamedTuple):
    """Gated MLPs of one shape. activation: see `Backend.act_and_mul`. Those with biases have the form of gpt-oss:
    weights are ``[experts, in, out]``, and gate and up are interleaved."""

    gate_up: torch.Tensor  # [experts, 2 * inner, hidden], gate first
    down: torch.Tensor  # [experts, hidden, inner]
    activation: str
    biases: tuple[torch.Tensor, torch.Tensor] | None = None  # [experts, 2 * inner], [experts, hidden]

    def layers(self, expert: int) -> list[Linear]:
        """Gate and up, and down."""
        if self.biases is None:
            return [Linear(self.gate_up[expert], None), Linear(self.down[expert], None)]
        return [Linear(w[expert].T, b[expert]) for w, b in zip((self.gate_up, self.down), self.biases, strict=True)]


class Routing(NamedTuple):
    """How a router chooses experts of a row by its logits: those of the highest scores, a softmax of the logits or
    the sigmoid of each."""

    top_k: int
    normalise: bool  # shares are scores by the sum of those chosen; else they are the scores
    widened: bool  # shares are fp32; else they are rounded to the dtype of the rows
    sigmoid: bool = False
    precise: bool = False  # logits are fp32 though the rows are not
    corrected: bool = False  # a number for each expert is added to the scores where these choose, not to the shares
    groups: int = 1  # of neighbouring experts, equally many in each
    kept: int = 1  # groups that may be chosen from: where the two highest scores have the highest sum
    scale: float = 1.0  # of shares


class Mixture(NamedTuple):
    """Experts, of which each row goes through some: see `Backend.route` and `Backend.experts`. A shared expert is one
    more, through which all rows go; its output may have a gate."""

    router: Linear
    routing: Routing
    correction: torch.Tensor | None  # [experts], where `routing` has one
    experts: Experts
    shared: GatedMLP | None  # with the same activation
    shared_gate: torch.Tensor | None  # [1, hidden]: the output is multiplied by the sigmoid of its product with a row


AttentionTensors = AttentionMixer[Norm, Linear, torch.Tensor]
RecurrenceTensors = RecurrentMixer[Norm, Linear, torch.Tensor]
# An MLP of another kind is a module, ``[1, rows, hidden]`` → the same, alone or first in a tuple.
LayerTensors = DecoderLayer[Norm, AttentionTensors, RecurrenceTensors, Linear, GatedMLP | Mixture | nn.Module]
# paths in the layer's module
AttentionNames = AttentionMixer[str, str, str]
RecurrenceNames = RecurrentMixer[str, str, str]
LayerNames = DecoderLayer[str, AttentionNames, RecurrenceNames, str, str]


NF4 = 5
"""In the place of the number of bits to which weights are rounded: 4 bits, with the codebook of QLoRA's normal floats,
and the largest absolute value of each 64 values as their scale."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The codebook of MXFP4: floats of a sign bit, two bits of exponent and one of mantissa."""
INT8_ROWS = 9
"""Likewise: 8 bits, with one scale for a whole row of the weight, and one for a whole row of inputs where these are
rounded, too."""


class QuantizedWeight(NamedTuple):
    """A weight ``[out, in]`` as integers. Neighbours along ``in`` form groups. A value is ``scale * (number - zero)``,
    with the scale and the zero of its group, or ``scale * codebook[number]``. Numbers have 4 bits, or 8 where there are
    neither zeros nor a codebook: the zero is then 128."""

    numbers: torch.Tensor  # uint8 [out, in]
    scales: torch.Tensor  # fp32 [out, groups]
    zeros: torch.Tensor | None  # fp32 [out, groups]
    codebook: torch.Tensor | None = None  # fp32 [16]

    def values(self) -> torch.Tensor:
        """fp32 ``[out, in]``: what the integers stand for."""
        grouped = self.numbers.view(*self.scales.shape, -1)
        if self.codebook is not None:
            found = self.codebook[grouped.int()]
        else:
            found = grouped.float().sub_(128 if self.zeros is None else self.zeros[..., None])
        return found.mul_(self.scales[..., None]).flatten(-2)


class Packed(Protocol):
    """A quantized weight in the form in which a backend reads it."""

    def unpack(self) -> torch.Tensor:
        """``[out, in]``, the values that its integers stand for."""

    def give_back(self) -> None:
        """Return its memory to the system. It has no values any more."""


class PackedWeight(Protocol):
    """A weight in the form in which a backend reads it."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """An embedding: ids int64 ``[n]`` → rows ``[n, in]``."""

    def unpack(self) -> torch.Tensor:
        """``[out, in]``; of a quantized weight, the values that its integers stand for."""

    def lazy(self) -> torch.Tensor:
        """The same, but made when it is used."""

    def replace(self, weight: torch.Tensor) -> None:
        """Take the values of another weight, ``[out, in]``."""


@dataclass(frozen=True)
class Embedding:
    """Rows of a weight, multiplied by each of `scales` in turn, with a rounding after each."""

    weight: PackedWeight | torch.Tensor  # [vocab, hidden]
    scales: Sequence[float] = ()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 ``[n]`` → ``[n, hidden]``."""
        rows = F.embedding(ids, self.weight) if isinstance(self.weight, torch.Tensor) else self.weight.rows(ids)
        for scale in self.scales:
            rows = rows * scale
        return rows


class DecodeSteps(NamedTuple):
    """Steps one after another in which each row computes one token, the one that the step before chose for it."""

    ids: torch.Tensor  # int64 [rows]: the tokens that the next step computes; overwritten by each step
    positions: torch.Tensor  # int64 [rows]: their positions; likewise
    kinds: Sequence[tuple[Any, torch.Tensor]]
    """A plan of the first step, and the blocks of each row's sequence, int32 ``[rows, columns]``."""
    kind_of_layer: Sequence[int]
    angles: Sequence[torch.Tensor]  # as in `Decoder.run`, up to the last step's positions
    embedding: Embedding
    scale: float  # of the logits
    choice: Choice
    """Of the first step, without masks. Its positions advance with each step, and each token chosen is added to the
    occurrences that its penalties read. `Decoder.logits` ignores it."""
    stops: np.ndarray  # int32 [n, 2]: a row, and a token that ends the row's request
    interrupt: np.ndarray  # int32 [1]; another thread may set it
    state_slots: torch.Tensor | None  # int32 [rows]: of each row's sequence, in a model with recurrent mixers
    scored: Sequence[tuple[np.ndarray, int]] = ()  # rows, int64 [n], and the `count` of their `RowScores`


class Decoder(Protocol):
    """All layers, the final norm and the output layer."""

    @property
    def runs_steps(self) -> bool:
        """Whether `run` and `repeat` may be called. If not, each step is computed layer by layer with `linear`."""

    @property
    def weights(self) -> Mapping[int, PackedWeight]:
        """By the ``id`` of the tensor that `Backend.decoder` was given."""

    def bind(self, caches: Sequence[LayerCache], sources: Sequence[int]) -> None:
        """Set the cache of each layer with attention, and which of these layers writes it: the layer itself, in most
        models."""

    def bind_states(self, states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Set the states of each recurrent mixer, as `contract.Scans.mix` takes them: of its convolution and of its
        scan."""

    def move(self, ids: Mapping[int, int]) -> None:
        """Other tensors have taken the places of some that `Backend.decoder` was given: their ``id`` by that of the
        old."""

    def give_back(self) -> None:
        """Return the memory of the weights to the system. The decoder can't run any more."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Backend.linear`. weight and bias are tensors that `Backend.decoder` was given. A step that `run` does
        not serve is computed layer by layer with it."""

    def experts(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, experts: Experts) -> torch.Tensor:
        """See `Backend.experts`. Their weights are tensors that `Backend.decoder` was given."""

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
        """Embeddings ``[rows, hidden]`` at int64 positions ``[rows]`` → logits ``[len(wanted), vocab]`` of the rows
        `wanted`, int64. Overwrites the embeddings.

        A kind is a plan, and the block and the row of that block for each row's keys and values, both int32 ``[rows]``.
        angles has a table fp32 ``[positions, rotary_dim]`` for each rotary embedding: cosines, then sines. sequences,
        for a model with recurrent mixers: starts, slots and fresh of `contract.Scans`.
        """

    def repeat(self, steps: DecodeSteps, most: int) -> tuple[torch.Tensor, list[RowScores], bool]:
        """Make at most `most` steps, at least one. No step follows one that chose a token of `DecodeSteps.stops`, nor
        is another one begun while `DecodeSteps.interrupt` is not 0. A token has the bits of `run`'s logits and of
        `Backend.draw`'s choice.

        Returns:
            the tokens chosen, int64 ``[steps, rows]``; of each group in `DecodeSteps.scored` the scores of its rows in
            the first step, then in the second, and so on; and whether one of the tokens is among the stops.
        """

    def logits(self, steps: DecodeSteps) -> torch.Tensor:
        """Make the next step up to its logits, ``[rows, vocab]``. The tokens chosen of them must be written to
        `DecodeSteps.ids`."""


class LayeredDecoder:
    """A decoder around another one's products. It runs layer by layer; all but the products is the other's own."""

    runs_steps = False

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def run(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    repeat = logits = run
