"""Weights that are held as integers, and that torch takes for the values that these stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mainspring.core.model.learn.fuse_match import widened
from mainspring.core.model.load.parameters import few_values
from mainspring.core.parallel.cuts import Cut
from mainspring.kernels import host_memory
from mainspring.kernels.decoder_contract import QuantizedWeight
from mainspring.kernels.lazy_weight import LazyWeight, Leaf
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from quantized_folders import Values


def quantized(out: int, seed: int, inputs: int = 384) -> QuantizedWeight:
    """4 bits, in groups of 128."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (out, inputs), dtype=torch.uint8, generator=generator)
    scales = torch.rand(out, inputs // 128, generator=generator)
    return QuantizedWeight(numbers, scales, torch.randint(0, 16, (out, inputs // 128), generator=generator).float())


def leaf(out: int, seed: int) -> Leaf:
    weight = quantized(out, seed)
    return Leaf((out, 384), [weight.numbers, weight.scales], lambda: weight, Values)


def matrix(out: int = 384, seed: int = 0) -> LazyWeight:
    return LazyWeight([leaf(out, seed)], torch.float32)


def experts(turned: bool = False) -> LazyWeight:
    return LazyWeight([leaf(384, seed) for seed in range(3)], torch.float32, stacked=True, turned=turned)


ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda w: w[...],
    "detach": lambda w: w.detach(),
    "parameter": lambda w: nn.Parameter(w, requires_grad=False),
    "contiguous": lambda w: w.mT.contiguous().mT,
    "other dtype": lambda w: w.to(torch.bfloat16),
    "turned": lambda w: w.mT,
    "transposed": lambda w: w.transpose(-1, -2),
    "rows": lambda w: w.narrow(-2, 32, 96),
    "columns": lambda w: w.narrow(-1, 64, 192),
    "columns of a turned one": lambda w: w.mT.narrow(-2, 128, 32),
}
JOINED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "joined": lambda w: torch.cat([w, w.narrow(-2, 32, 5)], -2),
    "joined and turned": lambda w: torch.cat([w.mT, w.mT], -1),
}
OF_MATRICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t": lambda w: w.t(),
    "stacked": lambda w: torch.stack([w, w]),
    "rows of two ranges": lambda w: Cut(0, ((0, 6), (12, 18)), 384).of(w),
}
OF_EXPERTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one": lambda w: w[1],
    "one, turned": lambda w: w[2].T,
    "some": lambda w: w[1:3],
}


OF = {
    "matrix": ONE | JOINED | OF_MATRICES,
    "experts": ONE | JOINED | OF_EXPERTS,
    "turned experts": ONE | OF_EXPERTS | {"joined": lambda w: torch.cat([w, w], -1)},
}


def integers(weight: torch.Tensor) -> torch.Tensor:
    """The values of what a backend finds in it."""
    assert isinstance(weight, LazyWeight)
    found = torch.stack([one.read().values() for one in weight.matrices])
    found = found.mT if weight.turned else found
    return (found if weight.dim() == 3 else found[0]).to(weight.dtype)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OF.items() for name in names])
def test_what_is_made_of_quantized_weights_has_their_integers(kind: str, name: str, inference: bool) -> None:
    operation = OF[kind][name]
    weight = matrix() if kind == "matrix" else experts(kind == "turned experts")
    with torch.inference_mode(inference):
        made, plain = operation(weight), operation(weight.values())
    assert isinstance(made, LazyWeight)
    assert (made.shape, made.dtype) == (plain.shape, plain.dtype)
    assert torch.equal(made.values(), plain)
    assert torch.equal(integers(made), plain)


@pytest.mark.parametrize("inference", [False, True])
def test_everything_else_is_computed_with_the_values(inference: bool) -> None:
    weight, stacked, x = matrix(), experts(), torch.randn(5, 384)
    values, of_experts = weight.values(), stacked.values()
    with torch.inference_mode(inference):
        for made, plain in (
            (F.linear(x, weight), F.linear(x, values)),
            (x @ weight.T, x @ values.T),
            (torch.einsum("bi,eoi->ebo", x, stacked), torch.einsum("bi,eoi->ebo", x, of_experts)),
            (weight[torch.tensor([3, 1])], values[torch.tensor([3, 1])]),
            (weight[::2], values[::2]),
            (torch.cat([weight, values]), torch.cat([values, values])),
            (torch.cat([stacked, stacked]), torch.cat([of_experts, of_experts])),
            (weight + 1, values + 1),
            (weight.int(), values.int()),
        ):
            assert not isinstance(made, LazyWeight)
            assert torch.equal(made, plain)


