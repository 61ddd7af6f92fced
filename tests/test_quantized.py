"""Quantized models: the requested or detected quantization runs, that of a checkpoint exactly, or is refused with one
sentence."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from mainspring.benchmarks.architectures_media import THINKERS, join_talker
from mainspring.benchmarks.tiny_media import build
from mainspring.core.model.learn.verify import final_logits, paged_logits, random_sequences, schedule
from mainspring.core.model.learn.whole_match import make_whole
from mainspring.core.model.load import loader
from mainspring.core.model.load.loader import load_model
from mainspring.core.model.load.quantized import BITS, EXPANDED, PackedWeights, has_integers
from mainspring.core.model.load.quantized_forms import (
    AWQ_COLUMNS,
    Awq,
    BitsAndBytes,
    CompressedTensors,
    Fp8,
    Gptq,
    ModelOpt,
    Mxfp4,
    form_of,
    unpack,
)
from mainspring.core.model.run.paged_model import PagedModel
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.ipc.errors import InvalidArgumentError, MainspringError, ModelNotFoundError, UnsupportedModelError
from mainspring.kernels.contract import Backend
from mainspring.kernels.decoder_contract import FP4, NF4, QuantizedWeight
from mainspring.kernels.lazy_weight import LazyWeight
from mainspring.kernels.native import build as native_build
from mainspring.kernels.native import weights as native_weights
from mainspring.kernels.native.native_backend import NativeBackend
from mainspring.kernels.native.weights import FP4_KIND, PackedExperts, PanelWeight, pack_quantized, rounded_to_fp4
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from native_here import why_not
from quantized_folders import (
    AWQ,
    BNB,
    COMPRESSED,
    FP8,
    GPTQ,
    MODELOPT,
    Layer,
    Values,
    awq_of,
    bnb_of,
    compressed_of,
    fp4_of,
    fp8_of,
    gptq_of,
    make_awq,
    make_mxfp4,
    make_quantized,
    mxfp4_of,
    mxfp8_of,
    pack_columns,
    pack_in_order,
)

REASON = why_not()
needs_native = pytest.mark.skipif(REASON is not None, reason=str(REASON))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    return NativeBackend()


def load(path: Path, backend: Backend, quantization: str | None = None, **fields: Any) -> PagedModel:
    """Load a model as the worker does."""
    config = ModelConfig(model=str(path), quantization=quantization, **fields)  # type: ignore[arg-type]
    model = load_model(config, LoadConfig(), CPU, backend=backend)
    make_whole(model, backend, BITS.get(quantization or ""))
    return model


def logits_of(model: PagedModel, backend: Backend) -> torch.Tensor:
    sequences = random_sequences(model)
    return torch.cat(paged_logits(model, sequences, schedule([len(s) for s in sequences]), backend)).float()


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """Error of the middle row, in standard deviations."""
    return float(((got - want).square().mean(-1).sqrt() / want.std()).median())


def read(weights: PackedWeights, name: str) -> QuantizedWeight:
    return weights.tensor(name, Values).matrices[0].read()


# ------------------------------------------------------------------ AWQ


def test_eight_columns_lie_in_a_word_in_awqs_order() -> None:
    assert unpack(torch.tensor([[0x75316420]], dtype=torch.int32), 4, AWQ_COLUMNS).tolist() == [list(range(8))]
    numbers = torch.randint(0, 16, (5, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(unpack(pack_columns(numbers), 4, AWQ_COLUMNS), numbers)


@pytest.mark.parametrize("group", [32, 64, 128, 384])
def test_numbers_scales_and_zeros_are_read_as_they_are(group: int) -> None:
    weight = torch.randn(16, 384, generator=torch.Generator().manual_seed(group))
    tensors, values = awq_of(weight, group)
    named = {f"a.b.{kind}": tensor for kind, tensor in tensors.items()} | {"a.b.bias": torch.zeros(16)}
    weights = PackedWeights(named, Awq())
    assert list(weights) == ["a.b.weight"]
    assert torch.equal(weights.plain("a.b.weight"), values)
    numbers, scales, zeros, _ = read(weights, "a.b.weight")
    assert zeros is not None
    assert scales.shape == zeros.shape == (16, 384 // min(group, 128)), "inputs are rounded in groups of 128 at most"
    wide = (numbers.view(16, -1, min(group, 128)) - zeros[..., None]) * scales[..., None]
    assert torch.equal(wide.flatten(1).half(), values)


def test_of_a_single_file_and_an_index_the_file_is_read(tmp_path: Path) -> None:
    path, _, values = make_awq(tmp_path)
    tensors = load_file(path / "model.safetensors")
    earlier = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(earlier, path / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))

    def is_read(name: str, value: torch.Tensor) -> bool:
        model = load_model(ModelConfig(model=str(path)), LoadConfig(), CPU)
        return torch.equal(model.parameters.get(name), value)

    assert is_read(*next(iter(values.items())))
    (path / "model.safetensors").unlink()
    assert is_read("model.norm.weight", earlier["model.norm.weight"])
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no weights of .*: it has no model\.safetensors"):
        load_model(ModelConfig(model=str(path)), LoadConfig(), CPU)


def test_an_awq_checkpoint_is_built_as_the_plain_model_that_it_stands_for(tmp_path: Path) -> None:
    path, plain, values = make_awq(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    backend = ReferenceBackend()
    backend.pack, backend.packs_integers = Values, True  # type: ignore[method-assign]
    model = load_model(ModelConfig(model=str(path)), LoadConfig(), CPU, backend=backend)
    assert has_integers(model.model)
    assert model.dtype == torch.float16
    assert model.eos_token_ids == (7, 9)
    for name, value in values.items():
        assert torch.equal(model.parameters.get(name), value), name
    of_plain = load_model(ModelConfig(model=str(plain)), LoadConfig(), CPU)
    assert error_of(logits_of(model, backend), logits_of(of_plain, backend)) < 1e-3


@needs_native
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_an_awq_checkpoint_runs_with_its_own_numbers(
    native: NativeBackend, architecture: str, dtype: Any, tmp_path: Path
) -> None:
    path, plain, values = make_awq(tmp_path, architecture)
    model, exact = load(path, native, dtype=dtype), load(plain, native, dtype="float32")
    packed = model.whole.decoder.weights  # type: ignore[union-attr]
    quantized = [weight for weight in packed.values() if weight.kind == 4]
    # q, k and v are one weight there, and so are gate and up
    assert sum(weight.out_features * weight.in_features for weight in quantized) == sum(
        v.numel() for v in values.values()
    )
    name = "model.layers.1.mlp.down_proj.weight"
    down = packed[id(model.parameters.slot(name).tensor)].unpack()
    if dtype == "bfloat16":
        torch.testing.assert_close(down.half(), values[name], rtol=2**-8, atol=0)
    else:
        assert torch.equal(down.half(), values[name])
    assert error_of(logits_of(model, native), logits_of(exact, native)) < 0.05, "inputs are rounded to 8 bits"


@needs_native
def test_gate_and_up_that_a_checkpoint_has_merged_run_with_their_numbers(native: NativeBackend, tmp_path: Path) -> None:
    path, plain, _ = make_awq(tmp_path, "phi3")
    model = load(path, native)
    kinds = [weight.kind for weight in model.whole.decoder.weights.values()]  # type: ignore[union-attr]
    assert kinds.count(4) == 2 * 4
    assert error_of(logits_of(model, native), logits_of(load(plain, native), native)) < 0.05


@needs_native
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_quantized_model_is_read_with_all_its_parameters(
    native: NativeBackend, quantization: str | None, tmp_path: Path
) -> None:
    if quantization is None:
        path, _, values = make_awq(tmp_path)
    else:
        path = tiny.make("mixtral", tmp_path)
        values = load_file(path / "model.safetensors")
    model = load(path, native, quantization)
    with model.unpacked() as whole:
        found = sum(weight.numel() for weight in whole.parameters())
        assert not any(isinstance(weight, LazyWeight) for weight in whole.parameters())
    assert found >= sum(value.numel() for value in values.values())
    assert all(weight.numel() == 0 for weight in model.model.parameters() if id(weight) in model.parameters.packed)


@needs_native
def test_weights_that_make_keys_of_latents_can_be_set_where_they_were_quantized(
    native: NativeBackend, tmp_path: Path
) -> None:
    sizes = {"q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32, "moe_intermediate_size": 64}
    path, _, _ = make_awq(tmp_path, "deepseek_v3", ["mlp.gate.weight", "kv_a_proj"], sizes)
    model = load(path, native, dtype="float32")
    before, name = final_logits(model, native), "model.layers.1.self_attn.kv_b_proj.weight"
    assert not model.is_quantized
    model.parameters.set(name, model.parameters.get(name) * 2)
    assert not torch.equal(final_logits(model, native), before)


@needs_native
def test_a_joined_weight_of_which_a_part_is_plain_stays_plain(native: NativeBackend, tmp_path: Path) -> None:
    path, plain, _ = make_awq(tmp_path, but=["v_proj"], modules_to_not_convert=["v_proj"])
    model = load(path, native)
    kinds = [weight.kind for weight in model.whole.decoder.weights.values()]  # type: ignore[union-attr]
    assert kinds.count(4) == 2 * 3, "output, gate and up, and down"
    assert error_of(logits_of(model, native), logits_of(load(plain, native), native)) < 0.05


@needs_native
def test_a_warning_says_how_many_weights_become_plain_ones(
    native: NativeBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, plain, _ = make_quantized(tmp_path, lambda w: awq_of(w, 16 if w.shape[1] == 96 else 32), AWQ)
    with caplog.at_level(logging.WARNING):
        model = load(path, native)
    assert "2 of 14 quantized weights are computed with as plain ones" in caplog.text, "each layer's down"
    kinds = [weight.kind for weight in model.whole.decoder.weights.values()]  # type: ignore[union-attr]
    assert kinds.count(4) == 2 * 3
    assert error_of(logits_of(model, native), logits_of(load(plain, native), native)) < 0.05


@needs_native
def test_weights_that_the_model_lacks_are_left_out(native: NativeBackend, tmp_path: Path) -> None:
    """As plain ones are. Checkpoints bring layers that guess tokens."""
    path, plain, _ = make_awq(tmp_path)
    tensors = load_file(path / "model.safetensors")
    more = {name.replace("layers.1.", "layers.2."): x.clone() for name, x in tensors.items() if "layers.1." in name}
    save_file(tensors | more, path / "model.safetensors", metadata={"format": "pt"})
    model = load(path, native)
    kinds = [weight.kind for weight in model.whole.decoder.weights.values()]  # type: ignore[union-attr]
    assert kinds.count(4) == 2 * 4
    assert error_of(logits_of(model, native), logits_of(load(plain, native), native)) < 0.05


def test_tensors_that_do_not_fit_together_are_named() -> None:
    tensors, values = awq_of(torch.randn(8, 64), 16)
    weights = PackedWeights({f"a.{kind}": tensor for kind, tensor in tensors.items()}, Awq())
    assert not weights.has_numbers("a.weight"), "groups of 16 are too short for kernels"
    assert torch.equal(weights.plain("a.weight"), values)
    for end, wrong in (("scales", torch.ones(3, 8)), ("qzeros", torch.ones(4, 2).int())):
        with pytest.raises(UnsupportedModelError, match=r"'a' has a qweight, qzeros and scales of \["):
            PackedWeights({f"a.{kind}": tensor for kind, tensor in {**tensors, end: wrong}.items()}, Awq())
    del tensors["qzeros"]
    with pytest.raises(UnsupportedModelError, match=r"has 'a.qweight', but no 'a.qzeros'"):
        PackedWeights({f"a.{kind}": tensor for kind, tensor in tensors.items()}, Awq())


# ------------------------------------------------------------------ GPTQ

GPTQ_KINDS = [(4, True, 1), (4, False, 1), (4, False, 0), (8, True, 1), (8, True, 0)]


@pytest.mark.parametrize(("bits", "symmetric", "stored_less"), GPTQ_KINDS)
@pytest.mark.parametrize("group", [32, 64, 128, 384])
def test_a_weight_of_gptq_is_its_scale_times_the_number_less_its_zero(
    bits: int, symmetric: bool, stored_less: int, group: int
) -> None:
    weight = torch.randn(16, 384, generator=torch.Generator().manual_seed(group))
    weight[3] = weight[3].abs()  # its zero is 0, or 1
    weight[4] = -weight[4].abs()
    tensors, values = gptq_of(weight, group, bits, symmetric, stored_less)
    weights = PackedWeights({f"a.{end}": tensor for end, tensor in tensors.items()}, Gptq(bits, stored_less))
    assert torch.equal(weights.plain("a.weight"), values)
    # one by one, from the bits of the file
    for out, i in [(0, 0), (3, 383), (4, 100), (9, 31), (15, 200)]:
        per, g = 32 // bits, i // group
        number = (int(tensors["qweight"][i // per, out]) & 0xFFFFFFFF) >> bits * (i % per) & (1 << bits) - 1
        zero = (int(tensors["qzeros"][g, out // per]) & 0xFFFFFFFF) >> bits * (out % per) & (1 << bits) - 1
        value = float(tensors["scales"][g, out]) * (number - (zero + stored_less))
        assert float(values[out, i]) == pytest.approx(value, rel=1e-3)
    if bits == 4 and stored_less:
        tensors["qzeros"][:] = -1  # a zero of 16
        grouped = (read(weights, "a.weight").numbers.view(16, -1, group).float() - 16) * tensors["scales"].T[..., None]
        assert torch.equal(weights.plain("a.weight"), grouped.flatten(1).half())


@needs_native
@pytest.mark.parametrize(("bits", "symmetric", "stored_less"), GPTQ_KINDS)
def test_a_gptq_checkpoint_runs_with_its_own_numbers(
    native: NativeBackend, bits: int, symmetric: bool, stored_less: int, tmp_path: Path
) -> None:
    more = {"bits": bits, "sym": symmetric} | ({} if stored_less else {"checkpoint_format": "gptq_v2"})
    of_layer = partial(gptq_of, bits=bits, symmetric=symmetric, stored_less=stored_less)
    path, plain, values = make_quantized(tmp_path, of_layer, {**GPTQ, **more})
    model, exact = load(path, native, "gptq"), load(plain, native, dtype="float32")
    packed = model.whole.decoder.weights  # type: ignore[union-attr]
    assert [weight.kind for weight in packed.values()].count(bits) == 2 * 4
    for name, value in values.items():
        assert torch.equal(model.parameters.get(name).half(), value), name
    assert error_of(logits_of(model, native), logits_of(exact, native)) < 0.05, "inputs are rounded to 8 bits"


@needs_native
@pytest.mark.parametrize("packing", ["auto_gptq", "auto_awq"])
def test_auto_round_packs_as_one_of_two_others(native: NativeBackend, packing: str, tmp_path: Path) -> None:
    config = {"quant_method": "auto-round", "bits": 4, "packing_format": f"auto_round:{packing}"}
    path, plain, _ = make_quantized(tmp_path, gptq_of if packing == "auto_gptq" else awq_of, config)
    model, exact = load(path, native), load(plain, native, dtype="float32")
    assert model.is_quantized
    assert error_of(logits_of(model, native), logits_of(exact, native)) < 0.05, "inputs are rounded to 8 bits"
    with pytest.raises(UnsupportedModelError, match=r"\(auto-round, 4 bits\)"):
        form_of({**config, "extra_config": {"lm_head": {"bits": 16}, "model.layers.0.mlp.up_proj": {"bits": 8}}}, "a")


def test_weights_of_gptq_that_kernels_do_not_take_are_plain() -> None:
    def plain(form: Gptq, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        weights = PackedWeights({f"a.{end}": tensor for end, tensor in tensors.items()}, form)
        assert not weights.has_numbers("a.weight")
        return weights.plain("a.weight")

    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    tensors, values = gptq_of(weight, bits=8, symmetric=False)
    assert torch.equal(plain(Gptq(8, 1), tensors), values), "zeros of 8 bits that are not in the middle"
    tensors, values = gptq_of(weight, symmetric=False)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))  # of inputs; each keeps its group
    numbers = unpack(tensors["qweight"].T.contiguous(), 4)[:, order]
    turned = {"qweight": pack_in_order(numbers, 4).T.contiguous(), "g_idx": tensors["g_idx"][order]}
    assert torch.equal(plain(Gptq(4, 1), {**tensors, **turned}), values[:, order]), "act-order"
    with pytest.raises(UnsupportedModelError, match="'a' has a qweight, qzeros and scales of"):
        plain(Gptq(4, 1), {**tensors, "qzeros": torch.ones(2, 2).int()})


# ------------------------------------------------------------------ bitsandbytes


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("shape", "block"), [((16, 384), 64), ((100, 192), 128), ((6, 64), 128), ((24, 96), 64)])
def test_a_weight_of_bitsandbytes_is_its_code_times_the_scale_of_its_block(
    nested: bool, shape: tuple[int, int], block: int
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(block))
    tensors, values = bnb_of(weight, nested, block)
    named = {f"a.{end}": tensor for end, tensor in tensors.items()}
    weights = PackedWeights({**named, "b.weight": torch.zeros(3, 3)}, BitsAndBytes())
    assert list(weights) == ["a.weight"]
    assert "b.weight" not in weights.sources
    torch.testing.assert_close(weights.plain("a.weight"), values, rtol=1e-3, atol=0)
    group = math.gcd(shape[1], block)
    assert read(weights, "a.weight").scales.shape == (shape[0], shape[1] // group)


@needs_native
@pytest.mark.parametrize("nested", [False, True])
def test_a_bitsandbytes_checkpoint_runs_with_its_own_numbers(
    native: NativeBackend, nested: bool, tmp_path: Path
) -> None:
    path, plain, values = make_quantized(tmp_path, partial(bnb_of, nested=nested), BNB)
    for quantization in (None, "bitsandbytes"):
        model, exact = load(path, native, quantization), load(plain, native)
        kinds = [weight.kind for weight in model.whole.decoder.weights.values()]  # type: ignore[union-attr]
        assert kinds.count(NF4) == 2 * 4
        for name, value in values.items():
            torch.testing.assert_close(model.parameters.get(name).half(), value, rtol=1e-3, atol=0)
        assert error_of(logits_of(model, native), logits_of(exact, native)) < 2e-3


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bitsandbytes_as_an_option_rounds_the_linear_layers_but_the_last(
    native: NativeBackend, dtype: Any, tmp_path: Path
) -> None:
    path = tiny.make("qwen3", tmp_path / "plain")
    before = load(path, native, dtype=dtype)
    original = {name: before.parameters.get(name) for name in before.parameters.names()}
    model = load(path, native, "bitsandbytes", dtype=dtype)
    packed = model.whole.decoder.weights  # type: ignore[union-attr]
    assert [weight.kind for weight in packed.values()].count(NF4) == 2 * 4
    for name, weight in original.items():
        kept = weight.dim() != 2 or "layers" not in name
        rounded_to = weight if kept else bnb_of(weight)[1]
        torch.testing.assert_close(
            model.parameters.get(name).float(), rounded_to.float(), rtol=0 if kept else 2**-8, atol=0
        )
    nibbles = sum(weight.memory.nbytes for weight in packed.values() if weight.kind == NF4)
    assert nibbles < 0.65 * sum(x.numel() for name, x in original.items() if x.dim() == 2 and "layers" in name)
    config = {name: model.parameters.get(name) for name in original}
    save_file({name: x.contiguous() for name, x in config.items()}, path / "model.safetensors", {"format": "pt"})
    exact = logits_of(load(path, native, dtype=dtype), native)
    assert error_of(logits_of(model, native), exact) < {"bfloat16": 0.02, "float32": 1e-5}[dtype]


@needs_native
def test_rows_that_are_no_multiple_of_32_values_are_refused(native: NativeBackend, tmp_path: Path) -> None:
    path = tiny.make("llama", tmp_path, intermediate_size=80)
    with pytest.raises(UnsupportedModelError, match="rows of 80 values; for NF4 it must be a multiple of 32"):
        load(path, native, "bitsandbytes")


# ------------------------------------------------------------------ MXFP4


def test_a_weight_of_mxfp4_is_a_small_float_times_a_power_of_two() -> None:
    weight = torch.randn(3, 64, 24, generator=torch.Generator().manual_seed(0))
    tensors, values = mxfp4_of(weight)
    assert float((values - weight).abs().max()) < 1
    weights = PackedWeights({f"a.up_{end}": tensor for end, tensor in tensors.items()}, Mxfp4())
    assert list(weights) == ["a.up"]
    assert torch.equal(weights.plain("a.up"), values.bfloat16())
    assert torch.equal(weights.tensor("a.up", Values).values(), values.bfloat16())
    for expert, i, out in [(0, 0, 0), (1, 33, 5), (2, 63, 23)]:  # one by one, from the bits of the file
        byte = int(tensors["blocks"][expert, out, i // 32, i % 32 // 2])
        sign, exponent, mantissa = (bits := byte >> 4 * (i % 2) & 15) >> 3, bits >> 1 & 3, bits & 1
        size = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
        scale = 2.0 ** (int(tensors["scales"][expert, out, i // 32]) - 127)
        assert float(values[expert, i, out]) == (-size if sign else size) * scale
    with pytest.raises(UnsupportedModelError, match="not of 32 numbers in 16 bytes each"):
        PackedWeights({"a_blocks": tensors["blocks"][..., :8], "a_scales": tensors["scales"]}, Mxfp4())


@needs_native
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_experts_of_gpt_oss_run_with_their_own_numbers(native: NativeBackend, dtype: Any, tmp_path: Path) -> None:
    path, plain, values = make_mxfp4(tmp_path)
    model, exact = load(path, native, dtype=dtype), load(plain, native, dtype=dtype)
    packed = [w for w in model.whole.decoder.weights.values() if isinstance(w, PackedExperts)]  # type: ignore[union-attr]
    assert [{panel.kind for panel in experts.panels} for experts in packed] == [{FP4_KIND}] * 2 * 2
    for name, value in values.items():
        assert torch.equal(model.parameters.get(name).bfloat16(), value), name
    assert error_of(logits_of(model, native), logits_of(exact, native)) < 0.05, "inputs are rounded to 8 bits"


@needs_native
@pytest.mark.parametrize("odd", [0, 1, -1])
def test_experts_of_mxfp4_may_lie_in_memory_in_two_ways(
    native: NativeBackend, odd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where fp16 has not all scales of one of them; rows for it take more memory than those for others."""
    path, plain, _ = make_mxfp4(tmp_path)
    count, made = load(plain, native).config.num_local_experts, 0

    def fits(weight: QuantizedWeight) -> bool:
        nonlocal made
        made += 1
        return (made - 1) % count != odd % count

    exact = logits_of(load(plain, native), native)
    monkeypatch.setattr(native_weights, "_fits_fp4", fits)
    model = load(path, native)
    packed = [w for w in model.whole.decoder.weights.values() if isinstance(w, PackedExperts)]  # type: ignore[union-attr]
    assert {panel.kind for experts in packed for panel in experts.panels} == {FP4_KIND, NF4}
    assert error_of(logits_of(model, native), exact) < 0.05, "inputs are rounded to 8 bits"


