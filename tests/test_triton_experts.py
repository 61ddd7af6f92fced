"""The experts of a mixture in Triton: what the backend's own code computes, with the same bits in any batch.

On a machine with CUDA the kernels are compiled, elsewhere they run in Triton's interpreter, on fewer rows.
"""

from __future__ import annotations

import pytest
import torch

from mainspring.kernels.decoder_contract import Experts, Routing
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from triton_here import (  # noqa: F401  (fixtures)
    CUDA,
    DEVICE,
    HALF,
    in_interpreter,
    interpreted,
    multiplies_in_interpreter,
    products_in_order,
)

with in_interpreter:
    from mainspring.kernels.flashinfer import triton_experts

pytestmark = multiplies_in_interpreter


def rows_of(experts: Experts, rows: int, top_k: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Rows, distinct experts of each, and their shares."""
    hidden, dtype = experts.down.shape[1], experts.down.dtype
    x = torch.randn(rows, hidden, generator=random)
    scores = torch.rand(rows, len(experts.down), generator=random)
    scores[:, 0] += 0.5  # one has many rows
    shares, chosen = scores.topk(top_k)
    return x.to(DEVICE, dtype), chosen.to(DEVICE), shares.to(DEVICE, dtype)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(20261127)


def experts_of(
    num_experts: int, hidden: int, inner: int, dtype: torch.dtype, random: torch.Generator, activation: str = "silu"
) -> Experts:
    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=random) * shape[-1] ** -0.5).to(DEVICE, dtype)

    return Experts(weight(num_experts, 2 * inner, hidden), weight(num_experts, hidden, inner), activation)


SHAPES = [(1, 2, 4, 64, 64), (9, 3, 5, 72, 40), (70, 1, 2, 64, 128), (150, 2, 3, 16, 24)]  # the last: two chunks
if CUDA:
    SHAPES += [(1, 8, 128, 2048, 768), (64, 8, 128, 2048, 768), (5000, 8, 128, 2048, 768), (300, 10, 512, 2048, 512)]


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["16-bit", "fp32"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "top_k", "num_experts", "hidden", "inner"), SHAPES, ids=str)
def test_they_give_what_one_after_another_gives(
    rows: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    inner: int,
    activation: str,
    dtype: torch.dtype,
    random: torch.Generator,
) -> None:
    experts = experts_of(num_experts, hidden, inner, dtype, random, activation)
    given = rows_of(experts, rows, top_k, random)
    got = triton_experts.compute_experts(*given, experts)
    want = ReferenceBackend().experts(*given, experts)
    assert got.dtype == dtype
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < (1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.usefixtures("products_in_order")
def test_the_bits_of_a_row_do_not_depend_on_the_others(
    random: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_experts, "_FEW_PAIRS", 256)
    monkeypatch.setattr(triton_experts, "_BLOCKS", 2)
    rows, shape = (4000, (64, 2048, 768)) if CUDA else (400, (2, 64, 64))
    experts = experts_of(*shape, HALF, random)
    given = rows_of(experts, rows, 2, random)
    together = triton_experts.compute_experts(*given, experts)
    for some in (slice(1), slice(3, 70), slice(rows - 200, rows), torch.randperm(rows, generator=random).to(DEVICE)):
        got = triton_experts.compute_experts(*(x[some] for x in given), experts)
        assert torch.equal(got, together[some])


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["16-bit", "fp32"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (60, 4), (128, 8), (5, 5), (200, 1)], ids=str)
def test_a_router_chooses_the_likeliest(
    num_experts: int, top_k: int, normalise: bool, dtype: torch.dtype, random: torch.Generator
) -> None:
    logits = (3 * torch.randn(40, num_experts, generator=random)).to(DEVICE, dtype)
    chosen, shares = triton_experts.route(logits, top_k, normalise)
    order = logits.float().argsort(dim=1, descending=True, stable=True)  # of equal ones the first
    assert torch.equal(chosen, order[:, :top_k])
    wanted, probabilities = ReferenceBackend().route(logits, Routing(top_k, normalise, widened=True))
    torch.testing.assert_close(shares, probabilities)
    assert torch.equal(logits.gather(1, wanted), logits.gather(1, chosen))


def test_no_rows(random: torch.Generator) -> None:
    experts = experts_of(4, 64, 64, HALF, random)
    nothing = rows_of(experts, 0, 2, random)
    for compute in (triton_experts.compute_experts, ReferenceBackend().experts):
        assert compute(*nothing, experts).shape == (0, 64)
    assert [x.shape for x in triton_experts.route(torch.empty(0, 4, device=DEVICE), 2, True)] == [(0, 2), (0, 2)]
