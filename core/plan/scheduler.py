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

from ...ipc.config import SchedulerConfig
from ...ipc.errors import InvalidArgumentError, wire_name, wire_text
from ...ipc.messages import Finished, Outputs, Stats
from ..core_meter import CoreMeter
from ..features.pauses import PauseMode, Pauses
from ..features.suspects import Suspects
from ..features.token_times import TokenTimes
from ..memory.cache_manager import CacheManager
from .admit import Admission
from .budget import Budget
from .columns import Columns
from .cut import Cut
from .ending import Ending
from .fair_share import FairShare
from .feature import Feature, Features
from .launch import Launch
from .need import Need
from .outbox import Outbox
from .preemption import Preemption
from .request import Request
from .room import Room
from .running import Running
from .share import Share
from .step import Step, StepResult
from .take_in import TakeIn
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
        kv: CacheManager,
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
        self._budget = budget = Budget(config)
        self._running = running = Running(rows, kv, fair, self._features, self._counts, clock)
        self._ending = ending = Ending(
            running, fair, self._features, self.meter, self._outbox, self.suspects, clock, lambda one: self.on_end(one)
        )
        self._preemption = preemption = Preemption(running, fair, kv, self._features, self.suspects, self._counts)
        self._need = Need(rows, budget, self._features)
        self._cut = cut = Cut(running, kv, budget)
        self._room = Room(running, kv, fair, preemption)
        self._share = Share(running, budget, fair, self._need, cut, self._room, self._features)
        self._admission = Admission(running, budget, kv, fair, cut, self._room, self._features)
        self._trial = Trial(self.suspects, running, kv, self._need, cut, self._room, preemption)
        self._launch = Launch(running, kv, fair, self._features, self.meter, self._counts)
        self._take_in = TakeIn(
            running,
            kv,
            budget,
            self._features,
            preemption,
            ending,
            self._outbox,
            self.meter,
            self.times,
            self._counts,
            clock,
        )

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
        if not request.finished:
            self._stalled = False
            self._ending.fail(request, wire_name(error), wire_text(error))

    def abort(self, frontend: int, handles: Iterable[int]) -> None:
        """End these requests with finish reason ``abort``; unknown handles are passed over."""
        requests = self.fair.of(frontend).requests
        for handle in handles:
            if handle in requests:
                self.suspects.clear(requests[handle])
                self._abort(requests[handle])

    def refuse(self, frontend: int, handle: int, error: Exception) -> None:
        """Answer a request that was never queued."""
        self.meter.ends["error"] += 1
        self._outbox.put(frontend, Finished(handle, "error", error=wire_name(error), error_text=wire_text(error)))

    def remove_frontend(self, frontend: int) -> None:
        """Forget a frontend and its requests. It may come back with the same requests: suspects stay suspects."""
        for request in list(self.fair.of(frontend).requests.values()):
            self._abort(request)
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
        self._running.rows.held_up[list(self.fair.of(frontend).running)] = not given

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

    def _abort(self, request: Request) -> None:
        self._stalled = False
        self._ending.finish(request, "abort")

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
            for request in list(self._running.requests.values()):
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
        pool, running = self.kv.pool, len(self._running.requests)
        more: dict[str, Any] = {**self._features.stats(), **self._counts}
        return Stats(
            num_running=running,
            num_waiting=self.fair.num_requests - running,
            kv_cache_usage=pool.num_in_use / max(1, pool.num_blocks - 1),
            num_steps=self._running.next_step,
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
        counts, in_flight = self._counts, self._running.in_flight
        preempted = counts["num_preemptions"]
        while (step := self._next()) is None and not in_flight and counts["num_preemptions"] > preempted:
            preempted = counts["num_preemptions"]  # for a request that only the next try admits
        self._stalled = step is None and not in_flight
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
        return None if self._running.in_flight else self._launch.step(*self._trial.plan(suspect), solo=True)

    def _may_be_tried(self, suspect: Request) -> bool:
        has_credit = self.fair.of(suspect.frontend).credit
        return has_credit and self._features.may_run(suspect, self._running.next_step, fetch=True)

    def _shared_step(self) -> Step | None:
        """The stages of a step, one after the other. What each grants is in the column `granted`."""
        running, granted, most = self._running, self._running.rows.granted, self._budget.tokens
        granted[:] = 0
        slots = running.order
        quotas, need = self._share.divide(slots, self._need.of(slots))
        granted[slots] = need = self._cut.of(slots, need)
        lacking = self._room.allocate(slots[need > 0])
        self._admission.admit(most - int(granted.sum()), quotas, lacking)
        if quotas is not None:
            self._share.grant_rest(most - int(granted.sum()))
        self._features.fill(running.order, most, self._room.extend)
        slots = running.order[granted[running.order] > 0]
        return self._launch.step(slots, granted[slots]) if slots.size else None

    # ------------------------------------------------------------------ a step ends

    def update(self, step: Step, result: StepResult) -> dict[int, Outputs]:
        """Take in what a step brought. Returns each frontend's outputs."""
        if result.lack:
            self._take_in.take_back(step, result.lack)
            return self.take_notices()
        brought = self._take_in.take(step, result)
        outputs = self._outbox.take(self.stats() if self._log_stats else None, *brought)
        for frontend, out in outputs.items():
            self.fair.of(frontend).generation_tokens += len(out.handles)
        return outputs

    def take_notices(self) -> dict[int, Outputs]:
        """Outputs for requests that ended outside a step."""
        return self._outbox.take(self.stats() if self._log_stats else None) if self._outbox else {}
