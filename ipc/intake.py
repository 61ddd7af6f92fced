"""How much of the frontends' messages a core decodes.

Decoding holds the interpreter's lock, so the main thread can't compute meanwhile. A body that is longer than the model
can accept is refused without decoding it, a list that is too long at its header. Between two steps of the core a
bounded number of bytes is decoded. Large bodies wait in a queue for each frontend, and the frontends take turns.

Receiving takes processor time from the computing threads. So libzmq closes the connection of a peer when it reads the
header of a frame that is longer than any frame of a request that the model can accept. A shorter body that is refused
costs its frontend so many turns that receiving such bodies takes well below a hundredth of the time of the steps.
"""

from __future__ import annotations

import re
import time
from collections import deque
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from .codec import Frame
from .messages import (
    KIND_OF,
    MAX_ABORTED,
    MAX_MEDIA_ITEMS,
    Abort,
    AddRequest,
    MediaItem,
    ModelFacts,
    Sampling,
    UtilityCall,
)
from .params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from .processor_names import MAX_EXTRA_ARGS_BYTES
from .structured import MAX_SPEC_BYTES
from .transport import MAX_MESSAGE_BYTES

SMALL_BODY_BYTES = 64 << 10  # body of a message for which there is no larger limit
ADMIN_BODY_BYTES = 16 << 20  # body of a utility call over a connection with `admin`
FIRST_FRAME_BYTES = 1 << 20  # frame of a frontend without `admin`, if it connects before the model's limits are known
LARGE_BYTES = 16 << 10  # a body above this waits for its frontend's turn
TURN_BYTES = 256 << 10  # of large bodies, and as many of small ones, decoded between two steps
REFUSED_FACTOR = 32  # a refused body delays its frontend's next large one like one of so many times its size
TURN_S = 0.1  # seconds after which a further turn begins although the step lasts longer
WAITING_BYTES = 2 << 20  # messages that wait; above this nothing is received
MESSAGE_BYTES = 1 << 10  # memory of a message that waits, beside its body; also what a small one counts at least
FIRST_BYTES = 16  # from the start of a body, which hold its first integer
_INTEGER_BYTES, _FLOAT_BYTES = 9, 9  # the longest encodings in msgpack
_ITEM_BYTES = 64  # of a media item
_LARGEST_FLOAT = 4  # bytes of an element of prompt embeddings
_ADD_REQUEST, _ABORT, _UTILITY_CALL = KIND_OF[AddRequest], KIND_OF[Abort], KIND_OF[UtilityCall]
# The whole text is matched, because msgspec quotes what a peer sent in other errors.
_TOO_LONG = re.compile(
    r"AddRequest does not decode: Expected `\w+` of length <= \d+ - at `\$\[(\d+)\](?:\[(\d+)\])?[^`]*`"
)
_Item = TypeVar("_Item")


class BodyLimits:
    """The largest bodies that the core of this model decodes.

    Attributes:
        frame_bytes: the largest frame of a request; of any frontend without `admin`.
    """

    def __init__(self, model: ModelFacts) -> None:
        longest, vocabulary = model.max_model_len, model.vocab_size
        self._request_bytes = (
            _INTEGER_BYTES * (longest + 2 * vocabulary + MAX_BAD_WORD_TOKENS)  # prompt, output, sampling
            + (_INTEGER_BYTES + _FLOAT_BYTES) * vocabulary  # logit_bias
            + MAX_SPEC_BYTES
            + MAX_EXTRA_ARGS_BYTES
            + (_ITEM_BYTES * MAX_MEDIA_ITEMS if model.media else 0)
            + SMALL_BODY_BYTES
        )
        embeds_bytes = _LARGEST_FLOAT * longest * model.hidden_size
        self.frame_bytes = min(MAX_MESSAGE_BYTES, max(FIRST_FRAME_BYTES, self._request_bytes, embeds_bytes))
        ids, tokens = _at_most(list[int], longest), _at_most(list[int], vocabulary)
        sampling = _narrowed(
            Sampling,
            stop_token_ids=tokens,
            allowed_token_ids=tokens,
            logit_bias=_at_most(dict[int, float], vocabulary),
            bad_words=_at_most(list[_at_most(list[int], longest)], MAX_BAD_WORDS),  # type: ignore[misc]
            grammar=_at_most(list[str], 2),
            extra_args=_at_most(bytes, MAX_EXTRA_ARGS_BYTES),
        )
        two = _at_most(list[int], 2)
        request = _narrowed(
            AddRequest,
            prompt_token_ids=ids,
            output_token_ids=ids,
            sampling=sampling,
            moved_from=two,
            media=_at_most(list[MediaItem], MAX_MEDIA_ITEMS),
        )
        self._request_decoder = msgspec.msgpack.Decoder(request)

    def of(self, kind: int, admin: bool) -> int:
        """The limit in bytes for a message of a connected frontend."""
        if kind == _ADD_REQUEST:
            return self._request_bytes
        if kind == _ABORT:
            return _INTEGER_BYTES * MAX_ABORTED + 16
        return ADMIN_BODY_BYTES if kind == _UTILITY_CALL and admin else SMALL_BODY_BYTES

    def decoder(self, kind: int, size: int) -> msgspec.msgpack.Decoder[Any] | None:
        """The decoder for a large request, which refuses lists that are too long; None: the usual one."""
        return self._request_decoder if kind == _ADD_REQUEST and size > LARGE_BYTES else None


