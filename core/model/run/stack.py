"""The decoder layers of a model as plain data, and the loop that runs them.

Where `stack_match` recognises all layers of a model, the loop below over the backend's kernels replaces the model's own
forward from the embeddings to the final norm. The model's code still computes embeddings, rotary frequencies (once a
step), MLPs of unknown forms, and the output layer. Parameters are held, not copied, so a `ParameterMap`
stays right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from ....kernels.contract import Backend
from ....kernels.decoder_contract import (
    AttentionMixer,
    AttentionNames,
    AttentionTensors,
    DecoderLayer,
    GatedMLP,
    LayerNames,
    LayerTensors,
    Linear,
    Mixture,
    Norm,
    RecurrenceNames,
    RecurrenceTensors,
    RecurrentMixer,
)
from ...parallel.stage_model import ForeignLayer, stages_of
from ...parallel.stages import Stages
from ..learn.fuse_observe import STAND_IN, own_values
from .attention import IMPLEMENTATION
from .fused import FusedMLP, FusedRMSNorm, gate_rows
from .recurrent import StepStates

IGNORED = {"use_cache": False, "output_router_logits": False, "return_dict": True}
"""Arguments of a decoder's forward, each with the value at which it does not change the hidden states."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""query, key and value ``[rows, heads, dim]``, sinks ``[heads]`` or None → ``[rows, query heads, value dim]``."""


class LayerInputs(NamedTuple):
    """What the layers of one step share."""

    backend: Backend
    linear: Callable[..., torch.Tensor]  # as `Backend.linear`
    experts: Callable[..., torch.Tensor]  # as `Backend.experts`
    angles: Sequence[torch.Tensor]  # of each rotary embedding: see `cos_sin`
    attend: Attend
    states: StepStates | None  # of the step's sequences, where a mixer is recurrent


def run_layers(
    step: LayerInputs,
    layers: Sequence[LayerTensors],
    norm: Norm,
    hidden: torch.Tensor,
    stages: Stages | None = None,
) -> torch.Tensor:
    """All layers and the final norm, on embeddings ``[rows, hidden]``, which may be overwritten. stages: of which these
    are the layers of one."""
    added = None  # is added to `hidden` by the kernel of the next norm
    if stages is not None:
        hidden = stages.enter(hidden)
    for layer in layers:
        hidden, added = run_layer(step, layer, hidden, added)
    if stages is not None and not stages.is_last:
        hidden, added = hidden if added is None else hidden + added, None
        stages.leave(hidden)
    return _add_norm(step.backend, hidden, added, norm)[0]


