"""First stage of a step: how many tokens each running request could compute.

A prompt cannot be cut anywhere: the tokens that a step computes may have to end where the layers' memory says so.
"""

from __future__ import annotations

import numpy as np

from .request import Request
from .state import SchedulerState


def tokens_needed(state: SchedulerState, slots: np.ndarray) -> np.ndarray:
    """Tokens that the requests at `slots` (int64 ``[n]``) could compute in one step (int64 ``[n]``): those that they
    have not computed yet, up to the length of a chunk, and as far as features allow."""
    rows, looks_back = state.rows, state.rows.looks_back[slots]
    need: np.ndarray = np.minimum(rows.num_computable(slots) - rows.num_computed[slots], state.budget.chunk)
    need[rows.excluded[slots]] = 0
    if looks_back.any():
        need[looks_back & rows.last_in_flight(slots)] = 0
    for cap in state.features.cap:
        cap(slots, need)
    return need


def cuts_are_ruled(state: SchedulerState) -> bool:
    """Whether prompts may not be cut anywhere. A budget below the smallest piece cuts them anywhere all the same: with
    so little memory, the bits of a result may differ."""
    return state.budget.chunked and state.kv.recurrent is not None and state.budget.chunk >= state.kv.least_cut


def cut(state: SchedulerState, request: Request, start: int, count: int) -> int:
    """How many of the next `count` tokens of a request, from `start`, a step may compute so that it stops where the
    layers' memory and the spans of media allow it; maybe 0. If a span is longer than what is left of the step,
    `_span_step` makes a step for it, in which it may exceed a budget that was cut."""
    ruled, left = cuts_are_ruled(state), count
    while True:
        before, count = count, request.cut_at_span(start, state.kv.cut(request, start, count) if ruled else count)
        if count == before:
            break
    if left and not count and (span := request.span_at(start)):
        if state.alone and not state.rows.granted.any():
            return span
        state.starved = state.starved or request
    return count


def cut_rows(state: SchedulerState, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many of the next `counts` tokens the requests at `slots` compute (int64 ``[n]`` each)."""
    if cuts_are_ruled(state) or state.media is not None:
        starts = state.rows.num_computed[slots]
        for i in np.flatnonzero((counts > 0) & (starts < state.rows.prompt_len[slots])).tolist():
            counts[i] = cut(state, state.running.requests[int(slots[i])], int(starts[i]), int(counts[i]))
    return counts
