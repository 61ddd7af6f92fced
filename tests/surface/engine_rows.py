"""Rows of `LLMEngine`."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import psutil

from mainspring import (
    Device,
    EngineArgs,
    InvalidArgumentError,
    LLMEngine,
    NotPermittedError,
    RequestOutput,
    SamplingParams,
    StatLoggerBase,
)
from mainspring.engine.observe.metrics import Counter, Gauge, Histogram
from mainspring.ipc.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig

from .harness import BASE, CONNECTED, IN, OWN, Place, row

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
RABBIT = " there was a clever rabbit named"
STARTS = "it starts a core; `connect` has a row of its own"
LOCAL = "it has no arguments for a core, only for a connection"


class Listener(StatLoggerBase):
    """Records the statistics it gets."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.recorded = self.logged = self.initialized = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, engine_idx: int = 0) -> None:
        self.recorded += 1

    def log_engine_initialized(self) -> None:
        self.initialized += 1

    def log(self) -> None:
        self.logged += 1


def processes(engine: LLMEngine) -> int:
    return len([one for one in psutil.Process().children(recursive=True) if "mainspring.core" in one.cmdline()])


@row("LLMEngine.add_request", "LLMEngine.step", "LLMEngine.has_unfinished_requests")
def generates(at: Place) -> None:
    engine = at.engine()
    assert engine.add_request("mine", "Once upon a time", GREEDY) == "mine"
    found = []
    while engine.has_unfinished_requests():
        found += engine.step()
    assert all(isinstance(one, RequestOutput) for one in found)
    assert found[-1].outputs[0].text.startswith(RABBIT)
    assert engine.has_unfinished_requests() is False
    assert engine.step() == []


@row("LLMEngine.add_request (older positional forms)", says="The forms of older generations, told apart by type.")
def older_forms(at: Place) -> None:
    engine = at.engine()
    ids = engine.get_tokenizer().encode("Once upon a time")
    added = [
        engine.add_request("o1", None, GREEDY, ids, 12.5),
        engine.add_request("o2", "Once upon a time", GREEDY, 12.5, None, {}, None, 0),
        engine.add_request("o3", inputs={"prompt_token_ids": ids}, params=GREEDY),
        engine.add_request(4, prompt="Once upon a time", sampling_params=GREEDY, prompt_token_ids=ids),  # type: ignore[arg-type]
        engine.add_request("o5", None, GREEDY, ids, None, None, 3),
    ]
    assert added == ["o1", "o2", "o3", "4", "o5"]
    texts = {one.request_id: one.outputs[0].text for one in at.outputs(engine)}
    assert {*texts} == {*added}
    assert len({*texts.values()}) == 1


@row("LLMEngine.add_request (forms of a prompt)", says="Text, token ids, dicts, embeddings, a prepared request.")
def prompts(at: Place) -> None:
    engine = at.engine()
    ids = engine.get_tokenizer().encode("Once upon a time")
    forms = ["Once upon a time", ids, {"prompt": "Once upon a time"}, {"prompt_token_ids": ids}]
    names = [engine.add_request(at.id(), form, GREEDY) for form in forms]
    prepared = engine.input_processor.process_inputs("own", "Once upon a time", GREEDY)
    names.append(engine.add_request("own", prepared))
    texts = {one.request_id: one.outputs[0].text for one in at.outputs(engine)}
    assert sorted(texts) == sorted(names)
    assert len({*texts.values()}) == 1


@row("LLMEngine.abort_request")
def aborts(at: Place) -> None:
    engine = at.engine()
    for name in ("a", "b", "c"):
        engine.add_request(name, "Once upon a time", LONG)
    engine.abort_request("a")
    engine.abort_request(name for name in ("b", "nobody"))
    ends = {one.request_id: one.outputs[0].finish_reason for one in at.outputs(engine) if one.finished}
    assert ends == {"a": "abort", "b": "abort", "c": "length"}


@row("LLMEngine.get_num_unfinished_requests")
def counts(at: Place) -> None:
    engine = at.engine()
    engine.add_request("a", "Once upon a time", GREEDY)
    engine.add_request("b", "Once upon a time", GREEDY)
    assert engine.get_num_unfinished_requests() == 2
    at.outputs(engine)
    assert engine.get_num_unfinished_requests() == 0


