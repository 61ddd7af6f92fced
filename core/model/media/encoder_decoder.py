"""Encoder-decoder models: the decoder is served as a language model, and the encoder's input is an item of its prompt.

From `serve_decoder` on, the model's forward takes the decoder's tokens, and gets the encoder's output from
`CrossAttention`. Which modules attend to that output is found by execution: they see as many keys as it has rows. An
item has no tokens in the prompt. No class of models is named.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ....ipc.config import ENCODER_TEXT
from ....ipc.errors import InvalidRequestError, UnsupportedModelError
from ....kernels.contract import ROW_MULTIPLE
from ..run.attention import attention_set
from ..run.cross_attention import CrossAttention, CrossStates, cross_attention_of
from ..run.float_products import fast_products
from ..run.positions import longest_sequence, positions_given, receivers
from .features import EncodedItem
from .merge import MergedPrompt

PROBE = "mainspring_cross_probe"
TOKENS, ROWS = 8, 2 * ROW_MULTIPLE  # of the decoder, and of the encoder's output, in the trial run
HARMLESS = frozenset({"dropout", "scaling", "output_attentions", "use_cache", "is_causal", "position_ids"})

MODALITY = {"audio": "audio", "text": ENCODER_TEXT}  # `input_modalities` of an encoder → what a prompt calls its input


@dataclass
class EncoderOutput(BaseModelOutput):
    """What an encoder returns. Some classes (Moonshine) also read a mask from it; one input needs none."""

    attention_mask: torch.Tensor | None = None


class EncoderMerger:
    """What `Merger` is to models whose media have tokens in the prompt."""

    layered = "it has cross attention"
    spans = ""
    axes = 1

    def __init__(self, model: PreTrainedModel, cross: CrossAttention) -> None:
        self.model, self.cross = model, cross
        self.encoder: Any = model.get_encoder()
        takes = self.encoder.input_modalities
        takes = [takes] if isinstance(takes, str) else list(takes)
        self.modalities = [MODALITY[name] for name in takes if name in MODALITY]
        if not self.modalities:
            raise UnsupportedModelError(
                f"{type(model).__name__} is an encoder-decoder model whose encoder takes {' and '.join(takes)}, which "
                "is not supported"
            )
        self.decoder: Any = model.get_decoder()
        self.embed: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def item_bytes(self) -> int:
        """The memory that an encoded item takes at most."""
        stand_in = self.cross.stand_in
        assert stand_in is not None
        row = sum(x.nbytes for x in (stand_in.states, *stand_in.keys, *stand_in.values)) // ROWS
        config = self.model.config
        names = ("max_source_positions", "max_position_embeddings")
        longest = next((n for name in names if isinstance(n := getattr(config, name, None), int)), 4096)
        return row * longest

    @torch.inference_mode()
    def encode(self, modality: str, arrays: Mapping[str, torch.Tensor]) -> EncodedItem:
        """Encode one input. The model's own errors come through."""
        if modality == ENCODER_TEXT:
            self._check_ids(arrays.get(self.encoder.main_input_name))
        accepted = inspect.signature(self.encoder.forward).parameters
        given = {
            name: x.to(self.model.device, self.model.dtype if x.is_floating_point() else None)
            for name, x in arrays.items()
            if name in accepted
        }
        if self.encoder.main_input_name not in given:
            raise InvalidRequestError(
                f"the processor gave no {self.encoder.main_input_name!r}, which the encoder needs"
            )
        attention = attention_set(self.model, "sdpa" if self.model._supports_sdpa else "eager")
        with attention, fast_products(self.model.device, self.model.dtype):
            states = self.encoder(**given)[0]
        return EncodedItem(modality, cross_states(self.model, self.cross, states), {})

    def _check_ids(self, ids: torch.Tensor | None) -> None:
        vocab_size, longest = self.encoder.get_input_embeddings().weight.shape[0], longest_sequence(self.model.config)
        if ids is None or not ids.numel() or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise InvalidRequestError(f"the input of the encoder must be token ids; the vocabulary has {vocab_size}")
        if longest is not None and ids.shape[-1] > longest:
            raise InvalidRequestError(f"the input of the encoder has {ids.shape[-1]} tokens; the model reads {longest}")

    def merge(self, ids: Sequence[int], items: Sequence[EncodedItem]) -> MergedPrompt:
        if len(items) != 1:
            raise InvalidRequestError(f"a prompt of this model has one input for its encoder, not {len(items)}")
        return MergedPrompt(len(ids), {}, None, None, 0, (None, None), items[0].output)

    def inputs(
        self, ids: Sequence[int], items: Sequence[EncodedItem], module: Any, prompt_len: int | None = None
    ) -> dict[str, Any]:
        """As `Merger.inputs`."""
        return {"input_ids": torch.tensor([list(ids)], device=self.model.device)}

    @contextmanager
    def encoded(self, items: Sequence[EncodedItem]) -> Iterator[None]:
        """In this context, the model's decoder sees the item."""
        with self.cross.given(items[0].output.states):
            yield


