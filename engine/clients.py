"""Where the choice between a core in this process, one in its own is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..ipc.async_client import AsyncClient
    from ..ipc.client import CoreClient
    from ..ipc.config import EngineConfig


def make_client(config: EngineConfig, multiprocess: bool) -> CoreClient:
    """Start a core and connect to it. Only a core in this process brings torch and transformers into it.

    Raises:
        MainspringError: the core did not start; its own error.
    """
    if multiprocess:
        from ..ipc.sync_client import SyncClient

        return SyncClient.launch(config)
    from ..core.engine_core import EngineCore
    from ..ipc.inproc_client import InprocClient

    return InprocClient(EngineCore(config))


def make_async_client(config: EngineConfig) -> AsyncClient:
    """The same for asyncio, with the core in a process of its own. Blocks until it is ready."""
    from ..ipc.async_client import AsyncClient

    return AsyncClient.launch(config)
