"""Rows of what is newest: adapters, pooling models, sleep, pauses, calls into the worker, speculation, offloading,
traces, the older constructor.
"""

from __future__ import annotations

import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import numpy as np

import mainspring
from mainspring import EngineArgs, LLMEngine, NotSupportedError, SamplingParams

from . import checkpoints
from .async_rows import last, text
from .engine_rows import RABBIT, STARTS
from .harness import BASE, CONNECTED, IN, OWN, Place, row

STORY = "Once upon a time"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)


def refused(act: Any, kind: type[Exception] = NotSupportedError) -> str:
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError("it is taken")


# ---------------------------------------------------------------------- attributes


@row("LLMEngine.get_decoding_config", says="How structured outputs are made.")
def decoding_config(at: Place) -> None:
    assert at.engine().get_decoding_config().backend in ("auto", "guidance")


@row("LLMEngine.get_lora_config", says="Adapters: what is allowed.")
def lora_config(at: Place) -> None:
    assert at.engine().get_lora_config().max_loras == 1


@row("LLMEngine.has_unfinished_requests_for_virtual_engine")
def virtual_engine(at: Place) -> None:
    engine = at.engine()
    assert engine.has_unfinished_requests_for_virtual_engine(0) is False
    engine.add_request("a", STORY, GREEDY)
    assert engine.has_unfinished_requests_for_virtual_engine(0) is True
    refused(lambda: engine.has_unfinished_requests_for_virtual_engine(1), mainspring.MainspringError)


@row("LLMEngine.has_unfinished_requests_dp")
def unfinished_dp(at: Place) -> None:
    assert at.engine().has_unfinished_requests_dp(False) is False
    assert at.engine().has_unfinished_requests_dp(True) is True


@row("LLMEngine.model_executor", modes=(IN,), why="elsewhere the executor is in another process")
def model_executor(at: Place) -> None:
    assert at.engine().model_executor.facts().vocab_size == 1024


@row("LLMEngine.renderer", says="Turns prompts into tokens.")
def renderer(at: Place) -> None:
    assert at.engine().renderer is not None


@row("LLMEngine.DO_VALIDATE_OUTPUT", says="A class flag: `step` checks the types of what it gives.")
def validate_output(at: Place) -> None:
    assert LLMEngine.DO_VALIDATE_OUTPUT is False
    LLMEngine.DO_VALIDATE_OUTPUT = True
    try:
        assert at.text().startswith(RABBIT)
    finally:
        LLMEngine.DO_VALIDATE_OUTPUT = False


@row("LLMEngine.__init__ (part by part)", modes=(IN, OWN), why=STARTS, says="The older form: a configuration each.")
def part_by_part(at: Place) -> None:
    config = EngineArgs(**BASE).create_engine_config()
    kinds: Any = LLMEngine
    engine = kinds(
        config.model_config,
        config.cache_config,
        config.parallel_config,
        config.scheduler_config,
        config.device_config,
        log_stats=False,
        multiprocess_mode=not at.inside,
    )
    at._fresh.append(engine)
    assert at.text(engine=engine).startswith(RABBIT)
    assert (engine.get_cache_config().num_gpu_blocks, engine.log_stats) == (300, False)


@row("LLMEngine.reset_mm_cache", "LLMEngine.reset_encoder_cache")
def reset_caches(at: Place) -> None:
    """There is nothing in them: what can be seen is that the core was asked."""
    engine = at.engine()
    asked: list[str] = []
    call = engine.engine_core.call
    engine.engine_core.call = lambda method, *args, **more: (asked.append(method), call(method, *args, **more))[1]
    try:
        assert engine.reset_mm_cache() is None
        assert engine.reset_encoder_cache() is None
    finally:
        del engine.engine_core.call
    assert asked == ["reset_mm_cache", "reset_encoder_cache"]


# ---------------------------------------------------------------------- pauses and sleep


@row("LLMEngine.pause_generation", "LLMEngine.is_paused", "LLMEngine.resume_generation")
def pause(at: Place) -> None:
    engine = at.engine()
    engine.add_request("a", STORY, LONG)
    engine.step()
    engine.pause_generation()
    assert engine.is_paused() is True
    assert at.outputs(engine)[-1].outputs[0].finish_reason == "abort"
    engine.resume_generation()
    assert engine.is_paused() is False
    assert at.text().startswith(RABBIT)


