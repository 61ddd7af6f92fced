"""Arguments of the utility calls that bring new weights, and of `collective_rpc`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...ipc.errors import InvalidArgumentError, shown, unknown_argument
from .prompts import read_array

if TYPE_CHECKING:
    from ...ipc.codec import Array  # imports numpy, which `import mainspring` must not

MAX_BYTES = 16 << 20  # of the arrays in one message; a single row may be larger
MAX_SECONDS = 1_000_000  # longest timeout of a call
MAX_ARRAYS = 14  # in one message: 16 frames without header and body
_METADATA = ("names", "dtype_names", "shapes")


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


def info_of(request: Any, field: str) -> Any:
    """The information in a request of vLLM's form: its attribute or key `field`, or the request itself if it is a dict.
    None if it has no such form."""
    return request.get(field, request) if isinstance(request, Mapping) else getattr(request, field, None)


def init_info(request: Any) -> dict[str, Any]:
    """The argument of the core's method ``init_weight_transfer_engine``.

    Raises:
        InvalidArgumentError: the request has no information.
    """
    info = info_of(request, "init_info")
    if not isinstance(info, Mapping):
        raise InvalidArgumentError(f"request is {shown(request)}; it must be a dict, or have one as init_info")
    return dict(info)


def update_info(info: Any) -> tuple[list[Any], Iterable[tuple[str, Any]] | None]:
    """Names, dtype names and shapes of the parameters of an update; and, if their values come along, pairs of name and
    array.

    Args:
        info: in vLLM's form, or a list with one for each worker, of which there is one.

    Raises:
        InvalidArgumentError: it has another form, or fields that are not known.
    """
    if isinstance(info, list | tuple) and len(info) == 1:
        (info,) = info
    if not isinstance(info, Mapping):
        raise InvalidArgumentError(f"update_info is {shown(info)}; it must be a dict")
    for name in info:
        if name not in (*_METADATA, "ipc_handles"):
            raise unknown_argument("update_info", name, (*_METADATA, "ipc_handles"))
    names, dtypes, shapes = (info.get(name) or [] for name in _METADATA)
    try:
        described = [list(names), list(dtypes), [list(shape) for shape in shapes]]
        arrays = None if info.get("ipc_handles") is None else list(info["ipc_handles"])
    except TypeError:
        raise InvalidArgumentError(f"update_info is {shown(info)}; its fields must be lists") from None
    if arrays is not None and len(arrays) != len(described[0]):
        raise InvalidArgumentError(f"update_info has {len(described[0])} names and {len(arrays)} ipc_handles")
    return described, None if arrays is None else zip(described[0], arrays, strict=True)


def plain_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, timeout: float | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for a method of the core's worker.

    Raises:
        InvalidArgumentError: they are no list and dict, or the timeout is no number.
    """
    if not isinstance(args, (list, tuple)):
        raise InvalidArgumentError(f"args is {shown(args)}; it must be a list or tuple")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise InvalidArgumentError(f"kwargs is {shown(kwargs)}; it must be a dict with names as keys")
    if timeout is not None and not (type(timeout) in (int, float) and 0 <= timeout <= MAX_SECONDS):
        raise InvalidArgumentError(f"timeout is {shown(timeout)}; it must be a number of seconds, 0 to {MAX_SECONDS}")
    return list(args), dict(kwargs or {})


def _parts(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, int, Array]]:
    for pair in weights:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidArgumentError(f"weights gives {shown(pair)}; it must give pairs of a name and an array")
        name, value = pair
        array = read_array(name, value)
        values = array.values
        if not values.ndim or not len(values):
            yield name, 0, array._replace(values=values.copy())  # a copy, because the caller may change the array
            continue
        rows = max(1, MAX_BYTES // max(1, values[:1].nbytes))
        for start in range(0, len(values), rows):
            yield name, start, array._replace(values=values[start : start + rows].copy())
