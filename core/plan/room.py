"""Blocks for running requests, and room for new ones where another frontend has more than its share.

Blocks of a preempted request come back when the steps in flight have retired. Until then they are promised to the
request that they were taken for.
"""

from __future__ import annotations

import numpy as np

from .preemption import giver_for, preempt_victim
from .request import Request
from .state import SchedulerState
from .transitions import preempt


def free_for(state: SchedulerState, request: Request) -> int:
    """Free blocks that this request may take."""
    return state.kv.num_free(request) - _reserved(state, request)


def _reserved(state: SchedulerState, request: Request) -> int:
    promised, kept = state.promised, state.fair.of(request.frontend).kept
    if promised is None or promised.finished or promised.frontend == request.frontend or promised.home != request.home:
        return kept
    return kept + promised.room


def extend(state: SchedulerState, slot: int, num_tokens: int, ahead: int = 0) -> bool:
    """Let the block tables of a running request reach `num_tokens`, and `ahead`, if that is more, where no window gives
    blocks up. False if there are too few blocks."""
    request, size = state.running.requests[slot], state.kv.block_size
    if not state.kv.extend(request, int(state.rows.num_computed[slot]), num_tokens, _reserved(state, request), ahead):
        return False
    state.rows.reach[slot] = -(-num_tokens // size) * size
    return True


def allocate(state: SchedulerState, slots: np.ndarray) -> set[int]:
    """Let the block tables at `slots` reach what this step computes, with preemptions where the pool has too few
    blocks.

    Returns:
        the frontends that get no new request in this step, which could take the blocks that running requests wait for:
        those whose requests lacked blocks or were preempted; all, if the oldest request of all waits for blocks that
        others took when they came back, which could go on for ever.
    """
    rows, lacking = state.rows, set()
    waited, state.waits = state.waits, None
    ends = rows.num_computed + rows.granted
    edges = [state.running.requests[slot] for slot in slots[ends[slots] > rows.reach[slots]].tolist()]
    for request in sorted(edges, key=state.fair.rank):
        slot = request.slot
        while request.slot >= 0 and not extend(state, slot, int(ends[slot])):
            lacking.add(request.frontend)
            if state.kv.num_coming(request):  # they come back when a step retires
                rows.granted[slot] = 0
                if _waits_in_vain(state, request, waited):
                    lacking.update(frontend.id for frontend in state.fair)
                break
            lacking.add(preempt_victim(state, request.home).frontend)
    return lacking


def _waits_in_vain(state: SchedulerState, request: Request, waited: tuple[Request, int] | None) -> bool:
    """Whether a request that waits for blocks is the oldest of its home, and all steps have retired that were in flight
    when it began to wait. waited: `SchedulerState.waits` after the step before."""
    running = state.running
    if request is not min((r for r in running.requests.values() if r.home == request.home), key=state.fair.rank):
        return False
    state.waits = waited if waited is not None and waited[0] is request else (request, running.next_step)
    return running.in_flight[0] >= state.waits[1]


def make_room(state: SchedulerState, request: Request, promised: bool) -> bool:
    """Preempt requests of frontends over their share for `request`, whose frontend is under its share.

    Returns:
        whether there is room now. If the room is there only when the steps in flight have retired, it is promised.
    """
    running, gave = state.running, False
    while True:
        slots = 1 - len(running.free_slots) - len(running.coming_slots)
        if slots <= 0 and request.room <= free_for(state, request) + state.kv.num_coming(request):
            break
        # A request that got its slot in this very step keeps it; the next step begins with the least served.
        giver = giver_for(state, request, slots > 0, but=running.admitted)
        if giver is None:
            return False
        preempt(state, giver)
        gave = True
    if running.in_flight and (gave or promised) and state.promised is None:
        state.promised = request
    return gave and not running.in_flight
