"""The LoRA adapters in memory, and the adapter slots ("places") of those that running requests use."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any

from ..plan.feature import Feature
from ..plan.request import Request

PATIENCE_STEPS = 64  # steps for which requests with a loaded adapter may overtake one that waits for an adapter slot
MOST_NAMES = 64  # names in each list of the statistics, which go into every message to every frontend
REMEMBERED = 1024  # unloaded adapter numbers to remember, because a late `put` may still name one of them


class LoRAs(Feature):
    """LoRA adapters by digest. If memory is full, the least recently used adapter without a running request is evicted.

    A request runs only while its adapter occupies one of the `places`. Requests of adapters with a place may overtake a
    request that waits for one, for `PATIENCE_STEPS` steps. After that they wait, too, until a place is free.

    Args:
        places: most adapters in one step.
        kept: most adapters in memory, at least `places`.
        pinned: returns the digests of the adapters that must not be evicted.
        missing: called with a request for which a place is free, but whose adapter is not in memory.
        unload: called with the worker's number of an evicted adapter.
    """

    def __init__(
        self,
        places: int,
        kept: int,
        pinned: Callable[[], Collection[bytes]],
        missing: Callable[[Request], None],
        unload: Callable[[int], None],
    ) -> None:
        self._kept, self._pinned, self._missing, self._unload = kept, pinned, missing, unload
        self.has_credit: Callable[[Request], bool] = lambda request: True  # whether its frontend has
        self._loaded: OrderedDict[bytes, int] = OrderedDict()  # the worker's number of each
        self._left: dict[int, None] = {}  # the latest unloaded numbers, oldest first (an ordered set)
        self._free = list(range(places, 0, -1))
        self._running: dict[bytes, tuple[int, int]] = {}  # digest → place and number of running requests
        self._names: Counter[str] = Counter()  # running requests by adapter name
        self.live: Counter[str] = Counter()  # running and waiting requests by adapter name
        self._first: tuple[Request, int] | None = None  # the request that waits for a place longest, and since when

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._loaded

    def stats(self) -> dict[str, Any]:
        waiting = (name for name, count in self.live.items() if count > self._names[name])
        named = {"running_loras": self._names, "waiting_loras": waiting}
        return {field: sorted(islice(names, MOST_NAMES)) for field, names in named.items()}

    def put(self, digest: bytes, number: int) -> bool:
        """Register an adapter that the worker has loaded under `number`. If the adapter is in memory already, the new
        copy is unloaded. Returns False if there is no room, or if `number` was evicted before this call."""
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
        """Unload an adapter, unless a running request uses it."""
        if digest not in self._running and digest in self._loaded:
            self._leave(self._loaded.pop(digest))

    def _victim(self) -> bytes | None:
        pinned = self._pinned()
        return next((one for one in self._loaded if one not in self._running and one not in pinned), None)

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
        if name := request.lora_name:
            self.live[name] -= 1
            if not self.live[name]:
                del self.live[name]

    def may_run(self, request: Request, step: int, fetch: bool) -> bool:
        if request.lora is None:
            return True
        digest = request.lora.digest
        if self._first is not None:
            first, since = self._first
            if first.finished or first.lora is None or first.lora.digest in self._running or not self.has_credit(first):
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

    def got_slot(self, request: Request) -> None:
        if request.lora is None:
            return
        digest = request.lora.digest
        if digest not in self._running:
            self._running[digest] = self._free.pop(), 0
            self._first = None  # requests that still wait now wait for another place: restart the count
        place, count = self._running[digest]
        self._running[digest] = place, count + 1
        self._names[request.lora.adapter.name] += 1
        self._loaded.move_to_end(digest)
        request.lora_place, request.lora_number = place, self._loaded[digest]

    def left_slot(self, request: Request) -> None:
        if request.lora is None:
            return
        digest = request.lora.digest
        place, count = self._running[digest]
        self._running[digest] = place, count - 1
        self._names -= Counter([request.lora.adapter.name])
        if count == 1:
            del self._running[digest]
            self._free.append(place)
