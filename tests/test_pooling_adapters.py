"""LoRA adapters of pooling models: the numbers of PEFT, beside requests without an adapter."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, AutoModelForSequenceClassification

import pooled
from mainspring import LLM, LoRARequest
from mainspring.ipc.errors import InvalidRequestError, NotSupportedError
from plain import make_engine

PROMPTS = pooled.prompts(5, 30, 90)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    auto = AutoModelForSequenceClassification
    return pooled.make("qwen3", tmp_path_factory.mktemp("model"), auto, num_labels=3)


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = []
    for seed in (1, 2):
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            base: Any = AutoModelForSequenceClassification.from_pretrained(checkpoint)
            adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.data.normal_(0, 0.15)
            adapted.save_pretrained(made_in := tmp_path_factory.mktemp("adapter"))
        made.append(made_in)
    return made


@torch.inference_mode()
def expected(checkpoint: Path, adapter: Path | None, prompt: list[int]) -> np.ndarray:
    model: Any = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    return model.eval()(torch.tensor([prompt])).logits[0].softmax(-1).numpy()


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_model_len": 128}
    with LLM(str(checkpoint), skip_tokenizer_init=True, **settings) as llm:
        yield llm


def classified(llm: LLM, adapters: list[Path | None]) -> list[Any]:
    paths = list(dict.fromkeys(path for path in adapters if path is not None))
    requests = [path and LoRARequest(path.name, 1 + paths.index(path), str(path)) for path in adapters]
    found = llm.classify([{"prompt_token_ids": one} for one in PROMPTS], use_tqdm=False, lora_request=requests)
    return [one.outputs.probs for one in found]


def test_each_request_has_its_own_adapter(checkpoint: Path, adapters: list[Path], llm: LLM) -> None:
    chosen = [adapters[0], None, adapters[1]]
    found = classified(llm, chosen)
    for prompt, adapter, probs in zip(PROMPTS, chosen, found, strict=True):
        np.testing.assert_allclose(probs, expected(checkpoint, adapter, prompt), atol=1e-4)
    assert not np.allclose(found[0], expected(checkpoint, None, PROMPTS[0]), atol=1e-2)


def test_adapters_work_after_the_weights_slept(adapters: list[Path], llm: LLM) -> None:
    chosen = [adapters[0], None, adapters[1]]
    before = classified(llm, chosen)
    llm.sleep(level=2)
    llm.wake_up()
    assert classified(llm, chosen) == before


def test_what_can_not_have_adapters_is_refused(tmp_path: Path, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="can't be read"):
        llm.classify([{"prompt_token_ids": [5]}], use_tqdm=False, lora_request=LoRARequest("x", 9, str(tmp_path)))
    encoder = pooled.make("bert", tmp_path / "bert", AutoModel)
    with pytest.raises(NotSupportedError, match="is an encoder, which takes no adapters"):
        make_engine(encoder, max_model_len=None, skip_tokenizer_init=True, enable_lora=True)
