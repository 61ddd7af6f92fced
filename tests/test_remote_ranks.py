"""A core with ranks on other machines: `mainspring rank` processes, and processes that torchrun has launched. The other
machines are further process trees on this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import plain
import tiny
from daemons import COMMAND, run, until
from mainspring import EngineArgs, EngineDeadError, LLMEngine
from mainspring.ipc.errors import InvalidArgumentError, NotSupportedError
from mainspring.ipc.keys import new_keypair
from mainspring.ipc.transport import free_port
from test_exact import SETTINGS
from test_ranks import GREEDY, PROMPT, exact, ranks_of, tokens_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("model"), tokenizer=True)


class Cluster:
    """This machine and others, which offer ranks at the address of this one."""

    def __init__(self, folder: Path) -> None:
        self.key_file = folder / "engine.key"
        new_keypair(self.key_file)
        self.port = free_port("127.0.0.1")
        self.machines: list[subprocess.Popen[bytes]] = []

    def add_machine(self, ranks: int = 1, port: int | None = None) -> subprocess.Popen[bytes]:
        joins = [
            "--join",
            f"tcp://127.0.0.1:{port or self.port}",
            "--key-file",
            str(self.key_file),
            "--ranks",
            str(ranks),
        ]
        machine = subprocess.Popen([*COMMAND, "rank", *joins])
        self.machines.append(machine)
        return machine

    def engine(self, model: Path, own_process: bool = True, **fields: Any) -> LLMEngine:
        fields = {"tensor_parallel_size": 2, "nnodes": 2, "max_restarts": 3, **fields}
        args = EngineArgs(str(model), master_port=self.port, rank_key_file=str(self.key_file), **fields)
        return LLMEngine.from_engine_args(args, enable_multiprocessing=own_process)

    def hosts_of_ranks(self) -> list[tuple[subprocess.Popen[bytes], psutil.Process]]:
        """The machines with rank processes, and these processes."""
        found = []
        for machine in self.machines:
            with contextlib.suppress(psutil.Error):  # it is ending
                found += [(machine, rank) for rank in ranks_of(machine.pid)]
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for machine in made.machines:
        machine.kill()
        machine.wait()


def streams_go_on(engine: LLMEngine, expected: list[list[int]], strike: Callable[[], Any]) -> None:
    """Begin streams, strike once the first token has come, and compare the tokens of all."""
    for number in range(len(expected)):
        engine.add_request(str(number), {"prompt_token_ids": PROMPT[number:]}, GREEDY)
    first = engine.step()
    assert first
    strike()
    found = {output.request_id: output for output in first}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
    got = [list(found[str(number)].outputs[0].token_ids) for number in range(len(expected))]
    assert got == expected


@pytest.mark.slow
def test_a_rank_of_another_machine_gives_the_tokens_of_generate_and_dies_as_one_of_this(
    cluster: Cluster, model: Path
) -> None:
    for _ in range(2):  # one of them is a spare
        cluster.add_machine()
    with plain.make_engine(model) as alone:
        expected = tokens_of(alone, [PROMPT[number:] for number in range(4)])
    with cluster.engine(model, num_gpu_blocks_override=40, **SETTINGS) as engine:
        exact(engine, model)
        supervisor = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        streams_go_on(engine, expected, lambda: os.kill(supervisor.core_pid, signal.SIGKILL))
        [(machine, rank)] = cluster.hosts_of_ranks()
        streams_go_on(engine, expected, rank.kill)
        assert "rank 1 ended by signal SIGKILL" in supervisor.launch.last_crash
        [(machine, rank)] = cluster.hosts_of_ranks()
        streams_go_on(engine, expected, machine.kill)
        assert "rank 1 ended because the connection to its machine was lost" in supervisor.launch.last_crash
        assert not rank.is_running()
        assert supervisor.launch.restarts == 3
    until(lambda: not cluster.hosts_of_ranks())


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_by_the_watchdog(cluster: Cluster, model: Path) -> None:
    cluster.add_machine()
    with cluster.engine(model, watchdog_timeout=3.0, **SETTINGS) as engine:
        expected = tokens_of(engine)
        [(_, rank)] = cluster.hosts_of_ranks()
        streams_go_on(engine, expected, rank.suspend)
        supervisor = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        assert "by hanging" in supervisor.launch.last_crash
        until(lambda: not rank.is_running())


@pytest.mark.slow
def test_each_machine_has_its_part_of_the_ranks(cluster: Cluster, model: Path) -> None:
    cluster.add_machine(2)
    with cluster.engine(model, own_process=False, tensor_parallel_size=4, **SETTINGS) as engine:
        exact(engine, model)
        places = engine.collective_rpc(lambda worker: [worker.rank, worker.local_rank, os.getpid()])
        assert [place[:2] for place in places] == [[0, 0], [1, 1], [2, 0], [3, 1]]
        assert [place[2] for place in places[:1]] == [os.getpid()]
        assert {place[2] for place in places[1:2]} == {rank.pid for rank in ranks_of(os.getpid())} - {
            rank.pid for _, rank in cluster.hosts_of_ranks()
        }
        assert {place[2] for place in places[2:]} == {rank.pid for _, rank in cluster.hosts_of_ranks()}
    until(lambda: not cluster.hosts_of_ranks())


@pytest.mark.slow
def test_several_cores_take_in_ranks_at_ports_of_their_own(cluster: Cluster, model: Path) -> None:
    cluster.add_machine()
    cluster.add_machine(port=cluster.port + 1)
    with cluster.engine(model, data_parallel_size=2, **SETTINGS) as engine:
        exact(engine, model)
        assert len(cluster.hosts_of_ranks()) == 2


@pytest.mark.slow
def test_an_engine_in_the_process_tells_of_a_lost_machine(cluster: Cluster, model: Path) -> None:
    machine = cluster.add_machine()
    with cluster.engine(model, own_process=False, **SETTINGS) as engine:
        tokens_of(engine)
        machine.kill()
        with pytest.raises(EngineDeadError, match="rank 1 ended because the connection to its machine was lost"):
            tokens_of(engine)
    cluster.add_machine()
    with cluster.engine(model, own_process=False, **SETTINGS) as engine:
        exact(engine, model)


@pytest.mark.slow
def test_a_core_waits_for_a_machine_and_can_be_stopped_meanwhile(cluster: Cluster, model: Path) -> None:
    later = threading.Timer(3.0, cluster.add_machine)
    later.start()
    with cluster.engine(model, **SETTINGS) as engine:
        assert not later.is_alive()
        exact(engine, model)
    flags = [f"--rank-key-file={cluster.key_file}", f"--master-port={cluster.port}", "--nnodes=4"]
    with tempfile.TemporaryFile("w+") as log:
        daemon = subprocess.Popen(
            [*COMMAND, "daemon", "--model", str(model), "--tensor-parallel-size=4", *flags, f"--listen={_socket()}"],
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        time.sleep(1.0)
        until(lambda: bool(psutil.Process(daemon.pid).children()))
        time.sleep(5.0)
        daemon.terminate()
        assert daemon.wait(30.0) == 0


def _socket() -> str:
    return f"ipc://{tempfile.mkdtemp(prefix='ms-')}/core.sock"


LAUNCHED = """
import json, os, sys
import torch.distributed as dist
from mainspring import LLM, SamplingParams
from mainspring.ipc.errors import MainspringError

