"""A connection to the HTTP server: how requests come, answers go, and clients leave."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from http_servers import certificate
from mainspring.web import protocol, worker
from mainspring.web.app import App
from mainspring.web.counters import Counters, shared_file
from mainspring.web.exchange import DIRECT, Answer, Request
from mainspring.web.router import Router
from mainspring.web.tenants import Tenant, Tenants


@pytest.fixture(autouse=True)
def _rounds_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test has its own event loop, in which nothing of another one's waits."""
    monkeypatch.setattr(protocol.LimitedProtocol, "_rounds", protocol._Rounds())


def on_a_connection(
    app: Any,
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, bytes]],
    files: tuple[str, str] | None = None,
) -> bytes:
    """What `talk` finds out on a connection to a server of this application; `files`: of `certificate`, for https."""
    mine = theirs = None
    if files is not None:
        mine, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=files[0])
        mine.load_cert_chain(*files)

    async def run() -> bytes:
        config, state = uvicorn.Config(app, ws="none", lifespan="off", log_config=None), ServerState()
        config.load()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: protocol.LimitedProtocol(config, state, {}), "127.0.0.1", 0, ssl=mine)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=theirs)
        try:
            return await asyncio.wait_for(talk(reader, writer), 20)
        finally:
            writer.close()
            server.close()

    with asyncio.Runner(loop_factory=worker.loop_factory()) as runner:
        return runner.run(run())


@pytest.mark.parametrize("rest", ["GET /", "\r\n"])
def test_a_header_after_another_request_may_not_come_slowly_either(monkeypatch: pytest.MonkeyPatch, rest: str) -> None:
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.4)  # between requests a connection may wait
        writer.write(rest.encode())
        return await reader.read()

    assert on_a_connection(app, talk).startswith(b"HTTP/1.1 408 ")


def test_what_comes_of_a_body_is_not_copied_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    receive_data = protocol.LimitedProtocol.data_received

    def data_received(self: protocol.LimitedProtocol, data: bytes) -> None:
        nonlocal most
        receive_data(self, data)
        most = max(most, len(self._rest))

    monkeypatch.setattr(protocol.LimitedProtocol, "data_received", data_received)
    size = 8 << 20

    async def app(scope: Any, receive: Any, send: Any) -> None:
        came, more = 0, True
        while more:
            message = await receive()
            came, more = came + len(message["body"]), message["more_body"]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
        await send({"type": "http.response.body", "body": b"%d" % came})

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"a" * size)
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")
        return await reader.readexactly(7)

    assert on_a_connection(app, talk) == b"%d" % size
    assert 0 < most < 1 << 20


def test_a_body_that_comes_byte_by_byte_is_parsed_in_pieces() -> None:
    size, pieces = protocol.PIECE_BYTES + 100, list[bytes]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            pieces.append(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
        for part in (head, *[b"%d" % (at % 10) for at in range(size)]):
            writer.write(part)
            await asyncio.sleep(0)
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")  # which has none
        return answer + await reader.readuntil(b"\r\n\r\n")

    assert on_a_connection(app, talk).count(b"200 OK") == 2
    assert b"".join(pieces) == b"".join(b"%d" % (at % 10) for at in range(size))
    assert len([one for one in pieces if one]) <= 3, "not a call for each byte"


def test_a_client_that_leaves_after_a_second_request_is_noticed_by_the_first() -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        await begun.wait()
        writer.close()
        await left.wait()
        return b"left"

    assert on_a_connection(app, talk) == b"left"


def test_connections_that_end_together_are_closed_in_several_rounds() -> None:
    async def run() -> None:
        config, state = uvicorn.Config(lambda *_: None, ws="none", lifespan="off", log_config=None), ServerState()
        config.load()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: protocol.LimitedProtocol(config, state, {}), "127.0.0.1", 0)
        clients = [await asyncio.open_connection(*server.sockets[0].getsockname()) for _ in range(50)]
        while len(state.connections) < 50:
            await asyncio.sleep(0)
        for _, writer in clients:
            writer.close()
        before, most = 50, 0
        while state.connections:
            await asyncio.sleep(0)
            most, before = max(most, before - len(state.connections)), len(state.connections)
        assert most <= 2 * protocol.CLOSED_AT_ONCE
        server.close()

    with asyncio.Runner(loop_factory=worker.loop_factory()) as runner:
        runner.run(asyncio.wait_for(run(), 20))


