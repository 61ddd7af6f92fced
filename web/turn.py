"""One answer to a conversation, as the pieces of its message: for the APIs that are made of chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, cast

from ..engine.text.response_reader import Piece
from .exchange import Request
from .logprobs import TextLogprobs
from .service import finish_reason

if TYPE_CHECKING:
    from ..engine.request.outputs import RequestOutput
    from ..engine.request.request_stream import RequestStream
    from .chat import Conversation


class Turn:
    """Attributes:
    reason: why it has ended: ``stop``, ``length`` or ``tool_calls``.
    stopped_by: the stop string that ended it.
    logprobs: of the tokens so far, if the request asks for them.
    """

    def __init__(self, request: Request, talk: Conversation) -> None:
        self._request, self._talk = request, talk
        self._reader = None if talk.readers is None else talk.readers()
        self._last: RequestOutput | None = None
        self.reason: str | None = None
        self.stopped_by: str | None = None
        self.num_tokens = 0
        self.logprobs = TextLogprobs()

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """The pieces as they come. The request is aborted if the iterator is closed before its end.

        Raises:
            HttpError: the request was ended by the server.
        """
        stream, reader = cast("RequestStream", self._talk.stream), self._reader
        try:
            async for output in stream:
                self._last, one = output, output.outputs[0]
                self.num_tokens += len(one.token_ids)
                self._request.num_tokens = self.num_tokens
                if one.logprobs:
                    self.logprobs.add(one.token_ids, self._talk.logprobs(one)["content"], self._talk.tokenizer)
                if reader is None:
                    pieces = [Piece("content", one.text)] if one.text else []
                else:
                    pieces = reader.read(one.text, one.token_ids)
                    pieces += reader.end() if one.finish_reason is not None else []
                if one.finish_reason is not None:
                    self.reason = finish_reason(one.finish_reason)
                    self.stopped_by = one.stop_reason if isinstance(one.stop_reason, str) else None
                    if self.reason == "stop" and reader is not None and reader.has_calls:
                        self.reason = "tool_calls"
                yield pieces
        finally:
            await stream.aclose()

    @property
    def num_prompt_tokens(self) -> int:
        return 0 if self._last is None else len(self._last.prompt_token_ids or ())

    @property
    def num_cached_tokens(self) -> int:
        return 0 if self._last is None else self._last.num_cached_tokens or 0

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._reader is None else round(self._reader.num_reasoning_tokens)


def assistant_message(content: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """A message of the model as chat templates take it.

    Args:
        calls: each with `id`, `name` and `arguments`, which is JSON.
    """
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": one["id"], "type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}}
            for one in calls
        ]
    return message
