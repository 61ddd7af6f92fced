"""Sleep: nothing is computed, memory is freed, requests wait, and after the wake-up all tokens are the same as without
sleep."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import tiny
from harness import make_core, message, run_core
from late_device import LateDevice
from mainspring import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from mainspring.core.plan.control import SetParameters, Sleep, Wake
from mainspring.core.worker import worker
from mainspring.ipc.codec import encode_value
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError
from mainspring.ipc.messages import DesiredState, Outputs
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from tiers import fast_only

PROMPTS = {"a": "Once upon a time", "b": "The capital of France", "c": "One, two, three"}
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=400, ignore_eos=True)  # some 0.1 s: sleep comes before


def add(engine: LLMEngine, prefix: str = "") -> None:
    for name, prompt in PROMPTS.items():
        engine.add_request(prefix + name, prompt, PARAMS)


def start(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Add all requests, and step until each has a token."""
    add(engine)
    seen: dict[str, RequestOutput] = {}
    while len(seen) < len(PROMPTS):
        seen |= {output.request_id: output for output in engine.step()}
    return seen


def finish(engine: LLMEngine, seen: dict[str, RequestOutput] | None = None) -> dict[str, RequestOutput]:
    seen = {} if seen is None else seen
    while engine.has_unfinished_requests():
        seen |= {output.request_id: output for output in engine.step()}
    return seen


def tokens(outputs: dict[str, RequestOutput]) -> dict[str, list[int]]:
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    with LLMEngine.from_engine_args(EngineArgs(), enable_multiprocessing=False) as engine:
        add(engine)
        return tokens(finish(engine))


@pytest.fixture(scope="module", params=fast_only([False], [False, True]), ids=["in-process", "multi-process"])
def engine(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    with LLMEngine.from_engine_args(EngineArgs(), enable_multiprocessing=request.param) as engine:
        yield engine


def nothing_is_computed(engine: LLMEngine) -> bool:
    before = engine.engine_core.call("stats")[10]
    if engine.engine_core.in_process:
        for _ in range(3):
            engine.step()
    else:
        late = engine.engine_core.get_outputs(timeout=0.2)  # tokens of steps before the sleep
        assert not isinstance(late, Outputs) or not engine.engine_core.get_outputs(timeout=0.2)
    return bool(engine.engine_core.call("stats")[10] == before)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_kept_requests_go_on_after_sleep_as_if_it_had_not_been(
    engine: LLMEngine, undisturbed: dict[str, list[int]], level: int
) -> None:
    seen = start(engine)
    assert not engine.is_sleeping()
    engine.sleep(level, mode="keep")
    assert engine.is_sleeping()
    assert engine.engine_core.call("stats")[18] == level
    states = {m.labels["sleep_state"]: m.value for m in engine.get_metrics() if "sleep_state" in m.labels}
    assert [name for name, value in states.items() if value] == [["awake", "weights_offloaded", "discard_all"][level]]
    engine.wake_up()
    assert not engine.is_sleeping()
    assert tokens(finish(engine, seen)) == undisturbed


@pytest.mark.parametrize("level", [0, 1, 2])
def test_requests_added_during_sleep_wait_for_its_end(
    engine: LLMEngine, undisturbed: dict[str, list[int]], level: int
) -> None:
    engine.sleep(level)
    add(engine)
    assert nothing_is_computed(engine)
    engine.wake_up()
    assert tokens(finish(engine)) == undisturbed


def test_sleep_ends_what_is_in_flight_by_default(engine: LLMEngine) -> None:
    start(engine)
    engine.sleep()
    assert {output.outputs[0].finish_reason for output in finish(engine).values()} == {"abort"}
    engine.wake_up()


def test_sleep_waits_for_those_that_have_begun_if_told_to(engine: LLMEngine, undisturbed: dict[str, list[int]]) -> None:
    seen = start(engine)
    engine.sleep(1, mode="wait")
    assert engine.is_sleeping()
    assert tokens(finish(engine, seen)) == undisturbed, "all of it was computed before"
    engine.wake_up()


def test_it_goes_on_when_weights_and_cache_are_awake(engine: LLMEngine, undisturbed: dict[str, list[int]]) -> None:
    engine.sleep(2)
    add(engine)
    for tags in (["weights"], ["weights"]):
        engine.wake_up(tags)
        assert engine.is_sleeping()
        assert nothing_is_computed(engine)
    engine.wake_up(["kv_cache"])
    assert not engine.is_sleeping()
    assert tokens(finish(engine)) == undisturbed
    engine.sleep(1)
    engine.wake_up(["kv_cache"])
    assert engine.is_sleeping()
    engine.wake_up(["scheduling", "weights"])
    assert not engine.is_sleeping()
    engine.sleep(0)
    engine.wake_up(["weights"])  # which never slept
    engine.wake_up(["scheduling"])
    assert not engine.is_sleeping()


def test_twice_asleep_is_as_deep_as_the_deeper_and_twice_awake_is_awake(
    engine: LLMEngine, undisturbed: dict[str, list[int]]
) -> None:
    engine.sleep(1)
    engine.sleep(2)
    engine.sleep(1)
    assert engine.engine_core.call("stats")[18] == 2
    engine.wake_up()
    engine.wake_up()
    add(engine)
    assert tokens(finish(engine)) == undisturbed


def test_a_pause_outlasts_a_sleep(engine: LLMEngine, undisturbed: dict[str, list[int]]) -> None:
    engine.pause_generation("keep")
    engine.sleep(1, mode="keep")
    add(engine)
    engine.wake_up()
    assert engine.is_paused()
    assert nothing_is_computed(engine)
    engine.resume_generation()
    assert not engine.is_paused()
    assert tokens(finish(engine)) == undisturbed


def test_cached_prefixes_do_not_outlast_a_sleep(engine: LLMEngine) -> None:
    long = " ".join(["Once upon a time there was a"] * 8)
    for expected in (False, True):
        engine.add_request("p", long, SamplingParams(max_tokens=2))
        assert bool(finish(engine)["p"].num_cached_tokens) == expected
    engine.sleep(1)
    engine.wake_up()
    engine.add_request("p", long, SamplingParams(max_tokens=2))
    assert not finish(engine)["p"].num_cached_tokens


@pytest.mark.parametrize("level", [-1, 3, "1", None, 1.0, True])
def test_there_are_three_levels(engine: LLMEngine, level: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"level is .*; it must be 0, 1 or 2"):
        engine.sleep(level)
    assert not engine.is_sleeping()


def test_modes_and_tags_are_checked(engine: LLMEngine) -> None:
    for call in (engine.sleep, lambda level, mode: engine.pause_generation(mode)):
        with pytest.raises(InvalidArgumentError, match="mode is 'nap'; it must be one of abort, keep, wait"):
            call(1, "nap")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="tags has 'cache'; tags are scheduling, weights, kv_cache"):
        engine.wake_up(["cache"])
    assert not engine.is_sleeping()
    assert not engine.is_paused()


