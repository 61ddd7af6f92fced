"""Sparse attention by an indexer (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp").

An *indexer* is a small module beside an attention module. It makes an index key of each token, scores the index keys of
a sequence for each query, and gives the indices of those with the largest scores; the attention sees only these.

transformers' indexers get all index keys of one sequence from their cache (`update_indexer`) and a causal mask. Here an
indexer's own code is called for one sequence of the step after the other, with a cache that writes the new index keys
to the paged cache and gives back those of the sequence. The numbers of rows and of keys in such a call are multiples of
`ROW_MULTIPLE` and `KEY_MULTIPLE`, so that a row's scores have the same bits however the text was cut. The shapes of the
calls follow the sequences, so no CUDA graph can hold such a step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ....kernels.contract import ROW_MULTIPLE, LayerCache, PagedBatch

if TYPE_CHECKING:
    from .attention import AttentionCalls, StepAttention

KEY_MULTIPLE = 64  # index keys in a call of an indexer, of which the last ones may be masked
MOST_SCORES = 1 << 18  # rows times keys in a call of an indexer: its scores for each head take 1 MiB
NONE = torch.iinfo(torch.int32).max  # stands for no key; larger than the index of any


class Part(NamedTuple):
    """Rows of one sequence that an indexer computes in one call."""

    request: int
    first: int  # row of the step
    num_rows: int
    rows: torch.Tensor  # int64 [n]: of the step; those behind `num_rows` repeat the last one
    own: torch.Tensor  # int64 [n, 1]: index of each row in its sequence
    blocks: torch.Tensor  # int64 [columns]: the blocks of the keys
    mask: torch.Tensor  # bool [n, keys]: the keys that each row may see


def parts_of(batch: PagedBatch, device: torch.device) -> list[Part]:
    """Cut a step into parts."""
    parts = []
    starts, tables, size = batch.qo_indptr.tolist(), batch.kv_indptr.tolist(), batch.block_size
    multiple = math.lcm(KEY_MULTIPLE, size)
    for request, last_page_len in enumerate(batch.last_page_len.tolist()):
        first, end = starts[request : request + 2]
        table = batch.kv_indices[tables[request] : tables[request + 1]].long()
        length = (len(table) - 1) * size + last_page_len
        most = max(1, MOST_SCORES // length // ROW_MULTIPLE) * ROW_MULTIPLE
        for start in range(first, end, most):
            count = min(most, end - start)
            rows = torch.arange(start, start - (-count // ROW_MULTIPLE) * ROW_MULTIPLE).clamp(max=start + count - 1)
            own = (rows + length - end)[:, None]
            keys = torch.arange(-(-(int(own[-1]) + 1) // multiple) * multiple)
            blocks = table[(keys[::size] // size).clamp(max=len(table) - 1)]
            on_device = (x.to(device) for x in (rows, own, blocks, keys <= own))
            parts.append(Part(request, start, count, *on_device))
    return parts


class _IndexKeys:
    """What an indexer is given as its cache."""

    def __init__(self, part: Part, step: StepAttention, keys: torch.Tensor) -> None:
        self._part, self._step, self._keys = part, step, keys

    def update_indexer(self, key_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Append index keys ``[1, n, index_dim]``; → those of the sequence, ``[1, keys, index_dim]``."""
        rows = slice(self._part.first, self._part.first + self._part.num_rows)
        new, step = key_states[0, : self._part.num_rows, None], self._step
        cache = LayerCache(self._keys, self._keys[..., :0])
        step.backend.append(cache, new, new[..., :0], step.blocks[rows], step.rows[rows])
        return self._keys[self._part.blocks].view(1, -1, key_states.shape[-1]).to(key_states.dtype)


class Trial:
    """A comparison of the served model with the model alone, in which so few keys are selected that it matters which.

    Rounding may change which of two keys with nearly equal scores is selected, and then all that follows. So the model
    alone is given what the served one selected, and its scores tell how far that is from the best."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.selected: dict[tuple[int, int], list[torch.Tensor]] = {}  # by indexer and slot: ``[rows, n]`` of each part
        self.sequence: int | None = None  # the slot whose selection the model alone is given
        self.misses: list[torch.Tensor] = []  # of each such call of `topk`

    def repeat(self, number: int, scores: torch.Tensor) -> Any:
        """What the served model selected, in place of the largest scores ``[1, rows, keys]``. Notes how much less the
        least of it scores than the least of the largest, in parts of the range of the row's scores."""
        assert self.sequence is not None
        given = torch.cat(self.selected[number, self.sequence])[None].long()
        own = torch.arange(scores.shape[1], device=given.device)[:, None]
        indices = torch.where(given == NONE, own, given)  # a row of few keys has selected its own, too
        values, ordered = scores.gather(-1, indices), scores.sort(descending=True).values
        lowest = scores.masked_fill(scores < torch.finfo(scores.dtype).min / 2, torch.inf).amin(-1)
        miss = (ordered[..., given.shape[-1] - 1] - values.amin(-1)) / (ordered[..., 0] - lowest).clamp(min=1e-30)
        self.misses.append(miss[0, given.shape[-1] :])  # earlier rows select all keys
        return torch.return_types.topk((values, indices))