llm = LLM(sys.argv[1], tensor_parallel_size=2, distributed_executor_backend="external_launcher", seed=1,
          max_model_len=128, enable_lora=True)
prompts = [{"prompt_token_ids": list(range(5, 45 - start))} for start in range(3)]
told = {"rank": dist.get_rank(), "core": llm.llm_engine.engine_core.__class__.__name__}
told["greedy"] = [one.outputs[0].token_ids for one in llm.generate(
    prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False), use_tqdm=False)]
# without a seed: each process would draw other tokens
told["drawn"] = [[one.token_ids for one in out.outputs] for out in llm.generate(
    prompts, SamplingParams(temperature=1.0, n=2, max_tokens=24), use_tqdm=False)]
told["facts"] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
try:
    llm.generate(prompts[0], SamplingParams(max_tokens=4), lora_request=llm_request("/nowhere"), use_tqdm=False)
except MainspringError as error:
    told["error"] = [type(error).__name__, str(error)]
llm.shutdown()
with open(f"{sys.argv[2]}/{dist.get_rank()}.json", "w") as file:
    json.dump(told, file)
""".replace("llm_request(", "__import__('mainspring').LoRARequest('a', 1, ")


@pytest.mark.slow
def test_processes_of_torchrun_are_ranks_and_return_the_same_outputs(model: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LAUNCHED)
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node=2"]
    where = ["--master-addr=127.0.0.1", f"--master-port={free_port('127.0.0.1')}"]
    script = [str(tmp_path / "script.py"), str(model), str(tmp_path)]
    done = subprocess.run([*torchrun, *where, *script], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert (first.pop("rank"), second.pop("rank")) == (0, 1)
    assert (first.pop("core"), second.pop("core")) == ("LeadingClient", "FollowingClient")
    assert first == second
    assert first["error"][0] == "InvalidRequestError"
    assert "/nowhere" in first["error"][1]
    assert len({str(tokens) for tokens in first["drawn"]}) == 3
    with plain.make_engine(model) as alone:
        assert first["greedy"] == tokens_of(alone, [list(range(5, 45 - start)) for start in range(3)])


# ---------------------------------------------------------------------- what is refused


def test_ranks_must_be_divided_evenly_and_the_engine_runs_on_the_first_machine() -> None:
    with pytest.raises(InvalidArgumentError, match="tensor_parallel_size is 4, which can't be divided among 3 nnodes"):
        EngineArgs(tensor_parallel_size=4, nnodes=3).create_engine_config()
    with pytest.raises(NotSupportedError, match="node_rank is 1"):
        EngineArgs(tensor_parallel_size=2, nnodes=2, node_rank=1).create_engine_config()
    with pytest.raises(InvalidArgumentError, match="master_port is 70000"):
        EngineArgs(master_port=70_000).create_engine_config()


def test_a_launcher_is_needed_with_as_many_processes_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    with pytest.raises(InvalidArgumentError, match="RANK is not set: use torchrun"):
        LLMEngine.from_engine_args(args)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match="3 processes were launched for 2 ranks and data_parallel_size 1"):
        LLMEngine.from_engine_args(args)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--join", "ipc:///x"], "join is ipc:///x; it must be tcp://HOST:PORT"),
        (["--join", "tcp://x:1", "--ranks", "0"], "ranks is 0; it must be at least 1"),
        (["--join", "tcp://x:1", "--key-file", "/nowhere/a.key"], "/nowhere/a.key can't be read"),
    ],
)
def test_the_command_says_what_is_wrong(flags: list[str], text: str) -> None:
    done = run("rank", *flags)
    assert done.returncode == 2
    assert text in done.stderr
