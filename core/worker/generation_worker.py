"""The worker of a model that generates tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError, OutOfMemoryError
from ...ipc.tokenizer_files import read_files
from ...kernels.contract import Backend
from ..model.learn.fuse import Decision
from ..model.load.kept_decisions import KeptDecisions
from ..model.media.features import EncodedItem
from ..model.media.merge import MergedPrompt
from ..model.run.expert_recorder import ExpertRecorder
from ..model.run.lora import AdaptedBackend
from ..model.run.paged_model import PagedModel
from ..model.run.streamed_layers import offloaded_bytes
from ..parallel.group import RankGroup
from ..plan.control import (
    Control,
    DropFunctions,
    DropGrammar,
    KeepMedia,
    ParameterRows,
    PendingStep,
    WorkerFacts,
)
from ..plan.step import Encoded, StepPlan, StepResult, with_guesses
from .backends import graph_sizes
from .block_count import HostSlots, count_slots, free_host_bytes, offloading_bytes
from .device import tensor_of
from .draft import Drafter, load_draft
from .grammar import GrammarCompiler
from .media_items import MediaItems
from .processors import Processors
from .registry import Registry
from .runner import ModelRunner
from .sampler import Sampled
from .stage_facts import facts_of_stages
from .worker import (
    Decisions,
    LocalWorker,
    Pending,
    empty,
    lay_out,
    load_paged,
    lora_limits,
    move,
    row_errors,
    tensors_of,
    with_ranks,
)

MOST_STEPS = 32  # of one plan
MOST_EXPERT_BYTES = 64 << 20  # numbers of experts in a step, because they are sent in one message


class GenerationWorker(LocalWorker):
    """See `Worker`."""

    def __init__(
        self,
        config: EngineConfig,
        decisions: Decisions | None = None,
        kept: KeptDecisions | None = None,
        group: RankGroup | None = None,
    ) -> None:
        parallel = config.parallel_config
        processors = Processors(config.model_config.logits_processors)  # before the weights are read, which takes long
        scheduler, host_bytes = config.scheduler_config, offloading_bytes(config.cache_config)
        super().__init__(config, decisions, group)
        self._offload = offloaded_bytes(config, self._device)
        self._loras: AdaptedBackend | None = None
        if config.lora_config.enable_lora:
            self._loras = AdaptedBackend(self._backend, scheduler.max_num_seqs, config.lora_config.max_loras)
            self._backend = cast(Backend, self._loras)
        self._backend = with_ranks(config, self._backend, self._tensor_group)
        stages, facts = self._stages, None
        # what the last stage's layers are fused to is nothing to the others
        model, weights = self._load(kept if decisions is None else None if stages else decisions.fusing)
        if stages is not None:
            facts = facts_of_stages(stages, model, self._backend, weights)
            weights = facts.fingerprint
        limits = None if self._loras is None else lora_limits(config, model, self._backend)
        if config.model_config.enable_return_routed_experts:
            model.experts = _recorder(model, scheduler.max_num_batched_tokens)
        if parallel.homes > 1:
            _refuse_beside_homes(config, model)
        self._registry = Registry(lambda: _grammar_compiler(config, model), limits, model.hidden_size, processors)
        self._explained = model.explain()
        self.layout = lay_out(config.cache_config, model, self._backend, facts.most if facts else None)
        self._graph_sizes = graph_sizes(config.device_config, self._device, scheduler.max_num_seqs)
        looped = model.states is not None and (model.states.looped or self._backend.graph_max_kv_len == 0)
        if looped or model.cross is not None:
            self._graph_sizes = []  # which rows a mixer computes, or its scan, is decided on the host
        self._draft = load_draft(config, model, self.layout) if self._leads else None
        beside = self._draft.layout.block_bytes if self._draft else 0
        num_blocks, max_model_len = self._count_blocks(config, self.layout, model, self._graph_sizes, beside, facts)
        state_bytes = sum(group.token_bytes for group in self._recurrent if group.snapshots)
        # kv_offloading_size is of all ranks together
        share, free = host_bytes // self._num_ranks, free_host_bytes() // self._num_ranks
        host_slots = HostSlots(*self._least(*count_slots(share, self.layout.block_bytes, free, state_bytes)))
        self._recurrent = [replace(group, host_snapshots=host_slots.states) for group in self._recurrent]
        self.facts = WorkerFacts(
            self._model_facts(model, max_model_len, eos_token_ids=list(model.eos_token_ids), fingerprint=weights),
            [*self.layout.groups, *self._recurrent],
            num_blocks,
            max_model_len,
            host_slots.blocks,
            model.accepts_embeddings,
            limits is not None,
        )
        self.decisions.fusing = model.decisions
        self._model = model
        self._media = MediaItems(model, self._verify_media)
        self._on_host: list[torch.Tensor] = []  # host memory of sleeping weights
        self._drafter: Drafter | None = None
        self._due: deque[StepPlan | Control] = deque()  # of a last stage: steps to make, and what is to be dropped then
        self._made: deque[StepResult] = deque()  # of steps that were made before they were waited for
        self._make_runners()
        repeats = self.runner.repeats and self._drafter is None and not processors.classes and group is None
        self.facts = replace(
            self.facts,
            asynchronous=self.runner.device.asynchronous,
            most_steps=MOST_STEPS if repeats else 1,
            stages=1 if stages is None else stages.count,
            media=self._media.facts if group is None else None,
            homes=parallel.homes,
        )
        known = replace(config.model_config, max_model_len=max_model_len, dtype=self.facts.model.dtype)
        processors.start(replace(config, model_config=known), self._device)

    def _load(self, decisions: Mapping[str, Decision] | KeptDecisions | None) -> tuple[PagedModel, str]:
        return load_paged(
            self._config, self._config.model_config, self._device, self._backend, decisions, self._offload, self._stages
        )

    def _make_runners(self) -> None:
        facts, media = self.facts, self._media
        self._runner = self._make_runner(self.model, self.layout, self._backend, facts.num_host_blocks, media)
        if (draft := self._draft) is not None:
            runner = self._make_runner(draft.model, draft.layout, draft.backend)
            self._drafter = Drafter(runner, draft.group, self._runner, self.facts.max_model_len)

    @property
    def model(self) -> PagedModel:
        """Raises `InvalidRequestError` while the weights sleep."""
        if self._dropped or self._on_host:
            raise InvalidRequestError("the weights sleep: call wake_up first")
        return self._model

    @property
    def _models(self) -> list[PagedModel]:
        return [self._model, *([self._draft.model] if self._draft else [])]

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "a step while the core sleeps"
        return self._runner

    # ------------------------------------------------------------------ steps

    def launch(self, plan: StepPlan) -> PendingStep:
        if self._stages is not None:  # the first stage begins, and this one computes when it is waited for
            self.on_plan(plan)
            self._due.append(plan)
            return Pending(lambda: self._made.popleft() if self._made else self._make_last())
        encoded = self._media.encode(plan.encodes.tolist(), self.beat) if plan.encodes.size else []
        try:
            self.runner.copy(plan)
            guesses = None
            if not plan.slots.size:  # media are encoded, and nothing else is computed
                self.on_plan(plan)
                self.runner.begin(plan)
                nothing = StepResult(plan.id, plan.counts, np.zeros(0, np.int64), encoded=encoded)
                return Pending(lambda: nothing)
            if self._drafter is not None:
                guesses = self._drafter.guess(plan)
                plan = replace(plan, token_ids=with_guesses(plan, guesses)) if guesses.size else plan
            if plan.num_steps > 1:
                return self._repeat(plan, encoded)
            self.on_plan(plan)
            with self.span("execute"):
                launched = self.runner.execute(plan)
            with self.span("sample"):
                sampled = self.runner.sample(launched)
            self._share_tokens()
            failed = {slot: error for slot, error in self.runner.failed.items() if slot in plan.slots}
            sampled.errors.update(failed)
            return Pending(lambda: replace(_result(plan, sampled, guesses), encoded=encoded))
        except RuntimeError as error:
            lacking = self._lacking(plan, error)
            return lacking._replace(wait=lambda: replace(lacking.wait(), encoded=encoded))

    def _make_last(self) -> StepResult:
        """The last stage's part of the step that is due."""
        plan = self._due.popleft()
        assert isinstance(plan, StepPlan)
        self.runner.copy(plan)
        with self.span("execute"):
            launched = self.runner.execute(plan)
        with self.span("sample"):
            result = _result(plan, self.runner.sample(launched), None)
        while self._due and not isinstance(self._due[0], StepPlan):
            super().control(cast("Control", self._due.popleft()))
        return result

    def catch_up(self) -> None:
        while self._due:
            self._made.append(self._make_last())

    def control(self, record: Control) -> Any:
        if self._due and isinstance(record, DropGrammar | DropFunctions):  # steps that are due name it
            self._due.append(record)
            return None
        return super().control(record)

    def run_method(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        self.catch_up()  # it may change the weights
        return super().run_method(method, args, kwargs)

    def follow(self, plan: StepPlan) -> None:
        self.runner.copy(plan)
        with self.span("execute"):
            self.runner.execute(plan)
        self._share_tokens()

    def _share_tokens(self) -> None:
        """With two steps in flight the next plan names the tokens of this step by placeholders, on all ranks."""
        if (
            self._group is not None
            and self._stages is None
            and self.facts.depth(self._config.scheduler_config.async_scheduling) > 1
        ):
            self._group.copy_of_leader(self.runner.last_tokens)

    def _repeat(self, plan: StepPlan, encoded: list[Encoded]) -> Pending:
        """Several steps, which are made when their results are waited for."""
        steps, done = self.runner.repeat(plan, self.interrupt), 0

        def wait() -> StepResult:
            nonlocal done
            first = done
            with self.span("execute"):
                if plan.ruled:
                    sampled, stopped = steps.make_ruled()
                    result = replace(_result(plan, sampled, None), first=first)
                else:
                    tokens, scores, stopped = steps.make(1 if plan.apart else plan.num_steps - first)
                    count, tokens = len(tokens), tokens.reshape(-1)
                    computed = np.full(len(plan.slots), count, np.int32)
                    result = StepResult(plan.id, computed, tokens, logprobs=scores, first=first, num_steps=count)
            if not done:
                result = replace(result, encoded=encoded)
            done += result.num_steps
            go_on = plan.apart and done < plan.num_steps and not (stopped or self.interrupt[0])
            return replace(result, more=True) if go_on else result

        return Pending(wait)

    def warm_up(self) -> None:
        if self.facts.asynchronous:
            try:
                self.runner.warm_up(self._graph_sizes, lambda here: bool(self._least(here)[0]))
                if self._drafter is not None:
                    self._drafter.runner.warm_up(())
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError(
                    "no memory is left for CUDA graphs: lower gpu_memory_utilization, or the size given for the cache, "
                    f"or set enforce_eager ({str(error).partition(chr(10))[0]})"
                ) from error
            super().warm_up()

    # ------------------------------------------------------------------ media

    def keep_media(self, record: KeepMedia) -> None:
        self._media.keep(record)

    def drop_media(self, number: int) -> None:
        self._media.drop(number)

    def _verify_media(self, ids: list[int], items: list[EncodedItem], merged: MergedPrompt) -> None:
        with nullcontext() if self._loras is None else self._loras.without():
            self._compare_media(self.model, ids, items, merged)

    # ------------------------------------------------------------------ weights

    def sleep(self, level: int) -> None:
        if self._runner is not None:
            self._runner.give_back()
            if self._drafter is not None:
                self._drafter.runner.give_back()
            self._runner = self._drafter = None
        if self._loras is not None:
            self._loras.forget()
        if level == 2 and not self._dropped:
            self._dropped, self._on_host = True, []
            for model in self._models:
                if model.whole is not None:
                    model.whole.decoder.give_back()
                empty(tensors_of(model.model))
                if model.streamed is not None:
                    model.streamed.sleep(drop=True)
        elif self._copies.asynchronous and not (self._on_host or self._dropped):
            self._on_host = move([x for model in self._models for x in _resident(model)], self._copies.host_blocks)
            if self._model.streamed is not None:
                self._model.streamed.sleep()
        self._collect()

    def wake(self, weights: bool, kv_cache: bool) -> None:
        if weights and self._dropped:
            model, _ = self._load(self.decisions.fusing)
            if model.whole is not None:
                self._model = model
                self._media = MediaItems(model, self._verify_media)
                if self._loras is not None:
                    self._registry.limits = lora_limits(self._config, model, self._backend)
            else:  # keep the tensor objects, because other parts of the worker refer to them
                for tensor, loaded in zip(_resident(self._model), _resident(model), strict=True):
                    tensor.data = loaded.data
                self._keep_tensors(self._model.model, model.model)
                if self._model.streamed is not None:
                    assert model.streamed is not None
                    self._model.streamed.wake(model.streamed)
            self._draft = load_draft(self._config, self._model, self.layout) if self._leads else None
            self._dropped = False
        if weights and self._on_host:
            move([x for model in self._models for x in _resident(model)], self._copies.zeros)
            if self._model.streamed is not None:
                self._model.streamed.wake()
            self._on_host = []
        if kv_cache and self._runner is None:
            try:
                self._make_runners()
                self.warm_up()
            except BaseException:
                self._runner = self._drafter = None
                raise

    def set_parameters(self, parts: Sequence[ParameterRows]) -> None:
        model = self.model
        if model.is_quantized:
            raise InvalidRequestError("the weights are quantized: only those of a model without quantization change")
        parameters = model.parameters
        for part in parts:
            parameters.check(part.name, part.start, part.values.shape)
        for part in (each for each in parts if each.name not in parameters.others):
            parameters.set(part.name, tensor_of(part.values).to(parameters.dtype(part.name)), part.start)
        self._renew_copies()

    def apply_model(self, func: Callable[[nn.Module], Any]) -> Any:
        try:
            with self.model.unpacked() as module:
                return func(module)
        finally:
            self._renew_copies(unseen=True)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.model
        if model.is_quantized:
            raise InvalidRequestError("the weights are quantized: only those of a model without quantization are saved")
        tied = getattr(model.model, "all_tied_weights_keys", {})
        return ((name, model.parameters.get(name)) for name in model.parameters.names() if name not in tied)


def _refuse_beside_homes(config: EngineConfig, model: PagedModel) -> None:
    """Raises NotSupportedError for what goes through all ranks' requests, where each rank has its own."""
    speculation = config.speculative_config
    reasons = {
        "a model with recurrent state": model.states is not None,
        "enable_lora": config.lora_config.enable_lora,
        "kv_offloading_size": bool(offloading_bytes(config.cache_config)),
        "a draft model": speculation is not None and bool(speculation.model),
        "enable_return_routed_experts": config.model_config.enable_return_routed_experts,
        "a model that computes logits of all rows": not model.selects_rows,
    }
    for what in (what for what, given in reasons.items() if given):
        raise NotSupportedError(
            f"data_parallel_size with enable_expert_parallel lets each rank have requests of its own, which is not "
            f"supported together with {what}: unset one of them, or use tensor_parallel_size"
        )


def _result(plan: StepPlan, sampled: Sampled, guesses: np.ndarray | None) -> StepResult:
    complete = np.flatnonzero(np.isin(plan.slots, list(sampled.complete))).tolist() if sampled.complete else []
    return StepResult(
        plan.id,
        plan.counts,
        sampled.tokens.wait(),
        row_errors(plan, sampled.errors),
        complete,
        [scores.wait() for scores in sampled.logprobs],
        [scores.wait() for scores in sampled.prompt_logprobs],
        guesses=guesses,
        experts=None if sampled.experts is None else _unsigned(sampled.experts.wait()),
    )


def _unsigned(experts: np.ndarray) -> np.ndarray:
    return experts.view(np.uint16) if experts.dtype == np.int16 else experts


def _recorder(model: PagedModel, max_tokens: int) -> ExpertRecorder:
    if model.whole is not None:
        raise NotSupportedError("enable_return_routed_experts is True, and weights are quantized: unset one of them")
    recorder = ExpertRecorder(model.model)
    layers, chosen = recorder.shape
    row_bytes = layers * chosen * recorder.dtype.itemsize
    if max_tokens * row_bytes > MOST_EXPERT_BYTES:
        raise InvalidArgumentError(
            f"max_num_batched_tokens is {max_tokens}; with enable_return_routed_experts it may be at most "
            f"{MOST_EXPERT_BYTES // row_bytes} for this model, because the experts of a step are one message"
        )
    model.notes.append(f"experts: recorded, {chosen} of a token in {recorder.num_routed_layers} of {layers} layers")
    return recorder


def _grammar_compiler(config: EngineConfig, model: PagedModel) -> GrammarCompiler:
    named = config.model_config
    files = read_files(named, config.load_config.download_dir) if named.model else {}
    text = files.get("tekken.json") if named.tokenizer_mode == "mistral" else None
    text = text or files.get("tokenizer.json") or files.get("tekken.json")
    if text is None or not model.eos_token_ids:
        lacks = "tokenizer.json or tekken.json" if text is None else "end-of-sequence token"
        raise NotSupportedError(f"structured outputs need a {lacks}, which this checkpoint does not have")
    return GrammarCompiler(text.decode(), model.vocab_size, model.eos_token_ids)


def _resident(model: PagedModel) -> list[torch.Tensor]:
    """The weights and buffers that are not streamed from host memory."""
    streamed = model.streamed.weights if model.streamed is not None else {}
    return [tensor for tensor in tensors_of(model.model) if id(tensor) not in streamed]
