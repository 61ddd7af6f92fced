"""What a streamed token costs at least in a server of this kind: a bare ASGI application on uvicorn without an engine.

It answers each request with ready-made events, one for each step, and all streams get theirs in the same step.
benchmarks/http_load.py starts this program.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

TEXT = b"ine"  # of a token
LOGGED = struct.Struct("id")  # max_tokens of a stream, and the time of its token
EVENT = b"data: %b,%b}\n\n" % (
    b'{"id":"chatcmpl-%032x","object":"chat.completion.chunk","created":1,"model":"m"' % 0,
    b'"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]' % TEXT,
)


class Floor:
    """Args:
    rate: steps a second.
    log: file of `LOGGED` records, one for each token.
    """

    def __init__(self, rate: float, log: io.RawIOBase) -> None:
        self._period, self._log = 1 / rate, log
        self._streams: dict[int, asyncio.Event] = {}  # max_tokens of the stream, which is its own

    async def _step(self) -> None:
        due = time.monotonic()
        while True:
            due += self._period
            await asyncio.sleep(due - time.monotonic())
            now = time.monotonic()
            for number, stream in self._streams.items():
                self._log.write(LOGGED.pack(number, now))
                stream.set()
            if not self._streams:
                self._log.flush()

    @contextlib.asynccontextmanager
    async def stepping(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._step())
        yield
        task.cancel()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        number = json.loads(body + message["body"])["max_tokens"]
        gone, stream = asyncio.ensure_future(receive()), asyncio.Event()
        self._streams[number] = stream
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        while not gone.done():
            await stream.wait()
            stream.clear()
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        del self._streams[number]


async def serve(rate: float, log: str) -> None:
    with open(log, "wb", buffering=1 << 16) as file, socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        floor = Floor(rate, file)
        options: dict[str, Any] = {"http": "httptools", "lifespan": "off", "access_log": False, "log_level": "error"}
        print(f"a bare server: http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        async with floor.stepping():
            await uvicorn.Server(uvicorn.Config(floor, **options)).serve([listener])


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(float(sys.argv[1]), sys.argv[2]))
