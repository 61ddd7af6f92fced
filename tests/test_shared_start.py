"""Data that one worker's start gives to another: matching parts of a checkpoint, and the decisions of the first
worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import tiny
from mainspring.core.model.learn import fuse
from mainspring.core.model.learn.verify import Chunk, paged_logits
from mainspring.core.model.load import sliced_reading
from mainspring.core.model.load.loader import build_model, load_model, read_config
from mainspring.core.plan.control import Explain
from mainspring.core.worker import worker
from mainspring.core.worker.make_worker import make_worker
from mainspring.core.worker.worker import Decisions
from mainspring.ipc.codec import decode_value, encode_value
from mainspring.ipc.config import CacheConfig, DeviceConfig, EngineConfig, LoadConfig, ModelConfig
from mainspring.ipc.errors import UnsupportedModelError
from mainspring.kernels.reference.reference_backend import ReferenceBackend

CPU = torch.device("cpu")
INNER = 96  # intermediate size of tiny's models
HALF = slice(INNER // 2, INNER)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("models") / "llama")


def half_of_mlp(name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """The second half of every MLP."""
    if "gate_proj" in name or "up_proj" in name:
        assert shape[0] == INNER
        return (HALF,)
    return (slice(None), HALF) if "down_proj" in name else None


def build(path: Path, slices_of: Any = None) -> PreTrainedModel:
    wanted = ModelConfig(model=str(path))
    return build_model(read_config(wanted, LoadConfig()), wanted, LoadConfig(), CPU, slices_of=slices_of)


def halved(whole: PreTrainedModel) -> PreTrainedModel:
    """A model with half the MLP, whose weights are cut after loading."""
    config = AutoConfig.for_model(**{**whole.config.to_dict(), "intermediate_size": INNER // 2})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    weights = {}
    for name, tensor in whole.state_dict().items():
        part = half_of_mlp(name, tuple(tensor.shape))
        weights[name] = tensor if part is None else tensor[part]
    model.load_state_dict(weights)
    return model


def test_half_the_rows_of_one_parameter_are_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, asked, read = "model.layers.1.mlp.up_proj.weight", {}, []

    def slices_of(name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        asked[name] = shape
        return (slice(0, INNER // 2),) if name == cut else None

    own = sliced_reading._Part.__getitem__

    def noted(part: Any, index: Any) -> torch.Tensor:
        read.append(own(part, index))
        return read[-1]

    monkeypatch.setattr(sliced_reading._Part, "__getitem__", noted)
    model, whole = build(llama, slices_of).state_dict(), build(llama).state_dict()
    assert asked == {name: tuple(tensor.shape) for name, tensor in whole.items()}
    assert [tensor.shape for tensor in read] == [(INNER // 2, 64)]
    assert torch.equal(model[cut], whole[cut][: INNER // 2])
    assert all(torch.equal(model[name], whole[name]) for name in whole if name != cut)


def test_a_model_of_parts_is_loaded_fused_and_verified(llama: Path) -> None:
    backend, ids = ReferenceBackend(), torch.arange(2, 30)
    model = load_model(ModelConfig(model=str(llama)), LoadConfig(), CPU, slices_of=half_of_mlp)
    assert any("gated_mlp: 2 fused" in line for line in model.explain())
    assert model.parameters.get("model.layers.0.mlp.gate_proj.weight").shape == (INNER // 2, 64)
    with torch.inference_mode():
        want = halved(build(llama))(input_ids=ids[None]).logits[0]
    (got,) = paged_logits(model, [ids], [[Chunk(0, 0, len(ids))]], backend)
    assert (got - want).abs().max() <= 1e-4 * want.std()


def test_parts_are_cut_before_tensors_are_joined(tmp_path: Path) -> None:
    """The experts of a mixture are separate tensors in the checkpoint and one parameter in the model."""
    path, names = tiny.make("mixtral", tmp_path), []

    def slices_of(name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        names.append(name)
        if name.endswith(("w1.weight", "w3.weight")):
            return (HALF,)
        return (slice(None), HALF) if name.endswith("w2.weight") else None

    whole, model = build(path), build(path, slices_of)
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in names
    experts: Any = whole.get_submodule("model.layers.0.mlp.experts")
    cut: Any = model.get_submodule("model.layers.0.mlp.experts")
    assert torch.equal(cut.gate_up_proj, torch.cat([part[:, HALF] for part in experts.gate_up_proj.chunk(2, 1)], 1))
    assert torch.equal(cut.down_proj, experts.down_proj[..., HALF])


def test_after_a_load_of_parts_models_load_whole(llama: Path, tmp_path: Path) -> None:
    before = vars(PreTrainedModel)["_load_pretrained_model"]
    build(llama, half_of_mlp)
    assert vars(PreTrainedModel)["_load_pretrained_model"] is before
    assert build(llama).get_parameter("model.layers.0.mlp.up_proj.weight").shape == (INNER, 64)
    whole = build(llama)
    whole.config.save_pretrained(tmp_path)
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="files are not safetensors"):
        build(tmp_path, half_of_mlp)


# ------------------------------------------------------------------ decisions


def config_of(path: Path, **cache: Any) -> EngineConfig:
    return EngineConfig(
        model_config=ModelConfig(model=str(path)),
        cache_config=CacheConfig(**cache),
        device_config=DeviceConfig(attention_backend="reference"),
    )


def test_a_second_worker_reuses_the_decisions_of_the_first(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_worker(config_of(llama, kv_cache_memory_bytes=1 << 20))
    found = first.decisions
    assert (found.num_blocks, found.max_model_len) == (first.facts.num_blocks, first.facts.max_model_len) != (0, 0)
    assert any(decision.fused for decision in found.fusing.values())

    sent = encode_value(found)
    assert bytes(encode_value(decode_value(sent, Decisions))) == bytes(sent)
    monkeypatch.setattr(worker, "count_blocks", None)
    monkeypatch.setattr(fuse.Fusion, "decide", None)
    for given in (found, decode_value(sent, Decisions), decode_value(sent)):
        # a rank with less memory; the decisions must not depend on it
        second = make_worker(config_of(llama, kv_cache_memory_bytes=1 << 12), given)
        assert bytes(encode_value(second.decisions)) == bytes(sent)
        assert second.facts == first.facts
        assert second.control(Explain()) == first.control(Explain())


def test_invalid_decisions_are_refused(llama: Path) -> None:
    with pytest.raises(msgspec.ValidationError):
        make_worker(config_of(llama), {"fusing": {"model.norm": 3}})
