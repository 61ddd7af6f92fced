"""Administration, for an administrator's key. It goes over a connection that may change the engine for all."""

from __future__ import annotations

from typing import Any

from ..ipc.adapters import LoRARequest
from .exchange import Answer, Request, answer
from .failures import HttpError
from .service import Service
from .tenants import Tenant


class AdminApi:
    """Args:
    tenant: whose connection may administer.
    """

    def __init__(self, service: Service, tenant: Tenant) -> None:
        self._service, self._tenant = service, tenant

    async def sleep(self, request: Request, body: None) -> Answer:
        query = request.query
        level = query.get("level", "1")
        if not level.isdecimal():
            raise HttpError(400, f"level is {level!r}; it must be 0, 1 or 2", "level")
        mode: Any = query.get("mode", "abort")
        await (await self._tenant.engine()).sleep(int(level[:4]), mode)
        return Answer(b"")

    async def wake_up(self, request: Request, body: None) -> Answer:
        tags = request.query.get("tags")
        await (await self._tenant.engine()).wake_up(tags.split(",") if tags else None)
        return Answer(b"")

    async def is_sleeping(self, request: Request, body: None) -> Answer:
        return answer({"is_sleeping": await (await self._tenant.engine()).is_sleeping()})

    async def reset_prefix_cache(self, request: Request, body: None) -> Answer:
        await (await self._tenant.engine()).reset_prefix_cache()
        return Answer(b"")

    async def pause(self, request: Request, body: None) -> Answer:
        mode: Any = request.query.get("mode", "abort")
        await (await self._tenant.engine()).pause_generation(mode)
        return Answer(b"")

    async def resume(self, request: Request, body: None) -> Answer:
        await (await self._tenant.engine()).resume_generation()
        return Answer(b"")

    async def is_paused(self, request: Request, body: None) -> Answer:
        return answer({"is_paused": await (await self._tenant.engine()).is_paused()})


def adapter_of(number: int, text: str) -> LoRARequest:
    """The adapter that NAME=FOLDER describes.

    Raises:
        InvalidArgumentError: it is not of that form.
    """
    name, _, folder = text.partition("=")
    return LoRARequest(name, number, folder)
