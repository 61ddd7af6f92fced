"""The client of a core in the same process: no sockets, no threads, one step for each call."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec
import numpy as np

from .codec import Array, decode_value, encode_arguments
from .config import EngineConfig
from .errors import EngineDeadError, check_process
from .messages import AddRequest, ModelFacts, Outputs
from .routing import check_rank
from .saving import SavesWeights

IDLE_SECONDS = 0.005  # wait of a caller who has nothing to do, because only another thread can resume a paused core


class Core(Protocol):
    """The part of `EngineCore` that this client uses. ipc/ may not import core/."""

    config: EngineConfig

    def connect(self, frontend: int) -> None: ...
    def disconnect(self, frontend: int) -> None: ...
    def add_request(
        self, frontend: int, request: AddRequest, tensors: Sequence[Any] = (), processors: Sequence[Any] = ()
    ) -> None: ...
    def abort(self, frontend: int, handles: Sequence[int]) -> None: ...
    def call(
        self, method: str, args: msgspec.Raw, frontend: int = 0, arrays: Sequence[np.ndarray] = ()
    ) -> msgspec.Raw | Future[Any]: ...
    def step(self) -> dict[int, Outputs]: ...
    def close(self) -> None: ...
    def collective_rpc(
        self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]: ...
    @property
    def model(self) -> ModelFacts: ...
    @property
    def error(self) -> EngineDeadError | None: ...
    @property
    def has_work(self) -> bool: ...


class InprocClient(SavesWeights):
    """See `CoreClient`. `get_outputs` runs one step; with nothing to do it soon returns None."""

    in_process = True

    def __init__(self, core: Core) -> None:
        self.core = core
        self.config = core.config
        self.model = core.model
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.RLock()  # of the core; a signal handler may close this client in the middle of a step
        self._early: deque[Outputs] = deque()  # outputs of steps that ran during a call
        core.connect(0)

    def add_request(
        self,
        request: AddRequest,
        tensors: Sequence[np.ndarray] = (),
        rank: int | None = None,
        processors: Sequence[Callable[..., Any]] = (),
    ) -> None:
        """`processors` are the user's functions on logits. They can only be passed to a core in this process."""
        check_rank(rank, (0,))
        with self._turn():
            arrays = [np.ascontiguousarray(t).data.cast("B") for t in tensors]
            self.core.add_request(0, request, arrays, processors)

    def abort(self, handles: Sequence[int]) -> None:
        with self._turn():
            self.core.abort(0, handles)

    def get_outputs(self, timeout: float | None = None) -> Outputs | None:
        with self._turn():
            if self._early:
                return self._early.popleft()
            if self.core.has_work:
                return self.core.step().get(0)
        time.sleep(IDLE_SECONDS)
        return None

    def call(self, method: str, *args: Any, arrays: Sequence[Array] = (), timeout: float | None = None) -> Any:
        with self._turn():
            answer = self.core.call(method, encode_arguments(method, list(args)), 0, [a.values for a in arrays])
            if not isinstance(answer, Future):
                return decode_value(answer)
            while not answer.done():
                if outputs := self.core.step().get(0):
                    self._early.append(outputs)
            return answer.result()

    def collective_rpc(
        self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Call a method of the worker. Arguments may be any objects, because they stay in this process."""
        with self._turn():
            return self.core.collective_rpc(method, args, kwargs)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self.core.disconnect(0)
                self.core.close()

    @property
    def error(self) -> EngineDeadError | None:
        return EngineDeadError("the engine was shut down") if self._closed else self.core.error

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """In this context the calling thread alone uses the core."""
        check_process(self._pid)  # first, because a thread that does not exist in a forked child may hold the lock
        with self._lock:
            if self.error is not None:
                raise self.error.with_traceback(None)
            yield
