"""The executor of models that give vectors: the rows of a prompt are kept on the host until all have come."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError
from ..ipc.messages import ModelFacts, Pooling
from ..kernels import host_memory
from .adapter_files import LoRALimits
from .device import Tokens, device_for
from .executor import empty, fingerprint, lack_of_memory, tensors_of
from .gpu import choose_backend, free_bytes, pick_device, prepare_kernels, wait_for_memory
from .kv_layout import KVLayout, cache_dtype, plan_layout
from .memory import count_blocks
from .model.encoder import EncoderModel
from .model.kept import KeptDecisions
from .model.paged_model import PagedModel
from .model.pooling import PoolingModel, load_pooling_model
from .model_runner import ModelRunner
from .request import Request
from .step import Step

logger = logging.getLogger(__name__)


class Launched(NamedTuple):
    """A step's rows on their way to the host."""

    step: Step
    rows: Tokens  # fp32 [kept rows, hidden]
    counts: np.ndarray  # int64 [step's rows]: how many of them are each request's


class PoolingExecutor:
    """See `Executor`. No tokens are chosen: what a row that samples brings is what `pooled` gives. Layers run one by
    one on a CPU too, for a whole model's native call ends in logits."""

    num_host_blocks = 0
    lora_limits: LoRALimits | None = None

    def __init__(
        self, config: EngineConfig, decisions: Mapping[str, Any] | None = None, kept: KeptDecisions | None = None
    ) -> None:
        _refuse(config)
        self._config = config
        options, cache = config.device_config, config.cache_config
        device = pick_device(options.device)
        if decisions is not None:
            wait_for_memory(device, decisions["device_bytes"])
        self._free_at_first = free_bytes(device)
        backend = choose_backend(options, device)
        self._backend, self._dropped = backend, False
        self._device = device_for(device)
        self.model = self._load(kept if decisions is None else decisions["fusing"])
        trunk, replace = self.model.trunk, msgspec.structs.replace
        self._fingerprint = fingerprint(self.model.model)
        self._runner: ModelRunner | None = None
        if isinstance(trunk, EncoderModel):
            self.layout = KVLayout(cache.block_size, trunk.dtype, 0, (), (), (), (), ())
            self.num_blocks, self.max_model_len = 1, _longest(config, self.model, trunk)
        else:
            kv_dtype = cache_dtype(cache.kv_cache_dtype, trunk.dtype)
            self.layout = plan_layout(
                trunk.layers, trunk.sources, cache.block_size, kv_dtype, backend.cache_dim, backend.heads_first
            )
            if config.model_config.max_model_len is None and (most := self.model.recipe.max_length) is not None:
                most = min(most, trunk.max_position or most)
                config = replace(config, model_config=replace(config.model_config, max_model_len=most))
            self.num_blocks, self.max_model_len = count_blocks(config, self.layout, trunk, backend)
            self._make_runner(trunk)
        self.asynchronous = self._device.asynchronous
        self.accepts_embeddings = isinstance(trunk, PagedModel) and trunk.accepts_embeddings and not self.model.has_head
        self.decisions: dict[str, Any] = {"fusing": getattr(trunk, "decisions", {}), "device_bytes": 0}
        self._requests: dict[int, Request] = {}  # by slot
        self._rows: dict[int, list[np.ndarray]] = {}  # of them, as far as they have come

    def _load(self, decisions: Mapping[str, Any] | KeptDecisions | None) -> PoolingModel:
        config, kv_dtype = self._config, self._config.cache_config.kv_cache_dtype
        return load_pooling_model(
            config.model_config,
            config.load_config,
            self._device.torch,
            self._backend,
            decisions,
            lambda specs, dtype: prepare_kernels(self._backend, specs, dtype, cache_dtype(kv_dtype, dtype)),
        )

    def _make_runner(self, trunk: PagedModel) -> None:
        scheduler = self._config.scheduler_config
        self._runner = ModelRunner(
            trunk,
            self.layout,
            self._backend,
            self.num_blocks,
            scheduler.max_num_seqs,
            self.max_model_len,
            scheduler.max_num_batched_tokens,
        )

    def sleep(self, level: int) -> None:
        """See `Executor`. On a GPU weights are dropped on level 1, too."""
        if self._runner is not None:
            host_memory.give_back(self._runner.pool)
            self._runner.model.unbind()
            self._runner = None
        if level == 2 or self._device.torch.type == "cuda":
            self._dropped = True
            empty(tensors_of(self.model.model))
        gc.collect()
        host_memory.trim()

    def wake(self, weights: bool, kv_cache: bool) -> None:
        if weights and self._dropped:
            self.model, self._dropped = self._load(self.decisions["fusing"]), False
        trunk = self.model.trunk
        if kv_cache and self._runner is None and isinstance(trunk, PagedModel):
            self._make_runner(trunk)

    def set_parameters(self, parts: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        raise NotSupportedError("update_weights is for models that generate; this one pools")

    def apply_model(self, func: Callable[[nn.Module], Any]) -> Any:
        if self._dropped:
            raise InvalidRequestError("the weights sleep: call wake_up first")
        return func(self.model.model)

    def warm_up(self) -> None:
        self.decisions["device_bytes"] = max(0, self._free_at_first - free_bytes(self._device.torch))

    def release_memory(self) -> None:
        self._device.release_memory()

    def facts(self) -> ModelFacts:
        trunk = self.model.trunk
        return ModelFacts(
            trunk.vocab_size,
            trunk.hidden_size,
            self.max_model_len,
            str(trunk.dtype).removeprefix("torch."),
            fingerprint=self._fingerprint,
            tasks=self.model.tasks,
        )

    def explain(self) -> list[str]:
        return self.model.explain()

    def keeps_rows(self, pooling: Pooling, num_tokens: int) -> bool:
        """Whether all rows of a prompt of so many tokens are kept, so that each has to be computed.

        Raises:
            InvalidRequestError: the model can't give this.
        """
        self.model.check(pooling, num_tokens)
        return self.model.keeps_rows(pooling)

    def execute(self, step: Step) -> Launched:
        for request in step.admitted:
            self._requests[request.slot], self._rows[request.slot] = request, []
        slots, starts, counts = (a.astype(np.int64) for a in (step.slots, step.starts, step.counts))
        whole = np.array([self._requests[slot].keeps_rows for slot in slots.tolist()])
        kept = np.where(whole, counts, step.samples)
        ends = np.cumsum(counts)
        wanted = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, kept, strict=True)])
        with lack_of_memory():
            if self._runner is not None:
                self._runner.begin(step)
                hidden = self._runner.forward(slots, starts, counts, step.token_ids, wanted)
            else:
                encoder: Any = self.model.trunk
                hidden = encoder.forward(step.token_ids, counts.tolist(), [self._second(s) for s in slots.tolist()])
                hidden = hidden[self._device.bring(torch.from_numpy(wanted))]
        return Launched(step, self._device.download(hidden.float()), kept)

    def sample(self, launched: Launched) -> Launched:
        return launched

    def tokens(self, launched: Launched) -> np.ndarray:
        return np.zeros(int(launched.step.samples.sum()), np.int64)

    def logprobs(self, launched: Launched) -> tuple[list[Any], list[Any]]:
        return [], []

    def pooled(self, launched: Launched) -> list[np.ndarray | Exception]:
        """Wait for the rows. For each row that samples what its request gets, fp32, or why it gets nothing."""
        step, rows, kept = launched
        parts = np.split(rows.wait(), np.cumsum(kept)[:-1])
        found: list[np.ndarray | Exception] = []
        for slot, part, ends in zip(step.slots.tolist(), parts, step.samples.tolist(), strict=True):
            self._rows[slot].append(part)
            if ends:
                found.append(self._finish(self._requests[slot], np.concatenate(self._rows.pop(slot))))
        return found

    def _finish(self, request: Request, rows: np.ndarray) -> np.ndarray | Exception:
        assert request.pooling is not None
        try:
            return self.model.finish(request.pooling, request.tokens[: request.prompt_len], rows)
        except Exception as error:  # from the model's own code: the request's trouble alone
            return error

    def _second(self, slot: int) -> int:
        pooling = self._requests[slot].pooling
        assert pooling is not None
        return pooling.second


