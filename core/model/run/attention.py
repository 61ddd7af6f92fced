"""Paged attention as an attention implementation of transformers, named ``mainspring``.

The library's models look up their attention by name and call it with query, key and value of one row of tokens. Here
that row holds the tokens of all requests of a step. The layer's number, its cache and its plan are no arguments of that
call: the function finds them in the `AttentionCalls` that loading set on the attention module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....kernels.contract import Backend, LayerCache, PagedBatch, SequenceOffsets
from ..media.features import feature_methods
from .cross_attention import CrossAttention, aside, cross_attention_of
from .indexed import indexers_of
from .latents import Expansion, LatentAttention
from .own_attention import Attend, OwnAttention, take_over
from .recurrent import states_of

IMPLEMENTATION = "mainspring"
OWN_IMPLEMENTATION = "mainspring_own"  # of models that compute their attention themselves (own_attention.py)
INDEXED_IMPLEMENTATION = "mainspring_indexed"  # of models whose code expects a mask, to give it to an indexer


class StepAttention(NamedTuple):
    """A step's plan and places for one attention call. Calls of one KV group and one spec share the object."""

    plan: Any  # from Backend.plan
    blocks: torch.Tensor  # [tokens] int32: the block for each token's keys and values; block 0 for padding rows
    rows: torch.Tensor  # [tokens] int32: the row in that block
    backend: Backend  # made the plan
    batch: PagedBatch  # which it was made from


class AttentionCalls:
    """The attention calls of a forward pass, in order: call ``i`` uses cache ``i`` and step entry ``i``. `sequences`
    tells layers of other kinds which rows belong together.

    The `PagedModel` owns the one object, and each of its attention modules refers to it. Calls are counted, not
    modules, because a pass may call one module twice (layers with shared weights).
    """

    def __init__(self, sources: Sequence[int]) -> None:
        self.sources = list(sources)  # the call whose keys and values call i reads: i in most models
        self.caches: list[LayerCache] = []
        self.index_keys: Sequence[torch.Tensor | None] = ()  # of each call
        self.sequences = SequenceOffsets.of((), ())
        self._step: Sequence[StepAttention] = ()
        self._next = 0

    def begin(self, step: Sequence[StepAttention], sequences: SequenceOffsets) -> None:
        self._step = step
        self.sequences = sequences
        self._next = 0

    def check(self) -> None:
        """Raise RuntimeError unless the pass made all its calls: a part of the model would not read its cache."""
        if self._next != len(self.sources):
            raise RuntimeError(f"{self._next} attention calls in a forward pass that had {len(self.sources)} at load")

    def coming(self) -> tuple[StepAttention, torch.Tensor | None]:
        """The step entry and the index keys of the next call."""
        return self._step[self._next], self.index_keys[self._next]

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``[tokens, heads, dim]`` views → ``[tokens, q_heads, value_dim]``. selected: see
        `Backend.run_selected`."""
        index = self._next
        self._next = index + 1
        cache, step = self.caches[index], self._step[index]
        if self.sources[index] == index:
            step.backend.append(cache, key, value, step.blocks, step.rows)
        if selected is not None:
            return step.backend.run_selected(step.plan, query, cache, selected, sinks)
        return step.backend.run(step.plan, query, cache, sinks)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls. query ``[1, q_heads, tokens, key_dim]``, key and value likewise →
    ``[1, tokens, q_heads, value_dim]``. indices: of selected keys, ``[1, tokens, n]``. Scale, window and soft cap come
    from the plan, which has them from the dry run of loading."""
    cross: CrossAttention | None = getattr(module, "mainspring_cross", None)
    if cross is not None:
        return cross.attend(module, query, kwargs.get("scaling")), None
    calls: AttentionCalls = module.mainspring_calls  # type: ignore[assignment]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    latents: LatentAttention | None = getattr(module, "mainspring_latents", None)
    selected = None if indices is None else indices[0]
    if latents is None:
        out = calls.run(query, key, value, s_aux, selected)
    else:
        out = latents.attend(query, key, partial(calls.run, sinks=s_aux, selected=selected))
    return out.unsqueeze(0), None


# No mask function is registered beside it: transformers then builds no mask at all (masking_utils, early exit).
ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, paged_attention)


def _no_mask(*, q_length: int, kv_length: int, device: torch.device | str = "cpu", **_: Any) -> torch.Tensor:
    """A mask of the shape that a model's own code expects. Nothing reads what is in it."""
    return torch.zeros((), dtype=torch.bool, device=device).expand(1, 1, q_length, kv_length)


