"""Encodes messages to frames, and decodes frames to messages.

Frame 0 is a fixed header, frame 1 the msgpack body, and each further frame one array, sent and received without a copy.
Decoding is typed: any bytes that do not fit the message's type are a `ProtocolError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from .errors import InvalidRequestError, ProtocolError
from .messages import KIND_OF, KINDS, PROTOCOL_VERSION, Tensor

if TYPE_CHECKING:
    import numpy as np

MAX_BODY_BYTES = 256 << 20
MAX_FRAMES = 16
MAX_DIMENSIONS = 32  # of a tensor
Frame = bytes | bytearray | memoryview

_HEADER = struct.Struct(">2sBB8sI")  # magic, protocol version, kind, instance id, epoch
HEADER_BYTES = _HEADER.size
_MAGIC = b"ms"
NO_INSTANCE = b"\0" * 8

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in KINDS.items()}


class Array(NamedTuple):
    """An array to send."""

    values: np.ndarray  # uint16 for bfloat16
    dtype: str  # as in `Tensor`


class Header(NamedTuple):
    """The fields of a message's first frame."""

    kind: int
    instance_id: bytes
    epoch: int


class Envelope(NamedTuple):
    """A decoded message, with the fields of its header."""

    instance_id: bytes
    epoch: int
    message: Any
    tensors: Sequence[Frame]


def encode(message: Any, instance_id: bytes, epoch: int, tensors: Sequence[np.ndarray] = ()) -> list[Any]:
    """Frames for a multipart send. Arrays are passed on as they are and must stay unchanged until sent."""
    header = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, KIND_OF[type(message)], instance_id, epoch)
    frames: list[Any] = [header, _encoder.encode(message)]
    if tensors:
        import numpy as np

        frames += [np.ascontiguousarray(tensor).data for tensor in tensors]
    return frames


def decode(frames: Sequence[Frame]) -> Envelope:
    """Raises `ProtocolError`, and nothing else, for anything that is not a message of this protocol version."""
    header = read_header(frames)
    if len(frames[1]) > MAX_BODY_BYTES:
        raise ProtocolError(f"a body of {len(frames[1])} bytes; the limit is {MAX_BODY_BYTES}")
    message = read_body(header.kind, frames[1])
    return Envelope(header.instance_id, header.epoch, message, frames[2:])


def read_header(frames: Sequence[Frame]) -> Header:
    """The header of a message that is not decoded yet. Raises `ProtocolError`."""
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"a message has 2 to {MAX_FRAMES} frames, this one {len(frames)}")
    header = frames[0]
    if len(header) != _HEADER.size:
        raise ProtocolError(f"a header has {_HEADER.size} bytes, this one {len(header)}")
    magic, version, kind, instance_id, epoch = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError("not a Mainspring frame")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {version} is not spoken here, only {PROTOCOL_VERSION}")
    if kind not in KINDS:
        raise ProtocolError(f"unknown message kind {kind}")
    return Header(kind, instance_id, epoch)


def kind_of(header: Frame) -> int:
    """The kind of message that a header of `HEADER_BYTES` names."""
    kind: int = header[3]
    return kind


def read_body(kind: int, body: Frame, decoder: msgspec.msgpack.Decoder[Any] | None = None) -> Any:
    """Decode a message. decoder: one with narrower limits. Raises `ProtocolError`."""
    try:
        return (decoder or _decoders[kind]).decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{KINDS[kind].__name__} does not decode: {error}") from None


def read_tensor(tensor: Tensor, frames: Sequence[Frame]) -> np.ndarray:
    """The array that a message refers to, as a read-only view of its frame. bfloat16 is returned as uint16."""
    import numpy as np

    if not 0 <= tensor.frame < len(frames):
        raise ProtocolError(f"tensor frame {tensor.frame} of {len(frames)}")
    names = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int32": "<i4", "int64": "<i8"}
    names |= {"uint8": "|u1", "bool": "|b1"}
    if tensor.dtype not in names:
        raise ProtocolError(f"tensor dtype {tensor.dtype!r} is not one of {', '.join(names)}")
    if len(tensor.shape) > MAX_DIMENSIONS:  # the product below is quadratic in their number
        raise ProtocolError(f"tensor of {len(tensor.shape)} dimensions, more than {MAX_DIMENSIONS}")
    if any(n < 0 for n in tensor.shape):
        raise ProtocolError(f"tensor shape {tensor.shape} is negative")
    flat = np.frombuffer(memoryview(frames[tensor.frame]).toreadonly(), dtype=np.uint8)
    dtype = np.dtype(names[tensor.dtype])
    size = dtype.itemsize
    for n in tensor.shape:
        size *= n
    if size != flat.size:
        raise ProtocolError(f"tensor of shape {tensor.shape} {tensor.dtype} came with {flat.size} bytes, not {size}")
    try:
        return flat.view(dtype).reshape(tensor.shape)
    except ValueError as error:  # more dimensions than numpy has, or one beyond its range beside a zero
        raise ProtocolError(f"tensor of {len(tensor.shape)} dimensions does not read: {error}") from None


def encode_value(value: Any) -> msgspec.Raw:
    """Encode the arguments or the result of a utility call: plain msgpack types or wire structs."""
    return msgspec.Raw(_encoder.encode(value))


def encode_arguments(owner: str, values: Any) -> msgspec.Raw:
    """Encode arguments that a user gave. owner: the method that gets them, for the error message.

    Raises:
        InvalidRequestError: the arguments can't be encoded.
    """
    try:
        return encode_value(values)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(
            f"the arguments of {owner} hold what can't go to another process: {error!s:.200}"
        ) from None


def decode_value(raw: msgspec.Raw, kind: Any = Any) -> Any:
    """Raises `ProtocolError` where `raw` is not a `kind`."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"value does not decode: {error}") from None
