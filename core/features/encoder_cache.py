"""Media in prompts: which items are encoded in a step, and how long what the encoder made of them is kept.

A request waits in its frontend's queue. When it could have a slot, its items are encoded, with a budget of tokens for
each step beside that of the language model; then it gets the slot. From the first of its items on it holds what the
encoder made until it ends. What nobody holds stays while there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ...ipc.config import MultiModalConfig
from ...ipc.errors import (
    InvalidRequestError,
    NotSupportedError,
    OutOfMemoryError,
    OverloadedError,
    RequestFailedError,
    wire_name,
)
from ...ipc.messages import MediaItem
from ..plan.control import Control, DropMedia, KeepMedia, MediaFacts
from ..plan.feature import Feature
from ..plan.request import Request
from ..plan.step import SequenceMedia, StepPlan, StepResult
from .media_store import BYTES_OF_PIXEL, MediaStore, StoredItem

Wait = tuple[Future[None], Callable[[Any], None]]  # as in adapters.py
OUT_OF_MEMORY = OutOfMemoryError.__name__
MEASURED_TOKENS = 32  # only an item of so many tokens shows what a token takes: in a shorter one the grids take more
MOST_FACTOR = 8  # a token counts at most so many times what the worker told, because a client may claim any length
PATIENCE_STEPS = 64  # for which others may take room in the encoder's cache before a request that waits for more of it
AFTER_CHANGE = (
    "the weights have changed, and its media would have to be encoded again, but they are not kept: send it again"
)


class EncoderCache(Feature):
    """Args:
    config: limits.
    budget: tokens of a step, at most; of the items encoded in a step as well, unless it is one.
    suspects: keys of requests that may have killed a core. What they name is encoded in a step of its own.
    control: `Worker.control`.
    """

    def __init__(
        self,
        facts: MediaFacts,
        config: MultiModalConfig,
        budget: int,
        suspects: Mapping[int, int],
        control: Callable[[Control], Any],
    ) -> None:
        self.items = MediaStore(facts.modalities, BYTES_OF_PIXEL * config.max_media_pixels)
        self.fail: Callable[[Request, str, str], None] = lambda request, error, text: None
        self.give_way: Callable[[Request], bool] = lambda request: False  # without credit: leave the slot
        self.has_credit: Callable[[Request], bool] = lambda request: True  # whether its frontend has
        self.due: list[StoredItem] = []  # to encode in the step that is being made
        self._facts, self._budget, self._suspects, self._control = facts, budget, suspects, control
        self._row_bytes = facts.row_bytes  # or what the items so far have taken, if that is more
        self._most_bytes = int(config.mm_encoder_cache_gb * (1 << 30))
        self._num_bytes = 0  # taken or reserved in the encoder's cache
        self._held: dict[Request, list[StoredItem]] = {}
        self._numbers: dict[int, StoredItem] = {}
        self._last_number = 0
        self._alone: StoredItem | None = None  # to encode in a step of its own
        self._first: Request | None = None  # the request that waits for room longest
        self._since = self._asked = 0  # the step when it began to, and the one when it was last considered
        self._queries = self._hits = self._num_encoded = 0
        self._seconds = 0.0

    # ------------------------------------------------------------------ requests come and go

    def prepare(self, request: Request, media: Sequence[MediaItem]) -> list[Wait]:
        """Set the items of a request. Returns what it has to wait for.

        Raises:
            InvalidRequestError, NotSupportedError: the model can't compute such a request.
        """
        if not media and self._facts.spans != "every":
            return []
        request.use_media(media, self._facts.spans)
        if request.longest_span > self._budget:
            raise InvalidRequestError(
                f"{request.longest_span} tokens of the prompt have to be computed in one step, because tokens of it "
                f"see later ones; max_num_batched_tokens is {self._budget}: raise it, or send smaller media"
            )
        if request.spans and request.wants_scores:
            raise NotSupportedError("this model can't give prompt_logprobs of a prompt with media")
        named = dict.fromkeys((one.digest, one.modality) for one in media)
        waits = [self.items.wait_for(*name) for name in named]
        self._queries += len(named)
        return [(arrays, lambda _: None) for arrays in waits if arrays is not None]

    def added(self, request: Request) -> None:
        if request.media:
            self.items.use(request)
            self._hits += sum(item.encoded for item in self.items.of(request))

    def ended(self, request: Request) -> None:
        if request.media:
            self._let_go(request)
            self.items.leave(request)
            self._evict(0)

    def got_slot(self, request: Request) -> None:
        if request.media:
            number_of = {(item.digest, item.modality): item.number for item in self._held[request]}
            request.encoded = tuple(
                SequenceMedia(number_of[m.digest, m.modality], m.offset, m.length) for m in request.media
            )

    # ------------------------------------------------------------------ what is encoded

    def may_run(self, request: Request, step: int, fetch: bool) -> bool:
        if not request.media:
            return True
        items = self.items.of(request)
        missing = [item for item in items if not item.encoded]
        if request not in self._held:
            if self._waits_behind(request, step):
                return False
            if not missing or (fetch and self._make_room(items)):
                self._hold(request, items)
            elif fetch and self._first is None:
                self._first, self._since, self._asked = request, step, step
        for item in missing if fetch and request in self._held else ():
            self._want(item)
        return not missing

    def _waits_behind(self, request: Request, step: int) -> bool:
        """Whether a request leaves room to the one that waits longest. That one loses its turn if the scheduler has
        not considered it for 8 steps, or can't, because its frontend has no credit."""
        first = self._first
        if first is request:
            self._asked = step
        elif first is not None and (
            first.finished or first in self._held or step > self._asked + 8 or not self.has_credit(first)
        ):
            self._first = None
        return self._first not in (None, request) and step - self._since >= PATIENCE_STEPS

    def _want(self, item: StoredItem) -> None:
        """Let an item be encoded: in this step, or in a step of its own if a request that names it is suspected, or if
        memory was lacking."""
        if item.busy or item in self.due:
            return
        if item.lacked or self.is_suspect(item):
            self._alone = self.alone or item
        elif not self.due or self._length([*self.due, item]) <= self._budget:
            self.due.append(item)

    def _length(self, items: Sequence[StoredItem]) -> int:
        """Tokens that count against the budget of a step. An item that is alone in its prompt takes all of it."""
        whole = self._facts.encoder_input or self._facts.lone
        return sum(self._budget if whole else item.length for item in items)

    def is_suspect(self, item: StoredItem) -> bool:
        return any(request.key in self._suspects for request in item.users)

    @property
    def alone(self) -> StoredItem | None:
        """What is to be encoded in a step of its own."""
        if self._alone and (self._alone.busy or self._alone.encoded or not self._alone.holders):
            self._alone = None
        return self._alone

    def launch(self, items: Sequence[StoredItem]) -> np.ndarray:
        """A step with these items is launched: `StepPlan.encodes`."""
        self.due = []
        for item in items:
            item.busy = True
            if not item.number:
                assert item.arrays is not None, "an item is encoded without its arrays"
                self._last_number += 1
                item.number = self._last_number
                self._numbers[item.number] = item
                self._control(KeepMedia(item.number, item.modality, item.names, list(item.arrays)))
        return np.array([item.number for item in items], np.int32)

    def take_in(self, result: StepResult) -> None:
        """A step has encoded items. An error ends the requests that name the item. If memory was lacking, what nobody
        holds is dropped, and the item is encoded once more in a step of its own."""
        for one in result.encoded:
            if (item := self._numbers.get(one.number)) is None:
                continue  # it was dropped meanwhile
            item.busy = False
            if one.error == OUT_OF_MEMORY and not item.lacked:
                item.lacked = True
                self._drop(item, again=True)
                self._evict(self._most_bytes)
                continue
            if one.error:
                self._end(item, one.error, one.text)
                continue
            item.encoded, item.lacked = True, False
            if item.length >= MEASURED_TOKENS:
                taken = min(-(-one.num_bytes // item.length), MOST_FACTOR * self._facts.row_bytes)
                self._row_bytes = max(self._row_bytes, taken)
            self._num_bytes += one.num_bytes - item.num_bytes
            item.num_bytes = one.num_bytes
            self._num_encoded += 1
            self._seconds += one.seconds
        self.items.take_puts()

    def take_back(self, plan: StepPlan) -> None:
        """The device lacked memory for a step. What its result did not name is encoded later, and what nobody holds is
        dropped."""
        for number in plan.encodes.tolist():
            if number in self._numbers and self._numbers[number].busy:
                self._drop(self._numbers[number], again=True)
        self._evict(self._most_bytes)

    def _end(self, item: StoredItem, error: str, text: str) -> None:
        """An item can't be encoded."""
        self._drop(item)
        self.items.drop_arrays(item)
        for request in list(item.users):
            self.fail(request, error, text)

    # ------------------------------------------------------------------ the encoder's cache

    def _hold(self, request: Request, items: list[StoredItem]) -> None:
        self._held[request] = items
        for item in items:
            item.holders += 1
            self._reserve(item)

    def _reserve(self, item: StoredItem) -> None:
        if not item.num_bytes:
            item.num_bytes = item.length * self._row_bytes
            self._num_bytes += item.num_bytes

    def _let_go(self, request: Request) -> None:
        for item in self._held.pop(request, ()):
            item.holders -= 1
            if not (item.holders or item.busy or item.encoded):
                self._drop(item)

    def _make_room(self, items: Sequence[StoredItem]) -> bool:
        """Whether there is room for what the encoder makes of items, beside those that are encoded. If no request holds
        anything, there is room for one, however large its items are. Those of frontends that do not read their messages
        give way."""
        needed = sum(item.length * self._row_bytes for item in items if not item.num_bytes)
        if self._evict(needed, items) or self._is_idle:
            return True
        for request in list(self._held):
            if self.give_way(request):
                held = self._held[request]
                self._let_go(request)
                if any(item.arrays is None for item in held):
                    self.fail(
                        request, wire_name(OverloadedError()), "its media were dropped while nobody read its tokens"
                    )
                if self._evict(needed, items) or self._is_idle:
                    return True
        return False

    @property
    def _is_idle(self) -> bool:
        """Whether no request holds an item, and no step in flight encodes one."""
        return not (self._held or any(item.busy for item in self._numbers.values()))

    def _evict(self, needed: int, but: Sequence[StoredItem] = ()) -> bool:
        """Drop what nobody holds, the least recently used first, until so many bytes are free, and nothing of `but`."""
        most = self._most_bytes - needed
        for item in self.items if self._num_bytes > most else ():
            if self._num_bytes > most and item.may_be_evicted and item not in but:
                self._drop(item)
        return self._num_bytes <= most

    def _drop(self, item: StoredItem, again: bool = False) -> None:
        """Let the worker forget an item. again: its holders have it encoded once more, and keep the room for it."""
        self._num_bytes -= item.num_bytes
        item.num_bytes, item.encoded, item.busy = 0, False, False
        if item.number:
            del self._numbers[item.number]
            self._control(DropMedia(item.number))
            item.number = 0
        if again and item.holders:
            self._reserve(item)
        self.items.clean(item)

    def reset(self) -> None:
        """Forget all items that no request uses or is expected to use."""
        for item in self.items:
            if not (item.users or item.is_expected):
                self._drop(item)
                self.items.drop_arrays(item)

    def reset_encoded(self) -> None:
        """What was encoded is worthless: the weights change or sleep. No request that names items has a slot. Requests
        whose arrays are not kept any more end with an error."""
        for request in list(self._held):
            self._let_go(request)
        for item in self.items:
            self._drop(item)
            if item.arrays is None and not item.awaited:
                for request in list(item.users):
                    self.fail(request, wire_name(RequestFailedError()), AFTER_CHANGE)

    def stats(self) -> dict[str, Any]:
        return {
            "encoder_queries": self._queries,
            "encoder_hits": self._hits,
            "encoded_items": self._num_encoded,
            "encoder_seconds": self._seconds,
            "encoder_bytes": self._num_bytes,
        }
