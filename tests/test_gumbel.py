"""Keyed sampling draws from the softmax and depends only on seed, position and token; masks equal those of
transformers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mainspring.kernels.reference import gumbel, sampling
from mainspring.kernels.reference.gumbel import gumbel_noise, keyed_choice, keyed_hash
from mainspring.kernels.reference.sampling import mask_top_k_top_p_min_p

ONE_IN_100_000 = {7: 35.6, 15: 49.5, 49: 107.9}  # degrees of freedom → chi-square exceeded once in 100,000 draws
GOLDEN = [  # [seed and position][token], as signed 32-bit numbers
    [555219340, 825723731, -386987619],
    [1296479073, -1883382635, -2136043861],
    [-2112992704, 1927458750, 1760167990],
    [108020803, 1244591269, 647491470],
]


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    """Two threads, because splitting an operation among threads may make its bits depend on its size, which one thread
    would hide."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# The same hash, computed for one number at a time.


def mix(x: int, between: int = 0) -> int:
    x ^= x >> 16
    x = (x * 0x85EBCA6B) % 2**32 ^ between
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def scalar_hash(seed: int, position: int, token: int) -> int:
    low, high = seed % 2**32, (seed >> 32) % 2**32
    first = mix((mix(mix(low) ^ high) + position * 0x9E3779B1) % 2**32)
    second = mix(mix(mix((high + 0x165667B1) % 2**32) ^ low) ^ position * 0x27D4EB2F % 2**32)
    return mix((first + mix(token * 0x27D4EB2F % 2**32)) % 2**32, second)


def scalar_gumbel(hashed: int) -> float:
    uniform = min((hashed + 0.5) / 2**32, 1 - 2**-24)
    return -math.log(-math.log1p(-uniform))


int64 = st.integers(-(2**63), 2**63 - 1)


@given(
    seeds=st.lists(int64, min_size=1, max_size=4),
    positions=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4),
    tokens=st.lists(st.integers(0, 2**20), min_size=1, max_size=40),
)
def test_hash_and_noise_equal_the_scalar_formula(seeds: list[int], positions: list[int], tokens: list[int]) -> None:
    arguments = torch.tensor(seeds), torch.tensor(positions[: len(seeds)]), torch.tensor(tokens)
    want = [[scalar_hash(s, p, t) for t in tokens] for s, p in zip(seeds, positions, strict=False)]
    got = keyed_hash(*arguments)
    assert got.dtype == torch.int32
    assert (got.to(torch.int64) % 2**32).tolist() == want
    noise = torch.tensor([[scalar_gumbel(h) for h in row] for row in want], dtype=torch.float64)
    upper = got >= 0  # as unsigned, below 2**31: the upper half of the distribution
    torch.testing.assert_close(gumbel_noise(*arguments).double()[upper], noise[upper], rtol=1e-6, atol=1e-6)


def test_these_very_bits_are_a_promise() -> None:
    """Streams continue after a restart, perhaps with a newer version, so the hash must not change."""
    seeds, positions = torch.tensor([0, 1, -1, 0x0123456789ABCDEF]), torch.tensor([0, 1, 2**31, 1000])
    assert keyed_hash(seeds, positions, torch.tensor([0, 1, 50256])).tolist() == GOLDEN


def test_noise_is_finite_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = [0, 1, 2**23, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 257, 2**32 - 2, 2**32 - 1]
    signed = torch.tensor([[h - 2**32 if h >= 2**31 else h for h in extremes]], dtype=torch.int32)
    monkeypatch.setattr(gumbel, "keyed_hash", lambda *_: signed)
    want = torch.tensor([[scalar_gumbel(h) for h in extremes]])
    unused = torch.zeros(1, dtype=torch.int64)
    noise = gumbel_noise(unused, unused, unused)
    torch.testing.assert_close(noise[:, :6], want[:, :6], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(noise, want, rtol=0, atol=1e-3)  # the lower tail, which is never chosen, is coarse


def test_every_input_bit_flips_about_half_of_the_output_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**62), 2**62, (500,), generator=generator)
    positions = torch.randint(0, 8192, (500,), generator=generator)
    tokens = torch.randint(0, 150_000, (20,), generator=generator)
    before = keyed_hash(seeds, positions, tokens)

    def share_flipped(after: torch.Tensor) -> torch.Tensor:
        """Share of flips of each output bit, ``[32]``."""
        return torch.stack([(((before ^ after) >> bit) & 1).double().mean() for bit in range(32)])

    flipped = [share_flipped(keyed_hash(seeds ^ (1 << bit), positions, tokens)) for bit in range(63)]
    flipped += [share_flipped(keyed_hash(seeds, positions ^ (1 << bit), tokens)) for bit in range(20)]
    flipped += [share_flipped(keyed_hash(seeds, positions, tokens ^ (1 << bit))) for bit in range(18)]
    assert (torch.stack(flipped) - 0.5).abs().max() < 0.08


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected).square() / expected).sum())


