"""FlashInfer's attention over latents, with the stand-in for the package: as the reference backend has it, in graphs,
and in a whole engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import references
import tiny
from mainspring.core.model.load.loader import page
from mainspring.core.worker.kv_layout import plan_layout
from mainspring.kernels.contract import AttentionSpec, PagedBatch, SlopeBias
from mainspring.kernels.flashinfer import latents
from mainspring.kernels.flashinfer.flashinfer_backend import Gpu
from test_exact import SETTINGS, requests
from test_flashinfer import AMPERE, BF16, CPU, FP8, HOPPER, PAGE, Layer, batch_of, make, names, on_device, staged
from test_flashinfer_engine import Machine, machines  # noqa: F401  (a fixture)
from test_late_device import run
from test_latents import model_of
from tiers import examples, fast_only

APPEND, RUN = "append_paged_mla_kv_cache", "BatchMLAPagedAttentionWrapper.run"
DEEPSEEK = AttentionSpec(16, 1, 576, 512, 192**-0.5, latent=True)
MINICPM = AttentionSpec(5, 1, 288, 256, 96**-0.5, latent=True)  # shorter than the kernels' sizes


@st.composite
def work(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int, int]]]]:
    """Lengths of requests; and steps of (request, first row, rows)."""
    lengths, steps = draw(st.lists(st.integers(1, 120), min_size=1, max_size=5)), []
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
        starts = [(r, draw(st.integers(0, lengths[r] - 1))) for r in chosen]
        steps.append([(r, s, draw(st.just(1) | st.integers(1, lengths[r] - s))) for r, s in starts])
    return lengths, steps


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(
    work(),
    st.sampled_from([DEEPSEEK, MINICPM, MINICPM._replace(key_dim=40, value_dim=32)]),
    st.sampled_from([(BF16, BF16, AMPERE), (torch.float16, torch.float16, HOPPER), (BF16, FP8, HOPPER)]),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_mix_of_requests_is_as_the_reference_has_it(
    drawn: tuple[list[int], list[Any]], spec: AttentionSpec, on: Any, with_sinks: bool, seed: int
) -> None:
    dtype, kv_dtype, gpu = on
    backend, double = make(gpu=gpu, hold=True)
    lengths, steps = drawn
    layer = Layer(backend, spec, lengths, dtype, kv_dtype, seed)
    sinks = torch.linspace(-2, 2, spec.num_q_heads) if with_sinks else None
    for number, step in enumerate(steps):
        batch, query = layer.step(step)
        got = backend.run(backend.plan(spec, on_device(double, batch), CPU, number % 2), query, layer.cache, sinks)
        torch.testing.assert_close(got, layer.want(batch, query, sinks), rtol=2e-2, atol=2e-2)
        assert not got[int(batch.qo_indptr[-1]) :].any(), "padding rows must come back as zeros"
        if number % 2:
            double.finish()
    assert names(double).count(RUN) == len(steps), "one launch for single rows and prompts alike"
    assert {wrapper._backend for wrapper in double.wrappers} == {"fa3" if gpu == HOPPER else "fa2"}


def test_an_empty_step_gives_only_padding() -> None:
    backend, _ = make()
    layer = Layer(backend, MINICPM, (3,))
    batch, query = layer.step([])
    assert not backend.run(backend.plan(MINICPM, batch, CPU), query, layer.cache).any()


@pytest.mark.parametrize(("spec", "dim"), [(DEEPSEEK, 576), (MINICPM, 512)])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_append_writes_these_rows_and_zeros_behind_them(spec: AttentionSpec, dim: int, kv_dtype: torch.dtype) -> None:
    backend, double = make(gpu=HOPPER)
    layer = Layer(backend, spec, (20,), kv_dtype=kv_dtype)
    assert APPEND in names(double)
    assert layer.cache.keys.shape[-1] == dim
    kept, want = layer.cache.keys.float(), layer.plain.keys.float()
    assert torch.equal(kept[..., : spec.key_dim].nan_to_num(-1), want.nan_to_num(-1))
    written = ~want[..., 0].isnan()
    assert int(written.sum()) == 20
    assert not kept[written][..., spec.key_dim :].any()


def test_a_step_of_more_tiles_than_a_plan_has_room_for_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "MOST_WORKS", 2 * 132 + 12)  # of 64 pairs: 12
    backend, double = make()
    layer = Layer(backend, DEEPSEEK, (90, 40, 7))
    double.calls.clear()
    layer.check([(0, 3, 87), (1, 0, 40), (2, 6, 1)])
    planned = [call.args for call in double.calls if call.name.endswith("Wrapper.plan")]
    assert len(planned) == names(double).count(RUN) > 2
    assert all(int(latents.works(qo_indptr.diff().numpy(), 16).sum()) <= 12 for qo_indptr, *_ in planned)


def test_the_largest_steps_fit() -> None:
    """The double fails where FlashInfer would write past its lists or workspaces."""
    spec, most = DEEPSEEK._replace(num_q_heads=128), 0
    for rows, kv_lens in (
        ([20000], [20000]),
        ([1] * 600 + [16000], [9000] * 600 + [30000]),
        ([1] * 512, [40000] * 512),
    ):
        backend, double = make(gpu=HOPPER)
        assert backend.refuses(spec, BF16, BF16) is None
        backend.plan(spec, batch_of(rows, kv_lens), CPU)
        most = max(most, *(schedule.programs for schedule in double.schedules), 0)
    assert most > 4000


@pytest.mark.parametrize("spec", [DEEPSEEK, MINICPM], ids=["deepseek", "minicpm"])
def test_a_graph_may_be_replayed_after_the_next_plan(spec: AttentionSpec) -> None:
    backend, double = make(gpu=HOPPER, hold=True)
    layer = Layer(backend, spec, (90, 70, 50))
    memory = {n: staged(double, n, 64) for n in (2, 3)}
    query = {n: torch.zeros(n, spec.num_q_heads, spec.key_dim, dtype=BF16) for n in memory}
    graphs: dict[int, Any] = {}
    for number in range(9):
        turn, n = number % 2, 2 + number // 2 % 2
        if turn == 0:
            double.finish()
        singles, rows = layer.step([(r, 3 + 5 * number + r, 1) for r in range(n)])
        host, device = memory[n].host[turn], memory[n].device
        used = len(singles.kv_indices)
        for target, source in zip(host, singles[1:4], strict=True):
            target[: len(source)] = source
        for target, source in zip(device, host, strict=True):
            target.copy_(source)
        query[n].copy_(rows[:n])
        arrays = host.kv_indptr, host.kv_indices[:used], host.last_page_len
        plan = backend.plan(spec, PagedBatch(singles.qo_indptr, *arrays, PAGE, n, 0, device), CPU, turn, graph=True)
        if n not in graphs:
            backend.run(plan, query[n], layer.cache)
            graphs[n] = double.record(lambda p=plan, q=query[n]: backend.run(p, q, layer.cache)), plan
        (graph, out), kept = graphs[n]
        assert plan is kept
        calls = len(double.calls)
        graph.replay()
        assert len(double.calls) == calls
        torch.testing.assert_close(out, layer.want(singles, rows[:n]), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("change", "dtypes", "gpu", "words"),
    [
        ({"value_dim": 520, "key_dim": 584}, (BF16, BF16), HOPPER, "520 numbers and 64 shared dimensions.*512 and 64"),
        ({"key_dim": 608}, (BF16, BF16), HOPPER, "512 numbers and 96 shared dimensions.*512 and 64"),
        ({"key_dim": 512}, (BF16, BF16), HOPPER, "512 numbers and 0 shared dimensions"),
        ({"value_dim": 500, "key_dim": 564}, (BF16, BF16), HOPPER, "latents of 500 numbers.*multiples of 8"),
        ({"value_dim": 504, "key_dim": 564}, (BF16, FP8), HOPPER, "latents of 504 numbers.*multiples of 16"),
        ({"window": 9}, (BF16, BF16), HOPPER, "a window or a soft cap"),
        ({"softcap": 9.0}, (BF16, BF16), HOPPER, "a window or a soft cap"),
        ({}, (torch.float16, torch.float16), Gpu((7, 5), 40), "latents on compute capability 7.5.*8.0"),
        ({}, (BF16, FP8), AMPERE, "latents in fp8.*Hopper alone"),
        ({}, (torch.float16, FP8), HOPPER, "latents in fp8, with queries of torch.float16.*with bfloat16"),
        ({}, (torch.float32, torch.float32), HOPPER, "queries of torch.float32"),
        ({"bias": SlopeBias((0.5,) * 16)}, (BF16, BF16), HOPPER, "a bias on its scores"),
        ({}, (BF16, BF16), HOPPER, "latents.*deterministic is set"),
    ],
    ids=str,
)
def test_what_it_has_no_kernel_for_is_refused_in_words(
    change: dict[str, Any], dtypes: tuple[torch.dtype, torch.dtype], gpu: Gpu, words: str
) -> None:
    backend, _ = make("deterministic" in words, gpu)
    reason = backend.refuses(DEEPSEEK._replace(**change), *dtypes)
    assert reason is not None
    assert re.search(words, reason), reason


# In a model.


def test_a_block_of_a_layer_over_latents_is_its_rows_with_padding() -> None:
    backend, _ = make()
    layout = plan_layout([MINICPM, MINICPM], [0, 1], PAGE, BF16, backend.cache_dims)
    assert (layout.dims, layout.block_elements) == (((512, 0), (512, 0)), 2 * PAGE * 512)
    pool = torch.zeros(3, layout.block_elements, dtype=BF16)
    keys, values = layout.caches(pool)[1]
    assert (keys.shape, values.shape) == ((3, PAGE, 1, 512), (3, PAGE, 1, 256))
    values[2, 1] = 1
    assert keys[2, 1, 0].sum() == pool.sum() == 256


@pytest.mark.slow
def test_an_fp8_cache_runs_and_graphs_change_nothing(tmp_path: Path, machines: list[Machine]) -> None:  # noqa: F811
    path = tiny.make("minicpm3", tmp_path, dtype=BF16)
    reqs = requests(tiny.VOCAB_SIZE, seed=4)
    first, second = (
        run(path, reqs, **{**SETTINGS, "kv_cache_dtype": "fp8", "enforce_eager": eager})[0] for eager in (False, True)
    )
    assert first == second
    assert [len(tokens) for tokens in first] == [n for _, n in reqs]
    assert {RUN, APPEND} <= {*names(machines[-1].package)}


def test_latents_that_are_refused_are_cached_as_keys_and_values(tmp_path: Path) -> None:
    model = model_of(tiny.make("minicpm3", tmp_path)).to(BF16)
    specs = [page(model, backend=make(deterministic=False, gpu=gpu)[0]).layers[0] for gpu in (Gpu((7, 5), 40),)]
    assert specs[0]._replace(scale=1.0) == AttentionSpec(4, 4, 32, 16, 1.0)


@pytest.mark.parametrize("architecture", fast_only(["deepseek_v3 experts"], ["deepseek_v3 experts", "minicpm3"]))
def test_greedy_tokens_equal_generate(architecture: str, tmp_path: Path, machines: list[Machine]) -> None:  # noqa: F811
    path = tiny.make(architecture.split()[0], tmp_path)
    reqs = requests(tiny.VOCAB_SIZE)
    got, engine = run(path, reqs, num_gpu_blocks_override=48, **SETTINGS)
    assert got == references.greedy(path, reqs)
    assert all(spec.latent for spec in engine.engine_core.core.worker.runner.model.layers)
    assert machines[-1].num_replays > 20
    called: Sequence[str] = names(machines[-1].package)
    assert RUN in called
    assert not [name for name in called if name.startswith(("BatchDecode", "BatchPrefill"))]
