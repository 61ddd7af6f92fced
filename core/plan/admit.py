"""Third stage of a step: waiting requests get slots."""

from __future__ import annotations

import math
from collections import Counter

from .fair_share import Frontend
from .need import cut, cuts_are_ruled
from .preemption import giver_for
from .request import Request
from .room import extend, free_for, make_room
from .state import SchedulerState
from .transitions import take_slot

COMING = -1  # in place of a number of cached tokens: a running request is computing more of the prefix
MOST_DEFERRED = 32  # requests of a frontend skipped in one step, because each may need a new cache lookup
LEAST_REFUSED = 4  # requests of a frontend that features may refuse in one step, however many frontends share the most


def admit(state: SchedulerState, budget: int, quotas: dict[int, int] | None, closed: set[int]) -> None:
    """Give waiting requests slots, as far as budget, slots and blocks go.

    If a request lacks room, requests of other frontends may go before it, as long as their frontend then has no
    larger share than its own. A request that waits for a prefix being computed is skipped in this step; its slot
    and blocks stay reserved. A request that a feature refuses is skipped too.

    Args:
        budget: tokens left of the step.
        quotas: tokens left of it for each frontend, if the budget is divided.
        closed: frontends that get no new request in this step.
    """
    promised, state.promised = state.promised, None
    lacking = () if state.alone else closed
    ceiling = min((state.fair.share(state.fair.of(f)) for f in lacking), default=math.inf)
    deferring: list[Frontend] = []
    refused: list[Request] = []  # by a feature
    takers: dict[int, bool] = {}  # whether a frontend could take a slot from another
    num_refused, its_share = Counter[int](), 0  # by frontend; of the most, counted at the first one
    while budget > 0 and (frontend := state.fair.next_waiting(closed)) is not None:
        request = frontend.peek()
        assert request is not None, "next_waiting named a frontend with nobody waiting"
        if not state.may_run(request, fetch=_may_get_slot(state, request, takers)):
            refused.append(frontend.pop())
            its_share = its_share or max(LEAST_REFUSED, MOST_DEFERRED // sum(one.competes for one in state.fair))
            num_refused[frontend.id] += 1
            if num_refused[frontend.id] >= its_share:
                closed.add(frontend.id)
            continue
        count = _most(state, request, frontend, budget, quotas)
        if count <= 0:
            closed.add(frontend.id)
            continue
        if not state.budget.chunked and (needed := len(request.tokens) - state.kv.find_prefix(request)) > count:
            if state.budget.tokens == state.budget.full or state.rows.granted.any():
                break  # no other request goes before it, or it could wait for ever
            count = needed  # alone it may exceed a budget that was cut
        most = max(count, request.longest_span) if state.alone else count
        cached = _find_room(state, frontend, request, most, ceiling, request is promised)
        if cached is None:
            closed.add(frontend.id)
            if not frontend.deferred:
                ceiling = min(ceiling, state.fair.share(frontend))
            continue
        if cached == COMING:
            frontend.defer()
            deferring.append(frontend)
            continue
        count = min(count, len(request.tokens) - cached, state.most_tokens(request, cached))
        count = cut(state, request, cached, count)
        if not count:  # the next step may have more of its budget left
            closed.add(frontend.id)
            continue
        frontend.pop()
        _begin(state, request, cached, count)
        budget -= count
        if quotas is not None:
            quotas[frontend.id] -= count
    for frontend in deferring:
        frontend.undefer()
    for request in refused:
        state.fair.push(request)


def _may_get_slot(state: SchedulerState, request: Request, takers: dict[int, bool]) -> bool:
    """Whether a slot is free, or could be taken from another frontend's request, so that it is worth to fetch what
    `request` needs."""
    if state.running.free_slots or not (request.media or request.lora):
        return bool(state.running.free_slots)
    if (found := takers.get(request.frontend)) is None:
        found = giver_for(state, request, slots=True, but=state.running.admitted) is not None
        takers[request.frontend] = found
    return found


def _most(
    state: SchedulerState, request: Request, frontend: Frontend, budget: int, quotas: dict[int, int] | None
) -> int:
    """Most tokens of a waiting request that this step may compute, before its prefix is looked up. A prompt that
    can't be cut may take the whole budget; frontends then share by their order alone."""
    divided = quotas is not None and state.budget.chunked and not cuts_are_ruled(state)
    left = min(budget, quotas.get(frontend.id, 0)) if quotas is not None and divided else budget
    if left <= 0:
        return 0
    start = request.num_cached_blocks * state.kv.block_size  # when it was looked up last
    return min(left, state.budget.chunk, state.most_tokens(request, start))


def _begin(state: SchedulerState, request: Request, cached: int, count: int) -> None:
    """Give `request` its slot, and grant it `count` tokens. Beside others it takes blocks for all its tokens, or
    they could be taken by others before it computes them."""
    ahead = len(request.tokens) if state.running.requests else 0
    take_slot(state, request, cached)
    extended = extend(state, request.slot, cached + count, ahead)
    assert extended, "blocks counted as free were not"
    state.rows.granted[request.slot] = count


def _find_room(
    state: SchedulerState, frontend: Frontend, request: Request, most: int, ceiling: float, promised: bool
) -> int | None:
    """Look for a slot and blocks for `request`.

    Beside running requests there must be room for all its tokens, or it would be admitted only to be preempted;
    alone, for the tokens it computes now, at `most`. The prefix cache is asked again only if that can help.

    Returns:
        its cached tokens, if there is room for it now and its frontend then has no larger share than `ceiling`;
        `COMING` if it should wait for a prefix, in which case no request is preempted for it, nor for those that
        go before it; None if there is no room.
    """
    passed = len(frontend.deferred)
    if passed and passed >= min(MOST_DEFERRED, len(state.running.free_slots)):
        return None
    while True:
        cached = None
        comes = not promised and _comes(state, request, most)
        known = request.room and state.running.requests and (comes or not state.kv.prefix_grew(request))
        if not known or (not comes and state.running.free_slots and request.room <= free_for(state, request)):
            cached = state.kv.find_prefix(request)
            tokens = len(request.tokens) if state.running.requests else min(len(request.tokens), cached + most)
            per_step = max(state.budget.chunk, request.longest_span)
            request.room, request.hold = state.kv.room_needed(request, tokens, per_step)
            comes = not promised and _comes(state, request, most)
        if state.fair.share(frontend, 1, request.hold) > ceiling:
            return None
        if comes:
            return COMING
        if cached is not None and state.running.free_slots and request.room <= free_for(state, request):
            return cached
        if passed or not make_room(state, request, promised):
            return None


def _comes(state: SchedulerState, request: Request, most: int) -> bool:
    """Whether a running request computes the next block that `request` lacks, in a step in flight or in this one,
    and gets at least as far by it as `request` would itself with `most` tokens, or to its own end. So no request
    waits for one that is slower, or that stands still."""
    rows, size, block = state.rows, state.kv.block_size, request.num_cached_blocks
    owner = state.kv.coming_from(request, block)
    if owner is None:
        return False
    published = int(rows.num_published[owner.slot]) // size
    if published > block:  # since `request` was looked up; maybe more is to come
        if state.kv.coming_from(request, published) is not owner or not state.kv.ends_cached(request, published):
            return False
        block = published
    computed, granted = int(rows.num_computed[owner.slot]), int(rows.granted[owner.slot])
    if not granted and computed < (block + 1) * size:
        return False
    return computed + granted >= min(block * size + most, len(owner.tokens))
