"""Verify by execution that a prompt with media gives the logits that the model gives alone.

The first prompt with an item of each modality goes through the model's own whole forward, with the library's own
attention, and through the paged path, cut into chunks and followed by a few generated tokens. So whatever the language
model is told about media in a way that the merger does not see shows as a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from ....ipc.errors import InvalidRequestError, UnsupportedModelError
from ....kernels.contract import Backend
from ....kernels.reference.reference_backend import ReferenceBackend
from ...worker.runner import ModelRunner
from ..media.features import EncodedItem
from ..media.merge import MergedPrompt
from ..run.attention import attention_set, language_model, library_attention
from ..run.paged_model import PagedModel
from .fuse_match import LOGITS_TOLERANCE, deviations, widened

TAIL = 3  # generated tokens, whose positions follow those of the prompt
ROWS = 32  # of the prompt, whose logits are compared: each sees the ones before it
EAGER_TOKENS = 4096  # eager attention of longer prompts takes gigabytes
BLOCK_SIZE = 8
QUANTIZED_LIMIT = 0.5  # standard deviations: activations may be rounded to 8 bits


def verify_media(
    model: PagedModel, backend: Backend, ids: Sequence[int], items: Sequence[EncodedItem], merged: MergedPrompt
) -> str:
    """Compare the two; → a line for ``--explain-model``. As in `verify`, fp32 decides where half precision differs.
    Leaves `model` bound to nothing of use.

    Raises:
        UnsupportedModelError: they differ.
        InvalidRequestError: there is nothing to compare, because of these items.
    """
    dtype = model.dtype
    error = _difference(model, backend, ids, items, merged, dtype)
    limit = QUANTIZED_LIMIT if model.is_quantized else LOGITS_TOLERANCE[dtype]
    if dtype != torch.float32 and not error <= limit and model.streamed is None and model.whole is None:
        wide: Any = tree_map_only(torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, list(items))
        with widened(model.model, backend, model.stack):
            assert model.merger is not None
            merged = model.merger.merge(ids, wide)
            error, limit = _difference(model, ReferenceBackend(), ids, wide, merged, torch.float32), 1.0
        limit = LOGITS_TOLERANCE[torch.float32]
    kinds = " and ".join(sorted({item.modality for item in items})) or "text"
    if not error <= limit:
        raise UnsupportedModelError(
            f"{type(model.model).__name__} gives other logits for a prompt with {kinds} than alone (they differ by "
            f"{error:.2g} standard deviations, the limit is {limit:g}), so such prompts are not served"
        )
    return f"verified: logits of a prompt with {kinds} within {error:.1e} standard deviations of the model's own"


def _difference(
    model: PagedModel,
    backend: Backend,
    ids: Sequence[int],
    items: Sequence[EncodedItem],
    merged: MergedPrompt,
    dtype: torch.dtype,
) -> float:
    limit = model.max_position or len(ids) + TAIL
    count = len(ids)
    tokens = [*ids, *range(2, 2 + min(TAIL, max(0, limit - count)))]
    rows = np.unique([*np.linspace(0, count - 1, ROWS, dtype=np.int64), *range(count, len(tokens))])
    paged = _paged(model, backend, tokens, merged, rows, dtype)
    own = _own(model, tokens, items, rows, count)
    if not bool(own.isfinite().all()):  # of other items they may be
        raise InvalidRequestError("the model's logits for the media of this prompt are not finite")
    errors = deviations(paged, own)
    return float(errors.amax() if dtype == torch.float32 else errors.median())


@torch.inference_mode()
def _own(
    model: PagedModel, tokens: list[int], items: Sequence[EncodedItem], rows: np.ndarray, prompt_len: int
) -> torch.Tensor:
    merger = model.merger
    assert merger is not None
    wanted = torch.from_numpy(rows).to(model.device)
    name = library_attention(model.model)
    soft = any(spec.softcap is not None for spec in model.layers)
    if len(tokens) > EAGER_TOKENS and not soft and language_model(model.model)._supports_sdpa:
        name = "sdpa"
    with (
        model.unpacked_in_use(),
        attention_set(model.model, name),
        merger.encoded(items),
    ):
        inputs = merger.inputs(tokens, items, merger.model, prompt_len)
        keep = {"logits_to_keep": wanted} if model.selects_rows else {}
        heard: list[torch.Tensor] = []  # of a retrieval model, the hidden states that the model inside of it gives
        hook = model.model.register_forward_hook(lambda _, __, output: heard.append(output[0][0]))
        try:
            merger.model(**inputs, **keep)
        finally:
            hook.remove()
        logits = heard[0]
    return logits if model.selects_rows else logits[wanted]


def _paged(
    model: PagedModel, backend: Backend, tokens: list[int], merged: MergedPrompt, rows: np.ndarray, dtype: torch.dtype
) -> torch.Tensor:
    """Logits ``[len(rows), vocab]``, from the two parts of the prompt and then token by token."""
    layout = model.lay_out(backend, BLOCK_SIZE, dtype)
    groups, columns = len(layout.groups), -(-len(tokens) // BLOCK_SIZE)
    limit = max(len(tokens), model.max_position or 4096)
    runner = ModelRunner(model, layout, backend, 1 + groups * columns, 1, limit, merged.length)
    runner.tables[:, 0, :columns] = 1 + np.arange(groups * columns).reshape(groups, columns)
    runner.inputs.prompt_lens[:1] = merged.length
    runner.admit_prompt(0, merged)
    cut = _cut(merged)
    edges = sorted({0, cut, *range(merged.length, len(tokens) + 1)})
    found = []
    for start, end in pairwise(edges):
        wanted = rows[(rows >= start) & (rows < end)] - start
        asked = wanted if len(wanted) else np.zeros(1, np.int64)
        logits = runner.forward(
            np.zeros(1, np.int64), np.array([start]), np.array([end - start]), np.array(tokens[start:end]), asked
        )
        found.append(logits[: len(wanted)].clone())
    return torch.cat(found)


def _cut(merged: MergedPrompt) -> int:
    """The place nearest to the middle where no token sees across."""
    allowed = np.ones(merged.length, bool)
    for last in merged.reach:
        if last is not None:
            allowed[1:] &= np.maximum.accumulate(last)[:-1] < np.arange(1, merged.length)
    places = np.flatnonzero(allowed)
    return int(places[np.argmin(np.abs(places - merged.length // 2))])
