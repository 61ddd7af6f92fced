"""The Triton kernels: the sampled token equals that of gumbel.py, and a row of a product has the same bits in any
batch.

On a machine with CUDA the kernels are compiled, elsewhere they run in Triton's interpreter, on fewer rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mainspring.kernels.decoder_contract import Norm
from mainspring.kernels.reference import gumbel
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from triton_here import (  # noqa: F401  (fixtures)
    CUDA,
    DEVICE,
    HALF,
    in_interpreter,
    interpreted,
    kernels,
    multiplies_in_interpreter,
    products_in_order,
    triton,
)

with in_interpreter:
    import triton.language as tl

    @triton.jit
    def _bits_and_noise(seeds, positions, bits, noise, num_tokens, WIDTH: tl.constexpr):
        row, tokens = tl.program_id(0), tl.arange(0, WIDTH)
        hashed = kernels.keyed_bits(tl.load(seeds + row), tl.load(positions + row), tokens)
        at, there = row * num_tokens + tokens, tokens < num_tokens
        tl.store(bits + at, hashed.to(tl.int32, bitcast=True), mask=there)
        tl.store(noise + at, kernels.noise_of_bits(hashed), mask=there)

    @triton.jit
    def _noise(bits, noise, WIDTH: tl.constexpr):
        at = tl.arange(0, WIDTH)
        tl.store(noise + at, kernels.noise_of_bits(tl.load(bits + at).to(tl.uint32, bitcast=True)))


SHAPES = [(1, 64, 128), (3, 130, 64), (70, 17, 100), (129, 200, 72), (64, 128, 8), (5, 1, 1)]
if CUDA:
    SHAPES += [(1, 4096, 14336), (300, 28672, 4096), (7, 50257, 4100)]


@pytest.fixture
def random() -> torch.Generator:
    seed = 20261120
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def keys(rows: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random seeds and positions."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random)
    return seeds, torch.randint(0, 2**32, (rows,), generator=random)


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def choose(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    return kernels.choose_by_key(*on_device(scores, seeds, positions, sampled)).cpu()


def greedy(scores: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(len(scores), dtype=torch.int64)
    return choose(scores, zeros, zeros, zeros.bool())


def assert_same_draws(got: torch.Tensor, scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> None:
    """Check that the chosen token is gumbel.py's choice, or that its score equals the largest within the rounding of
    two logs."""
    want = gumbel.keyed_choice(scores.float(), seeds, positions)
    sums = scores.float() + gumbel.gumbel_noise(seeds, positions, torch.arange(scores.shape[1]))
    behind = sums.gather(1, want.unsqueeze(1)) - sums.gather(1, got.unsqueeze(1))
    assert behind.max() < 1e-5, f"rows {(got != want).nonzero().flatten().tolist()} differ, by {behind.max()}"
    assert (got != want).float().mean() <= 0.001


# Sampling.


def test_the_hash_is_that_of_gumbel_bit_for_bit(random: torch.Generator) -> None:
    seeds, positions = keys(200 if CUDA else 20, random)
    seeds[:4], positions[:4] = torch.tensor([0, 1, -1, 2**63 - 1]), torch.tensor([0, 1, 2**31, 2**32 - 1])
    tokens = torch.arange(5000)
    bits = torch.empty(len(seeds), len(tokens), dtype=torch.int32, device=DEVICE)
    noise = torch.empty_like(bits, dtype=torch.float32)
    _bits_and_noise[(len(seeds),)](*on_device(seeds, positions), bits, noise, len(tokens), WIDTH=8192)
    assert torch.equal(bits.cpu(), gumbel.keyed_hash(seeds, positions, tokens))
    torch.testing.assert_close(noise.cpu(), gumbel.gumbel_noise(seeds, positions, tokens), rtol=1e-6, atol=1e-6)


def test_noise_is_right_in_both_tails(random: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [int(2**e * f) for e in range(32) for f in (1.0, 1.3, 1.99)]
    some = [0, *small, *(2**32 - 1 - bits for bits in small)]
    unsigned = torch.tensor(some + torch.randint(0, 2**32, (1024 - len(some),), generator=random).tolist())
    bits = torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).to(torch.int32)
    noise = torch.empty(len(bits), device=DEVICE)
    _noise[(1,)](bits.to(DEVICE), noise, WIDTH=len(bits))
    monkeypatch.setattr(gumbel, "keyed_hash", lambda *_: bits.clone())
    torch.testing.assert_close(noise.cpu(), gumbel.gumbel_noise(bits, bits, bits), rtol=1e-6, atol=1e-6)
    uniform = (unsigned.double() + 0.5) / 2**32
    exact, likely = -(-(-uniform).log1p()).log(), uniform < 0.9
    torch.testing.assert_close(noise.cpu().double()[likely], exact[likely], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab", [1, 7, 4096, 4099, 50_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_draws_are_those_of_gumbel_and_other_rows_greedy(
    vocab: int, dtype: torch.dtype, random: torch.Generator
) -> None:
    rows = 512 if CUDA else 3
    seeds, positions = keys(rows, random)
    wide = (4 * torch.randn(rows, vocab + 3, generator=random)).to(dtype)
    scores = wide[:, 1 : vocab + 1]  # rows with an unaligned start
    sampled = torch.rand(rows, generator=random) < 0.5
    sampled[:2] = torch.tensor([True, False])
    got = kernels.choose_by_key(wide.to(DEVICE)[:, 1 : vocab + 1], *on_device(seeds, positions, sampled)).cpu()
    assert torch.equal(got[~sampled], scores[~sampled].float().argmax(-1))
    assert_same_draws(got[sampled], scores[sampled], seeds[sampled], positions[sampled])
    assert torch.equal(choose(scores[1:2], seeds[1:2], positions[1:2], sampled[1:2]), got[1:2])
    order = torch.randperm(rows, generator=random)
    assert torch.equal(choose(scores[order], seeds[order], positions[order], sampled[order]), got[order])


def test_draws_are_distributed_as_the_softmax() -> None:
    draws = 40_000 if CUDA else 250
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.0, 1.5])
    counter = torch.arange(draws)
    chosen = choose(logits.expand(draws, -1), counter, 3 * counter, torch.ones(draws, dtype=torch.bool))
    expected = logits.double().softmax(0) * draws
    chi_square = ((torch.bincount(chosen, minlength=6) - expected).square() / expected).sum()
    assert chi_square < 30.9  # 5 degrees of freedom: exceeded once in 100,000 times


def test_of_equal_scores_the_lowest_id_wins_in_one_part_and_across_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SPLIT", 16)
    scores = torch.full((5, 83), -3.0)
    scores[0, [82, 40, 41]] = 1.5
    scores[1, [82, 16, 15]] = torch.inf
    scores[2, [5, 20]] = torch.tensor([-0.0, 0.0])
    scores[3] = -torch.inf
    scores[4] = -torch.inf
    scores[4, 70] = -1e30
    assert greedy(scores).tolist() == [40, 15, 5, 0, 70]


def test_masked_tokens_are_not_drawn_unless_all_are(random: torch.Generator) -> None:
    seeds, positions = keys(8, random)
    scores = torch.full((8, 100), -torch.inf)
    scores[:7, 17] = -1000.0
    assert choose(scores, seeds, positions, torch.ones(8, dtype=torch.bool)).tolist() == [17] * 7 + [0]


def test_nan_counts_as_the_largest_as_for_argmax(random: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SPLIT", 16)
    scores = torch.randn(4, 50, generator=random)
    scores[:, 3] = torch.inf
    scores[1:, [44, 47]] = torch.tensor([torch.nan, -torch.nan])
    scores[2, 11] = -torch.nan
    scores[3] = torch.nan
    assert greedy(scores).tolist() == [3, 44, 11, 0]
    assert kernels.choose_by_key(scores.to(DEVICE)).tolist() == [3, 44, 11, 0]
    seeds, positions = keys(4, random)
    assert choose(scores, seeds, positions, torch.ones(4, dtype=torch.bool)).tolist() == [3, 44, 11, 0]


def test_no_rows_no_choices() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    assert choose(torch.empty(0, 10), nothing, nothing, nothing.bool()).shape == (0,)


# The activation.


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["16-bit", "fp32"])
@pytest.mark.parametrize("shape", [(1, 14336), (5, 40), (2, 3, 1030), (0, 8)], ids=str)
def test_the_gated_activation_is_rounded_once(
    shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator
) -> None:
    gate_up = (4 * torch.randn(*shape[:-1], 2 * shape[-1], generator=random)).to(DEVICE, dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    want, got = gate * torch.sigmoid(gate) * up, kernels.silu_and_mul(gate_up)
    assert (got.dtype, got.shape) == (dtype, shape)
    assert ((got.double() - want).abs() <= want.abs() * (torch.finfo(dtype).eps / 2 + 2.0**-20) + 2.0**-25).all()
    assert torch.equal(kernels.silu_and_mul(gate_up[-1:]), got[-1:])


# Heads.


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["16-bit", "fp32"])
@pytest.mark.parametrize(("heads", "offset"), [((4, 2), 0.0), ((7, 1), 1.0), ((1, 1), 0.0)], ids=str)
def test_heads_are_normalised_and_rotated_in_place(
    heads: tuple[int, int], offset: float, dtype: torch.dtype, random: torch.Generator
) -> None:
    dim, rows = 64, 5
    reference = ReferenceBackend()
    fused = (3 * torch.randn(rows, sum(heads) + 2, dim, generator=random)).to(DEVICE, dtype)
    norms = [Norm(torch.rand(dim, generator=random).to(DEVICE, dtype), eps, offset) for eps in (1e-5, 1e-2)]
    angles = torch.randn(rows, dim // 2, generator=random).to(DEVICE)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    query, key = fused[:, : heads[0]], fused[:, heads[0] : sum(heads)]
    want = reference.norm_and_rotate(query.clone(), key.clone(), (norms[0], norms[1]), cos_sin)
    rest = fused[:, sum(heads) :].clone()
    alone = fused[2:3].clone()
    kernels.norm_and_rotate(query, key, (norms[0], norms[1]), cos_sin)
    limit = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for got, wanted in zip((query, key), want, strict=True):
        assert ((got - wanted).float().norm() / wanted.float().norm()) < limit
    assert torch.equal(fused[:, sum(heads) :], rest)
    kernels.norm_and_rotate(
        alone[:, : heads[0]], alone[:, heads[0] : sum(heads)], (norms[0], norms[1]), cos_sin[2:3].contiguous()
    )
    assert torch.equal(alone, fused[2:3])


# The product.


def operands(
    shape: tuple[int, int, int], dtype: torch.dtype, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, num_out, num_in = shape
    x = torch.randn(rows, num_in, generator=random).to(DEVICE, dtype)
    weight = torch.randn(num_out, num_in, generator=random).to(DEVICE, dtype)
    return x, weight, torch.randn(num_out, generator=random).to(DEVICE, dtype)


@multiplies_in_interpreter
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["16-bit", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_exact_but_for_rounding(
    shape: tuple[int, int, int], dtype: torch.dtype, with_bias: bool, random: torch.Generator
) -> None:
    x, weight, bias = operands(shape, dtype, random)
    got = kernels.row_invariant_linear(x, weight, bias if with_bias else None)
    want = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    # fp32 sums of num_in products, then one rounding
    bound = shape[2] * 2.0**-23 * (x.double().abs() @ weight.double().abs().T + bias.double().abs())
    bound += want.abs() * torch.finfo(dtype).eps / 2
    assert got.dtype == dtype
    assert ((got.double() - want).abs() <= bound).all()


@multiplies_in_interpreter
@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["16-bit", "fp32"])
def test_the_bits_of_a_row_depend_neither_on_the_other_rows_nor_on_their_number(
    dtype: torch.dtype, random: torch.Generator
) -> None:
    shape = (600, 6144, 4096) if CUDA else (140, 130, 200)
    x, weight, bias = operands(shape, dtype, random)
    together = kernels.row_invariant_linear(x, weight, bias)
    for rows in (1, 2, 63, 64, 65, 129):
        assert torch.equal(kernels.row_invariant_linear(x[:rows], weight, bias), together[:rows])
        assert torch.equal(kernels.row_invariant_linear(x[-rows:], weight, bias), together[-rows:])
    order = torch.randperm(len(x), generator=random).to(DEVICE)
    assert torch.equal(kernels.row_invariant_linear(x[order], weight, bias), together[order])


@multiplies_in_interpreter
@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("num_in", [4096, 14336, 100] if CUDA else [192, 100])
def test_all_tiles_give_the_same_bits(num_in: int, random: torch.Generator) -> None:
    x, weight, bias = operands((300, 4096 if CUDA else 140, num_in), HALF, random)
    limits = kernels._limits(x.device)
    tiles = [*kernels._TILES, *kernels._LONE_TILES] if limits.any_tile else kernels._TILES[1:2]
    fitting = [kernels._fitting(tile, limits) for tile in tiles]
    products = [kernels._linear_with(tile, x, weight, bias) for tile in fitting]
    assert all(torch.equal(product, products[0]) for product in products)


@multiplies_in_interpreter
def test_leading_dimensions_strides_and_no_rows(random: torch.Generator) -> None:
    x, weight, bias = operands((24, 40, 64), HALF, random)
    want = kernels.row_invariant_linear(x, weight, bias)
    assert torch.equal(kernels.row_invariant_linear(x.view(2, 3, 4, 64), weight, bias), want.view(2, 3, 4, 40))
    assert torch.equal(kernels.row_invariant_linear(torch.cat([x, x], 1)[:, :64], weight, bias), want)
    assert torch.equal(kernels.row_invariant_linear(x.T.contiguous().T, weight, bias), want)
    assert torch.equal(kernels.row_invariant_linear(x, torch.cat([weight, weight], 1)[:, :64], bias), want)
    assert kernels.row_invariant_linear(x[:0], weight, bias).shape == (0, 40)


def test_operands_that_do_not_match_are_refused(random: torch.Generator) -> None:
    x, weight, _ = operands((2, 40, 64), HALF, random)
    wrong: list[Any] = [(x.float(), weight), (x[:, :32], weight), (x, weight.T.contiguous().T), (x, weight, x[0])]
    for arguments in wrong:
        with pytest.raises(ValueError, match="one dtype, one inner size"):
            kernels.row_invariant_linear(*arguments)


def test_few_rows_get_low_tiles_and_many_high_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.1-8B on an H200: no more padding than needed, and as many programs as there are multiprocessors."""

    def tile(rows: int, num_out: int) -> tuple[int, int]:
        chosen = kernels._tile_for(rows, num_out, torch.bfloat16, DEVICE)
        return chosen.rows, chosen.num_stages

    monkeypatch.setattr(kernels, "_limits", lambda _: kernels._Limits(132, 232448, True))
    assert tile(1, 4096) == (64, 12)
    assert tile(1, 6144) == (64, 8)
    assert tile(64, 28672) == (64, 4)
    assert tile(65, 28672) == (128, 3)
    assert tile(256, 4096) == (64, 8)
    assert tile(256, 28672) == (256, 4)
    assert tile(600, 4096) == (128, 3)
    assert tile(8192, 4096) == (256, 4)
    monkeypatch.setattr(kernels, "_limits", lambda _: kernels._Limits(58, 101376, True))  # an L4
    assert tile(1, 1024) == (64, 8)
    assert tile(8192, 4096) == (256, 2)
    monkeypatch.setattr(kernels, "_limits", lambda _: kernels._Limits(148, 232448, False))
    assert tile(1, 4096) == tile(8192, 4096) == (128, 3)
