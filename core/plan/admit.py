"""Third stage of a step: waiting requests get slots."""

from __future__ import annotations

import math

from ..memory.cache_manager import CacheManager
from .budget import Budget
from .cut import Cut
from .fair_share import FairShare, Frontend
from .feature import Features
from .request import Request
from .room import Room
from .running import Running

COMING = -1  # in place of a number of cached tokens: a running request is computing more of the prefix
MOST_DEFERRED = 32  # requests of a frontend skipped in one step, because each may need a new cache lookup


class Admission:
    def __init__(
        self,
        running: Running,
        budget: Budget,
        kv: CacheManager,
        fair: FairShare,
        cut: Cut,
        room: Room,
        features: Features,
    ) -> None:
        self._running, self._rows, self._budget, self._kv = running, running.rows, budget, kv
        self._fair, self._cut, self._room, self._features = fair, cut, room, features

    def admit(self, budget: int, quotas: dict[int, int] | None, closed: set[int]) -> None:
        """Give waiting requests slots, as far as budget, slots and blocks go.

        If a request lacks room, requests of other frontends may go before it, as long as their frontend then has no
        larger share than its own. A request that waits for a prefix being computed is skipped in this step; its slot
        and blocks stay reserved. A request that a feature refuses is skipped too.

        Args:
            budget: tokens left of the step.
            quotas: tokens left of it for each frontend, if the budget is divided.
            closed: frontends that get no new request in this step.
        """
        promised = self._room.take_promise()
        ceiling = min((self._fair.share(self._fair.of(f)) for f in closed), default=math.inf)
        deferring: list[Frontend] = []
        refused: list[Request] = []  # by a feature
        while budget > 0 and (frontend := self._fair.next_waiting(closed)) is not None:
            request = frontend.peek()
            assert request is not None, "next_waiting named a frontend with nobody waiting"
            if not self._features.may_run(request, self._running.next_step, fetch=bool(self._running.free_slots)):
                refused.append(frontend.pop())
                if len(refused) >= MOST_DEFERRED:
                    closed.add(frontend.id)
                continue
            count = self._most(request, frontend, budget, quotas)
            if count <= 0:
                closed.add(frontend.id)
                continue
            if not self._budget.chunked and (needed := len(request.tokens) - self._kv.find_prefix(request)) > count:
                if self._budget.tokens == self._budget.full or self._rows.granted.any():
                    break  # no other request goes before it, or it could wait for ever
                count = needed  # alone it may exceed a budget that was cut
            cached = self._find_room(frontend, request, count, ceiling, request is promised)
            if cached is None:
                closed.add(frontend.id)
                if not frontend.deferred:
                    ceiling = min(ceiling, self._fair.share(frontend))
                continue
            if cached == COMING:
                frontend.defer()
                deferring.append(frontend)
                continue
            count = min(count, len(request.tokens) - cached, self._features.most(request, cached))
            count = self._cut.first(request, cached, count)
            if not count:  # the next step may have more of its budget left
                closed.add(frontend.id)
                continue
            frontend.pop()
            self._begin(request, cached, count)
            budget -= count
            if quotas is not None:
                quotas[frontend.id] -= count
        for frontend in deferring:
            frontend.undefer()
        for request in refused:
            self._fair.push(request)

    def _most(self, request: Request, frontend: Frontend, budget: int, quotas: dict[int, int] | None) -> int:
        """Most tokens of a waiting request that this step may compute, before its prefix is looked up. A prompt that
        can't be cut may take the whole budget; frontends then share by their order alone."""
        divided = quotas is not None and self._budget.chunked and not self._cut.is_needed
        left = min(budget, quotas.get(frontend.id, 0)) if quotas is not None and divided else budget
        if left <= 0:
            return 0
        start = request.num_cached_blocks * self._kv.block_size  # when it was looked up last
        return min(left, self._budget.chunk, self._features.most(request, start))

    def _begin(self, request: Request, cached: int, count: int) -> None:
        """Give `request` its slot, and grant it `count` tokens. Beside others it takes blocks for all its tokens, or
        they could be taken by others before it computes them."""
        ahead = len(request.tokens) if self._running.requests else 0
        self._running.seat(request, cached)
        extended = self._room.extend(request.slot, cached + count, ahead)
        assert extended, "blocks counted as free were not"
        self._rows.granted[request.slot] = count

    def _find_room(self, frontend: Frontend, request: Request, most: int, ceiling: float, promised: bool) -> int | None:
        """Look for a slot and blocks for `request`.

        Beside running requests there must be room for all its tokens, or it would be admitted only to be preempted;
        alone, for the tokens it computes now, at `most`. The prefix cache is asked again only if that can help.

        Returns:
            its cached tokens, if there is room for it now and its frontend then has no larger share than `ceiling`;
            `COMING` if it should wait for a prefix, in which case no request is preempted for it, nor for those that
            go before it; None if there is no room.
        """
        passed = len(frontend.deferred)
        if passed and passed >= min(MOST_DEFERRED, len(self._running.free_slots)):
            return None
        while True:
            free = self._room.free_for(frontend)
            cached = None
            comes = not promised and self._comes(request, most)
            known = request.room and self._running.requests and (comes or not self._kv.prefix_grew(request))
            if not known or (not comes and self._running.free_slots and request.room <= free):
                cached = self._kv.find_prefix(request)
                tokens = len(request.tokens) if self._running.requests else min(len(request.tokens), cached + most)
                request.room, request.hold = self._kv.room_needed(request, tokens, self._budget.chunk)
                comes = not promised and self._comes(request, most)
            if self._fair.share(frontend, 1, request.hold) > ceiling:
                return None
            if comes:
                return COMING
            if cached is not None and self._running.free_slots and request.room <= free:
                return cached
            if passed or not self._room.make(frontend, request, promised):
                return None

    def _comes(self, request: Request, most: int) -> bool:
        """Whether a running request computes the next block that `request` lacks, in a step in flight or in this one,
        and gets at least as far by it as `request` would itself with `most` tokens, or to its own end. So no request
        waits for one that is slower, or that stands still."""
        rows, size, block = self._rows, self._kv.block_size, request.num_cached_blocks
        owner = self._kv.coming_from(request, block)
        if owner is None:
            return False
        published = int(rows.num_published[owner.slot]) // size
        if published > block:  # since `request` was looked up; maybe more is to come
            if self._kv.coming_from(request, published) is not owner or not self._kv.ends_cached(request, published):
                return False
            block = published
        computed, granted = int(rows.num_computed[owner.slot]), int(rows.granted[owner.slot])
        if not granted and computed < (block + 1) * size:
            return False
        return computed + granted >= min(block * size + most, len(owner.tokens))
