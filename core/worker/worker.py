"""The base class of workers that run in the planner's process, on one device."""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from ...ipc.config import CacheConfig, EngineConfig, ModelConfig
from ...ipc.errors import NotSupportedError, wire_name, wire_text
from ...ipc.messages import ModelFacts
from ...kernels import host_memory
from ...kernels.contract import Backend
from ..memory.recurrent_state import num_states
from ..memory.updates import LayerGroup
from ..model.learn.fuse import Decision
from ..model.learn.verify import agree, final_logits, sample_of, verify_final
from ..model.learn.verify_media import verify_media
from ..model.learn.whole_match import make_whole
from ..model.load.kept_decisions import KeptDecisions, Verified
from ..model.load.loader import load_model
from ..model.load.parameters import few_values
from ..model.load.quantized import BITS
from ..model.media.features import EncodedItem
from ..model.media.merge import MergedPrompt
from ..model.run.paged_model import PagedModel
from ..parallel.group import OneRank, RankGroup
from ..parallel.homes import Homes
from ..parallel.parallel_backend import ParallelBackend, adapters_of
from ..parallel.stages import Stages
from ..plan import control as records
from ..plan.control import Worker
from ..plan.step import RowError, StepPlan, StepResult
from .adapter_files import LoRALimits
from .backends import choose_backend, free_bytes, pick_device, prepare_kernels, wait_for_memory
from .block_count import count_blocks, count_snapshots
from .device import device_for
from .kv_layout import KVLayout, LayerShape, cache_dtype
from .media_items import MediaItems
from .profiler import Profiler
from .registry import Registry
from .rpc import with_extension
from .runner import ModelRunner
from .stage_facts import StageFacts
from .weight_receiver import WeightReceiver

if TYPE_CHECKING:
    from ..model.run.encoder import EncoderModel


class Decisions(msgspec.Struct, kw_only=True):
    """The results of a start's measurements, which another worker reuses: the worker started after a crash, or another
    rank of the same model. Ranks with different fused modules or block counts would compute different steps."""

    fusing: dict[str, Decision] = {}  # which modules `fuse_model` fused, by their names
    num_blocks: int = 0  # in the pool, the null block included; 0: not measured yet
    max_model_len: int = 0  # tokens of the longest request that the blocks and the model allow
    num_snapshots: int = 0  # of recurrent state
    device_bytes: int = 0  # GPU memory that the worker occupies


logger = logging.getLogger(__name__)


