"""Administration, for an administrator's key. It goes over a connection that may change the engine for all."""

from __future__ import annotations

from typing import Any

import msgspec

from .exchange import TEXT, Answer, Request, answer
from .failures import HttpError
from .service import Service
from .tenants import Tenant


class LoadAdapterBody(msgspec.Struct):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct):
    lora_name: str
    lora_int_id: int | None = None  # without effect: the name says which


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

    async def reset_mm_cache(self, request: Request, body: None) -> Answer:
        await (await self._tenant.engine()).reset_mm_cache()
        return Answer(b"")

    async def reset_encoder_cache(self, request: Request, body: None) -> Answer:
        await (await self._tenant.engine()).reset_encoder_cache()
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

    async def load_adapter(self, request: Request, body: LoadAdapterBody) -> Answer:
        """Let requests name an adapter, once the core has loaded it."""
        service, name = self._service, body.lora_name
        if service.is_base(name) or (name in service.adapters.all() and not body.load_inplace):
            raise HttpError(400, f"there is a model {name!r} already; load_inplace replaces an adapter", "lora_name")
        one = service.adapters.next(name, body.lora_path)
        await (await self._tenant.engine()).add_lora(one)
        service.adapters.add(one)
        return Answer(f"Success: LoRA adapter '{name}' added successfully.".encode(), headers=(TEXT,))

    async def unload_adapter(self, request: Request, body: UnloadAdapterBody) -> Answer:
        """Refuse requests that name an adapter. Those under way go on."""
        number = self._service.adapters.remove(body.lora_name)
        await (await self._tenant.engine()).remove_lora(number)
        return Answer(f"Success: LoRA adapter '{body.lora_name}' removed successfully.".encode(), headers=(TEXT,))
