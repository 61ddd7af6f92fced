"""How a method is called by name: its permission and its arguments. The table of methods is in `methods.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..ipc.codec import MAX_BODY_BYTES, decode_value, encode_value
from ..ipc.errors import (
    InvalidArgumentError,
    InvalidRequestError,
    NotPermittedError,
    NotSupportedError,
)

MAX_ARGUMENT_BYTES = 64 << 10  # encoded arguments of one call; large arrays travel as tensors instead


class Caller(NamedTuple):
    """The frontend that calls a method."""

    frontend: int
    owner: bytes  # the namespace of its adapter numbers
    admin: bool  # whether it may call methods that change the engine for all frontends


class Method(NamedTuple):
    """One method that can be called by name."""

    function: Callable[..., Any]
    admin: bool = False  # the method changes the engine for all frontends, so the caller needs `Caller.admin`
    gets_caller: bool = False  # the first argument is the `Caller`
    gets_arrays: bool = False  # the next argument is the list of arrays that came with the call
    max_bytes: int = MAX_ARGUMENT_BYTES  # of the encoded arguments


def call_method(
    methods: Mapping[str, Method],
    caller: Caller,
    name: str,
    args: msgspec.Raw,
    arrays: Iterable[np.ndarray] = (),
) -> msgspec.Raw | Future[Any]:
    """Call a method by name. Returns the encoded result, or a future if steps have to run first.

    Raises:
        NotPermittedError: the method needs admin rights, and the caller has none.
        MainspringError: there is no such method, or the method raised this error.
    """
    method = methods.get(name)
    if method is None:
        raise NotSupportedError(f"the core has no method {name!r:.80}; it has {', '.join(sorted(methods))}")
    if method.admin and not caller.admin:
        raise NotPermittedError(
            f"{name} changes the engine for everyone: connect to the daemon's admin address, or have this "
            "client's key listed with `admin` among the allowed keys"
        )
    if len(args) > method.max_bytes:
        raise InvalidRequestError(f"{name} was called with {len(args)} bytes; the limit is {method.max_bytes}")
    given, arrays = decode_value(args, list), list(arrays)  # which may be read only now
    if method.gets_arrays:
        given = [arrays, *given]
    elif arrays:
        raise InvalidRequestError(f"{name} takes no arrays")
    if method.gets_caller:
        given = [caller, *given]
    try:
        inspect.signature(method.function).bind(*given)
    except TypeError as error:
        raise InvalidArgumentError(f"{name} was called wrongly: {error}") from None
    answer = method.function(*given)
    if isinstance(answer, Future) and not answer.done():
        return answer
    try:
        result = encode_value(answer.result() if isinstance(answer, Future) else answer)
        if (size := len(result)) > MAX_BODY_BYTES - 64:  # a client would not decode the message
            raise TypeError(f"it has {size} bytes; a message may have {MAX_BODY_BYTES}")
        return result
    except TypeError as error:
        raise InvalidRequestError(f"the result of {name} can't travel: {error}") from None