class LocalWorker(Worker):
    """See `Worker`. A subclass loads a model, or one rank's part of it, and runs its steps.

    Args:
        group: of the processes that compute the model together; None: there is one.
    """

    error = None

    def __init__(self, config: EngineConfig, decisions: Decisions | None, group: RankGroup | None = None) -> None:
        self._config, self._group = config, group
        self._num_ranks, rank = (1, 0) if group is None else (group.size, group.rank)
        self._leads = rank == 0
        self._stages: Stages | None = None  # if the ranks are of several
        self._tensor_group = group  # of the ranks that share layers
        if group is not None and (count := config.parallel_config.pipeline_parallel_size) > 1:
            self._stages = Stages(group, count, config.parallel_config.tensor_parallel_size)
            self._tensor_group, rank = self._stages.group_of_stage(), self._stages.rank
        self._device = pick_device(config.device_config.device) if group is None else group.device
        parallel = config.parallel_config
        shares = parallel.ordered_sums and not parallel.disable_custom_all_reduce
        if self._tensor_group is not None and self._device.type == "cuda" and shares:
            self._tensor_group.share_memory(bool(parallel.sum_parts))
        if decisions is not None:
            wait_for_memory(self._device, decisions.device_bytes)
        self._free_at_first = free_bytes(self._device)
        self._backend = choose_backend(config.device_config, self._device)
        self._copies = device_for(self._device)  # for copies outside of a runner
        self.interrupt = np.zeros(1, np.int32)
        self.beat: Callable[[], None] = lambda: None
        self._dropped = False  # whether the weights were dropped by sleep
        self._runner: ModelRunner | None = None
        self._registry = Registry()
        self._recurrent: list[LayerGroup] = []  # the group of layers with recurrent state, if there are any
        self._profiler = Profiler()
        self._receiver = WeightReceiver(keeps=self._leads)
        self.on_plan: Callable[[StepPlan], None] = lambda plan: None  # tells the other ranks, before a step is computed
        self._explained: list[str] = []  # lines about the model's properties and the decisions made for it
        extension = config.parallel_config.worker_extension_cls
        self._methods = with_extension(self.apply_model, self.parameters, extension, rank)
        self.decisions = Decisions() if decisions is None else replace(decisions)
        self._controls: dict[type, Callable[[Any], Any]] = {
            records.PrepareAdapter: lambda r: self._registry.prepare_adapter(r.number, r.adapter, r.frontend),
            records.DropAdapter: lambda r: self._registry.drop_adapter(r.number),
            records.PrepareGrammar: lambda r: self._registry.prepare_grammar(r.number, r.kind, r.text, r.frontend),
            records.DropGrammar: lambda r: self._registry.drop_grammar(r.number),
            records.DropFunctions: lambda r: self._registry.drop_functions(r.numbers),
            records.CheckSampling: lambda r: self._registry.processors.check(r.sampling),
            records.KeepMedia: lambda r: self.keep_media(r),
            records.DropMedia: lambda r: self.drop_media(r.number),
            records.Sleep: lambda r: self.sleep(r.level),
            records.Wake: lambda r: self.wake(r.weights, r.kv_cache),
            records.SetParameters: lambda r: self.set_parameters(r.rows),
            records.JoinTrainer: self._receiver.join,
            records.LeaveTrainer: lambda r: self._receiver.leave(),
            records.ReceiveParameters: self._receiver.receive,
            records.ReleaseMemory: lambda r: self._copies.release_memory(),
            records.StartProfile: lambda r: self._profiler.start(r.prefix),
            records.StopProfile: lambda r: self._profiler.stop(),
            records.Explain: lambda r: self._explained,
        }

    # ------------------------------------------------------------------ what a kind of model does its own way

    def follow(self, plan: StepPlan) -> None:
        """Take part in a step of the first rank's, as another one: compute it, and choose nothing."""
        raise NotImplementedError

    def keep_media(self, record: records.KeepMedia) -> None:
        """See `control.KeepMedia`."""
        raise NotImplementedError

    def drop_media(self, number: int) -> None:
        """See `control.DropMedia`."""
        raise NotImplementedError

    def sleep(self, level: int) -> None:
        """See `control.Sleep`."""
        raise NotImplementedError

    def wake(self, weights: bool, kv_cache: bool) -> None:
        """See `control.Wake`."""
        raise NotImplementedError

    def set_parameters(self, parts: Sequence[records.ParameterRows]) -> None:
        """See `control.SetParameters`."""
        raise NotImplementedError

    def apply_model(self, func: Callable[[nn.Module], Any]) -> Any:
        """Return ``func(model)``. All parameters of the model are unpacked during the call."""
        raise NotImplementedError

    def parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The parameters by their names in a checkpoint, those that are tied to another one left out."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what is the same for all

    def warm_up(self) -> None:
        self.decisions.device_bytes = max(0, self._free_at_first - free_bytes(self._device))

    def catch_up(self) -> None:
        """Make the steps that were launched, and that are made only when they are waited for: ranks that share layers
        with this one may be in the middle of them."""

    def control(self, record: records.Control) -> Any:
        return self._controls[type(record)](record)

    def agreed(self) -> list[Any]:
        """What must be the same on all ranks, or a plan of the first one would mean something else on another."""
        facts = self.facts
        groups = [(g.kind, g.window, g.slots, g.backups, g.snapshots, g.host_snapshots) for g in facts.groups]
        return [facts.num_blocks, facts.max_model_len, facts.num_host_blocks, *groups]

    def lend_functions(self, functions: Sequence[Callable[..., Any]]) -> tuple[int, ...]:
        return self._registry.lend_functions(functions)

    def run_method(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        return [self._methods.run(method, args, kwargs)]

    def span(self, name: str) -> AbstractContextManager[Any]:
        return self._profiler.span(name)

    def close(self) -> None:
        pass

    # ------------------------------------------------------------------ for subclasses

    def _count_blocks(
        self,
        config: EngineConfig,
        layout: KVLayout,
        model: PagedModel,
        graph_sizes: Sequence[int] = (),
        beside: int = 0,
        stages: StageFacts | None = None,
    ) -> tuple[int, int]:
        """The number of blocks and the length of the longest request: those of the previous core, or by
        `count_blocks`."""
        found, states = self.decisions, model.states
        state_bytes, tells_prompts = (0, False) if states is None else (states.state_bytes, states.tells_prompts)
        if stages is not None:
            state_bytes, tells_prompts = stages.state_bytes, stages.tells_prompts
        if state_bytes:
            slots, guesses = config.scheduler_config.max_num_seqs, config.speculative_config is not None
            group = LayerGroup(
                "recurrent", token_bytes=state_bytes, slots=slots, backups=guesses, prompts_only=tells_prompts
            )
            self._recurrent = [group]
        if not found.num_blocks:
            with nullcontext() if self._stages is None else self._stages.silence():
                count = count_blocks(config, layout, model, self._backend, graph_sizes, beside, *self._recurrent)
            snapshots = sum(count_snapshots(config, layout, count[0], group) for group in self._recurrent)
            found.num_blocks, found.max_model_len, found.num_snapshots = self._least(*count, snapshots)
        self._recurrent = [replace(group, snapshots=found.num_snapshots) for group in self._recurrent]
        return found.num_blocks, found.max_model_len

    def _lacking(self, plan: StepPlan, error: RuntimeError) -> Pending:
        """See `lacking`. With several ranks any error is raised, because the others are in the middle of the step."""
        if self._group is not None:
            raise error
        return lacking(plan, error)

    def _least(self, *numbers: int) -> list[int]:
        """The smallest of the ranks' numbers, one by one."""
        return list(numbers) if self._group is None else self._group.least(numbers)

    def _model_facts(self, model: PagedModel | EncoderModel, max_model_len: int, **more: Any) -> ModelFacts:
        dtype = str(model.dtype).removeprefix("torch.")
        return ModelFacts(model.vocab_size, model.hidden_size, max_model_len, dtype, **more)

    def _make_runner(
        self,
        model: PagedModel,
        layout: KVLayout,
        backend: Backend,
        host_blocks: int = 0,
        media: MediaItems | None = None,
    ) -> ModelRunner:
        scheduler, facts = self._config.scheduler_config, self.facts
        return ModelRunner(
            model,
            layout,
            backend,
            facts.num_blocks,
            scheduler.max_num_seqs,
            facts.max_model_len,
            scheduler.max_num_batched_tokens,
            host_blocks,
            self._registry,
            sum(map(num_states, self._recurrent)) or None,
            sum(group.host_snapshots for group in self._recurrent),
            media,
        )

    def _compare_media(self, model: PagedModel, ids: list[int], items: list[EncodedItem], merged: MergedPrompt) -> None:
        """See `verify_media`."""
        states = model.states
        pool = None if states is None else states.pool
        try:
            line = verify_media(model, self._backend, ids, items, merged)
        finally:
            if states is not None and pool is not None:
                states.pool = pool
                if model.whole is not None:
                    model.whole.bind_states()
            assert self._runner is not None, "a step while the core sleeps"
            self._runner.bind()
        logger.info(line)
        self._explained.append(line)

    def _keep_tensors(self, kept: nn.Module, loaded: nn.Module) -> None:
        """A model was loaded, and the tensor objects of the one before are used for its weights: tell the backend."""
        if isinstance(self._backend, ParallelBackend):
            pairs = zip(tensors_of(loaded), tensors_of(kept), strict=True)
            self._backend.move({id(new): tensor for new, tensor in pairs})

    def _renew_copies(self, unseen: bool = False) -> None:
        """See `ParallelBackend.renew`."""
        if isinstance(self._backend, ParallelBackend):
            self._backend.renew(unseen)

    def _collect(self) -> None:
        """Return unused memory to the system."""
        if isinstance(self._backend, ParallelBackend):
            self._backend.pieces.clear()
        gc.collect()
        host_memory.trim()
        self._copies.release_memory()


def load_paged(
    config: EngineConfig,
    wanted: ModelConfig,
    device: torch.device,
    backend: Backend,
    decisions: Mapping[str, Decision] | KeptDecisions | None = None,
    offload: int = 0,
    stages: Stages | None = None,
    thorough: bool = False,
) -> tuple[PagedModel, str]:
    """Load the model `wanted`, and let `backend` run it as a whole if it can. Returns also the fingerprint of its
    weights. thorough: see `KeptDecisions`. Other arguments, and errors, as `load_model`."""
    if (stages is not None or isinstance(backend, ParallelBackend)) and isinstance(decisions, KeptDecisions):
        decisions = None  # several ranks verify at each start
    kept = decisions if isinstance(decisions, KeptDecisions) else None
    layered = adapters_of(backend) is not None or config.model_config.enable_return_routed_experts
    if kept is not None:
        kept.settings = f"{wanted.quantization} {config.model_config.max_model_len} {layered}"
        kept.thorough = thorough or layered or wanted.quantization is not None
    model = load_model(
        wanted,
        config.load_config,
        device,
        config.model_config.max_model_len,
        backend,
        decisions,
        partial(prepare_kernels, backend, config.cache_config.kv_cache_dtype),
        offload,
        config.parallel_config.enable_expert_parallel,
        stages,
    )
    weights = fingerprint((name, model.parameters.get(name)) for name in model.parameters.names())
    bits = None if model.is_quantized else BITS.get(wanted.quantization or "")
    model.is_quantized = model.is_quantized or bits is not None
    try:
        if model.is_quantized or not layered:
            with nullcontext() if stages is None else stages.silence():
                make_whole(model, backend, bits)
        sound = kept is None or not kept.can_keep or _confirmed(model, backend, kept)
    except Exception:
        if model.own is None:
            raise
        sound = False
    if not sound:
        logger.info("the model gives other logits than alone or at an earlier start: it is loaded and verified anew")
        thorough = model.own is not None
        del model
        return load_paged(config, wanted, device, backend, decisions, offload, thorough=thorough)
    model.verified = model.own = None
    return model, weights


def _confirmed(model: PagedModel, backend: Backend, kept: KeptDecisions) -> bool:
    """Compare the logits of a model in its final form with its own if it is not verified yet, or with those of an
    earlier start that verified it, and keep them for the next. The second of two loads always verifies, because
    `KeptDecisions.find` removes the file."""
    logits = final_logits(model, backend) if model.verified is None else model.verified[1]
    if model.own is not None:
        if (line := verify_final(model, logits)) is None:
            return False
        model.verdict = [line]
        model.notes.append(line)
    logits, verified = sample_of(logits), kept.verified
    if verified is None:
        verified = Verified(model.verdict, logits.flatten().tolist())
    elif not agree(logits, torch.tensor(verified.logits), model.dtype):
        return False
    kept.keep(model.decisions, verified)
    return True


def with_ranks(config: EngineConfig, backend: Backend, group: RankGroup | None) -> Backend:
    """The backend of one of several ranks, or of one that adds as several do; or `backend` as it is."""
    parts = config.parallel_config.sum_parts
    if group is None and not parts:
        return backend
    homes = Homes(group) if group is not None and config.parallel_config.homes > 1 else None
    return cast(Backend, ParallelBackend(backend, group or OneRank(), parts, homes))


def lora_limits(config: EngineConfig, model: PagedModel, backend: Backend, prefix: str = "") -> LoRALimits:
    """Let the linear layers of `model` have adapters, those of its backend.

    Args:
        prefix: of the model's path in a larger one, under which adapters may name its layers, too.
    """
    if model.cross is not None:
        raise NotSupportedError(
            "enable_lora is set, but adapters can't change an encoder, which this model has: unset it"
        )
    loras = adapters_of(backend)
    assert loras is not None, "enable_lora gives the backend adapters"
    places = loras.attach(model, backend)
    model.notes.append(f"layer by layer: enable_lora; adapters may change {len(places)} linear layers")
    saved = 2 * 4 * model.hidden_size * model.vocab_size  # fp32 copies of the output layer and the embedding
    places |= {prefix + name: place for name, place in places.items()}
    return LoRALimits(places, config.lora_config.max_lora_rank, model.parameters, saved)


def lay_out(
    cache: CacheConfig, model: PagedModel, backend: Backend, most: Mapping[LayerShape, int] | None = None
) -> KVLayout:
    return model.lay_out(backend, cache.block_size, cache_dtype(cache.kv_cache_dtype, model.dtype), most)


class Pending(NamedTuple):
    """See `PendingStep`."""

    wait: Callable[[], StepResult]
    lacks_memory: bool = False


def lacking(plan: StepPlan, error: RuntimeError) -> Pending:
    """The result of a plan whose launch failed with `error`, if that means lack of device memory. Any other error is
    raised again. Some libraries report it with a text of their own: cuBLAS could not allocate its workspace, or
    FlashInfer's is too small for the step."""
    said = ("CUBLAS_STATUS_ALLOC_FAILED", "Buffer overflow")
    if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in said):
        raise error
    why = str(error).partition("\n")[0] or "out of memory"
    result = StepResult(plan.id, np.zeros(len(plan.slots), np.int32), np.zeros(0, np.int64), lack=why)
    return Pending(lambda: result, lacks_memory=True)


