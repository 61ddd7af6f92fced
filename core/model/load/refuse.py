"""Refuse models that can't be served, before anything of them runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ....ipc.errors import MainspringError, UnsupportedModelError

# Layers whose only memory is keys and values. On a few tokens others (linear attention, convolutions, sparse attention
# with an index of its own) may compute the same, so verification can't be relied on to find them.
_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def refuse_config(config: PreTrainedConfig, name: str) -> None:
    """Refuse by the config alone."""
    if getattr(config, "quantization_config", None):  # settle_quantization has removed those that are supported
        raise UnsupportedModelError(f"{name} is quantized, which is not supported so far")
    for layer_type in dict.fromkeys(getattr(config.get_text_config(), "layer_types", None) or ()):
        if layer_type not in _PLAIN_LAYERS:
            raise UnsupportedModelError(f"{name} has {layer_type} layers, which need more than a KV cache")


def refuse_class(model_class: type[PreTrainedModel]) -> None:
    """Refuse by the model's class, before any weight is read."""
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModelError(f"{model_class.__name__} keeps recurrent state, which is not in a KV cache")


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
