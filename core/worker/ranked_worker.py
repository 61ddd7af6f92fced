"""The worker of a model that several ranks compute: the first rank's own, which is in the planner's process, and what
the others are told. They get the same plans and control records in the same order."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...ipc.errors import EngineDeadError, InvalidArgumentError, InvalidRequestError
from ..plan import control as records
from ..plan.codec import encode
from ..plan.control import AdapterFacts, PendingStep, Worker, WorkerFacts
from ..plan.step import StepPlan, StepResult
from .rank_link import LINK_BYTES, Kind, for_rank, packed
from .ranks import ANSWER_SECONDS, Ranks
from .worker import Decisions, LocalWorker, Pending

logger = logging.getLogger(__name__)

# What only the rank that chooses tokens needs.
_OF_FIRST_RANK = (
    records.PrepareGrammar,
    records.DropGrammar,
    records.DropFunctions,
    records.CheckSampling,
    records.Explain,
)
# What is not the same for all other ranks.
_OF_EACH_RANK = (records.JoinTrainer, records.ReceiveParameters, records.StartProfile)
# What changes the state that steps depend on.
_OF_ALL_OR_NONE = (records.Sleep, records.Wake, records.SetParameters)


class RankedWorker(Worker):
    """See `Worker`."""

    def __init__(self, local: LocalWorker, ranks: Ranks, stages: int) -> None:
        self._unread_bytes = LINK_BYTES // stages  # most of a plan, because each stage may have one to read
        self.local, self._ranks = local, ranks
        self.interrupt = np.zeros(1, np.int32)  # nobody reads it, because a plan is one step
        self.beat: Callable[[], None] = lambda: None  # nor this, because such models take no media
        self._receivers = 1  # ranks that are in a trainer's group
        local.on_plan = self._tell_plan
        self._end = weakref.finalize(self, ranks.close)

    @property
    def error(self) -> EngineDeadError | None:  # type: ignore[override]
        return self._ranks.error

    @property
    def facts(self) -> WorkerFacts:  # type: ignore[override]
        return self.local.facts

    @property
    def decisions(self) -> Decisions:
        return self.local.decisions

    def warm_up(self) -> None:
        with self._ranks.explains():
            self.local.warm_up()
            self._ranks.wait_ready(self.local.agreed())

    def launch(self, plan: StepPlan) -> PendingStep:
        with self._ranks.in_step():
            pending = self.local.launch(plan)
        return Pending(lambda: self._wait(pending), pending.lacks_memory)

    def _wait(self, pending: PendingStep) -> StepResult:
        with self._ranks.in_step():
            return pending.wait()

    def control(self, record: records.Control) -> Any:
        if isinstance(record, _OF_FIRST_RANK) or _is_prompt_adapter(record):
            return self.local.control(record)
        if isinstance(record, records.JoinTrainer):
            self._receivers = self._places(record)
        with self._ranks.in_step():
            self.local.catch_up()  # before other ranks, which may be in the middle of a step, are waited for
        with self._ranks.explains():
            if isinstance(record, _OF_ALL_OR_NONE):
                return self._change_all(record)
            mine = self.local.control(record)  # if it fails here, the others are not asked
            asked = self._tell(record)
            if isinstance(mine, Future):
                return _together(mine, asked)
            _results(asked)
        return mine

    def _tell_plan(self, plan: StepPlan) -> None:
        body = encode(for_rank(plan))
        if len(body) > self._unread_bytes:  # sending it may have to wait until the ranks read
            self.local.catch_up()
        self._ranks.compute(body)

    def _tell(self, record: records.Control) -> dict[int, Future[Any]]:
        alike = None if isinstance(record, _OF_EACH_RANK) else encode(record)  # weights are long
        return self._ranks.ask(Kind.CONTROL, lambda rank: alike or self._bytes_for(record, rank))

    def lend_functions(self, functions: Sequence[Callable[..., Any]]) -> tuple[int, ...]:
        return self.local.lend_functions(functions)

    def run_method(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        body = packed(0, (method, args, kwargs))[8:]
        with self._ranks.explains():
            asked = self._ranks.ask(Kind.CALL, lambda rank: body)
            try:
                mine = self.local.run_method(method, args, kwargs)
            finally:
                wait(asked.values())
            found = dict(zip(map(self._ranks.rank_of, range(self._ranks.size)), [*mine, *_results(asked)], strict=True))
        return [found[rank] for rank in sorted(found)]

    def span(self, name: str) -> AbstractContextManager[Any]:
        return self.local.span(name)

    def close(self) -> None:
        self._end()

    def _change_all(self, record: records.Control) -> None:
        """Change the state of all ranks at once, because it may take collectives. If it fails on some of them only,
        they would differ from then on. Then a rank is killed, and the core with it. (If `Sleep` fails, the lifecycle
        wakes all.)"""
        asked, finished, own = self._tell(record), threading.Event(), None
        for rank, future in asked.items():
            future.add_done_callback(partial(self._not_waited_for, rank, finished))
        try:
            self.local.control(record)
        except Exception as error:
            own = error
        finished.set()
        done, late = wait(asked.values(), ANSWER_SECONDS if own else None)
        outcomes = {own is None, *(future.exception() is None for future in done)}
        if late or (len(outcomes) > 1 and not isinstance(record, records.Sleep)):
            logger.error("%s did not fail on all ranks alike: the core ends", type(record).__name__, exc_info=own)
            self._ranks.kill(1)
            raise RuntimeError(f"{type(record).__name__} did not fail on all ranks alike")
        if own is not None:
            raise own
        _results(asked)

    def _not_waited_for(self, rank: int, finished: threading.Event, done: Future[Any]) -> None:
        """If a rank has failed, end it unless the first rank finishes, too: it may wait for that rank."""

        def end() -> None:
            if not finished.wait(ANSWER_SECONDS):
                self._ranks.kill(rank)

        if done.exception() is not None and self._ranks.death is None:
            threading.Thread(target=end, name="mainspring-failed-rank", daemon=True).start()

    def _places(self, record: records.JoinTrainer) -> int:
        """How many ranks take part in a trainer's group: all, or the first one, which passes on what it receives."""
        if 1 < record.places < self._ranks.size:
            raise InvalidArgumentError(
                f"init_info has world_size {record.world_size} and rank_offset {record.rank}, which leaves "
                f"{record.places} places for the engine; it takes 1, or {self._ranks.size}, one for each rank"
            )
        return 1 if record.places < self._ranks.size else self._ranks.size

    def _bytes_for(self, record: records.Control, rank: int) -> bytes | None:
        """The record for a rank; None if it is not asked."""
        if isinstance(record, records.JoinTrainer | records.ReceiveParameters) and rank >= self._receivers:
            return None
        if isinstance(record, records.JoinTrainer):
            record = replace(record, rank=record.rank + rank)
        elif isinstance(record, records.StartProfile):
            record = replace(record, prefix=f"{record.prefix or 'mainspring'}-rank-{rank}")
        return encode(record)


def _is_prompt_adapter(record: records.Control) -> bool:
    return isinstance(record, records.PrepareAdapter) and record.adapter.num_virtual_tokens > 0


def _results(asked: Mapping[int, Future[Any]]) -> list[Any]:
    """The answers of all ranks. Raises the error of the first that failed, when all have answered."""
    wait(asked.values())
    return [future.result() for future in asked.values()]


def _together(mine: Future[Any], others: Mapping[int, Future[Any]]) -> Future[Any]:
    """A future of this rank's result, once all ranks have done their part, or of an error."""
    all_done, parts = Future[Any](), [mine, *others.values()]
    left, lock = len(parts), threading.Lock()

    def settle(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        try:
            result, *more = [part.result() for part in parts]
            if isinstance(result, AdapterFacts) and any(one.digest != result.digest for one in more):
                raise InvalidRequestError("the adapter's folder has changed while several ranks read it")
            all_done.set_result(result)
        except Exception as error:
            all_done.set_exception(error)

    for part in parts:
        part.add_done_callback(settle)
    return all_done
