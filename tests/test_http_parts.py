"""The parts of the HTTP server that need no process: routes, keys, errors, options, counters, chunks."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.engine.args import EngineArgs
from mainspring.engine.async_llm_engine import AsyncLLMEngine
from mainspring.engine.request.outputs import Logprob
from mainspring.engine.text.response_formats import REASONING_FORMATS
from mainspring.engine.text.response_reader import ResponseReader
from mainspring.ipc import errors
from mainspring.ipc.async_client import AsyncClient
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError
from mainspring.ipc.messages import Finished
from mainspring.ipc.params import RequestOutputKind, SamplingParams
from mainspring.web import bodies, chat, completions, serve_options
from mainspring.web.app import App
from mainspring.web.bodies import ChatBody, CompletionBody, listed_inputs, sampling_params
from mainspring.web.counters import Counters, shared_file
from mainspring.web.exchange import Answer, Events, Request, answer, event
from mainspring.web.failures import HttpError, http_error
from mainspring.web.logprobs import TextLogprobs, chat_logprobs, completion_logprobs
from mainspring.web.openapi import document
from mainspring.web.pooling import MAX_INPUTS, PoolingApi, RerankBody
from mainspring.web.reader import Piece, delta_of, read_whole
from mainspring.web.router import Router
from mainspring.web.served_adapters import ServedAdapters, adapters_file
from mainspring.web.service import LARGE_BODY, Service, made, together
from mainspring.web.tenants import THREADS, Tenant, Tenants, digest, load_api_keys
from test_async_llm_engine import ScriptedClient
from test_detokenizer import LLAMA, PLAIN_BYTES, WORDPIECE


async def nothing(request: Request, body: Any) -> Answer:
    return answer({"params": request.params, "tenant": request.tenant.name, "body": msgspec.to_builtins(body)})


def tenant(name: str, admin: bool = False) -> Tenant:
    return Tenant(name, 1.0, admin, lambda _: pytest.fail("nobody connects"))


class Body(msgspec.Struct):
    text: str


@pytest.fixture
def router() -> Router:
    made = Router()
    made.add("GET", "/things", nothing)
    made.add("POST", "/things", nothing, Body)
    made.add("GET", "/things/{name}", nothing)
    made.add("POST", "/things/{name}/end", nothing, access="admin")
    made.add("GET", "/models/{id:path}", nothing)
    made.add("GET", "/health", nothing, access="open")
    made.add("POST", "/forms", nothing, Body, form=True)
    return made


@pytest.fixture
def counters() -> Counters:
    file = shared_file(2)
    return Counters(file.fileno(), 2, 0)


# ---------------------------------------------------------------------- routes


def test_routes(router: Router) -> None:
    assert router.find("GET", "/things")[0].method == "GET"
    assert router.find("HEAD", "/things")[0].method == "GET"
    assert router.find("GET", "/things/a%b")[1] == {"name": "a%b"}
    assert router.find("POST", "/things/x/end")[1] == {"name": "x"}
    assert router.find("GET", "/models/a")[1] == {"id": "a"}
    assert router.find("GET", "/models/org/a/b")[1] == {"id": "org/a/b"}
    for method, path, status in (
        ("DELETE", "/things", 405),
        ("POST", "/models/a/b", 405),
        ("GET", "/things/x/end", 405),
        ("GET", "/things/x/y", 404),
        ("GET", "/", 404),
        ("GET", "/things/", 200),
    ):
        if status == 200:
            assert router.find(method, path)[1] == {"name": ""}
            continue
        with pytest.raises(HttpError) as caught:
            router.find(method, path)
        assert caught.value.status == status
        assert bool(dict(caught.value.headers).get(b"allow")) == (status == 405)


def test_another_method_is_told_which_ones_there_are(router: Router, counters: Counters) -> None:
    found = Exchange(app_of(router, counters), "DELETE", "/things")
    assert (found.status, found.headers[b"allow"]) == (405, b"GET, HEAD, POST")


# ---------------------------------------------------------------------- the application


class Exchange:
    """A request to an application, without a server."""

    def __init__(self, app: Any, method: str, path: str, body: bytes = b"", headers: Sequence[Any] = ()) -> None:
        self.sent: list[dict[str, Any]] = []
        self._parts = [body]
        self.left = asyncio.Event()
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": list(headers)}
        asyncio.run(asyncio.wait_for(app({**scope, "client": ("127.0.0.1", 1)}, self._receive, self._send), 20))

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(one["body"] for one in self.sent[1:])


def app_of(router: Router, counters: Counters, keys: dict[str, Tenant] | None = None, **options: Any) -> App:
    tenants = Tenants(tenant("everybody"), {digest(key.encode()): one for key, one in (keys or {}).items()})
    return App(router, tenants, counters, 1000, 1.0, **options)


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def test_a_request_is_answered_and_counted(router: Router, counters: Counters) -> None:
    app = app_of(router, counters)
    found = Exchange(app, "POST", "/things", b'{"text":"x"}')
    assert json.loads(found.body) == {"params": {}, "tenant": "everybody", "body": {"text": "x"}}
    assert (found.status, found.headers[b"content-length"]) == (200, str(len(found.body)).encode())
    assert len(found.headers[b"x-request-id"]) == 32
    assert Exchange(app, "POST", "/things", b'{"text":1}').status == 400
    assert Exchange(app, "POST", "/things", b" " * 1001).status == 413
    assert Exchange(app, "GET", "/none").status == 404
    lines = counters.lines()
    assert 'http_requests_total{status="200"} 1' in lines
    assert 'http_requests_total{status="400"} 1' in lines
    assert 'http_requests_total{status="413"} 1' in lines
    assert "http_requests_in_flight 0" in lines
    assert 'http_request_duration_seconds_bucket{le="+Inf"} 4' in lines


def test_a_form_is_read_as_its_route_says(router: Router, counters: Counters) -> None:
    app, headers = app_of(router, counters), [(b"content-type", b'multipart/form-data; boundary="x"')]
    form = b'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\nHi.\r\n--x--\r\n'
    found = Exchange(app, "POST", "/forms", form, headers)
    assert (found.status, json.loads(found.body)["body"]) == (200, {"text": "Hi."})
    assert Exchange(app, "POST", "/forms", form).status == 400
    assert Exchange(app, "POST", "/forms", form[:-8], headers).status == 400
    assert Exchange(app, "POST", "/forms", form * 20, headers).status == 413
    error = json.loads(Exchange(app, "POST", "/forms", b"{}").body)["error"]
    assert (error["type"], "multipart/form-data" in error["message"]) == ("invalid_request_error", True)
    bodies = {path: document(router)["paths"][path]["post"]["requestBody"]["content"] for path in ("/forms", "/things")}
    assert [[*content] for content in bodies.values()] == [["multipart/form-data"], ["application/json"]]


def test_who_may_ask(router: Router, counters: Counters) -> None:
    app = app_of(router, counters, {"sk-1": tenant("one"), "sk-2": tenant("two", admin=True)})
    assert json.loads(Exchange(app, "GET", "/things", headers=bearer("sk-1")).body)["tenant"] == "one"
    assert json.loads(Exchange(app, "GET", "/things", headers=[(b"x-api-key", b"sk-2")]).body)["tenant"] == "two"
    assert Exchange(app, "GET", "/things").status == 401
    assert Exchange(app, "GET", "/things", headers=bearer("sk-3")).status == 401
    assert Exchange(app, "GET", "/health").status == 200
    assert Exchange(app, "POST", "/things/x/end", headers=bearer("sk-1")).status == 403
    assert Exchange(app, "POST", "/things/x/end", headers=bearer("sk-2")).status == 200
    assert Exchange(app_of(router, counters), "POST", "/things/x/end").status == 403


def test_pages_of_other_origins_may_ask_only_if_they_are_listed(router: Router, counters: Counters) -> None:
    origin = [(b"origin", b"http://a")]
    for origins, allowed in ((), False), (["http://b"], False), (["http://a"], True), (["*"], True):
        app = app_of(router, counters, origins=origins)
        found = Exchange(app, "GET", "/things", headers=origin)
        assert (found.headers.get(b"access-control-allow-origin") == b"http://a") == allowed
        assert Exchange(app, "OPTIONS", "/things", headers=origin).status == (204 if allowed else 405)
    names = (b"access-control-request-headers", b"authorization,x-stainless-os")
    found = Exchange(app, "OPTIONS", "/things", headers=[*origin, names])
    assert found.headers[b"access-control-allow-headers"] == names[1], "those of OpenAI's client, too"


def test_headers_for_pages_of_other_origins_are_sent_once(router: Router, counters: Counters) -> None:
    async def events(request: Request, body: Any) -> Events:
        async def parts() -> AsyncIterator[bytes]:
            yield event({"text": "x"})

        return Events(parts())

    router.add("GET", "/events", events)
    app = app_of(router, counters, origins=["*"])
    for method, path in (("GET", "/things"), ("GET", "/events"), ("GET", "/none"), ("OPTIONS", "/things")):
        names = [name for name, _ in Exchange(app, method, path, headers=[(b"origin", b"http://a")]).sent[0]["headers"]]
        assert b"access-control-allow-origin" in names
        assert len(names) == len(set(names))


def test_an_error_before_the_first_event_is_a_status_and_later_an_event(counters: Counters) -> None:
    async def events(count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            yield event({"number": number})
        raise InvalidRequestError("no more")

    async def stream(request: Request, body: None) -> Events:
        return Events(events(int(request.params["count"])))

    router = Router()
    router.add("GET", "/{count}", stream)
    app = app_of(router, counters)
    found = Exchange(app, "GET", "/0")
    assert (found.status, json.loads(found.body)["error"]["message"]) == (400, "no more")
    found = Exchange(app, "GET", "/2")
    assert found.status == 200
    lines = [line for line in found.body.decode().split("\n\n") if line]
    assert lines[:2] == ['data: {"number":0}', 'data: {"number":1}']
    assert json.loads(lines[2][6:])["error"]["message"] == "no more"
    assert lines[3:] == ["data: [DONE]"]


def test_a_client_that_leaves_ends_its_handler(router: Router, counters: Counters) -> None:
    ended = []

    async def wait(request: Request, body: None) -> Answer:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        return answer(None)

    router.add("GET", "/wait", wait)
    app = app_of(router, counters)
    scope = {"type": "http", "method": "GET", "path": "/wait", "query_string": b"", "headers": []}
    messages = [{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        pytest.fail("nobody is there")

    began = time.monotonic()
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))
    assert ended
    assert time.monotonic() - began < 10
    assert 'http_requests_total{status="499"} 1' in counters.lines()


def test_a_stream_that_the_server_ends_is_told_so_in_its_own_form(counters: Counters) -> None:
    async def events() -> AsyncIterator[bytes]:
        yield event({"number": 1})
        await asyncio.sleep(60)

    async def stream(request: Request, body: None) -> Events:
        return Events(events(), b"", lambda error: event(error["error"]["message"], "error"))

    router = Router()
    router.add("GET", "/", stream)
    app, sent, parts = app_of(router, counters), list[dict[str, Any]](), [b""]

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": parts.pop()}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def run() -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
        task = asyncio.ensure_future(app(scope, receive, send))
        while len(sent) < 2:
            await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(asyncio.wait_for(run(), 20))
    assert sent[-1]["body"] == b'event: error\ndata: "the server shuts down"\n\n'


class Written:
    """What a handler sends directly and as events, in order."""

    def __init__(self, takes_parts: bool) -> None:
        self.takes_parts, self.all, self.direct = takes_parts, b"", 0

    def write_part(self, part: bytes) -> None:
        assert part
        self.all += part
        self.direct += 1


@pytest.mark.parametrize("kind", ["chat", "reasoning", "completion"])
def test_a_stream_is_the_same_with_and_without_direct_parts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Outputs of several kinds: text, a part of a character, several tokens, a pause of the client, the end."""
    monkeypatch.setattr(AsyncClient, "launch", ScriptedClient)
    steps = ["<think>", "I ", "see", "</think>", "Hello", " w\u00f6rld", "!", " <b>", " end"]

    async def answer_of(direct: Written | None, pauses: bool) -> tuple[bytes, int]:
        engine: Any = AsyncLLMEngine.from_engine_args(EngineArgs())
        tokens = [engine.tokenizer.encode(text, add_special_tokens=False) for text in steps]
        params = SamplingParams(max_tokens=1000, output_kind=RequestOutputKind.DELTA)
        stream = engine.generate([5], params, "r")
        await stream.begin()
        request: Any = SimpleNamespace(direct=direct, num_tokens=0)
        made: Any
        if kind == "completion":
            sent = completions._Sent(CompletionBody(prompt="x", stream=True), "m", [("", "")], [stream])
            sent.id, sent.created = "c", 1
            made = completions._events(request, sent)
        else:
            body = msgspec.json.decode(b'{"messages": [], "stream": true}', type=ChatBody)
            readers = partial(ResponseReader, None, REASONING_FORMATS["deepseek_r1"], {}, "")
            talk = chat.Conversation("c", "m", 1, body, stream, readers if kind == "reasoning" else None, None)
            made = chat._events(request, talk)
        written = direct or Written(False)

        async def read() -> None:
            async for part in made:
                written.all += part

        task, client = asyncio.ensure_future(read()), engine.engine_core
        (handle,) = (one.handle for one in client.added)
        for number, ids in enumerate(tokens):
            if direct is not None and pauses:
                direct.takes_parts = number % 3 != 0
            half = len(ids) // 2
            for some in (ids[:half], ids[half:]):
                client.say(*((handle, token) for token in some))
                for _ in range(10):
                    await asyncio.sleep(0)
        client.say(finished=[Finished(handle, "length")])
        await task
        engine.shutdown()
        return written.all, request.num_tokens

    def run(direct: Written | None, pauses: bool = False) -> tuple[bytes, int]:
        return asyncio.run(asyncio.wait_for(answer_of(direct, pauses), 60))

    expected, all_parts, some_parts = run(None), Written(True), Written(True)
    assert expected[0].count(b"data: ") > 6
    assert run(all_parts) == expected
    assert run(some_parts, pauses=True) == expected
    assert 0 < some_parts.direct < all_parts.direct


