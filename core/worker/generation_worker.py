"""The worker of a model that generates tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidRequestError, NotSupportedError, OutOfMemoryError
from ...ipc.tokenizer_files import read_files
from ...kernels.contract import Backend
from ..memory.updates import NO_COPIES, TableUpdate
from ..model.learn.fuse import Decision
from ..model.load.kept_decisions import KeptDecisions
from ..model.load.loader import load_model
from ..model.load.quantized import BITS
from ..model.run.lora import AdaptedBackend
from ..model.run.paged_model import PagedModel
from ..model.run.streamed_layers import offloaded_bytes
from ..model.run.whole_model import make_whole
from ..plan.control import PendingStep, WorkerFacts
from ..plan.step import IN_FLIGHT, StepPlan, StepResult, with_guesses
from .adapter_files import LoRALimits
from .backends import graph_sizes
from .block_count import free_host_bytes
from .decisions import Decisions
from .draft import Drafter, load_draft
from .grammar import GrammarCompiler
from .host_blocks import count_slots, offloading_bytes
from .registry import Registry
from .runner import ModelRunner, Sampled
from .worker import LackedMemory, LocalWorker, empty, fingerprint, lack_in, row_errors, tensors_of


class GenerationWorker(LocalWorker):
    """See `Worker`."""

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
        limits = None if self._loras is None else _lora_limits(config, model, self._loras)
        self._registry = Registry(lambda: _grammar_compiler(config, model), limits, model.hidden_size)
        self._explained = model.explain()
        self.layout = self._lay_out(model)
        self._graph_sizes = graph_sizes(config.device_config, self._device, scheduler.max_num_seqs)
        self._draft = load_draft(config, model, self.layout)
        beside = self._draft.layout.block_bytes if self._draft else 0
        num_blocks, max_model_len = self._count_blocks(config, self.layout, model, self._graph_sizes, beside)
        self.facts = WorkerFacts(
            self._model_facts(
                model, max_model_len, eos_token_ids=list(model.eos_token_ids), fingerprint=self._fingerprint
            ),
            list(self.layout.groups),
            num_blocks,
            max_model_len,
            count_slots(host_bytes, self.layout.block_bytes, free_host_bytes()),
            model.accepts_embeddings,
            limits is not None,
        )
        self.decisions.fusing = model.decisions
        self._model = model
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []  # sleeping weights, and their copies in host memory
        self._drafter: Drafter | None = None
        self._make_runners()
        self.facts = replace(self.facts, asynchronous=self.runner.device.asynchronous)

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
        self._runner = self._make_runner(self.model, self.layout, self.facts)
        if self._draft is not None:
            blocks, longest = self.facts.num_blocks, self.facts.max_model_len
            self._drafter = Drafter(self._draft, self._config, blocks, longest, self._runner)

    @property
    def model(self) -> PagedModel:
        """Raises `InvalidRequestError` while the weights sleep."""
        if self._dropped or self._on_host:
            raise InvalidRequestError("the weights sleep: call wake_up first")
        return self._model

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "a step while the core sleeps"
        return self._runner

    # ------------------------------------------------------------------ steps

    def launch(self, plan: StepPlan) -> PendingStep:
        try:
            self.runner.copy(plan)
            guesses = None
            if self._drafter is not None:
                guesses = self._drafter.guess(plan)
                plan = _with(plan, guesses)
            sampled = [self._choose(plan)]
            for _ in range(1, plan.num_steps):
                plan = _next_step(plan)
                sampled.append(self._choose(plan))
            return _Pending(plan, sampled, guesses)
        except RuntimeError as error:
            return LackedMemory(plan, lack_in(error))

    def _choose(self, plan: StepPlan) -> Sampled:
        with self.span("execute"):
            launched = self.runner.execute(plan)
        with self.span("sample"):
            return self.runner.sample(launched)

    def warm_up(self) -> None:
        if self.facts.asynchronous:
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

    # ------------------------------------------------------------------ weights

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
            else:  # keep the tensor objects, because other parts of the worker refer to them
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

    def explain(self) -> list[str]:
        return self._explained


class _Pending:
    """A launched plan, whose tokens are being copied to the host."""

    lacks_memory = False

    def __init__(self, plan: StepPlan, sampled: list[Sampled], guesses: np.ndarray | None) -> None:
        self._plan, self._sampled, self._guesses = plan, sampled, guesses

    def wait(self) -> list[StepResult]:
        return [
            StepResult(
                self._plan.id,
                self._plan.counts,
                one.tokens.wait(),
                row_errors(self._plan, one.errors),
                _rows_of(self._plan, one.complete),
                [scores.wait() for scores in one.logprobs],
                [scores.wait() for scores in one.prompt_logprobs],
                guesses=self._guesses,
            )
            for one in self._sampled
        ]


def _with(plan: StepPlan, guesses: np.ndarray) -> StepPlan:
    return replace(plan, token_ids=with_guesses(plan, guesses)) if guesses.size else plan


def _next_step(plan: StepPlan) -> StepPlan:
    """The decode step after `plan`; its inputs are the tokens that `plan` samples."""
    token_ids = np.full_like(plan.token_ids, IN_FLIGHT)
    nothing = TableUpdate(*np.zeros((4, 0), np.int32))
    return replace(
        plan,
        starts=plan.starts + 1,
        token_ids=token_ids,
        admitted=[],
        released=plan.released[:0],
        tables=nothing,
        copies=NO_COPIES,
    )


def _rows_of(plan: StepPlan, slots: set[int]) -> list[int]:
    return [row for row, slot in enumerate(plan.slots.tolist()) if slot in slots] if slots else []


def _grammar_compiler(config: EngineConfig, model: PagedModel) -> GrammarCompiler:
    named = config.model_config
    text = read_files(named, config.load_config.download_dir).get("tokenizer.json") if named.model else None
    if text is None or not model.eos_token_ids:
        lacks = "tokenizer.json" if text is None else "end-of-sequence token"
        raise NotSupportedError(f"structured outputs need a {lacks}, which this checkpoint does not have")
    return GrammarCompiler(text.decode(), model.vocab_size, model.eos_token_ids)


def _resident(model: PagedModel) -> list[torch.Tensor]:
    """The weights and buffers that are not streamed from host memory."""
    streamed = model.streamed.weights if model.streamed is not None else {}
    return [tensor for tensor in tensors_of(model.model) if id(tensor) not in streamed]


def _lora_limits(config: EngineConfig, model: PagedModel, loras: AdaptedBackend) -> LoRALimits:
    if model.is_quantized:
        raise NotSupportedError("enable_lora with quantized weights is not supported yet: choose one of them")
    places = loras.attach(model)
    model.notes.append(f"layer by layer: enable_lora; adapters may change {len(places)} linear layers")
    saved = 2 * 4 * model.hidden_size * model.vocab_size  # fp32 copies of the output layer and the embedding
    return LoRALimits(places, config.lora_config.max_lora_rank, model.parameters, saved)
