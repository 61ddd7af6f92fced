"""What `mainspring serve` answers, validated against OpenAI's published schema: the file `openapi.yaml` or
`openapi.json` of github.com/openai/openai-openapi, whose path MAINSPRING_OPENAI_SCHEMA names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import jsonschema
import pytest
import yaml

import media_models
import pooled
import tool_models
from daemons import PATIENCE_S, short_folder
from http_servers import HttpServer
from media_folders import tone, wav_of
from tool_models import CALL, WEATHER, says

GIVEN = os.environ.get("MAINSPRING_OPENAI_SCHEMA")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not GIVEN, reason="MAINSPRING_OPENAI_SCHEMA does not name OpenAI's schema"),
]

EXCEPTIONS = {  # (schema, place in the answer) → why the answer differs there
    ("CreateCompletionResponse", "choices/*/finish_reason"): (
        "The schema is that of the whole completion. A chunk before the last one has no finish reason, and OpenAI's "
        "server sends null, too."
    ),
    ("CreateCompletionResponse", "usage"): (
        "The description of stream_options.include_usage says that all chunks but the last one have null here."
    ),
    ("CreateCompletionResponse", "choices/*/logprobs/token_logprobs/*"): (
        "With echo, the first token of a prompt has no log probability, and OpenAI's server sends null, too."
    ),
    ("CreateCompletionResponse", "choices/*/logprobs/top_logprobs/*"): "As token_logprobs.",
}

KEY = {"authorization": "Bearer sk-root"}
MOST_BYTES = 100_000
ASK: list[Any] = [{"role": "user", "content": "Rain in Oslo?"}]
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
FLAT: list[Any] = [{"type": "function", **WEATHER}]
TEXT = f"<think>\nRain?\n</think>\n\nLet me look.\n{CALL}\n{CALL}"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
NAMED = {"name": "n", "schema": SCHEMA, "strict": True}
USAGE = {"stream_options": {"include_usage": True}}
EVERY_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "calls": {**says(TEXT), "tools": TOOLS},
    "a call that must be": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "log probabilities of calls": {**says(TEXT), "tools": TOOLS, "logprobs": True, "max_tokens": 300},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    "several": {"n": 2},
    "usage": USAGE,
    "usage of each chunk": EVERY_USAGE,
    "stop": {**says("One, two."), "stop": ["two"]},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "log probabilities": {"logprobs": 2},
    "echo": {"echo": True, "logprobs": 2},
    "only echo": {"echo": True, "logprobs": 2, "max_tokens": 0},
    "several": {"prompt": ["Rain", "Sun"], "n": 2},
    "usage": USAGE,
    "usage of each chunk": EVERY_USAGE,
    "end": says("Yes."),
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": says("Yes."),
    "calls": {**says(TEXT), "tools": FLAT, "instructions": "Be short.", "metadata": {"a": "b"}, "user": "me"},
    "cut": {"max_output_tokens": 2, "temperature": 1, "top_p": 0.9, "truncation": "auto"},
    "log probabilities": {**says("Yes."), "include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "a schema": {"text": {"format": {"type": "json_schema", **NAMED}}, "reasoning": {"effort": "low"}},
    "a call that must be": {"tools": FLAT, "tool_choice": {"type": "function", "name": "weather"}},
    "required": {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False, "store": False},
}
INPUT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "Rain."},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "Sure?"},
]
WRONG: dict[str, tuple[int, str, str, bytes, dict[str, str]]] = {
    "a value": (400, "POST", "/v1/chat/completions", b'{"messages": [], "temperature": -1}', KEY),
    "no JSON": (400, "POST", "/v1/responses", b"{", KEY),
    "a model": (404, "POST", "/v1/completions", b'{"model": "none", "prompt": "x"}', KEY),
    "a task": (400, "POST", "/v1/embeddings", b'{"input": "x"}', KEY),
    "no such response": (404, "GET", "/v1/responses/resp_1", b"", KEY),
    "no such model": (404, "GET", "/v1/models/none", b"", KEY),
    "no key": (401, "GET", "/v1/models", b"", {}),
    "no such route": (404, "GET", "/v1/none", b"", KEY),
    "a method": (405, "GET", "/v1/chat/completions", b"", KEY),
    "too long": (413, "POST", "/v1/responses", b" " * (MOST_BYTES + 1), KEY),
}
EVENTS = {  # kinds of events that a response can have here
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
    "error",
}


class Answered(NamedTuple):
    name: str
    schema: str
    value: Any


class Client:
    """Asks a server, and keeps what it answers beside the schema's name for it."""

    def __init__(self, server: HttpServer) -> None:
        self._http = httpx.Client(base_url=server.url, headers=KEY, timeout=PATIENCE_S)
        self.answers: list[Answered] = []

    def ask(self, name: str, schema: str, path: str, body: dict[str, Any] | None = None, method: str = "") -> Any:
        found = self._http.request(method or ("GET" if body is None else "POST"), path, json=body)
        assert found.status_code == 200, (name, found.text)
        self.answers.append(Answered(name, schema, found.json()))
        return found.json()

    def hear(self, name: str, schema: str, path: str, **fields: str) -> None:
        """An answer to a form with a sound."""
        found = self._http.post(path, files={"file": wav_of(tone())}, data={"max_completion_tokens": "9", **fields})
        assert found.status_code == 200, (name, found.text)
        events = [line[6:] for line in found.text.splitlines() if line.startswith("data: {")]
        self.answers += [Answered(name, schema, json.loads(one)) for one in events or [found.text]]

    def stream(self, name: str, schema: str, path: str, body: dict[str, Any], abort: bool = False) -> None:
        """A streamed answer, with all its events.

        Args:
            abort: whether the core aborts the request after the first event.
        """
        last = b""
        with self._http.stream("POST", path, json={**body, "stream": True}) as found:
            for line in found.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line[6:])
                    self.answers.append(Answered(name, "ErrorResponse" if "error" in event else schema, event))
                    if abort:
                        abort = False
                        self.post("/pause?mode=abort")
                last = line.encode() or last
        assert found.status_code == 200, name
        assert last == b"data: [DONE]" or path == "/v1/responses", name

    def post(self, path: str) -> None:
        assert httpx.post(f"{self._http.base_url}{path}", headers=KEY, timeout=PATIENCE_S).status_code == 200

    def fail(self, name: str, status: int, method: str, path: str, content: bytes, headers: dict[str, str]) -> None:
        found = httpx.request(method, f"{self._http.base_url}{path}", content=content, headers=headers)
        assert found.status_code == status, (name, found.text)
        self.answers.append(Answered(name, "ErrorResponse", found.json()))


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with short_folder() as folder:
        model = tool_models.make(folder / "model")
        (folder / "keys").write_text("sk-root root admin\n")
        flags = ("--api-key-file", str(folder / "keys"), "--max-body-bytes", str(MOST_BYTES))
        started = HttpServer(folder, "--model", str(model), "--served-model-name", "tiny", *flags).wait_ready()
        yield started
        started.end()


