"""Refuse models that can't be served, before anything of them runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionCacheLayerMixin

from ....ipc.errors import MainspringError, UnsupportedModelError
from ..run.recurrent import states_of

# Layers whose only memory, if any, is keys, values and index keys, and those whose state transformers keeps in its
# cache. On a few tokens others (sparse attention of other kinds) may compute the same, so verification can't be relied
# on to find them.
_PLAIN_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "moe", "mlp"}
)
_STATEFUL_LAYERS = frozenset(
    name for name, layer in DYNAMIC_LAYER_TYPE_MAPPING.items() if issubclass(layer, LinearAttentionCacheLayerMixin)
)


def refuse_config(config: PreTrainedConfig, name: str) -> None:
    """Refuse by the config alone."""
    if getattr(config, "quantization_config", None):  # settle_quantization has removed those that are supported
        raise UnsupportedModelError(f"{name} is quantized, which is not supported so far")
    for layer_type in dict.fromkeys(getattr(config.get_text_config(), "layer_types", None) or ()):
        if layer_type not in _PLAIN_LAYERS | _STATEFUL_LAYERS:
            raise UnsupportedModelError(f"{name} has {layer_type} layers, which need more than a KV cache")


def refuse_stateful(model: PreTrainedModel) -> None:
    """Refuse a model whose class says that it keeps state, if none was found in its cache."""
    if getattr(model, "_is_stateful", False) and states_of(model) is None:
        raise UnsupportedModelError(f"{type(model).__name__} keeps recurrent state that is not in its cache")


def settle_temperature(model: PreTrainedModel, longest: int | None) -> None:
    """Llama 4's attention scales queries from position `floor_scale` - 1 on, and takes a row's number in the pass for
    its position. No token that is computed stands there if sequences have `floor_scale` tokens at most."""
    for module in model.modules():
        first: Any = getattr(module, "floor_scale", None)
        if first is not None and getattr(module, "attn_temperature_tuning", False):
            if longest is None or longest > first:
                raise UnsupportedModelError(
                    f"{type(model).__name__} scales its attention by position from {first} on, which is not "
                    "supported: set max_model_len to that"
                )
            module.attn_temperature_tuning = False  # type: ignore[assignment]


def refuse_encoder_class(model_class: type[PreTrainedModel]) -> None:
    """Refuse an encoder by its class: there is no learning of its attention or positions."""
    name = model_class.__name__
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise UnsupportedModelError(f"{name} takes no positions, so several requests can't share a row of it")
    if not model_class._can_set_attn_implementation():
        raise UnsupportedModelError(f"{name} does not call its attention through transformers' attention interface")


@contextmanager
def trial_run(name: str, how: str = "") -> Iterator[None]:
    """Turn any error of a model's own code into `UnsupportedModelError`."""
    try:
        yield
    except (MainspringError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{name} failed in a trial run{how}: {error!r}") from error
