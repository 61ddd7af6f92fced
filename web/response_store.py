"""Responses that the server remembers, in the memory of the worker that made them, up to a bound."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
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
    """The latest responses. Where there are too many, the tenant that has most gives up the one that it did not use for
    longest."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._found: defaultdict[str, OrderedDict[str, bytes]] = defaultdict(OrderedDict)  # of each tenant, as JSON
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._found.values()))

    def add(self, number: str, stored: Stored) -> None:
        """Store a response, or store it again after it has changed. One larger than the bound is not stored."""
        self.remove(stored.tenant, number)
        data = msgspec.json.encode(stored)
        if len(data) > self._max_bytes:
            return
        self._found[stored.tenant][number] = data
        self._bytes[stored.tenant] += len(data)
        while len(self) > self._max_responses or self._bytes.total() > self._max_bytes:
            most = max(self._found, key=self._share)
            self._bytes[most] -= len(self._found[most].popitem(last=False)[1])

    def _share(self, tenant: str) -> float:
        return max(self._bytes[tenant] / self._max_bytes, len(self._found[tenant]) / self._max_responses)

    def get(self, tenant: str, number: str) -> Stored | None:
        found = self._found[tenant]
        if number not in found:
            return None
        found.move_to_end(number)
        return msgspec.json.decode(found[number], type=Stored)

    def remove(self, tenant: str, number: str) -> None:
        self._bytes[tenant] -= len(self._found[tenant].pop(number, b""))
