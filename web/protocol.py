"""The server's side of a connection: uvicorn's, with limits on the header and on the time that it takes."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10  # of a request, its first line included
MAX_HEADERS = 200
HEADER_SECONDS = 20.0  # from the first connection until the header has come


class LimitedProtocol(HttpToolsProtocol):
    max_connections = 1 << 30  # of this process, set by the worker: libzmq aborts a process without descriptors

    _header_bytes = 0
    _in_header = True
    _began = False  # whether a request has begun in the data that is being read
    _refused = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._timer = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._began = False
        super().data_received(data)
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._timer is None and not self.transport.is_closing():  # a header has begun, or what is none
            self._timer = self.loop.call_later(HEADER_SECONDS, self._too_slow)
        if self._in_header and not self._began:  # the parser keeps an unfinished line without telling
            self._count(len(data))

    def on_message_begin(self) -> None:
        self._header_bytes, self._began, self._in_header = 0, True, True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(431)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_header = False
        self._end_timer()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431)

    def _refuse(self, status: int) -> None:
        """Answer without asking the application, and close."""
        if self._refused:
            return
        self._refused = True
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()

    def _too_slow(self) -> None:
        self._timer = None
        self._refuse(408)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