@pytest.mark.parametrize("what_varies", ["seed", "position", "both"])
def test_choices_are_distributed_as_the_softmax(what_varies: str) -> None:
    draws = 40_000
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.0, -2.0, 1.5, 0.3])
    counter = torch.arange(draws)
    seeds = counter if what_varies != "position" else torch.full((draws,), 1234567)
    positions = counter if what_varies != "seed" else torch.full((draws,), 7)
    for temperature in (0.7, 1.0, 2.0):
        scores = (logits / temperature).expand(draws, -1)
        counts = torch.bincount(keyed_choice(scores, seeds, positions), minlength=8)
        assert chi_square(counts, scores[0].softmax(0)) < ONE_IN_100_000[7]


def test_choices_at_neighbouring_positions_and_seeds_are_independent() -> None:
    logits = torch.tensor([1.0, 0.0, 0.5, -0.5])
    pair = torch.outer(logits.softmax(0), logits.softmax(0)).flatten()
    counter = torch.arange(20_000)
    for other_seed, other_position in ((0, 1), (1, 0), (1, 1), (1 << 32, 0), (1, -1)):
        first = keyed_choice(logits.expand(20_000, -1), 3 * counter, 5 + counter % 7)
        second = keyed_choice(logits.expand(20_000, -1), 3 * counter + other_seed, 5 + counter % 7 + other_position)
        assert chi_square(torch.bincount(4 * first + second, minlength=16), pair) < ONE_IN_100_000[15]


def test_a_rare_token_is_drawn_as_often_as_it_should() -> None:
    """The upper tail of the noise: 50 tokens share a mass of 0.005 beside one token with a large logit."""
    logits = torch.zeros(51)
    logits[0] = math.log(50 * 199)
    draws = 200_000
    counts = torch.bincount(
        keyed_choice(logits.expand(draws, -1), torch.arange(draws), torch.zeros(draws).long()), minlength=51
    )
    assert abs(int(counts[1:].sum()) - 1000) < 4.4 * math.sqrt(1000)
    assert chi_square(counts[1:], torch.full((50,), 1 / 50)) < ONE_IN_100_000[49]


@pytest.mark.parametrize("vocab", [7, 257, 4099, 50_257])
def test_a_choice_does_not_depend_on_its_row_or_its_batch(vocab: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 37
    scores = torch.randn(rows, vocab, generator=generator)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 4000, (rows,), generator=generator)
    chosen = keyed_choice(scores, seeds, positions)
    tokens = torch.arange(vocab)
    noise = gumbel_noise(seeds, positions, tokens)
    assert torch.equal(chosen, (scores + noise).argmax(-1))
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(keyed_choice(scores[order], seeds[order], positions[order]), chosen[order])
    for row in (slice(0, 1), slice(5, 8), slice(36, 37)):
        assert torch.equal(keyed_choice(scores[row], seeds[row], positions[row]), chosen[row])
        assert torch.equal(gumbel_noise(seeds[row], positions[row], tokens), noise[row])
    some = tokens[torch.randperm(vocab, generator=generator)[:5]]
    assert torch.equal(gumbel_noise(seeds, positions, some), noise[:, some])


def test_masked_tokens_are_never_chosen_and_ties_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.full((1000, 50), -torch.inf)
    scores[:, 17] = -1000.0
    counter = torch.arange(1000)
    assert keyed_choice(scores, counter, counter).eq(17).all()
    monkeypatch.setattr(gumbel, "gumbel_noise", lambda seeds, _, tokens: torch.zeros(len(seeds), len(tokens)))
    scores[:, [9, 30, 44]] = 2.5
    assert keyed_choice(scores, counter, counter).eq(9).all()


def test_no_rows_no_choices() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    assert keyed_choice(torch.empty(0, 10), nothing, nothing).tolist() == []


# Top-k, top-p and min-p.


