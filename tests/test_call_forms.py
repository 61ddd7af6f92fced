"""Every documented call form of the engines, current and older, keyword and positional, and the request or engine that
it makes. Each form also takes adapters; only their recognition is tested here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mainspring import (
    AsyncLLMEngine,
    CacheConfig,
    DecodingConfig,
    Device,
    DeviceConfig,
    EngineArgs,
    EngineCoreRequest,
    ExplicitEncoderDecoderPrompt,
    LLMEngine,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    PromptAdapterRequest,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
    StatLoggerBase,
    StructuredOutputsConfig,
    UsageContext,
)
from mainspring.engine import llm_engine
from mainspring.ipc.async_client import AsyncClient
from mainspring.ipc.errors import (
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
    MainspringError,
    NotSupportedError,
    UnknownArgumentError,
)
from mainspring.ipc.messages import AddRequest, ModelFacts, Outputs

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
P = SamplingParams(temperature=0.0, max_tokens=8)
IDS = [3, 4]


class Silent:
    """A client of a core that never answers; it records the requests."""

    in_process = False
    error = None

    def __init__(self, config: Any) -> None:
        self.config = config
        self.model = ModelFacts(vocab_size=1024, hidden_size=4, max_model_len=64, dtype="float32", eos_token_ids=[2])
        self.added: list[AddRequest] = []
        self.ranks: list[int | None] = []
        self.aborted: list[int] = []
        self.calls: list[tuple[Any, ...]] = []
        self.closed = False

    def add_request(self, request: AddRequest, tensors: Sequence[Any] = (), rank: int | None = None) -> None:
        self.ranks.append(rank)
        self.added.append(request)

    def abort(self, handles: Sequence[int]) -> None:
        self.aborted += handles

    def get_outputs(self, timeout: float | None = None) -> Outputs | None:
        raise AssertionError("nobody asks for outputs")

    def call(self, *call: Any, timeout: float | None = None) -> Any:
        self.calls.append(call)
        return True

    def close(self) -> None:
        self.closed = True


class SilentAsync(Silent):
    lost: Any = None

    def send_request(self, request: AddRequest, tensors: Sequence[Any] = (), rank: int | None = None) -> None:
        super().add_request(request, tensors, rank)

    def send_abort(self, handles: Sequence[int]) -> None:
        super().abort(handles)

    def deliver_to(self, take: Any, lost: Any) -> None:
        self.lost = lost

    def close(self) -> None:
        super().close()
        if self.lost is not None:
            self.lost(EngineDeadError("the engine was shut down"))
            self.lost = None

    async def call(self, *call: Any, timeout: float | None = None) -> Any:  # type: ignore[override]
        return super().call(*call)


@pytest.fixture(autouse=True)
def no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_engine, "make_client", lambda config, multiprocess: Silent(config))
    monkeypatch.setattr(AsyncClient, "launch", SilentAsync)


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    with LLMEngine.from_engine_args(EngineArgs(scheduling_policy="priority")) as made:
        yield made


def kept(engine: LLMEngine | AsyncLLMEngine, request_id: str) -> dict[str, Any]:
    """The parts of a received request that a call form can express."""
    source = engine.output_processor._requests[request_id].source
    return {
        "prompt": source.prompt,
        "ids": source.prompt_token_ids,
        "arrival": source.arrival_time,
        "priority": source.priority,
        "trace": source.trace_headers,
    }


# arguments after request_id; each form can express all of `kept`, but the oldest has no priority and no trace
Call = tuple[tuple[Any, ...], dict[str, Any]]
ADD: dict[str, Call] = {
    "newest by position": ((IDS, P, 1.5, None, None, HEADERS, 3, "shown"), {}),
    "newest by keyword": ((), {
        "prompt": IDS, "params": P, "arrival_time": 1.5, "lora_request": None, "tokenization_kwargs": None,
        "trace_headers": HEADERS, "priority": 3, "prompt_text": "shown",
    }),
    "newest, half and half": ((IDS, P, 1.5), {"trace_headers": HEADERS, "priority": 3, "prompt_text": "shown"}),
    "newer by position": (("shown", P, 1.5, None, None, HEADERS, None, 3), {"prompt_token_ids": IDS}),
    "middle by position": (("shown", P, 1.5, None, HEADERS, None, 3), {"prompt_token_ids": IDS}),
    "middle by keyword": ((), {
        "prompt": {"prompt_token_ids": IDS, "prompt": "shown"}, "params": P, "arrival_time": 1.5, "lora_request": None,
        "trace_headers": HEADERS, "prompt_adapter_request": None, "priority": 3,
    }),
    "middle, inputs": ((), {
        "inputs": {"prompt_token_ids": IDS, "prompt": "shown"}, "params": P, "arrival_time": 1.5, "priority": 3,
        "trace_headers": HEADERS,
    }),
}  # fmt: skip
OLDEST: dict[str, Call] = {
    "oldest by position": (("shown", P, IDS, 1.5), {}),
    "oldest by position, all": (("shown", P, IDS, 1.5, None, 7), {}),
    "oldest, no text": ((None, P, IDS, 1.5), {"prompt_text": "shown"}),
    "oldest by keyword": ((), {
        "prompt": "shown", "sampling_params": P, "prompt_token_ids": IDS, "arrival_time": 1.5, "lora_request": None,
        "prefix_pos": 7,
    }),
    "oldest, half and half": (("shown", P), {"prompt_token_ids": IDS, "arrival_time": 1.5}),
    "a tuple of ids": (("shown", P, tuple(IDS), 1.5), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*ADD, *OLDEST])
def test_add_request_takes_every_generation(engine: LLMEngine, name: str) -> None:
    positional, keywords = {**ADD, **OLDEST}[name]
    assert engine.add_request("r", *positional, **keywords) == "r"
    newer = name in ADD
    assert kept(engine, "r") == {
        "prompt": "shown", "ids": IDS, "arrival": 1.5, "priority": 3 if newer else 0,
        "trace": HEADERS if newer else None,
    }  # fmt: skip
    (sent,) = engine.engine_core.added  # type: ignore[attr-defined]
    assert (sent.prompt_token_ids, sent.sampling.max_tokens) == (IDS, 8)


@pytest.mark.parametrize("name", [*ADD, *OLDEST])
def test_the_async_engines_add_request_takes_them_too(name: str) -> None:
    async def main() -> None:
        async with AsyncLLMEngine.from_engine_args(EngineArgs()) as engine:  # type: ignore[arg-type]
            positional, keywords = {**ADD, **OLDEST}[name]
            stream = await engine.add_request("r", *positional, **keywords)
            assert kept(engine, "r")["ids"] == IDS
            assert kept(engine, "r")["arrival"] == 1.5
            assert kept(engine, "r")["trace"] == (HEADERS if name in ADD else None)
            await stream.aclose()

    asyncio.run(main())


GENERATE: dict[str, Call] = {
    "newest": ((IDS, P, "r"), {"trace_headers": HEADERS, "priority": 3, "lora_request": None}),
    "newest by keyword": ((), {
        "prompt": IDS, "sampling_params": P, "request_id": "r", "trace_headers": HEADERS, "priority": 3,
        "prompt_text": None, "tokenization_kwargs": None,
    }),
    "newer by position": ((IDS, P, "r", None, HEADERS, 3), {}),
    "middle by position": ((IDS, P, "r", None, HEADERS, None, 3), {}),
    "middle, inputs": ((), {
        "inputs": IDS, "sampling_params": P, "request_id": "r", "trace_headers": HEADERS, "priority": 3,
        "prompt_adapter_request": None,
    }),
}  # fmt: skip
GENERATE_OLDEST: dict[str, Call] = {
    "oldest by position": ((None, P, "r", IDS), {}),
    "oldest by position, all": ((None, P, "r", IDS, None, 7), {}),
    "oldest by keyword": ((), {
        "prompt": None, "sampling_params": P, "request_id": "r", "prompt_token_ids": IDS, "lora_request": None,
        "prefix_pos": 7,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", [*GENERATE, *GENERATE_OLDEST])
def test_generate_takes_every_generation(name: str) -> None:
    async def main() -> None:
        async with AsyncLLMEngine.from_engine_args(EngineArgs()) as engine:  # type: ignore[arg-type]
            positional, keywords = {**GENERATE, **GENERATE_OLDEST}[name]
            stream = engine.generate(*positional, **keywords)
            task = asyncio.ensure_future(anext(stream))
            while "r" not in engine.output_processor:
                assert not task.done(), task.exception()
                await asyncio.sleep(0)
            newer = name in GENERATE
            assert kept(engine, "r") | {"arrival": 0} == {
                "prompt": None, "ids": IDS, "arrival": 0, "priority": 3 if newer else 0,
                "trace": HEADERS if newer else None,
            }  # fmt: skip
            await engine.abort("r")
            assert (await task).outputs[0].finish_reason == "abort"

    asyncio.run(main())


class Adapter:
    """Stands for an adapter's request."""