def test_parts_that_go_without_asgi_are_chunks_like_the_others() -> None:
    takes = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        direct = scope["extensions"][DIRECT]
        takes.append(direct.takes_parts)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        takes.append(direct.takes_parts)  # the header waits for the first part
        for _ in range(2):
            await send({"type": "http.response.body", "body": b"hello", "more_body": True})
            takes.append(direct.takes_parts)
            direct.write_part(b" world, ")
        direct.flow.pause_writing()
        takes.append(direct.takes_parts)
        direct.flow.resume_writing()
        await send({"type": "http.response.body", "body": b"bye"})
        takes.append(direct.takes_parts)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        return await reader.readuntil(b"0\r\n\r\n")

    said = b"5\r\nhello\r\n8\r\n world, \r\n"
    assert on_a_connection(app, talk) == said + said + b"3\r\nbye\r\n0\r\n\r\n"
    assert takes == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("request_line", "headers", "bodies", "writes"),
    [
        ("GET / HTTP/1.1", [(b"content-length", b"2")], [b"ok"], [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]),
        ("HEAD / HTTP/1.1", [(b"content-length", b"2")], [b"ok"], [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"]),
        (
            "GET / HTTP/1.1",
            [],
            [b"a", b"b", b""],
            [
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n",
                b"1\r\nb\r\n",
                b"0\r\n\r\n",
            ],
        ),
        (
            "POST / HTTP/1.1\r\nexpect: 100-continue",
            [(b"content-length", b"0")],
            [b""],
            [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"],
        ),
        # a handler that fails between the two
        ("GET / HTTP/1.1", [(b"content-length", b"2")], [], [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"]),
    ],
)
def test_a_header_goes_out_with_the_first_part(
    monkeypatch: pytest.MonkeyPatch, request_line: str, headers: list[Any], bodies: list[bytes], writes: list[bytes]
) -> None:
    written, made = [], protocol.LimitedProtocol.connection_made

    class Noting:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

        def write(self, data: bytes) -> None:
            written.append(data)
            self._transport.write(data)

    monkeypatch.setattr(protocol.LimitedProtocol, "connection_made", lambda self, real: made(self, Noting(real)))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for at, body in enumerate(bodies, 1):
            await send({"type": "http.response.body", "body": body, "more_body": at < len(bodies)})

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(f"{request_line}\r\nconnection: close\r\nhost: x\r\n\r\n".encode())
        return await reader.read()

    assert on_a_connection(app, talk) == b"".join(written)
    assert [one.replace(b"connection: close\r\n", b"") for one in written] == writes


def test_a_client_that_leaves_before_its_answer_leaves_no_garbage() -> None:
    begun, kept = asyncio.Event(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        kept.append(weakref.ref(scope["extensions"][DIRECT]))
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await begun.wait()
        writer.close()
        for _ in range(200):
            await asyncio.sleep(0.01)
            if kept[0]() is None:
                return b"gone"
        return b"there"

    gc.collect()
    gc.disable()
    try:
        assert on_a_connection(app, talk) == b"gone"
    finally:
        gc.enable()


def test_an_answer_whose_length_is_told_has_no_parts_without_asgi() -> None:
    takes = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        takes.append(scope["extensions"][DIRECT].takes_parts)
        await send({"type": "http.response.body", "body": b"ok"})

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        return await reader.readuntil(b"ok")

    assert on_a_connection(app, talk).endswith(b"ok")
    assert takes == [False]


class Waiting:
    """An application with one route, whose handler waits until its client has gone, and then says so."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.begun, self.left, self.size = asyncio.Event(), asyncio.Event(), 0
        with shared_file(1) as file:
            self.counters = Counters(file.fileno(), 1, 0)
        self.router = Router()
        self.router.add("POST", "/", self._wait)
        nobody = Tenant("everybody", 1.0, False, lambda _: pytest.fail("nobody connects"))
        self.app = App(self.router, Tenants(nobody, {}), self.counters, most, 5.0)

    async def _wait(self, request: Request, body: None) -> Answer:
        self.size = request.size
        self.begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            self.left.set()
        return Answer(b"")


@pytest.mark.parametrize(
    ("size", "again"),
    [
        (0, 0),
        (10, 0),
        (300_000, 0),
        (0, 1),
        (10, 1),
    ],  # a body that comes with the header, and one that reading pauses in
)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_leaves_ends_its_request(size: int, again: int, chunked: bool) -> None:
    waiting = Waiting()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"a" * size) if chunked and size else b"a" * size
        told = b"transfer-encoding: chunked" if chunked and size else b"content-length: %d" % size
        writer.write((b"POST / HTTP/1.1\r\nhost: x\r\n" + told + b"\r\n\r\n" + body) * (1 + again))
        await writer.drain()
        await waiting.begun.wait()
        writer.transport.abort()
        await waiting.left.wait()
        await asyncio.sleep(0)
        return b"%d" % waiting.size

    assert on_a_connection(waiting.app, talk) == b"%d" % size
    assert 'http_requests_total{status="499"} 1' in waiting.counters.lines()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_body_in_chunks_has_a_limit_too(at_once: bool) -> None:
    waiting = Waiting(most=100)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        if not at_once:
            await asyncio.sleep(0.05)
        writer.write(b"65\r\n" + b"a" * 101 + b"\r\n" + (b"0\r\n\r\n" if at_once else b""))
        return await reader.readline()

    assert on_a_connection(waiting.app, talk).startswith(b"HTTP/1.1 413 ")
    assert not waiting.begun.is_set()


def test_who_leaves_after_an_answer_ends_no_later_work() -> None:
    """What an application does after its answer is not for the client."""
    done, told = asyncio.Event(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"][DIRECT].watch(lambda: told.append(True))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        await asyncio.sleep(0.1)
        done.set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        await done.wait()
        return b"done"

    assert on_a_connection(app, talk) == b"done"
    assert not told


def test_who_has_left_is_told_of_at_once() -> None:
    told = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        direct = scope["extensions"][DIRECT]
        while (await receive())["type"] != "http.disconnect":
            pass
        assert direct.take_body() is None
        direct.watch(lambda: told.append(True))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await writer.drain()
        writer.transport.abort()
        while not told:
            await asyncio.sleep(0.01)
        return b"told"

    assert on_a_connection(app, talk) == b"told"


def test_a_large_answer_ends_when_a_slow_client_has_taken_it(tmp_path: Path) -> None:
    body, ended = bytes(range(256)) * (128 << 10), asyncio.Event()

    async def handler(request: Request, body_: None) -> Answer:
        return Answer(body)

    waiting = Waiting()
    waiting.router.add("GET", "/large", handler)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await waiting.app(scope, receive, send)
        ended.set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(100):
            await asyncio.sleep(0)
            assert not ended.is_set(), "the connection is closed while a client has most of its answer to read"
        found = await reader.read()
        await ended.wait()
        return found

    assert on_a_connection(app, talk, certificate(tmp_path)) == body


TLS = pytest.param(True, marks=pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux has TCP_INFO"))


@pytest.mark.parametrize("tls", [False, TLS])
@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_reads_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reads: bool, tls: bool
) -> None:
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", 0.2)
    part, count = bytes(1 << 20), 64
    left = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["scheme"] == ("https" if tls else "http")
        scope["extensions"][DIRECT].watch(left.set)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(count):
            await send({"type": "http.response.body", "body": part, "more_body": number < count - 1})

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        if not reads:
            await left.wait()
            return b"left"
        size = 0
        while size < len(part) * count:
            try:
                size += len(await reader.readexactly(4 << 20))
            except asyncio.IncompleteReadError as error:
                return b"all" if error.partial.endswith(b"\r\n0\r\n\r\n") else b"left"
            await asyncio.sleep(0.05)
        return b"all"

    files = certificate(tmp_path) if tls else None
    assert on_a_connection(app, talk, files) == (b"all" if reads else b"left")
