"""Combinations of features: sleep with adapters, drafts and host memory, lost weights, errors sent to clients."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import pooled
import tiny
from harness import make_core, message, run_core
from mainspring import LLMEngine, LoRARequest, PromptAdapterRequest, RequestOutput, SamplingParams, WeightsLostError
from mainspring.core.loop import EngineCore
from mainspring.core.plan.step import StepPlan
from mainspring.core.worker import block_count as memory
from mainspring.core.worker.draft import Drafter
from mainspring.core.worker.pooling_worker import PoolingWorker
from mainspring.engine.request.weight_messages import weight_messages
from mainspring.ipc import codec
from mainspring.ipc.codec import encode_value
from mainspring.ipc.connection import Connection
from mainspring.ipc.errors import InvalidRequestError, RequestFailedError
from mainspring.ipc.messages import Adapter, AddRequest, Ready, Sampling, UtilityCall
from mainspring.ipc.sync_client import SyncClient
from peft_folders import make_lora, make_prompt_adapter
from plain import collect, make_engine
from stand_in_core import StandInOwner, stand_in
from test_offloading import SETTINGS as OFFLOADING
from test_offloading import SIZE, one_by_one, requests, stats
from wire import PROMPTLY, Raw, eventually, sees_the_loss

PROMPT = list(range(5, 45))
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}
INSTANCE = bytes(8)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [tiny.make("llama", folder / str(seed), seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def lora(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    return make_lora(models[0], folder, 1, r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])


def core_of(engine: LLMEngine) -> EngineCore:
    return engine.engine_core.core  # type: ignore[attr-defined, no-any-return]


def add(engine: LLMEngine, name: str = "r", params: SamplingParams = PARAMS, **more: Any) -> None:
    engine.add_request(name, {"prompt_token_ids": PROMPT}, params, **more)


def begin(engine: LLMEngine) -> None:
    """Step until every request has some tokens."""
    for _ in range(4):
        assert engine.step()


def last(engine: LLMEngine) -> RequestOutput:
    return collect(engine)["r"][-1]


def tokens(engine: LLMEngine, **more: Any) -> list[int]:
    add(engine, **more)
    output = last(engine).outputs[0]
    assert output.error is None
    return output.token_ids


def ended(core: EngineCore, *added: AddRequest) -> dict[int, tuple[str | None, str]]:
    """The errors of requests sent directly to the core, by handle; checks that all outputs can be encoded."""
    for one in added:
        core.add_request(0, one)
    found = {}
    deadline = time.monotonic() + 60
    while len(found) < len(added):
        assert time.monotonic() < deadline
        for outputs in core.step().values():
            codec.encode(outputs, INSTANCE, 1)
            for finished in outputs.finished:
                assert finished.handle not in found
                found[finished.handle] = finished.error, finished.error_text
    return found


# ------------------------------------------------------------------ adapters


def test_an_error_text_that_utf8_does_not_hold_is_its_requests_trouble_alone(
    models: list[Path], lora: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(lora, tmp_path / "odd"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "\ud800x": 1}))
    with make_engine(models[0], enable_lora=True, **SETTINGS) as engine:
        found = ended(
            core_of(engine),
            AddRequest(900, "", PROMPT, Sampling(3), lora=Adapter(1, "odd", str(folder))),
            AddRequest(901, "", PROMPT, Sampling(3)),
        )
    assert found[900][0] == "InvalidRequestError"
    assert r"\ud800x is 1" in found[900][1]
    assert not found[901][0]


def test_what_is_no_lora_adapter_is_refused_whatever_its_number_stands_for(models: list[Path], lora: Path) -> None:
    where = str(lora)
    wrong = [Adapter(1, "a", where, 5), Adapter(2, "a", where, 5), Adapter(1, "a" * 10**6, where)]
    with make_engine(models[0], enable_lora=True, **SETTINGS) as engine:
        core = core_of(engine)
        known = AddRequest(900, "", PROMPT, Sampling(3), lora=Adapter(1, "a", where))
        assert not ended(core, known)[900][0]
        asked = [AddRequest(901 + i, "", PROMPT, Sampling(3), lora=one) for i, one in enumerate(wrong)]
        found = ended(core, *asked)
        for i, words in enumerate(("5 virtual tokens", "5 virtual tokens", "lora_name is")):
            assert found[901 + i][0] is not None
            assert words in found[901 + i][1]
        for one in wrong:
            with pytest.raises(Exception, match=r"virtual tokens|was called with \d+ bytes"):
                engine.engine_core.call("add_lora", one)
        assert engine.engine_core.call("add_lora", Adapter(1, "a", where)) is True


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_serve_after_sleep_and_take_no_place_meanwhile(models: list[Path], lora: Path, level: int) -> None:
    request = LoRARequest("a", 1, str(lora))
    with make_engine(models[0], enable_lora=True, max_loras=2, **SETTINGS) as engine:
        expected = {"lora": tokens(engine, lora_request=request), "plain": tokens(engine)}
        assert expected["lora"] != expected["plain"]
        for mode in ("keep", "abort"):
            add(engine, "lora", lora_request=request)
            add(engine, "plain")
            begin(engine)
            engine.sleep(level, mode)
            held = core_of(engine).worker._loras._loras  # type: ignore[attr-defined]
            assert held
            assert all(one is None for one in held)
            engine.wake_up()
            found = {name: outputs[-1].outputs[0] for name, outputs in collect(engine).items()}
            if mode == "keep":
                assert {name: one.token_ids for name, one in found.items()} == expected
            assert {"plain": tokens(engine), "lora": tokens(engine, lora_request=request)} == expected


def test_virtual_tokens_that_are_cached_leave_nothing_in_the_runner(models: list[Path], tmp_path: Path) -> None:
    request = PromptAdapterRequest("v", 1, str(make_prompt_adapter(models[0], tmp_path, 1, 20)), 20)
    with make_engine(models[0], enable_prompt_adapter=True, block_size=8, **SETTINGS) as engine:
        expected = tokens(engine, prompt_adapter_request=request)
        runner = core_of(engine).worker.runner  # type: ignore[attr-defined]
        add(engine, prompt_adapter_request=request)
        outputs = engine.step()
        assert outputs[0].num_cached_tokens
        assert runner._embeds == {}
        assert last(engine).outputs[0].token_ids == expected


# ------------------------------------------------------------------ drafts and host memory


def test_a_draft_that_finds_no_memory_leaves_loads_done(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**OFFLOADING, "speculative_config": {"model": str(models[1])}}
    with make_engine(models[0], **settings) as engine:
        expected = one_by_one(engine, requests())
    left, guess = [True], Drafter.guess

    def fails_once(self: Drafter, plan: StepPlan) -> np.ndarray:
        if plan.copies.loads and left:
            left.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return guess(self, plan)

    monkeypatch.setattr(Drafter, "guess", fails_once)
    with make_engine(models[0], num_gpu_blocks_override=12, kv_offloading_size=SIZE, **settings) as engine:
        assert one_by_one(engine, requests()) == expected
        assert stats(engine).host_hits > 100
    assert not left


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("method", ["draft", "ngram"])
def test_guesses_after_sleep_change_no_token(models: list[Path], method: str, level: int) -> None:
    how = {"model": str(models[0])} if method == "draft" else {"method": "ngram", "prompt_lookup_min": 1}
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True, detokenize=False)
    with make_engine(models[0], **SETTINGS) as engine:
        expected = tokens(engine, params=params)
    with make_engine(models[0], speculative_config={**how, "num_speculative_tokens": 3}, **SETTINGS) as engine:
        add(engine, params=params)
        begin(engine)
        engine.sleep(level, "keep")
        engine.wake_up()
        assert last(engine).outputs[0].token_ids == expected
        before = stats(engine)
        assert tokens(engine, params=params) == expected
        after = stats(engine)
    if method == "draft":  # the model itself: always right
        guessed = after.draft_tokens - before.draft_tokens
        assert guessed == after.accepted_tokens - before.accepted_tokens > 0


@pytest.mark.parametrize("level", [1, 2])
def test_host_memory_after_sleep_is_empty_and_fills_again(models: list[Path], level: int) -> None:
    asked = requests(rounds=2)
    settings = {"num_gpu_blocks_override": 12, "kv_offloading_size": SIZE, **OFFLOADING}
    with make_engine(models[0], **OFFLOADING) as engine:
        expected = one_by_one(engine, asked)
    with make_engine(models[0], **settings) as engine:
        assert one_by_one(engine, asked) == expected
        engine.sleep(level)
        engine.wake_up()
        before = stats(engine)
        assert before.host_hits > 0
        assert one_by_one(engine, asked[:6]) == expected[:6]
        assert stats(engine).host_hits == before.host_hits
        assert one_by_one(engine, asked) == expected
        assert stats(engine).host_hits > before.host_hits


# ------------------------------------------------------------------ sleep and weights


def update(engine: LLMEngine, folder: Path, version: str = "v1") -> None:
    engine.update_weights(load_file(folder / "model.safetensors").items(), version)


@pytest.fixture
def engine(models: list[Path]) -> Iterator[LLMEngine]:
    with make_engine(models[0], **SETTINGS) as engine:
        yield engine


def test_running_requests_fail_when_sent_weights_are_lost(engine: LLMEngine, models: list[Path]) -> None:
    update(engine, models[1])
    add(engine)
    begin(engine)
    engine.sleep(2, "keep")
    engine.wake_up()
    [output] = collect(engine)["r"]
    assert isinstance(output.outputs[0].error, WeightsLostError)
    update(engine, models[1], "v2")
    with make_engine(models[1], **SETTINGS) as other:
        assert tokens(engine) == tokens(other)


def test_an_update_that_begins_again_over_half_of_one_and_fails_is_none(engine: LLMEngine, models: list[Path]) -> None:
    weights = load_file(models[1] / "model.safetensors")
    (args, arrays), *_ = weight_messages(list(weights.items())[:3], "v")
    expected = tokens(engine)

    def send(names: list[str]) -> None:
        engine.engine_core.call("update_weights", "v", 0, names, args[3], False, arrays=arrays)

    wrong = ["no such parameter", *args[2][1:]]
    with pytest.raises(InvalidRequestError, match="no such parameter"):
        send(wrong)
    assert tokens(engine) == expected, "nothing was replaced"
    send(args[2])
    add(engine)
    with pytest.raises(InvalidRequestError, match="no such parameter"):
        send(wrong)
    assert isinstance(last(engine).outputs[0].error, WeightsLostError)
    add(engine)
    assert isinstance(last(engine).outputs[0].error, WeightsLostError)


def test_an_update_that_begins_again_twice_is_still_dirty(engine: LLMEngine, models: list[Path]) -> None:
    (args, arrays), *_ = weight_messages(list(load_file(models[1] / "model.safetensors").items())[:3], "v")
    call = engine.engine_core.call
    call("update_weights", *args[:4], False, arrays=arrays)
    call("update_weights", "w", 0, [], [], False)
    with pytest.raises(InvalidRequestError, match="no such parameter"):
        call("update_weights", "x", 0, ["no such parameter"], [0], False, arrays=arrays[:1])
    add(engine)
    assert isinstance(last(engine).outputs[0].error, WeightsLostError)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_finds_no_memory_is_an_error_and_the_core_goes_on(
    engine: LLMEngine, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, worker = tokens(engine), core_of(engine).worker
    sleep = worker.sleep

    def fails(level: int) -> None:
        sleep(level)
        raise MemoryError("the host has none")

    monkeypatch.setattr(worker, "sleep", fails)
    add(engine)
    begin(engine)
    with pytest.raises(Exception, match="the host has none"):
        engine.sleep(level, "keep")
    assert not engine.is_sleeping()
    assert last(engine).outputs[0].token_ids == expected
    assert tokens(engine) == expected
    monkeypatch.undo()
    engine.sleep(level)
    assert engine.is_sleeping()
    engine.wake_up()
    assert tokens(engine) == expected


def test_sent_weights_that_a_failed_sleep_has_dropped_are_lost(
    engine: LLMEngine, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    update(engine, models[1])
    worker = core_of(engine).worker
    sleep = worker.sleep

    def fails(level: int) -> None:
        sleep(level)
        raise MemoryError("the host has none")

    monkeypatch.setattr(worker, "sleep", fails)
    with pytest.raises(Exception, match="the host has none"):
        engine.sleep(2)
    add(engine)
    assert isinstance(last(engine).outputs[0].error, WeightsLostError)


def test_weights_do_not_come_while_a_sleep_waits(engine: LLMEngine, models: list[Path]) -> None:
    expected, core = tokens(engine), core_of(engine)
    add(engine)
    begin(engine)
    falls = core.call("sleep", encode_value([1, "wait"]))
    assert isinstance(falls, Future)
    assert not falls.done()
    with pytest.raises(InvalidRequestError, match="about to sleep"):
        update(engine, models[1])
    assert last(engine).outputs[0].token_ids == expected
    core.step()  # the one that brings no output
    falls.result(0)
    assert core.lifecycle.state.asleep
    engine.wake_up()
    assert tokens(engine) == expected


@pytest.mark.parametrize("method", ["pause", "sleep"])
def test_a_request_begun_under_an_earlier_core_runs_during_a_pause_that_waits(method: str) -> None:
    core = make_core()
    core.connect(0)
    core.add_request(0, message(0, output_token_ids=[7, 8], max_tokens=6, resumed=True))
    core.add_request(0, message(1))
    waits = core.lifecycle.pause("wait") if method == "pause" else core.lifecycle.sleep(1, "wait")
    assert not waits.done(), "somebody has begun"
    core.add_request(0, message(2, output_token_ids=[9], max_tokens=6, resumed=True))
    core.add_request(0, message(3))
    assert {handle for _, handle in run_core(core)} == {0, 2}
    waits.result(0)
    core.lifecycle.wake_up()
    core.lifecycle.resume()
    assert {handle for _, handle in run_core(core)} == {1, 3}


@pytest.mark.parametrize("architecture", ["qwen3", "bert"])
def test_vectors_after_sleep_are_the_same_though_less_memory_is_free(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompts = pooled.make(architecture, tmp_path), pooled.prompts(3, 20, 50)
    with make_engine(path, max_model_len=None, skip_tokenizer_init=True) as engine:
        worker = core_of(engine).worker
        assert isinstance(worker, PoolingWorker)
        expected, blocks = pooled.vectors(engine, prompts), worker.facts.num_blocks
        free = memory.free_host_bytes()
        monkeypatch.setattr(memory, "free_host_bytes", lambda: free // 3)
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up(["weights"])
            assert worker._runner is None
            engine.wake_up(["kv_cache"])
            assert worker.facts.num_blocks == blocks
            for found, wanted in zip(pooled.vectors(engine, prompts), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_a_buffer_that_is_filled_anew_sends_each_value_as_it_was(kind: Any) -> None:
    buffer = np.zeros((3, 2), np.float32)

    def refilled() -> Iterator[tuple[str, Any]]:
        for value in range(20):
            buffer[:] = value
            yield f"p{value}", kind(buffer)
            yield f"scalar{value}", kind(buffer)[0, 0]

    sent = [
        (name, float(array.values.flat[0]))
        for args, arrays in weight_messages(refilled(), "v")
        for name, array in zip(args[2], arrays, strict=True)
    ]
    assert sent == [(f"{kind}{value}", value) for value in range(20) for kind in ("p", "scalar")]


# ------------------------------------------------------------------ connections


@pytest.fixture
def owner() -> Iterator[StandInOwner]:
    with stand_in() as owner:
        yield owner


@pytest.fixture
def client(owner: StandInOwner) -> Iterator[SyncClient]:
    client = SyncClient(Connection(owner))
    yield client
    client.close()


def next_core(client: SyncClient, owner: StandInOwner) -> None:
    """Start the next core, and wait until its client knows it."""
    before = client._connection.reconnections
    owner.kill()
    owner.restart()
    assert eventually(lambda: client.abort([]) or client._connection.reconnections == before + 1)


def calls(owner: StandInOwner, method: str) -> int:
    return sum(isinstance(one.message, UtilityCall) and one.message.method == method for one in owner.events)


def test_after_one_death_a_call_is_made_again_but_not_one_that_may_do_anything(
    client: SyncClient, owner: StandInOwner
) -> None:
    with ThreadPoolExecutor() as pool:
        owner.busy = True
        echo = pool.submit(client.call, "echo", 1, timeout=PROMPTLY)
        once = pool.submit(client.call, "collective_rpc", 1, timeout=PROMPTLY)
        assert eventually(lambda: len(client._connection._calls) == 2)
        next_core(client, owner)
        owner.busy = False
        assert echo.result(PROMPTLY) == [1]
        with pytest.raises(RequestFailedError, match="the connection was lost before 'collective_rpc' was answered"):
            once.result(PROMPTLY)
        assert calls(owner, "collective_rpc") == 0
        owner.kill()
        assert sees_the_loss(client)
        late = pool.submit(client.call, "collective_rpc", 2, timeout=PROMPTLY)
        assert eventually(lambda: client._connection._calls)
        owner.restart()
        assert late.result(PROMPTLY) == [2]


def test_the_same_engine_may_come_back_with_other_weights(client: SyncClient, owner: StandInOwner) -> None:
    owner.kill()
    owner.restart(fingerprint="another")
    assert client.call("echo", 1, timeout=PROMPTLY) == [1]
    assert client._connection.model.fingerprint == "another"


def test_a_connection_keeps_its_rights_when_it_gets_ready_for_new_weights(owner: StandInOwner) -> None:
    raw = Raw(owner)
    first = raw.greet()
    assert first.capabilities
    owner.server.announce(Ready(owner.instance_id, owner.epoch, owner.core.model, b"{}"))
    second = raw.receive()
    assert isinstance(second, Ready)
    assert second.capabilities == first.capabilities
    raw.close()
