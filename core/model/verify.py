"""Verify by execution: the paged path must give the logits that the model gives alone.

Two random sequences go through the model one by one, with the library's own eager attention, and then together through
the paged path: flattened into rows, cut into chunks, their blocks interleaved. Whatever makes rows of one request
depend on another's, or a later chunk on state that no cache holds, shows as a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ...ipc.errors import UnsupportedModelError
from ...kernels.interface import ROW_MULTIPLE, Backend, LayerCache, PagedBatch
from ...kernels.reference import ReferenceBackend
from .attention import IMPLEMENTATION, StepAttention
from .paged_model import PagedModel

BLOCK_SIZE = 8
LENGTHS = (13, 10)  # tokens of the two sequences; more where a small window must be crossed
SMALL_WINDOW = 24

# Largest difference allowed, in standard deviations of the logits. Tiny random models of 104 architectures stay below
# 1e-4 in fp32. In half precision the library's own attention rounds scores, and a router may then send a token to
# another expert, so the middle row of a chunk is compared there: what is wrong by structure is wrong in most rows.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


class Chunk(NamedTuple):
    """The tokens ``start:end`` of one sequence."""

    sequence: int
    start: int
    end: int


def verify(model: PagedModel, backend: Backend) -> str:
    """Compare the paged path on `backend` with the model alone; → a line for ``--explain-model``.

    Where they differ by more than `TOLERANCE` in half precision, rounding alone may be the reason (seen in models with
    large scores), and fp32 decides: weights are widened for as long as that takes, which loses nothing but needs the
    memory. Raises `UnsupportedModelError` when they differ in fp32. Leaves `model` bound to nothing of use.
    """
    sequences = random_sequences(model)
    dtype = model.dtype
    error = _difference(model, sequences, backend, dtype)
    if dtype != torch.float32 and not error <= TOLERANCE[dtype]:
        dtype = torch.float32
        with _widened(model.model):
            error = _difference(model, sequences, ReferenceBackend(), dtype)
    if not error <= TOLERANCE[dtype]:  # also when it is not a number
        raise UnsupportedModelError(
            f"{type(model.model).__name__} gives other logits with a paged cache than alone (they differ by "
            f"{error:.2g} standard deviations, the limit is {TOLERANCE[dtype]:g}), so something besides its attention "
            "passes information between tokens"
        )
    kind = str(dtype).removeprefix("torch.")
    return f"verified: logits of the paged path within {error:.1e} standard deviations of the model's own, in {kind}"


def _difference(model: PagedModel, sequences: list[torch.Tensor], backend: Backend, dtype: torch.dtype) -> float:
    """The largest difference of any row in fp32, of the middle row of any chunk in half precision."""
    steps = schedule([len(sequence) for sequence in sequences])
    own = _own_logits(model, sequences)
    paged = paged_logits(model, sequences, steps, backend, dtype)
    worst = []
    for chunk in (chunk for step in steps for chunk in step):
        alone = own[chunk.sequence].float()
        ours = paged[chunk.sequence][chunk.start : chunk.end].float()
        rows = (ours - alone[chunk.start : chunk.end]).abs().amax(1) / alone.std().clamp_min(1e-12)
        worst.append(rows.amax() if dtype == torch.float32 else rows.median())
    return float(torch.stack(worst).amax())


def random_sequences(model: PagedModel) -> list[torch.Tensor]:
    """Two random sequences, long enough to cross the smallest window if that is small. Never the padding token."""
    windows = [spec.window for spec in model.layers if spec.window is not None]
    extra = min((window for window in windows if window < SMALL_WINDOW), default=0)
    pad = getattr(model.config, "pad_token_id", None)
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for length in LENGTHS:
        length = min(length + extra, model.max_position or length + extra)
        ids = torch.randint(2, model.vocab_size, (length,), generator=generator)
        ids[ids == pad] = 1
        sequences.append(ids.to(model.device))
    return sequences


@torch.inference_mode()
def _own_logits(model: PagedModel, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the model alone makes of each sequence, ``[length, vocab]``, with the library's eager attention."""
    model.model.set_attn_implementation("eager")
    try:
        return [
            model.model(
                input_ids=ids[None], position_ids=torch.arange(len(ids), device=ids.device)[None], use_cache=False
            ).logits[0]
            for ids in sequences
        ]
    finally:
        model.model.set_attn_implementation(IMPLEMENTATION)


