"""Rules that change a request's logits before a token is chosen, as its sampling parameters ask.

Each rule is a class below, and `RULES` is the order in which they act:

1. `UserFunctions`: the request's own ``logits_processors`` (only if the core runs in the user's process);
2. `Bias`: ``logit_bias`` is added; tokens outside ``allowed_token_ids`` and single-token ``bad_words`` get -inf;
3. `MinTokens`: stop tokens get -inf before ``min_tokens``;
4. `BadWords`: the last token of a word of ``bad_words`` gets -inf if the output ends with the word's other tokens;
5. `GrammarMask`: tokens that the ``grammar`` does not allow get -inf;
6. `Penalties`: first ``repetition_penalty`` r for each token that occurs in prompt or output: a positive logit is
   divided by r, any other is multiplied by r. Then ``frequency_penalty * c + presence_penalty`` is subtracted from the
   logit of each token that occurs c > 0 times in the output.

CONTRIBUTING.md says how to add one. A rule that reads the tokens before the next one makes `Sampling.looks_back` true,
and a rule that counts the chosen tokens makes `Sampling.is_penalised` true.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...ipc.errors import InvalidRequestError, RequestFailedError
from ..plan.step import NewSequence
from .device import Device
from .grammar import Follower
from .registry import Function, Registry


class Choosing(NamedTuple):
    """The rows of a step for which tokens are being chosen, and the findings of the rules about them."""

    slots: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int64 [rows]: index of the new token in its sequence
    tokens: Mapping[int, np.ndarray]  # by slot: prompt and output so far; only of sequences that look back
    errors: dict[int, Exception]  # by slot: the reason why no token can be chosen
    complete: set[int]  # slots whose grammar allows no further token


class Rule:
    """One rule, and its state for each slot that has it."""

    def __init__(self, slots: int, vocab_size: int, device: Device, registry: Registry) -> None:
        self.slots, self.vocab_size, self.device, self.registry = slots, vocab_size, device, registry

    def admit(self, sequence: NewSequence) -> bool:
        """Set up the rule for a sequence that got a slot. Returns whether the sequence has this rule."""
        raise NotImplementedError

    def release(self, slot: int) -> None:
        """Drop the state of a slot, which may have none."""
        raise NotImplementedError

    def apply(self, logits: torch.Tensor, step: Choosing) -> None:
        """Change fp32 logits ``[rows, vocab]`` in place."""
        raise NotImplementedError

    def chosen(self, tokens: torch.Tensor, slots: np.ndarray) -> None:
        """Update the state with the tokens that were chosen for `slots`: int64 ``[rows]``, on the device."""

    def bring(self, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Copy numbers from the host to a new device tensor."""
        return self.device.bring(torch.as_tensor(numbers, dtype=dtype))

    def _rows_of(self, slots: Mapping[int, Any], step: Choosing) -> list[tuple[int, int]]:
        """The step's rows whose slot is in `slots`, each with its slot."""
        return [(row, slot) for row, slot in enumerate(step.slots.tolist()) if slot in slots] if slots else []


class _SlotRows:
    """A device matrix with one row of `width` numbers for each slot that needs one."""

    def __init__(self, slots: int, width: int, dtype: torch.dtype, device: Device) -> None:
        self._row_of = np.full(slots, -1)
        self._device = device
        self.numbers = torch.zeros((0, width), dtype=dtype, device=device.torch)
        self._free: list[int] = []

    def give(self, slot: int) -> torch.Tensor:
        """Assign a row of zeros to `slot`, and return it."""
        if not self._free:
            size = len(self.numbers)
            more = self.numbers.new_zeros((max(1, size), self.numbers.shape[1]))
            self.numbers = torch.cat([self.numbers, more])
            self._free = list(range(size, len(self.numbers)))
        self._row_of[slot] = self._free.pop()
        return self.numbers[self._row_of[slot]].zero_()

    def take_back(self, slot: int) -> None:
        if self._row_of[slot] >= 0:
            self._free.append(int(self._row_of[slot]))
            self._row_of[slot] = -1
        if self._free and len(self._free) == len(self.numbers):  # no slot has a row: free the memory
            self.numbers, self._free = self.numbers[:0].clone(), []

    def find(self, slots: np.ndarray) -> tuple[np.ndarray, torch.Tensor | None]:
        """The indices of those `slots` that have a row, and (on the device) the indices of their rows in `numbers`."""
        having = np.flatnonzero(self._row_of[slots] >= 0)
        rows = self._row_of[slots[having]]
        return having, self._device.bring(torch.from_numpy(rows)) if having.size else None


