"""Quantized models: the requested or detected quantization runs, AWQ exactly, or is refused with one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from mainspring.core.model.learn.verify import paged_logits, random_sequences, schedule
from mainspring.core.model.learn.whole_match import make_whole
from mainspring.core.model.load.loader import load_model
from mainspring.core.model.load.quantized import BITS, AwqWeights, JoinedWeights, unpack
from mainspring.core.model.run.paged_model import PagedModel
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.ipc.errors import InvalidArgumentError, MainspringError, UnsupportedModelError
from mainspring.kernels.contract import Backend
from mainspring.kernels.native.native_backend import NativeBackend
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from native_here import why_not

REASON = why_not()
needs_native = pytest.mark.skipif(REASON is not None, reason=str(REASON))
CPU = torch.device("cpu")
GROUP = 32
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    return NativeBackend()


def pack_columns(numbers: torch.Tensor) -> torch.Tensor:
    """Pack as AutoAWQ does: integers below 16, ``[rows, columns]`` → int32 ``[rows, columns / 8]``."""
    packed = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int64)
    for i, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
        packed |= numbers[:, column::8].long() << 4 * i
    return packed.to(torch.int32)  # wraps


def awq_of(weight: torch.Tensor, group: int = GROUP) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The three tensors of a linear layer, and the weight ``[out, in]`` that they encode."""
    grouped = weight.float().view(len(weight), -1, group)
    low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    numbers = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    stands_for = ((numbers - zeros[..., None]) * scales.float()[..., None]).flatten(1).half()
    tensors = {
        "qweight": pack_columns(numbers.flatten(1).T),
        "qzeros": pack_columns(zeros.T),
        "scales": scales.T.contiguous(),
    }
    return tensors, stands_for


