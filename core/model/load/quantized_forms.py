"""The forms in which checkpoints have quantized weights: how each packs the integers of a linear layer [out, in].

AWQ (Lin et al., 2023, https://arxiv.org/abs/2306.00978) in AutoAWQ's "gemm" form has three tensors: ``qweight`` int32
[in, out / 8], ``qzeros`` int32 [groups, out / 8], ``scales`` fp16 [groups, out]. An int32 has 8 columns, the lowest 4
bits first, in the order `AWQ_COLUMNS`. A weight is scale * (number - zero).

GPTQ (Frantar et al., 2022, https://arxiv.org/abs/2210.17323) of b bits has ``qweight`` int32 [in * b / 32, out], whose
integers lie along the inputs, ``qzeros`` int32 [groups, out * b / 32], ``scales`` fp16 [groups, out] and ``g_idx``
int32 [in], the group of each input. Both are packed in order, the lowest bits first. In its first version a zero is
stored less one.

bitsandbytes (Dettmers et al., 2023, https://arxiv.org/abs/2305.14314) of 4 bits has ``weight``, with two numbers in a
byte, the first in its high half; ``weight.absmax``, the scale of each block of so many values of the flattened weight;
and ``weight.quant_state.bitsandbytes__nf4`` (or fp4), JSON. A weight is absmax * code[number]. With double quantization
absmax is an index into ``weight.nested_quant_map``, whose values have a scale in ``weight.nested_absmax`` for each
block, and an offset.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....ipc.errors import UnsupportedModelError
from ....kernels.decoder_contract import QuantizedWeight

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
SHORTEST, LONGEST = 32, 128  # groups that kernels take, and take well: inputs are rounded group by group, too
SUPPORTED = "AWQ's (4 bits, gemm), GPTQ's (4 or 8 bits) and bitsandbytes' (4 bits)"

Parts = Mapping[str, torch.Tensor]  # the tensors of a linear layer by the end of their names


class Form(ABC):
    """A form of quantized linear layers."""

    method: str  # the config's quant_method
    marks: tuple[str, ...]  # ends of names, after the layer's path: a layer that has such a tensor is quantized,
    needs: tuple[str, ...]  # and has these
    may_have: tuple[str, ...] = ()

    @abstractmethod
    def misfit(self, parts: Parts) -> str | None:
        """Why these tensors can't be read; None: they can."""

    @abstractmethod
    def read(self, parts: Parts) -> QuantizedWeight: ...

    def dtype(self, parts: Parts) -> torch.dtype:
        """Of the plain weight."""
        return parts["scales"].dtype


class Awq(Form):
    method = "awq"
    marks = ("qweight",)
    needs = ("qzeros", "scales")

    def misfit(self, parts: Parts) -> str | None:
        return _misfit(parts, 1, 8)

    def read(self, parts: Parts) -> QuantizedWeight:
        numbers = unpack(parts["qweight"], 4, AWQ_COLUMNS).T.contiguous()
        return _split(numbers, parts["scales"].T.float(), unpack(parts["qzeros"], 4, AWQ_COLUMNS).T.float())