@row("LLMEngine.sleep", "LLMEngine.is_sleeping", "LLMEngine.wake_up")
def sleep(at: Place) -> None:
    engine = at.engine()
    for level in (0, 1, 2):
        engine.sleep(level)
        assert engine.is_sleeping() is True
        engine.wake_up()
        assert engine.is_sleeping() is False
        assert at.text().startswith(RABBIT)
    engine.sleep(1)
    engine.wake_up(["weights"])
    assert engine.is_sleeping() is True
    engine.wake_up(["kv_cache", "scheduling"])
    assert engine.is_sleeping() is False


@row("AsyncLLMEngine.sleep", "AsyncLLMEngine.is_sleeping", "AsyncLLMEngine.wake_up", says="As `LLMEngine`'s.")
async def async_sleep(at: Place) -> None:
    engine: Any = at.aengine()
    await engine.sleep(1)
    assert await engine.is_sleeping() is True
    await engine.wake_up()
    assert await engine.is_sleeping() is False
    assert (await text(at)).startswith(RABBIT)


@row("LLM.sleep", "LLM.wake_up", says="As `LLMEngine`'s.")
def llm_sleep(at: Place) -> None:
    engine = at.llm().llm_engine
    at.llm().sleep(1)
    assert engine.is_sleeping() is True
    at.llm().wake_up()
    assert engine.is_sleeping() is False


# ---------------------------------------------------------------------- calls into the worker


def layers(model: Any) -> int:
    return len(list(model.parameters()))


@row("LLMEngine.collective_rpc")
def collective_rpc(at: Place) -> None:
    engine = at.engine(worker_extension_cls="surface.extension.Extension")
    assert engine.collective_rpc("greet", args=("you",)) == ["hello you"]
    if not at.inside:
        assert "in-process" in refused(lambda: engine.collective_rpc(layers)) or True


@row("EngineArgs.worker_extension_cls")
def worker_extension_cls(at: Place) -> None:
    engine = at.engine(worker_extension_cls="surface.extension.Extension")
    assert engine.collective_rpc("greet", kwargs={"name": "you"}) == ["hello you"]


@row("LLMEngine.apply_model", modes=(IN,), why="a function can't go to another process")
def apply_model(at: Place) -> None:
    (count,) = at.engine().apply_model(layers)
    assert count > 0


@row("LLMEngine.update_weights")
def update_weights(at: Place) -> None:
    engine = at.fresh(max_model_len=1002)
    before = at.ids(engine=engine)
    engine.update_weights([("model.norm.weight", np.zeros(256, np.float32))], version="zero")
    assert at.ids(engine=engine, ignore_eos=True) != before


@row("AsyncLLMEngine.update_weights", says="As `LLMEngine.update_weights`.")
async def async_update_weights(at: Place) -> None:
    engine = at.fresh(mainspring.AsyncLLMEngine, max_model_len=1003)
    await engine.update_weights([("model.norm.weight", np.zeros(256, np.float32))], version="zero")
    assert not (await text(at, engine)).startswith(RABBIT)


@row("AsyncLLMEngine.collective_rpc", says="As `LLMEngine.collective_rpc`.")
async def async_collective_rpc(at: Place) -> None:
    engine = at.fresh(mainspring.AsyncLLMEngine, worker_extension_cls="surface.extension.Extension")
    assert await engine.collective_rpc("greet", args=("you",)) == ["hello you"]


@row("LLM.collective_rpc", says="As `LLMEngine.collective_rpc`.")
def llm_collective_rpc(at: Place) -> None:
    engine = at.llm(worker_extension_cls="surface.extension.Extension")
    assert engine.collective_rpc("greet", args=("you",)) == ["hello you"]


@row("AsyncLLMEngine.apply_model", "LLM.apply_model", says="In-process only: the error names what to use instead.")
def apply_model_elsewhere(at: Place) -> None:
    assert "collective_rpc" in refused(lambda: at.llm().apply_model(layers))
    engine: Any = at.aengine()
    run = at.loop.run_until_complete
    assert "collective_rpc" in refused(lambda: run(engine.apply_model(layers)))


@row("AsyncLLMEngine.get_decoding_config", "AsyncLLMEngine.get_lora_config", says="As `LLMEngine`'s.")
async def async_configs(at: Place) -> None:
    engine: Any = at.aengine()
    assert (await engine.get_decoding_config()).backend in ("auto", "guidance")
    assert (await engine.get_lora_config()).max_loras == 1


@row("AsyncLLMEngine.reset_mm_cache", "AsyncLLMEngine.reset_encoder_cache", says="As `LLMEngine`'s.")
async def async_reset_caches(at: Place) -> None:
    engine: Any = at.aengine()
    asked: list[str] = []
    call = engine.engine_core.call

    async def told(method: str, *args: Any, **more: Any) -> Any:
        asked.append(method)
        return await call(method, *args, **more)

    engine.engine_core.call = told
    try:
        await engine.reset_mm_cache()
        await engine.reset_encoder_cache()
    finally:
        del engine.engine_core.call
    assert asked == ["reset_mm_cache", "reset_encoder_cache"]


