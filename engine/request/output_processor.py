"""Applies the core's outputs to the requests in flight. It does no I/O and never waits: both engines share it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ...ipc.errors import InvalidRequestError
from ...ipc.messages import AddRequest, Finished, Logprobs, Outputs, Routed
from ..text.tokenizer import Tokenizer
from .input_processor import EngineCoreRequest
from .outputs import Logprob
from .request_state import Completion, RequestState

if TYPE_CHECKING:
    from ..observe.metrics import StatLoggerManager
    from ..observe.tracing import Tracer
    from .pooling_state import PoolingState


class Processed(NamedTuple):
    """What follows from a message of the core."""

    changed: list[RequestState]  # requests with an output to show, which is made when it is taken
    aborts: list[int]  # handles for the core to abort
    adds: list[tuple[AddRequest, EngineCoreRequest]]  # the next round of beam searches, and their requests


def send_round(send: Callable[..., object], message: AddRequest, rank: int | None) -> None:
    """Send a round of a beam search to the core that had the one before, or to any if that has left meanwhile."""
    try:
        send(message, rank=rank)
    except InvalidRequestError:
        send(message)


class OutputProcessor:
    """Every request in flight of one frontend. Not thread-safe: the engine holds a lock."""

    def __init__(self, tokenizer: Tokenizer | None, handles: Iterator[int]) -> None:
        self._tokenizer, self._handles = tokenizer, handles
        self._pieces: dict[int, str] = {}  # token id → its text, for log probabilities
        self._requests: dict[str, RequestState] = {}
        self._completions: dict[int, Completion] = {}  # handle → unfinished completion
        self.statistics: StatLoggerManager | None = None
        self.tracer: Tracer | None = None
        self.on_media_end: Callable[[], None] = lambda: None  # called when a request with media has ended

    def use_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Use this tokenizer from now on. No request may be in flight."""
        self._tokenizer, self._pieces = tokenizer, {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests that have not started, as far as the core has told."""
        waiting = (state for state in self._requests.values() if state.metrics.first_token_time is None)
        return sum(len(state.source.prompt_token_ids) for state in waiting)

    def add(self, request: EngineCoreRequest, handles: Sequence[int], now: float) -> RequestState:
        make = RequestState
        if request.pooling:
            from .pooling_state import PoolingState as make
        elif request.params.use_beam_search:
            from .beam_search import BeamRequest as make
        state = self._requests[request.request_id] = make(request, handles, self._tokenizer, now)
        for completion in state.completions:
            self._completions[completion.handle] = completion
        return state

    def forget(self, error: Exception, now: float) -> list[RequestState]:
        """Drop all requests, because no more outputs will come. Returns those that were in flight."""
        dropped = list(self._requests.values())
        if self.tracer is not None:
            for state in dropped:
                self.tracer.ended(state, now, error)
        self._requests, self._completions = {}, {}
        return dropped

    def end_traces(self, error: Exception, now: float) -> None:
        """Trace the requests in flight as ended by `error`. What ends later is not traced."""
        tracer, self.tracer = self.tracer, None
        if tracer is not None:
            for state in list(self._requests.values()):
                tracer.ended(state, now, error)

    def process(self, outputs: Outputs, now: float) -> Processed:
        """Apply a message of the core. Outputs of requests that have ended here are dropped.

        A request that shows nothing before its end costs one dict look-up and one append for each token. Text is made
        at once only for the others.
        """
        completions = self._completions
        if self.statistics is not None:
            self.statistics.take(outputs.stats)
        touched: dict[Completion, Finished | None] = {}
        for handle, token in zip(outputs.handles, outputs.token_ids, strict=True):
            completion = completions.get(handle)
            if completion is not None:
                completion.token_ids.append(token)
                completion.request.metrics.last_token_time = now
                touched[completion] = None
        for scores in outputs.logprobs:
            self._take_logprobs(scores, outputs.handles)
        if outputs.routed is not None:
            self._take_experts(outputs.routed)
        for vectors in outputs.pooled:
            if (completion := completions.get(vectors.handle)) is not None and completion.request.source.pooling:
                cast("PoolingState", completion.request).vectors = vectors
        for said in outputs.started:
            completion = completions.get(said.handle)
            if completion is not None:
                if self.statistics is not None:
                    self.statistics.request_began(completion.request, now)
                completion.request.started(said)
        for ended in outputs.finished:
            completion = completions.get(ended.handle)
            if completion is not None:
                completion.request.metrics.num_preemptions += ended.num_preemptions
                touched[completion] = ended
        processed = self._advance(touched, now)
        if self.statistics is not None:
            self.statistics.outputs_processed(outputs, now, idle=not self._completions)
        return processed

    def abort(self, request_ids: Iterable[str], now: float) -> Processed:
        """End these requests at once. Unknown ids are ignored."""
        states = [self._requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self]
        running = [one for state in states for one in state.completions if one.finish_reason is None]
        changed = self._advance({one: Finished(one.handle, "abort") for one in running}, now).changed
        return Processed(changed, [one.handle for one in running], [])

    def _advance(self, touched: dict[Completion, Finished | None], now: float) -> Processed:
        aborts: list[int] = []
        adds: list[tuple[AddRequest, EngineCoreRequest]] = []
        changed: dict[RequestState, None] = {}
        for completion, ended in touched.items():
            request = completion.request
            if ended is None and request.makes_text_at_end:
                continue
            completion.advance(ended)
            if completion.finish_reason is not None:
                del self._completions[completion.handle]
                if ended is None:
                    aborts.append(completion.handle)
            changed[request] = None
        for state in changed:
            if state.finished and (messages := state.next_round(self._handles)):
                self._completions.update((completion.handle, completion) for completion in state.completions)
                adds += ((message, state.source) for message in messages)
        return Processed([state for state in changed if self._shows(state, now)], aborts, adds)

    def _take_experts(self, routed: Routed) -> None:
        from .expert_rows import ExpertRows, row_bytes

        size, rows, at = row_bytes(routed), memoryview(routed.experts), 0
        for handle, start, count in zip(routed.handles, routed.starts, routed.counts, strict=True):
            end = at + count * size
            if (completion := self._completions.get(handle)) is not None:
                if completion.experts is None:
                    completion.experts = ExpertRows(routed)
                completion.experts.add(start, rows[at:end])
            at = end

    def _take_logprobs(self, scores: Logprobs, handles: Sequence[int]) -> None:
        if scores.handle >= 0:
            if completion := self._completions.get(scores.handle):
                completion.request.add_prompt_logprobs(scores.start, self._entries(scores))
            return
        completions = [self._completions.get(handles[row]) for row in scores.rows]
        if any(completions):
            for completion, entry in zip(completions, self._entries(scores), strict=True):
                if completion is not None:
                    completion.add_logprobs(entry)

    def _entries(self, scores: Logprobs) -> list[dict[int, Logprob]]:
        token_ids, logprobs = _rows("<i", scores.token_ids, scores.width), _rows("<f", scores.logprobs, scores.width)
        entries = []
        for ids, values, (rank,) in zip(token_ids, logprobs, _rows("<i", scores.ranks, 1), strict=True):
            entry = {ids[0]: Logprob(values[0], rank, self._piece(ids[0]))}
            for place, (token, value) in enumerate(zip(ids[1:], values[1:], strict=True), 1):
                if token != ids[0]:
                    entry[token] = Logprob(value, place, self._piece(token))
            entries.append(entry)
        return entries

    def _piece(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token not in self._pieces:
            try:
                self._pieces[token] = self._tokenizer.decode(token)
            except Exception:  # some tokenizers raise for a row of the vocabulary that is no token
                self._pieces[token] = ""
        return self._pieces[token]

    def _shows(self, state: RequestState, now: float) -> bool:
        """Whether there is an output to make. A request that has ended is removed."""
        if not state.finished:
            return state.is_due
        state.metrics.finished_time = now
        del self._requests[state.source.request_id]
        if state.source.media is not None:  # outputs do not need it
            state.source = replace(state.source, media=None)
            self.on_media_end()
        if self.statistics is not None:
            self.statistics.request_ended(state, now)
        if self.tracer is not None:
            self.tracer.ended(state, now)
        return True


def _rows(kind: str, numbers: bytes, width: int) -> Iterator[tuple[Any, ...]]:
    return struct.Struct(f"{kind[0]}{width}{kind[1]}").iter_unpack(numbers)
