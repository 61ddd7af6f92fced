"""Responses that the server remembers, in the memory of the worker that made them, up to a bound."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

MAX_RESPONSES = 4096
MAX_BYTES = 64 << 20  # of all stored responses of a worker, as JSON; a conversation counts with each of its responses


class Stored(msgspec.Struct):
    """A response as it is shown, the conversation so far as messages of a chat, and the items of its input."""

    tenant: str
    response: dict[str, Any]
    messages: list[dict[str, Any]]
    items: list[dict[str, Any]]


class ResponseStore:
    """The latest responses. Those that were not used for longest are dropped first."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._found: OrderedDict[str, tuple[Stored, int]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._found)

    def add(self, number: str, stored: Stored) -> None:
        """Store a response, or store it again after it has changed. One larger than the bound is not stored."""
        self.remove(number)
        size = len(msgspec.json.encode(stored))
        if size > self._max_bytes:
            return
        self._found[number] = stored, size
        self._bytes += size
        while len(self._found) > self._max_responses or self._bytes > self._max_bytes:
            self._bytes -= self._found.popitem(last=False)[1][1]

    def get(self, number: str) -> Stored | None:
        if (found := self._found.get(number)) is None:
            return None
        self._found.move_to_end(number)
        return found[0]

    def remove(self, number: str) -> None:
        if (found := self._found.pop(number, None)) is not None:
            self._bytes -= found[1]