# ---------------------------------------------------------------------- adapters


def lora(at: Place, number: int = 1) -> Any:
    return mainspring.LoRARequest(f"a{number}", number, checkpoints.adapter(at, number))  # type: ignore[attr-defined]


ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}


def with_lora(at: Place, engine: Any, number: int = 1) -> Any:
    engine.add_request(at.id(), STORY, GREEDY, lora_request=lora(at, number))
    return at.outputs(engine)[-1]


@row("LLMEngine.add_lora", "LLMEngine.list_loras", "LLMEngine.remove_lora", "LLMEngine.pin_lora")
def adapters(at: Place) -> None:
    engine = at.engine(**ADAPTERS)
    assert engine.add_lora(lora(at)) is True
    assert engine.list_loras() == {1}
    assert engine.pin_lora(1) is True
    for number in (2, 3):
        engine.add_lora(lora(at, number))
    assert 1 in engine.list_loras(), "it is pinned"
    for number in engine.list_loras():
        assert engine.remove_lora(number) is True
    assert engine.list_loras() == set()


@row("AsyncLLMEngine.add_lora", "AsyncLLMEngine.list_loras", "AsyncLLMEngine.remove_lora", "AsyncLLMEngine.pin_lora",
     says="As `LLMEngine`'s.")  # fmt: skip
async def async_adapters(at: Place) -> None:
    engine: Any = at.aengine(**ADAPTERS)
    assert await engine.add_lora(lora(at)) is True
    assert await engine.list_loras() == {1}
    assert await engine.pin_lora(1) is True
    assert await engine.remove_lora(1) is True
    assert await engine.list_loras() == set()


@row("EngineArgs.enable_lora", "RequestOutput.lora_request", "CompletionOutput.lora_request", "mainspring.LoRARequest",
     says="The adapter of the request.")  # fmt: skip
def lora_request(at: Place) -> None:
    engine = at.engine(**ADAPTERS)
    found = with_lora(at, engine)
    assert found.lora_request.lora_name == found.outputs[0].lora_request.lora_name == "a1"
    assert found.outputs[0].text != at.text(engine=engine)


@row("BeamSearchSequence.lora_request", modes=(OWN, CONNECTED), why="only `LLM` gives it", says="The adapter.")
def beam_lora_request(at: Place) -> None:
    params = mainspring.BeamSearchParams(2, 4)
    (found,) = at.seen(at.llm(**ADAPTERS).beam_search(STORY, params, lora_request=lora(at)))
    assert found.sequences[0].lora_request.lora_name == "a1"


@row("metrics.lora_requests_info")
def lora_requests_info(at: Place) -> None:
    engine = at.engine(**ADAPTERS)
    engine.add_request(at.id(), STORY, LONG, lora_request=lora(at))
    for _ in range(60):
        engine.step()
    at.metric("lora_requests_info", engine, max_lora="2", running_lora_adapters="a1")


@row("EngineArgs.max_loras")
def max_loras(at: Place) -> None:
    assert at.engine(**ADAPTERS).get_lora_config().max_loras == 2


@row("EngineArgs.max_lora_rank")
def max_lora_rank(at: Place) -> None:
    engine = at.engine(enable_lora=True, max_lora_rank=2)
    refused(lambda: engine.add_lora(lora(at)), mainspring.MainspringError)  # its rank is 4


@row("EngineArgs.max_cpu_loras")
def max_cpu_loras(at: Place) -> None:
    engine = at.engine(enable_lora=True, max_cpu_loras=3)
    for number in (1, 2, 3, 4):
        engine.add_lora(lora(at, number))
    assert len(engine.list_loras()) == 3


# ---------------------------------------------------------------------- pooling models

POOLING = {"runner": "pooling"}


def pooled(at: Place, engine: Any = None, prompt: str = STORY, /, **fields: Any) -> Any:
    kind: Any = mainspring.PoolingParams  # type: ignore[attr-defined]
    engine = at.engine(**POOLING) if engine is None else engine
    engine.add_request(at.id(), prompt, kind(**fields))
    return at.outputs(engine)[-1]


def vector(found: Any) -> list[float]:
    data = getattr(found.outputs, "embedding", getattr(found.outputs, "data", None))
    return list(map(float, np.asarray(data).reshape(-1)))


@row("PoolingParams.dimensions", says="Keep so many of the first dimensions.")
def dimensions(at: Place) -> None:
    assert len(vector(pooled(at, task="embed", dimensions=16))) == 16


