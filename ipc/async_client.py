"""The client of asyncio programs: the same calls as coroutines, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from .client import ConnectedClient
from .codec import Array
from .connection import Connection, result_of
from .cores import Cores
from .errors import EngineDeadError, MainspringError, WrongEventLoopError
from .messages import AddRequest, MediaItem, Outputs

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
_LOOP_SECONDS = 5.0  # until a loop that runs in another thread counts as blocked


class AsyncClient(ConnectedClient):
    """See `CoreClient`. May be made with no loop running; belongs to the first loop it is used from.

    Raises:
        WrongEventLoopError: used from another loop.
    """

    def __init__(self, connection: Connection | Cores) -> None:
        super().__init__(connection)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Future[None]] = set()  # one for each waiting task
        self._watched: tuple[int, ...] = ()  # descriptors that the loop watches
        self._watched_socket = 0  # number of the socket they belong to
        self._timer: asyncio.TimerHandle | None = None  # while the connection is lost
        self._take: Callable[[Outputs], None] | None = None  # see `deliver_to`
        self._lost: Callable[[EngineDeadError], None] | None = None
        self._delivers = False  # whether the loop will call `_deliver`
        self._takes_in = False  # whether the loop will call `_take_in`

    async def add_request(
        self, request: AddRequest, tensors: Sequence[np.ndarray] = (), rank: int | None = None
    ) -> None:
        self.send_request(request, tensors, rank)

    def send_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = (), rank: int | None = None) -> None:
        """As `add_request`, which never waits. For callbacks of the loop."""
        self._enter()
        self._connection.add_request(request, tensors, rank)
        self._take_in_soon()

    async def abort(self, handles: Sequence[int]) -> None:
        self.send_abort(handles)

    def send_abort(self, handles: Sequence[int]) -> None:
        """As `abort`, which never waits."""
        self._enter()
        self._connection.abort(handles)
        self._take_in_soon()

    def deliver_to(self, take: Callable[[Outputs], None], lost: Callable[[EngineDeadError], None]) -> None:
        """Call `take` with all outputs as they come, one in a round of the loop, so that nobody needs `get_outputs`: no
        task has to be woken for them. When the core is gone for good, `lost` gets the error, and that ends it."""
        self._enter()
        self._take, self._lost = take, lost
        self._take_in()

    async def get_outputs(self) -> Outputs:
        """The next outputs. Only one task may wait for them at a time."""
        queue = self._connection.outputs
        return await self._wait_for(lambda: queue.popleft() if queue else None)

    @property
    def num_outputs(self) -> int:
        """The number of outputs that were received and not taken yet."""
        return len(self._connection.outputs)

    async def call(self, method: str, *args: Any, arrays: Sequence[Array] = (), timeout: float | None = None) -> Any:
        self._enter()
        self._take_in()  # what has arrived may tell of further cores, which are to be asked, too
        results, call_id = self._connection.results, self._connection.start_call(method, args, arrays)
        try:
            async with asyncio.timeout(timeout):
                answer = await self._wait_for(lambda: results.pop(call_id, None))
        except TimeoutError:
            raise TimeoutError(f"the core did not answer {method!r} within {timeout} s") from None
        finally:
            self._connection.end_call(call_id)
        return result_of(answer)

    def close(self) -> None:
        """Called from another thread while the loop runs, it is done there: the socket is not to be used by two."""
        loop = self._loop
        if loop is not None and loop.is_running() and asyncio._get_running_loop() is not loop:
            closed = Future[None]()
            loop.call_soon_threadsafe(self._close, closed)
            with contextlib.suppress(TimeoutError):  # the loop is blocked, so it does not use the socket
                return closed.result(_LOOP_SECONDS)
        self._close()

    def _close(self, closed: Future[None] | None = None) -> None:
        self._watch_only(())
        self._connection.close()
        self._take_in()
        if closed is not None:
            closed.set_result(None)

    def _fail_media(self, media: Sequence[MediaItem], error: MainspringError) -> None:
        def fail() -> None:
            if not self._connection.closed:
                self._connection.fail_media(media, error)
                self._take_in()

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(fail)

    async def _wait_for(self, take: Callable[[], T | None]) -> T:
        """Wait until `take` finds something among the messages that have arrived."""
        loop = self._enter()
        while True:
            self._take_in()
            if (found := take()) is not None:
                return found
            if (error := self._connection.error) is not None:
                raise error.with_traceback(None)
            waiter = loop.create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)

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
                loop.add_reader(fd, self._readable)
            self._watched, self._watched_socket = fds, socket

    def _readable(self) -> None:
        self._look()
        if not self._delivers:
            self._deliver()

    def _take_in_soon(self) -> None:
        """Let all that is sent in this round of the loop go together, and then receive: a zmq descriptor signals a
        change only once, so every send is followed by that."""
        if not self._takes_in and self._loop is not None:
            self._takes_in = True
            self._loop.call_soon(self._take_in)

    def _take_in(self) -> None:
        """Receive, and let the loop deliver."""
        self._takes_in = False
        self._look()
        self._deliver_soon()

    def _look(self) -> None:
        """Receive, and wake the tasks that wait for a message."""
        changed = self._receive()
        connection = self._connection
        self._watch_only(connection.fds)
        if connection.poll_seconds is not None and self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(connection.poll_seconds, self._look_again)
        if changed or connection.outputs or connection.error is not None:  # `abort` may make outputs itself
            for waiter in self._waiters:
                if not (waiter.done() or waiter.get_loop().is_closed()):  # the engine may be closed after its loop
                    waiter.set_result(None)

    def _deliver(self) -> None:
        """Deliver the first outputs, and let the loop deliver the others."""
        self._delivers, outputs, error = False, self._connection.outputs, self._connection.error
        if self._take is not None and outputs:
            self._take(outputs.popleft())
        elif self._lost is not None and error is not None:
            lost, self._take, self._lost = self._lost, None, None
            lost(error)
        self._deliver_soon()

    def _deliver_soon(self) -> None:
        connection, loop = self._connection, self._loop
        if self._take is None or self._delivers or not (connection.outputs or connection.error is not None):
            return
        if loop is not None and not loop.is_closed():  # the engine may be closed after its loop
            self._delivers = True
            loop.call_soon(self._deliver)

    def _look_again(self) -> None:
        self._timer = None
        if not self._connection.closed:
            self._take_in()
