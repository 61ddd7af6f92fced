"""The executor of models that give vectors: the rows of a prompt are kept on the host until all have come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError
from ...ipc.messages import Pooling
from ...kernels.contract import SequenceOffsets
from ..model.learn.fuse import Decision
from ..model.load.kept_decisions import KeptDecisions
from ..model.run.encoder import EncoderModel
from ..model.run.paged_model import PagedModel
from ..model.run.pooling import PoolingModel, load_pooling_model
from ..plan.request import Request
from ..plan.step import Step
from .decisions import Decisions
from .device import Tokens
from .executor import LocalExecutor, empty, fingerprint, lack_of_memory, tensors_of
from .kv_layout import KVLayout

logger = logging.getLogger(__name__)


class Launched(NamedTuple):
    """A step's rows on their way to the host."""

    step: Step
    rows: Tokens  # fp32 [kept rows, hidden]
    counts: np.ndarray  # int64 [step's rows]: how many of them are each request's


class PoolingExecutor(LocalExecutor):
    """See `Executor`. No tokens are chosen: what a row that samples brings is what `pooled` gives. Layers run one by
    one on a CPU too, for a whole model's native call ends in logits."""

    def __init__(
        self, config: EngineConfig, decisions: Decisions | None = None, kept: KeptDecisions | None = None
    ) -> None:
        _refuse(config)
        super().__init__(config, decisions)
        self.model = self._load(kept if decisions is None else decisions.fusing)
        trunk, replace = self.model.trunk, msgspec.structs.replace
        if isinstance(trunk, EncoderModel):
            self.layout = KVLayout(config.cache_config.block_size, trunk.dtype, 0, (), (), (), (), ())
            self.num_blocks, self.max_model_len = 1, _longest(config, self.model, trunk)
        else:
            self.layout = self._lay_out(trunk)
            if config.model_config.max_model_len is None and (most := self.model.recipe.max_length) is not None:
                most = min(most, trunk.max_position or most)
                config = replace(config, model_config=replace(config.model_config, max_model_len=most))
            self._count_blocks(config, trunk)
            self._runner = self._make_runner(trunk)
        self.asynchronous = self._copies.asynchronous
        self.accepts_embeddings = isinstance(trunk, PagedModel) and trunk.accepts_embeddings and not self.model.has_head
        self.decisions.fusing = getattr(trunk, "decisions", {})
        self._facts = self._facts_of(
            trunk, fingerprint=fingerprint(self.model.model.state_dict()), tasks=self.model.tasks
        )
        self._explained = self.model.explain()
        self._requests: dict[int, Request] = {}  # by slot
        self._rows: dict[int, list[np.ndarray]] = {}  # of them, as far as they have come

    def _load(self, decisions: Mapping[str, Decision] | KeptDecisions | None) -> PoolingModel:
        config = self._config
        return load_pooling_model(
            config.model_config, config.load_config, self._device, self._backend, decisions, self._prepare
        )

    def sleep(self, level: int) -> None:
        """See `Executor`. On a GPU weights are dropped on level 1, too."""
        if self._runner is not None:
            self._runner.give_back()
            self._runner = None
        if level == 2 or self._device.type == "cuda":
            self._dropped = True
            empty(tensors_of(self.model.model))
        self._collect()

    def wake(self, weights: bool, kv_cache: bool) -> None:
        if weights and self._dropped:
            self.model, self._dropped = self._load(self.decisions.fusing), False
        trunk = self.model.trunk
        if kv_cache and self._runner is None and isinstance(trunk, PagedModel):
            self._runner = self._make_runner(trunk)

    def set_parameters(self, parts: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        raise NotSupportedError("update_weights is for models that generate; this one pools")

    def apply_model(self, func: Callable[[nn.Module], Any]) -> Any:
        if self._dropped:
            raise InvalidRequestError("the weights sleep: call wake_up first")
        return func(self.model.model)

    def release_memory(self) -> None:
        self._copies.release_memory()

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
                offsets = SequenceOffsets.of(counts.tolist(), slots.tolist())
                hidden = encoder.forward(step.token_ids, offsets, [self._second(s) for s in slots.tolist()])
                hidden = hidden[self._copies.bring(torch.from_numpy(wanted))]
        return Launched(step, self._copies.download(hidden.float()), kept)

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
