"""The requirements on every kernel backend. A new backend adds its name to `BACKENDS` and must pass this file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.kernels.contract import (
    IN_PROMPT,
    ROW_MULTIPLE,
    AttentionSpec,
    Backend,
    Choice,
    LayerCache,
    PagedBatch,
    SlopeBias,
    TableBias,
)
from mainspring.kernels.native.native_backend import NativeBackend
from mainspring.kernels.reference.gumbel import keyed_choice
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from mainspring.kernels.reference.sampling import mask_top_k_top_p_min_p
from native_here import why_not
from tiers import examples, fast_only

BACKENDS: dict[str, Callable[[], Backend]] = {"reference": ReferenceBackend}
if why_not() is None:
    BACKENDS["native"] = NativeBackend
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200)  # lengths around the edges of blocks and tiles

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
by_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)
by_reaching = pytest.mark.parametrize("backend", [b for b in BACKENDS if b in ("reference", "native")], indirect=True)


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    """Two threads, because splitting an operation among threads may make its bits depend on its size, which one thread
    would hide."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]()


@dataclass(frozen=True)
class Tokens:
    """One request's queries, keys and values at every position."""

    query: torch.Tensor  # [length, q_heads, key_dim]
    keys: torch.Tensor  # [length, kv_heads, key_dim]
    values: torch.Tensor  # [length, kv_heads, value_dim]

    def __len__(self) -> int:
        return len(self.query)


class Setup(NamedTuple):
    """The shape of an attention layer and the layout of its cache."""

    spec: AttentionSpec
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    heads_first: bool = False  # a block holds [kv_heads, block_size, dim] and is viewed transposed
    sinks: torch.Tensor | None = None
    reach: Sequence[torch.Tensor] | None = None  # for each request: the last index that each row sees
    selected: Sequence[torch.Tensor] | None = None  # for each request: whether a row selects a key, bool [rows, keys]


Step = Sequence[tuple[int, int]]  # (request, rows), in the order of the rows


def spec_of(
    kv_heads: int = 2,
    ratio: int = 1,
    key_dim: int = 16,
    value_dim: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    bias: SlopeBias | TableBias | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        kv_heads * ratio, kv_heads, key_dim, value_dim or key_dim, key_dim**-0.5, window, softcap, bias
    )


def sequences(setup: Setup, lengths: Sequence[int], seed: int = 0) -> list[Tokens]:
    generator = torch.Generator().manual_seed(seed)
    spec = setup.spec

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(setup.dtype)

    return [
        Tokens(
            draw(n, spec.num_q_heads, spec.key_dim),
            draw(n, spec.num_kv_heads, spec.key_dim),
            draw(n, spec.num_kv_heads, spec.value_dim),
        )
        for n in lengths
    ]


def poisoned_cache(setup: Setup, num_blocks: int) -> LayerCache:
    """The middle layer of a pool of three, all NaN, so that reading memory that was never appended changes the
    result."""
    spec, rows = setup.spec, setup.block_size * setup.spec.num_kv_heads
    pool = torch.full((num_blocks, 3, rows * (spec.key_dim + spec.value_dim)), torch.nan, dtype=setup.dtype)
    views = []
    for part, dim in zip(pool[:, 1].split([rows * spec.key_dim, rows * spec.value_dim], 1), spec[2:4], strict=True):
        if setup.heads_first:
            views.append(part.unflatten(1, (spec.num_kv_heads, setup.block_size, dim)).transpose(1, 2))
        else:
            views.append(part.unflatten(1, (setup.block_size, spec.num_kv_heads, dim)))
    return LayerCache(*views)