def test_a_chat_template_of_a_request_is_refused_unless_they_are_trusted() -> None:
    given: Any = (None, None, "m", {}, None)
    Service(*given).check_template(None)
    with pytest.raises(HttpError, match="--trust-request-chat-template"):
        Service(*given).check_template("{{ messages }}")
    Service(*given, trusts_templates=True).check_template("{{ messages }}")


def test_a_model_may_have_several_names() -> None:
    adapters = SimpleNamespace(all=lambda: {"lora": "adapter"})
    service = Service(*cast(Any, (None, None, "org/m", adapters, None)), aliases=["n", "org/m", "o"])
    assert service.names == ["org/m", "n", "o"]
    assert {service.model(asked) for asked in (None, "", "org/m", "n", "o")} == {("org/m", None)}
    assert service.model("m") == ("m", None)
    assert service.model("lora") == ("lora", "adapter")
    assert service.is_base("o")
    with pytest.raises(HttpError, match="'p' does not exist"):
        service.model("p")


def test_threads_are_limited_for_each_tenant_until_their_work_ends() -> None:
    goes_on, began = threading.Event(), list[int]()

    def request_of(one: Tenant) -> Request:
        scope = {"method": "POST", "path": "/", "query_string": b"", "headers": []}
        return Request(scope, one, {}, LARGE_BODY)

    async def settled(count: int) -> None:
        while len(began) < count:
            await asyncio.sleep(0.01)

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4 * THREADS))
        mine, other = request_of(tenant("one")), request_of(tenant("two"))

        def work(number: int) -> int:
            began.append(number)
            goes_on.wait()
            return number

        tasks = [asyncio.create_task(made(mine, partial(work, number))) for number in range(THREADS + 1)]
        await settled(THREADS)
        assert await made(other, lambda: "at once") == "at once"
        tasks[0].cancel()  # its client leaves, but its thread works on
        await asyncio.wait(tasks[:1])
        assert await made(other, lambda: "at once") == "at once"
        assert began == [*range(THREADS)], "the last one waits"
        goes_on.set()
        assert await asyncio.gather(*tasks[1:]) == [*range(1, THREADS + 1)]

    async def guarded() -> None:
        try:
            await asyncio.wait_for(run(), 20)
        finally:
            goes_on.set()

    asyncio.run(guarded())


