"""How a core runs its model: two calls a step, so that masks can be made while the forward runs.

Neither waits, so that several steps can be in flight."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
import numpy as np
import torch
from torch import nn

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidRequestError, NotSupportedError, OutOfMemoryError
from ...ipc.messages import ModelFacts
from ...kernels import host_memory
from ...kernels.contract import AttentionSpec, Backend
from ..memory.host_cache import count_slots, offloading_bytes
from ..model.learn.fuse import Decision
from ..model.load.kept_decisions import KeptDecisions
from ..model.load.loader import load_model
from ..model.load.quantized import BITS
from ..model.run.lora import AdaptedBackend
from ..model.run.paged_model import PagedModel
from ..model.run.streamed_layers import offloaded_bytes
from ..model.run.whole_model import make_whole
from ..plan.step import Step
from .adapter_files import LoRALimits
from .backends import choose_backend, free_bytes, graph_sizes, pick_device, prepare_kernels, wait_for_memory
from .block_count import count_blocks, free_host_bytes
from .decisions import Decisions
from .device import device_for
from .draft import Drafter, load_draft
from .kv_layout import KVLayout, cache_dtype
from .logprobs import Scores
from .runner import Launched, ModelRunner, Sampled

if TYPE_CHECKING:
    from ..model.run.encoder import EncoderModel


class Executor(Protocol):
    """One model, on one or several devices."""

    layout: KVLayout
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    accepts_embeddings: bool  # whether prompts may be embeddings
    lora_limits: LoRALimits | None  # where requests may have LoRA adapters
    decisions: Decisions
    asynchronous: bool  # whether the host has time to spare while a step runs

    def warm_up(self) -> None:
        """Do once what would make the first steps slow."""

    def release_memory(self) -> None:
        """After a step that found none."""

    def sleep(self, level: int) -> None:
        """Give up the KV cache, and the GPU's memory for weights: they move to the host's, or with `level` 2 are
        dropped. No step may be in flight, and nobody hold a slot."""

    def wake(self, weights: bool, kv_cache: bool) -> None:
        """Have them again: weights as they were, or from the checkpoint; an empty cache once both are there."""

    def set_parameters(self, parts: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """Replace rows of parameters, given by their names in the checkpoint and the first row.

        Raises:
            InvalidRequestError: the weights sleep, or are quantized; then, and with the others, nothing is replaced.
            KeyError, ValueError: there is no such parameter, or it has another shape.
        """

    def apply_model(self, func: Callable[[nn.Module], Any]) -> Any:
        """What `func` makes of the model, with all parameters in their places."""

    def facts(self) -> ModelFacts:
        """What frontends must know of the model."""

    def explain(self) -> list[str]:
        """What was learned of the model and decided, line by line."""

    def execute(self, step: Step) -> Any:
        """Launch the forward of `step`."""

    def sample(self, launched: Any) -> Any:
        """Launch the choice of its tokens."""

    def tokens(self, sampled: Any) -> np.ndarray:
        """Wait for the tokens: int64, one for each row that samples."""

    def logprobs(self, sampled: Any) -> tuple[list[Scores], list[Scores]]:
        """Wait for log probabilities: those of rows that sample, and those of each of the step's prompt parts."""


def executor_for(
    config: EngineConfig,
    decisions: Decisions | Mapping[str, Any] | None = None,
    kept: KeptDecisions | None = None,
) -> Executor:
    """The executor of what a checkpoint is, or is asked to be: one that chooses tokens, or one that pools. `decisions`
    are those of the core before, as they are or decoded from a message; for a first core, `kept` may have some of
    fusing."""
    from ..model.run.pooling import wants_pooling
    from .pooling_executor import PoolingExecutor  # which is made of parts of this file

    kind = PoolingExecutor if wants_pooling(config.model_config, config.load_config) else UniprocExecutor
    return kind(config, None if decisions is None else msgspec.convert(decisions, Decisions), kept)