@pytest.mark.parametrize(
    "call",
    [
        ((IDS, P), {"lora_request": Adapter()}),
        ((IDS, P, 1.5, Adapter()), {}),
        (("x", P, IDS, 1.5, Adapter()), {}),
        ((IDS, P), {"prompt_adapter_request": Adapter()}),
        ((IDS, P, 1.5, None, HEADERS, Adapter(), 3), {}),
        ((IDS, P, 1.5, None, None, HEADERS, PromptAdapterRequest("p", 1, "/p", 4), 3), {}),
        ((IDS, P, 1.5, None, None, HEADERS, PromptAdapterRequest("p", 1, "/p", 4)), {}),
    ],
)
def test_an_adapter_is_recognised_where_each_form_has_it(engine: LLMEngine, call: Call) -> None:
    with pytest.raises(MainspringError, match=r"lora_request|prompt_adapter_request"):
        engine.add_request("r", *call[0], **call[1])
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ((IDS, P), InvalidRequestError("is still running")),
        (((), P), InvalidRequestError("empty")),
        ((None, P), InvalidRequestError("no prompt")),
        (({"prompt": "x", "multi_modal_data": {"image": 1}}, P), NotSupportedError("multi_modal_data")),
        ((ExplicitEncoderDecoderPrompt(encoder_prompt="x", decoder_prompt="y"), P), NotSupportedError("encoder")),
        ((IDS, None), InvalidRequestError("params is None")),
    ],
)
def test_arguments_of_no_call_form_are_refused(
    engine: LLMEngine, call: tuple[Any, ...], error: MainspringError
) -> None:
    engine.add_request("r", IDS, P)
    with pytest.raises(type(error), match=str(error)):
        engine.add_request("r" if "running" in str(error) else "s", *call)
    with pytest.raises(UnknownArgumentError, match="did you mean 'priority'"):
        engine.add_request("s", IDS, P, priorty=1)
    engine.add_request("s", {"prompt_token_ids": IDS, "multi_modal_data": None}, P, data_parallel_rank=None)
    assert engine.get_num_unfinished_requests() == 2


