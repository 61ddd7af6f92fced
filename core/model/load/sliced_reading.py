"""Read a part of a checkpoint: a rank of several loads its own shard of its own layers, and nothing else.

transformers opens safetensors files, reads each tensor when its turn comes, converts what was read (other names,
tensors that are joined or split) and puts it in its place in the model. Two of these steps are replaced for the time of
a load. A tensor that becomes a parameter as it is, perhaps under another name, is read in part, and so are the weights
of experts, which are stacked. What is converted otherwise is read whole, tensor by tensor, and cut before it takes its
place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, core_model_loading
from transformers.modeling_utils import load_state_dict

from ...parallel.cuts import Cut
from ...parallel.stage_model import StagePart

CutsOf = Callable[[PreTrainedModel], Mapping[str, Cut]]
"""A model on the meta device → which part of each parameter is wanted, by its name in the model; others whole."""
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")  # of layers and of experts, in the name of a tensor


class _Part:
    """A tensor that transformers is about to read, with ``tensor[...]``."""

    def __init__(self, tensor: Any, part: tuple[slice, ...]) -> None:
        self._tensor, self._part = tensor, part

    def __getitem__(self, _: Any) -> torch.Tensor:
        rows: torch.Tensor = self._tensor[self._part]
        return rows.contiguous()


@contextmanager
def reading(cuts_of: CutsOf | None, part: StagePart | None = None) -> Iterator[None]:
    """Models that transformers loads in this context get the parts that `cuts_of` names. part: the layers that are
    wanted, if not all are."""
    load, set_parameter = PreTrainedModel._load_pretrained_model, core_model_loading.set_param_for_module
    cuts: dict[str, Cut] = {}

    def load_parts(model: Any, state_dict: Any, files: list[str] | None, wanted: Any, *more: Any) -> Any:
        known = model.state_dict()
        if part is not None:
            part.cut(model)
        cuts.update(cuts_of(model) if cuts_of is not None else {})
        names = CheckpointNames(model, wanted.weight_mapping or [], known)
        tensors: dict[str, Any] = {}
        if state_dict is None and files and not all(file.endswith(".safetensors") for file in files):
            state_dict = {name: tensor for file in files for name, tensor in load_state_dict(file).items()}  # mapped
        if state_dict is not None and part is not None:
            places = {name: names.in_model(name)[0] for name in state_dict}
            own = set(places.values())
            kept = {name: place for name, place in places.items() if place not in part.others}
            kept = {name: place for name, place in kept.items() if part.moved.get(place) not in own}
            state_dict = {part.moved.get(place, name): state_dict[name] for name, place in kept.items()}
        tied = dict(getattr(model, "all_tied_weights_keys", {})) if cuts else {}
        found: dict[str, tuple[str, Any]] = {}  # place → name and tensor, as far as parameters are tied
        if state_dict is not None or not files:
            if tied and state_dict is not None:
                found = {names.in_model(name)[0]: (name, tensor) for name, tensor in state_dict.items()}
                state_dict = dict(state_dict)
                _read_once(tied, found, state_dict)
            return load(model, state_dict, files, wanted, *more)
        with ExitStack() as stack:
            opened = [stack.enter_context(safe_open(path, framework="pt")) for path in files]
            keys = [key for file in opened for key in file.keys()]  # noqa: SIM118  # it is no dict
            own = {names.in_model(key)[0] for key in keys} if part is not None else set()
            for file in opened:
                for key in file.keys():  # noqa: SIM118  # it is no dict
                    name, (place, pattern) = key, names.in_model(key)
                    if part is not None and place in part.others:
                        continue
                    if part is not None and place in part.moved:
                        if part.moved[place] in own:
                            continue
                        name = place = part.moved[place]
                    tensor = file.get_slice(key)
                    if place in tied or place in tied.values():
                        found[place] = name, tensor
                    if (cut := cuts.get(place)) is not None:
                        tensor = names.part_of(tensor, key, pattern, cut)
                    if tensor is not None:
                        tensors[name] = tensor
            _read_once(tied, found, tensors)
            return load(model, tensors, None, wanted, *more)

    def set_part(model: PreTrainedModel, name: str, value: torch.Tensor, *more: Any) -> None:
        if (cut := cuts.get(name)) is not None:
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            if value.shape[cut.dim] == cut.whole:
                value = cut.of(value)
            if value.shape[cut.dim] == cut.size:  # else transformers says that it does not fit
                held = getattr(module, attribute).detach().narrow(cut.dim, 0, cut.size)
                setattr(module, attribute, nn.Parameter(held, requires_grad=False))
        set_parameter(model, name, value, *more)

    with ExitStack() as stack:
        for owner, function, replacement in (
            (PreTrainedModel, "_load_pretrained_model", staticmethod(load_parts)),
            (core_model_loading, "set_param_for_module", set_part),
        ):
            stack.callback(setattr, owner, function, vars(owner)[function])
            setattr(owner, function, replacement)
        yield


def _read_once(tied: Mapping[str, str], found: Mapping[str, tuple[str, Any]], tensors: dict[str, Any]) -> None:
    """Leave one tensor of those that are equal and whose parameters are tied. transformers compares them when they are
    read: a part and a whole would be untied. tied: a parameter → the one whose values it has."""
    for target, source in tied.items():
        if target not in found:
            continue
        name, whole = found[target]
        if source not in found:
            tensors[source] = whole
        elif not torch.equal(whole[:], found[source][1][:]):
            continue
        tensors.pop(name, None)


class CheckpointNames:
    """The names of a checkpoint's tensors in the model that is loaded, which has, as a whole, the names in `known`."""

    def __init__(self, model: PreTrainedModel, mapping: list[Any], known: dict[str, Any]) -> None:
        converts = [isinstance(entry, core_model_loading.WeightConverter) for entry in mapping]
        self._converters = [entry for entry, one in zip(mapping, converts, strict=True) if one]
        self._renamings = [entry for entry, one in zip(mapping, converts, strict=True) if not one]
        self._prefix, self._known = model.base_model_prefix, known
        self._stacked = {  # patterns of tensors that are stacked, of which several may then be joined
            pattern: converter.source_patterns
            for converter in self._converters
            if _stacks(converter)
            for pattern in converter.source_patterns
        }

    def in_model(self, name: str) -> tuple[str, str | None]:
        """The parameter, or the first one, that the tensor becomes, and the pattern by which it is converted; None: it
        becomes that as it is. Empty if it is not used."""
        rename = core_model_loading.rename_source_key
        found, pattern = rename(name, self._renamings, self._converters, self._prefix, self._known)
        if found not in self._known and name in self._known:
            found, pattern = name, None
        return (found if found in self._known else ""), pattern

    def stacked(self, name: str, pattern: str) -> tuple[int, int] | None:
        """The number of the expert whose tensor this is, and its place among those that are joined; None: it does not
        become part of a parameter by being stacked."""
        joined = self._stacked.get(pattern)
        return None if joined is None else (int(_NUMBERS.findall(name)[-1]), joined.index(pattern))

    def part_of(self, tensor: Any, name: str, pattern: str | None, cut: Cut) -> Any:
        """What to read of a tensor, so that its parameter becomes that part: all of it, a `_Part`, or nothing (None).
        pattern: see `in_model`."""
        shape = tensor.get_shape()
        mine: Cut | None = cut
        if pattern is not None:
            if (place := self.stacked(name, pattern)) is None:
                return tensor
            number, at = place
            if cut.dim == 0:  # whole experts
                if not any(start <= number < end for start, end in cut.ranges):
                    return None
                return _Part(tensor, (slice(None),) * len(shape))
            mine = _of_stacked(cut, at, len(self._stacked[pattern]), shape)
        elif shape[cut.dim : cut.dim + 1] != [cut.whole]:  # not what the config says
            return tensor
        rows = None if mine is None else mine.slices(len(shape))
        return tensor if rows is None else _Part(tensor, rows)


def _stacks(converter: Any) -> bool:
    """Whether tensors become one parameter by a new first dimension, and by being joined along the next one."""
    kinds = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations]
    joins = [("Concatenate", 1)] if len(converter.source_patterns) > 1 else []
    return kinds == [("MergeModulelist", 0), *joins] and converter.quantization_operation is None


def _of_stacked(cut: Cut, place: int, count: int, shape: Sequence[int]) -> Cut | None:
    """The part of the tensor at `place` of `count` that are joined, if their parameter is cut like this; None: some of
    them must be read whole."""
    if cut.dim > 1 or count == 1:
        return Cut(cut.dim - 1, cut.ranges, cut.whole)
    size = shape[0]
    each = [[r for r in cut.ranges if at * size <= r[0] and r[1] <= (at + 1) * size] for at in range(count)]
    if cut.whole != count * size or any(len(ranges) != 1 for ranges in each) or len(cut.ranges) != count:
        return None
    ((start, end),) = each[place]
    return Cut(0, ((start - place * size, end - place * size),), size)
