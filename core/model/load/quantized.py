"""Quantized weights: what was asked for, what a checkpoint brings, and AWQ's form of it.

A model is built as a plain one: an AWQ checkpoint's weights take the values that its whole numbers stand for, so that
fusing and verification see the model itself. The numbers are kept beside, packed as they lie in the file, and go to the
backend exactly as they are.

AWQ (Lin et al., 2023, https://arxiv.org/abs/2306.00978) in AutoAWQ's "gemm" form has three tensors for a linear layer
[out, in]: ``qweight`` int32 [in, out / 8], ``qzeros`` int32 [groups, out / 8], ``scales`` fp16 [groups, out]. An int32
has 8 columns, the lowest 4 bits first, in the order `COLUMNS`. A weight is scale * (number - zero).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from ....ipc.errors import InvalidArgumentError, UnsupportedModelError
from ....kernels.contract import Backend
from ....kernels.decoder_contract import QuantizedWeight
from .parameters import ParameterMap

COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
BITS = {"int8": 8, "int4": 4}
_SHORTEST, _LONGEST = 32, 128  # groups that kernels take, and take well: inputs are rounded group by group, too


def settle_quantization(asked: str | None, config: PreTrainedConfig, name: str, backend: Backend) -> str | None:
    """int8, int4, awq or None: what was asked for, or what the checkpoint is. Its own `config` loses the word of it.

    Raises:
        InvalidArgumentError: the checkpoint, or the backend, can't be had so.
        UnsupportedModelError: the checkpoint is quantized in a way that is not known.
    """
    if asked is not None and backend.name != "native":
        raise InvalidArgumentError(
            f"quantization is {asked!r}, which needs the native backend on a CPU; this is the {backend.name} backend"
        )
    own: Any = getattr(config, "quantization_config", None)
    if not own:
        if asked == "awq":
            raise InvalidArgumentError(f"quantization is 'awq', but {name} is no AWQ checkpoint")
        return asked
    own = own if isinstance(own, dict) else own.to_dict()
    method, form = own.get("quant_method"), str(own.get("version") or own.get("format") or "gemm").lower()
    if method != "awq" or own.get("bits") != 4 or form != "gemm":
        raise UnsupportedModelError(
            f"{name} is quantized ({method}, {own.get('bits')} bits, {form}); of quantized checkpoints only AWQ's of 4 "
            "bits in gemm form are supported so far"
        )
    if backend.name != "native":
        raise UnsupportedModelError(
            f"{name} is quantized (awq), which needs the native backend on a CPU; this is the {backend.name} backend"
        )
    if asked not in (None, "awq"):
        raise InvalidArgumentError(f"quantization is {asked!r}, but {name} is an AWQ checkpoint, quantized already")
    del config.quantization_config
    return "awq"


class AwqWeights(Mapping[str, QuantizedWeight]):
    """The quantized weights of a checkpoint by the names they would have as plain ones (``….weight``).

    They stay packed, in the memory of the file, until they are asked for, and one asked for is not kept.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Of all `tensors` of a checkpoint, those of AWQ. Raises UnsupportedModelError for shapes that don't fit."""
        self._packed: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for name, qweight in tensors.items():
            path, _, kind = name.rpartition(".")
            if kind != "qweight":
                continue
            try:
                qzeros, scales = tensors[f"{path}.qzeros"], tensors[f"{path}.scales"]
            except KeyError as missing:
                raise UnsupportedModelError(f"the checkpoint has {name!r}, but no {missing}") from None
            groups, out = scales.shape
            group = len(qweight) // groups
            if qweight.shape != (groups * group, out // 8) or qzeros.shape != (groups, out // 8) or group % _SHORTEST:
                shapes = ", ".join(str(list(tensor.shape)) for tensor in (qweight, qzeros, scales))
                raise UnsupportedModelError(
                    f"{path!r} has a qweight, qzeros and scales of {shapes}; a group must be a multiple of {_SHORTEST} "
                    "inputs long and 8 outputs wide"
                )
            self._packed[f"{path}.weight"] = qweight, qzeros, scales

    def __getitem__(self, name: str) -> QuantizedWeight:
        qweight, qzeros, scales = self._packed[name]
        numbers, zeros = unpack(qweight).T.contiguous(), unpack(qzeros).T.float()
        group = len(qweight) // len(scales)
        times = group // _LONGEST if group % _LONGEST == 0 else 1
        return QuantizedWeight(
            numbers, *(x.repeat_interleave(times, dim=1).contiguous() for x in (scales.T.float(), zeros))
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def plain(self, name: str) -> torch.Tensor:
        """``[out, in]``, in the dtype of the scales: what the numbers stand for."""
        numbers, scales, zeros = self[name]
        grouped = numbers.view(*scales.shape, -1).float()
        return grouped.sub_(zeros[..., None]).mul_(scales[..., None]).flatten(1).to(self._packed[name][2].dtype)


class JoinedWeights(Mapping[int, QuantizedWeight]):
    """The same by the ``id`` of the tensors of a fused model, in which several lie one after another. A tensor that
    also holds what is not quantized is not among them, and stays plain."""

    def __init__(self, weights: Mapping[str, QuantizedWeight], parameters: ParameterMap) -> None:
        """Raises UnsupportedModelError for a weight that the model does not have."""
        self._weights = weights
        parts: dict[int, list[tuple[int, str]]] = {}
        missing: dict[int, int] = {}
        for name in weights:
            try:
                slot = parameters.slot(name)
            except KeyError as error:
                raise UnsupportedModelError(f"of quantized weights, {error.args[0]}") from None
            key, rows = id(slot.tensor), len(slot.view())
            parts.setdefault(key, []).append((slot.start, name))
            missing[key] = missing.get(key, len(slot.tensor)) - rows
        self._names = {key: [name for _, name in sorted(of)] for key, of in parts.items() if not missing[key]}

    def __getitem__(self, key: int) -> QuantizedWeight:
        parts = [self._weights[name] for name in self._names[key]]
        return QuantizedWeight(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def __iter__(self) -> Iterator[int]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_awq(name: str, revision: str | None, cache_dir: str | None) -> tuple[dict[str, torch.Tensor], AwqWeights]:
    """All weights of an AWQ checkpoint, a folder or a hub id, as plain ones; and those that are quantized.

    Raises:
        OSError: there are no safetensors files.
        UnsupportedModelError: see `AwqWeights`.
    """
    where: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **where)
    files: Any
    if index is None:
        files = [cached_file(name, SAFE_WEIGHTS_NAME, **where)]
    else:
        files, _ = get_checkpoint_shard_files(name, index, **where)
    tensors = {key: tensor for file in files for key, tensor in load_file(file).items()}  # it maps, and reads nothing
    weights = AwqWeights(tensors)
    plain = {key: tensor for key, tensor in tensors.items() if not key.endswith((".qweight", ".qzeros", ".scales"))}
    return {**plain, **{key: weights.plain(key) for key in weights}}, weights


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """int32 ``[rows, columns / 8]`` → uint8 ``[rows, columns]``."""
    shifts = 4 * torch.tensor(COLUMNS, dtype=torch.int32).argsort().int()
    return (packed[..., None] >> shifts).bitwise_and_(15).to(torch.uint8).flatten(1)
