"""The validation of a request: which requests a model and a configuration can serve, and which error names the
fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness import VOCAB, make_core
from mainspring import SamplingParams
from mainspring.engine.request.input_processor import InputProcessor
from mainspring.ipc.config import EngineConfig, LoRAConfig, ModelConfig, SchedulerConfig
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError
from mainspring.ipc.messages import Adapter, AddRequest, ModelFacts, Pooling, Sampling, Tensor
from mainspring.ipc.params import CORE_RANGES
from mainspring.ipc.request_check import RequestCheck, check_embeds_values

FACTS = ModelFacts(vocab_size=100, hidden_size=4, max_model_len=16, dtype="float32")
CONFIG = EngineConfig(
    model_config=ModelConfig(max_logprobs=5),
    lora_config=LoRAConfig(enable_prompt_adapter=True, max_prompt_adapter_token=8),
)
CHECK = RequestCheck(FACTS, CONFIG)
POOLS = CHECK._replace(model=ModelFacts(100, 4, 16, "float32", tasks=["embed", "score"]))
VIRTUAL = Adapter(1, "v", "/v", 4)
EMBEDS = Tensor(0, "float32", [3, 4])


def request(prompt: int | list[int] = 3, fields: dict[str, Any] | None = None, **more: Any) -> AddRequest:
    sampling = Sampling(**{"max_tokens": 4, **(fields or {})})
    return AddRequest(0, "r", [5] * prompt if isinstance(prompt, int) else prompt, sampling, **more)


@pytest.mark.parametrize(
    "message",
    [
        request(15),
        request(11, prompt_adapter=VIRTUAL),
        request(prompt_embeds=EMBEDS),
        request(3, {"max_tokens": 3}, output_token_ids=[7, 7]),
        request(
            fields={"logprobs": 5, "top_p": 1e-9, "temperature": 1e30, "bad_words": [[1], [2, 3]], "min_tokens": 2}
        ),
        request(fields={"allowed_token_ids": [1, 2], "bad_words": [[1]], "stop_token_ids": [2]}),
        request(fields={"grammar": ["regex", "a+"], "logit_bias": {99: -1e30}}),
    ],
)
def test_valid_requests_pass(message: AddRequest) -> None:
    CHECK.check(message)


def test_every_number_of_the_sampling_parameters_has_a_range() -> None:
    numbers = {name for name, kind in Sampling.__annotations__.items() if kind in (int, float)}
    assert numbers - {"top_p"} == set(CORE_RANGES)  # 0 is not a valid top_p, so it is checked separately


def test_a_pooling_prompt_may_fill_the_context() -> None:
    POOLS.check(request(16, pooling=Pooling("embed")))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (request(0), "the prompt is empty"),
        (request(16), "has 16 tokens; max_model_len is 16, .* at most 15"),
        (request(14, output_token_ids=[1, 2]), "has 14 tokens and 2 output tokens; max_model_len is 16"),
        (request(12, prompt_adapter=VIRTUAL), "of which the prompt adapter's virtual tokens take 4, .* at most 11"),
        (request(1, prompt_adapter=Adapter(1, "v", "/v", 9)), "max_prompt_adapter_token is 8"),
        (request(3, {"max_tokens": 2}, output_token_ids=[7, 7]), "2 output tokens .* max_tokens is 2"),
        (request(prompt_embeds=Tensor(0, "float32", [3, 5])), r"has shape \[3, 5\]; it must be \[3, 4\]"),
        (request(prompt_embeds=Tensor(0, "float32", [2, 4])), r"has shape \[2, 4\]; it must be \[3, 4\]"),
        (request(fields={"prompt_logprobs": 0}, prompt_embeds=EMBEDS), "prompt_logprobs needs"),
        (request(pooling=Pooling("embed")), "to embed, and this model can generate"),
        (request([5, 100]), "prompt_token_ids holds 100; token ids of this model go from 0 to 99"),
        (request([-1, 5]), "prompt_token_ids holds -1"),
        (request(output_token_ids=[100]), "output_token_ids holds 100"),
        (request(fields={"stop_token_ids": [100]}), "stop_token_ids holds 100"),
        (request(fields={"allowed_token_ids": [100]}), "allowed_token_ids holds 100"),
        (request(fields={"logit_bias": {100: 1.0}}), "logit_bias holds 100"),
        (request(fields={"bad_words": [[1, 100]]}), "bad_words holds 100"),
        (request(fields={"bad_words": [[1]], "allowed_token_ids": [1]}), "no token is left"),
        (request(fields={"stop_token_ids": [1], "allowed_token_ids": [1], "min_tokens": 1}), "no token is left"),
        (request(fields={"bad_words": [[token] for token in range(100)]}), "no token is left"),
        (request(fields={"stop_token_ids": list(range(100)), "min_tokens": 1}), "no token is left"),
        (request(fields={"top_p": 0.0}), "top_p is 0.0; it must be above 0"),
        (request(fields={"temperature": 1e-50}), "temperature is 1e-50; it must be 0 or at least 0.01"),
        (request(fields={"temperature": 0.0099}), "temperature is 0.0099; it must be 0 or at least 0.01"),
        (request(fields={"logit_bias": {1: 1e31}}), "logit_bias"),
        (request(fields={"logit_bias": {1: float("nan")}}), "logit_bias"),
        (request(fields={"grammar": ["regex"]}), "a grammar is a kind and a text"),
        (request(fields={"grammar": ["poem", "a"]}), "kinds are json"),
        (request(fields={"logprobs": 6}), "logprobs asks for 6 .* max_logprobs, 5"),
        (request(fields={"prompt_logprobs": 100}), "prompt_logprobs asks for all .* max_logprobs, 5"),
        *(
            (request(fields={name: value}), f"{name} is .*; it must be from")
            for name, values in {
                "temperature": (-0.1, float("nan"), float("inf"), 1e39),
                "min_p": (-0.1, 1.1),
                "presence_penalty": (1e31, float("nan")),
                "frequency_penalty": (-1e31,),
                "repetition_penalty": (0.0, 1e-31, float("inf")),
                "max_tokens": (0, 2**63),
                "top_k": (-1,),
                "min_tokens": (-1,),
                "logprobs": (-2,),
                "prompt_logprobs": (-2,),
                "seed": (2**63, -(2**63) - 1),
            }.items()
            for value in values
        ),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused_and_the_error_names_the_fault(message: AddRequest, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        CHECK.check(message)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (request(17, pooling=Pooling("embed")), "max_model_len is 16: raise that, or give truncate_prompt_tokens"),
        (request(), "to generate tokens, and this model can embed, score"),
        (request(pooling=Pooling("classify")), "the task is classify"),
        (request(pooling=Pooling("embed"), output_token_ids=[1]), "no output tokens"),
    ],
)
def test_what_a_pooling_model_can_not_serve(message: AddRequest, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        POOLS.check(message)


def test_virtual_tokens_must_leave_room_and_be_well_formed() -> None:
    anything = CHECK._replace(config=EngineConfig(lora_config=LoRAConfig(enable_prompt_adapter=True)))
    with pytest.raises(InvalidRequestError, match="15 virtual tokens; max_model_len is 16, which leaves none"):
        anything.check(request(1, prompt_adapter=Adapter(1, "v", "/v", 15)))
    with pytest.raises(InvalidArgumentError, match="prompt_adapter_id is 0"):
        anything.check(request(1, prompt_adapter=Adapter(0, "v", "/v", 5)))


@pytest.mark.parametrize(
    ("check", "message", "words"),
    [
        (CHECK, request(lora=Adapter(1, "a", "/a")), "enable_lora=True"),
        (RequestCheck(FACTS), request(prompt_adapter=VIRTUAL), "enable_prompt_adapter=True"),
        (CHECK, request(prompt_adapter=VIRTUAL, prompt_embeds=EMBEDS), "can't be used with a prompt that is embed"),
        (CHECK._replace(accepts_embeddings=False), request(prompt_adapter=VIRTUAL), "can't be used with this model"),
        (CHECK._replace(accepts_embeddings=False), request(prompt_embeds=EMBEDS), "prompt_embeds can't be used"),
    ],
)
def test_a_feature_that_the_core_does_not_have_is_named(check: RequestCheck, message: AddRequest, words: str) -> None:
    with pytest.raises(NotSupportedError, match=words):
        check.check(message)


def test_a_step_has_to_carry_the_log_probabilities() -> None:
    check = RequestCheck(FACTS, EngineConfig(scheduler_config=SchedulerConfig(max_num_seqs=3)), max_carried=7)
    check.check(request(fields={"logprobs": 7}))
    with pytest.raises(InvalidRequestError, match="all of max_num_seqs, 3"):
        check.check(request(fields={"logprobs": 8}))


@pytest.mark.parametrize(
    ("prompt", "fields"), [([VOCAB], {}), ([3], {"stop_token_ids": [VOCAB]}), ([3] * 99, {}), ([3], {"logprobs": 513})]
)
def test_a_frontend_and_the_core_refuse_the_same_requests_with_the_same_words(
    prompt: list[int], fields: dict[str, Any]
) -> None:
    core = make_core()
    core.connect(0)
    processor = InputProcessor(None, RequestCheck(core.model), [])
    with pytest.raises(InvalidRequestError) as raised:
        processor.process_inputs("r", prompt, SamplingParams(**fields))
    core.add_request(0, request(prompt, fields))
    [finished] = core.scheduler.take_notices()[0].finished
    assert (finished.error, finished.error_text) == ("InvalidRequestError", str(raised.value))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("model", ["float32", "float16", "bfloat16"])
def test_prompt_embeddings_hold_only_what_the_model_can_represent(dtype: str, model: str) -> None:
    def carried(value: float) -> np.ndarray:
        values = np.full((3, 4), 2.0, np.float32)
        values[1, 2] = value
        if dtype == "bfloat16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(dtype)

    for value in (0.0, -60000.0, 60000.0, *([1e38, -1e38] if "float16" not in (dtype, model) else [])):
        check_embeds_values(carried(value), dtype, model)
    for value in (np.nan, np.inf, -np.inf, *([1e5, -1e5] if (dtype, model) == ("float32", "float16") else [])):
        with pytest.raises(InvalidRequestError, match=f"a NaN, or a value out of the range of {model}"):
            check_embeds_values(carried(value), dtype, model)
