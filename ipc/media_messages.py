"""What frontends and media workers exchange: a token, a message in msgpack, and a frame for each content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from .codec import Frame
from .config import EngineConfig, MultiModalConfig
from .errors import ProtocolError
from .messages import MAX_CORES, MAX_MEDIA_ITEMS, MediaItem
from .transport import MAX_MESSAGE_BYTES, Endpoints

VERSION = b"mm1"
MESSAGE_BYTES = 4 << 20  # of a frame, beside a content: a long prompt, data: URLs
DELIVERIES = 4  # of a worker to a core at once; a client asks for no more, or items leave the cache while they wait


class Content(msgspec.Struct, array_like=True, frozen=True):
    """An item of a prompt, see `MediaInput`."""

    modality: str
    url: str = ""  # empty: the content is in a frame
    dtype: str = ""  # of an array; empty: it is a file
    shape: list[int] = []
    facts: dict[str, Any] = {}


class Prepare(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """See `MediaClient.prepare`. Its frames are those of the contents that have no URL, in their order."""

    job: int
    prompt: str | list[int]
    contents: Annotated[list[Content], msgspec.Meta(max_length=MAX_MEDIA_ITEMS)]
    kwargs: dict[str, Any]
    add_special_tokens: bool


class Deliver(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Send the arrays of these items to a core, unless it has them."""

    job: int
    core: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CORES)]  # its number
    digests: list[bytes]


class ResetCache(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Forget all prepared items."""

    job: int


Order = Prepare | Deliver | ResetCache


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The answer to each of them."""

    job: int
    error: str = ""  # name of the error type, empty if it succeeded
    error_text: str = ""
    token_ids: list[int] = []
    media: list[MediaItem] = []
    lacks: list[bytes] = []  # items that the worker does not have any more: they have to be prepared again
    windows: list[float] = []  # see `PreparedPrompt`


class MediaLaunch(msgspec.Struct):
    """What a starting worker reads from its standard input, as msgpack."""

    config: EngineConfig
    endpoints: Endpoints  # of core 0
    parent_pid: int
    listen_fd: int  # a socket that listens already
    mark_fd: int  # a file for the digest of the content that is being prepared
    address: str  # where it listens
    refused: list[bytes] = []  # digests of contents of which workers died
    item_seconds: float = 60.0  # longest time that an item may take


def most_bytes(limits: MultiModalConfig) -> int:
    """Of a frame. A worker ends the connection over which a larger one comes."""
    content = max(limits.max_media_bytes * 4 // 3, 3 * limits.max_media_pixels)
    return min(MAX_MESSAGE_BYTES, content + MESSAGE_BYTES)


_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_answers = msgspec.msgpack.Decoder(Answer)


def encode_order(token: bytes, order: Order, contents: Sequence[Frame] = ()) -> list[Any]:
    return [VERSION, token, _encoder.encode(order), *contents]


def decode_order(frames: Sequence[Frame]) -> tuple[bytes, Order, Sequence[Frame]]:
    """The token, the message and the contents. Raises `ProtocolError` for anything else."""
    if not 3 <= len(frames) <= 3 + MAX_MEDIA_ITEMS or bytes(frames[0]) != VERSION:
        raise ProtocolError("not a message for a media worker")
    try:
        return bytes(frames[1]), _orders.decode(frames[2]), frames[3:]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a message for a media worker does not decode: {error}") from None


def encode_answer(answer: Answer) -> list[bytes]:
    return [VERSION, _encoder.encode(answer)]


def decode_answer(frames: Sequence[Frame]) -> Answer:
    if len(frames) != 2 or bytes(frames[0]) != VERSION:
        raise ProtocolError("not an answer of a media worker")
    try:
        return _answers.decode(frames[1])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"an answer of a media worker does not decode: {error}") from None