def core_of(engine: LLMEngine) -> psutil.Process:
    return psutil.Process(engine.engine_core._connection._core.supervisor.core_pid)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "model"
    return tiny.make(
        "llama", folder, hidden_size=512, intermediate_size=1024, vocab_size=32_768, max_position_embeddings=2048
    )


@pytest.mark.parametrize("level", [1, 2])
def test_copies_of_weights_for_sums_of_parts_do_not_outlast_a_sleep(tmp_path: Path, level: int) -> None:
    args = EngineArgs(str(tiny.make("llama", tmp_path / "model")), skip_tokenizer_init=True, sum_parts=2)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
        found = []
        for _ in range(2):
            engine.add_request("r", {"prompt_token_ids": [7] * 9}, SamplingParams(temperature=0.0, max_tokens=9))
            found.append(tokens(finish(engine)))
            backend = engine.engine_core.core.worker._backend  # type: ignore[attr-defined]
            assert backend.pieces
            engine.sleep(level)
            assert not backend.pieces
            engine.wake_up()
        assert found[0] == found[1]


def test_weights_that_share_memory_share_it_after_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "device_for", LateDevice)  # weights go to host memory, as from a GPU
    path = str(tiny.make("llama", tmp_path / "model", tie_word_embeddings=True))
    args = EngineArgs(path, skip_tokenizer_init=True, attention_backend="reference")
    with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
        model = engine.engine_core.core.worker.model.model  # type: ignore[attr-defined]
        whole = model.get_input_embeddings().weight
        part = torch.nn.Parameter(whole.detach()[8:, ::2], requires_grad=False)  # as several GPUs cut a tied layer
        model.register_parameter("part", part)
        before = whole.clone()
        engine.sleep(1)
        assert engine.engine_core.core.worker._on_host  # type: ignore[attr-defined]
        engine.wake_up()
        assert torch.equal(whole, before)
        with torch.no_grad():
            whole.add_(1)
        assert torch.equal(part, before[8:, ::2] + 1)


