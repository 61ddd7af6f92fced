"""The ASGI application: finds the route and the tenant, reads the body, and sends the answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from ..ipc.messages import ModelFacts
from .counters import Counters
from .exchange import DIRECT, EVENTS, JSON, Answer, Direct, Header, Receive, Request, Send, event, json_of, request_id
from .failures import HttpError, http_error
from .forms import read_form
from .router import Route, Router
from .service import made
from .tenants import Tenants

access_log = logging.getLogger("mainspring.access")

MIN_BODY_RATE = 1024.0  # bytes a second of a body, after the first `body_timeout` seconds
ANSWER_PIECE_BYTES = 256 << 10  # of an answer: one that is sent at once is lost after 30 s if TLS is then closed


def longest_body(model: ModelFacts) -> int:
    """The usual limit of a body in bytes: what a request to this model can need. All streams of a worker wait while a
    body is decoded, a millisecond for each MB."""
    return (32 << 20) if model.media else (4 << 20) + 16 * model.max_model_len


class App:
    """Called by the server for each request.

    Args:
        max_body_bytes: longest body.
        body_timeout: seconds that a client has to go on with its body.
        origins: of web pages that may ask; ``*`` is all.
    """

    def __init__(
        self,
        router: Router,
        tenants: Tenants,
        counters: Counters,
        max_body_bytes: int,
        body_timeout: float,
        origins: Sequence[str] = (),
    ) -> None:
        self._origins = frozenset(one.encode() for one in origins)
        self._router, self._tenants, self._counters = router, tenants, counters
        self._max_body_bytes, self._body_timeout = max_body_bytes, body_timeout

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        began, status, request, route = time.monotonic(), 0, None, None
        self._counters.began()
        direct: Direct | None = scope.get("extensions", {}).get(DIRECT)
        watch: asyncio.Task[None] | None = None
        gone = False

        def leave() -> None:
            nonlocal gone
            gone = True
            task.cancel()

        reply = _Reply(send, self._cors(scope))
        try:
            try:
                if reply.headers and scope["method"] == "OPTIONS":
                    await reply.whole(Answer(b"", 204, ()))
                    return
                route, params = self._router.find(scope["method"], scope["path"])
                reply.error_form = route.error_form
                tenant = self._tenants.of(scope["headers"], route.access)
                body = await self._body(scope, receive, direct)
                request = Request(scope, tenant, params, len(body))
                reply.request_id = request.id
                task = cast("asyncio.Task[None]", asyncio.current_task())
                if direct is not None:
                    direct.watch(leave)
                else:
                    watch = asyncio.get_running_loop().create_task(_watch(receive, leave))
                await self._answer(route, request, body, reply)
            except asyncio.CancelledError:
                if not gone:  # the server ends
                    await reply.fail(HttpError(503, "the server shuts down", close=True))
                else:
                    reply.status = 499  # the client has gone
            except Exception as error:
                await reply.fail(http_error(error))
        finally:
            if watch is not None:
                watch.cancel()
            status = reply.status
            seconds = time.monotonic() - began
            self._counters.ended(status, seconds)
            if access_log.isEnabledFor(logging.INFO):
                _log(scope, request, route, status, seconds, reply.request_id)

    def _cors(self, scope: Mapping[str, Any]) -> list[Header]:
        """The headers that let a page of another origin read the answer."""
        if not self._origins:
            return []
        given = dict(scope["headers"])
        origin = given.get(b"origin")
        if origin is None or not (origin in self._origins or b"*" in self._origins):
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-headers", given.get(b"access-control-request-headers", b"*")),  # clients have many
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"vary", b"origin"),
        ]

    async def _answer(self, route: Route, request: Request, body: bytearray, reply: _Reply) -> None:
        if route.takes_form:
            content_type = request.headers.get("content-type", "")
            given = await made(request, lambda: read_form(content_type, body, route.body))
        else:
            given = None if route.decoder is None else route.decoder.decode(body)
        found = await route.handler(request, given)
        if isinstance(found, Answer):
            await reply.whole(found)
            return
        events, reply.failed, reply.last = found.events, found.failed, found.last
        try:
            async for one in events:
                await (reply.more(one) if reply.started else reply.first(one))
            await reply.end(found.last)
        finally:
            if (close := getattr(events, "aclose", None)) is not None:
                await close()

    async def _body(self, scope: Mapping[str, Any], receive: Receive, direct: Direct | None) -> bytearray:
        """The whole body.

        Raises:
            HttpError: it is too long, or comes too slowly.
        """
        limit = self._max_body_bytes
        for name, value in scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or int(value[:20]) > limit):
                raise _too_long(limit)
        whole = None if direct is None else direct.take_body()
        body, more, began = bytearray() if whole is None else whole, whole is None, time.monotonic()
        while more and len(body) <= limit:
            message = await self._next(receive, began + len(body) / MIN_BODY_RATE - time.monotonic())
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if len(body) > limit:
            raise _too_long(limit)
        return body

    async def _next(self, receive: Receive, ahead: float) -> dict[str, Any]:
        """ahead: seconds that the client is ahead of the slowest rate; negative: behind it."""
        try:
            async with asyncio.timeout(self._body_timeout + min(0.0, ahead)):
                message = await receive()
        except TimeoutError:
            raise HttpError(408, "the body came too slowly", close=True) from None
        if message["type"] == "http.disconnect":
            raise HttpError(400, "the client left before its body had come", close=True)
        return message


class _Reply:
    """What was sent of an answer."""

    def __init__(self, send: Send, headers: Sequence[Header] = ()) -> None:
        self._send, self.headers = send, headers
        self.status, self.started, self.ended = 0, False, False
        self.request_id = ""
        self.error_form: Callable[[dict[str, Any]], dict[str, Any]] = lambda error: error  # of `Route`
        self.failed: Callable[[dict[str, Any]], bytes] = event  # of `Events`, like `last`
        self.last = b""

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started, self.status = True, status
        headers += [(b"x-request-id", self.request_id.encode()), *self.headers]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def whole(self, found: Answer) -> None:
        await self._start(found.status, [*found.headers, (b"content-length", b"%d" % len(found.body))])
        self.ended, at = True, 0
        while at + ANSWER_PIECE_BYTES < len(found.body):
            await self.more(found.body[at : at + ANSWER_PIECE_BYTES])  # waits for a slow client
            at += ANSWER_PIECE_BYTES
        await self._send({"type": "http.response.body", "body": found.body[at:]})

    async def first(self, one: bytes) -> None:
        await self._start(200, [EVENTS, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        await self.more(one)

    def more(self, one: bytes) -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": one, "more_body": True})

    async def end(self, last: bytes) -> None:
        if not self.started:
            await self.first(b"")
        self.ended = True
        await self._send({"type": "http.response.body", "body": last})

    async def fail(self, error: HttpError) -> None:
        """Answer with an error, or break off an answer that has begun."""
        if not self.started:
            self.request_id = self.request_id or request_id("")
            body = json_of(self.error_form(error.body()))
            await self.whole(Answer(body, error.status, [JSON, *error.headers]))
        elif not self.ended:
            self.status = error.status
            await self.end(self.failed(error.body()) + self.last)


def _too_long(limit: int) -> HttpError:
    return HttpError(413, f"the body is longer than {limit} bytes", close=True)


async def _watch(receive: Receive, leave: Callable[[], None]) -> None:
    """Call `leave` when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()


def _log(
    scope: Mapping[str, Any], request: Request | None, route: Route | None, status: int, seconds: float, name: str
) -> None:
    """One line of JSON."""
    client = scope.get("client") or ("", 0)
    line: dict[str, Any] = {
        "time": round(time.time(), 3),
        "client": client[0],
        "method": scope["method"],
        "path": scope["path"],
        "route": None if route is None else route.path,
        "status": status,
        "seconds": round(seconds, 4),
        "request_id": name,
    }
    if request is not None:
        line |= {"tenant": request.tenant.name, "bytes": request.size, "tokens": request.num_tokens}
        if (trace := request.headers.get("traceparent")) is not None:
            line["traceparent"] = trace
    access_log.info("%s", json_of(line).decode())