def row_errors(plan: StepPlan, errors: Mapping[int, Exception]) -> list[RowError]:
    """Convert errors by slot to errors by row of the plan."""
    rows = plan.slots.tolist()
    return [RowError(rows.index(slot), wire_name(error), wire_text(error)) for slot, error in errors.items()]


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def empty(tensors: Sequence[torch.Tensor]) -> None:
    """Free the memory of `tensors`. The tensor objects stay, so that the weights can be set again."""
    for tensor in tensors:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def move(
    tensors: Sequence[torch.Tensor], allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
) -> list[torch.Tensor]:
    """Move `tensors` to memory that `allocate` gives (uint8), and return this. Those that share memory share it there,
    too."""
    moved: dict[int, torch.Tensor] = {}
    views = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if (address := storage.data_ptr()) not in moved:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            moved[address] = allocate((len(whole),), torch.uint8).copy_(whole)
        memory = moved[address].view(tensor.dtype)
        views.append(memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    for tensor, view in zip(tensors, views, strict=True):  # nothing has moved if there was too little memory
        tensor.data = view
    return list(moved.values())


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest that identifies weights without reading all of them: it covers each parameter's name, shape, dtype, and
    a few of its values. Parameters are read one by one, because those of packed weights are copies."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in weights:
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {few_values(parameter)}".encode())
    return digest.hexdigest()
