"""Requests that are malformed or hostile: each gets an error of its own or a closed connection, and others are served
meanwhile."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from daemons import PATIENCE_S, Daemon, short_folder, until
from http_servers import HttpServer, running

pytestmark = pytest.mark.slow

MIB = 1 << 20
CHAT = "/v1/chat/completions"
ENDLESS = {"messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with short_folder() as folder:
        started = Daemon(folder)
        started.ready_line()
        yield started
        started.end()


@pytest.fixture(scope="module")
def server(daemon: Daemon) -> Iterator[HttpServer]:
    with short_folder() as folder:
        started = HttpServer(folder, "--connect", daemon.address, "--body-timeout", "1").wait_ready()
        yield started
        assert started.process.poll() is None, "the server has survived"
        assert "Traceback" not in started.log
        started.end()


@pytest.fixture(autouse=True)
def _serves_others(server: HttpServer, daemon: Daemon) -> Iterator[None]:
    yield
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    status, answer = exchange(server, request(CHAT, json.dumps(body).encode()))
    assert status == 200
    assert json.loads(answer)["choices"][0]["message"]["content"] == "Paris"
    until(lambda: running(daemon) == 0)


def request(path: str, body: bytes = b"", *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer with a length; 0 if the connection was closed without one."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in data:
            if not (part := connection.recv(65536)):
                return 0, data
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head)
        length = int(found[1]) if found else 0
        while len(body) < length and (part := connection.recv(65536)):
            body += part
        return int(head.split()[1]), body
    return 0, data


def exchange(server: HttpServer, data: bytes) -> tuple[int, bytes]:
    with server.connect() as connection:
        with contextlib.suppress(ConnectionError):  # it is closed before all was sent
            connection.sendall(data)
        return read_answer(connection)


def is_closed(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


def memory(server: HttpServer) -> int:
    return psutil.Process(server.process.pid).memory_info().rss


def test_a_text_models_bodies_are_no_longer_than_its_context_may_need(server: HttpServer) -> None:
    long, longest = (json.dumps({"messages": [{"role": "user", "content": "a" * size}]}) for size in (3 << 20, 5 << 20))
    assert exchange(server, request(CHAT, long.encode()))[0] == 400  # decoded, and too many tokens
    assert exchange(server, request(CHAT, longest.encode()))[0] == 413


def test_more_connections_than_a_round_parses_are_all_answered(server: HttpServer) -> None:
    connections = [server.connect() for _ in range(200)]
    try:
        for connection in connections:
            connection.sendall(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n" * 20)
        for connection in connections:
            data = b""
            while data.count(b"HTTP/1.1 200") < 20 and (part := connection.recv(65536)):
                data += part
            assert data.count(b"HTTP/1.1 200") == 20
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_100_mb_is_refused_without_being_kept(server: HttpServer, announced: bool) -> None:
    before = memory(server)
    with server.connect() as connection:
        how = f"content-length: {100 * MIB}" if announced else "transfer-encoding: chunked"
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{how}\r\n\r\n".encode())
        part = b"a" * MIB
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(part if announced else b"%x\r\n%b\r\n" % (len(part), part))
        status, answer = read_answer(connection)
    assert status in (0, 413)
    if status:
        assert json.loads(answer)["error"]["type"] == "request_too_large"
    assert memory(server) - before < 80 * MIB


def test_bodies_that_are_announced_and_do_not_come_take_no_memory(server: HttpServer) -> None:
    before, opened = memory(server), [server.connect() for _ in range(20)]
    for connection in opened:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {16 * MIB}\r\n\r\n{{".encode())
    assert exchange(server, request("/version", method="GET"))[0] == 200
    assert memory(server) - before < 80 * MIB
    for connection in opened:
        connection.close()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * MIB,
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages":[{"role":"user","content":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}]}",
        b'{"messages":[{"role":"user","content":"x"}],"response_format":' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
        b'{"messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 100_000 + b"}",
        b'{"messages":[{"role":"user","content":"\xff\xfe"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b"",
        b"null",
        b'"text"',
    ],
)
def test_json_that_can_not_be_read_or_is_too_deep_is_a_bad_request(server: HttpServer, body: bytes) -> None:
    status, answer = exchange(server, request(CHAT, body))
    assert status == 400, answer[:300]
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "head",
    [
        "\r\n".join(f"x-{number}: y" for number in range(5000)),
        "x: " + "y" * MIB,
        "x" * MIB + ": y",
    ],
)
def test_a_flood_of_headers_ends_the_connection(server: HttpServer, head: str) -> None:
    before = memory(server)
    status, _ = exchange(server, f"GET /health HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode())
    assert status in (0, 400, 431)
    assert memory(server) - before < 32 * MIB
    status, _ = exchange(server, b"GET /" + b"a" * MIB + b" HTTP/1.1\r\n\r\n")
    assert status in (0, 400, 431)


def test_a_header_without_end_does_not_fill_the_memory(server: HttpServer) -> None:
    before = memory(server)
    with server.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        for _ in range(64):
            connection.sendall(b"y" * MIB)
    assert memory(server) - before < 32 * MIB


def test_a_slow_upload_times_out(server: HttpServer) -> None:
    with server.connect() as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode())
        began = time.monotonic()
        status, answer = read_answer(connection)
        assert status == 408
        assert json.loads(answer)["error"]["type"] == "timeout_error"
        assert 0.5 < time.monotonic() - began < 10
        assert is_closed(connection)


def test_a_body_that_comes_byte_by_byte_times_out(server: HttpServer) -> None:
    with server.connect() as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n".encode())
        connection.setblocking(False)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            connection.send(b" ")
            time.sleep(0.1)
            with contextlib.suppress(BlockingIOError):
                connection.recv(1, socket.MSG_PEEK)
                break
        connection.setblocking(True)
        assert read_answer(connection)[0] == 408


def test_a_body_that_comes_in_small_pieces_is_read(server: HttpServer) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
    data = request(CHAT, body)
    with server.connect() as connection:
        for at in range(0, len(data), 7):
            connection.sendall(data[at : at + 7])
            time.sleep(0.005)
        assert read_answer(connection)[0] == 200


def test_pipelined_requests_are_answered_in_order(server: HttpServer) -> None:
    paths = ["/version", "/nothing", "/load", "/v1/models"] * 200
    with server.connect() as connection:
        connection.sendall(b"".join(request(path, method="GET") for path in paths))
        data = b""
        while data.count(b"HTTP/1.1 ") < len(paths) or not data.endswith(b"}"):
            data += connection.recv(65536)
    assert [int(code) for code in re.findall(rb"HTTP/1.1 (\d+)", data)] == [200, 404, 200, 200] * 200


def test_a_half_closed_connection_ends_its_request(server: HttpServer, daemon: Daemon) -> None:
    with server.connect() as connection:
        connection.sendall(request(CHAT, json.dumps({**ENDLESS, "stream": True}).encode()))
        connection.recv(100)
        connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)


def test_a_reader_that_stops_holds_up_nobody(server: HttpServer, daemon: Daemon) -> None:
    """The answers of slow readers wait in the server's buffers, which are bounded."""
    before = memory(server)
    slow = []
    for _ in range(16):
        connection = server.connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request(CHAT, json.dumps({**ENDLESS, "stream": True, "logprobs": True}).encode()))
        slow.append(connection)
    until(lambda: running(daemon) == len(slow))
    status, _ = exchange(server, request("/version", method="GET"))
    assert status == 200
    assert memory(server) - before < 64 * MIB
    for connection in slow:
        connection.close()
    until(lambda: running(daemon) == 0)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 1000,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello",
        b"POST /v1/models HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /%ff%00/..%2f HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/models/%0d%0ax:y HTTP/1.1\r\nhost: x\r\nx-request-id: a\r\n\r\n",
        b"GET //// HTTP/1.1\r\nhost: x\r\n\r\n",
        b"OPTIONS /v1/models HTTP/1.1\r\nhost: x\r\norigin: http://evil\r\n\r\n",
    ],
)
def test_what_is_not_http_or_not_a_route_gets_an_error(server: HttpServer, data: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(data)
        connection.settimeout(10)
        connection.shutdown(socket.SHUT_WR)
        status, _ = read_answer(connection)
    assert status == 0 or 400 <= status < 500


def test_connections_that_say_nothing_do_not_keep_others_out(server: HttpServer) -> None:
    idle = [server.connect() for _ in range(300)]
    try:
        for connection in idle[::2]:
            connection.sendall(b"GET /hea")
        assert exchange(server, request("/version", method="GET"))[0] == 200
    finally:
        for connection in idle:
            connection.close()


def test_a_stream_goes_on_while_large_bodies_come(server: HttpServer) -> None:
    """Bodies of nearly the limit are decoded and refused, as prompts that are too long, while a stream runs."""
    body = json.dumps({"messages": [{"role": "user", "content": "word " * (4 * MIB // 5)}]}).encode()
    gaps: list[float] = []
    with server.connect() as connection:
        connection.sendall(request(CHAT, json.dumps({**ENDLESS, "max_tokens": 1500, "stream": True}).encode()))
        done = threading.Event()

        def read() -> None:
            last = time.monotonic()
            while not done.is_set() and (part := connection.recv(65536)):
                now = time.monotonic()
                gaps.append(now - last)
                last = now
                if b"[DONE]" in part:
                    break

        reader = threading.Thread(target=read)
        reader.start()
        statuses = [exchange(server, request(CHAT, body))[0] for _ in range(5)]
        reader.join(PATIENCE_S)
        done.set()
    assert statuses == [400] * 5
    assert max(gaps) < 1.0, "the loop was never blocked for long"
