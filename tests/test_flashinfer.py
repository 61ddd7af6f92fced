"""FlashInfer's backend on a CPU: with the stand-in for the package it gives the results of the reference backend."""

from __future__ import annotations

import builtins
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashinfer_double import FlashInferDouble
from mainspring.kernels import BackendUnavailableError
from mainspring.kernels.contract import AttentionSpec, DeviceBatch, LayerCache, PagedBatch, SlopeBias
from mainspring.kernels.flashinfer import partition as flashinfer_partition
from mainspring.kernels.flashinfer import plan as flashinfer_plan
from mainspring.kernels.flashinfer import prebuilt
from mainspring.kernels.flashinfer.flashinfer_backend import FlashInferBackend, Gpu
from mainspring.kernels.flashinfer.partition import Kind, cut_into_pieces, kv_lengths, two_launches
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from tiers import examples, fast_only

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
AMPERE, HOPPER = Gpu((8, 0), 132), Gpu((9, 0), 132)
REFERENCE = ReferenceBackend()
PAGE = 16


def make(deterministic: bool = False, gpu: Gpu = AMPERE, hold: bool = False) -> tuple[FlashInferBackend, Any]:
    double = FlashInferDouble(hold)
    return FlashInferBackend(CPU, deterministic, library=double, gpu=gpu), double


def spec_of(
    kv_heads: int = 2, ratio: int = 1, dim: int = 64, window: int | None = None, softcap: float | None = None
) -> AttentionSpec:
    return AttentionSpec(kv_heads * ratio, kv_heads, dim, dim, dim**-0.5, window, softcap)


