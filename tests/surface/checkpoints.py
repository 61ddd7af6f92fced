"""Small checkpoints for rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mistral_folders
import tiny
from mainspring.demo import MODEL_PATH

from .harness import Place


def no_decoder(at: Place) -> str:
    """The embedded model's tokenizer without its decoder: tokens are joined by spaces."""

    def make(folder: Path) -> str:
        shutil.copytree(MODEL_PATH, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        _edit(folder / "tokenizer.json", decoder=None)
        return str(folder)

    return at.once("no-decoder", make)


def embedded(at: Place, name: str, **generation: Any) -> str:
    """The embedded model with another generation config."""

    def make(folder: Path) -> str:
        shutil.copytree(MODEL_PATH, folder, dirs_exist_ok=True)
        _edit(folder / "generation_config.json", **generation)
        return str(folder)

    return at.once(name, make)


def random_llama(at: Place) -> str:
    """A tiny model with its own tokenizer."""
    return at.once("llama", lambda folder: str(tiny.make("llama", folder, tokenizer=True)))


def random_experts(at: Place) -> str:
    """A tiny model of 2 layers, in which 2 of 4 experts compute a token."""
    return at.once("experts", lambda folder: str(tiny.make("qwen3_moe", folder, tokenizer=True)))


def two_configs(at: Place) -> str:
    """A tiny model with two configs: params.json has a layer less than config.json."""

    def make(folder: Path) -> str:
        tiny.make("mistral", folder, tokenizer=True)
        mistral_folders.convert(folder, folder, n_layers=1)
        return str(folder)

    return at.once("two-configs", make)


def hub(at: Place) -> str:
    """A hub cache with one model, `us/model`, of two revisions: `main` is the embedded model, `other` a tiny one."""

    def make(folder: Path) -> str:
        repository = folder / "models--us--model"
        (repository / "refs").mkdir(parents=True)
        for name, commit, source in (("main", "a" * 40, str(MODEL_PATH)), ("other", "b" * 40, random_llama(at))):
            shutil.copytree(source, repository / "snapshots" / commit)
            (repository / "refs" / name).write_text(commit)
        return str(folder)

    return at.once("hub", make)


def _edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


CODE = """
from transformers import LlamaForCausalLM

class OwnForCausalLM(LlamaForCausalLM):
    pass
"""


def own_code(at: Place) -> str:
    """A tiny model that contains its code."""

    def make(folder: Path) -> str:
        tiny.make("llama", folder)
        (folder / "modeling_own.py").write_text(CODE)
        _edit(
            folder / "config.json",
            architectures=["OwnForCausalLM"],
            auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
        )
        return str(folder)

    return at.once("own-code", make)


def adapter(at: Place, number: int) -> str:
    """A LoRA adapter of rank 4 for the embedded model, large enough to change the output."""

    def make(folder: Path) -> str:
        import peft
        import torch
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng():
            torch.manual_seed(number)
            model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
            shape = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            peft.get_peft_model(model, shape).save_pretrained(str(folder))
        return str(folder)

    return at.once(f"adapter-{number}", make)


def classifier(at: Place, of: str = "Sequence") -> str:
    """A tiny model with three classes of texts, or of tokens."""

    def make(folder: Path) -> str:
        import transformers

        config = transformers.AutoConfig.from_pretrained(random_llama(at), num_labels=3, pad_token_id=2)
        getattr(transformers, f"LlamaFor{of}Classification")(config).save_pretrained(folder)
        tiny.make_tokenizer(folder)
        return str(folder)

    return at.once(f"classifier of {of}", make)


def prompt_adapter(at: Place, number: int, tokens: int) -> str:
    """Virtual tokens for the embedded model."""

    def make(folder: Path) -> str:
        import peft
        import torch
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng():
            torch.manual_seed(number)
            model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
            shape = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=tokens)
            peft.get_peft_model(model, shape).save_pretrained(str(folder))
        return str(folder)

    return at.once(f"prompt-adapter-{number}", make)
