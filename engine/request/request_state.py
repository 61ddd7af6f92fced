"""The state of a request in flight in the frontend: its completions, their text so far, and how much was shown."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...ipc.errors import MainspringError, OverloadedError, RequestFailedError, from_wire
from ...ipc.messages import AddRequest, Finished, FinishReason, Started
from ...ipc.params import RequestOutputKind
from ..text.detokenizer import TextStream, text_stream
from ..text.stop_strings import StopStrings
from ..text.tokenizer import Tokenizer
from .input_processor import EngineCoreRequest
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    import asyncio

    import numpy as np

    from .expert_rows import ExpertRows

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Completion:
    """One of a request's completions. Its tokens are kept as they come; text is made when it is needed."""

    request: RequestState
    index: int
    handle: int
    _stream: TextStream | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of each token, if the request asks for them
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: MainspringError | None = None
    experts: ExpertRows | None = None  # of its tokens, if the core tells them
    _stops: StopStrings | None = field(init=False)
    _decoded: int = 0  # tokens whose text is in _texts
    _texts: list[str] = field(default_factory=list)
    _shown_text: int = 0  # entries of _texts, and tokens, that DELTA outputs have shown
    _shown_tokens: int = 0
    _shown_end: bool = False

    def __post_init__(self) -> None:
        params = self.request.source.params
        self._stops = StopStrings(list(params.stop), params.include_stop_str_in_output) if params.stop else None

    def add_logprobs(self, entry: dict[int, Logprob]) -> None:
        """Add the log probabilities of the next token, which is the first key."""
        self.logprobs.append(entry)
        self.cumulative_logprob += next(iter(entry.values())).logprob

    def advance(self, ended: Finished | None) -> None:
        """Process the new tokens, and the end if there is one. If text can't be made, only this completion fails."""
        try:
            if ended is None:
                self._read()
            else:
                self._finish(ended)
        except Exception as error:
            text = f"its text could not be made ({type(error).__name__}: {error})"
            self._fail(RequestFailedError(text))

    def _read(self) -> bool:
        """Turn the new tokens into text. True if a stop string was found: the completion has then ended, and later
        tokens are dropped.
        """
        stream, stops = self._stream, self._stops
        if stream is None:
            return False
        end, min_tokens = len(self.token_ids), 0 if stops is None else self.request.source.params.min_tokens
        while self._decoded < end:
            text = stream.push(self.token_ids[self._decoded])
            self._decoded += 1
            if stops is not None:
                text = stops.push(text, accept=self._decoded > min_tokens)
            if text:
                self._texts.append(text)
            if stops is not None and stops.matched is not None:
                del self.token_ids[self._decoded :]
                if len(self.logprobs) > self._decoded:
                    del self.logprobs[self._decoded :]
                    self.cumulative_logprob = sum(next(iter(entry.values())).logprob for entry in self.logprobs)
                self.finish_reason, self.stop_reason = "stop", stops.matched
                return True
        return False

    def _finish(self, ended: Finished) -> None:
        """End as the core says. A stop token is part of `token_ids` but not of the text."""
        by_stop_token = ended.stop_token is not None and not self.request.source.params.include_stop_str_in_output
        last = self.token_ids.pop() if by_stop_token and len(self.token_ids) > self._decoded else None
        if not self._read():  # else a stop string came before the end
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
        if not isinstance(error, OverloadedError):  # an overloaded core is no failure of the request
            logger.warning("request %s failed: %s", self.request.source.request_id, self.stop_reason)

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._stream is not None:
            text = self._stream.flush()
            if self._stops is not None:
                text = self._stops.push(text, accept=False) + self._stops.flush()
            if text:
                self._texts.append(text)

    def is_due(self, interval: int = 1) -> bool:
        """Whether there is an output to show: the first token, `interval` new ones, or the end."""
        new = len(self.token_ids) - self._shown_tokens
        return new >= (interval if self._shown_tokens else 1) or (
            self.finish_reason is not None and not self._shown_end
        )

    @property
    def new_text(self) -> str:
        """What no output has shown."""
        return "".join(self._texts[self._shown_text :])

    @property
    def num_shown(self) -> int:
        """Tokens that outputs have shown."""
        return self._shown_tokens

    def text_shown(self) -> None:
        """Count all text and tokens so far as shown."""
        self._shown_text, self._shown_tokens = len(self._texts), len(self.token_ids)

    def output(self, delta: bool) -> CompletionOutput:
        first, params, reason = self._shown_tokens if delta else 0, self.request.source.params, self.finish_reason
        self._shown_end, self._shown_tokens = reason is not None, len(self.token_ids)
        if delta:
            text = self.new_text
            self._shown_text = len(self._texts)
        else:
            self._texts = ["".join(self._texts)]
            text = self._texts[0]
        return CompletionOutput(
            self.index,
            text,
            self.token_ids[first:],
            self.cumulative_logprob if self.request.is_scored else None,
            None if params.logprobs is None else self.logprobs[first:],
            reason,
            self.stop_reason,
            self.request.source.lora_request,
            self.error,
            None if reason is None else self._routed_experts(),
        )

    def _routed_experts(self) -> np.ndarray | None:
        """The last token is computed by no expert, because nothing follows it."""
        if self.experts is None:
            return None
        return self.experts.array(len(self.request.source.prompt_token_ids) + len(self.token_ids) - 1)


