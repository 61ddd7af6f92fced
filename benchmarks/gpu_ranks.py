"""The part of `gpu_check.py` for several ranks, as far as one GPU can show it: NCCL with a single rank, its collectives
in a CUDA graph, and a model whose products go through them. What two GPUs would show is not measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_models import IN_GRAPHS, Bar, Say, Setup, logits_of, paged, release, rms
from mainspring.core.parallel.group import RankGroup
from mainspring.core.parallel.parallel_backend import ParallelBackend

ROWS, WIDTH, SECONDS = 64, 4096, 60.0
LENGTHS = (40, 17, 64)


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
        *(Bar(f"logits through NCCL, graphs on and off: {family}", f"≤ {LIMIT} σ") for family in IN_GRAPHS),
    ]
}
PARTS: dict[str, Callable[[Setup, Say], None]] = {"ranks": check_ranks}
