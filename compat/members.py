"""Names that other engines have and that callers use: older names of what is here, and names without an effect."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum, auto

from ..ipc import config
from ..ipc.errors import InvalidArgumentError, shown


class UsageContext(StrEnum):
    """Who uses the engine. Nothing is reported anywhere; accepted because vLLM's signatures have it."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class Device(Enum):
    """Where cached blocks lie; for the older form of `reset_prefix_cache`. `GPU`: in the pool, on whatever device that
    is; `CPU`: in host memory beside it, see `kv_offloading_size`."""

    GPU = auto()
    CPU = auto()


class FrontendMembers:
    """Members of `LLMEngine` and `AsyncLLMEngine`."""

    @property
    def dp_group(self) -> None:
        """None: copies of the model need no process group."""

    def execute_dummy_batch(self) -> None:
        """A step for the sake of other copies of the model. Nothing happens, because no copy waits for another."""


class EngineMembers:
    """Members of `LLMEngine`; `AsyncLLMEngine` has the getters as coroutines."""

    vllm_config: config.EngineConfig
    has_unfinished_requests: Callable[[], bool]

    def has_unfinished_requests_for_virtual_engine(self, virtual_engine: int) -> bool:
        """The same, of a pipeline's part: there is one, number 0.

        Raises:
            InvalidArgumentError: another number.
        """
        if isinstance(virtual_engine, bool) or virtual_engine != 0:
            raise InvalidArgumentError(f"virtual_engine is {shown(virtual_engine)}; there is only 0")
        return self.has_unfinished_requests()

    def has_unfinished_requests_dp(self, has_unfinished: bool) -> bool:
        """The same: no copy of the model waits for another."""
        return has_unfinished

    def get_vllm_config(self) -> config.EngineConfig:
        """The attribute `vllm_config`."""
        return self.vllm_config

    def get_model_config(self) -> config.ModelConfig:
        return self.vllm_config.model_config

    def get_cache_config(self) -> config.CacheConfig:
        return self.vllm_config.cache_config

    def get_scheduler_config(self) -> config.SchedulerConfig:
        return self.vllm_config.scheduler_config

    def get_parallel_config(self) -> config.ParallelConfig:
        return self.vllm_config.parallel_config

    def get_decoding_config(self) -> config.StructuredOutputsConfig:
        return self.vllm_config.structured_outputs_config

    def get_lora_config(self) -> config.LoRAConfig:
        return self.vllm_config.lora_config
