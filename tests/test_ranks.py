"""A core of two ranks: it gives the tokens of one rank, and dies and starts again as one core."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

import plain
import pooled
import references
import tiny
from daemons import Daemon, short_folder, until
from mainspring import (
    EngineArgs,
    EngineDeadError,
    LLMEngine,
    LoRARequest,
    PoolingParams,
    PromptAdapterRequest,
    SamplingParams,
)
from mainspring.compat.vllm.utils import get_open_port
from mainspring.core.plan.codec import decode
from mainspring.core.plan.control import (
    AdapterFacts,
    Control,
    JoinTrainer,
    ParameterRows,
    SetParameters,
    StartProfile,
)
from mainspring.core.worker import make_worker, ranked_worker, ranks
from mainspring.core.worker.rank_link import Answer, Kind, RankLink, packed
from mainspring.ipc.errors import (
    EngineStartError,
    InvalidArgumentError,
    InvalidRequestError,
    MainspringError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from mainspring.tools.weight_sender import ModuleSource, NCCLTrainerInitInfo, WeightTransferTrainerFactory
from peft_folders import generate, make_lora, make_prompt_adapter
from test_exact import SETTINGS, requests
from test_speculation import jobs, outcome

GUARD = 240.0  # seconds
LENGTH = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
PROMPT = list(range(5, 45))
EXTENSION = """
import os, signal

class Extension:
    def place(self):
        return [self.rank, self.local_rank, os.getpid()]

    def shape(self, name):
        return list(self.apply_model(lambda model: model.get_parameter(name).shape))

    def fail(self, rank):
        if self.rank == rank:
            raise ZeroDivisionError("by design")
        return "done"

    def break_steps(self, rank):
        from mainspring.core.worker.runner import ModelRunner
        def broken(*_):
            raise RuntimeError("broken by design")
        if self.rank == rank:
            ModelRunner.forward = broken

    def break_wake(self):
        from mainspring.core.worker.generation_worker import GenerationWorker
        def broken(*_):
            raise RuntimeError("it does not wake, by design")
        if self.rank:
            GenerationWorker.wake = broken

def double(worker, number):
    return [worker.rank, 2 * number]

