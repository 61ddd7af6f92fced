"""Cross attention: a decoder's tokens see what the encoder made of their request's input.

Its keys and values do not depend on the decoder's tokens. So they are computed once, when the input is encoded, and
kept with it in the encoder's cache. A step gives each row those of its own request. Rows are computed one by one, so
that a row's bits do not depend on how a prompt was cut or which other requests the step has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel


class CrossStates(NamedTuple):
    """An encoded input."""

    states: torch.Tensor  # [1, length, hidden], the encoder's output
    keys: tuple[torch.Tensor, ...]  # of each cross attention: [heads, length, dim]
    values: tuple[torch.Tensor, ...]


class CrossAttention:
    """The cross attention of a model. Its modules refer to the one object as `mainspring_cross`.

    Args:
        states: ``[1, length, hidden]``: what the model is given where no request's input is, as in trial runs.
    """

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states  # what the model's forward gets as the encoder's output
        self.stand_in: CrossStates | None = None  # made of `states`
        self.modules: dict[nn.Module, int] = {}  # with their places in the order of calls
        self._rows: list[tuple[CrossStates | None, int]] = []
        self._heard: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @contextmanager
    def given(self, states: torch.Tensor) -> Iterator[None]:
        """In this context the model's forward gets these states."""
        before, self.states = self.states, states
        try:
            yield
        finally:
            self.states = before

    @contextmanager
    def listening(self) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        """In this context the keys and values of each call, ``[heads, length, dim]``, are written down."""
        heard: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._heard = heard
        try:
            yield heard
        finally:
            self._heard = None

    def begin(self, inputs: Sequence[CrossStates | None], counts: Sequence[int]) -> None:
        """The next pass has `counts` rows for each of these; None: for the stand-in."""
        self._rows = list(zip(inputs, counts, strict=True))

    def attend(self, module: nn.Module, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """query ``[1, heads, rows, dim]`` → ``[1, rows, heads, value_dim]``. Rows behind those of `begin` are zero."""
        at, found, row = self.modules[module], None, 0
        for given, count in self._rows:
            inputs = given or self.stand_in
            assert inputs is not None
            keys, values = inputs.keys[at][None], inputs.values[at][None]
            if found is None:
                found = query.new_zeros(1, query.shape[2], query.shape[1], values.shape[-1])
            found[:, row : row + count] = _by_row(query[:, :, row : row + count], keys, values, scaling)
            row += count
        assert found is not None, "a pass over no rows"
        return found

    def hear(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """The attention of a trial run, over the keys and values that the call brings."""
        if self._heard is not None:
            self._heard.append((key[0], value[0]))
        return _by_row(query, key, value, scaling)


def _by_row(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """query ``[1, heads, rows, dim]`` → ``[1, rows, heads, value_dim]``."""
    rows = [row.contiguous() for row in query.split(1, dim=2)]
    gqa = query.shape[1] != key.shape[1]
    return torch.cat(
        [scaled_dot_product_attention(row, key, value, scale=scaling, enable_gqa=gqa).transpose(1, 2) for row in rows],
        dim=1,
    )


def cross_attention_of(model: PreTrainedModel) -> CrossAttention | None:
    """What `model` attends to beside its tokens; None: nothing."""
    return getattr(model, "mainspring_cross", None)


def aside(cross: CrossAttention, attend: Callable[..., Any]) -> Callable[..., Any]:
    """`attend` for all modules but those of `cross`, which need not be known to it."""

    def called(module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if module in cross.modules:
            return cross.hear(module, query, key, value, kwargs.get("scaling")), None
        return attend(module, query, key, value, *args, **kwargs)

    return called
