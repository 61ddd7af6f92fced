"""Learn a model's recurrent state from its own calls.

One forward pass over a few tokens, with a cache of transformers that notes which module asks for a state. The innermost
module that runs then is stateful, and what the cache holds afterwards has the shape and dtype of a state. Nothing about
a class needs to be known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..run.positions import positions_given, receivers
from ..run.ragged_scans import all_at_once, is_ragged, ragged_specs
from ..run.recurrent import StateKey, StateSpec, StepStates, cache_argument, one_token_each

TOKENS = 8


class OwnCache(DynamicCache):
    """A cache of transformers' own, which also keeps the states of MiniMax and answers where no layer counts tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.linear: dict[int, torch.Tensor] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.layers and all(self.is_linear) else super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.layers and all(self.is_linear):
            return query_length, 0
        return super().get_mask_sizes(query_length, layer_idx)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.linear.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        self.linear[layer_idx] = state


class _Noting(OwnCache):
    """Notes the innermost running module at each access to a state."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.running: list[nn.Module] = []
        self.touched: dict[nn.Module, set[int]] = {}

    def enter(self, module: nn.Module, *_: Any) -> None:
        self.running.append(module)

    def leave(self, *_: Any) -> None:
        self.running.pop()

    def note(self, layer_idx: int) -> None:
        self.touched.setdefault(self.running[-1], set()).add(layer_idx)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        self.note(layer_idx)
        return super().get_linear_cache(layer_idx)


def _noting(name: str) -> Callable[..., Any]:
    signature = inspect.signature(getattr(Cache, name))

    def method(self: _Noting, *args: Any, **kwargs: Any) -> Any:
        self.note(signature.bind(self, *args, **kwargs).arguments["layer_idx"])
        return getattr(DynamicCache, name)(self, *args, **kwargs)

    return method


for _name in ("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"):
    setattr(_Noting, _name, _noting(_name))


def may_have_state(model: PreTrainedModel) -> bool:
    """Whether transformers would keep recurrent state for any layer of `model`."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    layers = DynamicCache(config=model.config).layers
    return "linear_attention" in types or any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def noted_pass(model: PreTrainedModel, cache: Any) -> None:
    """A forward pass over a few tokens. The methods `enter` and `leave` of `cache` are hooks of each module."""
    ids = torch.arange(2, 2 + TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
    positions = torch.arange(TOKENS, device=model.device)[None]
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(cache.enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(cache.leave).remove)
        inputs = hooks.enter_context(positions_given(receivers(model), positions))
        model(input_ids=ids, use_cache=False, **inputs, **{cache_argument(model): cache})


@torch.inference_mode()
def learn_states(model: PreTrainedModel) -> StepStates | None:
    """Find the stateful modules of `model` and let them compute the sequences of a step; None if there are none."""
    if not may_have_state(model):
        return None
    cache = _Noting(model.config)
    noted_pass(model, cache)
    found = {StateKey(layer, "recurrent"): state for layer, state in cache.linear.items()}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            found |= {StateKey(index, "conv", i): x for i, x in layer.conv_states.items() if x is not None}
            found |= {StateKey(index, "recurrent", i): x for i, x in layer.recurrent_states.items() if x is not None}
    specs = {
        key: StateSpec(tuple(state.shape[1:]), state.dtype, state.dtype == model.dtype) for key, state in found.items()
    }
    if not specs:
        return None
    states = StepStates(model.config, specs)
    for module, layers in cache.touched.items():
        states.modules.append(module)
        own = {key: spec for key, spec in specs.items() if key.layer in layers}
        if is_ragged(module, own):
            states.specs |= ragged_specs(module, own)
            module.forward = all_at_once(module)
        else:
            states.looped.append(module)
            module.forward = one_token_each(module.forward, layers)
    model.mainspring_states = states  # type: ignore[assignment]
    return states
