"""The media items that requests name: their arrays, which a media worker brings, and what the encoder made of them.

Items are known by digest. A media worker asks which of them the core lacks (`offer`) and brings these (`put`), before
or after the requests that name them. Arrays are kept until the item is encoded, and after that as long as there is
room: if the weights change, the items of unfinished requests have to be encoded again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...ipc.errors import InvalidRequestError, RequestFailedError
from ...ipc.messages import MAX_MEDIA_ITEMS
from ..plan.request import Request

WAIT_S = 60.0  # seconds that a request waits for arrays, and that an offered item stays for a request to come
COUNTED_S = 0.5  # seconds of a step, at most, that count as waiting: no arrays can come while a step encodes others
ARRAY_BYTES = 4 << 30  # of arrays that are kept; more only for requests that have some of their arrays already
BYTES_OF_PIXEL = 32  # of an item's arrays at most; Qwen2-VL makes 24 of a pixel
MAX_NAME = 64  # characters of an array's name
MAX_DIMENSIONS = 8
ITEM_BYTES = 4 << 10  # that count for an item beside its arrays, because short texts are kept, too
DTYPES = frozenset("bool uint8 uint16 int32 int64 float16 float32".split())  # uint16: bfloat16


class StoredItem:
    """A media item."""

    __slots__ = tuple(
        (
            "array_bytes arrays awaited busy digest encoded holders lacked length modality names num_bytes number "
            "offers until users"
        ).split()
    )

    def __init__(self, digest: bytes, modality: str) -> None:
        self.digest, self.modality = digest, modality
        self.names: list[str] = []
        self.arrays: Sequence[np.ndarray] | None = None
        self.array_bytes = 0
        self.length = 1  # tokens
        self.users: dict[Request, None] = {}  # requests that name it and have not ended
        self.awaited: dict[Future[None], float] = {}  # of requests that wait for its arrays → seconds left
        self.offers, self.until = 0, 0.0  # requests that are expected to name it, until then
        self.number = 0  # for the worker; 0: the worker does not have it
        self.busy = False  # whether a step in flight encodes it
        self.encoded = False
        self.lacked = False  # whether memory was lacking when it was encoded last
        self.num_bytes = 0  # in the encoder's cache, taken or reserved
        self.holders = 0  # users that hold it in that cache

    @property
    def is_there(self) -> bool:
        return self.encoded or self.arrays is not None

    @property
    def is_expected(self) -> bool:
        """Whether a request that names it may come: it was offered, and found to be there."""
        return self.offers > 0 and time.monotonic() < self.until

    @property
    def may_be_evicted(self) -> bool:
        """Whether the encoder's cache may drop it: nobody holds it, and it can be encoded again for those that name
        it."""
        return self.encoded and not self.holders and (self.arrays is not None or not (self.users or self.is_expected))


class _Put(NamedTuple):
    """Arrays that have come, and wait for room. Several workers may bring the same, because each may die meanwhile."""

    item: StoredItem
    names: list[str]
    arrays: Sequence[np.ndarray]
    num_bytes: int
    done: Future[None]


class MediaStore:
    """Args:
    modalities: of the model.
    most_bytes: of the arrays of one item.
    """

    def __init__(self, modalities: Collection[str], most_bytes: int) -> None:
        self._modalities, self._most_bytes = modalities, most_bytes
        # by digest and modality; the one that was used last is the last
        self._items: OrderedDict[tuple[bytes, str], StoredItem] = OrderedDict()
        self._awaited: dict[StoredItem, None] = {}  # items whose arrays are awaited
        self._fed: set[Request] = set()  # those that got arrays since `look` was called last
        self._puts: list[_Put] = []
        self._array_bytes = 0
        self._looked = 0.0  # when `look` was called last

    def __iter__(self) -> Iterator[StoredItem]:
        return iter(list(self._items.values()))

    def of(self, request: Request) -> list[StoredItem]:
        """The items that a request names, each once."""
        return [self._items[name] for name in dict.fromkeys((one.digest, one.modality) for one in request.media)]

    # ------------------------------------------------------------------ requests

    def wait_for(self, digest: bytes, modality: str) -> Future[None] | None:
        """A future that is done when the arrays of an item are there; None: they are, or it is encoded."""
        item = self._items.setdefault((digest, modality), StoredItem(digest, modality))
        if item.is_there:
            return None
        done: Future[None] = Future()
        item.awaited[done], self._awaited[item] = WAIT_S, None
        return done

    def use(self, request: Request) -> None:
        for one in request.media:
            item = self._items.setdefault((one.digest, one.modality), StoredItem(one.digest, one.modality))
            item.offers -= request not in item.users  # negative: it comes before it is offered
            item.users[request] = None
            item.length = max(item.length, one.length)

    def leave(self, request: Request) -> None:
        """A request has ended."""
        for item in self.of(request):
            del item.users[request]
            item.offers = item.offers if item.users else max(0, item.offers)
            self._items.move_to_end((item.digest, item.modality))
            if not item.users and not item.is_there:
                _answer(item)
            self.clean(item)
        self.take_puts()

    def clean(self, item: StoredItem) -> None:
        """Forget an item of which nothing is left."""
        if not (item.is_there or item.users or item.number or item.awaited or self._is_coming(item)):
            self._items.pop((item.digest, item.modality), None)

    def drop_arrays(self, item: StoredItem) -> None:
        self._array_bytes -= item.array_bytes
        item.arrays, item.array_bytes = None, 0
        self.clean(item)

    def look(self) -> None:
        """End the waits that have lasted too long: `WAIT_S` in which no arrays came for requests of the same frontend.
        No time counts while arrays wait for room, because media workers then wait, too. It does count for a request
        that has some of its arrays: others wait for the room that it takes, and its own arrays always get room."""
        self.take_puts()
        now = time.monotonic()
        waited, self._looked = min(now - self._looked, COUNTED_S), now
        frontends, holders = {user.frontend for user in self._fed}, set[Request]()
        if self._puts:
            holders.update(user for item in self._items.values() if item.arrays is not None for user in item.users)
        for item in list(self._awaited):
            if holders.isdisjoint(item.users):
                fed = bool(self._puts) or any(user.frontend in frontends for user in item.users)
            else:
                fed = not self._fed.isdisjoint(item.users)
            for done in list(item.awaited):
                item.awaited[done] = WAIT_S if fed else item.awaited[done] - waited
                if item.awaited[done] <= 0:
                    del item.awaited[done]
                    why = f"its media have not come within {WAIT_S:.0f} s: send them again"
                    done.set_exception(RequestFailedError(f"the request can't begin, because {why}"))
            if not item.awaited:
                del self._awaited[item]
            self.clean(item)
        self._fed.clear()

    # ------------------------------------------------------------------ media workers

    def offer(self, digests: Any) -> list[bytes]:
        """Which of the items the core lacks. The others stay until a request has named each, for `WAIT_S` at least.

        Raises:
            InvalidRequestError: these are no digests.
        """
        if not isinstance(digests, list) or len(digests) > MAX_MEDIA_ITEMS:
            raise InvalidRequestError(f"offer_media takes a list of at most {MAX_MEDIA_ITEMS} digests")
        self.take_puts()
        lacking = []
        for digest in digests:
            _checked_digest(digest)
            named = [self._items.get((digest, modality)) for modality in self._modalities]
            there = [item for item in named if item is not None and item.is_there]
            lacking += [] if there else [digest]
            for item in there:
                item.offers, item.until = item.offers + 1, time.monotonic() + WAIT_S
        return lacking

    def put(
        self, arrays: Sequence[np.ndarray], digest: Any, modality: Any, names: Any, shapes: Any = None
    ) -> Future[None]:
        """Take the arrays of an item. The future is done when there is room for them. An array of `shapes` has come in
        parts, which are flat and in order, and have the same name.

        Raises:
            InvalidRequestError: they can't be those of an item.
        """
        _checked_digest(digest)
        if modality not in self._modalities:
            raise InvalidRequestError(f"the modality is {modality!r:.80}; this model takes {self._takes}")
        done: Future[None] = Future()
        known = self._items.get((digest, modality))
        if known is not None and known.is_there:
            known.offers, known.until = known.offers + 1, time.monotonic() + WAIT_S
            done.set_result(None)
            return done
        names, arrays = _joined(names, arrays, shapes or {})
        size = ITEM_BYTES + _checked_arrays(names, arrays, self._most_bytes)
        item = self._items.setdefault((digest, modality), StoredItem(digest, modality))
        item.offers, item.until = item.offers + 1, time.monotonic() + WAIT_S
        self._puts.append(_Put(item, names, arrays, size, done))
        self.take_puts()
        return done

    @property
    def _takes(self) -> str:
        return ", ".join(self._modalities)

    def _is_coming(self, item: StoredItem) -> bool:
        return any(put.item is item for put in self._puts)

    def take_puts(self) -> None:
        """Keep arrays that have come, as far as there is room."""
        for put in list(self._puts):
            item = put.item
            if put.done.cancelled():  # the media worker has left
                self._puts.remove(put)
                self.clean(item)
            elif item.is_there or self._make_room(put):
                self._puts.remove(put)
                if not item.is_there:
                    self._array_bytes += put.num_bytes
                    item.names, item.arrays, item.array_bytes = put.names, put.arrays, put.num_bytes
                    self._fed.update(item.users)
                    _answer(item)
                put.done.set_result(None)

    def _make_room(self, put: _Put) -> bool:
        """Whether arrays of an item may be kept now. Those of encoded items are dropped for them, and those that no
        request has come for."""
        for other in list(self._items.values()):
            if not self._array_bytes or self._array_bytes + put.num_bytes <= ARRAY_BYTES:
                return True
            if other.arrays is None or other.busy:
                continue
            if (other.encoded and len(other.users) == other.holders) or not (other.users or other.is_expected):
                self.drop_arrays(other)
        # A request that has some of its arrays gets all: else several such requests might wait for each other.
        return any(other.is_there for user in put.item.users for other in self.of(user))


def _answer(item: StoredItem) -> None:
    """Requests need not wait for an item any more."""
    awaited, item.awaited = item.awaited, {}
    for done in awaited:
        done.set_result(None)


def _checked_digest(digest: Any) -> bytes:
    if not isinstance(digest, bytes) or len(digest) != 16:
        raise InvalidRequestError(f"a media item's digest has 16 bytes; this is {digest!r:.80}")
    return digest


def _joined(names: Any, arrays: Sequence[np.ndarray], shapes: Any) -> tuple[list[str], list[np.ndarray]]:
    """The arrays, with the parts of each of `shapes` put together."""
    try:
        names, shapes = msgspec.convert((names, shapes), tuple[list[str], dict[str, list[int]]])
    except msgspec.ValidationError:
        raise InvalidRequestError("the names of an item's arrays are a list of strings, with shapes of some") from None
    whole = [(name, array) for name, array in zip(names, arrays, strict=False) if name not in shapes]
    for name, shape in shapes.items():
        parts = [array for one, array in zip(names, arrays, strict=False) if one == name]
        try:
            whole.append((name, np.concatenate(parts, dtype=parts[0].dtype, casting="no").reshape(shape)))
        except (IndexError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"the parts of {name!r:.80} are not those of {shape}: {error}") from None
    if len(names) != len(arrays):
        raise InvalidRequestError(f"an item has one array for each name; these are {len(arrays)} for {len(names)}")
    return [name for name, _ in whole], [array for _, array in whole]


def _checked_arrays(names: Sequence[str], arrays: Sequence[np.ndarray], most_bytes: int) -> int:
    """The size of an item's arrays, if these and their names may be what a processor made."""
    if not names or len(set(names)) != len(names):
        raise InvalidRequestError(f"an item has one array for each name; these are {len(arrays)} for {len(names)}")
    for name, array in zip(names, arrays, strict=True):
        if not name.isidentifier() or len(name) > MAX_NAME:
            raise InvalidRequestError(f"{name!r:.80} is no name of an array")
        if array.dtype.name not in DTYPES or array.ndim > MAX_DIMENSIONS:
            raise InvalidRequestError(f"{name} is {array.dtype} of {array.ndim} dimensions, which no processor makes")
        if array.dtype == bool and array.size and int(array.view(np.uint8).max()) > 1:
            raise InvalidRequestError(f"{name} has bytes that are no booleans")
    size = sum(array.nbytes for array in arrays)
    if size > most_bytes:
        raise InvalidRequestError(
            f"an item's arrays have {size} bytes; the limit is {most_bytes}: see max_media_pixels"
        )
    return size
