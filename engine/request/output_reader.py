"""The part of the async engine that runs on its event loop: it sends requests, reads outputs and wakes their streams.

It is a module of its own because it imports asyncio, which is slow and which `import mainspring` must not do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ...ipc.async_client import AsyncClient
from ...ipc.errors import DuplicateRequestError, EngineDeadError, WrongEventLoopError
from ...ipc.messages import AddRequest, Outputs
from .output_processor import OutputProcessor, Processed, send_round
from .request_state import RequestState, Signal

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np

T = TypeVar("T")
logger = logging.getLogger(__name__)


def _give_up(begun: asyncio.Future[Future[Any] | None]) -> None:
    """Cancel what was begun."""
    if not begun.cancelled() and begun.exception() is None and (asked := begun.result()) is not None:
        asked.cancel()


class OutputReader:
    """Reads from its first use on. It holds no reference to the engine, so that an unused engine can be collected."""

    def __init__(self, client: AsyncClient, processor: OutputProcessor) -> None:
        self._client, self._processor = client, processor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reads = False
        self._ended = asyncio.Event()  # no more outputs will come
        self._preparing: dict[str, asyncio.Future[Any]] = {}  # requests whose media are prepared, by id
        self._idle = asyncio.Event()  # nothing is in flight
        self._idle.set()

    def enter(self) -> None:
        """Begin to read, unless that was done.

        Raises:
            WrongEventLoopError: called from another loop than before.
        """
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise WrongEventLoopError("this engine belongs to another event loop; make one for each loop")
        self._loop = loop
        if not self._reads:
            self._ended.clear()
            self._client.deliver_to(self._take, self._lost)
            self._reads = True

    async def send(self, state: RequestState, messages: Sequence[AddRequest], tensors: Sequence[np.ndarray]) -> None:
        state.output_ready = Signal(asyncio.get_running_loop())
        self._idle.clear()
        try:
            for message in messages:
                self._client.send_request(message, tensors, state.source.data_parallel_rank)
        except BaseException:
            await self.end([state.source.request_id])
            raise

    @property
    def num_preparing(self) -> int:
        return len(self._preparing)

    async def prepared(self, request_id: str, begin: Callable[[], Future[T] | None]) -> T | None:
        """Wait for what a request needs before it can be made. None: it was aborted meanwhile.

        Args:
            begin: called in another thread, because it may copy much.
        """

        async def prepare() -> T | None:
            begun = asyncio.get_running_loop().run_in_executor(None, begin)
            try:
                asked = await asyncio.shield(begun)
            except asyncio.CancelledError:
                begun.add_done_callback(_give_up)
                raise
            if asked is None:
                return None
            found: asyncio.Future[T] = asyncio.wrap_future(asked)
            return await found

        if request_id in self._preparing:
            raise DuplicateRequestError(f"request_id {request_id!r} is still running; ids must be unique")
        waiter = asyncio.ensure_future(prepare())
        self._preparing[request_id] = waiter
        self._idle.clear()
        try:
            return await waiter
        except asyncio.CancelledError:
            if self._preparing.get(request_id) is waiter:
                raise  # the task is cancelled, not the request
            return None
        finally:
            if self._preparing.get(request_id) is waiter:
                del self._preparing[request_id]
            self._rest()

    def aborted(self, state: RequestState) -> None:
        """End a request that was aborted before it was sent."""
        state.output_ready = Signal(asyncio.get_running_loop())
        self._processor.abort([state.source.request_id], time.monotonic())
        state.output_ready.set()
        self._rest()

    async def end(self, request_ids: Iterable[str]) -> None:
        """Abort requests, here and in the core."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            if (waiter := self._preparing.pop(request_id, None)) is not None:
                waiter.cancel()
        self._settle(self._processor.abort(request_ids, time.monotonic()))

    def end_from_anywhere(self, state: RequestState) -> None:
        """Abort a request whose stream was collected as garbage, in whatever thread that happened."""
        assert self._loop is not None

        async def end() -> None:
            if not state.finished:  # else another request may have its id by now
                await self.end([state.source.request_id])

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(end()))

    async def caught_up(self) -> None:
        """Wait until the streams have yielded all that was received so far."""
        for _ in range(self._client.num_outputs + 2):  # one turn of the loop each; then the last stream runs
            await asyncio.sleep(0)

    async def drained(self, seconds: float) -> None:
        """Wait until nothing is in flight. After so many seconds: `TimeoutError`."""
        async with asyncio.timeout(seconds):
            while not self._idle.is_set():  # a request whose media are prepared may begin before this goes on
                await self._idle.wait()

    async def ended(self) -> None:
        """Wait until no more outputs will come, as after the client was closed."""
        if self._reads:
            await self._ended.wait()

    def _take(self, outputs: Outputs) -> None:
        try:
            self._settle(self._processor.process(outputs, time.monotonic()))
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("reading outputs failed")
            self._fail(error)

    def _lost(self, error: EngineDeadError) -> None:
        self._reads = False
        self._fail(error)
        self._ended.set()

    def _fail(self, error: Exception) -> None:
        for state in self._processor.forget(error, time.monotonic()):  # no stream may wait for ever
            state.connection_error = error
            state.output_ready.set()
        self._idle.set()

    def _rest(self) -> None:
        if not len(self._processor) and not self._preparing:
            self._idle.set()

    def _settle(self, processed: Processed) -> None:
        for state in processed.changed:
            if state.direct is None or not state.passes():
                state.output_ready.set()
        self._rest()
        for message, source in processed.adds:
            send_round(self._client.send_request, message, source.data_parallel_rank)
        if processed.aborts:
            with contextlib.suppress(EngineDeadError):  # these requests have ended here already
                self._client.send_abort(processed.aborts)
