"""A request in flight as the frontend sees it: its completions, the text so far, what was shown already."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..ipc.errors import MainspringError, OverloadedError, RequestFailedError, from_wire
from ..ipc.messages import Finished, FinishReason, Started
from ..ipc.params import RequestOutputKind
from .detokenizer import TextStream, text_stream
from .input_processor import EngineCoreRequest
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .stop_strings import StopStrings
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Completion:
    """One of a request's completions: its tokens as they come, its text as it is asked for."""

    request: RequestState
    index: int
    handle: int
    _stream: TextStream | None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: MainspringError | None = None
    _stops: StopStrings | None = field(init=False)
    _decoded: int = 0  # tokens whose text is in _texts
    _texts: list[str] = field(default_factory=list)
    _shown_text: int = 0  # pieces of _texts and tokens that a DELTA output has had
    _shown_tokens: int = 0
    _shown_end: bool = False

    def __post_init__(self) -> None:
        params = self.request.source.params
        self._stops = StopStrings(list(params.stop), params.include_stop_str_in_output) if params.stop else None

    def advance(self, ended: Finished | None) -> None:
        """Take in the new tokens and, if so, the end. A text that can't be made is this completion's error alone."""
        try:
            if ended is None:
                self._read()
            else:
                self._finish(ended)
        except Exception as error:
            text = f"its text could not be made ({type(error).__name__}: {error})"
            self._fail(RequestFailedError(text))

    def _read(self) -> bool:
        """Turn the new tokens into text. True if that brought a stop string: the completion has then ended, and what
        came after it is dropped.
        """
        stream, stops = self._stream, self._stops
        if stream is None:
            return False
        end, min_tokens = len(self.token_ids), self.request.source.params.min_tokens
        while self._decoded < end:
            text = stream.push(self.token_ids[self._decoded])
            self._decoded += 1
            if stops is not None:
                text = stops.push(text, accept=self._decoded > min_tokens)
            if text:
                self._texts.append(text)
            if stops is not None and stops.matched is not None:
                del self.token_ids[self._decoded :]
                self.finish_reason, self.stop_reason = "stop", stops.matched
                return True
        return False

    def _finish(self, ended: Finished) -> None:
        """Take the core's word for the end. A stop token stands in `token_ids` but not in the text."""
        by_stop_token = ended.reason == "stop" and not self.request.source.params.include_stop_str_in_output
        last = self.token_ids.pop() if by_stop_token and len(self.token_ids) > self._decoded else None
        if not self._read():  # else a stop string stood before the end
            self._end(ended.reason)
            if last is not None:
                self.token_ids.append(last)
            if ended.reason == "stop" and ended.stop_token not in self.request.source.eos_token_ids:
                self.stop_reason = ended.stop_token
            elif ended.reason == "error":
                self._fail(from_wire(ended.error, ended.error_text))

    def _fail(self, error: MainspringError) -> None:
        self.finish_reason, self.error = "error", error
        self.stop_reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, OverloadedError):  # that is an answer, not a failure
            logger.warning("request %s failed: %s", self.request.source.request_id, self.stop_reason)

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._stream is not None:
            text = self._stream.flush()
            if self._stops is not None:
                text = self._stops.push(text, accept=False) + self._stops.flush()
            if text:
                self._texts.append(text)

    @property
    def has_news(self) -> bool:
        """Whether a DELTA output has anything to show of it."""
        return self._shown_tokens < len(self.token_ids) or (self.finish_reason is not None and not self._shown_end)

    def output(self, delta: bool) -> CompletionOutput:
        reason = self.finish_reason
        self._shown_end = reason is not None
        if delta:
            text, token_ids = "".join(self._texts[self._shown_text :]), self.token_ids[self._shown_tokens :]
            self._shown_text, self._shown_tokens = len(self._texts), len(self.token_ids)
        else:
            self._texts = ["".join(self._texts)]
            text, token_ids = self._texts[0], self.token_ids.copy()
        return CompletionOutput(
            self.index, text, token_ids, finish_reason=reason, stop_reason=self.stop_reason, error=self.error
        )


class RequestState:
    """A request and its completions."""

    def __init__(
        self, source: EngineCoreRequest, handles: Sequence[int], tokenizer: Tokenizer | None, now: float
    ) -> None:
        params = source.params
        self.source = source
        self.kind = params.output_kind
        self.metrics = RequestMetrics(source.arrival_time)
        self.num_cached_tokens: int | None = None
        self.news: asyncio.Event | None = None  # the async engine's: there is an output to be made, or `lost`
        self.lost: Exception | None = None  # why nothing more will come, though it has not ended
        self._added = now
        # text can wait for the end if nobody sees it before, and no stop string is to be found in it
        self.reads_at_end = self.kind == RequestOutputKind.FINAL_ONLY and not params.stop
        prompt = () if source.embeds is not None else source.prompt_token_ids

        def stream() -> TextStream | None:
            if tokenizer is None or not params.detokenize:
                return None
            return text_stream(tokenizer, prompt, params.skip_special_tokens, params.spaces_between_special_tokens)

        self.completions = [Completion(self, index, handle, stream()) for index, handle in enumerate(handles)]

    def started(self, said: Started) -> None:
        metrics = self.metrics
        if metrics.first_scheduled_time is None:
            metrics.time_in_queue = said.queued_s
            metrics.first_scheduled_time = self._added + said.queued_s
            metrics.first_token_time = metrics.first_scheduled_time + said.first_token_s
            self.num_cached_tokens = said.num_cached_tokens

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def output(self) -> RequestOutput:
        """What to show now: all that has come since the last one."""
        delta = self.kind == RequestOutputKind.DELTA
        shown = [one for one in self.completions if one.has_news] if delta else self.completions
        source = self.source
        return RequestOutput(
            source.request_id,
            source.prompt,
            None if source.embeds is not None else source.prompt_token_ids,
            None,
            [completion.output(delta) for completion in shown],
            self.finished,
            self.metrics,
            None,
            self.num_cached_tokens,
        )
