"""Who is next: requests wait per frontend, and frontends share budget and seats by weight.

Inside a frontend the order is (priority,) arrival. Between frontends it is the service so far, counted in tokens and
divided by weight: the one that got least goes first (the virtual token counter of Sheng et al., "Fairness in Serving
Large Language Models", 2024). One that comes back from idling starts level with the least served, so nobody saves up.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import numpy as np

from .request import Request

Rank = tuple[int, float, int]


class Frontend:
    """One frontend's requests."""

    def __init__(self, frontend_id: int, weight: float) -> None:
        self.id = frontend_id
        self.weight = weight
        self.served = 0.0  # tokens computed, by weight
        self.num_running = 0
        self.waiting_tokens = 0  # known tokens of all that wait
        self.requests: dict[int, Request] = {}  # by handle, running and waiting
        self._waiting: list[tuple[Rank, Request]] = []  # heap; finished ones are passed over

    def peek(self) -> Request | None:
        """The request to admit next."""
        while self._waiting and self._waiting[0][1].finished:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def pop(self) -> None:
        """Take out what `peek` showed."""
        self.waiting_tokens -= len(heapq.heappop(self._waiting)[1].tokens)

    def push(self, rank: Rank, request: Request) -> None:
        self.waiting_tokens += len(request.tokens)
        heapq.heappush(self._waiting, (rank, request))

    def finish(self, request: Request) -> None:
        """A waiting request has ended; `peek` will pass it over."""
        request.finished = True
        self.waiting_tokens -= len(request.tokens)

    @property
    def load(self) -> float:
        """Seats taken, by weight."""
        return self.num_running / self.weight

    @property
    def load_after(self) -> float:
        """Seats taken once one is given up, by weight."""
        return (self.num_running - 1) / self.weight


class FairShare:
    """All frontends of a core."""

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._frontends: dict[int, Frontend] = {}
        self._next_seq = 0

    def register(self, frontend: int, weight: float = 1.0) -> None:
        self._frontends[frontend] = Frontend(frontend, weight)

    def remove(self, frontend: int) -> None:
        del self._frontends[frontend]

    def of(self, frontend: int) -> Frontend:
        return self._frontends[frontend]

    def __contains__(self, frontend: int) -> bool:
        return frontend in self._frontends

    def rank(self, request: Request) -> Rank:
        """Smaller goes first."""
        return (request.priority if self._by_priority else 0, request.arrival, request.seq)

    def push(self, request: Request) -> None:
        """Let a request wait: a new one, or one that was preempted."""
        frontend = self._frontends[request.frontend]
        if request.handle not in frontend.requests:
            request.seq = self._next_seq
            self._next_seq += 1
            if not frontend.requests:
                busy = [f.served for f in self._frontends.values() if f.requests]
                frontend.served = max(frontend.served, min(busy, default=0.0))
            frontend.requests[request.handle] = request
        frontend.push(self.rank(request), request)

    def charge(self, tokens: np.ndarray) -> None:
        """Account for a step: `tokens` computed, by frontend id."""
        for frontend in np.flatnonzero(tokens).tolist():
            f = self._frontends[frontend]
            f.served += float(tokens[frontend]) / f.weight

    @property
    def num_competing(self) -> int:
        return sum(bool(f.requests) for f in self._frontends.values())

    def next_waiting(self, closed: set[int]) -> Frontend | None:
        """The least served frontend that has somebody waiting and is not closed."""
        able = [f for f in self._frontends.values() if f.id not in closed and f.peek() is not None]
        return min(able, key=lambda f: (f.served, f.load, f.id), default=None)

    def over_served(self, frontend: Frontend) -> Frontend | None:
        """The frontend with most seats by weight, if it would still have more than `frontend` after giving one up."""
        most = max((f for f in self._frontends.values() if f is not frontend), key=lambda f: f.load, default=None)
        if most is None or not most.num_running:
            return None
        return most if most.load_after >= (frontend.num_running + 1) / frontend.weight else None

    def quotas(self, budget: int, running: Mapping[int, int]) -> dict[int, int]:
        """The budget divided by weight among frontends, none given more than it wants: what its `running` requests
        need, plus all that it has waiting."""
        wants = dict(running)
        for f in self._frontends.values():
            if f.waiting_tokens:
                wants[f.id] = wants.get(f.id, 0) + f.waiting_tokens
        quotas = dict.fromkeys(wants, 0)
        while budget > 0 and (hungry := [f for f in wants if quotas[f] < wants[f]]):
            weight = sum(self._frontends[f].weight for f in hungry)
            share = {f: min(wants[f] - quotas[f], int(budget * self._frontends[f].weight / weight)) for f in hungry}
            if not any(share.values()):  # less left than one token each: to the least served
                share = {min(hungry, key=lambda f: self._frontends[f].served): 1}
            for frontend, n in share.items():
                quotas[frontend] += n
                budget -= n
        return quotas
