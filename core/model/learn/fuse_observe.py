"""See what a model's modules are called with, in one forward pass over a few random tokens.

An attention in which a token sees only itself takes the place of the model's. Then no cache is needed, and a row that
still depends on other rows shows something besides attention that mixes them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ....kernels.contract import ROW_MULTIPLE
from ..run.attention import attention_set
from ..run.cross_attention import cross_attention_of
from ..run.positions import positions_given, receivers
from ..run.recurrent import separate_rows, state_inputs

STAND_IN = "mainspring_row_local"
SEED = 20240229
TEXT_ROWS = 3 * ROW_MULTIPLE  # tokens of the text that a pass takes its rows from


def own_values(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Each token's output is its own value, for every query head: ``[rows, heads, dim]``."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


@contextmanager
def stand_in(model: PreTrainedModel, note: Callable[..., None] | None = None) -> Iterator[None]:
    """Attention is stood in for. `note` is called with the arguments of each call before."""

    def attend(module: nn.Module, *states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        if note is not None:
            note(module, *states, **kwargs)
        # as transformers calls it: [1, heads, rows, dim] → [1, rows, heads, dim]
        return own_values(*(x[0].transpose(0, 1) for x in states[:3]))[None], None

    with attention_set(model, STAND_IN, attend):
        yield


class RandomLayers(TorchFunctionMode):
    """Linear layers give random numbers here, because to read their weights would take nearly all of a pass. For what
    is learned from the modules that are called and from shapes, not from values."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(SEED)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.linear, torch._grouped_mm):
            return func(*args, **(kwargs or {}))
        x, weight = args[:2] if len(args) > 1 else (args[0], kwargs["weight"])
        out = weight.shape[0 if func is F.linear else -1]
        return torch.randn(*x.shape[:-1], out, generator=self._generator).to(x)


@torch.no_grad()
def run_rows(
    model: PreTrainedModel,
    rows: slice,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
    attention: Callable[..., None] | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Final hidden states ``[rows, hidden]`` of these rows of a fixed random text, without the output layer.

    Around every module ``before(path, module, args, kwargs)`` and ``after(path, module, args, kwargs, output)`` are
    called, before every attention ``attention`` with what it is given. positions: of all `TEXT_ROWS` of the text.
    """
    embeddings: Any = model.get_input_embeddings()
    text = torch.randint(embeddings.weight.shape[0], (TEXT_ROWS,), generator=torch.Generator().manual_seed(SEED))
    if positions is None:
        positions = torch.arange(TEXT_ROWS)
    ids, positions = text[None, rows].to(model.device), positions[None, rows].to(model.device)
    with ExitStack() as stack:
        stack.enter_context(stand_in(model, attention))
        for path, module in model.named_modules():
            if before:
                stack.enter_context(module.register_forward_pre_hook(partial(before, path), with_kwargs=True))
            if after:
                stack.enter_context(module.register_forward_hook(partial(after, path), with_kwargs=True))
        # of an encoder-decoder model only the whole has a forward that takes the decoder's tokens, and gives logits
        base = model.base_model if cross_attention_of(model) is None else model
        inputs = stack.enter_context(positions_given(receivers(base), positions))
        alone = separate_rows(model, ids.shape[1])
        outputs = base(input_ids=ids, **inputs, **state_inputs(model, alone, ids.shape[1]))
    hidden: torch.Tensor = outputs[0][0]
    return hidden


def shared_inputs(model: PreTrainedModel) -> dict[str, list[tuple[str, ...]]]:
    """Linear layers side by side in one module that are given the very same tensor.

    → module path → groups of child names, in the order of their calls. A layer counts when the pass called it exactly
    once, and a group when its tensor still held the same values at the last call.
    """
    plain = {path for path, module in model.named_modules() if is_plain_linear(module)}
    calls = Counter[str]()
    inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # and a copy; kept, so that an id means one tensor
    changed: set[int] = set()
    children: defaultdict[tuple[str, int], list[str]] = defaultdict(list)

    def note(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path in plain:
            (x,) = (*args, *kwargs.values())
            if not torch.equal(inputs.setdefault(id(x), (x, x.clone()))[1], x):
                changed.add(id(x))
            calls[path] += 1
            children[path.rpartition(".")[0], id(x)].append(path)

    with RandomLayers():
        run_rows(model, slice(ROW_MULTIPLE), before=note)
    groups: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for (parent, x), paths in children.items():
        once = tuple(path.rpartition(".")[2] for path in paths if calls[path] == 1)
        if len(once) > 1 and x not in changed:
            groups[parent].append(once)
    return groups


def is_plain_linear(module: nn.Module) -> bool:
    """An ``nn.Linear`` and nothing more: no forward of its own, no hook, no parametrization."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
    )