def run_layer(
    step: LayerInputs, layer: LayerTensors, hidden: torch.Tensor, added: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer on ``hidden + added`` → two tensors whose sum is its output."""
    backend, linear, rows = step.backend, step.linear, len(hidden)
    x, hidden = _add_norm(backend, hidden, added, layer.input_norm)
    mixed = _attended(step, layer.mixer, x) if isinstance(layer.mixer, AttentionMixer) else _mixed(step, layer.mixer, x)
    added = _scaled(backend, linear(mixed, *layer.output), layer.mixer_norm, layer.multiplier)
    if layer.mlp is None:
        return hidden, added

    x, hidden = _add_norm(backend, hidden, added, layer.mlp_norm)
    if isinstance(layer.mlp, GatedMLP):
        added = _gated_mlp(step, layer.mlp, x)
    elif isinstance(layer.mlp, Mixture):
        added = _mixture(step, layer.mlp, x)
    else:
        out = layer.mlp(x.unsqueeze(0))
        added = (out[0] if isinstance(out, tuple) else out).reshape(rows, -1)
    return hidden, _scaled(backend, added, layer.output_norm, layer.multiplier)


def _gated_mlp(step: LayerInputs, mlp: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    gate_up, down, activation = mlp
    return step.linear(step.backend.act_and_mul(step.linear(x, *gate_up), activation), *down)


def _mixture(step: LayerInputs, mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
    m = mixture
    precise = m.routing.precise
    logits = step.backend.linear(x.float(), m.router.weight.float()) if precise else step.linear(x, *m.router)
    chosen, shares = step.backend.route(logits, m.routing, m.correction)
    out = step.experts(x, chosen, shares if m.routing.widened else shares.to(x.dtype), m.experts)
    if m.shared is None:
        return out
    more = _gated_mlp(step, m.shared, x)
    if m.shared_gate is not None:
        more = gate_rows(more, step.linear(x, m.shared_gate))
    return out + more


def _attended(step: LayerInputs, mixer: AttentionTensors, x: torch.Tensor) -> torch.Tensor:
    """Rows ``[rows, hidden]`` → what attention gives for them, ``[rows, query heads * value_dim]``."""
    backend, gate = step.backend, None
    query, key, value = step.linear(x, *mixer.qkv).split(mixer.sizes, dim=-1)
    if mixer.gates:
        query, gate = (part.flatten(1) for part in query.unflatten(1, (-1, 2, mixer.key_dim)).unbind(2))
    dim, query_norm, key_norm = mixer.key_dim, mixer.query_norm, mixer.key_norm
    angles = None if mixer.rotary is None else step.angles[mixer.rotary]
    if angles is not None and query_norm and key_norm and len(query_norm.weight) == len(key_norm.weight) == dim:
        query, key = (part.view(len(x), -1, dim) for part in (query, key))
        query, key = backend.norm_and_rotate(query, key, (query_norm, key_norm), angles, mixer.interleaved)
    else:
        query, key = _heads(backend, query, query_norm, dim), _heads(backend, key, key_norm, dim)
        if angles is not None:
            backend.rotate(query, key, angles, mixer.interleaved)
    out = step.attend(query, key, value.view(len(x), -1, mixer.value_dim), mixer.sinks).reshape(len(x), -1)
    return out if gate is None else (out.float() / (1 + torch.exp(-gate.float()))).to(x.dtype)


def _mixed(step: LayerInputs, mixer: RecurrenceTensors, x: torch.Tensor) -> torch.Tensor:
    """Rows ``[rows, hidden]`` → what a recurrent mixer gives for them, ``[rows, heads * value_dim]``."""
    states = step.states
    assert states is not None, "a step of recurrent mixers has sequences"
    return states.scans.mix(mixer, step.linear(x, *mixer.projection), *states.of_layer(mixer.layer), *states.where())


def _add_norm(
    backend: Backend, hidden: torch.Tensor, added: torch.Tensor | None, norm: Norm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the sum, and the sum."""
    if norm is None:
        total = hidden if added is None else hidden + added
        return total, total
    if added is None:
        return backend.rms_norm(hidden, *norm), hidden
    return backend.add_rms_norm(added, hidden, *norm)


def _heads(backend: Backend, x: torch.Tensor, norm: Norm | None, dim: int) -> torch.Tensor:
    """``[rows, n]`` → ``[rows, heads, dim]``, normalised all heads at once or each."""
    if norm is not None and len(norm.weight) != dim:
        x, norm = backend.rms_norm(x, *norm), None
    heads = x.view(len(x), -1, dim)
    return heads if norm is None else backend.rms_norm(heads, *norm)


def _scaled(backend: Backend, added: torch.Tensor, norm: Norm | None, multiplier: float) -> torch.Tensor:
    if norm is not None:
        added = backend.rms_norm(added, *norm)
    return added if multiplier == 1.0 else added * multiplier


class RotaryOptions(NamedTuple):
    """A module of the model that gives cosines and sines, and what else than positions it is called with."""

    module: str
    arguments: Mapping[str, str]
    form: str  # each angle's cosine comes once ("single"), or twice, as "halves" of a row or side by side ("pairs")


class StackOptions(NamedTuple):
    """All that was recognised, in plain values."""

    decoder: str  # path of the module that holds embeddings, layers and final norm; names are relative to it
    layers: str
    attention: str | None  # of the first layer with attention, relative to `layers`
    norm: str
    embed_scale: float
    rotaries: Sequence[RotaryOptions]
    names: Sequence[LayerNames]  # of each layer

    @classmethod
    def of(cls, values: Sequence[Any]) -> StackOptions:
        """Back from what JSON makes of it."""
        *_, rotaries, names = values
        return cls(*values)._replace(
            rotaries=[RotaryOptions(*each) for each in rotaries], names=[_layer_names(*each) for each in names]
        )


def _layer_names(input_norm: Any, mixer: Sequence[Any], *others: Any) -> LayerNames:
    """A layer whose mixer is a list of fields. The two kinds of mixers have different numbers of fields."""
    kind: Any = AttentionMixer if len(mixer) == len(AttentionMixer._fields) else RecurrentMixer
    return DecoderLayer(input_norm, kind(*mixer), *others)


@dataclass
class _Output(MoeModelOutputWithPast):
    """What models read of their decoder's output."""

    cache_params: None = None


class StackedDecoder:
    """The stack in the place of the forward of a model's decoder."""

    def __init__(self, model: PreTrainedModel, options: StackOptions, backend: Backend) -> None:
        decoder = cast("PreTrainedModel", model.get_submodule(options.decoder))
        layers: Any = decoder.get_submodule(options.layers)
        own = [layer for layer in layers if not isinstance(layer, ForeignLayer)]
        self.layers = [build_layer(layer, names) for layer, names in zip(own, options.names, strict=True)]
        self.stages = stages_of(model)
        self.norm = _norm(decoder, options.norm)
        self.decoder = decoder
        self.embedding: Any = decoder.get_input_embeddings()
        self.embed_scale = options.embed_scale
        self.rotaries = options.rotaries
        self._backend = backend
        self._own_forward = decoder.forward
        self._attention: Any = None if options.attention is None else layers.get_submodule(options.attention)
        self._is_recurrent = any(isinstance(layer.mixer, RecurrentMixer) for layer in self.layers)

    @property
    def has_gated_mlps(self) -> bool:
        """Whether no layer has an MLP of another kind, which the model's own code computes."""
        return all(layer.mlp is None or isinstance(layer.mlp, GatedMLP) for layer in self.layers)

    def install(self) -> None:
        """From now on the decoder's forward is this one."""
        self.decoder.forward = self.forward

    def remove(self) -> None:
        self.decoder.forward = self._own_forward

    def scaled(self, embeddings: torch.Tensor) -> torch.Tensor:
        """What the first layer is given."""
        return embeddings if self.embed_scale == 1.0 else embeddings * self.embed_scale

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """What transformers calls, ids and positions ``[1, tokens]``. With an attention or states that are not of this
        package it is the model's own, so that the two can be compared.

        Raises:
            TypeError: the model passes an argument that could change the result, and that the stack does not know.
        """
        implementation = self.decoder.config._attn_implementation
        states = next((value for value in kwargs.values() if isinstance(value, StepStates)), None)
        attends_here = self._attention is None or implementation in (IMPLEMENTATION, STAND_IN)
        if not attends_here or (self._is_recurrent and states is None):
            inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, **kwargs}
            return self._own_forward(**inputs, **({} if position_ids is None else {"position_ids": position_ids}))
        if unknown := [name for name, value in kwargs.items() if not _changes_nothing(name, value)]:
            raise TypeError(f"{type(self.decoder).__name__} runs as a stack of layers, which takes no {unknown[0]}")
        # what is given from outside may be needed there, and the kernels overwrite
        hidden = self.scaled(self.embedding(input_ids) if inputs_embeds is None else inputs_embeds.clone())
        attend = own_values
        if self._attention is not None and implementation == IMPLEMENTATION:
            attend = self._attention.mainspring_calls.run
        angles = []
        if self.rotaries:
            assert position_ids is not None, "the model gives positions to its decoder"
            angles = cos_sin(self.decoder, self.rotaries, position_ids)
        step = LayerInputs(self._backend, self._backend.linear, self._backend.experts, angles, attend, states)
        return _Output(last_hidden_state=run_layers(step, self.layers, self.norm, hidden[0], self.stages)[None])


