"""Attention that a model computes with matrix products of its own, as one call of a function.

Inside `OwnAttention`, the product of queries and transposed keys is not computed. It becomes `LazyScores`, a tensor
without memory that knows both. What the model then does to its scores (a scale, a mask, a bias, the softmax) is noted
for the probe, or passed over when the model is served. Where the scores meet the values, the attention function is
called. So no class of models is known here by name, and none of their code is written again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ....ipc.errors import UnsupportedModelError

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Terms | None"], torch.Tensor]
"""query ``[tokens, q_heads, key_dim]``, key and value likewise, what was done to the scores →
``[tokens, q_heads, value_dim]``."""

HIDING = -1e3  # a score that is set to less is hidden: its weight is 0 in fp32

_PRODUCTS = {"matmul", "__matmul__", "bmm"}
_SUMS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_DIFFERENCES = {"sub", "sub_", "__sub__", "__isub__"}
_MULTIPLES = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}
_QUOTIENTS = {"div", "div_", "true_divide", "__truediv__", "__itruediv__"}
_CASTS = {"to", "float", "type", "type_as", "half", "bfloat16"}
_SHAPES = {"view", "reshape", "contiguous", "clone"}
_HIDES = {"masked_fill", "masked_fill_", "where"}
_FLOORS = {"max", "maximum"}
_CHANGES = _SUMS | _DIFFERENCES | _MULTIPLES | _QUOTIENTS | _HIDES | _FLOORS
_FACTS = {"__get__", "size", "dim", "numel", "is_floating_point", "ndimension"}


class Terms:
    """What a model does to its scores before the softmax, to be read by the probe. A score becomes
    ``scale * score + sum(biases)``, and is hidden where one of `hidden` is true. Where one of `zeroed` is true, it
    became 0 on the way. All tensors broadcast to ``[q_heads, tokens, tokens]``."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.biases: list[torch.Tensor] = []
        self.hidden: list[torch.Tensor] = []
        self.zeroed: list[torch.Tensor] = []

    def copy(self) -> Terms:
        made = Terms()
        made.scale, made.biases, made.hidden, made.zeroed = self.scale, [*self.biases], [*self.hidden], [*self.zeroed]
        return made

    def multiply(self, factor: Any) -> None:
        """By a number, or by a tensor of zeros and ones."""
        if isinstance(factor, torch.Tensor) and factor.numel() > 1:
            if not bool(((factor == 0) | (factor == 1)).all()):
                raise UnsupportedModelError("attention scores are multiplied by a tensor, which no kernel here does")
            factor = _by_head(factor)
            self.zeroed.append(factor == 0)
        else:
            self.scale *= float(factor)
        self.biases = [bias * factor for bias in self.biases]

    def add(self, bias: Any) -> None:
        if isinstance(bias, torch.Tensor):  # a number is the same for all keys
            self.biases.append(_by_head(bias))

    def hide(self, where: torch.Tensor, value: Any) -> None:
        if float(value) > HIDING:
            raise UnsupportedModelError(f"attention scores are set to {float(value):g}, which no kernel here does")
        self.hidden.append(_by_head(where))


def _by_head(x: torch.Tensor) -> torch.Tensor:
    return x[0] if x.dim() == 4 else x


