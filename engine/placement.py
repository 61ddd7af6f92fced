"""Where the processes of an engine's core run: `place` prepares that before the core is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidArgumentError, NotSupportedError, shown

C = TypeVar("C")


class Placement:
    """The core and its ranks are processes of this machine, or of others that join by themselves.

    Attributes:
        config: the configuration that the core gets.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def client(self, launch: Callable[[EngineConfig], C], connect: Callable[..., C]) -> C:
        """The engine's client. launch: starts a core in the usual way. connect: makes a client of a core that is there;
        its arguments are those of `Connection`."""
        return launch(self.config)

    def close(self) -> None:
        """Undo what was prepared. The core has ended."""


def place(config: EngineConfig, placement_group: Any = None, engine_use_ray: bool = False) -> Placement:
    """Prepare what `distributed_executor_backend` asks for.

    Args:
        placement_group: of Ray, with a bundle for each rank; means the backend "ray". None: one is made.
        engine_use_ray: let the core run in an actor of Ray, which may be on another machine.

    Raises:
        NotSupportedError: Ray is not installed.
        InvalidArgumentError: it is no placement group, or does not fit.
        EngineStartError: Ray has no room for the ranks.
    """
    if placement_group is not None:
        if type(placement_group).__name__ != "PlacementGroup":
            raise InvalidArgumentError(f"placement_group is {shown(placement_group)}; it must be one of Ray")
        config = replace(config, parallel_config=replace(config.parallel_config, distributed_executor_backend="ray"))
    backend = config.parallel_config.distributed_executor_backend
    if backend == "ray" or engine_use_ray:
        try:
            import ray  # noqa: F401
        except ImportError:
            raise NotSupportedError('Ray is asked for, but not installed: pip install "mainspring[ray]"') from None
        from .ray_placement import CoreInRay, RanksInRay

        return (CoreInRay if engine_use_ray else RanksInRay)(config, placement_group)
    if backend == "external_launcher":
        from ..core.external_launcher import LaunchedRanks

        return cast(Placement, LaunchedRanks(config))
    return Placement(config)
