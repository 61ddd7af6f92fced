"""What goes to the core by utility calls and is more than a few numbers: weights, and arguments of users' methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..ipc.errors import InvalidArgumentError, InvalidRequestError
from .prompts import read_array

if TYPE_CHECKING:
    from ..ipc.codec import Array  # brings numpy, which importing the package is not to

MAX_BYTES = 16 << 20  # of the arrays in one message, but for a single row that is larger
MAX_ARRAYS = 14  # in one message: two of its 16 frames are others


def weight_messages(weights: Iterable[tuple[str, Any]], version: str) -> Iterator[tuple[list[Any], list[Array]]]:
    """The arguments and arrays of each call of the core's method ``update_weights``.

    Raises:
        InvalidArgumentError: what is given is no stream of names and arrays.
    """
    parts: list[tuple[str, int, Array]] = []
    number = size = 0

    def message(last: bool) -> tuple[list[Any], list[Array]]:
        names, starts = [part[0] for part in parts], [part[1] for part in parts]
        return [version, number, names, starts, last], [part[2] for part in parts]

    for name, start, array in _parts(weights):
        if parts and (size + array.values.nbytes > MAX_BYTES or len(parts) == MAX_ARRAYS):
            yield message(last=False)
            parts, number, size = [], number + 1, 0
        parts.append((name, start, array))
        size += array.values.nbytes
    if not parts:
        raise InvalidArgumentError("weights is empty; it must give pairs of a parameter's name and its values")
    yield message(last=True)


def plain(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for a core in another process.

    Raises:
        InvalidRequestError: one can't travel.
    """
    from ..ipc.codec import encode_value

    found = list(args), dict(kwargs or {})
    try:
        encode_value(found)
    except TypeError as error:
        raise InvalidRequestError(f"args or kwargs hold what can't go to another process: {error}") from None
    return found


def _parts(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, int, Array]]:
    from ..ipc.codec import Array

    for pair in weights:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidArgumentError(f"weights gives {pair!r:.80}; it must give pairs of a name and an array")
        name, value = pair
        values, dtype = read_array(name, value)
        if not values.ndim or not len(values):
            yield name, 0, Array(values.copy(), dtype)  # whoever gives it may fill it anew
            continue
        rows = max(1, MAX_BYTES // max(1, values[:1].nbytes))
        for start in range(0, len(values), rows):
            yield name, start, Array(values[start : start + rows].copy(), dtype)