class LazyScores(torch.Tensor):
    """Products of queries and keys that are not computed, before the softmax or after it."""

    query: torch.Tensor  # [..., tokens, key_dim]
    key: torch.Tensor  # [..., key_dim, tokens]
    attend: Any  # an `Attend`
    terms: Terms | None  # None: the attention function knows them
    weights: bool  # after the softmax

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, *parts: Any) -> LazyScores:
        made: LazyScores = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=parts[0].device)
        made.query, made.key, made.attend, made.terms, made.weights = parts
        return made

    def _like(
        self,
        shape: torch.Size | None = None,
        dtype: torch.dtype | None = None,
        terms: Terms | None = None,
        weights: bool = False,
    ) -> LazyScores:
        parts = self.query, self.key, self.attend, terms or self.terms, weights or self.weights
        return LazyScores(shape or self.shape, dtype or self.dtype, *parts)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name in _FACTS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if name == "expand_as":  # of a mask
            return args[0].expand(args[1].shape)
        found = [x for x in (*args, *kwargs.values()) if isinstance(x, LazyScores)]
        if len(found) != 1 and name not in _CASTS:
            raise UnsupportedModelError(f"attention scores are combined with others by {name}")
        return found[0]._after(name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedModelError(f"{func} of attention scores is not known here")

    def _after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function of this name makes of these scores."""
        others = [x for x in (*args, *kwargs.values()) if x is not self]
        if name in _PRODUCTS and args[0] is self and self.weights:
            return self._times(others[0])
        if name in _SHAPES:
            sizes = args[1:]
            shape = torch.empty(self.shape, device="meta").reshape(*sizes).shape if sizes else self.shape
            if shape[-2:] == self.shape[-2:]:
                return self._like(shape)
        if name in _CASTS:
            dtypes = [x.dtype if isinstance(x, torch.Tensor) else x for x in others]
            named = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}.get(name)
            return self._like(dtype=next((x for x in dtypes if isinstance(x, torch.dtype)), named))
        if name == "softmax" and not self.weights:
            axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if axis in (-1, self.dim() - 1):
                return self._like(dtype=kwargs.get("dtype"), weights=True)
        if name in {"dropout", "dropout_"} and not kwargs.get("training", False):
            return self
        if name in _CHANGES and not self.weights:
            if self.terms is None:
                return self
            if name.endswith("_") and (not name.startswith("__") or name.startswith("__i")):  # in place
                self._note(self.terms, name, args, others[0])
                return self
            terms = self.terms.copy()
            self._note(terms, name, args, others[0])
            return self._like(terms=terms)
        what = "weights" if self.weights else "scores"
        raise UnsupportedModelError(f"attention {what} go through {name}, which no kernel here knows")

    def _note(self, terms: Terms, name: str, args: tuple[Any, ...], other: Any) -> None:
        """Note a change of the scores in `terms`."""
        first = args[0] is self
        if name in _SUMS:
            terms.add(other)
        elif name in _DIFFERENCES and first:
            terms.add(None if other is None else -other)
        elif name in _MULTIPLES:
            terms.multiply(other)
        elif name in _QUOTIENTS and first:
            terms.multiply(1 / other)
        elif name == "where" and len(args) == 3 and args[1] is self:
            terms.hide(~args[0], args[2])
        elif name.startswith("masked_fill") and first:
            terms.hide(*args[1:])
        elif not (name in _FLOORS and isinstance(other, torch.Tensor) and float(other.max()) < HIDING):
            raise UnsupportedModelError(f"attention scores go through {name} in a way that no kernel here knows")

    def _times(self, value: torch.Tensor) -> torch.Tensor:
        query, key, values = (x[0] if x.dim() == 4 else x for x in (self.query, self.key, value))
        rows = [x.to(value.dtype) for x in (query.transpose(0, 1), key.permute(2, 0, 1), values.transpose(0, 1))]
        out: torch.Tensor = self.attend(*rows, self.terms).transpose(0, 1)
        return out.reshape(*self.shape[:-1], value.shape[-1])


class OwnAttention(TorchFunctionMode):
    """Inside this context, attention that consists of matrix products is computed by `attend`. learn: it is told what
    is done to the scores."""

    def __init__(self, attend: Attend, learn: bool = False) -> None:
        super().__init__()
        self._attend = attend
        self._learn = learn

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name in _PRODUCTS and _are_scores(*args[:2]):
            return self._scores(*args)
        if name == "baddbmm":
            bias, query, key, beta, alpha = _of_baddbmm(*args, **kwargs)
            if _are_scores(query, key):
                scores = self._scores(query, key)
                if scores.terms is not None:
                    scores.terms.multiply(alpha)
                    scores.terms.add(bias * beta)
                return scores
        if func is F.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        return func(*args, **kwargs)

    def _scores(self, query: torch.Tensor, key: torch.Tensor) -> LazyScores:
        shape = torch.Size((*query.shape[:-1], key.shape[-1]))
        return LazyScores(shape, query.dtype, query, key, self._attend, Terms() if self._learn else None, False)

    def _sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        scores = self._scores(query, key.transpose(-1, -2))
        if scores.terms is not None:
            scores.terms.scale = query.shape[-1] ** -0.5 if scale is None else scale
            if is_causal:
                tokens = query.shape[-2]
                scores.terms.hidden.append(torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1))
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                scores.terms.hidden.append(_by_head(~attn_mask))
            else:
                scores.terms.add(attn_mask)
        return scores._times(value)


def _are_scores(query: Any, key: Any) -> bool:
    """Whether this is a product of each token's query with each token's key, head by head. Rotary embeddings have
    products of one term each."""
    if type(query) is not torch.Tensor or type(key) is not torch.Tensor or not 3 <= query.dim() == key.dim() <= 4:
        return False
    return query.shape[-2] == key.shape[-1] and query.shape[-1] > 1 and (query.dim() == 3 or query.shape[0] == 1)


def _of_baddbmm(
    input: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, float]:
    return input, batch1, batch2, beta, alpha


def take_over(module: nn.Module, attend: Attend, active: Callable[[], bool]) -> None:
    """From now on, attention inside `module` is computed by `attend` whenever `active`."""
    forward = module.forward

    @wraps(forward)
    def served(*args: Any, **kwargs: Any) -> Any:
        if not active():
            return forward(*args, **kwargs)
        with OwnAttention(attend):
            return forward(*args, **kwargs)

    module.forward = served
