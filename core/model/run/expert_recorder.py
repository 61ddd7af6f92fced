"""Records which experts compute each row of a forward pass.

The experts of a layer are a module that is called with the numbers of the experts of each row. They are what is
recorded, so no router is computed again. `ExpertRecorder` finds these modules in a pass over a few tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ....ipc.errors import NotSupportedError
from ....kernels.contract import ROW_MULTIPLE
from ..learn.fuse_observe import run_rows

_MOST_IN_A_BYTE = 256  # experts of a layer whose numbers fit in uint8


class _Call(NamedTuple):
    """How the experts of a layer are called."""

    module: nn.Module
    place: int | str  # of the argument that has the numbers: its index, or its name
    num_chosen: int  # experts of a row


class ExpertRecorder:
    """Adds a hook to the experts of each layer. Outside of `into` they do nothing.

    Attributes:
        shape: of a row: layers of the model, experts of a token.
        dtype: uint8, or int16 where a layer has more experts than uint8 can number.

    Raises:
        NotSupportedError: no layer is given the experts of each row, or not all of them in the same way.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        found = _calls(model)
        paths = [re.match(r"(.*?)\.(\d+)\.", path) for path in found]
        lists = {None if path is None else path[1] for path in paths}  # of layers; there should be one
        layers = [int(path[2]) for path in paths if path is not None]
        widths = {call.num_chosen for call in found.values()}
        name = lists.pop() if len(lists) == len(widths) == 1 else None
        if name is None or len({*layers}) < len(layers):
            raise NotSupportedError(
                f"enable_return_routed_experts is True, but in {type(model).__name__} no layers were found that are "
                "given the experts of each token: unset it"
            )
        self.num_routed_layers = len(layers)
        self.shape = len(cast(nn.ModuleList, model.get_submodule(name))), widths.pop()
        most = max(_num_experts(call.module) for call in found.values())
        self.dtype = torch.uint8 if most <= _MOST_IN_A_BYTE else torch.int16
        self._rows: torch.Tensor | None = None
        for layer, (module, place, _) in zip(layers, found.values(), strict=True):
            module.register_forward_pre_hook(partial(self._record, layer, place), with_kwargs=True)

    @contextmanager
    def into(self, rows: torch.Tensor) -> Iterator[None]:
        """Forward passes in this context are recorded in `rows`: `dtype` ``[at least the rows of a pass, *shape]``.
        Layers without experts are left as they are."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _record(self, layer: int, place: int | str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._rows is not None:
            numbers = args[place] if isinstance(place, int) else kwargs[place]
            self._rows[: len(numbers), layer] = numbers


def _num_experts(module: nn.Module) -> int:
    """Of all ranks; one more than fit in a byte if it is not known."""
    own: Any = getattr(module, "num_experts", _MOST_IN_A_BYTE + 1)
    return int(getattr(module, "mainspring_num_experts", own))


def _calls(model: PreTrainedModel) -> dict[str, _Call]:
    """The modules that are called with the experts of each row, by path; a module inside such a one is left out."""
    found: dict[str, _Call] = {}

    def note(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(path.startswith(f"{outer}.") for outer in found):
            return
        every: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        given = {place: x for place, x in every if isinstance(x, torch.Tensor) and x.dim() == 2}
        shares = {x.shape for x in given.values() if x.is_floating_point()}  # of each expert in a row's result
        for place, x in given.items():
            if not x.is_floating_point() and len(x) == ROW_MULTIPLE and x.shape in shares:
                found[path] = _Call(module, place, x.shape[1])

    run_rows(model, slice(ROW_MULTIPLE), before=note)
    return found
