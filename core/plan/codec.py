"""Plans, results and control records to bytes and back: for a pipe to another process, or a file.

msgpack; an array is an extension of its dtype, its shape and its bytes. Bytes come from a process of the same core, so
they are trusted, but decoded by type all the same.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np

from ...ipc.errors import NotSupportedError
from .step import StepPlan

_ARRAY = 1  # the code of the extension
_DTYPES = [np.dtype(name) for name in ("bool", "u1", "<u2", "<i4", "<i8", "<u8", "<f2", "<f4", "<f8")]
_NUMBER_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}


def encode(message: Any) -> bytes:
    """The bytes of a plan, a result, a control record or facts.

    Raises:
        NotSupportedError: a plan names functions of the user, which are in this process alone.
    """
    if isinstance(message, StepPlan) and any(sequence.functions for sequence in message.admitted):
        raise NotSupportedError("logits_processors are functions of this process: no worker elsewhere can call them")
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview, kind: Any) -> Any:
    """The message of type `kind` that `encode` wrote to `data`. Its arrays are views of `data`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_to_array)
    return decoder.decode(data)


def _from_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is no part of a step plan")
    head = struct.pack(f"<BB{value.ndim}q", _NUMBER_OF[value.dtype], value.ndim, *value.shape)
    return msgspec.msgpack.Ext(_ARRAY, head + value.tobytes())


def _to_array(kind: Any, value: Any) -> Any:
    if kind is not np.ndarray or not isinstance(value, msgspec.msgpack.Ext) or value.code != _ARRAY:
        raise TypeError(f"{kind} can't be decoded")
    data = memoryview(value.data)
    number, ndim = struct.unpack_from("<BB", data)
    shape = struct.unpack_from(f"<{ndim}q", data, 2)
    return np.frombuffer(data[2 + 8 * ndim :], _DTYPES[number]).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_from_array)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
