"""Who gives up seat and blocks where somebody else needs them."""

from __future__ import annotations

from collections.abc import Collection

from ..memory.cache_manager import CacheManager
from .fair_share import FairShare, Frontend
from .request import Request
from .suspects import Suspects


class Preemption:
    """Chooses among running requests. It is always the latest of a frontend, and never the suspect on trial."""

    def __init__(self, fair: FairShare, kv: CacheManager, suspects: Suspects) -> None:
        self._fair, self._kv, self._suspects = fair, kv, suspects

    def victim(self) -> Request:
        """Where the pool is empty: of a frontend without credit, or else of the one that holds most blocks by weight
        without that request. So the oldest request of all always goes on, and what `giver` gave a newcomer is not taken
        back."""
        latest = filter(None, map(self._latest, self._fair))
        return max(latest, key=lambda r: (*self._keeps(r), self._fair.rank(r)))

    def giver(self, request: Request, seats: bool, but: Collection[Request]) -> Request | None:
        """Who gives way for `request`, which waits for one of the `seats`, or for blocks: of a frontend without credit,
        or else of the one with most of them by weight, if it keeps as many as the frontend of `request` then has.
        Nobody of those in `but`."""
        fair, held, able = self._fair, self._kv.held, []
        frontend = fair.of(request.frontend)
        mine = (frontend.num_running + 1 if seats else held[frontend.id] + request.hold) / frontend.weight
        for other in fair:
            has = (other.num_running if seats else held[other.id]) / other.weight
            if other is frontend or (other.credit and has <= mine):
                continue
            latest = self._latest(other, but)
            if latest is not None and (not other.credit or self._keeps(latest, seats)[1] >= mine):
                able.append(latest)
        return max(able, key=lambda r: self._keeps(r, seats), default=None)

    def _latest(self, frontend: Frontend, but: Collection[Request] = ()) -> Request | None:
        able = (r for r in frontend.running.values() if r is not self._suspects.on_trial and r not in but)
        return max(able, key=self._fair.rank, default=None)

    def _keeps(self, request: Request, seats: bool = False) -> tuple[bool, float]:
        """Whether its frontend is without credit, and the blocks, or `seats`, that it keeps without it, by weight."""
        frontend = self._fair.of(request.frontend)
        blocks = self._kv.held[frontend.id] - self._kv.num_held(request)
        return not frontend.credit, (frontend.num_running - 1 if seats else blocks) / frontend.weight
