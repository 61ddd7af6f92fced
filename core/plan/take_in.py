"""The result of a step is taken in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...ipc.errors import OutOfMemoryError
from ...ipc.messages import Pooled, Started
from .columns import MANY_STOPS
from .request import Request
from .state import SchedulerState
from .step import Scores, Step, StepPlan, StepResult
from .transitions import fail, finish, preempt


def take_in(state: SchedulerState, step: Step, result: StepResult) -> None:
    """Put the tokens of `result` into the columns and the outbox, publish full blocks, and end the requests that are
    complete."""
    rows, features, outbox, plan, sampled = state.rows, state.features, state.outbox, step.plan, result.tokens
    if state.media is not None and result.encoded:
        state.media.take_in(result)
    end_rows(state, step, result)
    slots, ends = plan.slots.astype(np.int64), plan.starts.astype(np.int64) + result.computed
    alive, guessing = rows.alive[slots], bool(plan.guessed.any())
    row, back = plan.choices()
    keep, at = alive[row], ends[row] - back
    if guessing:
        stops = _stops(state, slots[row], sampled)
        for accept in features.accept:
            accept(plan, result, keep, ends, stops)
    chosen, at, tokens = slots[row][keep], at[keep], sampled[keep]
    if result.pooled is None:
        rows.tokens[chosen, at] = tokens
    publish(state, slots[alive], ends[alive])
    if step.solo and chosen.size:
        state.suspects.token_came(int(step.output_index[0]))
    firsts = chosen[rows.silent[chosen]]
    if result.pooled is None:
        num_requests = len(np.unique(chosen)) if guessing else len(chosen)
        state.meter.tokens_came(state.clock(), len(chosen), num_requests, len(firsts))
        scores = [of_kept(one, keep) for one in result.logprobs]
        outbox.put_tokens(rows.handle[chosen], rows.frontend[chosen], tokens, scores)
    for slot in firsts.tolist():
        _start(state, slot)
    for prompt_scores in features.prompt_scores:
        for frontend, logprobs in prompt_scores(plan, result):
            outbox.put_prompt_scores(frontend, logprobs)
    for routed in features.routed:
        for one in routed(plan, result, alive, ends):
            outbox.put_routed(one)
    if result.pooled is None:
        end_complete(state, chosen, at, tokens)
    else:
        _end_pooled(state, chosen, [result.pooled[i] for i in np.flatnonzero(keep).tolist()])
    retire(state, step)
    state.budget.step_succeeded()


def take_back(state: SchedulerState, step: Step, result: StepResult) -> None:
    """Undo `step`, the only one in flight, because the device lacked memory. Its requests catch up in steps of half the
    size; the budget grows back. A request that can't be cut any further ends with an error."""
    plan, why = step.plan, result.lack
    if state.media is not None:
        state.media.take_in(result)
        state.media.take_back(plan)
    requests = [state.running.requests[slot] for slot in plan.slots.tolist() if state.rows.alive[slot]]
    retire(state, step)
    if not plan.slots.size:
        return
    if len(plan.slots) == 1 and (not state.budget.chunked or _is_whole(requests, plan)):
        for request in requests:
            fail(state, request, OutOfMemoryError(f"the device lacks memory for this request alone: {why}"))
        return
    for request in requests:
        preempt(state, request)
    state.budget.cut(max(1, plan.num_tokens // 2))


def _is_whole(requests: Sequence[Request], plan: StepPlan) -> bool:
    """Whether the only row of a plan can't be cut."""
    return plan.num_tokens == 1 or any(one.span_at(int(plan.starts[0])) == plan.num_tokens for one in requests)


def retire(state: SchedulerState, step: Step) -> None:
    state.kv.step_retired(step.plan.id)
    state.running.retire(step.plan.id)
    if step.solo:
        state.suspects.step = None


# ------------------------------------------------------------------ requests end


def end_rows(state: SchedulerState, step: Step, result: StepResult) -> None:
    """End the requests that can't go on, and those whose grammar allows no further token."""
    slots, requests = step.plan.slots, state.running.requests
    for failed, name, text in result.errors:
        if (request := requests.get(int(slots[failed]))) is not None:
            state.suspects.clear(request)
            finish(state, request, "error", error=(name, text))
    for ended in result.complete:
        if (request := requests.get(int(slots[ended]))) is not None:
            state.suspects.clear(request)
            finish(state, request, "stop")


def _stops(state: SchedulerState, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Whether each of `tokens` ends the request at `slots` that it was chosen for."""
    stop = state.rows.stop[slots]
    found: np.ndarray = tokens == stop
    for i in np.flatnonzero((stop == MANY_STOPS) & state.rows.alive[slots]):
        found[i] = int(tokens[i]) in state.running.requests[int(slots[i])].stop_tokens
    return found


def end_complete(state: SchedulerState, slots: np.ndarray, at: np.ndarray, tokens: np.ndarray) -> None:
    """End the requests for which a stop token came, or the last token they may have (int64 ``[n]`` each; `at`: index of
    the token in its sequence)."""
    stop = state.rows.stop[slots]
    done = (tokens == stop) | (at + 1 >= state.rows.max_len[slots])
    for i in np.flatnonzero(done | (stop == MANY_STOPS)):
        request, token = state.running.requests[int(slots[i])], int(tokens[i])
        if token in request.stop_tokens:
            finish(state, request, "stop", stop_token=token)
        elif done[i]:
            finish(state, request, "length")


def _end_pooled(state: SchedulerState, slots: np.ndarray, results: Sequence[np.ndarray]) -> None:
    """Requests of a pooling model end with their vectors."""
    for slot, result in zip(slots.tolist(), results, strict=True):
        request = state.running.requests[slot]
        vectors = np.ascontiguousarray(result, "<f4")
        state.outbox.put_pooled(request.frontend, Pooled(request.handle, list(vectors.shape), vectors.tobytes()))
        finish(state, request, "stop")


# ------------------------------------------------------------------ requests go on


def publish(state: SchedulerState, slots: np.ndarray, ends: np.ndarray) -> None:
    """Let the prefix cache have the blocks that are full, where `ends` tokens are computed (int64 ``[n]`` each)."""
    size, published = state.kv.block_size, state.rows.num_published
    for i in np.flatnonzero(ends // size > published[slots] // size):
        slot, end = int(slots[i]), int(ends[i])
        request = state.running.requests[slot]
        request.extend_digests(state.rows.tokens[slot], end, size)
        state.kv.publish(request, int(published[slot]) // size, end // size)
        published[slot] = end // size * size


def _start(state: SchedulerState, slot: int) -> None:
    """A request got its first token."""
    request, now = state.running.requests[slot], state.clock()
    state.rows.silent[slot] = False
    request.started = True
    request.first_token_at = now
    state.meter.request_began(request, now)
    admitted = request.admitted_at or now
    cached = max(0, request.num_cached_tokens - request.num_virtual)
    started = Started(request.handle, admitted - request.arrival, now - admitted, cached)
    state.outbox.put_started(request.frontend, started)


def of_kept(scores: Scores, keep: np.ndarray) -> Scores:
    """The scores of the rows that are kept (bool ``[rows]``). Their row numbers then count kept rows only."""
    there = scores.only(keep[scores.rows])
    return there._replace(rows=(np.cumsum(keep) - 1)[there.rows])
