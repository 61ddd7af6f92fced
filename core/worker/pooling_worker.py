"""The worker of a pooling model. It collects a prompt's hidden states on the host until the prompt is complete."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError
from ...kernels.contract import SequenceOffsets
from ..model.learn.fuse import Decision
from ..model.load.kept_decisions import KeptDecisions
from ..model.run.encoder import EncoderModel
from ..model.run.paged_model import PagedModel
from ..model.run.pooling import PoolingModel, load_pooling_model
from ..plan.control import PendingStep, WorkerFacts
from ..plan.step import NewSequence, StepPlan, StepResult
from .decisions import Decisions
from .device import Tokens
from .kv_layout import KVLayout
from .worker import LackedMemory, LocalWorker, empty, fingerprint, lack_in, row_errors, tensors_of

logger = logging.getLogger(__name__)


class PoolingWorker(LocalWorker):
    """See `Worker`. It chooses no tokens: a row that samples produces the vectors of its request. Layers run one by one
    also on a CPU, because the native call for a whole model returns logits instead of hidden states."""

    def __init__(
        self, config: EngineConfig, decisions: Decisions | None = None, kept: KeptDecisions | None = None
    ) -> None:
        _refuse(config)
        super().__init__(config, decisions)
        self.model = self._load(kept if decisions is None else decisions.fusing)
        trunk, replace = self.model.trunk, msgspec.structs.replace
        if isinstance(trunk, EncoderModel):
            self.layout = KVLayout(config.cache_config.block_size, trunk.dtype, 0, (), (), (), (), ())
            num_blocks, max_model_len = 1, _longest(config, self.model, trunk)
        else:
            self.layout = self._lay_out(trunk)
            if config.model_config.max_model_len is None and (most := self.model.recipe.max_length) is not None:
                most = min(most, trunk.max_position or most)
                config = replace(config, model_config=replace(config.model_config, max_model_len=most))
            num_blocks, max_model_len = self._count_blocks(config, self.layout, trunk)
        weights = fingerprint(self.model.model.state_dict())
        embeddings = isinstance(trunk, PagedModel) and trunk.accepts_embeddings and not self.model.has_head
        self.facts = WorkerFacts(
            self._model_facts(trunk, max_model_len, fingerprint=weights, tasks=self.model.tasks),
            list(self.layout.groups),
            num_blocks,
            max_model_len,
            accepts_embeddings=embeddings,
            asynchronous=self._copies.asynchronous,
            pooling=self.model.facts(),
        )
        if isinstance(trunk, PagedModel):
            self._runner = self._make_runner(trunk, self.layout, self.facts)
        self.decisions.fusing = getattr(trunk, "decisions", {})
        self._explained = self.model.explain()
        self._sequences: dict[int, NewSequence] = {}  # by slot
        self._rows: dict[int, list[np.ndarray]] = {}  # hidden states computed so far, by slot

    def _load(self, decisions: Mapping[str, Decision] | KeptDecisions | None) -> PoolingModel:
        config = self._config
        return load_pooling_model(
            config.model_config, config.load_config, self._device, self._backend, decisions, self._prepare
        )

    def sleep(self, level: int) -> None:
        """See `control.Sleep`. On a GPU level 1 drops the weights, too."""
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
            self._runner = self._make_runner(trunk, self.layout, self.facts)

    def set_parameters(self, rows: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        raise NotSupportedError("update_weights is for models that generate; this one pools")

    def apply_model(self, func: Callable[[nn.Module], Any]) -> Any:
        if self._dropped:
            raise InvalidRequestError("the weights sleep: call wake_up first")
        return func(self.model.model)

    def explain(self) -> list[str]:
        return self._explained

    def launch(self, plan: StepPlan) -> PendingStep:
        for sequence in plan.admitted:
            self._sequences[sequence.slot], self._rows[sequence.slot] = sequence, []
        slots, starts, counts = (a.astype(np.int64) for a in (plan.slots, plan.starts, plan.counts))
        whole = np.array([self._sequences[slot].keeps_rows for slot in slots.tolist()])
        kept = np.where(whole, counts, plan.samples)
        ends = np.cumsum(counts)
        wanted = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, kept, strict=True)])
        try:
            with self.span("execute"):
                if self._runner is not None:
                    self._runner.begin(plan)
                    hidden = self._runner.forward(slots, starts, counts, plan.token_ids, wanted)
                else:
                    encoder: Any = self.model.trunk
                    seconds = [self._second(slot) for slot in slots.tolist()]
                    hidden = encoder.forward(
                        plan.token_ids, SequenceOffsets.of(counts.tolist(), slots.tolist()), seconds
                    )
                    hidden = hidden[self._copies.bring(torch.from_numpy(wanted))]
        except RuntimeError as error:
            return LackedMemory(plan, lack_in(error))
        return _Pending(self, plan, self._copies.download(hidden.float()), kept)

    def _second(self, slot: int) -> int:
        pooling = self._sequences[slot].pooling
        assert pooling is not None
        return pooling.second

    def take_in(self, plan: StepPlan, rows: np.ndarray, kept: np.ndarray) -> StepResult:
        """Store the hidden states of `plan`, and return its result.

        Args:
            rows: hidden states, float32 ``[sum of kept, hidden]``.
            kept: how many of them belong to each sequence of the plan, int64 ``[sequences]``.
        """
        pooled, errors = [], {}
        parts = np.split(rows, np.cumsum(kept)[:-1])
        for slot, part, ends in zip(plan.slots.tolist(), parts, plan.samples.tolist(), strict=True):
            self._rows[slot].append(part)
            if ends:
                sequence = self._sequences[slot]
                assert sequence.pooling is not None
                tokens, states = sequence.tokens[: sequence.prompt_len], np.concatenate(self._rows.pop(slot))
                try:
                    pooled.append(self.model.finish(sequence.pooling, tokens, states))
                except Exception as error:  # raised by code of the model: ends this request only
                    errors[slot] = error
                    pooled.append(np.zeros(0, np.float32))
        tokens = np.zeros(len(pooled), np.int64)
        return StepResult(plan.id, plan.counts, tokens, row_errors(plan, errors), pooled=pooled)


class _Pending:
    """A launched plan, whose hidden states are being copied to the host."""

    lacks_memory = False

    def __init__(self, worker: PoolingWorker, plan: StepPlan, rows: Tokens, kept: np.ndarray) -> None:
        self._worker, self._plan, self._rows, self._kept = worker, plan, rows, kept

    def wait(self) -> list[StepResult]:
        return [self._worker.take_in(self._plan, self._rows.wait(), self._kept)]


def _refuse(config: EngineConfig) -> None:
    """Raise NotSupportedError for options that only generation has."""
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
    """The length of the longest prompt: limited by the model and by the token budget of a step."""
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
