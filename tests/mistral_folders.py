"""Checkpoints in Mistral's own format, made of ordinary ones: params.json, consolidated.safetensors, tekken.json."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

NUM_SPECIAL = 24  # 20 that version v3 names, and some without a name
# of Mistral's published tokenizers, but without the classes of letters
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PARTS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe": "feed_forward",
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
}


def convert(ordinary: Path, folder: Path, parts: int = 1, **params: Any) -> Path:
    """Write params.json and the weights of an ordinary Mistral or Mixtral checkpoint in Mistral's format, the latter in
    so many files. `params` replace keys; None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = AutoConfig.from_pretrained(ordinary)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found: dict[str, Any] = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "head_dim": head_dim,
        "hidden_dim": config.intermediate_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_parameters["rope_theta"],
        "sliding_window": config.sliding_window,
        "max_seq_len": config.max_position_embeddings,
    }
    if config.model_type == "mixtral":
        found["moe"] = {"num_experts": config.num_local_experts, "num_experts_per_tok": config.num_experts_per_tok}
    found = {key: value for key, value in (found | params).items() if value is not None}
    (folder / "params.json").write_text(json.dumps(found))
    tensors = {}
    for name, tensor in load_file(ordinary / "model.safetensors").items():
        interleaved = tensor
        if "q_proj" in name or "k_proj" in name:  # row 2 i of a head was row i, row 2 i + 1 was row i + head_dim / 2
            heads = tensor.view(-1, 2, head_dim // 2, tensor.shape[-1])
            interleaved = torch.stack([heads[:, 0], heads[:, 1]], dim=2).reshape(tensor.shape)
        for theirs, mistrals in _PARTS.items():
            name = name.replace(theirs, mistrals)
        tensors[name] = interleaved.contiguous()
    names = sorted(tensors)
    for part in range(parts):
        file = "consolidated.safetensors" if parts == 1 else f"consolidated-{part + 1:05}-of-{parts:05}.safetensors"
        save_file({name: tensors[name] for name in names[part::parts]}, folder / file)
    return folder


def make_tekken(tokenizer_json: Path, folder: Path) -> int:
    """Write the vocabulary of a byte-level BPE tokenizer as tekken.json; → the number of tokens."""
    from mainspring.engine.text.tokenizer import byte_level_alphabet

    described = json.loads(tokenizer_json.read_text())
    bytes_of = byte_level_alphabet()
    added = {token["content"] for token in described["added_tokens"]}
    ids = sorted((token, text) for text, token in described["model"]["vocab"].items() if text not in added)
    merged = [bytes(bytes_of[char] for char in text) for _, text in ids if len(text) > 1]
    vocabulary = [bytes([byte]) for byte in range(256)] + merged
    size = NUM_SPECIAL + len(vocabulary)
    content = {
        "config": {
            "pattern": WORDS,
            "num_vocab_tokens": len(vocabulary),
            "default_vocab_size": size,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(vocabulary)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(content))
    return size
