"""Offloading in whole engines: the tokens equal those of an engine without it, for all clients and after deaths of the
core."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from daemons import Daemon
from kills import kill_core
from late_device import LateDevice
from mainspring import LLM, Device, EngineArgs, LLMEngine, SamplingParams
from mainspring.core.plan.step import StepPlan
from mainspring.core.worker.runner import ModelRunner
from mainspring.core.worker.sampler import Launched
from mainspring.ipc.errors import InvalidArgumentError, NotPermittedError, NotSupportedError
from mainspring.ipc.messages import Stats
from plain import make_engine
from plain import run as run_jobs
from test_late_device import late, run  # noqa: F401  # a fixture
from tiers import fast_only

SIZE = 0.01  # GiB, hundreds of blocks of a tiny model
SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "block_size": 16,
    "skip_tokenizer_init": True,
}
BLOCKS = {"gemma2": 26, "gemma3": 50, "mistral": 12}  # of the pool: enough for one request, too few for two prefixes
Requests = list[tuple[list[int], int]]


def requests(seed: int = 0, rounds: int = 3) -> Requests:
    """Requests with six texts as prefixes, in rounds."""
    r = random.Random(seed)
    texts = [[r.randrange(3, tiny.VOCAB_SIZE) for _ in range(r.randint(50, 90))] for _ in range(6)]
    return [
        (text + [r.randrange(3, tiny.VOCAB_SIZE) for _ in range(r.randint(1, 9))], r.randint(2, 12))
        for _ in range(rounds)
        for text in texts
    ]


def one_by_one(engine: LLMEngine, reqs: Requests) -> list[list[int]]:
    params = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    jobs = [({"prompt_token_ids": p}, SamplingParams(max_tokens=n, **params)) for p, n in reqs]  # type: ignore[arg-type]
    return [list(run_jobs(engine, {"x": job})["x"].outputs[0].token_ids) for job in jobs]


def stats(engine: LLMEngine) -> Stats:
    return engine.engine_core.core.scheduler.stats()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    "architecture", fast_only(["llama", "gemma2"], ["llama", "mistral", "gemma2", "gemma3", "gpt2"])
)
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_of_an_engine_without_a_cache(architecture: str, overlap: bool, tmp_path: Path) -> None:
    path, reqs = tiny.make(architecture, tmp_path), requests()
    wanted, _ = run(path, reqs, enable_prefix_caching=False, **SETTINGS)
    blocks = BLOCKS.get(architecture, 12)
    more = {"num_gpu_blocks_override": blocks, "kv_offloading_size": SIZE, "async_scheduling": overlap}
    got, engine = run(path, reqs, **SETTINGS, **more)
    assert got == wanted
    assert stats(engine).host_hits > 100
    assert stats(engine).host_hits <= stats(engine).prefix_hits


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_in_half_precision_and_with_an_fp8_cache_loaded_blocks_equal_saved_ones(dtype: str, path: Path) -> None:
    """An fp8 cache rounds, but recomputed keys and values would be equal, and so are the tokens."""
    more = {"dtype": "bfloat16", "kv_cache_dtype": dtype, "attention_backend": "reference"}
    with make_engine(path, enable_prefix_caching=False, **SETTINGS, **more) as engine:
        wanted = one_by_one(engine, requests())
    with make_engine(path, num_gpu_blocks_override=12, swap_space=SIZE, **SETTINGS, **more) as engine:
        assert one_by_one(engine, requests()) == wanted
        assert stats(engine).host_hits > 300


STATES = fast_only(["qwen3_next"], ["qwen3_next", "nemotron_h", "lfm2", "mamba2"])


def scarce(architecture: str) -> dict[str, Any]:
    """Settings with few blocks and snapshots, and with both in host memory. Mamba 2 has no blocks."""
    return {"num_gpu_blocks_override": None if architecture == "mamba2" else 12, "kv_offloading_size": SIZE, **SETTINGS}


@pytest.mark.parametrize("architecture", STATES)
@pytest.mark.parametrize("overlap", [False, True])
def test_recurrent_states_come_back_from_host_memory(architecture: str, overlap: bool, tmp_path: Path) -> None:
    path, reqs = tiny.make(architecture, tmp_path), requests()
    wanted, _ = run(path, reqs, enable_prefix_caching=False, **SETTINGS)
    with make_engine(path, async_scheduling=overlap, **scarce(architecture)) as engine:
        assert one_by_one(engine, reqs) == wanted
        before = stats(engine)
        assert before.host_hits > 400
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up()
            assert one_by_one(engine, reqs[:6]) == wanted[:6]
            assert stats(engine).host_hits == before.host_hits, "the host cache is empty after sleep"
            assert one_by_one(engine, reqs[:6]) == wanted[:6]
            assert stats(engine).host_hits > before.host_hits
            before = stats(engine)
        cache = engine.vllm_config.cache_config
        assert bool(cache.num_cpu_blocks) == (architecture != "mamba2")


def test_a_step_without_memory_leaves_loads_of_states_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reqs = tiny.make("qwen3_next", tmp_path), requests()
    wanted, _ = run(path, reqs, enable_prefix_caching=False, **SETTINGS)
    left, forward = [3], ModelRunner.execute

    def fails(self: ModelRunner, plan: StepPlan) -> Launched:
        if plan.states.host.loads and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", fails)
    with make_engine(path, **scarce("qwen3_next")) as engine:
        assert one_by_one(engine, reqs) == wanted
        assert stats(engine).num_preemptions == 3
    assert left == [0]


@pytest.mark.parametrize("architecture", STATES)
def test_on_a_gpu_states_come_back_with_two_steps_in_flight(
    architecture: str,
    tmp_path: Path,
    late: list[LateDevice],  # noqa: F811
) -> None:
    path, reqs, more = tiny.make(architecture, tmp_path), requests(seed=1), {"max_num_seqs": 16}
    wanted, _ = run(path, reqs, enable_prefix_caching=False, **{**SETTINGS, **more})
    got, engine = run(path, reqs, **{**scarce(architecture), **more})
    assert got == wanted
    assert engine.engine_core.core._depth == 2  # type: ignore[attr-defined]
    assert late[-1].num_replays > 5
    assert stats(engine).host_hits > 100


def test_on_a_gpu_two_steps_in_flight_and_graphs_give_the_same(path: Path, late: list[LateDevice]) -> None:  # noqa: F811
    reqs = requests(seed=1)
    settings = {**SETTINGS, "max_num_seqs": 16}
    wanted, _ = run(path, reqs, enable_prefix_caching=False, **settings)
    got, engine = run(path, reqs, num_gpu_blocks_override=12, kv_offloading_size=SIZE, **settings)
    assert got == wanted
    assert engine.engine_core.core._depth == 2  # type: ignore[attr-defined]
    assert late[-1].num_replays > 5
    assert stats(engine).host_hits > 100


def test_metrics_show_the_effect_of_resetting_each_tier(path: Path) -> None:
    reqs = requests(rounds=1)
    with make_engine(path, num_gpu_blocks_override=12, kv_offloading_size=SIZE, **SETTINGS) as engine:
        cache = engine.vllm_config.cache_config
        assert cache.num_cpu_blocks == int(SIZE * 2**30) // engine.engine_core.core.worker.layout.block_bytes  # type: ignore[attr-defined]

        def found(device: Device | None) -> tuple[int, int]:
            before = stats(engine)
            if device is not None:
                assert engine.reset_prefix_cache(device)
            one_by_one(engine, reqs[:1])
            after = stats(engine)
            return after.prefix_hits - before.prefix_hits, after.host_hits - before.host_hits

        one_by_one(engine, reqs)
        whole = len(reqs[0][0]) // 16 * 16
        assert found(None) == (whole, whole)
        assert found(None) == (whole, 0)
        assert found(Device.CPU) == (whole, 0)
        assert found(Device.GPU) == (0, 0), "what was in both is saved when it is evicted, not when it is loaded"
        one_by_one(engine, reqs)
        assert found(Device.GPU)[1] > 0
        engine.reset_prefix_cache()
        assert found(None) == (0, 0)
        counters = {metric.name: metric for metric in engine.get_metrics()}
        assert counters["mainspring:prefix_cache_host_hits"].value == stats(engine).host_hits > 0  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_with_a_core_of_its_own_that_dies_streams_go_on_and_the_host_is_filled_again(
    architecture: str, tmp_path: Path
) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = requests(seed=2, rounds=9)  # many, so that most are still to come when the core dies
    wanted, _ = run(path, reqs, enable_prefix_caching=False, **SETTINGS)
    more = {"num_gpu_blocks_override": 12, "kv_offloading_size": SIZE}
    args = EngineArgs(model=str(path), **SETTINGS, **more)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=True) as engine:
        assert (engine.vllm_config.cache_config.num_cpu_blocks or 0) > 100
        supervisor = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        for i, (prompt, n) in enumerate(reqs):
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        tokens: dict[int, list[int]] = {}
        ended = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
                ended += output.finished
            if ended >= 8 and supervisor.launch.restarts == 0:
                kill_core(supervisor)
        assert supervisor.launch.restarts == 1
        assert [tokens[i] for i in range(len(reqs))] == wanted
        assert engine.engine_core.call("stats")[19] > 0  # host_hits
        assert engine.reset_prefix_cache(Device.CPU) is True


@pytest.fixture(scope="module")
def daemon(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    options = {**SETTINGS, "num_gpu_blocks_override": 12, "kv_offloading_size": SIZE}
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]
    daemon = Daemon(tmp_path_factory.mktemp("daemon"), f"--model={path}", *flags)
    try:
        daemon.ready_line()
        yield daemon
    finally:
        daemon.end()


def test_frontends_of_a_daemon_share_blocks_in_host_memory(daemon: Daemon, path: Path) -> None:
    reqs = requests(seed=3, rounds=1)
    wanted, _ = run(path, reqs, enable_prefix_caching=False, **SETTINGS)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in reqs]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in reqs]
    for again in (False, True):
        with LLM(connect=daemon.address, skip_tokenizer_init=True) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
            assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
            hits = next(m.value for m in llm.get_metrics() if m.name.endswith("host_hits"))  # type: ignore[attr-defined]
            assert (hits > 200) == again
            with pytest.raises(NotPermittedError):  # which would affect all other frontends
                llm.reset_prefix_cache(Device.CPU)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"cpu_offload_gb": 0.5}, NotSupportedError, r"cpu_offload_gb is 0\.5; it is for GPUs"),
        ({"kv_offloading_size": 1.0, "swap_space": 2.0}, InvalidArgumentError, "swap_space"),
        ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, InvalidArgumentError, "enable_prefix_caching"),
        ({"kv_offloading_size": -1.0}, InvalidArgumentError, r"kv_offloading_size is -1\.0"),
        ({"kv_offloading_size": 1e6}, MemoryError, r"1000000\.00 GiB; .* GiB of host memory are free"),
    ],
)
def test_what_cannot_be_is_refused_at_start(fields: dict[str, Any], error: type, words: str, path: Path) -> None:
    with pytest.raises(error, match=words):
        make_engine(path, skip_tokenizer_init=True, **fields)
