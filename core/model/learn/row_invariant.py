"""Give a row of the forward pass the same bits whatever other rows there are, and tell whether it has them.

On a CPU, two kinds of torch's operators don't (seen with torch 2.13):

- matrix products over a number of rows that is no multiple of `ROW_MULTIPLE`, as experts of a mixture get them: other
  code runs the last few rows. On processors with AMX, also over numbers that are multiples (768 x 3072, for one);
- some elementwise functions: a scalar version, which rounds differently, computes the end of each thread's share.
  ``exp``, ``tanh``, ``erf``, ``log1p``, ``sin``, ``cos`` and plain arithmetic are the same in both versions, and the
  others can be written with them.

`RowInvariant` mends both, with a backend's products where it can use them. It costs a microsecond or two for every
torch call inside it, so it is put only around the modules that need it.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ....ipc.errors import UnsupportedModelError
from ....kernels.contract import ROW_MULTIPLE, Backend
from ....kernels.decoder_contract import AttentionMixer
from ..media.features import feature_methods
from ..run.fused import FusedMLP, FusedRMSNorm
from ..run.stack import StackedDecoder
from .fuse_observe import TEXT_ROWS, is_plain_linear, run_rows

logger = logging.getLogger(__name__)

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


def _odd_rows(function: Function, args: tuple[Any, ...]) -> int:
    """The number of rows of a matrix product, where it is no multiple of `ROW_MULTIPLE`; else 0."""
    at = LEFT_OPERAND.get(function)
    if at is None or len(args) <= at:
        return 0
    left = args[at]
    rows: int = left.shape[-2] if left.dim() > 1 else 1
    return rows if rows % ROW_MULTIPLE and left.shape[-1] > 1 else 0


def _padded(function: Function, by: Function | None, /, *args: Any, **kwargs: Any) -> Any:
    """The function's result, computed `by` another in its place. A matrix product is given as many more rows of zeros
    as make a multiple."""
    rows, by = _odd_rows(function, args), by or function
    if not rows:
        return by(*args, **kwargs)
    at = LEFT_OPERAND[function]
    left = args[at]
    flat = left.dim() == 1
    padded = F.pad(left[None] if flat else left, (0, 0, 0, -rows % ROW_MULTIPLE))
    out = by(*args[:at], padded, *args[at + 1 :], **kwargs).narrow(-2, 0, rows)
    return out[0] if flat else out


def _grouped_mm(
    rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor, linear: Function | None = None, **_: Any
) -> torch.Tensor:
    """``torch._grouped_mm``: rows ``[n, in]``, sorted by expert and ending at `offs`, times ``[experts, in, out]``. By
    `linear`, a backend's, where each expert's weight lies in memory as ``[out, in]``."""
    out = rows.new_empty(len(rows), weights.shape[2])
    by_linear = linear is not None and weights.transpose(1, 2).is_contiguous()
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            some, weight = rows[start:end], weights[expert]
            if by_linear:
                out[start:end] = _padded(F.linear, linear, some, weight.t())
            else:
                out[start:end] = _padded(torch.mm, None, some, weight)
            start = end
    return out


class RowInvariant(TorchFunctionMode):
    """Inside this context, products are padded to whole multiples of rows, linear layers are computed by `linear`, a
    backend's, if there is one, and hazardous functions are rewritten."""

    def __init__(self, linear: Function | None = None) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._grouped_mm:
            return _grouped_mm(*args, **kwargs, linear=self._linear)
        if replacement := ELEMENTWISE.get(func):
            return replacement(*args, **kwargs)
        return _padded(func, self._linear if func is F.linear else None, *args, **kwargs)


class RoutedProducts(TorchFunctionMode):
    """Inside this context, linear layers are computed by `linear`, a backend's."""

    def __init__(self, linear: Function) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._linear if func is F.linear else func)(*args, **(kwargs or {}))


class _Watch(TorchFunctionMode):
    """Notes what `RowInvariant` would replace in a pass over `model`, under the innermost module that was given all the
    rows. Fused modules are left out, because the backend promises their rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.found: defaultdict[str, set[str]] = defaultdict(set)
        self._stack: list[tuple[str, nn.Module, bool]] = []
        with self:
            run_rows(model, slice(TEXT_ROWS), self._before, self._after)

    def _before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim() > 1), None)
        self._stack.append((path, module, x is not None and x.shape[:-1].numel() % TEXT_ROWS == 0))

    def _after(self, *_: Any) -> None:
        self._stack.pop()

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        exact = func is F.gelu and kwargs.get("approximate", "none") == "none"
        if func in ELEMENTWISE and not exact and out.numel() >= TEXT_ROWS:
            self._note(func.__name__)
        elif func is torch._grouped_mm or _odd_rows(func, args):
            self._note("products over some of the rows")
        return out

    def _note(self, what: str) -> None:
        if self._stack and not isinstance(self._stack[-1][1], FusedMLP | FusedRMSNorm):
            path = next((path for path, _, whole in reversed(self._stack) if whole), self._stack[0][0])
            self.found[path].add(what)


def make_row_invariant(model: PreTrainedModel, linear: Function | None = None) -> list[str]:
    """Run the modules of `model` that need it in `RowInvariant`, with a backend's `linear`; → lines for
    ``--explain-model``. To be called on a loaded model in eval mode, after `fuse_model`. Changes no parameter and no
    name."""
    found, lines = _Watch(model).found, Counter[str]()
    for path, why in found.items():
        if any(path.startswith(f"{outer}.") for outer in found):
            continue  # runs in what is set around the outer one
        module = model.get_submodule(path)
        module.forward = _inside(partial(RowInvariant, linear), module.forward)
        lines[f"{type(module).__name__} runs row-invariant ({', '.join(sorted(why))})"] += 1
    return [f"clockwork: {count} x {what}" for what, count in lines.items()]


def _inside(mode: Callable[[], TorchFunctionMode], forward: Function) -> Function:
    """`forward`, each call of which runs in a new `mode()`."""

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return forward(*args, **kwargs)

    return wrapped


def route_products(modules: Iterable[nn.Module], linear: Function) -> None:
    """Let every linear layer that fusing and ranks left alone be computed by `linear`, a backend's.

    A subclass of ``nn.Linear`` may compute more than the product: the routers of Phimoe and Llama 4 also choose the
    experts. Its own forward still runs, and only the product inside it is computed by `linear`.
    """
    for module in modules:
        if is_plain_linear(module):
            module.forward = routed(module, linear)  # type: ignore[arg-type]
        elif type(module) is Conv1D:
            module.forward = _routed_conv(module, linear)  # type: ignore[method-assign]
        elif isinstance(module, nn.Linear) and not _has_forward(module):
            module.forward = _inside(partial(RoutedProducts, linear), module.forward)  # type: ignore[method-assign]


def turn_weights(modules: Iterable[nn.Module]) -> None:
    """`turn` the weights of GPT-2's kind."""
    turn(*(module.weight for module in modules if type(module) is Conv1D))


