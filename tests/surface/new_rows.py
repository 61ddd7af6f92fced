"""Rows of the newest features: adapters, sleep, pauses, calls into the worker, speculation, offloading, traces, the
older constructor.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import numpy as np
import pytest

import mainspring
from mainspring import EngineArgs, InvalidRequestError, LLMEngine, NotSupportedError, SamplingParams
from mainspring.ipc.messages import Adapter

from . import checkpoints
from .async_rows import text
from .engine_rows import RABBIT, STARTS
from .harness import BASE, CONNECTED, IN, NOT_INSIDE, OWN, Place, row

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


@row("LLMEngine.get_vllm_config")
def vllm_config(at: Place) -> None:
    assert at.engine().get_vllm_config().cache_config.num_gpu_blocks == 300


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


@row("LLMEngine.model_executor", modes=(IN,), why="elsewhere the worker is in another process")
def model_executor(at: Place) -> None:
    assert at.engine().model_executor.facts.model.vocab_size == 1024


@row("AsyncLLMEngine.model_executor")
def model_executor_elsewhere(at: Place) -> None:
    assert "collective_rpc" in refused(lambda: at.aengine().model_executor)


@row("LLMEngine.renderer")
def renderer(at: Place) -> None:
    assert at.engine().renderer.process_inputs("a", STORY, GREEDY).prompt == STORY


@row("AsyncLLMEngine.renderer")
def async_renderer(at: Place) -> None:
    assert at.aengine().renderer.process_inputs("a", STORY, GREEDY).prompt == STORY


@row("LLMEngine.structured_outputs_config", "AsyncLLMEngine.structured_outputs_config", modes=NOT_INSIDE[0],
     why="one test for both engines", says="How structured outputs are made.")  # fmt: skip
def structured_outputs(at: Place) -> None:
    for engine in (at.engine(), at.aengine()):
        assert engine.structured_outputs_config.backend in ("auto", "guidance")


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


@row("LLM.sleep", "LLM.is_sleeping", "LLM.wake_up")
def llm_sleep(at: Place) -> None:
    llm = at.llm()
    llm.sleep(1)
    assert llm.is_sleeping() is True
    llm.wake_up()
    assert llm.is_sleeping() is False


@row("LLM.pause_generation", "LLM.is_paused", "LLM.resume_generation")
def llm_pause(at: Place) -> None:
    llm = at.llm()
    llm.pause_generation()
    assert llm.is_paused() is True
    llm.resume_generation()
    assert llm.is_paused() is False


# ---------------------------------------------------------------------- calls into the worker


def layers(model: Any) -> int:
    return len(list(model.parameters()))


@row("LLMEngine.collective_rpc")
def collective_rpc(at: Place) -> None:
    engine = at.engine(worker_extension_cls="surface.extension.Extension")
    assert engine.collective_rpc("greet", args=("you",)) == ["hello you"]
    if at.inside:
        assert engine.collective_rpc(lambda worker: worker.greet("me")) == ["hello me"]
    else:
        assert "enable_multiprocessing=False" in refused(lambda: engine.collective_rpc(layers))


@row("EngineArgs.worker_extension_cls")
def worker_extension_cls(at: Place) -> None:
    engine = at.engine(worker_extension_cls="surface.extension.Extension")
    assert engine.collective_rpc("greet", kwargs={"name": "you"}) == ["hello you"]


PROCESSED = {"logits_processors": ["surface.extension:Only"]}


@row("EngineArgs.logits_processors")
def logits_processors(at: Place) -> None:
    engine = at.engine(**PROCESSED)
    assert at.ids(engine=engine, extra_args={"token": 88}) == [88] * 8
    assert at.ids(engine=engine) == at.ids()


@row("SamplingParams.extra_args", says="Plain data for the classes of the engine's `logits_processors`.")
def extra_args(at: Place) -> None:
    assert at.ids(engine=at.engine(**PROCESSED), extra_args={"token": 89}) == [89] * 8


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
    before = await text(at, engine)
    await engine.update_weights([("model.norm.weight", np.zeros(256, np.float32))], version="zero")
    assert await text(at, engine) != before


@row("LLM.update_weights")
def llm_update_weights(at: Place) -> None:
    llm = at.fresh(mainspring.LLM, max_model_len=1004)
    before = at.text(engine=llm.llm_engine)
    llm.update_weights([("model.norm.weight", np.zeros(256, np.float32))], version="zero")
    assert at.text(engine=llm.llm_engine) != before


# ---------------------------------------------------------------------- weights of a trainer

BEGINS = ("init_weight_transfer_engine", "start_weight_update", "shutdown_weight_transfer_engine")
ENDS = ("finish_weight_update", "update_weight_version", "get_weight_version")
NORM = {"names": ["model.norm.weight"], "ipc_handles": [np.zeros(256, np.float32)]}


def begins_anew(engine: Any) -> None:
    """Each of the two drops an update that is not finished."""
    engine.shutdown_weight_transfer_engine()
    engine.start_weight_update()
    engine.init_weight_transfer_engine({"init_info": {}})
    engine.start_weight_update()
    engine.shutdown_weight_transfer_engine()
    engine.start_weight_update()
    assert "active already" in refused(engine.start_weight_update, InvalidRequestError)
    engine.shutdown_weight_transfer_engine()


@row(*(f"LLMEngine.{name}" for name in BEGINS))
def begin_weight_update(at: Place) -> None:
    begins_anew(at.engine())


@row(*(f"LLM.{name}" for name in BEGINS))
def llm_begin_weight_update(at: Place) -> None:
    begins_anew(at.llm())


@row(*(f"AsyncLLMEngine.{name}" for name in BEGINS), says="As `LLMEngine`'s.")
async def async_begin_weight_update(at: Place) -> None:
    engine: Any = at.aengine()
    await engine.shutdown_weight_transfer_engine()
    await engine.start_weight_update()
    await engine.init_weight_transfer_engine({"init_info": {}})
    await engine.start_weight_update()
    await engine.shutdown_weight_transfer_engine()
    await engine.start_weight_update()
    with pytest.raises(InvalidRequestError, match="active already"):
        await engine.start_weight_update()
    await engine.shutdown_weight_transfer_engine()


@row(*(f"LLMEngine.{name}" for name in ENDS))
def finish_weight_update(at: Place) -> None:
    engine = at.fresh(max_model_len=1005)
    engine.update_weight_version("before")
    assert engine.get_weight_version() == "before"
    engine.start_weight_update()
    engine.update_weights(NORM)
    engine.finish_weight_update("zero")
    assert engine.get_weight_version() == "zero"
    assert len(set(at.ids(engine=engine, ignore_eos=True))) == 1


@row(*(f"AsyncLLMEngine.{name}" for name in ENDS), says="As `LLMEngine`'s.")
async def async_finish_weight_update(at: Place) -> None:
    engine = at.fresh(mainspring.AsyncLLMEngine, max_model_len=1006)
    await engine.update_weight_version("before")
    assert await engine.get_weight_version() == "before"
    await engine.start_weight_update()
    await engine.update_weights(NORM)
    await engine.finish_weight_update("zero")
    assert await engine.get_weight_version() == "zero"


@row(*(f"LLM.{name}" for name in ENDS))
def llm_finish_weight_update(at: Place) -> None:
    llm = at.fresh(mainspring.LLM, max_model_len=1007)
    llm.update_weight_version("before")
    assert llm.get_weight_version() == "before"
    llm.start_weight_update()
    llm.update_weights(request=NORM)
    llm.finish_weight_update("zero")
    assert llm.get_weight_version() == "zero"


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


# ---------------------------------------------------------------------- adapters


def lora(at: Place, number: int = 1) -> Any:
    return mainspring.LoRARequest(f"a{number}", number, checkpoints.adapter(at, number))  # type: ignore[attr-defined]


NAMED: Any = {"modes": (IN,), "why": "no core takes part"}
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}


def with_lora(at: Place, engine: Any, number: int = 1) -> Any:
    engine.add_request(at.id(), STORY, GREEDY, lora_request=lora(at, number))
    return at.outputs(engine)[-1]


@row("LLMEngine.add_lora", "LLMEngine.list_loras", "LLMEngine.remove_lora", "LLMEngine.pin_lora")
def adapters(at: Place) -> None:
    _adapters(at, at.engine(**ADAPTERS))


@row("LLM.add_lora", "LLM.list_loras", "LLM.remove_lora", "LLM.pin_lora")
def llm_adapters(at: Place) -> None:
    _adapters(at, at.llm(**ADAPTERS))


def _adapters(at: Place, engine: Any) -> None:
    core = getattr(engine, "llm_engine", engine).engine_core
    for number in core.call("list_loras"):  # left by a test that failed
        core.call("remove_lora", number)
    assert engine.add_lora(lora(at)) is True
    assert engine.list_loras() == {1}
    assert engine.pin_lora(1) is True
    for number in (2, 3):
        engine.add_lora(lora(at, number))
    assert 1 in engine.list_loras(), "it is pinned"
    for number in engine.list_loras():
        assert engine.remove_lora(number) is True
    assert engine.list_loras() == set()


@row("LoRARequest.lora_name", "LoRARequest.lora_int_id", "LoRARequest.lora_path",
     says="Its name, its number, and the folder it is in.")  # fmt: skip
def lora_fields(at: Place) -> None:
    engine = at.engine(**ADAPTERS)
    found = with_lora(at, engine, 2)
    assert (found.lora_request.lora_name, found.outputs[0].error) == ("a2", None)
    assert 2 in engine.list_loras()


@row("LoRARequest.message", says="As the core is told of it.", **NAMED)
def lora_message(at: Place) -> None:
    assert lora(at).message == Adapter(1, "a1", checkpoints.adapter(at, 1))


@row("LoRARequest.lora_local_path", says="The older name of `lora_path`.", **NAMED)
def lora_local_path(at: Place) -> None:
    kind: Any = mainspring.LoRARequest
    assert kind("a", 1, lora_local_path="/x").lora_path == "/x"


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


# ---------------------------------------------------------------------- speculation, offloading, traces


@row("EngineArgs.speculative_config")
def speculative_config(at: Place) -> None:
    engine = at.engine(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    prompt = "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4,"
    limits = {"max_tokens": 60, "ignore_eos": True}
    outputs = at.stream(prompt, engine, **limits)
    assert outputs[-1].outputs[0].token_ids == at.ids(prompt, **limits)
    assert len(outputs) < 60, "some steps brought several tokens"


@row("metrics.spec_decode_num_draft_tokens", "metrics.spec_decode_num_accepted_tokens")
def guesses(at: Place) -> None:
    engine = at.engine(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    at.run("1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4,", engine, max_tokens=60, ignore_eos=True)
    drafts, accepted = (at.metric(f"spec_decode_num_{kind}_tokens", engine) for kind in ("draft", "accepted"))
    assert drafts >= accepted > 0


@row("EngineArgs.kv_offloading_size", "EngineArgs.swap_space", "metrics.prefix_cache_host_hits")
def kv_offloading(at: Place) -> None:
    for name in ("kv_offloading_size", "swap_space"):
        engine = at.engine(**{name: 0.05, "num_gpu_blocks_override": 20, "max_model_len": 300})
        prompts = [[300 + 7 * number + step % 50 for step in range(200)] for number in range(4)]
        for prompt in prompts:
            at.run(prompt, engine)
        assert at.run(prompts[0], engine).num_cached_tokens > 100, "the pool has long forgotten it"
        assert engine.get_cache_config().num_cpu_blocks
        assert at.metric("prefix_cache_host_hits", engine) > 0


class Collector(BaseHTTPRequestHandler):
    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@row("EngineArgs.otlp_traces_endpoint")
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


@row("EngineArgs.cpu_offload_gb")
def cpu_offload_gb(at: Place) -> None:
    """On a CPU weights are always in host memory, so the option must be refused or reported."""
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


@row("PromptAdapterRequest.prompt_adapter_name", "PromptAdapterRequest.prompt_adapter_id",
     "PromptAdapterRequest.prompt_adapter_local_path", "PromptAdapterRequest.prompt_adapter_num_virtual_tokens",
     "PromptAdapterRequest.message", says="Its name, number, folder and size; as the core is told of it.")  # fmt: skip
def prompt_adapter_fields(at: Place) -> None:
    engine, made = at.engine(**PROMPT_ADAPTERS), prompt_adapter(at, 2)
    assert made.message == Adapter(2, "p2", checkpoints.prompt_adapter(at, 2, 4), 4)
    engine.add_request(at.id(), STORY, GREEDY, prompt_adapter_request=made)
    assert at.outputs(engine)[-1].outputs[0].error is None


@row("mainspring.DecodingConfig", "mainspring.StructuredOutputsConfig", "mainspring.LoRAConfig",
     "mainspring.SpeculativeConfig", modes=(IN,), why="a name is just a name")  # fmt: skip
def structured_outputs_config_names(at: Place) -> None:
    config = EngineArgs(speculative_config={"method": "ngram"}).create_engine_config()
    assert isinstance(config.lora_config, mainspring.LoRAConfig)
    assert isinstance(config.speculative_config, mainspring.SpeculativeConfig)
    found = at.engine().vllm_config.structured_outputs_config
    assert isinstance(found, mainspring.StructuredOutputsConfig)  # type: ignore[attr-defined]
    assert isinstance(found, mainspring.DecodingConfig)  # type: ignore[attr-defined]