@needs_native
def test_a_weight_in_mxfp4_that_is_changed_is_rounded_to_it_again(native: NativeBackend, tmp_path: Path) -> None:
    path, _, values = make_mxfp4(tmp_path)
    model = load(path, native)
    before, name = logits_of(model, native), next(iter(values))
    for factor in (2.0, 0.5):
        with model.unpacked():
            model.parameters.slot(name).tensor.data.mul_(factor)
        assert torch.equal(model.parameters.get(name).bfloat16(), values[name] * (2 if factor > 1 else 1))
    assert torch.equal(logits_of(model, native), before)


def test_fp4_is_rounded_to_the_nearest() -> None:
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    weight[1, :32], weight[2, 32:64] = 0, torch.tensor(FP4).repeat(2) * 4
    values = rounded_to_fp4(weight, 32).values()
    top = weight.unflatten(1, (3, 32)).abs().amax(-1, keepdim=True).expand(5, 3, 32).flatten(1)
    assert bool(((values - weight).abs() <= top / 3).all())  # between 4 and 6, of 6 at most and more than 3
    assert torch.equal(values[1, :32], weight[1, :32])
    assert torch.equal(values[2, 32:64], weight[2, 32:64])
    assert torch.equal(rounded_to_fp4(values, 32).values(), values)


