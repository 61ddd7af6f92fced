"""Rows of the package's names: each is used."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

import mainspring
from mainspring import SamplingParams
from mainspring.ipc import errors

from .harness import IN, OWN, Place, row

STORY = "Once upon a time"
ANY = {"modes": (IN,), "why": "a name is the same everywhere; what it names has rows of its own"}


def name(*names: str, **more: Any) -> Any:
    return row(*(f"mainspring.{one}" for one in names), **{**ANY, **more})


@name("LLMEngine", "EngineArgs", "SamplingParams", "RequestOutput", "CompletionOutput", "RequestMetrics")
def engine_names(at: Place) -> None:
    found = at.outputs(at.engine(), at.engine().add_request(at.id(), STORY, mainspring.SamplingParams(max_tokens=2)))
    assert isinstance(at.engine(), mainspring.LLMEngine)
    assert isinstance(found[-1], mainspring.RequestOutput)
    assert isinstance(found[-1].outputs[0], mainspring.CompletionOutput)
    assert isinstance(found[-1].metrics, mainspring.RequestMetrics)
    assert mainspring.EngineArgs(block_size=32).block_size == 32


@name("LLM", "BeamSearchParams", "BeamSearchOutput", "BeamSearchSequence", modes=(OWN,), why="as above")
def llm_names(at: Place) -> None:
    assert isinstance(at.llm(), mainspring.LLM)
    (found,) = at.llm().beam_search(STORY, mainspring.BeamSearchParams(2, 2))
    assert isinstance(found, mainspring.BeamSearchOutput)
    assert isinstance(found.sequences[0], mainspring.BeamSearchSequence)


@name("AsyncLLMEngine", "AsyncLLM", "AsyncEngineArgs", modes=(OWN,), why="as above")
def async_names(at: Place) -> None:
    assert isinstance(at.aengine(), mainspring.AsyncLLMEngine)
    assert isinstance(at.aengine(), mainspring.AsyncLLM)
    assert mainspring.AsyncEngineArgs(enable_log_requests=True).enable_log_requests


@name("StructuredOutputsParams", "GuidedDecodingParams")
def forms(at: Place) -> None:
    for kind in (mainspring.StructuredOutputsParams, mainspring.GuidedDecodingParams):
        assert at.text(structured_outputs=kind(choice=["abc"])) == "abc"


@name("TextPrompt", "TokensPrompt", "EmbedsPrompt")
def prompts(at: Place) -> None:
    import numpy as np

    text = at.text()
    ids = at.engine().get_tokenizer().encode(STORY)
    assert (
        at.text(mainspring.TextPrompt(prompt=STORY)) == at.text(mainspring.TokensPrompt(prompt_token_ids=ids)) == text
    )
    assert len(at.ids(mainspring.EmbedsPrompt(prompt_embeds=np.ones((3, 256), np.float32)), ignore_eos=True)) == 8


@name("EngineCoreRequest")
def prepared(at: Place) -> None:
    made = at.engine().input_processor.process_inputs("a", STORY, SamplingParams())
    assert isinstance(made, mainspring.EngineCoreRequest)


@name("Logprob")
def logprob(at: Place) -> None:
    found = at.run(logprobs=0).outputs[0]
    assert all(isinstance(one, mainspring.Logprob) for place in found.logprobs for one in place.values())
    assert mainspring.Logprob(-1.0, 2, "x").rank == 2


@name("RequestOutputKind")
def kinds(at: Place) -> None:
    assert len(at.stream(output_kind=mainspring.RequestOutputKind.FINAL_ONLY)) == 1


@name("UsageContext")
def usage_context(at: Place) -> None:
    config = mainspring.EngineArgs(num_gpu_blocks_override=300).create_engine_config()
    context = mainspring.UsageContext.LLM_CLASS
    engine = mainspring.LLMEngine(config, usage_context=context, multiprocess_mode=False)
    at._fresh.append(engine)
    assert at.text(engine=engine)


@name("Device")
def device(at: Place) -> None:
    at.run(STORY * 8)
    assert at.engine().reset_prefix_cache(mainspring.Device.CPU) is True
    assert at.run(STORY * 8).num_cached_tokens > 0, "that was host memory"
    assert at.engine().reset_prefix_cache(mainspring.Device.GPU) is True
    assert at.run(STORY * 8).num_cached_tokens == 0


@name("StatLoggerBase", says="Somebody who listens to an engine's statistics.")
def stat_logger(at: Place) -> None:
    class Mine(mainspring.StatLoggerBase):
        told = 0

        def __init__(self, *_: Any) -> None: ...

        def record(self, *_: Any, **__: Any) -> None:
            self.told += 1

        def log_engine_initialized(self) -> None: ...

    at.engine().stat_loggers["mine"] = mine = Mine()
    try:
        at.run()
    finally:
        del at.engine().stat_loggers["mine"]
    assert mine.told


CONFIGS = (
    "CacheConfig DeviceConfig LoadConfig ModelConfig ObservabilityConfig ParallelConfig SchedulerConfig ServiceConfig"
).split()


@name(*CONFIGS, "EngineConfig")
def configs(at: Place) -> None:
    found = at.engine().vllm_config
    assert isinstance(found, mainspring.EngineConfig)
    kinds = {type(getattr(found, field)) for field in type(found).__struct_fields__}
    assert all(getattr(mainspring, one) in kinds for one in CONFIGS)


# ---------------------------------------------------------------------- errors, each raised


def raised(kind: Any, act: Any) -> None:
    with pytest.raises(kind) as found:
        act()
    assert str(found.value)


@name("DuplicateRequestError")
def duplicate(at: Place) -> None:
    at.engine().add_request("twice", STORY, SamplingParams())
    raised(mainspring.DuplicateRequestError, lambda: at.engine().add_request("twice", STORY, SamplingParams()))


@name("InvalidRequestError")
def invalid_request(at: Place) -> None:
    raised(mainspring.InvalidRequestError, lambda: at.run(""))


@name("InvalidArgumentError")
def invalid_argument(at: Place) -> None:
    raised(mainspring.InvalidArgumentError, lambda: SamplingParams(top_p=3.0))


@name("UnknownArgumentError")
def unknown_argument(at: Place) -> None:
    raised(mainspring.UnknownArgumentError, lambda: SamplingParams(temprature=1.0))  # type: ignore[call-arg]


@name("NotSupportedError")
def not_supported(at: Place) -> None:
    raised(mainspring.NotSupportedError, lambda: mainspring.EngineArgs(enable_dbo=True).create_engine_config())


@name("ModelNotFoundError")
def model_not_found(at: Place) -> None:
    raised(mainspring.ModelNotFoundError, lambda: mainspring.EngineArgs("/no/such").create_engine_config())


@name("ConnectError")
def connect_error(at: Place) -> None:
    raised(mainspring.ConnectError, lambda: mainspring.LLMEngine.connect("ipc:///tmp/no", connect_timeout=0.01))


@name("WrongEventLoopError", modes=(OWN,), why="only an async engine has a loop")
async def wrong_loop(at: Place) -> None:
    import asyncio
    import threading

    engine, found = at.aengine(), []
    await engine.is_paused()

    def elsewhere() -> None:
        try:
            asyncio.run(engine.is_paused())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert isinstance(found[0], mainspring.WrongEventLoopError)


@name("WrongProcessError")
def wrong_process(at: Place) -> None:
    import os

    with mock.patch("os.getpid", return_value=os.getpid() + 1):
        raised(mainspring.WrongProcessError, at.engine().step)


@name("OverloadedError", "MainspringError")
def overloaded(at: Place) -> None:
    engine = at.engine(max_requests_in_flight=2)
    for _ in range(6):
        engine.add_request(at.id(), STORY, SamplingParams(max_tokens=20, ignore_eos=True))
    found = [one.outputs[0].error for one in at.outputs(engine) if one.outputs[0].error is not None]
    assert found
    assert all(isinstance(one, mainspring.OverloadedError) for one in found)
    assert all(isinstance(one, mainspring.MainspringError) for one in found)


@name("EngineDeadError")
def dead(at: Place) -> None:
    engine = at.fresh()
    engine.shutdown()
    raised(mainspring.EngineDeadError, lambda: engine.add_request("late", STORY, SamplingParams()))


@name("NotPermittedError", modes=("connected",), why="only a daemon has connections with fewer rights")
def not_permitted(at: Place) -> None:
    engine = mainspring.LLMEngine.connect(at.daemon().address)
    at._fresh.append(engine)
    raised(mainspring.NotPermittedError, engine.reset_prefix_cache)


@name("WeightsLostError")
def weights_lost(at: Place) -> None:
    import numpy as np

    def half() -> Any:
        for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
            yield name, np.zeros(256, np.float32)
        raise ZeroDivisionError

    engine = at.fresh()
    with mock.patch("mainspring.engine.request.weight_messages.MAX_ARRAYS", 1), pytest.raises(ZeroDivisionError):
        engine.update_weights(half())
    assert isinstance(at.run(engine=engine).outputs[0].error, mainspring.WeightsLostError)


OTHERS = "AddressInUseError EngineStartError OutOfMemoryError ProtocolError RequestFailedError UnsupportedModelError"


@name(*OTHERS.split())
def other_errors(at: Place) -> None:
    """Errors whose cause is a crash, a full device or another protocol version are tested in tests/test_*.py."""
    for one in OTHERS.split():
        assert getattr(mainspring, one) is getattr(errors, one)
        assert issubclass(getattr(mainspring, one), mainspring.MainspringError)