def attend(
    backend: Backend, setup: Setup, requests: Sequence[Tokens], steps: Sequence[Step], seed: int = 0
) -> list[torch.Tensor]:
    """Run `steps`, appending keys and values as the engine does → each request's outputs, ``[rows done, …]``.

    Blocks are shuffled in the pool; those entirely behind the window are freed (the table then names block 0).
    """
    spec, size = setup.spec, setup.block_size
    blocks_of = [-(-len(r) // size) for r in requests]
    shuffled = 1 + torch.randperm(sum(blocks_of), generator=torch.Generator().manual_seed(seed))
    tables = list(shuffled.split(blocks_of))
    cache = poisoned_cache(setup, 1 + sum(blocks_of))
    done = [0] * len(requests)
    outputs: list[list[torch.Tensor]] = [[] for _ in requests]
    for step in steps:
        indices, kv_counts, last, blocks, offsets = [], [], [], [], []
        for r, rows in step:
            positions = torch.arange(done[r], done[r] + rows)
            blocks.append(tables[r][positions // size])
            offsets.append(positions % size)
            table = tables[r][: -(-(done[r] + rows) // size)].clone()
            if spec.window is not None:
                table[: max(0, done[r] - spec.window + 1) // size] = 0
            indices.append(table)
            kv_counts.append(len(table))
            last.append((done[r] + rows - 1) % size + 1)

        def rows_of(name: str, step: Step = step) -> torch.Tensor:
            return torch.cat([getattr(requests[r], name)[done[r] : done[r] + rows] for r, rows in step])

        if step:
            backend.append(cache, rows_of("keys"), rows_of("values"), torch.cat(blocks), torch.cat(offsets))
        row_counts = [rows for _, rows in step]
        batch = PagedBatch(
            torch.tensor([0, *itertools.accumulate(row_counts)], dtype=torch.int32),
            torch.tensor([0, *itertools.accumulate(kv_counts)], dtype=torch.int32),
            torch.cat([*indices, torch.empty(0, dtype=torch.int64)]).int(),
            torch.tensor(last, dtype=torch.int32),
            size,
        )
        if setup.reach is not None:
            parts = [setup.reach[r][done[r] : done[r] + rows] for r, rows in step]
            batch = batch._replace(reach=torch.cat(parts).int())
            assert backend.takes(batch)
        total = sum(row_counts)
        query = torch.full((total + -total % ROW_MULTIPLE + ROW_MULTIPLE, *spec[:1], spec.key_dim), torch.nan)
        query = query.to(setup.dtype)
        if step:
            query[:total] = rows_of("query")
        plan = backend.plan(spec, batch, CPU)
        if setup.selected is None:
            out = backend.run(plan, query, cache, setup.sinks)
        else:
            selected = indices_of([setup.selected[r][done[r] : done[r] + rows] for r, rows in step], len(query))
            out = backend.run_selected(plan, query, cache, selected, setup.sinks)
        assert out.shape == (len(query), spec.num_q_heads, spec.value_dim)
        assert out.dtype == setup.dtype
        assert torch.equal(out[total:], torch.zeros_like(out[total:])), "padding rows must come back as zeros"
        for (r, rows), part in zip(step, out[:total].split(row_counts) if step else [], strict=True):
            outputs[r].append(part)
            done[r] += rows
    return [torch.cat(parts) if parts else torch.empty(0) for parts in outputs]


def indices_of(selected: list[torch.Tensor], num_rows: int) -> torch.Tensor:
    """Of keys that rows select: ascending, and behind them the largest number, int32 ``[num_rows, n]``."""
    rows = [row.nonzero().flatten() for part in selected for row in part]
    out = torch.full((num_rows, max(map(len, rows), default=0)), torch.iinfo(torch.int32).max, dtype=torch.int32)
    for row, indices in enumerate(rows):
        out[row, : len(indices)] = indices.int()
    return out


def oracle(
    setup: Setup, request: Tokens, reach: torch.Tensor | None = None, selected: torch.Tensor | None = None
) -> torch.Tensor:
    """Dense attention in fp64, one formula on each line."""
    spec, n = setup.spec, len(request)
    group = spec.num_q_heads // spec.num_kv_heads
    keys, values = (x.double().repeat_interleave(group, 1) for x in (request.keys, request.values))
    scores = torch.einsum("qhd,khd->hqk", request.query.double(), keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    if isinstance(spec.bias, SlopeBias):
        scores = scores - torch.tensor(spec.bias.slopes).double()[:, None, None] * distance.abs()
    elif spec.bias is not None:
        table = torch.tensor(spec.bias.table).double()
        scores = scores + table[:, distance.abs().clamp(max=table.shape[1] - 1)]
    hidden = distance < 0 if reach is None else torch.arange(n) > reach[:, None]
    if spec.window is not None:
        hidden |= distance >= spec.window
    if selected is not None:
        hidden |= ~selected
    scores = scores.masked_fill(hidden, -math.inf)
    if setup.sinks is not None:
        sink = setup.sinks.double()[:, None, None].expand(-1, n, 1)
        scores = torch.cat([scores, sink], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], values)


def whole(lengths: Sequence[int]) -> list[Step]:
    return [list(enumerate(lengths))]


def check(backend: Backend, setup: Setup, lengths: Sequence[int], steps: Sequence[Step], seed: int = 0) -> None:
    requests = sequences(setup, lengths, seed)
    reaches = setup.reach or [None] * len(requests)
    selections = setup.selected or [None] * len(requests)
    outputs = attend(backend, setup, requests, steps, seed)
    for request, reach, selected, got in zip(requests, reaches, selections, outputs, strict=True):
        want = oracle(setup, request, reach, selected)[: len(got)]
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[setup.dtype], atol=TOLERANCE[setup.dtype])


def mixed(lengths: Sequence[int]) -> list[Step]:
    """Most of each request in a first step, then one or more last tokens of each: decode beside prefill chunks."""
    tails = [min(n, (1, 3, 1, 20)[i % 4]) for i, n in enumerate(lengths)]
    first = [(i, n - tail) for i, (n, tail) in enumerate(zip(lengths, tails, strict=True)) if n > tail]
    return [first, list(enumerate(tails))]


@by_backend
@by_dtype
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_attention_is_right_for_every_head_size(backend: Backend, dtype: torch.dtype, dim: int) -> None:
    lengths = (1, 65, 70)
    check(backend, Setup(spec_of(key_dim=dim), dtype), lengths, mixed(lengths))


@by_backend
@by_dtype
@pytest.mark.parametrize("dims", [(24, 16), (16, 24), (192, 128)], ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
def test_keys_and_values_may_differ_in_size(
    backend: Backend, dtype: torch.dtype, dims: tuple[int, int], heads_first: bool
) -> None:
    lengths = (1, 65, 70)
    setup = Setup(spec_of(ratio=2, key_dim=dims[0], value_dim=dims[1]), dtype, heads_first=heads_first)
    check(backend, setup, lengths, mixed(lengths))


@by_backend
@by_dtype
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 7, 8])
def test_query_heads_share_their_kv_head(backend: Backend, dtype: torch.dtype, ratio: int) -> None:
    lengths = (1, 66, 70)
    check(backend, Setup(spec_of(ratio=ratio), dtype), lengths, mixed(lengths))


@by_backend
@by_dtype
@pytest.mark.parametrize("window", [None, 1, 5, 64, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_window_soft_cap_and_sinks(
    backend: Backend, dtype: torch.dtype, window: int | None, softcap: float | None, sinks: bool
) -> None:
    spec = spec_of(ratio=2, window=window, softcap=softcap)
    lengths = (1, 64, 150, 201)
    check(
        backend,
        Setup(spec, dtype, sinks=torch.tensor([2.0, -1.0, 4.0, 0.5]) if sinks else None),
        lengths,
        mixed(lengths),
    )


SLOPES = SlopeBias((0.5, 0.25, 0.125, 0.0625))
TABLE = TableBias(tuple(tuple(math.sin(head + 2 * distance) for distance in range(70)) for head in range(4)))


def spans(length: int, *both_ways: tuple[int, int]) -> torch.Tensor:
    """The reach of each row if the tokens of each span ``first:end`` see each other."""
    reach = torch.arange(length)
    for first, end in both_ways:
        reach[first:end] = end - 1
    return reach


by_bias = pytest.mark.parametrize("bias", [SLOPES, TABLE], ids=["slopes", "table"])


@by_backend
@by_dtype
@by_bias
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_bias_by_distance_is_added(
    backend: Backend, dtype: torch.dtype, bias: SlopeBias | TableBias, window: int | None, softcap: float | None
) -> None:
    lengths = (1, 64, 201, 700)
    spec = spec_of(ratio=2, window=window, softcap=softcap, bias=bias)
    check(backend, Setup(spec, dtype, heads_first=True), lengths, mixed(lengths))


@by_backend
@by_bias
def test_a_row_with_a_bias_has_the_same_bits_in_any_step(backend: Backend, bias: SlopeBias | TableBias) -> None:
    setup = Setup(spec_of(ratio=2, bias=bias), torch.bfloat16)
    requests = sequences(setup, (700, 80))
    alone = [[(0, 700)], [(1, 80)]]
    together = [[(1, 64), (0, 41)], [(1, 16), (0, 600)], *([(0, 1)] for _ in range(59))]
    first, other = (attend(backend, setup, requests, steps) for steps in (alone, together))
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@by_dtype
@by_bias
def test_the_reference_adds_a_bias_where_rows_reach_beyond_themselves(
    dtype: torch.dtype, bias: SlopeBias | TableBias
) -> None:
    lengths = (1, 64, 201)
    setup = Setup(spec_of(ratio=2, bias=bias), dtype, heads_first=True)
    setup = setup._replace(reach=[spans(1), spans(64, (3, 50)), spans(201, (90, 181))])
    check(ReferenceBackend(), setup, lengths, mixed(lengths))


@by_reaching
@by_dtype
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("heads_first", [False, True])
def test_a_row_sees_as_far_as_its_reach(
    backend: Backend, dtype: torch.dtype, window: int | None, heads_first: bool
) -> None:
    reach = [spans(70), spans(150, (10, 40), (40, 41), (60, 149)), spans(66, (0, 66)), spans(9, (1, 9))]
    setup = Setup(spec_of(ratio=2, window=window), dtype, heads_first=heads_first, reach=reach)
    steps = [[(0, 1), (1, 45)], [(0, 69), (1, 104), (2, 66)], [(3, 9), (1, 1)]]
    check(backend, setup, (70, 150, 66, 9), steps)


@by_reaching
@by_dtype
@pytest.mark.parametrize("window", [None, 30])
def test_a_row_with_a_reach_has_the_same_bits_in_any_step(
    backend: Backend, dtype: torch.dtype, window: int | None
) -> None:
    reach = [spans(150, (10, 40), (100, 130)), spans(80, (0, 64)), spans(700, (450, 560), (561, 640))]
    setup = Setup(spec_of(ratio=2, window=window), dtype, reach=reach)
    requests = sequences(setup, (150, 80, 700))
    alone = [[(0, 150)], [(1, 80)], [(2, 700)]]
    together = [[(1, 64), (0, 41)], [(1, 16), (0, 59)], [(2, 560), (0, 50)], [(2, 140)]]
    first, other = (attend(backend, setup, requests, steps) for steps in (alone, together))
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("reach", [[0, 0, 2], [0, 1, 3], [0, 1]])
def test_a_reach_before_the_row_or_behind_the_last_key_is_refused(reach: list[int]) -> None:
    batch = PagedBatch(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [0, 1], [1], [3])), 16)
    with pytest.raises(ValueError, match="reach must be the index of a key of its request"):
        ReferenceBackend().plan(spec_of(), batch._replace(reach=torch.tensor(reach, dtype=torch.int32)), CPU)


@by_backend
def test_a_backend_says_what_it_does_not_serve(backend: Backend) -> None:
    batch = PagedBatch(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0, 1], [1], [1])), 16)
    assert backend.takes(batch)
    assert backend.refuses(spec_of(), torch.float32, torch.float32) is None
    if backend.name not in ("reference", "native"):
        assert not backend.takes(batch._replace(reach=torch.zeros(1, dtype=torch.int32)))


@by_backend
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("heads_first", [False, True])
def test_lengths_at_block_and_tile_edges(backend: Backend, block_size: int, heads_first: bool) -> None:
    setup = Setup(spec_of(), block_size=block_size, heads_first=heads_first)
    check(backend, setup, EDGES, whole(EDGES))
    check(backend, setup, EDGES, mixed(EDGES))
    check(backend, setup._replace(spec=spec_of(window=40)), EDGES, mixed(EDGES))


@by_backend
@by_dtype
def test_a_step_larger_than_a_chunk_of_work(backend: Backend, dtype: torch.dtype) -> None:
    setup = Setup(spec_of(kv_heads=8, ratio=2, key_dim=64), dtype)
    lengths = [*range(60, 200, 7), 900]
    check(backend, setup, lengths, mixed(lengths))


@by_backend
def test_an_empty_step_gives_only_padding(backend: Backend) -> None:
    setup = Setup(spec_of())
    assert attend(backend, setup, sequences(setup, []), [[]]) == []


@by_backend
def test_scores_far_apart_neither_overflow_nor_vanish(backend: Backend) -> None:
    setup = Setup(spec_of(key_dim=64))
    (request,) = sequences(setup, [140])
    for factor in (1000.0, -1000.0):
        sharp = replace(request, query=request.query * factor)
        (got,) = attend(backend, setup, [sharp], [[(0, 100)], *[[(0, 1)]] * 40])
        torch.testing.assert_close(got.double(), oracle(setup, sharp), rtol=1e-3, atol=1e-3)


@by_backend
def test_append_writes_these_rows_and_no_others(backend: Backend) -> None:
    for heads_first in (False, True):
        setup = Setup(spec_of(key_dim=16, value_dim=24), block_size=8, heads_first=heads_first)
        cache = poisoned_cache(setup, 5)
        (request,) = sequences(setup, [6])
        blocks, rows = torch.tensor([3, 3, 1, 4, 4, 2]), torch.tensor([6, 7, 0, 5, 1, 7])
        backend.append(cache, request.keys, request.values, blocks, rows)
        for view, new in zip(cache, (request.keys, request.values), strict=True):
            assert torch.equal(view[blocks, rows], new)
            assert int((~view.isnan()).sum()) == new.numel()


# Clockwork: the bits do not depend on the other requests in a step or on how tokens are divided into steps.


def schedules(lengths: Sequence[int]) -> dict[str, list[Step]]:
    """Ways to compute the same requests."""
    longest = max(lengths)

    def in_chunks_of(size: int) -> list[Step]:
        starts = range(0, longest, size)
        return [[(i, min(size, n - at)) for i, n in enumerate(lengths) if n > at] for at in starts]

    return {
        "together": whole(lengths),
        "in reverse": [list(enumerate(lengths))[::-1]],
        "alone": [[(i, n)] for i, n in enumerate(lengths)],
        "token by token": in_chunks_of(1),
        "in chunks of 7": in_chunks_of(7),
        "in chunks of 64": in_chunks_of(64),
        "decode beside prefill": mixed(lengths),
    }


def assert_clockwork(
    backend: Backend, setup: Setup, lengths: Sequence[int], ways: dict[str, list[Step]], seed: int = 0
) -> None:
    requests = sequences(setup, lengths, seed)
    results = {way: attend(backend, setup, requests, steps, seed + i) for i, (way, steps) in enumerate(ways.items())}
    first, *others = results
    for way, (i, n) in itertools.product(others, enumerate(lengths)):
        differ = (results[way][i] != results[first][i]).flatten(1).any(1).nonzero().flatten().tolist()
        assert not differ, f"request {i} of {n} tokens: {way} and {first} differ at positions {differ}"


@by_backend
@by_dtype
@pytest.mark.parametrize(
    "spec",
    [
        spec_of(key_dim=64),
        spec_of(kv_heads=1, ratio=3, key_dim=80),
        spec_of(ratio=7, key_dim=16, softcap=5.0),
        spec_of(ratio=4, key_dim=24, value_dim=40, window=70),
    ],
    ids=["plain", "three to one", "capped", "windowed"],
)
def test_the_same_bits_however_steps_are_cut(backend: Backend, dtype: torch.dtype, spec: AttentionSpec) -> None:
    sinks = torch.linspace(-1, 3, spec.num_q_heads)
    lengths = (1, 30, 70, 135)
    assert_clockwork(backend, Setup(spec, dtype, sinks=sinks), lengths, schedules(lengths))


@by_backend
@by_dtype
def test_the_same_bits_whatever_the_block_size_and_layout(backend: Backend, dtype: torch.dtype) -> None:
    setup = Setup(spec_of(kv_heads=3, ratio=2, key_dim=64), dtype)
    requests = sequences(setup, EDGES)
    want = attend(backend, setup, requests, whole(EDGES))
    for block_size, heads_first in ((8, False), (64, False), (32, True)):
        got = attend(backend, setup._replace(block_size=block_size, heads_first=heads_first), requests, mixed(EDGES))
        assert all(map(torch.equal, got, want))


@st.composite
def random_work(draw: st.DrawFn) -> tuple[Setup, list[int], list[Step], int]:
    spec = spec_of(
        kv_heads=draw(st.integers(1, 3)),
        ratio=draw(st.integers(1, 8)),
        key_dim=draw(st.sampled_from([16, 32, 40])),
        value_dim=draw(st.sampled_from([16, 24])),
        window=draw(st.none() | st.integers(1, 150)),
        softcap=draw(st.none() | st.just(4.0)),
    )
    sinks = torch.linspace(-2, 2, spec.num_q_heads) if draw(st.booleans()) else None
    setup = Setup(
        spec, draw(st.sampled_from(DTYPES)), draw(st.sampled_from([8, 16, 32, 64])), draw(st.booleans()), sinks
    )
    left = lengths = draw(st.lists(st.integers(1, 160), min_size=1, max_size=5))
    steps: list[Step] = []
    while any(left):
        waiting = [i for i, n in enumerate(left) if n]
        chosen = draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        step = [(i, draw(st.just(1) | st.integers(1, left[i]) | st.just(left[i]))) for i in chosen]
        left = [n - dict(step).get(i, 0) for i, n in enumerate(left)]
        steps.append(step)
        if len(steps) == 6:
            steps.append([(i, n) for i, n in enumerate(left) if n])
            break
    return setup, lengths, [s for s in steps if s], draw(st.integers(0, 1000))


@by_backend
@pytest.mark.parametrize("dim", fast_only([16], [16, 64]))
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_a_request_alone_has_the_bits_it_has_among_others_also_where_products_are_tiny(
    backend: Backend, dim: int, ratio: int
) -> None:
    """One KV head and one row make products so small that torch computes them with other code (observed with 2.13)."""
    setup = Setup(spec_of(kv_heads=1, ratio=ratio, key_dim=dim, window=41), torch.bfloat16)
    lengths = [90, 60]
    alone = [[(0, 1)] for _ in range(lengths[0])] + [[(1, 1)] for _ in range(lengths[1])]
    for seed in range(3):
        assert_clockwork(backend, setup, lengths, {"together": whole(lengths), "alone, one by one": alone}, seed)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=examples(150))
@given(work=random_work())
def test_any_mix_of_requests_is_right_and_clockwork(name: str, work: tuple[Setup, list[int], list[Step], int]) -> None:
    setup, lengths, steps, seed = work
    backend = BACKENDS[name]()
    check(backend, setup, lengths, steps, seed)
    assert_clockwork(backend, setup, lengths, {"as drawn": steps, "together": whole(lengths)}, seed)


# The elementwise kernels.

ACTIVATIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal up to the rounding of got's dtype."""
    torch.testing.assert_close(got, want.to(got.dtype), rtol={4: 2e-6, 2: 1.6e-2}[got.itemsize], atol=2e-6)


@by_backend
@by_dtype
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_right(backend: Backend, dtype: torch.dtype, offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 48), (2, 3, 7, 33), (600, 768)):
        x = (3 * torch.randn(shape, generator=generator)).to(dtype)
        weight = torch.randn(shape[-1], generator=generator).to(dtype)
        wide = x.double()
        want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (offset + weight.double())
        assert_close(backend.rms_norm(x, weight, 1e-5, offset), want)