def test_the_rank_of_a_request_goes_to_the_client_also_of_a_prepared_one(engine: LLMEngine) -> None:
    engine.add_request("a", IDS, P, data_parallel_rank=1)
    prepared = engine.input_processor.process_inputs("b", IDS, P, data_parallel_rank=2)
    engine.add_request("b", prepared)
    engine.add_request("c", replace(prepared, request_id="c"), data_parallel_rank=3)
    engine.add_request("d", IDS, P)
    engine.add_request("e", IDS, P, None, None, None, None, 0, 4)  # type: ignore[arg-type]  # as vLLM's AsyncLLM
    assert engine.engine_core.ranks == [1, 2, 3, None, 4]  # type: ignore[attr-defined]


def test_a_prepared_request_takes_the_trace_of_its_call(engine: LLMEngine) -> None:
    prepared = engine.input_processor.process_inputs("r", IDS, P)
    assert isinstance(prepared, EngineCoreRequest)
    engine.add_request("r", prepared, trace_headers=HEADERS)
    assert kept(engine, "r")["trace"] == HEADERS


@pytest.mark.parametrize("given", ["a", ["a"], ("a",), {"a"}, (one for one in ("a", "gone")), ["gone", "a", "a"]])
def test_an_abort_takes_an_id_or_any_iterable(engine: LLMEngine, given: Any) -> None:
    for name in ("a", "b"):
        engine.add_request(name, IDS, P)
    engine.abort_request(given)
    engine.abort_request("nobody", internal=True)
    (output,) = engine.step()
    assert (output.request_id, output.outputs[0].finish_reason) == ("a", "abort")
    assert engine.engine_core.aborted == [1]  # type: ignore[attr-defined]
    engine.add_request(7, IDS, P)  # type: ignore[arg-type]
    engine.abort_request(7)  # type: ignore[arg-type]
    assert [output.request_id for output in engine.step()] == ["7"]


@pytest.mark.parametrize(
    ("positional", "keywords", "asked"),
    [
        ((), {}, (False,)),
        ((True,), {}, (True,)),
        ((True, True), {}, (True,)),
        ((), {"reset_running_requests": True, "reset_connector": False}, (True,)),
        ((Device.GPU,), {}, (False, "gpu")),
        ((Device.CPU,), {}, (False, "cpu")),
        ((None,), {}, (False,)),
    ],
)
def test_reset_prefix_cache_takes_both_forms(
    engine: LLMEngine, positional: tuple[Any, ...], keywords: dict[str, Any], asked: tuple[Any, ...]
) -> None:
    assert engine.reset_prefix_cache(*positional, **keywords) is True
    assert engine.engine_core.calls == [("reset_prefix_cache", *asked)]  # type: ignore[attr-defined]


