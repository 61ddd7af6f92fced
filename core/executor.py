"""How a core runs its model: two calls a step, so that masks can be made while the forward runs.

Neither waits, so that several steps can be in flight."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from ..ipc.config import EngineConfig
from ..ipc.messages import ModelFacts
from ..kernels import backend as make_backend
from .kv_layout import KVLayout, plan_layout
from .memory import count_blocks
from .model.loader import load_model
from .model.paged_model import PagedModel
from .model_runner import Launched, ModelRunner
from .step import Step


class Executor(Protocol):
    """One model, on one or several devices."""

    layout: KVLayout
    num_blocks: int
    max_model_len: int
    accepts_embeddings: bool  # whether prompts may be embeddings
    decisions: dict[str, Any]  # what a restart need not find out again

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


class UniprocExecutor:
    """The model in this process, on one device."""

    def __init__(self, config: EngineConfig, decisions: Mapping[str, Any] | None = None) -> None:
        device = pick_device(config.device_config.device)
        self._backend = make_backend(config.device_config.attention_backend, device)
        self.model = load_model(
            config.model_config,
            config.load_config,
            device,
            config.model_config.max_model_len,
            self._backend,
            decisions,
        )
        cache, scheduler = config.cache_config, config.scheduler_config
        self.layout = plan_layout(self.model.layers, self.model.sources, cache.block_size, self.model.dtype)
        self.num_blocks, self.max_model_len = count_blocks(config, self.layout, self.model, self._backend)
        self.accepts_embeddings = self.model.accepts_embeddings
        self.decisions = self.model.decisions
        self._runner = ModelRunner(
            self.model,
            self.layout,
            self._backend,
            self.num_blocks,
            scheduler.max_num_seqs,
            self.max_model_len,
            scheduler.max_num_batched_tokens,
        )

    def facts(self) -> ModelFacts:
        model = self.model
        return ModelFacts(
            model.vocab_size,
            model.hidden_size,
            self.max_model_len,
            str(model.dtype).removeprefix("torch."),
            list(model.eos_token_ids),
            _fingerprint(model),
        )

    def explain(self) -> list[str]:
        return self.model.explain()

    def execute(self, step: Step) -> Launched:
        return self._runner.execute(step)

    def sample(self, launched: Launched) -> torch.Tensor:
        return self._runner.sample(launched)

    def tokens(self, sampled: torch.Tensor) -> np.ndarray:
        return sampled.cpu().numpy()


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _fingerprint(model: PagedModel) -> str:
    """Tells weights apart, without reading all of them: every parameter's name, shape, and a few of its values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.model.state_dict().items():
        values = parameter.flatten()[:: max(1, parameter.numel() // 8)].float()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {values.tolist()}".encode())
    return digest.hexdigest()
