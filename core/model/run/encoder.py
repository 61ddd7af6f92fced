"""Bidirectional encoders: no cache, so a prompt is computed at once, and those of a step go through as one row.

Each sequence of the row attends to itself alone, in a call of its own over its own copy of queries, keys and values, so
its bits don't depend on its neighbours. A model is served if what it makes of such a row is what it makes of each
sequence alone (`verify_encoder`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....ipc.errors import UnsupportedModelError
from ....kernels.contract import ROW_MULTIPLE, SequenceOffsets
from ...worker.device import device_for
from ..learn.fuse_match import LOGITS_TOLERANCE, deviations
from ..learn.probe import HARMLESS, MaskFunction
from ..learn.random_texts import random_texts
from .attention import attention_set
from .float_products import fast_products

IMPLEMENTATION = "mainspring_encoder"
LENGTHS = (150, 13)  # tokens of the sequences that are compared: the first crosses the windows in use


class _Pattern:
    """A mask in the place of a tensor: who sees whom, for sequences of any length."""

    def __init__(self, function: MaskFunction) -> None:
        self._function = function
        self._built: torch.Tensor | None = None

    def of(self, length: int, device: torch.device) -> torch.Tensor:
        """bool ``[length, length]``; the longest one asked for is kept."""
        if self._built is None or len(self._built) < length:
            places, zero = torch.arange(length, device=device), torch.zeros((), dtype=torch.long, device=device)
            self._built = self._function(zero, zero, places[:, None], places[None]).expand(length, length)
        return self._built[:length, :length]


def _pattern(*, mask_function: MaskFunction, **_: Any) -> _Pattern | None:
    sees_all: Any = bidirectional_mask_function
    return None if mask_function is sees_all else _Pattern(mask_function)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _Pattern | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls. query ``[1, heads, tokens, dim]``, key and value likewise →
    ``[1, tokens, heads, dim]``. Rows of no sequence are zeros."""
    for argument, given in kwargs.items():
        if given is not None and given is not False and argument not in HARMLESS:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {argument!r} to its attention, which encoders are not served with"
            )
    if is_causal and attention_mask is None:
        raise UnsupportedModelError(f"{type(module).__name__} gives its attention no mask and wants it to be causal")
    out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    grouped = query.shape[1] != key.shape[1]
    step: _Step = module.mainspring_step  # type: ignore[assignment]
    for start, end in pairwise(step.sequences.cu_seqlens.tolist()):
        rows = slice(start, end)
        # copies, for what a product's bits depend on may be where its operands lie
        q, k, v = (x[:, :, rows].clone(memory_format=torch.contiguous_format) for x in (query, key, value))
        mask = None if attention_mask is None else attention_mask.of(end - start, query.device)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
        out[0, rows] = attended[0].transpose(0, 1)
    return out, None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _pattern)


class _Step:
    """The forward pass that runs, for the attention modules that it calls."""

    sequences = SequenceOffsets.of((), ())


class EncoderModel:
    """A model of transformers without an output layer that sees a whole sequence at once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.device = model.device
        self._copies = device_for(model.device)
        self.dtype: torch.dtype = model.dtype
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        accepted = inspect.signature(model.forward).parameters
        self.num_types: int = getattr(self.config, "type_vocab_size", 0) if "token_type_ids" in accepted else 0
        # RoBERTa and its kin count positions from the one after the padding token's id
        embeddings = getattr(model, "embeddings", None)
        counts_on = hasattr(embeddings, "create_position_ids_from_input_ids")
        self.first_position: int = self.config.pad_token_id + 1 if counts_on else 0
        limit = getattr(self.config, "max_position_embeddings", None)
        self.max_position: int | None = None if limit is None else limit - self.first_position
        self._step = _Step()
        for module in model.modules():
            module.mainspring_step = self._step  # type: ignore[assignment]
        model.set_attn_implementation(IMPLEMENTATION)

    @torch.inference_mode()
    def forward(self, token_ids: np.ndarray, sequences: SequenceOffsets, seconds: Sequence[int]) -> torch.Tensor:
        """Final hidden states ``[tokens, hidden]`` of `sequences`, given one after another. `seconds`: where in each
        the second text of a pair begins; 0: nowhere."""
        total = len(token_ids)
        ids, positions, types = np.zeros((3, -(-total // ROW_MULTIPLE) * ROW_MULTIPLE), np.int64)
        ids[:total] = token_ids
        positions += self.first_position
        for (start, end), second in zip(pairwise(sequences.cu_seqlens.tolist()), seconds, strict=True):
            positions[start:end] += np.arange(end - start)
            types[start + second : end] = bool(second)
        rows = {"input_ids": ids, "position_ids": positions}
        if self.num_types:
            rows["token_type_ids"] = types if self.num_types > 1 else np.zeros_like(types)
        inputs: dict[str, Any] = {name: self._copies.bring(torch.from_numpy(row)[None]) for name, row in rows.items()}
        self._step.sequences = sequences
        with fast_products(self.device, self.dtype):
            hidden: torch.Tensor = self.model(**inputs)[0][0]
        return hidden[:total]


def is_causal(model: PreTrainedModel) -> bool:
    """Whether no token sees a later one: what stands last makes no difference to the others."""
    size = model.config.get_text_config().vocab_size
    ids = torch.arange(2, 10, device=model.device) % size
    other = ids.clone()
    other[-1] = 11 % size
    with torch.inference_mode():
        one, two = (model(input_ids=each[None])[0][0, :-1].float() for each in (ids, other))
    return bool((one - two).abs().amax() <= 1e-5 * one.std())


@torch.inference_mode()
def verify_encoder(encoder: EncoderModel) -> str:
    """Compare sequences in one row with the model alone; → a line for ``--explain-model``. Raises
    `UnsupportedModelError` when they differ."""
    counts = [min(length, encoder.max_position or length) for length in LENGTHS]
    sequences, own = random_texts(encoder.config, counts), []
    seconds = [0, counts[1] // 2 if encoder.num_types > 1 else 0]
    with attention_set(encoder.model, "eager"):
        for ids, second in zip(sequences, seconds, strict=True):
            types = {"token_type_ids": (torch.arange(len(ids)) >= second)[None].long().to(encoder.device)}
            inputs: dict[str, Any] = {"input_ids": ids[None].to(encoder.device), **(types if second else {})}
            own.append(encoder.model(**inputs)[0][0])
    offsets = SequenceOffsets.of(counts, range(len(counts)))
    ours = encoder.forward(torch.cat(sequences).numpy(), offsets, seconds).split(counts)
    rows = torch.cat([deviations(got, alone) for got, alone in zip(ours, own, strict=True)])
    limit = LOGITS_TOLERANCE[encoder.dtype]
    error = float(rows.amax() if encoder.dtype == torch.float32 else rows.median())
    if not error <= limit:
        raise UnsupportedModelError(
            f"{type(encoder.model).__name__} gives other hidden states for several sequences in a row than for each "
            f"alone (they differ by {error:.2g} standard deviations, the limit is {limit:g})"
        )
    return f"verified: hidden states of a row within {error:.1e} standard deviations of the model's own"
