"""Last stage of a step: what was granted becomes a plan for the worker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..features.media_store import StoredItem
from ..memory.home_caches import HomeCaches
from .columns import MANY_STOPS, NO_STOP
from .request import Request
from .state import SchedulerState
from .step import IN_FLIGHT, NO_ITEMS, NO_STOPS, Step, StepPlan


def launch_step(
    state: SchedulerState,
    slots: np.ndarray,
    counts: np.ndarray,
    solo: bool = False,
    num_steps: int = 1,
    items: Sequence[StoredItem] = (),
) -> Step:
    """The step that computes the next `counts` tokens of the requests at `slots` (int64 ``[rows]`` each), and encodes
    `items` before that. It is in flight from now on. `solo`: it is a suspect's. `num_steps`: that the worker may make
    of it, see several_steps.py."""
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
        rows.home[slots].astype(np.int32) if isinstance(kv, HomeCaches) else NO_ITEMS,
        state.media.launch(items) if state.media is not None and items else NO_ITEMS,
    )
    kv.step_launched(number)
    keys = rows.key[slots]
    if items:
        waiting = _charge(state, items)
        keys = np.append(keys, np.array([request.key for request in waiting], np.uint64))
        positions = [len(request.tokens) - request.prompt_len for request in waiting]
        output_index = np.append(output_index, np.array(positions, np.int64))
    return Step(plan, keys, output_index, solo)


def _charge(state: SchedulerState, items: Sequence[StoredItem]) -> list[Request]:
    """Charge each item to a frontend whose request waits for it. Returns such requests, as many as the journal can
    hold beside those that run."""
    waiting = sorted((r for item in items for r in item.users), key=lambda r: r.key not in state.suspects.keys)
    frontends = [next(iter(item.users)).frontend for item in items]
    state.fair.charge(np.bincount(frontends, weights=[item.length for item in items]))
    return list(dict.fromkeys(waiting))[: len(state.rows.alive)]


def _stops(state: SchedulerState, slots: np.ndarray) -> np.ndarray:
    """`StepPlan.stops` of the requests at `slots`."""
    stop = state.rows.stop[slots]
    found = [(row, token) for row, token in enumerate(stop.tolist()) if token not in (NO_STOP, MANY_STOPS)]
    for row in np.flatnonzero(stop == MANY_STOPS).tolist():
        found += [(row, token) for token in state.running.requests[int(slots[row])].stop_tokens]
    return np.array(found, np.int32).reshape(-1, 2)
