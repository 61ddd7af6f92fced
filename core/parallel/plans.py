"""Plans for several ranks: transformers' own for a class, and others derived from names.

A plan is only used after a tiny twin of the class, whole and cut by it, gave the same logits (see twin.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import nn

from .cuts import ATTENTION, COLUMNS, ROWS, Plan, output_layer

# Linear layers by the last part of their names, as many classes have them.
_COLUMNS = (
    "q_proj k_proj v_proj q_b_proj kv_b_proj query key value query_key_value Wqkv "
    "gate_proj up_proj fc1 fc_in wi w1 w3 dense_h_to_4h intermediate.dense up"
).split()
_ROWS = (
    "o_proj out_proj down_proj fc2 fc_out wo w2 dense_4h_to_h output.dense attention.dense self_attention.dense down"
).split()


def plans_of(model: nn.Module, whole_experts: bool, homes: bool) -> Iterator[tuple[str, Plan]]:
    """Plans for a model of this class, the best one first, each with a description.

    Args:
        whole_experts: each rank holds some experts whole, not a part of each.
        homes: each rank has requests of its own, so nothing but experts and the output layer is divided.
    """
    if homes:
        experts: Plan = dict.fromkeys(_experts(model), "experts")
        output = {name: style for name, style in _derived(model) if style == "colwise_gather_output"}
        for divided in (output, {}):
            yield "whole experts, attention for own requests", {**divided, **experts}
        return
    derived, whole = dict(_derived(model)), dict.fromkeys(_experts(model), "experts")
    given = dict(getattr(model, "tp_plan", None) or {})
    split = {name: style for name, style in given.items() if name.startswith(tuple(whole))}
    library = {name: style for name, style in given.items() if name not in split}
    attention = {name: style for name, style in derived.items() if _is_attention(name, derived)}
    missing = {name: style for name, style in attention.items() if not _cuts_beside(library, name)}
    bodies = {
        "transformers' plan, and attention by names": {**missing, **library} if library and missing else {},
        "transformers' plan": library,
        "a plan by names": derived,
        "a plan by names, attention whole": {n: style for n, style in derived.items() if n not in attention},
        "a plan by names, attention alone": attention,
    }
    forms = (
        {"whole experts": whole, "parts of experts": split}
        if whole_experts
        else {"parts of experts": split, "whole experts": whole}
    )
    for how, experts in {**{how: form for how, form in forms.items() if form}, "": {}}.items():
        for name, body in bodies.items():
            if body or experts:
                yield f"{name}, {how}" if how else name, {**body, **experts}


def _generic(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _derived(model: nn.Module) -> Iterator[tuple[str, str]]:
    head = output_layer(model)
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            if "attn" in path.rpartition(".")[2] and "sinks" in module._parameters:
                yield f"{_generic(path)}.sinks", "colwise"
            continue
        if module is head:
            yield _generic(path), "colwise_gather_output"
        elif _generic(path) != path:  # one of several layers
            if _ends(path, _COLUMNS):
                yield _generic(path), "colwise"
            elif _ends(path, _ROWS):
                yield _generic(path), "rowwise"


def _experts(model: nn.Module) -> Iterator[str]:
    found = set()
    for path, module in model.named_modules():
        held = [p for p in module._parameters.values() if p is not None]
        if path.rpartition(".")[2] == "experts" and held and max(p.dim() for p in held) == 3:
            found.add(_generic(path))
    return iter(sorted(found))


def _ends(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _is_attention(name: str, derived: Plan) -> bool:
    parent = name.rpartition(".")[0]
    siblings = [other for other in derived if other.rpartition(".")[0] == parent]
    return any(_ends(other, ATTENTION) for other in siblings)


def _cuts_beside(plan: Plan, name: str) -> bool:
    """Whether the plan cuts this layer, or one that belongs to it."""
    parent = name.rpartition(".")[0]
    return any(other.rpartition(".")[0] == parent and style in (*COLUMNS, *ROWS) for other, style in plan.items())
