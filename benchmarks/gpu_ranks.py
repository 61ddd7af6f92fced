"""The part of `gpu_check.py` for several ranks, as far as one GPU can show it: NCCL with a single rank, its collectives
in a CUDA graph, a model whose products go through them, and FlashInfer's all-reduce between two processes that share
the GPU. What two GPUs would show is not measured."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from gpu_models import IN_GRAPHS, Bar, Say, Setup, logits_of, paged, release, rms
from mainspring.core.parallel.group import RankGroup
from mainspring.core.parallel.parallel_backend import ParallelBackend
from mainspring.kernels.flashinfer.shared_sums import SharedSums

ROWS, WIDTH, SECONDS = 64, 4096, 60.0
LENGTHS = (40, 17, 64)
SHARED_ROWS, SHARED_DTYPES = (1, 7, 64, 500), (torch.bfloat16, torch.float32)  # of tensors that two processes add


def check_ranks(setup: Setup, say: Say) -> None:
    """NCCL's collectives as `RankGroup` calls them."""
    for ordered in (True, False):
        store = f"file://{setup.folder / f'ranks-{ordered}'}"
        group = RankGroup(0, 1, store, setup.device, SECONDS, ordered=ordered)
        x = torch.randn(ROWS, WIDTH, device=setup.device).bfloat16()
        found = [group.sum(x), group.gather(x)]
        if not setup.rehearse:
            found += _in_graph(group, x)
        right = all(torch.equal(one, x) for one in found)
        how = "in a fixed order" if ordered else "by the library"
        say(f"sums {how} and columns, one rank", f"{len(found)} of {len(found)}" if right else "other values", right)
        if ordered:
            _check_models(setup, say, group)
        group.leave()
    _check_shared(setup, say)


def _check_shared(setup: Setup, say: Say) -> None:
    """What `SharedSums` adds in two processes. In a rehearsal a group of two ranks adds it."""
    device = None if setup.rehearse else str(setup.device)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        calls = [pool.submit(_add_shared, rank, f"file://{setup.folder / 'shared'}", device) for rank in range(2)]
        right = min(call.result(2 * SECONDS) for call in calls)
    count = len(SHARED_ROWS) * len(SHARED_DTYPES)
    say("sums by FlashInfer's all-reduce, two processes", f"{right} of {count}", right == count)


def _add_shared(rank: int, store: str, device: str | None) -> int:
    """How many sums of two ranks' tensors have the bits that they should have."""
    group = RankGroup(rank, 2, store, torch.device("cpu"), SECONDS)
    shared = None if device is None else SharedSums(rank, 2, torch.device(device), group.from_all, True)
    right = 0
    for dtype in SHARED_DTYPES:
        for rows in SHARED_ROWS:
            numbers = torch.Generator().manual_seed(rows)
            one, other = (torch.randn(rows, WIDTH, generator=numbers).to(dtype) for _ in range(2))
            mine = (one, other)[rank]
            total = group.sum(mine) if shared is None else shared.sum(mine.to(device)).cpu()
            right += torch.equal(total, (one.float() + other.float()).to(dtype))
    group.leave()
    return right


def _in_graph(group: RankGroup, x: torch.Tensor) -> list[torch.Tensor]:
    """The same, captured with other values and replayed with those of `x`."""
    held, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [group.sum(held), group.gather(held)]
    held.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    return found


def _check_models(setup: Setup, say: Say, group: RankGroup) -> None:
    for family in IN_GRAPHS:
        folder = setup.random_model(family, torch.bfloat16)
        backend = setup.backend()
        model = paged(setup, folder, backend)
        torch.manual_seed(3)
        sequences = [torch.randint(2, model.vocab_size, (length,)) for length in LENGTHS]
        alone = logits_of(model, sequences, backend)
        del model
        together: Any = ParallelBackend(setup.backend(), group)
        model = paged(setup, folder, together)
        apart = [rms(logits_of(model, sequences, together), alone)]
        if not setup.rehearse:
            apart.append(rms(logits_of(model, sequences, together, graphs=True), alone))
        error = max(apart)
        say(f"logits through NCCL, graphs on and off: {family}", f"{error:.4f} σ apart", setup.judge(error < LIMIT))
        del model
        release(setup)


LIMIT = 0.02  # of the same kernels over the same weights, in another order of launches
BARS: dict[str, list[Bar]] = {
    "ranks": [
        Bar("sums in a fixed order and columns, one rank", "the values themselves"),
        Bar("sums by the library and columns, one rank", "the values themselves"),
        Bar("sums by FlashInfer's all-reduce, two processes", "the bits of fp32 sums in order"),
        *(Bar(f"logits through NCCL, graphs on and off: {family}", f"≤ {LIMIT} σ") for family in IN_GRAPHS),
    ]
}
PARTS: dict[str, Callable[[Setup, Say], None]] = {"ranks": check_ranks}
