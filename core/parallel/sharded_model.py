"""Make a rank's part of a model: cut its parameters, and put sums around the modules whose outputs are partial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model.learn.row_invariant import routed
from .cuts import Cut, Plan, Sharding, output_layer, sharding_of
from .group import OneRank, RankGroup
from .homes import Homes
from .parallel_backend import ParallelBackend


class Shards:
    """A rank's part of one model that is loaded: as it is read, and as it then computes."""

    def __init__(self, plan: Plan, backend: ParallelBackend, note: str = "") -> None:
        self._plan, self._backend = plan, backend
        self.note = note  # a line for ``--explain-model``
        self.sharding = Sharding()

    def cuts_of(self, model: PreTrainedModel) -> Mapping[str, Cut]:
        """See `sliced_reading.CutsOf`."""
        group = self._backend.group
        self.sharding = sharding_of(model, self._plan, group.rank, group.size)
        return self.sharding.cuts

    def finish(self, model: PreTrainedModel) -> None:
        """Cut what was not read from the checkpoint, and let the model exchange sums."""
        cut_parameters(model, self.sharding)
        install(model, self.sharding, self._backend)


def cut_parameters(model: nn.Module, sharding: Sharding) -> None:
    """Replace each parameter that is still whole by this rank's part of it. One that is tied to the embeddings, which
    stay whole, becomes a view of them, but not on a CPU: there a weight's memory is given back when it is packed."""
    tied = {module.weight.data_ptr() for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, cut in sharding.cuts.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module._parameters[attribute]
        if parameter is not None and parameter.shape[cut.dim] == cut.whole:
            whole, rows = parameter.detach(), cut.slices(parameter.dim())
            is_view = rows is not None and cut.dim == 0 and whole.is_cuda and whole.data_ptr() in tied
            part = whole[rows] if is_view else cut.of(whole)
            module._parameters[attribute] = nn.Parameter(part, requires_grad=False)
        if isinstance(module, nn.Linear) and attribute == "weight":
            module.out_features, module.in_features = module.weight.shape


def install(model: nn.Module, sharding: Sharding, backend: ParallelBackend) -> None:
    """Let `model`, whose parameters are cut, exchange sums: linear layers by `backend`, once `route` is called, and
    other modules by a forward of their own."""
    group = backend.group
    backend.forget()
    head = output_layer(model)
    for path, whole_input in sharding.sums.items():
        backend.add_up(model.get_submodule(path).weight, whole_input)  # type: ignore[arg-type]
    for path in sharding.gathers:
        module: Any = model.get_submodule(path)
        backend.gather(module.weight)
        if module is not head:  # with a forward of its own it is not joined to others, which would copy its weight
            module.forward = routed(module, backend.linear)
    for path in sharding.added:
        _around(model.get_submodule(path), after=group.sum)
    for path in sharding.shared:
        _around(model.get_submodule(path), before=lambda x: x / group.size)
    for path in sharding.experts:
        _some_experts(model.get_submodule(path), group, backend.homes)
    if backend.homes is not None and head is not None:
        backend.collect(head.weight)  # type: ignore[arg-type]
    for path, counts in sharding.counts.items():
        for name, count in counts.items():
            setattr(model.get_submodule(path), name, count)


def route(model: nn.Module, backend: ParallelBackend) -> None:
    """Let the linear layers of partial sums or columns be computed by `backend`, if the model calls them. To be called
    after fusing, which leaves layers with a forward of their own alone."""
    known = {*backend.summed, *backend.gathered, backend.output}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in known and "forward" not in vars(module):
            module.forward = routed(module, backend.linear)  # type: ignore[method-assign]


def _around(
    module: nn.Module,
    before: Callable[[torch.Tensor], torch.Tensor] | None = None,
    after: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    own = module.forward

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = own(before(x) if before else x, *args, **kwargs)
        return after(out) if after else out

    module.forward = forward


def _some_experts(module: nn.Module, group: RankGroup | OneRank, homes: Homes | None) -> None:
    """All ranks have all rows, or get them here if each has its own. Rows for the experts of others are computed by a
    local expert, with weight 0."""
    own: Any = module.forward
    held = next(p for p in module._parameters.values() if p is not None and p.dim() > 1).shape[0]
    if hasattr(module, "num_experts"):
        module.mainspring_num_experts = module.num_experts  # of all ranks, whose numbers the module is given
        module.num_experts = held  # type: ignore[assignment]

    def forward(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *args: Any) -> torch.Tensor:
        rows = None if homes is None else homes.rows
        if homes is not None and rows is not None:
            x, chosen, weights = (homes.group.gather_rows(each, rows) for each in (x, chosen, weights))
        local = chosen - group.rank * held
        mine = (local >= 0) & (local < held)
        out = own(x, local.where(mine, 0), weights * mine, *args)
        return group.sum(out) if homes is None or rows is None else homes.group.sum_own_rows(out, rows)

    module.forward = forward