class Layer:
    """Requests with all their keys and values in two caches: in the layout of FlashInfer's backend, and in the plain
    one."""

    def __init__(
        self,
        backend: FlashInferBackend,
        spec: AttentionSpec,
        lengths: Sequence[int],
        dtype: torch.dtype = BF16,
        kv_dtype: torch.dtype = BF16,
        seed: int = 0,
    ) -> None:
        assert backend.refuses(spec, dtype, kv_dtype) is None
        self.backend, self.spec, self.dtype = backend, spec, dtype
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int) -> torch.Tensor:
            return torch.randn(sum(lengths), heads, spec.key_dim, generator=generator).to(dtype)

        self.query, keys, values = draw(spec.num_q_heads), draw(spec.num_kv_heads), draw(spec.num_kv_heads)
        pages = [-(-n // PAGE) for n in lengths]
        self.tables = (1 + torch.randperm(sum(pages), generator=generator)).int().split(pages)
        self.firsts = [0, *itertools.accumulate(lengths)]
        places = [divmod(p, PAGE) for n in lengths for p in range(n)]
        owners = [r for r, n in enumerate(lengths) for _ in range(n)]
        blocks = torch.tensor([int(self.tables[r][page]) for r, (page, _) in zip(owners, places, strict=True)])
        rows = torch.tensor([row for _, row in places])
        if spec.latent:
            values = keys[..., : spec.value_dim]
        self.cache, self.plain = (
            pool_of(1 + sum(pages), spec.num_kv_heads, each.cache_dims(spec)[0], kv_dtype)
            for each in (backend, REFERENCE)
        )
        if spec.latent:
            self.cache, self.plain = (of_latents(each, spec) for each in (self.cache, self.plain))
        backend.append(self.cache, keys, values, blocks, rows)
        REFERENCE.append(self.plain, keys, values, blocks, rows)

    def step(self, counts: Sequence[tuple[int, int, int]]) -> tuple[PagedBatch, torch.Tensor]:
        """Requests (index, first row, rows), those of one row first → the batch, its queries and some padding."""
        counts = sorted(counts, key=lambda c: c[2] > 1)
        ends = [start + n for _, start, n in counts]
        tables = [self.tables[r][: -(-end // PAGE)].clone() for (r, _, _), end in zip(counts, ends, strict=True)]
        for table, (_, start, _) in zip(tables, counts, strict=True):
            if self.spec.window is not None:
                table[: max(0, start - self.spec.window + 1) // PAGE] = 0  # freed
        batch = batch_of([n for _, _, n in counts], ends, tables)
        query = [self.query[self.firsts[r] + start :][:n] for r, start, n in counts]
        return batch, torch.cat([*query, torch.full((3, *self.query.shape[1:]), torch.nan, dtype=self.dtype)])

    def want(self, batch: PagedBatch, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return REFERENCE.run(REFERENCE.plan(self.spec, batch, CPU), query, self.plain, sinks)

    def check(self, counts: Sequence[tuple[int, int, int]], turn: int = 0, sinks: torch.Tensor | None = None) -> None:
        batch, query = self.step(counts)
        got = self.backend.run(self.backend.plan(self.spec, batch, CPU, turn), query, self.cache, sinks)
        assert not got[int(batch.qo_indptr[-1]) :].any(), "padding rows must come back as zeros"
        torch.testing.assert_close(got, self.want(batch, query, sinks), rtol=2e-2, atol=2e-2)


def pool_of(blocks: int, heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """The middle layer of a pool of three; memory that must not be read is NaN."""
    pool = torch.full((blocks, 3, 2, PAGE, heads, dim), torch.nan, dtype=dtype)
    return LayerCache(pool[:, 1, 0], pool[:, 1, 1])


def of_latents(cache: LayerCache, spec: AttentionSpec) -> LayerCache:
    return LayerCache(cache.keys, cache.keys[..., : spec.value_dim])


def batch_of(
    rows: Sequence[int], kv_lens: Sequence[int], tables: Sequence[torch.Tensor] | None = None, group: int = 0
) -> PagedBatch:
    pages = [-(-n // PAGE) for n in kv_lens]
    indices = torch.cat([*tables]) if tables else torch.ones(sum(pages), dtype=torch.int32)
    qo_indptr, kv_indptr, last = (
        torch.tensor(x, dtype=torch.int32)
        for x in (
            [0, *itertools.accumulate(rows)],
            [0, *itertools.accumulate(pages)],
            [(n - 1) % PAGE + 1 for n in kv_lens],
        )
    )
    single = next((i for i, n in enumerate(rows) if n > 1), len(rows))
    return PagedBatch(qo_indptr, kv_indptr, indices.int(), last, PAGE, single, group)


def on_device(double: FlashInferDouble, batch: PagedBatch) -> PagedBatch:
    """The same batch with copies in memory that the double treats as GPU memory."""
    twins = DeviceBatch(batch.kv_indptr.clone(), batch.kv_indices.clone(), batch.last_page_len.clone())
    double.put_on_device(*twins)
    return batch._replace(on_device=twins)


# Equal to the oracle.


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("gpu", [AMPERE, HOPPER], ids=["ampere", "hopper"])
@pytest.mark.parametrize("dim", fast_only([64, 96], [40, 64, 96, 128, 256]))
@pytest.mark.parametrize("ratio", fast_only([1, 3], [1, 3, 4, 5]))
def test_every_head_size_and_group(deterministic: bool, gpu: Gpu, dim: int, ratio: int) -> None:
    backend, _ = make(deterministic, gpu)
    layer = Layer(backend, spec_of(1, ratio, dim), (40, 65, 1))
    layer.check([(0, 39, 1), (1, 0, 65), (2, 0, 1)])
    layer.check([(0, 20, 20), (1, 64, 1)])


@st.composite
def work(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(1, 120), min_size=1, max_size=5))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        chosen = draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
        step = []
        for r in chosen:
            start = draw(st.integers(0, lengths[r] - 1))
            step.append((r, start, draw(st.just(1) | st.integers(1, lengths[r] - start))))
        steps.append(step)
    return {
        "spec": spec_of(
            draw(st.integers(1, 3)),
            draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8])),
            draw(st.sampled_from([64, 96, 128])),
            draw(st.none() | st.integers(1, 90)),
            draw(st.none() | st.just(4.0)),
        ),
        "lengths": lengths,
        "steps": steps,
        "dtype": draw(st.sampled_from([BF16, torch.float16])),
        "fp8": draw(st.booleans()),
        "sinks": draw(st.booleans()),
        "deterministic": draw(st.booleans()),
        "gpu": draw(st.sampled_from([AMPERE, HOPPER])),
        "twins": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.too_slow])
@given(work())
def test_any_mix_of_requests_is_as_the_reference_has_it(drawn: dict[str, Any]) -> None:
    backend, double = make(drawn["deterministic"], drawn["gpu"], hold=True)
    spec, dtype = drawn["spec"], drawn["dtype"]
    layer = Layer(backend, spec, drawn["lengths"], dtype, FP8 if drawn["fp8"] else dtype, drawn["seed"])
    sinks = torch.linspace(-2, 2, spec.num_q_heads) if drawn["sinks"] else None
    for number, step in enumerate(drawn["steps"]):
        batch, query = layer.step(step)
        planned = on_device(double, batch) if drawn["twins"] else batch
        got = backend.run(backend.plan(spec, planned, CPU, number % 2), query, layer.cache, sinks)
        torch.testing.assert_close(got, layer.want(batch, query, sinks), rtol=2e-2, atol=2e-2)
        assert not got[int(batch.qo_indptr[-1]) :].any()
        if number % 2:
            double.finish()


def test_an_empty_step_gives_only_padding() -> None:
    for deterministic in (False, True):
        backend, _ = make(deterministic)
        layer = Layer(backend, spec_of(), (3,))
        plan = backend.plan(layer.spec, batch_of([], []), CPU)
        out = backend.run(plan, torch.ones(8, 2, 64, dtype=BF16), layer.cache)
        assert torch.equal(out, torch.zeros(8, 2, 64, dtype=BF16))


def test_queries_may_lie_apart() -> None:
    backend, _ = make()
    layer = Layer(backend, spec_of(2, 2), (20,))
    batch, query = layer.step([(0, 0, 20)])
    fused = torch.cat([query, query.neg()], 1)
    plan = backend.plan(layer.spec, batch, CPU)
    want = backend.run(plan, query, layer.cache)
    assert torch.equal(backend.run(plan, fused[:, :4], layer.cache), want)
    assert torch.equal(backend.run(plan, query.transpose(0, 2).contiguous().transpose(0, 2), layer.cache), want)
    shifted = torch.cat([query.flatten()[:1], query.flatten()])[1:].view(query.shape)  # not aligned
    assert torch.equal(backend.run(plan, shifted, layer.cache), want)


def test_groups_with_the_same_attention_have_plans_of_their_own() -> None:
    backend, double = make()
    layer = Layer(backend, spec_of(), (30, 50))
    steps = [layer.step([(0, 29, 1)]), layer.step([(1, 10, 40)]), layer.step([(1, 49, 1)])]
    plans = [
        backend.plan(layer.spec, on_device(double, batch._replace(group=group)), CPU)
        for group, (batch, _) in enumerate(steps)
    ]
    for plan, (batch, query) in zip(plans, steps, strict=True):
        torch.testing.assert_close(
            backend.run(plan, query, layer.cache), layer.want(batch, query), rtol=2e-2, atol=2e-2
        )


# Choice and arguments of the wrapper.


def names(double: FlashInferDouble) -> list[str]:
    return [c.name for c in double.calls]


def test_a_decode_beside_a_prefill_gets_a_launch_of_its_own_from_a_thousand_keys_on() -> None:
    kind = Kind(spec_of(1, 1), 64, BF16, BF16)
    assert not two_launches(kind, np.array([1000] * 8))
    assert two_launches(kind, np.array([1025]))
    assert two_launches(kind, np.array([1000] * 40))  # 10 MB
    assert not two_launches(kind._replace(spec=spec_of(1, 1, window=100)), np.array([5000]))


def test_short_decodes_join_the_prefill_and_long_ones_do_not() -> None:
    for length, wrappers in ((40, ["Prefill"]), (1100, ["Decode", "Prefill"])):
        backend, double = make()
        layer = Layer(backend, spec_of(), (length, 20))
        double.calls.clear()
        layer.check([(0, length - 1, 1), (1, 0, 20)])
        assert [n for n in names(double) if n.endswith("run")] == [
            f"Batch{w}WithPagedKVCacheWrapper.run" for w in wrappers
        ]


@pytest.mark.parametrize("ratio", [1, 4])
def test_after_the_first_plan_a_decode_is_planned_without_copies_and_waiting(ratio: int) -> None:
    backend, double = make()
    layer = Layer(backend, spec_of(2, ratio), (30, 50, 9))
    double.calls.clear()
    for number in range(3):
        batch, query = layer.step([(0, 20 + number, 1), (1, 40 + number, 1)][: 1 + number])
        plan = backend.plan(layer.spec, on_device(double, batch), CPU, number % 2)
        got = backend.run(plan, query, layer.cache)
        torch.testing.assert_close(got, layer.want(batch, query), rtol=2e-2, atol=2e-2)
    planned = [n for n in names(double) if n.endswith("plan")]
    assert planned == ["BatchDecodeWithPagedKVCacheWrapper.plan", "fast_decode_plan", "fast_decode_plan"]


def test_hopper_prefills_with_what_flashinfer_prefers_unless_bits_or_dtypes_say_otherwise() -> None:
    def chosen(gpu: Gpu, deterministic: bool, kv_dtype: torch.dtype) -> str:
        backend, double = make(deterministic, gpu)
        Layer(backend, spec_of(), (20,), kv_dtype=kv_dtype).check([(0, 0, 20)])
        return str(double.wrappers[-1]._backend)

    assert chosen(HOPPER, False, BF16) == "auto"
    assert chosen(HOPPER, True, BF16) == chosen(HOPPER, False, FP8) == chosen(AMPERE, False, BF16) == "fa2"


@settings(max_examples=examples(120))
@given(
    heads=st.sampled_from([(1, 1), (8, 1), (32, 8), (64, 8), (64, 4), (96, 1), (128, 1), (71, 1), (40, 40)]),
    dim=st.sampled_from([64, 128, 256]),
    decodes=st.integers(0, 600),
    long=st.integers(1, 40000),
    rows=st.integers(0, 3000),
    window=st.none() | st.just(1024),
    deterministic=st.booleans(),
    graph=st.booleans(),
)
def test_no_plan_takes_more_than_the_workspaces_hold(
    heads: tuple[int, int],
    dim: int,
    decodes: int,
    long: int,
    rows: int,
    window: int | None,
    deterministic: bool,
    graph: bool,
) -> None:
    backend, _ = make(deterministic)
    spec = AttentionSpec(*heads, dim, dim, 1.0, window)
    if backend.refuses(spec, BF16, BF16):
        return
    if graph:
        limit = backend.graph_max_kv_len or long
        batch = batch_of([1] * (decodes + 1), [min(long, limit)] * (decodes + 1))
        backend.plan(spec, batch, CPU, graph=True)
    else:
        lengths = [1 + i * 37 % long for i in range(decodes)]
        batch = batch_of([1] * decodes + [rows] * (rows > 1), [*lengths, *[long + rows] * (rows > 1)])
        backend.plan(spec, batch, CPU)  # the double raises the same errors as FlashInfer


# Two steps in flight.


def test_page_locked_memory_that_is_rewritten_too_early_is_caught() -> None:
    backend, double = make(hold=True)
    layer = Layer(backend, spec_of(), (30,))
    layer.check([(0, 0, 30)], turn=0)
    layer.check([(0, 0, 29)], turn=1)
    with pytest.raises(AssertionError, match="rewritten before its copy was done"):
        layer.check([(0, 0, 28)], turn=0)
    double.finish()


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_turns_may_be_in_flight(deterministic: bool) -> None:
    backend, double = make(deterministic, hold=True)
    layer = Layer(backend, spec_of(2, 4), (30, 40))
    for number in range(6):
        if number % 2 == 0:
            double.finish()
        layer.check([(0, 20 + number, 1), (1, number, 20)], turn=number % 2)


def test_the_double_catches_what_a_pinned_buffer_that_changes_would_do() -> None:
    backend, _ = make()
    layer = Layer(backend, spec_of(), (30,))
    batch, query = layer.step([(0, 0, 30)])
    plan = backend.plan(layer.spec, batch, CPU)
    plan.parts[0].wrapper._pin_memory_int_workspace_buffer[0] += 1
    with pytest.raises(AssertionError, match="rewritten before its copy was done"):
        backend.run(plan, query, layer.cache)


# Graphs.


class Staged(NamedTuple):
    """The runner's memory: two page-locked copies of each array, and one on the device."""

    host: tuple[DeviceBatch, DeviceBatch]
    device: DeviceBatch


def staged(double: FlashInferDouble, requests: int, pages: int) -> Staged:
    def arrays(fill: int) -> DeviceBatch:
        sizes = (requests + 1, pages, requests)
        return DeviceBatch(*(torch.full((n,), fill, dtype=torch.int32) for n in sizes))

    device = arrays(-1)
    double.put_on_device(*device)
    return Staged((arrays(0), arrays(0)), device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "spec",
    [spec_of(), spec_of(2, 4, 128), spec_of(1, 5, softcap=3.0), spec_of(2, 2, window=20), spec_of(1, 8, 96)],
    ids=["plain", "tensor cores", "capped", "windowed", "padded"],
)
@pytest.mark.parametrize("with_sinks", fast_only([True], [False, True]))
def test_a_graph_may_be_replayed_after_the_next_plan(
    deterministic: bool, spec: AttentionSpec, with_sinks: bool
) -> None:
    backend, double = make(deterministic, hold=True)
    layer = Layer(backend, spec, (90, 70, 50))
    sinks = torch.linspace(-1, 2, spec.num_q_heads) if with_sinks else None
    memory = {n: staged(double, n, 64) for n in (2, 3)}
    query = {n: torch.zeros(n, spec.num_q_heads, spec.key_dim, dtype=BF16) for n in memory}
    graphs: dict[int, Any] = {}
    plans: dict[int, Any] = {}
    for number in range(9):
        turn, n = number % 2, 2 + number // 2 % 2
        if turn == 0:
            double.finish()
        singles, rows = layer.step([(r, 3 + 5 * number + r, 1) for r in range(n)])
        host, device = memory[n].host[turn], memory[n].device
        used = len(singles.kv_indices)
        for target, source in zip(host, (singles.kv_indptr, singles.kv_indices, singles.last_page_len), strict=True):
            target[: len(source)] = source
        for target, source in zip(device, host, strict=True):
            target.copy_(source)
        query[n].copy_(rows[:n])
        batch = PagedBatch(
            singles.qo_indptr, host.kv_indptr, host.kv_indices[:used], host.last_page_len, PAGE, n, 0, device
        )
        plan = backend.plan(spec, batch, CPU, turn, graph=True)
        if n not in graphs:
            backend.run(plan, query[n], layer.cache, sinks)
            graphs[n] = double.record(lambda p=plan, q=query[n]: backend.run(p, q, layer.cache, sinks))
            plans[n] = plan
        assert plan is plans[n]
        graph, out = graphs[n]
        calls = len(double.calls)
        graph.replay()
        assert len(double.calls) == calls
        torch.testing.assert_close(out, layer.want(singles, rows[:n], sinks), rtol=2e-2, atol=2e-2)


def test_arrays_of_a_graph_may_not_move() -> None:
    backend, double = make()
    layer = Layer(backend, spec_of(), (30, 40))
    batch, _ = layer.step([(0, 20, 1), (1, 20, 1)])
    backend.plan(layer.spec, on_device(double, batch), CPU, graph=True)
    with pytest.raises(RuntimeError, match="graph of 2 requests moved"):
        backend.plan(layer.spec, on_device(double, batch), CPU, graph=True)
    backend.forget_graphs()  # as it was before sleep
    moved = on_device(double, batch)
    assert backend.plan(layer.spec, moved, CPU, 0, True) is backend.plan(layer.spec, moved, CPU, 1, True)


# Deterministic.


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(
    ratio=st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
    window=st.none() | st.integers(1, 70),
    length=st.integers(1, 100),
    cuts=st.lists(st.integers(1, 99), max_size=4),
    split=st.sampled_from([16, 32, 64, 8192]),
    small=st.booleans(),
)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(
    ratio: int, window: int | None, length: int, cuts: list[int], split: int, small: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (flashinfer_plan, flashinfer_partition):
            patch.setattr(module, "DETERMINISTIC_SPLIT", split)
        if small:  # room for the partial results of only some pieces at a time
            patch.setattr(flashinfer_plan, "FLOAT_WORKSPACE", 2 << 20)
        backend, double = make(deterministic=True)
        layer = Layer(backend, spec_of(1, ratio, window=window), (length, 60))
        results = []
        for edges in ([0, length], [0, *sorted(c for c in {*cuts} if c < length), length], [*range(length + 1)]):
            parts = []
            for start, end in itertools.pairwise(edges):
                batch, query = layer.step([(0, start, end - start), (1, 50, 5)][: 1 + end % 2])
                out = backend.run(backend.plan(layer.spec, batch, CPU), query, layer.cache)
                parts.append(out[: end - start])
            results.append(torch.cat(parts))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        assert {s.tile for s in double.schedules} == {16}


@settings(max_examples=examples(200))
@given(
    ratio=st.integers(1, 16),
    window=st.none() | st.integers(1, 9000),
    end=st.integers(1, 20000),
    rows=st.integers(1, 400),
)
def test_a_rows_shares_of_keys_depend_on_its_position_alone(
    ratio: int, window: int | None, end: int, rows: int
) -> None:
    """As in FA2: with pieces in place of requests, each row's tiles of keys begin at the same keys, and in the same
    number of splits, as when the request decodes alone."""
    rows = min(rows, end)
    kind = Kind(spec_of(1, ratio, window=window), 64, BF16, BF16)

    def by_position(batch: PagedBatch) -> dict[int, tuple[int, int, int]]:
        pieces = cut_into_pieces(batch, kind)
        assert (pieces.rows * ratio <= 16).all()
        found = {}
        left = (window or 10**9) - 1
        for n, first_page, pages, kv_len, chunks in zip(*(c.tolist() for c in pieces), strict=True):
            assert (pages - 1) * PAGE < kv_len <= pages * PAGE
            start = max(0, kv_len - n - left)
            for row in range(n):
                position = first_page * PAGE + kv_len - n + row
                found[position] = (
                    first_page * PAGE + start,
                    chunks,
                    (kv_len - n + row) // 64 * 64 if not window else 0,
                )
        return found

    together = by_position(batch_of([rows], [end]))
    assert sorted(together) == list(range(end - rows, end))
    for position in {end - rows, end - 1, end - rows // 2 - 1}:
        alone = by_position(batch_of([1], [position + 1]))
        assert together[position] == alone[position]


def test_lengths_are_those_of_the_batch() -> None:
    assert kv_lengths(batch_of([1, 2], [17, 32])).tolist() == [17, 32]


# The cache.


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize("dim", [64, 80])
def test_append_writes_these_rows_and_no_others(index_dtype: torch.dtype, kv_dtype: torch.dtype, dim: int) -> None:
    backend, _ = make()
    cache = pool_of(5, 3, backend.cache_dims(spec_of(dim=dim))[0], kv_dtype)
    fused = 500 * torch.randn(6, 9, dim, generator=torch.Generator().manual_seed(0)).to(BF16)
    keys, values = fused[:, 3:6], fused[:, 6:]
    blocks, rows = torch.tensor([3, 3, 1, 4, 4, 2]), torch.tensor([6, 7, 0, 5, 1, 15])
    backend.append(cache, keys, values, blocks.to(index_dtype), rows.to(index_dtype))
    for view, new in zip(cache, (keys, values), strict=True):
        want = new.clamp(-448, 448).to(kv_dtype).float() if kv_dtype == FP8 else new.float()
        written = view[blocks, rows].float()
        assert torch.equal(written[..., :dim], want)
        assert not written[..., dim:].any()
        assert int((~view.float().isnan()).sum()) == written.numel()


def test_append_of_nothing_and_of_more_heads_than_a_block_has_threads() -> None:
    backend, double = make()
    cache = pool_of(2, 2, 64, BF16)
    none = torch.empty(0, dtype=torch.int64)
    backend.append(cache, torch.empty(0, 2, 64, dtype=BF16), torch.empty(0, 2, 64, dtype=BF16), none, none)
    many = pool_of(2, 65, 128, BF16)
    ones = torch.ones(1, 65, 128, dtype=BF16)
    backend.append(many, ones, ones, torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(many.values[1, 2], ones[0])
    assert not double.calls


# Other kernels.


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [0.0, 1.0, 0.5])
def test_norms(dtype: torch.dtype, offset: float) -> None:
    backend, double = make()
    fused = torch.randn(2, 5, 12, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.randn(64, generator=torch.Generator().manual_seed(1)).to(dtype)
    for x in (fused, fused[:, :, 3:7], fused[0, :, 2], fused[0, 0], fused[:, :0], fused.transpose(-1, -2)[..., :64]):
        if x.shape[-1] == 64:
            close(backend.rms_norm(x, weight, 1e-5, offset), REFERENCE.rms_norm(x, weight, 1e-5, offset))
    x, residual = fused[0, :, 0].contiguous(), fused[1, :, 1].contiguous()
    want = REFERENCE.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, offset)
    got = backend.add_rms_norm(x, residual, weight, 1e-5, offset)
    for a, b in zip(got, want, strict=True):
        close(a, b)
    expected = {0.0: {"rmsnorm", "fused_add_rmsnorm"}, 1.0: {"gemma_rmsnorm", "gemma_fused_add_rmsnorm"}}.get(offset)
    assert set(names(double)) == (expected if expected and dtype != torch.float32 else set())


def test_norms_with_weights_and_rows_that_are_not_aligned() -> None:
    backend, _ = make()
    x, residual, weight = (
        torch.randn(n, generator=torch.Generator().manual_seed(n)).to(BF16)[1:] for n in (257, 513, 65)
    )
    x, residual = x.view(4, 64), residual[:256].view(4, 64)
    close(backend.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    want = REFERENCE.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    for a, b in zip(backend.add_rms_norm(x, residual, weight, 1e-5), want, strict=True):
        close(a, b)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations(dtype: torch.dtype, activation: str) -> None:
    backend, double = make()
    for width in (64, 12, 8):  # 12: 24 bytes, where FlashInfer's kernel would read what is not aligned
        x = torch.randn(5, 2 * width, generator=torch.Generator().manual_seed(width)).to(dtype)
        for rows in (x, x[:0], x.T.contiguous().T):
            close(backend.act_and_mul(rows, activation), REFERENCE.act_and_mul(rows, activation))
    assert bool(double.calls) == (dtype == BF16)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match=r"'relu'.*silu, gelu, gelu_tanh"):
        make()[0].act_and_mul(torch.zeros(1, 16, dtype=BF16), "relu")


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (128, 64), (128, 32), (96, 96), (64, 24), (80, 32)])
def test_rotation(dtype: torch.dtype, interleaved: bool, dim: int, rotary_dim: int) -> None:
    backend, double = make()
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(7, 8, dim, generator=generator).to(dtype)
    angles = torch.randn(7, rotary_dim // 2, generator=generator)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    want = fused.clone()
    REFERENCE.rotate(want[:, :4], want[:, 4:6], table, interleaved)
    backend.rotate(fused[:, :4], fused[:, 4:6], table, interleaved)
    close(fused, want)
    assert bool(double.calls) == (dtype == BF16 and dim != 96 and dim != 80 and rotary_dim % 16 == 0)


@settings(max_examples=examples(100))
@given(st.data())
def test_masks_are_as_on_a_cpu(data: st.DataObject) -> None:
    backend, _ = make()
    rows, vocab = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    scores = 3 * torch.randn(rows, vocab, generator=generator)

    def column(values: st.SearchStrategy[Any], dtype: torch.dtype) -> torch.Tensor | None:
        drawn = [data.draw(values) for _ in range(rows)]
        return torch.tensor(drawn, dtype=dtype) if data.draw(st.booleans()) else None

    limits = (
        column(st.integers(0, 50), torch.int64),
        column(st.sampled_from([1.0, 0.9, 0.5, 1e-6]), torch.float32),
        column(st.sampled_from([0.0, 0.1, 0.9]), torch.float32),
    )
    got = backend.mask(scores, *limits)
    assert torch.equal(got, REFERENCE.mask(scores, *limits))


def test_choices_and_products_are_as_on_a_cpu() -> None:
    backend, _ = make(deterministic=True)
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    args = torch.arange(4), torch.arange(4) + 7, torch.tensor([True, False, True, False])
    assert torch.equal(backend.choose(scores, *args), REFERENCE.choose(scores, *args))
    assert torch.equal(backend.linear(scores, scores), scores @ scores.T)


# Refused arguments.


@pytest.mark.parametrize(
    ("spec", "dtypes", "gpu", "words"),
    [
        (spec_of(), (torch.float32, torch.float32), HOPPER, "queries of torch.float32.*set dtype"),
        (spec_of(), (BF16, BF16), Gpu((7, 5), 40), "bfloat16 on compute capability 7.5.*float16"),
        (spec_of(), (BF16, torch.float16), HOPPER, "cache of torch.float16.*kv_cache_dtype"),
        (AttentionSpec(2, 2, 192, 128, 1.0), (BF16, BF16), HOPPER, "keys of 192 elements and values of 128"),
        (spec_of(dim=512), (BF16, BF16), HOPPER, "heads of 512 elements.*256 at most"),
        (AttentionSpec(3, 2, 64, 64, 1.0), (BF16, BF16), HOPPER, "3 query heads over 2 KV heads"),
        (spec_of(1, 17), (BF16, BF16), HOPPER, "17 query heads per KV head: deterministic takes 16"),
        (spec_of(), (torch.float16, torch.float16), Gpu((7, 5), 40), "deterministic takes 8.0"),
        (spec_of()._replace(bias=SlopeBias((0.5, 0.25))), (BF16, BF16), HOPPER, "a bias on its scores"),
    ],
    ids=str,
)
def test_what_it_has_no_kernel_for_is_refused_in_words(
    spec: AttentionSpec, dtypes: tuple[torch.dtype, torch.dtype], gpu: Gpu, words: str
) -> None:
    backend = FlashInferBackend(CPU, "deterministic" in words, library=FlashInferDouble(), gpu=gpu)
    reason = backend.refuses(spec, *dtypes)
    assert reason is not None
    assert re.search(words, reason), reason
    with pytest.raises(ValueError, match="planned before refuses"):
        backend.plan(spec, batch_of([1], [1]), CPU)


def test_heads_lie_padded_to_the_next_size() -> None:
    backend, _ = make()
    sizes = {16: 64, 64: 64, 65: 128, 96: 128, 128: 128, 192: 256, 256: 256, 300: 300}
    assert all(backend.cache_dims(spec_of(dim=dim)) == (size, size) for dim, size in sizes.items())
    assert backend.cache_dims(AttentionSpec(8, 8, 192, 128, 1.0)) == (256, 128)
    assert backend.graph_max_kv_len is None
    assert make(True)[0].graph_max_kv_len == 8192


def test_without_cuda_in_torch_or_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BackendUnavailableError, match="built for CPUs: install its CUDA build"):
        FlashInferBackend(CPU)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(BackendUnavailableError, match=r"driver for CUDA 13\.0.*nvidia-smi"):
        FlashInferBackend(torch.device("cuda"))


def test_an_old_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        name, major, minor, multi_processor_count = "Tesla V100", 7, 0, 80

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Old)
    with pytest.raises(
        BackendUnavailableError, match=r"Tesla V100 has compute capability 7\.0 and FlashInfer needs 7\.5"
    ):
        FlashInferBackend(torch.device("cuda"))


def test_a_missing_package_or_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "flashinfer":
            raise ImportError("No module named 'flashinfer'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BackendUnavailableError, match=r"can't be imported.*install it"):
        FlashInferBackend(torch.device("cuda"), gpu=HOPPER)
    monkeypatch.setattr(builtins, "__import__", original)
    monkeypatch.setattr(prebuilt, "require_flashinfer", FlashInferDouble)
    monkeypatch.setattr(prebuilt, "use", lambda folder: None)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(BackendUnavailableError, match=r"no compiler.*CUDA_HOME"):
        FlashInferBackend(torch.device("cuda"), gpu=HOPPER)
