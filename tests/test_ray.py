"""What Ray is to an engine: a place for its ranks, its core, or itself. A real Ray with several nodes, on loopback.

`make test-ray` runs these, because Ray is large.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # then 127.0.0.1 is a node's address, before Ray is imported
os.environ["RAY_AUTH_MODE"] = "disabled"

import psutil
import pytest

import plain
import tiny
from daemons import Daemon, short_folder, until
from mainspring import LLM, AsyncLLMEngine, EngineArgs, EngineDeadError, LLMEngine, SamplingParams
from mainspring.ipc.errors import InvalidArgumentError, ModelNotFoundError
from test_exact import SETTINGS
from test_ranks import GREEDY, PROMPT, exact, ranks_of, tokens_of
from test_remote_ranks import streams_go_on

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'mainspring[ray]'", exc_type=ImportError)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
STORE_BYTES = 80 << 20
CORE, RANK = "mainspring.core", "mainspring.core.rank"
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with room for one rank each; the tests are on the first one."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    made = Cluster(True, head_node_args={**node, "include_dashboard": False, "node_ip_address": "127.0.0.1"})
    made.node = node
    made.second = made.add_node(**node)
    ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    assert {one["NodeManagerAddress"] for one in ray.nodes()} == {"127.0.0.1"}
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(autouse=True)
def _room(cluster: Any) -> None:
    """What the test before has held is free again."""
    until(lambda: ray.available_resources().get("CPU", 0) == ray.cluster_resources()["CPU"])


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with plain.make_engine(model) as alone:
        return tokens_of(alone, [PROMPT[number:] for number in range(4)])


def ranked(model: Path, **fields: Any) -> EngineArgs:
    return EngineArgs(
        str(model), tensor_parallel_size=2, distributed_executor_backend="ray", max_restarts=5, **SETTINGS, **fields
    )


def running(module: str) -> list[psutil.Process]:
    """The processes below this one that run `module`: Ray's are, too."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it is ending
            found += [process] if module in process.cmdline() else []
    return found


def groups() -> list[dict[str, Any]]:
    return [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]


# ---------------------------------------------------------------------- ranks


def test_ranks_are_placed_on_several_nodes_and_streams_survive_the_death_of_a_rank_and_of_a_node(
    cluster: Any, model: Path, expected: list[list[int]]
) -> None:
    with LLMEngine.from_engine_args(ranked(model, num_gpu_blocks_override=40)) as engine:
        exact(engine, model)
        [group] = groups()
        assert len(set(group["bundles_to_node_id"].values())) == 2
        supervisor = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        assert not ranks_of(supervisor.core_pid)
        [rank] = running(RANK)
        assert "RankActor" in rank.parent().cmdline()[0]
        streams_go_on(engine, expected, rank.kill)
        assert "rank 1 ended by signal SIGKILL" in supervisor.launch.last_crash
        cluster.add_node(**cluster.node)
        [rank] = running(RANK)

        def lose_node() -> None:
            rank.suspend()  # else the streams might end before the processes of a lost node do
            cluster.remove_node(cluster.second, allow_graceful=False)

        streams_go_on(engine, expected, lose_node)
        assert not rank.is_running()
        assert "rank 1 ended because the connection to its machine was lost" in supervisor.launch.last_crash
        [group] = groups()
        assert len(set(group["bundles_to_node_id"].values())) == 2
        exact(engine, model)
    until(lambda: not groups())
    until(lambda: not running(RANK))


def test_a_core_in_the_process_may_have_its_ranks_in_ray(cluster: Any, model: Path) -> None:
    with LLMEngine.from_engine_args(ranked(model), enable_multiprocessing=False) as engine:
        exact(engine, model)


def test_a_daemon_may_have_its_ranks_in_ray(cluster: Any, model: Path) -> None:
    flags = ["--model", str(model), "--tensor-parallel-size=2", "--distributed-executor-backend=ray"]
    more = ["--max-model-len=128", "--skip-tokenizer-init", "--num-gpu-blocks-override=40"]
    with short_folder() as folder:
        daemon = Daemon(folder, *flags, *more, RAY_ADDRESS=cluster.address)
        try:
            daemon.ready_line()
            with LLMEngine.connect(daemon.address) as engine:
                exact(engine, model)
            assert not ranks_of(daemon.status()[1]["core_pid"])
            [rank] = running(RANK)
            assert daemon.stop() == 0
        finally:
            daemon.end()
    until(lambda: not rank.is_running())
    until(lambda: not groups())


def test_a_given_placement_group_is_used_and_kept(cluster: Any, model: Path) -> None:
    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    try:
        config = EngineArgs(str(model), tensor_parallel_size=2, **SETTINGS).create_engine_config()
        with LLMEngine(config, placement_group=group) as engine:
            assert engine.vllm_config.parallel_config.distributed_executor_backend == "ray"
            exact(engine, model)
            assert len(groups()) == 1
        assert len(groups()) == 1
    finally:
        ray.util.remove_placement_group(group)


