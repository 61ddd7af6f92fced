"""The decoder layers of a model as plain data, and the loop that runs them.

Where `stack_match` recognises all layers of a model, the loop below over the backend's kernels replaces the model's own
forward from the embeddings to the final norm. The model's code still computes embeddings, rotary frequencies (once a
step), MLPs that are no gated ones (experts), and the output layer. Parameters are held, not copied, so a `ParameterMap`
stays right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from ....kernels.contract import Backend
from ....kernels.decoder_contract import DecoderLayer, GatedMLP, LayerNames, LayerTensors, Linear, Norm
from ..learn.fuse_observe import STAND_IN, own_values
from .attention import IMPLEMENTATION
from .fused import FusedMLP, FusedRMSNorm

IGNORED = {"use_cache": False, "output_router_logits": False, "return_dict": True}
"""Arguments of a decoder's forward, each with the value at which it does not change the hidden states."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""query, key and value ``[rows, heads, dim]``, sinks ``[heads]`` or None → ``[rows, query heads, value dim]``."""


class LayerInputs(NamedTuple):
    """What the layers of one step share."""

    backend: Backend
    linear: Callable[..., torch.Tensor]  # as `Backend.linear`
    angles: Sequence[torch.Tensor]  # of each rotary embedding: see `cos_sin`
    attend: Attend


def run_layers(step: LayerInputs, layers: Sequence[LayerTensors], norm: Norm, hidden: torch.Tensor) -> torch.Tensor:
    """All layers and the final norm, on embeddings ``[rows, hidden]``, which may be overwritten."""
    added = None  # is added to `hidden` by the kernel of the next norm
    for layer in layers:
        hidden, added = run_layer(step, layer, hidden, added)
    return _add_norm(step.backend, hidden, added, norm)[0]


def run_layer(
    step: LayerInputs, layer: LayerTensors, hidden: torch.Tensor, added: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer on ``hidden + added`` → two tensors whose sum is its output."""
    backend, linear, rows = step.backend, step.linear, len(hidden)
    x, hidden = _add_norm(backend, hidden, added, layer.input_norm)
    query, key, value = linear(x, *layer.qkv).split(layer.sizes, dim=-1)
    query = _heads(backend, query, layer.query_norm, layer.key_dim)
    key = _heads(backend, key, layer.key_norm, layer.key_dim)
    if layer.rotary is not None:
        backend.rotate(query, key, step.angles[layer.rotary], layer.interleaved)
    attended = step.attend(query, key, value.view(rows, -1, layer.value_dim), layer.sinks)
    added = linear(attended.reshape(rows, -1), *layer.output)
    added = _scaled(backend, added, layer.attention_norm, layer.multiplier)

    x, hidden = _add_norm(backend, hidden, added, layer.mlp_norm)
    if isinstance(layer.mlp, GatedMLP):
        gate_up, down, activation = layer.mlp
        added = linear(backend.act_and_mul(linear(x, *gate_up), activation), *down)
    else:
        out = layer.mlp(x.unsqueeze(0))
        added = (out[0] if isinstance(out, tuple) else out).reshape(rows, -1)
    return hidden, _scaled(backend, added, layer.output_norm, layer.multiplier)


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
    attention: str  # of a layer
    norm: str
    embed_scale: float
    rotaries: Sequence[RotaryOptions]
    names: Sequence[LayerNames]  # of each layer

    @classmethod
    def of(cls, values: Sequence[Any]) -> StackOptions:
        """Back from what JSON makes of it."""
        *_, rotaries, names = values
        return cls(*values)._replace(
            rotaries=[RotaryOptions(*each) for each in rotaries], names=[DecoderLayer(*each) for each in names]
        )


class StackedDecoder:
    """The stack in the place of the forward of a model's decoder."""

    def __init__(self, model: PreTrainedModel, options: StackOptions, backend: Backend) -> None:
        decoder = cast("PreTrainedModel", model.get_submodule(options.decoder))
        layers: Any = decoder.get_submodule(options.layers)
        self.layers = [build_layer(layer, names) for layer, names in zip(layers, options.names, strict=True)]
        self.norm = _norm(decoder, options.norm)
        self.decoder = decoder
        self.embedding: Any = decoder.get_input_embeddings()
        self.embed_scale = options.embed_scale
        self.rotaries = options.rotaries
        self._backend = backend
        self._own_forward = decoder.forward
        self._attention: Any = layers[0].get_submodule(options.attention)

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
        """What transformers calls, ids and positions ``[1, tokens]``. With an attention that is not of this package it
        is the model's own, so that the two can be compared.

        Raises:
            TypeError: the model passes an argument that could change the result, and that the stack does not know.
        """
        implementation = self.decoder.config._attn_implementation
        if implementation not in (IMPLEMENTATION, STAND_IN):
            inputs = {"input_ids": input_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
            return self._own_forward(**inputs, **kwargs)
        if unknown := [name for name, value in kwargs.items() if not _changes_nothing(name, value)]:
            raise TypeError(f"{type(self.decoder).__name__} runs as a stack of layers, which takes no {unknown[0]}")
        assert position_ids is not None
        # what is given from outside may be needed there, and the kernels overwrite
        hidden = self.scaled(self.embedding(input_ids) if inputs_embeds is None else inputs_embeds.clone())
        attend = self._attention.mainspring_calls.run if implementation == IMPLEMENTATION else own_values
        angles = cos_sin(self.decoder, self.rotaries, position_ids)
        step = LayerInputs(self._backend, self._backend.linear, angles, attend)
        return MoeModelOutputWithPast(last_hidden_state=run_layers(step, self.layers, self.norm, hidden[0])[None])


def _changes_nothing(name: str, value: Any) -> bool:
    """Whether the stack may ignore this argument of a decoder's forward."""
    if name == "attention_mask" and isinstance(value, Mapping):  # one mask for each kind of layer
        return all(mask is None for mask in value.values())
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
    held["qkv"], held["output"] = _linear(layer, names.qkv), _linear(layer, names.output)
    held["sinks"] = None if names.sinks is None else layer.get_parameter(names.sinks)
    mlp = held["mlp"] = layer.get_submodule(names.mlp)
    if isinstance(mlp, FusedMLP):
        held["mlp"] = GatedMLP(_linear(mlp, "gate_up"), _linear(mlp, "down"), mlp.activation)
    return DecoderLayer(**held)


def _norm(parent: nn.Module, path: str) -> Norm:
    norm = cast("FusedRMSNorm", parent.get_submodule(path))
    return Norm(norm.weight, norm.eps, norm.offset)


def _linear(parent: nn.Module, path: str) -> Linear:
    linear: Any = parent.get_submodule(path)
    return Linear(linear.weight, linear.bias)
