"""The runner as a GPU has it: buffers written ahead, steps in flight, graphs with padding. On a stand-in for a GPU."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import references
import tiny
from late_device import LateDevice
from mainspring import EngineArgs, LLMEngine, SamplingParams
from mainspring.core.worker import generation_worker, worker
from mainspring.core.worker import runner as model_runner
from mainspring.core.worker.device import Staged
from mainspring.core.worker.step_inputs import Rows
from mainspring.kernels.contract import AttentionSpec, LayerCache, PagedBatch
from mainspring.kernels.reference.attention_plan import AttentionPlan
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from test_exact import DEFAULT_BLOCKS, NUM_BLOCKS, SETTINGS, requests
from tiers import EACH_ARCHITECTURE, fast_only

SIZES = [1, 3, 8, 16]


class GraphPlan:
    inner: AttentionPlan


class GraphReference(ReferenceBackend):
    """The reference kernels with plans that can be renewed under a graph."""

    graph_max_kv_len = None

    def __init__(self) -> None:
        super().__init__()
        self._graph_plans: dict[tuple[AttentionSpec, int, int], GraphPlan] = {}

    def plan(
        self, spec: AttentionSpec, batch: PagedBatch, device: torch.device, turn: int = 0, graph: bool = False
    ) -> Any:
        plan = super().plan(spec, batch, device)
        if not graph:
            return plan
        kept = self._graph_plans.setdefault((spec, batch.group, len(batch.last_page_len)), GraphPlan())
        kept.inner = plan
        return kept

    def run(self, plan: Any, query: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return super().run(plan.inner if isinstance(plan, GraphPlan) else plan, query, cache, sinks)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateDevice]:
    """The devices of runners, the newest last."""
    devices: list[LateDevice] = []

    def make(device: torch.device) -> LateDevice:
        devices.append(LateDevice(device))
        return devices[-1]

    monkeypatch.setattr(model_runner, "device_for", make)
    monkeypatch.setattr(
        generation_worker, "graph_sizes", lambda options, device, most: [] if options.enforce_eager else SIZES
    )
    monkeypatch.setattr(worker, "choose_backend", lambda options, device: GraphReference())
    return devices


def run(
    path: Path, reqs: list[tuple[list[int], int]], *, started: Callable[[], None] = lambda: None, **settings: Any
) -> tuple[list[list[int]], LLMEngine]:
    """The tokens of each request. `started` is called once the engine is ready, before it gets any requests."""
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(path), **settings), enable_multiprocessing=False)
    started()
    for i, (prompt, n) in enumerate(reqs):
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    tokens: dict[int, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    engine.shutdown()
    return [tokens[i] for i in range(len(reqs))], engine


@pytest.mark.parametrize("architecture", EACH_ARCHITECTURE)
def test_two_steps_in_flight_and_graphs_give_exactly_the_tokens_of_generate(
    architecture: str, tmp_path: Path, late: list[LateDevice]
) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = requests(tiny.VOCAB_SIZE)
    blocks = NUM_BLOCKS.get(architecture, DEFAULT_BLOCKS)
    got, engine = run(path, reqs, num_gpu_blocks_override=blocks, **SETTINGS)
    assert got == references.greedy(path, reqs)
    stats = engine.engine_core.core.scheduler.stats()
    assert engine.engine_core.core._depth == 2
    assert late[-1].num_replays > 20
    assert min(stats.num_preemptions, stats.prefix_hits, stats.chunked_prefills, stats.mixed_steps) > 0


@pytest.mark.parametrize("architecture", fast_only(["nemotron_h"], tiny.RECURRENT))
def test_models_with_recurrent_state_run_in_graphs_too(
    architecture: str, tmp_path: Path, late: list[LateDevice]
) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = requests(tiny.VOCAB_SIZE)
    blocks = None if architecture in ("mamba2", "falcon_mamba") else 20  # they have no attention
    got, engine = run(path, reqs, num_gpu_blocks_override=blocks, **SETTINGS)
    assert got == references.greedy(path, reqs)
    assert engine.engine_core.core._depth == 2
    # MiniMax's mixer is called once for each token of a sequence, and how often is decided on the host.
    assert (late[-1].num_replays > 20) == (architecture != "minimax")


def test_guesses_about_a_recurrent_state_are_not_computed_as_requests_of_one_token(
    tmp_path: Path, late: list[LateDevice]
) -> None:
    path = tiny.make("qwen3_next", tmp_path)
    prompts = [prompt for prompt, _ in requests(tiny.VOCAB_SIZE)[5:9]]
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    # so few tokens that some guesses are right
    few = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, allowed_token_ids=[7, 8])
    outputs = []
    for speculative in (None, guesses):
        args = EngineArgs(model=str(path), speculative_config=speculative, **SETTINGS)
        engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, few)
        done = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
        outputs.append(done)
        stats = engine.engine_core.core.scheduler.stats()
        engine.shutdown()
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert outputs[0] == outputs[1]
    assert late[-1].num_replays > 0


@pytest.mark.slow
def test_with_graphs_and_without_with_one_step_in_flight_and_two_tokens_are_the_same(
    tmp_path: Path, late: list[LateDevice]
) -> None:
    path = tiny.make("llama", tmp_path, dtype=torch.bfloat16)
    reqs = requests(tiny.VOCAB_SIZE, seed=5)
    outputs = []
    for eager in (False, True):
        for overlap in (False, True, None):
            got, engine = run(path, reqs, enforce_eager=eager, async_scheduling=overlap, **SETTINGS)
            outputs.append(got)
            assert (late[-1].num_replays > 0) != eager
            assert engine.engine_core.core._depth == (1 if overlap is False else 2)
    assert all(one == outputs[0] for one in outputs)


class Inputs(TorchDispatchMode):
    """Notes what is read that was not made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[StorageWeakRef, str] = {}
        self._made: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and func is not torch.ops.aten.lift_fresh.default:  # a number's
                self.read.setdefault(StorageWeakRef(tensor.untyped_storage()), str(func))
        for tensor in tree_leaves(out):
            ref = StorageWeakRef(tensor.untyped_storage()) if isinstance(tensor, torch.Tensor) else None
            if ref is not None and ref not in self.read:
                self._made.add(ref)
        return out

    def from_outside(self) -> dict[StorageWeakRef, str]:
        return {ref: by for ref, by in self.read.items() if ref not in self._made}


