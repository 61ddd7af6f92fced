"""Layers whose weights are in host memory, tested on a stand-in for a GPU, whose parallel copies are done at once or as
late as possible."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import references
import tiny
from late_device import LateDevice
from mainspring import LLMEngine, LoRARequest, SamplingParams
from mainspring.core.model.load import loader
from mainspring.core.model.run.streamed_layers import StreamedLayers, stream_layers
from mainspring.core.worker import generation_worker, worker
from mainspring.core.worker.worker import tensors_of
from mainspring.ipc.errors import UnsupportedModelError
from peft_folders import make_lora
from plain import collect, make_engine
from plain import run as run_jobs
from test_exact import DEFAULT_BLOCKS, NUM_BLOCKS, SETTINGS, requests
from test_late_device import late, run  # noqa: F401  # a fixture
from tiers import fast_only

LAYERS = 6
PROMPT = {"prompt_token_ids": list(range(5, 45))}
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)


@pytest.fixture(params=fast_only([False], [True, False]), ids=["at once", "late"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[LateDevice]:
    """The devices that weights are streamed to; a CPU counts as a GPU."""
    devices: list[LateDevice] = []

    def make(device: torch.device) -> LateDevice:
        devices.append(LateDevice(device))
        devices[-1].hasty = request.param
        return devices[-1]

    monkeypatch.setattr(loader, "device_for", make)
    monkeypatch.setattr(
        generation_worker, "offloaded_bytes", lambda config, _: int(config.cache_config.cpu_offload_gb * 2**30)
    )
    return devices


def layer_bytes(path: Path) -> int:
    weights = load_file(path / "model.safetensors")
    return sum(t.numel() * t.dtype.itemsize for name, t in weights.items() if re.search(r"\.(layers|h)\.0\.", name))


def streamed_of(engine: LLMEngine) -> StreamedLayers:
    return engine.engine_core.core.worker._model.streamed  # type: ignore[attr-defined, no-any-return]


def tokens(engine: LLMEngine) -> list[int]:
    return list(run_jobs(engine, {"x": (PROMPT, PARAMS)})["x"].outputs[0].token_ids)  # type: ignore[dict-item]


def make_path(folder: Path, architecture: str = "llama", **overrides: Any) -> Path:
    return tiny.make(architecture, folder, num_hidden_layers=LAYERS, **overrides)


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [
        ("llama", 1),
        pytest.param("llama", 100, marks=pytest.mark.slow),
        pytest.param("gpt2", 2, marks=pytest.mark.slow),
        pytest.param("mixtral", 1, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_generate(
    architecture: str,
    layers: int,
    tmp_path: Path,
    late: list[LateDevice],  # noqa: F811
    streams: list[LateDevice],
) -> None:
    path, reqs = make_path(tmp_path, architecture), requests(tiny.VOCAB_SIZE)
    blocks = NUM_BLOCKS.get(architecture, DEFAULT_BLOCKS)
    size = (layers - 0.5) * layer_bytes(path) / 2**30
    got, engine = run(path, reqs, num_gpu_blocks_override=blocks, cpu_offload_gb=size, **SETTINGS)
    assert got == references.greedy(path, reqs)
    assert len(streamed_of(engine)._layers) == min(layers + 2, LAYERS)
    assert late[-1].num_replays > 20
    assert len(streams) == 1


def test_with_drafts_and_guesses_too(tmp_path: Path, streams: list[LateDevice]) -> None:
    path = make_path(tmp_path)
    guesses = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    draft = {"speculative_config": {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}}
    found = []
    for more in ({}, {"cpu_offload_gb": 1.0}, {"cpu_offload_gb": 1.0, **guesses}, {"cpu_offload_gb": 1.0, **draft}):
        with make_engine(path, skip_tokenizer_init=True, **more) as engine:
            found.append(tokens(engine))
    assert len(streams) == 3
    assert found == found[:1] * 4


def test_new_weights_and_a_look_at_the_model_reach_them(tmp_path: Path, streams: list[LateDevice]) -> None:
    old, new = make_path(tmp_path / "old"), make_path(tmp_path / "new", seed=1)
    weights = load_file(new / "model.safetensors")
    with make_engine(new, skip_tokenizer_init=True) as engine:
        wanted = tokens(engine)
    with make_engine(old, skip_tokenizer_init=True, cpu_offload_gb=1.0) as engine:
        before = tokens(engine)
        assert len(streamed_of(engine)._layers) == LAYERS
        engine.update_weights(weights.items(), version="1")
        assert tokens(engine) == wanted != before

        def differences(module: torch.nn.Module) -> float:
            state = module.state_dict()
            return sum(float((state[name] - values).abs().max()) for name, values in weights.items())

        assert engine.apply_model(differences) == [0.0]
        # its changes are kept
        engine.apply_model(lambda module: [p.data.zero_() for p in module.model.layers[3].parameters()] and None)
        engine.reset_prefix_cache()
        changed = tokens(engine)
        assert changed != wanted
        assert tokens(engine) == changed


def test_two_checkpoints_have_two_fingerprints_though_only_streamed_weights_differ(
    tmp_path: Path, streams: list[LateDevice]
) -> None:
    path = make_path(tmp_path)
    found = []
    for _ in range(2):
        with make_engine(path, skip_tokenizer_init=True, cpu_offload_gb=1.0) as engine:
            found.append(engine.engine_core.core.worker.facts.model.fingerprint)  # type: ignore[attr-defined]
        weights = load_file(path / "model.safetensors")
        weights["model.layers.2.mlp.up_proj.weight"] += 1
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert found[0] != found[1]


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_with_its_weights(
    level: int, tmp_path: Path, streams: list[LateDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "device_for", LateDevice)
    with make_engine(make_path(tmp_path), skip_tokenizer_init=True, cpu_offload_gb=1.0) as engine:
        before = tokens(engine)
        engine.sleep(level)
        assert not streamed_of(engine)._places
        asleep = engine.engine_core.core.worker  # type: ignore[attr-defined]
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(asleep._model.model)}
        assert places <= {0, *(memory.data_ptr() for memory in asleep._on_host)}
        engine.wake_up()
        assert tokens(engine) == before
        streamed = streamed_of(engine)
        assert streamed._places
    assert len(streams) == level


def test_a_forward_that_fails_half_way_spoils_none_after_it(tmp_path: Path, streams: list[LateDevice]) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_path(tmp_path)).eval()
    ids = torch.arange(5, 25).view(1, -1)
    with torch.inference_mode():
        wanted = model(ids).logits
        stream_layers(model, 1 << 30, loader.device_for(torch.device("cpu")))
        handle = model.model.layers[3].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(ids)
        handle.remove()
        assert torch.equal(model(ids).logits, wanted)
        layer = model.model.layers[1]  # alone, and then all together
        layer(model.model.embed_tokens(ids), position_embeddings=model.model.rotary_emb(wanted, torch.arange(20)[None]))
        assert torch.equal(model(ids).logits, wanted)


class Aside(torch.nn.Module):
    """A module that calls a layer's parts itself."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, hidden, **kwargs)


