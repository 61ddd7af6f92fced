"""Tools and reasoning through `mainspring serve`, as the clients of OpenAI and Anthropic see them: chat completions,
responses and messages. Where a test needs a certain answer, it makes the model of random weights write it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

import tool_models
from daemons import PATIENCE_S, short_folder
from http_servers import HttpServer
from tool_models import CALL, WEATHER, says

pytestmark = pytest.mark.slow

ASK: list[Any] = [{"role": "user", "content": "Rain in Oslo?"}]
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
FLAT: list[Any] = [{"type": "function", **WEATHER}]
THEIRS: list[Any] = [{"name": "weather", "description": "Rain?", "input_schema": WEATHER["parameters"], "strict": True}]
ARGUMENTS = {"city": "Oslo", "days": 2}
TEXT = f"<think>\nRain?\n</think>\n\nLet me look.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    """Two workers, so that what one remembers is often asked of the other."""
    with short_folder() as folder:
        model = tool_models.make(folder / "model")
        started = HttpServer(
            folder, "--model", str(model), "--served-model-name", "tiny", "--workers", "2"
        ).wait_ready()
        yield started
        started.end()


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    """A client whose every request comes over a connection of its own, and so to any worker."""
    limits = httpx.Limits(max_keepalive_connections=0)
    with server.client(http_client=httpx.Client(limits=limits, timeout=PATIENCE_S)) as found:
        yield found


@pytest.fixture
def other(server: HttpServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url,
        api_key="none",
        max_retries=0,
        timeout=PATIENCE_S,
        _strict_response_validation=True,
    ) as found:
        yield found


def chat(client: openai.OpenAI, text: str | None = None, **options: Any) -> Any:
    given = {"model": "tiny", "messages": ASK, "max_tokens": 600, "extra_body": says(text) if text else {}, **options}
    return client.chat.completions.create(**given)


def valid(arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), WEATHER["parameters"])


def called(ask: Callable[[], list[Any]], kind: str) -> Any:
    """The last part of an answer, which must be a call. A model of random weights may begin to think instead, and go on
    until the limit of tokens; then it is asked again."""
    for _ in range(30):
        *_, last = ask()
        if last.type == kind:
            return last
        assert last.type in ("reasoning", "thinking"), last
    raise AssertionError("30 answers end in thoughts")


# ---------------------------------------------------------------------- chat completions


def test_calls_and_reasoning_of_a_chat(client: openai.OpenAI) -> None:
    choice = chat(client, TEXT, tools=TOOLS).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    assert choice.message.reasoning_content == choice.message.reasoning == "Rain?"
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [ARGUMENTS] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_the_stream_of_a_chat_has_the_same_calls(client: openai.OpenAI) -> None:
    content, reasoning, arguments, names, reason = "", "", ["", ""], [], None
    count = 0
    for chunk in chat(client, TEXT, tools=TOOLS, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            count += 1
            if call.id:
                assert call.type == "function"
                names.append(call.function.name)
            arguments[call.index] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    assert (content, reasoning, names, reason) == ("Let me look.", "Rain?", ["weather"] * 2, "tool_calls")
    assert [json.loads(one) for one in arguments] == [ARGUMENTS] * 2
    assert count > 8  # arguments are streamed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_model_of_random_weights_calls_when_it_must(client: openai.OpenAI, choice: Any) -> None:
    calls = 0
    for seed in range(16):
        found = chat(
            client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed, temperature=1.5
        ).choices[0]
        if found.finish_reason == "length":  # it thinks without an end
            assert not found.message.content
            continue
        (call,) = found.message.tool_calls
        reason = "tool_calls" if choice == "required" else "stop"
        assert (call.function.name, found.finish_reason) == ("weather", reason)
        valid(call.function.arguments)
        calls += 1
    assert calls


def test_the_finish_reason_of_a_call_that_is_named_is_stop_in_a_stream_too(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for seed in range(16):
        choices = [
            chunk.choices[0]
            for chunk in chat(client, tools=TOOLS, tool_choice=named, seed=seed, temperature=1.5, stream=True)
        ]
        if choices[-1].finish_reason != "length":  # it thinks without an end
            assert any(one.delta.tool_calls for one in choices)
            assert choices[-1].finish_reason == "stop"
            return
    raise AssertionError("16 answers end in thoughts")


def test_marks_that_are_special_tokens_come_as_these_tokens() -> None:
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    with short_folder() as folder:
        model = tool_models.make(folder / "model", marks)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        server = HttpServer(folder, "--model", str(model), "--served-model-name", "tiny").wait_ready()
        try:
            calls = 0
            for seed in range(8):
                options: Any = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.5}
                extra = {"return_token_ids": True}
                found = chat(server.client(), tools=TOOLS, seed=seed, extra_body=extra, **options).choices[0]
                if found.finish_reason == "length":  # it thinks without an end
                    continue
                (call,) = found.message.tool_calls
                valid(call.function.arguments)
                ids = [tokenizer.token_to_id(mark) for mark in marks]
                assert [found.token_ids.count(token) for token in ids[:2]] == [1, 1]
                assert found.token_ids.count(ids[2]) == found.token_ids.count(ids[3])
                assert bool(getattr(found.message, "reasoning", None)) <= found.token_ids.count(ids[2])
                calls += 1
            assert calls
        finally:
            server.end()


def test_without_tools_and_with_none_a_call_is_text(client: openai.OpenAI) -> None:
    assert chat(client, CALL).choices[0].message.content == CALL
    found = chat(client, CALL, tools=TOOLS, tool_choice="none").choices[0]
    assert (found.message.content, found.message.tool_calls, found.finish_reason) == (CALL, None, "stop")


def test_a_call_that_is_cut_keeps_its_text(client: openai.OpenAI) -> None:
    found = chat(client, CALL, tools=TOOLS, max_tokens=50).choices[0]
    assert found.finish_reason == "length"
    (call,) = found.message.tool_calls
    assert '{"city": "Oslo", "days": 2}'.startswith(call.function.arguments)


def test_the_result_of_a_call_goes_back_into_the_prompt(server: HttpServer, client: openai.OpenAI) -> None:
    message = chat(client, TEXT, tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in message.tool_calls]
    messages = [*ASK, message.model_dump(exclude_none=True), *results]
    body = {"messages": messages, "return_token_strs": True}
    tokens = httpx.post(f"{server.url}/tokenize", json=body).json()["token_strs"]
    prompt = "".join(tokens).replace("Ġ", " ").replace("Ċ", "\n")
    assert prompt.count(CALL) == 2
    assert "<|im_start|>tool\nRain.<|im_end|>" in prompt
    assert chat(client, "It rains.", messages=messages, tools=TOOLS).choices[0].message.content == "It rains."


def without_thoughts(server: HttpServer) -> dict[str, Any]:
    """Fields of a body that keep a model of random weights from opening a reasoning, which it might never end."""
    begins = [httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"] for text in ("<", "<think>")]
    return {"logit_bias": {str(tokens[0]): -100 for tokens in begins}}


def test_reasoning_that_the_prompt_opens_comes_before_an_answer_in_json(
    server: HttpServer, client: openai.OpenAI
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}}}
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    found = chat(client, response_format=form, extra_body=extra, max_tokens=200, temperature=0).choices[0]
    assert found.message.reasoning_content
    assert found.message.content == "" or json.loads(found.message.content)
    found = chat(client, response_format=form, max_tokens=200, extra_body=without_thoughts(server)).choices[0]
    assert isinstance(json.loads(found.message.content)["n"], int)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [{"type": "function"}]}, "it must have type 'function' and a function with a name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "names 'x'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": 3}}, "names None"),
        ({"tool_choice": "required"}, "there are no tools"),
    ],
)
def test_wrong_tools_are_a_bad_request(client: openai.OpenAI, options: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        chat(client, **options)


def test_a_message_that_is_echoed_stands_before_what_is_read(client: openai.OpenAI) -> None:
    messages = [*ASK, {"role": "assistant", "content": "Let me see."}]
    more = {**says(CALL), "echo": True, "continue_final_message": True}
    for stream in (False, True):
        found = client.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, max_tokens=600, stream=stream, extra_body=more
        )
        messages_of = [
            choice.delta if stream else choice.message
            for one in (found if stream else [found])
            for choice in one.choices
        ]
        assert "".join(one.content or "" for one in messages_of) == "Let me see."
        assert any(one.tool_calls for one in messages_of)


# ---------------------------------------------------------------------- responses


def respond(client: openai.OpenAI, text: str | None = None, **options: Any) -> Any:
    given = {"model": "tiny", "input": "Rain?", "max_output_tokens": 600, "extra_body": says(text) if text else {}}
    return client.responses.create(**{**given, **options})


def test_a_response(client: openai.OpenAI) -> None:
    found = respond(client, TEXT, tools=FLAT, instructions="Be short.", metadata={"a": "b"})
    assert (found.object, found.status, found.model) == ("response", "completed", "tiny")
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    assert found.output[0].content[0].text == "Rain?"
    assert found.output_text == "Let me look."
    assert json.loads(found.output[2].arguments) == ARGUMENTS
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert (found.instructions, found.metadata) == ("Be short.", {"a": "b"})


def test_the_events_of_a_response_build_it_up(client: openai.OpenAI) -> None:
    events = list(respond(client, TEXT, tools=FLAT, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    for at, item in enumerate(final.output):
        own = [event for event in events if getattr(event, "output_index", None) == at]
        assert (own[0].type, own[-1].type) == ("response.output_item.added", "response.output_item.done")
        assert own[-1].item == item
        deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert deltas == text
        (done,) = [event for event in own if event.type.endswith(("_text.done", "arguments.done"))]
        assert (done.arguments if item.type == "function_call" else done.text) == text
    assert client.responses.retrieve(final.id).output == final.output


def test_log_probabilities_of_a_response(client: openai.OpenAI) -> None:
    options: Any = {"tools": FLAT, "temperature": 0, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    found = respond(client, TEXT, **options)
    assert found.top_logprobs == 2
    part = found.output[1].content[0]
    text = b"".join(bytes(one.bytes) for one in part.logprobs).decode()
    assert "Let me look." in text
    assert len(text) < len(TEXT) / 4
    assert all(one.logprob <= 0 and len(one.top_logprobs) == 2 for one in part.logprobs)
    events = list(respond(client, TEXT, stream=True, **options))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [(one.token, round(one.logprob, 3)) for event in deltas for one in event.logprobs]
    assert streamed == [(one.token, round(one.logprob, 3)) for one in part.logprobs]
    assert all(event.logprobs for event in deltas)
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [one.token for one in done.logprobs] == [one.token for one in part.logprobs]
    final = events[-1].response
    assert len(final.output[1].content[0].logprobs) == len(streamed)
    assert client.responses.retrieve(final.id).output == final.output
    plain = respond(client, "Yes.", include=["reasoning.encrypted_content"], top_logprobs=2)
    assert plain.output[0].content[0].logprobs == []
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        respond(client, "Yes.", **{**options, "top_logprobs": 21})


def test_a_conversation_is_remembered_by_whichever_worker_is_asked(client: openai.OpenAI) -> None:
    first = respond(client, CALL, tools=FLAT)
    call = first.output[0]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    for _ in range(6):
        second = respond(client, "It rains.", input=[result], previous_response_id=first.id, tools=FLAT)
        assert second.output_text == "It rains."
        assert second.previous_response_id == first.id
        assert second.usage.input_tokens > first.usage.input_tokens + 20
        assert client.responses.retrieve(first.id).output == first.output
    for event in respond(client, "Yes.", input="Sure?", previous_response_id=second.id, stream=True):
        last = event
    assert last.response.output_text == "Yes."
    items = client.responses.input_items.list(first.id).data
    assert [item.content[0].text for item in items] == ["Rain?"]
    for _ in range(3):
        client.responses.delete(respond(client, "A.").id)
    client.responses.delete(first.id)
    for _ in range(4):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.retrieve(first.id)


def test_a_response_that_is_not_stored_or_cut(client: openai.OpenAI) -> None:
    found = respond(client, "Yes and no.", store=False, max_output_tokens=2)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)


def test_a_response_that_the_core_refuses_is_an_error_before_any_event(server: HttpServer) -> None:
    for stream in (False, True):
        asked = {"input": "x", "stream": stream, "guided_regex": "(((("}
        answer = httpx.post(f"{server.url}/v1/responses", json=asked)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_response_in_the_background_ends_or_is_cancelled(client: openai.OpenAI) -> None:
    found = respond(client, "Yes.", background=True)
    assert found.status == "in_progress"
    deadline = time.monotonic() + PATIENCE_S
    while (found := client.responses.retrieve(found.id)).status == "in_progress":
        assert time.monotonic() < deadline
    assert (found.status, found.output_text) == ("completed", "Yes.")
    long = respond(client, background=True, max_output_tokens=8000, extra_body={"ignore_eos": True})
    with pytest.raises(openai.BadRequestError, match="is in_progress"):
        respond(client, "And then?", previous_response_id=long.id)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="only a response in the background"):
        client.responses.cancel(respond(client, "Yes.").id)


class Answer(BaseModel):
    n: int


def test_a_response_of_a_schema_and_one_that_must_call(server: HttpServer, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"max_output_tokens": 200, "extra_body": without_thoughts(server)}
    found = client.responses.parse(model="tiny", input="How many?", text_format=Answer, **asked)
    assert isinstance(found.output_parsed, Answer)
    for choice in ("required", {"type": "function", "name": "weather"}):

        def ask(choice: Any = choice) -> list[Any]:
            return respond(client, tools=FLAT, tool_choice=choice, parallel_tool_calls=False).output  # type: ignore[no-any-return]

        valid(called(ask, "function_call").arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": [{"type": "x"}]}, "an item of type 'x'"),
        ({"tools": [{"type": "web_search"}]}, "functions only"),
        ({"background": True, "stream": True}, "background is for responses"),
        ({"previous_response_id": "resp_1"}, "there is no response"),
    ],
)
def test_a_wrong_response_is_refused(client: openai.OpenAI, options: Any, message: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=message):
        respond(client, **options)


# ---------------------------------------------------------------------- messages


def message(other: anthropic.Anthropic, text: str | None = None, **options: Any) -> Any:
    given = {"model": "tiny", "messages": ASK, "max_tokens": 600, "extra_body": says(text) if text else {}}
    return other.messages.create(**{**given, **options})


def test_a_message(other: anthropic.Anthropic) -> None:
    found = message(other, TEXT, tools=THEIRS, system="Be short.")
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (found.content[0].thinking, found.content[1].text) == ("Rain?", "Let me look.")
    assert (found.content[2].name, found.content[2].input) == ("weather", ARGUMENTS)
    assert (found.role, found.stop_reason) == ("assistant", "tool_use")
    assert found.usage.output_tokens > 20


def test_the_stream_of_a_message_builds_it_up(other: anthropic.Anthropic) -> None:
    with other.messages.stream(
        model="tiny", messages=ASK, max_tokens=600, tools=THEIRS, extra_body=says(TEXT)
    ) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (found.content[1].text, found.content[3].input) == ("Let me look.", ARGUMENTS)
    assert found.stop_reason == "tool_use"
    assert found.usage.output_tokens > 20


def test_results_of_tools_and_a_choice_of_them(other: anthropic.Anthropic) -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):

        def ask(choice: Any = choice) -> list[Any]:
            return message(other, tools=THEIRS, tool_choice=choice).content  # type: ignore[no-any-return]

        call = called(ask, "tool_use")
        jsonschema.validate(call.input, WEATHER["parameters"])
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}]
    messages = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": results}]
    after = message(other, "It rains.", messages=messages, tools=THEIRS)
    assert (after.content[0].text, after.stop_reason) == ("It rains.", "end_turn")


def test_tokens_are_counted_as_the_message_has_them(other: anthropic.Anthropic) -> None:
    counted = other.messages.count_tokens(model="tiny", messages=ASK, tools=THEIRS, system="Be short.")
    found = message(other, "Yes.", tools=THEIRS, system="Be short.")
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == counted.input_tokens


def test_a_stop_sequence_and_the_limit_of_tokens(other: anthropic.Anthropic) -> None:
    found = message(other, "One, two, three.", stop_sequences=["two"])
    assert (found.content[0].text, found.stop_reason, found.stop_sequence) == ("One, ", "stop_sequence", "two")
    assert message(other, "One, two, three.", max_tokens=2).stop_reason == "max_tokens"


def test_an_answer_that_the_client_has_begun(other: anthropic.Anthropic) -> None:
    begun = [*ASK, {"role": "assistant", "content": "It"}]
    assert message(other, " rains.", messages=begun).content[0].text == " rains."


def test_errors_have_the_form_of_anthropic(server: HttpServer, other: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="a block of type 'x'"):
        message(other, messages=[{"role": "user", "content": [{"type": "x"}]}])
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        message(other, model="none")
    image = b'{"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": "x"}]}]}'
    for body in (b"{", b'{"messages": 3}', b'{"messages": []}', image):
        answer = httpx.post(f"{server.url}/v1/messages", content=body)
        assert answer.status_code == 400
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "invalid_request_error")
    asked = {"messages": ASK, "max_tokens": 5, "structured_outputs": {"grammar": "???"}}
    for stream in (False, True):  # the core refuses it, before there is an event
        answer = httpx.post(f"{server.url}/v1/messages", json={**asked, "stream": stream})
        assert answer.status_code == 400
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "invalid_request_error")
