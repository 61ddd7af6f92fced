"""Requests about what another worker remembers: its number is in the id, and it is asked over a Unix socket.

A request goes as one frame: its ASGI scope and its body. The answer comes as frames, each an ASGI message. Closing the
connection means that the client has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec

from .exchange import JSON, Answer, Events, Request
from .failures import HttpError

_MAX_FRAME = 1 << 30  # bytes
App = Callable[[Mapping[str, Any], Any, Any], Awaitable[None]]


class Forwarding:
    """Args:
    folder: of the sockets; empty: there is one worker only.
    row, rows: the worker's number, and how many there are.
    """

    def __init__(self, folder: str, row: int, rows: int) -> None:
        self._folder, self._row, self._rows = folder, row, rows
        self._server: asyncio.Server | None = None

    def marked(self, number: str) -> str:
        """An id that names this worker."""
        return f"{number}{self._row:03x}"

    def elsewhere(self, number: str) -> int | None:
        """The worker that an id names, if it is another one."""
        try:
            row = int(number[-3:], 16)
        except ValueError:
            return None
        return row if row != self._row and 0 <= row < self._rows else None

    async def ask(self, row: int, request: Request, body: bytes = b"") -> Answer | Events:
        """The answer of another worker.

        Raises:
            HttpError: it does not answer.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(self._path(row))
        except OSError:
            raise HttpError(503, "the worker that has this response is being restarted", retry_after=1) from None
        # this worker answers for origins; the length of a body that is encoded anew is another one
        kept = {name: text for name, text in request.headers.items() if name not in ("content-length", "origin")}
        headers = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in kept.items()]
        scope = {"type": "http", "method": request.method, "path": request.path, "query_string": request.query_string}
        try:
            await _write(writer, {**scope, "headers": headers}, body)
            start = await _read(reader)
            headers = [(bytes(name), bytes(text)) for name, text in start["headers"]]
            headers = [one for one in headers if one[0] not in (b"content-length", b"x-request-id")]
            if (b"content-type", JSON[1]) in headers:
                parts = [part async for part in _parts(reader)]
                writer.close()
                return Answer(b"".join(parts), start["status"], headers)
        except BaseException as error:
            writer.close()
            if isinstance(error, (OSError, EOFError)):
                raise HttpError(503, "the worker that has this response has ended", retry_after=1) from None
            raise

        async def events() -> AsyncIterator[bytes]:
            try:
                async for part in _parts(reader):
                    yield part
            except (OSError, EOFError):
                raise HttpError(503, "the worker that has this response has ended", retry_after=1) from None
            finally:
                writer.close()

        return Events(events(), b"")

    async def listen(self, app: App, tasks: set[asyncio.Task[None]]) -> None:
        """Answer other workers. tasks: those that a worker waits for before it ends; the answers are added."""
        if not self._folder:
            return

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if (task := asyncio.current_task()) is not None:
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            with contextlib.suppress(OSError, EOFError):
                scope, body = await _read(reader)
                sent = False

                async def receive() -> dict[str, Any]:
                    nonlocal sent
                    if not sent:
                        sent = True
                        return {"type": "http.request", "body": body, "more_body": False}
                    await reader.read(1)
                    return {"type": "http.disconnect"}

                await app(scope, receive, lambda message: _write(writer, message))
            writer.close()

        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(self._row))
        self._server = await asyncio.start_unix_server(serve, self._path(self._row))

    def _path(self, row: int) -> str:
        return os.path.join(self._folder, f"worker-{row}.sock")


async def _write(writer: asyncio.StreamWriter, *values: Any) -> None:
    frame = msgspec.msgpack.encode(values if len(values) > 1 else values[0])
    writer.write(len(frame).to_bytes(4, "big") + frame)
    await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MAX_FRAME:
        raise EOFError
    return msgspec.msgpack.decode(await reader.readexactly(size))


async def _parts(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The parts of a body, up to its end."""
    more = True
    while more:
        message = await _read(reader)
        yield message.get("body", b"")
        more = message.get("more_body", False)
