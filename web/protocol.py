"""The server's side of a connection: uvicorn's, with limits on the header and on the time that it takes."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .exchange import DIRECT

MAX_HEADER_BYTES = 64 << 10  # of a request, its first line included
MAX_HEADERS = 200
HEADER_SECONDS = 20.0  # from the first connection until the header has come
UNREAD_SECONDS = 120.0  # that a client may read nothing of what waits for it
PIECE_BYTES, BODY_PIECE_BYTES = 4 << 10, 64 << 10  # of what has come, parsed before other connections have their turn
PARSE_SECONDS = 0.0005  # of each round of the event loop, because what is parsed starts requests
CLOSED_AT_ONCE = 4  # connections that clients have ended; to close one takes as long as to send a token
CLOSE_SECONDS = 0.001  # until the next ones are closed: the engine's core needs the processor, too


class _Rounds:
    """What a round of the event loop may parse and close. Hundreds of connections can bring something, or end, in the
    same round, and all streams would wait for that: some of the connections have their turn later."""

    def __init__(self) -> None:
        self._until = 0.0  # when this round has parsed enough; 0: it has not begun to
        self._waiting: deque[LimitedProtocol] = deque()
        self._ended: deque[asyncio.Transport] = deque()
        self._closes = False  # whether the loop will call `_close_some`

    def has_time(self, loop: asyncio.AbstractEventLoop) -> bool:
        if not self._until:
            self._begin(loop)
        return not self._waiting and time.perf_counter() < self._until

    def wait(self, one: LimitedProtocol) -> None:
        """Let a connection parse when the loop comes round."""
        if not self._until:
            self._begin(one.loop)
        self._waiting.append(one)

    def close(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        """Close a connection that the client has ended."""
        self._ended.append(transport)
        if not self._closes:
            self._close_later(loop)

    def _close_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._closes = True
        loop.call_later(CLOSE_SECONDS, self._close_some, loop)

    def _close_some(self, loop: asyncio.AbstractEventLoop) -> None:
        self._closes = False
        for _ in range(min(len(self._ended), CLOSED_AT_ONCE)):
            self._ended.popleft().close()
        if self._ended:
            self._close_later(loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._until = time.perf_counter() + PARSE_SECONDS
        loop.call_soon(self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._until = 0.0
        for _ in range(len(self._waiting)):
            if not self._until:
                self._begin(loop)
            self._waiting.popleft().parse()
            if time.perf_counter() >= self._until:
                return


class _Flow(FlowControl):
    """The application lets its connection be read again when it has taken a part of the body. What came before may not
    be parsed then, and would be copied with all that comes."""

    holds = False  # whether reading is paused until what has come is parsed

    def resume_reading(self) -> None:
        if self.holds:
            self.read_paused = False
        else:
            super().resume_reading()

    def hold(self) -> None:
        if not self.holds:
            self.holds = True
            self._transport.pause_reading()

    def release(self) -> None:
        if self.holds:
            self.holds = False
            if not self.read_paused:
                self._transport.resume_reading()


class _Unbegun:
    """The transport of an answer until it has begun: the header goes out with the first part of the body, because each
    write is a system call, and may wake the client."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport, self._header = cycle, cycle.transport, b""

    def write(self, data: bytes) -> None:
        if self._header:
            self.begin(data)
        elif self._cycle.response_started:
            self._header = data
        else:  # 100 Continue
            self._transport.write(data)

    def begin(self, data: bytes = b"") -> None:
        """Send the header and the first part."""
        self._cycle.transport = self._transport
        self._transport.write(self._header + data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.begin()
        self._transport.close()


class LimitedProtocol(HttpToolsProtocol):
    flow: _Flow
    _rounds = _Rounds()  # a process has one event loop
    max_connections = 1 << 30  # of this process, set by the worker: libzmq aborts a process without descriptors

    _header_bytes = 0
    _in_header = True
    _began = False  # whether a request has begun in the data that is being read
    _refused = False
    _rest, _at = b"", 0  # what has come, and how much of it is parsed
    _body_left = 0  # bytes of the body that are to come, if the header says so
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _running: Any = None  # the cycle of the request that is being answered; `cycle` is that of the latest one
    _left: Callable[[], object] | None = None  # of `watch`, for that request
    _lost = False

    def connection_made(self, transport: Any) -> None:
        os.sched_yield()  # hundreds may come at once, and clients and the core wait for this processor, too
        super().connection_made(transport)
        self.flow = _Flow(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._timer = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        self._end_unread()
        self._rest, self._lost = b"", True
        if self._running is not None:
            self._running.transport = self.transport  # else an answer that has not begun would keep itself alive
        self.cycle = self._running  # uvicorn tells this one that the client has left
        super().connection_lost(exc)
        self.cycle = self._running = self.scope = None  # type: ignore[assignment]  # the scope refers to this object
        left, self._left = self._left, None
        if left is not None:
            left()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.scheme == "http" or hasattr(socket, "TCP_INFO"):  # only Linux has it
            self._wait_for_reader()

    def resume_writing(self) -> None:
        self._end_unread()
        super().resume_writing()

    def _wait_for_reader(self) -> None:
        self._unread = self.loop.call_later(UNREAD_SECONDS, self._check_reader, self._taken())

    def _check_reader(self, before: int) -> None:
        if self._taken() > before:
            self._wait_for_reader()
        else:
            self.transport.abort()

    def _taken(self) -> int:
        """A number that grows when the client's side takes bytes, and only then while writing is paused."""
        if self.scheme == "http":
            return -self.transport.get_write_buffer_size()
        # with TLS, what waits is in two buffers, of which one can be asked
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        return int(struct.unpack_from("Q", info, 120)[0])  # tcpi_bytes_acked

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def take_body(self) -> bytearray | None:
        """See `exchange.Direct`."""
        one = self._running
        if one is None or one.more_body:
            return None
        body: bytearray = one.body
        one.body = bytearray()
        return body

    def watch(self, left: Callable[[], object]) -> None:
        """See `exchange.Direct`."""
        if self._lost:
            left()
        else:
            self._left = left
            self.flow.resume_reading()  # as uvicorn does for who waits for the client's next message

    @property
    def takes_parts(self) -> bool:
        """See `exchange.Direct`."""
        one = self._running
        begun = one is not None and one.transport is self.transport and one.chunked_encoding is True
        begun = begun and not one.response_complete
        return begun and not (self.flow.write_paused or self.transport.is_closing())

    def write_part(self, part: bytes) -> None:
        """See `exchange.Direct`."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = _Unbegun(cycle)  # type: ignore[assignment]
        cycle.scope["extensions"] = {DIRECT: self}  # type: ignore[dict-item]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if isinstance(unbegun := self._running.transport, _Unbegun):  # it has a header only
            unbegun.begin()
        self._left = None
        super().on_response_complete()

    def eof_received(self) -> Any:
        if self.scheme == "http":  # TLS can't stay half open: such a connection is closed at once
            self._rounds.close(self.loop, self.transport)
        return self.scheme == "http"

    def data_received(self, data: bytes) -> None:
        self._rest += data
        if self.flow.holds or len(self._rest) < min(self._body_left, PIECE_BYTES):  # more of the body is to come
            return
        if self._rounds.has_time(self.loop):
            self.parse()
        else:
            self._wait()

    def _wait(self) -> None:
        self.flow.hold()
        self._rounds.wait(self)

    def parse(self) -> None:
        """Parse a piece, and the next one when the loop comes round: a read may have thousands of requests."""
        if self._refused or self.transport.is_closing():
            self._rest = b""
            return
        end = self._at + max(PIECE_BYTES, min(self._body_left, BODY_PIECE_BYTES))
        piece = self._rest[self._at : end]
        self._began = False
        super().data_received(piece)
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._timer is None and not self.transport.is_closing():  # a header has begun, or what is none
            self._timer = self.loop.call_later(HEADER_SECONDS, self._too_slow)
        if self._in_header and not self._began:  # the parser keeps an unfinished line without telling
            self._count(len(piece))
        if end < len(self._rest):
            self._at = end
            self._wait()
            return
        self._rest, self._at = b"", 0
        self.flow.release()

    def on_message_begin(self) -> None:
        self._header_bytes, self._began, self._in_header, self._body_left = 0, True, True, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(431)
        if self._refused:
            return
        if value.isdigit() and name.lower() == b"content-length":
            self._body_left = int(value[:20])
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_header = False
        self._end_timer()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_left -= len(body)
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
