"""Last stage of a step: what was granted becomes a plan for the worker."""

from __future__ import annotations

import numpy as np

from .columns import MANY_STOPS, NO_STOP
from .state import SchedulerState
from .step import IN_FLIGHT, NO_STOPS, Step, StepPlan


def launch_step(
    state: SchedulerState, slots: np.ndarray, counts: np.ndarray, solo: bool = False, num_steps: int = 1
) -> Step:
    """The step that computes the next `counts` tokens of the requests at `slots` (int64 ``[rows]`` each). It is in
    flight from now on. `solo`: it is a suspect's. `num_steps`: that the worker may make of it, see several_steps.py."""
    rows, kv, running, meter = state.rows, state.kv, state.running, state.meter
    prompt_len, starts, guessed = rows.prompt_len[slots], rows.num_computed[slots], rows.guessed[slots]
    output_index = rows.num_tokens[slots] - guessed - prompt_len
    ends, prefill = starts + counts, starts < prompt_len
    token_ids, samples = rows.advance(slots, counts)
    for slot, count in zip(slots[guessed > 0].tolist(), guessed[guessed > 0].tolist(), strict=True):
        # the known tokens of a request end before its guesses
        rows.tokens[slot, rows.num_tokens[slot] - 1 - count :][:count] = IN_FLIGHT
    meter.counts["chunked_prefills"] += int((ends < prompt_len).sum())
    meter.counts["mixed_steps"] += bool(prefill.any() and not prefill.all())
    meter.counts["prompt_tokens"] += int((np.minimum(ends, prompt_len) - starts)[prefill].sum())
    meter.stepped(int(counts.sum()))
    state.fair.charge(np.bincount(rows.frontend[slots], weights=counts))
    number, admitted, released = running.launch()
    plan = StepPlan(
        number,
        slots.astype(np.int32),
        starts.astype(np.int32),
        counts.astype(np.int32),
        token_ids,
        samples,
        guessed.astype(np.int32),
        [request.sequence() for request in admitted],
        np.array(released, np.int32),
        kv.take_updates(),
        [part for parts in state.features.prompt_parts for part in parts(slots, starts, counts)],
        kv.take_copies(),
        kv.take_state_copies(running.requests, slots, ends, guessed),
        num_steps,
        num_steps > 1 and not (rows.plain & rows.patient)[slots].all(),
        num_steps > 1 and not rows.plain[slots].all(),
        _stops(state, slots) if num_steps > 1 else NO_STOPS,
    )
    kv.step_launched(number)
    return Step(plan, rows.key[slots], output_index, solo)


def _stops(state: SchedulerState, slots: np.ndarray) -> np.ndarray:
    """`StepPlan.stops` of the requests at `slots`."""
    stop = state.rows.stop[slots]
    found = [(row, token) for row, token in enumerate(stop.tolist()) if token not in (NO_STOP, MANY_STOPS)]
    for row in np.flatnonzero(stop == MANY_STOPS).tolist():
        found += [(row, token) for token in state.running.requests[int(slots[row])].stop_tokens]
    return np.array(found, np.int32).reshape(-1, 2)
