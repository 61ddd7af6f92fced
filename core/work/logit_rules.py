"""What a request's parameters do to its logits before a token is chosen, in this order:

1. its own `logits_processors` (only where the core runs in the user's process);
2. `logit_bias` is added; tokens outside `allowed_token_ids`, the last token of each of `bad_words` after the others of
   it, and stop tokens before `min_tokens` get -inf;
3. tokens that its `grammar` does not allow get -inf;
4. `repetition_penalty` r of a token that stands in prompt or output: a positive logit is divided by r, another one
   multiplied by it;
5. of a token that stands c > 0 times in the output, ``frequency_penalty * c + presence_penalty`` is subtracted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...ipc.errors import InvalidRequestError, RequestFailedError
from ..plan.request import Request
from .device import Device

Processor = Callable[..., Any]
Before = Mapping[int, np.ndarray]  # by slot: prompt and output so far, of requests with `looks_back`


class _SlotRows:
    """A row of `width` numbers on the device for each slot that was given one."""

    def __init__(self, slots: int, width: int, dtype: torch.dtype, device: Device) -> None:
        self._seat = np.full(slots, -1)
        self._device = device
        self.numbers = torch.zeros((0, width), dtype=dtype, device=device.torch)
        self._free: list[int] = []

    def give(self, slot: int) -> torch.Tensor:
        """A row of zeros."""
        if not self._free:
            size = len(self.numbers)
            more = self.numbers.new_zeros((max(1, size), self.numbers.shape[1]))
            self.numbers = torch.cat([self.numbers, more])
            self._free = list(range(size, len(self.numbers)))
        self._seat[slot] = self._free.pop()
        return self.numbers[self._seat[slot]].zero_()

    def take_back(self, slot: int) -> None:
        if self._seat[slot] >= 0:
            self._free.append(int(self._seat[slot]))
            self._seat[slot] = -1
        if self._free and len(self._free) == len(self.numbers):  # nobody has one
            self.numbers, self._free = self.numbers[:0].clone(), []

    def find(self, slots: np.ndarray) -> tuple[np.ndarray, torch.Tensor | None]:
        """Which of `slots` have a row (indices into them), and where those are in `numbers`."""
        having = np.flatnonzero(self._seat[slots] >= 0)
        seats = self._seat[slots[having]]
        return having, self._device.bring(torch.from_numpy(seats)) if having.size else None


class LogitRules:
    """The rules of every request that has any, by slot; set when it gets the slot."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: Device) -> None:
        self._device, self._vocab_size = device, vocab_size
        self._bias = _SlotRows(max_num_seqs, vocab_size, torch.float32, device)  # what is added
        self._counts = _SlotRows(max_num_seqs, vocab_size, torch.int32, device)  # of each token in the output
        self._in_prompt = _SlotRows(max_num_seqs, vocab_size, torch.bool, device)
        self._penalties = np.zeros((max_num_seqs, 3), np.float32)  # repetition, frequency, presence
        self._unstoppable_until = np.zeros(max_num_seqs, np.int64)  # position of the first token that may be a stop
        self._requests: dict[int, Request] = {}  # by slot, those with rules
        self._stop_tokens: dict[int, torch.Tensor] = {}  # where min_tokens is set
        self._processors: dict[int, list[tuple[Processor, bool]]] = {}  # the user's, and whether each takes the prompt

    def admit(self, request: Request) -> None:
        slot, sampling = request.slot, request.sampling
        self._drop(slot)
        if not request.has_rules:
            return
        self._requests[slot] = request
        if request.processors:
            self._processors[slot] = [(process, _takes_prompt(process)) for process in request.processors]
        if sampling.min_tokens and request.stop_tokens:
            self._unstoppable_until[slot] = request.prompt_len + sampling.min_tokens
            self._stop_tokens[slot] = self._device.bring(torch.tensor(sorted(request.stop_tokens)))
        never = [words[0] for words in sampling.bad_words if len(words) == 1]
        if sampling.allowed_token_ids or sampling.logit_bias or never:
            bias = self._bias.give(slot)
            if sampling.allowed_token_ids:
                bias.fill_(-torch.inf)
                bias[self._bring(sampling.allowed_token_ids)] = 0
            added = self._bring(list(sampling.logit_bias.values()), torch.float32)
            bias[self._bring(list(sampling.logit_bias))] += added
            bias[self._bring(never)] = -torch.inf
        if request.is_penalised:
            penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
            self._penalties[slot] = penalties
            first, last = request.num_virtual, request.prompt_len
            _, prompt, output = np.split(request.tokens.astype(np.int64), [first, last])
            seen = self._in_prompt.give(slot)
            if request.embeds is None or first:
                seen[self._bring(prompt)] = True
            counts, tokens = self._counts.give(slot), self._bring(output)
            counts.index_put_((tokens,), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)

    def _drop(self, slot: int) -> None:
        for rows in (self._bias, self._counts, self._in_prompt):
            rows.take_back(slot)
        self._requests.pop(slot, None)
        self._stop_tokens.pop(slot, None)
        self._processors.pop(slot, None)

    def apply(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, before: Before) -> torch.Tensor:
        """Logits ``[rows, vocab]`` for the tokens at `positions` of the requests at `slots` → changed ones, fp32 if any
        is changed. Sets `failure` or `complete` of a request for which nothing is to be chosen."""
        for slot in [slot for slot, request in self._requests.items() if request.slot != slot]:
            self._drop(slot)
        if not self._requests:
            return logits
        ruled = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._requests]
        if not ruled:
            return logits
        logits = logits.float()
        looking = [(row, self._requests[slot], before[slot]) for row, slot in ruled if slot in before]
        for row, request, tokens in looking:
            if (processors := self._processors.get(request.slot)) is not None:
                logits[row] = _processed(request, processors, tokens, logits[row])
        rows, seats = self._bias.find(slots)
        if seats is not None:
            logits[self._bring(rows)] += self._bias.numbers[seats]
        for row, slot in ruled:
            if slot in self._stop_tokens and positions[row] < self._unstoppable_until[slot]:
                logits[row, self._stop_tokens[slot]] = -torch.inf
        for row, request, tokens in looking:
            if banned := _ends_of_bad_words(request, tokens):
                logits[row, self._bring(banned)] = -torch.inf
                if request.sampling.allowed_token_ids and (logits[row] == -torch.inf).all():
                    request.failure = InvalidRequestError(
                        "bad_words forbid the last of allowed_token_ids: none is left"
                    )
        masked = [(row, request, tokens) for row, request, tokens in looking if request.follower is not None]
        if masked:
            bits = np.stack([self._allowed(request, tokens) for _, request, tokens in masked])
            at = self._bring([row for row, _, _ in masked])
            logits[at] = logits[at].masked_fill(~self._unpacked(bits), -torch.inf)
        rows, seats = self._counts.find(slots)
        if seats is not None:
            at = self._bring(rows)
            factors = self._bring(self._penalties[slots[rows]], torch.float32)
            in_prompt = self._in_prompt.numbers[self._in_prompt.find(slots)[1]]
            logits[at] = _penalised(logits[at], self._counts.numbers[seats], in_prompt, factors)
        return logits

    def _allowed(self, request: Request, tokens: np.ndarray) -> np.ndarray:
        """Bits of the tokens that its grammar allows, int32 ``[words]``; all, where none is to be chosen."""
        bits = np.zeros(-(-self._vocab_size // 32), np.int32)
        assert request.follower is not None
        try:
            request.follower.fill(tokens[request.prompt_len :], bits)
        except Exception as error:  # this request's trouble alone
            request.failure, bits[:] = error, -1
            return bits
        if request.follower.matcher.finished:
            # Nothing but the end may come: by a stop token, or, where none may be chosen, without one.
            early = request.slot in self._stop_tokens and len(tokens) < self._unstoppable_until[request.slot]
            ends = [token for token in request.stop_tokens if bits[token >> 5] >> (token & 31) & 1]
            request.complete = early or not ends
        return bits

    def chosen(self, tokens: torch.Tensor, slots: np.ndarray) -> None:
        """Count the tokens (int64 ``[rows]``, on the device) of the requests at `slots`."""
        if self._requests:
            rows, seats = self._counts.find(slots)
            if rows.size:
                one = torch.ones(len(rows), dtype=torch.int32, device=tokens.device)
                self._counts.numbers.index_put_((seats, tokens[self._bring(rows)]), one, accumulate=True)

    def _unpacked(self, bits: np.ndarray) -> torch.Tensor:
        """int32 ``[rows, words]`` → bool ``[rows, vocab]``."""
        shifts = torch.arange(32, dtype=torch.int32, device=self._device.torch)
        words = self._bring(bits, torch.int32).unsqueeze(2)
        return ((words >> shifts) & 1).bool().flatten(1)[:, : self._vocab_size]

    def _bring(self, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return self._device.bring(torch.as_tensor(numbers, dtype=dtype))


def _penalised(
    logits: torch.Tensor, counts: torch.Tensor, in_prompt: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    repetition, frequency, presence = (factors[:, i : i + 1] for i in range(3))
    present = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | present, repeated, logits)
    return logits - frequency * counts - presence * present


def _ends_of_bad_words(request: Request, tokens: np.ndarray) -> list[int]:
    """The last tokens of those bad words whose others the output just ended with."""
    words = request.sampling.bad_words
    if not words:
        return []
    output = tokens[request.prompt_len :][-max(map(len, words)) :].tolist()
    return [w[-1] for w in words if 1 < len(w) <= len(output) + 1 and output[len(output) - len(w) + 1 :] == w[:-1]]


def _processed(
    request: Request, processors: Sequence[tuple[Processor, bool]], tokens: np.ndarray, logits: torch.Tensor
) -> torch.Tensor:
    """What the user's functions make of one row. Each is called with the output so far (where it takes three arguments,
    with the prompt before that) and the logits, and returns logits."""
    first, last = request.num_virtual, request.prompt_len
    prompt, output = tokens[first:last].tolist(), tokens[last:].tolist()
    changed = logits.clone()
    try:
        for process, takes_prompt in processors:
            changed = process(prompt, output, changed) if takes_prompt else process(output, changed)
        return changed.to(logits).view_as(logits)
    except Exception as error:  # this request's trouble alone
        request.failure = RequestFailedError(f"a logits processor failed: {type(error).__name__}: {error}")
        return logits


def _takes_prompt(process: Processor) -> bool:
    try:
        parameters: Sequence[inspect.Parameter] = list(inspect.signature(process).parameters.values())
    except (TypeError, ValueError):
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 3
