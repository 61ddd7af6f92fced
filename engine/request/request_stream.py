"""One request of the async engine, as its user sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Self, cast

from .outputs import RequestOutput, errors_of, num_tokens_of
from .request_state import RequestState

if TYPE_CHECKING:
    from .output_reader import OutputReader  # brings asyncio


class RequestStream:
    """The outputs of a request: an async iterator, which sends the request when the first output is asked for. All that
    has come since the last output is one output, so a slow reader gets fewer and longer ones, and no queue grows.

    A request that ends in an error raises it, after its outputs. To leave the loop before the end, to cancel the task
    or to call `aclose` aborts the request in the core.

    Args:
        request_id: the request's, unless it was prepared under another.
        send: sends the request. Called once, for the first output.
    """

    def __init__(self, reader: OutputReader, request_id: str, send: Callable[[], Awaitable[RequestState]]) -> None:
        self._reader = reader
        self._request_id = request_id
        self._send = send
        self._state: RequestState | None = None
        self._ended: Exception | None = None  # what the next call raises

    @property
    def request_id(self) -> str:
        return self._request_id if self._state is None else self._state.source.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended is not None:
            ended, self._ended = self._ended, StopAsyncIteration()
            raise ended
        try:
            state = self._state or await self.begin()
            await state.output_ready.wait()
        except BaseException:  # refused, or cancelled
            await self.aclose()
            raise
        state.output_ready.clear()
        if state.direct_error is not None:
            await self.aclose()
            raise state.direct_error
        if state.connection_error is not None:
            self._ended = StopAsyncIteration()
            raise state.connection_error.with_traceback(None)
        output = state.output()
        if errors := errors_of(output):
            await self.aclose()
            if not num_tokens_of(output):
                raise errors[0]
            self._ended = errors[0]
        elif output.finished:
            self._ended = StopAsyncIteration()
        return output

    def pass_text(self, take: Callable[[str, list[int]], bool]) -> None:
        """Give text that comes alone to `take`, at once and without making an output, which takes three times as long.
        The iterator must be waited for meanwhile: it gives all else, like the first and the last output, and what
        `take` has answered with False. For begun requests with one completion and outputs of kind DELTA, without log
        probabilities.

        Args:
            take: called from the event loop with new text and tokens. What it raises, the iterator raises.
        """
        assert self._state is not None
        self._state.direct = take

    async def aclose(self) -> None:
        """End the stream. The request is aborted unless it has ended. A second call does nothing."""
        leaves, self._ended = self._is_open, self._ended or StopAsyncIteration()
        if leaves:
            await self._reader.end([self.request_id])

    async def begin(self) -> RequestState:
        """Send the request."""
        self._state = await self._send()
        if self._ended is not None:  # closed by another task meanwhile
            await self._reader.end([self.request_id])
        return self._state

    @property
    def _is_open(self) -> bool:
        """Whether the request is in flight. If not, another request may have its id by now."""
        return self._ended is None and self._state is not None and not self._state.finished

    def __del__(self) -> None:
        if self._is_open:
            self._reader.end_from_anywhere(cast(RequestState, self._state))
