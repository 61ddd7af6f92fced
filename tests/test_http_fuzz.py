"""Random bodies for every route: an answer is a result or an error object of status 4xx, never a failure of the
server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemons import Daemon, short_folder
from http_servers import HttpServer
from mainspring.web.bodies import ChatBody, CompletionBody
from mainspring.web.messages_api import MessagesBody
from mainspring.web.pooling import InputBody, RerankBody, ScoreBody
from mainspring.web.responses_api import ResponseBody
from mainspring.web.text_api import DetokenizeBody, TokenizeBody
from mainspring.web.transcriptions import TranscriptionBody
from tiers import examples

pytestmark = pytest.mark.slow

BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/embeddings": InputBody,
    "/v1/score": ScoreBody,
    "/rerank": RerankBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": MessagesBody,
}
TOKENS = st.integers(0, 200) | st.integers(-5, 2000)
LISTS = st.lists(st.lists(TOKENS, max_size=3), max_size=2)
WORDS = st.text(max_size=6) | st.sampled_from(["a fox", "{", "\ud83d\ude00", "<|user|>", "\x00"])
NUMBERS = st.integers(-2, 5) | st.integers() | st.floats(-3, 3) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS
ANYTHING = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3))
SCHEMAS = st.sampled_from(
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"$ref": "#/nowhere"},
        {"type": "colour"},
        {"pattern": "(("},
    ]
)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = st.fixed_dictionaries({"type": st.just("text"), "text": WORDS})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "critic"])},
        optional={
            "content": WORDS
            | st.none()
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": WORDS}))
            | ANYTHING,
            "name": WORDS,
            "tool_calls": st.just([CALL]) | ANYTHING,
            "tool_call_id": st.just("c"),
        },
    ),
    max_size=3,
)
FUNCTIONS = st.fixed_dictionaries({"name": WORDS}, optional={"parameters": SCHEMAS})
TOOL = st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS})
TOOLS = st.lists(TOOL | ANYTHING, max_size=2)
FORMS = st.sampled_from(["json", "regex", "choice", "grammar", "x"])
KNOWN: dict[str, Any] = {  # values that are often right, by field
    "messages": MESSAGES,
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["none", "auto", "required"])
    | st.builds(lambda name: {"type": "function", "function": {"name": name}}, WORDS),
    "prompt": WORDS
    | st.lists(WORDS, max_size=3)
    | st.lists(TOKENS, max_size=5)
    | st.lists(st.lists(TOKENS, max_size=3)),
    "response_format": st.builds(
        lambda kind, schema: {"type": kind, "json_schema": {"name": "x", "schema": schema}, "regex": "a+"},
        st.sampled_from(["text", "json_object", "json_schema", "regex", "grammar", "choice", "structural_tag", "xml"]),
        SCHEMAS,
    ),
    "guided_json": SCHEMAS,
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar", "x"]), ANYTHING, max_size=2
    ),
    "guided_regex": st.sampled_from(["[a-z]+", "((", "a{1,99999999}"]),
    "guided_grammar": st.sampled_from(["start: /a/", 'root ::= "a"', "???"]),
    "n": st.integers(0, 3),
    "best_of": st.integers(0, 4),
    "max_tokens": st.integers(0, 6),
    "max_completion_tokens": st.integers(0, 6),
    "logprobs": st.integers(-1, 3) | st.booleans(),
    "top_logprobs": st.integers(-1, 3),
    "prompt_logprobs": st.integers(-1, 3),
    "truncate_prompt_tokens": st.integers(-2, 5),
    "stream_options": st.just({"include_usage": True})
    | st.just({"include_usage": True, "continuous_usage_stats": True}),
    "input": WORDS | st.lists(TOKENS, max_size=4) | st.lists(WORDS, max_size=3),
    "tokens": st.lists(TOKENS, max_size=5),
    "logit_bias": st.dictionaries(st.integers(-2, 300).map(str) | WORDS, st.floats(-100, 100), max_size=3),
    "chat_template": st.sampled_from(
        [
            "{{ messages }}",
            "{% for",
            "{{ 1/0 }}",
            "{{ messages.__class__ }}",
            "{{ '{1}'.format(0) }}",
            "{% for a in [] %}" * 30 + "{% endfor %}" * 30,
        ]
    ),
    "model": st.just("spring"),
    "request_id": WORDS,
}
BOUND: dict[str, dict[str, Any]] = {  # of requests that leave it out, so that they end soon
    "/v1/chat/completions": {"max_tokens": 4, "max_completion_tokens": 4},
    "/v1/completions": {"max_tokens": 4},
    "/v1/responses": {"max_output_tokens": 4},
    "/v1/messages": {"max_tokens": 4},
}
# Fields that the APIs have each in a form of its own.
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image", "document", "x"])},
    optional={
        "text": WORDS,
        "id": st.just("c"),
        "tool_use_id": st.just("c"),
        "name": WORDS,
        "input": ANYTHING,
        "content": WORDS | ANYTHING,
        "thinking": WORDS,
        "source": st.dictionaries(WORDS, ANYTHING, max_size=2),
    },
)
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference", "x"])},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "developer", "critic"]),
        "content": WORDS | st.lists(PARTS | ANYTHING, max_size=2) | ANYTHING,
        "call_id": st.just("c"),
        "name": WORDS,
        "arguments": st.just("{}") | WORDS,
        "output": WORDS | ANYTHING,
        "summary": ANYTHING,
        "id": WORDS,
    },
)
TALK = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "critic"]), "content": WORDS | st.lists(BLOCKS, max_size=3)}
)
FLAT = st.fixed_dictionaries(
    {"name": WORDS},
    optional={"type": st.sampled_from(["function", "web_search"]), "parameters": SCHEMAS, "input_schema": SCHEMAS},
)
CHOICES = st.sampled_from(
    ["none", "auto", "required", {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}]
)
OWN: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": WORDS | st.lists(ITEMS | ANYTHING, max_size=3),
        "tools": st.lists(FLAT | ANYTHING, max_size=2),
        "tool_choice": CHOICES,
        "max_output_tokens": st.integers(0, 6),
        "include": st.lists(st.sampled_from(["message.output_text.logprobs", "x"]), max_size=2),
        "stream": st.booleans(),
        "text": st.builds(lambda schema: {"format": {"type": "json_schema", "name": "x", "schema": schema}}, SCHEMAS),
    },
    "/v1/messages": {
        "messages": st.lists(TALK | ANYTHING, max_size=3),
        "system": WORDS | st.lists(BLOCKS, max_size=2),
        "tools": st.lists(FLAT | ANYTHING, max_size=2),
        "tool_choice": CHOICES,
        "stream": st.booleans(),
        "stop_sequences": st.lists(WORDS, max_size=2),
        "thinking": st.sampled_from([{"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}, {}]),
    },
}
ENDS = {  # last events of streams that do not end with [DONE]
    "/v1/responses": {"response.completed", "response.incomplete", "response.failed"},
    "/v1/messages": {"message_stop", "error"},
}
OWN["/v1/messages/count_tokens"] = OWN["/v1/messages"]


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Bodies with a few fields, most of them of the right form."""
    kind, known = BODIES[path], {**KNOWN, **OWN.get(path, {})}
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    each = {name: known[name] | ANYTHING if name in known else LEAVES | ANYTHING for name in names}
    needed = [field.encode_name for field in msgspec.structs.fields(kind) if field.required]
    usual = st.fixed_dictionaries({name: known.get(name, WORDS) for name in needed})
    fields = st.lists(st.sampled_from(names), max_size=4, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: each[name] for name in chosen})
    )
    return st.builds(lambda one, two: {**one, **two}, usual, fields) | ANYTHING


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with short_folder() as folder:
        daemon = Daemon(folder)
        daemon.ready_line()
        options = ("--connect", daemon.address, "--served-model-name", "spring", "--no-access-log")
        started = HttpServer(folder, *options, "--trust-request-chat-template").wait_ready()
        yield started
        assert "Traceback" not in started.log, started.log[-5000:]
        started.end()
        daemon.end()