def _refuse(config: EngineConfig) -> None:
    """What is for generating only."""
    cache, adapters = config.cache_config, config.lora_config
    for name, value in (
        ("enable_lora", adapters.enable_lora),
        ("enable_prompt_adapter", adapters.enable_prompt_adapter),
        ("speculative_config", config.speculative_config),
        ("kv_offloading_size", cache.kv_offloading_size or cache.swap_space),
        ("cpu_offload_gb", cache.cpu_offload_gb),
    ):
        if value:
            raise NotSupportedError(f"{name} is {value!r}, which is for models that generate; this one pools")


def _longest(config: EngineConfig, model: PoolingModel, encoder: EncoderModel) -> int:
    """The longest prompt: what the model allows, and a step holds."""
    wanted, budget = config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens
    limit = encoder.max_position or 4096
    if wanted and wanted > limit:
        raise InvalidArgumentError(f"max_model_len is {wanted}; the model's own limit is {limit}")
    longest = wanted or min(limit, model.recipe.max_length or limit)
    if longest > budget:
        words = f"max_num_batched_tokens is {budget}, less than max_model_len, {longest}"
        if wanted:
            raise InvalidArgumentError(f"{words}: an encoder sees a prompt at once, so it must fit in one step")
        logger.warning("%s: an encoder's prompt must fit in one step, so max_model_len is cut", words)
    return min(longest, budget)