def limits(*rows: tuple[int, float, float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top_k, top_p, min_p = zip(*rows, strict=True)
    return torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p)


def as_transformers_does(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    scores = row.unsqueeze(0)
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores[0]


COMBINATIONS = [
    *itertools.product((-1, 0, 1, 5, 50, 10**6), (1.0, 0.9, 0.5, 0.05), (0.0, 0.02, 0.3)),
    (0, 0.999, 0.0),
    (0, 0.0, 0.0),
    (0, 1.0, 1.0),
    (300, 0.99, 0.001),
]


@pytest.mark.parametrize("rounded", [False, True], ids=["fp32 logits", "bf16 logits, with ties"])
@pytest.mark.parametrize(("vocab", "spread"), [(5, 1.0), (1000, 3.0), (6000, 1.0), (6000, 0.1)])
def test_masks_equal_those_of_transformers(vocab: int, spread: float, rounded: bool) -> None:
    logits = spread * torch.randn(len(COMBINATIONS), vocab, generator=torch.Generator().manual_seed(vocab))
    if rounded:
        logits = logits.bfloat16().float()
    kept = logits.clone()
    got = mask_top_k_top_p_min_p(logits, *limits(*COMBINATIONS))
    assert torch.equal(logits, kept), "the argument must not change"
    for row, (combination, want) in enumerate(zip(COMBINATIONS, logits, strict=True)):
        want = as_transformers_does(want, *combination)
        differ = got[row] != want
        if rounded:  # among equal scores, transformers' top-p keeps an arbitrary one
            assert torch.equal(got[row].sort().values, want.sort().values), f"top_k, top_p, min_p = {combination}"
            assert torch.equal(logits[row, differ].unique(), logits[row, differ][:1]), (
                "only the smallest kept may differ"
            )
        else:
            assert not differ.any(), f"top_k, top_p, min_p = {combination}: {int(differ.sum())} differ"


def test_top_p_stops_when_its_mass_is_reached_exactly() -> None:
    """Four tokens of probability 1/4: two of them hold 1/2."""
    row = torch.zeros(4)
    for top_p, stay in ((0.25, 1), (0.5, 2), (0.75, 3)):
        masked = mask_top_k_top_p_min_p(row.unsqueeze(0), *limits((0, top_p, 0.0)))
        assert int(masked.isfinite().sum()) == stay == int(as_transformers_does(row, 0, top_p, 0.0).isfinite().sum())


def test_of_equal_scores_top_p_keeps_the_lowest_ids() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0, 0.0, -1.0, 0.0]])
    masked = mask_top_k_top_p_min_p(scores, *limits((0, 0.75, 0.0)))  # probabilities .37 and four times .14
    assert masked.isfinite().tolist() == [[True, True, True, True, False, False]]


def test_masks_of_a_row_do_not_depend_on_the_other_rows() -> None:
    logits = 2 * torch.randn(len(COMBINATIONS), 5000, generator=torch.Generator().manual_seed(1))
    top_k, top_p, min_p = limits(*COMBINATIONS)
    together = mask_top_k_top_p_min_p(logits, top_k, top_p, min_p)
    for row in range(len(COMBINATIONS)):
        one = slice(row, row + 1)
        assert torch.equal(mask_top_k_top_p_min_p(logits[one], top_k[one], top_p[one], min_p[one]), together[one])


def test_a_row_without_limits_is_left_alone() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    off = (0, 1.0, 0.0)
    assert mask_top_k_top_p_min_p(logits, *limits(off, off, off)) is logits
    for on in ((5, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.5)):
        masked = mask_top_k_top_p_min_p(logits, *limits(off, on, off))
        assert torch.equal(masked[::2], logits[::2])
        assert 0 < int(masked[1].isfinite().sum()) < 100


def test_only_top_p_that_needs_it_sorts_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("sorted")

    monkeypatch.setattr(torch.Tensor, "sort", refuse)
    peaked, flat = 4 * torch.randn(1, 6000, generator=torch.Generator().manual_seed(3)), torch.zeros(1, 6000)
    mask_top_k_top_p_min_p(peaked, *limits((50, 0.9, 0.1)))
    with pytest.raises(AssertionError, match="sorted"):
        mask_top_k_top_p_min_p(flat, *limits((0, 0.9, 0.0)))


def test_a_long_row_sums_to_the_same_bits_alone_and_among_others() -> None:
    x = torch.rand(16, 128_256, generator=torch.Generator().manual_seed(4))
    sums = sampling._row_sums(x)
    assert all(torch.equal(sampling._row_sums(x[i : i + 1]), sums[i : i + 1]) for i in range(16))
    torch.testing.assert_close(sums, x.sum(-1, keepdim=True))
