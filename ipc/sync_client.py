"""The client of `LLM` and `LLMEngine`: blocking calls, from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .client import ConnectedClient
from .codec import Array
from .connection import Connection, result_of
from .cores import Cores
from .errors import MainspringError
from .messages import AddRequest, MediaItem, Outputs
from .saving import SavesWeights
from .transport import Waker, readable, seconds_left

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


class SyncClient(SavesWeights, ConnectedClient):
    """See `CoreClient`. One lock guards the socket and is never held while waiting.

    One of the waiting threads is the reader: it waits for the socket, and the others wait for the reader. A zmq
    descriptor signals a change only once, so a thread that sends must also receive, and then wakes the reader.
    """

    def __init__(self, connection: Connection | Cores) -> None:
        super().__init__(connection)
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._has_reader = False
        self._waker = Waker()

    def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = (), rank: int | None = None) -> None:
        self._with_socket(lambda: self._connection.add_request(request, tensors, rank))

    def abort(self, handles: Sequence[int]) -> None:
        self._with_socket(lambda: self._connection.abort(handles))

    def get_outputs(self, timeout: float | None = None) -> Outputs | None:
        queue = self._connection.outputs
        return self._wait_for(lambda: queue.popleft() if queue else None, timeout)

    def call(self, method: str, *args: Any, arrays: Sequence[Array] = (), timeout: float | None = None) -> Any:
        self._with_socket(lambda: None)  # what has arrived may tell of further cores, which are to be asked, too
        call_id = self._with_socket(lambda: self._connection.start_call(method, args, arrays))
        try:
            answer = self._wait_for(lambda: self._connection.results.pop(call_id, None), timeout)
        finally:
            with self._lock:
                self._connection.end_call(call_id)
        if answer is None:
            raise TimeoutError(f"the core did not answer {method!r} within {timeout} s")
        return result_of(answer)

    def close(self) -> None:
        if not self._connection.is_mine:
            return  # in a forked child the lock may be held by a thread that does not exist there
        with self._lock:
            self._connection.close()
            self._arrived.notify_all()
        self._waker.wake()

    def _fail_media(self, media: Sequence[MediaItem], error: MainspringError) -> None:
        with self._lock:
            if self._connection.closed:
                return
            self._connection.fail_media(media, error)
            self._arrived.notify_all()
        self._waker.wake()

    def _with_socket(self, act: Callable[[], T]) -> T:
        self._connection.check_process()
        with self._lock:
            result = act()
            arrived = self._receive()
            if arrived:
                self._arrived.notify_all()
        if arrived:
            self._waker.wake()
        return result

    def _wait_for(self, take: Callable[[], T | None], timeout: float | None) -> T | None:
        """Wait until `take` finds something among the messages that have arrived."""
        self._connection.check_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while True:
                if self._receive():
                    self._arrived.notify_all()
                    if self._has_reader:  # its descriptors do not signal what was just received
                        self._waker.wake()
                if (found := take()) is not None:
                    return found
                if (error := self._connection.error) is not None:
                    raise error.with_traceback(None)
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                if self._has_reader:
                    self._arrived.wait(seconds_left(deadline))
                    continue
                self._has_reader = True
                fds, patience = self._connection.fds, self._connection.poll_seconds
                self._lock.release()
                try:
                    waits = [wait for wait in (seconds_left(deadline), patience) if wait is not None]
                    readable((*fds, self._waker.fd), min(waits, default=None))
                    self._waker.clear()
                finally:
                    self._lock.acquire()
                    self._has_reader = False
                    self._arrived.notify_all()  # one of the waiting threads becomes the reader
