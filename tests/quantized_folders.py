"""Quantized checkpoints as AutoAWQ, AutoGPTQ, bitsandbytes, compressed-tensors and the makers of models write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import tiny
from mainspring.kernels.decoder_contract import QuantizedWeight

GROUP = 32
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 48]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# QLoRA, appendix E
NORMAL_FLOATS = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip
Layer = tuple[dict[str, torch.Tensor], torch.Tensor]  # tensors by the end of their names; the weight [out, in]


class Values:
    """A packed weight that is not packed."""

    made = given_back = 0

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        Values.made += 1
        self._values = weight.values().to(dtype)

    def unpack(self) -> torch.Tensor:
        return self._values

    def give_back(self) -> None:
        Values.given_back += 1


def pack_columns(numbers: torch.Tensor) -> torch.Tensor:
    """Pack as AutoAWQ does: integers below 16, ``[rows, columns]`` → int32 ``[rows, columns / 8]``."""
    packed = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int64)
    for i, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
        packed |= numbers[:, column::8].long() << 4 * i
    return packed.to(torch.int32)  # wraps


def pack_in_order(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack as AutoGPTQ does: ``[rows, columns]`` → int32 ``[rows, columns * bits / 32]``."""
    per = 32 // bits
    packed = torch.zeros(len(numbers), numbers.shape[1] // per, dtype=torch.int64)
    for i in range(per):
        packed |= numbers[:, i::per].long() << bits * i
    return packed.to(torch.int32)


def rounded(weight: torch.Tensor, group: int, bits: int = 4, symmetric: bool = False) -> tuple[torch.Tensor, ...]:
    """Numbers ``[out, groups, group]``, scales and zeros ``[out, groups]``, and the weight that they encode."""
    grouped, top = weight.float().view(len(weight), -1, group), (1 << bits) - 1
    low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / top).half()
    zeros = torch.full_like(low, (top + 1) // 2) if symmetric else (-low / scales.float()).round().clamp(0, top)
    numbers = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    stands_for = ((numbers - zeros[..., None]) * scales.float()[..., None]).flatten(1).half()
    return numbers, scales, zeros, stands_for


def awq_of(weight: torch.Tensor, group: int = GROUP) -> Layer:
    numbers, scales, zeros, stands_for = rounded(weight, group)
    tensors = {
        "qweight": pack_columns(numbers.flatten(1).T),
        "qzeros": pack_columns(zeros.T),
        "scales": scales.T.contiguous(),
    }
    return tensors, stands_for


def gptq_of(
    weight: torch.Tensor, group: int = GROUP, bits: int = 4, symmetric: bool = True, stored_less: int = 1
) -> Layer:
    numbers, scales, zeros, stands_for = rounded(weight, group, bits, symmetric)
    tensors = {
        "qweight": pack_in_order(numbers.flatten(1), bits).T.contiguous(),
        "qzeros": pack_in_order((zeros.T - stored_less).clamp_min(0), bits),  # a zero of 0 can't be stored less one
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // group).int(),
    }
    if stored_less:
        zeros = zeros.clamp_min(1)
        stands_for = ((numbers - zeros[..., None]) * scales.float()[..., None]).flatten(1).half()
    return tensors, stands_for


def bnb_of(weight: torch.Tensor, nested: bool = False, block: int = 64) -> Layer:
    blocks = weight.float().flatten().view(-1, block)  # which may end in the next row
    absmax = blocks.abs().amax(1)
    codes = (blocks / absmax[:, None]).sub(NORMAL_FLOATS[:, None, None]).abs().argmin(0)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float16", "shape": list(weight.shape)}
    tensors = {
        "weight": (codes.flatten()[::2] << 4 | codes.flatten()[1::2]).to(torch.uint8)[:, None],
        "weight.quant_map": NORMAL_FLOATS,
        "weight.absmax": absmax,
    }
    if nested:
        offset, table = absmax.mean(), torch.linspace(-1, 1, 256)
        inner = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        outer = inner.abs().amax(1)
        index = (inner / outer[:, None]).sub(table[:, None, None]).abs().argmin(0)
        absmax = ((table[index] * outer[:, None]).flatten() + offset)[: len(absmax)]
        tensors |= {
            "weight.absmax": index.flatten()[: len(absmax)].to(torch.uint8),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": table,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = text
    return tensors, (NORMAL_FLOATS[codes] * absmax[:, None]).view(weight.shape).half()


def fp8_of(weight: torch.Tensor, block: tuple[int, int] | None = (32, 48), end: str = "weight_scale_inv") -> Layer:
    """block: of rows and columns that have a scale; None: each row has one."""
    rows, columns = block or (1, weight.shape[1])
    spread = (-len(weight) % rows, -weight.shape[1] % columns)
    padded = torch.nn.functional.pad(weight.float(), (0, spread[1], 0, spread[0]))
    blocks = padded.view(len(padded) // rows, rows, -1, columns)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    numbers = (blocks / scales).to(torch.float8_e4m3fn)
    stands_for = (numbers.float() * scales).view_as(padded)[: len(weight), : weight.shape[1]].half()
    numbers = numbers.view_as(padded)[: len(weight), : weight.shape[1]].contiguous()
    return {"weight": numbers, end: scales[:, 0, :, 0].contiguous()}, stands_for


def compressed_of(weight: torch.Tensor, bits: int = 4, group: int | None = GROUP, symmetric: bool = True) -> Layer:
    """bits: 4 or 8, packed; 16 stands for int8 that is not packed. group: None is a whole row."""
    packed, bits = bits < 16, min(bits, 8)
    numbers, scales, zeros, _ = rounded(weight, group or weight.shape[1], bits, symmetric)
    stands_for = ((numbers - zeros[..., None]) * scales.float()[..., None]).flatten(1).half()
    numbers = numbers.flatten(1)
    if not packed:
        return {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}, stands_for
    tensors = {
        "weight_packed": pack_in_order(numbers, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_in_order(zeros.T, bits).T.contiguous()
    return tensors, stands_for


def rounded_to_fp4(groups: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[…, groups, group]`` and a scale for each group → two numbers in a byte, and what all stand for."""
    scaled = groups / scales[..., None]
    codes = (scaled.abs()[..., None] - FP4_VALUES).abs().argmin(-1)
    stands_for = FP4_VALUES[codes] * scaled.sign() * scales[..., None]
    codes = codes + 8 * (scaled < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), stands_for


def mxfp4_of(weight: torch.Tensor) -> Layer:
    """Of experts ``[experts, in, out]``."""
    groups = weight.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    blocks, stands_for = rounded_to_fp4(groups, exponents.exp2())
    tensors = {"blocks": blocks, "scales": (exponents + 127).to(torch.uint8)}
    return tensors, stands_for.flatten(2).transpose(1, 2).contiguous()


def fp4_of(weight: torch.Tensor, maker: str = "compressed-tensors", group: int = 16) -> Layer:
    """NVFP4, or with groups of 32 MXFP4, of one of two makers."""
    groups = weight.float().view(len(weight), -1, group)
    tensors = {}
    if group == 32:
        exponents = groups.abs().amax(-1).log2().floor() - 2
        scales, tensors["weight_scale"] = exponents.exp2(), (exponents + 127).to(torch.uint8)
    else:
        outer = weight.float().abs().max() / (6 * 448)
        tensors["weight_scale"] = (groups.abs().amax(-1) / (6 * outer)).to(torch.float8_e4m3fn)
        if maker == "modelopt":
            tensors["weight_scale_2"] = outer
        else:
            tensors["weight_global_scale"] = outer = 1 / outer.view(1)
            outer = 1 / outer
        scales = tensors["weight_scale"].float() * outer
    packed, stands_for = rounded_to_fp4(groups, scales)
    tensors["weight" if maker == "modelopt" else "weight_packed"] = packed.flatten(1)
    tensors["input_scale" if maker == "modelopt" else "input_global_scale"] = torch.ones(1)
    return tensors, stands_for.flatten(1)


def mxfp8_of(weight: torch.Tensor) -> Layer:
    groups = weight.float().view(len(weight), -1, 32)
    exponents = groups.abs().amax(-1).log2().floor() - 8
    numbers = (groups / exponents.exp2()[..., None]).to(torch.float8_e4m3fn)
    tensors = {"weight": numbers.flatten(1), "weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, (numbers.float() * exponents.exp2()[..., None]).flatten(1)


def make_mxfp4(folder: Path, **fields: Any) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """As `make_quantized`, of gpt-oss."""
    return make_quantized(folder, mxfp4_of, MXFP4, "gpt_oss", dim=3, before_end="_", dtype=torch.bfloat16, **fields)


def make_quantized(
    folder: Path,
    of_layer: Callable[[torch.Tensor], Layer],
    config: Mapping[str, Any],
    architecture: str = "llama",
    but: Sequence[str] = (),
    dim: int = 2,
    before_end: str = ".",
    dtype: torch.dtype = torch.float16,
    **fields: Any,
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A quantized checkpoint, the equivalent plain one, and the values of its quantized weights, those that have so
    many dimensions."""
    plain = tiny.make(architecture, folder / "plain", dtype=dtype, **fields)
    tensors = load_file(plain / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        path = name.removesuffix(".weight")
        if tensor.dim() == dim and "layers" in name and not any(part in name for part in but):
            layer, value = of_layer(tensor)
            values[name] = value.to(dtype)
            packed |= {f"{path}{before_end}{end}": part.contiguous().clone() for end, part in layer.items()}
        else:
            packed[name] = tensor
    save_file({**tensors, **values}, plain / "model.safetensors", metadata={"format": "pt"})
    quantized = folder / str(config["quant_method"])
    quantized.mkdir()
    text = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**text, "quantization_config": dict(config)}))
    save_file(packed, quantized / "model.safetensors", metadata={"format": "pt"})
    return quantized, plain, values


def make_awq(
    folder: Path, architecture: str = "llama", but: Sequence[str] = (), fields: Mapping[str, Any] = {}, **settings: Any
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    return make_quantized(folder, awq_of, {**AWQ, **settings}, architecture, but, **fields)