def test_tensors_move_all_or_none() -> None:
    tensors, allocated = [torch.ones(3), torch.ones(4)], list[torch.Tensor]()

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if allocated:
            raise MemoryError
        allocated.append(torch.zeros(shape, dtype=dtype))
        return allocated[-1]

    before = [tensor.data_ptr() for tensor in tensors]
    with pytest.raises(MemoryError):
        worker.move(tensors, allocate)
    assert [tensor.data_ptr() for tensor in tensors] == before
    assert len(worker.move(tensors, lambda shape, dtype: torch.zeros(shape, dtype=dtype))) == 2
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 3, [1.0] * 4]


def test_copies_of_weights_for_sums_of_parts_change_with_the_weights(tmp_path: Path) -> None:
    path, name = str(tiny.make("llama", tmp_path / "model")), "model.layers.0.self_attn.o_proj.weight"
    found: dict[int, list[Any]] = {0: [], 2: []}
    for parts in found:
        args = EngineArgs(path, skip_tokenizer_init=True, sum_parts=parts)
        with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
            worker = engine.engine_core.core.worker  # type: ignore[attr-defined]
            other = worker.model.parameters.get(name) * 9
            for change in (
                lambda engine=engine: engine.apply_model(lambda model: model.get_parameter(name).data.mul_(-9)),
                lambda engine=engine, other=other: engine.update_weights([(name, other)]),
            ):
                change()
                engine.add_request("r", {"prompt_token_ids": [7] * 9}, SamplingParams(temperature=0.0, max_tokens=9))
                found[parts].append(tokens(finish(engine)))
    assert found[0] == found[2]
    assert found[0][0] != found[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_memory_is_given_back(large: Path, backend: Any) -> None:
    weights = (large / "model.safetensors").stat().st_size
    args = EngineArgs(str(large), skip_tokenizer_init=True, attention_backend=backend, max_model_len=2048)
    with LLMEngine.from_engine_args(args) as engine:
        engine.add_request("r", {"prompt_token_ids": [7] * 2000}, SamplingParams(temperature=0.0, max_tokens=2))
        expected = tokens(finish(engine))
        process = core_of(engine)
        engine.sleep(0)
        before = process.memory_info().rss
        engine.sleep(1)
        level_1 = process.memory_info().rss
        engine.sleep(2)
        level_2 = process.memory_info().rss
        assert level_1 < before, "the cache is given back"
        assert level_2 < before - 0.8 * weights, "the weights too"
        engine.wake_up()
        engine.add_request("r", {"prompt_token_ids": [7] * 2000}, SamplingParams(temperature=0.0, max_tokens=2))
        assert tokens(finish(engine)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_a_core_that_dies_in_its_sleep_is_followed_by_one_that_sleeps(
    undisturbed: dict[str, list[int]], level: int
) -> None:
    with LLMEngine.from_engine_args(EngineArgs()) as engine:
        seen = start(engine)
        engine.sleep(level, mode="keep")
        engine.wake_up(["weights"])
        os.kill(core_of(engine).pid, signal.SIGKILL)
        assert engine.is_sleeping()  # answered by the next core
        assert engine.engine_core._connection.reconnections == 1  # type: ignore[attr-defined]
        assert engine.engine_core.call("stats")[18] == level
        engine.wake_up(["kv_cache"])
        assert not engine.is_sleeping()
        assert tokens(finish(engine, seen)) == undisturbed


@pytest.mark.slow
def test_the_async_engine_sleeps_too(undisturbed: dict[str, list[int]]) -> None:
    async def run() -> None:
        async with AsyncLLMEngine.from_engine_args(AsyncEngineArgs()) as engine:
            last: dict[str, RequestOutput] = {}
            all_begun = asyncio.Event()

            async def stream(name: str) -> None:
                async for output in engine.generate(PROMPTS[name], PARAMS, name):
                    last[name] = output
                    if len(last) == len(PROMPTS):
                        all_begun.set()

            tasks = [asyncio.create_task(stream(name)) for name in PROMPTS]
            await all_begun.wait()
            await engine.sleep(1, mode="keep")
            assert await engine.is_sleeping()
            assert not any(task.done() for task in tasks)
            await engine.wake_up()
            assert not await engine.is_sleeping()
            await asyncio.gather(*tasks)
            assert tokens(last) == undisturbed
            await engine.reset_mm_cache()
            await engine.reset_encoder_cache()

    asyncio.run(run())


# ---------------------------------------------------------------------- in the core


def call(core: Any, method: str, *args: Any, frontend: int = 0) -> Any:
    return core.call(method, encode_value(list(args)), frontend)


def test_a_call_that_waits_for_a_cancelled_sleep_gets_an_error() -> None:
    core = make_core()
    core.connect(0)
    core.add_request(0, message(0, max_tokens=4))
    core.step()
    waiting = call(core, "sleep", 1, "wait")
    assert isinstance(waiting, Future)
    assert not waiting.done()
    call(core, "wake_up")
    with pytest.raises(InvalidRequestError, match="woken before it slept"):
        waiting.result()
    assert len(run_core(core)) == 1
    assert core.worker.controls == []


def test_a_caller_that_leaves_gets_no_answer_and_the_core_sleeps_all_the_same() -> None:
    core = make_core()
    core.connect(0)
    core.connect(1)
    core.add_request(1, message(0, max_tokens=4))
    core.step()
    waiting = call(core, "sleep", 1, "wait", frontend=0)
    core.disconnect(0)
    assert waiting.cancelled()
    assert len(run_core(core)) == 1
    assert core.worker.controls == [Sleep(1)]
    assert core.phase == "asleep"


def test_a_sleep_does_not_wait_for_requests_of_a_removed_frontend() -> None:
    core = make_core()
    core.connect(0)
    core.connect(1)
    core.add_request(1, message(0, max_tokens=50))
    core.step()
    waiting = call(core, "sleep", 1, "wait", frontend=0)
    core.disconnect(1)
    assert waiting.done()


def test_a_pause_waits_for_begun_requests_behind_an_update_of_weights() -> None:
    core = make_core()
    core.connect(0)
    core.add_request(0, message(0, max_tokens=20))
    core.step()
    paused = call(core, "pause_generation", "wait")
    core.lifecycle.update_weights(0, "new", 0, [], last=False)
    assert run_core(core) == {}
    assert not paused.done()
    core.lifecycle.update_weights(0, "new", 1, [], last=True)
    assert len(run_core(core)) == 1
    assert paused.done()


def test_an_update_of_weights_that_breaks_off_for_any_reason_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def control(record: Any) -> None:
        if isinstance(record, SetParameters) and record.rows:
            raise RuntimeError("no memory")

    core = make_core()
    monkeypatch.setattr(core.worker, "control", control)
    core.connect(0)
    with pytest.raises(RuntimeError, match="no memory"):
        core.call("update_weights", encode_value(["new", 0, ["weight"], [0], False]), 0, [np.zeros(2, np.float32)])
    core.add_request(0, message(0))
    [(_, finished)] = run_core(core).values()
    assert finished.error == "WeightsLostError"


def test_frontends_are_told_whether_the_core_has_the_weights_of_users() -> None:
    core, other, told = make_core(), make_core(), list[bool]()
    core.on_model = lambda model: told.append(model.weights_lost)
    core.connect(0)
    core.lifecycle.update_weights(0, "new", 0, [], last=False)
    with pytest.raises(InvalidRequestError, match="out of order"):
        core.lifecycle.update_weights(0, "new", 2, [], last=True)
    core.lifecycle.update_weights(0, "new", 0, [], last=True)
    call(core, "sleep", 2)
    call(core, "wake_up")
    assert told == [True, False, True]
    other.restore(core.lifecycle.state)
    assert other.model.weights_lost


def test_state_set_by_users_is_reported_and_restored() -> None:
    told: list[DesiredState] = []
    core = make_core()
    core.on_state = told.append
    core.connect(0)
    call(core, "pause_generation", "keep")
    call(core, "sleep", 2)
    call(core, "wake_up", ["weights"])
    assert told[-1] == DesiredState(True, ["kv_cache", "scheduling"], 2) or told[-1].asleep == [
        "scheduling",
        "kv_cache",
    ]
    other = make_core()
    other.restore(told[-1])
    other.connect(0)
    other.add_request(0, message(0))
    assert other.worker.controls == [Sleep(2), Wake(True, False)]
    assert not run_core(other)
    call(other, "wake_up")
    assert not run_core(other), "still paused"
    call(other, "resume_generation")
    assert len(run_core(other)) == 1


def test_the_number_of_cores_is_told_once_for_each_call() -> None:
    """The supervisor obeys each report that has a number: an earlier number would undo a later one."""
    told: list[int | None] = []

    def making() -> Any:
        core = make_core()
        core.on_state = lambda state: told.append(state.num_cores)
        core.connect(0)
        return core

    core = making()
    call(core, "scale", 3)
    call(core, "scale", 3)
    call(core, "pause_generation", "keep")
    other = making()
    other.restore(DesiredState(num_cores=3))
    call(other, "pause_generation", "keep")
    assert told == [3, 3, None, None]


@pytest.mark.slow
def test_kernels_hear_of_it_that_their_graphs_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(ReferenceBackend, "forget_graphs", lambda self: told.append(self))
    args = EngineArgs(attention_backend="reference", skip_tokenizer_init=True, max_model_len=256)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
        assert told == []
        engine.sleep(1)
        assert told != []
