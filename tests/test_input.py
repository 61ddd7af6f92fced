"""Validation of prompts and parameters: every form is recognised, every fault gives one sentence, and arguments are not
changed."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from mainspring import LoRARequest, PromptAdapterRequest, SamplingParams
from mainspring.compat.forms import Call, resolve_add_request
from mainspring.demo import MODEL_PATH
from mainspring.engine.request.input_processor import EngineCoreRequest, InputProcessor, child_seed, core_messages
from mainspring.engine.request.prompts import ParsedPrompt, parse_prompt
from mainspring.engine.text.tokenizer import load_tokenizer
from mainspring.ipc.errors import InvalidRequestError, NotSupportedError, UnknownArgumentError
from mainspring.ipc.messages import ModelFacts
from mainspring.ipc.request_check import RequestCheck

TOKENIZER = load_tokenizer(MODEL_PATH)
FACTS = ModelFacts(vocab_size=1024, hidden_size=4, max_model_len=32, dtype="float32", eos_token_ids=[2])
PROCESSOR = InputProcessor(TOKENIZER, RequestCheck(FACTS), [2, 7])


def process(prompt: Any, params: SamplingParams | None = None, **options: Any) -> EngineCoreRequest:
    return PROCESSOR.process_inputs("r", prompt, params or SamplingParams(), **options)


# ------------------------------------------------------------------ prompts

HELLO = [1, *TOKENIZER.encode("hello", add_special_tokens=False)]


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("hello", "hello", HELLO),
        ({"prompt": "hello"}, "hello", HELLO),
        ({"prompt_token_ids": [5, 6]}, None, [5, 6]),
        ({"prompt_token_ids": (5, 6), "prompt": "shown"}, "shown", [5, 6]),
        ({"prompt": None, "prompt_token_ids": [5]}, None, [5]),
        ([5, 6], None, [5, 6]),
        ((5, 6), None, [5, 6]),
        (np.array([5, 6]), None, [5, 6]),
        ([np.int64(5)], None, [5]),
    ],
)
def test_each_form_of_a_prompt(prompt: Any, text: str | None, ids: list[int]) -> None:
    request = process(prompt)
    assert (request.prompt, request.prompt_token_ids) == (text, ids)
    assert all(type(token) is int for token in request.prompt_token_ids)


def test_text_is_tokenized_with_special_tokens_by_default_and_may_be_shown_differently() -> None:
    assert process("hello", tokenization_kwargs={"add_special_tokens": False}).prompt_token_ids == HELLO[1:]
    assert process("hello", prompt_text="shown").prompt == "shown"
    with pytest.raises(UnknownArgumentError, match="add_special_tokens"):
        process("hello", tokenization_kwargs={"add_special_token": False})


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_embeddings_travel_as_a_tensor_with_zeros_for_ids(dtype: str) -> None:
    array = np.arange(12, dtype=dtype).reshape(3, 4)
    request = process({"prompt_embeds": array})
    assert request.prompt_token_ids == [0, 0, 0]
    assert request.embeds is not None
    assert request.embeds.dtype == ("float16" if dtype == "float16" else "float32")
    assert np.array_equal(request.embeds.values, array)
    (message,) = core_messages(request, [1])
    assert message.prompt_embeds is not None
    assert (message.prompt_embeds.frame, message.prompt_embeds.shape) == (0, [3, 4])


def test_torch_embeddings_keep_their_bfloat16_bits() -> None:
    import torch

    tensor = torch.randn(2, 4).to(torch.bfloat16).t().contiguous().t().requires_grad_()
    request = process({"prompt_embeds": tensor})
    assert request.embeds is not None
    assert request.embeds.dtype == "bfloat16"
    assert request.embeds.values.dtype == np.uint16
    assert torch.equal(torch.from_numpy(request.embeds.values).view(torch.bfloat16), tensor.detach())


def test_embeddings_of_anything_with_dlpack() -> None:
    class OnlyDLPack:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    request = process({"prompt_embeds": OnlyDLPack(np.ones((2, 4), np.float32))})
    assert request.embeds is not None
    assert request.embeds.values.shape == (2, 4)


class Raises:
    """A prompt that must be refused, and words that the message must contain."""

    def __init__(self, prompt: Any, *words: str, error: type[Exception] = InvalidRequestError) -> None:
        self.prompt, self.words, self.error = prompt, words, error


@pytest.mark.parametrize(
    "case",
    [
        Raises("", "the prompt is empty"),
        Raises([], "the prompt is empty"),
        Raises({"prompt_token_ids": []}, "the prompt is empty"),
        Raises(None, "must be a str"),
        Raises(5, "must be a str"),
        Raises({}, "must have 'prompt'"),
        Raises({"promt": "x"}, "did you mean 'prompt'"),
        Raises({"prompt": 5}, "prompt is 5"),
        Raises([1, "a"], "prompt_token_ids[1] is 'a'"),
        Raises([1, 2.0], "prompt_token_ids[1] is 2.0"),
        Raises([1, True], "prompt_token_ids[1] is True"),
        Raises({"prompt_token_ids": "abc"}, "must be a list of ints"),
        Raises([1, 1024], "prompt_token_ids holds 1024", "from 0 to 1023"),
        Raises([-1], "prompt_token_ids holds -1"),
        Raises([1] * 32, "the prompt has 32 tokens", "max_model_len is 32", "at most 31"),
        Raises("very long " * 40, "max_model_len is 32"),
        Raises({"prompt_embeds": np.ones((2, 3), np.float32)}, "shape [2, 3]", "hidden size is 4"),
        Raises({"prompt_embeds": np.ones(4, np.float32)}, "must be [tokens, hidden]"),
        Raises({"prompt_embeds": np.ones((2, 4), int)}, "dtype int64"),
        Raises({"prompt_embeds": "no array"}, "can't be read"),
        Raises({"prompt_embeds": np.ones((0, 4), np.float32)}, "empty"),
        Raises({"prompt_embeds": np.ones((1, 4), np.float32), "prompt_token_ids": [1]}, "both"),
        Raises({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        Raises({"prompt": "x", "multi_modal_data": {"image": b""}}, "this model takes: text", error=NotSupportedError),
        Raises({"prompt_embeds": np.ones((1, 4), np.float32), "multi_modal_data": {"image": b""}}, "has both"),
        Raises({"encoder_prompt": "x", "decoder_prompt": "y"}, "encoder-decoder", error=NotSupportedError),
    ],
    ids=lambda case: case.words[0],
)
def test_a_bad_prompt_is_refused_in_one_sentence(case: Raises) -> None:
    with pytest.raises(case.error) as caught:
        process(case.prompt)
    for word in case.words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    assert process([1] * 31).params.max_tokens == 1


def test_parsing_embeddings_does_not_import_torch() -> None:
    import subprocess

    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import numpy; from mainspring.engine.request.prompts import parse_prompt\n"
        "print(parse_prompt({'prompt_embeds': numpy.ones((1, 2))}).embeds.dtype)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "float32\n"


# ------------------------------------------------------------------ parameters


def test_parameters_are_copied_and_completed() -> None:
    params = SamplingParams(max_tokens=None, stop=["x"], stop_token_ids=[9])
    before = params.clone()
    request = process([1, 2], params)
    assert params == before
    assert request.params.max_tokens == 30
    assert process([1, 2], SamplingParams(max_tokens=100, min_tokens=50)).params.max_tokens == 30
    assert process([1, 2], SamplingParams(max_tokens=100, min_tokens=50)).params.min_tokens == 30
    assert process([1, 2], SamplingParams(max_tokens=3)).params.max_tokens == 3


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(stop_token_ids=[1024]), "stop_token_ids holds 1024"),
        ({"temperature": 1}, "must be a SamplingParams"),
        (None, "params is None"),
    ],
)
def test_bad_parameters_are_refused(params: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        PROCESSOR.process_inputs("r", "hello", params)


def test_fields_assigned_after_construction_are_checked_again() -> None:
    params = SamplingParams()
    params.temperature = -1
    with pytest.raises(ValueError, match="temperature is -1"):
        process("hello", params)


def test_without_a_tokenizer_only_ids_and_no_stop_strings() -> None:
    bare = InputProcessor(None, RequestCheck(FACTS), [])
    assert bare.process_inputs("r", [3], SamplingParams()).prompt_token_ids == [3]
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        bare.process_inputs("r", "text", SamplingParams())
    with pytest.raises(InvalidRequestError, match="stop strings"):
        bare.process_inputs("r", [3], SamplingParams(stop="x"))


# ------------------------------------------------------------------ messages


def test_only_fields_that_the_core_needs_are_sent() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, seed=-3, stop="x", stop_token_ids=[9, 2], min_tokens=2
    )
    request = process({"prompt_token_ids": [4], "cache_salt": "s"}, params, priority=-1)
    (message,) = core_messages(request, [11])
    sampling = message.sampling
    assert (message.handle, message.request_id, message.prompt_token_ids) == (11, "r", [4])
    assert (message.priority, message.cache_salt) == (-1, "s")
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (16, 2, -3)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 0, 0.9, 0.1)
    assert sampling.stop_token_ids == [2, 7, 9], "the model's ends of sequence, and the user's"


def test_an_end_of_sequence_that_the_model_can_not_choose_is_left_out() -> None:
    model = RequestCheck(FACTS)  # some checkpoints name -1, or a token that only their tokenizer has
    request = InputProcessor(None, model, [2, -1, FACTS.vocab_size]).process_inputs("r", [5], P)
    assert core_messages(request, [1])[0].sampling.stop_token_ids == [2]


def test_ignore_eos_leaves_only_the_users_stop_tokens() -> None:
    (message,) = core_messages(process([4], SamplingParams(ignore_eos=True, stop_token_ids=[9])), [1])
    assert message.sampling.stop_token_ids == [9]


def test_completions_of_one_request_have_seeds_of_their_own_that_never_change() -> None:
    messages = core_messages(process([4], SamplingParams(n=3, seed=42)), [5, 6, 7])
    assert [message.handle for message in messages] == [5, 6, 7]
    assert [message.sampling.seed for message in messages] == [child_seed(42, index) for index in range(3)]
    assert [child_seed(42, index) for index in range(2)] == [SEED_42_0, SEED_42_1], "part of what a seed promises"


SEED_42_0, SEED_42_1 = -8561999937793848326, 438106210058129217


def test_without_a_seed_each_request_gets_64_random_bits_before_it_is_sent() -> None:
    seeds = {process([4]).params.seed for _ in range(64)}
    assert len(seeds) == 64
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)
    assert min(seed for seed in seeds if seed is not None) < 0 < max(seed for seed in seeds if seed is not None)


# ------------------------------------------------------------------ call forms

P = SamplingParams()
NEWEST: Call = {
    "request_id": "r",
    "prompt": "hi",
    "params": P,
    "arrival_time": None,
    "tokenization_kwargs": None,
    "priority": 0,
    "prompt_text": None,
    "trace_headers": None,
    "lora_request": None,
    "prompt_adapter_request": None,
    "data_parallel_rank": None,
}
IDS = {"prompt": None, "prompt_token_ids": [1, 2]}
BOTH = {"prompt": "hi", "prompt_token_ids": [1, 2]}
LORA, VIRTUAL = LoRARequest("a", 1, "a"), PromptAdapterRequest("v", 1, "v", 3)
_NO = None


@pytest.mark.parametrize(
    ("slots", "older", "expected"),
    [
        # newest: arrival_time, lora_request, tokenization_kwargs, trace_headers, priority
        ((_NO, _NO, _NO, _NO, 0), {}, NEWEST),
        ((1.5, _NO, _NO, _NO, 4), {}, dict(NEWEST, arrival_time=1.5, priority=4)),
        ((1.5, LORA, _NO, _NO, 4), {}, dict(NEWEST, arrival_time=1.5, lora_request=LORA, priority=4)),
        ((2, _NO, {"add_special_tokens": False}, _NO, 0), {},
         dict(NEWEST, arrival_time=2, tokenization_kwargs={"add_special_tokens": False})),
        # middle: arrival_time, lora_request, trace_headers, prompt_adapter_request, priority
        ((1.5, _NO, {"traceparent": "x"}, _NO, 4), {},
         dict(NEWEST, arrival_time=1.5, priority=4, trace_headers={"traceparent": "x"})),
        ((1.5, LORA, _NO, VIRTUAL, 4), {},
         dict(NEWEST, arrival_time=1.5, lora_request=LORA, prompt_adapter_request=VIRTUAL, priority=4)),
        # oldest: prompt_token_ids, arrival_time, lora_request, prefix_pos
        (([1, 2], _NO, _NO, _NO, 0), {}, dict(NEWEST, prompt=BOTH)),
        ((_NO, 1.5, _NO, _NO, 0), {}, dict(NEWEST, arrival_time=1.5)),
        (([1, 2], 1.5, _NO, 3, 0), {}, dict(NEWEST, prompt=BOTH, arrival_time=1.5)),
        (([1, 2], 1.5, LORA, 3, 0), {}, dict(NEWEST, prompt=BOTH, arrival_time=1.5, lora_request=LORA)),
        ((_NO, _NO, LORA, _NO, 0), {}, dict(NEWEST, lora_request=LORA)),
        ((_NO, _NO, _NO, 3, 0), {}, NEWEST),
        # keywords
        ((_NO, _NO, _NO, _NO, 0), {"prompt_token_ids": [1, 2], "prefix_pos": 1}, dict(NEWEST, prompt=BOTH)),
        # parameters that do not exist yet
        ((_NO, _NO, _NO, {"any": "x"}, 0), {}, dict(NEWEST, trace_headers={"any": "x"})),
        ((_NO, _NO, _NO, _NO, 0), {"prompt_adapter_request": VIRTUAL},
         dict(NEWEST, prompt_adapter_request=VIRTUAL)),
        # parameters that never existed
        ((_NO, _NO, _NO, _NO, 0), {"priorty": 1}, UnknownArgumentError("did you mean 'priority'")),
        (("soon", _NO, _NO, _NO, 0), {}, InvalidRequestError("arrival_time is 'soon'")),
    ],
)  # fmt: skip
def test_call_forms_of_all_generations(slots: Any, older: dict[str, Any], expected: Call | Exception) -> None:
    if isinstance(expected, Exception):
        with pytest.raises(type(expected), match=str(expected)):
            resolve_add_request("r", "hi", P, (*slots, None), older)
    else:
        assert resolve_add_request("r", "hi", P, (*slots, None), older) == expected


@pytest.mark.parametrize(
    ("prompt", "older", "expected"),
    [
        (None, {"prompt_token_ids": [1, 2]}, IDS),
        (None, {"inputs": "hi"}, "hi"),
        (None, {"inputs": {"prompt": "hi"}}, {"prompt": "hi"}),
        (None, {}, InvalidRequestError("no prompt")),
        ({"prompt": "x"}, {"prompt_token_ids": [1]}, InvalidRequestError("beside a prompt")),
    ],
)
def test_where_the_prompt_may_stand(prompt: Any, older: dict[str, Any], expected: Any) -> None:
    slots = (None, None, None, None, 0, None)
    if isinstance(expected, Exception):
        with pytest.raises(type(expected), match=str(expected)):
            resolve_add_request("r", prompt, P, slots, older)
    else:
        assert resolve_add_request("r", prompt, P, slots, older)["prompt"] == expected


def test_ids_are_str_but_an_int_is_taken_and_the_older_name_of_params_too() -> None:
    slots = (None, None, None, None, 0, None)
    assert resolve_add_request(7, "hi", P, slots, {})["request_id"] == "7"
    assert resolve_add_request("7", "hi", None, slots, {"sampling_params": P})["params"] is P
    for wrong in (None, 1.5, True, b"x"):
        with pytest.raises(InvalidRequestError, match="request_id"):
            resolve_add_request(wrong, "hi", P, slots, {})  # type: ignore[arg-type]


def test_a_prompt_dict_is_parsed_without_being_changed() -> None:
    prompt = {"prompt_token_ids": [1, 2], "prompt": "x", "cache_salt": "s"}
    parsed = parse_prompt(prompt)
    assert parsed == ParsedPrompt("x", [1, 2], None, "s")
    assert parsed.token_ids is not prompt["prompt_token_ids"]
