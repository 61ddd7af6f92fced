"""Rows of `EngineArgs`.

In-process each field has an engine of its own, which differs from the plain one in nothing else. A start in another
process takes seconds, so there fields that don't get in each other's way share an engine: a bundle.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from daemons import COMMAND
from mainspring import (
    EngineArgs,
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
    LLMEngine,
    MainspringError,
    NotSupportedError,
    OverloadedError,
    SamplingParams,
)
from mainspring.ipc.keys import new_keypair
from mainspring.ipc.transport import free_port

from . import checkpoints
from .engine_rows import RABBIT
from .harness import CONNECTED, IN, NOT_INSIDE, OWN, Place, row

STORY = "Once upon a time"
BUNDLES: dict[str, dict[str, Any]] = {}
ArgTest = Callable[[Place, LLMEngine], None]


def arg(
    name: str, value: Any, bundle: str = "", modes: tuple[str, ...] = (), why: str = "", **more: Any
) -> Callable[[ArgTest], ArgTest]:
    """A test of an engine with this argument and those in `more`. A callable value is called for the value."""

    def register(test: ArgTest) -> ArgTest:
        if bundle:
            BUNDLES.setdefault(bundle, {}).update({name: value, **more})

        def run(at: Place) -> None:
            args = {name: value, **more} if at.inside or not bundle else BUNDLES[bundle]
            if at.default == name and args is BUNDLES.get(bundle):
                args = {}
            test(at, at.engine(**{key: one(at) if callable(one) else one for key, one in args.items()}))

        row(f"EngineArgs.{name}", modes=modes, why=why)(run)
        return test

    return register


def together(at: Place, engine: LLMEngine, *prompts: Any, priorities: tuple[int, ...] = (), **sampling: Any) -> Any:
    """Add these requests together; → the steps of each one's first token and of its end."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **sampling})
    engine.engine_core.call("pause_generation", "keep", False)
    names = [
        engine.add_request(at.id(), prompt, params, priority=priority)
        for prompt, priority in zip(prompts, priorities or [0] * len(prompts), strict=True)
    ]
    engine.engine_core.call("resume_generation")
    firsts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for number in itertools.count():
        if not engine.has_unfinished_requests():
            break
        for one in engine.step():
            firsts.setdefault(one.request_id, number)
            if one.finished:
                ends[one.request_id] = number
    return [firsts[name] for name in names], [ends[name] for name in names]


