"""One request of the async engine, as its user sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ...compat.forms import AddCall
from .outputs import RequestOutput, errors_of, num_tokens_of
from .request_state import RequestState

if TYPE_CHECKING:
    from ..async_llm_engine import AsyncLLMEngine


class RequestStream:
    """A request's outputs: an async iterator, begun when first asked. What has come since the last look is one output,
    so a slow reader gets fewer and longer ones, and nothing piles up.

    A request that ends in an error raises it, after what it had brought. Whoever leaves before the end (out of the
    loop, by a cancelled task, by `aclose`) aborts the request in the core.
    """

    def __init__(self, engine: AsyncLLMEngine, call: AddCall) -> None:
        self._engine = engine
        self._call = call
        self._state: RequestState | None = None
        self._ended: Exception | None = None  # what to raise when asked again

    @property
    def request_id(self) -> str:
        return self._call.request_id if self._state is None else self._state.source.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended is not None:
            ended, self._ended = self._ended, StopAsyncIteration()
            raise ended
        try:
            state = self._state or await self._begin()
            assert state.news is not None
            await state.news.wait()
        except BaseException:  # refused, or cancelled
            await self.aclose()
            raise
        state.news.clear()
        if state.lost is not None:
            self._ended = StopAsyncIteration()
            raise state.lost
        output = state.output()
        error = next(iter(errors_of(output)), None)
        if error is not None:
            await self.aclose()
            if not num_tokens_of(output):
                raise error
            self._ended = error
        elif output.finished:
            self._ended = StopAsyncIteration()
        return output

    async def aclose(self) -> None:
        """End here; the request is aborted if it has not ended. Twice is once."""
        leaves, self._ended = self._is_open, self._ended or StopAsyncIteration()
        if leaves:
            await self._engine._reader.end([self.request_id])

    async def _begin(self) -> RequestState:
        self._state = await self._engine._add(self._call)
        return self._state

    @property
    def _is_open(self) -> bool:
        """Whether the core works for it. If not, the id may be another's by now."""
        return self._ended is None and self._state is not None and not self._state.finished

    def __del__(self) -> None:
        if self._is_open:
            self._engine._reader.end_from_anywhere(self.request_id)
