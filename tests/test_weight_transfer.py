"""Weights of a trainer, by vLLM's calls: in one process and across two, whole or not at all."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

import daemons
import plain
import tiny
from mainspring import EngineArgs, LLMEngine, NotSupportedError, RequestOutput, SamplingParams, WeightsLostError
from mainspring.compat.vllm.config import WeightTransferConfig
from mainspring.compat.vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
from mainspring.compat.vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from mainspring.compat.vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from mainspring.compat.vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from mainspring.compat.vllm.utils import get_open_port
from mainspring.core.worker.trainer_group import TrainerGroup, in_thread
from mainspring.engine.request import weight_messages as weights_module
from mainspring.ipc.codec import encode_value
from mainspring.ipc.errors import (
    ConnectError,
    InvalidArgumentError,
    InvalidRequestError,
    NotPermittedError,
    OutOfMemoryError,
    UnknownArgumentError,
)
from mainspring.tools.weight_sender import ParamMeta

PROMPT = {"prompt_token_ids": list(range(5, 45))}
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}
LOOPBACK = "127.0.0.1"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [tiny.make("llama", folder / str(seed), seed=seed) for seed in (1, 2)]


def trained(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def complete(engine: LLMEngine, name: str = "r") -> RequestOutput:
    engine.add_request(name, PROMPT, PARAMS)
    return plain.collect(engine)[name][-1]


def tokens(engine: LLMEngine) -> list[int]:
    return complete(engine).outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(checkpoints: list[Path]) -> list[list[int]]:
    """Tokens of a fresh engine on each of the two checkpoints."""
    found = []
    for path in checkpoints:
        with plain.make_engine(path, **SETTINGS) as engine:
            found.append(tokens(engine))
    assert found[0] != found[1]
    return found


@pytest.fixture
def engine(checkpoints: list[Path]) -> Iterator[LLMEngine]:
    with plain.make_engine(checkpoints[0], **SETTINGS) as engine:
        yield engine


def init_info(kind: str) -> Any:
    if kind == "ipc":
        return IPCTrainerInitInfo(rank=0)
    if kind == "packed ipc":
        return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=1)
    return NCCLTrainerInitInfo(master_address=LOOPBACK, master_port=get_open_port(), world_size=2, rank=0)


def sender(kind: str, engine: Any, source: Any) -> Any:
    return WeightTransferTrainerFactory.trainer_init(init_info(kind), client=engine, source=source)


def arrays_of(folder: Path) -> dict[str, Any]:
    """An update whose values come along."""
    weights = load_file(folder / "model.safetensors")
    return {"names": list(weights), "ipc_handles": list(weights.values())}


# ---------------------------------------------------------------------- one process, and two


@pytest.mark.parametrize("kind", ["nccl", "ipc", "packed ipc"])
@pytest.mark.parametrize(
    "multiprocess", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in-process", "multi-process"]
)
def test_after_an_update_the_engine_serves_the_trained_model(
    checkpoints: list[Path], expected: list[list[int]], kind: str, multiprocess: bool
) -> None:
    args = EngineArgs(str(checkpoints[0]), weight_transfer_config=WeightTransferConfig(backend="nccl"), **SETTINGS)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=multiprocess) as engine:
        model = trained(checkpoints[1])
        trainer = sender(kind, engine, ModuleSource(model))
        assert tokens(engine) == expected[0]
        assert complete(engine).num_cached_tokens
        trainer.send_weights()
        output = complete(engine)
        assert not output.num_cached_tokens, "cached prefixes were of the other weights"
        assert output.outputs[0].token_ids == expected[1]
        assert engine.get_weight_version() == "default"
        engine.update_weight_version("step 1")
        assert engine.get_weight_version() == "step 1"
        model.load_state_dict(trained(checkpoints[0]).state_dict())
        trainer.send_weights()
        assert tokens(engine) == expected[0]
        trainer.shutdown()
        engine.shutdown_weight_transfer_engine()


TRAINER = """
import os, sys
import torch
from transformers import AutoModelForCausalLM
from mainspring import LLMEngine
from mainspring.compat.vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
from mainspring.compat.vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

address, folder, port, dies = sys.argv[1:]

class Source(ModuleSource):
    def iter_full(self):
        for number, pair in enumerate(super().iter_full()):
            if dies and number == 5:
                os._exit(7)
            yield pair

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
with LLMEngine.connect(address, skip_tokenizer_init=True) as engine:
    place = NCCLTrainerInitInfo("127.0.0.1", int(port), world_size=2, rank=0)
    sender = WeightTransferTrainerFactory.trainer_init(place, client=engine, source=Source(model))
    sender.send_weights()
    sender.shutdown()
    engine.update_weight_version("trained")
