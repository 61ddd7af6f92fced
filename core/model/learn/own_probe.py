"""Learn the attention of a model that computes it itself.

One pass over as many tokens as a window may have, in which no matrix product is computed: what a model does to its
scores depends on places, not on values. The terms that it adds and the places that it hides tell the window and the
bias. A second pass over a few tokens computes everything, and tells which heads of keys and values are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.masking_utils import eager_mask

from ....ipc.errors import UnsupportedModelError
from ....kernels.contract import AttentionSpec, SlopeBias, TableBias
from ..run.attention import has_own_attention, own_attention_learned
from ..run.own_attention import HIDING, Terms
from ..run.positions import longest_sequence, positions_given, receivers
from .probe import CPU, TOKENS, UNLIMITED, AttentionCall, MaskFunction, record_attention, window_of

MOST_TOKENS = 2048  # of the long pass; a mask of the library is asked about places beyond it
ROUNDING = 2e-6  # largest difference of a bias from its rule, in parts of the largest bias: that of fp32

Bias = SlopeBias | TableBias | None


def learn_attention(model: PreTrainedModel, max_model_len: int | None) -> list[AttentionCall]:
    """The attention calls of one forward pass of `model`; arguments and errors as `record_attention`."""
    if not has_own_attention(model):
        return record_attention(model, max_model_len)
    longest = max_model_len or UNLIMITED
    tokens = min(longest, MOST_TOKENS, longest_sequence(model.config.get_text_config()) or MOST_TOKENS)
    recorder = _Recorder(longest, tokens)
    with _WithoutProducts():
        _run(model, tokens, recorder.attend, recorder)
    repeats: list[int] = []
    few = _Recorder(longest, min(tokens, TOKENS))
    _run(model, few.tokens, partial(_count_repeats, repeats), few)
    if len(repeats) != len(recorder.calls):
        raise UnsupportedModelError(f"the attention calls of {type(model).__name__} depend on the number of tokens")
    calls = []
    for index, (call, count) in enumerate(zip(recorder.calls, repeats, strict=True)):
        spec = call.spec._replace(num_kv_heads=call.spec.num_kv_heads // count)
        calls.append(AttentionCall(call.module, spec, index, count))
    return calls


@torch.inference_mode()
def _run(model: PreTrainedModel, tokens: int, attend: Callable[..., torch.Tensor], recorder: _Recorder) -> None:
    vocab = model.config.get_text_config().vocab_size
    ids = torch.arange(1, tokens + 1, device=model.device)[None] % vocab
    base = model.base_model  # the output layer would take much memory
    positions = torch.arange(tokens, device=model.device)[None]
    with (
        recorder.following(model),
        own_attention_learned(model, attend, recorder.build_mask),
        positions_given(receivers(base), positions) as inputs,
    ):
        base(input_ids=ids, use_cache=False, **inputs)


def _count_repeats(
    found: list[int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any
) -> torch.Tensor:
    """Note how often each head of keys and values follows itself. Where all are the same, they say nothing."""
    heads = key.shape[1]
    distinct = [h for h in range(heads) if h == 0 or not (_same_head(key, h) and _same_head(value, h))]
    size = heads // len(distinct)
    found.append(size if len(distinct) > 1 and distinct == list(range(0, heads, size)) else 1)
    return query.new_zeros(*query.shape[:2], value.shape[2])


def _same_head(x: torch.Tensor, head: int) -> bool:
    return torch.equal(x[:, head], x[:, head - 1])


_TIMES = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class _WithoutProducts(TorchFunctionMode):
    """What would need weights is zeros in fp32, so that a bias is not rounded to the dtype of the weights."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight = args[:2] if len(args) > 1 else (args[0], kwargs["weight"])
            return x.new_zeros(*x.shape[:-1], weight.shape[0], dtype=torch.float32)
        if func in _TIMES and type(args[0]) is torch.Tensor and args[1].dim() == 2:
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[1], dtype=torch.float32)
        if func is torch.addmm:
            return args[1].new_zeros(args[1].shape[0], args[2].shape[1], dtype=torch.float32)
        if func is F.embedding:
            ids, weight = (args[0], args[1]) if len(args) > 1 else (kwargs["input"], kwargs["weight"])
            return torch.zeros(*ids.shape, weight.shape[1], device=ids.device)
        if func is F.layer_norm:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


