"""Fuse by structure, verify by execution.

A pass over a loaded model replaces, in place, what it recognises: RMSNorms by one kernel, gated MLPs by one product for
gate and up and one kernel for ``act(gate) * up``, and linear layers that are given the same tensor (query, key and
value, but also any others) by one product whose parts are handed out. Each replacement is run against the original on
fixed random rows and kept only if both agree within `fuse_match.TOLERANCE`. Decisions are plain values; given back at a
restart they are followed without running anything, so that numerics are those of the first start.

One module at a time: memory peaks at the model plus the weights of one module, and the originals are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ...kernels.interface import Backend
from .fuse_match import (
    MLPOptions,
    NormOptions,
    NotRecognisedError,
    compare,
    is_mlp_candidate,
    is_norm_candidate,
    recognise_mlp,
    recognise_norm,
)
from .fuse_observe import is_plain_linear, shared_inputs
from .fused import FusedMLP, FusedRMSNorm, JoinedProjections, ProjectionPart, join, linear_of
from .parameters import ParameterMap, Slot

RMS_NORM, GATED_MLP, PROJECTIONS = "rms_norm", "gated_mlp", "projections"
_KINDS = (RMS_NORM, GATED_MLP, PROJECTIONS)

ROTARY_LINE = (
    "rotary embedding: left as it is; its tables are made once a step for all layers, and the rotation is a function "
    "inside each model's attention, not a module"
)


class Decision(NamedTuple):
    """What was decided about one place: a plain value, for msgpack or JSON."""

    kind: str  # rms_norm, gated_mlp or projections
    fused: bool
    reason: str  # why not; empty where fused
    options: Sequence[Any] = ()  # the fields of NormOptions or MLPOptions, or the names of the joined layers


class FuseReport(NamedTuple):
    """What `fuse_model` did, and where the parameters live now."""

    decisions: dict[str, Decision]  # module path → decision; joined layers: "path:q_proj+k_proj+v_proj"
    parameters: ParameterMap
    untouched: dict[str, int]  # class name → how many modules with parameters of their own stayed as they were

    def lines(self) -> list[str]:
        """For ``--explain-model``."""
        lines = []
        for kind in _KINDS:
            of_kind = {path: d for path, d in self.decisions.items() if d.kind == kind}
            done = Counter(_describe(d) for d in of_kind.values() if d.fused)
            lines += [f"{kind}: {count} fused ({what})" for what, count in done.items()]
            left = Counter(d.reason for d in of_kind.values() if not d.fused)
            for reason, count in left.items():
                first = next(path for path, d in of_kind.items() if d.reason == reason)
                lines.append(f"{kind}: {count} not fused, such as {first}: {reason}")
        lines.append(ROTARY_LINE)
        others = ", ".join(f"{count} {name}" for name, count in self.untouched.items())
        return [*lines, f"as they were: {others}"] if others else lines


def fuse_model(
    model: PreTrainedModel, backend: Backend, *, decisions: Mapping[str, Sequence[Any]] | None = None
) -> FuseReport:
    """Fuse `model` in place. It must be in eval mode.

    decisions: those of an earlier report on the same checkpoint and backend, as they are or back from JSON; then
    nothing is run, and what they do not name stays as it is. Raises ValueError where they don't fit the model.
    """
    if model.training:
        raise ValueError("fuse_model needs a model in eval mode; call model.eval() first")
    fusing = _Fusing(model, backend)
    with torch.no_grad():
        if decisions is None:
            fusing.decide()
        else:
            fusing.follow({path: Decision(*decision) for path, decision in decisions.items()})
    return FuseReport(fusing.decisions, fusing.parameters, _untouched(model))


class _Fusing:
    """One pass over one model."""

    def __init__(self, model: PreTrainedModel, backend: Backend) -> None:
        self.model = model
        self.backend = backend
        self.decisions: dict[str, Decision] = {}
        self.parameters = ParameterMap.of(model)
        names = [(_identity(p), name) for name, p in model.named_parameters(remove_duplicate=False)]
        uses = Counter(identity for identity, _ in names)
        self._shared = {name for identity, name in names if uses[identity] > 1}

    def decide(self) -> None:
        """Look at every place there is, and fuse what agrees."""
        groups: dict[str, list[tuple[str, ...]]] = {}
        failure = ""
        try:
            groups = shared_inputs(self.model)
        except Exception as error:  # any model's code
            failure = f"the model can't be run on its own ({type(error).__name__}: {error})"
        for path, module in list(self.model.named_modules()):
            if is_norm_candidate(module):
                self._settle(path, RMS_NORM, partial(recognise_norm, module))
            elif is_mlp_candidate(module):
                self._settle(path, GATED_MLP, partial(recognise_mlp, module))
            for children in groups.get(path, ()):
                if self._still_there(path, children):
                    self._settle(f"{path}:{'+'.join(children)}", PROJECTIONS, partial(tuple, children))
        if failure:
            self.decisions["(all)"] = Decision(PROJECTIONS, False, failure)

    def follow(self, decisions: Mapping[str, Decision]) -> None:
        """Do what was decided before, without running anything."""
        for path, decision in decisions.items():
            if decision.fused:
                try:
                    self._fuse(path, decision.kind, decision.options, verify=False)
                except (AttributeError, KeyError, TypeError, RuntimeError, NotRecognisedError) as error:
                    raise ValueError(
                        f"the decision {path!r}: {tuple(decision)} does not fit the model: {error}"
                    ) from error
            self.decisions[path] = decision

    def _settle(self, path: str, kind: str, recognise: Callable[[], Sequence[Any]]) -> None:
        try:
            options = recognise()
            self._fuse(path, kind, options, verify=True)
            self.decisions[path] = Decision(kind, True, "", list(options))
        except NotRecognisedError as reason:
            self.decisions[path] = Decision(kind, False, str(reason))

    def _fuse(self, path: str, kind: str, options: Sequence[Any], *, verify: bool) -> None:
        {RMS_NORM: self._norm, GATED_MLP: self._mlp, PROJECTIONS: self._projections}[kind](path, options, verify)

    def _norm(self, path: str, options: Sequence[Any], verify: bool) -> None:
        original = self.model.get_submodule(path)
        ((name, weight),) = original.named_parameters()
        self._refuse_shared(_at(path, name))
        fused = FusedRMSNorm(weight, *NormOptions(*options), self.backend).eval()
        if verify:
            compare(original, fused, weight)
        self._replace(path, fused)
        self.parameters.move(_at(path, name), Slot(fused, "weight"))

    def _mlp(self, path: str, options: Sequence[Any], verify: bool) -> None:
        original = self.model.get_submodule(path)
        gate, up, down, activation = MLPOptions(*options)
        merged = gate == up
        first, last = (self._linear(_at(path, name)) for name in (gate, down))
        if merged:
            fused = FusedMLP(first, last, activation, self.backend).eval()
        else:
            linears = [first, self._linear(_at(path, up))]
            self._refuse_shared(*_parameter_names(path, (gate, up), linears))
            fused = FusedMLP(linear_of(*join(linears)), last, activation, self.backend).eval()
        if verify:
            compare(original, fused, first.weight)
        self._replace(path, fused)
        if not merged:
            self._move(path, (gate, up), linears, fused.gate_up)

    def _projections(self, key: str, options: Sequence[Any], verify: bool) -> None:
        path = key.partition(":")[0]
        linears = [self._linear(_at(path, name)) for name in options]
        self._refuse_shared(*_parameter_names(path, options, linears))
        joined = JoinedProjections(*join(linears), [linear.out_features for linear in linears]).eval()
        parts = [ProjectionPart(joined, i, linear.bias is not None).eval() for i, linear in enumerate(linears)]
        if verify:
            compare(partial(_side_by_side, linears), partial(_side_by_side, parts), joined.weight)
        self.model.get_submodule(path).add_module("+".join(options), joined)
        for name, part in zip(options, parts, strict=True):
            self._replace(_at(path, name), part)
        self._move(path, options, linears, joined)

    def _replace(self, path: str, module: nn.Module) -> None:
        parent, _, child = path.rpartition(".")
        setattr(self.model.get_submodule(parent), child, module)

    def _move(self, path: str, names: Sequence[str], linears: Sequence[nn.Linear], owner: nn.Module) -> None:
        start = 0
        for name, linear in zip(names, linears, strict=True):
            for attribute in _held(linear):
                slot = Slot(owner, attribute, 0, start, linear.out_features)
                self.parameters.move(_at(path, name, attribute), slot)
            start += linear.out_features

    def _linear(self, path: str) -> nn.Linear:
        linear = self.model.get_submodule(path)
        if not isinstance(linear, nn.Linear) or not is_plain_linear(linear):
            raise NotRecognisedError(f"{path} is not a plain linear layer")
        return linear

    def _still_there(self, path: str, children: Sequence[str]) -> bool:
        """Whether no fused MLP has taken the place of these layers meanwhile."""
        parent = self.model.get_submodule(path)
        return all(isinstance(getattr(parent, name, None), nn.Linear) for name in children)

    def _refuse_shared(self, *names: str) -> None:
        for name in names:
            if name in self._shared:
                raise NotRecognisedError(f"its parameter {name} is also used elsewhere")


def _side_by_side(modules: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return torch.cat([module(x) for module in modules], dim=-1)


def _at(path: str, *names: str) -> str:
    return ".".join((path, *names) if path else names)


def _held(linear: nn.Linear) -> Iterator[str]:
    return (name for name in ("weight", "bias") if getattr(linear, name) is not None)


def _parameter_names(path: str, names: Sequence[str], linears: Sequence[nn.Linear]) -> list[str]:
    return [_at(path, name, held) for name, linear in zip(names, linears, strict=True) for held in _held(linear)]


def _identity(parameter: torch.Tensor) -> int:
    """Equal for two parameters in the same memory."""
    return id(parameter) if parameter.device.type == "meta" else parameter.data_ptr()


def _describe(decision: Decision) -> str:
    if decision.kind == RMS_NORM:
        eps, offset = decision.options
        return f"weight + {offset:g}, eps {eps:g}" if offset else f"eps {eps:g}"
    if decision.kind == GATED_MLP:
        gate, up, _, activation = decision.options
        return f"{activation}, merged already" if gate == up else str(activation)
    return ", ".join(decision.options)


def _untouched(model: nn.Module) -> dict[str, int]:
    ours = {id(m) for fused in model.modules() if isinstance(fused, FusedMLP) for m in fused.modules()}
    ours |= {id(m) for m in model.modules() if isinstance(m, FusedRMSNorm | JoinedProjections)}
    return dict(Counter(type(m).__name__ for m in model.modules() if m._parameters and id(m) not in ours))