"""


@pytest.mark.slow
def test_a_trainer_in_another_process_sends_its_weights_and_one_that_dies_changes_nothing(
    checkpoints: list[Path], expected: list[list[int]], tmp_path: Path
) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)

    def train(address: str, dies: str) -> subprocess.CompletedProcess[str]:
        arguments = [address, str(checkpoints[1]), str(get_open_port()), dies]
        command = [sys.executable, "-P", str(tmp_path / "trainer.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with daemons.short_folder() as folder:
        daemon = daemons.Daemon(
            folder, "--model", str(checkpoints[0]), "--skip-tokenizer-init", "--max-model-len=128",
            "--admin-listen", f"ipc://{folder}/admin.sock",
        )  # fmt: skip
        try:
            daemon.ready_line()
            with LLMEngine.connect(daemon.address, skip_tokenizer_init=True) as user:
                with pytest.raises(NotPermittedError, match="changes the engine for everyone"):
                    sender("nccl", user, ModuleSource(torch.nn.Linear(2, 3)))  # which waits for nobody
                assert train(f"ipc://{folder}/admin.sock", "dies").returncode == 7
                assert tokens(user) == expected[0]
                done = train(f"ipc://{folder}/admin.sock", "")
                assert done.returncode == 0, done.stderr
                assert tokens(user) == expected[1]
                assert user.get_weight_version() == "trained"
        finally:
            daemon.end()


# ---------------------------------------------------------------------- whole or not at all


class Broken(ModuleSource):
    """Fails after some parameters."""

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(super().iter_full())[:5]
        raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["nccl", "packed ipc"])
def test_half_an_update_leaves_the_old_weights(
    engine: LLMEngine, checkpoints: list[Path], expected: list[list[int]], kind: str
) -> None:
    model = trained(checkpoints[1])
    trainer = sender(kind, engine, Broken(model))
    with pytest.raises(ZeroDivisionError):
        trainer.send_weights()
    with pytest.raises(InvalidRequestError, match="no weight update was started"):
        engine.finish_weight_update()
    assert tokens(engine) == expected[0]
    if kind == "nccl":
        with pytest.raises(ConnectError, match="make a new one"):
            trainer.send_weights()
        engine.init_weight_transfer_engine({})
    sender(kind, engine, ModuleSource(model)).send_weights()
    assert tokens(engine) == expected[1]


def test_requests_go_on_until_the_update_is_finished(
    engine: LLMEngine, checkpoints: list[Path], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "MAX_BYTES", 5000)  # some parameters go in several messages
    engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"packed": False}))
    engine.start_weight_update()
    engine.add_request("r", PROMPT, PARAMS)
    engine.step()
    engine.update_weights(WeightTransferUpdateRequest(update_info=[arrays_of(checkpoints[1])]))
    assert plain.collect(engine)["r"][-1].outputs[0].token_ids == expected[0]
    engine.finish_weight_update("step 9")
    assert engine.get_weight_version() == "step 9"
    assert tokens(engine) == expected[1]


def test_a_running_request_goes_on_with_the_new_weights(engine: LLMEngine, checkpoints: list[Path]) -> None:
    engine.add_request("r", PROMPT, PARAMS)
    begun = [output for _ in range(6) for output in engine.step()][-1].outputs[0].token_ids
    engine.start_weight_update()
    engine.update_weights(arrays_of(checkpoints[1]))
    engine.finish_weight_update()
    whole = plain.collect(engine)["r"][-1].outputs[0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=24 - len(begun), ignore_eos=True)
    with plain.make_engine(checkpoints[1], **SETTINGS) as other:
        other.add_request("r", {"prompt_token_ids": [*PROMPT["prompt_token_ids"], *begun]}, params)
        assert whole == begun + plain.collect(other)["r"][-1].outputs[0].token_ids


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"names": ["x"], "ipc_handles": [np.zeros(3, np.float32)]}, "no parameter 'x'"),
        ({"names": ["model.norm.weight"], "ipc_handles": [np.zeros((3, 3), np.float32)]}, "has shape"),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused_at_the_end(
    engine: LLMEngine, checkpoints: list[Path], expected: list[list[int]], wrong: Any, error: str
) -> None:
    engine.start_weight_update()
    engine.update_weights(arrays_of(checkpoints[1]))
    engine.update_weights(wrong)
    with pytest.raises(InvalidRequestError, match=error):
        engine.finish_weight_update()
    assert tokens(engine) == expected[0], "nothing was replaced"


def test_a_failure_while_the_weights_are_set_leaves_none_to_serve(
    engine: LLMEngine, checkpoints: list[Path], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mainspring.core.worker import generation_worker

    calls = []

    def fails(values: np.ndarray) -> torch.Tensor:
        calls.append(values)
        if len(calls) > 3:
            raise MemoryError("no more")
        return torch.from_numpy(values.copy())

    engine.start_weight_update()
    engine.update_weights(arrays_of(checkpoints[1]))
    with monkeypatch.context() as patch:
        patch.setattr(generation_worker, "tensor_of", fails)
        with pytest.raises(MemoryError):
            engine.finish_weight_update("v")
    assert isinstance(complete(engine).outputs[0].error, WeightsLostError)
    sender("ipc", engine, ModuleSource(trained(checkpoints[1]))).send_weights()
    assert tokens(engine) == expected[1]


def test_an_update_belongs_to_its_frontend_and_leaves_with_it(engine: LLMEngine, checkpoints: list[Path]) -> None:
    core: Any = engine.engine_core.core  # type: ignore[attr-defined]
    core.connect(5)
    core.call("start_weight_update", encode_value([]), 5)
    with pytest.raises(InvalidRequestError, match="active already"):
        engine.start_weight_update()
    with pytest.raises(InvalidRequestError, match="that of another frontend"):
        engine.update_weights(arrays_of(checkpoints[1]))
    core.call("finish_weight_update", encode_value([None, False]), 0)
    with pytest.raises(InvalidRequestError, match="active already"):
        engine.start_weight_update()
    core.disconnect(5)
    engine.start_weight_update()


@pytest.mark.slow
def test_after_a_crash_sent_weights_are_lost_and_a_name_is_not(
    checkpoints: list[Path], expected: list[list[int]]
) -> None:
    def kill(engine: Any) -> RequestOutput:
        engine.add_request("r", PROMPT, SamplingParams(max_tokens=80, ignore_eos=True))
        engine.step()
        os.kill(engine.engine_core._connection._core.supervisor.core_pid, signal.SIGKILL)
        return plain.collect(engine)["r"][-1]

    with LLMEngine.from_engine_args(EngineArgs(str(checkpoints[0]), **SETTINGS)) as engine:
        engine.update_weight_version("step 0")
        engine.start_weight_update()
        engine.update_weights(arrays_of(checkpoints[1]))
        assert kill(engine).outputs[0].error is None
        with pytest.raises(InvalidRequestError, match="no weight update was started"):
            engine.finish_weight_update()
        assert tokens(engine) == expected[0], "what was held is gone, and nothing else"
        assert engine.get_weight_version() == "step 0"
        trainer = sender("nccl", engine, ModuleSource(trained(checkpoints[1])))
        trainer.send_weights()
        engine.update_weight_version("step 1")
        assert tokens(engine) == expected[1]
        lost = kill(engine).outputs[0].error
        assert isinstance(lost, WeightsLostError)
        assert "step 1" in str(lost)
        with pytest.raises(InvalidRequestError, match="no trainer is connected"):
            trainer.send_weights()
        sender("nccl", engine, ModuleSource(trained(checkpoints[1]))).send_weights()
        assert tokens(engine) == expected[1]


def test_weights_that_were_dropped_in_sleep_are_to_be_sent_again(
    engine: LLMEngine, checkpoints: list[Path], expected: list[list[int]]
) -> None:
    trainer = sender("ipc", engine, ModuleSource(trained(checkpoints[1])))
    trainer.send_weights()
    engine.sleep(2)
    with pytest.raises(InvalidRequestError, match="weights sleep: call wake_up first"):
        trainer.send_weights()
    engine.wake_up()
    assert isinstance(complete(engine).outputs[0].error, WeightsLostError)
    trainer.send_weights()
    assert tokens(engine) == expected[1]


# ---------------------------------------------------------------------- errors

GROUP = {"master_address": LOOPBACK, "master_port": 29500}
NAMED = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}


@pytest.mark.parametrize(
    ("request_", "kind", "error"),
    [
        (3, InvalidArgumentError, "it must be a dict"),
        ({"init_info": []}, InvalidArgumentError, "it must be a dict"),
        ({"master_address": LOOPBACK}, InvalidArgumentError, "give both or none"),
        ({**GROUP, "master_port": 0}, InvalidArgumentError, "master_port"),
        ({**GROUP, "rank_offset": 2}, InvalidArgumentError, "no rank of 2"),
        ({**GROUP, "nccl_unique_id_b64": "AAAA"}, InvalidArgumentError, "unknown field `nccl_unique_id_b64`"),
        ({**GROUP, "packed": True}, NotSupportedError, "packed=True"),
    ],
)
def test_wrong_ways_to_begin_are_refused(engine: LLMEngine, request_: Any, kind: type[Exception], error: str) -> None:
    with pytest.raises(kind, match=error):
        engine.init_weight_transfer_engine(request_)


@pytest.mark.parametrize(
    ("info", "kind", "error"),
    [
        (NAMED, InvalidRequestError, "no trainer is connected"),
        ({**NAMED, "dtype_names": []}, InvalidArgumentError, "1 names, 0 dtype_names"),
        ({**NAMED, "dtype_names": ["int8"]}, InvalidArgumentError, "w has dtype 'int8'"),
        ({**NAMED, "shapes": [[-1]]}, InvalidArgumentError, "negative size"),
        ({**NAMED, "shapes": 3}, InvalidArgumentError, "its fields must be lists"),
        ({**NAMED, "ipc_handles": []}, InvalidArgumentError, "1 names and 0 ipc_handles"),
        ({**NAMED, "ipc_handles": [{"GPU": ()}]}, InvalidRequestError, "can't be read as an array"),
        ({**NAMED, "tensor_sizes": [8]}, UnknownArgumentError, "tensor_sizes"),
        ([NAMED, NAMED], InvalidArgumentError, "it must be a dict"),
    ],
)
def test_wrong_updates_are_refused_and_end_the_update(
    engine: LLMEngine, info: Any, kind: type[Exception], error: str
) -> None:
    engine.start_weight_update()
    with pytest.raises(kind, match=error):
        engine.update_weights(WeightTransferUpdateRequest(update_info=info))
    with pytest.raises(InvalidRequestError, match="no weight update was started"):
        engine.finish_weight_update()


def test_steps_out_of_order_are_refused(engine: LLMEngine, checkpoints: list[Path]) -> None:
    with pytest.raises(InvalidRequestError, match="call start_weight_update first"):
        engine.update_weights(arrays_of(checkpoints[1]))
    with pytest.raises(InvalidRequestError, match="call start_weight_update first"):
        engine.finish_weight_update()
    engine.start_weight_update()
    with pytest.raises(InvalidRequestError, match="active already"):
        engine.start_weight_update()
    with pytest.raises(InvalidRequestError, match="none were sent"):
        engine.finish_weight_update()
    engine.update_weights(arrays_of(checkpoints[1]))
    with pytest.raises(InvalidArgumentError, match="give it to finish_weight_update"):
        engine.update_weights(arrays_of(checkpoints[1]), "v")
    with pytest.raises(InvalidRequestError, match="arguments are wrong"):
        engine.finish_weight_update(3)  # type: ignore[arg-type]
    engine.shutdown_weight_transfer_engine()
    with pytest.raises(InvalidRequestError, match="call start_weight_update first"):
        engine.finish_weight_update()


def test_quantized_weights_are_not_replaced(tmp_path: Path) -> None:
    path = tiny.make("llama", tmp_path / "wide", hidden_size=128, intermediate_size=128)
    with plain.make_engine(path, quantization="int8", attention_backend="native", **SETTINGS) as engine:
        trainer = sender("nccl", engine, ModuleSource(trained(path)))
        with pytest.raises(InvalidRequestError, match="weights are quantized"):
            trainer.send_weights()


def test_the_sender_raises_what_the_engine_refuses(
    engine: LLMEngine, checkpoints: list[Path], expected: list[list[int]]
) -> None:
    trainer = sender("nccl", engine, ModuleSource(trained(checkpoints[1]).double()))
    with pytest.raises(InvalidArgumentError, match="dtype 'float64'"):
        trainer.send_weights()
    assert tokens(engine) == expected[0]


def joined_by(engine: LLMEngine) -> TrainerGroup:
    """The group of a trainer that is no sender of ours."""
    port = get_open_port()
    opened = in_thread(TrainerGroup, LOOPBACK, port, 0, 2)
    engine.init_weight_transfer_engine({"master_address": LOOPBACK, "master_port": port})
    return opened.result()


def test_a_request_without_names_is_like_the_last_one(engine: LLMEngine) -> None:
    group, name = joined_by(engine), "model.norm.weight"
    for info in ({"names": [name], "dtype_names": ["bfloat16"], "shapes": [[64]]}, {"names": []}):
        before = tokens(engine)
        engine.start_weight_update()
        received = in_thread(engine.update_weights, info)
        group.broadcast(torch.randn(64, generator=torch.Generator().manual_seed(len(info))).bfloat16())
        received.result()
        engine.finish_weight_update()
        assert tokens(engine) != before


def test_weights_for_which_the_host_has_no_memory_are_refused_and_the_trainer_does_not_wait(
    engine: LLMEngine, expected: list[list[int]]
) -> None:
    group = joined_by(engine)
    engine.start_weight_update()
    received = in_thread(engine.update_weights, {**NAMED, "shapes": [[1 << 50]]})
    with pytest.raises(ConnectError, match=r"closed by peer|reset by peer"):
        group.broadcast(torch.zeros(64 << 20))
    with pytest.raises(OutOfMemoryError, match="do not fit in host memory"):
        received.result()
    assert tokens(engine) == expected[0]


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        (lambda metas: metas[:-1], "but its metadata say None"),
        (lambda metas: [*metas, metas[0]], "but its metadata 22"),
        (lambda metas: [ParamMeta(metas[0].name, torch.float16, metas[0].shape), *metas[1:]], "parameter 0"),
    ],
)
def test_a_source_that_does_not_yield_what_it_declares_is_refused(
    engine: LLMEngine, checkpoints: list[Path], expected: list[list[int]], kind: str, metadata: Any, error: str
) -> None:
    source = ModuleSource(trained(checkpoints[1]))
    source.metadata = metadata(source.metadata)
    with pytest.raises(InvalidArgumentError, match=error):
        sender(kind, engine, source).send_weights()
    assert tokens(engine) == expected[0]


def test_senders_of_other_ranks_only_iterate() -> None:
    iterated = []

    class Source(ModuleSource):
        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in super().iter_full():
                iterated.append(name)
                yield name, value

    place = NCCLTrainerInitInfo(LOOPBACK, 1, world_size=2, rank=1)
    other = WeightTransferTrainerFactory.trainer_init(place, client=None, source=Source(torch.nn.Linear(2, 3)))  # type: ignore[arg-type]
    other.send_weights()
    assert iterated == ["weight", "bias"]


def test_a_factory_without_a_source_or_a_known_kind_says_so() -> None:
    with pytest.raises(InvalidArgumentError, match="source is None"):
        WeightTransferTrainerFactory.trainer_init(IPCTrainerInitInfo(rank=0), client=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="init_info is 3"):
        WeightTransferTrainerFactory.trainer_init(3, client=None, source=ModuleSource(torch.nn.Linear(2, 3)))  # type: ignore[arg-type]


def test_other_backends_are_not_supported() -> None:
    for backend in ("nccl", "ipc", None):
        assert EngineArgs(weight_transfer_config=backend and {"backend": backend}) == EngineArgs()
    with pytest.raises(NotSupportedError, match="backend is 'sharded_rdt'"):
        EngineArgs(weight_transfer_config=WeightTransferConfig(backend="sharded_rdt"))
    with pytest.raises(InvalidArgumentError, match="must be a dict"):
        EngineArgs(weight_transfer_config=7)


# ---------------------------------------------------------------------- the group


def pair_of_groups() -> tuple[TrainerGroup, TrainerGroup]:
    port = get_open_port()
    other = in_thread(TrainerGroup, LOOPBACK, port, 1, 2)
    return TrainerGroup(LOOPBACK, port, 0, 2), other.result()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 4)])
def test_a_tensor_arrives_as_it_is(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    trainer, worker = pair_of_groups()
    sent, got = torch.randn(shape).to(dtype), torch.zeros(shape, dtype=dtype)
    received = in_thread(worker.broadcast, got)
    trainer.broadcast(sent)
    received.result()
    assert torch.equal(sent, got)


def test_when_one_side_leaves_the_other_waits_no_longer() -> None:
    trainer, worker = pair_of_groups()
    received = in_thread(worker.broadcast, torch.zeros(3))
    trainer.close()
    with pytest.raises(ConnectError, match=r"closed by peer|reset by peer"):
        received.result()
    with pytest.raises(ConnectError, match="is closed"):
        worker.broadcast(torch.zeros(3))


def test_an_address_in_use_is_an_error() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken, pytest.raises(ConnectError, match="did not come together"):
        TrainerGroup(LOOPBACK, taken.getsockname()[1], 0, 2)


def test_the_trainer_listens_on_its_address_only() -> None:
    port = get_open_port()
    waiting = in_thread(TrainerGroup, LOOPBACK, port, 0, 2)
    joined = TrainerGroup(LOOPBACK, port, 1, 2)
    listening = {
        line.split()[1]
        for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    }
    assert listening == {f"0100007F:{port:04X}"}
    waiting.result().close()
    joined.close()
