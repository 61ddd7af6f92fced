"""Products of 16-bit numbers in float32, where torch's own take many times as long: on a CPU without instructions for
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

PRODUCTS = frozenset(
    {functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}
    | {functional.conv1d, functional.conv2d, functional.conv3d}
)
_SUPPORTED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


class _InFloat32(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS or not any(self._is_short(x) for x in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        wide = [x.float() if self._is_short(x) else x for x in args]
        named = {name: x.float() if self._is_short(x) else x for name, x in kwargs.items()}
        return func(*wide, **named).to(self._dtype)

    def _is_short(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dtype is self._dtype


def fast_products(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """In this context, products of numbers of this type are computed the fastest way. Weights stay as they are: each
    product converts them, which is a tenth of its work if it has hundreds of rows."""
    name = _SUPPORTED.get(dtype) if device.type == "cpu" else None
    return nullcontext() if name is None or getattr(torch.ops.mkldnn, name)() else _InFloat32(dtype)
