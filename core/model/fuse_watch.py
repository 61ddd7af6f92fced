"""Find what gives a row of the forward pass other bits when other rows change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ...kernels.interface import ROW_MULTIPLE
from .fuse_observe import random_ids, row_local_attention, run_rows
from .fuse_rows import is_elementwise_hazard, odd_rows
from .fused import FusedMLP, FusedRMSNorm

_ROWS = 2 * ROW_MULTIPLE


def hazards(model: PreTrainedModel) -> dict[str, set[str]]:
    """Path of each module that does in its own code what `RowInvariant` cures → what it does."""
    watch = _Watch(model)
    with row_local_attention(model), watch:
        run_rows(model, random_ids(model, _ROWS), torch.arange(_ROWS, device=model.device))
    return watch.found


@torch.no_grad()
def row_dependence(model: PreTrainedModel) -> list[str]:
    """Modules in which a row of the result depends on the other rows of the pass, attention aside.

    Runs a few tokens alone and among others and compares bits. Empty: clockwork. Else the model must be refused where
    that is promised: a router that drops tokens when an expert is full does this, or a sum over all rows. Named are the
    innermost modules that made other rows of the same rows; "the model itself" where none of them did.
    """
    count = 3 * ROW_MULTIPLE
    ids, positions = random_ids(model, count), torch.arange(count, device=model.device)
    some = slice(ROW_MULTIPLE, 2 * ROW_MULTIPLE)
    with row_local_attention(model):
        among, alone = run_rows(model, ids, positions), run_rows(model, ids[some], positions[some])
        if torch.equal(among[some], alone):
            return []
        seen_among, seen_alone = _Seen(model), _Seen(model)
        with seen_among:
            run_rows(model, ids, positions)
        with seen_alone:
            run_rows(model, ids[some], positions[some])
    found: list[str] = []
    for path, (given, made) in seen_alone.calls.items():
        given_among, made_among = seen_among.calls.get(path, (None, None))
        same_rows = _equal_rows(given_among, given, some) and not _equal_rows(made_among, made, some)
        if same_rows and not any(inner.startswith(f"{path}.") for inner in found):
            found.append(path)
    return found or ["the model itself"]


class _Hooks:
    """Hooks before and after every module of a model, for the time of a context."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def before(self, path: str, module: nn.Module, rows: torch.Tensor | None) -> None: ...

    def after(self, path: str, rows: torch.Tensor | None, output: Any) -> None: ...

    def attach(self) -> None:
        for path, module in self._model.named_modules():

            def before(m: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                self.before(path, m, _first_tensor([*args, *kwargs.values()]))

            def after(m: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
                self.after(path, _first_tensor([*args, *kwargs.values()]), output)

            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Watch(TorchFunctionMode, _Hooks):
    """Notes hazardous torch calls, under the module whose code makes them.

    A matrix product over some of the rows is noted under the innermost module that was given all of them: one that
    deals rows out. What fused modules do inside is the backend's promise.
    """

    def __init__(self, model: nn.Module) -> None:
        TorchFunctionMode.__init__(self)
        _Hooks.__init__(self, model)
        self.found: dict[str, set[str]] = {}
        self._stack: list[tuple[str, nn.Module, bool]] = []

    def __enter__(self) -> _Watch:
        self.attach()
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        TorchFunctionMode.__exit__(self, *exc)
        self.detach()

    def before(self, path: str, module: nn.Module, rows: torch.Tensor | None) -> None:
        whole = rows is not None and rows.shape[:-1].numel() % _ROWS == 0
        self._stack.append((path, module, whole))

    def after(self, path: str, rows: torch.Tensor | None, output: Any) -> None:
        self._stack.pop()

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._stack and not isinstance(self._stack[-1][1], FusedMLP | FusedRMSNorm):
            if is_elementwise_hazard(func, args, kwargs) and out.numel() >= _ROWS:
                self.found.setdefault(self._stack[-1][0], set()).add(func.__name__)
            elif odd_rows(func, args):
                path = next((path for path, _, whole in reversed(self._stack) if whole), self._stack[0][0])
                self.found.setdefault(path, set()).add("products over some of the rows")
        return out


class _Seen(_Hooks):
    """The first tensor each module was given and the first it made, in the order in which they finished."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def __enter__(self) -> _Seen:
        self.attach()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.detach()

    def after(self, path: str, rows: torch.Tensor | None, output: Any) -> None:
        made = _first_tensor(output if isinstance(output, tuple | list) else [output])
        self.calls[path] = tuple(None if t is None else t.clone() for t in (rows, made))  # type: ignore[assignment]


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    return next((v for v in values if isinstance(v, torch.Tensor) and v.dim() > 1), None)


def _equal_rows(among: torch.Tensor | None, alone: torch.Tensor | None, some: slice) -> bool:
    """Whether `alone` is those rows of `among`, wherever in the shape the rows are."""
    if among is None or alone is None or among.dim() != alone.dim():
        return False
    count = some.stop - some.start
    for dim, (size, size_alone) in enumerate(zip(among.shape, alone.shape, strict=True)):
        if size != size_alone:
            return size >= some.stop and torch.equal(among.narrow(dim, some.start, count), alone)
    return torch.equal(among, alone)
