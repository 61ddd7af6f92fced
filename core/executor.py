"""How a core runs its model: two calls a step, so that masks can be made while the forward runs.

Neither waits, so that several steps can be in flight."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import nn

from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidRequestError, NotSupportedError, OutOfMemoryError
from ..ipc.messages import ModelFacts
from ..kernels import host_memory
from ..kernels.interface import Backend
from .adapter_files import LoRALimits
from .draft import Drafter, load_draft
from .gpu import choose_backend, free_bytes, graph_sizes, pick_device, prepare_kernels, wait_for_memory
from .host_cache import count_slots, offloading_bytes
from .kv_layout import KVLayout, cache_dtype, plan_layout
from .logprobs import Scores
from .memory import count_blocks, free_host_bytes
from .model.kept import KeptDecisions
from .model.loader import load_model
from .model.lora import AdaptedBackend
from .model.paged_model import PagedModel
from .model.quantized import BITS
from .model.whole import make_whole
from .model_runner import Launched, ModelRunner, Sampled
from .step import Step


class Executor(Protocol):
    """One model, on one or several devices."""

    layout: KVLayout
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    accepts_embeddings: bool  # whether prompts may be embeddings
    lora_limits: LoRALimits | None  # where requests may have LoRA adapters
    decisions: dict[str, Any]  # what a restart need not find out again
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
    config: EngineConfig, decisions: Mapping[str, Any] | None = None, kept: KeptDecisions | None = None
) -> Executor:
    """The executor of what a checkpoint is, or is asked to be: one that chooses tokens, or one that pools. `decisions`
    are those of the core before; for a first core, `kept` may have some of fusing."""
    from .model.pooling import wants_pooling
    from .pooling_executor import PoolingExecutor  # which is made of parts of this file

    kind = PoolingExecutor if wants_pooling(config.model_config, config.load_config) else UniprocExecutor
    return kind(config, decisions, kept)


class UniprocExecutor:
    """The model in this process, on one device."""

    def __init__(
        self, config: EngineConfig, decisions: Mapping[str, Any] | None = None, kept: KeptDecisions | None = None
    ) -> None:
        self._config, cache, scheduler = config, config.cache_config, config.scheduler_config
        self._device = device = pick_device(config.device_config.device)
        host_bytes = offloading_bytes(cache)
        if decisions is not None:
            wait_for_memory(device, decisions["device_bytes"])
        self._free_at_first = free_bytes(device)
        self._backend = choose_backend(config.device_config, device)
        self._loras: AdaptedBackend | None = None
        if config.lora_config.enable_lora:
            self._loras = AdaptedBackend(self._backend, scheduler.max_num_seqs, config.lora_config.max_loras)
            self._backend = cast(Backend, self._loras)
        backend = self._backend
        model = self._load(kept if decisions is None else decisions["fusing"])
        self.lora_limits = None if self._loras is None else _lora_limits(config, model, self._loras)
        self._explained = model.explain()
        kv_dtype = cache_dtype(cache.kv_cache_dtype, model.dtype)
        self.layout = plan_layout(
            model.layers, model.sources, cache.block_size, kv_dtype, backend.cache_dim, backend.heads_first
        )
        self._graph_sizes = graph_sizes(config.device_config, device, scheduler.max_num_seqs)
        self._draft = load_draft(config, model, self.layout)
        self.num_blocks, self.max_model_len = count_blocks(
            config, self.layout, model, backend, self._graph_sizes, self._draft.layout.block_bytes if self._draft else 0
        )
        self.num_host_blocks = count_slots(host_bytes, self.layout.block_bytes, free_host_bytes())
        self.accepts_embeddings = model.accepts_embeddings
        self._facts = ModelFacts(
            model.vocab_size,
            model.hidden_size,
            self.max_model_len,
            str(model.dtype).removeprefix("torch."),
            list(model.eos_token_ids),
            self._fingerprint,
        )
        self.decisions: dict[str, Any] = {"fusing": model.decisions, "device_bytes": 0}
        self._model = model
        self._dropped = False  # its weights
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights that left the GPU, and what they are
        self._runner: ModelRunner | None = None
        self._drafter: Drafter | None = None
        self._make_runners()
        self.asynchronous = self.runner.device.asynchronous

    def _load(self, decisions: Mapping[str, Any] | KeptDecisions | None) -> PagedModel:
        config, backend = self._config, self._backend
        kv_dtype = config.cache_config.kv_cache_dtype
        model = load_model(
            config.model_config,
            config.load_config,
            self._device,
            config.model_config.max_model_len,
            backend,
            decisions,
            lambda specs, dtype: prepare_kernels(backend, specs, dtype, cache_dtype(kv_dtype, dtype)),
        )
        self._fingerprint = fingerprint(model.model)
        bits = BITS.get(config.model_config.quantization or "")
        if self._loras is None:
            make_whole(model, backend, bits, model.quantized)
        model.is_quantized, model.quantized = bits is not None or model.quantized is not None, None
        return model

    def _make_runners(self) -> None:
        scheduler = self._config.scheduler_config
        self._runner = ModelRunner(
            self.model,
            self.layout,
            self._backend,
            self.num_blocks,
            scheduler.max_num_seqs,
            self.max_model_len,
            scheduler.max_num_batched_tokens,
            host_blocks=self.num_host_blocks,
        )
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
            for runner in (self._runner, *([self._drafter.runner] if self._drafter else [])):
                host_memory.give_back(runner.pool)
                runner.model.unbind()
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
        elif self._device.type == "cuda" and not (self._on_host or self._dropped):
            self._on_host = [(x, x.data.to("cpu").pin_memory()) for model in models for x in tensors_of(model.model)]
            empty([tensor for tensor, _ in self._on_host])
        gc.collect()
        host_memory.trim()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, weights: bool, kv_cache: bool) -> None:
        if weights and self._dropped:
            model = self._load(self.decisions["fusing"])
            if model.whole is not None:
                self._model = model
            else:  # others know its tensors by their identity
                for tensor, loaded in zip(tensors_of(self._model.model), tensors_of(model.model), strict=True):
                    tensor.data = loaded.data
            self._draft = load_draft(self._config, self._model, self.layout)
            self._dropped = False
        if weights:
            for tensor, held in self._on_host:
                tensor.data = held.to(self._device)
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
            self.decisions["device_bytes"] = max(0, self._free_at_first - free_bytes(self._device))

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

    def facts(self) -> ModelFacts:
        return self._facts

    def explain(self) -> list[str]:
        return self._explained

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


def fingerprint(model: nn.Module) -> str:
    """Tells weights apart, without reading all of them: every parameter's name, shape, and a few of its values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.state_dict().items():
        values = parameter.flatten()[:: max(1, parameter.numel() // 8)].float()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {values.tolist()}".encode())
    return digest.hexdigest()
