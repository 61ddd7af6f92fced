"""Second stage of a step: the token budget is divided among frontends, and what nobody took is granted at the end."""

from __future__ import annotations

import numpy as np

from .need import cut_rows, tokens_needed
from .room import allocate, extend
from .state import SchedulerState


def divide_budget(
    state: SchedulerState, slots: np.ndarray, need: np.ndarray
) -> tuple[dict[int, int] | None, np.ndarray]:
    """Divide the budget among the frontends that want some of it, if it is short or several compete.

    Args:
        slots, need: of all running requests (int64 ``[n]``).

    Returns:
        what each frontend has left for waiting requests, or None if the budget was not divided; and `need`, lowered to
        the quotas. In a frontend decodes come first, then priority and arrival.
    """
    fair, budget, frontends = state.fair, state.budget.tokens, state.rows.frontend[slots]
    competition = fair.num_requests > len(slots) and sum(frontend.competes for frontend in fair) > 1
    if not competition and need.sum() <= budget:
        return None, need
    demand = np.bincount(frontends, weights=need)
    wanted = {f: int(demand[f]) for f in np.flatnonzero(demand).tolist()}
    quotas = fair.quotas(budget, wanted)
    if all(count <= quotas[f] for f, count in wanted.items()):
        return {f: quota - wanted.get(f, 0) for f, quota in quotas.items()}, need
    lowered = np.zeros_like(need)
    ranks = [(need[i] > 1, *fair.rank(state.running.requests[int(slot)])) for i, slot in enumerate(slots)]
    for i in sorted(range(len(slots)), key=ranks.__getitem__):
        frontend = int(frontends[i])
        lowered[i] = min(int(need[i]), quotas.get(frontend, 0))
        quotas[frontend] = quotas.get(frontend, 0) - int(lowered[i])
    return quotas, lowered


def grant_rest(state: SchedulerState, budget: int) -> None:
    """Grant what was kept for waiting requests that found no slot or blocks to running requests of any frontend, as far
    as there are free blocks. If nothing else moves, the first of them gets blocks by preemption."""
    if budget <= 0:
        return
    rows, requests, slots = state.rows, state.running.requests, state.running.order
    more = tokens_needed(state, slots) - rows.granted[slots]
    wants = {int(slot): int(n) for slot, n in zip(slots[more > 0], more[more > 0], strict=True)}
    able = sorted(wants, key=lambda slot: state.fair.rank(requests[slot]))
    for slot in able:
        granted = int(rows.granted[slot])
        start = int(rows.num_computed[slot]) + granted
        count = min(wants[slot], budget, state.most_tokens(requests[slot], start))
        count = int(cut_rows(state, np.array([slot]), np.array([granted + count]))[0]) - granted
        if count > 0 and (start + count <= rows.reach[slot] or extend(state, slot, start + count)):
            rows.granted[slot] += count
            budget -= count
    if able and not (state.running.in_flight or rows.granted.any()):
        first = np.array(able[:1])
        rows.granted[first] = cut_rows(state, first, np.array([min(wants[able[0]], budget)]))
        allocate(state, first)
