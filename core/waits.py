"""What requests and calls wait for while steps go on: grammars, adapters, media, other cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from .features.adapters import Wait
from .plan.request import Request

IDLE_SECONDS = 0.005  # that a step without other work waits for the first one


class Waits:
    """Calls functions in the thread of the loop once futures are done. True while one of these is not called yet."""

    def __init__(self) -> None:
        self._count = 0
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def __bool__(self) -> bool:
        return self._count > 0

    def then(self, future: Future[Any], function: Callable[[Future[Any]], None]) -> None:
        """Call the function at the beginning of the first step after the future is done."""
        self._count += 1
        future.add_done_callback(lambda done: self._done.put(partial(function, done)))

    def bring(self, future: Future[Any]) -> Future[Any]:
        """A future that gets the result of another one in the thread of the loop, unless it is cancelled before."""
        brought = Future[Any]()
        brought.add_done_callback(lambda done: done.cancelled() and future.cancel())

        def settle(done: Future[Any]) -> None:
            if brought.set_running_or_notify_cancel():
                error = done.exception()
                brought.set_exception(error) if error else brought.set_result(done.result())

        self.then(future, settle)
        return brought

    def give_all(
        self, request: Request, waits: Sequence[Wait], then: Callable[[Request, Exception | None], None]
    ) -> None:
        """Call `then` once the request has got all that it waits for, or with an error as soon as one wait fails."""
        request.pending = len(waits)
        for future, take in waits:
            self.then(future, partial(_give, request, take, then))

    def take(self, busy: bool) -> None:
        """Call the functions of the futures that are done. Without other work (`busy`), wait for the first one for at
        most `IDLE_SECONDS`."""
        while True:
            try:
                function = self._done.get(not busy, IDLE_SECONDS)
            except Empty:
                return
            self._count, busy = self._count - 1, True
            function()


def _give(
    request: Request,
    take: Callable[[Any], None],
    then: Callable[[Request, Exception | None], None],
    done: Future[Any],
) -> None:
    """Take in one thing that a request waited for."""
    request.pending -= 1
    try:
        take(done.result())
    except BaseException as error:
        then(request, error if isinstance(error, Exception) else RuntimeError(str(error)))
        return
    if not request.pending:
        then(request, None)
