"""Second stage of a step: the token budget is divided among frontends, and what nobody took is granted at the end."""

from __future__ import annotations

import numpy as np

from .budget import Budget
from .cut import Cut
from .fair_share import FairShare
from .feature import Features
from .need import Need
from .room import Room
from .running import Running


class Share:
    def __init__(
        self,
        running: Running,
        budget: Budget,
        fair: FairShare,
        need: Need,
        cut: Cut,
        room: Room,
        features: Features,
    ) -> None:
        self._running, self._rows, self._budget, self._fair = running, running.rows, budget, fair
        self._need, self._cut, self._room, self._features = need, cut, room, features

    def divide(self, slots: np.ndarray, need: np.ndarray) -> tuple[dict[int, int] | None, np.ndarray]:
        """Divide the budget among the frontends that want some of it, if it is short or several compete.

        Args:
            slots, need: of all running requests (int64 ``[n]``).

        Returns:
            what each frontend has left for waiting requests, or None if the budget was not divided; and `need`, lowered
            to the quotas. In a frontend decodes come first, then priority and arrival.
        """
        competition = self._fair.num_requests > len(slots) and self._fair.num_competing > 1
        if not competition and need.sum() <= self._budget.tokens:
            return None, need
        demand = np.bincount(self._rows.frontend[slots], weights=need)
        wanted = {f: int(demand[f]) for f in np.flatnonzero(demand).tolist()}
        quotas = self._fair.quotas(self._budget.tokens, wanted)
        if all(count <= quotas[f] for f, count in wanted.items()):
            return {f: quota - wanted.get(f, 0) for f, quota in quotas.items()}, need
        cut = np.zeros_like(need)
        ranks = [(need[i] > 1, *self._fair.rank(self._running.requests[int(slot)])) for i, slot in enumerate(slots)]
        for i in sorted(range(len(slots)), key=ranks.__getitem__):
            frontend = int(self._rows.frontend[slots[i]])
            cut[i] = min(int(need[i]), quotas.get(frontend, 0))
            quotas[frontend] = quotas.get(frontend, 0) - int(cut[i])
        return quotas, cut

    def grant_rest(self, budget: int) -> None:
        """Grant what was kept for waiting requests that found no slot or blocks to running requests of any frontend, as
        far as there are free blocks. If nothing else moves, the first of them gets blocks by preemption."""
        if budget <= 0:
            return
        rows, slots = self._rows, self._running.order
        more = self._need.of(slots) - rows.granted[slots]
        wants = {int(slot): int(n) for slot, n in zip(slots[more > 0], more[more > 0], strict=True)}
        able = sorted(wants, key=lambda slot: self._fair.rank(self._running.requests[slot]))
        for slot in able:
            granted = int(rows.granted[slot])
            start = int(rows.num_computed[slot]) + granted
            count = min(wants[slot], budget, self._features.most(self._running.requests[slot], start))
            count = int(self._cut.of(np.array([slot]), np.array([granted + count]))[0]) - granted
            if count > 0 and (start + count <= rows.reach[slot] or self._room.extend(slot, start + count)):
                rows.granted[slot] += count
                budget -= count
        if able and not (self._running.in_flight or rows.granted.any()):
            first = np.array(able[:1])
            rows.granted[first] = self._cut.of(first, np.array([min(wants[able[0]], budget)]))
            self._room.allocate(first)
