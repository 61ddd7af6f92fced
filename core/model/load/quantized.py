"""Quantized weights: what was asked for, and what a checkpoint brings.

For a backend that runs a model as a whole with integers, the weights of a quantized checkpoint are `LazyWeight`:
fusing and verification see the values, and the backend gets the integers exactly as they are. Any other one computes
with plain weights, which take more memory. quantized_forms.py knows how integers are packed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from ....ipc.errors import InvalidArgumentError, UnsupportedModelError
from ....kernels.contract import Backend
from ....kernels.decoder_contract import INT8_ROWS, NF4
from ....kernels.lazy_weight import LazyWeight, Leaf, Pack, Plain
from .quantized_forms import Form, form_of

logger = logging.getLogger(__name__)

BITS = {"int8": 8, "int8-dynamic": INT8_ROWS, "int4": 4, "bitsandbytes": NF4}
"""Options that round the weights of a plain checkpoint → what `Backend.decoder` calls it."""
_EXPERT = re.compile(r"\.experts\.\d+\.")  # in the name of a tensor
EXPANDED = "the checkpoint's quantized weights are computed with as plain ones, which take more memory"


def settle_quantization(
    asked: str | None, config: PreTrainedConfig, name: str, backend: Backend, revision: str, cache_dir: str | None
) -> Form | None:
    """The form of the checkpoint's quantized weights; None: it is a plain one. Its own `config`, or the part of it that
    is about the language model, loses the word of it. Older checkpoints of ModelOpt say it in hf_quant_config.json.

    Raises:
        InvalidArgumentError: the checkpoint, or the backend, can't be had as `asked`.
        UnsupportedModelError: the checkpoint is quantized in a way that is not known.
    """
    if asked in BITS and backend.name != "native":
        raise InvalidArgumentError(
            f"quantization is {asked!r}, which needs the native backend on a CPU; this is the {backend.name} backend"
        )
    told = [part for part in (config, config.get_text_config()) if getattr(part, "quantization_config", None)]
    own: Any = told[0].quantization_config if told else None
    offline = {"_raise_exceptions_for_connection_errors": False}
    if not told and (file := _optional_file(name, "hf_quant_config.json", revision, cache_dir, **offline)):
        listed = json.loads(Path(file).read_text())
        if listed["quantization"].get("quant_algo"):  # else only the cache is
            own = {"quant_method": "modelopt", **listed}
    if own is None:
        if asked is not None and asked not in BITS:
            raise InvalidArgumentError(f"quantization is {asked!r}, but {name} is no checkpoint of that form")
        return None
    form = form_of(own if isinstance(own, dict) else own.to_dict(), name)
    if asked not in (None, form.method, *BITS):
        raise already_quantized(asked, name, form)
    for part in told:
        vars(part).pop("quantization_config", None)
    return form


def already_quantized(asked: str | None, name: str, form: Form) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"quantization is {asked!r}, but {name} is a checkpoint of {form.method}, quantized already"
    )


class PackedWeights:
    """The quantized weights of a checkpoint by the names they would have as plain ones. They stay in the memory of the
    file until they are asked for."""

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

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def has_numbers(self, name: str) -> bool:
        """Whether kernels take the weight as it is; else only its values are used. A single row is a gate, which they
        have in fp32."""
        form, parts = self._form, self._packed[name]
        return form.has_numbers(parts) and (form.stacked or form.shape(parts)[0] > 1)

    def plain(self, name: str) -> torch.Tensor:
        """The values of the weight, in the dtype that the checkpoint would have without quantization, or in fp32."""
        return self._form.plain(self._packed[name])

    def tensor(self, name: str, pack: Pack) -> LazyWeight:
        """A weight that `has_numbers`."""
        form, parts = self._form, self._packed[name]
        of_each = [parts]
        if form.stacked:
            each = zip(*parts.values(), strict=True)
            of_each = [dict(zip(parts, tensors, strict=True)) for tensors in each]
        leaves = [Leaf(form.shape(one), [*one.values()], partial(form.read, one), pack) for one in of_each]
        return LazyWeight(leaves, form.dtype(parts), form.stacked, turned=form.stacked)


@dataclass(frozen=True)
class PlainWeight:
    """The values of a quantized weight, which transformers asks for by ``weight[...]`` when their turn comes, so that
    those of all weights are never in memory twice."""

    weights: PackedWeights
    name: str

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self.weights.plain(self.name)


def has_integers(model: nn.Module) -> bool:
    """Whether a weight of it is quantized."""
    return any(isinstance(parameter, LazyWeight) and parameter.has_integers for parameter in model.parameters())


def settle_weights(model: nn.Module) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Put usual tensors in the places of all lazy weights: empty ones where a decoder has taken the weight, else their
    values. → Old and new one by the ``id`` of the old."""
    new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        weights: dict[str, Any] = module._parameters
        for name, weight in weights.items():
            if not isinstance(weight, LazyWeight):
                continue
            if id(weight) not in new:
                values = weight.values() if weight.matrices else torch.empty(0, dtype=weight.dtype)
                new[id(weight)] = weight, nn.Parameter(values, requires_grad=False)
                weight.forget()
            weights[name] = new[id(weight)][1]
    return new