if "MAINSPRING_TEST_DIES" in os.environ and "rank" in os.path.basename(__import__("sys").argv[0]):
    if os.environ["MAINSPRING_TEST_DIES"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ImportError("not in this rank")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("extension")
    (folder / "ranks_extension.py").write_text(EXTENSION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(str(folder))
        yield "ranks_extension.Extension"


def engine_of(model: Path | None, own_process: bool = False, **fields: Any) -> LLMEngine:
    args = EngineArgs(None if model is None else str(model), tensor_parallel_size=2, **fields)
    return LLMEngine.from_engine_args(args, enable_multiprocessing=own_process)


def tokens_of(engine: LLMEngine, prompts: list[list[int]] | None = None, **more: Any) -> list[list[int]]:
    for number, prompt in enumerate(prompts or [PROMPT]):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, GREEDY, **more)
    found = plain.collect(engine)
    return [list(found[name][-1].outputs[0].token_ids) for name in sorted(found, key=int)]


def exact(engine: LLMEngine, model: Path) -> None:
    asked = requests(tiny.VOCAB_SIZE)
    for number, (prompt, length) in enumerate(asked):
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    found = plain.collect(engine)
    got = [list(found[str(number)][-1].outputs[0].token_ids) for number in range(len(asked))]
    assert got == references.greedy(model, asked)


def ranks_of(pid: int) -> list[psutil.Process]:
    """The other ranks of the core in process `pid`."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "mainspring.core.rank" in child.cmdline()]


# ---------------------------------------------------------------------- tokens


def test_two_ranks_give_the_tokens_of_generate(model: Path) -> None:
    with engine_of(model, num_gpu_blocks_override=20, **SETTINGS) as engine:
        exact(engine, model)
        stats = engine.engine_core.core.stats()  # type: ignore[attr-defined]
        assert stats.num_preemptions > 0
        assert stats.prefix_hits > 0
        [other] = ranks_of(os.getpid())
        listening = [one for one in other.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        assert {one.laddr.ip for one in listening} <= {"127.0.0.1", "::1"}
    assert not other.is_running()


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_a_core_of_two_ranks_may_be_a_process_of_its_own(model: Path, depth: int) -> None:
    more = {"async_scheduling": True} if depth == 2 else {}
    with engine_of(model, own_process=True, num_gpu_blocks_override=20, **SETTINGS, **more) as engine:
        exact(engine, model)


@pytest.mark.slow
def test_a_daemon_serves_two_ranks(model: Path) -> None:
    flags = ["--model", str(model), "--tensor-parallel-size=2", "--max-model-len=128", "--skip-tokenizer-init"]
    with short_folder() as folder:
        daemon = Daemon(folder, *flags, "--num-gpu-blocks-override=40")
        try:
            daemon.ready_line()
            with LLMEngine.connect(daemon.address) as engine:
                exact(engine, model)
            pid = daemon.status()[1]["core_pid"]
            [other] = ranks_of(pid)
            assert daemon.stop() == 0
        finally:
            daemon.end()
        assert not other.is_running()


@pytest.fixture(scope="module")
def of_one(model: Path) -> dict[str, tuple[Any, ...]]:
    """What one rank gives for requests of all kinds: penalties, grammars, functions, log probabilities."""
    with plain.make_engine(model) as engine:
        return outcomes(engine)


def outcomes(engine: LLMEngine) -> dict[str, tuple[Any, ...]]:
    for name, (prompt, params) in jobs().items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    return {name: outcome(outputs[-1]) for name, outputs in plain.collect(engine).items()}


def same(found: dict[str, tuple[Any, ...]], expected: dict[str, tuple[Any, ...]]) -> None:
    """Sums of two ranks have other last bits, so log probabilities are compared with a tolerance."""
    assert found.keys() == expected.keys()
    for name, (*rest, logprobs, prompt_logprobs) in found.items():
        assert rest == list(expected[name][:-2]), name
        for ours, theirs in ((logprobs, expected[name][-2]), (prompt_logprobs, expected[name][-1])):
            assert (ours is None) == (theirs is None)
            for one, other in zip(ours or (), theirs or (), strict=True):
                assert (one is None) == (other is None)
                for token, found_here in (one or {}).items():
                    assert other is not None
                    assert found_here.logprob == pytest.approx(other[token].logprob, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["no guesses", "ngram", "draft_model", "async"])
def test_requests_of_every_kind_are_as_with_one_rank(
    model: Path, of_one: dict[str, tuple[Any, ...]], tmp_path: Path, way: str
) -> None:
    fields: dict[str, Any] = {}
    if way == "ngram":
        fields = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    elif way == "draft_model":
        draft = tiny.make("qwen2", tmp_path / "draft", seed=5, num_hidden_layers=1)
        fields = {"speculative_config": {"model": str(draft), "num_speculative_tokens": 3}}
    elif way == "async":
        fields = {"async_scheduling": True}
    with engine_of(model, max_model_len=256, max_logprobs=-1, **fields) as engine:
        same(outcomes(engine), of_one)
        if "speculative_config" in fields:
            assert engine.engine_core.core.stats().draft_tokens > 0  # type: ignore[attr-defined]


@pytest.mark.slow
def test_blocks_come_back_from_the_host_memory_of_both_ranks(model: Path) -> None:
    settings = {**SETTINGS, "max_num_seqs": 2}
    prompts = [[2 + (7 * one + place) % 300 for place in range(64)] for one in range(6)]
    with plain.make_engine(model, **settings) as engine:
        expected = tokens_of(engine, prompts)
    with engine_of(model, kv_offloading_size=0.01, num_gpu_blocks_override=14, **settings) as engine:
        assert tokens_of(engine, prompts) == expected
        assert tokens_of(engine, prompts) == expected
        stats = engine.engine_core.core.stats()  # type: ignore[attr-defined]
        assert stats.host_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "bert"])
def test_a_pooling_model_runs_on_two_ranks(tmp_path: Path, architecture: str) -> None:
    folder = pooled.make(architecture, tmp_path / "model", tokenizer=True)
    asked = [{"prompt_token_ids": prompt} for prompt in pooled.prompts(5, 40, 90)]
    budget = 32 if architecture == "qwen3" else 128  # an encoder's prompts are not cut
    with plain.make_engine(folder, max_num_batched_tokens=budget, max_model_len=128) as engine:
        expected = pooled.vectors(engine, asked, PoolingParams())
    with engine_of(folder, max_num_batched_tokens=budget, max_model_len=128) as engine:
        for found, wanted in zip(pooled.vectors(engine, asked, PoolingParams()), expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
def test_adapters_are_read_by_both_ranks(model: Path, tmp_path: Path) -> None:
    folder = make_lora(model, tmp_path / "lora", 1, r=4, target_modules=["q_proj", "o_proj", "down_proj"])
    expected = [generate(model, None, PROMPT, LENGTH), generate(model, folder, PROMPT, LENGTH)]
    assert expected[0] != expected[1]
    virtual = make_prompt_adapter(model, tmp_path / "virtual", 2, num_virtual_tokens=5)
    with engine_of(model, enable_lora=True, enable_prompt_adapter=True, max_model_len=128) as engine:
        adapted = tokens_of(engine, prompt_adapter_request=PromptAdapterRequest("v", 1, str(virtual), 5))
        assert adapted == [generate(model, virtual, PROMPT, LENGTH)]
        assert [tokens_of(engine)[0], tokens_of(engine, lora_request=LoRARequest("a", 1, str(folder)))[0]] == expected
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).unlink()
        engine.add_request("r", {"prompt_token_ids": PROMPT}, GREEDY, lora_request=LoRARequest("b", 2, str(folder)))
        assert "adapter_config.json" in str(plain.collect(engine)["r"][-1].outputs[0].error)
        assert tokens_of(engine)[0] == expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_weights_that_ranks_wrote_are_read_by_as_many(how: dict[str, int], tmp_path: Path) -> None:
    folder = tiny.make("qwen3_moe", tmp_path / "model", tie_word_embeddings=True)
    saved = tmp_path / "saved"
    fields: dict[str, Any] = {"max_model_len": 128, "skip_tokenizer_init": True, **how}
    with plain.make_engine(folder, **fields) as engine:
        expected = tokens_of(engine)
        engine.engine_core.save_sharded_state(str(saved))
    assert {path.name for path in saved.iterdir()} == {f"model-rank-{n}-part-0.safetensors" for n in range(2)}
    shutil.copy(folder / "config.json", saved)
    fields["load_format"] = "sharded_state"
    with plain.make_engine(saved, **fields) as engine:
        assert tokens_of(engine) == expected
    with pytest.raises(UnsupportedModelError, match="were written by 2 ranks"):
        plain.make_engine(saved, **{**fields, **dict.fromkeys(how, 1)})


@pytest.mark.slow
def test_experts_are_recorded_by_the_first_rank(tmp_path: Path) -> None:
    folder = tiny.make("qwen3_moe", tmp_path / "model")
    fields = {"enable_return_routed_experts": True, "max_model_len": 128, "skip_tokenizer_init": True}
    with plain.make_engine(folder, **fields) as engine:
        engine.add_request("r", {"prompt_token_ids": PROMPT}, GREEDY)
        one = plain.collect(engine)["r"][-1].outputs[0]
    with engine_of(folder, **fields) as engine:
        engine.add_request("r", {"prompt_token_ids": PROMPT}, GREEDY)
        two = plain.collect(engine)["r"][-1].outputs[0]
    assert two.token_ids == one.token_ids
    np.testing.assert_array_equal(two.routed_experts, one.routed_experts)


def test_ranks_on_a_cpu_share_its_threads_unless_the_user_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineArgs(tensor_parallel_size=4, device="cpu").create_engine_config()
    assert config.parallel_config.distributed_executor_backend == "mp"
    asked: list[int] = []
    monkeypatch.setattr(make_worker, "_all_threads", lambda: 10)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    make_worker.device_of(config, 1, 4)
    assert asked == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    make_worker.device_of(config, 1, 4)
    assert asked == [2]


def test_a_record_that_is_the_same_for_all_ranks_is_encoded_once() -> None:
    worker: Any = object.__new__(ranked_worker.RankedWorker)
    worker._receivers = 1
    worker._ranks = SimpleNamespace(ask=lambda kind, body_for: [body_for(rank) for rank in (1, 2, 3)])
    weights = SetParameters([ParameterRows("a", 0, np.zeros((2, 3), np.float32))])
    bodies = worker._tell(weights)
    assert all(body is bodies[0] for body in bodies)
    assert isinstance(decode(bodies[0], Control), SetParameters)
    assert len({*worker._tell(StartProfile("a"))}) == 3
    assert worker._tell(JoinTrainer("a", 1, 1, 2, 1)) == [None] * 3


# ---------------------------------------------------------------------- what is not a step


@pytest.mark.slow
@pytest.mark.parametrize("own_process", [False, True], ids=["in-process", "own process"])
def test_calls_reach_each_rank(
    model: Path, extension: str, own_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAINSPRING_PROFILE_DIR", str(tmp_path / "traces"))
    weights = [load_file(tiny.make("llama", tmp_path / str(seed), seed=seed) / "model.safetensors") for seed in (0, 3)]
    with engine_of(model, own_process, worker_extension_cls=extension, max_model_len=128) as engine:
        before = tokens_of(engine)
        # methods by name, and functions
        places = engine.collective_rpc("place")
        assert [place[:2] for place in places] == [[0, 0], [1, 1]]
        assert len({place[2] for place in places}) == 2
        whole = engine.collective_rpc("shape", args=["model.layers.0.self_attn.o_proj.weight"])
        assert [shape[1] for shape in whole] == [32, 32], "each rank has its half of the columns"
        for rank in (0, 1):
            with pytest.raises((MainspringError, ZeroDivisionError), match="by design"):
                engine.collective_rpc("fail", args=[rank])
        if not own_process:
            from ranks_extension import double  # type: ignore[import-not-found]

            assert engine.collective_rpc(double, args=[21]) == [[0, 42], [1, 42]]
            names = engine.apply_model(lambda module: type(module).__name__)
            assert names == ["LlamaForCausalLM"] * 2
            with pytest.raises(InvalidRequestError, match="each rank is a process of its own"):
                engine.apply_model(lambda module: (number for number in range(3)))
        engine.collective_rpc("save_sharded_state", args=[str(tmp_path / "saved")])
        saved = sorted(path.name for path in (tmp_path / "saved").iterdir())
        assert saved == [f"model-rank-{rank}-part-0.safetensors" for rank in (0, 1)]
        # sleep
        for level in (1, 2):
            engine.sleep(level)
            assert engine.is_sleeping()
            engine.wake_up()
            assert tokens_of(engine) == before
        # weights
        engine.update_weights(weights[1].items())
        with plain.make_engine(tmp_path / "3", skip_tokenizer_init=True, max_model_len=128) as other:
            assert tokens_of(engine) == tokens_of(other) != before
        with pytest.raises(InvalidRequestError, match="has shape"):
            engine.update_weights({"model.norm.weight": np.zeros((3, 5), np.float32)}.items())
        # profiles
        with pytest.raises(InvalidRequestError, match="profile_prefix"):
            engine.start_profile("a/b")
        engine.start_profile("mine")
        tokens_of(engine)
        trace = Path(engine.stop_profile())
        assert trace.name.startswith("mine-")
        assert sorted(path.name.startswith("mine-rank-1-") for path in trace.parent.iterdir()) == [False, True]


def store_head(folder: Path, names: Sequence[str]) -> None:
    """Store tied embeddings under these names."""
    tensors = load_file(folder / "model.safetensors")
    both = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, **{name: both.copy() for name in names}}, folder / "model.safetensors", {"format": "pt"})


HEAD = ["lm_head.weight"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"dtype": "bfloat16"}, None),
        ({"attention_backend": "reference"}, None),
        ({"attention_backend": "reference"}, HEAD),
        ({"attention_backend": "reference"}, [*HEAD, "model.embed_tokens.weight"]),
    ],
)
def test_a_tied_output_layer_changes_with_the_embeddings(
    fields: dict[str, Any], names: list[str] | None, tmp_path: Path
) -> None:
    folders = [tiny.make("llama", tmp_path / str(seed), seed=seed, tie_word_embeddings=True) for seed in (0, 3)]
    if names is not None:
        store_head(folders[0], names)
    fields = {"max_model_len": 128, "skip_tokenizer_init": True, **fields}
    with engine_of(folders[0], **fields) as engine:
        before = tokens_of(engine)
        module = AutoModelForCausalLM.from_pretrained(folders[1])
        engine.update_weights((name, one.detach()) for name, one in module.named_parameters())  # each tensor once
        after = tokens_of(engine)
    with engine_of(folders[1], **fields) as engine:
        assert tokens_of(engine) == after != before


@pytest.mark.slow
def test_ranks_wake_together_or_not_at_all(model: Path, extension: str, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(model, tmp_path / "model")
    with engine_of(checkpoint, worker_extension_cls=extension, max_model_len=128) as engine:
        before = tokens_of(engine)
        engine.sleep(2)
        checkpoint.rename(tmp_path / "elsewhere")
        with pytest.raises(MainspringError, match="model"):
            engine.wake_up()
        assert engine.is_sleeping()
        (tmp_path / "elsewhere").rename(checkpoint)
        engine.wake_up()
        assert tokens_of(engine) == before
        engine.sleep(1)
        engine.collective_rpc("break_wake")
        with pytest.raises(EngineDeadError, match="rank 1 ended by signal SIGKILL"):
            engine.wake_up()


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "fields"), [("llama", {"attention_backend": "reference"}), ("qwen3_moe", {})])
def test_ranks_that_run_layer_by_layer_wake_with_the_weights_they_had(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny.make(architecture, tmp_path / "model")
    with engine_of(folder, max_model_len=128, skip_tokenizer_init=True, **fields) as engine:
        before = tokens_of(engine)
        engine.sleep(2)
        engine.wake_up()
        assert tokens_of(engine) == before


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_a_trainer_may_count_the_ranks_or_the_cores(model: Path, tmp_path: Path, cores: int) -> None:
    other, expected = tiny.make("llama", tmp_path / "other", seed=3), {}
    for folder in (other, model):
        with plain.make_engine(folder, skip_tokenizer_init=True, max_model_len=128) as engine:
            expected[folder] = tokens_of(engine)
    assert expected[other] != expected[model]
    with engine_of(model, cores > 1, data_parallel_size=cores, max_model_len=128) as engine:
        for world_size, folder in ((1 + cores, other), (1 + 2 * cores, model)):
            source = ModuleSource(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
            place = NCCLTrainerInitInfo("127.0.0.1", get_open_port(), world_size=world_size, rank=0)
            WeightTransferTrainerFactory.trainer_init(place, client=engine, source=source).send_weights()
            for core in range(cores):
                found = tokens_of(engine, **({"data_parallel_rank": core} if cores > 1 else {}))
                assert found == expected[folder]


def test_answers_of_ranks_come_together_or_not_at_all() -> None:
    mine, other = Future[Any](), Future[Any]()
    together = ranked_worker._together(mine, {1: other})
    other.set_result(AdapterFacts(b"one"))
    assert not together.done()
    mine.set_result(AdapterFacts(b"other"))
    with pytest.raises(InvalidRequestError, match="has changed"):
        together.result(0)


class Sealed(Exception):
    """Pickle writes it and can't read it, because its constructor wants two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def test_an_answer_that_can_not_be_read_is_an_error_of_its_call_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        seen: Any = object.__new__(ranks.Ranks)
        rank = RankLink(theirs)
        seen._links, seen._lock, seen._closing, seen.rank_of = {1: RankLink(ours)}, threading.Lock(), True, lambda n: n
        seen._asked = asked = {(1, number): Future[Any]() for number in (3, 4)}
        answers = list(asked.values())
        rank.send(Kind.ANSWER, packed(3, Answer(3, "", "", Sealed("a", "b"))))
        rank.send(Kind.ANSWER, packed(4, Answer(4, "", "", "well")))
        rank.end()
        seen._watch()
        with pytest.raises(InvalidRequestError, match="rank 1: what it returns can't be read here: TypeError"):
            answers[0].result(0)
        assert answers[1].result(0) == "well"


# ---------------------------------------------------------------------- deaths


def kill(process: psutil.Process, how: str, engine: LLMEngine, rank: int) -> None:
    if how == "exception":
        engine.collective_rpc("break_steps", args=[rank])
    else:
        process.send_signal(signal.Signals[how])


DEATHS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256}


