"""What stands in the way of serving a model, found before anything is run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ....ipc.errors import MainspringError, UnsupportedModelError

# Layers whose only memory is keys and values. Others (linear attention, convolutions, sparse attention with an index of
# its own) may look the same on a few tokens, so they are not left to verification.
_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def refuse_config(config: PreTrainedConfig, name: str) -> None:
    """Refuse what the config alone tells."""
    if getattr(config, "quantization_config", None):  # but for what settle_quantization has taken
        raise UnsupportedModelError(f"{name} is quantized, which is not supported so far")
    for layer_type in dict.fromkeys(getattr(config.get_text_config(), "layer_types", None) or ()):
        if layer_type not in _PLAIN_LAYERS:
            raise UnsupportedModelError(f"{name} has {layer_type} layers, which need more than a KV cache")


def refuse_class(model_class: type[PreTrainedModel]) -> None:
    """Refuse what the model's class tells, before any weight is read."""
    name = model_class.__name__
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} keeps recurrent state, which is not in a KV cache")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise UnsupportedModelError(f"{name} takes no positions, so several requests can't share a row of it")
    if not model_class._can_set_attn_implementation():
        raise UnsupportedModelError(f"{name} does not call its attention through transformers' attention interface")


@contextmanager
def trial_run(name: str, how: str = "") -> Iterator[None]:
    """Around what runs a model's own code, which may be anybody's."""
    try:
        yield
    except (MainspringError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{name} failed in a trial run{how}: {error!r}") from error
