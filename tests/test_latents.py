"""Attention over latents: what is recognised, what the cache holds, and changes of the weights it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM

import peft_folders
import references
import tiny
from mainspring import EngineArgs, LLMEngine, LoRARequest, SamplingParams
from mainspring.core.model.learn import verify
from mainspring.core.model.load.loader import page
from mainspring.core.model.run.latents import LatentAttention
from mainspring.core.worker.worker import load_paged
from mainspring.kernels.contract import AttentionSpec
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from plain import collect, make_engine
from test_exact import SETTINGS, requests

REQUESTS = requests(tiny.VOCAB_SIZE)[:8]


def greedy(engine: LLMEngine, **how: Any) -> list[list[int]]:
    for number, (prompt, length) in enumerate(REQUESTS):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params, **how)
    found = collect(engine)
    return [list(found[str(number)][-1].outputs[0].token_ids) for number in range(len(REQUESTS))]


def model_of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("architecture", tiny.LATENT)
def test_the_cache_holds_the_latent_and_the_shared_dimensions(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    config = model_of(path).config
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    with LLMEngine.from_engine_args(EngineArgs(str(path), **SETTINGS), enable_multiprocessing=False) as engine:
        runner = engine.engine_core.core.worker.runner
        layers, bytes_per_block = runner.model.layers, runner.pool[0].nbytes
    assert {(spec.num_kv_heads, spec.key_dim, spec.value_dim) for spec in layers} == {(1, rank + rope, rank)}
    assert bytes_per_block == len(layers) * 16 * (rank + rope) * 4


def test_explain_names_latents(tmp_path: Path) -> None:
    model = page(model_of(tiny.make("minicpm3", tmp_path)))
    assert any("values of 32, over latents" in line for line in model.explain())


def test_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    path = tiny.make("deepseek_v3", tmp_path)
    expected = model_of(path).state_dict()
    parameters = page(model_of(path)).parameters
    assert set(parameters.names()) == set(expected)
    assert all(torch.equal(parameters.get(name), value) for name, value in expected.items())


def test_the_fingerprint_has_no_copies_of_all_expansions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(str(tiny.make("deepseek_v3", tmp_path, num_hidden_layers=4)), dtype="float32")
    made: list[StorageWeakRef] = []
    live: list[int] = []
    unpack = LatentAttention.unpack

    def noted(self: LatentAttention) -> torch.Tensor:
        out = unpack(self)
        made.append(StorageWeakRef(out.untyped_storage()))
        live.append(sum(not each.expired() for each in made))
        return out

    monkeypatch.setattr(LatentAttention, "unpack", noted)
    config = args.create_engine_config()
    load_paged(config, config.model_config, torch.device("cpu"), ReferenceBackend())
    assert len(live) >= 4
    assert max(live) <= 2


def test_a_layer_that_does_more_than_to_expand_is_left_alone(tmp_path: Path) -> None:
    model = model_of(tiny.make("minicpm3", tmp_path))
    before = model.model.layers[0].self_attn.kv_b_proj
    biased = nn.Linear(before.in_features, before.out_features)
    model.model.layers[0].self_attn.kv_b_proj = biased
    assert [spec.latent for spec in page(model).layers] == [False, True]


def test_a_key_that_is_not_shared_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.minicpm3 import modeling_minicpm3

    rotate = modeling_minicpm3.apply_rotary_pos_emb

    def rotate_heads_apart(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        q, k = rotate(q, k, *args, **kwargs)
        return q, k * torch.arange(1, 5)[:, None, None]  # the one key becomes four

    monkeypatch.setattr(modeling_minicpm3, "apply_rotary_pos_emb", rotate_heads_apart)
    model = page(model_of(tiny.make("minicpm3", tmp_path)))
    assert not any(spec.latent for spec in model.layers)


def test_a_backend_without_them_caches_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceBackend, "caches_latents", lambda *_: False)
    path = tiny.make("minicpm3", tmp_path)
    model = page(model_of(path), backend=ReferenceBackend())
    assert model.layers[0]._replace(scale=1.0) == AttentionSpec(4, 4, 32, 16, 1.0)


def test_new_weights_count(tmp_path: Path) -> None:
    path = tiny.make("deepseek_v3", tmp_path / "a")
    other = tiny.make("deepseek_v3", tmp_path / "b", seed=1)
    with make_engine(path, **SETTINGS) as engine:
        assert greedy(engine) == references.greedy(path, REQUESTS)
        engine.sleep(2)
        engine.wake_up()
        assert greedy(engine) == references.greedy(path, REQUESTS)
        engine.update_weights(model_of(other).state_dict().items())
        assert greedy(engine) == references.greedy(other, REQUESTS)


def test_a_model_in_half_precision_may_be_verified_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify.LOGITS_TOLERANCE, torch.bfloat16, 1e-9)
    model = page(model_of(tiny.make("minicpm3", tmp_path)).to(torch.bfloat16))
    assert all(spec.latent for spec in model.layers)
    assert "in float32" in model.verdict[0]


def test_parts_of_an_expansion_keep_their_memory_and_sleep(tmp_path: Path) -> None:
    path = tiny.make("deepseek_v3", tmp_path)
    with LLMEngine.from_engine_args(EngineArgs(str(path), **SETTINGS), enable_multiprocessing=False) as engine:
        model = engine.engine_core.core.worker.model
        (latents, *_) = [x for x in model.parameters.packed.values() if isinstance(x, LatentAttention)]
        parts = list(latents.linear.buffers())
        before = [part.data_ptr() for part in parts]  # which CUDA graphs read
        assert len(before) == 2
        latents.replace(2 * latents.unpack())
        assert [part.data_ptr() for part in parts] == before
        engine.sleep(2)
        assert not any(part.numel() for part in parts)


@pytest.mark.slow
def test_an_adapter_of_the_expansion(tmp_path: Path) -> None:
    path = tiny.make("minicpm3", tmp_path / "model")
    adapter = peft_folders.make_lora(path, tmp_path / "lora", 1, r=4, target_modules=["kv_b_proj", "o_proj"])
    with make_engine(path, **SETTINGS, enable_lora=True) as engine:
        assert greedy(engine) == references.greedy(path, REQUESTS)
        adapted = greedy(engine, lora_request=LoRARequest("a", 1, str(adapter)))
    assert adapted == [peft_folders.generate(path, adapter, prompt, n) for prompt, n in REQUESTS]


@pytest.mark.slow
def test_guesses_and_a_narrow_cache(tmp_path: Path) -> None:
    path = tiny.make("minicpm3", tmp_path)
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with make_engine(path, **SETTINGS, speculative_config=guesses) as engine:
        assert greedy(engine) == references.greedy(path, REQUESTS)
    with make_engine(path, **SETTINGS, kv_cache_dtype="fp8") as engine:
        first = greedy(engine)
        assert greedy(engine) == first