def add_streams(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=100, ignore_eos=True, detokenize=False)
    for number in range(6):
        prompt = [2 + (7 * number + place) % 300 for place in range(9)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)


def last_tokens(engine: LLMEngine) -> dict[str, list[int]]:
    return {name: list(outputs[-1].outputs[0].token_ids) for name, outputs in plain.collect(engine).items()}


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> dict[str, list[int]]:
    """The tokens of `add_streams` with two ranks of which none dies."""
    with engine_of(model, **DEATHS) as engine:
        add_streams(engine)
        return last_tokens(engine)


# Rank 0 is the core's process, so its deaths by signals of its own, such as SIGSEGV, are those of test_supervisor.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rank"),
    [
        ("SIGKILL", 0),
        ("SIGKILL", 1),
        ("SIGSEGV", 1),
        ("SIGSTOP", 0),
        ("SIGSTOP", 1),
        ("exception", 0),
        ("exception", 1),
    ],
)
def test_after_the_death_of_any_rank_every_stream_goes_on(
    model: Path, extension: str, undisturbed: dict[str, list[int]], how: str, rank: int
) -> None:
    settings = {**DEATHS, "worker_extension_cls": extension, "watchdog_timeout": 2.0}
    with engine_of(model, own_process=True, **settings) as engine:
        supervisor: Any = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        core = psutil.Process(supervisor.core_pid)
        group = [core, *ranks_of(core.pid)]
        add_streams(engine)
        seen = plain.tokens_through(engine, lambda: kill(group[rank], how, engine, rank))
        assert seen == undisturbed
        assert supervisor.launch.restarts == 1
        why = supervisor.launch.last_crash
        if how == "SIGSTOP":
            assert "by hanging (" in why
            assert f"rank {rank} (pid {group[rank].pid}) is stopped" in why  # the other may be a step behind
        elif rank == 1:
            ended = "with exit code 1: RuntimeError: broken by design" if how == "exception" else f"by signal {how}"
            assert f"rank 1 ended {ended}" in why
        until(lambda: not any(process.is_running() for process in group))
        assert len(ranks_of(supervisor.core_pid)) == 1
        group = [psutil.Process(supervisor.core_pid), *ranks_of(supervisor.core_pid)]
    until(lambda: not any(process.is_running() for process in group))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "exception"])