def test_a_model_that_runs_layers_without_calling_them_is_refused(
    tmp_path: Path, streams: list[LateDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_path(tmp_path)).eval().requires_grad_(False)
    streamed, _ = stream_layers(model, 1 << 30, loader.device_for(torch.device("cpu")))
    model.model.layers = torch.nn.ModuleList(Aside(layer) for layer in model.model.layers)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM runs layers without calling them"):
        loader.page(model, streamed=streamed)


def test_parameters_that_layers_share_stay_and_a_model_without_layers_is_refused(streams: list[LateDevice]) -> None:
    device = loader.device_for(torch.device("cpu"))
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
    for layer in layers:
        layer.bias = layers[0].bias
    streamed, note = stream_layers(model := torch.nn.Sequential(layers), 512, device)
    assert list(streamed.weights) == [id(layers[i].weight) for i in (0, 1, 2, 3)]
    assert "4 of 4 layers" in note
    assert model[0][0].bias.shape == (8,)
    with pytest.raises(UnsupportedModelError, match="cpu_offload_gb is set, and Linear has no list of layers"):
        stream_layers(torch.nn.Linear(2, 2), 1, device)


def test_adapters_change_them_before_and_after_sleep(tmp_path: Path, streams: list[LateDevice]) -> None:
    path = make_path(tmp_path / "model")
    folder = make_lora(path, tmp_path / "lora", 1, r=4, lora_alpha=16, target_modules=["q_proj", "o_proj", "down_proj"])
    lora, found = LoRARequest("adapter", 1, str(folder)), []
    for more in ({}, {"cpu_offload_gb": 1.0}):
        with make_engine(path, skip_tokenizer_init=True, enable_lora=True, max_lora_rank=8, **more) as engine:
            for asleep in (False, True):
                if asleep:
                    engine.sleep(2)
                    engine.wake_up()
                engine.add_request("with", PROMPT, PARAMS, lora_request=lora)  # type: ignore[arg-type]
                engine.add_request("without", PROMPT, PARAMS)  # type: ignore[arg-type]
                outputs = {name: seen[-1].outputs[0].token_ids for name, seen in collect(engine).items()}
                assert outputs["with"] != outputs["without"]
                found.append(outputs)
    assert found == found[:1] * 4
