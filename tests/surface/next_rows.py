"""Arguments accepted by signature that raise `NotSupportedError` until their feature exists."""

from __future__ import annotations

import mainspring
from mainspring import EngineArgs, SamplingParams

from .harness import CONNECTED, IN, OWN, Place, comes

PARAMS = SamplingParams(max_tokens=2)
ONCE = (IN,)


@comes("EngineArgs.data_parallel_size above 1: data_parallel_size", ONCE)
def data_parallel(at: Place) -> None:
    EngineArgs(data_parallel_size=2).create_engine_config()


@comes("EngineArgs.tensor_parallel_size above 1: tensor_parallel_size", ONCE)
def tensor_parallel(at: Place) -> None:
    EngineArgs(tensor_parallel_size=2).create_engine_config()


@comes("EngineArgs.pipeline_parallel_size above 1: pipeline_parallel_size", ONCE)
def pipeline_parallel(at: Place) -> None:
    EngineArgs(pipeline_parallel_size=2).create_engine_config()


@comes("EngineArgs.distributed_executor_backend mp: distributed_executor_backend", ONCE)
def executor_mp(at: Place) -> None:
    EngineArgs(distributed_executor_backend="mp").create_engine_config()


@comes("EngineArgs.distributed_executor_backend ray: distributed_executor_backend", ONCE)
def executor_ray(at: Place) -> None:
    EngineArgs(distributed_executor_backend="ray").create_engine_config()


@comes("LLMEngine.add_request, a multi-modal prompt: multi_modal_data")
def multi_modal(at: Place) -> None:
    at.engine().add_request("m", {"prompt": "x", "multi_modal_data": {"image": 1}}, PARAMS)  # type: ignore[arg-type]


@comes("LLMEngine.add_request, an encoder-decoder prompt: encoder_prompt")
def encoder_decoder(at: Place) -> None:
    at.engine().add_request("m", {"encoder_prompt": "x", "decoder_prompt": "y"}, PARAMS)  # type: ignore[arg-type]


@comes("mainspring.ExplicitEncoderDecoderPrompt as a prompt: encoder_prompt")
def explicit_encoder_decoder(at: Place) -> None:
    kind = getattr(mainspring, "ExplicitEncoderDecoderPrompt", None)
    assert kind is not None, "there is no such name"
    at.engine().add_request("m", kind(encoder_prompt="x", decoder_prompt="y"), PARAMS)


@comes("LLMEngine.__init__, an executor_class: executor_class", ONCE)
def executor_class(at: Place) -> None:
    config = EngineArgs().create_engine_config()
    mainspring.LLMEngine(config, executor_class=object)  # type: ignore[arg-type]


@comes("LLMEngine.__init__, a placement_group: placement_group", ONCE)
def placement_group(at: Place) -> None:
    config = EngineArgs().create_engine_config()
    mainspring.LLMEngine(config, placement_group=object())  # type: ignore[call-arg]


@comes("AsyncLLMEngine.__init__, Ray: worker_use_ray", ONCE)
def ray(at: Place) -> None:
    mainspring.AsyncLLMEngine(True, False, EngineArgs().create_engine_config())


@comes("LLMEngine.execute_dummy_batch, data-parallel waves: execute_dummy_batch")
def dummy_batch(at: Place) -> None:
    at.engine().execute_dummy_batch()  # type: ignore[attr-defined]


@comes("AsyncLLMEngine.execute_dummy_batch, data-parallel waves: execute_dummy_batch", (OWN, CONNECTED))
def async_dummy_batch(at: Place) -> None:
    at.aengine().execute_dummy_batch()


@comes("LoRARequest.base_model_name given: base_model_name", ONCE)
def base_model_name(at: Place) -> None:
    mainspring.LoRARequest("a", 1, "/x", base_model_name="b")
