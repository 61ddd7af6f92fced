"""A step of one suspect alone, see features/suspects.py."""

from __future__ import annotations

import numpy as np

from .need import cut_rows, tokens_needed
from .preemption import preempt_victim
from .request import Request
from .room import extend
from .state import SchedulerState
from .transitions import take_slot


def plan_trial(state: SchedulerState, suspect: Request) -> tuple[np.ndarray, np.ndarray]:
    """Let `suspect` have the next step; no step is in flight. If it lacks room, others are preempted.

    Returns:
        its slot and the number of tokens to compute (int64 ``[1]`` each).
    """
    rows, kv, running, suspects = state.rows, state.kv, state.running, state.suspects
    rows.granted[:] = 0
    state.promised = None
    if suspect.slot < 0:
        if not running.free_slots:
            preempt_victim(state)
        suspects.begin(suspect)
        cached = kv.find_prefix(suspect)
        while kv.room_needed(suspect, cached, 0)[0] > kv.num_free(suspect):
            preempt_victim(state, suspect.home)
        take_slot(state, suspect, cached)
    slot = np.array([suspect.slot])
    rows.excluded[slot], state.alone = False, True
    need = cut_rows(state, slot, tokens_needed(state, slot))
    rows.excluded[slot], state.alone = True, False
    while not extend(state, suspect.slot, int((rows.num_computed[slot] + need)[0])):
        preempt_victim(state, suspect.home)
    suspects.step, suspects.have_turn = running.next_step, False
    return slot, need
