"""Tiny random fp32 checkpoints of 15 architectures, generated at run time.

Weights have a larger variance than the model's own initialisation, so that greedy outputs are diverse: with small
weights the logits hardly depend on the context, and an error in the cache would not be detected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

VOCAB_SIZE = 384
MAX_POSITION = 512
BOS, EOS = 0, 1

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_ALTERNATING = {"num_hidden_layers": 4, "sliding_window": 24, "head_dim": 16, "query_pre_attn_scalar": 16}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}

# name → model type of transformers, and config fields besides the sizes above
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma2": ("gemma2", _ALTERNATING),  # layers alternate: sliding, full
    "gemma3": (
        "gemma3_text",
        {
            **_ALTERNATING,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}),
    "gpt2": ("gpt2", {"n_inner": 96}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 2}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "mixtral": ("mixtral", _EXPERTS),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "moe_intermediate_size": 48, "num_experts_per_tok": 2, "num_experts": 4},
    ),
}

# The same for models whose keys and values are made from latents.
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 24,
            "n_routed_experts": 16,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
        },
    ),
    "minicpm3": (
        "minicpm3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
}

_INDEX: dict[str, Any] = {
    **LATENT["deepseek_v3"][1],
    "num_hidden_layers": 4,
    "mlp_layer_types": ["dense", "sparse"] * 2,
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 32,
}

# The same for models whose attention sees 8 keys that an indexer selects.
INDEXED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("deepseek_v32", _INDEX),
    "glm_moe_dsa": ("glm_moe_dsa", {**_INDEX, "indexer_types": ["full", "shared"] * 2}),
}

_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}

# The same for models with recurrent state. Experts are 16 because torch's own products in bfloat16 with fewer columns
# differ in a bit with the number of rows.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "qwen3_next",
        {
            **_DELTA,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
            "num_experts_per_tok": 2,
            "num_experts": 16,
        },
    ),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 32}),
    "nemotron_h": (  # computes a prompt otherwise than what it generates
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "moe", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 32,
            "moe_intermediate_size": 48,
            "n_routed_experts": 16,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
        },
    ),
    "falcon_mamba": ("falcon_mamba", {"num_hidden_layers": 4, "state_size": 16, "time_step_rank": 8}),
    "minimax": ("minimax", {"num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 16, "block_size": 16}),
    "lfm2": ("lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}),
}

# Models that compute their attention themselves, or take no positions. The sizes above have their names in these too.
OWN_ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {}),  # ALiBi, no positions
    "mpt": ("mpt", {"max_seq_len": MAX_POSITION}),  # ALiBi by a table of that length
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 24}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),  # repeats its heads of keys
    "bart": (
        "bart",
        {
            "d_model": 64,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 96,
            "forced_eos_token_id": None,
        },
    ),
}

# The same for models whose experts have biases.
BIASED_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {"gpt_oss": ("gpt_oss", {**_EXPERTS, "head_dim": 16})}


def make(
    architecture: str,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of `architecture` (a key of one of the tables above) to `folder`; → the folder.

    `overrides` replace config fields. `tokenizer` adds a byte-level BPE one, whose ids the model's vocabulary covers.
    """
    model_type, fields = (ARCHITECTURES | LATENT | INDEXED | RECURRENT | OWN_ATTENTION | BIASED_EXPERTS)[architecture]
    config = AutoConfig.for_model(model_type, **{**_SIZES, **fields, **overrides})
    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        widen(model)
    model.to(dtype).save_pretrained(folder)
    if tokenizer:
        make_tokenizer(folder)
    return Path(folder)


def widen(model: PreTrainedModel, gain: float = 1.5) -> None:
    """Redraw every matrix with a variance so large that a layer's output clearly depends on its input, and add noise to
    the vectors."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                # with large embeddings, tied to the output layer, the model would only repeat the last token
                strength = 0.3 if parameter in embeddings else gain
                parameter.normal_(0.0, strength * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def make_tokenizer(folder: str | Path) -> None:
    """A byte-level BPE tokenizer of at most `VOCAB_SIZE` tokens, trained on a few sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [
        "The clock on the wall strikes twelve, and the spring is wound again.",
        "Count the wheels: one, two, three.",
    ]
    bpe.train_from_iterator(text * 4, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
