"""Which frontends a core lets in."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os

import zmq
from zmq.utils import z85

from .errors import ConnectError, MainspringError, NotPermittedError
from .keys import AllowedKey, load_allowed
from .transport import Endpoints, Socket

logger = logging.getLogger(__name__)


class Access:
    """Used by the I/O thread only.

    Attributes:
        zap: the socket where libzmq asks whether a key is allowed; None without CURVE.
    """

    def __init__(self, context: zmq.Context[Socket], endpoints: Endpoints) -> None:
        self._token, self._worker_token = endpoints.token, endpoints.worker_token
        self._allowed_keys = endpoints.allowed_keys
        self._own_key = zmq.curve_public(endpoints.secret_key.encode()).decode() if endpoints.secret_key else ""
        self.zap: Socket | None = None
        if endpoints.secret_key:
            self.zap = context.socket(zmq.REP)
            self.zap.bind("inproc://zeromq.zap.01")

    def admit(self, frame: zmq.Frame, token: bytes) -> AllowedKey | None:
        """Check the sender of a frame: its user on a Unix socket, its token for an embedded core, its key over tcp.
        Returns the entry in the list of allowed keys, if there is a list; for a media worker, one of its own."""
        if self._worker_token and hmac.compare_digest(token, self._worker_token):
            return AllowedKey("", admin=True)
        if not hmac.compare_digest(token, self._token):
            raise ConnectError("the session token is wrong: this core belongs to another process")
        if self.zap is not None:
            key = self._allowed(str(frame.get("User-Id")))
            if key is None:
                raise NotPermittedError("this key is not among the allowed keys any more")
            return key
        with contextlib.suppress(zmq.ZMQError):
            where, *ids = str(frame.get("Peer-Address")).rsplit(":", 3)
            if where == "localhost" and len(ids) == 3 and int(ids[0]) not in (os.getuid(), 0):
                raise NotPermittedError(
                    f"user {ids[0]} may not use this core, which belongs to user {os.getuid()}: connect over tcp with "
                    "a key that its owner allows"
                )
        return None

    def _allowed(self, key: str) -> AllowedKey | None:
        if key == self._own_key:  # the daemon itself
            return AllowedKey("daemon", admin=True)
        return load_allowed(self._allowed_keys).get(key)

    def authenticate(self) -> None:
        """Answer libzmq's authentication request for a public key (RFC 27, ZAP), if there is one."""
        if self.zap is None:
            return
        with contextlib.suppress(zmq.Again):
            version, call, _, _, _, _, *credentials = self.zap.recv_multipart(zmq.NOBLOCK)
            key = z85.encode(credentials[0]) if credentials else b""
            allowed = False
            try:
                allowed = self._allowed(key.decode()) is not None
            except MainspringError as error:
                logger.error("nobody is let in: %s", error)
            if not allowed:
                logger.warning("refused a connection with the key %s", key.decode())
            code, text = (b"200", b"OK") if allowed else (b"400", b"unknown key")
            self.zap.send_multipart([version, call, code, text, key if allowed else b"", b""])
