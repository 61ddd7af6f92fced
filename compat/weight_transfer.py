"""vLLM's classes that say how weights are transferred: the configuration and the two requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..ipc.errors import InvalidArgumentError, check_default, shown


class WeightTransferConfig(dict[str, Any]):
    """The field `weight_transfer_config` of `EngineArgs`, as a dict."""

    def __init__(self, backend: str = "nccl") -> None:
        super().__init__(backend=backend)


@dataclass
class WeightTransferInitRequest:
    """The argument of `init_weight_transfer_engine`."""

    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    """An argument of `update_weights`."""

    update_info: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)


def check_transfer(config: Any) -> None:
    """Raises `NotSupportedError` for a backend that does not exist here. The others need no configuration."""
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise InvalidArgumentError(f"weight_transfer_config is {shown(config)}; it must be a dict")
    for name, value in config.items():
        values = ("nccl", "ipc") if name == "backend" else ()
        check_default(f"weight_transfer_config: {name}", value, values, "other ways to transfer weights")