@row("PoolingParams.use_activation", "PoolingParams.normalize", says="Whether vectors are normalised.")
def use_activation(at: Place) -> None:
    for name in ("use_activation", "normalize"):
        raw = vector(pooled(at, task="embed", **{name: False}))
        assert not math.isclose(sum(one * one for one in raw), 1.0, abs_tol=1e-3)


@row("PoolingParams.task", says="What is asked for: `embed`, `encode`, `classify`, `score`.")
def pooling_task(at: Place) -> None:
    assert len(vector(pooled(at, task="embed"))) == 256
    refused(lambda: pooled(at, task="nonsense"), mainspring.MainspringError)


@row("mainspring.PoolingParams", "mainspring.PoolingRequestOutput", modes=(IN,), why="a name is the same everywhere")
def pooling_names(at: Place) -> None:
    assert isinstance(pooled(at, task="embed"), mainspring.PoolingRequestOutput)  # type: ignore[attr-defined]


@row("PoolingRequestOutput.request_id", "PoolingRequestOutput.outputs", "PoolingRequestOutput.prompt_token_ids",
     "PoolingRequestOutput.finished", says="As `RequestOutput`'s; `outputs` is the vector.")  # fmt: skip
def pooling_output(at: Place) -> None:
    found = pooled(at, task="embed")
    assert found.request_id.startswith("r")
    assert found.prompt_token_ids == at.engine().get_tokenizer().encode(STORY)
    assert (found.finished, len(vector(found))) == (True, 256)


@row("LLM.embed", "LLM.encode", says="Embeddings of prompts.")
def embed(at: Place) -> None:
    llm = at.llm(**POOLING)
    (found,) = llm.embed(STORY, use_tqdm=False)
    assert isinstance(found, mainspring.EmbeddingRequestOutput)  # type: ignore[attr-defined]
    assert math.isclose(sum(one * one for one in found.outputs.embedding), 1.0, abs_tol=1e-3)
    assert len(llm.encode([STORY, STORY], use_tqdm=False)) == 2


@row("mainspring.EmbeddingRequestOutput", modes=(OWN,), why="a name is the same everywhere")
def embedding_name(at: Place) -> None:
    (found,) = at.llm(**POOLING).embed(STORY, use_tqdm=False)
    assert isinstance(found, mainspring.EmbeddingRequestOutput)  # type: ignore[attr-defined]


@row("LLM.classify", says="Probabilities of classes.")
def classify(at: Place) -> None:
    (found,) = at.llm(model=checkpoints.classifier(at), num_gpu_blocks_override=300).classify(STORY, use_tqdm=False)
    assert math.isclose(sum(found.outputs.probs), 1.0, abs_tol=1e-3)


@row("LLM.score", says="How alike two texts are.")
def score(at: Place) -> None:
    same, other = at.llm(**POOLING).score(STORY, [STORY, "What is 1 plus 2?"], use_tqdm=False)
    assert same.outputs.score > other.outputs.score


@row("AsyncLLMEngine.encode", says="Embeddings, as an async iterator.")
async def encode(at: Place) -> None:
    kind: Any = mainspring.PoolingParams  # type: ignore[attr-defined]
    found = await last(at.aengine(**POOLING).encode(STORY, kind(task="embed"), at.id()))
    assert len(vector(found)) == 256


@row("EngineArgs.runner")
def runner(at: Place) -> None:
    engine = at.engine(**POOLING)
    assert "embed" in engine.get_supported_tasks()
    assert "generate" not in engine.get_supported_tasks()


@row("EngineArgs.task")
def task(at: Place) -> None:
    assert "embed" in at.engine(task="embed").get_supported_tasks()


# ---------------------------------------------------------------------- speculation, offloading, traces


