"""Sampling: the request's logit rules, then the top-k, top-p and min-p masks, then the keyed Gumbel choice.

The sampling parameters are kept in one array per parameter, indexed by slot, and written when a request gets its slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...kernels.contract import Backend
from ..plan.step import NewSequence, StepPlan
from .device import Device, Staged
from .logit_rules import Choosing, LogitRules
from .logprobs import Scoring, score
from .registry import Registry

_COLUMNS = {
    "temperature": torch.float32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "top_k": torch.int64,
    "seed": torch.int64,
    "position": torch.int64,
    "slot": torch.int64,
    "sampled": torch.bool,
}
_OF_SEQUENCE = ("temperature", "top_p", "min_p", "top_k", "seed")
_OFF = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}


class Choice(NamedTuple):
    """The chosen tokens, on the device, and the findings of the logit rules."""

    tokens: torch.Tensor  # int64 [rows]
    slots: torch.Tensor  # int64 [rows]
    logprobs: list[Scoring]  # of the rows that ask for them
    errors: dict[int, Exception]  # by slot: the reason why no token can be chosen
    complete: set[int]  # slots whose grammar allows no further token


class _KnownTokens:
    """The tokens of one sequence, on the host."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens, self._num = tokens.copy(), len(tokens)

    def write(self, start: int, tokens: np.ndarray) -> None:
        self._num = start + len(tokens)
        if self._num > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(max(64, len(self._tokens)), np.int32)])
        self._tokens[start : self._num] = tokens

    def read(self) -> np.ndarray:
        return self._tokens[: self._num]


class Sampler:
    """Chooses a token for each row of logits. The choice depends only on the row's logits, parameters and position."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: Device, backend: Backend, max_rows: int, registry: Registry
    ) -> None:
        self._device, self._backend = device, backend
        self._rules = LogitRules(max_num_seqs, vocab_size, device, registry)
        self._num_logprobs = np.full(max_num_seqs, -1)
        self._rows = {name: Staged(device, (max_rows,), dtype) for name, dtype in _COLUMNS.items()}
        self._of_slot = {name: np.zeros(max_num_seqs, self._rows[name].host[0].dtype) for name in _OF_SEQUENCE}
        self._known: dict[int, _KnownTokens] = {}  # by slot, of sequences whose rules look back

    def admit(self, sequence: NewSequence) -> None:
        slot, sampling = sequence.slot, sequence.sampling
        for name, column in self._of_slot.items():
            column[slot] = getattr(sampling, name)
        self._num_logprobs[slot] = sampling.logprobs
        self._rules.admit(sequence)
        self._known.pop(slot, None)
        if sampling.looks_back or sequence.functions:
            self._known[slot] = _KnownTokens(sequence.tokens)

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self._rules.release(slot)
        self._known.pop(slot, None)

    def read(self, plan: StepPlan) -> None:
        """Store the tokens that a step computes, for sequences whose rules look back. These tokens are never
        placeholders."""
        if not self._known:
            return
        ends = np.cumsum(plan.counts)
        for row, slot in enumerate(plan.slots.tolist()):
            if (known := self._known.get(slot)) is not None:
                known.write(int(plan.starts[row]), plan.token_ids[ends[row] - plan.counts[row] : ends[row]])

    def choose(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, turn: int) -> Choice:
        """Choose a token for each row. May change `logits`.

        Args:
            logits: ``[rows, vocab]``.
            slots, positions: of the new tokens, int64 ``[rows]``.
        """
        on_device = self._send("slot", slots, turn)
        asked = np.flatnonzero(self._num_logprobs[slots] >= 0)
        if asked.size:
            index = self._device.bring(torch.from_numpy(asked))
            logprobs = logits[index].float().log_softmax(1)  # of the model's logits, before rules and masks
        known = {slot: known.read() for slot, known in self._known.items()}
        choosing = Choosing(slots, positions, known, {}, set())
        tokens = self._choose(self._rules.apply(logits, choosing), slots, positions, turn)
        self._rules.chosen(tokens, slots)
        scores = []
        if asked.size:
            scores = score(logprobs, tokens[index], self._num_logprobs[slots[asked]], self._device)
            scores = [one._replace(rows=asked[one.rows]) for one in scores]
        return Choice(tokens, on_device, scores, choosing.errors, choosing.complete)

    def _choose(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, turn: int) -> torch.Tensor:
        sampled = self._of_slot["temperature"][slots] > 0
        if not sampled.any():
            return self._backend.largest(logits)

        def limit(name: str) -> torch.Tensor | None:
            values = np.where(sampled, self._of_slot[name][slots], _OFF[name])
            return self._send(name, values, turn) if (values != _OFF[name]).any() else None

        scores = logits.float()
        temperature = limit("temperature")
        if temperature is not None:
            scores = scores / temperature.unsqueeze(1)
        limits = limit("top_k"), limit("top_p"), limit("min_p")
        if any(values is not None for values in limits):
            scores = self._backend.mask(scores, *limits)
        seeds = self._send("seed", self._of_slot["seed"][slots], turn)
        where = self._send("position", positions, turn)
        return self._backend.choose(scores, seeds, where, self._send("sampled", sampled, turn))

    def warm_up(self, logits: torch.Tensor) -> None:
        """Run every kernel once."""
        one = np.ones(len(logits))
        limits = [self._send(name, one * value, 0) for name, value in (("top_k", 2), ("top_p", 0.5), ("min_p", 0.1))]
        seeds, sampled = (self._send(name, one, 0) for name in ("seed", "sampled"))
        self._backend.choose(self._backend.mask(logits.float(), *limits), seeds, seeds, sampled)

    def _send(self, name: str, values: np.ndarray, turn: int) -> torch.Tensor:
        column = self._rows[name]
        column.host[turn][: len(values)] = values
        return column.send(turn, len(values))
