"""The scheduler: it decides what each step computes, and takes in the results.

There is one token budget and there are no phases. A request has computed some of its tokens; each step computes more,
until it has caught up and every step brings one new token. Prefill, chunked prefill, decode, a prefix-cache hit and
resumption after preemption are all this one operation.

A step is made in stages, one file each: need, share, admit, speculate (the features' `fill`), launch. Features take
part through the hooks of feature.py. Running requests live in columns indexed by slot, and every stage works on these;
a step in which each request decodes and none crosses the edge of a block touches no request object.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from ...ipc.config import SchedulerConfig
from ...ipc.errors import InvalidArgumentError, OutOfMemoryError, wire_name, wire_text
from ...ipc.messages import Finished, FinishReason, Logprobs, Outputs, Pooled, Started, Stats
from ..core_meter import CoreMeter
from ..features.pauses import PauseMode, Pauses
from ..features.speculation import Guesses, standing
from ..features.suspects import Suspects
from ..features.token_times import TokenTimes
from ..memory.kv_cache import KVCacheManager
from .admit import Admission
from .budget import Budget
from .columns import MANY_STOPS, Columns
from .ending import Ending
from .fair_share import FairShare
from .feature import Feature, Features
from .need import Need
from .outbox import NO_TOKENS, Outbox
from .preemption import Preemption
from .request import Request
from .room import Room
from .running import Running
from .share import Share
from .step import IN_FLIGHT, PromptPart, Scores, Step, StepPlan, StepResult
from .trial import Trial

__all__ = ["CacheTier", "PauseMode", "Scheduler"]

CacheTier = Literal["", "gpu", "cpu"]


class Scheduler:
    """Composes the stages of a step, and is told what comes, goes and changes.

    `schedule` may be called again before `update` was called for the step before: the tokens not known yet stand as
    placeholders. `update` takes the steps in the order of `schedule`.

    Args:
        features: beside pauses and suspects, in the order in which their `cap` is called.
        clock: gives monotonic seconds.
        log_stats: whether outputs carry statistics.
        suspects: keys of requests that may have killed a core, see `Suspects`.
        on_suspects: called with the keys of those left.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        max_model_len: int,
        features: Sequence[Feature] = (),
        clock: Callable[[], float] = lambda: time.monotonic(),
        log_stats: bool = True,
        suspects: Mapping[int, int] | None = None,
        on_suspects: Callable[[Collection[int]], None] = lambda keys: None,
    ) -> None:
        by_priority, num_blocks = config.scheduling_policy == "priority", kv.pool.num_blocks - 1
        self.kv = kv
        self.fair = fair = FairShare(by_priority, config.max_num_seqs, max(1, num_blocks), kv.held)
        self.suspects = Suspects(suspects or {}, on_suspects)
        self.meter = CoreMeter()
        self.times = TokenTimes()
        self.sleep_level = 0  # for statistics
        self.on_end: Callable[[Request], None] = lambda request: None  # called with each request that ends
        self._pauses = Pauses(fair)
        rows = Columns(config.max_num_seqs, max_model_len)
        # A suspect waits in the queue of suspects, also during a pause.
        self._features = Features([self.suspects, self._pauses, self.times, *features], rows)
        self._log_stats = log_stats
        self._counts: Counter[str] = Counter()  # counters of `Stats`, by name
        self._outbox = Outbox()
        self._stalled = False  # nothing can be computed before something changes
        self._budget_of_step = budget = Budget(config)
        self._requests = running = Running(rows, kv, fair, self._features, self._counts, clock)
        self._ending = Ending(running, fair, self._features, self.meter, self._outbox, clock)
        self._preemption = preemption = Preemption(running, fair, kv, self._features, self.suspects, self._counts)
        self._need = Need(rows, budget, self._features)
        self._room = Room(running, kv, fair, preemption)
        self._share = Share(running, budget, fair, self._need, self._room, self._features)
        self._admission = Admission(running, budget, kv, fair, self._room, self._features)
        self._trial = Trial(self.suspects, running, kv, self._need, self._room, preemption)
        # names that `_launch`, `update` and `_undo` use
        self._rows, self._running, self._in_flight = rows, running.requests, running.in_flight
        self._free_slots = running.free_slots
        self._count, self._clock, self._chunked = self._counts, clock, budget.chunked
        self._guesses = next((one for one in features if isinstance(one, Guesses)), None)
        self.first_token, self.between_tokens = self.times.first, self.times.between

    def attach(self, feature: Feature) -> None:
        """Add a feature, before any request is added."""
        self._features.attach(feature)

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request, ready: bool = True) -> None:
        """Queue a request. If it is not `ready`, it is only counted, until `queue` or `fail` is called for it."""
        self._stalled = False
        self.fair.add(request)
        self._features.added(request)
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
        """Forget a frontend and its requests. It may come back with the same requests: suspects stay suspects."""
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
            self._preemption.preempt(trial)
        self._rows.held_up[list(self.fair.of(frontend).running)] = not given

    def abort_all(self) -> None:
        for frontend in self.fair:
            self.abort(frontend.id, list(frontend.requests))

    def fail_all(self, error: Exception) -> None:
        for frontend in self.fair:
            for request in list(frontend.requests.values()):
                self.fail(request, error)

    def _wait(self, request: Request) -> None:
        if not self._features.keeps(request):
            self.fair.push(request)

    def _finish(
        self, request: Request, reason: FinishReason, stop_token: int | None = None, error: tuple[str, str] = ("", "")
    ) -> None:
        self._stalled = False
        self._ending.finish(request, reason, stop_token, error)
        self.on_end(request)

    # ------------------------------------------------------------------ pauses

    @property
    def paused(self) -> PauseMode | None:
        return self._pauses.mode

    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Compute nothing until `resume`. Present requests end at once with finish reason ``abort``, are kept as they
        are, or (``wait``) go on to their end if they have begun to run."""
        if mode == "abort":
            self.abort_all()
        self._stalled = False
        self._pauses.set(mode)
        if clear_cache:
            self.reset_prefix_cache()

    def resume(self) -> None:
        self._stalled = False
        self._pauses.set(None)

    def reset_prefix_cache(self, reset_running: bool = False, tier: CacheTier = "") -> bool:
        """Forget all cached prefixes, or those in one place: the pool (``gpu``) or host memory (``cpu``). Running
        requests go on with what they have, or, with `reset_running`, compute all of it again."""
        if tier not in (tiers := get_args(CacheTier)):
            raise InvalidArgumentError(f"tier is {tier!r}; it must be one of {', '.join(map(repr, tiers))}")
        if reset_running:
            for request in list(self._requests.requests.values()):
                self._preemption.preempt(request)
        self.kv.reset_cache(pool=tier != "cpu", host=tier != "gpu")
        return True

    # ------------------------------------------------------------------ how it is

    @property
    def has_begun(self) -> bool:
        """Whether any request is here that has run."""
        return any(request.has_begun for f in self.fair for request in f.requests.values())

    @property
    def has_work(self) -> bool:
        """Whether a step, or an answer, is due."""
        return bool(self._outbox or (self.fair.num_requests and not self._stalled))

    def stats(self) -> Stats:
        pool, running = self.kv.pool, len(self._requests.requests)
        more: dict[str, Any] = {**self._features.stats(), **self._counts}
        return Stats(
            num_running=running,
            num_waiting=self.fair.num_requests - running,
            kv_cache_usage=pool.num_in_use / max(1, pool.num_blocks - 1),
            num_steps=self._requests.next_step,
            frontends_connected=len(self.fair),
            epoch=self.meter.epoch,
            requests_recovered=self.meter.requests_recovered,
            requests_quarantined=self.meter.requests_quarantined,
            malformed_frames=self.meter.malformed_frames(),
            sleep_level=self.sleep_level,
            **more,
        )

    # ------------------------------------------------------------------ a step begins

    def schedule(self) -> Step | None:
        """The next step, or None if there is nothing to compute now."""
        preempted = self._counts["num_preemptions"]
        while (step := self._next()) is None and not self._in_flight and self._counts["num_preemptions"] > preempted:
            preempted = self._counts["num_preemptions"]  # for a request that only the next try admits
        self._stalled = step is None and not self._in_flight
        return step

    def _next(self) -> Step | None:
        """A step of all requests but suspects, or of one suspect, in turn."""
        suspects = self.suspects
        if self._pauses.stops_steps or suspects.step is not None:
            return None
        suspect = suspects.next(self._may_be_tried)
        if suspect is None or not suspects.have_turn:
            suspects.have_turn = True
            step = self._shared_step()
            if step is not None or suspect is None:
                return step
        return None if self._in_flight else self._launch(*self._trial.plan(suspect), solo=True)

    def _may_be_tried(self, suspect: Request) -> bool:
        has_credit = self.fair.of(suspect.frontend).credit
        return has_credit and self._features.may_run(suspect, self._requests.next_step, fetch=True)

    def _shared_step(self) -> Step | None:
        """The stages of a step, one after the other. What each grants is in the column `granted`."""
        running, granted, most = self._requests, self._rows.granted, self._budget_of_step.tokens
        granted[:] = 0
        slots = running.order
        quotas, need = self._share.divide(slots, self._need.of(slots))
        granted[slots] = need
        lacking = self._room.allocate(slots[need > 0])
        self._admission.admit(most - int(granted.sum()), quotas, lacking)
        if quotas is not None:
            self._share.grant_rest(most - int(granted.sum()))
        self._features.fill(running.order, most, self._room.extend)
        slots = running.order[granted[running.order] > 0]
        return self._launch(slots, granted[slots]) if slots.size else None

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
            made, right = self._guesses.settle(plan, slots, ends, np.bincount(row[keep], minlength=len(slots)))
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
        """Tokens came for `rows`."""
        num_firsts = int(self._rows.silent[rows].sum())
        gap = self.times.brought(self._clock(), len(rows), num_requests, num_firsts)
        self.meter.brought(len(rows), num_firsts, gap)

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
        self._requests.retire(step.plan.id)
        if step.solo:
            self.suspects.step = None

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

    # ------------------------------------------------------------------ names that the functions above use

    def _preempt(self, request: Request) -> None:
        self._preemption.preempt(request)

    def _set_budget(self, tokens: int) -> None:
        self._budget_of_step.cut(tokens)

    @property
    def _budget(self) -> int:
        return self._budget_of_step.tokens

    @property
    def _full_budget(self) -> int:
        return self._budget_of_step.full

    @property
    def _steps_until_grown(self) -> int:
        return self._budget_of_step.steps_until_grown

    @_steps_until_grown.setter
    def _steps_until_grown(self, steps: int) -> None:
        self._budget_of_step.steps_until_grown = steps

    @property
    def _admitted(self) -> list[Request]:
        return self._requests.admitted

    @_admitted.setter
    def _admitted(self, admitted: list[Request]) -> None:
        self._requests.admitted = admitted

    @property
    def _released(self) -> list[int]:
        return self._requests.released

    @_released.setter
    def _released(self, slots: list[int]) -> None:
        self._requests.released = slots

    @property
    def _next_step(self) -> int:
        return self._requests.next_step

    @_next_step.setter
    def _next_step(self, step: int) -> None:
        self._requests.next_step = step


def _of_kept(scores: Scores, keep: np.ndarray) -> Scores:
    """Those of rows that are kept (bool ``[rows]``), which are counted without the others from then on."""
    there = scores.only(keep[scores.rows])
    return there._replace(rows=(np.cumsum(keep) - 1)[there.rows])
