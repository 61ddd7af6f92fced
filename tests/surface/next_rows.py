"""Arguments accepted by signature that raise `NotSupportedError` until their feature exists."""

from __future__ import annotations

import mainspring
from mainspring import EngineArgs, SamplingParams

from .harness import IN, Place, comes

PARAMS = SamplingParams(max_tokens=2)
ONCE = (IN,)


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


@comes("LoRARequest.base_model_name given: base_model_name", ONCE)
def base_model_name(at: Place) -> None:
    mainspring.LoRARequest("a", 1, "/x", base_model_name="b")
