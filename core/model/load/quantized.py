"""Quantized weights: what was asked for, and what a checkpoint brings.

A model is built as a plain one: the weights of a quantized checkpoint take the values that its numbers stand for, so
that fusing and verification see the model itself. The numbers stay beside, packed as they lie in the file, and go to a
backend that runs the model as a whole with them exactly as they are. Any other one computes with the values, which take
more memory. quantized_forms.py knows how numbers are packed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from ....ipc.errors import InvalidArgumentError, UnsupportedModelError
from ....kernels.contract import Backend
from ....kernels.decoder_contract import INT8_ROWS, NF4, QuantizedWeight
from ...parallel.cuts import Cut
from .parameters import ParameterMap
from .quantized_forms import SHORTEST, Form, form_of
from .sliced_reading import CheckpointNames

BITS = {"int8": 8, "int8-dynamic": INT8_ROWS, "int4": 4, "bitsandbytes": NF4}
"""Options that round the weights of a plain checkpoint → what `Backend.decoder` calls it."""
EXPANDED = "the checkpoint's quantized weights are computed with as plain ones, which take more memory"


def settle_quantization(asked: str | None, config: PreTrainedConfig, name: str, backend: Backend) -> Form | None:
    """The form of the checkpoint's quantized weights; None: it is a plain one. Its own `config` loses the word of it.

    Raises:
        InvalidArgumentError: the checkpoint, or the backend, can't be had as `asked`.
        UnsupportedModelError: the checkpoint is quantized in a way that is not known.
    """
    if asked in BITS and backend.name != "native":
        raise InvalidArgumentError(
            f"quantization is {asked!r}, which needs the native backend on a CPU; this is the {backend.name} backend"
        )
    own: Any = getattr(config, "quantization_config", None)
    if not own:
        if asked is not None and asked not in BITS:
            raise InvalidArgumentError(f"quantization is {asked!r}, but {name} is no checkpoint of that form")
        return None
    form = form_of(own if isinstance(own, dict) else own.to_dict(), name)
    if asked not in (None, form.method, *BITS):
        raise already_quantized(asked, name, form)
    del config.quantization_config
    return form


def already_quantized(asked: str | None, name: str, form: Form) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"quantization is {asked!r}, but {name} is a checkpoint of {form.method}, quantized already"
    )


class PackedWeights(Mapping[str, QuantizedWeight]):
    """The quantized weights of a checkpoint by the names they would have as plain ones: those with numbers that kernels
    take.

    They stay packed, in the memory of the file, until they are asked for, and one asked for is not kept.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], form: Form) -> None:
        """Of all `tensors` of a checkpoint, those of this form. Raises UnsupportedModelError for some that don't fit
        together."""
        self._form = form
        self._packed: dict[str, dict[str, torch.Tensor]] = {}
        self.sources: set[str] = set()  # names of tensors that are part of a quantized weight
        for name in tensors:
            mark = next((mark for mark in form.marks if name.endswith(f"{form.before_end}{mark}")), None)
            if mark is None:
                continue
            path = name.removesuffix(mark)
            ends = [end for end in (mark, *form.needs, *form.may_have) if f"{path}{end}" in tensors]
            if lacks := next((end for end in form.needs if end not in ends), None):
                raise UnsupportedModelError(f"the checkpoint has {name!r}, but no {f'{path}{lacks}'!r}")
            parts = {end: tensors[f"{path}{end}"] for end in ends}
            plain = path.removesuffix(form.before_end) + form.plain_end
            if reason := form.misfit(parts):
                raise UnsupportedModelError(f"{plain.removesuffix('.weight')!r} has {reason}")
            self._packed[plain] = parts
            self.sources.update(f"{path}{end}" for end in ends)
        self._names = [name for name, parts in self._packed.items() if form.has_numbers(parts)]

    def __getitem__(self, name: str) -> QuantizedWeight:
        return self._form.read(self._packed[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def plain(self, name: str) -> torch.Tensor:
        """The values of the weight, in the dtype that the checkpoint would have without quantization, or in fp32."""
        return self._form.plain(self._packed[name])

    def all_plain(self) -> dict[str, PlainWeight]:
        """The values of all quantized weights, also those without numbers that kernels take."""
        return {name: PlainWeight(self, name) for name in self._packed}


@dataclass(frozen=True)
class PlainWeight:
    """The values of a quantized weight, which transformers asks for by ``weight[...]`` when their turn comes, so that
    those of all weights are never in memory twice."""

    weights: PackedWeights
    name: str

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self.weights.plain(self.name)


class PlacedWeights(Mapping[str, QuantizedWeight]):
    """Quantized weights by the names of the model's parameters. Those of experts that are one parameter are stacked,
    and gate and up joined. What becomes a parameter in another way, or none, is not among them."""

    def __init__(
        self, weights: Mapping[str, QuantizedWeight], model: PreTrainedModel, others: Mapping[str, torch.Size]
    ) -> None:
        """others: parameters that only other stages hold."""
        self._weights = weights
        known = {**{name: tensor.shape for name, tensor in model.state_dict().items()}, **others}
        names = CheckpointNames(model, get_model_conversion_mapping(model), known)
        self._names: dict[str, str | list[list[str]]] = {}  # of a parameter; of each expert those that are joined
        parts: dict[str, dict[tuple[int, int], str]] = {}
        for name in weights:
            parameter, pattern = names.in_model(name)
            if not parameter:
                continue
            if pattern is None:
                self._names[parameter] = name
            elif (place := names.stacked(name, pattern)) is not None:
                parts.setdefault(parameter, {})[place] = name
        for parameter, places in parts.items():
            experts, joined = known[parameter][0], 1 + max(at for _, at in places)
            if len(places) == experts * joined:
                self._names[parameter] = [[places[e, at] for at in range(joined)] for e in range(experts)]

    def __getitem__(self, name: str) -> QuantizedWeight:
        found = self._names[name]
        if isinstance(found, str):
            return self._weights[found]
        read = [joined([self._weights[each] for each in one]) for one in found]
        zeros = [each.zeros for each in read if each.zeros is not None]
        return QuantizedWeight(
            torch.stack([each.numbers for each in read]),
            torch.stack([each.scales for each in read]),
            torch.stack(zeros) if zeros else None,
            read[0].codebook,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Rows of several, one after another."""
    if len(weights) == 1:
        return weights[0]
    numbers, scales, zeros, codebooks = zip(*weights, strict=True)
    joint = None if zeros[0] is None else torch.cat(zeros)
    return QuantizedWeight(torch.cat(numbers), torch.cat(scales), joint, codebooks[0])


class CutWeights(Mapping[str, QuantizedWeight]):
    """The parts of quantized weights that one of several ranks holds. Where a cut divides a group of inputs, the groups
    of the weight become shorter. Those in `others` are held by other stages."""

    def __init__(
        self, weights: Mapping[str, QuantizedWeight], cuts: Mapping[str, Cut], others: Collection[str] = ()
    ) -> None:
        self._weights, self._cuts = weights, cuts
        self._names = [name for name in weights if name not in others]

    def __getitem__(self, name: str) -> QuantizedWeight:
        """Raises `UnsupportedModelError` if groups would be too short, and for experts."""
        weight, cut = self._weights[name], self._cuts.get(name)
        if cut is None:
            return weight
        numbers, scales, zeros, codebook = weight
        if numbers.dim() > 2:
            raise UnsupportedModelError(f"{name!r} would be cut, and those are numbers of experts")
        if cut.dim == 0:
            return QuantizedWeight(cut.of(numbers), cut.of(scales), None if zeros is None else cut.of(zeros), codebook)
        group = numbers.shape[1] // scales.shape[1]
        short = math.gcd(group, *(edge for both in cut.ranges for edge in both))
        if short < SHORTEST:
            raise UnsupportedModelError(f"{name!r} would have groups of {short} inputs on a rank")
        groups = Cut(1, tuple((start // short, end // short) for start, end in cut.ranges), cut.whole // short)

        def part(of_groups: torch.Tensor) -> torch.Tensor:
            return groups.of(of_groups.repeat_interleave(group // short, 1))

        return QuantizedWeight(cut.of(numbers), part(scales), None if zeros is None else part(zeros), codebook)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class JoinedWeights(Mapping[int, QuantizedWeight]):
    """The same by the ``id`` of the tensors of a fused model, in which several lie one after another. A tensor that
    also holds what is not quantized is not among them, and stays plain."""

    def __init__(self, weights: Mapping[str, QuantizedWeight], parameters: ParameterMap) -> None:
        self._weights = weights
        parts: dict[int, list[tuple[int, str]]] = {}
        missing: dict[int, int] = {}
        for name in weights:
            slot = parameters.slot(name)
            key, rows = id(slot.tensor), len(slot.view())
            parts.setdefault(key, []).append((slot.start, name))
            missing[key] = missing.get(key, len(slot.tensor)) - rows
        self._names = {key: [name for _, name in sorted(of)] for key, of in parts.items() if not missing[key]}

    def __getitem__(self, key: int) -> QuantizedWeight:
        return joined([self._weights[name] for name in self._names[key]])

    def __iter__(self) -> Iterator[int]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_quantized(
    form: Form, name: str, revision: str | None, cache_dir: str | None
) -> tuple[dict[str, torch.Tensor | PlainWeight], PackedWeights]:
    """All weights of a checkpoint, a folder or a hub id, as plain ones; and those that are quantized.

    Raises:
        OSError: there are no safetensors files.
        UnsupportedModelError: no weight is quantized; or see `PackedWeights`.
    """
    where: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **where)
    files: Any
    if index is None:
        files = [cached_file(name, SAFE_WEIGHTS_NAME, **where)]
    else:
        files, _ = get_checkpoint_shard_files(name, index, **where)
    tensors = {key: tensor for file in files for key, tensor in load_file(file).items()}  # it maps, and reads nothing
    weights = PackedWeights(tensors, form)
    if not weights.sources:
        raise UnsupportedModelError(f"{name} is quantized ({form.method}) by its config, but holds no such weights")
    plain = {key: tensor for key, tensor in tensors.items() if key not in weights.sources}
    return {**plain, **weights.all_plain()}, weights