def turn(*weights: nn.Parameter) -> None:
    """Let weights ``[…, in, out]`` lie in memory as a backend reads them. They keep their shape."""
    for weight in weights:
        weight.data = weight.data.mT.contiguous().mT


def _has_forward(module: nn.Linear) -> bool:
    """Whether fusing or ranks gave a plain layer another forward, which calls a backend."""
    return type(module).forward is nn.Linear.forward and "forward" in vars(module)


def _of_tokens(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules that compute tokens. Those of encoders, whose items have thousands of rows, have `fast_products`."""
    apart = feature_methods(model) or getattr(model.config, "is_encoder_decoder", False)
    yield from (model.get_decoder() if apart else model).modules()
    if apart and (head := model.get_output_embeddings()) is not None:
        yield head


def routed(module: nn.Linear, linear: Function) -> Function:
    """A forward of this linear layer."""
    return lambda input: linear(input, module.weight, module.bias)


def _routed_conv(module: Conv1D, linear: Function) -> Function:
    """A forward of this layer of GPT-2's kind, a linear layer whose weight is ``[in, out]``."""
    return lambda x: linear(x, module.weight.t(), module.bias)


def stray_products(model: PreTrainedModel) -> set[str]:
    """Modules with matrix products of torch's own, once `route_products` was called: few rows may not show that their
    bits depend on how many there are."""
    return set(_Products(model).found)


class _Products(_Watch):
    """Notes them under the class of the innermost module."""

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = 0 if func in (torch._grouped_mm, torch.einsum) else LEFT_OPERAND.get(func)
        left = args[at] if at is not None and len(args) > at else None
        # products of one term each, which rotary embeddings have, are exact
        if at is not None and self._stack and not (isinstance(left, torch.Tensor) and left.shape[-1] == 1):
            self.found[type(self._stack[-1][1]).__name__].add(func.__name__)
        return func(*args, **(kwargs or {}))


def is_row_invariant(model: PreTrainedModel) -> bool:
    """Whether a few tokens, attention aside, have the same bits alone and among others.

    Else clockwork can't be promised: a router that drops tokens when an expert is full does this, or a sum over rows.
    """
    some = slice(ROW_MULTIPLE, 2 * ROW_MULTIPLE)
    return torch.equal(run_rows(model, slice(TEXT_ROWS))[some], run_rows(model, some))


def has_kernels_only(model: PreTrainedModel, stack: StackedDecoder | None) -> bool:
    """Whether a backend's kernels compute everything between the embeddings and the output layer of a model on a CPU.
    It promises their rows, so there is nothing to look for."""
    return (
        model.device.type == "cpu"
        and stack is not None
        and stack.decoder is model.base_model
        and stack.has_gated_mlps
        and all(isinstance(layer.mixer, AttentionMixer) for layer in stack.layers)
    )


def isolate_rows(model: PreTrainedModel, backend: Backend, stack: StackedDecoder | None = None) -> list[str]:
    """Do what makes rows independent of each other; → lines for ``--explain-model``. stack: has taken the place of the
    layers' code."""
    if model.device.type != "cuda":
        route_products(_of_tokens(model), backend.linear)  # torch's product may be many times slower
        return [] if has_kernels_only(model, stack) else make_row_invariant(model, backend.linear)
    if backend.deterministic:
        route_products(model.modules(), backend.linear)
    return []


def check_rows(model: PreTrainedModel, refuse: bool) -> list[str]:
    """A warning unless `is_row_invariant`, also as a line for ``--explain-model``.

    Raises:
        UnsupportedModelError: in place of the warning, where asked for and `route_products` was called.
    """
    stray = stray_products(model) if refuse else set()
    if not stray and is_row_invariant(model):
        return []
    if refuse:
        where = f" ({', '.join(sorted(stray))})" if stray else ""
        raise UnsupportedModelError(
            f"deterministic is set, and in {type(model).__name__} a token's bits depend on the other tokens of a "
            f"step{where}: unset it, or run the model on a CPU"
        )
    note = "not clockwork: a token's bits depend on the other tokens of a step"
    logger.warning("%s is %s", type(model).__name__, note)
    return [note]
