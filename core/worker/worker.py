"""The base class of workers that run in the planner's process, on one device."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ...ipc.config import EngineConfig
from ...ipc.errors import wire_name, wire_text
from ...ipc.messages import ModelFacts
from ...kernels import host_memory
from ...kernels.contract import AttentionSpec
from ..model.run.paged_model import PagedModel
from ..plan.control import (
    Control,
    DropAdapter,
    DropFunctions,
    DropGrammar,
    Explain,
    ParameterRows,
    PendingStep,
    PrepareAdapter,
    PrepareGrammar,
    ReleaseMemory,
    SetParameters,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
    Worker,
    WorkerFacts,
)
from ..plan.step import RowError, StepPlan, StepResult
from .backends import choose_backend, free_bytes, pick_device, prepare_kernels, wait_for_memory
from .block_count import count_blocks
from .decisions import Decisions
from .device import device_for
from .kv_layout import KVLayout, cache_dtype
from .profiler import Profiler
from .registry import Registry
from .rpc import with_extension
from .runner import ModelRunner

if TYPE_CHECKING:
    from ..model.run.encoder import EncoderModel


class LocalWorker(Worker):
    """See `Worker`. A subclass loads a model, and runs its steps."""

    def __init__(self, config: EngineConfig, decisions: Decisions | None) -> None:
        self._config = config
        self._device = pick_device(config.device_config.device)
        if decisions is not None:
            wait_for_memory(self._device, decisions.device_bytes)
        self._free_at_first = free_bytes(self._device)
        self._backend = choose_backend(config.device_config, self._device)
        self._copies = device_for(self._device)  # for copies outside of a runner
        self._dropped = False  # whether the weights were dropped by sleep
        self._runner: ModelRunner | None = None
        self._registry = Registry()
        self._profiler = Profiler()
        self._methods = with_extension(self.apply_model, config.parallel_config.worker_extension_cls)
        self._given = decisions or Decisions()
        self.decisions = Decisions()
        self._controls: dict[type, Callable[[Any], Any]] = {
            PrepareAdapter: lambda r: self._registry.prepare_adapter(r.number, r.adapter),
            DropAdapter: lambda r: self._registry.drop_adapter(r.number),
            PrepareGrammar: lambda r: self._registry.prepare_grammar(r.number, r.kind, r.text),
            DropGrammar: lambda r: self._registry.drop_grammar(r.number),
            DropFunctions: lambda r: self._registry.drop_functions(r.numbers),
            Sleep: lambda r: self.sleep(r.level),
            Wake: lambda r: self.wake(r.weights, r.kv_cache),
            SetParameters: lambda r: self.set_parameters([_as_tensor(rows) for rows in r.rows]),
            ReleaseMemory: lambda r: self.release_memory(),
            StartProfile: lambda r: self._profiler.start(r.prefix),
            StopProfile: lambda r: self._profiler.stop(),
            Explain: lambda r: self.explain(),
        }

    # ------------------------------------------------------------------ what a kind of model does its own way

    def launch(self, plan: StepPlan) -> PendingStep:
        raise NotImplementedError

    def sleep(self, level: int) -> None:
        """See `control.Sleep`."""
        raise NotImplementedError

    def wake(self, weights: bool, kv_cache: bool) -> None:
        """See `control.Wake`."""
        raise NotImplementedError

    def set_parameters(self, rows: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """See `control.SetParameters`."""
        raise NotImplementedError

    def apply_model(self, func: Callable[[nn.Module], Any]) -> Any:
        """Return ``func(model)``. All parameters of the model are unpacked during the call."""
        raise NotImplementedError

    def explain(self) -> list[str]:
        """Lines of text about the model's properties and the decisions made for it."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what is the same for all

    def warm_up(self) -> None:
        self.decisions.device_bytes = max(0, self._free_at_first - free_bytes(self._device))

    def control(self, record: Control) -> Any:
        return self._controls[type(record)](record)

    def lend_functions(self, functions: Sequence[Callable[..., Any]]) -> tuple[int, ...]:
        return self._registry.lend_functions(functions)

    def run_method(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        return [self._methods.run(method, args, kwargs)]

    def span(self, name: str) -> AbstractContextManager[Any]:
        return self._profiler.span(name)

    def release_memory(self) -> None:
        self._copies.release_memory()

    # ------------------------------------------------------------------ for subclasses

    def _count_blocks(
        self,
        config: EngineConfig,
        layout: KVLayout,
        model: PagedModel,
        graph_sizes: Sequence[int] = (),
        beside: int = 0,
    ) -> tuple[int, int]:
        """The number of blocks and the length of the longest request: those of the previous core, or by
        `count_blocks`."""
        count = self._given.num_blocks, self._given.max_model_len
        if not self._given.num_blocks:
            count = count_blocks(config, layout, model, self._backend, graph_sizes, beside)
        self.decisions.num_blocks, self.decisions.max_model_len = count
        return count

    def _prepare(self, specs: Sequence[AttentionSpec], dtype: torch.dtype) -> None:
        prepare_kernels(self._backend, specs, dtype, self._cache_dtype(dtype))

    def _cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return cache_dtype(self._config.cache_config.kv_cache_dtype, dtype)

    def _lay_out(self, model: PagedModel) -> KVLayout:
        return model.lay_out(self._backend, self._config.cache_config.block_size, self._cache_dtype(model.dtype))

    def _model_facts(self, model: PagedModel | EncoderModel, max_model_len: int, **more: Any) -> ModelFacts:
        dtype = str(model.dtype).removeprefix("torch.")
        return ModelFacts(model.vocab_size, model.hidden_size, max_model_len, dtype, **more)

    def _make_runner(self, model: PagedModel, layout: KVLayout, facts: WorkerFacts) -> ModelRunner:
        scheduler = self._config.scheduler_config
        return ModelRunner(
            model,
            layout,
            self._backend,
            facts.num_blocks,
            scheduler.max_num_seqs,
            facts.max_model_len,
            scheduler.max_num_batched_tokens,
            host_blocks=facts.num_host_blocks,
            registry=self._registry,
        )

    def _collect(self) -> None:
        """Return unused memory to the system."""
        gc.collect()
        host_memory.trim()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class LackedMemory:
    """A `PendingStep` whose launch failed because the device lacked memory."""

    lacks_memory = True

    def __init__(self, plan: StepPlan, why: str) -> None:
        self._plan, self._why = plan, why

    def wait(self) -> list[StepResult]:
        nothing = np.zeros(len(self._plan.slots), np.int32)
        return [StepResult(self._plan.id, nothing, np.zeros(0, np.int64), lack=self._why)]


def lack_in(error: RuntimeError) -> str:
    """The message of an error that means lack of device memory. Any other error is raised again. Some libraries report
    it with a text of their own: cuBLAS could not allocate its workspace, or FlashInfer's is too small for the step."""
    said = ("CUBLAS_STATUS_ALLOC_FAILED", "Buffer overflow")
    if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in said):
        raise error
    return str(error).partition("\n")[0] or "out of memory"


def row_errors(plan: StepPlan, errors: Mapping[int, Exception]) -> list[RowError]:
    """Convert errors by slot to errors by row of the plan."""
    rows = {slot: row for row, slot in enumerate(plan.slots.tolist())} if errors else {}
    return [RowError(rows[slot], wire_name(error), wire_text(error)) for slot, error in errors.items()]


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def empty(tensors: Sequence[torch.Tensor]) -> None:
    """Free the memory of `tensors`. The tensor objects stay, so that the weights can be set again."""
    for tensor in tensors:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """A digest that identifies weights without reading all of them: it covers each parameter's name, shape, dtype, and
    a few of its values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in weights.items():
        values = parameter.flatten()[:: max(1, parameter.numel() // 8)].float()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {values.tolist()}".encode())
    return digest.hexdigest()


def _as_tensor(rows: ParameterRows) -> tuple[str, int, torch.Tensor]:
    values = torch.from_numpy(rows.values.copy())
    return rows.name, rows.start, values.view(torch.bfloat16) if rows.values.dtype == np.uint16 else values