def test_in_the_users_process_the_death_of_a_rank_ends_the_engine(model: Path, extension: str, how: str) -> None:
    with engine_of(model, worker_extension_cls=extension, max_model_len=128) as engine:
        tokens_of(engine)
        [other] = ranks_of(os.getpid())
        kill(other, how, engine, 1)
        with pytest.raises(EngineDeadError, match="rank 1 ended"):
            tokens_of(engine)
        with pytest.raises(EngineDeadError, match="rank 1 ended"):
            engine.collective_rpc("place")
        assert "rank 1 ended" in str(engine.engine_core.error)
        until(lambda: not other.is_running())


@pytest.mark.slow
def test_in_the_users_process_an_error_in_a_step_ends_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(model, max_model_len=128) as engine:
        tokens_of(engine)
        [other] = ranks_of(os.getpid())

        def broken(launched: Any) -> Any:
            raise ZeroDivisionError("by design")

        monkeypatch.setattr(engine.engine_core.core.worker.local.runner, "sample", broken)  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError, match="by design"):
            tokens_of(engine)
        for call in (engine.step, lambda: engine.add_request("1", "Hello", GREEDY)):
            with pytest.raises(EngineDeadError, match=r"rank 0 failed in a step: .*by design"):
                call()
        until(lambda: not other.is_running())


