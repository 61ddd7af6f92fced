"""All errors that users can catch. Each message is one sentence that names the field, the value and the limit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar


class MainspringError(Exception):
    """Base of all errors raised by Mainspring.

    If a request of `LLM.generate`, or of a method like it, failed while it ran, `outputs` holds the outputs of all
    requests of that call, in the order of the prompts. Otherwise it is None.
    """

    outputs: Sequence[Any] | None = None


class InvalidArgumentError(MainspringError, ValueError):
    """A value is out of its range, or arguments contradict each other."""


class UnknownArgumentError(MainspringError, TypeError):
    """An argument of this name does not exist."""


class InvalidRequestError(InvalidArgumentError):
    """This request can't be served as it is. Other requests are not affected."""


class DuplicateRequestError(InvalidRequestError):
    """A request of this id is still running."""


class NotSupportedError(MainspringError, NotImplementedError):
    """A named feature that Mainspring does not have yet."""


class MissingNameError(NotSupportedError, AttributeError):
    """vLLM has this name or may have it, and Mainspring does not. Also an `AttributeError`, as `hasattr` needs."""


class ModelNotFoundError(MainspringError, OSError):
    """No checkpoint at this path or under this name."""


class UnsupportedModelError(MainspringError, ValueError):
    """Mainspring can't compute this model correctly, so it refuses the model. The message says why."""


class OutOfMemoryError(MainspringError, MemoryError):
    """The KV cache or the weights do not fit."""


class EngineStartError(MainspringError, RuntimeError):
    """The core did not start. The message holds the core's own error text."""


class EngineDeadError(MainspringError, RuntimeError):
    """The core is gone for good: it was shut down, died too often, or did not come back in time."""


class ConnectError(MainspringError, ConnectionError):
    """No daemon answered at this address, or it refused the connection; or the connection to a trainer failed."""


class AddressInUseError(MainspringError, OSError):
    """This address can't be opened: another process listens there, or the system does not allow it."""


class NotPermittedError(MainspringError, PermissionError):
    """This call needs a capability that the connection does not have."""


class OverloadedError(MainspringError, RuntimeError):
    """A limit on requests or tokens in flight is reached. The same request may be accepted later."""


class RequestFailedError(MainspringError, RuntimeError):
    """The core gave up on this request, because cores died repeatedly while they computed it."""


class WeightsLostError(MainspringError, RuntimeError):
    """Weights sent by users are lost, and the checkpoint's weights must not be served instead."""


class WrongProcessError(MainspringError, RuntimeError):
    """An engine was used in a process forked from the one that made it."""


class WrongEventLoopError(MainspringError, RuntimeError):
    """An async client was used from a second event loop."""


class ProtocolError(MainspringError, ValueError):
    """A frame does not follow the protocol, or has another protocol version."""


BY_NAME: dict[str, type[MainspringError]] = {
    cls.__name__: cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, MainspringError)
}


def check_process(owner: int) -> None:
    """Raise `WrongProcessError` unless this is the process `owner`, which made the engine."""
    if (pid := os.getpid()) != owner:
        raise WrongProcessError(
            f"this engine belongs to process {owner}; process {pid}, forked from it, must make its own"
        )


def wire_name(error: BaseException) -> str:
    """The name of an error in a message. Errors of other libraries are named `MainspringError`."""
    return type(error).__name__ if type(error).__name__ in BY_NAME else "MainspringError"


def wire_text(error: BaseException) -> str:
    """The text of an error in a message, always valid UTF-8. For errors of other libraries it begins with the type."""
    text = str(error) if isinstance(error, MainspringError) else f"{type(error).__name__}: {error}"
    return text.encode("utf-8", "backslashreplace").decode()


def from_wire(name: str, text: str) -> MainspringError:
    return BY_NAME.get(name, MainspringError)(text)


def unknown_argument(owner: str, name: str, known: Iterable[str]) -> UnknownArgumentError:
    """The error for a keyword that `owner` does not have. It suggests the most similar one that `owner` has."""
    import difflib  # imported here to keep `import mainspring` fast

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6) if isinstance(name, str) else ()
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UnknownArgumentError(f"{owner} has no argument {shown(name)}{hint}")


def shown(value: Any) -> str:
    """A short text of a value for error messages. Never raises, while ``repr`` fails for an int of 5000 digits."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a {type(value).__name__} that is too long to be shown"


@contextlib.contextmanager
def names_prompt(index: int, count: int) -> Iterator[None]:
    """Put the index of the prompt before the text of an error, if the call has several prompts."""
    try:
        yield
    except MainspringError as error:
        raise type(error)(f"prompt {index}: {error}" if count > 1 else str(error)) from None


def printable(text: str) -> str:
    """The text with each control character replaced, because any frontend can choose its name."""
    return "".join(c if c.isprintable() else "?" for c in text)


def check_default(name: str, value: Any, values: Iterable[Any], feature: str) -> None:
    """Raise `NotSupportedError`, which names the feature, unless the value is one of these, None or empty."""
    if value is not None and value not in ("", (), [], {}, set()) and value not in values:
        raise NotSupportedError(f"{name} is {shown(value)}, which is not supported ({feature}); leave it out")


# keyword without an effect → values that it may have and the feature of others; older keyword → its newer name
Accepted = Mapping[str, tuple[Iterable[Any], str] | str]


def check_accepted(given: Mapping[str, Any], accepted: Accepted) -> dict[str, Any]:
    """`given` without the keywords that have no effect, and under our names."""
    found = dict(given)
    for name in accepted.keys() & found.keys():
        value, entry = found.pop(name), accepted[name]
        if not isinstance(entry, str):
            check_default(name, value, *entry)
        elif value is not None and found.setdefault(entry, value) is not value:
            raise InvalidArgumentError(f"{name} is the older name of {entry}: give one of them")
    return found


T = TypeVar("T")


def suggests_names(cls: type[T]) -> type[T]:
    """Class decorator: an unknown keyword to the constructor raises `UnknownArgumentError` with the nearest name.

    A class attribute `_accepted` may name keywords that no field has, see `check_accepted`.
    """
    construct: Callable[..., None] = cls.__init__
    known = [name for name in construct.__annotations__ if name != "return"]
    accepted: Accepted = getattr(cls, "_accepted", {})

    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        if kwargs.keys() & accepted.keys():
            kwargs = check_accepted(kwargs, accepted)
        for name in kwargs:
            if name not in known:
                raise unknown_argument(cls.__name__, name, known)
        construct(self, *args, **kwargs)

    __init__.__wrapped__ = construct  # type: ignore[attr-defined]  # inspect.signature shows the real one
    cls.__init__ = __init__  # type: ignore[assignment,method-assign]
    return cls
