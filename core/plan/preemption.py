"""Preemption: a running request loses its slot and blocks to another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from ..features.suspects import Suspects
from ..memory.cache_manager import CacheManager
from .fair_share import FairShare, Frontend
from .feature import Features
from .request import Request
from .running import Running


class Preemption:
    """Chooses among running requests: always the latest of a frontend, never the suspect on trial.

    Args:
        counts: counters of `Stats`, by name.
    """

    def __init__(
        self,
        running: Running,
        fair: FairShare,
        kv: CacheManager,
        features: Features,
        suspects: Suspects,
        counts: Counter[str],
    ) -> None:
        self._running, self._fair, self._kv = running, fair, kv
        self._features, self._suspects, self._counts = features, suspects, counts

    def preempt(self, request: Request) -> None:
        """Take a running request's slot and blocks. It keeps its tokens, waits, and computes their keys and values
        again later; its tokens are not sent again."""
        request.tokens = self._running.rows.known_tokens(request.slot)
        request.num_preemptions += 1
        self._counts["num_preemptions"] += 1
        request.room = request.hold = 0
        self._running.unseat(request)
        if not self._features.keeps(request):
            self._fair.push(request)

    def preempt_victim(self) -> Request:
        """Make room where the pool is empty. Returns the request that was preempted."""
        victim = self._victim()
        self.preempt(victim)
        return victim

    def _victim(self) -> Request:
        """The latest request of a frontend without credit, or else of the frontend that would still hold most blocks
        by weight without it. So the oldest request of all always goes on, and what was taken from a `giver` for a new
        request is not taken back."""
        latest = filter(None, map(self._latest, self._fair))
        return max(latest, key=lambda r: (*self._keeps(r), self._fair.rank(r)))

    def giver(self, request: Request, seats: bool, but: Collection[Request]) -> Request | None:
        """The request that gives way for `request`, which waits for a slot (`seats`) or for blocks: the latest one of a
        frontend without credit, or else of the frontend with most of them by weight, if that keeps as many as the
        frontend of `request` then has. Never one of those in `but`."""
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
        """Whether the frontend of `request` is without credit, and the blocks (or slots, with `seats`) that it keeps
        without this request, by weight."""
        frontend = self._fair.of(request.frontend)
        blocks = self._kv.held[frontend.id] - self._kv.num_held(request)
        return not frontend.credit, (frontend.num_running - 1 if seats else blocks) / frontend.weight
