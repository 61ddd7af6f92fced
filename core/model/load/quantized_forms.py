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

MXFP4 (Open Compute Project, Microscaling Formats 1.0) of experts, as gpt-oss has them: ``_blocks`` uint8 [experts, out,
in / 32, 16], two numbers in a byte, the first in its low half, and ``_scales`` uint8 [experts, out, in / 32], exponents
of 2 with a bias of 127. A number has a sign, 2 bits of exponent and one of mantissa.

FP8 has ``weight`` float8_e4m3fn [out, in] and ``weight_scale_inv``, what it is to be multiplied by: one number, or one
for each block of so many rows and columns, as in DeepSeek-V3.

compressed-tensors has ``weight_scale`` [out, groups], or one number, beside one of these:

- ``weight_packed`` int32 [out, in * b / 32], integers of b bits along the inputs, the lowest bits first, more by half
  of their range than they stand for, with ``weight_zero_point`` int32 [out * b / 32, groups] in the same form unless it
  is symmetric;
- ``weight`` int8, or float8_e4m3fn;
- ``weight_packed`` uint8 [out, in / 2], numbers of FP4 as in MXFP4. In NVFP4 their scales are float8_e4m3fn, for groups
  of 16, and divided by the number ``weight_global_scale``.

Scales of uint8 are exponents, as in MXFP4. ModelOpt has the same, but that FP4 is in ``weight``, and its scales are
multiplied by ``weight_scale_2``.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from ....ipc.errors import UnsupportedModelError
from ....kernels.decoder_contract import FP4, QuantizedWeight
from ....kernels.lazy_weight import SHORTEST, SHORTEST_CODED

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
LONGEST = 128  # inputs of a group that kernels take well: inputs are rounded group by group, too
SUPPORTED = (
    "AWQ's (4 bits, gemm) and GPTQ's (4 or 8 bits), also as AutoRound packs them, bitsandbytes' (4 bits), MXFP4's of "
    "gpt-oss, FP8's, compressed-tensors' (integers of 4 or 8 bits, FP8, FP4) and ModelOpt's (FP8, FP4)"
)
FP8_BLOCK = (128, 128)  # rows and columns, where the config does not say
MX_GROUP = 32  # inputs that share a scale in MXFP8
AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}  # by packing_format
# the values of ModelOpt's quant_algo that only round weights to FP8 or FP4
MODELOPT = ("fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "mxfp8", "nvfp4", "w4a16_nvfp4", "mixed_precision")

Parts = Mapping[str, torch.Tensor]  # the tensors of a linear layer by the end of their names


class Form(ABC):
    """A form of quantized linear layers."""

    method: str  # the config's quant_method
    marks: tuple[str, ...]  # ends of names, after the layer's path: a layer that has such a tensor is quantized,
    needs: ClassVar[tuple[str, ...]]  # and has these
    may_have: ClassVar[tuple[str, ...]] = ()
    before_end, plain_end = ".", ".weight"  # between path and end, and after the path in the plain weight's name
    stacked = False  # tensors are those of experts, which the model has as ``[experts, in, out]``

    @abstractmethod
    def misfit(self, parts: Parts) -> str | None:
        """Why these tensors can't be read; None: they can."""

    def has_numbers(self, parts: Parts) -> bool:
        """Whether kernels take the weight as it is, by `read`; else only its values are used."""
        return True

    def shape(self, parts: Parts) -> tuple[int, int]:
        """Of what `read` gives."""
        raise NotImplementedError

    def read(self, parts: Parts) -> QuantizedWeight:
        """Of one expert, if they are stacked."""
        raise NotImplementedError

    def plain(self, parts: Parts) -> torch.Tensor:
        """What the numbers stand for, in the shape of the plain weight."""
        return self.read(parts).values().to(self.dtype(parts))

    def dtype(self, parts: Parts) -> torch.dtype:
        """Of the plain weight."""
        return parts["scales"].dtype


class Groups(NamedTuple):
    """Of an integer layer."""

    scales: torch.Tensor  # fp32 [out, groups]
    zeros: torch.Tensor  # fp32 [out, groups]
    order: torch.Tensor | None = None  # int64 [in], the group of each input; None: neighbours form them


class IntegerForm(Form):
    """A weight is scale * (integer - zero)."""

    @abstractmethod
    def bits_of(self, parts: Parts) -> int:
        """4 or 8."""

    @abstractmethod
    def numbers(self, parts: Parts) -> torch.Tensor:
        """uint8 ``[out, in]``."""

    @abstractmethod
    def shape(self, parts: Parts) -> tuple[int, int]: ...

    @abstractmethod
    def groups(self, parts: Parts) -> Groups: ...

    def has_numbers(self, parts: Parts) -> bool:
        scales, zeros, order = self.groups(parts)
        fits = order is None and self.shape(parts)[1] // scales.shape[1] % SHORTEST == 0
        return fits and (self.bits_of(parts) == 4 or bool((zeros == 128).all()))

    def read(self, parts: Parts) -> QuantizedWeight:
        scales, zeros, _ = self.groups(parts)
        group = self.shape(parts)[1] // scales.shape[1]
        if group % LONGEST == 0:  # divide it into groups that kernels take well
            scales, zeros = (x.repeat_interleave(group // LONGEST, dim=1) for x in (scales, zeros))
        return QuantizedWeight(self.numbers(parts), scales, zeros if self.bits_of(parts) == 4 else None)

    def plain(self, parts: Parts) -> torch.Tensor:
        scales, zeros, order = self.groups(parts)
        if order is not None:
            scales, zeros = scales[:, order], zeros[:, order]
        return QuantizedWeight(self.numbers(parts), scales, zeros).values().to(self.dtype(parts))


class Awq(IntegerForm):
    method = "awq"
    marks = ("qweight",)
    needs = ("qzeros", "scales")

    def misfit(self, parts: Parts) -> str | None:
        return _misfit(parts, 1, 8)

    def bits_of(self, parts: Parts) -> int:
        return 4

    def numbers(self, parts: Parts) -> torch.Tensor:
        return unpack(parts["qweight"], 4, AWQ_COLUMNS).T.contiguous()

    def shape(self, parts: Parts) -> tuple[int, int]:
        return parts["scales"].shape[1], len(parts["qweight"])

    def groups(self, parts: Parts) -> Groups:
        zeros = unpack(parts["qzeros"], 4, AWQ_COLUMNS)
        return Groups(parts["scales"].T.float().contiguous(), zeros.T.float().contiguous())


@dataclass
class Gptq(IntegerForm):
    bits: int  # 4 or 8
    stored_less: int  # what a zero is more than it is stored as

    method = "gptq"
    marks = ("qweight",)
    needs = ("qzeros", "scales")
    may_have = ("g_idx",)

    def misfit(self, parts: Parts) -> str | None:
        return _misfit(parts, 32 // self.bits, 32 // self.bits)

    def bits_of(self, parts: Parts) -> int:
        return self.bits

    def numbers(self, parts: Parts) -> torch.Tensor:
        return unpack(parts["qweight"].T.contiguous(), self.bits)

    def shape(self, parts: Parts) -> tuple[int, int]:
        return parts["scales"].shape[1], len(parts["qweight"]) * (32 // self.bits)

    def groups(self, parts: Parts) -> Groups:
        zeros = unpack(parts["qzeros"], self.bits).short() + self.stored_less
        scales = parts["scales"].T.float().contiguous()
        return Groups(scales, zeros.T.float().contiguous(), _order(parts.get("g_idx"), scales.shape[1]))


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

    def shape(self, parts: Parts) -> tuple[int, int]:
        rows, columns = self._state(parts)["shape"]
        return rows, columns

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


class Mxfp4(Form):
    method = "mxfp4"
    marks = ("blocks",)
    needs = ("scales",)
    before_end, plain_end = "_", ""
    stacked = True

    def misfit(self, parts: Parts) -> str | None:
        blocks, scales = parts["blocks"], parts["scales"]
        if blocks.shape == (*scales.shape, 16) and scales.dim() == 3 and blocks.dtype == scales.dtype == torch.uint8:
            return None
        return f"blocks and scales of {list(blocks.shape)} and {list(scales.shape)}, not of 32 numbers in 16 bytes each"

    def shape(self, parts: Parts) -> tuple[int, int]:
        out, groups = parts["scales"].shape
        return out, 32 * groups

    def read(self, parts: Parts) -> QuantizedWeight:
        return fp4_weight(parts["blocks"], scale_values(parts["scales"]))

    def plain(self, parts: Parts) -> torch.Tensor:
        scales, dtype = scale_values(parts["scales"]), self.dtype(parts)
        codes = torch.tensor(FP4, dtype=dtype)
        of_byte = torch.stack((codes.repeat(16), codes.repeat_interleave(16)), dim=1)  # the two values
        experts, out, groups, _ = parts["blocks"].shape
        plain = torch.empty(experts, out, groups * 32, dtype=dtype)
        for whole, blocks, scale in zip(plain, parts["blocks"], scales, strict=True):
            values = F.embedding(blocks.int(), of_byte).view(out, groups, 32)
            whole.copy_(values.mul_(scale[..., None]).view(out, -1))
        return plain.mT

    def dtype(self, parts: Parts) -> torch.dtype:
        return torch.bfloat16  # in which they are exact


@dataclass
class Fp8(Form):
    block: tuple[int, int]

    method = "fp8"
    marks = ("weight_scale_inv",)
    needs = ("weight",)
    may_have = ("activation_scale", "input_scale")

    def misfit(self, parts: Parts) -> str | None:
        return fp8_misfit(parts["weight"], parts["weight_scale_inv"], self.block)

    def has_numbers(self, parts: Parts) -> bool:
        return False

    def plain(self, parts: Parts) -> torch.Tensor:
        return fp8_values(parts["weight"], parts["weight_scale_inv"], self.block)


@dataclass
class CompressedTensors(IntegerForm):
    block: tuple[int, int]  # of FP8

    method = "compressed-tensors"
    marks = ("weight_scale",)
    needs: ClassVar[tuple[str, ...]] = ()
    may_have: ClassVar[tuple[str, ...]] = (
        "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", "weight", "weight_global_scale",
        "input_scale", "input_global_scale",
    )  # fmt: skip

    def misfit(self, parts: Parts) -> str | None:
        if "weight_packed" not in parts and "weight" not in parts:
            return "a weight_scale, but neither weight nor weight_packed"
        if (packed := self._fp4(parts)) is not None:
            shape, of_scales = list(packed.shape), list(parts["weight_scale"].shape)
            if len(shape) == len(of_scales) == 2 and shape[0] == of_scales[0] and 2 * shape[1] % of_scales[1] == 0:
                return None
            return f"FP4 numbers and scales of {shape} and {of_scales}"
        if not self._is_integer(parts):
            return fp8_misfit(parts["weight"], self._fp8_scales(parts), self.block)
        bits, (out, inputs) = self.bits_of(parts), self.shape(parts)
        scales = parts["weight_scale"]
        groups = scales.numel() // out if scales.numel() > 1 else 1
        if bits in (4, 8) and groups and inputs % groups == 0 and scales.numel() in (1, out * groups):
            return None
        return f"integers of {bits} bits [{out}, {inputs}] and scales of {list(scales.shape)}"

    def has_numbers(self, parts: Parts) -> bool:
        if self._fp4(parts) is not None:
            return self.shape(parts)[1] // parts["weight_scale"].shape[1] % SHORTEST_CODED == 0
        return self._is_integer(parts) and super().has_numbers(parts)

    def read(self, parts: Parts) -> QuantizedWeight:
        if (packed := self._fp4(parts)) is not None:
            return fp4_weight(packed, scale_values(parts["weight_scale"]) * self._outer_scale(parts))
        return super().read(parts)

    def plain(self, parts: Parts) -> torch.Tensor:
        if self._fp4(parts) is not None:
            return self.read(parts).values()
        if self._is_integer(parts):
            return super().plain(parts)
        return fp8_values(parts["weight"], self._fp8_scales(parts), self.block)

    def dtype(self, parts: Parts) -> torch.dtype:
        return torch.bfloat16 if self._fp4(parts) is not None else parts["weight_scale"].dtype

    def bits_of(self, parts: Parts) -> int:
        packed = parts.get("weight_packed")
        return 8 if packed is None else 32 // -(-self.shape(parts)[1] // packed.shape[1])

    def numbers(self, parts: Parts) -> torch.Tensor:
        if "weight_packed" in parts:
            return unpack(parts["weight_packed"], self.bits_of(parts))[:, : self.shape(parts)[1]].contiguous()
        return parts["weight"].view(torch.uint8) ^ 128

    def shape(self, parts: Parts) -> tuple[int, int]:
        if (packed := self._fp4(parts)) is not None:
            return len(packed), 2 * packed.shape[1]
        if "weight_packed" in parts:
            return len(parts["weight_packed"]), int(parts["weight_shape"][1])
        out, inputs = parts["weight"].shape
        return out, inputs

    def groups(self, parts: Parts) -> Groups:
        bits, zeros, (out, _) = self.bits_of(parts), parts.get("weight_zero_point"), self.shape(parts)
        scales = parts["weight_scale"].float()
        scales = scales.view(out if scales.numel() > 1 else 1, -1).expand(out, -1).contiguous()
        if zeros is None:
            zeros = torch.full_like(scales, 1 << (bits - 1))
        elif zeros.dtype == torch.int8:
            zeros = (zeros.float() + (1 << (bits - 1))).expand_as(scales)
        else:
            zeros = unpack(zeros.T.contiguous(), bits).T[:out].float().contiguous()
        return Groups(scales, zeros, _order(parts.get("weight_g_idx"), scales.shape[1]))

    def _is_integer(self, parts: Parts) -> bool:
        return "weight_packed" in parts or parts["weight"].dtype == torch.int8

    def _fp4(self, parts: Parts) -> torch.Tensor | None:
        """Its numbers, if they are of FP4."""
        packed = parts.get("weight_packed", parts.get("weight"))
        return packed if packed is not None and packed.dtype == torch.uint8 else None

    def _fp8_scales(self, parts: Parts) -> torch.Tensor:
        return parts["weight_scale"]

    def _outer_scale(self, parts: Parts) -> torch.Tensor | float:
        return 1 / parts["weight_global_scale"].float() if "weight_global_scale" in parts else 1


class ModelOpt(CompressedTensors):
    method = "modelopt"
    needs = ("weight",)
    may_have = ("weight_scale_2", "input_scale")

    def _fp8_scales(self, parts: Parts) -> torch.Tensor:
        scales = parts["weight_scale"]
        if scales.dim() == 4:  # [out / rows, 1, in / columns, 1]
            return scales[:, 0, :, 0]
        return scales[:, None] if scales.dim() == 1 else scales

    def _outer_scale(self, parts: Parts) -> torch.Tensor | float:
        return parts["weight_scale_2"].float() if "weight_scale_2" in parts else 1


def form_of(config: Mapping[str, Any], name: str) -> Form:
    """The form that the `quantization_config` of the checkpoint `name` tells of.

    Raises:
        UnsupportedModelError: it is none of those known.
    """
    method, bits = config.get("quant_method"), config.get("bits")
    kind = str(config.get("checkpoint_format") or config.get("version") or config.get("format") or "").lower()
    others = {layer.get("bits", bits) for layer in (config.get("extra_config") or {}).values()}
    if method == "auto-round" and others <= {bits, 16}:  # 16: not quantized
        method = AUTO_ROUND.get(config.get("packing_format", ""), method)
    if method == "awq" and bits == 4 and kind in ("", "gemm"):
        return Awq()
    if method == "gptq" and bits in (4, 8) and kind in ("", "gptq", "gptq_v2") and not config.get("dynamic"):
        return Gptq(bits, 0 if kind == "gptq_v2" else 1)
    if method == "bitsandbytes" and config.get("load_in_4bit"):
        return BitsAndBytes()
    if method == "mxfp4":
        return Mxfp4()
    if method == "fp8":
        rows, columns = config.get("weight_block_size") or FP8_BLOCK
        return Fp8((rows, columns))
    if method == "compressed-tensors" and (compressed := _compressed(config)) is not None:
        return compressed
    if method == "modelopt":
        kind = str(config.get("quantization", config).get("quant_algo")).lower()
        if kind in MODELOPT:
            return ModelOpt((1, MX_GROUP) if kind == "mxfp8" else FP8_BLOCK)
    more = "".join(f", {word}" for word in (bits and f"{bits} bits", kind) if word)
    raise UnsupportedModelError(f"{name} is quantized ({method}{more}); of quantized checkpoints {SUPPORTED} are read")


def _compressed(config: Mapping[str, Any]) -> CompressedTensors | None:
    """None: weights are of numbers that are not known, or are more than rounded."""
    groups = [group.get("weights") or {} for group in config.get("config_groups", {}).values()]
    kinds = {(group.get("type", "int"), group.get("num_bits", 8)) for group in groups}
    blocks = {tuple(group["block_structure"]) for group in groups if group.get("block_structure")}
    of_fp8 = [group for group in groups if (group.get("type"), group.get("num_bits")) == ("float", 8)]
    blocks |= {(1, group["group_size"]) for group in of_fp8 if group.get("group_size")}
    blocks = blocks or {FP8_BLOCK}
    sparse = (config.get("sparsity_config") or {}).get("format", "dense") != "dense"
    known = {("int", 4), ("int", 8), ("float", 4), ("float", 8)}
    if kinds - known or len(blocks) > 1 or sparse or config.get("transform_config"):
        return None
    return CompressedTensors(blocks.pop())


def unpack(packed: torch.Tensor, bits: int, columns: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 ``[rows, columns * bits / 32]`` → uint8 ``[rows, columns]``. `columns`: those that an int32 has, the lowest
    bits first; None: in order."""
    order = torch.arange(32 // bits) if columns is None else torch.tensor(columns).argsort()
    return (packed[..., None] >> (bits * order).int()).bitwise_and_((1 << bits) - 1).to(torch.uint8).flatten(1)


def fp4_weight(packed: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """uint8 ``[out, …]``, two numbers in a byte, the first in its low half; scales fp32 ``[out, groups]``."""
    numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return QuantizedWeight(numbers, scales, None, torch.tensor(FP4))


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """fp32, of scales, or of exponents of 2 with a bias of 127."""
    if scales.dtype != torch.uint8:
        return scales.float()
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)


def fp8_values(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """fp32 ``[out, in]``: FP8 numbers times the scales of the whole, or of their rows or blocks."""
    scales = scale_values(scales)
    for dim, (size, length) in enumerate(zip(weight.shape, block, strict=True)):
        if scales.numel() > 1 and 1 < scales.shape[dim] < size:
            scales = scales.repeat_interleave(length, dim).narrow(dim, 0, size)
    return weight.float().mul_(scales)


def fp8_misfit(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> str | None:
    """`Form.misfit` of such numbers and scales."""
    shape = list(weight.shape)
    if weight.dtype != torch.float8_e4m3fn or len(shape) != 2:
        return f"a weight of {str(weight.dtype).removeprefix('torch.')} {shape}, not a matrix of float8_e4m3fn"
    known = [[-(-size // length), 1, size] for size, length in zip(shape, block, strict=True)]
    if scales.numel() == 1 or (
        scales.dim() == 2 and all(n in sizes for n, sizes in zip(scales.shape, known, strict=True))
    ):
        return None
    return f"a weight and scales of {shape} and {list(scales.shape)}, not in blocks of {block[0]} × {block[1]}"


def _misfit(parts: Parts, rows: int, columns: int) -> str | None:
    """`Form.misfit` of a qweight whose int32 have this many inputs, and qzeros with this many outputs."""
    qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    groups, out = scales.shape
    outputs = qweight.shape[1] * (columns if rows == 1 else 1)
    if outputs == out and qzeros.shape == (groups, out / columns) and len(qweight) * rows % groups == 0:
        return None
    return f"a qweight, qzeros and scales of {', '.join(str(list(x.shape)) for x in (qweight, qzeros, scales))}"


def _order(index: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """`Groups.order`, where each input has the number of its group."""
    if index is None or torch.equal(index.long(), torch.arange(len(index)) // (len(index) // groups)):
        return None
    return index.long()