class _Recorder:
    def __init__(self, longest: int, tokens: int) -> None:
        self.calls: list[AttentionCall] = []
        self.tokens = tokens
        self._longest = longest
        self._masks: list[tuple[torch.Tensor, MaskFunction]] = []
        self._running: list[nn.Module] = []

    def build_mask(self, *, mask_function: MaskFunction, **kwargs: Any) -> torch.Tensor:
        mask = eager_mask(mask_function=mask_function, **kwargs)
        if mask is not None:  # a mask for cross-attention to nothing is none
            self._masks.append((mask, mask_function))
        return mask

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """In this context, the modules that run are known."""

        def begin(module: nn.Module, _: Any) -> None:
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                name = type(module).__name__
                raise UnsupportedModelError(f"a {name} runs over the tokens, so it mixes those of several requests")
            self._running.append(module)

        hooks = [module.register_forward_pre_hook(begin) for module in model.modules()]
        hooks += [module.register_forward_hook(lambda *_: self._end()) for module in model.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _end(self) -> None:
        self._running.pop()

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms) -> torch.Tensor:
        module = self._running[-1]
        name = type(module).__name__
        if query.shape[0] != self.tokens or key.shape[0] != self.tokens:
            raise UnsupportedModelError(
                f"{name} attends from {query.shape[0]} to {key.shape[0]} positions where there are {self.tokens} tokens"
            )
        window, bias = self._read(name, terms, query.shape[1])
        spec = AttentionSpec(
            query.shape[1], key.shape[1], query.shape[2], value.shape[2], terms.scale, window=window, bias=bias
        )
        self.calls.append(AttentionCall(module, spec, len(self.calls)))
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def _read(self, name: str, terms: Terms, heads: int) -> tuple[int | None, Bias]:
        """Window and bias, from some rows of what was done to the scores."""
        last = self.tokens - 1
        rows = {row: _row(terms, row, heads, self.tokens) for row in sorted({last, last - 1, last // 2, last // 3, 0})}
        reaches = {row: _reach(name, seen, row) for row, (_, seen) in rows.items()}
        reach = reaches[last]
        if any(found != min(reach, row + 1) for row, found in reaches.items()):
            raise UnsupportedModelError(f"the mask of {name} is neither causal nor a sliding window")
        window = reach if reach < self.tokens else self._far_window(name, terms)
        return window, _bias_of(name, {row: values[:, : row + 1] for row, (values, _) in rows.items()}, reach)

    def _far_window(self, name: str, terms: Terms) -> int | None:
        """The window that shows only beyond the tokens of the pass."""
        if self.tokens >= self._longest:
            return None
        functions = {f for mask, f in self._masks if any(_stems_from(x, mask) for x in (*terms.biases, *terms.hidden))}
        device = self._masks[0][0].device if self._masks else CPU
        windows = {window_of(f, name, self._longest, device if device.type == "cuda" else CPU) for f in functions}
        # the library's masks hide no less than the module's own, or the module's is a window of its own
        if not functions:
            raise UnsupportedModelError(
                f"the mask of {name} is known for sequences of up to {self.tokens} tokens: set max_model_len"
            )
        return min((window for window in windows if window is not None), default=None)


def _stems_from(term: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether a mask of the library is this term, as it is or as the places that are hidden."""
    mask = mask[0]
    if term.shape[-2:] != mask.shape[-2:]:
        return False
    last = slice(-1, None)  # one row tells
    row = term[..., last, :]
    hidden = row if row.dtype == torch.bool else row < HIDING
    return bool((hidden == (mask[..., last, :] < HIDING)).all())


def _row(terms: Terms, row: int, heads: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to the scores of the query `row`, fp64 ``[heads, tokens]``, and which keys it sees, bool
    ``[tokens]``."""
    total = torch.zeros(heads, tokens, dtype=torch.float64)
    hidden = torch.zeros(heads, tokens, dtype=torch.bool)
    for bias in terms.biases:
        total += _at(bias, row).double().cpu()
    for where in terms.hidden:
        hidden |= _at(where, row).bool().cpu()
    hidden |= total < HIDING * max(1.0, abs(terms.scale))
    if not torch.equal(hidden.all(0), hidden.any(0)):
        raise UnsupportedModelError("heads of one layer see other keys than its other heads")
    if any(bool((_at(where, row).cpu() & ~hidden).any()) for where in terms.zeroed):
        raise UnsupportedModelError("attention scores are multiplied by 0, which no kernel here does")
    return total, ~hidden.all(0)


def _at(x: torch.Tensor, row: int) -> torch.Tensor:
    """The row of a tensor that broadcasts to ``[heads, tokens, tokens]``."""
    return x if x.dim() < 2 else x[..., row if x.shape[-2] > 1 else 0, :]


def _reach(name: str, seen: torch.Tensor, row: int) -> int:
    """How many keys the query `row` sees, itself included."""
    reach = int(seen.sum())
    keys = torch.arange(len(seen))
    if not torch.equal(seen, (keys > row - reach) & (keys <= row)):
        raise UnsupportedModelError(f"the mask of {name} is neither causal nor a sliding window")
    return reach


def _bias_of(name: str, rows: dict[int, torch.Tensor], reach: int) -> Bias:
    """The rule of a bias by distance, given what is added to the scores of some queries, ``[heads, row + 1]``. What is
    added to all scores of a row makes no difference to it."""
    # by distance, relative to the query's own key
    by_distance = {row: (x - x[:, -1:]).flip(1)[:, :reach] for row, x in rows.items()}
    table = by_distance[max(rows)]
    tolerance = ROUNDING * float(torch.stack([x[:, -reach:].abs().amax() for x in rows.values()]).amax())
    if any(float((x - table[:, : x.shape[1]]).abs().amax()) > tolerance for x in by_distance.values()):
        raise UnsupportedModelError(f"{name} adds a bias to its scores that depends on more than the distance")
    if float(table.abs().amax()) <= tolerance:
        return None
    distances = torch.arange(table.shape[1], dtype=torch.float64)
    slopes = -table[:, -1] / max(table.shape[1] - 1, 1)
    if float((table + slopes[:, None] * distances).abs().amax()) <= tolerance:
        return SlopeBias(tuple(slopes.tolist()))
    change = (table - table[:, -1:]).abs().amax(0) > tolerance
    end = int(change.nonzero().amax()) + 2
    if end > table.shape[1] // 2:
        raise UnsupportedModelError(f"{name} adds a bias to its scores that has no end within {table.shape[1]} tokens")
    return TableBias(tuple(tuple(head) for head in table[:, :end].tolist()))