def test_pairs_of_texts_are_counted_and_then_encoded_beside_the_loop() -> None:
    threads = []

    def encode_pair(one: str, two: str) -> Any:
        threads.append(threading.current_thread())
        raise InvalidRequestError("enough")

    tokenizer = SimpleNamespace(encode_pair=encode_pair, media={}, get_vocab=lambda: {"a": 1})

    async def get_tokenizer() -> Any:
        return tokenizer

    model = SimpleNamespace(tasks=["classify"], max_model_len=64)
    core = SimpleNamespace(model=model)
    engine = SimpleNamespace(engine_core=core, tokenizer=tokenizer, get_tokenizer=get_tokenizer)
    one = tenant("one")
    one.use(cast(Any, engine))
    engine.dead_error = core.lost_since = None
    service: Any = Service(*cast(Any, (None, None, "m", {}, None)))

    def rerank(query: str, count: int) -> None:
        body = RerankBody(query=query, documents=["x"] * count)
        asyncio.run(PoolingApi(service).rerank(cast(Any, SimpleNamespace(tenant=one, size=100)), body))

    for query, count, says in (("a", MAX_INPUTS + 1, "the limit is 2048"), ("a" * 2000, 9, "limit is 64 tokens")):
        with pytest.raises(HttpError, match=says):
            rerank(query, count)
    assert not threads
    with pytest.raises(InvalidRequestError, match="enough"):
        rerank("a", 2)
    assert threading.main_thread() not in threads