# ------------------------------------------------------------------ constructors


class Listener(StatLoggerBase):
    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None: ...
    def record(self, *_: Any, **__: Any) -> None: ...
    def log_engine_initialized(self) -> None: ...


def parts() -> dict[str, Any]:
    config = EngineArgs(max_num_seqs=3, block_size=32, enable_prefix_caching=False).create_engine_config()
    names = ("model", "cache", "parallel", "scheduler", "device", "load", "lora", "observability")
    found = {f"{name}_config": getattr(config, f"{name}_config") for name in names}
    return {**found, "decoding_config": config.structured_outputs_config}


FIRST = ("model_config", "cache_config", "parallel_config", "scheduler_config")
CONSTRUCTORS: dict[str, Callable[[dict[str, Any], Listener], Any]] = {
    "first, by position": lambda p, one: LLMEngine(*(p[name] for name in FIRST), None, False),
    "with a device": lambda p, one: LLMEngine(*(p[name] for name in FIRST), p["device_config"], None, None, False),
    "all, by position": lambda p, one: LLMEngine(
        *(p[name] for name in (*FIRST, "device_config", "load_config", "lora_config")), None, p["decoding_config"],
        p["observability_config"], None, None, False, UsageContext.ENGINE_CONTEXT, {"one": one}, object(), True,
    ),
    "all, by keyword": lambda p, one: LLMEngine(
        **p, speculative_config=None, prompt_adapter_config=None, executor_class=None, log_stats=False,
        usage_context=UsageContext.API_SERVER, stat_loggers={"one": one}, input_registry=object(),
        mm_registry=object(), use_cached_outputs=True,
    ),
    "half and half": lambda p, one: LLMEngine(p.pop("model_config"), **p, log_stats=False),
    "async, by position": lambda p, one: AsyncLLMEngine(False, False, *(p[name] for name in FIRST), None, False),
    "async, by keyword": lambda p, one: AsyncLLMEngine(
        worker_use_ray=False, engine_use_ray=False, **p, log_stats=False, log_requests=True, max_log_len=None,
        start_engine_loop=True, stat_loggers={"one": one},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_older_constructors_take_the_configuration_part_by_part(name: str) -> None:
    engine = CONSTRUCTORS[name](parts(), Listener())
    config = engine.vllm_config
    assert config.scheduler_config.max_num_seqs == 3
    assert (config.cache_config.block_size, config.cache_config.enable_prefix_caching) == (32, False)
    assert config.structured_outputs_config == StructuredOutputsConfig()
    assert engine.log_stats is False
    engine.shutdown()


def test_newest_constructors_by_position_and_keyword() -> None:
    config, one = EngineArgs(max_num_seqs=3).create_engine_config(), Listener()
    context = UsageContext.ENGINE_CONTEXT
    for engine in (
        LLMEngine(config, None, True, True, context, {"one": one}, None, True, False),
        LLMEngine(vllm_config=config, log_stats=True, stat_loggers=[lambda *_: one], multiprocess_mode=False),
        LLMEngine.from_vllm_config(config, context, {"one": one}, False),
        LLMEngine.from_engine_args(EngineArgs(max_num_seqs=3), context, {"one": one}, None),
        AsyncLLMEngine(config, None, True, context, None, False, stat_loggers={"one": one}),
        AsyncLLMEngine.from_vllm_config(config, True, context, {"one": one}, False, False),
        AsyncLLMEngine.from_engine_args(EngineArgs(max_num_seqs=3), True, context, {"one": one}),  # type: ignore[arg-type]
    ):
        assert engine.vllm_config.scheduler_config.max_num_seqs == 3
        assert engine.log_stats
        assert one in engine.stat_loggers.values()
        engine.shutdown()


def test_loggers_that_stand_by_position_in_an_older_form_are_told() -> None:
    p, one = parts(), Listener()
    engine = LLMEngine(*(p[name] for name in FIRST), None, None, True, UsageContext.ENGINE_CONTEXT, {"one": one})
    assert engine.stat_loggers["one"] is one
    engine.shutdown()


@pytest.mark.parametrize("make", [LLMEngine, AsyncLLMEngine])
def test_arguments_of_no_constructor_are_refused(make: Any) -> None:
    p = parts()
    whole = EngineArgs().create_engine_config()
    for positional, keywords, error in (
        ((), {}, InvalidArgumentError("no vllm_config")),
        (("a model",), {}, InvalidArgumentError("no vllm_config")),
        ((), {**p, "cache_config": p["load_config"]}, InvalidArgumentError("cache_config is LoadConfig")),
        ((), {**p, "placement_group": object()}, InvalidArgumentError("placement_group is <object")),
        (
            (p["model_config"], object(), False),
            {},
            InvalidArgumentError("placement_group is <object"),
        ),
        ((p["model_config"], object, False), {}, NotSupportedError("executor_class")),
        ((whole, object), {}, NotSupportedError("executor_class")),
        ((), {**p, "prompt_adapter_config": object()}, NotSupportedError("prompt_adapter_config")),
        ((whole,), {"log_stat": True}, UnknownArgumentError("Engine has no argument 'log_stat'; .*'log_stats'")),
        ((), {**p, "schedular_config": None}, UnknownArgumentError("did you mean 'scheduler_config'")),
    ):
        with pytest.raises(type(error), match=str(error)):
            make(*positional, **keywords)


# ------------------------------------------------------------------ small members


def test_small_members_return_the_current_state(engine: LLMEngine) -> None:
    config = engine.vllm_config
    assert engine.get_decoding_config() is engine.structured_outputs_config is config.structured_outputs_config
    assert isinstance(engine.get_decoding_config(), DecodingConfig)
    assert engine.get_lora_config() is config.lora_config
    assert engine.dp_group is None
    assert engine.renderer is engine.input_processor
    assert engine.renderer.tokenizer is engine.tokenizer
    with pytest.raises(NotSupportedError, match="model_executor lives in the core's process"):
        _ = engine.model_executor
    engine.execute_dummy_batch()  # without effect
    for unfinished in (False, True):
        assert engine.has_unfinished_requests_dp(unfinished) is unfinished
        assert engine.has_unfinished_requests_for_virtual_engine(0) is unfinished
        engine.add_request(str(unfinished), IDS, P)
    for wrong in (1, -1, "0", None, True):
        with pytest.raises(InvalidArgumentError, match="virtual_engine"):
            engine.has_unfinished_requests_for_virtual_engine(wrong)  # type: ignore[arg-type]


def test_members_of_the_async_engine_are_coroutines(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with AsyncLLMEngine.from_engine_args(EngineArgs()) as engine:  # type: ignore[arg-type]
            assert await engine.get_decoding_config() is engine.structured_outputs_config
            assert await engine.get_lora_config() is engine.vllm_config.lora_config
            assert {metric.name for metric in await engine.get_metrics()} >= {"mainspring:num_requests_running"}
            with caplog.at_level(logging.INFO):
                await engine.do_log_stats_with_interval()
                assert "throughput" not in caplog.text
                await engine.do_log_stats(None, model_output=None)
                assert "throughput" in caplog.text
            with pytest.raises(NotSupportedError, match="model_executor"):
                _ = engine.model_executor

    asyncio.run(main())


def test_types_of_outputs_are_looked_at_if_asked_for(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add_request("a", IDS, P)
    engine._ready.append("no output")  # type: ignore[arg-type]
    assert engine.step() == ["no output"]
    monkeypatch.setattr(LLMEngine, "DO_VALIDATE_OUTPUT", True)
    engine._ready.append("no output")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="step gives str, 'no output'"):
        engine.step()
    engine.abort_request("a")
    assert [output.request_id for output in engine.step()] == ["a"]


def test_the_served_name_is_shown_in_metrics() -> None:
    for name, shown in (("mine", "mine"), (None, EngineArgs().create_engine_config().model_config.model)):
        with LLMEngine.from_engine_args(EngineArgs(served_model_name=name)) as engine:
            assert {metric.labels["model_name"] for metric in engine.get_metrics()} == {shown}


def test_configuration_classes_are_public() -> None:
    assert DecodingConfig is StructuredOutputsConfig
    config = EngineArgs().create_engine_config()
    kinds = (ModelConfig, CacheConfig, ParallelConfig, SchedulerConfig, DeviceConfig, LoadConfig, LoRAConfig)
    assert {type(part) for part in parts().values()} == {*kinds, ObservabilityConfig, DecodingConfig}
    assert SpeculativeConfig(method="ngram").method == "ngram"
    assert config.speculative_config is None
