"""The result of a step is taken in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...ipc.errors import OutOfMemoryError, wire_name, wire_text
from ...ipc.messages import Logprobs, Pooled, Started
from ..core_meter import CoreMeter
from ..features.token_times import TokenTimes
from ..memory.cache_manager import CacheManager
from .budget import Budget
from .columns import MANY_STOPS
from .ending import Ending
from .feature import Features
from .outbox import NO_TOKENS, Outbox
from .preemption import Preemption
from .running import Running
from .step import Scores, Step, StepResult


class Brought(NamedTuple):
    """What frontends are told of a step, as the arguments of `Outbox.take`."""

    handles: np.ndarray  # int64 [tokens]
    owners: np.ndarray  # int64 [tokens], frontends
    tokens: np.ndarray  # int64 [tokens]
    started: Sequence[tuple[int, Started]]  # by frontend
    scores: Sequence[Scores]
    prompts: Sequence[tuple[int, Logprobs]]  # by frontend


class TakeIn:
    """
    Args:
        counts: counters of `Stats`, by name.
    """

    def __init__(
        self,
        running: Running,
        kv: CacheManager,
        budget: Budget,
        features: Features,
        preemption: Preemption,
        ending: Ending,
        outbox: Outbox,
        meter: CoreMeter,
        times: TokenTimes,
        counts: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._running, self._rows, self._kv, self._budget = running, running.rows, kv, budget
        self._features, self._preemption, self._ending, self._outbox = features, preemption, ending, outbox
        self._meter, self._times, self._counts, self._clock = meter, times, counts, clock

    def take(self, step: Step, result: StepResult) -> Brought:
        """Put the tokens of `result` into the columns, publish full blocks, and end the requests that are complete."""
        rows, plan, sampled = self._rows, step.plan, result.tokens
        self._end_rows(step, result)
        slots, ends = plan.slots.astype(np.int64), plan.starts.astype(np.int64) + result.computed
        alive = rows.alive[slots]
        row, back = plan.choices()
        keep, at = alive[row], ends[row] - back
        if plan.guessed.any():
            self._features.accept(plan, result, keep, ends, self._stops(slots[row], sampled))
        chosen, at, tokens = slots[row][keep], at[keep], sampled[keep]
        if result.pooled is None:
            rows.tokens[chosen, at] = tokens
            self._counts["generation_tokens"] += len(tokens)
        self._publish(slots[alive], ends[alive])
        self._features.brought(step, chosen)
        if result.pooled is None:
            self._observe(chosen, len(chosen) if not plan.guessed.any() else len(np.unique(chosen)))
        started = [self._start(int(slot)) for slot in chosen[rows.silent[chosen]]]
        handles, owners = rows.handle[chosen], rows.frontend[chosen]
        scores = [_of_kept(one, keep) for one in result.logprobs]
        prompts = self._features.prompt_scores(plan, result)
        if result.pooled is not None:
            self._end_pooled(chosen, [result.pooled[i] for i in np.flatnonzero(keep).tolist()])
            handles = owners = tokens = NO_TOKENS
        else:
            self._end_complete(chosen, at, tokens)
        self._retire(step)
        self._budget.step_succeeded()
        return Brought(handles, owners, tokens, started, scores, prompts)

    def take_back(self, step: Step, why: str) -> None:
        """Undo `step`, the only one in flight, because the device lacked memory. Its requests catch up in steps of half
        the size; the budget grows back. A request that can't be cut any further ends with an error."""
        plan = step.plan
        requests = [self._running.requests[slot] for slot in plan.slots.tolist() if self._rows.alive[slot]]
        self._retire(step)
        if len(plan.slots) == 1 and (plan.num_tokens == 1 or not self._budget.chunked):
            error = OutOfMemoryError(f"the device lacks memory for this request alone: {why}")
            for request in requests:
                self._ending.fail(request, wire_name(error), wire_text(error))
            return
        for request in requests:
            self._preemption.preempt(request)
        self._budget.cut(max(1, plan.num_tokens // 2))

    def _retire(self, step: Step) -> None:
        self._running.retire(step.plan.id)
        self._features.retired(step)

    # ------------------------------------------------------------------ requests end

    def _end_rows(self, step: Step, result: StepResult) -> None:
        """End the requests that can't go on, and those whose grammar allows no further token."""
        slots, requests = step.plan.slots, self._running.requests
        for failed, name, text in result.errors:
            if (request := requests.get(int(slots[failed]))) is not None:
                self._ending.fail(request, name, text)
        for ended in result.complete:
            if (request := requests.get(int(slots[ended]))) is not None:
                self._ending.complete(request)

    def _stops(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Whether each of `tokens` ends the request at `slots` that it was chosen for."""
        stop = self._rows.stop[slots]
        found: np.ndarray = tokens == stop
        for i in np.flatnonzero((stop == MANY_STOPS) & self._rows.alive[slots]):
            found[i] = int(tokens[i]) in self._running.requests[int(slots[i])].stop_tokens
        return found

    def _end_complete(self, slots: np.ndarray, at: np.ndarray, tokens: np.ndarray) -> None:
        """End the requests for which a stop token came, or the last token they may have (int64 ``[n]`` each; `at`:
        index of the token in its sequence)."""
        stop = self._rows.stop[slots]
        done = (tokens == stop) | (at + 1 >= self._rows.max_len[slots])
        for i in np.flatnonzero(done | (stop == MANY_STOPS)):
            request, token = self._running.requests[int(slots[i])], int(tokens[i])
            if token in request.stop_tokens:
                self._ending.finish(request, "stop", stop_token=token)
            elif done[i]:
                self._ending.finish(request, "length")

    def _end_pooled(self, slots: np.ndarray, results: Sequence[np.ndarray]) -> None:
        """Requests of a pooling model end with their vectors."""
        for slot, result in zip(slots.tolist(), results, strict=True):
            request = self._running.requests[slot]
            vectors = np.ascontiguousarray(result, "<f4")
            self._outbox.pooled(request.frontend, Pooled(request.handle, list(vectors.shape), vectors.tobytes()))
            self._ending.finish(request, "stop")

    # ------------------------------------------------------------------ requests go on

    def _publish(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """Let the prefix cache have the blocks that are full, where `ends` tokens are computed (int64 ``[n]`` each)."""
        size, published = self._kv.block_size, self._rows.num_published
        for i in np.flatnonzero(ends // size > published[slots] // size):
            slot, end = int(slots[i]), int(ends[i])
            request = self._running.requests[slot]
            request.extend_digests(self._rows.tokens[slot], end, size)
            self._kv.publish(request, int(published[slot]) // size, end // size)
            published[slot] = end // size * size

    def _observe(self, slots: np.ndarray, num_requests: int) -> None:
        """Measure a step that brought a token for each of `slots`."""
        num_firsts = int(self._rows.silent[slots].sum())
        gap = self._times.observe(self._clock(), len(slots), num_requests, num_firsts)
        self._meter.brought(len(slots), num_firsts, gap)

    def _start(self, slot: int) -> tuple[int, Started]:
        """A request got its first token. Returns its frontend, and what to tell it."""
        request, now = self._running.requests[slot], self._clock()
        self._rows.silent[slot] = False
        request.started = True
        request.first_token_at = now
        self._times.first.append(now - request.arrival)
        self._meter.began(request.prompt_len, now - request.arrival)
        admitted = request.admitted_at or now
        cached = max(0, request.num_cached_tokens - request.num_virtual)
        return request.frontend, Started(request.handle, admitted - request.arrival, now - admitted, cached)


def _of_kept(scores: Scores, keep: np.ndarray) -> Scores:
    """The scores of the rows that are kept (bool ``[rows]``). Their row numbers then count kept rows only."""
    there = scores.only(keep[scores.rows])
    return there._replace(rows=(np.cumsum(keep) - 1)[there.rows])
