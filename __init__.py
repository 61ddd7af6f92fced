"""Mainspring: an LLM inference engine. One process owns the accelerator, any number of light ones own the users.

The names below are loaded when first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .engine.args import EngineArgs as EngineArgs
    from .engine.async_llm_engine import AsyncEngineArgs as AsyncEngineArgs
    from .engine.async_llm_engine import AsyncLLM as AsyncLLM
    from .engine.async_llm_engine import AsyncLLMEngine as AsyncLLMEngine
    from .engine.frontend import UsageContext as UsageContext
    from .engine.input_processor import EngineCoreRequest as EngineCoreRequest
    from .engine.llm import LLM as LLM
    from .engine.llm_engine import LLMEngine as LLMEngine
    from .engine.outputs import (
        CompletionOutput as CompletionOutput,
    )
    from .engine.outputs import (
        RequestMetrics as RequestMetrics,
    )
    from .engine.outputs import (
        RequestOutput as RequestOutput,
    )
    from .engine.prompts import EmbedsPrompt as EmbedsPrompt
    from .engine.prompts import TextPrompt as TextPrompt
    from .engine.prompts import TokensPrompt as TokensPrompt
    from .ipc.config import CacheConfig as CacheConfig
    from .ipc.config import DeviceConfig as DeviceConfig
    from .ipc.config import EngineConfig as EngineConfig
    from .ipc.config import LoadConfig as LoadConfig
    from .ipc.config import ModelConfig as ModelConfig
    from .ipc.config import ObservabilityConfig as ObservabilityConfig
    from .ipc.config import ParallelConfig as ParallelConfig
    from .ipc.config import SchedulerConfig as SchedulerConfig
    from .ipc.config import ServiceConfig as ServiceConfig
    from .ipc.errors import AddressInUseError as AddressInUseError
    from .ipc.errors import ConnectError as ConnectError
    from .ipc.errors import DuplicateRequestError as DuplicateRequestError
    from .ipc.errors import EngineDeadError as EngineDeadError
    from .ipc.errors import EngineStartError as EngineStartError
    from .ipc.errors import InvalidArgumentError as InvalidArgumentError
    from .ipc.errors import InvalidRequestError as InvalidRequestError
    from .ipc.errors import MainspringError as MainspringError
    from .ipc.errors import ModelNotFoundError as ModelNotFoundError
    from .ipc.errors import NotPermittedError as NotPermittedError
    from .ipc.errors import NotSupportedError as NotSupportedError
    from .ipc.errors import OutOfMemoryError as OutOfMemoryError
    from .ipc.errors import OverloadedError as OverloadedError
    from .ipc.errors import ProtocolError as ProtocolError
    from .ipc.errors import RequestFailedError as RequestFailedError
    from .ipc.errors import UnknownArgumentError as UnknownArgumentError
    from .ipc.errors import UnsupportedModelError as UnsupportedModelError
    from .ipc.errors import WrongEventLoopError as WrongEventLoopError
    from .ipc.errors import WrongProcessError as WrongProcessError
    from .ipc.params import RequestOutputKind as RequestOutputKind
    from .ipc.params import SamplingParams as SamplingParams

_MODULES = {
    "engine.args": ("EngineArgs",),
    "engine.async_llm_engine": ("AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine"),
    "engine.frontend": ("UsageContext",),
    "engine.input_processor": ("EngineCoreRequest",),
    "engine.llm": ("LLM",),
    "engine.llm_engine": ("LLMEngine",),
    "engine.outputs": ("CompletionOutput", "RequestMetrics", "RequestOutput"),
    "engine.prompts": ("EmbedsPrompt", "TextPrompt", "TokensPrompt"),
    "ipc.config": (
        "CacheConfig",
        "DeviceConfig",
        "EngineConfig",
        "LoadConfig",
        "ModelConfig",
        "ObservabilityConfig",
        "ParallelConfig",
        "SchedulerConfig",
        "ServiceConfig",
    ),
    "ipc.errors": (
        "AddressInUseError",
        "ConnectError",
        "DuplicateRequestError",
        "EngineDeadError",
        "EngineStartError",
        "InvalidArgumentError",
        "InvalidRequestError",
        "MainspringError",
        "ModelNotFoundError",
        "NotPermittedError",
        "NotSupportedError",
        "OutOfMemoryError",
        "OverloadedError",
        "ProtocolError",
        "RequestFailedError",
        "UnknownArgumentError",
        "UnsupportedModelError",
        "WrongEventLoopError",
        "WrongProcessError",
    ),
    "ipc.params": ("RequestOutputKind", "SamplingParams"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  # all of them are str


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
