"""One HTTP request and its answer, as handlers see them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qs

import msgspec

if TYPE_CHECKING:
    from .tenants import Tenant

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

json_of = msgspec.json.Encoder().encode

JSON = (b"content-type", b"application/json")
TEXT = (b"content-type", b"text/plain; charset=utf-8")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
TRACE_HEADERS = ("traceparent", "tracestate")  # of W3C's trace context


class Direct(Protocol):
    """The connection of the request that is being answered. With ASGI alone, each of these needs a task or a wait. The
    server gives it as the extension `DIRECT` of the scope."""

    def take_body(self) -> bytearray | None:
        """The body, if all of it has come and nothing was received yet."""

    def watch(self, left: Callable[[], object]) -> None:
        """Call `left` if the client leaves before its answer is complete. The body must have been received."""

    @property
    def takes_parts(self) -> bool:
        """Whether the answer has begun, and the client is there and reads fast enough."""

    def write_part(self, part: bytes) -> None:
        """Send bytes, at least one, if it `takes_parts`."""


DIRECT = "mainspring.direct"


class Request:
    """A request whose body was read and decoded.

    Attributes:
        params: the parts of the path that the route leaves open.
        tenant: whose key came with the request.
        size: bytes of the body.
        num_tokens: tokens generated for it, which the handler counts for the access log.
        direct: None: the server has none.
    """

    __slots__ = ("_query", "direct", "headers", "id", "method", "num_tokens", "params", "path", "size", "tenant")

    def __init__(self, scope: Mapping[str, Any], tenant: Tenant, params: Mapping[str, str], size: int) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._query: bytes = scope["query_string"]
        self.headers: dict[str, str] = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        self.id = request_id(self.headers.get("x-request-id", ""))
        self.tenant, self.params, self.size = tenant, params, size
        self.num_tokens = 0
        self.direct: Direct | None = scope.get("extensions", {}).get(DIRECT)

    @property
    def query_string(self) -> bytes:
        return self._query

    @property
    def query(self) -> dict[str, str]:
        return {name: values[-1] for name, values in parse_qs(self._query.decode("latin-1")).items()}

    @property
    def trace_headers(self) -> dict[str, str] | None:
        found = {name: self.headers[name] for name in TRACE_HEADERS if name in self.headers}
        return found or None


def request_id(given: str) -> str:
    """The client's own id of a request, if it is short and of plain characters, else a new one."""
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return os.urandom(16).hex()


class Answer:
    """A whole answer."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, body: bytes, status: int = 200, headers: Sequence[Header] = (JSON,)) -> None:
        self.body, self.status, self.headers = body, status, headers


class Events:
    """An answer of server-sent events. What is raised before the first one is answered as an error; after it, the
    error is an event.

    Args:
        events: each one as bytes, with its ``data:``.
        last: sent at the end.
        failed: the event of an error object.
    """

    __slots__ = ("events", "failed", "last")

    def __init__(
        self,
        events: AsyncIterator[bytes],
        last: bytes = b"data: [DONE]\n\n",
        failed: Callable[[dict[str, Any]], bytes] | None = None,
    ) -> None:
        self.events, self.last, self.failed = events, last, failed or event


def answer(value: Any) -> Answer:
    """A value as JSON."""
    return Answer(json_of(value))


def event(value: Any, name: str = "") -> bytes:
    """A value as an event."""
    if name:
        return b"event: %b\ndata: %b\n\n" % (name.encode(), json_of(value))
    return b"data: %b\n\n" % json_of(value)
