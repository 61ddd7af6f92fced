"""Rules that change a request's logits before a token is chosen, as its sampling parameters ask.

Each rule is a class below. `RULES` change the logits, in this order. Then grammars and penalties act, as a part of the
draw.

CONTRIBUTING.md says how to add one. A rule that reads the tokens before the next one makes `Sampling.looks_back` true,
and a rule that counts the chosen tokens makes `Sampling.is_penalised` true.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from ...ipc.errors import InvalidRequestError, RequestFailedError
from ...kernels.contract import IN_PROMPT, Choice
from ..plan.step import NewSequence
from .device import Device
from .grammar import Matcher, Replay
from .processors import ProcessedSequence
from .registry import Function, Registry

State = TypeVar("State")


class Choosing(NamedTuple):
    """The rows of a step for which tokens are being chosen, and the findings of the rules about them."""

    slots: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int64 [rows]: index of the new token in its sequence
    tokens: Mapping[int, list[int]]  # by slot: prompt and output so far; only of sequences that look back
    errors: dict[int, Exception]  # by slot: the reason why no token can be chosen
    complete: set[int]  # slots whose grammar allows no further token


class Rule(Generic[State]):
    """One rule, and its state for each slot that has it."""

    def __init__(self, vocab_size: int, device: Device, registry: Registry) -> None:
        self.vocab_size, self.device, self.registry = vocab_size, device, registry
        self.of_slot: dict[int, State] = {}

    def state(self, sequence: NewSequence) -> State | None:
        """The rule's state for a sequence that got a slot; None: the sequence does not have this rule."""
        raise NotImplementedError

    def release(self, slot: int) -> None:
        """Drop the state of a slot, which may have none."""
        self.of_slot.pop(slot, None)

    def apply(self, logits: torch.Tensor, rows: list[tuple[int, int]], step: Choosing) -> None:
        """Change fp32 logits ``[rows, vocab]`` in place. `rows`: those with this rule, each with its slot."""
        raise NotImplementedError

    def chosen(self, tokens: torch.Tensor, rows: list[tuple[int, int]]) -> None:
        """Update the state with the tokens that were chosen: int64 ``[rows of the step]``, on the device."""

    def bring(self, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Copy numbers from the host to a new device tensor."""
        return self.device.bring(torch.as_tensor(numbers, dtype=dtype))

    def rows_of(self, slots: list[int]) -> list[tuple[int, int]]:
        """The rows whose slot has this rule, each with its slot."""
        return [(row, slot) for row, slot in enumerate(slots) if slot in self.of_slot] if self.of_slot else []


class UserFunctions(Rule[tuple[NewSequence, list[tuple[Function, bool]]]]):
    """``logits_processors``, if the core runs in the user's process: calls each function with the output so far and the
    logits; it returns the new logits. A function of three parameters gets the prompt as its first argument: the state
    says which functions do."""

    def state(self, sequence: NewSequence) -> tuple[NewSequence, list[tuple[Function, bool]]] | None:
        functions = [self.registry.functions[number] for number in sequence.functions]
        return (sequence, [(function, _takes_prompt(function)) for function in functions]) if functions else None

    def apply(self, logits: torch.Tensor, rows: list[tuple[int, int]], step: Choosing) -> None:
        for row, slot in rows:
            sequence, functions = self.of_slot[slot]
            tokens, changed = step.tokens[slot], logits[row].clone()
            prompt, output = tokens[sequence.num_virtual : sequence.prompt_len], tokens[sequence.prompt_len :]
            try:
                for function, takes_prompt in functions:
                    changed = function(prompt, output, changed) if takes_prompt else function(output, changed)
                logits[row] = changed.to(logits).view_as(logits[row])
            except Exception as error:  # ends this request only
                text = f"a logits processor failed: {type(error).__name__}: {error}"
                step.errors[slot] = RequestFailedError(text)


class UserClasses(Rule[ProcessedSequence]):
    """``logits_processors`` of the configuration. Each sequence has objects of its own, so an error ends its request
    only."""

    def state(self, sequence: NewSequence) -> ProcessedSequence | None:
        processors = self.registry.processors
        return ProcessedSequence(sequence, processors) if processors.classes else None

    def release(self, slot: int) -> None:
        if (state := self.of_slot.pop(slot, None)) is not None:
            state.release()

    def apply(self, logits: torch.Tensor, rows: list[tuple[int, int]], step: Choosing) -> None:
        for row, slot in rows:
            try:
                logits[row] = self.of_slot[slot].apply(step.tokens[slot], logits[row : row + 1].clone())[0]
            except Exception as error:  # ends this request only
                text = f"a logits processor failed: {type(error).__name__}: {error}"
                step.errors[slot] = RequestFailedError(text)


class Bias(Rule[torch.Tensor]):
    """Adds ``logit_bias``. Tokens outside ``allowed_token_ids`` and ``bad_words`` of a single token get -inf. The state
    is what is added: fp32 ``[vocab]``."""

    def state(self, sequence: NewSequence) -> torch.Tensor | None:
        sampling = sequence.sampling
        never = [words[0] for words in sampling.bad_words if len(words) == 1]
        if not (sampling.allowed_token_ids or sampling.logit_bias or never):
            return None
        bias = torch.zeros(self.vocab_size, device=self.device.torch)
        if sampling.allowed_token_ids:
            bias.fill_(-torch.inf)
            bias[self.bring(sampling.allowed_token_ids)] = 0
        bias[self.bring(list(sampling.logit_bias))] += self.bring(list(sampling.logit_bias.values()), torch.float32)
        bias[self.bring(never)] = -torch.inf
        return bias

    def apply(self, logits: torch.Tensor, rows: list[tuple[int, int]], step: Choosing) -> None:
        logits[self.bring([row for row, _ in rows])] += torch.stack([self.of_slot[slot] for _, slot in rows])


class MinTokens(Rule[tuple[int, torch.Tensor]]):
    """Stop tokens get -inf before ``min_tokens``. The state is the first position that may have one, and the tokens."""

    def state(self, sequence: NewSequence) -> tuple[int, torch.Tensor] | None:
        until = _unstoppable_until(sequence)
        return (until, self.bring(sorted(set(sequence.sampling.stop_token_ids)))) if until else None

    def apply(self, logits: torch.Tensor, rows: list[tuple[int, int]], step: Choosing) -> None:
        for row, slot in rows:
            until, stops = self.of_slot[slot]
            if step.positions[row] < until:
                logits[row, stops] = -torch.inf


class BadWords(Rule[tuple[NewSequence, dict[int, list[list[int]]]]]):
    """The last token of a word of ``bad_words`` gets -inf if the output ends with the word's other tokens. The state
    has the words by the token before their last one, so that a step compares only words that may be about to end."""

    def state(self, sequence: NewSequence) -> tuple[NewSequence, dict[int, list[list[int]]]] | None:
        found = defaultdict[int, list[list[int]]](list)
        for word in sequence.sampling.bad_words:
            if len(word) > 1:
                found[word[-2]].append(word)
        return (sequence, dict(found)) if found else None

    def apply(self, logits: torch.Tensor, rows: list[tuple[int, int]], step: Choosing) -> None:
        for row, slot in rows:
            (sequence, words), tokens = self.of_slot[slot], step.tokens[slot]
            most = len(tokens) - sequence.prompt_len + 1
            able = [w for w in words.get(tokens[-1], ()) if len(w) <= most]
            if ends := [w[-1] for w in able if tokens[len(tokens) - len(w) + 1 :] == w[:-1]]:
                logits[row, self.bring(ends)] = -torch.inf


class GrammarMask(Rule[tuple[NewSequence, Matcher | Replay]]):
    """Tokens that the ``grammar`` does not allow get -inf."""

    def state(self, sequence: NewSequence) -> tuple[NewSequence, Matcher | Replay] | None:
        return (sequence, self.registry.matchers[sequence.grammar].result()) if sequence.grammar else None

    def masks(self, rows: list[tuple[int, int]], step: Choosing) -> tuple[torch.Tensor, torch.Tensor]:
        """`Choice.masks`."""
        bits = np.zeros((len(rows), -(-self.vocab_size // 32)), np.int32)
        for (_, slot), allowed in zip(rows, bits, strict=True):
            self._fill(allowed, slot, step)
        return self.bring([row for row, _ in rows]), self.bring(bits, torch.int32)

    def _fill(self, bits: np.ndarray, slot: int, step: Choosing) -> None:
        """Write the mask of the tokens that the grammar allows to `bits`, int32 ``[words]``. An error sets all bits."""
        sequence, matcher = self.of_slot[slot]
        tokens = step.tokens[slot]
        try:
            matcher.follow(tokens[sequence.prompt_len :], bits)
        except Exception as error:  # ends this request only
            step.errors[slot], bits[:] = error, -1
            return
        if matcher.finished:
            # The output is complete. If no stop token may be chosen, the request ends without one.
            early = len(tokens) < _unstoppable_until(sequence)
            ends = [t for t in sequence.sampling.stop_token_ids if bits[t >> 5] >> (t & 31) & 1]
            if early or not ends:
                step.complete.add(slot)


class Penalties(Rule[tuple[int, list[float]]]):
    """For each token that occurs in prompt or output, a positive logit is divided by ``repetition_penalty``, and any
    other is multiplied by it. Then ``frequency_penalty * c + presence_penalty`` is subtracted from the logit of each
    token that occurs c > 0 times in the output. The state is a row of `_counts`, and the three penalties."""

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        # For each penalised slot the occurrences of each token in the output, plus `IN_PROMPT`: int32 [rows, vocab].
        self._counts = torch.zeros((0, self.vocab_size), dtype=torch.int32, device=self.device.torch)
        self._free: list[int] = []  # rows of `_counts`

    def state(self, sequence: NewSequence) -> tuple[int, list[float]] | None:
        sampling = sequence.sampling
        if not sampling.is_penalised:
            return None
        if not self._free:
            size = len(self._counts)
            self._counts = torch.cat([self._counts, self._counts.new_zeros((max(1, size), self.vocab_size))])
            self._free = list(range(size, len(self._counts)))
        index = self._free.pop()
        counts = self._counts[index].zero_()
        first, last = sequence.num_virtual, sequence.prompt_len
        _, prompt, output = map(self.bring, np.split(sequence.tokens.astype(np.int64), [first, last]))
        if sequence.embeds is None or first:
            counts[prompt] = IN_PROMPT
        counts.index_put_((output,), torch.ones_like(output, dtype=torch.int32), accumulate=True)
        return index, [sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty]

    def release(self, slot: int) -> None:
        if slot in self.of_slot:
            self._free.append(self.of_slot.pop(slot)[0])
        if self._free and not self.of_slot:  # free the memory
            self._counts, self._free = self._counts[:0].clone(), []

    def penalties(self, rows: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`Choice.penalties`."""
        factors = self.bring([self.of_slot[slot][1] for _, slot in rows], torch.float32)
        return self.bring([row for row, _ in rows]), self._counts, self._indices(rows), factors

    def chosen(self, tokens: torch.Tensor, rows: list[tuple[int, int]]) -> None:
        one = torch.ones(len(rows), dtype=torch.int32, device=tokens.device)
        mine = tokens[self.bring([row for row, _ in rows])]
        self._counts.index_put_((self._indices(rows), mine), one, accumulate=True)

    def _indices(self, rows: list[tuple[int, int]]) -> torch.Tensor:
        return self.bring([self.of_slot[slot][0] for _, slot in rows])


RULES: tuple[type[Rule[Any]], ...] = (UserFunctions, UserClasses, Bias, MinTokens, BadWords)


class LogitRules:
    """The rules of all slots. A step in which no slot has a rule costs one look-up per rule."""

    def __init__(self, vocab_size: int, device: Device, registry: Registry) -> None:
        self._changing = [rule(vocab_size, device, registry) for rule in RULES]
        self._masks = GrammarMask(vocab_size, device, registry)
        self._penalties = Penalties(vocab_size, device, registry)
        self._rules = [*self._changing, self._masks, self._penalties]

    def admit(self, sequence: NewSequence) -> None:
        for rule in self._rules:
            if (state := rule.state(sequence)) is not None:
                rule.of_slot[sequence.slot] = state

    def release(self, slot: int) -> None:
        for rule in self._rules:
            rule.release(slot)

    def apply(self, logits: torch.Tensor, step: Choosing) -> torch.Tensor:
        """Apply `RULES` to logits ``[rows, vocab]``. Returns new fp32 logits, or `logits` if no row has such a rule."""
        slots, changed = step.slots.tolist(), None
        for rule in self._changing:
            if rows := rule.rows_of(slots):
                changed = logits.to(torch.float32, copy=True) if changed is None else changed
                rule.apply(changed, rows, step)
        return logits if changed is None else changed

    def in_draw(self, step: Choosing) -> Choice:
        """The rules that act as a part of the draw, after `apply`: masks and penalties."""
        slots = step.slots.tolist()
        masked = self._masks.rows_of(slots)
        masks = self._masks.masks(masked, step) if masked else None
        return self.penalized(slots)._replace(masks=masks)

    def penalized(self, slots: list[int]) -> Choice:
        """The penalties of `slots`."""
        rows = self._penalties.rows_of(slots)
        return Choice(penalties=self._penalties.penalties(rows) if rows else None)

    def check(self, changed: torch.Tensor, choice: Choice, tokens: torch.Tensor, step: Choosing) -> None:
        """End the requests that are left no token. The draw has then chosen one that a rule forbids: `tokens`, int64
        ``[rows]``, of the logits that `apply` has `changed`. Only rules that look back can leave none."""
        settled = step.errors.keys() | step.complete
        rows = [(row, s) for row, s in enumerate(step.slots.tolist()) if s in step.tokens and s not in settled]
        if not rows:
            return
        masks: dict[int, np.ndarray] = {}
        if choice.masks is not None:
            masks = dict(zip(choice.masks[0].tolist(), choice.masks[1].cpu().numpy(), strict=True))
        chosen, scores = tokens.tolist(), changed.gather(1, tokens.unsqueeze(1)).flatten().tolist()
        for row, slot in rows:
            token, mask = chosen[row], masks.get(row)
            if scores[row] == -torch.inf or not (mask is None or mask[token >> 5] >> (token & 31) & 1):
                step.errors[slot] = InvalidRequestError("no token is left: the rules of the request forbid all")

    def chosen(self, tokens: torch.Tensor, slots: np.ndarray) -> None:
        """Tell the rules which tokens were chosen for `slots`: int64 ``[rows]``, on the device."""
        listed = slots.tolist()
        for rule in self._rules:
            if rows := rule.rows_of(listed):
                rule.chosen(tokens, rows)


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