@needs_native
def test_scales_of_mxfp4_that_fp16_has_not_are_kept_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (40, 96), generator=generator, dtype=torch.uint8)
    scales = torch.ldexp(torch.ones(40, 3), torch.randint(-22, 17, (40, 3), generator=generator))
    library = native_build.load()
    for small, zero, kind in ((False, False, FP4_KIND), (True, False, NF4), (True, True, FP4_KIND)):
        scales[7, 1] = 2.0 ** (-127 if small else 0)
        numbers[7, 32:64] = numbers[7, 32:64] & 8 if zero else 1
        weight = QuantizedWeight(numbers, scales, None, torch.tensor(FP4))
        packed = pack_quantized(library, weight, torch.float32)
        assert packed.kind == kind
        assert torch.equal(packed.unpack(), weight.values())


# ------------------------------------------------------------------ FP8


@pytest.mark.parametrize("block", [(32, 48), (128, 128), None])
def test_a_weight_of_fp8_is_its_number_times_the_scale_of_its_block(block: tuple[int, int] | None) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    tensors, values = fp8_of(weight, block)
    named = {f"a.{end}": tensor for end, tensor in tensors.items()} | {"a.activation_scale": torch.ones(())}
    weights = PackedWeights(named, Fp8(block or (128, 128)))
    assert not weights.has_numbers("a.weight"), "kernels do not take FP8"
    assert weights.sources == set(named)
    assert torch.equal(weights.plain("a.weight").half(), values)
    whole = {"a.weight": tensors["weight"], "a.weight_scale_inv": torch.tensor(0.5)}
    assert torch.equal(PackedWeights(whole, Fp8((128, 128))).plain("a.weight"), tensors["weight"].float() / 2)
    for wrong in ({"a.weight_scale_inv": torch.ones(3, 3)}, {"a.weight": weight}):
        with pytest.raises(UnsupportedModelError, match="'a' has a weight "):
            PackedWeights({**named, **wrong}, Fp8((32, 48)))


