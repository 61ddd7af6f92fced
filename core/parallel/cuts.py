"""Which part of each parameter a rank holds, and what its products then are: columns, or partial sums.

It follows from a plan: a style for each module or parameter, by names with ``*`` for numbers. The styles are those of
transformers' plans (`base_model_tp_plan`), and ``experts``: whole experts for each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ...ipc.errors import UnsupportedModelError

COLUMNS = ("colwise", "colwise_gather_output")
ROWS = ("rowwise", "rowwise_split_input")
ADDED = ("moe_tp_experts", "all_reduce")  # of modules: the sum of what ranks compute
WHOLE = (
    "replicate",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "local_params",
    "embedding_rowwise",
    "embedding_colwise",
    "moe_identity_expert",
)
KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value")
ATTENTION = (*KEYS_AND_VALUES, "q_proj", "q_b_proj", "kv_b_proj", "query", "query_key_value", "Wqkv")
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
WIDTHS = ("embed_dim", "all_head_size", "hidden_size", "inner_dim", "attn_hidden_size")

Plan = Mapping[str, str]


class UncutError(Exception):
    """A parameter can't be cut into so many parts."""


class Cut(NamedTuple):
    """A rank's part of a parameter: ranges of one dimension."""

    dim: int
    ranges: tuple[tuple[int, int], ...]  # begin and end, in order
    whole: int  # size of the dimension in the checkpoint

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """This part of a whole parameter, in memory of its own."""
        parts = [x.narrow(self.dim, start, end - start) for start, end in self.ranges]
        return (torch.cat(parts, self.dim) if len(parts) > 1 else parts[0]).clone(memory_format=torch.contiguous_format)

    def rows_of(self, value: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, int]]:
        """This part of `value`, rows of the whole parameter from `start` on: pieces, each with its first row here."""
        if self.dim:
            yield self.of(value), start
            return
        held = 0
        for first, end in self.ranges:
            low, high = max(first, start), min(end, start + len(value))
            if low < high:
                yield value[low - start : high - start], held + low - first
            held += end - first

    @property
    def size(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def slices(self, dims: int) -> tuple[slice, ...] | None:
        """The same as slices, if it is a single range."""
        if len(self.ranges) > 1:
            return None
        return (*[slice(None)] * self.dim, slice(*self.ranges[0]), *[slice(None)] * (dims - self.dim - 1))


@dataclass
class Sharding:
    """What a rank holds of a model, by names of parameters and paths of modules."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    sums: dict[str, bool] = field(default_factory=dict)  # linear layers of partial sums; whether their input is whole
    gathers: set[str] = field(default_factory=set)  # linear layers of some columns, of which all are wanted
    added: set[str] = field(default_factory=set)  # other modules of partial sums
    experts: set[str] = field(default_factory=set)  # modules that hold some of the experts
    shared: set[str] = field(default_factory=set)  # modules whose output is added once for all ranks
    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # attributes of modules that tell of their heads


def output_layer(model: Any) -> nn.Module | None:
    """The layer that makes logits, if the model has one."""
    found: nn.Module | None = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found


def style_of(plan: Plan, name: str) -> str | None:
    """Only whole parts of a name are numbers: ``fc1`` and ``dense_4h_to_h`` have digits, too."""
    return plan.get(name) or plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))


def sharding_of(model: nn.Module, plan: Plan, rank: int, size: int) -> Sharding:
    """What rank `rank` of `size` holds of `model`, which may be on the meta device. A module whose parts can't be cut
    evenly stays whole, with all that belongs to it.

    Raises:
        UnsupportedModelError: the plan has a style that is not known.
    """
    found = Sharding()
    head = output_layer(model)
    parents: dict[str, list[tuple[str, nn.Module, str | None]]] = {}
    for path, module in model.named_modules():
        style = style_of(plan, path)
        own = {name: style_of(plan, f"{path}.{name}") for name in module._parameters}
        if not isinstance(module, nn.Embedding) and (style or any(own.values())):
            # the parts of an attention or of an MLP are cut together
            parent = path if any(own.values()) and not style else path.rpartition(".")[0]
            parents.setdefault(path if module is head else parent, []).append((path, module, style))
    for parent, members in parents.items():
        part = Sharding()
        try:
            for path, module, style in members:
                _add(part, model, plan, path, module, style, rank, size)
        except UncutError:
            continue
        _count_heads(part, model.get_submodule(parent), parent, members, size)
        for name in Sharding.__dataclass_fields__:
            getattr(found, name).update(getattr(part, name))
    return found


def _add(
    found: Sharding,
    model: nn.Module,
    plan: Plan,
    path: str,
    module: nn.Module,
    style: str | None,
    rank: int,
    size: int,
) -> None:
    part = path.rpartition(".")[2]
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        cut = _cut_of(style_of(plan, f"{path}.{name}") or style, name, parameter.shape, rank, size)
        if cut is not None and part in ATTENTION and _heads(model, path)[0] % size:
            raise UncutError  # a rank would have a part of a head
        if cut is not None and part in KEYS_AND_VALUES:
            cut = _cut_heads(cut, model, path, rank, size)
        if cut is not None:
            found.cuts[f"{path}.{name}"] = cut
    if style in ROWS and isinstance(module, nn.Linear):
        found.sums[path] = style == "rowwise_split_input"
    elif style == "colwise_gather_output" and isinstance(module, nn.Linear):
        found.gathers.add(path)
    elif style in ADDED:
        found.added.add(path)
    elif style == "experts":
        found.experts.add(path)
    elif style == "moe_identity_expert":
        found.shared.add(path)


def _cut_of(style: str | None, name: str, shape: torch.Size, rank: int, size: int) -> Cut | None:
    dims = len(shape)
    last, before = dims - 1, max(0, dims - 2)
    if style in COLUMNS:
        return _even(before, 1, shape, rank, size)
    if style == "packed_colwise":
        return _even(before, 1 if dims == 1 else 2, shape, rank, size)
    if style in ROWS:
        return None if name == "bias" else _even(last, 1, shape, rank, size)
    if style == "packed_rowwise":
        return None if dims == 1 else _even(last, 2, shape, rank, size)
    if style == "experts":
        return _even(0, 1, shape, rank, size) if dims > 1 else None
    if style is None or style in ADDED or style in WHOLE:
        return None
    raise UnsupportedModelError(f"its plan for several ranks has the style {style!r}, which is not known")


def _even(dim: int, pieces: int, shape: torch.Size, rank: int, size: int) -> Cut:
    """The same share of each of `pieces` equal pieces of a dimension."""
    whole = shape[dim]
    if whole % (pieces * size):
        raise UncutError
    piece, each = whole // pieces, whole // pieces // size
    starts = [at * piece + rank * each for at in range(pieces)]
    return Cut(dim, tuple((start, start + each) for start in starts), whole)


def _heads(model: nn.Module, path: str) -> tuple[int, int]:
    """Query heads, and heads of keys and values, of the attention that a projection at `path` belongs to."""
    attention, config = model.get_submodule(path.rpartition(".")[0]), model.config.get_text_config()  # type: ignore[union-attr, operator]
    owners = attention, config, getattr(attention, "config", None)

    def first(*names: str) -> int:
        return next(filter(None, (count_in(owner, name) for owner in owners for name in names)), 0)

    queries = first("num_heads", "num_attention_heads", "n_head", "n_heads")
    return queries, first("num_key_value_heads", "num_kv_heads") or queries


def count_in(owner: object, name: str) -> int:
    """A number that a module or a config has; 0: it has none, or different ones for its layers."""
    try:
        found = getattr(owner, name, None)
    except Exception:  # a config may have an error of its own for this
        return 0
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def _cut_heads(cut: Cut, model: nn.Module, path: str, rank: int, size: int) -> Cut:
    """Whole heads of keys or values. If there are fewer heads than ranks, several ranks hold the same one."""
    _, heads = _heads(model, path)
    if not heads or cut.whole % heads or heads % size == 0:
        return cut
    if size % heads:
        raise UncutError
    width, head = cut.whole // heads, rank * heads // size
    return Cut(cut.dim, ((head * width, (head + 1) * width),), cut.whole)


def _count_heads(
    found: Sharding,
    module: nn.Module,
    parent: str,
    members: list[tuple[str, nn.Module, str | None]],
    size: int,
) -> None:
    """What an attention module whose projections are cut knows of its number of heads."""
    paths = {path.rpartition(".")[2]: path for path, _, _ in members}
    keys = next((paths[name] for name in KEYS_AND_VALUES if name in paths), None)
    cut = None if keys is None else found.cuts.get(f"{keys}.weight")
    if cut is None:
        return
    counts = vars(module)
    changed = {name: counts[name] // size for name in (*COUNTS, *WIDTHS) if _is_number(counts.get(name))}
    for name in ("num_key_value_heads", "num_kv_heads"):
        if _is_number(counts.get(name)):
            changed[name] = counts[name] * cut.size // cut.whole
    if _is_number(counts.get("num_key_value_groups")):
        changed["num_key_value_groups"] = counts["num_key_value_groups"] * cut.whole // (cut.size * size)
    found.counts[parent] = changed


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
