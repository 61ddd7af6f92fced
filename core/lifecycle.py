"""Pauses, sleep, and weight updates: when the core makes steps, and which memory it keeps while it makes none.

Each of the three stops the steps on its own, and requests that arrive meanwhile wait. `state` is what users have set;
the supervisor keeps it for the next core.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import msgspec
import numpy as np

from ..ipc.errors import InvalidArgumentError, InvalidRequestError, WeightsLostError
from ..ipc.messages import DesiredState, ModelFacts
from .features.held_weights import HeldWeights, Later
from .features.pauses import PauseMode
from .plan.control import ParameterRows, SetParameters, Sleep, Wake, Worker
from .plan.scheduler import Scheduler

logger = logging.getLogger(__name__)

MODES = ("abort", "keep", "wait")  # what becomes of the present requests in a pause
TAGS = ("scheduling", "weights", "kv_cache")  # the parts of a core that can sleep and wake separately


class _Update(NamedTuple):
    """An unfinished weight update."""

    frontend: int
    version: str
    parts: int  # messages received so far


class Lifecycle:
    """Not thread-safe: only the thread that drives the core may call it.

    Args:
        busy: returns whether a step is in flight.
        on_state: called after each change of `state`.
        on_model: called with `model` after each change of it.
        later: as for `Adapters`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        model: ModelFacts,
        busy: Callable[[], bool],
        on_state: Callable[[], None],
        on_model: Callable[[ModelFacts], None],
        later: Later,
    ) -> None:
        self._scheduler, self._worker, self._busy = scheduler, worker, busy
        self._on_state, self._on_model = on_state, on_model
        self.on_stale: Callable[[], None] = lambda: None  # called when nothing holds that was computed with the weights
        self.model = model  # with the fingerprint of the current weights
        self.state = DesiredState()
        self.held = HeldWeights(worker, later)
        self._pause_mode: PauseMode = "keep"
        self._sleep_mode: PauseMode = "keep"
        self._pausing: list[tuple[Future[None], bool]] = []  # unanswered pauses; whether each clears the cache
        self._falling: list[Future[None]] = []  # unanswered calls of `sleep`
        self._update: _Update | None = None
        self._fingerprint = hashlib.blake2b(digest_size=16)

    def restore(self, state: DesiredState) -> None:
        """Take over the state of the previous core. Weights that users had sent to it are lost."""
        if state.weights_version is not None:
            self.model = msgspec.structs.replace(self.model, fingerprint=state.fingerprint, weights_lost=True)
        self.state = msgspec.structs.replace(state, num_cores=None)  # has been done
        self._scheduler.sleep_level = state.sleep_level
        if state.sleep_level:
            self._worker.control(Sleep(state.sleep_level))
            self._wake_worker(set(state.asleep))
        self._settle()

    def check(self) -> None:
        """Raises `WeightsLostError` if the weights that users have sent are lost or incomplete."""
        if self.model.weights_lost:
            version = self.state.weights_version
            raise WeightsLostError(
                f"the weights of version {version!r}, which update_weights had brought, are lost: send them again"
            )

    # ------------------------------------------------------------------ pause

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> Future[None]:
        """Make no more steps until `resume`; requests that arrive wait. The future is done when no step is in flight.

        Args:
            mode: ``abort`` ends the present requests, ``keep`` leaves them as they are, ``wait`` lets those that have
                begun to run go on to their end.
            clear_cache: drop the prefix cache.

        Raises:
            InvalidArgumentError: no such mode.
        """
        self._pause_mode = self._abort_or(mode)
        self._set(paused=True)
        done: Future[None] = Future()
        self._pausing.append((done, clear_cache))
        self.advance()
        return done

    def resume(self) -> None:
        """Undo `pause`."""
        self._answer_pausing()
        self._set(paused=False)

    # ------------------------------------------------------------------ sleep

    @property
    def sleeping(self) -> bool:
        """Whether some part of the core sleeps, or a call of `sleep` is not answered yet."""
        return bool(self.state.asleep or self._falling)

    def sleep(self, level: int = 1, mode: str = "abort") -> Future[None]:
        """Make no steps until `wake_up`. The future is done when the core sleeps.

        Args:
            level: 0 stops the steps only. 1 also frees the KV cache and moves the weights from the GPU to host memory.
                2 frees the KV cache and the weights; `wake_up` reads the checkpoint again.
            mode: what becomes of requests, as in `pause`.

        Raises:
            InvalidArgumentError: no such level or mode.
        """
        if type(level) is not int or not 0 <= level <= 2:
            raise InvalidArgumentError(f"level is {level!r:.80}; it must be 0, 1 or 2")
        if self._update is not None:
            raise InvalidRequestError(f"weights of version {self._update.version!r} are being received: sleep later")
        self._sleep_mode = self._abort_or(mode)
        done: Future[None] = Future()
        self._falling.append(done)
        self._scheduler.sleep_level = max(level, self._scheduler.sleep_level)
        self._settle()
        self.advance()
        return done

    @property
    def is_due(self) -> bool:
        """Whether `advance` has a call of `pause` or `sleep` to answer."""
        if self._busy() or not (self._falling or self._pausing):
            return False
        if self._update is not None and self._pause_mode == "wait":  # requests that have begun go on behind it
            return False
        return not (self._scheduler.paused == "wait" and self._scheduler.has_begun)

    def advance(self) -> None:
        """Answer `pause` and `sleep` once no step is in flight. Called after a step without outputs."""
        if not self.is_due:
            return
        if any(clear_cache for _, clear_cache in self._pausing):
            self._scheduler.reset_prefix_cache()
        self._answer_pausing()
        if self._falling:
            self._fall_asleep()

    def _fall_asleep(self) -> None:
        level, (falling, self._falling) = self._scheduler.sleep_level, (self._falling, [])
        try:
            if level:
                self._forget_computed()
                self._worker.control(Sleep(level))
        except Exception as error:  # host memory may be too small
            if level == 2:  # some weights may be dropped already
                self._lose_sent()
            self._worker.control(Wake(True, True))
            self._scheduler.sleep_level = 0
            self._set(asleep=[], sleep_level=0)
            return _answer(falling, error)
        self._set(asleep=list(TAGS if level else TAGS[:1]), sleep_level=level)
        _answer(falling)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Wake all parts, or some of them. Steps start again when the weights and the KV cache are back.

        Args:
            tags: some of ``scheduling``, ``weights`` and ``kv_cache``; None means all.

        Raises:
            InvalidArgumentError: there is no such tag.
        """
        if tags is not None and not isinstance(tags, list | tuple):
            raise InvalidArgumentError(f"tags is {tags!r:.80}; it must be a list")
        for tag in tags or ():
            if tag not in TAGS:
                raise InvalidArgumentError(f"tags has {tag!r:.80}; tags are {', '.join(TAGS)}")
        falling, self._falling = self._falling, []
        _answer(falling, InvalidRequestError("the core was woken before it slept"))
        before = set(self.state.asleep)
        left = before - set(TAGS if tags is None else tags)
        if before > {"scheduling"} and left <= {"scheduling"}:
            left = set()
        level = self._scheduler.sleep_level if left or before else 0
        if level == 2 and "weights" in before - left:
            self._lose_sent()
        if level:
            self._wake_worker(left)
        self._scheduler.sleep_level = level if left else 0
        self._set(asleep=[tag for tag in TAGS if tag in left], sleep_level=self._scheduler.sleep_level)

    def _lose_sent(self) -> None:
        """Note that the weights sent by users are lost, if there were any: the worker reads the checkpoint again."""
        if self.state.weights_version is not None:
            self._tell_model(weights_lost=True)
            try:
                self.check()
            except WeightsLostError as error:
                self._scheduler.fail_all(error)

    def _wake_worker(self, asleep: set[str]) -> None:
        weights = "weights" not in asleep
        self._worker.control(Wake(weights, weights and "kv_cache" not in asleep))

    def forget(self, frontend: int) -> None:
        """A frontend has left. If it was sending weights, that update stays incomplete; one that is held is dropped."""
        if self._update is not None and self._update.frontend == frontend:
            self._lose_update("its sender left")
        self.held.forget(frontend)

    # ------------------------------------------------------------------ new weights

    def update_weights(self, frontend: int, version: str, number: int, parts: list[ParameterRows], last: bool) -> None:
        """Set the weights of message `number`, counted from 0. No step is made until the `last` message. Then the
        prefix cache is dropped, and running requests compute all their tokens again.

        Raises:
            InvalidRequestError: the model has no such parameter or shape, or earlier messages are missing. If some
                weights were replaced already, no request is served until a complete update.
        """
        begun = self._update is not None  # earlier messages have replaced some parameters
        if number == 0 and (self._update is None or self._update.frontend == frontend):
            if self._falling:
                raise InvalidRequestError("the core is about to sleep: send weights when it is awake")
            self._worker.control(SetParameters([]))  # raises if the weights sleep
            self._update = _Update(frontend, version, 0)
            self._settle()
        if self._update is not None and self._update.frontend != frontend:
            raise InvalidRequestError(f"another frontend is sending weights of version {self._update.version!r}")
        if self._update != (frontend, version, number):
            if self._update is not None:
                self._lose_update("its sender gave up")
            raise InvalidRequestError(f"message {number} of version {version!r} is out of order: begin again at 0")
        try:
            self._set_parameters(parts)
        except Exception as error:
            if begun or not isinstance(error, InvalidRequestError):  # some parameters may be replaced
                self._lose_update(str(error))
            else:
                self._update = None
                self._settle()
            raise
        self._update = self._update._replace(parts=number + 1)
        if last:
            self._update = None
            self._serve_new(version)

    def finish_update(self, frontend: int, version: str | None = None, replace: bool = True) -> None:
        """Replace the parameters that were held since `start_weight_update`, between two steps, or drop them.

        Args:
            version: a name for them; None or empty: the present one stays.
            replace: False drops them.

        Raises:
            InvalidRequestError: no update was started, or is complete; the model has no such parameter or shape; the
                weights sleep. Then nothing was replaced.
        """
        if not replace:
            return self.held.forget(frontend)
        if self._update is not None:
            raise InvalidRequestError(f"weights of version {self._update.version!r} are being sent by update_weights")
        rows = self.held.take(frontend)
        try:
            self._set_parameters(rows)
        except InvalidRequestError:
            raise
        except Exception as error:  # for lack of memory; some parameters may be replaced
            self._update = _Update(frontend, version or self.state.weights_label, 0)
            self._lose_update(str(error))
            raise
        self._serve_new(version)

    def set_weight_version(self, version: str) -> None:
        """Name the weights that are served, and replace none."""
        sent = self.state.weights_version is not None
        self._set(weights_label=version, weights_version=version if sent else None)

    def set_num_cores(self, count: int) -> None:
        """Let the supervisor have this many cores.

        Raises:
            InvalidRequestError: users have sent weights, which a further core would not have.
        """
        if self.state.weights_version is not None:
            raise InvalidRequestError("the weights were sent by users, and a further core would not have them")
        self._set(num_cores=count)
        self.state = msgspec.structs.replace(self.state, num_cores=None)

    def _set_parameters(self, parts: list[ParameterRows]) -> None:
        """Raises `InvalidRequestError` if one of them can't be set; then none is."""
        try:
            self._worker.control(SetParameters(parts))
        except (KeyError, ValueError) as error:
            raise InvalidRequestError(f"the weights can't be set: {error.args[0]}") from None
        for part in parts:
            self._fingerprint.update(f"{part.name} {part.start} {part.values.shape} {_sample(part.values)}".encode())

    def _serve_new(self, version: str | None) -> None:
        """The weights are complete: serve them under this name."""
        version = version or self.state.weights_label
        self._forget_computed()
        self._fingerprint.update(f"{self.model.fingerprint} {version}".encode())
        fingerprint = self._fingerprint.hexdigest()
        self._set(weights_version=version, weights_label=version, fingerprint=fingerprint)
        self._tell_model(fingerprint=fingerprint, weights_lost=False)

    def _forget_computed(self) -> None:
        self._scheduler.reset_prefix_cache(True)
        self.on_stale()

    def _lose_update(self, why: str) -> None:
        assert self._update is not None
        version, self._update = self._update.version, None
        logger.error("the update of weights to version %r is incomplete (%s): requests are refused", version, why)
        self._tell_model(weights_lost=True)
        self._scheduler.fail_all(WeightsLostError(f"the update of weights to version {version!r} is incomplete: {why}"))
        self._set(weights_version=version, fingerprint=self.model.fingerprint)

    # ------------------------------------------------------------------ inside

    def _answer_pausing(self) -> None:
        pausing, self._pausing = self._pausing, []
        _answer([done for done, _ in pausing])

    def _abort_or(self, mode: str) -> PauseMode:
        """Abort all requests if `mode` says so. Returns how the scheduler treats those that remain or arrive."""
        if mode not in MODES:
            raise InvalidArgumentError(f"mode is {mode!r:.80}; it must be one of {', '.join(MODES)}")
        if mode == "abort":
            self._scheduler.abort_all()
        return "wait" if mode == "wait" else "keep"

    def _tell_model(self, **changes: object) -> None:
        self.model = msgspec.structs.replace(self.model, **changes)
        self._on_model(self.model)

    def _set(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
        self._settle()
        self._on_state()

    def _settle(self) -> None:
        """Pause or resume the scheduler as the current state asks."""
        if self.state.asleep or self._update is not None:
            self._scheduler.pause("keep")
        elif self._falling:
            self._scheduler.pause(self._sleep_mode)
        elif self.state.paused:
            self._scheduler.pause(self._pause_mode)
        else:
            self._scheduler.resume()


def _answer(calls: Sequence[Future[None]], error: Exception | None = None) -> None:
    for call in calls:
        if call.set_running_or_notify_cancel():
            if error is None:
                call.set_result(None)
            else:
                call.set_exception(error)


def _sample(values: np.ndarray) -> list[float]:
    """About eight values of a parameter, for its fingerprint."""
    few = values.reshape(-1)[:: max(1, values.size // 8)]
    if few.dtype == np.uint16:  # bfloat16: the upper half of a float32
        few = (few.astype(np.uint32) << 16).view(np.float32)
    numbers: list[float] = few.astype(np.float32).tolist()
    return numbers
