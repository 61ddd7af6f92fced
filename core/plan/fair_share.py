"""Fair sharing: each frontend has a queue, and frontends share the token budget, slots and blocks by weight.

Requests of one frontend are ordered by priority (if enabled) and arrival. Frontends are ordered by service, which is
their computed tokens divided by weight: the least served frontend goes first (the virtual token counter of Sheng et
al., "Fairness in Serving Large Language Models", 2024). A frontend that was idle starts with the service of the least
served one, so that it cannot save up service.

Service orders the use of the token budget. Slots and blocks are occupied rather than consumed. A frontend's share of
them is the larger of its two shares, divided by weight (dominant resource fairness, Ghodsi et al., 2011).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

import numpy as np

from .request import Request

Rank = tuple[int, float, int]


class Frontend:
    """One frontend's requests."""

    def __init__(self, frontend_id: int, weight: float) -> None:
        self.id = frontend_id
        self.weight = weight
        self.credit = True  # whether it reads its messages; nothing is computed for it otherwise
        self.served = 0.0  # tokens computed, divided by the weight
        self.generation_tokens = 0
        self.tokens_in_flight = 0  # sum of the largest lengths of its requests
        self.waiting_tokens = 0  # known tokens of all queued requests
        self.requests: dict[int, Request] = {}  # by handle, running and waiting
        self.running: dict[int, Request] = {}  # by slot
        self._queue: list[tuple[Rank, Request]] = []  # a heap; `peek` removes finished requests
        self._num_queued = 0  # queued requests that are not finished
        self.deferred: list[tuple[Rank, Request]] = []  # taken off the heap while a step is planned, still counted
        self.kept = 0  # free blocks reserved for the deferred requests

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def competes(self) -> bool:
        return self.credit and bool(self.requests)

    def peek(self) -> Request | None:
        """The request to admit next."""
        while self._queue and self._queue[0][1].finished:
            heapq.heappop(self._queue)
        return self._queue[0][1] if self._queue else None

    def pop(self) -> Request:
        """Remove the request that `peek` returned from the queue, and return it."""
        request = heapq.heappop(self._queue)[1]
        self._count(request, queued=False)
        return request

    def defer(self) -> None:
        """Skip the request that `peek` returned until `undefer`, and reserve its blocks."""
        self.deferred.append(heapq.heappop(self._queue))
        self.kept += self.deferred[-1][1].room

    def undefer(self) -> None:
        while self.deferred:
            heapq.heappush(self._queue, self.deferred.pop())
        self.kept = 0

    def push(self, rank: Rank, request: Request) -> None:
        self._count(request, queued=True)
        heapq.heappush(self._queue, (rank, request))

    def finish(self, request: Request) -> None:
        """Mark a request as ended. If it is queued, `peek` removes it later."""
        request.finished = True
        if request.queued:
            self._count(request, queued=False)
            if len(self._queue) > 2 * self._num_queued + 16:
                self._queue = [entry for entry in self._queue if not entry[1].finished]
                heapq.heapify(self._queue)

    def _count(self, request: Request, queued: bool) -> None:
        request.queued = queued
        self._num_queued += 1 if queued else -1
        self.waiting_tokens += len(request.tokens) if queued else -len(request.tokens)


