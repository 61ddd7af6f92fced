"""One token budget, no phases.

A request has computed some of its tokens; each step computes more, until it has caught up and every step brings one new
token. Prefill, chunked prefill, decode, a prefix-cache hit and resumption after preemption are all this one operation.

Running requests live in columns indexed by slot. A step in which everybody decodes touches no request object, but for
those that finish or cross a block edge.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from ...ipc.config import SchedulerConfig
from ...ipc.errors import InvalidArgumentError, OutOfMemoryError, wire_name, wire_text
from ...ipc.messages import Finished, FinishReason, Logprobs, Outputs, Pooled, Started, Stats
from ..core_meter import CoreMeter, Latest
from ..features.adapter_slots import LoRAs
from ..features.speculation import Guesses, Speculation, standing
from ..memory.cache_manager import CacheManager
from .columns import MANY_STOPS, Columns
from .fair_share import FairShare, Frontend
from .outbox import NO_TOKENS, Outbox
from .preemption import Preemption
from .request import Request
from .step import IN_FLIGHT, PROMPT_LOGITS, PromptPart, Scores, Step, StepPlan, StepResult
from .suspects import Suspects

PauseMode = Literal["abort", "keep", "wait"]
CacheTier = Literal["", "gpu", "cpu"]

COMING = -1  # instead of how much of a request is cached: a running one is just computing more of it
MOST_DEFERRED = 32  # requests of a frontend in one step, for each may be new and have to be looked up
GROW_AFTER_STEPS = 64  # that succeeded with a budget cut for lack of memory, it is doubled


class Scheduler:
    """Decides what each step computes, and takes in what it brought.

    `schedule` may be called again before `update` was called for the step before: the tokens not known yet stand as
    placeholders. `update` takes the steps in the order of `schedule`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: CacheManager,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
        log_stats: bool = True,
        suspects: Mapping[int, int] | None = None,
        on_suspects: Callable[[Collection[int]], None] = lambda keys: None,
        speculation: Speculation | None = None,
    ) -> None:
        self.kv = kv
        by_priority, num_blocks = config.scheduling_policy == "priority", kv.pool.num_blocks - 1
        self.fair = FairShare(by_priority, config.max_num_seqs, max(1, num_blocks), kv.held)
        self.suspects = Suspects(suspects or {}, on_suspects)
        self._preemption = Preemption(self.fair, kv, self.suspects)
        self.paused: PauseMode | None = None
        self.sleep_level = 0  # for statistics
        self.first_token, self.between_tokens = Latest(maxlen=1000), Latest(maxlen=1000)
        self.meter = CoreMeter()
        self.loras: LoRAs | None = None  # if requests may have adapters
        self._full_budget = config.max_num_batched_tokens
        self._chunked = config.enable_chunked_prefill
        self._full_chunk = (config.long_prefill_token_threshold if self._chunked else 0) or self._full_budget
        self._set_budget(self._full_budget)
        self._clock = clock
        self._log_stats = log_stats  # whether outputs carry them
        slots = config.max_num_seqs
        self._free_slots = list(range(slots - 1, -1, -1))
        self._freed_slots: list[tuple[int, int]] = []  # (step to wait for, slot)
        self._running: dict[int, Request] = {}  # by slot, in order of admission
        self._order = np.zeros(0, np.int64)  # its keys
        self._rows = Columns(slots, max_model_len)
        self._guesses = None if speculation is None else Guesses(speculation, self._rows)
        self._admitted: list[Request] = []
        self._released: list[int] = []  # slots that became free since the last step
        self.on_end: Callable[[Request], None] = lambda request: None  # told of each request that ends
        self._promised: Request | None = None  # others preempted for it leave it their blocks, which are on the way
        self._in_flight: list[int] = []
        self._stalled = False  # nothing can be computed before something changes
        self._last_update: float | None = None  # since when somebody has been running
        self._outbox = Outbox()
        self._next_step = 0
        self._count: defaultdict[str, Any] = defaultdict(int)  # counters of `Stats`, by name

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request, ready: bool = True) -> None:
        """Queue a request, or only count it, if it is not `ready`; then it is told apart by `queue` or `fail`."""
        self._stalled = False
        self.fair.add(request)
        if self.loras is not None and request.lora_name:
            self.loras.live[request.lora_name] += 1
        if ready:
            self._wait(request)

    def queue(self, request: Request) -> None:
        """A request that was added before is ready now, unless it has ended."""
        self.wake()
        if not request.finished:
            self._wait(request)

    def wake(self) -> None:
        """Something that waiting requests need has come."""
        self._stalled = False

    def fail(self, request: Request, error: Exception) -> None:
        """End a request with `error`, unless it has ended."""
        self._fail(request, wire_name(error), wire_text(error))

    def _fail(self, request: Request, name: str, text: str) -> None:
        if not request.finished:
            self.suspects.clear(request)
            self._finish(request, "error", error=(name, text))

    def _wait(self, request: Request) -> None:
        (self.suspects if request.key in self.suspects.keys else self.fair).push(request)

    def abort(self, frontend: int, handles: Iterable[int]) -> None:
        """End these requests with finish reason ``abort``; unknown handles are passed over."""
        requests = self.fair.of(frontend).requests
        for handle in handles:
            if handle in requests:
                self.suspects.clear(requests[handle])
                self._finish(requests[handle], "abort")

    def refuse(self, frontend: int, handle: int, error: Exception) -> None:
        """Answer a request that was never queued."""
        self.meter.ends["error"] += 1
        self._outbox.put(frontend, Finished(handle, "error", error=wire_name(error), error_text=wire_text(error)))

    def remove_frontend(self, frontend: int) -> None:
        """Forget a frontend and all that is its. It may come back with the same requests: suspects stay suspects."""
        for request in list(self.fair.of(frontend).requests.values()):
            self._finish(request, "abort")
        self.fair.remove(frontend)
        self._outbox.forget(frontend)

    def set_credit(self, frontend: int, given: bool) -> None:
        """Whether anything is computed for a frontend. One without credit keeps what it has until others need it."""
        if self.fair.of(frontend).credit == given:
            return
        self._stalled = False
        self.fair.set_credit(frontend, given)
        trial = self.suspects.on_trial
        if trial is not None and trial.frontend == frontend:
            self._preempt(trial)
        self._rows.held_up[list(self.fair.of(frontend).running)] = not given

    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Compute nothing until `resume`. What is there ends at once with finish reason ``abort``, is kept as it is,
        or (``wait``) goes on to its end if it has begun to run."""
        if mode == "abort":
            self.abort_all()
        self.paused, self._stalled = mode, False
        self.fair.set_aside(mode == "wait")
        if clear_cache:
            self.reset_prefix_cache()

    def abort_all(self) -> None:
        for frontend in self.fair:
            self.abort(frontend.id, list(frontend.requests))

    def fail_all(self, error: Exception) -> None:
        for frontend in self.fair:
            for request in list(frontend.requests.values()):
                self.fail(request, error)

    @property
    def has_begun(self) -> bool:
        """Whether anybody is here who has run."""
        return any(request.has_begun for f in self.fair for request in f.requests.values())

    def resume(self) -> None:
        self.paused, self._stalled = None, False
        self.fair.set_aside(False)

    @property
    def has_work(self) -> bool:
        """Whether a step, or an answer, is due."""
        return bool(self._outbox or (self.fair.num_requests and not self._stalled))

    @property
    def num_waiting(self) -> int:
        return self.fair.num_requests - len(self._running)

    def reset_prefix_cache(self, reset_running: bool = False, tier: CacheTier = "") -> bool:
        """Forget all cached prefixes, or those in one place: the pool (``gpu``) or host memory (``cpu``). Running
        requests go on with what they have, or, with `reset_running`, compute all of it again."""
        if tier not in (tiers := get_args(CacheTier)):
            raise InvalidArgumentError(f"tier is {tier!r}; it must be one of {', '.join(map(repr, tiers))}")
        if reset_running:
            for request in list(self._running.values()):
                self._preempt(request)
        self.kv.reset_cache(pool=tier != "cpu", host=tier != "gpu")
        return True

    # ------------------------------------------------------------------ a step begins

    def schedule(self) -> Step | None:
        """The next step, or None if there is nothing to compute now."""
        preempted = self._count["num_preemptions"]
        while (step := self._next()) is None and not self._in_flight and self._count["num_preemptions"] > preempted:
            preempted = self._count["num_preemptions"]  # for somebody that only the next try lets in
        self._stalled = step is None and not self._in_flight
        return step

    def _next(self) -> Step | None:
        suspects = self.suspects
        if self.paused in ("abort", "keep") or suspects.step is not None:
            return None
        suspect = suspects.next(self._may_run)
        if suspect is None or not suspects.have_turn:
            suspects.have_turn = True
            step = self._shared_step()
            if step is not None or suspect is None:
                return step
        return None if self._in_flight else self._trial_step(suspect)

    def _may_run(self, request: Request) -> bool:
        may = self.fair.of(request.frontend).credit and (self.paused is None or request.has_begun)
        return may and self._has_lora(request, ask=True)

    def _has_lora(self, request: Request, ask: bool) -> bool:
        return request.lora is None or self.loras is None or self.loras.allows(request, self._next_step, ask)

    def _shared_step(self) -> Step | None:
        """A step for all but suspects."""
        slots, granted = self._order, self._rows.granted
        granted[:] = 0
        need = self._need(slots)
        quotas: dict[int, int] | None = None
        if need.sum() > self._budget or (self.num_waiting and self.fair.num_competing > 1):
            quotas, need = self._within_quotas(slots, need)
        granted[slots] = need = self._cut(slots, need)
        lacking = self._allocate(slots[need > 0])
        self._admit(self._budget - int(granted.sum()), quotas, lacking)
        if quotas is not None:
            self._grant_rest(self._budget - int(granted.sum()))
        if self._guesses is not None:
            self._guesses.fill(self._order, self._budget, self._extend)
        slots = self._order[granted[self._order] > 0]
        return self._launch(slots, granted[slots]) if slots.size else None

    def _trial_step(self, suspect: Request) -> Step:
        """A step of a suspect alone; nothing is in flight. Where it finds no room others are preempted."""
        self._rows.granted[:] = 0
        self._promised = None
        if suspect.slot < 0:
            if not self._free_slots:
                self._preempt(self._preemption.victim())
            self.suspects.begin(suspect)
            cached = self.kv.find_prefix(suspect)
            while self.kv.room_needed(suspect, cached, 0)[0] > self.kv.pool.num_free:
                self._preempt(self._preemption.victim())
            self._seat(suspect, cached)
        slot = np.array([suspect.slot])
        self._rows.held_up[slot] = False
        need = self._cut(slot, self._need(slot))
        self._rows.held_up[slot] = True
        while not self._extend(suspect.slot, int((self._rows.num_computed[slot] + need)[0])):
            self._preempt(self._preemption.victim())
        self.suspects.step, self.suspects.have_turn = self._next_step, False
        return self._launch(slot, need, solo=True)

    def _need(self, slots: np.ndarray) -> np.ndarray:
        """Tokens that the requests at `slots` could compute in one step. The last token of a request is sampled, never
        computed."""
        known = np.minimum(self._rows.num_tokens[slots], self._rows.max_len[slots] - 1)
        need: np.ndarray = np.minimum(known - self._rows.num_computed[slots], self._chunk)
        need[self._rows.held_up[slots]] = 0
        waits = self._rows.looks_back[slots]
        if self._guesses is not None:
            waits = waits | self._guesses.wait(slots, len(self._order))
        if waits.any():
            need[waits & (self._rows.tokens[slots, known - 1] == IN_FLIGHT)] = 0
        if self._chunked and (scored := self._rows.scored[slots] & (need > 0)).any():
            need[scored] = np.minimum(need[scored], max(self.kv.least_cut, PROMPT_LOGITS // int(scored.sum())))
        return need

    def _cut(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """How many of the next `counts` tokens the requests at `slots` compute, so that their prompts are cut where
        the layers' memory allows it."""
        starts = self._rows.num_computed[slots]
        if self._cuts:
            for i in np.flatnonzero((counts > 0) & (starts < self._rows.prompt_len[slots])).tolist():
                counts[i] = self.kv.cut(self._running[int(slots[i])], int(starts[i]), int(counts[i]))
        return counts

    def _within_quotas(self, slots: np.ndarray, need: np.ndarray) -> tuple[dict[int, int], np.ndarray]:
        """Divide the budget among the frontends that want some of it, and cut `need` down to that; also what each has
        left. Inside a frontend decodes come first, then priority and arrival."""
        demand = np.bincount(self._rows.frontend[slots], weights=need)
        wanted = {f: int(demand[f]) for f in np.flatnonzero(demand).tolist()}
        quotas = self.fair.quotas(self._budget, wanted)
        if all(count <= quotas[f] for f, count in wanted.items()):
            return {f: quota - wanted.get(f, 0) for f, quota in quotas.items()}, need
        cut = np.zeros_like(need)
        ranks = [(need[i] > 1, *self.fair.rank(self._running[int(slot)])) for i, slot in enumerate(slots)]
        for i in sorted(range(len(slots)), key=ranks.__getitem__):
            frontend = int(self._rows.frontend[slots[i]])
            cut[i] = min(int(need[i]), quotas.get(frontend, 0))
            quotas[frontend] = quotas.get(frontend, 0) - int(cut[i])
        return quotas, cut

    def _grant_rest(self, budget: int) -> None:
        """What was kept for requests that then found no seat or blocks goes to running ones, whosever they are, as far
        as there are free blocks. Where nothing else moves, blocks are found for the first of them."""
        if budget <= 0:
            return
        slots = self._order
        more = self._need(slots) - self._rows.granted[slots]
        more[self._rows.scored[slots] & (self._rows.granted[slots] > 0)] = 0
        wants = {int(slot): int(n) for slot, n in zip(slots[more > 0], more[more > 0], strict=True)}
        able = sorted(wants, key=lambda slot: self.fair.rank(self._running[slot]))
        for slot in able:
            count = min(wants[slot], budget, self._prompt_logits_left if self._rows.scored[slot] else budget)
            granted = int(self._rows.granted[slot])
            count = int(self._cut(np.array([slot]), np.array([granted + count]))[0]) - granted
            end = int(self._rows.num_computed[slot]) + granted + count
            if count and (end <= self._rows.reach[slot] or self._extend(slot, end)):
                self._rows.granted[slot] += count
                budget -= count
        if able and not (self._in_flight or self._rows.granted.any()):
            first = np.array(able[:1])
            self._rows.granted[first] = self._cut(first, np.array([min(wants[able[0]], budget)]))
            self._allocate(first)

    @property
    def _prompt_logits_left(self) -> int:
        """Rows that may still have logits in the step being made, beside those that sample."""
        if not self._chunked:
            return self._budget
        rows = self._rows
        return max(0, PROMPT_LOGITS - int(rows.granted[self._order][rows.scored[self._order]].sum()))

    def _allocate(self, slots: np.ndarray) -> set[int]:
        """Let the block tables reach what this step computes; preempt where the pool has too few blocks. Returns the
        frontends for whose requests it had too few, and whose requests were preempted: nobody may come and take what
        running requests wait for."""
        lacking = set()
        ends = self._rows.num_computed + self._rows.granted
        edges = slots[ends[slots] > self._rows.reach[slots]].tolist()
        for slot in sorted(edges, key=lambda slot: self.fair.rank(self._running[slot])):
            while self._rows.alive[slot] and not self._extend(slot, int(ends[slot])):
                lacking.add(int(self._rows.frontend[slot]))
                if self.kv.num_on_the_way:  # they come back when a step retires
                    self._rows.granted[slot] = 0
                    break
                victim = self._preemption.victim()
                lacking.add(victim.frontend)
                self._preempt(victim)
        return lacking

    def _extend(self, slot: int, num_tokens: int, ahead: int = 0) -> bool:
        request, computed = self._running[slot], int(self._rows.num_computed[slot])
        if not self.kv.extend(request, computed, num_tokens, self._reserved(request.frontend), ahead):
            return False
        self._rows.reach[slot] = -(-num_tokens // self.kv.block_size) * self.kv.block_size
        return True

    def _reserved(self, frontend: int) -> int:
        """Free blocks that are not for this frontend."""
        promised, kept = self._promised, self.fair.of(frontend).kept
        return kept + (promised.room if promised is not None and promised.frontend != frontend else 0)

    def _admit(self, budget: int, quotas: dict[int, int] | None, closed: set[int]) -> None:
        """Give waiting requests seats, as far as budget, seats and blocks go. `closed`: frontends that get no more in
        this step. Where one of them lacks room, another may go before it that then still has no larger share. Who waits
        for what is `COMING` is passed by others, for this step, that leave it a seat and its blocks."""
        promised, self._promised = self._promised, None
        ceiling = min((self.fair.share(self.fair.of(f)) for f in closed), default=math.inf)
        deferring: list[Frontend] = []
        passed_by: list[Request] = []  # others may run before they do, for their adapters
        while budget > 0 and (frontend := self.fair.next_waiting(closed)) is not None:
            request = frontend.peek()
            assert request is not None, "next_waiting named a frontend with nobody waiting"
            if not self._has_lora(request, ask=bool(self._free_slots)):
                passed_by.append(frontend.pop())
                if len(passed_by) >= MOST_DEFERRED:
                    closed.add(frontend.id)
                continue
            # What can't be cut takes the whole budget if it must; fairness is then the order alone.
            left = budget
            if quotas is not None and self._chunked and not self._cuts:
                left = min(budget, quotas.get(frontend.id, 0))
            if left <= 0:
                closed.add(frontend.id)
                continue
            count = min(left, self._chunk)
            if request.told < request.prompt_len:
                count = min(count, max(self.kv.least_cut, self._prompt_logits_left))  # the next step divides them anew
            if not self._chunked and (needed := len(request.tokens) - self.kv.find_prefix(request)) > count:
                if self._budget == self._full_budget or self._rows.granted.any():
                    break  # nobody passes it, or smaller ones could for ever
                count = needed  # alone it may pass a budget that was cut
            cached = self._find_room(frontend, request, count, ceiling, request is promised)
            if cached is None:
                closed.add(frontend.id)
                if not frontend.deferred:
                    ceiling = min(ceiling, self.fair.share(frontend))
                continue
            if cached == COMING:
                frontend.defer()
                deferring.append(frontend)
                continue
            count = min(count, len(request.tokens) - cached)
            if self._cuts and not (count := self.kv.cut(request, cached, count)):
                closed.add(frontend.id)  # the next step may have more of its budget left
                continue
            frontend.pop()
            ahead = len(request.tokens) if self._running else 0  # nobody is to take what it was admitted for
            self._seat(request, cached)
            extended = self._extend(request.slot, cached + count, ahead)
            assert extended, "blocks counted as free were not"
            self._rows.granted[request.slot] = count
            budget -= count
            if quotas is not None:
                quotas[frontend.id] -= count
        for frontend in deferring:
            frontend.undefer()
        for request in passed_by:
            self.fair.push(request)

    def _comes(self, request: Request, most: int) -> bool:
        """Whether a running request computes the next block that `request` lacks, in a step in flight or in this one,
        and gets by it as far as `request` would itself, with `most` tokens, or to its end. So nobody waits for one that
        is slower, or stands still."""
        rows, size, block = self._rows, self.kv.block_size, request.num_cached_blocks
        owner = self.kv.coming_from(request, block)
        if owner is None:
            return False
        published = int(rows.num_published[owner.slot]) // size
        if published > block:  # since `request` was looked up; maybe more is to come
            if self.kv.coming_from(request, published) is not owner or not self.kv.ends_cached(request, published):
                return False
            block = published
        computed, granted = int(rows.num_computed[owner.slot]), int(rows.granted[owner.slot])
        if not granted and computed < (block + 1) * size:
            return False
        return computed + granted >= min(block * size + most, len(owner.tokens))

    def _find_room(self, frontend: Frontend, request: Request, most: int, ceiling: float, promised: bool) -> int | None:
        """Tokens of `request` that are cached, if there are a seat and blocks for it now, of which its frontend then
        holds no larger a share than `ceiling`. Beside others all its tokens must find room, or it would be admitted
        only to be preempted; alone, those it computes now, at `most`. It is looked up anew only if that can help.
        `COMING` if it should wait; nobody gives way for it then, nor for those that pass it."""
        passed = len(frontend.deferred)
        if passed and passed >= min(MOST_DEFERRED, len(self._free_slots)):
            return None
        while True:
            free = self.kv.pool.num_free - self._reserved(frontend.id)
            cached = None
            comes = not promised and self._comes(request, most)
            known = request.room and self._running and (comes or not self.kv.prefix_grew(request))
            if not known or (not comes and self._free_slots and request.room <= free):
                cached = self.kv.find_prefix(request)
                tokens = len(request.tokens) if self._running else min(len(request.tokens), cached + most)
                request.room, request.hold = self.kv.room_needed(request, tokens, self._chunk)
                comes = not promised and self._comes(request, most)
            if self.fair.share(frontend, 1, request.hold) > ceiling:
                return None
            if comes:
                return COMING
            if cached is not None and self._free_slots and request.room <= free:
                return cached
            if passed or not self._make_room(frontend, request, promised):
                return None

    def _make_room(self, frontend: Frontend, request: Request, promised: bool) -> bool:
        """Preempt those who are over their share for `request`, whose `frontend` is under its own. False if nobody has
        to give way, or if the room is there only when the steps in flight have retired: then it is promised."""
        gave = False
        while True:
            seats = 1 - len(self._free_slots) - len(self._freed_slots)
            free = self.kv.pool.num_free - self._reserved(frontend.id)
            if seats <= 0 and request.room <= free + self.kv.num_on_the_way:
                break
            # Who got a seat in this very step keeps it; the next one begins with whoever is least served.
            giver = self._preemption.giver(request, seats > 0, but=self._admitted)
            if giver is None:
                return False
            self._preempt(giver)
            gave = True
        if self._in_flight and (gave or promised) and self._promised is None:
            self._promised = request
        return gave and not self._in_flight

    def _seat(self, request: Request, cached: int) -> None:
        slot = request.slot = self._free_slots.pop()
        self._running[slot] = request
        self._order = np.fromiter(self._running, np.int64, len(self._running))
        self._rows.seat(request, cached)
        if request.lora is not None and self.loras is not None:
            self.loras.seat(request)
        self._rows.held_up[slot] = request is self.suspects.on_trial
        if self._guesses is not None:
            self._guesses.seat(request)
        self.fair.of(request.frontend).running[slot] = request
        if request.admitted_at is None:
            request.admitted_at = self._clock()
            request.num_cached_tokens = cached
            self._count["prefix_queries"] += len(request.tokens)
            self._count["prefix_hits"] += cached
            self._count["host_hits"] += self.kv.num_on_host(request)
        before = self.kv.coming_from(request, request.num_cached_blocks)
        # What one that still runs has published, and is not there, the cache can't keep: no use to wait for it again.
        self.kv.take_prefix(request, waited_for=before is None or self._rows.num_published[before.slot] <= cached)
        self.kv.show(request)
        self._admitted.append(request)

    def _launch(self, slots: np.ndarray, counts: np.ndarray, solo: bool = False) -> Step:
        rows, prompt_len = self._rows, self._rows.prompt_len[slots]
        starts, guessed = rows.num_computed[slots], rows.guessed[slots]
        output_index = rows.num_tokens[slots] - guessed - prompt_len
        ends, prefill = starts + counts, starts < prompt_len
        token_ids, samples = rows.advance(slots, counts)
        for slot, count in zip(slots[guessed > 0].tolist(), guessed[guessed > 0].tolist(), strict=True):
            rows.tokens[slot, rows.num_tokens[slot] - 1 - count :][:count] = IN_FLIGHT  # what is known ends before them
        self._count["chunked_prefills"] += int((ends < prompt_len).sum())
        self._count["mixed_steps"] += bool(prefill.any() and not prefill.all())
        self._count["prompt_tokens"] += int((np.minimum(ends, prompt_len) - starts)[prefill].sum())
        self.fair.charge(np.bincount(rows.frontend[slots], weights=counts))
        self.meter.stepped(int(counts.sum()))
        released = np.array([slot for slot in self._released if slot in self._free_slots], np.int32)
        plan = StepPlan(
            self._next_step,
            slots.astype(np.int32),
            starts.astype(np.int32),
            counts.astype(np.int32),
            token_ids,
            samples,
            guessed.astype(np.int32),
            [request.sequence() for request in self._admitted],
            released,
            self.kv.take_updates(),
            self._prompt_parts(slots, starts, counts) if rows.scored[slots].any() else [],
            self.kv.take_copies(),
            self.kv.take_state_copies(self._running, slots, ends, guessed),
        )
        step = Step(plan, rows.key[slots], output_index, solo)
        self._admitted, self._released = [], []
        self._next_step += 1
        self._in_flight.append(plan.id)
        self.kv.step_launched(plan.id)
        return step

    def _prompt_parts(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> list[PromptPart]:
        parts, row = [], 0
        for slot, start, count in zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True):
            request = self._running[slot]
            first, last = max(request.told, start + 1), min(request.prompt_len, start + count + 1)
            if self._rows.scored[slot] and first < last:
                parts.append(PromptPart(slot, first, last - first, row + first - start - 1))
            row += count
        return parts

    # ------------------------------------------------------------------ a step ends

    def update(self, step: Step, result: StepResult) -> dict[int, Outputs]:
        """Take in what a step brought. Returns each frontend's outputs."""
        plan = step.plan
        if result.lack:
            self._undo(step, f"the device lacks memory for this request alone: {result.lack}")
            return self.take_notices()
        for failed, name, text in result.errors:
            if (request := self._running.get(int(plan.slots[failed]))) is not None:
                self._fail(request, name, text)
        for ended in result.complete:
            if (request := self._running.get(int(plan.slots[ended]))) is not None:
                self.suspects.clear(request)
                self._finish(request, "stop")
        sampled, pooled = result.tokens, result.pooled
        slots, ends = plan.slots.astype(np.int64), plan.starts.astype(np.int64) + result.computed
        alive = self._rows.alive[slots]
        row, back = plan.choices()
        keep, at = alive[row], ends[row] - back
        if self._guesses is not None and plan.guessed.any():
            keep &= standing(plan, result.guesses, row, back, sampled, self._stops(slots[row], sampled))
            brought = np.bincount(row[keep], minlength=len(slots))
            made, right = self._guesses.settle(plan, slots, ends, brought, self.kv.roll_back)
            self._count["draft_tokens"] += made
            self._count["accepted_tokens"] += right
        rows, at, tokens = slots[row][keep], at[keep], sampled[keep]
        if pooled is None:
            self._rows.tokens[rows, at] = tokens
            self._count["generation_tokens"] += len(tokens)
        self._publish(slots[alive], ends[alive])
        if step.solo and rows.size:
            suspect = self._running[int(rows[0])]
            if step.output_index[0] >= self.suspects.keys.get(suspect.key, 0):
                self._rows.held_up[rows] = False
                self.suspects.clear(suspect)
        if pooled is None:
            self._observe(rows, len(rows) if not plan.guessed.any() else len(np.unique(rows)))
        started = [self._started(int(slot)) for slot in rows[self._rows.silent[rows]]]
        stop = self._rows.stop[rows]
        done = (tokens == stop) | (at + 1 >= self._rows.max_len[rows])
        check = np.flatnonzero(done | (stop == MANY_STOPS))
        handles, owners = self._rows.handle[rows], self._rows.frontend[rows]
        scores = [_of_kept(one, keep) for one in result.logprobs]
        told = [self._tell_prompt(*one) for one in zip(plan.scored, result.prompt_logprobs, strict=True)]
        if pooled is not None:
            self._end_pooled(rows, [pooled[i] for i in np.flatnonzero(keep).tolist()])
            check = handles = owners = tokens = NO_TOKENS
        for i in check:
            request, token = self._running[int(rows[i])], int(tokens[i])
            if token in request.stop_tokens:
                self._finish(request, "stop", stop_token=token)
            elif done[i]:
                self._finish(request, "length")
        self._retire(step)
        if self._budget < self._full_budget:
            self._steps_until_grown -= 1
            if self._steps_until_grown == 0:
                self._set_budget(2 * self._budget)
        stats = self.stats() if self._log_stats else None
        prompts = [one for one in told if one is not None]
        outputs = self._outbox.take(stats, handles, owners, tokens, started, scores, prompts)
        for frontend, out in outputs.items():
            self.fair.of(frontend).generation_tokens += len(out.handles)
        return outputs

    def _stops(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Whether each of `tokens` ends the request at `slots` that it was chosen for."""
        stop = self._rows.stop[slots]
        found: np.ndarray = tokens == stop
        for i in np.flatnonzero((stop == MANY_STOPS) & self._rows.alive[slots]):
            found[i] = int(tokens[i]) in self._running[int(slots[i])].stop_tokens
        return found

    def _end_pooled(self, slots: np.ndarray, results: Sequence[np.ndarray]) -> None:
        for slot, result in zip(slots.tolist(), results, strict=True):
            request = self._running[slot]
            vectors = np.ascontiguousarray(result, "<f4")
            self._outbox.pooled(request.frontend, Pooled(request.handle, list(vectors.shape), vectors.tobytes()))
            self._finish(request, "stop")

    def _tell_prompt(self, part: PromptPart, scores: Scores) -> tuple[int, Logprobs] | None:
        request = self._running.get(part.slot)
        if request is None or part.start > request.told:
            return None  # it will be computed again, or what is before it will
        request.told = max(request.told, part.start + part.num_rows)
        self._rows.scored[request.slot] = request.told < request.prompt_len
        return request.frontend, scores.message([], request.handle, part.start - request.num_virtual)

    def _observe(self, rows: np.ndarray, num_requests: int) -> None:
        """Tokens came for `rows`; those that came together share the time that they took."""
        now, num_firsts = self._clock(), int(self._rows.silent[rows].sum())
        gap = None if self._last_update is None else (now - self._last_update) * num_requests / max(1, len(rows))
        if gap is not None and num_firsts < len(rows):
            self.between_tokens.append(gap)
        self.meter.brought(len(rows), num_firsts, gap)
        if rows.size:
            self._last_update = now

    def _publish(self, slots: np.ndarray, ends: np.ndarray) -> None:
        size = self.kv.block_size
        for i in np.flatnonzero(ends // size > self._rows.num_published[slots] // size):
            slot, end = int(slots[i]), int(ends[i])
            request = self._running[slot]
            request.extend_digests(self._rows.tokens[slot], end, size)
            self.kv.publish(request, int(self._rows.num_published[slot]) // size, end // size)
            self._rows.num_published[slot] = end // size * size

    def _started(self, slot: int) -> tuple[int, Started]:
        request, now = self._running[slot], self._clock()
        self._rows.silent[slot] = False
        request.started = True
        request.first_token_at = now
        self.first_token.append(now - request.arrival)
        self.meter.began(request.prompt_len, now - request.arrival)
        admitted = request.admitted_at or now
        return request.frontend, Started(
            request.handle,
            admitted - request.arrival,
            now - admitted,
            max(0, request.num_cached_tokens - request.num_virtual),
        )

    def take_notices(self) -> dict[int, Outputs]:
        """Outputs for requests that ended outside a step."""
        return self._outbox.take(self.stats() if self._log_stats else None) if self._outbox else {}

    def _retire(self, step: Step) -> None:
        assert self._in_flight[0] == step.plan.id, "steps are taken in in the order they were launched"
        self._in_flight.pop(0)
        if step.solo:
            self.suspects.step = None
        self.kv.step_retired(step.plan.id)
        while self._freed_slots and self._freed_slots[0][0] <= step.plan.id:
            self._free_slot(self._freed_slots.pop(0)[1])

    # ------------------------------------------------------------------ a step fails

    def _undo(self, step: Step, error: str) -> None:
        """Take back `step`, the only one in flight: the device lacked the memory for it. Its requests catch up in steps
        of half the size; the budget grows back. A request that could not be cut any further ends with `error`."""
        plan = step.plan
        requests = [self._running[slot] for slot in plan.slots.tolist() if self._rows.alive[slot]]
        self._retire(step)
        self._stalled = False
        if len(plan.slots) == 1 and (plan.num_tokens == 1 or not self._chunked):
            for request in requests:
                self.fail(request, OutOfMemoryError(error))
            return
        for request in requests:
            self._preempt(request)
        self._set_budget(max(1, plan.num_tokens // 2))

    def _set_budget(self, tokens: int) -> None:
        self._budget = min(tokens, self._full_budget)
        self._chunk = min(self._full_chunk, self._budget) if self._chunked else self._full_budget
        # Lack of memory comes before equal bits: a budget below the smallest piece cuts prompts anywhere.
        self._cuts = self._chunked and self.kv.state is not None and self._chunk >= self.kv.least_cut
        self._steps_until_grown = GROW_AFTER_STEPS

    # ------------------------------------------------------------------ leaving a slot

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it catches up later. Its tokens are kept, and not sent again."""
        request.tokens = self._rows.known_tokens(request.slot)
        request.num_preemptions += 1
        self._count["num_preemptions"] += 1
        request.room = request.hold = 0
        self._unseat(request)
        self._wait(request)

    def _finish(
        self, request: Request, reason: FinishReason, stop_token: int | None = None, error: tuple[str, str] = ("", "")
    ) -> None:
        num_tokens = len(request.tokens)
        if request.slot >= 0:
            num_tokens = self._rows.num_known(request.slot)
            self._unseat(request)
        self.meter.request_ended(request, reason, num_tokens, self._clock())
        if request is self._promised:
            self._promised = None
        self._stalled = False
        self.suspects.leave(request)
        self.fair.end(request)
        if self.loras is not None and request.lora_name:
            self.loras.live -= Counter([request.lora_name])
        self.on_end(request)
        self._outbox.put(
            request.frontend, Finished(request.handle, reason, stop_token, request.num_preemptions, *error)
        )

    def _unseat(self, request: Request) -> None:
        slot, request.slot = request.slot, -1
        self.kv.free(request)
        if request.lora is not None and self.loras is not None:
            self.loras.unseat(request)
        self.suspects.leave(request)
        del self._running[slot], self.fair.of(request.frontend).running[slot]
        if not self._running:
            self._last_update = None
        self._order = np.fromiter(self._running, np.int64, len(self._running))
        self._rows.alive[slot] = False
        self._rows.granted[slot] = 0
        if request in self._admitted:
            self._admitted.remove(request)
        if self._in_flight:
            self._freed_slots.append((self._in_flight[-1], slot))
        else:
            self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        self._free_slots.append(slot)
        self._released.append(slot)

    # ------------------------------------------------------------------ numbers

    def stats(self) -> Stats:
        pool = self.kv.pool
        running, waiting = ([], []) if self.loras is None else self.loras.names()
        return Stats(
            num_running=len(self._running),
            num_waiting=self.num_waiting,
            kv_cache_usage=pool.num_in_use / max(1, pool.num_blocks - 1),
            num_steps=self._next_step,
            frontends_connected=len(self.fair),
            epoch=self.meter.epoch,
            requests_recovered=self.meter.requests_recovered,
            requests_quarantined=self.meter.requests_quarantined,
            malformed_frames=self.meter.malformed_frames(),
            sleep_level=self.sleep_level,
            running_loras=running,
            waiting_loras=waiting,
            **self._count,
        )


def _of_kept(scores: Scores, keep: np.ndarray) -> Scores:
    """Those of rows that are kept (bool ``[rows]``), which are counted without the others from then on."""
    there = scores.only(keep[scores.rows])
    return there._replace(rows=(np.cumsum(keep) - 1)[there.rows])