SCRIPT = """
import sys, time
from mainspring import EngineArgs, LLMEngine
args = EngineArgs(sys.argv[1], tensor_parallel_size=2, max_model_len=128, skip_tokenizer_init=True)
engine = LLMEngine.from_engine_args(args, enable_multiprocessing=sys.argv[2] == "own")
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("own_process", [False, True], ids=["in-process", "own process"])
def test_nothing_is_left_of_a_killed_engine_even_if_a_rank_is_stopped(model: Path, own_process: bool) -> None:
    command = [sys.executable, "-P", "-c", SCRIPT, str(model), "own" if own_process else "same"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == b"ready\n"
        group = psutil.Process(script.pid).children(recursive=True)
        [other] = ranks_of(script.pid)
        other.suspend()
        script.kill()
    until(lambda: not any(process.is_running() for process in group))


@pytest.mark.slow
def test_an_engine_that_is_dropped_ends_its_ranks(model: Path) -> None:
    engine = engine_of(model, max_model_len=128)
    [other] = ranks_of(os.getpid())
    del engine
    gc.collect()
    until(lambda: not other.is_running())


@pytest.mark.slow
def test_an_idle_rank_that_is_stopped_is_noticed_too(model: Path) -> None:
    with engine_of(model, own_process=True, max_model_len=128, watchdog_timeout=2.0) as engine:
        supervisor: Any = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        before = tokens_of(engine)
        [other] = ranks_of(supervisor.core_pid)
        other.suspend()
        until(lambda: supervisor.launch.restarts == 1)
        assert f"rank 1 (pid {other.pid}) is stopped" in supervisor.launch.last_crash
        assert tokens_of(engine) == before


# ---------------------------------------------------------------------- starts


WITHOUT_RANKS = """
import sys
from mainspring.core import __main__ as core
from mainspring.core.worker import ranks
from mainspring.ipc.errors import InvalidArgumentError

