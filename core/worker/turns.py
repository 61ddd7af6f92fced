"""A thread that works for several frontends, which take turns."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any


class TurnThread:
    """Calls functions one after another in a daemon thread, so that a process can end during a call."""

    def __init__(self, name: str, stack_bytes: int = 0) -> None:
        self._name, self._stack_bytes = name, stack_bytes
        # by frontend, in the order of their turns
        self._queues: OrderedDict[int, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._lock, self._queued = threading.Lock(), threading.Semaphore(0)
        self._started = False

    def submit(self, frontend: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call a function for `frontend`. The future can be cancelled until its turn comes."""
        future = Future[Any]()
        with self._lock:
            self._queues.setdefault(frontend, deque()).append((future, partial(function, *args)))
            self._queued.release()
            if not self._started:
                self._started = True
                # The stack size is a setting of the process: threads that start at the same moment get it, too.
                before = threading.stack_size(self._stack_bytes)
                try:
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
                finally:
                    threading.stack_size(before)
        return future

    def _work(self) -> None:
        while True:
            self._queued.acquire()
            with self._lock:
                frontend, queue = self._queues.popitem(last=False)
                future, call = queue.popleft()
                if queue:
                    self._queues[frontend] = queue
            if future.set_running_or_notify_cancel():  # else nobody needs it any more
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call  # what they refer to may be large
