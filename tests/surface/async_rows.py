"""Rows of `AsyncLLMEngine`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from mainspring import AsyncEngineArgs, AsyncLLMEngine, EngineDeadError, InvalidArgumentError, SamplingParams
from mainspring.ipc.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig

from .engine_rows import RABBIT, STARTS, Listener
from .harness import BASE, CONNECTED, OWN, Place, row

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
STORY = "Once upon a time"


async def last(stream: AsyncIterator[Any]) -> Any:
    found = [one async for one in stream]
    assert found[-1].finished
    return found[-1]


async def text(at: Place, engine: Any = None) -> str:
    engine = at.aengine() if engine is None else engine
    return (await last(await engine.add_request(at.id(), STORY, GREEDY))).outputs[0].text


@row("AsyncLLMEngine.generate")
async def generate(at: Place) -> None:
    engine = at.aengine()
    names = [at.id() for _ in range(3)]
    found = await asyncio.gather(*(last(engine.generate(STORY, GREEDY, name)) for name in names))
    assert [one.request_id for one in found] == names
    assert all(one.outputs[0].text.startswith(RABBIT) for one in found)
    ids = found[0].prompt_token_ids
    older = await last(engine.generate(None, GREEDY, at.id(), ids, None, 3))
    assert older.outputs[0].text == found[0].outputs[0].text
    async for _ in engine.generate(STORY, LONG, "left"):
        break
    await engine.wait_for_requests_to_drain(60)
    assert "left" not in engine.output_processor


@row("AsyncLLMEngine.add_request")
async def add_request(at: Place) -> None:
    found = await last(await at.aengine().add_request("mine", STORY, GREEDY))
    assert (found.request_id, found.outputs[0].text.startswith(RABBIT)) == ("mine", True)


@row("AsyncLLMEngine.abort")
async def abort(at: Place) -> None:
    engine = at.aengine()
    streams = [await engine.add_request(name, STORY, LONG) for name in ("a", "b")]
    await engine.abort("a")
    await engine.abort(["b", "nobody"])
    for stream in streams:
        assert (await last(stream)).outputs[0].finish_reason == "abort"


@row("AsyncLLMEngine.pause_generation", "AsyncLLMEngine.is_paused", "AsyncLLMEngine.resume_generation")
async def pause(at: Place) -> None:
    engine = at.aengine()
    await engine.pause_generation(mode="keep")
    assert await engine.is_paused() is True
    waiting = asyncio.ensure_future(text(at))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await engine.resume_generation()
    assert await engine.is_paused() is False
    assert (await asyncio.wait_for(waiting, 30)).startswith(RABBIT)


@row("AsyncLLMEngine.wait_for_requests_to_drain")
async def drain(at: Place) -> None:
    engine = at.aengine()
    stream = await engine.add_request(at.id(), STORY, LONG)
    try:
        await engine.wait_for_requests_to_drain(0.01)
    except TimeoutError:
        pass
    else:
        raise AssertionError("it does not wait")
    await engine.abort(stream.request_id)
    await engine.wait_for_requests_to_drain(30)
    assert not len(engine.output_processor)


@row("AsyncLLMEngine.check_health", "AsyncLLMEngine.errored", "AsyncLLMEngine.dead_error", "AsyncLLMEngine.is_running",
     "AsyncLLMEngine.is_stopped", says="Whether the core can serve, and why not.")  # fmt: skip
async def health(at: Place) -> None:
    engine = at.fresh(AsyncLLMEngine)
    assert await text(at, engine)
    assert (engine.errored, engine.dead_error, engine.is_running, engine.is_stopped) == (False, None, True, False)
    assert await engine.check_health() is None
    engine.shutdown()
    assert (engine.errored, engine.is_running) == (True, False)
    assert isinstance(engine.dead_error, EngineDeadError)
    try:
        await engine.check_health()
    except EngineDeadError:
        return
    raise AssertionError("a dead engine is called healthy")


@row("AsyncLLMEngine.get_tokenizer", "AsyncLLMEngine.tokenizer", says="The tokenizer.")
async def tokenizer(at: Place) -> None:
    for one in (await at.aengine().get_tokenizer(), at.aengine().tokenizer):
        assert one.decode(one.encode(STORY), skip_special_tokens=True).strip() == STORY


@row("AsyncLLMEngine.get_num_unfinished_requests", "AsyncLLMEngine.get_num_queued_tokens")
async def in_flight(at: Place) -> None:
    engine = at.aengine()
    stream = await engine.add_request(at.id(), [5, 6, 7], LONG)
    assert (engine.get_num_unfinished_requests(), engine.get_num_queued_tokens()) == (1, 3)
    await anext(stream)
    assert (engine.get_num_unfinished_requests(), engine.get_num_queued_tokens()) == (1, 0)


@row("AsyncLLMEngine.is_tracing_enabled")
async def is_tracing_enabled(at: Place) -> None:
    assert await at.aengine().is_tracing_enabled() is False
    engine = at.fresh(AsyncLLMEngine, otlp_traces_endpoint="http://127.0.0.1:1/traces")
    assert await engine.is_tracing_enabled() is True


@row("AsyncLLMEngine.get_vllm_config")
async def vllm_config(at: Place) -> None:
    assert await at.aengine().get_vllm_config() is at.aengine().vllm_config


@row("AsyncLLMEngine.get_model_config", "AsyncLLMEngine.model_config", says="What the model is, as the core found it.")
async def model_config(at: Place) -> None:
    for one in (await at.aengine().get_model_config(), at.aengine().model_config):
        assert isinstance(one, ModelConfig)
        assert one.max_model_len == 4096


@row("AsyncLLMEngine.get_cache_config", says="The KV cache, with the number of blocks.")
async def cache_config(at: Place) -> None:
    one = await at.aengine().get_cache_config()
    assert isinstance(one, CacheConfig)
    assert one.num_gpu_blocks == 300


@row("AsyncLLMEngine.get_scheduler_config", says="How requests share the steps.")
async def scheduler_config(at: Place) -> None:
    assert isinstance(await at.aengine().get_scheduler_config(), SchedulerConfig)


@row("AsyncLLMEngine.get_parallel_config", says="Over how many devices the model is split.")
async def parallel_config(at: Place) -> None:
    assert isinstance(await at.aengine().get_parallel_config(), ParallelConfig)


@row("AsyncLLMEngine.vllm_config", "AsyncLLMEngine.observability_config", says="The configuration, as the core has it.")
async def config(at: Place) -> None:
    engine = at.aengine()
    assert isinstance(engine.vllm_config, EngineConfig)
    assert engine.observability_config == engine.vllm_config.observability_config


@row("AsyncLLMEngine.generation_config", says="Defaults for sampling, as the checkpoint has them.")
async def generation_config(at: Place) -> None:
    assert at.aengine().generation_config["do_sample"] is False


@row("AsyncLLMEngine.input_processor", says="Makes requests of prompts: `process_inputs`.")
async def input_processor(at: Place) -> None:
    engine = at.aengine()
    prepared = engine.input_processor.process_inputs("own", STORY, GREEDY)
    assert (await last(engine.generate(prepared, None, "other"))).request_id == "own"


@row("AsyncLLMEngine.output_processor", says="Holds the requests in flight.")
async def output_processor(at: Place) -> None:
    engine = at.aengine()
    await engine.add_request("held", STORY, LONG)
    assert "held" in engine.output_processor


@row("AsyncLLMEngine.engine_core", says="The client of the core.")
async def engine_core(at: Place) -> None:
    engine = at.aengine()
    await engine.is_paused()
    assert await engine.engine_core.call("is_paused") is False


@row("AsyncLLMEngine.log_stats", says="Whether statistics are collected.")
async def log_stats(at: Place) -> None:
    assert at.aengine().log_stats is True


@row("AsyncLLMEngine.logger_manager", "AsyncLLMEngine.stat_loggers", says="Who is told of statistics, and keeps them.")
async def loggers(at: Place) -> None:
    engine = at.aengine()
    engine.stat_loggers["mine"] = listener = Listener()
    try:
        assert await text(at)
        assert listener.recorded > 0
        assert engine.logger_manager.stat_loggers["mine"] is listener
    finally:
        (engine.stat_loggers or {}).pop("mine", None)


@row("AsyncLLMEngine.do_log_stats")
async def do_log_stats(at: Place) -> None:
    engine = at.aengine()
    engine.stat_loggers["mine"] = listener = Listener()
    try:
        await engine.do_log_stats()
        assert listener.logged == 1
    finally:
        del engine.stat_loggers["mine"]


@row("AsyncLLMEngine.do_log_stats_with_interval")
async def do_log_stats_with_interval(at: Place) -> None:
    engine = at.aengine()
    engine.stat_loggers["mine"] = listener = Listener()
    try:
        engine.logger_manager._logged -= 1000
        await engine.do_log_stats_with_interval()
        await engine.do_log_stats_with_interval()
        assert listener.logged == 1, "the second came too soon"
    finally:
        del engine.stat_loggers["mine"]


@row("AsyncLLMEngine.get_metrics")
async def get_metrics(at: Place) -> None:
    assert await text(at)
    found = {one.name: one for one in await at.aengine().get_metrics()}
    assert found["mainspring:generation_tokens"].value >= 8


@row("AsyncLLMEngine.metrics_port", modes=(OWN,), why="a daemon serves its own port: see `EngineArgs.metrics_port`",
     says="Where this engine's metrics are served, if anywhere.")  # fmt: skip
async def metrics_port(at: Place) -> None:
    engine = at.fresh(AsyncLLMEngine, metrics_port=0)
    assert await text(at, engine)
    assert at.scrape(engine.metrics_port)["generation_tokens_total"] >= 8


@row("AsyncLLMEngine.get_supported_tasks")
async def tasks(at: Place) -> None:
    assert "generate" in await at.aengine().get_supported_tasks()


@row("AsyncLLMEngine.reset_prefix_cache")
async def reset_prefix_cache(at: Place) -> None:
    engine = at.aengine()

    async def cached() -> int:
        return (await last(engine.generate(STORY * 12, GREEDY, at.id()))).num_cached_tokens

    await cached()
    assert await cached() > 0
    assert await engine.reset_prefix_cache() is True
    assert await cached() == 0


@row("AsyncLLMEngine.start_profile", "AsyncLLMEngine.stop_profile", says="A Chrome trace of what the core does.")
async def profile(at: Place) -> None:
    engine = at.aengine()
    try:
        await engine.start_profile("surface")
        await text(at)
        path = Path(await engine.stop_profile())
        assert "traceEvents" in path.read_text()
        path.unlink()
    finally:
        with contextlib.suppress(InvalidArgumentError):
            Path(await engine.engine_core.call("stop_profile")).unlink()


@row("AsyncLLMEngine.__init__", modes=(OWN,), why=STARTS, says="An engine and its core; older forms work too.")
async def constructor(at: Place) -> None:
    config = AsyncEngineArgs(**BASE).create_engine_config()
    for arguments in ((config,), (False, False, config, None, True)):
        engine = AsyncLLMEngine(*arguments, log_requests=False, start_engine_loop=True)
        at._fresh.append(engine)
        assert (await text(at, engine)).startswith(RABBIT)


@row("AsyncLLMEngine.from_engine_args", modes=(OWN,), why=STARTS)
async def from_engine_args(at: Place) -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**BASE), stat_loggers={"mine": (mine := Listener())})
    at._fresh.append(engine)
    assert (await text(at, engine)).startswith(RABBIT)
    assert mine.recorded > 0


@row("AsyncLLMEngine.from_vllm_config", modes=(OWN,), why=STARTS)
async def from_vllm_config(at: Place) -> None:
    engine = AsyncLLMEngine.from_vllm_config(AsyncEngineArgs(**BASE).create_engine_config(), disable_log_stats=True)
    at._fresh.append(engine)
    assert (await text(at, engine)).startswith(RABBIT)
    assert engine.log_stats is False


@row("AsyncLLMEngine.connect", modes=(CONNECTED,), why="it is what connects")
async def connect(at: Place) -> None:
    engine = AsyncLLMEngine.connect(at.daemon().address, name="mine")
    at._fresh.append(engine)
    assert (await text(at, engine)).startswith(RABBIT)
    assert "mine" in str(at.daemon().status()[1])


@row("AsyncLLMEngine.shutdown", "AsyncLLMEngine.__aexit__", says="Lets go of the core; one of its own ends.")
async def shutdown(at: Place) -> None:
    engine = at.fresh(AsyncLLMEngine)
    assert await text(at, engine)
    engine.shutdown()
    assert engine.errored
    async with at.fresh(AsyncLLMEngine) as other:
        assert await text(at, other)
    assert other.errored


@row("AsyncLLMEngine.__aenter__", says="`async with` an engine: it is shut down at the end of the block.")
async def context(at: Place) -> None:
    async with at.fresh(AsyncLLMEngine) as engine:
        assert isinstance(engine, AsyncLLMEngine)


# ---------------------------------------------------------------------- AsyncEngineArgs


async def _logged(at: Place, **args: Any) -> bool:
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mainspring.engine.async_llm_engine")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**BASE, **args))
        at._fresh.append(engine)
        await text(at, engine)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return any(STORY in line for line in lines)


ITS_OWN = "a connection has no such option: its program logs what it asks"


@row("AsyncEngineArgs.enable_log_requests", modes=(OWN,), why=ITS_OWN, says="Log each request, at level INFO.")
async def enable_log_requests(at: Place) -> None:
    assert await _logged(at, enable_log_requests=True)


@row("AsyncEngineArgs.disable_log_requests", modes=(OWN,), why=ITS_OWN, says="The older name, which wins.")
async def disable_log_requests(at: Place) -> None:
    assert not await _logged(at, enable_log_requests=True, disable_log_requests=True)
