"""Tenants: who may ask, by API key. Each has a connection to the core of its own, with its weight."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..ipc.errors import InvalidArgumentError
from .failures import HttpError

if TYPE_CHECKING:
    from ..engine.async_llm_engine import AsyncLLMEngine

Access = Literal["open", "key", "admin"]  # whom a route is for

MAX_TENANTS = 1000  # in a key file, because each takes a connection
THREADS = 8  # at work for one tenant, of those that a worker has for all


class Tenant:
    """Args:
    connect: makes the tenant's connection. It blocks.
    patience: seconds that requests wait for a core that restarts; after that they are refused.
    """

    def __init__(
        self, name: str, weight: float, admin: bool, connect: Callable[[Tenant], AsyncLLMEngine], patience: float = 30.0
    ) -> None:
        self.name, self.weight, self.admin = name, weight, admin
        self._connect, self._patience = connect, patience
        self._engine: AsyncLLMEngine | None = None
        self._opening: asyncio.Task[AsyncLLMEngine] | None = None
        self.threads = asyncio.Semaphore(THREADS)

    async def engine(self) -> AsyncLLMEngine:
        """The engine on the tenant's connection.

        Raises:
            HttpError: the core is not there.
        """
        engine = self._engine
        if engine is None or engine.dead_error is not None:
            if (opening := self._opening) is None or opening.done():
                opening = self._opening = asyncio.create_task(self._open())
            await asyncio.wait([opening], timeout=self._patience)
            if not opening.done():
                raise HttpError(503, f"the core has not answered for {self._patience:.0f} s", retry_after=5)
            engine = opening.result()
        lost = engine.engine_core.lost_since
        if lost is not None and time.monotonic() - lost > self._patience:
            waited = time.monotonic() - lost
            raise HttpError(503, f"the core has not answered for {waited:.0f} s; it restarts", retry_after=5)
        return engine

    async def _open(self) -> AsyncLLMEngine:
        self.close()
        self._engine = await asyncio.to_thread(self._connect, self)
        return self._engine

    def use(self, engine: AsyncLLMEngine) -> None:
        """Use an engine that is connected."""
        self._engine = engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


class Tenants:
    """All tenants of a worker.

    Args:
        by_key: digest of a key → tenant; empty: there are no keys, and everybody is `default`.
    """

    def __init__(self, default: Tenant, by_key: dict[bytes, Tenant]) -> None:
        self.default, self._by_key = default, by_key

    def of(self, headers: Iterable[tuple[bytes, bytes]], access: Access) -> Tenant:
        """Whose key came with a request.

        Raises:
            HttpError: 401: no key, or an unknown one. 403: not an administrator's.
        """
        if access == "open":
            return self.default
        if not self._by_key:
            if access == "admin":
                raise HttpError(403, "administration needs a key of an administrator, and this server has no keys")
            return self.default
        given = b""
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                given = value[7:].strip()
            elif name == b"x-api-key":
                given = given or value.strip()
        if not given:
            raise HttpError(401, "no API key came with the request: send Authorization: Bearer KEY", code="no_api_key")
        tenant = self._by_key.get(digest(given))
        if tenant is None:
            raise HttpError(401, "this API key is not known here", code="invalid_api_key")
        if access == "admin" and not tenant.admin:
            raise HttpError(403, "this API key is not an administrator's")
        return tenant

    def close(self) -> None:
        for tenant in {self.default, *self._by_key.values()}:
            tenant.close()


class ApiKey:
    """A line of a key file."""

    def __init__(self, name: str, digest: bytes, weight: float, admin: bool) -> None:
        self.name, self.digest, self.weight, self.admin = name, digest, weight, admin


def digest(key: bytes) -> bytes:
    """What is looked up, so that the time of the look-up says nothing about a key."""
    return hashlib.sha256(key).digest()


def load_api_keys(path: str) -> list[ApiKey]:
    """The keys in a file: on each line a key, the tenant's name, and perhaps ``weight=2`` and ``admin``.

    Raises:
        InvalidArgumentError: the file can't be read, or a line is not of that form.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"api_key_file is {path}, which can't be read: {error}") from None
    found: dict[bytes, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        fields = [] if line.lstrip().startswith("#") else line.split()
        if not fields:
            continue
        where = f"line {number} of {path}"
        if len(fields) < 2 or "=" in fields[1]:
            raise InvalidArgumentError(f"{where} must be: KEY NAME [weight=NUMBER] [admin]")
        key, name, *more = fields
        weight, admin = 1.0, False
        for word in more:
            if word == "admin":
                admin = True
            elif word.startswith("weight="):
                try:
                    weight = float(word[7:])
                except ValueError:
                    weight = 0.0
                if not 0.01 <= weight <= 100:  # as a core takes it
                    raise InvalidArgumentError(f"{where}: {word}; the weight must be a number in 0.01 to 100")
            else:
                raise InvalidArgumentError(f"{where}: {word!r} is neither weight=NUMBER nor admin")
        if digest(key.encode()) in found:
            raise InvalidArgumentError(f"{where}: this key is in the file twice")
        found[digest(key.encode())] = ApiKey(name, digest(key.encode()), weight, admin)
    if not found:
        raise InvalidArgumentError(f"api_key_file is {path}, which holds no key")
    if len(found) > MAX_TENANTS:
        raise InvalidArgumentError(f"{path} holds {len(found)} keys; the limit is {MAX_TENANTS}")
    return list(found.values())
