"""Tiny checkpoints of pooling models, generated at run time: encoders, decoders, classifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

import tiny
from mainspring import LLMEngine, PoolingParams, PoolingRequestOutput
from plain import collect

SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"max_position_embeddings": 259},  # positions begin after the padding token's id
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    "modernbert": {"num_hidden_layers": 4, "local_attention": 16, "cls_token_id": 0, "sep_token_id": 1},
}
DECODERS: dict[str, dict[str, Any]] = {"qwen3": {"head_dim": 32, "num_key_value_heads": 2}, "llama": {}}


def make(architecture: str, folder: Path, auto: Any = AutoModel, tokenizer: bool = False, **overrides: Any) -> Path:
    """Write a checkpoint of the model that transformers' class `auto` builds; → the folder."""
    fields = {**SIZES, **ENCODERS.get(architecture, DECODERS.get(architecture, {})), **overrides}
    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(AutoConfig.for_model(architecture, **fields), dtype=torch.float32)
        tiny.widen(model)
    model.save_pretrained(folder)
    if tokenizer:
        make_tokenizer(folder, types=architecture in ("bert", "roberta"))
    return folder


def make_tokenizer(folder: Path, types: bool = True) -> None:
    """A tokenizer that puts texts between special tokens and separates the two texts of a pair."""
    tiny.make_tokenizer(folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [(token, backend.token_to_id(token)) for token in ("<bos>", "<eos>")]
    backend.post_processor = processors.TemplateProcessing("<bos> $A <eos>", "<bos> $A <eos> $B:1 <eos>:1", ids)
    named = {"cls_token": "<bos>", "sep_token": "<eos>", "pad_token": "<pad>", "model_max_length": 200}
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **named).save_pretrained(folder)


def prompts(*lengths: int) -> list[list[int]]:
    """Random token ids without special tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, tiny.VOCAB_SIZE, length).tolist() for length in lengths]


def run(
    engine: LLMEngine,
    asked: Sequence[Any],
    params: PoolingParams | None = None,
    after_two_steps: Callable[[], object] = lambda: None,
) -> list[PoolingRequestOutput[Any]]:
    """The output of each prompt, with all requests in flight at once."""
    for number, prompt in enumerate(asked):
        engine.add_request(str(number), prompt, params or PoolingParams())
    found: dict[str, list[Any]] = {}
    for output in [*engine.step(), *engine.step()]:
        found[output.request_id] = [output]
    after_two_steps()
    for name, outputs in collect(engine).items():
        found.setdefault(name, []).extend(outputs)
    for outputs in found.values():
        assert len(outputs) == 1, "it ends once"
        assert outputs[0].finished
    return [found[str(number)][0] for number in range(len(asked))]


def vectors(engine: LLMEngine, asked: Sequence[Any], *more: Any, **named: Any) -> list[np.ndarray]:
    """The same as arrays; no request may fail."""
    outputs = run(engine, asked, *more, **named)
    assert [output.error for output in outputs] == [None] * len(asked)
    return [output.outputs.data for output in outputs]
