"""A model as one call of its backend: embeddings in, logits out, and no module's forward in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ....kernels.contract import Backend, Choice
from ....kernels.decoder_contract import Decoder, DecodeSteps, Embedding, Linear, RecurrentMixer
from .attention import StepAttention
from .recurrent import StepStates
from .stack import Attend, LayerInputs, StackedDecoder, cos_sin, position_ids, run_layers

FIRST_POSITIONS = 2048  # positions in a table of angles at first; the table doubles when a step has a later one


class Head(NamedTuple):
    """Logits are ``cap * tanh(scale * product / cap)``."""

    linear: Linear
    scale: float = 1.0
    cap: float | None = None

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            logits *= self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass
class WholeModel:
    """Takes the place of the forward of a `PagedModel`. One call of `backend` runs a step that it takes; another step
    goes through the layers one by one."""

    stack: StackedDecoder
    embedding: Callable[[torch.Tensor], torch.Tensor]  # an `Embedding`, if it is a plain lookup
    head: Head
    decoder: Decoder
    backend: Backend
    states: StepStates | None  # of recurrent mixers
    _angles: list[torch.Tensor] = field(default_factory=list)  # of each rotary embedding, at the first positions

    def forward(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        attention: Sequence[StepAttention],
        attend: Attend,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """As `PagedModel.forward`, from embeddings, which may be overwritten. `attend`: the step's attention calls, one
        after another."""
        kinds = {id(step): step for step in attention}
        others = any(step.backend is not self.backend for step in kinds.values())
        stages = self.stack.stages
        others = others or (stages is not None and not stages.is_last)
        if others or not self.decoder.runs_steps:
            return self._layer_by_layer(embeddings, positions, attend, wanted)
        places, angles = positions[0].contiguous(), None
        if len(positions) > 1 and not (positions == positions[0]).all():  # a table with a row for each token
            places, angles = torch.arange(len(places)), self._angles_at(positions)
        index = {key: i for i, key in enumerate(kinds)}
        hidden = self.stack.scaled(embeddings)
        logits = self.decoder.run(
            hidden if stages is None else stages.enter(hidden),
            places,
            [(step.plan, step.blocks, step.rows) for step in kinds.values()],
            [index[id(step)] for step in attention],
            self._angles_to(int(positions.max())) if angles is None else angles,
            wanted,
            () if self.states is None else self.states.where(),
        )
        return self.head.finish(logits)

    @property
    def repeats(self) -> bool:
        """Whether `repeat` may be called."""
        alone = self.stack.stages is None and isinstance(self.embedding, Embedding)
        return self.decoder.runs_steps and self.head.cap is None and alone

    def repeat(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        kinds: Sequence[tuple[Any, torch.Tensor]],
        kind_of_layer: Sequence[int],
        choice: Choice,
        stops: np.ndarray,
        interrupt: np.ndarray,
        state_slots: torch.Tensor | None,
        most: int,
    ) -> DecodeSteps:
        """Steps for `Decoder.repeat` and `Decoder.logits`, at most `most`."""
        assert isinstance(self.embedding, Embedding)
        embedding = self.embedding
        if self.stack.embed_scale != 1.0:
            embedding = Embedding(embedding.weight, (*embedding.scales, self.stack.embed_scale))
        angles = self._angles_to(int(positions.max()) + most)
        return DecodeSteps(
            ids,
            positions,
            kinds,
            kind_of_layer,
            angles,
            embedding,
            self.head.scale,
            choice,
            stops,
            interrupt,
            state_slots,
        )

    def bind_states(self) -> None:
        """The states have memory of their own from now on."""
        states = self.states
        if states is not None:
            mixers = [layer.mixer for layer in self.stack.layers if isinstance(layer.mixer, RecurrentMixer)]
            self.decoder.bind_states([states.of_layer(mixer.layer) for mixer in mixers])

    def _layer_by_layer(
        self, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor
    ) -> torch.Tensor:
        stack = self.stack
        kernels = self.backend, self.decoder.linear, self.decoder.experts
        step = LayerInputs(*kernels, self._angles_at(positions), attend, self.states)
        hidden = run_layers(step, stack.layers, stack.norm, stack.scaled(embeddings), stack.stages)
        return self.head.finish(self.decoder.linear(hidden[wanted], *self.head.linear))

    def _angles_at(self, positions: torch.Tensor) -> list[torch.Tensor]:
        return cos_sin(self.stack.decoder, self.stack.rotaries, position_ids(positions))

    def _angles_to(self, position: int) -> list[torch.Tensor]:
        if self.stack.rotaries and (not self._angles or position >= len(self._angles[0])):
            length = max(FIRST_POSITIONS, 1 << position.bit_length())
            self._angles = cos_sin(self.stack.decoder, self.stack.rotaries, torch.arange(length)[None])
        return self._angles
