"""The bounded queue of messages from the core's I/O thread to its main thread."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from .codec import Frame

MAX_MESSAGES = 1024
MAX_BYTES = 64 << 20


class Credit(NamedTuple):
    """Made by the server, not received: whether a frontend reads its messages."""

    given: bool


class Undecoded(NamedTuple):
    """Made by the server, not received: a request that is larger than the model can accept."""

    handle: int
    reason: str


class Event(NamedTuple):
    """A received `message` of a `frontend`. Its first one is a `Hello`, its last one a `Bye`."""

    frontend: int
    message: Any
    tensors: Sequence[Frame] = ()
    admin: bool = False  # of a Hello
    size: int = 0


class Inbox:
    """One thread puts events and stops when there is no room, another one takes them."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Event] = SimpleQueue()
        self._put_bytes = self._taken_bytes = 0  # counters, each written by one thread only
        self.waits = np.zeros(1, np.int32)  # not 0: there are events, or messages wait for a turn

    @property
    def has_room(self) -> bool:
        return self._queue.qsize() < MAX_MESSAGES and self._put_bytes - self._taken_bytes < MAX_BYTES

    def put(self, event: Event) -> None:
        self._put_bytes += event.size
        self._queue.put(event)
        self.waits[0] = 1

    def take(self, wait: bool) -> list[Event]:
        """All events that are there. With `wait`, wait up to a second for the first."""
        events: list[Event] = []
        self.waits[0] = 0  # before the queue is emptied, so that no later event is overlooked
        with contextlib.suppress(Empty):
            if wait:
                events.append(self._queue.get(timeout=1.0))  # bounded, so that Python can run signal handlers
            while len(events) < MAX_MESSAGES:
                events.append(self._queue.get_nowait())
        if len(events) == MAX_MESSAGES:
            self.waits[0] = 1
        self._taken_bytes += sum(event.size for event in events)
        return events
