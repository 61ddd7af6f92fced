"""What a step puts in where a model calls its language model: rows, positions and reach of prompts with media."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..run.cross_attention import CrossStates
from .merge import DEEPSTACK, MergedPrompt, Puts

DEEPSTACK_ROWS = "deepstack"


class StepMedia:
    """The rows of one step: by an argument's name, int64 ``[n]`` rows of the step and their values."""

    def __init__(self, puts: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.puts = puts

    @contextmanager
    def at(self, decoder: torch.nn.Module) -> Iterator[None]:
        """In this context, calls of `decoder` get them."""
        hook = decoder.register_forward_pre_hook(self._enter, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def into(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Write them into embeddings ``[tokens, hidden]``, for a model with nothing else to put in."""
        rows, values = self.puts["inputs_embeds"]
        embeddings[rows] = values
        return embeddings

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = dict(kwargs)
        tokens = given["inputs_embeds"].shape[1]
        for name, (rows, values) in self.puts.items():
            if name == DEEPSTACK_ROWS:
                where = torch.zeros(1, tokens, dtype=torch.bool, device=values.device)
                where[0, rows] = True
                values = values[torch.argsort(rows)]
                given |= {DEEPSTACK[0]: where, DEEPSTACK[1]: list(values.unbind(1))}
                continue
            before = given.get(name)
            whole = values.new_zeros(1, tokens, *values.shape[1:]) if before is None else before.clone()
            whole[0, rows] = values.to(whole.dtype)
            given[name] = whole
        return args, given


class Door:
    """The prompts with media that have a slot."""

    def __init__(self, axes: int, spans: bool) -> None:
        self._axes, self._spans = axes, spans
        self._prompts: dict[int, MergedPrompt] = {}

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def admit(self, slot: int, prompt: MergedPrompt) -> None:
        self._prompts[slot] = prompt

    def release(self, slot: int) -> None:
        self._prompts.pop(slot, None)

    def cross(self, slots: np.ndarray) -> list[CrossStates | None]:
        """What the tokens of each of these slots see beside their sequence."""
        prompts = [self._prompts.get(slot) for slot in slots.tolist()]
        return [None if prompt is None else prompt.cross for prompt in prompts]

    def computes(self, slots: np.ndarray, starts: np.ndarray) -> bool:
        """Whether a step that begins there computes tokens of these prompts, not only tokens behind them."""
        return bool(self._prompts) and any(
            (prompt := self._prompts.get(slot)) is not None and start < prompt.length
            for slot, start in zip(slots.tolist(), starts.tolist(), strict=True)
        )

    def positions(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
        """int64 ``[axes, sum of counts]``; None: those of a text."""
        prompts = [self._prompts.get(slot) for slot in slots.tolist()]
        if all(p is None or p.positions is None for p in prompts):
            return None
        found = np.empty((self._axes, int(counts.sum())), np.int64)
        at = 0
        for prompt, start, count in zip(prompts, starts.tolist(), counts.tolist(), strict=True):
            part = found[:, at : at + count]
            part[:] = np.arange(start, start + count)
            if prompt is not None and prompt.positions is not None:
                within = max(0, min(start + count, prompt.length) - start)
                part += prompt.delta
                part[:, :within] = prompt.positions[:, start : start + within]
            at += count
        return found

    def reach(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
        """int32 ``[2, sum of counts]``, of layers without and with a window; None: no token of the step sees a later
        one."""
        if not self._spans:
            return None
        index = np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, counts, strict=True)])
        found, at = np.stack([index, index]), 0
        for slot, start, count in zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True):
            prompt = self._prompts.get(slot)
            if prompt is not None:
                end = min(start + count, prompt.length)
                for kind, last in enumerate(prompt.reach):
                    if last is not None and end > start:
                        found[kind, at : at + end - start] = last[start:end]
            at += count
        return found if (found != index).any() else None

    def rows(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> StepMedia | None:
        """What the step puts in; None: nothing."""
        parts: dict[str, list[tuple[np.ndarray, torch.Tensor]]] = {}
        at = np.cumsum(counts) - counts
        for slot, start, count, first in zip(*(x.tolist() for x in (slots, starts, counts, at)), strict=True):
            prompt = self._prompts.get(slot)
            if prompt is None or start >= prompt.length:
                continue
            named: list[tuple[str, Puts]] = list(prompt.puts.items())
            if prompt.deepstack is not None:
                named.append((DEEPSTACK_ROWS, prompt.deepstack))
            for name, (index, values) in named:
                low, high = np.searchsorted(index, [start, start + count])
                if low < high:
                    parts.setdefault(name, []).append((index[low:high] - start + first, values[low:high]))
        if not parts:
            return None
        puts = {}
        for name, found in parts.items():
            values = torch.cat([each for _, each in found])
            rows = torch.from_numpy(np.concatenate([each for each, _ in found]))
            puts[name] = rows.to(values.device), values
        return StepMedia(puts)
