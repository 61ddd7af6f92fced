"""What the ranks of `rank_pool.py` do in tests. A process can import this file, unlike one of tests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mainspring.benchmarks.architectures import MAX_TOKENS, drive
from mainspring.core.model.learn.verify import final_logits
from mainspring.core.model.learn.whole_match import make_whole
from mainspring.core.model.load import sliced_reading
from mainspring.core.model.load.loader import load_model
from mainspring.core.parallel import twin
from mainspring.core.parallel.group import RankGroup
from mainspring.core.parallel.parallel_backend import ParallelBackend
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.ipc.errors import UnsupportedModelError
from mainspring.kernels.native.native_backend import NativeBackend
from mainspring.kernels.reference.reference_backend import ReferenceBackend

CPU = torch.device("cpu")
PROMPTS = [[(7 * i + j * j) % 380 + 2 for j in range(n)] for i, n in enumerate((5, 37, 18, 9))]


def sums(group: RankGroup, dtype: torch.dtype, large: int) -> list[list[float]]:
    """Sums of one row: alone, at several places of a batch, and in one of `large` rows, which goes another way."""
    torch.manual_seed(group.rank)
    row = torch.randn(64).to(dtype)
    found = []
    for rows, at in ((1, 0), (3, 2), (8, 5), (37, 36), (large, large // 2)):
        batch = torch.randn(rows, 64).to(dtype)
        batch[at] = row
        found.append(group.sum(batch)[at].float().tolist())
    return found


def library_sums(group: RankGroup, dtype: torch.dtype) -> list[float]:
    """A sum as the library adds it."""
    torch.manual_seed(group.rank)
    group.ordered = False
    try:
        return group.sum(torch.randn(64).to(dtype)).float().tolist()
    finally:
        group.ordered = True


def exchanged(group: RankGroup) -> tuple[list[list[int]], list[int], bytes, bytes, list[int]]:
    x = torch.tensor([group.rank, 7])
    group.copy_of_leader(x)
    return (
        group.gather(torch.tensor([[group.rank, 10 + group.rank]])).tolist(),
        group.least([group.rank, 3 - group.rank]),
        group.from_leader(b"decided" if group.leads else None),
        group.from_leader(b"" if group.leads else None),
        x.tolist(),
    )


def generate(group: Any, path: str, kernels: str = "reference", **how: Any) -> tuple[list[list[int]], float, str]:
    """Greedy tokens of all prompts, the share of the weights that this rank holds, and the first note."""
    torch.set_num_threads(1)
    inner: Any = ReferenceBackend() if kernels == "reference" else NativeBackend()
    backend: Any = ParallelBackend(inner, group, how.pop("parts", 0))
    model = load_model(ModelConfig(model=path), LoadConfig(), CPU, None, backend, **how)
    tokens = drive(model, PROMPTS, MAX_TOKENS)
    names = list(model.parameters.names())
    held = sum(model.parameters.shape(name).numel() for name in names)
    return tokens, held / sum(model.parameters.whole_shape(name).numel() for name in names), model.notes[0]


def quantized(group: Any, path: str) -> tuple[list[list[float]], list[int]]:
    """Logits, and the kinds of the weights that this rank holds."""
    torch.set_num_threads(1)
    backend: Any = ParallelBackend(NativeBackend(), group)
    model = load_model(ModelConfig(model=path, dtype="float32"), LoadConfig(), CPU, None, backend)
    make_whole(model, backend)
    weights: Any = model.whole.decoder.weights  # type: ignore[union-attr]
    return final_logits(model, backend).tolist(), sorted(weight.kind for weight in weights.values())


def whole_experts(group: RankGroup, path: str) -> Any:
    return generate(group, path, whole_experts=True)


def in_parts(group: Any, path: str) -> list[Any]:
    seen = []
    backend: Any = ParallelBackend(ReferenceBackend(), group, 4)
    model = load_model(ModelConfig(model=path, dtype="bfloat16"), LoadConfig(), CPU, None, backend)
    forward = model.forward

    def noted(*args: Any) -> torch.Tensor:
        seen.append(forward(*args))
        return seen[-1]

    model.forward = noted  # type: ignore[method-assign]
    tokens = drive(model, PROMPTS, MAX_TOKENS)
    return [tokens, torch.cat(seen).view(torch.int16).numpy().tobytes()]


def read_bytes(group: RankGroup, path: str, whole_experts: bool) -> tuple[int, int]:
    """Bytes that are read of the parameters that are cut, and of these parameters as a whole."""
    read, own, part_of = [0], sliced_reading._Part.__getitem__, sliced_reading.CheckpointNames.part_of

    def noted(part: Any, index: Any) -> torch.Tensor:
        found = own(part, index)
        read[0] += found.numel() * found.element_size()
        return found

    def noted_whole(names: Any, tensor: Any, *more: Any) -> Any:
        found = part_of(names, tensor, *more)
        read[0] += 4 * math.prod(tensor.get_shape()) * (found is tensor)
        return found

    sliced_reading._Part.__getitem__ = noted  # type: ignore[method-assign]
    sliced_reading.CheckpointNames.part_of = noted_whole  # type: ignore[method-assign]
    try:
        backend: Any = ParallelBackend(ReferenceBackend(), group)
        model = load_model(ModelConfig(model=path), LoadConfig(), CPU, None, backend, whole_experts=whole_experts)
    finally:
        sliced_reading._Part.__getitem__ = own  # type: ignore[method-assign]
        sliced_reading.CheckpointNames.part_of = part_of  # type: ignore[method-assign]
    return read[0], sum(4 * model.parameters.whole_shape(name).numel() for name in model.parameters.cuts)


def dummy(group: RankGroup, path: str) -> tuple[int, dict[str, float], dict[str, tuple[int, ...]]]:
    backend: Any = ParallelBackend(ReferenceBackend(), group)
    model = load_model(ModelConfig(model=path), LoadConfig(load_format="dummy"), CPU, None, backend)
    parameters = model.parameters
    whole = {n: float(parameters.get(n).sum()) for n in parameters.names() if n not in parameters.cuts}
    return group.rank, whole, {name: tuple(parameters.shape(name)) for name in parameters.cuts}


def set_rows(group: RankGroup, path: str) -> list[float]:
    backend: Any = ParallelBackend(ReferenceBackend(), group)
    model = load_model(ModelConfig(model=path), LoadConfig(), CPU, None, backend)
    name, parameters = "model.layers.0.mlp.up_proj.weight", model.parameters
    for start in (0, 40):
        rows = torch.arange(start, start + 60.0)[: 96 - start, None].expand(-1, 64).contiguous()
        parameters.check(name, start, rows.shape)
        parameters.set(name, rows, start)
    with pytest.raises(ValueError, match="has shape"):
        parameters.check(name, 0, (48, 64, 1))
    return [float(x) for x in parameters.get(name)[:, 5]]


def with_wrong_plans(group: RankGroup, path: str, then_right: bool) -> str:
    """Plans in which keys are not cut, and outputs are columns."""
    own = twin.plans_of

    def wrong(model: Any, whole: bool, homes: bool) -> Iterator[Any]:
        names = "model.layers.*.self_attn."
        yield "a wrong plan", {f"{names}q_proj": "colwise", f"{names}o_proj": "colwise"}
        yield "half a plan", {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise"}
        yield "no plan", {}
        if then_right:
            yield from own(model, whole, homes)

    twin.plans_of = wrong
    try:
        return generate(group, path)[2]
    except UnsupportedModelError as error:
        return str(error)
    finally:
        twin.plans_of = own
