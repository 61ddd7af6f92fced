"""Make torch's own operators give a row the same bits whatever other rows are there.

Two kinds do not, on a CPU (both seen with torch 2.13):

- matrix products over a number of rows that is no multiple of `ROW_MULTIPLE`: other code runs the last few rows;
- some elementwise functions, which are computed by vector instructions but for the end of each thread's share of the
  tensor, where a scalar version rounds differently. Which elements lie there depends on the number of rows. ``exp``,
  ``tanh``, ``erf``, ``log1p``, ``sin``, ``cos`` and plain arithmetic are the same in both, and the others can be
  written with them.

`RowInvariant` is a context in which both are right. It costs a microsecond or two for every torch call inside it, so it
is put only around the modules that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ...kernels.interface import ROW_MULTIPLE

Function = Callable[..., Any]


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-x.float()).add_(1.0).reciprocal_().to(x.dtype)


def _silu(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    x = input.float()
    return (x / torch.exp(-x).add_(1.0)).to(input.dtype)


def _gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if approximate == "none":
        return F.gelu(input)
    x = input.float()
    inner = (x * x * x).mul_(0.044715).add_(x).mul_((2.0 / torch.pi) ** 0.5)
    return (torch.tanh(inner).add_(1.0).mul_(x).mul_(0.5)).to(input.dtype)


def _softplus(input: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    x = input.float() * beta
    return torch.where(x > threshold, x, torch.log1p(torch.exp(x))).div_(beta).to(input.dtype)


def _mish(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return (input.float() * torch.tanh(_softplus(input.float()))).to(input.dtype)


ELEMENTWISE: dict[Function, Function] = {
    F.silu: _silu,
    F.gelu: _gelu,
    F.softplus: _softplus,
    F.mish: _mish,
    torch.sigmoid: _sigmoid,
    torch.Tensor.sigmoid: _sigmoid,
}

LEFT_OPERAND: dict[Function, int] = {
    F.linear: 0,
    torch.matmul: 0,
    torch.Tensor.matmul: 0,
    torch.mm: 0,
    torch.Tensor.mm: 0,
    torch.bmm: 0,
    torch.Tensor.bmm: 0,
    torch.addmm: 1,
    torch.baddbmm: 1,
}
"""Matrix products → which argument holds the rows, in its second last dimension."""


def is_elementwise_hazard(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return function in ELEMENTWISE and not (function is F.gelu and kwargs.get("approximate", "none") == "none")


def odd_rows(function: Function, args: tuple[Any, ...]) -> int:
    """The number of rows of a matrix product, where it is no multiple of `ROW_MULTIPLE`; else 0."""
    at = LEFT_OPERAND.get(function)
    if at is None or len(args) <= at:
        return 0
    left = args[at]
    rows: int = left.shape[-2] if left.dim() > 1 else 1
    return rows if rows % ROW_MULTIPLE and left.shape[-1] > 1 else 0


class RowInvariant(TorchFunctionMode):
    """Inside this context, products are padded to whole multiples of rows and hazardous functions rewritten."""

    def __torch_function__(
        self, func: Function, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = ELEMENTWISE.get(func)
        if replacement is not None:
            return replacement(*args, **kwargs)
        rows = odd_rows(func, args)
        if not rows:
            return func(*args, **kwargs)
        at = LEFT_OPERAND[func]
        left = args[at]
        flat = left.dim() == 1
        padded = F.pad(left[None] if flat else left, (0, 0, 0, -rows % ROW_MULTIPLE))
        out = func(*args[:at], padded, *args[at + 1 :], **kwargs).narrow(-2, 0, rows)
        return out[0] if flat else out


def make_row_invariant(module: nn.Module) -> None:
    """Let `module`, and all that it calls, run in `RowInvariant`. Parameters and names stay as they are."""
    forward = module.forward

    @wraps(forward)
    def invariant(*args: Any, **kwargs: Any) -> Any:
        with RowInvariant():
            return forward(*args, **kwargs)

    module.forward = invariant
