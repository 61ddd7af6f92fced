"""Verify by execution: the paged path must give the logits that the model gives alone.

Two random sequences go through the model one by one, with the library's own eager attention, and then together through
the runner: flattened into rows, cut into chunks, their blocks interleaved. Rows that depend on another request's, or
chunks that depend on state that no cache holds, show as a difference. A model with recurrent state is compared once
more with what it computes for the second half of each sequence token by token, as `generate` does: transformers has
other code for a single token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ....ipc.errors import UnsupportedModelError
from ....kernels.contract import Backend
from ....kernels.reference.reference_backend import ReferenceBackend
from ...worker.runner import ModelRunner
from ..run.attention import attention_set, library_attention
from ..run.indexed import Trial
from ..run.paged_model import PagedModel
from ..run.positions import takes_positions
from ..run.recurrent import cache_argument
from .fuse_match import LOGITS_TOLERANCE, deviations, widened
from .random_texts import random_texts
from .recurrent_probe import OwnCache

BLOCK_SIZE = 8
LENGTHS = (13, 10)  # tokens of the two sequences; more where a small window must be crossed
SMALL_WINDOW = 24
MOST_SELECTED = 4  # keys that a row may select by an indexer: fewer than the tokens of a sequence


class Chunk(NamedTuple):
    """The tokens ``start:end`` of one sequence."""

    sequence: int
    start: int
    end: int


def verify(model: PagedModel, backend: Backend) -> str:
    """Compare the paged path on `backend` with the model alone; → a line for ``--explain-model``.

    Where they differ by too much in half precision, rounding alone may be the reason (seen in models with large
    scores), and fp32 decides: weights are widened for as long as that takes, which loses nothing, and is not done where
    they are streamed. Raises `UnsupportedModelError` when they differ in fp32. Leaves `model` bound to nothing of use.
    """
    sequences = random_sequences(model)
    dtype = model.dtype
    error, logits = _difference(model, sequences, backend, dtype)
    if not bool(logits.isfinite().all()):  # in fp32 they might be, but the model is served in this dtype
        raise UnsupportedModelError(
            f"{type(model.model).__name__} gives logits in {dtype} that are not finite: its weights are damaged, or "
            "another dtype is needed"
        )
    model.verified, model.rounding = (backend, logits), error
    if dtype != torch.float32 and not error <= LOGITS_TOLERANCE[dtype] and model.streamed is None:
        dtype = torch.float32
        with widened(model.model, backend, model.stack):
            error, _ = _difference(model, sequences, ReferenceBackend(), dtype)
    limit = LOGITS_TOLERANCE[dtype]
    if not error <= limit:  # also when it is not a number
        raise UnsupportedModelError(
            f"{type(model.model).__name__} gives other logits with a paged cache than alone (they differ by "
            f"{error:.2g} standard deviations, the limit is {limit:g}), so something besides its attention "
            "passes information between tokens"
        )
    kind = str(dtype).removeprefix("torch.")
    return f"verified: logits of the paged path within {error:.1e} standard deviations of the model's own, in {kind}"


def _difference(
    model: PagedModel, sequences: list[torch.Tensor], backend: Backend, dtype: torch.dtype
) -> tuple[float, torch.Tensor]:
    """The largest difference of any row in fp32, of the middle row of any chunk in half precision; and the paged path's
    logits of all rows."""
    steps = schedule([len(sequence) for sequence in sequences])
    misses: list[torch.Tensor] = []
    with nullcontext() if model.indexers is None else model.indexers.tried(MOST_SELECTED) as trial:
        paged = paged_logits(model, sequences, steps, backend, dtype)
        found = [(paged, _own_logits(model, sequences, trial))]
    if model.indexers is not None and trial is not None:
        misses = trial.misses
        if len(misses) != len(model.indexers.modules) * len(sequences):
            raise UnsupportedModelError(f"{type(model.model).__name__} selects keys by another function than topk")
    if model.states is not None:
        halves = [len(sequence) // 2 for sequence in sequences]
        generated = paged_logits(model, sequences, steps, backend, dtype, halves)
        found.append((generated, [_own_steps(model, *pair) for pair in zip(sequences, halves, strict=True)]))
    worst = [miss.amax() if dtype == torch.float32 else miss.median() for miss in misses]
    worst += [_error(ours, own, dtype) for ours, own in found]
    return float(torch.stack(worst).amax()), torch.cat(paged)


def _error(ours: Sequence[torch.Tensor], own: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The largest difference of the logits of sequences, as `_difference`."""
    rows = [deviations(*pair) for pair in zip(ours, own, strict=True)]
    chunks = [rows[chunk.sequence][chunk.start : chunk.end] for step in schedule([*map(len, own)]) for chunk in step]
    return torch.stack([chunk.amax() if dtype == torch.float32 else chunk.median() for chunk in chunks]).amax()


@torch.inference_mode()
def own_logits(model: PagedModel) -> list[torch.Tensor]:
    """What a model whose layers were shown to compute rows apart makes of each sequence, ``[length, vocab]``, with the
    library's own attention. They go through it together, the shorter one followed by tokens that it can't see."""
    sequences = random_sequences(model)
    ids = pad_sequence(sequences, batch_first=True)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    inputs: dict[str, Any] = {"position_ids": positions} if takes_positions(model.model) else {}
    with attention_set(model.model, library_attention(model.model)):
        logits: torch.Tensor = model.model(input_ids=ids, use_cache=False, **inputs)[0]
    return [one[: len(sequence)] for one, sequence in zip(logits, sequences, strict=True)]