@pytest.fixture(scope="module")
def answers(server: HttpServer) -> list[Answered]:
    """Everything that the server of a model that generates has answered."""
    client = Client(server)
    for name, more in CHATS.items():
        body: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 40, "seed": 1, **more}
        client.ask(name, "CreateChatCompletionResponse", "/v1/chat/completions", body)
        client.stream(name, "CreateChatCompletionStreamResponse", "/v1/chat/completions", body)
    for name, more in COMPLETIONS.items():
        body = {"model": "tiny", "prompt": "Rain", "max_tokens": 8, "seed": 1, **more}
        client.ask(name, "CreateCompletionResponse", "/v1/completions", body)
        client.stream(name, "CreateCompletionResponse", "/v1/completions", body)
    for name, more in RESPONSES.items():
        body = {"model": "tiny", "input": "Rain?", "max_output_tokens": 300, "seed": 1, **more}
        client.ask(name, "Response", "/v1/responses", body)
        client.stream(name, "ResponseStreamEvent", "/v1/responses", body)
    first = client.ask("items", "Response", "/v1/responses", {"input": INPUT, "tools": FLAT, **says("Yes.")})
    client.ask("stored", "Response", f"/v1/responses/{first['id']}")
    client.ask("stored items", "ResponseItemList", f"/v1/responses/{first['id']}/input_items")
    more = {"previous_response_id": first["id"], **says("Yes.")}
    client.ask("a second turn", "Response", "/v1/responses", {"input": "Sure?", **more})
    endless = {"input": "Rain?", "max_output_tokens": 8000, "ignore_eos": True}
    number = client.ask("background", "Response", "/v1/responses", {**endless, "background": True})["id"]
    client.ask("cancelled", "Response", f"/v1/responses/{number}/cancel", method="POST")
    client.stream("aborted", "ResponseStreamEvent", "/v1/responses", endless, abort=True)
    client.post("/resume")
    body = {"messages": ASK, "max_tokens": 8000, "ignore_eos": True}
    client.stream("aborted", "CreateChatCompletionStreamResponse", "/v1/chat/completions", body, abort=True)
    client.post("/resume")
    client.ask("models", "ListModelsResponse", "/v1/models")
    client.ask("a model", "Model", "/v1/models/tiny")
    for name, wrong in WRONG.items():
        client.fail(name, *wrong)
    return client.answers


class Schema:
    """The file. Parts of it are still written as OpenAPI 3.0 has them, with `nullable`, which version 3.1, as which the
    file describes itself, does not know. They are read as they were meant."""

    def __init__(self, path: Path) -> None:
        with path.open() as file:
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            document = json.load(file) if path.suffix == ".json" else yaml.load(file, loader)
        self._components = _with_nulls(document["components"])
        self._validators: dict[str, Any] = {}

    def errors(self, name: str, value: Any) -> list[tuple[str, str]]:
        """Where a value differs from the schema of this name, and how."""
        if name not in self._validators:
            whole = {"$ref": f"#/components/schemas/{name}", "components": self._components}
            self._validators[name] = _Validator(whole)
        errors = [leaf for error in self._validators[name].iter_errors(value) for leaf in _leaves(error)]
        return [
            ("/".join("*" if isinstance(at, int) else at for at in one.absolute_path), one.message) for one in errors
        ]