@row("LLMEngine.get_model_config", "LLMEngine.model_config", says="What the model is, as the core filled it in.")
def model_config(at: Place) -> None:
    engine = at.engine()
    for one in (engine.get_model_config(), engine.model_config):
        assert isinstance(one, ModelConfig)
        assert (one.max_model_len, one.dtype) == (4096, "bfloat16")


@row("LLMEngine.get_cache_config", says="The KV cache, with the number of blocks that the core made room for.")
def cache_config(at: Place) -> None:
    one = at.engine().get_cache_config()
    assert isinstance(one, CacheConfig)
    assert (one.num_gpu_blocks, one.block_size) == (300, 16)


@row("LLMEngine.get_scheduler_config", says="How requests share the steps.")
def scheduler_config(at: Place) -> None:
    one = at.engine().get_scheduler_config()
    assert isinstance(one, SchedulerConfig)
    assert one.scheduling_policy == "fcfs"


@row("LLMEngine.get_parallel_config", says="Over how many devices the model is split.")
def parallel_config(at: Place) -> None:
    one = at.engine().get_parallel_config()
    assert isinstance(one, ParallelConfig)
    assert one.tensor_parallel_size == 1


@row("LLMEngine.vllm_config", says="The whole configuration, as the core filled it in.")
def vllm_config(at: Place) -> None:
    engine = at.engine()
    assert isinstance(engine.vllm_config, EngineConfig)
    assert engine.vllm_config.cache_config.num_gpu_blocks == 300


@row("LLMEngine.observability_config", says="What the engine tells about itself.")
def observability_config(at: Place) -> None:
    assert at.engine().observability_config.disable_log_stats is False


@row("LLMEngine.generation_config", says="Defaults for sampling, as the checkpoint has them.")
def generation_config(at: Place) -> None:
    assert at.engine().generation_config["do_sample"] is False


@row("LLMEngine.get_tokenizer", "LLMEngine.tokenizer", says="The tokenizer; None with `skip_tokenizer_init`.")
def tokenizer(at: Place) -> None:
    engine = at.engine()
    for one in (engine.get_tokenizer(), engine.tokenizer):
        assert one.decode(one.encode("Once upon a time"), skip_special_tokens=True).strip() == "Once upon a time"


@row("LLMEngine.input_processor", says="Makes requests of prompts: `process_inputs`.")
def input_processor(at: Place) -> None:
    engine = at.engine()
    made = engine.input_processor.process_inputs("a", "Once upon a time", GREEDY)
    assert made.prompt_token_ids == engine.get_tokenizer().encode("Once upon a time")


@row("LLMEngine.output_processor", says="Holds the requests in flight.")
def output_processor(at: Place) -> None:
    engine = at.engine()
    engine.add_request("held", "Once upon a time", LONG)
    assert "held" in engine.output_processor
    assert len(engine.output_processor) == 1


@row("LLMEngine.engine_core", says="The client of the core.")
def engine_core(at: Place) -> None:
    client = at.engine().engine_core
    assert client.in_process is at.inside
    assert client.call("is_paused") is False


@row("LLMEngine.log_stats", says="Whether statistics are collected.")
def log_stats(at: Place) -> None:
    assert at.engine().log_stats is True


@row("LLMEngine.logger_manager", "LLMEngine.stat_loggers", says="Who is told of statistics, and keeps them.")
def loggers(at: Place) -> None:
    engine = at.engine()
    engine.stat_loggers["mine"] = listener = Listener()
    try:
        at.run()
        assert listener.recorded > 0
        assert engine.logger_manager.stat_loggers["mine"] is listener
    finally:
        (engine.stat_loggers or {}).pop("mine", None)


@row("LLMEngine.do_log_stats", "LLMEngine.do_log_stats_with_interval")
def logs(at: Place) -> None:
    engine = at.engine()
    manager = engine.logger_manager
    manager.stat_loggers["mine"] = listener = Listener()
    try:
        engine.do_log_stats()
        assert listener.logged == 1, "it logs even when idle"
        engine.do_log_stats_with_interval()
        assert listener.logged == 1, "it has just done so"
        manager._logged -= 1000
        engine.do_log_stats_with_interval()
        assert listener.logged == 2
    finally:
        del manager.stat_loggers["mine"]


@row("LLMEngine.get_metrics")
def get_metrics(at: Place) -> None:
    engine = at.engine()
    at.run()
    found = engine.get_metrics()
    assert {Counter, Gauge, Histogram} <= {type(one) for one in found}
    assert at.metric("generation_tokens") >= 8