def test_counters_of_several_workers_are_summed() -> None:
    file = shared_file(3)
    rows = [Counters(file.fileno(), 3, row) for row in range(3)]
    for one in rows:
        one.began()
    rows[0].ended(200, 0.02)
    rows[1].ended(777, 1000.0)
    assert [one.in_flight for one in rows] == [1, 1, 1]
    assert 'http_requests_total{status="other"} 1' in rows[2].lines()
    assert 'http_request_duration_seconds_bucket{le="0.05"} 1' in rows[2].lines()
    Counters(file.fileno(), 3, 2)  # a worker that follows one that died
    assert rows[0].in_flight == 0


# ---------------------------------------------------------------------- keys, errors, options


def test_a_tenant_whose_connection_takes_long_is_told_so() -> None:
    may_connect, made = threading.Event(), []

    def connect(one: Tenant) -> Any:
        made.append(one)
        may_connect.wait(30)
        return SimpleNamespace(dead_error=None, engine_core=SimpleNamespace(lost_since=None))

    async def run() -> None:
        one = Tenant("one", 1.0, False, connect, patience=0.05)
        for found in await asyncio.gather(*(one.engine() for _ in range(3)), return_exceptions=True):
            assert isinstance(found, HttpError)
            assert (found.status, dict(found.headers)[b"retry-after"]) == (503, b"5")
        may_connect.set()
        await asyncio.sleep(0.2)
        assert await one.engine() is await one.engine()
        assert len(made) == 1

    asyncio.run(run())


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# comment\n\nsk-#1 one\n sk-2  two weight=2.5 admin\n")
    one, two = load_api_keys(str(path))
    assert (one.name, one.digest, one.weight, one.admin) == ("one", digest(b"sk-#1"), 1.0, False)
    assert (two.name, two.weight, two.admin) == ("two", 2.5, True)
    weights = ("weight=x", "weight=-1", "weight=101")
    for text in ("", "sk-1", "sk-1 weight=2", *(f"sk-1 a {one}" for one in weights), "sk-1 a b", "sk-1 a\nsk-1 b"):
        path.write_text(text)
        with pytest.raises(InvalidArgumentError, match="keys"):
            load_api_keys(str(path))
    with pytest.raises(InvalidArgumentError, match="can't be read"):
        load_api_keys(str(tmp_path / "none"))