@contextmanager
def _widened(module: torch.nn.Module) -> Iterator[None]:
    """Hold every half-precision tensor of `module` in fp32 for a while."""
    narrow = [(t, t.dtype) for t in (*module.parameters(), *module.buffers()) if t.dtype in TOLERANCE]
    try:
        for tensor, _ in narrow:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in narrow:
            tensor.data = tensor.data.to(dtype)


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
) -> list[torch.Tensor]:
    """Logits ``[length, vocab]`` of each sequence, from steps that cover it, through a cache made for the purpose."""
    device = model.device
    longest = max(len(sequence) for sequence in sequences)
    blocks_each = -(-longest // BLOCK_SIZE)
    count = len(sequences)
    # block 0 is the null block; sequence s owns s + 1, s + 1 + count, ...
    tables = [torch.arange(blocks_each) * count + sequence + 1 for sequence in range(count)]
    own_caches = [
        LayerCache(
            *(
                torch.zeros(
                    1 + blocks_each * count,
                    BLOCK_SIZE,
                    spec.num_kv_heads,
                    dim,
                    dtype=dtype or model.dtype,
                    device=device,
                )
                for dim in (spec.key_dim, spec.value_dim)
            )
        )
        for spec in model.layers
    ]
    model.bind([own_caches[source] for source in model.sources], backend)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        tokens = sum(end - start for _, start, end in step)
        padded = -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE
        # padding stands at the last position there is: it shows frequencies that depend on a neighbour's position
        positions = torch.full((padded,), (model.max_position or 4096) - 1)
        ids = torch.zeros(padded, dtype=torch.long)
        blocks, rows = torch.zeros(padded, dtype=torch.long), torch.zeros(padded, dtype=torch.long)
        at = 0
        for sequence, start, end in step:
            here = slice(at, at + end - start)
            positions[here] = torch.arange(start, end)
            ids[here] = sequences[sequence][start:end].cpu()
            blocks[here] = tables[sequence][positions[here] // BLOCK_SIZE]
            rows[here] = positions[here] % BLOCK_SIZE
            at += end - start
        batch = _batch(step, tables)
        plans = {spec: backend.plan(spec, batch, device) for spec in set(model.layers)}
        blocks, rows = blocks.to(device), rows.to(device)
        attention = [StepAttention(plans[spec], blocks, rows) for spec in model.layers]
        every = torch.arange(padded, device=device)
        out = model.forward(ids.to(device), positions.to(device), attention, every)
        at = 0
        for sequence, start, end in step:
            logits[sequence].append(out[at : at + end - start])
            at += end - start
    return [torch.cat(parts) for parts in logits]


def _batch(step: list[Chunk], tables: list[torch.Tensor]) -> PagedBatch:
    used = [tables[chunk.sequence][: -(-chunk.end // BLOCK_SIZE)] for chunk in step]
    query_rows = torch.tensor([0, *(chunk.end - chunk.start for chunk in step)])
    return PagedBatch(
        qo_indptr=query_rows.cumsum(0).int(),
        kv_indptr=torch.tensor([0, *(len(table) for table in used)]).cumsum(0).int(),
        kv_indices=torch.cat(used).int(),
        last_page_len=torch.tensor([(chunk.end - 1) % BLOCK_SIZE + 1 for chunk in step]).int(),
        block_size=BLOCK_SIZE,
    )