def test_what_does_not_fit_into_a_placement_group_is_said(cluster: Any, model: Path) -> None:
    config = ranked(model).create_engine_config()
    group = ray.util.placement_group([{"CPU": 1}])
    try:
        with pytest.raises(InvalidArgumentError, match="a bundle for each of 2 ranks; the placement group has 1"):
            LLMEngine(config, placement_group=group)
    finally:
        ray.util.remove_placement_group(group)
    with pytest.raises(InvalidArgumentError, match=r"placement_group is .*; it must be one of Ray"):
        LLMEngine(config, placement_group=object())


# ---------------------------------------------------------------------- the engine in an actor


def test_an_engine_may_be_an_actor(cluster: Any, model: Path, expected: list[list[int]]) -> None:
    config = EngineArgs(str(model), **SETTINGS).create_engine_config()
    actor = ray.remote(num_cpus=1)(AsyncLLMEngine).remote(config)
    try:
        outputs = [ray.get(one) for one in actor.generate.remote({"prompt_token_ids": PROMPT}, GREEDY, "a")]
        assert outputs[-1].outputs[0].token_ids == expected[0]
        assert len(outputs) > 1
        outputs = [ray.get(one) for one in actor.add_request.remote("b", {"prompt_token_ids": PROMPT}, GREEDY)]
        assert outputs[-1].outputs[0].token_ids == expected[0]
        assert ray.get(actor.get_model_config.remote()).model == str(model)
        stream = actor.generate.remote({"prompt_token_ids": PROMPT}, LONG, "c")
        ray.get(next(stream))
        ray.cancel(stream)
        until(lambda: ray.get(actor.get_num_unfinished_requests.remote()) == 0)
        with pytest.raises(ray.exceptions.RayTaskError, match="InvalidRequestError"):
            [ray.get(one) for one in actor.generate.remote({"prompt_token_ids": []}, GREEDY, "d")]
    finally:
        ray.kill(actor)


def test_an_llm_in_an_actor_has_its_ranks_in_the_placement_group_of_that_actor(
    cluster: Any, model: Path, expected: list[list[int]]
) -> None:
    """As vLLM's examples of training with Ray make it, with processors in place of GPUs."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class MyLLM(LLM):
        def __init__(self, *args: Any, **fields: Any) -> None:
            os.environ["VLLM_RAY_BUNDLE_INDICES"] = "1,2"
            super().__init__(*args, **fields)

    group = ray.util.placement_group([{"CPU": 0.1}, {"CPU": 0.5}, {"CPU": 0.5}])
    try:
        strategy = PlacementGroupSchedulingStrategy(group, 1, placement_group_capture_child_tasks=True)
        llm = ray.remote(num_cpus=0, num_gpus=0, scheduling_strategy=strategy)(MyLLM).remote(
            str(model), tensor_parallel_size=2, distributed_executor_backend="ray", **SETTINGS
        )
        outputs = ray.get(llm.generate.remote({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False))
        assert outputs[0].outputs[0].token_ids == expected[0]
        assert len(groups()) == 1
        assert len(running(RANK)) == 1
        ray.kill(llm)
        until(lambda: not running(RANK))
    finally:
        ray.util.remove_placement_group(group)


# ---------------------------------------------------------------------- the core in an actor


def test_engine_use_ray_puts_the_core_into_an_actor(cluster: Any, model: Path, expected: list[list[int]]) -> None:
    config = EngineArgs(str(model), max_restarts=2, **SETTINGS).create_engine_config()
    with LLMEngine(config, engine_use_ray=True) as engine:
        exact(engine, model)
        [core] = running(CORE)
        assert "CoreActor" in core.parent().cmdline()[0]
        streams_go_on(engine, expected, core.kill)
    until(lambda: not running(CORE))


def test_the_older_flags_put_core_and_ranks_into_actors(cluster: Any, model: Path, expected: list[list[int]]) -> None:
    config = EngineArgs(str(model), tensor_parallel_size=2, **SETTINGS).create_engine_config()

    async def main() -> list[int]:
        async with AsyncLLMEngine(True, True, config) as engine:
            async for output in engine.generate({"prompt_token_ids": PROMPT}, GREEDY, "a"):
                last = output
            assert len(running(RANK)) == 1
        return list(last.outputs[0].token_ids)

    assert asyncio.run(main()) == expected[0]
    until(lambda: not groups())


def test_the_death_of_the_cores_actor_is_the_end_of_the_engine(cluster: Any, model: Path) -> None:
    config = EngineArgs(str(model), **SETTINGS).create_engine_config()
    with LLMEngine(config, engine_use_ray=True) as engine:
        tokens_of(engine)
        engine.add_request("a", {"prompt_token_ids": PROMPT}, LONG)
        assert engine.step()
        ray.kill(engine.engine_core._connection._core._actor)  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match=r"the core's actor has ended: .*ray.kill"):
            plain.collect(engine)
    until(lambda: not running(CORE))


def test_errors_of_a_core_in_an_actor_are_raised_under_their_type(cluster: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    config = EngineArgs(str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    with pytest.raises(ModelNotFoundError):
        LLMEngine(config, engine_use_ray=True)