def test_memory_that_a_graph_reads_outlives_its_capture(
    tmp_path: Path, late: list[LateDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real graph keeps nothing alive: it goes on reading memory that others have been given."""
    noted: list[Inputs] = []

    def capture(self: LateDevice, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        noted.append(Inputs())
        with noted[-1]:
            return lambda: None, run()

    monkeypatch.setattr(LateDevice, "capture", capture)
    path = tiny.make("llama", tmp_path)
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(path), **SETTINGS), enable_multiprocessing=False)
    gc.collect()
    assert len(noted) == len([size for size in SIZES if size <= SETTINGS["max_num_seqs"]])
    for inputs in noted:
        read = inputs.from_outside()
        assert len(read) > 10
        assert not [by for ref, by in read.items() if ref.expired()]
    engine.shutdown()


def test_memory_written_before_its_copy_is_done_is_seen() -> None:
    device = LateDevice()
    array = Staged(device, (4,), torch.int64)
    array.host[0][:] = 1
    array.send(0, 4)
    array.host[1][:] = 2
    array.send(1, 4)
    mark = device.mark()
    assert array.device.tolist() == [2] * 4
    array.host[0][0] = 3
    with pytest.raises(AssertionError, match="before its copy was done"):
        device.mark()
    array.host[0][0] = 1
    mark.wait()
    array.host[0][0] = 3
    device.mark()


def test_single_rows_come_first_and_everything_follows_them() -> None:
    r = np.random.default_rng(0)
    for _ in range(200):
        n = int(r.integers(1, 8))
        counts = r.choice([1, 1, 2, 5], n)
        firsts = np.cumsum(counts) - counts
        ids = r.integers(0, 1000, counts.sum())
        wanted = (firsts + counts - 1)[r.random(n) < 0.7]
        step = Rows(r.permutation(n), r.integers(0, 9, n), counts, ids, wanted)
        moved = step.singles_first()
        assert (np.diff((moved.counts > 1).astype(int)) >= 0).all()
        assert moved.token_ids[moved.wanted].tolist() == ids[wanted].tolist()

        def by_slot(rows: Rows) -> dict[int, tuple[int, list[int]]]:
            parts = np.split(rows.token_ids, np.cumsum(rows.counts)[:-1])
            return {int(s): (int(a), p.tolist()) for s, a, p in zip(rows.slots, rows.starts, parts, strict=True)}

        assert by_slot(moved) == by_slot(step)


def test_sampled_requests_too(tmp_path: Path, late: list[LateDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.make("llama", tmp_path)
    numbers = random.Random(2)
    prompts = [[numbers.randrange(tiny.VOCAB_SIZE) for _ in range(numbers.randint(1, 40))] for _ in range(12)]
    many = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.3)[i % 3],
            top_k=(0, 5)[i % 2],
            top_p=(1.0, 0.8, 0.95)[i % 3],
            min_p=(0.0, 0.05)[i // 2 % 2],
            min_tokens=i % 4,
            seed=i,
            max_tokens=12,
        )
        for i in range(len(prompts))
    ]

    def outputs(**settings: Any) -> list[list[int]]:
        args = EngineArgs(model=str(path), **{**SETTINGS, **settings})
        engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        for i, (prompt, params) in enumerate(zip(prompts, many, strict=True)):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        tokens: dict[int, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        engine.shutdown()
        return [tokens[i] for i in range(len(prompts))]

    with_graphs = outputs()
    monkeypatch.undo()
    assert outputs() == with_graphs


@pytest.mark.parametrize(
    "words",
    fast_only(["CUDA out of memory"], ["Buffer overflow when allocating memory for tmp_v", "CUDA out of memory"]),
)
def test_a_step_that_a_library_has_no_room_for_is_cut(
    words: str, tmp_path: Path, late: list[LateDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.make("llama", tmp_path)
    reqs = requests(tiny.VOCAB_SIZE, seed=8)
    whole, _ = run(path, reqs, **SETTINGS)
    plan = GraphReference.plan

    def short(self: GraphReference, spec: AttentionSpec, batch: PagedBatch, *args: Any, **kwargs: Any) -> Any:
        if int(batch.qo_indptr[-1]) > 20:
            raise (torch.OutOfMemoryError if "CUDA" in words else RuntimeError)(words)
        return plan(self, spec, batch, *args, **kwargs)

    cut, _ = run(path, reqs, started=lambda: monkeypatch.setattr(GraphReference, "plan", short), **SETTINGS)
    assert cut == whole
