"""Several decode steps in one plan, where nothing needs the planner between them.

A step of a small model takes a few milliseconds, and to plan and take it in costs another one. So if all requests
decode and nobody waits, one plan lets the worker make several steps. Each row then has the tokens, the blocks and the
place in the prefix cache that it would have after as many plans of one step, and each frontend is charged the same.
A plan ends early with a request, and with a message from a frontend.
"""

from __future__ import annotations

import numpy as np

from .columns import MANY_STOPS
from .room import extend
from .state import SchedulerState
from .step import Step, StepPlan, StepResult
from .take_in import end_complete, end_rows, of_kept, publish, retire

MOST_SECONDS = 0.2  # that a plan may take by the step before; what the core does beside steps waits as long
MOST_STOPS = 4096  # stop tokens that a plan lists at most, a millisecond's work; a request may have as many as tokens


def steps_of(state: SchedulerState, slots: np.ndarray) -> int:
    """How many steps the worker may make of the plan that computes what is granted at `slots` (int64 ``[rows]``)."""
    rows, running, features = state.rows, state.running, state.features
    if state.most_steps == 1 or running.in_flight or state.fair.num_requests > len(slots):
        return 1
    # guesses come between steps, and numbers of experts with each
    if features.fill or features.routed:
        return 1
    if rows.silent[slots].any() or not (state.hands_out or (rows.plain & rows.patient)[slots].all()):
        return 1
    computed, known = rows.num_computed[slots], rows.num_tokens[slots]
    if (computed + 1 < known).any() or state.step_seconds == 0:
        return 1
    many = slots[rows.stop[slots] == MANY_STOPS].tolist()
    if sum(len(running.requests[slot].stop_tokens) for slot in many) > MOST_STOPS:
        return 1
    count = min(state.most_steps, int((rows.max_len[slots] - known).min()), int(MOST_SECONDS / state.step_seconds))
    count = min(count, state.kv.steps_before_snapshot(computed))
    return _within_blocks(state, slots, count) if count > 1 else 1


def _within_blocks(state: SchedulerState, slots: np.ndarray, count: int) -> int:
    """As many of `count` steps as the requests at `slots` have blocks for. They get new ones if the pool has plenty."""
    rows, size = state.rows, state.kv.block_size
    ends = rows.num_computed[slots] + count
    short = np.flatnonzero(ends > rows.reach[slots])
    needed = int((-(-(ends - rows.reach[slots])[short] // size)).sum()) * len(state.kv.kinds)
    if 2 * needed <= state.kv.num_free(state.running.requests[int(slots[0])]):
        short = np.array([i for i in short.tolist() if not extend(state, int(slots[i]), int(ends[i]))], np.int64)
    within = (rows.reach[slots] - rows.num_computed[slots])[short]
    return min(count, int(within.min())) if within.size else count


def take_in_several(state: SchedulerState, step: Step, result: StepResult) -> None:
    """As `take_in` for each of the steps. Only the last one can end a request."""
    rows, plan, count = state.rows, step.plan, result.num_steps
    _count_as_planned(state, plan, count if result.first else count - 1)
    end_rows(state, step, result)
    alive = rows.alive[plan.slots]
    slots = plan.slots[alive].astype(np.int64)
    tokens = result.tokens.reshape(count, -1)[:, alive]
    at = plan.starts[alive].astype(np.int64) + result.first + np.arange(1, count + 1)[:, None]
    rows.tokens[slots, at] = tokens
    rows.num_computed[slots], rows.num_tokens[slots] = at[-1], at[-1] + 1
    publish(state, slots, at[-1])
    state.meter.tokens_came(state.clock(), tokens.size, len(slots), 0)
    handles, frontends = (np.tile(column[slots], count) for column in (rows.handle, rows.frontend))
    scores = [of_kept(one, np.tile(alive, count)) for one in result.logprobs]
    state.outbox.put_tokens(handles, frontends, tokens.reshape(-1), scores)
    end_complete(state, slots, at[-1], tokens[-1])
    if not result.more:
        retire(state, step)
        state.budget.step_succeeded()


def _count_as_planned(state: SchedulerState, plan: StepPlan, count: int) -> None:
    """Count so many steps of `plan` beside the one that was counted when it was launched."""
    state.running.next_step += count
    state.fair.charge(count * np.bincount(state.rows.frontend[plan.slots]))
    for _ in range(count):
        state.meter.stepped(plan.num_tokens)
