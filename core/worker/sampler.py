"""Sampling: the request's logit rules, then the top-k, top-p and min-p masks, then the keyed Gumbel choice.

The sampling parameters are kept in one array per parameter, indexed by slot, and written when a request gets its slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...kernels.contract import Backend, Choice, RowScores
from ..plan.step import NewSequence, PromptPart, Scores, StepPlan
from .device import Device, Staged, Tokens
from .logit_rules import Choosing, LogitRules
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
_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Launched(NamedTuple):
    """A launched forward pass."""

    logits: torch.Tensor  # [sampling rows, then the rows of the prompt parts, vocab]
    slots: np.ndarray  # int64 [sampling rows]
    positions: np.ndarray  # int64 [sampling rows], of the new tokens
    turn: int
    scored: list[PromptPart]
    experts: Tokens | None = None  # of each row, where they are recorded: [rows, layers, experts of a token]


class Scoring(NamedTuple):
    """`Scores` that are being copied to the host."""

    rows: np.ndarray
    token_ids: Tokens
    logprobs: Tokens
    ranks: Tokens

    def wait(self) -> Scores:
        return Scores(self.rows, self.token_ids.wait(), self.logprobs.wait(), self.ranks.wait())


class Sampled(NamedTuple):
    """The results of a step, which are being copied to the host."""

    tokens: Tokens  # int64 [sampling rows]
    logprobs: list[Scoring]  # of the sampling rows that ask for them
    prompt_logprobs: list[Scoring]  # of each of the step's prompt parts
    errors: dict[int, Exception]  # by slot: the reason why no token can be chosen
    complete: set[int]  # slots whose grammar allows no further token
    experts: Tokens | None = None  # as in `Launched`


class Sampler:
    """Chooses a token for each row of logits. The choice depends only on the row's logits, parameters and position."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: Device, backend: Backend, max_rows: int, registry: Registry
    ) -> None:
        self._device, self._backend, self._registry = device, backend, registry
        self._rules = LogitRules(vocab_size, device, registry)
        self._num_logprobs = np.full(max_num_seqs, -1)
        self._rows = {name: Staged(device, (max_rows,), dtype) for name, dtype in _COLUMNS.items()}
        self._of_slot = {name: np.zeros(max_num_seqs, self._rows[name].host[0].dtype) for name in _OF_SEQUENCE}
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device.torch)  # by slot
        self._scored: dict[int, NewSequence] = {}  # by slot: sequences with prompt log probabilities
        self._known: dict[int, list[int]] = {}  # tokens by slot, of sequences whose rules look back

    def admit(self, sequence: NewSequence) -> None:
        slot, sampling = sequence.slot, sequence.sampling
        self.release(slot)
        for name, column in self._of_slot.items():
            column[slot] = getattr(sampling, name)
        self._num_logprobs[slot] = sampling.logprobs
        self._rules.admit(sequence)
        if sampling.prompt_logprobs >= 0:
            self._scored[slot] = sequence
        if sampling.looks_back or sequence.functions or self._registry.processors.classes:
            self._known[slot] = sequence.tokens.tolist()

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self._rules.release(slot)
        self._known.pop(slot, None)
        self._scored.pop(slot, None)

    def read(self, plan: StepPlan) -> None:
        """Store the tokens that a step computes, for sequences whose rules look back. These tokens are never
        placeholders."""
        if not self._known:
            return
        ends = np.cumsum(plan.counts)
        for row, slot in enumerate(plan.slots.tolist()):
            if (known := self._known.get(slot)) is not None:
                known[plan.starts[row] :] = plan.token_ids[ends[row] - plan.counts[row] : ends[row]].tolist()

    def sample(self, launched: Launched) -> Sampled:
        """Choose a token for each sampling row, and score the prompts."""
        slots, positions, turn = launched.slots, launched.positions, launched.turn
        logits = launched.logits[: len(slots)]
        choosing = Choosing(slots, positions, self._known, {}, set())
        changed = self._rules.apply(logits, choosing)
        choice = self._draws(self._rules.in_draw(choosing), slots, positions, turn)
        groups = self._groups(slots)
        tokens, found = self._backend.draw_and_score(changed, choice, logits, [(index, n) for _, index, n in groups])
        if changed is not logits:
            self._rules.check(changed, choice, tokens, choosing)
        self._rules.chosen(tokens, slots)
        self.last_tokens[self._send("slot", slots, turn)] = tokens
        scores = [self._scoring(rows, one) for (rows, _, _), one in zip(groups, found, strict=True)]
        prompts = self._score_prompts(launched)
        tokens_out = self._device.download(tokens)
        return Sampled(tokens_out, scores, prompts, choosing.errors, choosing.complete, launched.experts)

    def begin_steps(
        self, slots: np.ndarray, positions: np.ndarray, turn: int
    ) -> tuple[Choice, list[tuple[np.ndarray, int]]]:
        """`DecodeSteps.choice` and `DecodeSteps.scored`, without the rules of the host. positions: of the first
        tokens."""
        choice = self._draws(self._rules.penalized(slots.tolist()), slots, positions, turn)
        return choice, [(rows, count) for rows, _, count in self._groups(slots)]

    def made_steps(self, tokens: torch.Tensor, slots: np.ndarray) -> None:
        """The tokens that `Decoder.repeat` chose: int64 ``[steps, rows]``."""
        self.last_tokens[torch.from_numpy(slots)] = tokens[-1]

    def follow(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """As `read`, for tokens that `sample` chose and that a further step of the same plan computes."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if (known := self._known.get(slot)) is not None:
                known.append(token)

    def _score_prompts(self, launched: Launched) -> list[Scoring]:
        found, first = [], len(launched.slots)
        for slot, start, count, _ in launched.scored:
            sequence = self._scored[slot]
            logits = launched.logits[first : first + count]
            tokens = self._device.bring(torch.from_numpy(sequence.tokens[start : start + count].astype(np.int64)))
            scores = self._backend.score(logits, tokens, sequence.sampling.prompt_logprobs)
            found.append(self._scoring(np.arange(count), scores))
            first += count
        return found

    def _groups(self, slots: np.ndarray) -> list[tuple[np.ndarray, torch.Tensor | None, int]]:
        """The rows that ask for log probabilities, by the number of likeliest tokens: on the host, on the device (None:
        all rows), and the number. So the choice among tokens of equal probability depends on the row alone, and not on
        the other rows of the step."""
        counts, found = self._num_logprobs[slots], []
        for count in np.unique(counts[counts >= 0]).tolist():
            rows = np.flatnonzero(counts == count)
            index = self._device.bring(torch.from_numpy(rows)) if len(rows) < len(slots) else None
            found.append((rows, index, count))
        return found

    def _scoring(self, rows: np.ndarray, scores: RowScores) -> Scoring:
        """Start to copy scores to the host."""
        return Scoring(rows, *map(self._device.download, scores))

    def _draws(self, choice: Choice, slots: np.ndarray, positions: np.ndarray, turn: int) -> Choice:
        """`choice` with keys, temperature and limits."""
        sampled = self._of_slot["temperature"][slots] > 0
        if not sampled.any():
            return choice

        def limit(name: str) -> torch.Tensor | None:
            values = np.where(sampled, self._of_slot[name][slots], _OFF[name])
            return self._send(name, values, turn) if (values != _OFF[name]).any() else None

        seeds, where = self._send("seed", self._of_slot["seed"][slots], turn), self._send("position", positions, turn)
        return choice._replace(
            keys=(seeds, where, self._send("sampled", sampled, turn)),
            temperature=limit("temperature"),
            top_k=limit("top_k"),
            top_p=limit("top_p"),
            min_p=limit("min_p"),
        )

    def warm_up(self, logits: torch.Tensor) -> None:
        """Run every kernel once."""
        one = np.ones(len(logits))
        seeds, sampled = (self._send(name, one, 0) for name in ("seed", "sampled"))
        limits = (("temperature", 0.5), ("top_k", 2), ("top_p", 0.5), ("min_p", 0.1))
        temperature, top_k, top_p, min_p = (self._send(name, one * value, 0) for name, value in limits)
        self._backend.draw(logits, Choice((seeds, seeds, sampled), temperature, top_k, top_p, min_p))

    def _send(self, name: str, values: np.ndarray, turn: int) -> torch.Tensor:
        column = self._rows[name]
        column.host[turn][: len(values)] = values
        return column.send(turn, len(values))