@pytest.mark.parametrize("inference", [False, True])
def test_views_of_any_kind_can_be_taken(inference: bool) -> None:
    for weight in (matrix(), experts()):
        values = weight.values()
        with torch.inference_mode(inference):
            for view in (
                lambda w: w.view(-1, 96),
                lambda w: w.flatten(),
                lambda w: w[None],
                lambda w: w.unsqueeze(-1),
                lambda w: w.expand(2, *w.shape),
                lambda w: w.transpose(0, -1),
                lambda w: torch.stack(w.unbind()),
                lambda w: torch.cat(w.chunk(2, -1)),
                lambda w: torch.cat(w.split(100, -2), -2),
                lambda w: w[..., 3],
                lambda w: w[1:1],
                lambda w: w.permute(*reversed(range(w.dim()))),
            ):
                assert torch.equal(_plain(view(weight)), view(values))


def _plain(weight: torch.Tensor) -> torch.Tensor:
    return weight.values() if isinstance(weight, LazyWeight) else weight


def test_one_weight_is_joined_to_itself() -> None:
    weight = matrix()
    assert host_memory.joined([weight]) is weight
    assert torch.equal(_plain(host_memory.joined([weight, weight])), torch.cat([weight.values()] * 2))


def test_grouped_products_need_the_weights_of_experts_that_have_rows() -> None:
    Values.made, weight, rows = 0, experts().to(torch.bfloat16), torch.randn(5, 384).bfloat16()
    out = torch._grouped_mm(rows, weight.mT, offs=torch.tensor([2, 2, 5], dtype=torch.int32))
    assert Values.made == 2
    values = weight.values()
    assert torch.equal(out, torch.cat([rows[:2] @ values[0].T, rows[2:] @ values[2].T]))


def test_a_weight_is_packed_when_its_values_are_first_asked_for_and_then_once() -> None:
    Values.made = Values.given_back = 0
    weight = experts()
    torch.cat([weight.mT, weight.mT], 2)
    few_values(weight)
    assert Values.made == 0
    for _ in range(2):
        weight[1].values()
    assert Values.made == 1
    weight.to(torch.bfloat16).values()
    assert Values.made == 3, "it is the same for another dtype"
    weight.forget()
    assert Values.given_back == 3


def test_a_cut_may_divide_groups_but_not_into_what_kernels_do_not_take() -> None:
    weight = matrix()
    (part,) = Cut(1, ((64, 256),), 384).of(weight).matrices  # type: ignore[attr-defined]
    assert part.read().scales.shape == (384, 3)
    (part,) = Cut(1, ((0, 200),), 384).of(weight).matrices  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="groups of 8 inputs"):
        part.read()


def test_weights_quantized_in_different_ways_are_not_joined() -> None:
    other = QuantizedWeight(*quantized(384, 1)[:2], None)
    joined = torch.cat([matrix(), LazyWeight([Leaf((384, 384), [], lambda: other, Values)], torch.float32)])
    assert isinstance(joined, LazyWeight)
    with pytest.raises(ValueError, match="quantized in different ways"):
        joined.matrices[0].read()


def test_a_quantized_weight_is_not_written_to() -> None:
    weight = matrix()
    with pytest.raises(TypeError, match=r"copy_.* would write to a weight that is made"):
        weight.copy_(torch.zeros(384, 384))


def test_few_values_are_those_of_the_checkpoint() -> None:
    found = [few_values(LazyWeight([leaf(384, seed)], torch.float32)) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 256)
        self.experts = nn.Parameter(torch.randn(3, 256, 256) / 16)
        self.norm = nn.LayerNorm(256)
        self.head = nn.Linear(256, 512)
        self.head.weight = self.table.weight  # tied

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for weight in self.experts:
            x = x + F.linear(x, weight)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@torch.no_grad()
def test_a_widened_module_computes_in_fp32_and_its_large_weights_are_not_copied() -> None:
    torch.manual_seed(1)
    module, ids = Mixture().to(torch.bfloat16), torch.tensor([3, 511, 3])
    wanted = copy.deepcopy(module).float()(ids)
    held, rounded = dict(module.named_parameters()), module(ids)
    with widened(module, ReferenceBackend()):
        assert {x.dtype for x in module.parameters()} == {torch.float32}
        lazy = {name for name, x in module.named_parameters(remove_duplicate=False) if isinstance(x, LazyWeight)}
        assert lazy == {"table.weight", "head.weight", "experts"}
        torch.testing.assert_close(module(ids), wanted)
    assert all(x is held[name] for name, x in module.named_parameters())
    assert torch.equal(module(ids), rounded)