@pytest.mark.parametrize("error", [*errors.BY_NAME.values(), ValueError, RecursionError, msgspec.DecodeError])
def test_each_error_has_a_status_and_a_type(error: type[Exception]) -> None:
    found = http_error(error("this is wrong"))
    told = found.body()["error"]
    expected = {
        "OverloadedError": 429,
        "NotPermittedError": 403,
        "InvalidRequestError": 400,
        "NotSupportedError": 400,
        "EngineDeadError": 503,
        "RequestFailedError": 500,
        "RecursionError": 400,
        "DecodeError": 400,
        "ValueError": 500,
    }
    assert found.status == expected.get(error.__name__, found.status)
    assert set(told) == {"message", "type", "param", "code"}
    assert ("this is wrong" in told["message"]) == (error is not ValueError)
    assert (b"retry-after" in dict(found.headers)) == (found.status in (429, 503))


def test_an_error_of_validation_names_the_field() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'{"messages":[],"stop":[1]}', type=ChatBody)
    assert http_error(caught.value).param == "stop[0]"
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b"{}", type=ChatBody)
    assert "messages" in http_error(caught.value).message


def test_an_id_of_a_request_is_short() -> None:
    with pytest.raises(msgspec.ValidationError, match="length <= 256"):
        msgspec.convert({"messages": [], "request_id": "x" * 257}, ChatBody)


def options_of(*arguments: str) -> Any:
    parser = argparse.ArgumentParser(conflict_handler="resolve")  # as `mainspring serve` has it
    serve_options.add_cli_args(parser)
    return serve_options.from_cli_args(parser.parse_args(arguments))


def test_names_of_vllm() -> None:
    given = "--tool-call-parser hermes --ssl-certfile c --ssl-keyfile k --api-server-count 2 --enable-auto-tool-choice"
    options, config = options_of("org/model", *given.split(), "--disable-uvicorn-access-log", "--disable-log-requests")
    assert (options.tool_parser, options.tls_cert, options.tls_key, options.workers) == ("hermes", "c", "k", 2)
    assert not options.access_log
    assert config.model_config.model == "org/model"
    assert options_of("--allowed-origins", '["http://a"]')[0].cors_origins == ["http://a"]
    with pytest.raises(InvalidArgumentError, match="give one"):
        options_of("org/model", "--model", "other")
    with pytest.raises(InvalidArgumentError, match="cors_origins"):
        options_of("--allowed-origins", "5")
    page = (Path(__file__).parent.parent / "docs" / "migrating.md").read_text()
    for name in (*serve_options.VLLM_NAMES, *serve_options.VLLM_IGNORED):
        assert f"--{name.replace('_', '-')}" in page


