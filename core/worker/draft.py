"""Speculation with a draft model: a smaller model with the same vocabulary guesses the tokens of the target model.

Block b of the draft's cache holds the same tokens as block b of the target's first group without a window. So both
share prefix cache, preemption and eviction, and the draft has no other state. In each step the draft first computes the
step's known tokens to fill its cache, and then its guesses one after another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidArgumentError, NotSupportedError
from ...kernels.contract import Backend
from ..memory.updates import NO_TABLES, TableUpdate
from ..model.run.paged_model import PagedModel
from ..plan.step import StepPlan
from .backends import choose_backend
from .kv_layout import KVLayout
from .runner import ModelRunner
from .worker import lay_out, load_paged


class Draft(NamedTuple):
    """A draft model, loaded."""

    model: PagedModel
    layout: KVLayout
    backend: Backend
    group: int  # the target's group with the same block numbers


def load_draft(config: EngineConfig, target: PagedModel, target_layout: KVLayout) -> Draft | None:
    """Load the draft model that the configuration names, if any.

    Raises:
        InvalidArgumentError: the draft model has another vocabulary, or is limited to shorter requests.
        NotSupportedError: its blocks can't mirror the target's.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method != "draft_model":
        return None
    wanted = replace(
        config.model_config,
        model=speculative.model,
        revision=speculative.revision,
        quantization=None,
        hf_overrides={},
        config_format="auto",
    )
    if config.load_config.load_format in ("sharded_state", "mistral"):  # the form of the target's files only
        config = replace(config, load_config=replace(config.load_config, load_format="auto"))
    backend = choose_backend(config.device_config, target.device)
    model, _ = load_paged(config, wanted, target.device, backend)
    if model.vocab_size != target.vocab_size:
        raise InvalidArgumentError(
            f"the draft model has a vocabulary of {model.vocab_size} tokens, and the model one of {target.vocab_size}: "
            "they must have the same tokenizer"
        )
    if model.cross is not None or target.cross is not None:
        raise NotSupportedError(
            "a draft model does not see an encoder's input: neither it nor the model may have an encoder"
        )
    if model.states is not None:
        raise NotSupportedError("a draft model must have no recurrent state: its state could not be rolled back")
    layout = lay_out(config.cache_config, model, backend)
    group = next((i for i, one in enumerate(target_layout.groups) if one.kind == "full"), None)
    if group is None or len(layout.groups) > 1:
        raise NotSupportedError(
            "a draft model needs layers of one kind, and a model that has layers without a window: here are "
            f"{len(layout.groups)} kinds of layers, and {'none' if group is None else 'some'} without a window"
        )
    return Draft(model, layout, backend, group)


class Drafter:
    """Runs a draft model beside the target, whose runner is `target`."""

    def __init__(self, runner: ModelRunner, group: int, target: ModelRunner, max_model_len: int) -> None:
        limit = runner.model.max_position
        if limit is not None and limit < max_model_len:
            raise InvalidArgumentError(f"max_model_len is {max_model_len}; the draft model's own limit is {limit}")
        self.runner, self._group = runner, group
        runner.follow(target)

    def guess(self, plan: StepPlan) -> np.ndarray:
        """Compute the known tokens of `plan`, then the guesses that it asks for. Returns these, int32 ``[sum of
        guessed]``. Waits for the device after each guess."""
        guessed, ends = plan.guessed, np.cumsum(plan.counts)
        bare = replace(plan, scored=[], guessed=np.zeros_like(guessed))
        mine = plan.tables.group == self._group
        known = np.repeat(ends - guessed, plan.counts) > np.arange(plan.num_tokens)
        tokens = self._choose(
            replace(
                bare,
                counts=plan.counts - guessed,
                token_ids=plan.token_ids[known],
                samples=guessed > 0,
                admitted=[sequence for sequence in plan.admitted if sequence.speculates],
                tables=TableUpdate(np.zeros(int(mine.sum()), np.int32), *(column[mine] for column in plan.tables[1:])),
            )
        )
        found = np.zeros(int(guessed.sum()), np.int32)
        firsts = np.cumsum(guessed) - guessed
        for nth in range(int(guessed.max(initial=0))):
            rows = np.flatnonzero(guessed > nth)
            found[firsts[rows] + nth] = tokens
            tokens = self._choose(
                replace(
                    bare,
                    slots=plan.slots[rows],
                    starts=(plan.starts + plan.counts - guessed)[rows] + nth,
                    counts=np.ones(len(rows), np.int32),
                    token_ids=tokens.astype(np.int32),
                    samples=guessed[rows] > nth + 1,  # the last guess is computed only to fill the cache
                    admitted=[],
                    released=plan.released[:0],
                    tables=NO_TABLES,
                    guessed=bare.guessed[rows],
                )
            )
        return found

    def _choose(self, plan: StepPlan) -> np.ndarray:
        launched = self.runner.execute(plan)
        return self.runner.sample(launched).tokens.wait() if plan.samples.any() else np.zeros(0, np.int64)
