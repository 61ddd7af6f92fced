"""What an async engine does on its event loop: sends requests, reads outputs, and wakes whoever waits for them.

Apart from the engine, so that importing that one does not bring asyncio, which takes a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...ipc.async_client import AsyncClient
from ...ipc.errors import EngineDeadError, WrongEventLoopError
from ...ipc.messages import AddRequest
from .output_processor import OutputProcessor, Processed
from .request_state import RequestState

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)


class OutputReader:
    """Reads from the first use on. Knows no engine, so that one that nobody holds can be collected."""

    def __init__(self, client: AsyncClient, processor: OutputProcessor) -> None:
        self._client, self._processor = client, processor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()  # nothing is in flight
        self._idle.set()

    def enter(self) -> None:
        """Begin to read, if need be.

        Raises:
            WrongEventLoopError: called from another loop than before.
        """
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise WrongEventLoopError("this engine belongs to another event loop; make one for each loop")
        self._loop = loop
        if self.done():
            self._task = loop.create_task(self._read())

    def done(self) -> bool:
        return self._task is None or self._task.done()

    async def send(self, state: RequestState, messages: Sequence[AddRequest], tensors: Sequence[np.ndarray]) -> None:
        state.news = asyncio.Event()
        self._idle.clear()
        try:
            for message in messages:
                await self._client.add_request(message, tensors)
        except BaseException:
            await self.end([state.source.request_id])
            raise

    async def end(self, request_ids: Iterable[str]) -> None:
        """Abort, here and in the core."""
        await self._settle(self._processor.abort(request_ids, time.monotonic()))

    def end_from_anywhere(self, request_id: str) -> None:
        """Nobody reads this request any more; from whichever thread collects garbage."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self.end([request_id])))

    async def drained(self, seconds: float) -> None:
        """Wait until nothing is in flight, so long at most, else `TimeoutError`."""
        await asyncio.wait_for(self._idle.wait(), seconds)

    async def ended(self) -> None:
        """Wait for the end of reading, which the client's brings."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _read(self) -> None:
        """Take in all outputs, until the core is gone."""
        try:
            while True:
                outputs = await self._client.get_outputs()
                await self._settle(self._processor.process(outputs, time.monotonic()))
                await asyncio.sleep(0)  # where outputs come faster than they are taken, others have their turn
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("reading outputs failed")
            for state in self._processor.forget(error, time.monotonic()):  # whatever it was, nobody is left waiting
                assert state.news is not None
                state.lost = error
                state.news.set()
            self._idle.set()

    async def _settle(self, processed: Processed) -> None:
        for state in processed.changed:
            assert state.news is not None
            state.news.set()
        if not len(self._processor):
            self._idle.set()
        for message in processed.adds:
            await self._client.add_request(message)
        if processed.aborts:
            with contextlib.suppress(EngineDeadError):  # these have ended anyway
                await self._client.abort(processed.aborts)
