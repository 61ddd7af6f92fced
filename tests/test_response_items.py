"""What /v1/responses and /v1/messages are made of, without a server: items, events, store, messages for templates."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from daemons import short_folder
from mainspring.engine.text.chat_template import template_messages
from mainspring.engine.text.response_reader import Piece
from mainspring.web.exchange import Answer, Request
from mainspring.web.failures import HttpError
from mainspring.web.forwarding import Forwarding
from mainspring.web.messages_api import MessagesBody, _Blocks, _chat_body
from mainspring.web.response_items import Items, chat_messages
from mainspring.web.response_store import ResponseStore, Stored
from mainspring.web.responses_api import ResponsesApi

PIECES = [
    Piece("reasoning", "Ra"),
    Piece("reasoning", "in?"),
    Piece("content", "Let me "),
    Piece("content", "look."),
    Piece("tool", "", 0, "call_1", "weather"),
    Piece("tool", '{"city":', 0),
    Piece("tool", ' "Oslo"}', 0),
    Piece("tool", "", 1, "call_2", "now"),
    Piece("tool", "{}", 1),
    Piece("content", "Done."),
]


@pytest.mark.parametrize("size", [1, 3, len(PIECES)])
def test_pieces_become_items_and_a_message(size: int) -> None:
    items = Items()
    events = [one for at in range(0, len(PIECES), size) for one in items.add(PIECES[at : at + size])]
    events += items.close("completed")
    assert [item["type"] for item in items.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert all(item["status"] == "completed" for item in items.output)
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert done == items.output
    added = [one["item"] for one in events if one["type"] == "response.output_item.added"]
    assert all(item["status"] == "in_progress" for item in added)
    assert items.message() == {
        "role": "assistant",
        "content": "Let me look.Done.",
        "reasoning_content": "Rain?",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }


def test_each_part_of_text_has_its_own_log_probabilities() -> None:
    items = Items(lambda text: [{"token": text}])
    events = [*items.add(PIECES), *items.close("completed")]
    texts = [["Let me ", "look."], ["Done."]]
    assert [[one["token"] for one in items.output[at].get("content")[0]["logprobs"]] for at in (1, 4)] == texts
    deltas = [one for one in events if one["type"] == "response.output_text.delta"]
    assert all(one["logprobs"] == [{"token": one["delta"]}] for one in deltas)
    done = [one["logprobs"] for one in events if one["type"] == "response.output_text.done"]
    assert [[one["token"] for one in logprobs] for logprobs in done] == texts
    added = [one["part"] for one in events if one["type"] == "response.content_part.added"]
    assert all(not part.get("logprobs") for part in added)
    assert "logprobs" not in items.output[0]["content"][0], "of reasoning"


def test_pieces_become_blocks() -> None:
    blocks = _Blocks()
    events = [*blocks.add(PIECES), *blocks.close()]
    assert [block["type"] for block in blocks.content] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert blocks.content[2]["input"] == {"city": "Oslo"}
    starts = [one["index"] for one in events if one["type"] == "content_block_start"]
    stops = [one["index"] for one in events if one["type"] == "content_block_stop"]
    assert starts == stops == list(range(5))
    arguments = '{"city":"\\ud800"}'  # half a surrogate pair, which no text can have
    blocks.add([Piece("tool", arguments, 0, "call_3", "weather")])
    blocks.close()
    assert arguments.encode() in msgspec.json.encode(blocks.content)


def test_input_items_become_messages() -> None:
    messages, items = chat_messages(
        [
            {"role": "developer", "content": "Be short."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "Rain."},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "Noon."}]},
        ]
    )
    calls = [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
        {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    assert messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "Rain."},
        {"role": "tool", "tool_call_id": "b", "content": "Noon."},
    ]
    assert all(item["id"] for item in items)


def test_each_answer_of_the_model_keeps_its_own_reasoning() -> None:
    given = [
        one
        for text in ("One", "Two")
        for one in (
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": f"{text}?"}]},
            {"role": "assistant", "content": f"{text}."},
        )
    ]
    assert chat_messages(given)[0] == [
        {"role": "assistant", "content": f"{text}.", "reasoning_content": f"{text}?"} for text in ("One", "Two")
    ]


@pytest.mark.parametrize(
    "item",
    [
        {},
        {"role": "user"},
        {"type": "function_call", "name": "f"},
        {"type": "image"},
        {"role": "x", "content": "a"},
        {"type": "function_call_output", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": "data:,"}]},
    ],
)
def test_an_item_of_no_known_form_is_refused(item: Any) -> None:
    with pytest.raises(HttpError, match=r"input\[0\]"):
        chat_messages([item])


def test_blocks_become_messages() -> None:
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "Rain."}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    body = _chat_body(MessagesBody(messages=given, system="Be short.", thinking={"type": "disabled"}))
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert body.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "Rain."},
        {"role": "user", "content": "So?"},
    ]
    assert body.chat_template_kwargs == {"enable_thinking": False}
    assert not body.continue_final_message


def test_templates_get_arguments_as_objects() -> None:
    def calls(arguments: str | None) -> Any:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        (found,) = template_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
        return found["tool_calls"][0]["function"]["arguments"]

    assert calls('{"a": 1}') == {"a": 1}
    assert calls("") == calls(None) == {}
    assert calls('{"a": ') == '{"a": '  # a model wrote it, and was cut
    assert calls('{"a": "\\ud800"}') == '{"a": "\\ud800"}'  # no text can have half a surrogate pair


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_templates_get_reasoning_under_each_of_its_names(name: str) -> None:
    (found,) = template_messages([{"role": "assistant", "content": None, name: "So."}])
    assert (found["reasoning"], found["reasoning_content"], found["thinking"]) == ("So.", "So.", "So.")
    (found,) = template_messages([{"role": "assistant", "content": "Yes.", name: "So."}])
    assert (found["reasoning"], found["reasoning_content"], "thinking" in found) == ("So.", "So.", False)
    for plain in ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes.", name: None}):
        assert template_messages([plain]) == [plain]


def stored(size: int, tenant: str = "one") -> Stored:
    return Stored(tenant, {"text": "x" * size}, [{"role": "user"}], [])


def test_the_store_keeps_the_latest_up_to_its_bounds() -> None:
    store = ResponseStore(max_responses=3, max_bytes=10_000)
    for number in "abc":
        store.add(number, stored(10))
    assert store.get("one", "a") == stored(10)  # used, so that b is the next to go
    store.add("d", stored(10))
    assert [number for number in "abcd" if store.get("one", number)] == ["a", "c", "d"]
    store.add("e", stored(9_900))
    assert [number for number in "acde" if store.get("one", number)] == ["e"]
    store.add("f", stored(20_000))  # longer than the bound
    assert (store.get("one", "f"), len(store)) == (None, 1)
    store.add("e", stored(10))
    store.add("g", stored(9_000))
    assert len(store) == 2
    store.remove("one", "e")
    store.remove("one", "unknown")
    assert (store.get("one", "e"), len(store)) == (None, 1)
    assert len(msgspec.json.encode(stored(10))) < 100


def test_a_response_is_shown_to_its_own_tenant_only() -> None:
    api = ResponsesApi(cast(Any, None), cast(Any, None), Forwarding("", 0, 1))
    api._store.add("resp_1", stored(10))

    def asked(tenant: str) -> Any:
        return SimpleNamespace(tenant=SimpleNamespace(name=tenant))

    assert api._stored(asked("one"), "resp_1").tenant == "one"
    with pytest.raises(HttpError, match="there is no response 'resp_1'") as caught:
        api._stored(asked("other"), "resp_1")
    assert caught.value.status == 404


def test_an_id_names_its_worker() -> None:
    first, second = Forwarding("/nowhere", 0, 2), Forwarding("/nowhere", 1, 2)
    number = second.marked("resp_abc")
    assert (first.elsewhere(number), second.elsewhere(number)) == (1, None)
    assert first.elsewhere(first.marked("resp_abc")) is None
    for strange in ("", "resp_xyz", "resp_fff", "resp_-01"):
        assert first.elsewhere(strange) is None


@pytest.mark.parametrize("kind", ["json", "events", "gone", "dies"])
def test_a_worker_is_asked_over_its_socket(kind: str) -> None:
    """Also when the client leaves before the end of a stream, of which the other worker hears."""
    left: list[str] = []
    tasks: set[asyncio.Task[None]] = set()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (scope["path"], dict(scope["headers"])[b"authorization"]) == ("/v1/responses/resp_1", b"Bearer key")
        body = (await receive())["body"]
        assert asyncio.current_task() in tasks, "the worker must not end before this"
        content = b"application/json" if kind == "json" else b"text/event-stream"
        await send({"type": "http.response.start", "status": 202, "headers": [(b"content-type", content)]})
        await send({"type": "http.response.body", "body": b"got " + body, "more_body": True})
        if kind == "dies":
            return
        if kind == "gone":
            left.append((await receive())["type"])
        else:
            await send({"type": "http.response.body", "body": b"."})

    async def run(folder: str) -> None:
        asking, asked = Forwarding(folder, 0, 2), Forwarding(folder, 1, 2)
        scope = {"method": "POST", "path": "/v1/responses/resp_1", "query_string": b""}
        request = Request({**scope, "headers": [(b"authorization", b"Bearer key")]}, cast(Any, None), {}, 0)
        with pytest.raises(HttpError, match="is being restarted"):
            await asking.ask(1, request)
        await asked.listen(app, tasks)
        found = await asking.ask(1, request, b"body")
        if isinstance(found, Answer):
            assert (kind, found.status, found.body) == ("json", 202, b"got body.")
            return
        events = cast(Any, found.events)
        assert await anext(events) == b"got body"
        if kind == "dies":
            with pytest.raises(HttpError, match="has ended") as caught:
                await anext(events)
            assert caught.value.status == 503
        elif kind == "events":
            assert [one async for one in events] == [b"."]
        else:
            await events.aclose()
            async with asyncio.timeout(30):
                while not left:
                    await asyncio.sleep(0.01)
            assert left == ["http.disconnect"]

    with short_folder() as folder:
        asyncio.run(run(str(folder)))


@pytest.mark.parametrize(("sizes", "left"), [((10, 10), 2), ((2_000, 10), 1)])
def test_the_tenant_that_has_most_gives_up_its_responses(sizes: tuple[int, int], left: int) -> None:
    store = ResponseStore(max_responses=4, max_bytes=5_000)
    store.add("mine", stored(sizes[1], "one"))
    for number in range(8):
        store.add(f"{number}", stored(sizes[0], "two"))
    assert store.get("one", "mine") is not None
    assert store.get("two", "mine") is None
    assert store.get("two", "7") is not None
    assert len(store) > left
