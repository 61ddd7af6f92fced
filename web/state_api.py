"""What is served and how it is: models, health, metrics, load, version."""

from __future__ import annotations

import asyncio
from typing import Any

from .. import __version__
from ..engine.observe.metrics import PREFIX, Metric, metrics_of
from ..ipc.connection import ask_status
from ..ipc.errors import ConnectError
from ..ipc.messages import Stats
from ..ipc.transport import address_at
from .exchange import TEXT, Answer, Request, answer
from .failures import HttpError
from .service import Service

_STATUS_SECONDS = 2.0  # longest wait for a core's status
_OURS = (  # metrics that vLLM does not have
    "prefix_cache_host_hits frontends_connected core_epoch core_restarts requests_recovered requests_quarantined "
    "malformed_frames"
).split()


class StateApi:
    """Args:
    address: of the daemon.
    keys: `key` and `server_key` for it.
    """

    def __init__(self, service: Service, address: str, keys: dict[str, Any]) -> None:
        self._service, self._address, self._keys = service, address, keys

    async def models(self, request: Request, body: None) -> Answer:
        return answer({"object": "list", "data": await self._models(request)})

    async def model(self, request: Request, body: None) -> Answer:
        for one in await self._models(request):
            if one["id"] == request.params["model"]:
                return answer(one)
        raise HttpError(404, f"the model {request.params['model']!r} does not exist", "model", "model_not_found")

    async def _models(self, request: Request) -> list[dict[str, Any]]:
        engine, service = await request.tenant.engine(), self._service
        common = {"object": "model", "created": service.created, "owned_by": "mainspring"}
        longest = engine.engine_core.model.max_model_len
        own = {**common, "root": service.name, "parent": None, "max_model_len": longest}
        found: list[dict[str, Any]] = [{"id": name, **own} for name in service.names]
        for name, adapter in service.adapters.all().items():
            more = {"root": adapter.lora_path, "parent": service.name, "max_model_len": longest}
            found.append({"id": name, **common, **more})
        return found

    async def health(self, request: Request, body: None) -> Answer:
        """200 while requests are served, also while a core that died is being restarted for a short time."""
        await request.tenant.engine()
        return Answer(b"", headers=(TEXT,))

    async def version(self, request: Request, body: None) -> Answer:
        return answer({"version": __version__})

    async def load(self, request: Request, body: None) -> Answer:
        """Requests that all workers are answering, this one left out."""
        return answer({"server_load": max(0, self._service.counters.in_flight - 1)})

    async def metrics(self, request: Request, body: None) -> Answer:
        from ..engine.observe.prometheus import exposition

        engine = await request.tenant.engine()
        lora = engine.vllm_config.lora_config
        found = await asyncio.to_thread(self._metrics, lora.max_loras if lora.enable_lora else 0)
        lines = "\n".join(self._service.counters.lines())
        return Answer(exposition(found) + lines.encode() + b"\n", headers=(TEXT,))

    def _metrics(self, max_loras: int) -> list[Metric]:
        """The metrics of all cores, over the requests of all their frontends. Those that vLLM has too are there under
        its names, too."""
        first = ask_status(self._address, _STATUS_SECONDS, **self._keys)
        statuses = [first]
        for place in first.core.cores:
            if place.number != first.core.core:
                try:
                    at = address_at(self._address, place.place)
                    statuses.append(ask_status(at, _STATUS_SECONDS, **self._keys))
                except ConnectError:
                    continue  # it restarts
        found: list[Metric] = []
        for status in statuses:
            core = status.core
            told: Stats = core.stats
            found += metrics_of(told, status.measured, self._service.name, core.restarts, max_loras)
        return found + [one.renamed(f"vllm:{name}") for one in found if (name := one.name[len(PREFIX) :]) not in _OURS]