class Signal:
    """Like `asyncio.Event`, which asks for the running loop at each wait. That is a system call: a twentieth of the
    time that the HTTP server needs for a token."""

    __slots__ = ("_is_set", "_loop", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._is_set = loop, False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether a task waits that nothing has woken so far."""
        return self._waiter is not None and not self._waiter.done()

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        if not self._is_set:
            if self._waiter is None or self._waiter.done():
                self._waiter = self._loop.create_future()
            await self._waiter


class RequestState:
    """A request and its completions."""

    output_ready: Signal  # set by the async engine: an output can be made, or there is a `connection_error`
    direct: Callable[[str, list[int]], bool] | None = None  # see `RequestStream.pass_text`
    direct_error: Exception | None = None  # that it raised

    def __init__(
        self, source: EngineCoreRequest, handles: Sequence[int], tokenizer: Tokenizer | None, now: float
    ) -> None:
        params = source.params
        self.source = source
        self.output_kind = params.output_kind
        self.stream_interval = params.stream_interval or 1
        self.is_scored = params.logprobs is not None or params.width > params.n or params.use_beam_search
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]  # those received so far
        self._prompt_shown = False
        self.metrics = RequestMetrics(source.arrival_time)
        self.num_cached_tokens: int | None = None
        self.connection_error: Exception | None = None  # why no outputs come any more, though it has not ended
        self.added = now
        self._tokenizer = tokenizer
        # without stop strings and without outputs before the end, text can be made at the end
        self.makes_text_at_end = self.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop
        self.completions = [Completion(self, index, handle, self._text()) for index, handle in enumerate(handles)]

    def _text(self) -> TextStream | None:
        params, source = self.source.params, self.source
        if self._tokenizer is None or not params.detokenize:
            return None
        prompt = () if source.embeds is not None else source.prompt_token_ids
        skip, spaces = params.skip_special_tokens, params.spaces_between_special_tokens
        return text_stream(self._tokenizer, prompt, skip, spaces)

    def next_round(self, handles: Iterator[int]) -> list[AddRequest]:
        """The messages of the next round, once all `completions` have ended. Only beam search has rounds."""
        return []

    def started(self, said: Started) -> None:
        metrics = self.metrics
        if metrics.first_scheduled_time is None:
            metrics.time_in_queue = said.queued_s
            metrics.first_scheduled_time = self.added + said.queued_s
            metrics.first_token_time = metrics.first_scheduled_time + said.first_token_s
            self.num_cached_tokens = said.num_cached_tokens

    def add_prompt_logprobs(self, start: int, entries: list[dict[int, Logprob]]) -> None:
        """Add those of the prompt's tokens from `start` on. After a restart a core may send them again."""
        if start <= len(self._prompt_logprobs):
            self._prompt_logprobs[start : start + len(entries)] = entries

    @property
    def finished(self) -> bool:
        for completion in self.completions:  # noqa: SIM110  # asked for each token, and `all` takes three times as long
            if completion.finish_reason is None:
                return False
        return True

    @property
    def is_due(self) -> bool:
        """Whether there is enough for an output before the end."""
        if self.output_kind == RequestOutputKind.FINAL_ONLY:
            return False
        return self.stream_interval == 1 or any(
            completion.is_due(self.stream_interval) for completion in self.completions
        )

    def passes(self) -> bool:
        """Give new text to `direct`, if that is all there is to show and the stream's user waits for it. False: an
        output has to be made."""
        one = self.completions[0]
        if one.finish_reason is not None or self.direct is None or not self.output_ready.is_awaited:
            return False
        try:
            if not self.direct(one.new_text, one.token_ids[one.num_shown :]):
                return False
        except Exception as error:  # which belongs to the stream's user, not to the other requests
            self.direct, self.direct_error = None, error
            return False
        one.text_shown()
        return True

    def _best(self) -> list[Completion]:
        """The `n` completions with the largest sum of log probabilities, of `best_of`."""
        n, completions = self.source.params.n, self.completions
        if len(completions) > n:
            completions = sorted(completions, key=lambda one: (one.error is not None, -one.cumulative_logprob))[:n]
            for index, completion in enumerate(completions):
                completion.index = index
        return completions

    def output(self) -> RequestOutput:
        """The output to show now."""
        delta = self.output_kind == RequestOutputKind.DELTA
        if delta:
            outputs = [one.output(True) for one in self.completions if one.is_due()]
        else:
            outputs = [one.output(False) for one in self._best()]
        source, told = self.source, self._prompt_logprobs
        if source.params.prompt_logprobs is None or len(told) < len(source.prompt_token_ids):
            prompt_logprobs = None
        else:
            prompt_logprobs = None if delta and self._prompt_shown else told
            self._prompt_shown = True
        return RequestOutput(
            source.request_id,
            source.prompt,
            None if source.embeds is not None else source.prompt_token_ids,
            prompt_logprobs,
            outputs,
            self.finished,
            self.metrics,
            source.lora_request,
            self.num_cached_tokens,
        )
