"""The client of `LLM` and `LLMEngine`: blocking calls, from any thread."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from .config import EngineConfig
from .connection import WATCH_SECONDS, Connection, result_of
from .messages import AddRequest, Outputs
from .transport import Waker, seconds_left

T = TypeVar("T")


class SyncClient:
    """See `CoreClient`. One lock guards the socket and is never held while waiting.

    Of the threads that wait, one is the reader: it waits for the socket and hands what comes to the others. A zmq
    descriptor tells of a change once, so whoever sends also takes in what has come, and wakes the reader.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.config = connection.config
        self.model = connection.model
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._has_reader = False
        self._waker = Waker()

    @classmethod
    def launch(cls, config: EngineConfig) -> SyncClient:
        """Start a core of one's own.

        Raises:
            MainspringError: the core did not start.
        """
        return cls(Connection.launch(config))

    def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = ()) -> None:
        self._with_socket(lambda: self._connection.add_request(request, tensors))

    def abort(self, handles: Sequence[int]) -> None:
        self._with_socket(lambda: self._connection.abort(handles))

    def get_outputs(self, timeout: float | None = None) -> Outputs | None:
        queue = self._connection.outputs
        return self._wait_for(lambda: queue.popleft() if queue else None, timeout)

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        call_id = self._with_socket(lambda: self._connection.start_call(method, args))
        try:
            answer = self._wait_for(lambda: self._connection.results.pop(call_id, None), timeout)
        finally:
            self._connection.end_call(call_id)
        if answer is None:
            raise TimeoutError(f"the core did not answer {method!r} within {timeout} s")
        return result_of(answer)

    def close(self) -> None:
        if not self._connection.is_mine:
            return  # a forked child, where the lock may be held for ever
        with self._lock:
            self._connection.close()
            self._arrived.notify_all()
        self._waker.wake()

    def _with_socket(self, act: Callable[[], T]) -> T:
        self._connection.check_process()
        with self._lock:
            result = act()
            arrived = self._connection.receive()
            if arrived:
                self._arrived.notify_all()
        if arrived:
            self._waker.wake()
        return result

    def _wait_for(self, take: Callable[[], T | None], timeout: float | None) -> T | None:
        """What `take` finds among what has arrived; waits for it."""
        self._connection.check_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while True:
                if self._connection.receive():
                    self._arrived.notify_all()
                if (found := take()) is not None:
                    return found
                if (error := self._connection.dead_error()) is not None:
                    raise error
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                if self._has_reader:
                    self._arrived.wait(seconds_left(deadline))
                    continue
                self._has_reader = True
                fd, watch = self._connection.fd, self._connection.core.watch.fd
                self._lock.release()
                try:
                    self._wait_readable(fd, watch, seconds_left(deadline))
                finally:
                    self._lock.acquire()
                    self._has_reader = False
                    self._arrived.notify_all()  # one of them is the reader next

    def _wait_readable(self, fd: int, watch: int | None, timeout: float | None) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._waker.fd, select.POLLIN)
        if watch is not None:
            poll.register(watch, select.POLLIN)
        elif timeout is None or timeout > WATCH_SECONDS:
            timeout = WATCH_SECONDS
        poll.poll(None if timeout is None else timeout * 1000)
        self._waker.clear()