ALL_MASK_ATTENTION_FUNCTIONS.register(OWN_IMPLEMENTATION, _no_mask)
ALL_ATTENTION_FUNCTIONS.register(INDEXED_IMPLEMENTATION, paged_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(INDEXED_IMPLEMENTATION, _no_mask)


def has_own_attention(model: PreTrainedModel) -> bool:
    """Whether the model computes its attention itself, instead of looking it up by name. A model of several parts may
    do both; then the part that looks it up is the language model. One with recurrent state may have none."""
    return states_of(model) is None and not any(part._can_set_attn_implementation() for part in _parts(model))


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model with encoders of media that sees the whole prompt; another model itself."""
    decoder = model.get_decoder() if feature_methods(model) else model
    apart = decoder is not model.base_model and isinstance(decoder, PreTrainedModel)
    return decoder if apart and decoder._can_set_attn_implementation() else model


def _parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """`model` and the models inside it, each of which may have a config of its own."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _set_implementation(model: PreTrainedModel, name: str) -> None:
    """Let `model` look up its attention by this name, or those of its parts that look it up. Encoders of media, which
    are neither part of the language model nor around it, keep theirs."""
    decoder = language_model(model)
    if decoder is not model:
        for part in _parts(model):
            if any(module is decoder for module in part.modules()) or any(part is module for module in _parts(decoder)):
                part.config._attn_implementation_internal = name
        return
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
        return
    for part in _parts(model):
        if part._can_set_attn_implementation():
            part.config._attn_implementation_internal = name


def library_attention(model: PreTrainedModel) -> str:
    """The name of the library's attention that the model is compared with. A model with attention of its own may have
    two forms of it, and then means the one that the library would choose."""
    return "sdpa" if has_own_attention(model) and model._supports_sdpa else "eager"


@contextmanager
def attention_set(
    model: PreTrainedModel,
    implementation: str,
    attend: Callable[..., Any] | None = None,
    build_mask: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """In this context `model` looks up its attention by another name, under which these functions are registered.
    `attend` is also called for a model that computes its attention itself."""
    if has_own_attention(model):
        with _own_attention_set(model, implementation, attend, build_mask or _no_mask):
            yield
        return
    if attend is not None and build_mask is None and indexers_of(model) is not None:
        build_mask = _no_mask
    cross = cross_attention_of(model)
    if cross is not None and attend is not None:
        attend = aside(cross, attend)
    before = [(part, part.config._attn_implementation) for part in _parts(model)]
    both = (ALL_ATTENTION_FUNCTIONS, attend), (ALL_MASK_ATTENTION_FUNCTIONS, build_mask)
    given = [(registry, function) for registry, function in both if function is not None]
    for registry, function in given:
        registry.register(implementation, function)
    try:
        _set_implementation(model, implementation)
        yield
    finally:
        for part, name in before:
            part.config._attn_implementation_internal = name
        for registry, _ in given:
            registry._global_mapping.pop(implementation)


@contextmanager
def _own_attention_set(
    model: PreTrainedModel, implementation: str, attend: Callable[..., Any] | None, build_mask: Callable[..., Any]
) -> Iterator[None]:
    def called(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any) -> torch.Tensor:
        assert attend is not None
        # as transformers calls it: [1, heads, tokens, dim] → [1, tokens, heads, dim]
        out: torch.Tensor = attend(model, *(x.transpose(0, 1)[None] for x in (query, key, value)), None)[0]
        return out[0]

    before = model.config._attn_implementation
    model.config._attn_implementation = implementation
    if attend is not None:
        ALL_MASK_ATTENTION_FUNCTIONS.register(implementation, build_mask)
    try:
        with OwnAttention(called) if attend is not None else nullcontext():
            yield
    finally:
        model.config._attn_implementation = before
        if attend is not None:
            ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(implementation)


@contextmanager
def own_attention_learned(model: PreTrainedModel, attend: Attend, build_mask: Callable[..., Any]) -> Iterator[None]:
    """In this context `attend` computes the attention of `model`, which computes it itself otherwise, and is told what
    is done to the scores. `build_mask` builds the library's masks."""
    before = model.config._attn_implementation
    name = library_attention(model)
    ALL_MASK_ATTENTION_FUNCTIONS[name] = build_mask  # for this while, in place of the library's
    model.config._attn_implementation = name
    try:
        with OwnAttention(attend, learn=True):
            yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[name]
        model.config._attn_implementation = before


def serve_attention(model: PreTrainedModel, calls: AttentionCalls, own: Mapping[nn.Module, int]) -> None:
    """From now on `model` computes its attention by `calls`. own: the modules that compute it themselves, and how often
    each head of keys and values is repeated there."""
    if not own:
        indexers = indexers_of(model)
        _set_implementation(model, IMPLEMENTATION if indexers is None else INDEXED_IMPLEMENTATION)
        if indexers is not None:
            config = next(part.config for part in _parts(model) if part._can_set_attn_implementation())
            indexers.calls = calls
            indexers.serving = lambda: config._attn_implementation == INDEXED_IMPLEMENTATION
        return
    for module, repeats in own.items():
        attend = partial(_attend, calls, repeats)
        take_over(module, attend, lambda: model.config._attn_implementation == OWN_IMPLEMENTATION)
    model.config._attn_implementation = OWN_IMPLEMENTATION


def serve_latents(module: nn.Module, expansion: Expansion) -> LatentAttention:
    """From now on the attention of `module` runs over latents, while its attention is `paged_attention`."""
    config: Any = module.config
    names = IMPLEMENTATION, INDEXED_IMPLEMENTATION
    latents = LatentAttention(expansion, lambda: config._attn_implementation in names)
    module.mainspring_latents = latents  # type: ignore[assignment]
    return latents


def _attend(
    calls: AttentionCalls, repeats: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any
) -> torch.Tensor:
    return calls.run(query, key[:, ::repeats], value[:, ::repeats], None)
