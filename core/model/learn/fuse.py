"""Fuse by structure, verify by execution.

A pass over a loaded model replaces, in place, RMSNorms by one kernel, gated MLPs by one product for gate and up and one
kernel for ``act(gate) * up``, the experts of a mixture by the backend's, and linear layers that are given the same
tensor (such as query, key and value) by one product. Each replacement is kept only if it agrees with the original on
fixed random rows. If then all decoder layers are of a known form, one loop over kernels takes the place of their code
(see stack.py). Decisions are plain values; given back at a restart they are followed without running anything, so that
numerics are those of the first start.

One module is fused at a time, so memory peaks at the model plus the weights of one module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ....kernels import host_memory
from ....kernels.contract import Backend
from ....kernels.decoder_contract import Routing
from ..load.parameters import ParameterMap, Slot
from ..run.fused import (
    FusedExperts,
    FusedMLP,
    FusedRMSNorm,
    FusedRouter,
    JoinedProjections,
    ProjectionPart,
    join,
    linear_of,
)
from ..run.stack import StackedDecoder, StackOptions
from .fuse_match import (
    ROW_COUNTS,
    ExpertsOptions,
    MLPOptions,
    NormOptions,
    NotRecognisedError,
    code_of,
    compare,
    correction_of,
    first_of,
    given_experts,
    is_experts_candidate,
    is_mlp_candidate,
    is_norm_candidate,
    is_router_candidate,
    mixture_of,
    recognise_experts,
    recognise_mixture,
    recognise_mlp,
    recognise_norm,
    recognise_router,
    router_names,
    routes,
)
from .fuse_observe import is_plain_linear, shared_inputs
from .row_invariant import turn
from .stack_match import recognise_stack

RMS_NORM, GATED_MLP, ROUTER, EXPERTS, MIXTURE = "rms_norm", "gated_mlp", "router", "experts", "mixture"
PROJECTIONS, STACK = "projections", "decoder_stack"
_WHOLE = FusedRMSNorm | FusedRouter | FusedExperts | JoinedProjections  # fused modules without others inside


class Decision(NamedTuple):
    """What was decided about one place: a plain value, for msgpack or JSON."""

    kind: str  # one of the above
    fused: bool
    reason: str  # why not; empty where fused
    # the fields of …Options or `Routing`, the names of joined layers, or what a mixture returns besides its output
    options: Sequence[Any] = ()


class _Replacement(NamedTuple):
    """What one decision would change."""

    original: Callable[[torch.Tensor], torch.Tensor]
    fused: Callable[[torch.Tensor], torch.Tensor]
    modules: dict[str, nn.Module]  # by the path they are to have
    slots: dict[str, Slot]  # where parameters will be


class Fusion:
    """One pass over one model: what it decided, and where the parameters live now."""

    def __init__(self, model: PreTrainedModel, backend: Backend) -> None:
        self.model = model
        self.backend = backend
        # module path → decision; of joined layers "path:q_proj+k_proj+v_proj", of the stack "decoder_stack"
        self.decisions: dict[str, Decision] = {}
        self.parameters = ParameterMap.of(model)
        self.stack: StackedDecoder | None = None  # where it took the place of the layers' code
        # kind and code of modules → what those that were fused are
        self._known: dict[tuple[Any, ...], Callable[[], Sequence[Any]]] = {}
        places = {name: p.data_ptr() or id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        uses = Counter(places.values())
        self._shared = {name for name, place in places.items() if uses[place] > 1}

    def lines(self) -> list[str]:
        """For ``--explain-model``."""
        lines = []
        for kind in (*_BUILD, STACK):
            of_kind = {path: d for path, d in self.decisions.items() if d.kind == kind}
            done = Counter(_describe(kind, d.options) for d in of_kind.values() if d.fused)
            lines += [f"{kind}: {count} fused ({what})" for what, count in done.items()]
            left = Counter(d.reason for d in of_kind.values() if not d.fused)
            for reason, count in left.items():
                first = next(path for path, d in of_kind.items() if d.reason == reason)
                such_as = "" if first == kind else f", such as {first}"
                lines.append(f"{kind}: {count} not fused{such_as}: {reason}")
        # modules with parameters of their own
        ours = {id(m) for fused in self.model.modules() if isinstance(fused, FusedMLP) for m in fused.modules()}
        ours |= {id(m) for m in self.model.modules() if isinstance(m, _WHOLE)}
        others = Counter(type(m).__name__ for m in self.model.modules() if m._parameters and id(m) not in ours)
        left_over = ", ".join(f"{count} {name}" for name, count in others.items())
        return [*lines, f"as they were: {left_over}"] if others else lines

    def decide(self, layered: str = "", thorough: bool = True) -> None:
        """Look at every place there is, and fuse what agrees. Arguments: see `fuse_model`."""
        groups = shared_inputs(self.model)
        for path, module in list(self.model.named_modules()):
            if is_norm_candidate(module):
                self._settle_one(path, RMS_NORM, partial(recognise_norm, module, self.backend), {"": module})
            elif is_mlp_candidate(module):
                self._settle_one(path, GATED_MLP, partial(recognise_mlp, module, self.backend), {"": module})
            elif is_router_candidate(module):
                self._settle_one(
                    path, ROUTER, partial(recognise_router, module, self.backend, self.model.dtype), {"": module}
                )
            elif is_experts_candidate(module):
                self._settle_one(path, EXPERTS, partial(recognise_experts, module, self.backend), {"": module})
            for children in groups.get(path, ()):
                # unless a fused MLP has taken their place meanwhile
                parent = self.model.get_submodule(path)
                linears = {name: getattr(parent, name, None) for name in children}
                if all(isinstance(linear, nn.Linear) for linear in linears.values()):
                    self._settle_one(f"{path}:{'+'.join(children)}", PROJECTIONS, partial(tuple, children), linears)
        for path, module in list(self.model.named_modules()):
            if mixture_of(module) is not None:
                self._settle(path, MIXTURE, partial(recognise_mixture, module))
        if layered:
            self.decisions[STACK] = Decision(STACK, False, layered)
        else:
            self._settle(STACK, STACK, partial(recognise_stack, self.model, self.backend, thorough))

    def follow(self, decisions: Mapping[str, Sequence[Any]]) -> None:
        """Do what was decided before, without running anything."""
        for path, decision in ((path, Decision(*fields)) for path, fields in decisions.items()):
            if decision.fused:
                try:
                    self._fuse(path, decision.kind, decision.options)
                except Exception as error:  # a name, a shape or a class is not what it was
                    raise ValueError(
                        f"the decision {path!r}: {tuple(decision)} does not fit the model: {error}"
                    ) from error
            self.decisions[path] = decision

    def _settle_one(
        self, path: str, kind: str, recognise: Callable[[], Sequence[Any]], modules: Mapping[str, Any]
    ) -> None:
        """`_settle` of a place among many. modules: what is there, by name. Where modules of the same code were fused,
        it is known what these are, and their own weights are all that is left to try."""
        code = kind, *((name, code_of(module)) for name, module in modules.items())
        known = self._known.get(code)
        self._settle(path, kind, known or recognise, ROW_COUNTS if known is None else ROW_COUNTS[:1])
        if (decision := self.decisions[path]).fused:
            self._known[code] = partial(tuple, decision.options)

    def _settle(
        self, path: str, kind: str, recognise: Callable[[], Sequence[Any]], row_counts: Sequence[int] = ROW_COUNTS
    ) -> None:
        try:
            options = recognise()
            self._fuse(path, kind, options, row_counts)
            self.decisions[path] = Decision(kind, True, "", list(options))
        except NotRecognisedError as reason:
            self.decisions[path] = Decision(kind, False, str(reason))

    def _fuse(self, path: str, kind: str, options: Sequence[Any], row_counts: Sequence[int] = ()) -> None:
        """row_counts: on how many rows the two are compared."""
        if kind == STACK:
            self.stack = StackedDecoder(self.model, StackOptions.of(options), self.backend)
            self.stack.install()
            return
        path = path.partition(":")[0]
        new = _BUILD[kind](self.model.get_submodule(path), path, options, self.backend)
        for name in new.slots:
            if name in self._shared:
                raise NotRecognisedError(f"its parameter {name} is also used elsewhere")
        if row_counts:
            held = [slot.tensor for slot in new.slots.values()] or list(new.modules[path].parameters())
            compare(new.original, new.fused, held[0], row_counts)
        for at, module in new.modules.items():
            parent, _, child = at.rpartition(".")
            setattr(self.model.get_submodule(parent), child, module.eval())
        for name, slot in new.slots.items():
            old = self.parameters.get(name)
            self.parameters.move(name, slot)
            if old.data_ptr() != slot.view().data_ptr():
                host_memory.give_back(old)


def _norm(original: nn.Module, path: str, options: Sequence[Any], backend: Backend) -> _Replacement:
    ((name, weight),) = original.named_parameters()
    fused = FusedRMSNorm(weight, *NormOptions(*options), backend)
    return _Replacement(original, fused, {path: fused}, {_at(path, name): Slot(fused, "weight")})


def _mlp(original: nn.Module, path: str, options: Sequence[Any], backend: Backend) -> _Replacement:
    gate, up, down, activation = MLPOptions(*options)
    linears = _linears(original, dict.fromkeys((gate, up)))  # one where they are merged already
    gate_up = linear_of(*join(list(linears.values())))
    fused = FusedMLP(gate_up, _linears(original, [down])[down], activation, backend)
    return _Replacement(original, fused, {path: fused}, _slots(path, linears, gate_up))


def _router(original: nn.Module, path: str, options: Sequence[Any], backend: Backend) -> _Replacement:
    weight, bias = router_names(original)
    parameters: dict[str, Any] = dict(original.named_parameters())
    routing = Routing(*options)
    correction = correction_of(original) if routing.corrected else None
    fused = FusedRouter(parameters[weight], parameters.get(bias or ""), correction, routing, backend)
    slots = {_at(path, weight): Slot(fused, "weight")}
    if bias is not None:
        slots[_at(path, bias)] = Slot(fused, "bias")
    if correction is not None:
        slots[_at(path, next(iter(original._buffers)))] = Slot(fused, "correction")
    return _Replacement(lambda x: routes(original(x[0])), lambda x: routes(fused(x[0])), {path: fused}, slots)


def _experts(original: nn.Module, path: str, options: Sequence[Any], backend: Backend) -> _Replacement:
    gate_up, down, activation, *biases = filter(None, options)
    parameters: dict[str, Any] = dict(original.named_parameters())
    if biases:
        turn(parameters[gate_up], parameters[down])
    fused = FusedExperts(
        parameters[gate_up], parameters[down], activation, backend, *(parameters[name] for name in biases)
    )
    names = zip((gate_up, down, *biases), ("gate_up", "down", "gate_up_bias", "down_bias"), strict=False)
    slots = {_at(path, name): Slot(fused, attribute) for name, attribute in names}
    if biases:
        slots = dict(reversed(slots.items()))  # the first is as wide as the rows
    given = partial(given_experts, fused.num_experts)
    return _Replacement(lambda x: original(*given(x)), lambda x: fused(*given(x)), {path: fused}, slots)


def _mixture(original: nn.Module, path: str, options: Sequence[Any], backend: Backend) -> _Replacement:
    fused = mixture_of(original, *options)
    assert fused is not None, "the router and the experts are fused"
    return _Replacement(lambda x: first_of(original(x)), lambda x: first_of(fused(x)), {path: fused}, {})


def _projections(parent: nn.Module, path: str, names: Sequence[Any], backend: Backend) -> _Replacement:
    linears = _linears(parent, names)
    originals = list(linears.values())
    joined = JoinedProjections(*join(originals), [linear.out_features for linear in originals], backend)
    parts = [ProjectionPart(joined, i, linear.bias is not None) for i, linear in enumerate(originals)]
    modules = {_at(path, "+".join(names)): joined, **{_at(path, n): p for n, p in zip(names, parts, strict=True)}}
    return _Replacement(
        partial(_side_by_side, originals), partial(_side_by_side, parts), modules, _slots(path, linears, joined)
    )


_BUILD: dict[str, Callable[[nn.Module, str, Sequence[Any], Backend], _Replacement]] = {
    RMS_NORM: _norm,
    GATED_MLP: _mlp,
    ROUTER: _router,
    EXPERTS: _experts,
    MIXTURE: _mixture,
    PROJECTIONS: _projections,
}


def _linears(parent: nn.Module, names: Iterable[str]) -> dict[str, nn.Linear]:
    linears = {name: parent.get_submodule(name) for name in names}
    for name, linear in linears.items():
        if not is_plain_linear(linear):
            raise NotRecognisedError(f"{name} is not a plain linear layer")
    return cast("dict[str, nn.Linear]", linears)


def _slots(path: str, linears: Mapping[str, nn.Linear], owner: nn.Module) -> dict[str, Slot]:
    """Where the parameters of linear layers are once they lie in `owner` one after another."""
    slots, start = {}, 0
    for name, linear in linears.items():
        for attribute, _ in linear.named_parameters():
            slots[_at(path, name, attribute)] = Slot(owner, attribute, start, linear.out_features)
        start += linear.out_features
    return slots


def _side_by_side(modules: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return torch.cat([module(x) for module in modules], dim=-1)


def _at(path: str, *names: str) -> str:
    return ".".join((path, *names) if path else names)


_OPTIONS: dict[str, Any] = {RMS_NORM: NormOptions, GATED_MLP: MLPOptions, ROUTER: Routing, EXPERTS: ExpertsOptions}


def _describe(kind: str, options: Sequence[Any]) -> str:
    if kind == STACK:
        return f"{len(StackOptions.of(options).names)} layers"
    if (form := _OPTIONS.get(kind)) is None:
        return ", ".join(options)
    named, usual = form(*options)._asdict(), form._field_defaults
    return ", ".join(f"{name} {value}" for name, value in named.items() if usual.get(name) != value)


@torch.no_grad()
def fuse_model(
    model: PreTrainedModel,
    backend: Backend,
    *,
    decisions: Mapping[str, Sequence[Any]] | None = None,
    layered: str = "",
    thorough: bool = True,
) -> Fusion:
    """Fuse `model` in place. It must be in eval mode. layered: why no stack may take the place of the layers' code.
    thorough: else the caller compares the logits of a model whose layers kernels alone compute, and nobody else does.

    decisions: those of an earlier fusion of the same checkpoint and backend, as they are or back from JSON; then
    nothing is run, and what they do not name stays as it is. Raises ValueError where they don't fit the model.
    """
    if model.training:
        raise ValueError("fuse_model needs a model in eval mode; call model.eval() first")
    fusion = Fusion(model, backend)
    if decisions is None:
        fusion.decide(layered, thorough)
    else:
        fusion.follow(decisions)
    return fusion
