"""``mainspring batch IN.jsonl OUT.jsonl``: requests of a file in OpenAI's batch format, answered into another file.

Each answer is one line, written at once. After a kill the same command goes on: a last line that is not complete is cut
off, and requests that have an answer are not asked again. The requests take the way that they take through `mainspring
serve`, without a socket.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from tqdm import tqdm  # type: ignore[import-untyped]

from ..engine.request_queue import PATIENCE_S
from ..ipc.errors import InvalidArgumentError, NotSupportedError

if TYPE_CHECKING:
    from ..engine.async_llm_engine import AsyncLLMEngine
    from ..web.serve_options import ServeOptions
    from ..web.worker import Site

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/score")
_AGAIN = (429, 503, 504)  # statuses of requests that are asked again
_BEGIN = b'{"id":"batch_req_'  # of an answer
_PAUSES = (0.2, 0.5, 1.0, 2.0)  # seconds before a request is asked again; then always the last one


class Line(msgspec.Struct):
    """A request of the file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


def run(engine: AsyncLLMEngine, options: ServeOptions, source: Path, target: Path, max_concurrent: int) -> int:
    """Answer all requests that have no answer; how many answers are errors.

    Raises:
        InvalidArgumentError: a file can't be read, or is not in the format.
        EngineDeadError: the core is gone for good.
    """
    if max_concurrent < 1:
        raise InvalidArgumentError(f"max_concurrent is {max_concurrent}; it must be at least 1")
    try:
        from ..web.counters import shared_file
        from ..web.served_adapters import adapters_file
        from ..web.worker import Order, Site
    except ImportError as error:
        raise NotSupportedError(f'{error.name} is not installed: pip install "mainspring[serve]"') from error
    with ExitStack() as stack:
        ids = [line.custom_id for line in requests_of(source)]
        if len(set(ids)) < len(ids):
            twice = Counter(ids).most_common(1)[0][0]
            raise InvalidArgumentError(f"{source} has the custom_id {twice!r} twice")
        out = stack.enter_context(_opened(target))
        done = _answered(target)
        if strange := done.keys() - set(ids):
            raise InvalidArgumentError(f"{target} has an answer to {min(strange)!r}, which is not in {source}")
        counters = stack.enter_context(shared_file(1))
        adapters = stack.enter_context(adapters_file(options.lora_modules or ()))
        site = Site(Order(options, "", {}, None, 0, 1, counters.fileno(), adapters.fileno(), -1), engine)
        progress = stack.enter_context(tqdm(total=len(ids), initial=len(done), unit="request", disable=None))
        batch = _Batch(site, engine, out.fileno(), progress, sum(done.values()))
        asyncio.run(batch.run((line for line in requests_of(source) if line.custom_id not in done), max_concurrent))
    return batch.num_failed


def requests_of(source: Path) -> Iterator[Line]:
    """The requests of a file.

    Raises:
        InvalidArgumentError: the file or a line can't be read, or a line asks for what a batch can't have.
    """
    if source.exists() and not source.is_file():
        raise InvalidArgumentError(f"{source} is no regular file, and a batch is read several times")
    decoder = msgspec.json.Decoder(Line)
    try:
        file = source.open("rb")
    except OSError as error:
        raise InvalidArgumentError(f"{source} can't be read: {error.strerror}") from None
    with file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = decoder.decode(text)
                body = json.loads(bytes(line.body))
            except (ValueError, RecursionError, msgspec.MsgspecError) as error:
                raise InvalidArgumentError(f"line {number} of {source} is no request of a batch: {error}") from None
            if line.method != "POST" or line.url not in URLS:
                raise InvalidArgumentError(
                    f"line {number} of {source} asks for {line.method} {line.url}; it must be POST and one of "
                    f"{', '.join(URLS)}"
                )
            if isinstance(body, dict) and (body.get("stream") or body.get("background")):
                raise InvalidArgumentError(f"line {number} of {source} asks for a stream, which a file can't hold")
            yield line


class _opened:
    """The file of answers, which no other process may write meanwhile."""

    def __init__(self, target: Path) -> None:
        try:
            self._file = target.open("ab", buffering=0)
        except OSError as error:
            raise InvalidArgumentError(f"{target} can't be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise InvalidArgumentError(f"{target} is being written by another batch") from None

    def __enter__(self) -> Any:
        return self._file

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _answered(target: Path) -> dict[str, bool]:
    """The requests that have an answer, and whether that is an error. A last line without an end is cut off.

    Raises:
        InvalidArgumentError: the file holds something else.
    """
    done: dict[str, bool] = {}
    size = 0
    with target.open("rb") as file:
        for number, text in enumerate(file, 1):
            whole = text.endswith(b"\n")
            if not whole and (done or text.startswith(_BEGIN[: len(text)])):
                break
            size += len(text)
            try:
                answer = json.loads(text if whole else b"")
                done[answer["custom_id"]] = answer["response"]["status_code"] != 200
            except (ValueError, KeyError, TypeError, RecursionError):
                raise InvalidArgumentError(f"line {number} of {target} is no answer of a batch; name another") from None
    os.truncate(target, size)
    return done


class _Batch:
    def __init__(self, site: Site, engine: AsyncLLMEngine, out: int, progress: tqdm[Any], num_failed: int) -> None:
        self._site, self._engine, self._out, self._progress = site, engine, out, progress
        self.num_failed = num_failed
        self._began, self._num_tokens = time.monotonic(), 0
        self._counted = self._began  # when the last answer came

    async def run(self, lines: Iterator[Line], max_concurrent: int) -> None:
        """Answer these requests, so many at once."""

        async def work() -> None:
            for line in lines:
                await self._answer(line)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(max_concurrent):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer(self, line: Line) -> None:
        attempt = 0
        while True:
            status, headers, text = await self._asked(line)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # which the application has answered with status 503
            if (error := self._engine.dead_error) is not None:
                raise error
            if status not in _AGAIN or (status == 429 and time.monotonic() - self._counted > PATIENCE_S):
                break  # with 429: its completions together are above a limit, which no waiting changes
            await asyncio.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
            attempt += 1
        number = headers.get(b"x-request-id", b"").decode()
        response = {"status_code": status, "request_id": number, "body": msgspec.Raw(text)}
        found = {"id": f"batch_req_{number}", "custom_id": line.custom_id, "response": response, "error": None}
        row = memoryview(msgspec.json.encode(found) + b"\n")
        while row:
            row = row[os.write(self._out, row) :]
        self._count(status, text)

    def _count(self, status: int, text: bytes) -> None:
        self.num_failed += status != 200
        self._counted = time.monotonic()
        usage = json.loads(text).get("usage") or {}
        self._num_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        seconds = max(time.monotonic() - self._began, 1e-3)
        self._progress.set_postfix_str(f"{self._num_tokens / seconds:.0f} tokens/s, {self.num_failed} failed", False)
        self._progress.update()

    async def _asked(self, line: Line) -> tuple[int, dict[bytes, bytes], bytes]:
        """The answer to a request: status, headers and body."""
        status, headers, parts = 500, {}, []
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()  # the client never goes
            asked = True
            return {"type": "http.request", "body": bytes(line.body), "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], dict(message["headers"])
            else:
                parts.append(message.get("body", b""))

        scope = {"type": "http", "method": "POST", "path": line.url, "query_string": b"", "headers": []}
        await self._site.app(scope, receive, send)
        return status, headers, b"".join(parts)
