"""New weights for a running core: it then serves the new model, and never a mixture or the old one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

import daemons
import plain
import tiny
from mainspring import EngineArgs, LLMEngine, RequestOutput, SamplingParams, WeightsLostError
from mainspring.engine.request import weight_messages as weights_module
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, NotPermittedError

PROMPT = {"prompt_token_ids": list(range(5, 45))}
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [tiny.make("llama", folder / str(seed), seed=seed) for seed in (1, 2)]


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def complete(engine: LLMEngine, name: str = "r") -> RequestOutput:
    engine.add_request(name, PROMPT, PARAMS)
    return plain.collect(engine)[name][-1]


def tokens(engine: LLMEngine) -> list[int]:
    return complete(engine).outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(checkpoints: list[Path]) -> list[list[int]]:
    found = []
    for path in checkpoints:
        with plain.make_engine(path, **SETTINGS) as engine:
            found.append(tokens(engine))
    assert found[0] != found[1]
    return found


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    "multiprocess", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in-process", "multi-process"]
)
def test_after_an_update_the_engine_serves_the_new_model(
    checkpoints: list[Path],
    expected: list[list[int]],
    backend: Any,
    multiprocess: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_module, "MAX_BYTES", 5000)  # some parameters go in several messages
    args = EngineArgs(str(checkpoints[0]), attention_backend=backend, **SETTINGS)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=multiprocess) as engine:
        assert tokens(engine) == expected[0]
        assert complete(engine).num_cached_tokens
        engine.update_weights(weights_of(checkpoints[1]).items(), "step 1")
        output = complete(engine)
        assert not output.num_cached_tokens, "cached prefixes were of the other weights"
        assert output.outputs[0].token_ids == expected[1]
        engine.update_weights(load_tensors(checkpoints[0] / "model.safetensors").items())
        assert tokens(engine) == expected[0]


def test_half_precision_goes_as_it_is(tmp_path: Path) -> None:
    path = tiny.make("llama", tmp_path / "bf16", seed=2, dtype=torch.bfloat16)
    other = tiny.make("llama", tmp_path / "other", seed=3, dtype=torch.bfloat16)
    sent = load_tensors(path / "model.safetensors")
    with plain.make_engine(path, **SETTINGS) as engine:
        expected = tokens(engine)
    with plain.make_engine(other, **SETTINGS) as engine:
        assert tokens(engine) != expected
        engine.update_weights(sent.items())
        assert tokens(engine) == expected


def test_running_requests_go_on_with_the_new_weights(checkpoints: list[Path]) -> None:
    with (
        plain.make_engine(checkpoints[1], **SETTINGS) as other,
        plain.make_engine(checkpoints[0], **SETTINGS) as engine,
    ):
        engine.add_request("r", PROMPT, PARAMS)
        outputs = [output for _ in range(6) for output in engine.step()]
        begun = outputs[-1].outputs[0].token_ids
        engine.update_weights(weights_of(checkpoints[1]).items())
        whole = plain.collect(engine)["r"][-1].outputs[0].token_ids
        assert whole[: len(begun)] == begun
        prompt = [*PROMPT["prompt_token_ids"], *begun]
        params = SamplingParams(temperature=0.0, max_tokens=24 - len(begun), ignore_eos=True)
        other.add_request("r", {"prompt_token_ids": prompt}, params)
        assert whole == begun + plain.collect(other)["r"][-1].outputs[0].token_ids


@pytest.fixture
def engine(checkpoints: list[Path]) -> Iterator[LLMEngine]:
    with plain.make_engine(checkpoints[0], **SETTINGS) as engine:
        yield engine


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], "weights is empty"),
        ([("x", np.zeros(3, np.float32))], "no parameter 'x'"),
        ([("model.norm.weight", np.zeros((3, 3), np.float32))], "has shape"),
        ([("model.norm.weight", np.zeros(100_000, np.float32))], "has shape"),
        ([("model.norm.weight", np.zeros(3, np.int32))], "dtype int32; it must be float32, float16 or bfloat16"),
        ([("model.norm.weight", "text")], "can't be read as an array"),
        ([("model.norm.weight",)], "pairs of a name and an array"),
        ([(3, np.zeros(3, np.float32))], "pairs of a name and an array"),
        (["ab"], "pairs of a name and an array"),
    ],
)
def test_unknown_weights_are_refused(engine: LLMEngine, expected: list[list[int]], given: Any, error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=error):
        engine.update_weights(given, "v")
    assert tokens(engine) == expected[0], "nothing was replaced"


def test_half_an_update_is_never_served(
    engine: LLMEngine, checkpoints: list[Path], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "MAX_BYTES", 1000)

    def broken() -> Iterator[tuple[str, np.ndarray]]:
        yield from list(weights_of(checkpoints[1]).items())[:4]
        engine.add_request("meanwhile", PROMPT, PARAMS)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.update_weights(broken(), "step 7")
    [ended] = plain.collect(engine)["meanwhile"]
    assert isinstance(ended.outputs[0].error, WeightsLostError)
    refused = complete(engine).outputs[0]
    assert isinstance(refused.error, WeightsLostError)
    assert "step 7" in str(refused.error)
    engine.update_weights(weights_of(checkpoints[1]).items(), "step 8")
    assert tokens(engine) == expected[1]


@pytest.mark.slow
def test_a_core_that_comes_back_without_them_refuses_until_they_are_sent_again(
    checkpoints: list[Path], expected: list[list[int]]
) -> None:
    args = EngineArgs(str(checkpoints[0]), **SETTINGS)
    with LLMEngine.from_engine_args(args) as engine:
        engine.update_weights(weights_of(checkpoints[1]).items(), "step 3")
        supervisor = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        engine.add_request("r", PROMPT, SamplingParams(max_tokens=80, ignore_eos=True))
        engine.step()
        os.kill(supervisor.core_pid, signal.SIGKILL)
        output = plain.collect(engine)["r"][-1].outputs[0]
        assert isinstance(output.error, WeightsLostError)
        assert "step 3" in str(output.error)
        assert isinstance(complete(engine).outputs[0].error, WeightsLostError)
        engine.update_weights(weights_of(checkpoints[1]).items(), "step 3")
        assert tokens(engine) == expected[1]


def test_weights_that_were_dropped_in_sleep_are_to_be_sent_again(
    engine: LLMEngine, checkpoints: list[Path], expected: list[list[int]]
) -> None:
    engine.update_weights(weights_of(checkpoints[1]).items(), "step 5")
    engine.sleep(1)
    engine.wake_up()
    assert tokens(engine) == expected[1]
    engine.sleep(2)
    with pytest.raises(InvalidRequestError, match="weights sleep: call wake_up first"):
        engine.update_weights(weights_of(checkpoints[1]).items())
    engine.wake_up(["weights"])
    engine.add_request("waits", PROMPT, PARAMS)
    assert isinstance(plain.collect(engine)["waits"][-1].outputs[0].error, WeightsLostError)
    engine.update_weights(weights_of(checkpoints[1]).items(), "step 6")
    engine.wake_up(["kv_cache"])
    assert tokens(engine) == expected[1]


def test_quantized_weights_are_not_replaced(tmp_path: Path) -> None:
    path = tiny.make("llama", tmp_path / "wide", hidden_size=128, intermediate_size=128)
    with plain.make_engine(path, quantization="int8", attention_backend="native", **SETTINGS) as engine:
        before = tokens(engine)
        with pytest.raises(InvalidRequestError, match="weights are quantized"):
            engine.update_weights(weights_of(path).items())
        assert tokens(engine) == before


@pytest.mark.slow
def test_after_an_incomplete_update_on_a_daemon_all_requests_fail_until_an_update_is_complete(
    checkpoints: list[Path], expected: list[list[int]]
) -> None:
    with daemons.short_folder() as folder:
        daemon = daemons.Daemon(
            folder, "--model", str(checkpoints[0]), "--skip-tokenizer-init", "--max-model-len=128",
            "--admin-listen", f"ipc://{folder}/admin.sock",
        )  # fmt: skip
        try:
            daemon.ready_line()
            with LLMEngine.connect(daemon.address, skip_tokenizer_init=True) as user:
                with pytest.raises(NotPermittedError, match="update_weights changes the engine for everyone"):
                    user.update_weights(weights_of(checkpoints[1]).items())
                assert tokens(user) == expected[0]
                admin = LLMEngine.connect(f"ipc://{folder}/admin.sock", skip_tokenizer_init=True)
                first = next(weights_module.weight_messages(list(weights_of(checkpoints[1]).items()), "v"))
                admin.engine_core.call("update_weights", *first[0][:4], False, arrays=first[1])
                admin.shutdown()
                while not isinstance(complete(user).outputs[0].error, WeightsLostError):
                    pass
                before = user.engine_core._connection.model.fingerprint  # type: ignore[attr-defined]
                with LLMEngine.connect(f"ipc://{folder}/admin.sock", skip_tokenizer_init=True) as admin:
                    admin.update_weights(weights_of(checkpoints[1]).items(), "w")
                    assert tokens(admin) == expected[1]
                    after = admin.engine_core._connection.model.fingerprint  # type: ignore[attr-defined]
                assert tokens(user) == expected[1]
                assert user.engine_core._connection.model.fingerprint == after != before  # type: ignore[attr-defined]
        finally:
            daemon.end()