def serve_decoder(model: PreTrainedModel) -> EncoderMerger:
    """Let the forward of `model` be its decoder's, and learn its cross attention.

    Raises:
        UnsupportedModelError: it has none that can be served.
    """
    own, accepted = model.forward, inspect.signature(model.forward).parameters
    name = type(model).__name__
    if not {"decoder_input_ids", "encoder_outputs"} <= set(accepted):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model that takes no output of an encoder")
    states = torch.empty(1, ROWS, _hidden_size(model), device=model.device, dtype=model.dtype)
    torch.nn.init.normal_(states, generator=torch.Generator(model.device).manual_seed(0))
    cross = CrossAttention(states)
    merger = EncoderMerger(model, cross)

    def decode(ids: torch.Tensor, **more: Any) -> Any:
        return own(
            encoder_outputs=EncoderOutput(last_hidden_state=cross.states),
            decoder_input_ids=ids,
            use_cache=False,
            **more,
        )

    def forward(input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        return decode(input_ids)

    def forward_at(input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, use_cache: bool = False) -> Any:
        return decode(input_ids, decoder_position_ids=position_ids)

    model.forward = forward_at if "decoder_position_ids" in accepted else forward
    model.mainspring_cross = cross  # type: ignore[assignment]
    _find_modules(model, cross)
    cross.stand_in = cross_states(model, cross, states)
    return merger


def _hidden_size(model: PreTrainedModel) -> int:
    config: Any = model.get_encoder().config
    own = getattr(config, "hidden_size", None) or getattr(model.config, "hidden_size", None)
    if own is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model whose encoder has no hidden_size"
        )
    return int(own)


@torch.inference_mode()
def _find_modules(model: PreTrainedModel, cross: CrossAttention) -> None:
    name = type(model).__name__

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        out = query.new_zeros(1, TOKENS, query.shape[1], value.shape[3])
        if key.shape[2] != ROWS:
            return out, None
        for argument, given in kwargs.items():
            if given is not None and given is not False and argument not in HARMLESS:
                raise UnsupportedModelError(
                    f"{name} passes {argument!r} to its cross attention, which is not known here"
                )
        if mask is not None:
            raise UnsupportedModelError(f"{name} adds a mask or bias to the scores of its cross attention")
        if module in cross.modules:
            raise UnsupportedModelError(f"{name} calls a cross attention twice")
        cross.modules[module] = len(cross.modules)
        module.mainspring_cross = cross
        return out, None

    with attention_set(model, PROBE, attend):
        _pass(model, TOKENS)
    if not cross.modules:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model whose cross attention was not found")


@torch.inference_mode()
def cross_states(model: PreTrainedModel, cross: CrossAttention, states: torch.Tensor) -> CrossStates:
    """The keys and values that the model's cross attention makes of an encoder's output ``[1, length, hidden]``."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    with cross.given(states), cross.listening() as heard, attention_set(model, PROBE, attend):
        _pass(model, 1)
    if len(heard) != len(cross.modules):
        raise UnsupportedModelError(f"{type(model).__name__} makes {len(heard)} calls of its cross attention")
    keys, values = zip(*heard, strict=True)
    return CrossStates(states, tuple(x.contiguous() for x in keys), tuple(x.contiguous() for x in values))


def _pass(model: PreTrainedModel, tokens: int) -> None:
    """A pass over a few tokens."""
    positions = torch.arange(tokens, device=model.device)[None]
    with positions_given(receivers(model), positions) as given:
        model(input_ids=torch.zeros_like(positions), **given)


def decoder_of(model: PreTrainedModel) -> EncoderMerger | None:
    """See `serve_decoder`; None: the model has no encoder of its own."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return None
    assert cross_attention_of(model) is None
    return serve_decoder(model)