def test_options(tmp_path: Path) -> None:
    options, config = options_of("--max-num-seqs", "3", "--port", "0")
    assert (options.host, options.workers, config.scheduler_config.max_num_seqs) == ("127.0.0.1", 1, 3)
    options, frontend = options_of("--connect", "ipc:///x", "--served-model-name", "m")
    assert (frontend, options.model_aliases) == ({"served_model_name": "m"}, [])
    options, config = options_of("--served-model-name", "m", "n", "o", "--port", "0")
    assert (config.model_config.shown_name, options.model_aliases) == ("m", ["n", "o"])
    (tmp_path / "file.toml").write_text(
        "[serve]\nport = 5\nmodel_aliases = ['n']\n"
        "[model_config]\nserved_model_name = 'm'\n[scheduler_config]\nmax_num_seqs = 7\n"
    )
    options, config = options_of("--config", str(tmp_path / "file.toml"), "--workers", "2")
    assert (config.model_config.shown_name, options.model_aliases) == ("m", ["n"])
    assert (options.port, options.workers, config.scheduler_config.max_num_seqs) == (5, 2, 7)
    for arguments, says in (
        (["--host", "0.0.0.0"], "api-key-file"),
        (["--connect", "ipc:///x", "--max-num-seqs", "3"], "max_num_seqs"),
        (["--key", "x"], "connect"),
        (["--tls-cert", "x"], "tls_key"),
        (["--workers", "0"], "workers"),
        (["--port", "70000"], "port"),
    ):
        with pytest.raises(InvalidArgumentError, match=says):
            options_of(*arguments)
    assert options_of("--host", "0.0.0.0", "--insecure")[0].insecure
    assert options_of("--host", "0.0.0.0", "--api-key-file", "x")[0].api_key_file == "x"
    assert options_of("--host", "::1")[0].host == "::1"


def test_a_chat_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{{ messages[0].content }}ü", encoding="utf-8")
    (tmp_path / "wrong").write_text("{% if %}")
    given = options_of("--chat-template", str(tmp_path / "file"), "--default-chat-template-kwargs", '{"a": {"b": 1}}')[
        0
    ]
    assert given.chat_template == "{{ messages[0].content }}ü"
    assert given.default_chat_template_kwargs == {"a": {"b": 1}}
    assert options_of("--chat-template", "{{ a }}")[0].chat_template == "{{ a }}"
    assert options_of()[0].chat_template is None
    for wrong, says in ((tmp_path / "none", "No such file"), (tmp_path / "wrong", "line 1"), ("{% if %}", "line 1")):
        with pytest.raises(InvalidArgumentError, match=f"chat_template.*{says}"):
            options_of("--chat-template", str(wrong))


# ---------------------------------------------------------------------- parameters


class Engine:
    generation_config: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99}  # noqa: RUF012


def params(**fields: Any) -> Any:
    body = msgspec.convert({"messages": [], **fields}, ChatBody)
    return sampling_params(Engine(), body, max_tokens=body.max_tokens)  # type: ignore[arg-type]


def test_adapters_are_listed_as_text_or_json() -> None:
    listed = ["mine=/a=b", '{"name": "other", "path": "/c", "base_model_name": "spring"}']
    with adapters_file(listed) as file:
        found = ServedAdapters(file.fileno()).all().values()
        assert [(one.lora_name, one.lora_int_id, one.lora_path) for one in found] == [
            ("mine", 1, "/a=b"),
            ("other", 2, "/c"),
        ]
    for wrong in ("mine", "{", '{"name": "x"}'):
        with pytest.raises(InvalidArgumentError, match="lora"):
            adapters_file([wrong])


def test_parameters_come_from_the_body_else_from_the_generation_config() -> None:
    found = params()
    assert (found.temperature, found.top_k, found.top_p, found.n, found.max_tokens) == (0.6, 20, 1.0, 1, None)
    found = params(temperature=0.9, top_k=0, n=2, stop="x", seed=3, logit_bias={"5": 200}, min_p=0.1, max_tokens=4)
    assert (found.temperature, found.top_k, found.n, found.stop, found.seed) == (0.9, 0, 2, ["x"], 3)
    assert (found.logit_bias, found.min_p, found.max_tokens) == ({5: 100.0}, 0.1, 4)
    assert params(stream=True).output_kind != params().output_kind