@needs_native
@pytest.mark.parametrize("quantization", [None, "fp8", "int8"])
def test_an_fp8_checkpoint_is_the_plain_model_that_it_stands_for(
    native: NativeBackend, quantization: str | None, tmp_path: Path
) -> None:
    path, plain, values = make_quantized(tmp_path, fp8_of, FP8)
    model = load(path, native, quantization, dtype="float16")
    exact = load(plain, native, "int8" if quantization == "int8" else None, dtype="float16")
    for name in values:
        assert torch.equal(model.parameters.get(name), exact.parameters.get(name)), name
    assert torch.equal(logits_of(model, native), logits_of(exact, native))


# ------------------------------------------------------------------ compressed-tensors

COMPRESSED_KINDS = [(4, 32, True), (4, 32, False), (4, None, True), (8, 32, True), (8, None, True), (16, None, True)]


@pytest.mark.parametrize(("bits", "group", "symmetric"), COMPRESSED_KINDS)
def test_a_weight_of_compressed_tensors_is_its_scale_times_its_integer(
    bits: int, group: int | None, symmetric: bool
) -> None:
    weight = torch.randn(16, 384, generator=torch.Generator().manual_seed(bits))
    tensors, values = compressed_of(weight, bits, group, symmetric)
    named = {f"a.{end}": tensor for end, tensor in tensors.items()} | {"a.input_scale": torch.ones(1)}
    weights = PackedWeights(named, CompressedTensors((128, 128)))
    assert weights.sources == set(named)
    assert torch.equal(weights.plain("a.weight"), values)
    assert read(weights, "a.weight").scales.shape[1] == 384 // min(group or 384, 128)
    others = {**named, "a.weight_scale": torch.ones(16, 24)}
    others.pop("a.weight_zero_point", None)
    short = PackedWeights(others, CompressedTensors((128, 128)))
    assert not short.has_numbers("a.weight"), "groups of 16 are too short for kernels"
    with pytest.raises(UnsupportedModelError, match=r"'a' has integers of . bits \[16, 384\] and scales of \[16, 25\]"):
        PackedWeights({**named, "a.weight_scale": torch.ones(16, 25)}, CompressedTensors((128, 128)))
    if group == 32 and symmetric:
        turned = {**named, "a.weight_g_idx": torch.arange(384).flip(0).int() // 32}
        scales = tensors["weight_scale"].float()[..., None]
        integers = (values.float().view(16, 12, 32) / scales).round()
        flipped = PackedWeights(turned, CompressedTensors((128, 128))).plain("a.weight")
        assert torch.equal(flipped, (integers * scales.flip(1)).half().flatten(1)), "act-order"


@needs_native
@pytest.mark.parametrize(("bits", "group", "symmetric"), COMPRESSED_KINDS)
def test_a_checkpoint_of_compressed_tensors_runs_with_its_own_numbers(
    native: NativeBackend, bits: int, group: int | None, symmetric: bool, tmp_path: Path
) -> None:
    of_layer = partial(compressed_of, bits=bits, group=group, symmetric=symmetric)
    path, plain, values = make_quantized(tmp_path, of_layer, COMPRESSED)
    model, exact = load(path, native), load(plain, native, dtype="float32")
    packed = model.whole.decoder.weights  # type: ignore[union-attr]
    assert [weight.kind for weight in packed.values()].count(min(bits, 8)) == 2 * 4
    for name, value in values.items():
        torch.testing.assert_close(model.parameters.get(name).half(), value, rtol=1e-3, atol=0)
    assert error_of(logits_of(model, native), logits_of(exact, native)) < 0.05, "inputs are rounded to 8 bits"


@needs_native
@pytest.mark.parametrize("other", [{"bits": 8}, {"group": 64}], ids=str)
def test_joined_weights_that_are_quantized_in_different_ways_become_plain_ones(
    native: NativeBackend, other: dict[str, int], tmp_path: Path
) -> None:
    layers = itertools.count()

    def of_layer(weight: torch.Tensor) -> Layer:
        return compressed_of(weight, **(other if next(layers) % 7 in (1, 3) else {}))  # of gate and key

    path, plain, values = make_quantized(tmp_path, of_layer, COMPRESSED)
    model, exact = load(path, native, dtype="float32"), load(plain, native, dtype="float32")
    kinds = [weight.kind for weight in model.whole.decoder.weights.values()]  # type: ignore[union-attr]
    assert kinds.count(0) == 2 * 2 + 1, "what is joined, and the output layer"
    for name, value in values.items():
        torch.testing.assert_close(model.parameters.get(name).half(), value, rtol=1e-3, atol=0)
    assert error_of(logits_of(model, native), logits_of(exact, native)) < 0.05, "inputs are rounded to 8 bits"


@needs_native
def test_quantized_weights_outside_of_the_layers_are_expanded(native: NativeBackend, tmp_path: Path) -> None:
    path, plain, _ = make_quantized(tmp_path, compressed_of, COMPRESSED)
    name = "model.embed_tokens.weight"
    for folder in (path, plain):
        tensors = load_file(folder / "model.safetensors")
        layer, value = compressed_of(tensors.pop(name))
        parts = {f"{name.removesuffix('weight')}{end}": part for end, part in layer.items()}
        more = {name: value} if folder == plain else parts
        save_file({**tensors, **more}, folder / "model.safetensors", metadata={"format": "pt"})
    model, exact = load(path, native), load(plain, native, dtype="float32")
    assert torch.equal(model.parameters.get(name), exact.parameters.get(name).half())
    assert not any(isinstance(weight, LazyWeight) for weight in model.model.parameters())
    assert error_of(logits_of(model, native), logits_of(exact, native)) < 0.05


@needs_native
def test_fp8_of_compressed_tensors_has_a_scale_for_each_row(native: NativeBackend, tmp_path: Path) -> None:
    of_layer = partial(fp8_of, block=None, end="weight_scale")
    path, plain, _ = make_quantized(tmp_path, of_layer, {**COMPRESSED, "format": "float-quantized"})
    logits = [logits_of(load(each, native, dtype="float16"), native) for each in (path, plain)]
    assert torch.equal(*logits)


# ------------------------------------------------------------------ FP4 and FP8 of compressed-tensors and ModelOpt

FP4_GROUPS = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}}
MXFP8_GROUPS = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "group_size": 32}}}}


