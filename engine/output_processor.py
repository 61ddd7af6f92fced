"""The core's outputs to requests with news. No I/O and no waiting: the synchronous and the async engine share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..ipc.messages import Finished, Outputs
from ..ipc.params import RequestOutputKind
from .input_processor import EngineCoreRequest
from .request_state import Completion, RequestState
from .tokenizer import Tokenizer


class Processed(NamedTuple):
    """The requests that have an output to show, which is made when somebody takes it, and the handles that the core is
    to abort."""

    changed: list[RequestState]
    aborts: list[int]


class OutputProcessor:
    """Every request in flight of one frontend. Not thread-safe; its engine sees to that."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestState] = {}
        self._completions: dict[int, Completion] = {}  # by handle, the unfinished ones

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: EngineCoreRequest, handles: Sequence[int], now: float) -> RequestState:
        state = self._requests[request.request_id] = RequestState(request, handles, self._tokenizer, now)
        for completion in state.completions:
            self._completions[completion.handle] = completion
        return state

    def forget(self) -> list[RequestState]:
        """Drop all requests without a word; those that were in flight."""
        dropped = list(self._requests.values())
        self._requests, self._completions = {}, {}
        return dropped

    def process(self, outputs: Outputs, now: float) -> Processed:
        """Take in a step's outputs. Those of requests that are no longer known are dropped.

        The work is one dict look-up and one append a token for requests that show nothing before their end; text costs
        more and is made only for the others.
        """
        completions = self._completions
        touched: dict[Completion, Finished | None] = {}
        for handle, token in zip(outputs.handles, outputs.token_ids, strict=True):
            completion = completions.get(handle)
            if completion is not None:
                completion.token_ids.append(token)
                completion.request.metrics.last_token_time = now
                touched[completion] = None
        for said in outputs.started:
            completion = completions.get(said.handle)
            if completion is not None:
                completion.request.started(said)
        for ended in outputs.finished:
            completion = completions.get(ended.handle)
            if completion is not None:
                completion.request.metrics.num_preemptions += ended.num_preemptions
                touched[completion] = ended
        return self._advance(touched, now)

    def abort(self, request_ids: Iterable[str], now: float) -> Processed:
        """End these requests at once; unknown ids are ignored."""
        states = [self._requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self]
        running = [one for state in states for one in state.completions if one.finish_reason is None]
        changed, _ = self._advance({one: Finished(one.handle, "abort") for one in running}, now)
        return Processed(changed, [one.handle for one in running])

    def _advance(self, touched: dict[Completion, Finished | None], now: float) -> Processed:
        aborts: list[int] = []
        changed: dict[RequestState, None] = {}
        for completion, ended in touched.items():
            request = completion.request
            if ended is None and request.reads_at_end:
                continue
            completion.advance(ended)
            if completion.finish_reason is not None:
                del self._completions[completion.handle]
                if ended is None:
                    aborts.append(completion.handle)
            changed[request] = None
        return Processed([state for state in changed if self._shows(state, now)], aborts)

    def _shows(self, state: RequestState, now: float) -> bool:
        """Whether there is an output to make; one that has ended is not looked after any more."""
        if not state.finished:
            return state.kind != RequestOutputKind.FINAL_ONLY
        state.metrics.finished_time = now
        del self._requests[state.source.request_id]
        return True
