"""Where every parameter of a checkpoint lives in the model that runs.

Fusing puts several checkpoint parameters into one tensor (gate and up; query, key and value), and so changes the names
in ``model.state_dict()``. All code that reads or writes weights by their checkpoint names uses this map.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ....kernels.lazy_weight import LazyWeight
from ...parallel.cuts import Cut


def few_values(tensor: torch.Tensor) -> list[float]:
    """At least 8 of its values, of all if it has fewer, from beginning to end. The others are not read."""
    if isinstance(tensor, LazyWeight):
        return [value for part in tensor.sample() for value in few_values(part)]
    every = max(1, tensor.numel() // 8)
    if tensor.is_contiguous():
        return tensor.flatten()[::every].float().tolist()
    places = torch.arange(0, tensor.numel(), every, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)].float().tolist()


class Slot(NamedTuple):
    """Rows ``start : start + length`` of a module's tensor; length None means the whole tensor."""

    owner: nn.Module
    attribute: str
    start: int = 0
    length: int | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that holds the parameter, possibly beside others."""
        tensor = getattr(self.owner, self.attribute)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def view(self) -> torch.Tensor:
        """The parameter itself, in its checkpoint shape; shares memory with `tensor`."""
        return self.part(self.tensor.detach())

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """The parameter's rows of the whole tensor."""
        return whole if self.length is None else whole.narrow(0, self.start, self.length)


class Elsewhere(Protocol):
    """The contents of a tensor that is empty, because a backend has packed them or they are in host memory."""

    def unpack(self) -> torch.Tensor:
        """All of it, in the checkpoint's form."""

    def replace(self, weight: torch.Tensor) -> None:
        """Take other contents, in the checkpoint's form."""


class ParameterMap:
    """Checkpoint parameter name → `Slot`. Names and order are those of ``model.state_dict()`` before fusing."""

    def __init__(self, slots: dict[str, Slot]) -> None:
        self._slots = slots
        self._shapes = {name: slot.view().shape for name, slot in slots.items()}  # also of what is elsewhere
        self.packed: Mapping[int, Elsewhere] = {}  # by the id of a tensor
        self.cuts: Mapping[str, Cut] = {}  # of what this rank holds a part of; names and shapes are the whole ones'
        self.others: Mapping[str, torch.Size] = {}  # shapes of what only other stages of a pipeline hold
        self.tied: Mapping[str, str] = {}  # a parameter with a tensor of its own → the one whose values it has
        self.moved: Mapping[str, str] = {}  # a parameter of another stage → the one here that is tied to it

    @classmethod
    def of(cls, model: nn.Module) -> ParameterMap:
        """The map of a model as transformers built it: each name is its own tensor."""
        slots = {}
        for path, module in model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            persistent = (name for name in module._buffers if name not in module._non_persistent_buffers_set)
            for attribute in (*module._parameters, *persistent):
                if getattr(module, attribute) is not None:
                    slots[prefix + attribute] = Slot(module, attribute)
        return cls(slots)

    def names(self) -> Iterable[str]:
        return self._slots.keys()

    def slot(self, name: str) -> Slot:
        """Raises KeyError for a name the checkpoint does not have."""
        try:
            return self._slots[self.moved.get(name, name)]
        except KeyError:
            raise KeyError(f"the model has no parameter {name!r} (it has {len(self._slots)} others)") from None

    def get(self, name: str) -> torch.Tensor:
        """The parameter in its checkpoint shape: a view, through which one can write to the model, or a copy where a
        backend has packed the weight."""
        slot = self.slot(name)
        packed = self.packed.get(id(slot.tensor))
        return slot.view() if packed is None else slot.part(packed.unpack())

    def check(self, name: str, start: int, given: Sequence[int]) -> None:
        """Raises KeyError as `slot`; ValueError unless values of the shape `given` are the parameter, or its rows from
        `start` on."""
        shape = self.whole_shape(name)
        fits = given == shape if not (shape and given) else given[1:] == shape[1:]
        if not fits or (shape and not 0 <= start <= shape[0] - given[0]):
            raise ValueError(f"parameter {name!r} has shape {list(shape)}, but got {list(given)} from row {start} on")

    def shape(self, name: str) -> torch.Size:
        """Of what is held: in the checkpoint, unless this is one of several ranks."""
        return self._shapes[name]

    def whole_shape(self, name: str) -> torch.Size:
        """In the checkpoint. Raises KeyError as `slot`."""
        if (other := self.others.get(name)) is not None:
            return other
        self.slot(name)
        name = self.moved.get(name, name)
        shape, cut = list(self._shapes[name]), self.cuts.get(name)
        if cut is not None:
            shape[cut.dim] = cut.whole
        return torch.Size(shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.slot(name).tensor.dtype

    @torch.no_grad()
    def set(self, name: str, value: torch.Tensor, start: int = 0) -> None:
        """Copy `value` over the parameter and those tied to it, in place, or over their rows from `start` on. Shape and
        dtype must be the parameter's in the checkpoint; the device need not. A rank takes its own part."""
        for each in (name, *(tied for tied, source in self.tied.items() if source == name)):
            if (cut := self.cuts.get(self.moved.get(each, each))) is not None:
                for part, first in cut.rows_of(value, start):
                    self._set(each, part, first)
            else:
                self._set(each, value, start)

    def _set(self, name: str, value: torch.Tensor, start: int) -> None:
        slot = self.slot(name)
        packed = self.packed.get(id(slot.tensor))
        whole = slot.tensor.detach() if packed is None else packed.unpack()
        target = slot.part(whole)
        if start or (target.dim() and value.dim() and len(value) < len(target)):
            target = target[start : start + len(value)]
        if value.shape != target.shape:
            raise ValueError(f"parameter {name!r} has shape {tuple(target.shape)}, but got {tuple(value.shape)}")
        if value.dtype != target.dtype:
            raise ValueError(f"parameter {name!r} has dtype {target.dtype}, but got {value.dtype}")
        target.copy_(value)
        if packed is not None:
            packed.replace(whole)

    def move(self, name: str, slot: Slot) -> None:
        """Set `slot` as the parameter's new place. The caller has copied the value there."""
        held = slot.view().shape
        if held != self.get(name).shape:
            raise ValueError(f"parameter {name!r} has shape {tuple(self.get(name).shape)}, the slot {tuple(held)}")
        self._slots[name] = slot
