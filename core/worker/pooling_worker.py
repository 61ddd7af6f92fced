"""The worker of a pooling model. It collects a prompt's hidden states on the host until the prompt is complete."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import msgspec
import numpy as np
import torch
from torch import nn

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError
from ...kernels.contract import Backend, SequenceOffsets
from ..memory.updates import LayerGroup
from ..model.learn.fuse import Decision
from ..model.load.kept_decisions import KeptDecisions
from ..model.media.dual_encoder import DualEncoder
from ..model.run.encoder import EncoderModel
from ..model.run.lora import AdaptedBackend
from ..model.run.paged_model import PagedModel
from ..model.run.pooling import PoolingModel, finish_vectors, load_pooling_model
from ..parallel.group import RankGroup
from ..plan.control import KeepMedia, ParameterRows, PendingStep, WorkerFacts
from ..plan.step import NewSequence, StepPlan, StepResult
from .backends import prepare_kernels
from .media_items import MediaItems
from .registry import Registry
from .worker import (
    Decisions,
    LocalWorker,
    Pending,
    empty,
    fingerprint,
    lay_out,
    lora_limits,
    row_errors,
    tensors_of,
    with_ranks,
)

logger = logging.getLogger(__name__)


class PoolingWorker(LocalWorker):
    """See `Worker`. It chooses no tokens: a row that samples produces the vectors of its request. Layers run one by one
    also on a CPU, because the native call for a whole model returns logits instead of hidden states."""

    def __init__(
        self,
        config: EngineConfig,
        decisions: Decisions | None = None,
        kept: KeptDecisions | None = None,
        group: RankGroup | None = None,
    ) -> None:
        _refuse(config)
        if config.parallel_config.homes > 1:
            raise NotSupportedError(
                "data_parallel_size with enable_expert_parallel is for models that generate: unset one of them"
            )
        super().__init__(config, decisions, group)
        self._loras: AdaptedBackend | None = None
        if config.lora_config.enable_lora:
            loras = AdaptedBackend(self._backend, config.scheduler_config.max_num_seqs, config.lora_config.max_loras)
            self._loras, self._backend = loras, cast(Backend, loras)
        self._backend = with_ranks(config, self._backend, group)
        self.model = self._load(kept if decisions is None else decisions.fusing)
        trunk, replace = self.model.trunk, msgspec.structs.replace
        if isinstance(trunk, EncoderModel):
            groups: list[LayerGroup] = []
            num_blocks, max_model_len = 1, _longest(config, self.model, trunk)
        else:
            self._layout = lay_out(config.cache_config, trunk, self._backend)
            if config.model_config.max_model_len is None and (most := self.model.recipe.max_length) is not None:
                most = min(most, trunk.max_position or most)
                config = replace(config, model_config=replace(config.model_config, max_model_len=most))
            num_blocks, max_model_len = self._count_blocks(config, self._layout, trunk)
            groups = [*self._layout.groups, *self._recurrent]
        weights = fingerprint(self.model.model.state_dict().items())
        if self._loras is not None:
            if not isinstance(trunk, PagedModel) or self.model.retrieves:
                raise NotSupportedError("enable_lora is True, and this model is an encoder, which takes no adapters")
            limits = lora_limits(config, trunk, self._backend, f"{self.model.model.base_model_prefix}.")
            self._registry = Registry(None, limits, trunk.hidden_size)
        embeddings = isinstance(trunk, PagedModel) and trunk.accepts_embeddings and self.model.is_plain
        self._media = self._take_media()
        self.facts = WorkerFacts(
            self._model_facts(trunk, max_model_len, fingerprint=weights, tasks=self.model.tasks),
            groups,
            num_blocks,
            max_model_len,
            accepts_embeddings=embeddings,
            asynchronous=self._copies.asynchronous,
            has_adapters=self._loras is not None,
            pooling=self.model.facts(),
            media=None if self._media is None else self._media.facts,
        )
        if isinstance(trunk, PagedModel):
            self._runner = self._make_runner(trunk, self._layout, self._backend, media=self._media)
        self.decisions.fusing = getattr(trunk, "decisions", {})
        self._explained = self.model.explain()
        self._sequences: dict[int, NewSequence] = {}  # by slot
        self._rows: dict[int, list[np.ndarray]] = {}  # hidden states computed so far, by slot

    def _load(self, decisions: Mapping[str, Decision] | KeptDecisions | None) -> PoolingModel:
        config = self._config
        prepare = partial(prepare_kernels, self._backend, config.cache_config.kv_cache_dtype)
        return load_pooling_model(
            config.model_config,
            config.load_config,
            self._device,
            self._backend,
            decisions,
            prepare,
            config.pooler_config,
        )

    def _take_media(self) -> MediaItems | None:
        trunk = self.model.trunk
        if isinstance(trunk, PagedModel):
            return MediaItems(trunk, partial(self._compare_media, trunk)) if self.model.retrieves else None
        return MediaItems(trunk) if isinstance(trunk, DualEncoder) else None

    def sleep(self, level: int) -> None:
        """See `control.Sleep`. On a GPU level 1 drops the weights, too."""
        if self._runner is not None:
            self._runner.give_back()
            self._runner = None
        if self._loras is not None:
            self._loras.forget()
        if level == 2 or self._device.type == "cuda":
            self._dropped = True
            empty(tensors_of(self.model.model))
        self._collect()

    def wake(self, weights: bool, kv_cache: bool) -> None:
        if weights and self._dropped:
            loaded = self._load(self.decisions.fusing)
            if self._loras is None:
                self.model = loaded
            else:  # keep the tensor objects, because adapters refer to them
                for tensor, new in zip(tensors_of(self.model.model), tensors_of(loaded.model), strict=True):
                    tensor.data = new.data
                self._keep_tensors(self.model.model, loaded.model)
            self._dropped = False
        trunk = self.model.trunk
        self._media = self._take_media()
        if kv_cache and self._runner is None and isinstance(trunk, PagedModel):
            self._runner = self._make_runner(trunk, self._layout, self._backend, media=self._media)

    def set_parameters(self, parts: Sequence[ParameterRows]) -> None:
        raise NotSupportedError("update_weights is for models that generate; this one pools")

    def apply_model(self, func: Callable[[nn.Module], Any]) -> Any:
        if self._dropped:
            raise InvalidRequestError("the weights sleep: call wake_up first")
        try:
            return func(self.model.model)
        finally:
            self._renew_copies(unseen=True)

    def parameters(self) -> NoReturn:
        raise NotSupportedError("save_sharded_state is for models that generate; this one pools")

    def keep_media(self, record: KeepMedia) -> None:
        assert self._media is not None, "a model without media in its prompts"
        self._media.keep(record)

    def drop_media(self, number: int) -> None:
        assert self._media is not None, "a model without media in its prompts"
        self._media.drop(number)

    def launch(self, plan: StepPlan) -> PendingStep:
        media, numbers = self._media, plan.encodes.tolist()
        encoded = media.encode(numbers, self.beat) if media is not None and numbers else []
        try:
            self.on_plan(plan)
            hidden, kept = self._compute(plan)
            failed = {} if self._runner is None else self._runner.failed
            errors = {slot: failed[slot] for slot in plan.slots.tolist() if slot in failed}
        except RuntimeError as error:
            lacking = self._lacking(plan, error)
            return lacking._replace(wait=lambda: msgspec.structs.replace(lacking.wait(), encoded=encoded))
        rows = self._copies.download(hidden.float())
        return Pending(lambda: msgspec.structs.replace(self._take_in(plan, rows.wait(), kept, errors), encoded=encoded))

    def follow(self, plan: StepPlan) -> None:
        self._compute(plan)

    def _compute(self, plan: StepPlan) -> tuple[torch.Tensor, np.ndarray]:
        """The hidden states that are wanted of a step, and how many of them belong to each sequence."""
        for slot in plan.released.tolist():
            self._sequences.pop(slot, None)
            self._rows.pop(slot, None)
        for sequence in plan.admitted:
            self._sequences[sequence.slot], self._rows[sequence.slot] = sequence, []
        if self._runner is not None:
            self._runner.copy(plan)
            self._runner.begin(plan)
        # an item of a dual encoder has no hidden states: its vector was made when it was encoded
        lone = isinstance(self.model.trunk, DualEncoder)
        texts = np.array([not (lone and self._sequences[slot].media) for slot in plan.slots.tolist()], bool)
        every = np.zeros(len(texts), np.int64)
        if not texts.any():
            return torch.zeros(0, self.model.trunk.hidden_size, device=self._device), every
        slots, starts, counts = (a.astype(np.int64)[texts] for a in (plan.slots, plan.starts, plan.counts))
        token_ids = plan.token_ids[np.repeat(texts, plan.counts)]
        sequences = [self._sequences[slot] for slot in slots.tolist()]
        kept = every[texts] = np.where([one.keeps_rows for one in sequences], counts, plan.samples[texts])
        ends = np.cumsum(counts)
        wanted = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, kept, strict=True)])
        with self.span("execute"):
            if self._runner is not None:
                hidden = self._runner.forward(slots, starts, counts, token_ids, wanted)
                self._runner.snapshot(plan)
            else:
                encoder: Any = self.model.trunk
                offsets = SequenceOffsets.of(counts.tolist(), slots.tolist())
                seconds = [one.pooling.second if one.pooling else 0 for one in sequences]
                hidden = encoder.forward(token_ids, offsets, seconds)
                hidden = hidden[self._copies.bring(torch.from_numpy(wanted))]
        return hidden, every

    def _take_in(self, plan: StepPlan, rows: np.ndarray, kept: np.ndarray, errors: dict[int, Exception]) -> StepResult:
        """Store the hidden states of `plan`, and return its result.

        Args:
            rows: hidden states, float32 ``[sum of kept, hidden]``.
            kept: how many of them belong to each sequence of the plan, int64 ``[sequences]``.
            errors: by slot, why a prompt could not be computed.
        """
        pooled: list[np.ndarray] = []
        parts = np.split(rows, np.cumsum(kept))[:-1]
        for slot, part, ends in zip(plan.slots.tolist(), parts, plan.samples.tolist(), strict=True):
            self._rows[slot].append(part)
            if ends:
                sequence = self._sequences[slot]
                assert sequence.pooling is not None
                tokens, states = sequence.tokens[: sequence.prompt_len], np.concatenate(self._rows.pop(slot))
                try:
                    if slot in errors:
                        pooled.append(np.zeros(0, np.float32))
                    elif sequence.media and isinstance(self.model.trunk, DualEncoder) and self._media is not None:
                        pooled.append(finish_vectors(sequence.pooling, self._media.vector(sequence)))
                    else:
                        pooled.append(self.model.finish(sequence.pooling, tokens, states))
                except Exception as error:  # raised by code of the model: ends this request only
                    errors[slot] = error
                    pooled.append(np.zeros(0, np.float32))
        tokens = np.zeros(len(pooled), np.int64)
        return StepResult(plan.id, plan.counts, tokens, row_errors(plan, errors), pooled=pooled)


def _refuse(config: EngineConfig) -> None:
    """Raise NotSupportedError for options that only generation has."""
    cache, adapters = config.cache_config, config.lora_config
    if config.parallel_config.pipeline_parallel_size > 1:
        raise NotSupportedError("pipeline_parallel_size is above 1, which is for models that generate; this one pools")
    for name, value in (
        ("enable_return_routed_experts", config.model_config.enable_return_routed_experts),
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
