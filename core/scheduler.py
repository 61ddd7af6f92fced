"""One token budget, no phases.

A request has computed some of its tokens; each step computes more, until it has caught up and every step brings one new
token. Prefill, chunked prefill, decode, a prefix-cache hit and resumption after preemption are all this one operation.

Running requests live in columns indexed by slot. A step in which everybody decodes touches no request object, but for
those that finish or cross a block edge.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..ipc.config import SchedulerConfig
from ..ipc.errors import MainspringError, wire_name, wire_text
from ..ipc.messages import Finished, FinishReason, Outputs, Started, Stats
from .fair_share import FairShare, Frontend
from .kv_cache import KVCacheManager
from .request import Request
from .step import IN_FLIGHT, Step

NO_STOP, MANY_STOPS = -1, -2  # in the column of stop tokens


class Scheduler:
    """Decides what each step computes, and takes in what it brought.

    `schedule` may be called again before `update` was called for the step before: the tokens not known yet stand as
    placeholders. `update` takes the steps in the order of `schedule`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
        log_stats: bool = True,
    ) -> None:
        self.kv = kv
        self.fair = FairShare(by_priority=config.scheduling_policy == "priority")
        self._budget = config.max_num_batched_tokens
        self._chunked = config.enable_chunked_prefill
        self._chunk = (config.long_prefill_token_threshold if self._chunked else 0) or self._budget
        self._clock = clock
        self._log_stats = log_stats  # whether outputs carry them
        slots = config.max_num_seqs
        self._free_slots = list(range(slots - 1, -1, -1))
        self._freed_slots: list[tuple[int, int]] = []  # (step to wait for, slot)
        self._running: dict[int, Request] = {}  # by slot, in order of admission
        self._order = np.zeros(0, np.int64)  # its keys
        self._tokens = np.zeros((slots, max_model_len), np.int32)
        self._num_tokens = np.zeros(slots, np.int64)  # known ones and placeholders
        self._num_computed = np.zeros(slots, np.int64)  # launched, in steps in flight too
        self._num_published = np.zeros(slots, np.int64)  # tokens whose blocks are in the prefix cache
        self._reach = np.zeros(slots, np.int64)  # tokens the block tables have room for
        self._max_len = np.zeros(slots, np.int64)
        self._prompt_len = np.zeros(slots, np.int64)
        self._stop = np.zeros(slots, np.int64)  # the one stop token, NO_STOP or MANY_STOPS
        self._handle = np.zeros(slots, np.int64)
        self._frontend = np.zeros(slots, np.int64)
        self._alive = np.zeros(slots, bool)
        self._silent = np.zeros(slots, bool)  # no token of it was sent yet
        self._granted = np.zeros(slots, np.int64)  # tokens to compute in the step being made
        self._admitted: list[Request] = []
        self._in_flight: list[int] = []
        self._notices: dict[int, list[Finished]] = {}
        self._next_step = 0
        self.num_waiting = 0
        self._count = {
            "prefix_queries": 0,
            "prefix_hits": 0,
            "num_preemptions": 0,
            "chunked_prefills": 0,
            "mixed_steps": 0,
            "prompt_tokens": 0,
            "generation_tokens": 0,
        }

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        self.fair.push(request)
        self.num_waiting += 1

    def abort(self, frontend: int, handles: Iterable[int]) -> None:
        """End these requests with finish reason ``abort``; unknown handles are passed over."""
        requests = self.fair.of(frontend).requests
        for handle in handles:
            if handle in requests:
                self._finish(requests[handle], "abort")

    def refuse(self, frontend: int, handle: int, error: MainspringError) -> None:
        """Answer a request that was never queued."""
        finished = Finished(handle, "error", error=wire_name(error), error_text=wire_text(error))
        self._notices.setdefault(frontend, []).append(finished)

    def remove_frontend(self, frontend: int) -> None:
        """Forget a frontend and all that is its."""
        self.abort(frontend, list(self.fair.of(frontend).requests))
        self.fair.remove(frontend)
        self._notices.pop(frontend, None)

    @property
    def has_work(self) -> bool:
        """Whether a step, or an answer, is due."""
        return bool(self._running or self.num_waiting or self._notices)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def reset_prefix_cache(self) -> bool:
        self.kv.pool.reset_cache()
        return True

    # ------------------------------------------------------------------ a step begins

    def schedule(self) -> Step | None:
        """The next step, or None if there is nothing to compute now."""
        slots, granted = self._order, self._granted
        granted[:] = 0
        need = self._need(slots)
        quotas: dict[int, int] | None = None
        if need.sum() > self._budget or (self.num_waiting and self.fair.num_competing > 1):
            quotas = self._quotas(slots, need)
            need = self._within(quotas, slots, need)
        granted[slots] = need
        if self._allocate(slots[need > 0]):
            self._admit(self._budget - int(granted.sum()), quotas)
        if quotas is not None:
            self._grant_rest(self._budget - int(granted.sum()))
        slots = self._order[granted[self._order] > 0]
        return self._launch(slots, granted[slots]) if slots.size else None

    def _need(self, slots: np.ndarray) -> np.ndarray:
        """Tokens that the requests at `slots` could compute in one step. The last token of a request is sampled, never
        computed."""
        known = np.minimum(self._num_tokens[slots], self._max_len[slots] - 1)
        need: np.ndarray = np.minimum(known - self._num_computed[slots], self._chunk)
        return need

    def _quotas(self, slots: np.ndarray, need: np.ndarray) -> dict[int, int]:
        """The budget divided among the frontends that want some of it."""
        demand = np.bincount(self._frontend[slots], weights=need)
        return self.fair.quotas(self._budget, {f: int(demand[f]) for f in np.flatnonzero(demand).tolist()})

    def _within(self, quotas: dict[int, int], slots: np.ndarray, need: np.ndarray) -> np.ndarray:
        """Cut `need` down to the quotas, which become what is left of them. Inside a frontend decodes come first, then
        priority and arrival."""
        demand = np.bincount(self._frontend[slots], weights=need).astype(np.int64)
        if all(demand[f] <= quotas[f] for f in np.flatnonzero(demand).tolist()):
            for f in np.flatnonzero(demand).tolist():
                quotas[f] -= int(demand[f])
            return need
        cut = np.zeros_like(need)
        ranks = [(need[i] > 1, *self.fair.rank(self._running[int(slot)])) for i, slot in enumerate(slots)]
        for i in sorted(range(len(slots)), key=ranks.__getitem__):
            frontend = int(self._frontend[slots[i]])
            cut[i] = min(int(need[i]), quotas.get(frontend, 0))
            quotas[frontend] = quotas.get(frontend, 0) - int(cut[i])
        return cut

    def _grant_rest(self, budget: int) -> None:
        """What was kept for requests that then found no seat or blocks goes to running ones, whosever they are, as far
        as there are free blocks. Where nothing else moves, blocks are found for the first of them."""
        if budget <= 0:
            return
        slots = self._order
        more = self._need(slots) - self._granted[slots]
        wants = {int(slot): int(n) for slot, n in zip(slots[more > 0], more[more > 0], strict=True)}
        able = sorted(wants, key=lambda slot: self.fair.rank(self._running[slot]))
        for slot in able:
            count = min(wants[slot], budget)
            end = int(self._num_computed[slot] + self._granted[slot]) + count
            if count and (end <= self._reach[slot] or self._extend(slot, end)):
                self._granted[slot] += count
                budget -= count
        if able and not (self._in_flight or self._granted.any()):
            self._granted[able[0]] = min(wants[able[0]], budget)
            self._allocate(np.array(able[:1]))

    def _allocate(self, slots: np.ndarray) -> bool:
        """Let the block tables reach what this step computes; preempt where the pool has too few blocks. False if it
        had too few: then nobody new may take what running requests wait for."""
        enough = True
        edges = slots[self._num_computed[slots] + self._granted[slots] > self._reach[slots]].tolist()
        for slot in sorted(edges, key=lambda slot: self.fair.rank(self._running[slot])):
            while self._alive[slot] and not self._extend(slot, int(self._num_computed[slot] + self._granted[slot])):
                enough = False
                if self.kv.blocks_on_the_way:  # they come back when a step retires
                    self._granted[slot] = 0
                    break
                self._preempt(self._victim())
        return enough

    def _victim(self) -> Request:
        """Whom to preempt where the pool is empty: the latest request of the frontend with most seats by weight. So the
        oldest request of all always goes on, and what `_make_room` gave a newcomer is not taken back."""
        fair = self.fair
        return max(self._running.values(), key=lambda r: (fair.of(r.frontend).load_after, fair.rank(r)))

    def _extend(self, slot: int, num_tokens: int) -> bool:
        if not self.kv.extend(self._running[slot], int(self._num_computed[slot]), num_tokens):
            return False
        self._reach[slot] = -(-num_tokens // self.kv.block_size) * self.kv.block_size
        return True

    def _admit(self, budget: int, quotas: dict[int, int] | None) -> None:
        """Give waiting requests seats, as far as budget, seats and blocks go."""
        closed: set[int] = set()  # frontends that get no more in this step
        while budget > 0 and (frontend := self.fair.next_waiting(closed)) is not None:
            request = frontend.peek()
            assert request is not None, "next_waiting named a frontend with nobody waiting"
            # What can't be cut takes the whole budget if it must; fairness is then the order alone.
            left = budget if quotas is None or not self._chunked else min(budget, quotas.get(frontend.id, 0))
            if left <= 0:
                closed.add(frontend.id)
                continue
            if not self._free_slots and not self._make_room(frontend):
                break
            cached = self.kv.find_prefix(request)
            missing = len(request.tokens) - cached
            count = min(missing, self._chunk, left)
            if count < missing and not self._chunked:
                self.kv.free(request)
                break  # nobody passes it, or smaller ones could for ever
            if not self._find_blocks(frontend, request, cached + count):
                self.kv.free(request)
                break
            frontend.pop()
            self.num_waiting -= 1
            self._seat(request, cached)
            extended = self._extend(request.slot, cached + count)
            assert extended, "blocks counted as free were not"
            self._granted[request.slot] = count
            budget -= count
            if quotas is not None:
                quotas[frontend.id] -= count

    def _find_blocks(self, frontend: Frontend, request: Request, reach: int) -> bool:
        """Whether there are blocks to admit `request`. Beside others all its tokens must find room, or it would be
        admitted only to be preempted; alone, those it computes now."""
        while True:
            tokens = len(request.tokens) if self._running else reach
            if self.kv.blocks_needed(request, tokens, self._chunk) <= self.kv.pool.num_free:
                return True
            if not self._make_room(frontend):
                return False

    def _make_room(self, frontend: Frontend) -> bool:
        """Preempt the newest request of the frontend that is most over its share, if `frontend` is under its own."""
        other = self.fair.over_served(frontend)
        if other is None or self.kv.blocks_on_the_way or self._freed_slots:
            return False
        mine = [r for r in self._running.values() if r.frontend == other.id]
        newest = max(mine, key=self.fair.rank)
        if newest in self._admitted:  # in this very step; the next one begins with whoever is least served
            return False
        self._preempt(newest)
        return not self._in_flight  # else the room is there when the steps in flight have retired

    def _seat(self, request: Request, cached: int) -> None:
        slot = request.slot = self._free_slots.pop()
        n = len(request.tokens)
        self._running[slot] = request
        self._order = np.fromiter(self._running, np.int64, len(self._running))
        self._tokens[slot, :n] = request.tokens
        self._num_tokens[slot] = n
        self._num_computed[slot] = self._num_published[slot] = self._reach[slot] = cached
        self._max_len[slot] = request.max_len
        self._prompt_len[slot] = request.prompt_len
        stops = request.stop_tokens
        self._stop[slot] = NO_STOP if not stops else next(iter(stops)) if len(stops) == 1 else MANY_STOPS
        self._handle[slot] = request.handle
        self._frontend[slot] = request.frontend
        self._alive[slot] = True
        self._silent[slot] = not request.started
        self.fair.of(request.frontend).num_running += 1
        if request.admitted_at is None:
            request.admitted_at = self._clock()
            request.num_cached_tokens = cached
            self._count["prefix_queries"] += n
            self._count["prefix_hits"] += cached
        self.kv.show(request)
        self._admitted.append(request)

    def _launch(self, slots: np.ndarray, need: np.ndarray) -> Step:
        starts = self._num_computed[slots]
        ends = starts + need
        samples = ends == self._num_tokens[slots]
        within = np.arange(int(need.sum())) - np.repeat(np.cumsum(need) - need, need)
        token_ids = self._tokens[np.repeat(slots, need), np.repeat(starts, need) + within]
        self._num_computed[slots] = ends
        sampled = slots[samples]
        # The token to come has its place; a row at its full length samples its last one there.
        at = self._num_tokens[sampled]
        self._tokens[sampled, at] = IN_FLIGHT
        self._num_tokens[sampled] = at + 1
        prefill = starts < self._prompt_len[slots]
        self._count["chunked_prefills"] += int((ends < self._prompt_len[slots]).sum())
        self._count["mixed_steps"] += bool(prefill.any() and not prefill.all())
        self._count["prompt_tokens"] += int((np.minimum(ends, self._prompt_len[slots]) - starts)[prefill].sum())
        self.fair.charge(np.bincount(self._frontend[slots], weights=need))
        step = Step(
            self._next_step,
            slots.astype(np.int32),
            starts.astype(np.int32),
            need.astype(np.int32),
            token_ids,
            samples,
            self._admitted,
            self.kv.take_updates(),
        )
        self._admitted = []
        self._next_step += 1
        self._in_flight.append(step.id)
        self.kv.step_launched(step.id)
        return step

    # ------------------------------------------------------------------ a step ends

    def update(self, step: Step, sampled: np.ndarray) -> dict[int, Outputs]:
        """Take in the tokens `sampled` (int64, one for each row that samples). Returns each frontend's outputs."""
        slots, ends = step.slots.astype(np.int64), step.starts.astype(np.int64) + step.counts
        alive = self._alive[slots]
        rows = slots[step.samples]
        keep = self._alive[rows]
        rows, at, tokens = rows[keep], ends[step.samples][keep], sampled[keep]
        self._tokens[rows, at] = tokens
        self._count["generation_tokens"] += len(tokens)
        self._publish(slots[alive], ends[alive])
        started = [self._started(int(slot)) for slot in rows[self._silent[rows]]]
        stop = self._stop[rows]
        done = (tokens == stop) | (at + 1 >= self._max_len[rows])
        check = np.flatnonzero(done | (stop == MANY_STOPS))
        handles, owners = self._handle[rows], self._frontend[rows]
        for i in check:
            request, token = self._running[int(rows[i])], int(tokens[i])
            if token in request.stop_tokens:
                self._finish(request, "stop", stop_token=token)
            elif done[i]:
                self._finish(request, "length")
        self._retire(step)
        return self._outputs(handles, owners, tokens, started)

    def _publish(self, slots: np.ndarray, ends: np.ndarray) -> None:
        size = self.kv.block_size
        for i in np.flatnonzero(ends // size > self._num_published[slots] // size):
            slot, end = int(slots[i]), int(ends[i])
            request = self._running[slot]
            request.extend_digests(self._tokens[slot], end, size)
            self.kv.publish(request, int(self._num_published[slot]) // size, end // size)
            self._num_published[slot] = end // size * size

    def _started(self, slot: int) -> tuple[int, Started]:
        request, now = self._running[slot], self._clock()
        self._silent[slot] = False
        request.started = True
        admitted = request.admitted_at or now
        return request.frontend, Started(
            request.handle, admitted - request.arrival, now - admitted, request.num_cached_tokens
        )

    def _outputs(
        self, handles: np.ndarray, owners: np.ndarray, tokens: np.ndarray, started: Sequence[tuple[int, Started]]
    ) -> dict[int, Outputs]:
        stats = self.stats() if self._log_stats else None
        notices, self._notices = self._notices, {}
        outputs = {}
        for frontend in {*np.unique(owners).tolist(), *notices}:
            mine = owners == frontend
            outputs[frontend] = Outputs(
                handles[mine].tolist(),
                tokens[mine].tolist(),
                [s for f, s in started if f == frontend],
                notices.get(frontend, []),
                stats,
            )
        return outputs

    def take_notices(self) -> dict[int, Outputs]:
        """Outputs for requests that ended outside a step."""
        none = np.zeros(0, np.int64)
        return self._outputs(none, none, none, []) if self._notices else {}

    def _retire(self, step: Step) -> None:
        assert self._in_flight[0] == step.id, "steps are taken in in the order they were launched"
        self._in_flight.pop(0)
        self.kv.step_retired(step.id)
        while self._freed_slots and self._freed_slots[0][0] <= step.id:
            self._free_slots.append(self._freed_slots.pop(0)[1])

    # ------------------------------------------------------------------ leaving a slot

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it catches up later. Its tokens are kept, and not sent again."""
        slot = request.slot
        known = int(self._num_tokens[slot])
        while known and self._tokens[slot, known - 1] == IN_FLIGHT:
            known -= 1
        request.tokens = self._tokens[slot, :known].copy()
        request.num_preemptions += 1
        self._count["num_preemptions"] += 1
        self._unseat(request)
        self.fair.push(request)
        self.num_waiting += 1

    def _finish(self, request: Request, reason: FinishReason, stop_token: int | None = None) -> None:
        if request.slot >= 0:
            self._unseat(request)
            request.finished = True
        else:
            self.num_waiting -= 1
            self.fair.of(request.frontend).finish(request)
        del self.fair.of(request.frontend).requests[request.handle]
        self._notices.setdefault(request.frontend, []).append(
            Finished(request.handle, reason, stop_token, request.num_preemptions)
        )

    def _unseat(self, request: Request) -> None:
        slot, request.slot = request.slot, -1
        self.kv.free(request)
        del self._running[slot]
        self._order = np.fromiter(self._running, np.int64, len(self._running))
        self._alive[slot] = False
        self._granted[slot] = 0
        self.fair.of(request.frontend).num_running -= 1
        if request in self._admitted:
            self._admitted.remove(request)
        if self._in_flight:
            self._freed_slots.append((self._in_flight[-1], slot))
        else:
            self._free_slots.append(slot)

    # ------------------------------------------------------------------ numbers

    def stats(self) -> Stats:
        pool = self.kv.pool
        return Stats(
            num_running=len(self._running),
            num_waiting=self.num_waiting,
            kv_cache_usage=pool.num_in_use / max(1, pool.num_blocks - 1),
            num_steps=self._next_step,
            **self._count,
        )