def _changes_nothing(name: str, value: Any) -> bool:
    """Whether the stack may ignore this argument of a decoder's forward."""
    if name == "attention_mask" and isinstance(value, Mapping):  # one mask for each kind of layer
        return all(mask is None for mask in value.values())
    if isinstance(value, StepStates):
        return True
    return value is None or (name in IGNORED and value is IGNORED[name])


def position_ids(positions: torch.Tensor) -> torch.Tensor:
    """Positions ``[axes, tokens]`` as transformers takes them: ``[1, tokens]``, or with several axes ``[axes, 1,
    tokens]``."""
    return positions if len(positions) == 1 else positions.unsqueeze(1)


def cos_sin(decoder: nn.Module, rotaries: Sequence[RotaryOptions], positions: torch.Tensor) -> list[torch.Tensor]:
    """Cosines and sines at positions ``[1, rows]`` of each rotary embedding: fp32 ``[rows, rotary_dim]``."""
    like = torch.empty(1, device=positions.device)  # tells the dtype
    return [
        torch.cat([_each_once(x[0], form) for x in decoder.get_submodule(module)(like, positions, **arguments)], dim=-1)
        for module, arguments, form in rotaries
    ]


def _each_once(part: torch.Tensor, form: str) -> torch.Tensor:
    """Cosines or sines ``[rows, n]`` with each angle's once, in fp32."""
    return {"single": part, "halves": part[:, : part.shape[1] // 2], "pairs": part[:, ::2]}[form].float()


def build_layer(layer: nn.Module, names: LayerNames) -> LayerTensors:
    """Collect a layer's tensors. Raises AttributeError for a name that it does not have."""
    held: dict[str, Any] = names._asdict()
    for field, path in held.items():
        if field.endswith("_norm") and path is not None:
            held[field] = _norm(layer, path)
    held["mixer"] = (
        _attention(layer, names.mixer) if isinstance(names.mixer, AttentionMixer) else _recurrence(layer, names.mixer)
    )
    held["output"] = _linear(layer, names.output)
    mlp = held["mlp"] = None if names.mlp is None else layer.get_submodule(names.mlp)
    if isinstance(mlp, FusedMLP):
        held["mlp"] = mlp.tensors()
    return DecoderLayer(**held)


def _attention(layer: nn.Module, names: AttentionNames) -> AttentionTensors:
    return AttentionMixer(
        **{
            **names._asdict(),
            "qkv": _linear(layer, names.qkv),
            "query_norm": None if names.query_norm is None else _norm(layer, names.query_norm),
            "key_norm": None if names.key_norm is None else _norm(layer, names.key_norm),
            "sinks": None if names.sinks is None else layer.get_parameter(names.sinks),
        }
    )


def _recurrence(layer: nn.Module, names: RecurrenceNames) -> RecurrenceTensors:
    return RecurrentMixer(
        **{
            **names._asdict(),
            "projection": _linear(layer, names.projection),
            "conv": _linear(layer, names.conv),
            "decay": layer.get_parameter(names.decay),
            "decay_bias": layer.get_parameter(names.decay_bias),
            "skip": None if names.skip is None else layer.get_parameter(names.skip),
            "norm": _gated_norm(layer.get_submodule(names.norm)),
        }
    )


def _norm(parent: nn.Module, path: str) -> Norm:
    norm = cast("FusedRMSNorm", parent.get_submodule(path))
    return Norm(norm.weight, norm.eps, norm.offset)


def _gated_norm(module: nn.Module) -> Norm:
    """The norm of a recurrent mixer, which is the model's own module: one vector and one small number."""
    (weight,) = module.parameters()
    (eps,) = {value for value in vars(module).values() if isinstance(value, float)}
    return Norm(weight, eps, 0.0)


def _linear(parent: nn.Module, path: str) -> Linear:
    linear: Any = parent.get_submodule(path)
    return Linear(linear.weight, linear.bias)
