"""Every error a user can catch. Each message is one sentence that names the field, the value and the limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar


class MainspringError(Exception):
    """Base of all errors raised by Mainspring."""


class InvalidArgumentError(MainspringError, ValueError):
    """A value is out of its range, or arguments contradict each other."""


class UnknownArgumentError(MainspringError, TypeError):
    """An argument of this name does not exist."""


class InvalidRequestError(InvalidArgumentError):
    """This request can't be served as it stands; the engine goes on with the others."""


class DuplicateRequestError(InvalidRequestError):
    """A request of this id is still running."""


class NotSupportedError(MainspringError, NotImplementedError):
    """A named feature that Mainspring does not have yet."""


class ModelNotFoundError(MainspringError, OSError):
    """No checkpoint at this path or under this name."""


class UnsupportedModelError(MainspringError, ValueError):
    """The model would not be computed rightly, so it is refused. The message says what stands in the way."""


class OutOfMemoryError(MainspringError, MemoryError):
    """The KV cache or the weights do not fit."""


class EngineStartError(MainspringError, RuntimeError):
    """The core did not start; carries the core's own error text."""


class EngineDeadError(MainspringError, RuntimeError):
    """The core is gone for good: it was shut down, died too often, or did not come back in time."""


class ConnectError(MainspringError, ConnectionError):
    """No daemon answered at this address, or it did not let us in."""


class AddressInUseError(MainspringError, OSError):
    """Another process listens at this address, or nobody can."""


class NotPermittedError(MainspringError, PermissionError):
    """This call needs a capability that the connection does not have."""


class OverloadedError(MainspringError, RuntimeError):
    """A limit on what may be in flight is reached: the same request may be accepted later."""


class RequestFailedError(MainspringError, RuntimeError):
    """The core gave up on this one request: it died each time it computed it."""


class WeightsLostError(MainspringError, RuntimeError):
    """The weights that `update_weights` brought are gone, and the checkpoint's are not to be served in their place."""


class WrongProcessError(MainspringError, RuntimeError):
    """An engine was used in a process forked from the one that made it."""


class WrongEventLoopError(MainspringError, RuntimeError):
    """An async client was used from a second event loop."""


class ProtocolError(MainspringError, ValueError):
    """A frame that is not of the protocol, or of another version."""


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
    """The name under which an error is sent; of other errors `MainspringError`."""
    return type(error).__name__ if type(error).__name__ in BY_NAME else "MainspringError"


def wire_text(error: BaseException) -> str:
    """The text with which an error is sent, always valid UTF-8. Other errors have the name of their type in front."""
    text = str(error) if isinstance(error, MainspringError) else f"{type(error).__name__}: {error}"
    return text.encode("utf-8", "backslashreplace").decode()


def from_wire(name: str, text: str) -> MainspringError:
    return BY_NAME.get(name, MainspringError)(text)


def unknown_argument(owner: str, name: str, known: Iterable[str]) -> UnknownArgumentError:
    """The error for a keyword that `owner` does not have, with the nearest one it has."""
    import difflib  # imported here because it is rarely needed

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6) if isinstance(name, str) else ()
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UnknownArgumentError(f"{owner} has no argument {shown(name)}{hint}")


def shown(value: Any) -> str:
    """A value for error messages: short, and it never raises, as ``repr`` does for an int of 5000 digits."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a {type(value).__name__} that is too long to be shown"


T = TypeVar("T")


def suggests_names(cls: type[T]) -> type[T]:
    """Class decorator: an unknown keyword to the constructor raises `UnknownArgumentError` with the nearest name."""
    construct: Callable[..., None] = cls.__init__
    known = [name for name in construct.__annotations__ if name != "return"]

    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise unknown_argument(cls.__name__, name, known)
        construct(self, *args, **kwargs)

    __init__.__wrapped__ = construct  # type: ignore[attr-defined]  # inspect.signature shows the real one
    cls.__init__ = __init__  # type: ignore[assignment,method-assign]
    return cls