def started(*_):
    raise InvalidArgumentError(f"torch is imported: {'torch' in sys.modules}")

ranks.Ranks = started
sys.exit(core.main())
"""


@pytest.mark.slow
def test_a_core_process_starts_the_other_ranks_before_it_imports_torch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' -P '{tmp_path}/core.py'\n")
    python.chmod(0o700)
    (tmp_path / "core.py").write_text(WITHOUT_RANKS)
    monkeypatch.setattr("mainspring.ipc.supervisor.sys.executable", str(python))
    with pytest.raises(InvalidArgumentError, match=r"^torch is imported: False"):
        engine_of(model, own_process=True)


@pytest.mark.slow
def test_what_keeps_the_first_rank_from_starting_is_raised_under_its_own_type(model: Path) -> None:
    """Of a core in a process of its own, errors of the first rank are those of a core with one rank."""
    with pytest.raises(OutOfMemoryError, match="max_model_len"):
        engine_of(model, kv_cache_memory_bytes=1024, max_model_len=256)
    with pytest.raises(InvalidArgumentError, match=r"no_such\.Class"):
        engine_of(model, worker_extension_cls="no_such.Class")
    until(lambda: not ranks_of(os.getpid()))


@pytest.mark.slow
@pytest.mark.parametrize("own_process", [False, True], ids=["in-process", "own process"])
def test_what_keeps_a_rank_from_starting_is_raised_under_its_own_type(
    model: Path, extension: str, own_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAINSPRING_TEST_DIES", "raises")
    with pytest.raises(InvalidArgumentError, match=r"rank 1: .*not in this rank"):
        engine_of(model, own_process, worker_extension_cls=extension)
    monkeypatch.setenv("MAINSPRING_TEST_DIES", "killed")
    with pytest.raises(EngineStartError, match="rank 1 ended by signal SIGKILL, while it started"):
        engine_of(model, own_process, worker_extension_cls=extension)
    until(lambda: not ranks_of(os.getpid()))
