"""Requirements on the native backend beyond test_kernels.py: the reference's choices, one OpenMP runtime, any number of
threads."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.core.worker.kv_layout import plan_layout
from mainspring.kernels.contract import AttentionSpec, Choice, LayerCache, PagedBatch
from mainspring.kernels.native.native_backend import NativeBackend
from mainspring.kernels.reference.gumbel import gumbel_noise, keyed_choice
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from native_here import why_not
from tiers import examples

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
CPU = torch.device("cpu")
REFERENCE = ReferenceBackend()
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    return NativeBackend()


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


# ------------------------------------------------------------------ attention


def step_of(
    spec: AttentionSpec, requests: Sequence[tuple[int, int]], kv_dtype: torch.dtype, block_size: int = 16
) -> tuple[PagedBatch, LayerCache]:
    """A filled cache and the batch of a step in which request i, of the given length, has the given number of rows."""
    counts = [-(-length // block_size) for length, _ in requests]
    total = sum(counts)
    shapes = [(1 + total, block_size, spec.num_kv_heads, dim) for dim in (spec.key_dim, spec.value_dim)]
    cache = LayerCache(*(draw(*shape, seed=i).to(kv_dtype) for i, shape in enumerate(shapes)))
    batch = PagedBatch(
        torch.tensor([0, *itertools.accumulate(rows for _, rows in requests)], dtype=torch.int32),
        torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        1 + torch.randperm(total, generator=torch.Generator().manual_seed(0)).int(),
        torch.tensor([(length - 1) % block_size + 1 for length, _ in requests], dtype=torch.int32),
        block_size,
    )
    return batch, cache


def spec_of(q_heads: int = 4, kv_heads: int = 2, key_dim: int = 64, **rest: object) -> AttentionSpec:
    values = {"value_dim": key_dim, "scale": key_dim**-0.5, **rest}
    return AttentionSpec(q_heads, kv_heads, key_dim, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (1, 3), (33, 17), (72, 200)], ids=str)
def test_any_dtypes_and_head_sizes(
    native: NativeBackend, dtype: torch.dtype, kv_dtype: torch.dtype, dims: tuple[int, int]
) -> None:
    spec = spec_of(6, 2, dims[0], value_dim=dims[1])
    requests = [(1, 1), (70, 1), (130, 9), (65, 65)]
    batch, cache = step_of(spec, requests, kv_dtype)
    query = draw(76, 6, dims[0], seed=5).to(dtype)
    got = native.run(native.plan(spec, batch, CPU), query, cache)
    wide = LayerCache(cache.keys.float(), cache.values.float())
    want = REFERENCE.run(REFERENCE.plan(spec, batch, CPU), query.float(), wide)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-3 if dtype == torch.float16 else 1e-2
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_long_contexts_have_the_same_bits_alone_beside_others_and_with_any_threads(
    native: NativeBackend, dtype: torch.dtype, window: int | None
) -> None:
    """Past 512 positions a row's sums are joined range by range, and the ranges may be computed by several threads."""
    spec = spec_of(4, 2, 32, window=window, softcap=None)
    lengths = [513, 1500, 1024, 70]
    requests = [(length, 40) for length in lengths]
    batch, cache = step_of(spec, requests, dtype)
    query = draw(160, 4, 32).to(dtype)
    torch.set_num_threads(1)
    together = native.run(native.plan(spec, batch, CPU), query, cache)
    for threads in (2, 3, 16):
        torch.set_num_threads(threads)
        assert torch.equal(bits(native.run(native.plan(spec, batch, CPU), query, cache)), bits(together))
    for i, length in enumerate(lengths):
        begin, end = batch.kv_indptr[i], batch.kv_indptr[i + 1]
        for back in (0, 1, 39):  # compute the row this far before the last, as a decode step
            last = length - back
            table = batch.kv_indices[begin:end][: -(-last // 16)]
            sizes = torch.tensor([0, len(table)], dtype=torch.int32)
            page = torch.tensor([(last - 1) % 16 + 1], dtype=torch.int32)
            alone = PagedBatch(torch.tensor([0, 1], dtype=torch.int32), sizes, table, page, 16)
            row = 40 * i + 39 - back
            for threads in (1, 2):
                torch.set_num_threads(threads)
                got = native.run(native.plan(spec, alone, CPU), query[row : row + 1], cache)
                assert torch.equal(bits(got[0]), bits(together[row])), (i, back, threads)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rest", [{}, {"window": 600}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_requests_that_share_blocks_have_the_bits_that_they_have_alone(
    native: NativeBackend, kv_dtype: torch.dtype, rest: dict[str, Any], group: int
) -> None:
    """Ranges that neighbouring requests have in the same blocks are computed once for all of their rows."""
    spec = spec_of(4 * group, 4, 64, **rest)
    # shared blocks of 16 tokens, tokens after them, rows
    requests = [(70, 1, 1), (70, 30, 1), (64, 200, 9), (33, 1, 1), (70, 500, 40), (70, 7, 7), (0, 90, 3), (70, 16, 1)]
    requests += [(10, 1500, 1), (10, 1500, 3), (70, 9, 1), (100, 20, 1), (100, 3000, 1), (100, 9, 2), (70, 60, 60)]
    tables, free = [], itertools.count(101)
    for shared, own, _ in requests:
        tables.append([*range(1, shared + 1), *itertools.islice(free, -(-own // 16))])
    shape = (next(free), 16, 4, 64)
    cache = LayerCache(draw(*shape, seed=1).to(kv_dtype), draw(*shape, seed=2).to(kv_dtype))
    rows = [0, *itertools.accumulate(count for *_, count in requests)]
    query = draw(rows[-1], 4 * group, 64).bfloat16()

    def batch_of(chosen: Sequence[int]) -> PagedBatch:
        ends = [
            [0, *itertools.accumulate(counts)]
            for counts in ([requests[r][2] for r in chosen], [len(tables[r]) for r in chosen])
        ]
        pages = [(requests[r][1] - 1) % 16 + 1 for r in chosen]
        table = [block for r in chosen for block in tables[r]]
        return PagedBatch(*(torch.tensor(one, dtype=torch.int32) for one in (*ends, table, pages)), 16)

    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        plan = native.plan(spec, batch_of(range(len(requests))), CPU)
        for _ in range(2):  # as for two layers
            together = native.run(plan, query, cache)
            for r in range(len(requests)):
                mine = slice(rows[r], rows[r + 1])
                alone = native.run(native.plan(spec, batch_of([r]), CPU), query[mine], cache)
                assert torch.equal(bits(together[mine]), bits(alone)), (threads, r)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("window", [None, 37])
def test_a_row_has_the_same_bits_however_many_share_its_keys(
    native: NativeBackend, kv_dtype: torch.dtype, window: int | None
) -> None:
    """With few rows values are read in place, with many they are packed; six rows make a block."""
    for group, dims in ((1, (64, 64)), (2, (128, 128)), (3, (72, 40)), (7, (33, 129))):
        spec = spec_of(2 * group, 2, dims[0], value_dim=dims[1], window=window)
        batch, cache = step_of(spec, [(150, 30)], kv_dtype)
        query = draw(32, 2 * group, dims[0]).bfloat16()
        prompt = native.run(native.plan(spec, batch, CPU), query, cache)
        for rows in (1, 2, 3, 4, 5, 9):
            some = batch._replace(qo_indptr=torch.tensor([0, rows], dtype=torch.int32))
            got = native.run(native.plan(spec, some, CPU), query[30 - rows : 30], cache)
            assert torch.equal(bits(got), bits(prompt[30 - rows : 30])), (group, rows)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("block_size", [8, 32])
def test_where_heads_lie_in_a_block_makes_no_difference(
    native: NativeBackend, kv_dtype: torch.dtype, block_size: int
) -> None:
    spec = spec_of(6, 3, 40, value_dim=24)
    batch, filled = step_of(spec, [(150, 1), (77, 20)], kv_dtype, block_size)
    query, results = draw(24, 6, 40).bfloat16(), []
    for heads_first in (False, True):
        layout = plan_layout([spec] * 2, [0, 1], block_size, kv_dtype, native.cache_dims, heads_first)
        pool = torch.full((len(filled.keys), layout.block_elements), math.nan).to(kv_dtype)
        cache = layout.caches(pool)[1]
        for view, numbers in zip(cache, filled, strict=True):
            view.copy_(numbers)
        results.append(native.run(native.plan(spec, batch, CPU), query, cache))
    assert torch.equal(*results)


def test_a_block_size_that_does_not_fit_is_named(native: NativeBackend) -> None:
    batch, _ = step_of(spec_of(), [(20, 1)], torch.float32)
    for block_size in (0, 4, 12):
        with pytest.raises(ValueError, match=f"block_size is {block_size}; it must be a multiple of 8"):
            native.plan(spec_of(), batch._replace(block_size=block_size), CPU)


def test_one_plan_serves_many_layers(native: NativeBackend) -> None:
    spec = spec_of(8, 2, 32)
    batch, cache = step_of(spec, [(5000, 1)], torch.bfloat16)
    query = draw(8, 8, 32).bfloat16()
    plan = native.plan(spec, batch, CPU)
    first = native.run(plan, query, cache)
    for _ in range(5):
        assert torch.equal(native.run(plan, query, cache), first)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_a_row_whose_scores_are_no_numbers_gives_none(native: NativeBackend, dtype: torch.dtype, rows: int) -> None:
    """Also over several ranges of positions, and whatever was computed before."""
    spec = spec_of()
    batch, cache = step_of(spec, [(1500, rows), (700, rows), (60, rows)], dtype)
    query = draw(sum(int(n) for n in batch.qo_indptr.diff()), 4, 64).to(dtype)
    plan = native.plan(spec, batch, CPU)
    want = native.run(plan, query, cache).clone()
    bad = torch.tensor([0, rows, 2 * rows])
    query[bad] = math.inf
    got = native.run(plan, query, cache)
    assert bool(got[bad].isnan().all())
    rest = torch.ones(len(query), dtype=torch.bool).index_fill(0, bad, False)
    assert torch.equal(got[rest], want[rest])


def test_null_blocks_and_memory_behind_the_end_are_never_read(native: NativeBackend) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        spec = spec_of(2, 2, 24, window=20)
        batch, cache = step_of(spec, [(200, 3)], dtype, block_size=8)
        query = draw(8, 2, 24).to(dtype)
        want = native.run(native.plan(spec, batch, CPU), query, cache)
        used = batch.kv_indices[(200 - 3 - 19) // 8 :].long()
        poisoned = LayerCache(*(torch.full_like(x, math.nan) for x in cache))
        for clean, dirty in zip(cache, poisoned, strict=True):
            dirty[used] = clean[used]
        batch.kv_indices[: (200 - 3 - 19) // 8] = 0
        assert torch.equal(native.run(native.plan(spec, batch, CPU), query, poisoned), want)


# ------------------------------------------------------------------ into the cache


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_append_casts_as_torch_does(native: NativeBackend, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    keys = torch.cat([draw(40, 2, 50) * 100, torch.linspace(-0.05, 0.05, 4000).view(40, 2, 50)]).to(dtype)
    keys[0, 0, :6] = torch.tensor([0.0, -0.0, 448.0, -464.0, 1e4, -1e4])
    values = draw(80, 2, 20, seed=1).to(dtype)
    blocks, rows = torch.arange(80) // 8, torch.arange(80) % 8
    caches = [
        LayerCache(torch.zeros(10, 8, 2, 50, dtype=kv_dtype), torch.zeros(10, 8, 2, 20, dtype=kv_dtype))
        for _ in range(2)
    ]
    native.append(caches[0], keys, values, blocks, rows)
    REFERENCE.append(caches[1], keys, values, blocks, rows)
    for got, want in zip(*caches, strict=True):
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 24, 64, 70])
def test_rotation_has_the_references_bits(
    native: NativeBackend, dtype: torch.dtype, interleaved: bool, rotary_dim: int
) -> None:
    joined = draw(37, 6 + 2 + 2, 80).to(dtype)  # strided, as the joint projection writes them
    angles = draw(37, rotary_dim // 2, seed=1)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    want = joined.clone()
    REFERENCE.rotate(want[:, :6], want[:, 6:8], cos_sin, interleaved)
    got = joined.clone()
    native.rotate(got[:, :6], got[:, 6:8], cos_sin, interleaved)
    assert torch.equal(got, want)


# ------------------------------------------------------------------ norms and activations


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_add_rms_norm_is_the_norm_of_the_rounded_sum(native: NativeBackend, dtype: torch.dtype) -> None:
    for width in (1, 33, 768):
        x, residual, weight = (draw(7, width, seed=i).to(dtype) for i in range(3))
        total = residual + x
        want = native.rms_norm(total, weight[0], 1e-6, 1.0)
        normed, added = native.add_rms_norm(x.clone(), residual.clone(), weight[0], 1e-6, 1.0)
        assert torch.equal(added, total)
        assert torch.equal(normed, want)


def test_a_norms_weight_may_have_another_dtype(native: NativeBackend) -> None:
    x, weight = draw(3, 40).bfloat16(), draw(40)
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


def test_a_head_norm_reads_the_joint_projection_in_place(native: NativeBackend) -> None:
    joined, weight = draw(1, 9, 10 * 64).bfloat16(), draw(64).bfloat16()
    heads = joined[..., 64 : 64 * 5].view(1, 9, 4, 64)
    assert torch.equal(native.rms_norm(heads, weight, 1e-6), native.rms_norm(heads.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_are_right_to_a_few_ulp_of_the_result(native: NativeBackend, activation: str) -> None:
    gate = torch.cat([torch.linspace(-9, 9, 40001), torch.logspace(-30, 0, 1000), -torch.logspace(-30, 0, 1000)])
    x = torch.stack([gate, torch.ones_like(gate)]).T.contiguous()
    wide = gate.double()
    inner = {
        "silu": lambda: 1 / (1 + torch.exp(-wide)),
        "gelu": lambda: 0.5 * torch.special.erfc(-wide / math.sqrt(2)),
        "gelu_tanh": lambda: 1 / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))),
    }[activation]()
    got = native.act_and_mul(x, activation)[:, 0].double()
    error = ((got - wide * inner) / (wide * inner).abs().clamp_min(1e-30)).abs()
    near = wide > -4  # the exponents of the tails are large, and so is their rounding error
    assert error[near].max() < 2e-6
    assert error.max() < 3e-5


# ------------------------------------------------------------------ choosing


def test_the_noise_is_the_references(native: NativeBackend) -> None:
    """Over many rows the same token wins, and where the two noises are close, neither may be far off."""
    rows, vocab = 400, 1000
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(rows) * 7919
    scores = torch.zeros(rows, vocab)
    sampled = torch.ones(rows, dtype=torch.bool)
    chosen = native.choose(scores, seeds, positions, sampled)
    assert torch.equal(chosen, keyed_choice(scores, seeds, positions))
    # Bound the winner's lead from both sides: raise the runner-up by a little less and by a little more than the lead.
    noise = gumbel_noise(seeds, positions, torch.arange(vocab))
    best, second = noise.topk(2).values.T
    runner_up = noise.topk(2).indices[:, 1]
    for factor, want in ((0.999, chosen), (1.001, runner_up)):
        lifted = scores.clone()
        lifted[torch.arange(rows), runner_up] = (best - second) * factor + (1e-5 if factor > 1 else -1e-5)
        assert torch.equal(native.choose(lifted, seeds, positions, sampled), want)


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, 5), vocab=st.integers(1, 300), seed=st.integers(-(2**63), 2**63 - 1), data=st.integers(0, 1000)
)
def test_choices_are_the_references_on_scores_that_are_exact(rows: int, vocab: int, seed: int, data: int) -> None:
    native = NativeBackend()
    generator = torch.Generator().manual_seed(data)
    scores = torch.randint(-40, 40, (rows, vocab), generator=generator) / 4
    scores[torch.rand(rows, vocab, generator=generator) < 0.2] = -torch.inf
    seeds = torch.arange(rows) + torch.tensor(seed)
    positions = torch.randint(0, 2**32, (rows,), generator=generator)
    sampled = torch.rand(rows, generator=generator) < 0.7
    want = REFERENCE.choose(scores, seeds, positions, sampled)
    assert torch.equal(native.choose(scores, seeds, positions, sampled), want)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_the_largest_score_wins_and_of_equal_ones_the_lowest_token(native: NativeBackend, dtype: torch.dtype) -> None:
    nothing = torch.zeros(3, dtype=torch.int64)
    for vocab in (1, 15, 16, 17, 4097, 50000):
        scores = torch.zeros(3, vocab, dtype=dtype)
        scores[1] = draw(vocab).to(dtype)
        scores[2] = -torch.inf
        want = [0, int((scores[1] == scores[1].max()).nonzero()[0]), 0]
        for threads in (1, 2):
            torch.set_num_threads(threads)
            got = native.choose(scores, nothing, nothing, torch.zeros(3, dtype=torch.bool))
            assert got.tolist() == want


def test_a_rows_choice_does_not_depend_on_the_others_or_the_threads(native: NativeBackend) -> None:
    scores, seeds, positions = draw(9, 30000), torch.arange(9), torch.arange(9)
    sampled = torch.arange(9) % 3 > 0
    together = native.choose(scores, seeds, positions, sampled)
    for row in range(9):
        part = slice(row, row + 1)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert native.choose(scores[part], seeds[part], positions[part], sampled[part]) == together[row]


@settings(max_examples=examples(150), deadline=None)
@given(data=st.integers(0, 10**6), vocab=st.integers(1, 700), shape=st.sampled_from(["exact", "normal", "flat"]))
def test_draws_within_limits_are_the_references(data: int, vocab: int, shape: str) -> None:
    generator = torch.Generator().manual_seed(data)
    rows = 8
    if shape == "exact":  # many ties
        scores = torch.randint(-12, 12, (rows, vocab), generator=generator) / 2
    else:
        scores = torch.randn(rows, vocab, generator=generator) * (4 if shape == "normal" else 1e-3)
    scores[torch.rand(rows, vocab, generator=generator) < 0.1] = -torch.inf
    scores[:, 0] = 1.0  # at least one token
    top_k = torch.tensor([0, 1, 5, vocab + 3])[torch.randint(0, 4, (rows,), generator=generator)]
    # Exact ties would be decided by rounding, so these are not sums of a few equal weights.
    top_p = torch.tensor([1.0, 0.123457, 0.51234, 0.951317])[torch.randint(0, 4, (rows,), generator=generator)]
    min_p = torch.tensor([0.0, 0.05, 0.31, 1.0])[torch.randint(0, 4, (rows,), generator=generator)]
    keys = torch.arange(rows) + data, torch.arange(rows), torch.ones(rows, dtype=torch.bool)
    choice = Choice(keys, torch.full((rows,), 0.5), top_k, top_p, min_p)
    assert torch.equal(NativeBackend().draw(scores, choice), REFERENCE.draw(scores, choice)), choice


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.95])
def test_draws_of_a_large_vocabulary_are_the_references(native: NativeBackend, top_p: float, spread: float) -> None:
    """And they depend neither on the other rows nor on the number of threads."""
    rows = 24
    scores = (draw(rows, 128256) * spread).bfloat16()
    keys = torch.arange(rows), torch.arange(rows) * 7, torch.ones(rows, dtype=torch.bool)
    top_k = torch.tensor([0, 40, 5000, 0] * (rows // 4))
    limits = torch.full((rows,), 0.9), top_k, torch.full((rows,), top_p), torch.tensor([0, 0, 0.001, 0] * (rows // 4))
    choice = Choice(keys, *limits)
    together = native.draw(scores, choice)
    assert torch.equal(together, REFERENCE.draw(scores, choice))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for row in range(0, rows, 5):
            one = slice(row, row + 1)
            seed, position, sampled = (key[one] for key in keys)
            alone = native.draw(scores[one], Choice((seed, position, sampled), *(limit[one] for limit in limits)))
            assert alone == together[row]


def test_rows_without_a_finite_largest_score_get_a_token(native: NativeBackend) -> None:
    scores = torch.full((4, 100), -torch.inf)
    scores[1] = torch.nan
    scores[2, 7] = torch.inf
    scores[3, 40:] = torch.nan
    scores[3, 30] = 1.0
    ones = torch.ones(4)
    keys = torch.arange(4), torch.arange(4), ones.bool()
    assert native.draw(scores, Choice(keys)).tolist() == [0, 0, 7, 30]
    assert native.draw(scores, Choice(keys, ones, ones.long() * 3, ones / 2, ones / 9)).tolist() == [0, 0, 7, 30]
    native.score(scores, torch.zeros(4, dtype=torch.int64), 5)


def test_of_equally_likely_tokens_the_lowest_are_scored(native: NativeBackend) -> None:
    logits = torch.randint(0, 3, (5, 1000), generator=torch.Generator().manual_seed(0)).float()
    for count in (3, 400, 1000):
        order = logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
        assert torch.equal(native.score(logits, torch.zeros(5, dtype=torch.int64), count)[0][:, 1:].long(), order)


# ------------------------------------------------------------------ the process


@pytest.mark.slow
def test_the_process_has_one_openmp_runtime() -> None:
    code = """
import torch
from mainspring.kernels.native.native_backend import NativeBackend
from mainspring.kernels.native.build import openmp_runtimes
native = NativeBackend()
torch.set_num_threads(2)
native.act_and_mul(torch.zeros(4000, 200), "silu")
torch.randn(3000, 300) @ torch.randn(300, 300)
print(*openmp_runtimes())
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert len(done.stdout.split()) == 1, done.stdout


def test_two_python_threads_may_share_a_backend(native: NativeBackend) -> None:
    from concurrent.futures import ThreadPoolExecutor

    x = draw(300, 512)
    want = native.act_and_mul(x, "gelu")
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(got, want) for got in pool.map(lambda _: native.act_and_mul(x, "gelu"), range(40)))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_a_product_of_a_weight_as_it_lies_has_the_same_bits_with_any_number_of_rows(
    native: NativeBackend, dtype: torch.dtype
) -> None:
    """Of a real layer's size, of which torch's own product has other bits with other numbers of rows on some
    processors; in two slabs where numbers have four bytes."""
    weight, bias, x = (draw(*shape, seed=i).to(dtype) for i, shape in enumerate([(1031, 3072), (1031,), (300, 3072)]))
    all_rows = native.linear(x, weight, bias)
    torch.testing.assert_close(
        all_rows.double(), torch.nn.functional.linear(x.double(), weight.double(), bias.double()), rtol=1e-2, atol=0.3
    )
    for rows in (1, 2, 17, 32, 33, 64):
        assert torch.equal(native.linear(x[:rows], weight, bias), all_rows[:rows])