def test_options_of_a_stream_may_be_null() -> None:
    given = b'{"messages": [], "stream_options": {"include_usage": true, "continuous_usage_stats": null}}'
    options = msgspec.json.decode(given, type=ChatBody).stream_options
    assert options is not None
    assert (options.include_usage, options.continuous_usage_stats) == (True, None)


def test_parameters_of_equal_requests_are_equal_and_not_shared() -> None:
    checked = bodies._checked
    checked.cache_clear()
    given: dict[str, Any] = {"n": 2, "max_tokens": 5, "temperature": 0.6, "top_k": 20}
    expected = SamplingParams(**given, output_kind=RequestOutputKind.FINAL_ONLY)
    one, other = params(max_tokens=5, n=2), params(max_tokens=5, n=2)
    assert one == other
    assert checked.cache_info().hits == 1
    one.max_tokens, one.n = 1, 1
    assert params(max_tokens=5, n=2) == other == expected
    for large in ({"cache_salt": "x" * 9999}, {"stop": ["x"]}, {"logit_bias": {"5": 1}}):  # nothing large is kept
        size = checked.cache_info().currsize
        assert params(max_tokens=6, **large) == params(max_tokens=6, **large)
        assert checked.cache_info().currsize == size
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="top_p"):
            params(top_p=3.0)


def test_the_form_of_an_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert params(response_format=asked).structured_outputs.json == schema
    assert params(response_format={"type": "json_object"}).structured_outputs.json_object
    assert params(response_format={"type": "text"}).structured_outputs is None
    assert params(response_format={"type": "regex", "regex": "a+"}).structured_outputs.regex == "a+"
    assert params(guided_json=schema).structured_outputs.json == schema
    assert params(structured_outputs={"grammar": "start: /a/"}).structured_outputs.grammar == "start: /a/"
    tag: dict[str, Any] = {"structures": [], "triggers": []}
    found = params(response_format={"type": "structural_tag", **tag})
    assert json.loads(found.structured_outputs.structural_tag) == tag
    for wrong in ({"type": "xml"}, {}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 3}}):
        with pytest.raises(HttpError, match="response_format"):
            params(response_format=wrong)
    with pytest.raises(InvalidArgumentError):
        params(guided_json=schema, guided_regex="a")
    with pytest.raises(errors.UnknownArgumentError):
        params(structured_outputs={"colour": "red"})


@given(st.recursive(st.text(max_size=2) | st.integers(0, 9), lambda inner: st.lists(inner, max_size=3), max_leaves=6))
def test_prompts_are_one_or_several(value: Any) -> None:
    try:
        body = msgspec.convert({"prompt": value}, CompletionBody)
        found = listed_inputs(body.prompt, "prompt")  # type: ignore[arg-type]
    except (msgspec.ValidationError, HttpError):
        kinds = {type(one) for one in value} if isinstance(value, list) else {type(value)}
        assert kinds in ({int}, set()) if not isinstance(value, list) else value == [] or int in kinds or list in kinds
        return
    assert found == ([value] if isinstance(value, str) or isinstance(value[0], int) else value)


# ---------------------------------------------------------------------- outputs