class Indexers:
    """The indexers of a model."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.calls: AttentionCalls | None = None  # once the model is served
        self.serving: Callable[[], bool] = lambda: False
        self.width = 0  # of the index keys that the last call of an indexer made; 0: attention has taken them
        self.trial: Trial | None = None  # while the model is verified
        self._batch: PagedBatch | None = None
        self._parts: list[Part] = []

    @contextmanager
    def tried(self, limit: int) -> Iterator[Trial]:
        """In this context no row selects more than `limit` keys."""
        self.trial = Trial(limit)
        try:
            yield self.trial
        finally:
            self.trial = None

    def take_width(self) -> int:
        """`width`, which attention takes."""
        width, self.width = self.width, 0
        return width

    def serve(self, module: nn.Module, cache_argument: str, width: int) -> None:
        """From now on this indexer computes the sequences of a step, while the model is served."""
        number, forward = len(self.modules), module.forward
        self.modules.append(module)
        signature = inspect.signature(forward)

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.serving():
                with _TopK(self.trial):
                    return self._select(number, forward, signature.bind(*args, **kwargs), cache_argument)
            self.width = width
            with _TopK(self.trial, number):
                return forward(*args, **kwargs)

        module.forward = run

    def _select(
        self, number: int, forward: Callable[..., Any], given: inspect.BoundArguments, cache: str
    ) -> torch.Tensor:
        """The indices that an indexer selects for each row of a step, ascending, int32 ``[1, rows, n]``."""
        assert self.calls is not None
        step, keys = self.calls.coming()
        assert keys is not None
        if self._batch is not step.batch:
            self._batch, self._parts = step.batch, parts_of(step.batch, keys.device)
        num_rows, found = len(step.blocks), []
        for part in self._parts:
            cut = {name: _cut(value, part, num_rows) for name, value in given.arguments.items()}
            cut[cache] = _IndexKeys(part, step, keys)
            indices = forward(*inspect.BoundArguments(given.signature, cut).args)
            found.append(torch.where(indices[0] > part.own, NONE, indices[0])[: part.num_rows].sort().values)
            if self.trial is not None:
                slot = int(self.calls.sequences.slots[part.request])
                self.trial.selected.setdefault((number, slot), []).append(found[-1])
        out = keys.new_full((1, num_rows, max(each.shape[1] for each in found)), NONE, dtype=torch.int32)
        for part, indices in zip(self._parts, found, strict=True):
            out[0, part.first : part.first + part.num_rows, : indices.shape[1]] = indices
        return out


def indexers_of(model: nn.Module) -> Indexers | None:
    """The indexers of a model that is served with them; None for others."""
    return getattr(model, "mainspring_indexers", None)


def _cut(value: Any, part: Part, num_rows: int) -> Any:
    """An argument of an indexer for a part: of tensors ``[1, rows, ...]`` its rows, and its mask for all others."""
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bool and value.shape[-2:] == (num_rows, num_rows):
            return part.mask.expand(*value.shape[:-2], -1, -1)
        return value[:, part.rows] if value.dim() > 1 and value.shape[:2] == (1, num_rows) else value
    if isinstance(value, tuple | list):
        return type(value)(_cut(x, part, num_rows) for x in value)
    return value


class _TopK(TorchFunctionMode):
    """Inside this context `topk` takes the first of equal numbers, so that what it takes does not depend on how many
    masked ones there are. In a trial it takes fewer, and those that indexer `number` selected before, if that is
    given."""

    def __init__(self, trial: Trial | None, number: int | None = None) -> None:
        super().__init__()
        self._trial, self._number = trial, number

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, torch.Tensor.topk):
            return self._first(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _first(self, input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        if self._trial is not None:
            k = min(k, self._trial.limit)
            if self._number is not None and self._trial.sequence is not None:
                return self._trial.repeat(self._number, input)
        values, indices = input.sort(dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))