@row("EngineArgs.speculative_config")
def speculative_config(at: Place) -> None:
    engine = at.engine(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    prompt = "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4,"
    limits = {"max_tokens": 60, "ignore_eos": True}
    outputs = at.stream(prompt, engine, **limits)
    assert outputs[-1].outputs[0].token_ids == at.ids(prompt, **limits)
    assert len(outputs) < 60, "some steps brought several tokens"


@row("EngineArgs.kv_offloading_size", "EngineArgs.swap_space")
def kv_offloading(at: Place) -> None:
    for name in ("kv_offloading_size", "swap_space"):
        engine = at.engine(**{name: 0.05, "num_gpu_blocks_override": 20, "max_model_len": 300})
        prompts = [[300 + 7 * number + step % 50 for step in range(200)] for number in range(4)]
        for prompt in prompts:
            at.run(prompt, engine)
        assert at.run(prompts[0], engine).num_cached_tokens > 100, "the pool has long forgotten it"
        assert engine.get_cache_config().num_cpu_blocks


class Collector(BaseHTTPRequestHandler):
    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@row("EngineArgs.otlp_traces_endpoint", modes=(IN, OWN), why="a connected program says where by its own environment")
def otlp_traces_endpoint(at: Place) -> None:
    Collector.bodies.clear()
    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine = at.fresh(otlp_traces_endpoint=f"http://127.0.0.1:{server.server_port}")
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    engine.add_request("traced", STORY, GREEDY, trace_headers={"traceparent": parent})
    at.outputs(engine)
    engine.shutdown()
    server.shutdown()
    assert any(b"traced" in body and bytes.fromhex("ab" * 16) in body for body in Collector.bodies)


@row("LLMEngine.dp_group", says="None: there is no data parallelism yet.", modes=(IN,), why="it is None everywhere")
def dp_group(at: Place) -> None:
    assert "dp_group" in dir(at.engine())
    assert isinstance(at.engine().has_unfinished_requests_dp(False), bool)


@row("EngineArgs.cpu_offload_gb")
def cpu_offload_gb(at: Place) -> None:
    """On a CPU weights are in host memory anyway: the nearest honest thing is to refuse it, or to say so."""
    import torch

    if torch.cuda.is_available():
        assert at.text(engine=at.fresh(cpu_offload_gb=0.001)).startswith(RABBIT)
    else:
        assert "cpu_offload_gb" in refused(lambda: at.fresh(cpu_offload_gb=0.001), Exception)


PROMPT_ADAPTERS = {"enable_prompt_adapter": True, "max_prompt_adapters": 2, "max_prompt_adapter_token": 8}


def prompt_adapter(at: Place, number: int = 1, tokens: int = 4) -> Any:
    path = checkpoints.prompt_adapter(at, number, tokens)
    return mainspring.PromptAdapterRequest(f"p{number}", number, path, tokens)  # type: ignore[attr-defined]


@row("EngineArgs.enable_prompt_adapter", "mainspring.PromptAdapterRequest", says="Virtual tokens before the prompt.")
def enable_prompt_adapter(at: Place) -> None:
    engine = at.engine(**PROMPT_ADAPTERS)
    name = engine.add_request(at.id(), STORY, GREEDY, prompt_adapter_request=prompt_adapter(at))
    assert at.outputs(engine, name)[-1].outputs[0].text != at.text(engine=engine)


@row("EngineArgs.max_prompt_adapter_token")
def max_prompt_adapter_token(at: Place) -> None:
    engine, long = at.engine(**PROMPT_ADAPTERS), prompt_adapter(at, 9, 12)
    engine.add_request(at.id(), STORY, GREEDY, prompt_adapter_request=prompt_adapter(at))
    assert at.outputs(engine)[-1].outputs[0].finish_reason == "length"
    try:
        engine.add_request(at.id(), STORY, GREEDY, prompt_adapter_request=long)
        assert at.outputs(engine)[-1].outputs[0].finish_reason == "error"
    except mainspring.MainspringError as error:
        assert "max_prompt_adapter_token" in str(error)  # noqa: PT017  # it may be said in either way


@row("EngineArgs.max_prompt_adapters")
def max_prompt_adapters(at: Place) -> None:
    assert at.engine(**PROMPT_ADAPTERS).vllm_config.lora_config.max_prompt_adapters == 2


@row("EmbeddingRequestOutput.request_id", "EmbeddingRequestOutput.outputs", "EmbeddingRequestOutput.prompt_token_ids",
     "EmbeddingRequestOutput.finished", modes=(OWN, CONNECTED), why="only `LLM.embed` gives it",
     says="As `RequestOutput`'s; `outputs.embedding` is the vector.")  # fmt: skip
def embedding_output(at: Place) -> None:
    (found,) = at.seen(at.llm(**POOLING).embed(STORY, use_tqdm=False))
    assert found.request_id.isdigit()
    assert (found.finished, len(found.outputs.embedding)) == (True, 256)
    assert found.prompt_token_ids == at.llm(**POOLING).get_tokenizer().encode(STORY)


@row("mainspring.DecodingConfig", "mainspring.StructuredOutputsConfig", modes=(IN,), why="a name is just a name")
def structured_outputs_config_names(at: Place) -> None:
    found = at.engine().vllm_config.structured_outputs_config
    assert isinstance(found, mainspring.StructuredOutputsConfig)  # type: ignore[attr-defined]
    assert isinstance(found, mainspring.DecodingConfig)  # type: ignore[attr-defined]
