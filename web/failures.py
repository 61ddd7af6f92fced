"""Errors as HTTP answers: a status, and OpenAI's error object."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from ..ipc.errors import (
    ConnectError,
    EngineDeadError,
    InvalidArgumentError,
    MainspringError,
    NotPermittedError,
    NotSupportedError,
    OverloadedError,
    UnknownArgumentError,
    WeightsLostError,
)

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1  # after which a client may ask again, when a limit of the core is reached
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class HttpError(Exception):
    """A request that is answered with an error.

    Args:
        status: of the answer.
        message: for the client's user.
        param: the field of the body that is wrong.
        code: OpenAI's short name of the error.
        retry_after: seconds.
        close: whether the connection is closed, because the rest of the request is not read.
        allow: for status 405, the methods of the path.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
        allow: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.close, self.allow = retry_after, close, allow

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "internal_server_error")

    def body(self) -> dict[str, Any]:
        """The error object."""
        code = self.code or self.status
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": str(code)}}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        found = [] if self.retry_after is None else [(b"retry-after", b"%d" % self.retry_after)]
        if self.allow:
            found.append((b"allow", ", ".join(self.allow).encode()))
        return [*found, (b"connection", b"close")] if self.close else found


def http_error(error: BaseException) -> HttpError:
    """The answer to a request that failed with this error."""
    if isinstance(error, HttpError):
        return error
    text = str(error)
    if isinstance(error, (msgspec.DecodeError, RecursionError, UnicodeDecodeError)):  # ValidationError is one
        if isinstance(error, msgspec.ValidationError):
            what, _, where = text.rpartition(" - at `$")
            field = where.strip("`").lstrip(".") if what else None
            return HttpError(400, f"{field}: {what}" if field else what or text, field or None)
        return HttpError(400, f"the body is not JSON that can be read: {text}")
    match error:
        case OverloadedError():
            return HttpError(429, text, retry_after=RETRY_SECONDS)
        case NotPermittedError():
            return HttpError(403, text)
        case InvalidArgumentError() | UnknownArgumentError() | NotSupportedError():
            return HttpError(400, text, code="not_supported" if isinstance(error, NotSupportedError) else None)
        case EngineDeadError() | ConnectError() | WeightsLostError():
            return HttpError(503, text, retry_after=RETRY_SECONDS)
        case TimeoutError():
            return HttpError(504, text or "the core did not answer in time")
        case MainspringError():
            return HttpError(500, text)
    logger.error("a request failed", exc_info=error)
    return HttpError(500, f"internal error ({type(error).__name__}); the server's log says more")