def read_quantized(
    form: Form, name: str, revision: str | None, cache_dir: str | None, pack: Pack | None
) -> dict[str, torch.Tensor | PlainWeight]:
    """All weights of a checkpoint, a folder or a hub id. pack: a backend's; None: all become plain ones.

    Raises:
        OSError: there are no safetensors files.
        UnsupportedModelError: no weight is quantized; or see `PackedWeights`.
    """
    tensors = _mapped(name, revision, cache_dir)
    weights = PackedWeights(tensors, form)
    if not weights.sources:
        raise UnsupportedModelError(f"{name} is quantized ({form.method}) by its config, but holds no such weights")
    found: dict[str, torch.Tensor | PlainWeight] = {}
    for key in weights:
        if pack is not None and weights.has_numbers(key):
            found[key] = weights.tensor(key, pack)
        else:
            found[key] = PlainWeight(weights, key)
    expanded = sum(isinstance(weight, PlainWeight) for weight in found.values())
    if 0 < expanded < len(found):
        logger.warning("%d of %d quantized weights are computed with as plain ones", expanded, len(found))
    return {**{key: tensor for key, tensor in tensors.items() if key not in weights.sources}, **found}


def read_experts(name: str, revision: str | None, cache_dir: str | None) -> dict[str, torch.Tensor] | None:
    """All weights of a plain checkpoint, a folder or a hub id, whose experts will be rounded: they are joined when they
    are used, so that there is never a joined copy of all. None: it has no experts, or no safetensors files."""
    try:
        tensors = _mapped(name, revision, cache_dir)
    except OSError:
        return None
    experts = {key: x for key, x in tensors.items() if _EXPERT.search(key) and x.dim() == 2 and x.is_floating_point()}
    lazy = {key: LazyWeight([Plain(tensor)], tensor.dtype) for key, tensor in experts.items()}
    return {**tensors, **lazy} if lazy else None


def _mapped(name: str, revision: str | None, cache_dir: str | None) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, in the memory of its files: the single one if it is there, as in transformers.
    Raises OSError if there are no safetensors files."""
    single = _optional_file(name, SAFE_WEIGHTS_NAME, revision, cache_dir)
    index = None if single else _optional_file(name, SAFE_WEIGHTS_INDEX_NAME, revision, cache_dir)
    files: Any = [single]
    if index is not None:
        files, _ = get_checkpoint_shard_files(name, index, revision=revision, cache_dir=cache_dir)
    elif single is None:
        raise OSError(f"it has no {SAFE_WEIGHTS_NAME}")
    return {key: tensor for file in files for key, tensor in load_file(file).items()}  # it maps, and reads nothing


def _optional_file(name: str, file: str, revision: str | None, cache_dir: str | None, **more: bool) -> str | None:
    missing: Any = {"_raise_exceptions_for_missing_entries": False, **more}
    folder = str(Path(name).expanduser())
    found: str | None = cached_file(folder, file, revision=revision, cache_dir=cache_dir, **missing)
    return found