@row(
    "LLMEngine.metrics_port",
    modes=(IN, OWN),
    why="a daemon serves its own port: see `EngineArgs.metrics_port`",
    says="Where this engine's metrics are served, if anywhere.",
)
def metrics_port(at: Place) -> None:
    engine = at.engine(metrics_port=0)
    at.run(engine=engine)
    assert at.scrape(engine.metrics_port)["generation_tokens_total"] >= 8


@row("LLMEngine.get_supported_tasks")
def tasks(at: Place) -> None:
    assert "generate" in at.engine().get_supported_tasks()


@row("LLMEngine.reset_prefix_cache")
def reset_prefix_cache(at: Place) -> None:
    engine = at.engine()
    prompt = "Once upon a time " * 12
    at.run(prompt)
    assert at.run(prompt).num_cached_tokens > 0
    assert engine.reset_prefix_cache() is True
    assert at.run(prompt).num_cached_tokens == 0
    assert engine.reset_prefix_cache(Device.GPU) is True
    assert at.run(prompt).num_cached_tokens == 0


@row("LLMEngine.start_profile", "LLMEngine.stop_profile")
def profile(at: Place) -> None:
    engine = at.engine()
    try:
        engine.start_profile("surface")
        at.run()
        path = Path(engine.stop_profile())
        assert "traceEvents" in path.read_text()
        assert "surface" in path.name
        path.unlink()
    finally:
        with contextlib.suppress(InvalidArgumentError):
            Path(engine.engine_core.call("stop_profile")).unlink()


@row("LLMEngine.__init__", modes=(IN, OWN), why=STARTS, says="`LLMEngine(vllm_config, …)`: an engine and its core.")
def constructor(at: Place) -> None:
    config = EngineArgs(**BASE).create_engine_config()
    engine = LLMEngine(config, None, True, multiprocess_mode=not at.inside, stat_loggers={"mine": (mine := Listener())})
    at._fresh.append(engine)
    assert at.text(engine=engine).startswith(RABBIT)
    assert (mine.initialized, engine.engine_core.in_process) == (1, at.inside)


@row("LLMEngine.from_engine_args", modes=(IN, OWN), why=STARTS)
def from_engine_args(at: Place) -> None:
    enable = False if at.inside else None
    engine = LLMEngine.from_engine_args(EngineArgs(**BASE), stat_loggers=[Listener], enable_multiprocessing=enable)
    at._fresh.append(engine)
    assert at.text(engine=engine).startswith(RABBIT)
    assert engine.engine_core.in_process is at.inside
    assert engine.stat_loggers["0"].recorded > 0


@row("LLMEngine.from_vllm_config", modes=(OWN,), why="a process of its own is what it promises")
def from_vllm_config(at: Place) -> None:
    engine = LLMEngine.from_vllm_config(EngineArgs(**BASE).create_engine_config(), disable_log_stats=True)
    at._fresh.append(engine)
    assert at.text(engine=engine).startswith(RABBIT)
    assert (engine.engine_core.in_process, engine.log_stats) == (False, False)


@row("LLMEngine.connect", modes=(CONNECTED,), why="it is what connects")
def connect(at: Place) -> None:
    daemon = at.daemon()
    engine = LLMEngine.connect(daemon.address, name="mine", weight=2.0)
    at._fresh.append(engine)
    assert at.text(engine=engine).startswith(RABBIT)
    status = daemon.status()[1]
    assert "mine" in str(status)
    try:
        engine.reset_prefix_cache()
    except NotPermittedError:
        return
    raise AssertionError("a plain connection may change the engine for everyone")


@row("LLMEngine.shutdown", "LLMEngine.__exit__", says="Lets go of the core; one of its own ends. Twice is once.")
def shutdown(at: Place) -> None:
    before = processes(None)  # type: ignore[arg-type]
    engine = at.fresh()
    assert at.text(engine=engine)
    engine.shutdown()
    _is_over(at, engine, before)
    with at.fresh() as engine:
        assert at.text(engine=engine)
    _is_over(at, engine, before)


@row("LLMEngine.__enter__", says="`with` an engine: it is shut down at the end of the block.")
def context(at: Place) -> None:
    with at.fresh() as engine:
        assert isinstance(engine, LLMEngine)


def _is_over(at: Place, engine: LLMEngine, before: int) -> None:
    try:
        engine.add_request("late", "x", GREEDY)
        raise AssertionError("it still takes requests")
    except RuntimeError as error:
        logging.debug("%s in %d", error, os.getpid())
    assert processes(engine) == before