class UserFunctions(Rule):
    """Calls each function of the user with the output so far and the logits; it returns the new logits. A function of
    three parameters gets the prompt as its first argument."""

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self._of_slot: dict[
            int, tuple[NewSequence, list[tuple[Function, bool]]]
        ] = {}  # with each function, whether it takes the prompt

    def admit(self, sequence: NewSequence) -> bool:
        if sequence.functions:
            functions = [self.registry.functions[number] for number in sequence.functions]
            self._of_slot[sequence.slot] = sequence, [(function, _takes_prompt(function)) for function in functions]
        return bool(sequence.functions)

    def release(self, slot: int) -> None:
        self._of_slot.pop(slot, None)

    def apply(self, logits: torch.Tensor, step: Choosing) -> None:
        for row, slot in self._rows_of(self._of_slot, step):
            sequence, functions = self._of_slot[slot]
            first, last, tokens = sequence.num_virtual, sequence.prompt_len, step.tokens[slot]
            prompt, output = tokens[first:last].tolist(), tokens[last:].tolist()
            changed = logits[row].clone()
            try:
                for function, takes_prompt in functions:
                    changed = function(prompt, output, changed) if takes_prompt else function(output, changed)
                logits[row] = changed.to(logits).view_as(logits[row])
            except Exception as error:  # ends this request only
                text = f"a logits processor failed: {type(error).__name__}: {error}"
                step.errors[slot] = RequestFailedError(text)


class Bias(Rule):
    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self._added = _SlotRows(self.slots, self.vocab_size, torch.float32, self.device)

    def admit(self, sequence: NewSequence) -> bool:
        sampling = sequence.sampling
        never = [words[0] for words in sampling.bad_words if len(words) == 1]
        if not (sampling.allowed_token_ids or sampling.logit_bias or never):
            return False
        bias = self._added.give(sequence.slot)
        if sampling.allowed_token_ids:
            bias.fill_(-torch.inf)
            bias[self.bring(sampling.allowed_token_ids)] = 0
        bias[self.bring(list(sampling.logit_bias))] += self.bring(list(sampling.logit_bias.values()), torch.float32)
        bias[self.bring(never)] = -torch.inf
        return True

    def release(self, slot: int) -> None:
        self._added.take_back(slot)

    def apply(self, logits: torch.Tensor, step: Choosing) -> None:
        rows, where = self._added.find(step.slots)
        if where is not None:
            logits[self.bring(rows)] += self._added.numbers[where]


class MinTokens(Rule):
    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self._of_slot: dict[int, tuple[int, torch.Tensor]] = {}  # first position allowed to stop; stop tokens

    def admit(self, sequence: NewSequence) -> bool:
        until = _unstoppable_until(sequence)
        if until:
            self._of_slot[sequence.slot] = until, self.bring(sorted(set(sequence.sampling.stop_token_ids)))
        return bool(until)

    def release(self, slot: int) -> None:
        self._of_slot.pop(slot, None)

    def apply(self, logits: torch.Tensor, step: Choosing) -> None:
        for row, slot in self._rows_of(self._of_slot, step):
            until, stops = self._of_slot[slot]
            if step.positions[row] < until:
                logits[row, stops] = -torch.inf


class BadWords(Rule):
    """Words of several tokens. `Bias` handles words of a single token."""

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self._of_slot: dict[int, NewSequence] = {}

    def admit(self, sequence: NewSequence) -> bool:
        has = any(len(words) > 1 for words in sequence.sampling.bad_words)
        if has:
            self._of_slot[sequence.slot] = sequence
        return has

    def release(self, slot: int) -> None:
        self._of_slot.pop(slot, None)

    def apply(self, logits: torch.Tensor, step: Choosing) -> None:
        for row, slot in self._rows_of(self._of_slot, step):
            sequence = self._of_slot[slot]
            words = sequence.sampling.bad_words
            output = step.tokens[slot][sequence.prompt_len :][-max(map(len, words)) :].tolist()
            ends = [w for w in words if 1 < len(w) <= len(output) + 1 and output[len(output) - len(w) + 1 :] == w[:-1]]
            if not ends:
                continue
            logits[row, self.bring([word[-1] for word in ends])] = -torch.inf
            if sequence.sampling.allowed_token_ids and (logits[row] == -torch.inf).all():
                text = "bad_words forbid the last of allowed_token_ids: none is left"
                step.errors[slot] = InvalidRequestError(text)