def make_awq(
    folder: Path, architecture: str = "llama", but: Sequence[str] = (), **settings: Any
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """An AWQ checkpoint, the equivalent plain one, and the values of its quantized weights."""
    plain = tiny.make(architecture, folder / "plain", dtype=torch.float16)
    tensors = load_file(plain / "model.safetensors")
    awq: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        path = name.removesuffix(".weight")
        if tensor.dim() == 2 and "layers" in name and not any(part in name for part in but):
            of_layer, values[name] = awq_of(tensor)
            awq |= {f"{path}.{kind}": part for kind, part in of_layer.items()}
        else:
            awq[name] = tensor
    save_file({**tensors, **values}, plain / "model.safetensors", metadata={"format": "pt"})
    quantized = folder / "awq"
    quantized.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": {**AWQ, **settings}}))
    save_file(awq, quantized / "model.safetensors", metadata={"format": "pt"})
    return quantized, plain, values


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


# ------------------------------------------------------------------ AWQ


def test_eight_columns_lie_in_a_word_in_awqs_order() -> None:
    assert unpack(torch.tensor([[0x75316420]], dtype=torch.int32)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    numbers = torch.randint(0, 16, (5, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(unpack(pack_columns(numbers)), numbers)


@pytest.mark.parametrize("group", [32, 64, 128, 384])
def test_numbers_scales_and_zeros_are_read_as_they_are(group: int) -> None:
    weight = torch.randn(16, 384, generator=torch.Generator().manual_seed(group))
    tensors, values = awq_of(weight, group)
    weights = AwqWeights({f"a.b.{kind}": tensor for kind, tensor in tensors.items()} | {"a.b.bias": torch.zeros(16)})
    assert list(weights) == ["a.b.weight"]
    assert torch.equal(weights.plain("a.b.weight"), values)
    numbers, scales, zeros = weights["a.b.weight"]
    assert scales.shape == zeros.shape == (16, 384 // min(group, 128)), "inputs are rounded in groups of 128 at most"
    wide = (numbers.view(16, -1, min(group, 128)) - zeros[..., None]) * scales[..., None]
    assert torch.equal(wide.flatten(1).half(), values)


def test_an_awq_checkpoint_is_built_as_the_plain_model_that_it_stands_for(tmp_path: Path) -> None:
    path, plain, values = make_awq(tmp_path)
    backend = ReferenceBackend()
    backend.name = "native"
    model = load_model(ModelConfig(model=str(path)), LoadConfig(), CPU, backend=backend)
    assert model.dtype == torch.float16
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
def test_a_joined_weight_of_which_a_part_is_plain_stays_plain(native: NativeBackend, tmp_path: Path) -> None:
    path, plain, _ = make_awq(tmp_path, but=["v_proj"], modules_to_not_convert=["v_proj"])
    model = load(path, native)
    kinds = [weight.kind for weight in model.whole.decoder.weights.values()]  # type: ignore[union-attr]
    assert kinds.count(4) == 2 * 3, "output, gate and up, and down"
    assert error_of(logits_of(model, native), logits_of(load(plain, native), native)) < 0.05


def test_weights_that_the_model_lacks_are_named(tmp_path: Path) -> None:
    weights = AwqWeights({f"model.other.{kind}": t for kind, t in awq_of(torch.randn(8, 32))[0].items()})
    model = load_model(ModelConfig(model=str(tiny.make("llama", tmp_path))), LoadConfig(), CPU)
    with pytest.raises(UnsupportedModelError, match=r"no parameter 'model.other.weight'"):
        JoinedWeights(weights, model.parameters)


def test_tensors_that_do_not_fit_together_are_named() -> None:
    tensors, _ = awq_of(torch.randn(8, 64), 16)
    with pytest.raises(UnsupportedModelError, match=r"'a' has .* a group must be a multiple of 32"):
        AwqWeights({f"a.{kind}": tensor for kind, tensor in tensors.items()})
    del tensors["qzeros"]
    with pytest.raises(UnsupportedModelError, match=r"has 'a.qweight', but no 'a.qzeros'"):
        AwqWeights({f"a.{kind}": tensor for kind, tensor in tensors.items()})


# ------------------------------------------------------------------ by option


@needs_native
@pytest.mark.parametrize(("quantization", "kinds", "error"), [("int8", {8}, 0.05), ("int4", {4, 8}, 0.5)])
def test_weights_are_quantized_as_they_are_loaded(
    native: NativeBackend, quantization: str, kinds: set[int], error: float, tmp_path: Path
) -> None:
    path = tiny.make("qwen3", tmp_path)
    model = load(path, native, quantization)
    assert {weight.kind for weight in model.whole.decoder.weights.values()} == kinds  # type: ignore[union-attr]
    assert 1e-4 < error_of(logits_of(model, native), logits_of(load(path, native), native)) < error


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize("quantization", ["int8", "int4", "awq"])
def test_a_backend_that_cannot_says_so(quantization: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"quantization is '{quantization}', which needs the native backend"):
        load(tiny.make("llama", tmp_path), ReferenceBackend(), quantization)
    path, _, _ = make_awq(tmp_path / "of awq")
    with pytest.raises(UnsupportedModelError, match="which needs the native backend on a CPU; this is the reference"):
        load(path, ReferenceBackend())


@needs_native
@pytest.mark.parametrize(
    ("settings", "asked", "error", "words"),
    [
        ({"quant_method": "gptq"}, None, UnsupportedModelError, r"quantized \(gptq, 4 bits, gemm\)"),
        ({"bits": 8}, None, UnsupportedModelError, "of 4 bits in gemm form"),
        ({"version": "gemv"}, "awq", UnsupportedModelError, "gemv"),
        ({}, "int8", InvalidArgumentError, "an AWQ checkpoint, quantized already"),
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
    with pytest.raises(InvalidArgumentError, match="is no AWQ checkpoint"):
        load(plain, native, "awq")


@needs_native
def test_a_model_of_unknown_layers_is_not_quantized(native: NativeBackend, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel can't be quantized: "):
        load(tiny.make("gpt2", tmp_path), native, "int8")
