"""Arguments of a caller either reach the core unchanged or give one typed error: none is dropped, no value that a
message can't hold is sent, and no call waits for an answer that can't come."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import math
import os
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from mainspring import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    PoolingParams,
    PromptAdapterRequest,
    SamplingParams,
    StructuredOutputsParams,
)
from mainspring.compat.forms import Call, resolve_add_request, resolve_engine, resolve_generate
from mainspring.demo import MODEL_PATH
from mainspring.engine import llm_engine
from mainspring.engine.args import checked
from mainspring.engine.pooling_methods import PoolingMethods
from mainspring.engine.request.input_processor import InputProcessor, core_messages
from mainspring.engine.request.outputs import PoolingOutput, PoolingRequestOutput
from mainspring.engine.request.weight_messages import plain_arguments
from mainspring.engine.text.tokenizer import load_tokenizer
from mainspring.ipc.async_client import AsyncClient
from mainspring.ipc.codec import encode_arguments
from mainspring.ipc.config import CacheConfig, EngineConfig, LoRAConfig, ModelConfig, SchedulerConfig
from mainspring.ipc.connection import Connection
from mainspring.ipc.errors import (
    InvalidArgumentError,
    InvalidRequestError,
    NotSupportedError,
    WrongProcessError,
)
from mainspring.ipc.messages import AddRequest, ModelFacts
from mainspring.ipc.request_check import RequestCheck
from mainspring.ipc.sync_client import SyncClient
from stand_in_core import stand_in
from test_call_forms import Silent, SilentAsync
from wire import collect, request

FACTS = ModelFacts(vocab_size=1024, hidden_size=4, max_model_len=32, dtype="float32", eos_token_ids=[2])
POOLS = msgspec.structs.replace(FACTS, tasks=["embed"])
ADAPTERS = LoRAConfig(enable_lora=True, enable_prompt_adapter=True)
PROCESSOR = InputProcessor(load_tokenizer(MODEL_PATH), RequestCheck(FACTS, EngineConfig(lora_config=ADAPTERS)), [2])
POOLER = InputProcessor(None, RequestCheck(POOLS), [2])
P = SamplingParams(max_tokens=4)
LORA = LoRARequest("a", 1, "/a")
HUGE = 10**5000  # too long for repr
HALF = "\ud800"


def kind(value: Any) -> str:
    """A name for test ids, because `HUGE` has no repr."""
    return type(value).__name__


class Whole(int):
    pass


class Text(str):
    __slots__ = ()


class Number(IntEnum):
    ONE = 1


@pytest.fixture
def no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_engine, "make_client", lambda config, multiprocess: Silent(config))
    monkeypatch.setattr(AsyncClient, "launch", SilentAsync)


# ------------------------------------------------------------------ requests


@pytest.mark.parametrize("field", ["use_activation", "normalize"])
@pytest.mark.parametrize("value", [1, 0.0, np.True_, np.zeros(2), HUGE], ids=kind)
def test_a_flag_is_true_or_false(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field} is .* must be True or False"):
        PoolingParams(**{field: value})


@pytest.mark.parametrize("fields", [{"dimensions": 2**70}, {"dimensions": HUGE}, {"task": np.zeros(2)}, {"task": 5}])
def test_pooling_params_that_no_message_holds_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(fields))} is .*; it must be"):
        PoolingParams(**fields)


@pytest.mark.parametrize("priority", [True, 2**63, HUGE, "1"], ids=kind)
def test_a_priority_is_an_int_of_64_bits(priority: Any) -> None:
    with pytest.raises(InvalidRequestError, match="priority is"):
        PROCESSOR.process_inputs("r", [3], P, priority=priority)


@pytest.mark.parametrize("request_id", [7, None, b"a", HALF])
def test_an_id_that_no_message_holds_is_refused(request_id: Any) -> None:
    with pytest.raises(InvalidRequestError, match="request_id is"):
        PROCESSOR.process_inputs(request_id, [5], SamplingParams())


def test_values_of_subclasses_travel_as_what_they_are() -> None:
    params = SamplingParams(
        max_tokens=Whole(4), min_tokens=Whole(1), seed=Whole(5), top_k=Whole(2), top_p=np.float64(0.5),
        min_p=np.float64(0.25), presence_penalty=np.float64(1), frequency_penalty=Number.ONE,
        repetition_penalty=np.float64(2), temperature=np.float64(1), logprobs=Whole(3), stop_token_ids=[Whole(9)],
        allowed_token_ids=[Whole(8)], logit_bias={Whole(8): np.float64(1)}, cache_salt=Text("salt"), n=2,
        structured_outputs=StructuredOutputsParams(regex=Text("a+")),
    )  # fmt: skip
    lora = LoRARequest(Text("a"), 1, Text("/a"))
    made = PROCESSOR.process_inputs("r", [3], params, priority=Whole(7), lora_request=lora)
    for index, message in enumerate(core_messages(made, [1, 2])):
        back = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=AddRequest)
        assert back == message
        assert (back.priority, back.cache_salt, back.lora and back.lora.name) == (7, "salt", "a")
        sampling = back.sampling
        assert (sampling.top_p, sampling.min_p, sampling.top_k, sampling.logprobs) == (0.5, 0.25, 2, 3)
        assert (sampling.stop_token_ids, sampling.grammar) == ([2, 9], ["regex", "a+"])
        assert index or sampling.seed != 5  # each completion has its own embeddings
    asked = POOLER.process_inputs("r", [3], PoolingParams(Whole(2), task=cast(Any, Text("embed"))))
    assert msgspec.msgpack.encode(core_messages(asked, [1])[0])


@pytest.mark.parametrize(
    "wrong",
    [
        ("", 1, "/a"), (HALF, 1, "/a"), (HUGE, 1, "/a"), ("a", HUGE, "/a"), ("a", True, "/a"), ("a", 1), ("a", 1, None),
        ("a", 1, b"/x"), ("a", 1, HALF), ("a", 1, HUGE), ("a", 1, "/a", "/a"),
    ],
)  # fmt: skip
def test_an_adapter_that_no_message_holds_is_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="lora_"):
        LoRARequest(*wrong)


def test_an_adapters_path_has_an_older_name() -> None:
    assert LoRARequest("a", 1, lora_local_path="/a") == LORA
    assert LORA.message.path == "/a"
    with pytest.raises(NotSupportedError, match="base_model_name"):
        LoRARequest("a", 1, "/a", base_model_name="b")


def test_errors_name_the_virtual_tokens() -> None:
    def process(virtual: int, prompt: list[int]) -> None:
        adapter = PromptAdapterRequest("v", 1, "/v", virtual)
        PROCESSOR.process_inputs("r", prompt, P, prompt_adapter_request=adapter)

    with pytest.raises(InvalidRequestError, match=r"30 tokens; max_model_len is 32, of which .* virtual tokens take 8"):
        process(8, [3] * 30)
    with pytest.raises(InvalidRequestError, match="40 virtual tokens; max_model_len is 32"):
        process(40, [3])


@pytest.mark.parametrize("types", [5, "00", [0, np.zeros(2)], np.ones(2), HUGE, [HUGE, 0]], ids=kind)
def test_token_types_are_zeros_and_ones(types: Any) -> None:
    with pytest.raises(InvalidRequestError, match="token_type_ids is"):
        POOLER.process_inputs("r", {"prompt_token_ids": [3, 4], "token_type_ids": types}, PoolingParams())


def test_token_types_have_a_place() -> None:
    typed = {"prompt_token_ids": [3, 4], "token_type_ids": np.array([0, 1])}
    assert POOLER.process_inputs("r", typed, PoolingParams()).second == 1
    with pytest.raises(InvalidRequestError, match="token_type_ids are for pooling models"):
        PROCESSOR.process_inputs("r", typed, P)
    with pytest.raises(InvalidRequestError, match="token_type_ids are given without"):
        POOLER.process_inputs("r", {"prompt": "hello", "token_type_ids": [0]}, PoolingParams())


@pytest.mark.parametrize("given", [5, "ab", {"add_special_tokens": 5}])
def test_tokenization_kwargs_are_a_dict_of_a_flag(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"tokenization_kwargs is|add_special_tokens is"):
        PROCESSOR.process_inputs("r", "hello", P, tokenization_kwargs=given)


def test_a_length_to_pad_to_needs_padding() -> None:
    for given in ({"max_length": 4}, {"padding": False, "max_length": 4}):
        with pytest.raises(InvalidRequestError, match=r"padding is (None|False), and max_length 4"):
            POOLER.process_inputs("r", [3, 4], PoolingParams(), tokenization_kwargs=given)


def test_embeddings_are_those_of_the_call() -> None:
    given = np.ones((3, FACTS.hidden_size), np.float32)
    request = PROCESSOR.process_inputs("r", {"prompt_embeds": given}, P)
    given[:] = 0
    assert request.embeds is not None
    assert (request.embeds.values == 1).all()


# ------------------------------------------------------------------ call forms

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def generated(*positional: Any, **keywords: Any) -> Call:
    slots = [keywords.pop(name, None) for name in ("arrival_time", "lora_request", "tokenization_kwargs")]
    slots += [keywords.pop("trace_headers", None), keywords.pop("priority", 0), None]
    return resolve_generate("p", P, "r", positional, cast(Any, tuple(slots)), keywords)


def test_a_keyword_fills_in_what_is_not_given_by_position() -> None:
    call = generated(LORA, trace_headers=HEADERS)
    assert (call["lora_request"], call["trace_headers"]) == (LORA, HEADERS)
    call = generated([3, 4], lora_request=LORA, trace_headers=HEADERS, priority=5, prefix_pos=7)
    assert (call["lora_request"], call["trace_headers"], call["priority"]) == (LORA, HEADERS, 5)
    assert call["prompt"] == {"prompt": "p", "prompt_token_ids": [3, 4]}
    assert generated(None, None, None, 6)["priority"] == generated(None, None, 6)["priority"] == 6
    assert generated(None, None, None, priority=6)["priority"] == 6


@pytest.mark.parametrize(
    ("positional", "keywords", "name"),
    [
        ((LORA,), {"lora_request": LORA}, "lora_request"),
        ((None, HEADERS), {"trace_headers": HEADERS}, "trace_headers"),
        ((None, None, 3), {"priority": 4}, "priority"),
        (([3], LORA), {"lora_request": LORA}, "lora_request"),
        (([3],), {"prompt_token_ids": [4]}, "prompt_token_ids"),
        (([3], None, 1), {"prefix_pos": 2}, "prefix_pos"),
    ],
)
def test_what_is_given_twice_is_refused(positional: Any, keywords: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} is given by position and by keyword"):
        generated(*positional, **keywords)


def test_what_has_no_meaning_is_refused() -> None:
    for positional in ((None, None, 3, 1), ([3], None, None, 1)):
        assert generated(*positional)["data_parallel_rank"] == 1
    with pytest.raises(InvalidArgumentError, match="prompt_token_ids is given by position and by keyword"):
        resolve_add_request("r", "p", P, ([3], None, None, None, 0, None), {"prompt_token_ids": [4]})


MODEL, CACHE, WHOLE = ModelConfig(), CacheConfig(), EngineConfig()


@pytest.mark.parametrize(
    ("positional", "keywords", "words"),
    [
        ((), {"vllm_config": WHOLE, "cache_config": CACHE}, "cache_config is given beside a vllm_config"),
        ((MODEL, CACHE), {"cache_config": CACHE}, "beside another CacheConfig"),
        ((MODEL, None, True, 5), {}, "got 5 by position"),
        ((MODEL, None, True, object), {}, "got <class 'object'> by position"),
        ((MODEL, None, True, object(), object()), {}, "got <object"),
        ((MODEL, None, True, True, True, False), {}, "4 flags"),
        ((MODEL, None, True), {"log_stats": False}, "log_stats is given by position and by keyword"),
        ((MODEL, None, True, {}), {"stat_loggers": {}}, "stat_loggers is given by position and by keyword"),
    ],
)
def test_no_argument_of_a_constructor_is_dropped(positional: Any, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        resolve_engine("LLMEngine", positional, keywords)


# ------------------------------------------------------------------ configurations


def test_a_configuration_made_by_hand_is_as_one_of_engine_args(no_core: None) -> None:
    args = EngineArgs().create_engine_config()
    assert checked(EngineConfig()) == checked(args) == args
    for engine in (LLMEngine(EngineConfig()), LLMEngine(ModelConfig()), AsyncLLMEngine(EngineConfig())):
        assert engine.vllm_config.model_config.model == str(MODEL_PATH)
        engine.shutdown()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EngineConfig(scheduler_config=SchedulerConfig(max_num_seqs=0)), "max_num_seqs is 0"),
        (EngineConfig(scheduler_config=SchedulerConfig(max_num_seqs=cast(Any, "x"))), "max_num_seqs is 'x'"),
        (EngineConfig(cache_config=cast(Any, 5)), "cache_config is 5; it must be a CacheConfig"),
    ],
)
def test_a_configuration_made_by_hand_is_checked(no_core: None, config: EngineConfig, words: str) -> None:
    for make in (LLMEngine, AsyncLLMEngine):
        with pytest.raises(InvalidArgumentError, match=words):
            make(config)


def test_what_the_core_set_is_kept() -> None:
    config = EngineArgs().create_engine_config()
    cache = msgspec.structs.replace(config.cache_config, num_gpu_blocks=7)
    assert checked(msgspec.structs.replace(config, cache_config=cache)).cache_config.num_gpu_blocks == 7


def test_flags_of_the_async_engine() -> None:
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    given = AsyncEngineArgs.from_cli_args(parser.parse_args(["--enable-log-requests", "--max-num-seqs", "3"]))
    assert (given.enable_log_requests, given.disable_log_requests, given.max_num_seqs) == (True, False, 3)
    assert AsyncEngineArgs.from_cli_args(parser.parse_args(["--disable-log-requests"])).disable_log_requests
    with pytest.raises(SystemExit):
        EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args(["--enable-log-requests"])
    own = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser(), async_args_only=True)
    assert vars(own.parse_args(["--enable-log-requests"])) == {"enable_log_requests": True}
    with pytest.raises(SystemExit):
        own.parse_args(["--max-num-seqs", "3"])


# ------------------------------------------------------------------ clients

SELF: list[Any] = []
SELF.append(SELF)


@pytest.mark.parametrize("value", [2**70, HALF, SELF, object(), [HALF], HUGE], ids=kind)
def test_arguments_that_no_message_holds_are_refused_and_leave_nothing_behind(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="the arguments of ping hold what can't go to another process"):
        encode_arguments("ping", [value])
    with stand_in() as owner:
        client = SyncClient(Connection(owner))
        for call in (
            lambda: client.call("ping", value),
            lambda: client.add_request(msgspec.structs.replace(request(7), cache_salt=value)),
        ):
            with pytest.raises(InvalidRequestError, match="what can't go to another process"):
                call()
        assert not client._connection._ledger
        assert not client._connection._calls
        client.add_request(request(0, max_tokens=3, first=5))
        assert collect(client, 1) == {0: [5, 6, 7]}
        client.close()


@pytest.mark.parametrize(
    ("args", "kwargs", "timeout", "name"),
    [
        (5, None, None, "args"), ("ab", None, None, "args"), ((), 5, None, "kwargs"), ((), {1: 2}, None, "kwargs"),
        ((), None, "x", "timeout"), ((), None, True, "timeout"), ((), None, math.nan, "timeout"),
        ((), None, HUGE, "timeout"), ((), None, -1, "timeout"),
    ],
    ids=kind,
)  # fmt: skip
def test_arguments_of_a_workers_method_are_checked(args: Any, kwargs: Any, timeout: Any, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name} is"):
        plain_arguments(args, kwargs, timeout)
    assert plain_arguments((1,), None, 2.5) == ([1], {})


def test_an_async_call_that_is_not_answered_says_which() -> None:
    async def main() -> None:
        with stand_in() as owner:
            client = AsyncClient(Connection(owner))
            with pytest.raises(TimeoutError, match=r"the core did not answer 'sleep' within 0\.0 s"):
                await client.call("sleep", 0.2, timeout=0.0)
            client.close()

    asyncio.run(main())


@pytest.mark.parametrize("params", [SamplingParams(), "x", 5])
@pytest.mark.parametrize("keep", [None, 3])
def test_only_pooling_params_encode(no_core: None, params: Any, keep: int | None) -> None:
    engine = AsyncLLMEngine(EngineConfig())
    with pytest.raises(InvalidRequestError, match="pooling_params is"):
        engine.encode("p", params, "r", truncate_prompt_tokens=keep)
    engine.shutdown()


def test_a_forked_child_does_not_wait_for_a_lock(no_core: None) -> None:
    engine = LLMEngine(EngineConfig())
    engine._lock.acquire()  # as if another thread of the parent held it
    pid = os.fork()
    if not pid:
        refused = 0
        for method in ("has_unfinished_requests", "get_metrics", "do_log_stats", "get_tokenizer"):
            try:
                getattr(engine, method)()
            except WrongProcessError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    engine._lock.release()
    engine.shutdown()


# ------------------------------------------------------------------ LLM


class Asked(PoolingMethods):
    """Pooling methods that give the same vector for every prompt and record the parameters."""

    def __init__(self) -> None:
        self.llm_engine = cast(Any, SimpleNamespace(get_supported_tasks=lambda: ("embed", "score"), tokenizer=None))
        self.params: list[Any] = []
        data = np.ones(2, np.float32)
        self._output = PoolingRequestOutput("r", PoolingOutput(cast(Any, data)), [3], True, 0, "stop")
        self.generate = self._generate  # type: ignore[assignment]

    def _generate(self, prompts: Any, params: Any, *more: Any, **also: Any) -> list[Any]:
        self.params.append(params)
        return [self._output] * (len(prompts) if isinstance(prompts, list) else 1)


def test_each_pooling_method_cuts_prompts() -> None:
    llm = Asked()
    llm.embed("a", truncate_prompt_tokens=3)
    llm.classify("a", truncate_prompt_tokens=3)
    assert llm.score("a", "b", truncate_prompt_tokens=3)[0].outputs.score == pytest.approx(1.0)
    assert [params.truncate_prompt_tokens for params in llm.params] == [3, 3, 3]


@pytest.fixture
def llm(no_core: None) -> LLM:
    return LLM()


def test_the_older_form_of_token_ids(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(llm._queue, "run", lambda requests, use_tqdm: asked.extend(requests) or [])
    llm.generate(prompt_token_ids=[3, 4])
    llm.generate(prompt_token_ids=[[5], [6, 7]])
    llm.generate("shown", prompt_token_ids=[8])
    assert [one.prompt_token_ids for one in asked] == [[3, 4], [5], [6, 7], [8]]
    assert asked[-1].prompt == "shown"
    with pytest.raises(InvalidArgumentError, match="prompt_token_ids has 2 entries for 1 prompts"):
        llm.generate(["a"], prompt_token_ids=[[5], [6]])
    with pytest.raises(InvalidRequestError, match="a prompt is None"):
        llm.generate()


def test_an_empty_list_of_parameters_is_not_the_default(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._queue, "run", lambda requests, use_tqdm: [])
    with pytest.raises(InvalidArgumentError, match="sampling_params has 0 entries for 1 prompts"):
        llm.generate("a", [])
    assert llm.generate([], []) == []


def test_arguments_of_a_conversation_have_vllms_order() -> None:
    assert [*inspect.signature(LLM.chat).parameters][1:11] == [
        "messages", "sampling_params", "use_tqdm", "lora_request", "chat_template", "chat_template_content_format",
        "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs",
    ]  # fmt: skip


def test_variables_of_a_template_win_over_arguments(llm: LLM) -> None:
    conversation: Any = [{"role": "user", "content": "Hi"}]
    given = {"add_generation_prompt": False, "chat_template": "{{ messages[0].content }}{{ add_generation_prompt }}"}
    (made,) = llm.preprocess_chat(conversation, chat_template_kwargs=given)
    assert made["prompt"] == "HiFalse"


def test_templates_get_the_arguments_of_tool_calls_as_objects(llm: LLM) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    conversation: Any = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    (made,) = llm.preprocess_chat(conversation, chat_template=template)
    assert made["prompt"] == '{"city": "Oslo"}'


def test_templates_do_not_get_an_empty_list_of_tool_calls(llm: LLM) -> None:
    template = "{{ messages[0].content }}{% if 'tool_calls' in messages[0] %}{{ raise_exception('calls') }}{% endif %}"
    for calls in ([], None):
        conversation: Any = [{"role": "assistant", "content": "Yes.", "tool_calls": calls}]
        (made,) = llm.preprocess_chat(conversation, chat_template=template)
        assert made["prompt"] == "Yes."


@pytest.mark.parametrize("messages", [5, [{"role": "user", "content": HALF}], "hello"])
def test_a_conversation_is_text(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.chat(messages, chat_template="{{ messages[0]['content'] }}")


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("is_sleeping", ()), ("is_paused", ()), ("pause_generation", ("keep",)), ("resume_generation", ()),
        ("remove_lora", (3,)), ("pin_lora", (3,)),
    ],
)  # fmt: skip
def test_llm_has_the_utility_calls(llm: LLM, method: str, args: tuple[Any, ...]) -> None:
    getattr(llm, method)(*args)
    assert cast(Any, llm.llm_engine.engine_core).calls[-1][: 1 + len(args)] == (method, *args)


def test_llm_has_the_calls_that_need_no_core(llm: LLM) -> None:
    assert llm.get_supported_tasks() == ("generate",)
    for nothing in (llm.reset_mm_cache(), llm.reset_encoder_cache(), llm.do_log_stats()):
        assert nothing is None
    with pytest.raises(NotSupportedError, match="enable_lora"):
        llm.add_lora(LORA)
    cast(Any, llm.llm_engine.engine_core).call = lambda *call: [3]
    assert llm.list_loras() == {3}
