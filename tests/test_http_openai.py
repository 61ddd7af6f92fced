"""`mainspring serve` as OpenAI's own Python client sees it, which validates each answer and each event strictly."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

import media_folders
import media_models
import peft_folders
from daemons import PATIENCE_S, Daemon, short_folder, until
from http_servers import HttpServer, cancel_when_running, running
from mainspring import LLM, SamplingParams
from mainspring.demo import MODEL_PATH

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a long story about a fox."}]
# The types of legacy completions do not have the nulls that OpenAI's own server sends: the finish reason of a chunk
# before the last one, and the log probability of a prompt's first token.
LENIENT = {"_strict_response_validation": False}
KEYS = "# tenants\nsk-first first\nsk-heavy heavy weight=3\nsk-root root admin\n"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    started = Daemon(folder)
    started.ready_line()
    yield started
    started.end()


@pytest.fixture(scope="module")
def server(folder: Path, daemon: Daemon) -> Iterator[HttpServer]:
    started = HttpServer(folder, "--connect", daemon.address, "--served-model-name", "spring", "summer").wait_ready()
    yield started
    started.end()


@pytest.fixture(scope="module")
def keyed(folder: Path, daemon: Daemon) -> Iterator[HttpServer]:
    (folder / "keys").write_text(KEYS)
    started = HttpServer(folder, "--connect", daemon.address, "--api-key-file", str(folder / "keys")).wait_ready()
    yield started
    started.end()


def chat(server: HttpServer, messages: Any = QUESTION, **options: Any) -> Any:
    given = {"model": "spring", "temperature": 0, "max_tokens": 24, **options}
    return server.client().chat.completions.create(messages=messages, **given)


def streamed(chunks: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts


def test_a_chat_completion(server: HttpServer) -> None:
    found = chat(server)
    (choice,) = found.choices
    assert (found.object, found.model) == ("chat.completion", "spring")
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Paris", "stop")
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.usage.completion_tokens == 4
    # as vLLM's server has them: clients read them without asking whether they are there
    assert (choice.stop_reason, choice.message.reasoning, choice.message.reasoning_content) == (None, None, None)
    assert [*chat(server, stream=True)][-1].choices[0].stop_reason is None


def test_a_stream_brings_the_same_text_in_pieces_and_its_usage_last(server: HttpServer) -> None:
    whole = chat(server, STORY, max_tokens=60)
    chunks = list(chat(server, STORY, max_tokens=60, stream=True, stream_options={"include_usage": True}))
    assert streamed(chunks) == {0: whole.choices[0].message.content}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 20
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 60)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_repeated_prompt_is_found_in_the_cache(server: HttpServer) -> None:
    long = [{"role": "user", "content": "Tell me a story about a bear. " * 30}]
    chat(server, long, max_tokens=1)
    usage = chat(server, long, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens // 2


def test_seeds_and_n(server: HttpServer) -> None:
    options = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 20}
    one, two = chat(server, STORY, **options), chat(server, STORY, **options)
    texts = [choice.message.content for choice in one.choices]
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in two.choices]
    assert streamed(chat(server, STORY, stream=True, **options)) == dict(enumerate(texts))
    assert one.usage.completion_tokens == 60


def test_log_probabilities_of_a_chat(server: HttpServer) -> None:
    found = chat(server, logprobs=True, top_logprobs=3).choices[0]
    content = found.logprobs.content
    assert "".join(one.token for one in content).startswith("Paris")
    assert all(len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob >= one.logprob for one in content)
    assert bytes(content[0].bytes).decode() == content[0].token
    part = json.loads((MODEL_PATH / "tokenizer.json").read_text())["model"]["vocab"]["â"]  # the byte E2, spelled so
    for stream in (False, True):
        asked = chat(server, logprobs=True, max_tokens=1, stream=stream, extra_body={"allowed_token_ids": [part]})
        choices = [choice for one in (asked if stream else [asked]) for choice in one.choices if choice.logprobs]
        assert [one.bytes for choice in choices for one in choice.logprobs.content] == [[0xE2]]
    assert chat(server, top_logprobs=0).choices[0].logprobs is None
    tokens = [
        one
        for chunk in chat(server, logprobs=True, top_logprobs=3, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for one in choice.logprobs.content
    ]
    assert tokens == content


def test_log_probabilities_of_token_ids(server: HttpServer) -> None:
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    options: Any = {"logprobs": True, "top_logprobs": 1, "max_tokens": 3, "extra_body": more}
    found = chat(server, **options).choices[0]
    names = [f"token_id:{token}" for token in found.token_ids]
    assert [one.token for one in found.logprobs.content] == names
    assert [one.top_logprobs[0].token for one in found.logprobs.content] == names  # greedy
    chunks = [chunk.choices[0] for chunk in chat(server, stream=True, **options)]
    assert [one.token for choice in chunks if choice.logprobs for one in choice.logprobs.content] == names
    given: Any = {"model": "spring", "prompt": "Once", "temperature": 0, "logprobs": 1, "max_tokens": 3}
    text: Any = server.client().completions.create(**given, extra_body=more).choices[0]
    assert text.logprobs.tokens == [f"token_id:{token}" for token in text.token_ids]
    assert [*text.logprobs.top_logprobs[0]] == text.logprobs.tokens[:1]


def test_log_probabilities_of_the_prompt_of_a_chat(server: HttpServer) -> None:
    found = chat(server, max_tokens=1, extra_body={"prompt_logprobs": 1, "return_token_ids": True})
    assert len(found.prompt_logprobs) == found.usage.prompt_tokens
    assert found.prompt_logprobs[0] is None
    for token, entry in zip(found.prompt_token_ids[1:], found.prompt_logprobs[1:], strict=True):
        assert entry[str(token)]["logprob"] <= 0


def test_stop_strings(server: HttpServer) -> None:
    text = chat(server, STORY, max_tokens=60).choices[0].message.content
    word = text.split()[5]
    cut = chat(server, STORY, max_tokens=60, stop=[word]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[: text.index(word)], "stop")
    kept = chat(server, STORY, max_tokens=60, stop=word, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == text[: text.index(word) + len(word)]


def test_max_completion_tokens_and_parameters_of_vllm(server: HttpServer) -> None:
    found = chat(server, STORY, max_tokens=None, max_completion_tokens=5)
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (5, "length")
    more = {"min_tokens": 9, "ignore_eos": True, "top_k": 1, "return_token_ids": True}
    found = chat(server, max_tokens=9, temperature=1.0, extra_body=more)
    assert len(found.choices[0].token_ids) == 9
    first = found.choices[0].token_ids[0]
    again = chat(server, max_tokens=1, logit_bias={str(first): -100}, extra_body={"return_token_ids": True})
    assert again.choices[0].token_ids[0] != first


def test_the_token_ids_of_a_stream_are_those_of_an_answer(server: HttpServer) -> None:
    options: Any = {"max_tokens": 9, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    whole, chunks = chat(server, **options), list(chat(server, stream=True, **options))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or ()]
    assert ids == whole.choices[0].token_ids


def test_beam_search(server: HttpServer) -> None:
    for stream in (False, True):
        found = chat(server, STORY, temperature=None, n=2, stream=stream, extra_body={"use_beam_search": True})
        texts = streamed(found) if stream else {one.index: one.message.content for one in found.choices}
        assert len(set(texts.values())) == 2
        assert texts[0]


def test_continue_final_message(server: HttpServer) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "Par"}]
    found = chat(server, messages, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert found.choices[0].message.content.startswith("is")


def test_the_message_that_is_continued_may_be_echoed(server: HttpServer) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "Par"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    plain = chat(server, messages, extra_body=more)
    whole = chat(server, messages, extra_body={**more, "echo": True})
    text = f"Par{plain.choices[0].message.content}"
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens == plain.usage.completion_tokens
    stream = chat(server, messages, n=2, stream=True, extra_body={**more, "echo": True})
    assert streamed(stream) == {0: text, 1: text}
    asked = chat(server, extra_body={"echo": True}).choices[0].message.content  # the last message is the user's
    assert asked == chat(server).choices[0].message.content


def test_the_template_of_the_server_renders_all_chats(folder: Path, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ mood }} {{ reasoning_effort }} {{ messages[0].content }}")
    defaults = ("--default-chat-template-kwargs", '{"mood": "glad", "reasoning_effort": "low"}')
    options = ("--chat-template", str(tmp_path / "template"), *defaults)
    (tmp_path / "keys").write_text(KEYS)  # each tenant has an engine of its own
    tenants = ("--api-key-file", str(tmp_path / "keys"))
    server = HttpServer(folder, "--connect", daemon.address, *options, *tenants).wait_ready()

    def post(path: str, key: str = "sk-first", **body: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        found = httpx.post(f"{server.url}{path}", headers=headers, json=body, timeout=PATIENCE_S)
        assert found.is_success, found.text
        return found.json()

    def prompt(key: str = "sk-first", **body: Any) -> str:
        tokens = post("/tokenize", key, messages=QUESTION, **body)["tokens"]
        return str(post("/detokenize", key, tokens=tokens)["prompt"])

    try:
        text = QUESTION[0]["content"]
        assert prompt() == prompt("sk-heavy") == f"glad low {text}"
        assert prompt(chat_template_kwargs={"mood": "sad"}) == f"sad low {text}"
        assert prompt(reasoning_effort="high") == f"glad high {text}"
        count = post("/tokenize", messages=QUESTION)["count"]
        few = {"max_tokens": 1}
        assert post("/v1/chat/completions", messages=QUESTION, **few)["usage"]["prompt_tokens"] == count
        assert post("/v1/responses", input=text)["usage"]["input_tokens"] == count
        assert post("/v1/messages", messages=QUESTION, **few)["usage"]["input_tokens"] <= count
        assert post("/v1/messages/count_tokens", messages=QUESTION)["input_tokens"] == count
    finally:
        server.end()


class Person(BaseModel):
    name: str
    age: int


def test_structured_outputs(server: HttpServer) -> None:
    client = server.client()
    parsed = client.chat.completions.parse(
        model="spring", messages=STORY, response_format=Person, temperature=1.0, seed=1, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    apples = [{"role": "user", "content": "Tom bought 3 apples for 12 dollars. As JSON:"}]
    found = chat(server, apples, response_format={"type": "json_object"}, max_tokens=200)
    assert isinstance(json.loads(found.choices[0].message.content), dict)
    for more in (
        {"structured_outputs": {"choice": ["red", "green"]}},
        {"guided_choice": ["red", "green"]},
        {"response_format": {"type": "choice", "choice": ["red", "green"]}},
    ):
        assert chat(server, STORY, extra_body=more).choices[0].message.content in ("red", "green")
    found = chat(server, STORY, extra_body={"guided_regex": "[0-9]{3}"})
    assert found.choices[0].message.content.isdecimal()


def test_completions_of_texts_and_of_token_ids(server: HttpServer) -> None:
    create, stream = (server.client(**one).completions.create for one in ({}, LENIENT))
    common: dict[str, Any] = {"model": "spring", "temperature": 0, "max_tokens": 8}
    text = "Once upon a time"
    one = create(prompt=text, **common)
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    assert create(prompt=ids, **common).choices[0].text == one.choices[0].text
    several = create(prompt=[text, "The fox", text], n=2, **{**common, "temperature": 1.0}, seed=5)
    assert [choice.index for choice in several.choices] == list(range(6))
    chunks = stream(prompt=[text, "The fox", text], n=2, stream=True, **{**common, "temperature": 1.0}, seed=5)
    texts = dict.fromkeys(range(6), "")
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in several.choices}
    assert several.usage.completion_tokens == 48


def test_echo_with_log_probabilities(server: HttpServer) -> None:
    create: Any = server.client(**LENIENT).completions.create
    common: dict[str, Any] = {"model": "spring", "prompt": "Once upon a time", "temperature": 0, "logprobs": 2}
    found = create(max_tokens=4, echo=True, **common).choices[0]
    assert found.text.startswith("Once upon a time")
    logprobs = found.logprobs
    assert "".join(logprobs.tokens) == found.text
    assert logprobs.token_logprobs[0] is None
    assert all(math.isfinite(value) and value <= 0 for value in logprobs.token_logprobs[1:])
    assert [found.text[at:].startswith(token) for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)]
    scored = create(max_tokens=0, echo=True, **common).choices[0]
    assert scored.text == "Once upon a time"
    assert scored.logprobs.token_logprobs == logprobs.token_logprobs[: len(scored.logprobs.tokens)]
    parts = [chunk.choices[0] for chunk in create(max_tokens=4, echo=True, stream=True, **common)]
    assert "".join(part.text for part in parts) == found.text
    assert [at for part in parts if part.logprobs for at in part.logprobs.text_offset] == logprobs.text_offset


def test_the_document_of_the_routes(server: HttpServer) -> None:
    found = httpx.get(f"{server.url}/openapi.json").json()
    body = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = {**body, "components": found["components"]}
    jsonschema.validate({"messages": QUESTION, "stop": ["a"], "temperature": 1, "stream": True}, schema)
    for wrong in ({}, {"messages": "x"}, {"messages": QUESTION, "n": "two"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    assert {"/v1/models/{model}", "/v1/embeddings", "/health", "/sleep"} <= found["paths"].keys()
    error = {"$ref": "#/components/schemas/Error", "components": found["components"]}
    jsonschema.validate(httpx.post(f"{server.url}/v1/chat/completions", content=b"{}").json(), error)


def test_adapters_are_models(folder: Path, tmp_path: Path) -> None:
    prompt = [5, 9, 30, 7]
    adapter = peft_folders.make_lora(MODEL_PATH, tmp_path / "adapter", 1, r=4, target_modules=["q_proj", "v_proj"])
    options = ("--enable-lora", "--lora-modules", f"mine={adapter}", "--served-model-name", "spring")
    server = HttpServer(folder, *options).wait_ready()
    try:
        client = server.client()
        assert [one.id for one in client.models.list()] == ["spring", "mine"]
        for name, path in (("spring", None), ("mine", adapter)):
            more = {"return_token_ids": True, "ignore_eos": True}
            found: Any = client.completions.create(
                model=name, prompt=prompt, max_tokens=8, temperature=0, extra_body=more
            )
            assert found.model == name
            assert found.choices[0].token_ids == peft_folders.generate(MODEL_PATH, path, prompt, 8)
    finally:
        server.end()


def test_adapters_come_and_go_for_all_workers(folder: Path, tmp_path: Path) -> None:
    prompt, name = [5, 9, 30, 7], "mine"
    options: Any = {"r": 4, "target_modules": ["q_proj"]}
    paths = [peft_folders.make_lora(MODEL_PATH, tmp_path / str(seed), seed, **options) for seed in (1, 2)]
    (folder / "keys").write_text(KEYS)
    server = HttpServer(folder, "--enable-lora", "--workers", "2", "--api-key-file", str(folder / "keys")).wait_ready()

    def post(path: str, key: str = "sk-root", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{server.url}/v1/{path}", headers=headers, json=body, timeout=60)

    def answers() -> list[Any]:
        """Of 12 connections: token ids, or a status."""
        asked = {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        found = [post("completions", "sk-first", **asked, return_token_ids=True) for _ in range(12)]
        return [one.json()["choices"][0]["token_ids"] if one.is_success else one.status_code for one in found]

    try:
        assert answers() == [404] * 12
        assert post("load_lora_adapter", "sk-first", lora_name=name, lora_path=str(paths[0])).status_code == 403
        assert post("load_lora_adapter", lora_name=name, lora_path=str(tmp_path / "none")).status_code == 400
        assert answers() == [404] * 12
        for path, more in ((paths[0], {}), (paths[1], {"load_inplace": True})):
            assert post("load_lora_adapter", lora_name=name, lora_path=str(path), **more).status_code == 200
            assert post("load_lora_adapter", lora_name=name, lora_path=str(path)).status_code == 400
            assert answers() == [peft_folders.generate(MODEL_PATH, path, prompt, 8)] * 12
        assert post("unload_lora_adapter", lora_name=name).status_code == 200
        assert answers() == [404] * 12
        assert post("unload_lora_adapter", lora_name=name).status_code == 404
    finally:
        server.end()


def test_models_and_what_else_is_told(server: HttpServer) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["spring", "summer"]
    assert client.models.retrieve("summer").id == "summer"
    assert chat(server, model="summer", max_tokens=1).model == "spring"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("winter")
    told = httpx.get(f"{server.url}/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
    ):
        assert name in told
    assert "mainspring:core_restarts" in told
    assert "vllm:core_restarts" not in told
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
    assert httpx.get(f"{server.url}/version").json()["version"]
    assert httpx.get(f"{server.url}/health").status_code == httpx.get(f"{server.url}/ping").status_code == 200
    text = "a fox, ünï"
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"])
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": ids["tokens"][1:]}).json()["prompt"] == text
    found = httpx.post(f"{server.url}/tokenize", json={"messages": QUESTION}).json()
    assert found["count"] == chat(server).usage.prompt_tokens


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n is 0"),
        ({"n": 129}, "at most 128"),
        ({"best_of": 129}, "at most 128"),
        ({"prompt_logprobs": 21}, "max_logprobs, 20"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"messages": []}, "conversation"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": "hello"}, "messages"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": "word " * 6000}]}, "4096"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"chat_template_kwargs": {"self": 1}}, "self"),
        ({"chat_template": "{{ messages }}"}, "--trust-request-chat-template"),
        ({"stop": ["x"] * 1025}, "stop has 1025 entries; the limit is 1024"),
        ({"stop": "x" * 4097}, "stop holds a text of 4097 characters; the limit is 4096"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_a_request_that_can_not_be_served(server: HttpServer, more: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        chat(server, messages=more.get("messages", QUESTION), extra_body=more)
    error: Any = caught.value.body
    assert error["type"] == "invalid_request_error"
    assert "code" in error
    assert "param" in error
    assert caught.value.response.headers["content-type"] == "application/json"


def test_a_schema_that_the_core_refuses_is_a_bad_request_in_streams_too(server: HttpServer) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            list(chat(server, stream=stream, extra_body={"guided_regex": "(((("}))


def test_other_errors_have_their_own_types(server: HttpServer) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError, match="winter"):
        client.chat.completions.create(model="winter", messages=QUESTION)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="spring", prompt="x", suffix="y")
    with pytest.raises(openai.BadRequestError, match="generates text"):
        client.embeddings.create(model="spring", input="x")
    assert httpx.get(f"{server.url}/v1/chat/completions").status_code == 405
    assert httpx.post(f"{server.url}/v1/chat/completions", content=b"{").status_code == 400
    assert httpx.post(f"{server.url}/sleep").status_code == 403


def test_an_id_of_the_client_comes_back(server: HttpServer) -> None:
    found = httpx.get(f"{server.url}/version", headers={"x-request-id": "abc-1"})
    assert found.headers["x-request-id"] == "abc-1"
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"messages": QUESTION, "max_tokens": 3}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"x-request-id": "abc-2", "traceparent": trace})
    until(lambda: "abc-2" in server.out)
    line = json.loads(next(line for line in server.out.splitlines() if "abc-2" in line))
    assert line["status"] == 200
    assert line["tokens"] == 3
    assert line["traceparent"] == trace
    assert line["route"] == "/v1/chat/completions"


def test_a_client_that_leaves_ends_its_request(server: HttpServer, daemon: Daemon) -> None:
    endless = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    stream = chat(server, STORY, stream=True, **endless)
    next(iter(stream))
    until(lambda: running(daemon) == 1)
    stream.close()
    began = time.monotonic()
    until(lambda: running(daemon) == 0)
    assert time.monotonic() - began < 2.0
    with pytest.raises(openai.APITimeoutError):
        chat(server, STORY, timeout=0.3, **endless)
    began = time.monotonic()
    until(lambda: running(daemon) == 0)
    assert time.monotonic() - began < 2.0
    until(lambda: '"status":499' in server.out)


def test_cancelled_tasks_of_the_async_client(server: HttpServer, daemon: Daemon) -> None:
    async def main() -> None:
        async with server.async_client() as client:
            given: Any = {"model": "spring", "messages": STORY, "extra_body": {"ignore_eos": True}}
            calls = [client.chat.completions.create(max_tokens=3000, **given) for _ in range(8)]
            await cancel_when_running(daemon, calls)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    until(lambda: running(daemon) == 0)


def test_keys(keyed: HttpServer, daemon: Daemon) -> None:
    model = keyed.client("sk-first").models.list().data[0].id
    for key in ("sk-first", "sk-heavy"):
        found = keyed.client(key).chat.completions.create(model=model, messages=QUESTION, max_tokens=2)  # type: ignore[arg-type]
        assert found.choices[0].message.content
    assert keyed.client("sk-first").models.retrieve(model).id == model
    short = keyed.client("sk-first").completions.create(model="model", prompt="x", max_tokens=1)
    assert short.model == "model", "the last part of the path"
    weights = {
        one["name"].split()[1]: one["weight"] for one in daemon.status()[1]["frontends"] if "http" in one["name"]
    }
    assert weights["heavy"] == 3
    assert weights["first"] == 1
    for key in ("sk-wrong", ""):
        for path in ("/v1/models", "/metrics", "/load", "/version"):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert httpx.get(f"{keyed.url}{path}", headers=headers).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        keyed.client("sk-wrong").models.list()
    assert httpx.get(f"{keyed.url}/health").status_code == 200
    assert httpx.get(f"{keyed.url}/version", headers={"x-api-key": "sk-first"}).status_code == 200


def test_tenants_share_no_cached_prefix(keyed: HttpServer) -> None:
    long = [{"role": "user", "content": "Tell me a story about an otter. " * 30}]

    def cached(key: str) -> int:
        given = {"model": keyed.client(key).models.list().data[0].id, "max_tokens": 1, "temperature": 0}
        usage: Any = keyed.client(key).chat.completions.create(messages=long, **given).usage  # type: ignore[call-overload]
        return int(usage.prompt_tokens_details.cached_tokens)

    assert [cached(key) > 0 for key in ("sk-first", "sk-first", "sk-heavy", "sk-heavy")] == [False, True, False, True]


def test_administration_needs_the_key_of_an_administrator(keyed: HttpServer) -> None:
    def post(path: str, key: str) -> httpx.Response:
        return httpx.post(f"{keyed.url}{path}", headers={"authorization": f"Bearer {key}"}, timeout=60)

    assert post("/reset_prefix_cache", "sk-first").status_code == 403
    for cache in ("prefix", "mm", "encoder"):
        assert post(f"/reset_{cache}_cache", "sk-root").status_code == 200
    assert post("/sleep?level=0", "sk-root").status_code == 200
    headers = {"authorization": "Bearer sk-root"}
    assert httpx.get(f"{keyed.url}/is_sleeping", headers=headers).json() == {"is_sleeping": True}
    assert post("/wake_up", "sk-root").status_code == 200
    assert httpx.get(f"{keyed.url}/is_sleeping", headers=headers).json() == {"is_sleeping": False}
    assert post("/sleep?level=x", "sk-root").status_code == 400


def test_a_full_queue_is_a_rate_limit(folder: Path) -> None:
    with short_folder() as own:
        daemon = Daemon(own, "--max-requests-in-flight", "2")
        daemon.ready_line()
        server = HttpServer(own, "--connect", daemon.address).wait_ready()
        try:
            client = server.client()
            options: Any = {"messages": STORY, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
            streams = [client.chat.completions.create(model="", stream=True, **options) for _ in range(2)]
            for stream in streams:
                next(iter(stream))
            for more in ({}, {"stream": True}):
                with pytest.raises(openai.RateLimitError) as caught:
                    client.chat.completions.create(model="", **options, **more)
                assert int(caught.value.response.headers["retry-after"]) >= 1
            for stream in streams:
                stream.close()
        finally:
            server.end()
            daemon.end()


def test_images_in_messages(folder: Path, tmp_path: Path) -> None:
    made = media_models.make("llava", tmp_path / "llava")
    image = media_folders.file_of(media_folders.picture(1))
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    parts: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    sizes = {"max_model_len": 256, "dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "block_size": 16}
    with LLM(str(made), **sizes) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (expected,) = llm.chat([{"role": "user", "content": parts}], greedy, use_tqdm=False)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    server = HttpServer(folder, "--model", str(made), *flags).wait_ready()
    try:
        extra = {"ignore_eos": True, "return_token_ids": True}
        for stream in (False, True):
            options: Any = {"model": "", "max_tokens": 12, "stream": stream, "extra_body": extra}
            found = chat(server, [{"role": "user", "content": parts}], **options)
            choices = [one for chunk in found for one in chunk.choices] if stream else found.choices
            ids = [token for one in choices for token in getattr(one, "token_ids", None) or []]
            assert ids == expected.outputs[0].token_ids
        parts[0]["image_url"]["url"] = "data:image/png;base64,AAAA"
        with pytest.raises(openai.BadRequestError):
            chat(server, [{"role": "user", "content": parts}], model="")
    finally:
        server.end()