def tokens(count: int) -> list[int]:
    """A prompt that no earlier request had."""
    start = time.monotonic_ns()
    return [300 + (start // 7**at) % 700 for at in range(count)]


def score(at: Place, engine: LLMEngine | None = None) -> float:
    return at.run(engine=engine, logprobs=0, max_tokens=12).outputs[0].cumulative_logprob


# ---------------------------------------------------------------------- model


@arg("model", checkpoints.random_llama)
def model(at: Place, engine: LLMEngine) -> None:
    assert engine.get_model_config().model == checkpoints.random_llama(at)
    assert max(at.ids(engine=engine)) < 384


@arg("tokenizer", checkpoints.no_decoder)
def tokenizer(at: Place, engine: LLMEngine) -> None:
    plain = at.engine().get_tokenizer()
    assert engine.get_tokenizer().decode(plain.encode("a b")) != plain.decode(plain.encode("a b"))


def _on_connection(at: Place, **options: Any) -> LLMEngine:
    """For a connected engine these are options of the connection."""
    if at.mode != CONNECTED:
        return at.fresh(**options)
    engine = LLMEngine.connect(at.address(), **{k: v for k, v in options.items() if k != at.default})
    at._fresh.append(engine)
    return engine


@row("EngineArgs.tokenizer_mode")
def tokenizer_mode(at: Place) -> None:
    from transformers import AutoTokenizer

    with mock.patch.object(AutoTokenizer, "from_pretrained", wraps=AutoTokenizer.from_pretrained) as asked:
        engine = _on_connection(at, tokenizer_mode="hf")
    assert asked.called
    assert at.text(engine=engine).startswith(RABBIT)


@row("EngineArgs.skip_tokenizer_init")
def skip_tokenizer_init(at: Place) -> None:
    engine = _on_connection(at, skip_tokenizer_init=True)
    found = at.run([1, 742, 740, 266, 525], engine).outputs[0]
    assert (found.text, len(found.token_ids)) == ("", 8)
    assert engine.tokenizer is None


@row("EngineArgs.trust_remote_code")
def trust_remote_code(at: Place) -> None:
    args = {"model": checkpoints.own_code(at), "trust_remote_code": True, "skip_tokenizer_init": True}
    if at.mode == CONNECTED:  # a connection disables them for itself
        engine = LLMEngine.connect(at.address(**args), skip_tokenizer_init=True)
        at._fresh.append(engine)
    else:
        engine = at.fresh(**args)
    assert len(at.ids([5, 6, 7], engine, ignore_eos=True, detokenize=False)) == 8
    assert "OwnForCausalLM" in engine.engine_core.call("explain_model")[0]


HUB = {"model": "us/model", "download_dir": checkpoints.hub}


@arg("revision", "other", **HUB)
def revision(at: Place, engine: LLMEngine) -> None:
    assert max(at.ids(engine=engine, ignore_eos=True)) < 384
    assert not at.text(engine=engine).startswith(RABBIT)


@arg("download_dir", checkpoints.hub, model="us/model", revision="other")
def download_dir(at: Place, engine: LLMEngine) -> None:
    assert engine.vllm_config.load_config.download_dir == checkpoints.hub(at)


@arg("tokenizer_revision", "other", tokenizer="us/model", download_dir=checkpoints.hub)
def tokenizer_revision(at: Place, engine: LLMEngine) -> None:
    assert len(engine.get_tokenizer()) <= 384


@arg("dtype", "float32", "first")
def dtype(at: Place, engine: LLMEngine) -> None:
    assert engine.get_model_config().dtype == "float32"
    assert score(at, engine) != score(at)


@arg("quantization", "int8", "rounded")
def quantization(at: Place, engine: LLMEngine) -> None:
    assert 0 < abs(score(at, engine) - score(at)) < 10


@arg("kv_cache_dtype", "fp8", "rounded")
def kv_cache_dtype(at: Place, engine: LLMEngine) -> None:
    assert 0 < abs(score(at, engine) - score(at)) < 10


@arg("attention_backend", "reference", "reference")
def attention_backend(at: Place, engine: LLMEngine) -> None:
    assert 0 < abs(score(at, engine) - score(at)) < 1


@arg("hf_overrides", {"num_hidden_layers": 2}, "shallow")
def hf_overrides(at: Place, engine: LLMEngine) -> None:
    assert at.text(engine=engine) != at.text()


@arg("config_format", "mistral", model=checkpoints.two_configs)
def config_format(at: Place, engine: LLMEngine) -> None:
    other = at.engine(model=checkpoints.two_configs(at))
    assert at.ids(engine=engine, ignore_eos=True) != at.ids(engine=other, ignore_eos=True)


@arg("load_format", "dummy", "random")
def load_format(at: Place, engine: LLMEngine) -> None:
    assert not at.text(engine=engine).startswith(" there")


@arg("seed", 7, load_format="dummy")
def seed(at: Place, engine: LLMEngine) -> None:
    assert at.ids(engine=engine, ignore_eos=True) != at.ids(engine=at.engine(load_format="dummy"), ignore_eos=True)


@arg("data_parallel_size", 2, modes=NOT_INSIDE[0], why=NOT_INSIDE[1])
def data_parallel_size(at: Place, engine: LLMEngine) -> None:
    names = [at.id() for _ in range(2)]
    for rank, one in enumerate(names):
        engine.add_request(one, STORY, SamplingParams(max_tokens=2), data_parallel_rank=rank)
    at.outputs(engine, *names)
    assert {one.labels["engine"] for one in engine.get_metrics()} == {"0", "1"}


@arg("max_model_len", 64, "first")
def max_model_len(at: Place, engine: LLMEngine) -> None:
    assert engine.get_model_config().max_model_len == 64
    with pytest.raises(InvalidRequestError, match="64"):
        at.run([5] * 65, engine)


@arg("max_logprobs", 3, "first")
def max_logprobs(at: Place, engine: LLMEngine) -> None:
    with pytest.raises((InvalidRequestError, InvalidArgumentError), match="max_logprobs"):
        at.run(engine=engine, logprobs=5)


@arg("generation_config", "none", "second")
def generation_config(at: Place, engine: LLMEngine) -> None:
    assert "do_sample" in at.engine().generation_config
    assert "do_sample" not in engine.generation_config


@arg("override_generation_config", {"temperature": 0.4}, "first")
def override_generation_config(at: Place, engine: LLMEngine) -> None:
    assert engine.generation_config["temperature"] == 0.4


@arg("served_model_name", "spring", "first")
def served_model_name(at: Place, engine: LLMEngine) -> None:
    at.run(engine=engine)
    assert {one.labels["model_name"] for one in engine.get_metrics()} == {"spring"}


@row("EngineArgs.use_tqdm_on_load", modes=(IN,), why="the bar is on the core's terminal")
def use_tqdm_on_load(at: Place) -> None:
    from transformers.utils import logging

    for wanted in (True, False):
        with mock.patch.object(logging, "set_tqdm_hook", wraps=logging.set_tqdm_hook) as told:
            at.fresh(use_tqdm_on_load=wanted)
        makes_bars = told.call_args_list[0].args[0]
        assert makes_bars(lambda **how: how["disable"], (), {}) is (None if wanted else True)


# ---------------------------------------------------------------------- cache


@arg("block_size", 32, "second")
def block_size(at: Place, engine: LLMEngine) -> None:
    prompt = tokens(60)
    at.run(prompt, engine)
    assert at.run(prompt, engine).num_cached_tokens == 32


@arg("kv_cache_memory_bytes", 4 << 20, num_gpu_blocks_override=None)
def kv_cache_memory_bytes(at: Place, engine: LLMEngine) -> None:
    assert engine.get_cache_config().num_gpu_blocks == 128, "of 4 layers, 2 heads of 64, 16 tokens"


@arg("num_gpu_blocks_override", 123, "first")
def num_gpu_blocks_override(at: Place, engine: LLMEngine) -> None:
    assert engine.get_cache_config().num_gpu_blocks == 123


@arg("enable_prefix_caching", False, "budget")
def enable_prefix_caching(at: Place, engine: LLMEngine) -> None:
    prompt = tokens(60)
    at.run(prompt, engine)
    assert at.run(prompt, engine).num_cached_tokens == 0


# ---------------------------------------------------------------------- scheduler


@arg("max_num_batched_tokens", 16, "budget")
def max_num_batched_tokens(at: Place, engine: LLMEngine) -> None:
    (first, second), _ = together(at, engine, tokens(60), tokens(60))
    assert first < second


@arg("max_num_seqs", 1, "one by one")
def max_num_seqs(at: Place, engine: LLMEngine) -> None:
    (_, second), (end, _) = together(at, engine, tokens(10), tokens(10), max_tokens=30)
    assert second >= end


@arg("scheduling_policy", "priority", "one by one", max_num_seqs=1)
def scheduling_policy(at: Place, engine: LLMEngine) -> None:
    (low, high), _ = together(at, engine, tokens(10), tokens(10), priorities=(5, 1), max_tokens=30)
    assert high < low


@arg("enable_chunked_prefill", False, "unchunked", max_num_batched_tokens=64, max_model_len=64)
def enable_chunked_prefill(at: Place, engine: LLMEngine) -> None:
    short = [[5 + at_short] * 5 for at_short in range(5)]
    (*_, long), (end, *_) = together(at, engine, *short, tokens(60), max_tokens=4)
    assert long >= end, "beside five others it does not fit into 64"


@arg("long_prefill_token_threshold", 8, "threshold")
def long_prefill_token_threshold(at: Place, engine: LLMEngine) -> None:
    (long, short), _ = together(at, engine, tokens(60), tokens(6), max_tokens=20)
    assert short < long


@arg("stream_interval", 4, "second")
def stream_interval(at: Place, engine: LLMEngine) -> None:
    assert [len(one.outputs[0].token_ids) for one in at.stream(engine=engine)] == [1, 5, 8]


def _refused(at: Place, engine: LLMEngine, count: int, max_tokens: int) -> str:
    for _ in range(count):
        engine.add_request(at.id(), STORY, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    errors = [one.outputs[0].error for one in at.outputs(engine) if one.outputs[0].error is not None]
    assert all(isinstance(one, OverloadedError) for one in errors)
    return " ".join(map(str, errors))


@arg("max_num_queued_requests", 1, "queue", max_num_seqs=1)
def max_num_queued_requests(at: Place, engine: LLMEngine) -> None:
    assert "max_num_queued_requests" in _refused(at, engine, 6, 40)


@arg("max_requests_in_flight", 3, "core's")
def max_requests_in_flight(at: Place, engine: LLMEngine) -> None:
    assert "max_requests_in_flight" in _refused(at, engine, 6, 40)


@arg("max_tokens_in_flight", 500, "core's")
def max_tokens_in_flight(at: Place, engine: LLMEngine) -> None:
    assert "max_tokens_in_flight" in _refused(at, engine, 2, 300)


@arg("max_requests_per_frontend", 3, "frontend's")
def max_requests_per_frontend(at: Place, engine: LLMEngine) -> None:
    assert "max_requests_per_frontend" in _refused(at, engine, 6, 40)


@arg("max_tokens_per_frontend", 500, "frontend's")
def max_tokens_per_frontend(at: Place, engine: LLMEngine) -> None:
    assert "max_tokens_per_frontend" in _refused(at, engine, 2, 300)


@arg("async_scheduling", True, "second")
def async_scheduling(at: Place, engine: LLMEngine) -> None:
    assert engine.get_scheduler_config().async_scheduling is True
    assert at.ids(engine=engine) == at.ids()


# ---------------------------------------------------------------------- service

CRASHES = "a core in this process ends with it"


@arg("tensor_parallel_size", 2, "ranks", distributed_executor_backend="uni")
def tensor_parallel_size(at: Place, engine: LLMEngine) -> None:
    assert at.text(engine=engine).startswith(RABBIT)
    places = engine.collective_rpc("save_sharded_state", args=[str(at.folder / "ranks")])
    assert places == [None, None]
    assert engine.get_parallel_config().distributed_executor_backend == "mp"


@row(
    "EngineArgs.nnodes",
    "EngineArgs.master_addr",
    "EngineArgs.master_port",
    "EngineArgs.rank_key_file",
)
def ranks_of_other_machines(at: Place) -> None:
    key_file = Path(tempfile.mkdtemp(dir=at.folder), "engine.key")
    new_keypair(key_file)
    port = free_port("127.0.0.2")
    where = {"nnodes": 2, "master_addr": "127.0.0.2", "master_port": port, "rank_key_file": str(key_file)}
    told = EngineArgs(tensor_parallel_size=2, **where).create_engine_config().parallel_config
    assert {name: getattr(told, name) for name in where} == where  # else the engine would wait for ranks for long
    flags = ["--join", f"tcp://127.0.0.2:{port}", "--key-file", str(key_file), "--ranks", "1"]
    machine = subprocess.Popen([*COMMAND, "rank", *flags])
    try:
        engine = at.fresh(tensor_parallel_size=2, **where)
        assert at.text(engine=engine).startswith(RABBIT)
        assert engine.get_parallel_config().num_local_ranks == 1
    finally:
        machine.kill()
        machine.wait()


@row("EngineArgs.distributed_executor_backend", modes=(IN, OWN), why="a daemon does not start then")
def executor_backend(at: Place) -> None:
    with pytest.raises(InvalidArgumentError, match="use torchrun"):
        at.fresh(distributed_executor_backend="external_launcher")


@row("EngineArgs.node_rank")
def node_rank(at: Place) -> None:
    with pytest.raises(NotSupportedError, match="node_rank is 1"):
        EngineArgs(node_rank=1).create_engine_config()


@arg(
    "enable_expert_parallel",
    True,
    modes=(IN,),
    why="the model is loaded in the same way elsewhere",
    tensor_parallel_size=2,
    model=checkpoints.random_experts,
)
def enable_expert_parallel(at: Place, engine: LLMEngine) -> None:
    assert any("whole experts" in line for line in engine.engine_core.call("explain_model"))


@arg("sum_parts", 2, modes=(IN,), why="the model is loaded in the same way elsewhere")
def sum_parts(at: Place, engine: LLMEngine) -> None:
    assert any("one of 1 ranks" in line for line in engine.engine_core.call("explain_model"))
    assert at.text(engine=engine).startswith(RABBIT)


@arg("ordered_sums", False, modes=(IN,), why="the model is loaded in the same way elsewhere", tensor_parallel_size=2)
def ordered_sums(at: Place, engine: LLMEngine) -> None:
    assert any("the library adds" in line for line in engine.engine_core.call("explain_model"))
    assert at.text(engine=engine).startswith(RABBIT)


@arg("pipeline_parallel_size", 2, "stages")
def pipeline_parallel_size(at: Place, engine: LLMEngine) -> None:
    assert at.text(engine=engine).startswith(RABBIT)
    assert engine.collective_rpc("save_sharded_state", args=[str(at.folder / "stages")]) == [None, None]


@row("EngineArgs.max_restarts", modes=(OWN, CONNECTED), why=CRASHES)
def max_restarts(at: Place) -> None:
    engine = at.fresh(max_restarts=0, max_model_len=1000)  # the length, so that no other test's core is killed
    client: Any = engine.engine_core
    daemon = at.daemon(max_restarts=0, max_model_len=1000) if at.mode == CONNECTED else None
    pid = daemon.status()[1]["core_pid"] if daemon else client._connection._core.supervisor.core_pid
    engine.add_request(at.id(), STORY, SamplingParams(max_tokens=900, ignore_eos=True))  # takes longer than the kill
    engine.step()
    os.kill(pid, signal.SIGKILL)
    try:
        at.outputs(engine)
    except EngineDeadError:
        return
    raise AssertionError("it is started again")


@row("EngineArgs.salt_per_frontend", modes=(CONNECTED,), why="elsewhere there is one frontend")
def salt_per_frontend(at: Place) -> None:
    one, other = (at.fresh(salt_per_frontend=True, max_model_len=999) for _ in range(2))
    prompt = tokens(60)
    at.run(prompt, one)
    assert at.run(prompt, one).num_cached_tokens > 0
    assert at.run(prompt, other).num_cached_tokens == 0


# ---------------------------------------------------------------------- device, observability


@arg("enable_return_routed_experts", True, model=checkpoints.random_experts)
def enable_return_routed_experts(at: Place, engine: LLMEngine) -> None:
    experts = at.run([3, 4, 5], max_tokens=4, engine=engine).outputs[0].routed_experts
    assert experts.max() < 4
    assert all(one != other for one, other in experts.reshape(-1, 2).tolist())


@row("EngineArgs.device", modes=(IN, OWN), why="a daemon that can't start tells its log")
def device(at: Place) -> None:
    import torch

    wrong = "cpu" if torch.cuda.is_available() else "cuda"
    try:
        engine = at.fresh(device=wrong)
    except MainspringError as error:
        if "device is 'cuda'" not in str(error):
            raise
        return
    explained = engine.engine_core.call("explain_model")
    assert wrong in explained[0], "on a machine with a GPU: it is not used"


@arg("disable_log_stats", True, "second")
def disable_log_stats(at: Place, engine: LLMEngine) -> None:
    with pytest.raises(InvalidArgumentError, match="disable_log_stats"):
        engine.get_metrics()


@row("EngineArgs.metrics_port")
def metrics_port(at: Place) -> None:
    engine = at.engine(metrics_port=0)
    at.run(engine=engine)
    port = engine.metrics_port
    if at.mode == CONNECTED:
        (port,) = re.findall(r"metrics at http://127\.0\.0\.1:(\d+)/", at.daemon(metrics_port=0).log)
    deadline = time.monotonic() + 30
    while at.scrape(port)["generation_tokens_total"] < 8:  # a core reports to its daemon at intervals
        assert time.monotonic() < deadline
        time.sleep(0.1)


# ---------------------------------------------------------------------- without an engine

NO_ENGINE = {"modes": (IN,), "why": "no core takes part"}


@row("EngineArgs.structured_outputs_config", **NO_ENGINE)
def structured_outputs_config(at: Place) -> None:
    assert EngineArgs(structured_outputs_config={"backend": "guidance"}).create_engine_config()
    with pytest.raises(InvalidArgumentError, match="structured_outputs_config"):
        EngineArgs(structured_outputs_config={"backend": "another"}).create_engine_config()


@row("EngineArgs.add_cli_args", "EngineArgs.from_cli_args", **NO_ENGINE)
def cli_args(at: Place) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--max-num-seqs=3", "--no-enable-prefix-caching"]))
    assert (args.max_num_seqs, args.enable_prefix_caching, args.block_size) == (3, False, 16)


@row("EngineArgs.create_engine_config", **NO_ENGINE)
def create_engine_config(at: Place) -> None:
    assert EngineArgs(block_size=32).create_engine_config().cache_config.block_size == 32
    with pytest.raises(InvalidArgumentError, match="max_num_seqs is 0"):
        EngineArgs(max_num_seqs=0).create_engine_config()
