"""A loaded model as the runner sees it: flattened tokens in, logits of chosen rows out, KV in the paged cache."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ....kernels.contract import ROW_MULTIPLE, AttentionSpec, Backend, LayerCache, Scans, SequenceOffsets
from ...worker.kv_layout import KVLayout, LayerShape, plan_layout
from ..learn.fuse import Fusion
from ..learn.probe import AttentionCall
from ..media.door import StepMedia
from ..media.encoder_decoder import EncoderMerger
from ..media.merge import Merger
from .attention import AttentionCalls, StepAttention, serve_attention, serve_latents
from .cross_attention import cross_attention_of
from .expert_recorder import ExpertRecorder
from .indexed import indexers_of
from .positions import longest_sequence, positions_given, receivers
from .recurrent import cache_argument, states_of
from .stack import position_ids
from .streamed_layers import StreamedLayers
from .whole_model import WholeModel


class PagedModel:
    """A causal language model of transformers whose attention runs over a paged KV cache. A model without an output
    layer (see pooling.py) gives hidden states in place of logits.

    ``layers[i]`` describes attention call ``i`` of a forward pass. ``sources[i]`` is ``i``, or, where layers share keys
    and values, the earlier call whose keys and values call ``i`` reads: `bind` is then given that call's cache twice.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        calls: Sequence[AttentionCall],
        fused: Fusion,
        notes: list[str],
        merger: Merger | EncoderMerger | None = None,
    ) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.layers: list[AttentionSpec] = [call.spec for call in calls]
        self.sources: list[int] = [call.source for call in calls]
        self.max_position = longest_sequence(self.config)
        self.hidden_size: int = self.config.hidden_size
        # of the decoder, where an encoder has another one
        self.vocab_size: int = getattr(self.config, "decoder_vocab_size", None) or self.config.vocab_size
        self.eos_token_ids = _eos_token_ids(model)
        self.parameters = fused.parameters  # each parameter of the checkpoint in its present place
        self.notes = notes  # lines for --explain-model
        self.decisions = dict(fused.decisions)  # for the next load of the same checkpoint
        self.is_quantized = False  # by this engine, or as the checkpoint comes
        self.verdict: list[str] = []  # of `verify`, also as lines for --explain-model; empty: it was not called
        self.verified: tuple[Backend, torch.Tensor] | None = None  # the backend of `verify`, and the logits it gave
        self.own: list[torch.Tensor] | None = None  # the model's own logits, if they are yet to be compared
        self.rounding = 0.0  # the error that `verify` found in the model's dtype, in standard deviations
        self.stack = fused.stack  # if it took the place of the layers' code
        self.streamed: StreamedLayers | None = None  # the layers whose weights are in host memory
        self.whole: WholeModel | None = None  # if a backend runs the model in one call
        self.experts: ExpertRecorder | None = None  # if it is to be recorded which experts compute a row
        self.states = states_of(model)  # of layers with recurrent state, if there are any
        self.indexers = indexers_of(model)  # if attention sees only keys that an indexer selects
        self.cross = cross_attention_of(model)  # if its tokens see an encoder's output
        self.merger = merger  # of media with prompts, if the model takes any
        self.position_axes = 1 if merger is None else merger.axes
        self.row_multiple = ROW_MULTIPLE  # the number of rows of a forward pass is a multiple of this
        self._calls = AttentionCalls(self.sources)
        for call in calls:
            call.module.mainspring_calls = self._calls  # type: ignore[assignment]
        serve_attention(model, self._calls, {call.module: call.repeats for call in calls if call.repeats})
        latents = [serve_latents(call.module, call.expansion) for call in calls if call.expansion is not None]
        self.parameters.packed = {id(each.linear.weight): each for each in latents}
        self._receivers = receivers(model)  # of positions
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = cache_argument(model)
        self.selects_rows = "logits_to_keep" in accepted  # the output layer then gets only rows that need logits
        # A model that adds embeddings in each layer looks them up by token id, and rows of embeddings have no id.
        per_layer = getattr(self.config, "hidden_size_per_layer_input", 0)
        self.accepts_embeddings = "inputs_embeds" in accepted and not per_layer

    def lay_out(
        self,
        backend: Backend,
        block_size: int,
        dtype: torch.dtype,
        most: Mapping[LayerShape, int] | None = None,
    ) -> KVLayout:
        """The layout of a cache of this `dtype` that `backend` reads. most: see `plan_layout`."""
        calls = self.layers, self.sources
        return plan_layout(*calls, block_size, dtype, backend.cache_dims, backend.heads_first, most)

    def bind(self, caches: Sequence[LayerCache], index_keys: Sequence[torch.Tensor | None] = ()) -> None:
        """Set the cache of each attention call, and its index keys."""
        self._calls.caches, self._calls.index_keys = list(caches), list(index_keys)
        if self.whole is not None:
            self.whole.decoder.bind(caches, self.sources)

    def allocate_states(self, slots: int, scans: Scans, zeros: Callable[..., torch.Tensor]) -> None:
        """Make room for recurrent states, if the model has any: see `StepStates.allocate`."""
        if self.states is not None:
            self.states.scans = scans
            self.states.allocate(slots, self.model.dtype, zeros)
            if self.whole is not None:
                self.whole.bind_states()

    def unbind(self) -> None:
        """Drop the cache; no step can run until `bind`."""
        self._calls.caches, self._calls.index_keys = [], []

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Sequence[StepAttention],
        sequences: SequenceOffsets,
        logit_rows: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        media: StepMedia | None = None,
    ) -> torch.Tensor:
        """One step over the flattened tokens of all its requests.

        input_ids are int64 ``[tokens]``, and positions ``[position_axes, tokens]``; attention has one entry per
        attention call; logit_rows is int64 ``[n]``; inputs_embeds ``[tokens, hidden]`` takes the place of input_ids;
        `media` is put in where the language model is called.
        tokens and n are multiples of `row_multiple`. → logits ``[n, vocab]`` in the model's dtype.
        """
        self._calls.begin(attention, sequences)
        if self.states is not None:
            self.states.begin(sequences, positions.shape[-1])
        if self.whole is not None:
            embeddings = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
            if media is not None:
                embeddings = media.into(embeddings)
            return self.whole.forward(embeddings, positions, attention, self._calls.run, logit_rows)
        inputs: dict[str, Any] = {"use_cache": False}
        if self.states is not None:
            inputs[self._cache_name] = self.states
        if inputs_embeds is None:
            inputs["input_ids"] = input_ids.unsqueeze(0)
        else:
            inputs["inputs_embeds"] = inputs_embeds.unsqueeze(0)
        if self.selects_rows:
            inputs["logits_to_keep"] = logit_rows
        entered = nullcontext() if media is None or self.merger is None else media.at(self.merger.decoder)
        with entered, positions_given(self._receivers, position_ids(positions)) as given:
            logits: torch.Tensor = self.model(**inputs, **given)[0][0]
        self._calls.check()
        return logits if self.selects_rows else logits[logit_rows]

    @torch.inference_mode()
    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows ``[tokens, hidden]`` for `forward`'s inputs_embeds; see `accepts_embeddings`."""
        embedding = self.model.get_input_embeddings() if self.whole is None else self.whole.embedding
        rows: torch.Tensor = embedding(input_ids)
        return rows

    @contextmanager
    def unpacked(self) -> Iterator[PreTrainedModel]:
        """The model with all its parameters in their modules. Of weights that a backend has packed they are copies, and
        changes to them are packed again at the end. Streamed weights are in host memory, so such a model can be read
        and changed, but not run. Kernels and graphs have addresses, so what ``parameter.data = ...`` gave a parameter
        is copied to where it was."""
        kept = {}
        for name in self.parameters.names():
            tensor = self.parameters.slot(name).tensor
            packed = self.parameters.packed.get(id(tensor))
            if id(tensor) not in kept:
                kept[id(tensor)] = tensor, packed, tensor.data
                if packed is not None:
                    tensor.data = packed.unpack()
        try:
            yield self.model
        finally:
            for tensor, packed, before in kept.values():
                now, tensor.data = tensor.data, before
                if packed is None:
                    if now.data_ptr() != before.data_ptr():
                        before.copy_(now)
                elif not torch.equal(now.to((whole := packed.unpack()).device), whole):
                    packed.replace(now)

    @contextmanager
    def unpacked_in_use(self) -> Iterator[None]:
        """The model's own forward can run: a copy of each weight that a backend has packed is made when it is used."""
        packed = {} if self.whole is None else self.whole.decoder.weights
        kept: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        try:
            for slot in map(self.parameters.slot, self.parameters.names()):
                held: dict[str, Any] = slot.owner._parameters
                before = slot.tensor
                if slot.attribute in held and id(before) in packed:
                    kept.append((held, slot.attribute, before))
                    held[slot.attribute] = packed[id(before)].lazy()
            yield
        finally:
            for held, attribute, before in kept:
                held[attribute] = before

    def explain(self) -> list[str]:
        """Lines for ``--explain-model``: the findings and decisions of loading."""
        shared = sum(source != index for index, source in enumerate(self.sources))
        lines = [f"model: {type(self.model).__name__}, {self.dtype}, {self.device}"]
        lines += [f"attention: {count} x {_describe(spec)}" for spec, count in Counter(self.layers).items()]
        if self.states is not None:
            layers, size = len({key.layer for key in self.states.specs}), self.states.state_bytes
            lines.append(f"recurrent state: {layers} layers, {size} bytes for each sequence")
        if shared:
            lines.append(f"attention: {shared} of {len(self.layers)} calls read the keys and values of an earlier one")
        return lines + self.notes


def _describe(spec: AttentionSpec) -> str:
    text = f"{spec.num_q_heads} query heads of {spec.key_dim}, {spec.num_kv_heads} KV heads, scale {spec.scale:.6g}"
    if spec.value_dim != spec.key_dim:
        text += f", values of {spec.value_dim}"
    if spec.latent:
        text += ", over latents"
    if spec.selects:
        text += f", keys selected by an indexer ({f'of {spec.index_dim}' if spec.index_dim else 'of an earlier call'})"
    if spec.window is not None:
        text += f", window {spec.window}"
    if spec.softcap is not None:
        text += f", soft cap {spec.softcap:g}"
    if spec.bias is not None:
        text += f", {type(spec.bias).__name__}"
    return text


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The ids that end a text: the generation config's, which transformers fills from the config where it is absent."""
    config = getattr(model, "generation_config", None)
    ids = None if config is None else config.eos_token_id
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