class LocalExecutor(Executor):
    """What executors of a model in this process, on one device, have in common."""

    num_host_blocks = 0
    lora_limits: LoRALimits | None = None
    _facts: ModelFacts
    _explained: list[str]

    def __init__(self, config: EngineConfig, decisions: Decisions | None) -> None:
        self._config = config
        self._device = pick_device(config.device_config.device)
        if decisions is not None:
            wait_for_memory(self._device, decisions.device_bytes)
        self._free_at_first = free_bytes(self._device)
        self._backend = choose_backend(config.device_config, self._device)
        self._copies = device_for(self._device)  # that are no runner's
        self._dropped = False  # its weights
        self._runner: ModelRunner | None = None
        self._given = decisions or Decisions()
        self.decisions = Decisions()

    def _count_blocks(
        self, config: EngineConfig, model: PagedModel, graph_sizes: Sequence[int] = (), beside: int = 0
    ) -> None:
        """Settle the size of the pool and the longest request: as given, or by `count_blocks`."""
        count = self._given.num_blocks, self._given.max_model_len
        if not count[0]:
            count = count_blocks(config, self.layout, model, self._backend, graph_sizes, beside)
        self.num_blocks, self.max_model_len = self.decisions.num_blocks, self.decisions.max_model_len = count

    def _prepare(self, specs: Sequence[AttentionSpec], dtype: torch.dtype) -> None:
        prepare_kernels(self._backend, specs, dtype, self._cache_dtype(dtype))

    def _cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return cache_dtype(self._config.cache_config.kv_cache_dtype, dtype)

    def _lay_out(self, model: PagedModel) -> KVLayout:
        return model.lay_out(self._backend, self._config.cache_config.block_size, self._cache_dtype(model.dtype))

    def _facts_of(self, model: PagedModel | EncoderModel, **more: Any) -> ModelFacts:
        dtype = str(model.dtype).removeprefix("torch.")
        return ModelFacts(model.vocab_size, model.hidden_size, self.max_model_len, dtype, **more)

    def _make_runner(self, model: PagedModel) -> ModelRunner:
        scheduler = self._config.scheduler_config
        return ModelRunner(
            model,
            self.layout,
            self._backend,
            self.num_blocks,
            scheduler.max_num_seqs,
            self.max_model_len,
            scheduler.max_num_batched_tokens,
            host_blocks=self.num_host_blocks,
        )

    def warm_up(self) -> None:
        self.decisions.device_bytes = max(0, self._free_at_first - free_bytes(self._device))

    def _collect(self) -> None:
        """Let the system have what was let go."""
        gc.collect()
        host_memory.trim()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def facts(self) -> ModelFacts:
        return self._facts

    def explain(self) -> list[str]:
        return self._explained


