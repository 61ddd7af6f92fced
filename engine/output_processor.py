"""The core's outputs to `RequestOutput`s. No I/O and no waiting: the synchronous and the async engine share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..ipc.messages import Outputs
from ..ipc.params import RequestOutputKind
from .input_processor import EngineCoreRequest
from .outputs import RequestOutput
from .request_state import Completion, RequestState
from .tokenizer import Tokenizer


class Processed(NamedTuple):
    """What a step brought the users, and the handles that the core is to abort."""

    outputs: list[RequestOutput]
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

    def add(self, request: EngineCoreRequest, handles: Sequence[int], now: float) -> None:
        state = RequestState(request, handles, self._tokenizer, now)
        self._requests[request.request_id] = state
        for completion in state.completions:
            self._completions[completion.handle] = completion

    def forget(self, request_ids: Iterable[str] | None = None) -> None:
        """Drop these requests, or all, without a word."""
        for request_id in list(self._requests) if request_ids is None else request_ids:
            for completion in self._requests.pop(request_id).completions:
                self._completions.pop(completion.handle, None)

    def process(self, outputs: Outputs, now: float) -> Processed:
        """Take in a step's outputs. Those of requests that are no longer known are dropped.

        The work is one dict look-up and one append a token for requests that show nothing before their end; text costs
        more and is made only for the others.
        """
        completions = self._completions
        touched: dict[Completion, None] = {}
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
            completion = completions.pop(ended.handle, None)
            if completion is not None:
                completion.finish(ended)
                completion.request.metrics.num_preemptions += ended.num_preemptions
                touched[completion] = None
        aborts: list[int] = []
        changed: dict[RequestState, None] = {}
        for completion in touched:
            if completion.finish_reason is None:
                if completion.request.reads_at_end:
                    continue
                if completion.read():
                    del completions[completion.handle]
                    aborts.append(completion.handle)
            changed[completion.request] = None
        return Processed(self._show(changed, now), aborts)

    def abort(self, request_ids: Iterable[str], now: float) -> Processed:
        """End these requests at once, each with a last output; unknown ids are ignored."""
        aborts: list[int] = []
        changed: dict[RequestState, None] = {}
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                changed[state] = None
                for completion in state.completions:
                    if self._completions.pop(completion.handle, None) is not None:
                        completion.abort()
                        aborts.append(completion.handle)
        return Processed(self._show(changed, now), aborts)

    def _show(self, changed: Iterable[RequestState], now: float) -> list[RequestOutput]:
        shown: list[RequestOutput] = []
        for state in changed:
            finished = state.finished
            if finished:
                del self._requests[state.source.request_id]
            elif state.kind == RequestOutputKind.FINAL_ONLY:
                continue
            shown.append(state.output(finished, now))
        return shown
