"""Products in float32 where torch's own of 16-bit numbers are slow."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from mainspring.core.model.run.encoder import EncoderModel
from mainspring.core.model.run.float_products import PRODUCTS, fast_products
from mainspring.kernels.contract import SequenceOffsets

CPU = torch.device("cpu")


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: False, raising=False)
    return request.param


@torch.inference_mode()
def test_modules_compute_in_float32_and_give_their_type(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 14, 14, dtype=dtype)
    layers = [nn.Conv2d(3, 8, 7, 7, dtype=dtype), nn.Flatten(), nn.Linear(32, 16, dtype=dtype)]
    with fast_products(CPU, dtype):
        found = [x]
        for layer in layers:
            found.append(layer(found[-1]))
        scores = found[-1] @ found[-1].T
    assert {each.dtype for each in (*found, scores)} == {dtype}
    for layer, before, after in zip(layers, found, found[1:], strict=False):
        assert torch.equal(after, layer.float()(before.float()).to(dtype))
    assert torch.equal(scores, (found[-1].float() @ found[-1].float().T).to(dtype))


def test_only_products_are_changed(dtype: torch.dtype) -> None:
    called = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if any(isinstance(x, torch.Tensor) and x.dtype == torch.float32 for x in args):
                called.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(4, 4, dtype=dtype)
    with Seen(), fast_products(CPU, dtype):
        torch.softmax(x * x + x, -1)
        assert not called
        torch.matmul(x, x)
    assert set(called) & PRODUCTS == {torch.matmul}


@torch.inference_mode()
def test_encoders_of_texts_compute_in_float32(dtype: torch.dtype) -> None:
    types = set()

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types_, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is nn.functional.linear:
                types.add(args[0].dtype)
            return func(*args, **(kwargs or {}))

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = EncoderModel(BertModel(BertConfig(**sizes, intermediate_size=48)).to(dtype).eval())
    with Seen():
        hidden = encoder.forward(np.arange(5), SequenceOffsets.of([3, 2], range(2)), [0, 0])
    assert (hidden.dtype, types) == (dtype, {torch.float32})


def test_where_the_processor_has_instructions_and_for_float32_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    for device, dtype in ((CPU, torch.bfloat16), (CPU, torch.float32), (torch.device("cuda"), torch.bfloat16)):
        assert isinstance(fast_products(device, dtype), nullcontext)