def verify_final(model: PagedModel, logits: torch.Tensor) -> str | None:
    """Compare what `final_logits` gave with the model's own logits; → a line for ``--explain-model``. None: they differ
    by too much, so the model is to be loaded anew and compared at each step."""
    assert model.own is not None
    error = float(_error(logits.split([*map(len, model.own)]), model.own, model.dtype))
    if not (bool(logits.isfinite().all()) and error <= LOGITS_TOLERANCE[model.dtype]):
        return None
    kind = str(model.dtype).removeprefix("torch.")
    return f"verified: logits of the final form within {error:.1e} standard deviations of the model's own, in {kind}"


def sample_of(logits: torch.Tensor) -> torch.Tensor:
    """Some of the logits ``[rows, vocab]`` of a verified model, fp32 ``[rows, at most 64]`` in host memory."""
    return logits[:, :: -(-logits.shape[1] // 64)].float().cpu()


def agree(logits: torch.Tensor, earlier: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits ``[rows, n]`` of a model of this `dtype` are those of an earlier start, fp32 ``[rows * n]``."""
    if logits.numel() != earlier.numel():
        return False
    return float(deviations(logits, earlier.view_as(logits)).median()) <= LOGITS_TOLERANCE[dtype]


def final_logits(model: PagedModel, backend: Backend) -> torch.Tensor:
    """The logits ``[rows, vocab]`` that a model in its final form gives for the sequences of `verify`."""
    sequences = random_sequences(model)
    with nullcontext() if model.indexers is None else model.indexers.tried(MOST_SELECTED):
        return torch.cat(paged_logits(model, sequences, schedule([len(s) for s in sequences]), backend))


def random_sequences(model: PagedModel) -> list[torch.Tensor]:
    """Two random sequences, long enough to cross the smallest window if that is small."""
    windows = [spec.window for spec in model.layers if spec.window is not None]
    extra = min((window for window in windows if window < SMALL_WINDOW), default=0)
    lengths = [min(length + extra, model.max_position or length + extra) for length in LENGTHS]
    return [ids.to(model.device) for ids in random_texts(model.config, lengths)]


@torch.inference_mode()
def _own_logits(model: PagedModel, sequences: list[torch.Tensor], trial: Trial | None = None) -> list[torch.Tensor]:
    """What the model alone makes of each sequence, ``[length, vocab]``, with the library's own attention. trial: has
    selected keys of the sequences."""
    logits = []
    with attention_set(model.model, library_attention(model.model)):
        for number, ids in enumerate(sequences):
            if trial is not None:
                trial.sequence = number
            logits.append(_own_pass(model, ids, range(len(ids)), {}))
    return logits


def _own_pass(model: PagedModel, ids: torch.Tensor, part: range, cache: dict[str, Any]) -> torch.Tensor:
    """Logits ``[rows, vocab]`` of some rows of a sequence."""
    positions = torch.arange(part.start, part.stop, device=ids.device)[None]
    # a model that takes none counts itself
    inputs: dict[str, Any] = {"position_ids": positions} if takes_positions(model.model) else {}
    ids = ids[None, part.start : part.stop]
    logits: torch.Tensor = model.model(input_ids=ids, use_cache=False, **inputs, **cache)[0][0]
    return logits


@torch.inference_mode()
def _own_steps(model: PagedModel, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """What the model alone, with a cache of its own, makes of a prompt of so many tokens and then of each further
    token, ``[length, vocab]``."""
    cache = {cache_argument(model.model): OwnCache(model.model.config)}
    parts = [range(prompt), *(range(i, i + 1) for i in range(prompt, len(ids)))]
    with attention_set(model.model, library_attention(model.model)):
        return torch.cat([_own_pass(model, ids, part, cache) for part in parts])


def schedule(lengths: list[int]) -> list[list[Chunk]]:
    """Three steps: a chunk of each sequence, one token of the first beside most of the second, then what is left."""
    first, second = lengths
    cut, other = first // 2, second // 3
    return [
        [Chunk(0, 0, cut), Chunk(1, 0, other)],
        [Chunk(1, other, second - 1), Chunk(0, cut, cut + 1)],
        [Chunk(0, cut + 1, first), Chunk(1, second - 1, second)],
    ]


def paged_logits(
    model: PagedModel,
    sequences: list[torch.Tensor],
    steps: list[list[Chunk]],
    backend: Backend,
    dtype: torch.dtype | None = None,
    prompt_lens: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Logits ``[length, vocab]`` of each sequence, from steps that cover it, through a cache made for the purpose.
    Tokens behind `prompt_lens` count as generated; None: there are none."""
    count, longest = len(sequences), max(map(len, sequences))
    layout = model.lay_out(backend, BLOCK_SIZE, dtype or model.dtype)
    groups, columns = len(layout.groups), -(-longest // BLOCK_SIZE)
    limit = max(longest, model.max_position or 4096)
    tokens = max(sum(chunk.end - chunk.start for chunk in step) for step in steps)
    runner = ModelRunner(model, layout, backend, 1 + groups * count * columns, count, limit, tokens)
    # block 0 is the null block; the sequences take turns with the others
    places = torch.arange(groups * count * columns).view(columns, count, groups).permute(2, 1, 0)
    runner.tables[:, :, :columns] = 1 + places.numpy()
    if prompt_lens is not None:
        runner.inputs.prompt_lens[:count] = prompt_lens
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        order, starts, ends = np.array(step).T
        ids = torch.cat([sequences[c.sequence][c.start : c.end] for c in step]).cpu().numpy()
        out = runner.forward(order, starts, ends - starts, ids, np.arange(len(ids)))
        for sequence, part in zip(order, out.split((ends - starts).tolist()), strict=True):
            logits[sequence].append(part)
    return [torch.cat(parts) for parts in logits]