class UniprocExecutor(LocalExecutor):
    """One that chooses tokens."""

    def __init__(
        self, config: EngineConfig, decisions: Decisions | None = None, kept: KeptDecisions | None = None
    ) -> None:
        scheduler, host_bytes = config.scheduler_config, offloading_bytes(config.cache_config)
        super().__init__(config, decisions)
        self._offload = offloaded_bytes(config, self._device)
        self._loras: AdaptedBackend | None = None
        if config.lora_config.enable_lora:
            self._loras = AdaptedBackend(self._backend, scheduler.max_num_seqs, config.lora_config.max_loras)
            self._backend = cast(Backend, self._loras)
        model = self._load(kept if decisions is None else decisions.fusing)
        self.lora_limits = None if self._loras is None else _lora_limits(config, model, self._loras)
        self._explained = model.explain()
        self.layout = self._lay_out(model)
        self._graph_sizes = graph_sizes(config.device_config, self._device, scheduler.max_num_seqs)
        self._draft = load_draft(config, model, self.layout)
        beside = self._draft.layout.block_bytes if self._draft else 0
        self._count_blocks(config, model, self._graph_sizes, beside)
        self.num_host_blocks = count_slots(host_bytes, self.layout.block_bytes, free_host_bytes())
        self.accepts_embeddings = model.accepts_embeddings
        self._facts = self._facts_of(model, eos_token_ids=list(model.eos_token_ids), fingerprint=self._fingerprint)
        self.decisions.fusing = model.decisions
        self._model = model
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights that left the GPU, and what they are
        self._drafter: Drafter | None = None
        self._make_runners()
        self.asynchronous = self.runner.device.asynchronous

    def _load(self, decisions: Mapping[str, Decision] | KeptDecisions | None) -> PagedModel:
        config, backend = self._config, self._backend
        model = load_model(
            config.model_config,
            config.load_config,
            self._device,
            config.model_config.max_model_len,
            backend,
            decisions,
            self._prepare,
            self._offload,
        )
        self._fingerprint = fingerprint({name: model.parameters.get(name) for name in model.parameters.names()})
        bits = BITS.get(config.model_config.quantization or "")
        if self._loras is None:
            make_whole(model, backend, bits, model.quantized)
        model.is_quantized, model.quantized = bits is not None or model.quantized is not None, None
        model.verified = None
        return model

    def _make_runners(self) -> None:
        self._runner = self._make_runner(self.model)
        if self._draft is not None:
            self._drafter = Drafter(self._draft, self._config, self.num_blocks, self.max_model_len, self._runner)

    @property
    def model(self) -> PagedModel:
        """Raises `InvalidRequestError` while its weights are not there."""
        if self._dropped or self._on_host:
            raise InvalidRequestError("the weights sleep: call wake_up first")
        return self._model

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "a step while the core sleeps"
        return self._runner

    def sleep(self, level: int) -> None:
        if self._runner is not None:
            self._runner.give_back()
            if self._drafter is not None:
                self._drafter.runner.give_back()
            self._runner = self._drafter = None
        if self._loras is not None:
            self._loras.forget()
        models = [self._model, *([self._draft.model] if self._draft else [])]
        if level == 2 and not self._dropped:
            self._dropped, self._on_host = True, []
            for model in models:
                if model.whole is not None:
                    model.whole.decoder.give_back()
                empty(tensors_of(model.model))
                if model.streamed is not None:
                    model.streamed.sleep(drop=True)
        elif self._copies.asynchronous and not (self._on_host or self._dropped):
            tensors = [x for model in models for x in _resident(model)]
            self._on_host = [(x, self._copies.host_blocks(tuple(x.shape), x.dtype).copy_(x.data)) for x in tensors]
            empty(tensors)
            if self._model.streamed is not None:
                self._model.streamed.sleep()
        self._collect()

    def wake(self, weights: bool, kv_cache: bool) -> None:
        if weights and self._dropped:
            model = self._load(self.decisions.fusing)
            if model.whole is not None:
                self._model = model
            else:  # others know its tensors by their identity
                for tensor, loaded in zip(_resident(self._model), _resident(model), strict=True):
                    tensor.data = loaded.data
                if self._model.streamed is not None:
                    assert model.streamed is not None
                    self._model.streamed.wake(model.streamed)
            self._draft = load_draft(self._config, self._model, self.layout)
            self._dropped = False
        if weights:
            for tensor, held in self._on_host:
                tensor.data = held.to(self._device)
            if self._on_host and self._model.streamed is not None:
                self._model.streamed.wake()
            self._on_host = []
        if kv_cache and self._runner is None:
            try:
                self._make_runners()
                self.warm_up()
            except BaseException:
                self._runner = self._drafter = None
                raise

    def warm_up(self) -> None:
        if self.asynchronous:
            try:
                self.runner.warm_up(self._graph_sizes)
                if self._drafter is not None:
                    self._drafter.warm_up()
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError(
                    "no memory is left for CUDA graphs: lower gpu_memory_utilization, or the size given for the cache, "
                    f"or set enforce_eager ({str(error).partition(chr(10))[0]})"
                ) from error
            super().warm_up()

    def release_memory(self) -> None:
        self.runner.device.release_memory()

    def set_parameters(self, parts: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        model = self.model
        if model.is_quantized:
            raise InvalidRequestError("the weights are quantized: only those of a model without quantization change")
        for part in parts:
            model.parameters.check(*part)
        for name, start, values in parts:
            model.parameters.set(name, values.to(model.parameters.dtype(name)), start)

    def apply_model(self, func: Callable[[nn.Module], Any]) -> Any:
        with self.model.unpacked() as module:
            return func(module)

    def execute(self, step: Step) -> Launched:
        with lack_of_memory():
            self.runner.copy(step)
            if self._drafter is not None:
                self._drafter.write_guesses(step)
            return self.runner.execute(step)

    def sample(self, launched: Launched) -> Sampled:
        with lack_of_memory():
            return self.runner.sample(launched)

    def tokens(self, sampled: Sampled) -> np.ndarray:
        return sampled.tokens.wait()

    def logprobs(self, sampled: Sampled) -> tuple[list[Scores], list[Scores]]:
        return [one.wait() for one in sampled.logprobs], [one.wait() for one in sampled.prompt_logprobs]


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """All that takes the memory of weights."""
    return [*module.parameters(), *module.buffers()]


def _resident(model: PagedModel) -> list[torch.Tensor]:
    """Those that are not streamed."""
    streamed = model.streamed.weights if model.streamed is not None else {}
    return [tensor for tensor in tensors_of(model.model) if id(tensor) not in streamed]


def empty(tensors: Sequence[torch.Tensor]) -> None:
    """Let their memory go, and them be the tensors that they are."""
    for tensor in tensors:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _lora_limits(config: EngineConfig, model: PagedModel, loras: AdaptedBackend) -> LoRALimits:
    if model.is_quantized:
        raise NotSupportedError("enable_lora with quantized weights is not supported yet: choose one of them")
    places = loras.attach(model)
    model.notes.append(f"layer by layer: enable_lora; adapters may change {len(places)} linear layers")
    saved = 2 * 4 * model.hidden_size * model.vocab_size  # output layer and embedding
    return LoRALimits(places, config.lora_config.max_lora_rank, model.parameters, saved)


@contextmanager
def lack_of_memory() -> Iterator[None]:
    """Libraries have their own words for it: cuBLAS found no workspace, FlashInfer's is too small for the step."""
    try:
        yield
    except RuntimeError as error:
        if any(words in str(error) for words in ("CUBLAS_STATUS_ALLOC_FAILED", "Buffer overflow")):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """Tells weights apart, without reading all of them: every parameter's name, shape, and a few of its values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in weights.items():
        values = parameter.flatten()[:: max(1, parameter.numel() // 8)].float()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {values.tolist()}".encode())
    return digest.hexdigest()
