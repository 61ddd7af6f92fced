"""The scheduler: it decides what each step computes, and takes in the results.

There is one token budget and there are no phases. A request has computed some of its tokens; each step computes more,
until it has caught up and every step brings one new token. Prefill, chunked prefill, decode, a prefix-cache hit and
resumption after preemption are all this one operation.

A step is made in stages, one file each: need, share, admit, speculate (the features' `fill`), launch. A stage is a
function of `SchedulerState`. Features take part through the hooks of feature.py. Running requests live in columns
indexed by slot, and every stage works on these; a step in which each request decodes and none crosses the edge of a
block touches no request object.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...ipc.config import SchedulerConfig
from ...ipc.errors import InvalidArgumentError, wire_name, wire_text
from ...ipc.messages import Finished, Outputs, Stats
from ..features.encoder_cache import EncoderCache
from ..features.media_store import StoredItem
from ..features.pauses import PauseMode, Pauses
from ..features.prompt_scores import PromptScores
from ..features.speculation import Guesses, Speculation
from ..features.suspects import Suspects
from ..memory.cache_manager import CacheManager
from ..memory.home_caches import HomeCaches
from .admit import admit
from .budget import Budget
from .columns import Columns
from .fair_share import FairShare
from .feature import Feature, Features
from .launch import launch_step
from .need import cut_rows, tokens_needed
from .request import Request
from .room import allocate, extend
from .running import Running
from .several_steps import steps_of, take_in_several
from .share import divide_budget, grant_rest
from .state import SchedulerState
from .step import Step, StepResult
from .take_in import take_back, take_in
from .transitions import enqueue, fail, finish, preempt
from .trial import plan_trial

NO_SLOTS = np.zeros(0, np.int64)
CACHE_TIERS = ("", "gpu", "cpu")  # where prefixes are cached: anywhere, in the pool, in host memory


class Scheduler:
    """Runs the stages of a step, and is told what comes, goes and changes.

    `schedule` may be called again before `update` was called for the step before: the tokens not known yet stand as
    placeholders. `update` takes the steps in the order of `schedule`.

    Args:
        clock: gives monotonic seconds.
        log_stats: whether outputs carry statistics.
        suspects: keys of requests that may have killed a core, see `Suspects`.
        on_suspects: called with the keys of those left.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: CacheManager | HomeCaches,
        max_model_len: int,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = lambda: time.monotonic(),
        log_stats: bool = True,
        suspects: Mapping[int, int] | None = None,
        on_suspects: Callable[[Collection[int]], None] = lambda keys: None,
    ) -> None:
        slots, num_blocks = config.max_num_seqs, max(1, kv.num_blocks)
        self.fair = fair = FairShare(config.scheduling_policy == "priority", slots, num_blocks, kv.blocks_used)
        self.sleep_level = 0  # for statistics
        self._pauses = Pauses(fair)
        self._log_stats = log_stats
        rows, suspected = Columns(slots, max_model_len), Suspects(suspects or {}, on_suspects)
        hooks = Features(rows)
        hooks.attach(suspected)  # first: a suspect waits in the queue of suspects, also during a pause
        hooks.attach(self._pauses)
        if speculation is not None:
            hooks.attach(Guesses(speculation, kv.roll_back))
        hooks.attach(PromptScores(config.enable_chunked_prefill, kv.least_cut))
        self.state = SchedulerState(rows, Running(slots), kv, fair, Budget(config), hooks, suspected, clock)
        self.meter = self.state.meter

    def attach(self, feature: Feature) -> None:
        """Add a feature, before any request is added."""
        self.state.features.attach(feature)

    def serve_media(self, media: EncoderCache) -> None:
        """Prompts may have media. Called before any request is added."""
        self.attach(media)
        self.state.media, media.fail, media.give_way = media, self._fail_media, self._give_way
        media.has_credit = lambda request: self.fair.of(request.frontend).credit

    def _fail_media(self, request: Request, error: str, text: str) -> None:
        self.state.suspects.clear(request)
        finish(self.state, request, "error", error=(error, text))

    def _give_way(self, request: Request) -> bool:
        """Whether a request is of a frontend without credit. Then it leaves its slot."""
        if self.fair.of(request.frontend).credit:
            return False
        if request.slot >= 0:
            preempt(self.state, request)
        return True

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request, ready: bool = True) -> None:
        """Queue a request. If it is not `ready`, it is only counted, until `queue` or `fail` is called for it."""
        self.fair.add(request)
        for added in self.state.features.added:
            added(request)
        if ready:
            self.queue(request)

    def queue(self, request: Request) -> None:
        """A request that was added before is ready now, unless it has ended."""
        self.wake()
        if not request.finished:
            enqueue(self.state, request)

    def wake(self) -> None:
        """Something that waiting requests need has come."""
        self.state.stalled = False

    def fail(self, request: Request, error: Exception) -> None:
        """End a request with `error`, unless it has ended."""
        if not request.finished:
            fail(self.state, request, error)

    def abort(self, frontend: int, handles: Iterable[int]) -> None:
        """End these requests with finish reason ``abort``; unknown handles are passed over."""
        requests = self.fair.of(frontend).requests
        for handle in handles:
            if handle in requests:
                self.state.suspects.clear(requests[handle])
                finish(self.state, requests[handle], "abort")

    def refuse(self, frontend: int, handle: int, error: Exception) -> None:
        """Answer a request that was never queued."""
        self.meter.ends["error"] += 1
        self.state.outbox.put(frontend, Finished(handle, "error", error=wire_name(error), error_text=wire_text(error)))

    def remove_frontend(self, frontend: int) -> None:
        """Forget a frontend and its requests. It may come back with the same requests: suspects stay suspects."""
        for request in list(self.fair.of(frontend).requests.values()):
            finish(self.state, request, "abort")
        self.fair.remove(frontend)
        self.state.outbox.forget(frontend)

    def set_credit(self, frontend: int, given: bool) -> None:
        """Whether anything is computed for a frontend. One without credit keeps what it has until others need it."""
        if self.fair.of(frontend).credit == given:
            return
        self.wake()
        self.fair.set_credit(frontend, given)
        trial = self.state.suspects.on_trial
        if trial is not None and trial.frontend == frontend:
            preempt(self.state, trial)
        for request in [] if given else list(self.fair.of(frontend).running.values()):
            if request.lora is not None:  # others may wait for its adapter's slot
                preempt(self.state, request)
        self.state.rows.excluded[list(self.fair.of(frontend).running)] = not given

    def abort_all(self) -> None:
        for frontend in self.fair:
            self.abort(frontend.id, list(frontend.requests))

    def fail_all(self, error: Exception) -> None:
        for frontend in self.fair:
            for request in list(frontend.requests.values()):
                self.fail(request, error)

    # ------------------------------------------------------------------ pauses and the prefix cache

    @property
    def paused(self) -> PauseMode | None:
        return self._pauses.mode

    def pause(self, mode: PauseMode) -> None:
        """Until `resume`, compute nothing (``keep``), or only requests that have begun to run (``wait``)."""
        self.wake()
        self._pauses.set(mode)

    def resume(self) -> None:
        self.wake()
        self._pauses.set(None)

    def reset_prefix_cache(self, reset_running: bool = False, tier: str = "") -> bool:
        """Forget all cached prefixes, or those in one place: the pool (``gpu``) or host memory (``cpu``). Running
        requests go on with what they have, or, with `reset_running`, compute all of it again."""
        if tier not in CACHE_TIERS:
            raise InvalidArgumentError(f"tier is {tier!r}; it must be one of {', '.join(map(repr, CACHE_TIERS))}")
        if reset_running:
            for request in list(self.state.running.requests.values()):
                preempt(self.state, request)
        self.state.kv.reset_cache(pool=tier != "cpu", host=tier != "gpu")
        return True

    # ------------------------------------------------------------------ how it is

    @property
    def has_begun(self) -> bool:
        """Whether any request is here that has run."""
        return any(request.has_begun for f in self.fair for request in f.requests.values())

    @property
    def has_work(self) -> bool:
        """Whether a step, or an answer, is due."""
        return bool(self.state.outbox or (self.fair.num_requests and not self.state.stalled))

    def stats(self) -> Stats:
        state, meter, kv = self.state, self.meter, self.state.kv
        fields: dict[str, Any] = {**meter.counts}
        for stats in state.features.stats:
            fields |= stats()
        return Stats(
            num_running=len(state.running.requests),
            num_waiting=self.fair.num_requests - len(state.running.requests),
            kv_cache_usage=kv.num_in_use / max(1, kv.num_blocks),
            num_steps=state.running.next_step,
            generation_tokens=meter.generation_tokens,
            frontends_connected=len(self.fair),
            epoch=meter.epoch,
            requests_recovered=meter.requests_recovered,
            requests_quarantined=meter.requests_quarantined,
            malformed_frames=meter.malformed_frames(),
            sleep_level=self.sleep_level,
            core=meter.core,
            **fields,
        )

    # ------------------------------------------------------------------ a step

    def schedule(self) -> Step | None:
        """The next step, or None if there is nothing to compute now."""
        counts, in_flight = self.meter.counts, self.state.running.in_flight
        preempted = counts["num_preemptions"]
        while (step := self._next()) is None and not in_flight and counts["num_preemptions"] > preempted:
            preempted = counts["num_preemptions"]  # for a request that only the next try admits
        self.state.stalled = step is None and not in_flight
        return step

    def _next(self) -> Step | None:
        """A step of all requests but suspects, or of one suspect, in turn. What is encoded alone has the turn of a
        suspect."""
        state, suspects, media = self.state, self.state.suspects, self.state.media
        if self.paused == "keep" or suspects.step is not None:
            return None
        suspect = suspects.next(lambda r: self.fair.of(r.frontend).credit and state.may_run(r, fetch=True))
        waits = suspect is not None or (media is not None and media.alone is not None)
        if not waits or not suspects.have_turn:
            suspects.have_turn = True
            if (step := self._shared_step()) is not None:
                return step
        if state.running.in_flight:
            return None
        if suspect is not None:
            return launch_step(state, *plan_trial(state, suspect), solo=True)
        return None if media is None or media.alone is None else self._encode_alone(media, media.alone)

    def _encode_alone(self, media: EncoderCache, item: StoredItem) -> Step:
        """A step that does nothing but encode an item."""
        solo = media.is_suspect(item)
        self.state.suspects.have_turn = False
        if solo:
            self.state.suspects.step = self.state.running.next_step
        return launch_step(self.state, NO_SLOTS, NO_SLOTS, solo, items=[item])

    def _shared_step(self) -> Step | None:
        """The stages of a step, one after the other. What each grants is in the column `granted`."""
        state, running, granted, budget = self.state, self.state.running, self.state.rows.granted, self.state.budget
        if state.media is not None:
            state.media.due = []
            if (step := self._span_step()) is not None or state.starved is not None:
                return step
        granted[:] = 0
        slots = running.order
        quotas, need = divide_budget(state, slots, tokens_needed(state, slots))
        granted[slots] = need = cut_rows(state, slots, need)
        lacking = allocate(state, slots[need > 0])
        admit(state, budget.tokens - int(granted.sum()), quotas, set(lacking))
        if quotas is not None:
            grant_rest(state, budget.tokens - int(granted.sum()))
            if not (running.in_flight or granted.any()):  # all of a small budget was for requests that can't run yet
                admit(state, budget.tokens, None, lacking)
        for fill in state.features.fill:
            fill(running.order, budget.tokens, partial(extend, state))
        slots, items = running.order[granted[running.order] > 0], state.media.due if state.media is not None else ()
        if not (slots.size or items):
            return self._span_step()
        return launch_step(state, slots, granted[slots], num_steps=steps_of(state, slots), items=items)

    def _span_step(self) -> Step | None:
        """A step for the request whose next tokens have to be computed together, if others left too little of the
        budget for them in the step before. Running requests of others are not in it. If the request waits for blocks
        on their way back, so do the others, or they could take them."""
        state, rows, running = self.state, self.state.rows, self.state.running
        request, state.starved = state.starved, None
        if request is None or request.finished:
            return None
        rows.granted[:] = 0
        state.alone = True
        if request.slot >= 0:
            slot = np.array([request.slot])
            rows.granted[slot] = need = cut_rows(state, slot, tokens_needed(state, slot))
            allocate(state, slot[need > 0])
            waits = need.any() and request.slot >= 0 and not rows.granted[slot].any()
        else:
            admit(state, state.budget.tokens, None, {one.id for one in self.fair if one.id != request.frontend})
            waits = False
        state.alone, state.starved = False, request if waits else None
        slots, items = running.order[rows.granted[running.order] > 0], state.media.due if state.media else ()
        return launch_step(state, slots, rows.granted[slots], items=items) if slots.size else None

    def update(self, step: Step, result: StepResult) -> dict[int, Outputs]:
        """Take in what a step brought. Returns each frontend's outputs."""
        if result.lack:
            take_back(self.state, step, result)
        elif step.plan.num_steps > 1:
            take_in_several(self.state, step, result)
        else:
            take_in(self.state, step, result)
        return self.take_notices()

    def take_notices(self) -> dict[int, Outputs]:
        """What frontends are to be told now, also of requests that ended outside a step."""
        outputs = self.state.outbox.take(self.stats() if self._log_stats else None)
        for frontend, out in outputs.items():
            self.fair.of(frontend).generation_tokens += len(out.handles)
        return outputs