class FairShare:
    """All frontends of a core. slots, blocks: the core's slots and KV blocks. blocks_used: those of each frontend; the
    cache manager updates this mapping."""

    def __init__(self, by_priority: bool, slots: int, blocks: int, blocks_used: Mapping[int, int]) -> None:
        self.num_requests = 0  # running and waiting requests of all frontends
        self.num_tokens = 0  # sum of their largest lengths
        self._by_priority = by_priority
        self._slots, self._blocks, self._blocks_used = slots, blocks, blocks_used
        self._frontends: dict[int, Frontend] = {}
        self._level_of_idle = 0.0  # the most that a frontend was served when its last request ended
        self._next_seq = 0

    def register(self, frontend: int, weight: float = 1.0) -> None:
        self._frontends[frontend] = Frontend(frontend, weight)

    def remove(self, frontend: int) -> None:
        """Forget a frontend, whose requests must all have ended."""
        del self._frontends[frontend]

    def of(self, frontend: int) -> Frontend:
        return self._frontends[frontend]

    def __iter__(self) -> Iterator[Frontend]:
        return iter(self._frontends.values())

    def __len__(self) -> int:
        return len(self._frontends)

    def rank(self, request: Request) -> Rank:
        """The sort key of a request in its frontend's queue; the smallest is admitted first."""
        return (request.priority if self._by_priority else 0, request.arrival, request.seq)

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Register a new request, without queueing it."""
        frontend = self._frontends[request.frontend]
        request.seq = self._next_seq
        self._next_seq += 1
        if not frontend.requests:
            self._level(frontend)
        frontend.requests[request.handle] = request
        self._count(frontend, request, 1)

    def push(self, request: Request) -> None:
        """Queue a new or preempted request."""
        self._frontends[request.frontend].push(self.rank(request), request)

    def end(self, request: Request) -> None:
        """Remove a request that has ended."""
        frontend = self._frontends[request.frontend]
        frontend.finish(request)
        del frontend.requests[request.handle]
        self._count(frontend, request, -1)
        if not frontend.requests:
            self._level_of_idle = max(self._level_of_idle, frontend.served)

    def set_credit(self, frontend: int, given: bool) -> None:
        if given and not self._frontends[frontend].credit:
            self._level(self._frontends[frontend])
        self._frontends[frontend].credit = given

    def _level(self, frontend: Frontend) -> None:
        least = min((f.served for f in self if f.competes), default=self._level_of_idle)
        frontend.served = max(frontend.served, least)

    def _count(self, frontend: Frontend, request: Request, sign: int) -> None:
        self.num_requests += sign
        self.num_tokens += sign * request.max_len
        frontend.tokens_in_flight += sign * request.max_len

    # ------------------------------------------------------------------ shares

    def charge(self, tokens: np.ndarray) -> None:
        """Add the tokens of a step to the service of frontends. tokens: computed tokens, indexed by frontend id."""
        for frontend in np.flatnonzero(tokens).tolist():
            f = self._frontends[frontend]
            f.served += float(tokens[frontend]) / f.weight

    def next_waiting(self, closed: set[int]) -> Frontend | None:
        """The least served frontend that has a queued request and credit, and is not in `closed`."""
        able = [f for f in self if f.credit and f.id not in closed and f.peek() is not None]
        return min(able, key=lambda f: (f.served, self.share(f), f.id), default=None)

    def share(self, frontend: Frontend, slots: int = 0, blocks: int = 0) -> float:
        """A frontend's dominant share of slots and blocks, divided by its weight, if it got `slots` more slots and
        `blocks` more blocks."""
        of_slots, of_blocks = frontend.num_running + slots, self._blocks_used[frontend.id] + blocks
        return max(of_slots / self._slots, of_blocks / self._blocks) / frontend.weight

    def quotas(self, budget: int, running: Mapping[int, int]) -> dict[int, int]:
        """Divide the token budget among frontends by weight. No frontend gets more than it wants: the tokens that its
        `running` requests need, plus all its waiting tokens."""
        wants = dict(running)
        for f in self:
            if f.credit and f.waiting_tokens:
                wants[f.id] = wants.get(f.id, 0) + f.waiting_tokens
        quotas = dict.fromkeys(wants, 0)
        while budget > 0 and (hungry := [f for f in wants if quotas[f] < wants[f]]):
            weight = sum(self._frontends[f].weight for f in hungry)
            share = {f: min(wants[f] - quotas[f], int(budget * self._frontends[f].weight / weight)) for f in hungry}
            if not any(share.values()):  # less than one token each is left: the least served frontend gets one
                share = {min(hungry, key=lambda f: self._frontends[f].served): 1}
            for frontend, n in share.items():
                quotas[frontend] += n
                budget -= n
        return quotas
