"""The client of asyncio programs: the same calls as coroutines, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from .client import ConnectedClient
from .codec import Array
from .connection import Connection, result_of
from .errors import WrongEventLoopError
from .messages import AddRequest, Outputs, UtilityResult


class AsyncClient(ConnectedClient):
    """See `CoreClient`. May be made with no loop running; belongs to the first loop it is used from.

    Raises:
        WrongEventLoopError: used from another loop.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outputs_waiter: asyncio.Future[None] | None = None
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._watched: tuple[int, ...] = ()  # descriptors that the loop watches
        self._watched_socket = 0  # number of the socket they belong to
        self._timer: asyncio.TimerHandle | None = None  # while the connection is lost

    async def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = ()) -> None:
        self._enter()
        self._connection.add_request(request, tensors)
        self._take_in()

    async def abort(self, handles: Sequence[int]) -> None:
        self._enter()
        self._connection.abort(handles)
        self._take_in()

    async def get_outputs(self) -> Outputs:
        """The next outputs. Only one task may wait for them at a time."""
        loop = self._enter()
        while True:
            self._take_in()
            if self._connection.outputs:
                return self._connection.outputs.popleft()
            if (error := self._connection.dead_error()) is not None:
                raise error
            self._outputs_waiter = loop.create_future()
            try:
                await self._outputs_waiter
            finally:
                self._outputs_waiter = None

    async def call(self, method: str, *args: Any, arrays: Sequence[Array] = (), timeout: float | None = None) -> Any:
        loop = self._enter()
        call_id = self._connection.start_call(method, args, arrays)
        self._calls[call_id] = loop.create_future()
        try:
            self._take_in()
            answer = await asyncio.wait_for(self._calls[call_id], timeout)
        except TimeoutError:
            raise TimeoutError(f"the core did not answer {method!r} within {timeout} s") from None
        finally:
            del self._calls[call_id]
            self._connection.end_call(call_id)
        return result_of(answer)

    def close(self) -> None:
        self._watch_only(())
        self._connection.close()
        self._take_in()

    def _enter(self) -> asyncio.AbstractEventLoop:
        self._connection.check_process()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif loop is not self._loop:
            raise WrongEventLoopError("this engine belongs to another event loop; make one for each loop")
        return loop

    def _watch_only(self, fds: tuple[int, ...]) -> None:
        """Let the loop watch these descriptors, and no earlier ones."""
        loop, socket = self._loop, self._connection.num_sockets
        if loop is not None and not loop.is_closed() and (fds, socket) != (self._watched, self._watched_socket):
            for fd in self._watched:
                loop.remove_reader(fd)
            for fd in fds:
                loop.add_reader(fd, self._take_in)
            self._watched, self._watched_socket = fds, socket

    def _take_in(self) -> None:
        """Receive, and wake the tasks that wait for a message. A zmq descriptor signals a change only once, so every
        send is followed by this."""
        connection = self._connection
        connection.receive()
        self._watch_only(connection.fds)
        if connection.poll_seconds is not None and self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(connection.poll_seconds, self._look_again)
        error = connection.dead_error()
        for call_id, future in self._calls.items():
            if future.done():
                continue
            if (answer := connection.results.pop(call_id, None)) is not None:
                future.set_result(answer)
            elif error is not None:
                future.set_exception(error)
        waiter = self._outputs_waiter
        if waiter is not None and not waiter.done() and (connection.outputs or error is not None):
            waiter.set_result(None)

    def _look_again(self) -> None:
        self._timer = None
        if not self._connection.closed:
            self._take_in()
