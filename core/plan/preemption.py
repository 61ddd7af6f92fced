"""Preemption: a running request loses its slot and blocks to another one.

It is always the latest request of a frontend, and never the suspect on trial.
"""

from __future__ import annotations

from collections.abc import Collection

from .fair_share import Frontend
from .request import Request
from .state import SchedulerState
from .transitions import preempt

OFTEN = 16  # preemptions of a request after which it keeps its slot until it has a new token


def preempt_victim(state: SchedulerState, home: int | None = None) -> Request:
    """Make room where the pool is empty, of one home or (None) anywhere. Returns the request that was preempted: the
    latest one of a frontend without credit, or else of the frontend that would still hold most blocks by weight without
    it. So the oldest request of all always goes on, and what `giver_for` has taken for a new request is not taken
    back."""
    latest = [request for frontend in state.fair if (request := _latest(state, frontend, home)) is not None]
    victim = max(latest, key=lambda request: (*_left_without(state, request), state.fair.rank(request)))
    preempt(state, victim)
    return victim


def giver_for(state: SchedulerState, request: Request, slots: bool, but: Collection[Request]) -> Request | None:
    """The request that gives way for `request`, which waits for a slot (`slots`) or for blocks: the latest one of a
    frontend without credit, or else of the frontend with most of them by weight, if that keeps as many as the frontend
    of `request` then has. Never one of those in `but`, nor one that was preempted often and has no new token yet: else
    requests that need most of the pool could take it from one another for ever."""
    used, able = state.kv.blocks_used, []
    frontend = state.fair.of(request.frontend)
    mine = (frontend.num_running + 1 if slots else used[frontend.id] + request.hold) / frontend.weight
    for other in state.fair:
        has = (other.num_running if slots else used[other.id]) / other.weight
        if other is frontend or (other.credit and has <= mine):
            continue
        latest = _latest(state, other, None if slots else request.home, but)
        if latest is None or (latest.num_preemptions >= OFTEN and not _has_new_token(state, latest)):
            continue
        if not other.credit or _left_without(state, latest, slots)[1] >= mine:
            able.append(latest)
    return max(able, key=lambda request: _left_without(state, request, slots), default=None)


def _has_new_token(state: SchedulerState, request: Request) -> bool:
    """Whether a running request has a token that it did not have when it got its slot."""
    return state.rows.num_known(request.slot) > len(request.tokens)


def _latest(
    state: SchedulerState, frontend: Frontend, home: int | None, but: Collection[Request] = ()
) -> Request | None:
    able = (r for r in frontend.running.values() if r is not state.suspects.on_trial and r not in but)
    return max((r for r in able if home in (None, r.home)), key=state.fair.rank, default=None)


def _left_without(state: SchedulerState, request: Request, slots: bool = False) -> tuple[bool, float]:
    """Whether the frontend of `request` is without credit, and the blocks (or slots, with `slots`) that it keeps
    without this request, by weight."""
    frontend = state.fair.of(request.frontend)
    blocks = state.kv.blocks_used[frontend.id] - state.kv.num_listed(request)
    return not frontend.credit, (frontend.num_running - 1 if slots else blocks) / frontend.weight