class GrammarMask(Rule):
    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self._of_slot: dict[int, tuple[NewSequence, Follower]] = {}

    def admit(self, sequence: NewSequence) -> bool:
        if sequence.grammar:
            self._of_slot[sequence.slot] = sequence, self.registry.followers[sequence.grammar]
        return bool(sequence.grammar)

    def release(self, slot: int) -> None:
        self._of_slot.pop(slot, None)

    def apply(self, logits: torch.Tensor, step: Choosing) -> None:
        rows = self._rows_of(self._of_slot, step)
        if rows:
            at = self.bring([row for row, _ in rows])
            bits = np.stack([self._allowed(slot, step) for _, slot in rows])
            logits[at] = logits[at].masked_fill(~self._unpacked(bits), -torch.inf)

    def _allowed(self, slot: int, step: Choosing) -> np.ndarray:
        """The mask of the tokens that the grammar allows, int32 ``[words]``. All bits are set after an error."""
        bits = np.zeros(-(-self.vocab_size // 32), np.int32)
        sequence, follower = self._of_slot[slot]
        tokens = step.tokens[slot]
        try:
            follower.fill(tokens[sequence.prompt_len :], bits)
        except Exception as error:  # ends this request only
            step.errors[slot], bits[:] = error, -1
            return bits
        if follower.matcher.finished:
            # The output is complete. If no stop token may be chosen, the request ends without one.
            early = len(tokens) < _unstoppable_until(sequence)
            ends = [t for t in sequence.sampling.stop_token_ids if bits[t >> 5] >> (t & 31) & 1]
            if early or not ends:
                step.complete.add(slot)
        return bits

    def _unpacked(self, bits: np.ndarray) -> torch.Tensor:
        """int32 ``[rows, words]`` → bool ``[rows, vocab]``."""
        shifts = torch.arange(32, dtype=torch.int32, device=self.device.torch)
        words = self.bring(bits, torch.int32).unsqueeze(2)
        return ((words >> shifts) & 1).bool().flatten(1)[:, : self.vocab_size]


class Penalties(Rule):
    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self._factors = np.zeros((self.slots, 3), np.float32)  # repetition, frequency, presence
        self._counts = _SlotRows(self.slots, self.vocab_size, torch.int32, self.device)  # occurrences in the output
        self._in_prompt = _SlotRows(self.slots, self.vocab_size, torch.bool, self.device)

    def admit(self, sequence: NewSequence) -> bool:
        slot, sampling = sequence.slot, sequence.sampling
        if not sampling.is_penalised:
            return False
        self._factors[slot] = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        first, last = sequence.num_virtual, sequence.prompt_len
        _, prompt, output = np.split(sequence.tokens.astype(np.int64), [first, last])
        seen = self._in_prompt.give(slot)
        if sequence.embeds is None or first:
            seen[self.bring(prompt)] = True
        counts, tokens = self._counts.give(slot), self.bring(output)
        counts.index_put_((tokens,), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
        return True

    def release(self, slot: int) -> None:
        self._counts.take_back(slot)
        self._in_prompt.take_back(slot)

    def apply(self, logits: torch.Tensor, step: Choosing) -> None:
        rows, where = self._counts.find(step.slots)
        if where is None:
            return
        at, factors = self.bring(rows), self.bring(self._factors[step.slots[rows]], torch.float32)
        repetition, frequency, presence = (factors[:, i : i + 1] for i in range(3))
        counts, in_prompt = self._counts.numbers[where], self._in_prompt.numbers[self._in_prompt.find(step.slots)[1]]
        mine, present = logits[at], counts > 0
        repeated = torch.where(mine > 0, mine / repetition, mine * repetition)
        mine = torch.where(in_prompt | present, repeated, mine)
        logits[at] = mine - frequency * counts - presence * present

    def chosen(self, tokens: torch.Tensor, slots: np.ndarray) -> None:
        rows, where = self._counts.find(slots)
        if where is not None:
            one = torch.ones(len(rows), dtype=torch.int32, device=tokens.device)
            self._counts.numbers.index_put_((where, tokens[self.bring(rows)]), one, accumulate=True)


RULES: tuple[type[Rule], ...] = (UserFunctions, Bias, MinTokens, BadWords, GrammarMask, Penalties)


class LogitRules:
    """The rules of all slots. A step in which no slot has a rule costs one look-up per row.

    Args:
        slots: number of slots.
    """

    def __init__(self, slots: int, vocab_size: int, device: Device, registry: Registry) -> None:
        self._rules = [rule(slots, vocab_size, device, registry) for rule in RULES]
        self._of_slot: dict[int, list[Rule]] = {}  # only slots that have a rule

    def admit(self, sequence: NewSequence) -> None:
        self.release(sequence.slot)
        rules = [rule for rule in self._rules if rule.admit(sequence)]
        if rules:
            self._of_slot[sequence.slot] = rules

    def release(self, slot: int) -> None:
        for rule in self._of_slot.pop(slot, ()):
            rule.release(slot)

    def apply(self, logits: torch.Tensor, step: Choosing) -> torch.Tensor:
        """Apply the rules to logits ``[rows, vocab]``. Returns new fp32 logits, or `logits` if no row has a rule."""
        if not self._of_slot or not any(slot in self._of_slot for slot in step.slots.tolist()):
            return logits
        changed = logits.float()
        for rule in self._rules:
            rule.apply(changed, step)
        return changed

    def chosen(self, tokens: torch.Tensor, slots: np.ndarray) -> None:
        """Tell the rules which tokens were chosen for `slots`: int64 ``[rows]``, on the device."""
        if self._of_slot:
            for rule in self._rules:
                rule.chosen(tokens, slots)


def _unstoppable_until(sequence: NewSequence) -> int:
    """The first position at which a stop token is allowed; 0: every position."""
    sampling = sequence.sampling
    return sequence.prompt_len + sampling.min_tokens if sampling.min_tokens and sampling.stop_token_ids else 0


def _takes_prompt(function: Function) -> bool:
    try:
        parameters: Sequence[inspect.Parameter] = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 3
