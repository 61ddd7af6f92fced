"""Data that one worker's start gives to another: matching parts of a checkpoint, and the decisions of the first
worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import tiny
from mainspring.core.model.learn import fuse
from mainspring.core.model.load import sliced_reading
from mainspring.core.model.load.loader import build_model, read_config
from mainspring.core.parallel.cuts import Cut
from mainspring.core.plan.control import Explain
from mainspring.core.worker import worker
from mainspring.core.worker.make_worker import make_worker
from mainspring.core.worker.worker import Decisions
from mainspring.ipc.codec import decode_value, encode_value
from mainspring.ipc.config import CacheConfig, DeviceConfig, EngineConfig, LoadConfig, ModelConfig
from mainspring.ipc.errors import UnsupportedModelError

CPU = torch.device("cpu")
INNER = 96  # intermediate size of tiny's models


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("models") / "llama")


def half(dim: int) -> Cut:
    return Cut(dim, ((INNER // 2, INNER),), INNER)


def half_of_mlp(model: nn.Module) -> dict[str, Cut]:
    """The second half of every MLP."""
    names = [name for name, _ in model.named_parameters() if ".mlp." in name]
    return {name: half(1 if "down_proj" in name else 0) for name in names}


def build(path: Path, cuts_of: Any = None) -> PreTrainedModel:
    wanted = ModelConfig(model=str(path))
    return build_model(read_config(wanted, LoadConfig()), wanted, LoadConfig(), CPU, cuts_of=cuts_of)


def halved(whole: PreTrainedModel) -> PreTrainedModel:
    """A model with half the MLP, whose weights are cut after loading."""
    config = AutoConfig.for_model(**{**whole.config.to_dict(), "intermediate_size": INNER // 2})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    weights = {}
    for name, tensor in whole.state_dict().items():
        cut = half_of_mlp(whole).get(name)
        weights[name] = tensor if cut is None else cut.of(tensor)
    model.load_state_dict(weights)
    return model


def test_half_the_rows_of_one_parameter_are_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, read = "model.layers.1.mlp.up_proj.weight", []
    own = sliced_reading._Part.__getitem__

    def noted(part: Any, index: Any) -> torch.Tensor:
        read.append(own(part, index))
        return read[-1]

    monkeypatch.setattr(sliced_reading._Part, "__getitem__", noted)
    model, whole = build(llama, lambda model: {name: half(0)}).state_dict(), build(llama).state_dict()
    assert [tensor.shape for tensor in read] == [(INNER // 2, 64)]
    assert torch.equal(model[name], whole[name][INNER // 2 :])
    assert all(torch.equal(model[other], whole[other]) for other in whole if other != name)


def test_tensors_that_are_joined_are_cut_afterwards(tmp_path: Path) -> None:
    """The experts of a mixture are separate tensors in the checkpoint and one parameter in the model."""
    path = tiny.make("mixtral", tmp_path)
    twice = Cut(1, ((INNER // 2, INNER), (3 * INNER // 2, 2 * INNER)), 2 * INNER)
    experts = "model.layers.0.mlp.experts"
    whole = build(path)
    model = build(path, lambda model: {f"{experts}.gate_up_proj": twice, f"{experts}.down_proj": half(2)})
    own: Any = whole.get_submodule(experts)
    cut: Any = model.get_submodule(experts)
    halves = [part[:, INNER // 2 :] for part in own.gate_up_proj.chunk(2, 1)]
    assert torch.equal(cut.gate_up_proj, torch.cat(halves, 1))
    assert torch.equal(cut.down_proj, own.down_proj[..., INNER // 2 :])


def test_after_a_load_of_parts_models_load_whole(llama: Path, tmp_path: Path) -> None:
    before = vars(PreTrainedModel)["_load_pretrained_model"]
    build(llama, half_of_mlp)
    assert vars(PreTrainedModel)["_load_pretrained_model"] is before
    assert build(llama).get_parameter("model.layers.0.mlp.up_proj.weight").shape == (INNER, 64)


def test_files_that_are_not_safetensors_are_cut_as_they_are_set(llama: Path, tmp_path: Path) -> None:
    whole = build(llama)
    whole.config.save_pretrained(tmp_path)
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    cut = build(tmp_path, half_of_mlp).get_parameter("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(cut, whole.get_parameter("model.layers.0.mlp.down_proj.weight")[:, INNER // 2 :])


def test_parts_of_what_the_config_does_not_describe_are_refused(tmp_path: Path) -> None:
    """As the whole is: here parts of 96 rows could be read of the 128 that there are."""
    path = tiny.make("llama", tmp_path, intermediate_size=128)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": INNER}))
    message = r"'model\.layers\.0\.mlp\.down_proj\.weight' has shape \[64, 128\]"
    for cuts_of in (half_of_mlp, None):
        with pytest.raises(UnsupportedModelError, match=message):
            build(path, cuts_of)


def test_a_rank_notices_that_one_of_its_experts_is_missing(tmp_path: Path) -> None:
    path = tiny.make("mixtral", tmp_path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if "layers.0." in name and ".experts.3." in name]:
        del tensors[name]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    experts = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    with pytest.raises(UnsupportedModelError, match=rf"'{experts[1]}' has shape \[1, 64, 96\]"):
        build(path, lambda model: dict.fromkeys(experts, Cut(0, ((2, 4),), 4)))


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
