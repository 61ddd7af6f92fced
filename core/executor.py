"""How a core runs its model: two calls a step, so that masks can be made while the forward runs.

Neither waits, so that several steps can be in flight."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from ..ipc.config import EngineConfig
from ..ipc.errors import OutOfMemoryError
from ..ipc.messages import ModelFacts
from .draft import Drafter, load_draft
from .gpu import choose_backend, free_bytes, graph_sizes, pick_device, prepare_kernels, wait_for_memory
from .kv_layout import KVLayout, cache_dtype, plan_layout
from .logprobs import Scores
from .memory import count_blocks
from .model.loader import load_model
from .model.paged_model import PagedModel
from .model.quantized import BITS
from .model.whole import make_whole
from .model_runner import Launched, ModelRunner, Sampled
from .step import Step


class Executor(Protocol):
    """One model, on one or several devices."""

    layout: KVLayout
    num_blocks: int
    max_model_len: int
    accepts_embeddings: bool  # whether prompts may be embeddings
    decisions: dict[str, Any]  # what a restart need not find out again
    asynchronous: bool  # whether the host has time to spare while a step runs

    def warm_up(self) -> None:
        """Do once what would make the first steps slow."""

    def release_memory(self) -> None:
        """After a step that found none."""

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


class UniprocExecutor:
    """The model in this process, on one device."""

    def __init__(self, config: EngineConfig, decisions: Mapping[str, Any] | None = None) -> None:
        options, cache, scheduler = config.device_config, config.cache_config, config.scheduler_config
        device = pick_device(options.device)
        if decisions is not None:
            wait_for_memory(device, decisions["device_bytes"])
        free = free_bytes(device)
        backend = choose_backend(options, device)
        self.model = model = load_model(
            config.model_config,
            config.load_config,
            device,
            config.model_config.max_model_len,
            backend,
            None if decisions is None else decisions["fusing"],
            lambda specs, dtype: prepare_kernels(backend, specs, dtype, cache_dtype(cache.kv_cache_dtype, dtype)),
        )
        self._fingerprint = _fingerprint(model)
        make_whole(model, backend, BITS.get(config.model_config.quantization or ""), model.quantized)
        model.quantized = None
        kv_dtype = cache_dtype(cache.kv_cache_dtype, model.dtype)
        self.layout = plan_layout(
            model.layers, model.sources, cache.block_size, kv_dtype, backend.cache_dim, backend.heads_first
        )
        sizes = graph_sizes(options, device, scheduler.max_num_seqs)
        draft = load_draft(config, model, self.layout)
        beside = 0 if draft is None else draft.layout.block_bytes
        self.num_blocks, self.max_model_len = count_blocks(config, self.layout, model, backend, sizes, beside)
        self.accepts_embeddings = model.accepts_embeddings
        self._runner = ModelRunner(
            model,
            self.layout,
            backend,
            self.num_blocks,
            scheduler.max_num_seqs,
            self.max_model_len,
            scheduler.max_num_batched_tokens,
        )
        self._drafter = (
            Drafter(draft, config, self.num_blocks, self.max_model_len, self._runner) if draft is not None else None
        )
        self.asynchronous = self._runner.device.asynchronous
        self._graph_sizes, self._free_at_first = sizes, free
        self.decisions: dict[str, Any] = {"fusing": model.decisions, "device_bytes": 0}

    def warm_up(self) -> None:
        if self.asynchronous:
            try:
                self._runner.warm_up(self._graph_sizes)
                if self._drafter is not None:
                    self._drafter.warm_up()
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError(
                    "no memory is left for CUDA graphs: lower gpu_memory_utilization, or the size given for the cache, "
                    f"or set enforce_eager ({str(error).partition(chr(10))[0]})"
                ) from error
            self.decisions["device_bytes"] = max(0, self._free_at_first - free_bytes(self.model.device))

    def release_memory(self) -> None:
        self._runner.device.release_memory()

    def facts(self) -> ModelFacts:
        model = self.model
        return ModelFacts(
            model.vocab_size,
            model.hidden_size,
            self.max_model_len,
            str(model.dtype).removeprefix("torch."),
            list(model.eos_token_ids),
            self._fingerprint,
        )

    def explain(self) -> list[str]:
        return self.model.explain()

    def execute(self, step: Step) -> Launched:
        with _lack_of_memory():
            if self._drafter is not None:
                self._drafter.write_guesses(step)
            return self._runner.execute(step)

    def sample(self, launched: Launched) -> Sampled:
        with _lack_of_memory():
            return self._runner.sample(launched)

    def tokens(self, sampled: Sampled) -> np.ndarray:
        return sampled.tokens.wait()

    def logprobs(self, sampled: Sampled) -> tuple[list[Scores], list[Scores]]:
        return [one.wait() for one in sampled.logprobs], [one.wait() for one in sampled.prompt_logprobs]


@contextmanager
def _lack_of_memory() -> Iterator[None]:
    """Libraries have their own words for it: cuBLAS found no workspace, FlashInfer's is too small for the step."""
    try:
        yield
    except RuntimeError as error:
        if any(words in str(error) for words in ("CUBLAS_STATUS_ALLOC_FAILED", "Buffer overflow")):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def _fingerprint(model: PagedModel) -> str:
    """Tells weights apart, without reading all of them: every parameter's name, shape, and a few of its values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.model.state_dict().items():
        values = parameter.flatten()[:: max(1, parameter.numel() // 8)].float()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {values.tolist()}".encode())
    return digest.hexdigest()
