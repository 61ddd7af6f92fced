"""Checkpoints with Mistral's own names of tensors (``load_format="mistral"``), as transformers has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from ....ipc.config import LoadConfig, ModelConfig
from ....ipc.errors import ModelNotFoundError, UnsupportedModelError

PATTERN = "consolidated*.safetensors"
_ORDINARY = ("model*.safetensors", "pytorch_model*.bin", "adapter_model*")
MODEL_TYPES = ("mistral", "ministral", "mixtral")

_WHOLE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_EXPERT = re.compile(r"feed_forward\.(experts\.\d+\.w[123])")


def mistral_files(model: ModelConfig, load: LoadConfig) -> list[Path]:
    """The files with Mistral's tensors. Empty if the checkpoint's ordinary files are to be read: with ``auto`` unless
    the model is a folder that has only Mistral's.

    Raises:
        ModelNotFoundError: ``mistral`` is asked for, and there are none.
    """
    name = str(model.model)
    folder = Path(name).expanduser()
    if load.load_format == "auto" and any(any(folder.glob(pattern)) for pattern in _ORDINARY):
        return []
    if load.load_format not in ("auto", "mistral"):
        return []
    if load.load_format == "mistral" and not folder.is_dir():
        from huggingface_hub import snapshot_download

        found = snapshot_download(name, revision=model.revision, cache_dir=load.download_dir, allow_patterns=[PATTERN])
        folder = Path(found)
    files = sorted(folder.glob(PATTERN))
    if load.load_format == "mistral" and not files:
        raise ModelNotFoundError(f"load_format is 'mistral', but {name!r} holds no file {PATTERN}")
    return files


def read_mistral(files: Sequence[Path], config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """All tensors of these files under the names of transformers' checkpoints.

    Raises:
        UnsupportedModelError: the model is of another kind, or has a tensor that its kind does not have.
    """
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"load_format 'mistral' is for models of type {', '.join(MODEL_TYPES)}, and this one is a "
            f"{config.model_type}"
        )
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}  # mapped, not read
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name in list(tensors):
        renamed = hf_name(name)
        kind = renamed.split(".")[-2]
        tensor = tensors.pop(name)
        found[renamed] = rotate_half_rows(tensor, heads[kind]) if kind in heads else tensor
    return found


def hf_name(name: str) -> str:
    """The name that transformers' checkpoints have for a tensor of Mistral's."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.fullmatch(name)
    part = _OF_LAYER.get(match[2]) if match else None
    if match and part is None and (expert := _EXPERT.fullmatch(match[2])):
        part = f"block_sparse_moe.{expert[1]}"
    if match is None or part is None:
        raise UnsupportedModelError(f"the checkpoint has a tensor {name!r}, which is not supported")
    return f"model.layers.{match[1]}.{part}.weight"


def rotate_half_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a query or key projection, ``[num_heads * head_dim, in]``, for rotary embeddings that rotate component
    ``i`` with ``i + head_dim / 2``. Mistral's own rotate ``2 i`` with ``2 i + 1``."""
    pairs: torch.Tensor = weight.unflatten(0, (num_heads, -1, 2))  # [num_heads, head_dim / 2, 2, in]
    return pairs.transpose(1, 2).reshape(weight.shape)
