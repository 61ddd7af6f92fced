"""LoRA over quantized weights: what an adapter adds is the same as over the plain weights that the integers stand for,
and requests without an adapter do not notice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import tiny
from mainspring import LLMEngine, LoRARequest, SamplingParams
from mainspring.core.model.run.lora import AdaptedBackend
from mainspring.core.worker.adapter_files import read_lora
from mainspring.core.worker.worker import load_paged, lora_limits
from mainspring.ipc.config import EngineConfig, LoRAConfig, ModelConfig
from mainspring.ipc.messages import Adapter
from mainspring.kernels.contract import Backend
from mainspring.kernels.decoder_contract import NF4
from mainspring.kernels.native.native_backend import NativeBackend
from mainspring.kernels.native.weights import PanelWeight
from native_here import why_not
from peft_folders import make_lora
from plain import collect, make_engine
from quantized_folders import BNB, GPTQ, bnb_of, gptq_of, make_awq, make_quantized
from test_quantized import error_of, load, logits_of
from tiers import fast_only

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
EACH_LAYER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FORMS = ["int8", "int4", "bitsandbytes", "awq", "gptq", "bitsandbytes checkpoint"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def checkpoint(form: str, folder: Path) -> tuple[Path, str | None]:
    """A checkpoint, and the option with which it runs."""
    if form == "awq":
        return make_awq(folder)[0], None
    if form == "gptq":
        return make_quantized(folder, gptq_of, GPTQ)[0], None
    if form == "bitsandbytes checkpoint":
        return make_quantized(folder, bnb_of, BNB)[0], None
    return tiny.make("llama", folder / "plain"), form


def plain_equivalent(path: Path, form: str | None, folder: Path) -> Path:
    """The checkpoint with the values that the quantized weights stand for."""
    model = load(path, NativeBackend(), form, dtype="float32")
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("quantization_config", "was"))
    tensors = {name: model.parameters.get(name).clone() for name in model.parameters.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("form", fast_only(["awq", "bitsandbytes"], FORMS))
def test_an_adapter_adds_what_it_adds_to_the_weights_that_the_integers_stand_for(form: str, tmp_path: Path) -> None:
    adds_the_same(*checkpoint(form, tmp_path), EACH_LAYER, 0.5, tmp_path)


@pytest.mark.parametrize("quantized_gate", [False, True])
def test_an_adapter_may_change_the_gate_of_a_shared_expert(quantized_gate: bool, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    but = [".gate.weight", *([] if quantized_gate else ["shared_expert_gate"])]
    path, _, values = make_quantized(tmp_path, bnb_of, BNB, "qwen3_next", but, **sizes)
    assert any("shared_expert_gate" in name for name in values) == quantized_gate
    adds_the_same(path, None, ["shared_expert_gate"], 0.3, tmp_path)


def adds_the_same(path: Path, option: str | None, target_modules: list[str], least: float, tmp_path: Path) -> None:
    """Compare an adapter over quantized weights with the merged one over the plain weights that these stand for.
    least: by how many standard deviations the adapter changes logits."""
    plain = plain_equivalent(path, option, tmp_path / "equivalent")
    adapter = make_lora(plain, tmp_path / "adapter", 1, r=8, lora_alpha=16, target_modules=target_modules)
    base: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(tmp_path / "merged")
    native = NativeBackend()
    config = EngineConfig(
        model_config=ModelConfig(model=str(path), quantization=cast(Any, option)),
        lora_config=LoRAConfig(enable_lora=True),
    )
    adapted = AdaptedBackend(native, 2, 1)
    model, _ = load_paged(config, config.model_config, torch.device("cpu"), cast(Backend, adapted))
    weights = model.whole.decoder.weights.values()  # type: ignore[union-attr]
    assert {weight.kind for weight in weights if isinstance(weight, PanelWeight)} & {4, 8, NF4}
    without = logits_of(model, cast(Backend, adapted))
    lora = read_lora(Adapter("a", 1, str(adapter)), lora_limits(config, model, adapted))
    for slot in (0, 1):
        adapted.admit(slot, 1, lora)
    got = logits_of(model, cast(Backend, adapted))
    exact, unchanged = (logits_of(load(p, native, dtype="float32"), native) for p in (tmp_path / "merged", plain))
    assert error_of(got, exact) < 0.05, "inputs are rounded to 8 bits"
    assert error_of(without, unchanged) < 0.05
    assert error_of(got, unchanged) > least, "the adapter changes much"
    adapted.admit(1, 0, None)
    half = logits_of(model, cast(Backend, adapted))
    assert torch.equal(half, torch.where((half == without).all(1, keepdim=True), without, got)), "row by row"
    assert not torch.equal(half, got)
    assert not torch.equal(half, without)


PROMPTS = {name: list(range(5 + i, 45 + 3 * i)) for i, name in enumerate(("a", "b", "none", "also none"))}
PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=2)


def run(engine: LLMEngine, names: list[str], loras: dict[str, LoRARequest]) -> dict[str, Any]:
    for name in names:
        engine.add_request(name, {"prompt_token_ids": PROMPTS[name]}, PARAMS, lora_request=loras.get(name))
    found = {name: outputs[-1].outputs[0] for name, outputs in collect(engine).items()}
    for output in found.values():
        assert output.error is None
    return {name: (output.token_ids, output.logprobs) for name, output in found.items()}


@pytest.mark.parametrize("form", fast_only(["awq"], FORMS))
@pytest.mark.parametrize("dtype", fast_only(["bfloat16"], ["bfloat16", "float32"]))
def test_a_request_has_the_same_bits_alone_and_among_those_of_other_adapters(
    form: str, dtype: str, tmp_path: Path
) -> None:
    path, option = checkpoint(form, tmp_path)
    plain = tiny.make("llama", tmp_path / "base")
    loras = {
        name: LoRARequest(name, i, str(make_lora(plain, tmp_path / name, i, r=4, target_modules=EACH_LAYER)))
        for i, name in enumerate(("a", "b"), 1)
    }
    settings = {"skip_tokenizer_init": True, "enable_lora": True, "quantization": option, "dtype": dtype}
    with make_engine(path, **settings, max_loras=2) as engine:
        alone = {name: run(engine, [name], loras)[name] for name in PROMPTS}
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == 4
    with make_engine(path, **settings, max_loras=2, max_num_batched_tokens=24, enable_prefix_caching=False) as engine:
        assert run(engine, ["none", "also none"], loras) == {name: alone[name] for name in ("none", "also none")}
        assert run(engine, list(PROMPTS), loras) == alone
        engine.sleep(level=2)
        engine.wake_up()
        assert run(engine, list(PROMPTS), loras) == alone, "after the weights were read again"