@pytest.mark.parametrize("form", [CompressedTensors((128, 128)), ModelOpt((128, 128))], ids=lambda form: form.method)
@pytest.mark.parametrize("group", [16, 32])
def test_a_weight_of_fp4_is_its_number_times_two_scales(form: CompressedTensors, group: int) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    tensors, values = fp4_of(weight, form.method, group)
    named = {f"a.{end}": tensor for end, tensor in tensors.items()}
    weights = PackedWeights(named, form)
    assert weights.sources == set(named)
    assert torch.equal(weights.plain("a.weight"), values)
    assert weights.has_numbers("a.weight")
    with pytest.raises(UnsupportedModelError, match=r"'a' has FP4 numbers and scales of \[40, 48\] and \[40, 7\]"):
        PackedWeights({**named, "a.weight_scale": tensors["weight_scale"].repeat(1, 3)[:, :7]}, form)


@needs_native
@pytest.mark.parametrize("maker", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("group", [16, 32])
def test_a_checkpoint_of_fp4_is_the_plain_model_that_it_stands_for(
    native: NativeBackend, maker: str, group: int, tmp_path: Path
) -> None:
    config = MODELOPT if maker == "modelopt" else {**COMPRESSED, **FP4_GROUPS}
    path, plain, values = make_quantized(tmp_path, partial(fp4_of, maker=maker, group=group), config)
    model, exact = (load(each, native, dtype="float32") for each in (path, plain))
    for name, value in values.items():
        torch.testing.assert_close(model.parameters.get(name).half(), value, rtol=1e-3, atol=0)
    packed = model.whole.decoder.weights  # type: ignore[union-attr]
    kinds = [weight.kind for weight in packed.values()]
    assert (kinds.count(FP4_KIND), kinds.count(NF4)) == ((2 * 3, 2) if group == 32 else (0, 2 * 4)), (
        "gate and up are NF4's"
    )
    # those of FP4 round their inputs to 8 bits
    assert error_of(logits_of(model, native), logits_of(exact, native)) < (0.05 if group == 32 else 1e-3)


@needs_native
@pytest.mark.parametrize("rows", ["one scale", "rows", "blocks", "groups"])
def test_fp8_of_modelopt_has_scales_of_several_shapes(native: NativeBackend, rows: str, tmp_path: Path) -> None:
    def of_layer(weight: torch.Tensor) -> Layer:
        if rows == "groups":
            return mxfp8_of(weight)
        blocks = {"one scale": (*weight.shape,), "rows": None, "blocks": (128, 128)}[rows]
        tensors, values = fp8_of(weight, blocks, "weight_scale")
        shape = {"one scale": (), "rows": (-1,), "blocks": (len(tensors["weight_scale"]), 1, -1, 1)}[rows]
        return {**tensors, "weight_scale": tensors["weight_scale"].view(shape)}, values

    algorithm = {"one scale": "FP8", "rows": "fp8_per_channel_per_token", "blocks": "fp8_pb_wo", "groups": "MXFP8"}[
        rows
    ]
    path, plain, _ = make_quantized(tmp_path, of_layer, {**MODELOPT, "quant_algo": algorithm})
    logits = [logits_of(load(each, native, dtype="float16"), native) for each in (path, plain)]
    assert torch.equal(*logits)


@needs_native
def test_exponents_of_compressed_tensors_scale_fp8(native: NativeBackend, tmp_path: Path) -> None:
    path, plain, _ = make_quantized(tmp_path, mxfp8_of, {**COMPRESSED, **MXFP8_GROUPS})
    logits = [logits_of(load(each, native, dtype="float16"), native) for each in (path, plain)]
    assert torch.equal(*logits)


def test_groups_of_integers_say_nothing_about_blocks_of_fp8() -> None:
    integers, floats = {"type": "int", "num_bits": 8, "group_size": 32}, {"type": "float", "num_bits": 8}
    parts = {"a": {"weights": integers}, "b": {"weights": {**floats, "block_structure": [64, 64]}}}
    assert form_of({**COMPRESSED, "config_groups": parts}, "x") == CompressedTensors((64, 64))


@needs_native
def test_modelopt_may_tell_of_its_form_in_a_file_of_its_own(native: NativeBackend, tmp_path: Path) -> None:
    path, plain, _ = make_quantized(tmp_path, partial(fp4_of, maker="modelopt"), MODELOPT)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (path / "hf_quant_config.json").write_text(json.dumps(told))
    model, exact = (load(each, native, dtype="float32") for each in (path, plain))
    assert error_of(logits_of(model, native), logits_of(exact, native)) < 1e-3
    told["quantization"]["quant_algo"] = "W4A8_AWQ"  # type: ignore[index]
    (path / "hf_quant_config.json").write_text(json.dumps(told))
    with pytest.raises(UnsupportedModelError, match=r"quantized \(modelopt, w4a8_awq\)"):
        load(path, native)
    told["quantization"]["quant_algo"] = None  # type: ignore[index]
    (plain / "hf_quant_config.json").write_text(json.dumps(told))
    assert not load(plain, native).is_quantized, "only the cache is"


# ------------------------------------------------------------------ media


@needs_native
@pytest.mark.parametrize(("kind", "part"), [("qwen2_vl", ""), ("qwen2_vl", "text_config"), ("qwen2_5_omni", "")])
def test_the_config_of_a_model_with_media_tells_in_one_of_several_places_that_it_is_quantized(
    native: NativeBackend, kind: str, part: str, tmp_path: Path
) -> None:
    build(THINKERS.get(kind, kind))[0].half().save_pretrained(tmp_path)
    if kind in THINKERS:
        join_talker(tmp_path, kind)
    tensors, values = load_file(tmp_path / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [each for each in tensors if re.match(r"(thinker\.)?model\.layers\..*proj\.weight", each)]:
        layer, values[name] = awq_of(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{end}": tensor.contiguous() for end, tensor in layer.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (config[part] if part else config)["quantization_config"] = AWQ
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path, native)
    assert model.is_quantized
    found = [name for name in model.parameters.names() if re.search(r"\.layers\..*down_proj", name)]
    expected = [value for name, value in values.items() if "down_proj" in name]
    for name, value in zip(found, expected, strict=True):
        torch.testing.assert_close(model.parameters.get(name).half(), value, rtol=2**-8, atol=0)


# ------------------------------------------------------------------ experts


@needs_native
@pytest.mark.parametrize(
    ("of_layer", "config", "kind"),
    [
        (awq_of, AWQ, 4),
        (gptq_of, GPTQ, 4),
        (bnb_of, BNB, NF4),
        (partial(compressed_of, bits=16, group=None), COMPRESSED, 8),
        (partial(fp4_of, maker="modelopt"), MODELOPT, NF4),
    ],
)
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_experts_of_a_checkpoint_run_with_their_own_numbers(
    native: NativeBackend, of_layer: Any, config: dict[str, Any], kind: int, architecture: str, tmp_path: Path
) -> None:
    sizes = {"moe_intermediate_size": 64} if architecture == "qwen3_moe" else {"intermediate_size": 64}
    path, plain, values = make_quantized(tmp_path, of_layer, config, architecture, ["gate.weight"], **sizes)
    assert any(".experts.3." in name for name in values)
    model, exact = load(path, native), load(plain, native, dtype="float32")
    weights = list(model.whole.decoder.weights.values())  # type: ignore[union-attr]
    packed = [w for w in weights if isinstance(w, PackedExperts)]
    assert [{panel.kind for panel in experts.panels} for experts in packed] == [{kind}] * 2 * 2
    assert sum(isinstance(w, PanelWeight) and w.kind == kind for w in weights) == 2 * 2, "of attention"
    wide = {name: exact.parameters.get(name) for name in exact.parameters.names() if ".experts." in name}
    for name, value in wide.items():
        torch.testing.assert_close(model.parameters.get(name).float(), value, rtol=1e-3, atol=0)
    assert error_of(logits_of(model, native), logits_of(exact, native)) < 0.05, "inputs are rounded to 8 bits"


@needs_native
def test_experts_of_which_some_are_plain_stay_plain(native: NativeBackend, tmp_path: Path) -> None:
    path, plain, _ = make_quantized(
        tmp_path,
        awq_of,
        AWQ,
        "mixtral",
        ["gate.weight", "0.block_sparse_moe.experts.2.", "1.block_sparse_moe.experts.3.w1"],
    )
    model = load(path, native)
    weights = model.whole.decoder.weights.values()  # type: ignore[union-attr]
    kinds = [{panel.kind for panel in w.panels} for w in weights if isinstance(w, PackedExperts)]
    assert kinds == [{2}, {2}, {2}, {4}], "fp16, and the second layer's down"
    assert error_of(logits_of(model, native), logits_of(load(plain, native), native)) < 0.05


# ------------------------------------------------------------------ by option


@needs_native
@pytest.mark.parametrize(
    ("quantization", "kinds", "error"),
    [("int8", {8}, 0.05), ("int8-dynamic", {8}, 0.06), ("int4", {4, 8}, 0.5)],
)
def test_weights_are_quantized_as_they_are_loaded(
    native: NativeBackend, quantization: str, kinds: set[int], error: float, tmp_path: Path
) -> None:
    path = tiny.make("qwen3", tmp_path)
    model = load(path, native, quantization)
    assert {weight.kind for weight in model.whole.decoder.weights.values()} == kinds  # type: ignore[union-attr]
    assert 1e-4 < error_of(logits_of(model, native), logits_of(load(path, native), native)) < error


@needs_native
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_that_will_be_rounded_are_not_joined_before(
    native: NativeBackend, architecture: str, quantization: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.make(architecture, tmp_path)
    config = ModelConfig(model=str(path), quantization=quantization)
    model = load_model(config, LoadConfig(), CPU, backend=native)
    assert sum(isinstance(weight, LazyWeight) for weight in model.model.parameters()) == 2 * 2
    logits = logits_of(load(path, native, quantization), native)
    monkeypatch.setattr(loader, "MAPPED", ())
    model = load_model(config, LoadConfig(), CPU, backend=native)
    assert not any(isinstance(weight, LazyWeight) for weight in model.model.parameters())
    assert torch.equal(logits, logits_of(load(path, native, quantization), native))


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize("quantization", ["int8", "int8-dynamic", "int4", "bitsandbytes"])
def test_a_backend_that_cannot_says_so(quantization: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"quantization is '{quantization}', which needs the native backend"):
        load(tiny.make("llama", tmp_path), ReferenceBackend(), quantization)


@needs_native
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_what_does_not_run_as_a_whole_computes_with_plain_weights_and_says_so(
    native: NativeBackend, architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, plain, _ = make_awq(tmp_path, architecture)
    backend = ReferenceBackend() if architecture == "llama" else native
    with caplog.at_level(logging.WARNING):
        model = load(path, backend)
    assert EXPANDED in caplog.text
    assert not model.is_quantized
    assert torch.equal(logits_of(model, backend), logits_of(load(plain, backend), backend))


@needs_native
@pytest.mark.parametrize(
    ("settings", "asked", "error", "words"),
    [
        ({"quant_method": "gptq"}, None, UnsupportedModelError, r"quantized \(gptq, 4 bits, gemm\)"),
        ({"quant_method": "gptq", "version": None, "bits": 3}, None, UnsupportedModelError, r"\(gptq, 3 bits\)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, None, UnsupportedModelError, r"\(bitsandbytes, "),
        ({"bits": 8}, None, UnsupportedModelError, r"\(awq, 8 bits, gemm\); of quantized checkpoints AWQ's"),
        ({"version": "gemv"}, "awq", UnsupportedModelError, "gemv"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None, UnsupportedModelError, "holds no such weights"),
        ({}, "int8", InvalidArgumentError, "a checkpoint of awq, quantized already"),
        ({}, "int8-dynamic", InvalidArgumentError, "a checkpoint of awq, quantized already"),
        ({}, "bitsandbytes", InvalidArgumentError, "a checkpoint of awq, quantized already"),
        ({"quant_method": None}, "awq", UnsupportedModelError, "quantized"),
    ],
)
def test_a_checkpoint_that_does_not_match_the_request_is_refused(
    native: NativeBackend,
    settings: dict[str, Any],
    asked: str | None,
    error: type[MainspringError],
    words: str,
    tmp_path: Path,
) -> None:
    path, plain, _ = make_awq(tmp_path, **settings)
    with pytest.raises(error, match=words):
        load(path, native, asked)
    for form in ("awq", "gptq"):
        with pytest.raises(InvalidArgumentError, match=f"quantization is '{form}', but .* is no checkpoint of that"):
            load(plain, native, form)


@needs_native
def test_a_model_of_unknown_layers_is_not_quantized(native: NativeBackend, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel can't be quantized: "):
        load(tiny.make("gpt2", tmp_path), native, "int8")
