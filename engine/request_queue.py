"""The requests of an `LLM`: sent as the limits of the core allow; their outputs are kept until they are asked for."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any

from ..ipc.errors import InvalidArgumentError, InvalidRequestError, OverloadedError, RequestFailedError, shown
from .request.input_processor import EngineCoreRequest
from .request.outputs import PoolingRequestOutput, RequestOutput, errors_of, num_tokens_of

if TYPE_CHECKING:
    from .llm_engine import LLMEngine

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0  # seconds before requests that an overloaded core refused are sent again
PATIENCE_S = 300.0  # seconds without any request ending, after which a refusal is returned to the caller

Progress = bool | Callable[..., Any]  # False, True, or something like the class `tqdm`
OutputType = type[Any] | tuple[type[Any], ...]  # of outputs, as the second argument of `isinstance`


class RequestQueue:
    """Methods may be called from several threads. One of the threads that wait steps the engine for all."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        limits = engine.get_scheduler_config()
        self._room = _Room(limits.max_requests_per_frontend, limits.max_tokens_per_frontend)
        self._unsent: deque[EngineCoreRequest] = deque()
        self._sent: dict[str, EngineCoreRequest] = {}  # by id, as below
        # last outputs that nobody has taken so far; an error: the request could not be sent
        self._outputs: dict[str, RequestOutput | Exception] = {}
        self._enqueued: list[EngineCoreRequest] = []
        self._lock = threading.RLock()  # guards the above; not held during a step
        self._stepper: int | None = None  # the thread that steps, until it has all that it waits for
        self._stepped = threading.Condition(self._lock)  # requests have ended, or no thread steps any more
        self._pause, self._not_before, self._deadline = FIRST_PAUSE_S, 0.0, 0.0

    def run(self, requests: Sequence[EngineCoreRequest], use_tqdm: Progress) -> list[RequestOutput]:
        """Send requests, and wait for their outputs, in order. Whatever is raised meanwhile aborts them."""
        with self._aborting(requests):
            self._add(requests)
            return self._collect(requests, use_tqdm)

    def enqueue(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Send requests whose outputs `run_enqueued` gives."""
        with self._aborting(requests):
            self._add(requests)
            with self._lock:
                self._enqueued += requests

    def run_enqueued(self, output_type: OutputType | None, use_tqdm: Progress) -> list[Any]:
        """Wait for the outputs of the enqueued requests, in order. `output_type` None: of any type.

        Raises:
            InvalidArgumentError: an output will not be of this type. The requests stay enqueued.
        """
        wanted = (RequestOutput, PoolingRequestOutput) if output_type is None else output_type
        with self._lock:
            for request in self._enqueued:
                if not issubclass(kind := PoolingRequestOutput if request.pooling else RequestOutput, wanted):
                    raise InvalidArgumentError(
                        f"output_type is {shown(output_type)}, but request {request.request_id} gives a {kind.__name__}"
                    )
            requests, self._enqueued = self._enqueued, []
        with self._aborting(requests):
            return self._collect(requests, use_tqdm)

    def check_all_sent(self) -> None:
        """Raise `InvalidRequestError` if requests wait until the core has room for them."""
        if self._unsent:
            raise InvalidRequestError(
                f"{len(self._unsent)} enqueued requests are unsent; call wait_for_completion first"
            )

    @contextlib.contextmanager
    def _aborting(self, requests: Sequence[EngineCoreRequest]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            ids = {request.request_id for request in requests}
            with self._lock:
                self._unsent = deque(request for request in self._unsent if request.request_id not in ids)
                for request_id in ids:
                    self._outputs.pop(request_id, None)
                    if (request := self._sent.pop(request_id, None)) is not None:
                        self._room.take(request, -1)
                self._engine._end_requests(ids)
            raise

    def _add(self, requests: Sequence[EngineCoreRequest]) -> None:
        with self._lock:
            self._unsent += requests
            self._send()
            for request in requests:
                if isinstance(error := self._outputs.get(request.request_id), Exception):
                    raise error

    def _send(self) -> None:
        """Send what there is room for. An error is kept for the thread that has added the request."""
        while self._unsent and time.monotonic() >= self._not_before and self._room.has(self._unsent[0]):
            request = self._unsent.popleft()
            try:
                self._engine.add_request(request.request_id, request)
            except Exception as error:
                self._outputs[request.request_id] = error
                self._stepped.notify_all()
            else:
                self._sent[request.request_id] = request
                self._room.take(request)

    def _collect(self, requests: Sequence[EngineCoreRequest], use_tqdm: Progress) -> list[RequestOutput]:
        found: dict[str, RequestOutput] = {}
        waiting = {request.request_id for request in requests}
        self._pause, self._deadline = FIRST_PAUSE_S, time.monotonic() + PATIENCE_S
        try:
            with ProgressBar(use_tqdm, len(requests), "Processed prompts") as progress:
                while waiting:
                    for request_id, output in self._ended(waiting).items():
                        if isinstance(output, Exception):
                            raise output
                        found[request_id] = output
                        waiting.remove(request_id)
                        progress.add_output(output)
        finally:
            with self._lock:
                if self._stepper == threading.get_ident():
                    self._stepper = None
                    self._stepped.notify_all()
        return [found[request.request_id] for request in requests]

    def _ended(self, waiting: Set[str]) -> dict[str, RequestOutput | Exception]:
        """Take the outputs of those of these requests that have ended. If there are none, step, or let another thread
        step that does so already."""
        me = threading.get_ident()
        with self._lock:
            if ids := self._outputs.keys() & waiting:
                return {request_id: self._outputs.pop(request_id) for request_id in ids}
            if self._stepper not in (None, me):
                self._stepped.wait()
                return {}
            self._stepper = me
        self._step()
        return {}

    def _step(self) -> None:
        """Send what there is room for, and run one step."""
        with self._lock:
            if not self._engine.has_unfinished_requests() and (self._sent or not self._unsent):
                taken = RequestFailedError("its output was taken by a step of llm_engine outside this object")
                raise self._engine.engine_core.error or taken
            self._send()
            is_free = self._room.is_free
        if is_free:  # nothing is in flight: wait until requests may be sent again
            time.sleep(max(0.0, self._not_before - time.monotonic()))
        outputs = self._engine.step()
        now = time.monotonic()
        with self._lock:
            for output in outputs:
                if (request := self._sent.pop(output.request_id, None)) is None:
                    continue
                self._room.take(request, -1)
                refused = any(isinstance(error, OverloadedError) for error in errors_of(output))
                if refused and now < self._deadline and self._room.allows(request):
                    self._unsent.append(request)
                    if now >= self._not_before:
                        self._not_before, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE_S)
                        logger.info("the core is busy; sending again in %.2f s", self._not_before - now)
                    continue
                self._outputs[request.request_id] = output
                self._stepped.notify_all()
                self._pause, self._deadline = FIRST_PAUSE_S, now + PATIENCE_S


class _Room:
    """Counts completions and tokens in flight against the core's limits of a frontend, to avoid refused requests."""

    def __init__(self, *limits: int | None) -> None:
        self._limits = [math.inf if limit is None else limit for limit in limits]
        self._used = [0] * len(limits)

    @property
    def is_free(self) -> bool:
        return not any(self._used)

    def has(self, request: EngineCoreRequest) -> bool:
        """Whether a request fits beside those in flight. A single request is always sent: the core may refuse it."""
        return self.is_free or self.allows(request, self._used)

    def allows(self, request: EngineCoreRequest, used: Sequence[int] = (0, 0)) -> bool:
        return all(u + c <= limit for u, c, limit in zip(used, _cost(request), self._limits, strict=True))

    def take(self, request: EngineCoreRequest, times: int = 1) -> None:
        """Count a request `times` times; -1: it has ended."""
        self._used = [u + times * c for u, c in zip(self._used, _cost(request), strict=True)]


def _cost(request: EngineCoreRequest) -> tuple[int, int]:
    n = request.params.width
    return n, n * (len(request.prompt_token_ids) + (request.params.max_tokens or 0))


class ProgressBar:
    """The progress bar of a batch, closed at the end of a ``with`` block."""

    def __init__(self, use_tqdm: Progress, total: int, description: str) -> None:
        make: Any = use_tqdm
        if use_tqdm is True:
            from tqdm.auto import tqdm as make  # type: ignore[import-untyped,no-redef]
        self._bar = make(total=total, desc=description, dynamic_ncols=True) if make and total else None
        self._started = time.monotonic()
        self._prompt_tokens = self._output_tokens = 0

    def add(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def add_output(self, output: RequestOutput) -> None:
        """Also show tokens per second."""
        if self._bar is None:
            return
        self._prompt_tokens += len(output.prompt_token_ids or ())
        self._output_tokens += num_tokens_of(output)
        seconds = max(time.monotonic() - self._started, 1e-6)
        speeds = self._prompt_tokens / seconds, self._output_tokens / seconds
        self._bar.set_postfix_str("input: {:.0f} tokens/s, output: {:.0f} tokens/s".format(*speeds), refresh=False)
        self.add()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
