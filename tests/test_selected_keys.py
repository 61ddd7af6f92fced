"""Attention to selected keys in the reference kernels: right, and with bits that depend on a row's own keys alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mainspring.kernels.contract import AttentionSpec
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from test_kernels import Setup, attend, by_dtype, check, mixed, sequences, spec_of, whole

LENGTHS = (1, 65, 300, 150, 7)
BACKEND = ReferenceBackend()


def draw(lengths: Sequence[int], most: int, seed: int = 0) -> list[torch.Tensor]:
    """Each row selects at most so many of the keys that it may see, its own sometimes not among them. Every third row
    also names later keys, which stand for none."""
    generator = torch.Generator().manual_seed(seed)
    selections = []
    for length in lengths:
        order = torch.rand(length, length, generator=generator)
        order[2::3] += torch.ones(length, length).triu(1)[2::3]
        order[0::3] += 9 * torch.ones(length, length).triu(1)[0::3]
        order[1::3] += 9 * torch.ones(length, length).triu(1)[1::3]
        chosen = torch.zeros(length, length, dtype=torch.bool)
        chosen.scatter_(1, order.argsort(1)[:, :most], True)
        selections.append(chosen)
    return selections


def selecting(spec: AttentionSpec) -> AttentionSpec:
    return spec._replace(selects=True)


@by_dtype
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    "spec",
    [spec_of(), spec_of(kv_heads=1, ratio=20, key_dim=40, value_dim=32), spec_of(ratio=3, softcap=2.0)],
    ids=["heads", "latent", "softcap"],
)
def test_a_row_sees_its_selected_keys_alone(dtype: torch.dtype, heads_first: bool, spec: AttentionSpec) -> None:
    setup = Setup(selecting(spec), dtype, heads_first=heads_first, selected=draw(LENGTHS, 90))
    check(BACKEND, setup, LENGTHS, mixed(LENGTHS))


def test_sinks_take_part() -> None:
    setup = Setup(selecting(spec_of()), sinks=torch.tensor([0.5, 2.0]), selected=draw(LENGTHS, 10))
    check(BACKEND, setup, LENGTHS, whole(LENGTHS))


def test_bits_are_those_of_full_attention_where_all_keys_are_selected() -> None:
    spec = spec_of(ratio=4)
    every = [torch.ones(n, n, dtype=torch.bool) for n in LENGTHS]
    requests = sequences(Setup(spec), LENGTHS)
    full = attend(BACKEND, Setup(spec), requests, whole(LENGTHS))
    selected = attend(BACKEND, Setup(selecting(spec), selected=every), requests, mixed(LENGTHS))
    assert all(torch.equal(one, other) for one, other in zip(full, selected, strict=True))


@by_dtype
def test_bits_depend_on_the_row_alone(dtype: torch.dtype) -> None:
    setup = Setup(selecting(spec_of(kv_heads=1, ratio=5)), dtype, selected=draw(LENGTHS, 70))
    requests = sequences(setup, LENGTHS)
    together = attend(BACKEND, setup, requests, mixed(LENGTHS))
    for number, length in enumerate(LENGTHS):
        alone = setup._replace(selected=setup.selected[number : number + 1])  # type: ignore[index]
        steps = [[(0, min(9, length - start))] for start in range(0, length, 9)]
        assert torch.equal(attend(BACKEND, alone, requests[number : number + 1], steps, seed=3)[0], together[number])