def _at_most(kind: Any, length: int) -> Any:
    return Annotated[kind, msgspec.Meta(max_length=length)]


def _narrowed(struct: type[msgspec.Struct], **types: Any) -> type[msgspec.Struct]:
    """A struct with these types for some of its fields."""
    make: Any = msgspec.field  # its stub does not allow both arguments
    fields = [
        (one.name, types.get(one.name, one.type), make(default=one.default, default_factory=one.default_factory))
        for one in msgspec.structs.fields(struct)
    ]
    return msgspec.defstruct(struct.__name__, fields, bases=(struct,), array_like=True, frozen=True)


def first_integer(body: Frame) -> int | None:
    """The first field of a body that is not decoded: the handle of a request, the `call_id` of a call. None if it is
    no such number."""
    if len(body) < FIRST_BYTES:
        return None
    at = {0xDC: 3, 0xDD: 5}.get(body[0], 1)  # bytes of the header of the array
    size = 1 + (1 << (body[at] & 3)) if 0xCC <= body[at] <= 0xD3 else 1
    try:
        found = msgspec.msgpack.decode(body[at : at + size], type=int)
    except msgspec.DecodeError:
        return None
    return found if 0 <= found < 2**63 else None


def name_of_list(error: str) -> str | None:
    """The field of a request whose list is too long, by msgspec's error; None if it is another error."""
    found = _TOO_LONG.fullmatch(error)
    if found is None:
        return None
    first, second = found.groups()
    name = AddRequest.__struct_fields__[int(first)]
    return Sampling.__struct_fields__[int(second)] if name == "sampling" and second else name


class Turns(Generic[_Item]):
    """What may be decoded between two steps. The main thread calls `begin`, the I/O thread all others.

    Attributes:
        idle: the main thread waits for messages, so that decoding delays no step.
    """

    def __init__(self) -> None:
        self.idle = True
        self._begun = self._seen = 0
        self._until = 0.0
        self._small = self._large = TURN_BYTES  # bytes that may still be decoded; negative after a larger body
        self._waiting: dict[Any, deque[tuple[int, int, _Item]]] = {}  # by frontend, in the order of their turns
        self._waiting_bytes = 0
        self._debts: dict[Any, int] = {}  # by frontend that had more than a turn: bytes until it gets the next one

    def begin(self, idle: bool) -> None:
        self.idle = idle
        self._begun += 1

    def renew(self) -> None:
        """Allow the bytes of another turn, if one has begun."""
        now = time.monotonic()
        if self.idle or self._begun != self._seen or now >= self._until:
            self._seen, self._until = self._begun, now + TURN_S
            self._small = TURN_BYTES
            self._large = TURN_BYTES if self.idle else min(TURN_BYTES, self._large + TURN_BYTES)
            debts = {} if self.idle else self._debts
            self._debts = {one: debt - TURN_BYTES for one, debt in debts.items() if debt > TURN_BYTES}

    @property
    def may_receive(self) -> bool:
        return self._small > 0 and self._waiting_bytes < WAITING_BYTES

    @property
    def next_turn(self) -> float | None:
        """When to call `renew` although the main thread has begun no turn."""
        return self._until if self._waiting or self._small <= 0 else None

    def spend(self, size: int) -> None:
        self._small -= max(size, MESSAGE_BYTES)  # the main thread works on each

    def must_wait(self, frontend: Any, size: int) -> bool:
        """Whether a body has to wait. A frontend's messages stay in order."""
        return size > LARGE_BYTES or frontend in self._waiting

    def put(self, frontend: Any, size: int, kept: int, item: _Item) -> None:
        """Let a message wait. size: bytes of its body; kept: bytes of all its frames that are kept in memory."""
        kept += MESSAGE_BYTES
        self._waiting.setdefault(frontend, deque()).append((size, kept, item))
        self._waiting_bytes += kept

    def take(self) -> tuple[Any, int, _Item] | None:
        """The next message that has waited and may be decoded now: its frontend, its size and the message. A frontend
        that has had more than a turn is passed over, unless what waits keeps others from being received."""
        frontend = next((one for one in self._waiting if one not in self._debts), None)
        if frontend is None and self._waiting_bytes >= WAITING_BYTES:
            frontend = next(iter(self._waiting))
        if self._large <= 0 or frontend is None:
            return None
        queue = self._waiting.pop(frontend)
        size, kept, item = queue.popleft()
        if queue:
            self._waiting[frontend] = queue
        if size > TURN_BYTES:
            self._debts[frontend] = size - TURN_BYTES
        self._waiting_bytes -= kept
        return frontend, size, item

    def spend_large(self, size: int) -> None:
        self._large -= size

    def charge(self, frontend: Any, size: int) -> None:
        """Let the next body of a frontend wait, because one of more than a turn was refused."""
        if size > TURN_BYTES:
            self._debts[frontend] = REFUSED_FACTOR * size

    def forget(self, frontend: Any) -> None:
        self._waiting_bytes -= sum(kept for _, kept, _ in self._waiting.pop(frontend, ()))
        self._debts.pop(frontend, None)
