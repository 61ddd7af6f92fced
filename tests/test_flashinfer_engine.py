"""The engine as it runs on a GPU, with stand-ins for the package and the device: the FlashInfer backend, two steps in
flight, graphs with padding. All architectures of test_exact.py, token for token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer_double
import references
import tiny
from flashinfer_double import FlashInferDouble
from late_device import LateDevice
from mainspring.core.worker import generation_worker, worker
from mainspring.core.worker import runner as model_runner
from mainspring.kernels.flashinfer import flashinfer_backend as flashinfer
from mainspring.kernels.flashinfer.flashinfer_backend import FlashInferBackend, Gpu
from test_exact import DEFAULT_BLOCKS, NUM_BLOCKS, SETTINGS, requests
from test_late_device import SIZES, run
from tiers import EACH_ARCHITECTURE, fast_only

EXPERTS = ("mixtral", "qwen3_moe")
H200 = Gpu((9, 0), flashinfer_double.NUM_MULTIPROCESSORS)


class Machine(LateDevice):
    """Device and package share one queue of work. A graph is the launched work without the Python code in between."""

    def __init__(self, package: FlashInferDouble) -> None:
        super().__init__()
        self.package = package
        self.reruns = False  # a graph calls its function again, if experts on a CPU depend on their router's choice

    def done(self, number: int) -> None:
        super().done(number)
        self.package.finish()

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        if self.reruns:
            return super().capture(run)
        self.package.finish()
        graph, result = self.package.record(run)

        def replay() -> None:
            with torch.inference_mode():
                graph.replay()
            self.num_replays += 1

        return replay, result


@pytest.fixture
def machines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The devices of runners, the newest last. The kernels also accept fp32, so that tokens can be compared."""
    monkeypatch.setattr(flashinfer, "HALF", (*flashinfer.HALF, torch.float32))
    monkeypatch.setattr(flashinfer_double, "HALF", (*flashinfer_double.HALF, torch.float32))
    machines: list[Machine] = []
    package = FlashInferDouble(hold=True)

    def make(device: torch.device) -> Machine:
        machines.append(Machine(package))
        machines[-1].reruns = "experts" in request.node.name
        return machines[-1]

    monkeypatch.setattr(model_runner, "device_for", make)
    monkeypatch.setattr(worker, "prepare_kernels", lambda *args: None)
    monkeypatch.setattr(
        generation_worker,
        "graph_sizes",
        lambda options, device, most: [] if options.enforce_eager else [n for n in SIZES if n <= most],
    )
    monkeypatch.setattr(
        worker,
        "choose_backend",
        lambda options, device: FlashInferBackend(device, options.deterministic, library=package, gpu=H200),
    )
    return machines


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(*each.values, marks=each.marks, id=f"{name} experts" if name in EXPERTS else name)
        for name, each in zip(tiny.ARCHITECTURES, EACH_ARCHITECTURE, strict=True)
    ],
)
@pytest.mark.parametrize("deterministic", fast_only([False], [False, True]), ids=["", "deterministic"])
def test_greedy_tokens_equal_generate(
    architecture: str, deterministic: bool, tmp_path: Path, machines: list[Machine]
) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = requests(tiny.VOCAB_SIZE)
    blocks = NUM_BLOCKS.get(architecture, DEFAULT_BLOCKS)
    got, engine = run(path, reqs, num_gpu_blocks_override=blocks, deterministic=deterministic, **SETTINGS)
    assert got == references.greedy(path, reqs)
    stats = engine.engine_core.core.scheduler.stats()
    assert engine.engine_core.core._depth == 2
    assert machines[-1].num_replays > 20
    assert min(stats.num_preemptions, stats.prefix_hits, stats.chunked_prefills, stats.mixed_steps) > 0
    names = {call.name for call in machines[-1].package.calls}
    assert "BatchPrefillWithPagedKVCacheWrapper.run" in names
    assert deterministic or "BatchDecodeWithPagedKVCacheWrapper.run" in names


def outputs(path: Path, **settings: Any) -> list[list[int]]:
    return run(path, requests(tiny.VOCAB_SIZE, seed=4), **{**SETTINGS, **settings})[0]


@pytest.mark.slow
def test_in_bf16_graphs_and_overlap_change_nothing_and_the_kernels_are_flashinfers(
    tmp_path: Path, machines: list[Machine]
) -> None:
    path = tiny.make("qwen3", tmp_path, dtype=torch.bfloat16, head_dim=64)
    first = outputs(path, deterministic=True)
    assert outputs(path, deterministic=True, enforce_eager=True) == first
    assert outputs(path, deterministic=True, async_scheduling=False) == first
    assert outputs(path, deterministic=True, max_num_batched_tokens=64, max_num_seqs=3) == first
    names = {call.name for call in machines[-1].package.calls}
    assert {
        "append_paged_kv_cache",
        "rmsnorm",
        "fused_add_rmsnorm",
        "silu_and_mul",
        "apply_rope_with_cos_sin_cache_inplace",
    } <= names


def test_an_fp8_cache_runs(tmp_path: Path, machines: list[Machine]) -> None:
    path = tiny.make("llama", tmp_path, dtype=torch.bfloat16)
    assert [len(tokens) for tokens in outputs(path, kv_cache_dtype="fp8")] == [n for _, n in requests(384, seed=4)]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", tiny.INDEXED)
def test_selected_keys_are_read_from_its_cache_without_graphs(
    architecture: str, tmp_path: Path, machines: list[Machine]
) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = requests(tiny.VOCAB_SIZE)
    got, engine = run(path, reqs, num_gpu_blocks_override=DEFAULT_BLOCKS, **SETTINGS)
    assert got == references.greedy(path, reqs)
    assert engine.engine_core.core._depth == 2
    assert machines[-1].num_replays == 0
