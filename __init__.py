"""Mainspring: an LLM inference engine. One process owns the accelerator, any number of light ones own the users.

The names below are loaded when first used, so that importing the package costs next to nothing. Editors and type
checkers read `__init__.pyi`, which says the same.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "compat.members": "Device UsageContext",
    "engine.args": "EngineArgs",
    "engine.async_llm_engine": "AsyncEngineArgs AsyncLLM AsyncLLMEngine",
    "engine.request.input_processor": "EngineCoreRequest",
    "engine.llm": "LLM",
    "engine.llm_engine": "LLMEngine",
    "engine.observe.metrics": "StatLoggerBase",
    "engine.request.beam_search": "BeamSearchOutput BeamSearchSequence",
    "engine.request.outputs": (
        "ClassificationOutput ClassificationRequestOutput CompletionOutput "
        "EmbeddingOutput EmbeddingRequestOutput Logprob PoolingOutput PoolingRequestOutput RequestMetrics "
        "RequestOutput ScoringOutput ScoringRequestOutput"
    ),
    "engine.request.prompts": "EmbedsPrompt ExplicitEncoderDecoderPrompt TextPrompt TokensPrompt",
    "ipc.adapters": "LoRARequest PromptAdapterRequest",
    "ipc.config": (
        "CacheConfig DecodingConfig DeviceConfig EngineConfig LoRAConfig LoadConfig ModelConfig ObservabilityConfig "
        "ParallelConfig SchedulerConfig ServiceConfig SpeculativeConfig StructuredOutputsConfig"
    ),
    "ipc.errors": (
        "AddressInUseError ConnectError DuplicateRequestError EngineDeadError EngineStartError InvalidArgumentError "
        "InvalidRequestError MainspringError ModelNotFoundError NotPermittedError NotSupportedError "
        "OutOfMemoryError OverloadedError ProtocolError RequestFailedError UnknownArgumentError "
        "UnsupportedModelError WeightsLostError WrongEventLoopError WrongProcessError"
    ),
    "ipc.structured": "GuidedDecodingParams StructuredOutputsParams",
    "ipc.params": "BeamSearchParams RequestOutputKind SamplingParams",
    "ipc.pooling_params": "PoolingParams",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  # all of them are str


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