@dataclass
class Gptq(Form):
    bits: int  # 4 or 8
    stored_less: int  # what a zero is more than it is stored as

    method = "gptq"
    marks = ("qweight",)
    needs = ("qzeros", "scales")
    may_have = ("g_idx",)

    def misfit(self, parts: Parts) -> str | None:
        packed = 32 // self.bits
        if reason := _misfit(parts, packed, packed):
            return reason
        inputs = len(parts["qweight"]) * packed
        order, group = parts.get("g_idx"), inputs // len(parts["scales"])
        if order is not None and not torch.equal(order.long(), torch.arange(inputs) // group):
            return "a g_idx with groups of inputs that are not neighbours (desc_act), which is not supported so far"
        if self.bits == 8 and not bool((self._zeros(parts) == 128).all()):
            return "zeros of 8 bits that are not in the middle; only symmetric weights of 8 bits are supported"
        return None

    def read(self, parts: Parts) -> QuantizedWeight:
        numbers = unpack(parts["qweight"].T.contiguous(), self.bits)
        scales = parts["scales"].T.float()
        return _split(numbers, scales, self._zeros(parts).T.float() if self.bits == 4 else None)

    def _zeros(self, parts: Parts) -> torch.Tensor:
        return unpack(parts["qzeros"], self.bits).short() + self.stored_less


class BitsAndBytes(Form):
    method = "bitsandbytes"
    marks = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
    needs = ("weight", "weight.absmax", "weight.quant_map")
    may_have = ("weight.nested_absmax", "weight.nested_quant_map")

    def misfit(self, parts: Parts) -> str | None:
        state = self._state(parts)
        shape, block = state["shape"], state["blocksize"]
        if len(shape) != 2 or math.gcd(shape[1], block) % SHORTEST:
            return f"a weight of {shape} in blocks of {block} values; a row must be a multiple of {SHORTEST} values"
        if parts["weight"].nbytes * 2 != shape[0] * shape[1] or parts["weight.quant_map"].numel() != 16:
            return f"a weight of {list(parts['weight'].shape)}, which is not one of {shape} in halves of bytes"
        return None

    def read(self, parts: Parts) -> QuantizedWeight:
        state = self._state(parts)
        (rows, columns), block = state["shape"], state["blocksize"]
        packed, absmax = parts["weight"].contiguous().view(torch.uint8).flatten(), parts["weight.absmax"]
        if "weight.nested_absmax" in parts:
            outer = parts["weight.nested_absmax"].float().repeat_interleave(state["nested_blocksize"])[: len(absmax)]
            absmax = parts["weight.nested_quant_map"].float()[absmax.long()] * outer + state["nested_offset"]
        group = math.gcd(columns, block)
        scales = absmax.float().repeat_interleave(block // group)[: rows * columns // group]
        numbers = torch.stack((packed >> 4, packed & 15), dim=-1)
        codebook = parts["weight.quant_map"].float()
        return QuantizedWeight(numbers.view(rows, columns), scales.view(rows, -1), None, codebook)

    def dtype(self, parts: Parts) -> torch.dtype:
        dtype = getattr(torch, self._state(parts)["dtype"])
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _state(self, parts: Parts) -> Any:
        return json.loads(next(bytes(parts[mark].tolist()) for mark in self.marks if mark in parts))


def form_of(config: Mapping[str, Any], name: str) -> Form:
    """The form that the `quantization_config` of the checkpoint `name` tells of.

    Raises:
        UnsupportedModelError: it is none of those known.
    """
    method, bits = config.get("quant_method"), config.get("bits")
    kind = str(config.get("checkpoint_format") or config.get("version") or config.get("format") or "").lower()
    if method == "awq" and bits == 4 and kind in ("", "gemm"):
        return Awq()
    if method == "gptq" and bits in (4, 8) and kind in ("", "gptq", "gptq_v2") and not config.get("dynamic"):
        return Gptq(bits, 0 if kind == "gptq_v2" else 1)
    if method == "bitsandbytes" and config.get("load_in_4bit"):
        return BitsAndBytes()
    more = "".join(f", {word}" for word in (bits and f"{bits} bits", kind) if word)
    raise UnsupportedModelError(f"{name} is quantized ({method}{more}); of quantized checkpoints {SUPPORTED} are read")


def values_of(weight: QuantizedWeight) -> torch.Tensor:
    """fp32 ``[out, in]``: what the numbers stand for."""
    numbers, scales, zeros, codebook = weight
    grouped = numbers.view(*scales.shape, -1)
    if codebook is not None:
        found = codebook[grouped.int()]
    else:
        found = grouped.float().sub_(128 if zeros is None else zeros[..., None])
    return found.mul_(scales[..., None]).flatten(1)


def unpack(packed: torch.Tensor, bits: int, columns: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 ``[rows, columns * bits / 32]`` → uint8 ``[rows, columns]``. `columns`: those that an int32 has, the lowest
    bits first; None: in order."""
    order = torch.arange(32 // bits) if columns is None else torch.tensor(columns).argsort()
    return (packed[..., None] >> (bits * order).int()).bitwise_and_((1 << bits) - 1).to(torch.uint8).flatten(1)


def _misfit(parts: Parts, rows: int, columns: int) -> str | None:
    """`Form.misfit` of a qweight whose int32 have this many inputs, and qzeros with this many outputs."""
    qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    groups, out = scales.shape
    inputs = len(qweight) * rows
    group = inputs // groups
    outputs = qweight.shape[1] * (columns if rows == 1 else 1)
    if inputs == groups * group and outputs == out and qzeros.shape == (groups, out // columns) and not (
        out % columns or group % SHORTEST
    ):  # fmt: skip
        return None
    shapes = ", ".join(str(list(tensor.shape)) for tensor in (qweight, qzeros, scales))
    return (
        f"a qweight, qzeros and scales of {shapes}; a group must be a multiple of {SHORTEST} inputs long and {columns} "
        "outputs wide"
    )


def _split(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> QuantizedWeight:
    """Scales and zeros ``[out, groups]``, of groups that kernels take well."""
    group = numbers.shape[1] // scales.shape[1]
    times = group // LONGEST if group % LONGEST == 0 else 1

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(times, dim=1).contiguous()

    return QuantizedWeight(numbers, split(scales), None if zeros is None else split(zeros))