def _leaves(error: Any) -> list[Any]:
    """What is wrong, of several alternatives with the one that fits best: its errors lie deepest."""
    if not error.context:
        return [error]
    ways: dict[Any, list[Any]] = {}
    for one in error.context:
        ways.setdefault(one.relative_schema_path[0], []).extend(_leaves(one))
    return max(ways.values(), key=lambda found: max(len(one.absolute_path) for one in found))


def _with_nulls(node: Any) -> Any:
    if isinstance(node, list):
        return [_with_nulls(one) for one in node]
    if not isinstance(node, dict):
        return node
    made = {name: _with_nulls(one) for name, one in node.items()}
    return {"anyOf": [made, {"type": "null"}]} if made.pop("nullable", None) is True else made


def _alternatives(validator: Any, given: list[Any], value: Any, schema: Any) -> Iterator[Any]:
    """`anyOf` and `oneOf`, of those alternatives that have the value's type, so that an error is about this type."""
    kind = value.get("type") if isinstance(value, dict) else None
    fitting = [one for one in given if kind is None or kind in _kinds(validator, one)]
    rule = "oneOf" if "oneOf" in schema else "anyOf"
    yield from jsonschema.Draft202012Validator.VALIDATORS[rule](validator, fitting or given, value, schema)


def _kinds(validator: Any, schema: Any) -> list[str]:
    """The values of `type` that an object of this schema may have."""
    if "$ref" in schema:
        schema = validator._resolver.lookup(schema["$ref"]).contents
    parts = schema.get("allOf", [schema])
    if len(parts) > 1:
        return [kind for part in parts for kind in _kinds(validator, part)]
    return schema.get("properties", {}).get("type", {}).get("enum", [])  # type: ignore[no-any-return]


_Validator: Any = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"anyOf": _alternatives, "oneOf": _alternatives}
)


@pytest.fixture(scope="module")
def schema() -> Schema:
    assert GIVEN is not None
    return Schema(Path(GIVEN))


def check(schema: Schema, answers: list[Answered]) -> set[tuple[str, str]]:
    """Validate answers; → the exceptions that they need."""
    wrong, needed = set(), set()
    for name, kind, value in answers:
        for place, message in schema.errors(kind, value):
            if (kind, place) in EXCEPTIONS:
                needed.add((kind, place))
            else:
                wrong.add(f"{kind} ({name}): {place}: {message[:300]}")
    assert not wrong, "\n".join(sorted(wrong))
    return needed


def test_every_answer_and_event_validates(schema: Schema, answers: list[Answered]) -> None:
    assert check(schema, answers) == EXCEPTIONS.keys()


def test_every_kind_of_event_was_seen(answers: list[Answered]) -> None:
    assert {value["type"] for _, kind, value in answers if kind == "ResponseStreamEvent"} == EVENTS


def test_an_answer_that_lacks_a_field_does_not_validate(schema: Schema, answers: list[Answered]) -> None:
    for kind in {one.schema for one in answers}:
        value = next(one.value for one in answers if one.schema == kind)
        for name in ("object", "type", "error"):
            assert name not in value or schema.errors(kind, {key: value[key] for key in value if key != name})


def test_embeddings_validate(schema: Schema) -> None:
    with short_folder() as folder:
        model = pooled.make("qwen3", folder / "model", tokenizer=True)
        server = HttpServer(folder, "--model", str(model), "--runner", "pooling").wait_ready()
        try:
            client = Client(server)
            for given in ("Rain", ["Rain", "Sun"], [1, 2, 3]):
                client.ask(f"{given}", "CreateEmbeddingResponse", "/v1/embeddings", {"input": given})
            check(schema, client.answers)
        finally:
            server.end()


def test_transcripts_validate(schema: Schema) -> None:
    with short_folder() as folder:
        model = media_models.make("speech", folder / "model")
        server = HttpServer(folder, "--model", str(model)).wait_ready()
        try:
            client = Client(server)
            for kind, path in (("Transcription", "transcriptions"), ("Translation", "translations")):
                client.hear("plain", f"Create{kind}ResponseJson", f"/v1/audio/{path}")
                verbose = f"Create{kind}ResponseVerboseJson"
                client.hear("verbose", verbose, f"/v1/audio/{path}", response_format="verbose_json")
            client.hear("stream", "CreateTranscriptionResponseStreamEvent", "/v1/audio/transcriptions", stream="true")
            assert len(client.answers) > 6
            check(schema, client.answers)
        finally:
            server.end()