class Upper:
    """Reads words in capitals as calls, and text in brackets as reasoning."""

    has_calls = False
    num_reasoning_tokens = 1

    def read(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        pieces = []
        for word in text.split():
            if word.isupper():
                self.has_calls = True
                pieces += [Piece("tool", '{"a":', 0, "call-1", word), Piece("tool", "1}", 0)]
            elif word[:1] == "[":
                pieces.append(Piece("reasoning", word))
            else:
                pieces.append(Piece("content", word))
        return pieces

    def end(self) -> list[Piece]:
        return [Piece("content", ".")]


def test_pieces_make_up_a_message_and_its_deltas() -> None:
    message = read_whole(Upper(), "[think] hello FIND you", [1])
    assert message == {
        "content": "helloyou.",
        "reasoning": "[think]",
        "reasoning_content": "[think]",
        "tool_calls": [{"id": "call-1", "type": "function", "function": {"name": "FIND", "arguments": '{"a":1}'}}],
    }
    assert delta_of(Piece("content", "x")) == {"content": "x"}
    first = {"index": 2, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert delta_of(Piece("tool", "", 2, "c", "f")) == {"tool_calls": [first]}
    more = {"tool_calls": [{"index": 2, "function": {"arguments": "{"}}]}
    assert delta_of(Piece("tool", "{", 2)) == more


def test_log_probabilities() -> None:
    entries = [{5: Logprob(-1.0, 3, "é"), 1: Logprob(-0.5, 1, "a"), 2: Logprob(-0.7, 2, "b")}]
    found = chat_logprobs([5], entries, 2)["content"][0]
    assert (found["token"], found["logprob"], found["bytes"]) == ("é", -1.0, [0xC3, 0xA9])
    assert [one["token"] for one in found["top_logprobs"]] == ["a", "b"]
    found = completion_logprobs([9, 5], [None, *entries], 1, 4, "xy")
    assert found == {
        "tokens": ["xy", "é"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"a": -0.5, "é": -1.0}],
        "text_offset": [4, 6],
    }
    assert chat_logprobs([1], [{1: Logprob(float("-inf"), 1, "a")}], 0)["content"][0]["logprob"] == -9999.0
    found = completion_logprobs([1], [{1: Logprob(-0.5, 1, "a"), 2: Logprob(-0.7, 2, "b")}], -1, 0)
    assert found["top_logprobs"] == [{"a": -0.5, "b": -0.7}]  # of all tokens


def test_log_probabilities_may_name_tokens_by_their_ids() -> None:
    entries = [{5: Logprob(-1.0, 2, "é"), 1: Logprob(-0.5, 1, "a")}]
    found = chat_logprobs([5], entries, 1, as_ids=True)["content"][0]
    assert (found["token"], found["bytes"], found["top_logprobs"][0]["token"]) == (
        "token_id:5",
        [0xC3, 0xA9],
        "token_id:1",
    )
    assert completion_logprobs([9, 5], [None, *entries], 1, 4, "xy", as_ids=True) == {
        "tokens": ["token_id:9", "token_id:5"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"token_id:1": -0.5, "token_id:5": -1.0}],
        "text_offset": [4, 6],  # of the text
    }


def test_a_token_that_is_a_part_of_a_character_has_its_own_bytes() -> None:
    own = [[byte] for byte in "a€".encode()]
    for tokenizer, ids in ((PLAIN_BYTES, PLAIN_BYTES.encode("a€")), (LLAMA, list("a€".encode()))):
        entries = [{token: Logprob(-1.0, 1, tokenizer.decode(token))} for token in ids]
        content = chat_logprobs(ids, entries, 1, tokenizer)["content"]
        assert [one["bytes"] for one in content] == own
        assert [one["top_logprobs"][0]["bytes"] for one in content] == own
    entries = [{0: Logprob(-1.0, 1, "\ufffd")}]
    assert chat_logprobs([0], entries, 0, WORDPIECE)["content"][0]["bytes"] == [*"\ufffd".encode()]


def test_log_probabilities_are_taken_with_the_parts_of_a_text() -> None:
    made = TextLogprobs()

    def add(ids: list[int]) -> None:
        entries = [{token: Logprob(-1.0, 1, LLAMA.decode(token))} for token in ids]
        made.add(ids, chat_logprobs(ids, entries, 0, LLAMA)["content"], LLAMA)

    def take(text: str) -> list[str]:
        return [one["token"] for one in made.take(text)]

    add(list(b"<a>bc</a> bc\xe2\x82\xac!?"))  # reasoning between marks, then content
    assert take("bc") == ["b", "c"]
    assert take("bc€!") == ["b", "c", "\ufffd", "\ufffd", "\ufffd", "!"]
    assert take("") == []
    assert take("rewritten") == ["?"]
    assert take("more") == []
    add([*b"a"])  # held back, with the next one
    add([*b"b"])
    assert take("ab") == ["a", "b"]
    word = LLAMA.get_vocab()["▁Hello"]
    add([word, word])
    assert take("Hello Hello") == ["Hello", "Hello"]  # alone, they lose their spaces


def test_streams_together_bring_all_outputs_and_are_closed() -> None:
    closed = []

    async def numbers(count: int, fail: bool = False) -> AsyncIterator[int]:
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield number
            if fail:
                raise ValueError("broken")
        finally:
            closed.append(count)

    async def collect(*streams: AsyncIterator[int]) -> list[tuple[int, int]]:
        return [pair async for pair in together(streams)]

    assert asyncio.run(collect(numbers(3))) == [(0, 0), (0, 1), (0, 2)]
    found = asyncio.run(collect(numbers(2), numbers(0), numbers(4)))
    assert sorted(found) == [(0, 0), (0, 1), *((2, number) for number in range(4))]
    closed.clear()
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(collect(numbers(1000), numbers(3, fail=True)))
    assert sorted(closed) == [3, 1000]