@by_backend
@by_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_and_mul_is_right(backend: Backend, dtype: torch.dtype, activation: str) -> None:
    for shape in ((5, 66), (400, 3072)):
        x = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
        kept = x.clone()
        gate, up = x.double().chunk(2, -1)
        assert_close(backend.act_and_mul(x, activation), ACTIVATIONS[activation](gate) * up)
        assert torch.equal(x, kept), "the argument must not change"


@by_backend
@by_dtype
def test_add_rms_norm_is_the_norm_of_the_rounded_sum(backend: Backend, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(9, 48, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    weight, total = torch.randn(48, generator=torch.Generator().manual_seed(2)).to(dtype), x + residual
    normed, got = backend.add_rms_norm(x, residual, weight, 1e-5, 1.0)
    assert torch.equal(got, total)
    assert_close(normed, backend.rms_norm(total, weight, 1e-5, 1.0).double())


@by_backend
@by_dtype
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_turns_pairs_of_strided_heads_in_place(backend: Backend, dtype: torch.dtype, interleaved: bool) -> None:
    """As complex numbers: a pair times e^(i angle). Elements beyond rotary_dim do not change."""
    rows, q_heads, kv_heads, dim, rotary_dim = 7, 4, 2, 20, 12
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(rows, q_heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    angles = torch.randn(rows, rotary_dim // 2, generator=generator) * 9
    query, key, value = joined.clone().split([q_heads, kv_heads, kv_heads], dim=1)
    backend.rotate(query, key, torch.cat([angles.cos(), angles.sin()], -1), interleaved)
    turned = joined.double()
    pairs = turned[..., :rotary_dim].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None].to(torch.complex128)
    product = torch.complex(first, second) * turn
    want = torch.stack([product.real, product.imag], -1 if interleaved else -2).flatten(-2)
    torch.testing.assert_close(
        torch.cat([query, key], 1)[..., :rotary_dim].double(),
        want[:, :-kv_heads],
        rtol=0,
        atol=4 * 2.0**-8 if dtype.itemsize == 2 else 4e-6,
    )
    for part, kept in zip((query, key, value), joined.split([q_heads, kv_heads, kv_heads], dim=1), strict=True):
        assert torch.equal(part[..., rotary_dim:], kept[..., rotary_dim:])
    assert torch.equal(value, joined[:, -kv_heads:])


@by_backend
def test_masks_and_choices_are_those_of_sampling_and_gumbel(backend: Backend) -> None:
    scores = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 3
    top_k, top_p = torch.tensor([0, 5, 0, 1, 0, 40]), torch.tensor([1.0, 1.0, 0.5, 1.0, 0.9, 0.7])
    off = torch.zeros(6)
    masked = backend.mask(scores, top_k, top_p, None)
    assert torch.equal(masked, mask_top_k_top_p_min_p(scores, top_k, top_p, off))
    assert torch.equal(backend.mask(scores, None, None, None), scores)
    seeds, positions = torch.arange(6) * 977, torch.arange(6)
    sampled = torch.tensor([True, False, True, False, False, True])
    chosen = backend.choose(masked, seeds, positions, sampled)
    assert torch.equal(chosen, torch.where(sampled, keyed_choice(masked, seeds, positions), masked.argmax(-1)))


@by_backend
@by_dtype
@pytest.mark.parametrize("asked", ["nothing", "temperature", "top_k", "top_p", "min_p", "all"])
def test_a_draw_is_the_choice_of_what_the_limits_leave(backend: Backend, dtype: torch.dtype, asked: str) -> None:
    numbers = torch.Generator().manual_seed(1)
    rows, vocab = 40, 700
    scores = (torch.randn(rows, vocab, generator=numbers) * 2).to(dtype)
    sampled = torch.arange(rows) % 4 > 0
    keys = torch.arange(rows) * 977, torch.arange(rows) + 3, sampled
    values = {
        "temperature": (torch.rand(rows, generator=numbers) + 0.3, 1.0),
        "top_k": (torch.randint(1, 60, (rows,), generator=numbers), 0),
        "top_p": (torch.rand(rows, generator=numbers), 1.0),
        "min_p": (torch.rand(rows, generator=numbers) * 0.3, 0.0),
    }
    limits = {
        name: torch.where(sampled, value, torch.tensor(off)) if asked in (name, "all") else None
        for name, (value, off) in values.items()
    }
    plain = scores.float()
    if (temperature := limits["temperature"]) is not None:
        plain = plain / temperature.unsqueeze(1)
    plain = mask_top_k_top_p_min_p(plain, limits["top_k"], limits["top_p"], limits["min_p"])
    want = torch.where(sampled, keyed_choice(plain, *keys[:2]), scores.argmax(-1))
    assert torch.equal(backend.draw(scores, Choice(keys, **limits)), want)
    assert torch.equal(backend.draw(scores, Choice()), scores.argmax(-1))


@by_backend
@by_dtype
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("vocab", [1, 16, 31, 33, 500])
def test_masks_and_penalties_change_what_is_drawn(
    backend: Backend, vocab: int, limited: bool, dtype: torch.dtype
) -> None:
    """Scores and penalties have few bits, so that many sums are equal, and each rounding error would show."""
    numbers = torch.Generator().manual_seed(vocab)
    rows, changed = 60, torch.randperm(60, generator=numbers)
    scores = (torch.randint(-20, 20, (rows, vocab), generator=numbers) / 4).to(dtype)
    masked, penalized = changed[:30], changed[15:50]
    bits = torch.randint(-(2**31), 2**31, (30, -(-vocab // 32)), generator=numbers, dtype=torch.int32)
    bits[:, 0] |= 1  # at least one token
    counts = torch.randint(0, 4, (70, vocab), generator=numbers, dtype=torch.int32)
    counts += torch.randint(0, 2, (70, vocab), generator=numbers, dtype=torch.int32) * IN_PROMPT
    counts *= torch.rand(70, vocab, generator=numbers) < 0.5
    indices = torch.randperm(70, generator=numbers)[:35]
    factors = torch.randint(1, 9, (35, 3), generator=numbers) / 4 * torch.tensor([1, -1, 1])
    choice = Choice(masks=(masked, bits), penalties=(penalized, counts, indices, factors))

    want = scores.to(torch.float32, copy=True)
    for row, mine in zip(masked.tolist(), bits.tolist(), strict=True):
        for token in range(vocab):
            if not mine[token // 32] >> token % 32 & 1:
                want[row, token] = -torch.inf
    for row, index, (repetition, frequency, presence) in zip(penalized, indices, factors, strict=True):
        seen, s = counts[index], want[row]
        times = seen % IN_PROMPT
        s = torch.where(seen > 0, torch.where(s > 0, s / repetition, s * repetition), s)
        want[row] = s - frequency * times - presence * (times > 0)
    assert torch.equal(choice.amend(scores), want)
    keys, limits = None, {}
    if limited:
        keys = torch.arange(rows) * 977, torch.arange(rows) + 3, torch.arange(rows) % 4 > 0
        ones = torch.ones(rows)
        limits = {"temperature": ones / 2, "top_k": ones.long() * 30, "top_p": ones * 0.87654}
        want /= 0.5
        masks = mask_top_k_top_p_min_p(want, limits["top_k"], limits["top_p"], None)
        chosen = torch.where(keys[2], keyed_choice(masks, *keys[:2]), want.argmax(-1))
    else:
        chosen = want.argmax(-1)
    assert torch.equal(backend.draw(scores, choice._replace(keys=keys, **limits)), chosen)


@by_backend
@by_dtype
@pytest.mark.parametrize("count", [0, 1, 5, 600])
def test_log_probabilities_are_those_of_a_softmax(backend: Backend, dtype: torch.dtype, count: int) -> None:
    vocab = 501
    logits = (torch.randperm(6 * vocab, generator=torch.Generator().manual_seed(2)).view(6, vocab) % vocab / 30).to(
        dtype
    )
    logits[2, ::3] = -torch.inf
    tokens = torch.tensor([0, 1, 2, 499, 500, 7])
    wanted = logits.double().log_softmax(1)
    ids, logprobs, ranks = backend.score(logits, tokens, count)
    count = min(count, vocab)
    assert (ids.dtype, logprobs.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    assert ids.shape == logprobs.shape == (6, 1 + count)
    assert torch.equal(ids[:, 0].long(), tokens)
    torch.testing.assert_close(logprobs, wanted.gather(1, ids.long()).float(), rtol=0, atol=4e-6)
    torch.testing.assert_close(logprobs[:, 1:], wanted.topk(count).values.float(), rtol=0, atol=4e-6)
    assert all(len(set(row[1:])) == count for row in ids.tolist())
    own = logits.gather(1, tokens.unsqueeze(1))
    assert torch.equal(ranks, (logits > own).sum(1, dtype=torch.int32) + 1)
    some = [(torch.tensor([4, 1]), 3), (torch.tensor([0]), count), (torch.tensor([5]), 0)]
    for groups in (some, [(None, count)], []):
        drawn, scored = backend.draw_and_score(-logits.float(), Choice(), logits, groups)
        assert torch.equal(drawn, backend.largest(-logits.float()))
        for (rows, number), found in zip(groups, scored, strict=True):
            part = slice(None) if rows is None else rows
            want = backend.score(logits[part], drawn[part], number)
            assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
    for row in range(6):  # a row alone has the same bits
        alone = backend.score(logits[row : row + 1], tokens[row : row + 1], count)
        assert all(torch.equal(x[0], y[row]) for x, y in zip(alone, (ids, logprobs, ranks), strict=True))


@by_backend
def test_large_gates_stay_finite(backend: Backend) -> None:
    x = torch.tensor([[-1000.0, -90.0, 90.0, 1000.0, 1, 1, 1, 1]])
    for activation in ACTIVATIONS:
        assert backend.act_and_mul(x, activation).tolist() == [[0, 0, 90, 1000]]


@by_backend
@by_dtype
@pytest.mark.parametrize("width", [7, 33, 64, 100])
def test_rows_of_elementwise_kernels_do_not_depend_on_the_others(
    backend: Backend, dtype: torch.dtype, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(3000, 2 * width, generator=generator)).to(dtype)
    weight = torch.randn(2 * width, generator=generator).to(dtype)
    further_apart = torch.cat([x, x], 1)[:, : 2 * width]
    by_columns = x.T.contiguous().T
    kernels = [lambda rows: backend.rms_norm(rows, weight, 1e-6)]
    kernels += [lambda rows, name=name: backend.act_and_mul(rows, name) for name in ACTIVATIONS]
    kernels += [lambda rows: _rotated(backend, rows)]
    for kernel in kernels:
        together = kernel(x)
        assert torch.equal(kernel(further_apart), together)
        assert torch.equal(kernel(by_columns), together)
        for start, count in ((0, 1), (1, 1), (2998, 2), (5, 3), (11, 8), (100, 1501)):
            assert torch.equal(kernel(x[start : start + count]), together[start : start + count])


def _rotated(backend: Backend, rows: torch.Tensor) -> torch.Tensor:
    """Rotated by a separate angle for each row."""
    heads = rows.clone(memory_format=torch.contiguous_format).unsqueeze(1)
    angles = rows[:, : rows.shape[1] // 2].float().contiguous()
    backend.rotate(heads, heads[:, :0], torch.cat([angles.cos(), angles.sin()], -1))
    return heads


# Errors.


@by_backend
def test_an_unknown_activation_is_named(backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"'relu'.*silu, gelu, gelu_tanh"):
        backend.act_and_mul(torch.zeros(1, 4), "relu")


def test_the_reference_refuses_block_sizes_that_do_not_fit_its_tiles() -> None:
    one = torch.tensor([0, 1], dtype=torch.int32)
    for block_size in (0, 12, 128):
        with pytest.raises(ValueError, match=f"block_size is {block_size}.*power of two up to 64"):
            ReferenceBackend().plan(spec_of(), PagedBatch(one, one, one[:1], one[1:], block_size), CPU)
