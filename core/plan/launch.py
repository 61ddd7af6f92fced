"""Last stage of a step: what was granted becomes a plan for the worker."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..core_meter import CoreMeter
from ..memory.cache_manager import CacheManager
from .fair_share import FairShare
from .feature import Features
from .running import Running
from .step import IN_FLIGHT, Step, StepPlan


class Launch:
    """
    Args:
        counts: counters of `Stats`, by name.
    """

    def __init__(
        self,
        running: Running,
        kv: CacheManager,
        fair: FairShare,
        features: Features,
        meter: CoreMeter,
        counts: Counter[str],
    ) -> None:
        self._running, self._rows, self._kv, self._fair = running, running.rows, kv, fair
        self._features, self._meter, self._counts = features, meter, counts

    def step(self, slots: np.ndarray, counts: np.ndarray, solo: bool = False) -> Step:
        """The step that computes the next `counts` tokens of the requests at `slots` (int64 ``[rows]`` each). It is in
        flight from now on. `solo`: it is a suspect's."""
        rows, prompt_len = self._rows, self._rows.prompt_len[slots]
        starts, guessed = rows.num_computed[slots], rows.guessed[slots]
        output_index = rows.num_tokens[slots] - guessed - prompt_len
        ends, prefill = starts + counts, starts < prompt_len
        token_ids, samples = rows.advance(slots, counts)
        for slot, count in zip(slots[guessed > 0].tolist(), guessed[guessed > 0].tolist(), strict=True):
            # the known tokens of a request end before its guesses
            rows.tokens[slot, rows.num_tokens[slot] - 1 - count :][:count] = IN_FLIGHT
        self._counts["chunked_prefills"] += int((ends < prompt_len).sum())
        self._counts["mixed_steps"] += bool(prefill.any() and not prefill.all())
        self._counts["prompt_tokens"] += int((np.minimum(ends, prompt_len) - starts)[prefill].sum())
        self._fair.charge(np.bincount(rows.frontend[slots], weights=counts))
        self._meter.stepped(int(counts.sum()))
        number, admitted, released = self._running.launch()
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
            self._kv.take_updates(),
            self._features.prompt_parts(slots, starts, counts),
            self._kv.take_copies(),
            self._kv.take_state_copies(self._running.requests, slots, ends, guessed),
        )
        self._kv.step_launched(number)
        return Step(plan, rows.key[slots], output_index, solo)
