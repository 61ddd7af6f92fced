"""Which LoRA adapters are in memory, and which of them running requests have: a fixed number of places."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from ..plan.feature import Feature
from ..plan.request import Request

PATIENCE_STEPS = 64  # that who waits for a place is passed by requests of adapters that have one
REMEMBERED = 1024  # numbers of adapters that left the worker's memory


class LoRAs(Feature):
    """Adapters by content; the least recently used of those that nobody runs with gives way to another.

    A request runs only while its adapter has one of `places`. One that waits for a place is passed by others, but not
    for ever: after `PATIENCE_STEPS` adapters that have a place get no more requests, until one is free.

    Args:
        kept: most adapters in memory, at least `places`.
        is_pinned: whether the adapter of this digest is to stay.
        missing: told of a request whose adapter is not in memory, when there is a place for it.
        unload: told the worker's number of an adapter that is to leave its memory.
    """

    def __init__(
        self,
        places: int,
        kept: int,
        is_pinned: Callable[[bytes], bool],
        missing: Callable[[Request], None],
        unload: Callable[[int], None],
    ) -> None:
        self._kept, self._is_pinned, self._missing, self._unload = kept, is_pinned, missing, unload
        self._loaded: OrderedDict[bytes, int] = OrderedDict()  # the worker's number of each
        self._left: dict[int, None] = {}  # the latest numbers that the worker has unloaded: several may wait for one
        self._free = list(range(places, 0, -1))
        self._running: dict[bytes, tuple[int, int]] = {}  # place, and how many requests run
        self._names: Counter[str] = Counter()  # of these requests
        self.live: Counter[str] = Counter()  # requests in flight, by their adapter's name
        self._first: tuple[Request, int] | None = None  # who waits for a place, and since which step

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._loaded

    def stats(self) -> dict[str, Any]:
        running = self._names
        waiting = sorted(name for name, count in self.live.items() if count > running[name])
        return {"running_loras": sorted(running), "waiting_loras": waiting}

    def put(self, digest: bytes, number: int) -> bool:
        """Keep an adapter that the worker has loaded under `number`, unless it is kept already. False: there is no
        room, or it had to leave again before this was called."""
        if number in self._left:
            return digest in self._loaded
        if self._loaded.get(digest, number) != number or (digest not in self._loaded and not self._make_room()):
            self._leave(number)
        else:
            self._loaded[digest] = number
        if digest not in self._loaded:
            return False
        self._loaded.move_to_end(digest)
        return True

    def _leave(self, number: int) -> None:
        self._left[number] = None
        if len(self._left) > REMEMBERED:
            self._left.pop(next(iter(self._left)))
        self._unload(number)

    def drop(self, digest: bytes) -> None:
        """Forget an adapter, unless somebody runs with it."""
        if digest not in self._running and digest in self._loaded:
            self._leave(self._loaded.pop(digest))

    def _victim(self) -> bytes | None:
        return next((one for one in self._loaded if one not in self._running and not self._is_pinned(one)), None)

    def _make_room(self) -> bool:
        if len(self._loaded) >= self._kept:
            victim = self._victim()
            if victim is None:
                return False
            self._leave(self._loaded.pop(victim))
        return True

    def added(self, request: Request) -> None:
        if request.lora_name:
            self.live[request.lora_name] += 1

    def ended(self, request: Request) -> None:
        if request.lora_name:
            self.live -= Counter([request.lora_name])

    def may_run(self, request: Request, step: int, fetch: bool) -> bool:
        if request.lora is None:
            return True
        digest = request.lora.digest
        if self._first is not None:
            first, since = self._first
            if first.finished or first.lora is None or first.lora.digest in self._running:
                self._first = None
            elif digest in self._running:
                return step - since < PATIENCE_STEPS
        if digest in self._running or (self._free and digest in self._loaded):
            return True
        if self._free and (len(self._loaded) < self._kept or self._victim() is not None):
            if fetch and digest not in self._loaded:
                self._missing(request)
        elif self._first is None:
            self._first = request, step
        return False

    def seated(self, request: Request) -> None:
        if request.lora is None:
            return
        digest = request.lora.digest
        if digest not in self._running:
            self._running[digest] = self._free.pop(), 0
            self._first = None  # whoever waits now began to wait for the next one
        place, count = self._running[digest]
        self._running[digest] = place, count + 1
        self._names[request.lora.adapter.name] += 1
        self._loaded.move_to_end(digest)
        request.lora_place, request.lora_number = place, self._loaded[digest]

    def unseated(self, request: Request) -> None:
        if request.lora is None:
            return
        digest = request.lora.digest
        place, count = self._running[digest]
        self._running[digest] = place, count - 1
        self._names -= Counter([request.lora.adapter.name])
        if count == 1:
            del self._running[digest]
            self._free.append(place)