@pytest.mark.parametrize("path", BODIES)
def test_random_bodies(server: HttpServer, path: str) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)

    @settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
    @given(bodies(path))
    def run(body: Any) -> None:
        if isinstance(body, dict) and path in BOUND:
            body = {**BOUND[path], **body}
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        if response.status == 200:
            if response.headers["content-type"].startswith("text/event-stream"):
                if path in ENDS:
                    assert text.rpartition("event: ")[2].partition("\n")[0] in ENDS[path]
                else:
                    assert text.endswith("data: [DONE]\n\n")
                    assert '"error":' not in text or '"error":{"message"' in text
            else:
                json.loads(text)
            return
        assert 400 <= response.status < 500, text
        error = json.loads(text)["error"]
        assert set(error) == ({"message", "type"} if "messages" in path else {"message", "type", "param", "code"})
        assert error["message"]

    run()


def parts(name: str) -> st.SearchStrategy[Any]:
    """Entries of a form for a field: a text, or now and then a file."""
    text = NUMBERS.map(str) | WORDS | st.sampled_from(["true", "json", "en", "spring"])
    return st.tuples(
        st.just(name), st.tuples(st.none() | st.just("a.wav"), text.map(lambda one: one.encode("utf-8", "replace")))
    )


def forms() -> st.SearchStrategy[Any]:
    names = [field.encode_name for field in msgspec.structs.fields(TranscriptionBody)]
    names += ["timestamp_granularities[]", "include[]", "x"]
    return st.lists(st.sampled_from(names).flatmap(parts), max_size=5)


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_random_forms(server: HttpServer, path: str) -> None:
    """The model hears nothing, so each is refused."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)

    @settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
    @given(forms(), st.booleans(), st.none() | st.integers(0, 300))
    def run(fields: list[Any], has_file: bool, cut: int | None) -> None:
        files = [*fields, *[("file", ("a.wav", b"RIFF"))] * has_file]
        made = httpx.Request("POST", server.url, files=files or [("x", (None, b""))])
        made.read()
        connection.request("POST", path, made.content[:cut], {"content-type": made.headers["content-type"]})
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        assert response.status in (400, 404), error
        assert error["message"]

    run()
