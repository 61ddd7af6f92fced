"""Random adapters as PEFT writes them, and the output of transformers with PEFT for a prompt."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM


def make_lora(model: Path, folder: Path, seed: int, strength: float = 0.15, **config: Any) -> Path:
    """A LoRA adapter of the checkpoint `model`; `config`: fields of `LoraConfig`."""
    return _save(model, folder, seed, strength, LoraConfig(task_type="CAUSAL_LM", **config))


def make_prompt_adapter(model: Path, folder: Path, seed: int, num_virtual_tokens: int) -> Path:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=num_virtual_tokens)
    return _save(model, folder, seed, 0.4, config)


def _save(model: Path, folder: Path, seed: int, strength: float, config: Any) -> Path:
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name or "prompt_encoder" in name:
                    parameter.normal_(0, strength)
        adapted.save_pretrained(folder)
    return folder


@lru_cache(2)
def _loaded(model: Path, adapter: Path | None, changed: tuple[int, ...]) -> Any:
    """changed: when each of their files was written."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return loaded if adapter is None else PeftModel.from_pretrained(loaded, adapter).eval()


def generate(model: Path, adapter: Path | None, prompt: Sequence[int], length: int) -> list[int]:
    """Greedy, in fp32, by transformers' `generate`."""
    files = [file for folder in (model, adapter) if folder is not None for file in sorted(folder.iterdir())]
    loaded = _loaded(model, adapter, tuple(file.stat().st_mtime_ns for file in files))
    ids = torch.tensor([list(prompt)])
    output = loaded.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return [int(token) for token in output[0, len(prompt) :]]
