"""Resolves URLs of media: `data:` always, hosts by an allow-list, files below one folder."""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from ..ipc.config import MultiModalConfig
from ..ipc.errors import InvalidRequestError, NotSupportedError
from .decode import Limits, check_bytes

FETCH_SECONDS = 10.0  # longest time from the connection to the last byte
MAX_URL = 8192  # characters of a URL that is shown or fetched; data: URIs may be longer
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # it carries an IPv4 address in its last 32 bits
_CHUNK = 1 << 16

Resolver = Callable[[str, int], list[str]]


def resolve_name(host: str, port: int) -> list[str]:
    """The addresses of a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_global(address: str) -> bool:
    """Whether an address is of the public internet: not of this machine, a private network or a cloud's metadata."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_global(str(inner))
    return found.is_global and not (found.is_multicast or (found.version == 6 and found.is_site_local))


class Fetcher:
    """Gets what URLs name.

    Args:
        resolve: the addresses of a host's name.
        allows: whether a connection to an address may be made.
    """

    def __init__(
        self,
        config: MultiModalConfig,
        resolve: Resolver = resolve_name,
        allows: Callable[[str], bool] = is_global,
    ) -> None:
        self._config, self._resolve, self._allows = config, resolve, allows
        self._limits = Limits(config.max_media_pixels, config.max_media_bytes)

    def get(self, what: str, url: str) -> bytes:
        """The content of a URL.

        Raises:
            InvalidRequestError: the URL is not allowed, or can't be fetched.
        """
        kind = url[:8].partition(":")[0].lower()
        if kind == "data":
            return self._data(what, url)
        if len(url) > MAX_URL or not url.isprintable():
            raise InvalidRequestError(f"{what} has a URL that is too long or has control characters")
        if kind in ("http", "https"):
            return self._http(what, url)
        if kind == "file":
            return self._file(what, url)
        raise InvalidRequestError(f"{what} is {url!r:.80}; it must be a data:, http:, https: or file: URL")

    def _data(self, what: str, url: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma:
            raise InvalidRequestError(f"{what} is a data: URL without a comma")
        in_base64 = head.lower().endswith(";base64")
        check_bytes(what, len(body) * 3 // 4 - 2 if in_base64 and len(body) > 4 else bool(body), self._limits)
        try:
            found = base64.b64decode(unquote(body), validate=True) if in_base64 else unquote_to_bytes(body)
        except (binascii.Error, ValueError):
            raise InvalidRequestError(f"{what} is a data: URL that is not valid base64") from None
        check_bytes(what, len(found), self._limits)
        return found

    # ------------------------------------------------------------------ files

    def _file(self, what: str, url: str) -> bytes:
        folder = self._config.allowed_local_media_path
        if not folder:
            raise InvalidRequestError(f"{what} is a file: URL, but allowed_local_media_path is not set")
        parts = urlsplit(url)
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or "\0" in path or not path.startswith("/"):
            raise InvalidRequestError(f"{what} is {url!r:.80}, which names no file of this machine")
        if not hasattr(os, "O_PATH"):
            raise NotSupportedError("file: URLs are only supported on Linux")
        refused = InvalidRequestError(f"{what} is no file in the folder allowed_local_media_path")
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)  # names the file, without opening it
        except OSError:
            raise refused from None
        try:
            # where it really is, after all symbolic links, and whatever is renamed now
            real = os.readlink(f"/proc/self/fd/{place}")
            root = os.path.realpath(folder)
            found = os.fstat(place)
            if os.path.commonpath([real, root]) != root or not stat.S_ISREG(found.st_mode):
                raise refused
            check_bytes(what, found.st_size, self._limits)
            with open(f"/proc/self/fd/{place}", "rb") as file:
                data = file.read(self._limits.bytes + 1)
        except OSError:
            raise refused from None
        finally:
            os.close(place)
        check_bytes(what, len(data), self._limits)
        return data

    # ------------------------------------------------------------------ hosts

    def _http(self, what: str, url: str) -> bytes:
        try:
            parts = urlsplit(url)
            host, given = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            raise InvalidRequestError(f"{what} has no valid URL: {url!r:.80}") from None
        port = given or (443 if parts.scheme.lower() == "https" else 80)
        name = f"[{host}]" if ":" in host else host
        named = {name, f"{name}:{port}"} if given is None or port in (80, 443) else {f"{name}:{port}"}
        allowed = {name.lower() for name in self._config.allowed_media_domains}
        if not host or parts.username is not None or not named & allowed:
            listed = ", ".join(sorted(allowed)) or "none"
            raise InvalidRequestError(f"{what} is at {host!r:.80}, which is not of allowed_media_domains ({listed})")
        try:
            addresses = self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = []
        if not addresses:
            raise InvalidRequestError(f"{what} is at {host!r:.80}, which has no address")
        for address in addresses:
            if not self._allows(address):
                raise InvalidRequestError(f"{what} is at {host!r:.80}, whose address {address} is not public")
        try:
            return self._download(what, parts.scheme.lower() == "https", host, addresses[0], port, _target(url))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InvalidRequestError(f"{what} can't be fetched from {host}: {error!s:.200}") from None

    def _download(self, what: str, tls: bool, host: str, address: str, port: int, target: str) -> bytes:
        """Fetch from this address, without a second look at the name."""
        ends_at = time.monotonic() + FETCH_SECONDS
        raw = socket.create_connection((address, port), FETCH_SECONDS)
        # A limit of the socket is one of each read, and an answer may come byte by byte.
        same = socket.socket(fileno=os.dup(raw.fileno()))  # of which TLS takes nothing away
        alarm = threading.Timer(FETCH_SECONDS, _end, (same,))
        alarm.daemon = True
        alarm.start()
        found = b""
        try:
            found = self._answer(what, raw, tls, host, port, target)
        except (OSError, http.client.HTTPException, InvalidRequestError):
            if time.monotonic() < ends_at:
                raise
        finally:
            alarm.cancel()
            same.close()
        if time.monotonic() >= ends_at:
            raise InvalidRequestError(f"{what} can't be fetched within {FETCH_SECONDS:.0f} s")
        return found

    def _answer(self, what: str, raw: socket.socket, tls: bool, host: str, port: int, target: str) -> bytes:
        with raw, ssl.create_default_context().wrap_socket(raw, server_hostname=host) if tls else raw as line:
            connection = http.client.HTTPConnection(host, port)
            connection.default_port = 443 if tls else 80  # the Host header names no other port than the URL does
            connection.sock = line
            connection.request("GET", target, headers={"Accept-Encoding": "identity", "User-Agent": "mainspring"})
            answer = connection.getresponse()
            if answer.status != 200:
                more = "; redirects are not followed" if 300 <= answer.status < 400 else ""
                raise InvalidRequestError(f"{what} can't be fetched: {host} answered {answer.status}{more}")
            if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise InvalidRequestError(f"{what} can't be fetched: {host} sends it compressed")
            check_bytes(what, answer.length if answer.length is not None else 1, self._limits)
            found = bytearray()
            while chunk := answer.read1(_CHUNK):
                found += chunk
                check_bytes(what, len(found), self._limits)
            if answer.length:
                raise InvalidRequestError(f"{what} can't be fetched: {host} closed the connection early")
        check_bytes(what, len(found), self._limits)
        return bytes(found)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _target(url: str) -> str:
    """The part of a URL that is asked of its host."""
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
