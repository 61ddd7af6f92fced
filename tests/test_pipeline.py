"""A core of several stages: a step is under way in each, and streams are those of one rank."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.numpy import load_file

import plain
import tiny
from daemons import until
from mainspring import EngineArgs, EngineDeadError, LLMEngine, LoRARequest, SamplingParams, StructuredOutputsParams
from mainspring.engine.request.weight_messages import weight_messages
from mainspring.ipc.errors import InvalidArgumentError, MainspringError, NotSupportedError, UnsupportedModelError
from native_here import why_not
from peft_folders import generate, make_lora
from quantized_folders import make_awq
from test_exact import SETTINGS
from test_ranks import (
    DEATHS,
    GREEDY,
    GUARD,
    LENGTH,
    PROMPT,
    add_streams,
    exact,
    extension,  # noqa: F401
    kill,
    last_tokens,
    of_one,  # noqa: F401
    outcomes,
    ranks_of,
    same,
    tokens_of,
)
from test_remote_ranks import Cluster

LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny.make("llama", folder, tokenizer=True, num_hidden_layers=LAYERS)


def engine_of(model: Path, own_process: bool = False, stages: int = 2, **fields: Any) -> LLMEngine:
    args = EngineArgs(str(model), pipeline_parallel_size=stages, **fields)
    return LLMEngine.from_engine_args(args, enable_multiprocessing=own_process)


def most_in_flight(engine: LLMEngine) -> list[int]:
    """A list whose only number is the most steps that the last stage has had to make at once."""
    worker: Any = engine.engine_core.core.worker.local  # type: ignore[attr-defined]
    launch, found = worker.launch, [0]

    def noting(plan: Any) -> Any:
        pending = launch(plan)
        found[0] = max(found[0], len(worker._due))
        return pending

    worker.launch = noting
    return found


# ---------------------------------------------------------------------- tokens


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_give_the_tokens_of_generate_and_each_has_a_step_to_make(model: Path, stages: int) -> None:
    with engine_of(model, stages=stages, num_gpu_blocks_override=20, **SETTINGS) as engine:
        most = most_in_flight(engine)
        exact(engine, model)
        stats = engine.engine_core.core.stats()  # type: ignore[attr-defined]
        assert stats.num_preemptions > 0
        assert stats.prefix_hits > 0
        assert most == [stages]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "mixtral", "qwen3_next", "nemotron_h", "deepseek_v3"])
def test_stages_with_layers_of_other_kinds(tmp_path: Path, name: str) -> None:
    """Windows, recurrent states, latents and dense layers in some of the stages only."""
    path = tiny.make(name, tmp_path)
    with engine_of(path, num_gpu_blocks_override=60, **SETTINGS) as engine:
        exact(engine, path)


@pytest.mark.slow
def test_each_stage_may_be_of_several_ranks(tmp_path: Path) -> None:
    path = tiny.make("gemma3", tmp_path)
    with engine_of(path, tensor_parallel_size=2, num_gpu_blocks_override=60, **SETTINGS) as engine:
        exact(engine, path)


@pytest.mark.slow
def test_ranks_of_the_last_stage_are_waited_for_while_it_has_steps_to_make(model: Path, tmp_path: Path) -> None:
    """The other one is in the middle of the step that the first one makes when its result is asked for."""
    adapters = []
    for number in (1, 2):
        folder = make_lora(model, tmp_path / str(number), number, r=4, target_modules=["q_proj"])
        adapters.append(LoRARequest(str(number), number, str(folder)))
    fields: dict[str, Any] = {"max_num_batched_tokens": 1 << 15, "max_num_seqs": 256, "max_model_len": 512}
    lora = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
    with engine_of(model, tensor_parallel_size=2, **fields, **lora) as engine:
        most = most_in_flight(engine)
        # plans that are longer than what a link holds
        long = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        for number in range(256):
            engine.add_request(str(number), {"prompt_token_ids": [number, *range(2, 300)]}, long)
        first = last_tokens(engine)
        assert most == [2]
        engine.add_request("0", {"prompt_token_ids": [0, *range(2, 300)]}, long)
        assert last_tokens(engine)["0"] == first["0"]
        # calls
        add_streams(engine)
        for _ in range(3):
            engine.step()
        engine.start_profile("mine")
        engine.step()
        assert Path(engine.stop_profile()).exists()
        for adapter in adapters:
            engine.add_request(adapter.lora_name + "a", {"prompt_token_ids": PROMPT}, GREEDY, lora_request=adapter)
        assert all(last_tokens(engine).values())


@pytest.mark.slow
def test_a_stage_may_be_on_another_machine(model: Path, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    machine = cluster.add_machine()
    try:
        with cluster.engine(model, tensor_parallel_size=1, pipeline_parallel_size=2, **SETTINGS) as engine:
            assert len(cluster.hosts_of_ranks()) == 1
            exact(engine, model)
    finally:
        machine.kill()
        machine.wait()


@pytest.mark.slow
@pytest.mark.parametrize("guesses", [False, True])
def test_requests_of_every_kind_are_as_with_one_rank(
    model: Path,
    of_one: dict[str, tuple[Any, ...]],  # noqa: F811
    guesses: bool,
) -> None:
    more: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}} if guesses else {}
    with engine_of(model, max_model_len=256, max_logprobs=-1, **more) as engine:
        same(outcomes(engine), of_one)


@pytest.mark.slow
def test_each_stage_reads_its_own_part_of_an_adapter(model: Path, tmp_path: Path) -> None:
    folder = make_lora(model, tmp_path / "lora", 1, r=4, target_modules=["q_proj", "o_proj", "down_proj"])
    expected = [generate(model, None, PROMPT, LENGTH), generate(model, folder, PROMPT, LENGTH)]
    assert expected[0] != expected[1]
    with engine_of(model, enable_lora=True, max_model_len=128) as engine:
        assert [tokens_of(engine)[0], tokens_of(engine, lora_request=LoRARequest("a", 1, str(folder)))[0]] == expected


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("way", ["int8", "awq", "experts", "embeddings"])
def test_quantized_weights_and_prompts_that_are_embeddings(model: Path, tmp_path: Path, way: str) -> None:
    path = model
    if way == "awq":
        path = make_awq(tmp_path)[0]
    elif way == "experts":
        path = make_awq(tmp_path, "qwen3_moe", ["gate.weight"], {"moe_intermediate_size": 64})[0]
    fields: dict[str, Any] = {"quantization": "int8"} if way == "int8" else {"dtype": "float32"}
    prompts: list[Any] = [{"prompt_token_ids": PROMPT[number:]} for number in range(4)]
    if way == "embeddings":
        fields |= {"enable_prompt_embeds": True, "max_num_batched_tokens": 16}
        prompts += [{"prompt_embeds": torch.randn(length, 64)} for length in (5, 40, 20)]
    found = []
    for stages in (1, 2):
        with engine_of(path, stages=stages, max_model_len=128, skip_tokenizer_init=True, **fields) as engine:
            for number, prompt in enumerate(prompts):
                engine.add_request(str(number), prompt, GREEDY)
            outputs = plain.collect(engine)
            found.append([list(outputs[str(number)][-1].outputs[0].token_ids) for number in range(len(prompts))])
    assert found[0] == found[1]
    assert all(len(tokens) == LENGTH for tokens in found[0])


def test_what_a_request_named_is_dropped_after_its_last_step(model: Path) -> None:
    """The request is aborted when the first stage has begun its first step, and the last one has not."""
    params = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="a+"))
    with engine_of(model, max_model_len=128, max_num_seqs=4) as engine:
        worker: Any = engine.engine_core.core.worker.local  # type: ignore[attr-defined]
        engine.add_request("long", {"prompt_token_ids": PROMPT}, GREEDY)
        aborted_in_time = 0
        for number in range(4):
            engine.add_request(str(number), {"prompt_token_ids": PROMPT}, params)
            deadline = time.monotonic() + GUARD
            while time.monotonic() < deadline:
                due = [one for plan in worker._due for one in getattr(plan, "admitted", []) if one.grammar]
                if due:
                    aborted_in_time += 1
                    break
                engine.step()
            engine.abort_request(str(number))
        assert aborted_in_time == 4
        plain.collect(engine)
        assert not worker._registry.matchers


# ---------------------------------------------------------------------- what is not a step


@pytest.mark.slow
@pytest.mark.parametrize("own_process", [False, True], ids=["in-process", "own process"])
def test_calls_reach_each_stage(
    model: Path,
    extension: str,  # noqa: F811
    own_process: bool,
    tmp_path: Path,
) -> None:
    other = tiny.make("llama", tmp_path / "other", seed=3, num_hidden_layers=LAYERS)
    with engine_of(model, own_process, worker_extension_cls=extension, max_model_len=128) as engine:
        before = tokens_of(engine)
        places = engine.collective_rpc("place")
        assert [place[:2] for place in places] == [[0, 1], [1, 0]], (
            "the first process, with the first GPU, has the last stage"
        )
        if not own_process:
            assert places[1][2] == psutil.Process().pid, "the last stage is where tokens are chosen"
        with pytest.raises((MainspringError, AttributeError), match="no attribute `o_proj`"):
            engine.collective_rpc("shape", args=["model.layers.0.self_attn.o_proj.weight"])
        engine.collective_rpc("save_sharded_state", args=[str(tmp_path / "saved")])
        held = [set(load_file(tmp_path / "saved" / f"model-rank-{rank}-part-0.safetensors")) for rank in (0, 1)]
        assert held[0] & held[1] == {"model.norm.weight"}
        assert held[0] | held[1] == set(load_file(model / "model.safetensors"))
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up()
            assert tokens_of(engine) == before
        engine.update_weights(load_file(other / "model.safetensors").items())
        with plain.make_engine(other, skip_tokenizer_init=True, max_model_len=128) as alone:
            assert tokens_of(engine) == tokens_of(alone) != before


@pytest.mark.slow
def test_steps_under_way_are_made_with_the_weights_before_an_update(model: Path, tmp_path: Path) -> None:
    other = tiny.make("llama", tmp_path / "other", seed=3, num_hidden_layers=LAYERS)
    prompts = [[2 + (7 * one + place) % 300 for place in range(9)] for one in range(6)]
    fields: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}
    found: dict[int, list[int]] = {}

    def step() -> None:
        found.update({int(output.request_id): list(output.outputs[0].token_ids) for output in engine.step()})

    with engine_of(model, **fields) as engine:
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, GREEDY)
        while len(found) < len(prompts):
            step()
        for args, arrays in weight_messages(load_file(other / "model.safetensors").items(), ""):
            engine.engine_core.call("update_weights", *args, arrays=arrays)
            if not args[-1]:  # the last message lets the next step have the new weights
                step()
        before = [found[number] for number in range(len(prompts))]
        while engine.has_unfinished_requests():
            step()
    with plain.make_engine(model, **fields) as alone:
        assert [row[: len(part)] for row, part in zip(tokens_of(alone, prompts), before, strict=True)] == before
    with plain.make_engine(other, **fields) as alone:
        rest = tokens_of(alone, [prompt + part for prompt, part in zip(prompts, before, strict=True)])
    for number, part in enumerate(before):
        assert found[number] == [*part, *rest[number]][:LENGTH]


# ---------------------------------------------------------------------- deaths


# The last stage, number 1, is the core's own process, whose death by a signal is that of rank 0 in test_ranks.py.
@pytest.mark.slow
@pytest.mark.parametrize(("how", "stage"), [("SIGKILL", 0), ("SIGSTOP", 0), ("exception", 0), ("exception", 1)])
def test_after_the_death_of_any_stage_every_stream_goes_on(
    model: Path,
    extension: str,  # noqa: F811
    how: str,
    stage: int,
) -> None:
    settings = {**DEATHS, "worker_extension_cls": extension, "watchdog_timeout": 2.0}
    with plain.make_engine(model, **DEATHS) as engine:
        add_streams(engine)
        expected = last_tokens(engine)
    with engine_of(model, own_process=True, **settings) as engine:
        supervisor: Any = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        core = psutil.Process(supervisor.core_pid)
        [first] = ranks_of(core.pid)
        group = [first, core]
        add_streams(engine)
        seen = plain.tokens_through(engine, lambda: kill(group[stage], how, engine, stage))
        assert seen == expected
        assert supervisor.launch.restarts == 1
        if stage == 0 and how == "SIGKILL":
            assert f"rank 0 ended by signal {signal.Signals.SIGKILL.name}" in supervisor.launch.last_crash
        until(lambda: not any(process.is_running() for process in group))
        group = [psutil.Process(supervisor.core_pid), *ranks_of(supervisor.core_pid)]
    until(lambda: not any(process.is_running() for process in group))


@pytest.mark.slow
def test_in_the_users_process_the_death_of_a_stage_ends_the_engine(model: Path) -> None:
    with engine_of(model, max_model_len=128) as engine:
        tokens_of(engine)
        [first] = ranks_of(psutil.Process().pid)
        first.kill()
        engine.add_request("r", {"prompt_token_ids": PROMPT}, GREEDY)
        with pytest.raises(EngineDeadError, match="rank 0 ended"):
            plain.collect(engine)


# ---------------------------------------------------------------------- starts that fail


def test_what_stages_do_not_support_is_refused(model: Path) -> None:
    with pytest.raises(NotSupportedError, match="does not go with cpu_offload_gb"):
        engine_of(model, cpu_offload_gb=1.0)
    with pytest.raises(InvalidArgumentError, match="at most 16"):
        engine_of(model, stages=17)
    with pytest.raises(UnsupportedModelError, match="has 4 layers, and pipeline_parallel_size is 5"):
        engine_of(model, stages=5)
