"""Checkpoints of real shapes with random weights, because speed does not depend on the values.

They are made once, under .bench/models. If peers are installed (`peers.py`), their formats can be written, too:
OpenVINO's by its exporter, GGUF for llama.cpp by the gguf package, each of the peer's own environment.

    python benchmarks/make_models.py [NAME ...] [--forms openvino gguf]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    Mamba2Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from report import CACHE, MODELS, ROOT

SHAPES: dict[str, PreTrainedConfig] = {
    "llama-110m": LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2_048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=2_048,
    ),
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151_936,
        hidden_size=1_024,
        intermediate_size=3_072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    ),
    # a row goes through 4 of 32 experts
    "qwen3-moe-0.7b": Qwen3MoeConfig(
        vocab_size=32_000,
        hidden_size=1_024,
        moe_intermediate_size=512,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=40_960,
    ),
    # the same with a router of sigmoids, a shared expert and a first layer without experts
    "glm4-moe-0.7b": Glm4MoeConfig(
        vocab_size=32_000,
        hidden_size=1_024,
        intermediate_size=3_072,
        moe_intermediate_size=512,
        n_routed_experts=32,
        num_experts_per_tok=4,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        use_qk_norm=True,
        max_position_embeddings=40_960,
    ),
    "gpt-oss-0.7b": GptOssConfig(
        vocab_size=32_000,
        hidden_size=1_024,
        intermediate_size=512,
        num_local_experts=32,
        num_experts_per_tok=4,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
    ),
    # three of four layers keep a state
    "qwen3.5-110m": Qwen3_5TextConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2_048,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=6,
        linear_num_value_heads=6,
        max_position_embeddings=40_960,
    ),
    "qwen3.5-0.6b": Qwen3_5TextConfig(
        vocab_size=151_936,
        hidden_size=1_024,
        intermediate_size=3_072,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    ),
    "mamba2-110m": Mamba2Config(
        vocab_size=32_000,
        hidden_size=768,
        state_size=128,
        num_hidden_layers=16,
        num_heads=24,
        head_dim=64,
        n_groups=1,
        max_position_embeddings=40_960,
    ),
}


def save(name: str) -> Path:
    """The checkpoint's folder; made if it is not there. ``NAME-mxfp4`` has the experts of gpt-oss in MXFP4."""
    folder = MODELS / name
    if (folder / "tokenizer.json").exists():
        return folder
    if name.endswith("-mxfp4"):
        save_mxfp4(save(name.removesuffix("-mxfp4")), folder)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16)
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        print(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters")
    return folder


def save_mxfp4(plain: Path, folder: Path) -> None:
    sys.path.append(str(ROOT / "tests"))
    from quantized_folders import MXFP4, mxfp4_of

    tensors = dict(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16).state_dict())
    for name in [name for name, tensor in tensors.items() if tensor.dim() == 3]:
        packed, _ = mxfp4_of(tensors.pop(name))
        tensors |= {f"{name}_{end}": part.contiguous() for end, part in packed.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the bytes and two special tokens, for engines that require one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=258, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def save_openvino(folder: Path) -> None:
    """`folder`-ov, by the exporter of the peer's own environment."""
    target = folder.with_name(folder.name + "-ov")
    if not target.exists():
        exporter = CACHE / "peers" / "openvino" / "bin" / "optimum-cli"
        task = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
        half = target.with_name(target.name + "-unfinished")
        subprocess.run([exporter, "export", "openvino", "--model", folder, *task, half], check=True)
        half.rename(target)


# where it is not the model type
GGUF_ARCHITECTURES = {"qwen3_5_text": "qwen35", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
# checkpoint module → GGUF tensor; {} is the layer
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
    "model.layers.{}.mlp.gate": "blk.{}.ffn_gate_inp",
    "model.layers.{}.mlp.router": "blk.{}.ffn_gate_inp",
    "model.layers.{}.self_attn.sinks": "blk.{}.attn_sinks.weight",
    "model.layers.{}.mlp.experts.down_proj": "blk.{}.ffn_down_exps.weight",
    "model.layers.{}.linear_attn.in_proj_qkv": "blk.{}.attn_qkv",
    "model.layers.{}.linear_attn.in_proj_z": "blk.{}.attn_gate",
    "model.layers.{}.linear_attn.in_proj_a": "blk.{}.ssm_alpha",
    "model.layers.{}.linear_attn.in_proj_b": "blk.{}.ssm_beta",
    "model.layers.{}.linear_attn.conv1d": "blk.{}.ssm_conv1d",
    "model.layers.{}.linear_attn.norm": "blk.{}.ssm_norm",
    "model.layers.{}.linear_attn.out_proj": "blk.{}.ssm_out",
    "model.layers.{}.linear_attn.A_log": "blk.{}.ssm_a",
    "model.layers.{}.linear_attn.dt_bias": "blk.{}.ssm_dt.bias",
}


def save_gguf(folder: Path) -> None:
    """`folder`.gguf in bf16, or with experts in MXFP4 if it has them, without a tokenizer, because the benchmark uses
    token ids."""
    target = folder.with_name(folder.name + ".gguf")
    if target.exists():
        return
    sys.path += map(str, (CACHE / "peers" / "llamacpp" / "lib").glob("python*/site-packages"))  # after our own packages
    import gguf

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    half = target.with_name(target.name + "-unfinished")
    arch = GGUF_ARCHITECTURES.get(config.model_type, config.model_type)
    hybrid, oss = arch == "qwen35", arch == "gpt-oss"
    writer = gguf.GGUFWriter(str(half), arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim // 4 if hybrid else head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    if hybrid:
        if config.linear_num_key_heads != config.linear_num_value_heads:
            raise ValueError("llama.cpp has the heads of values in another order")
        add_states(writer, arch, config)
    if arch == "qwen3moe" or oss:
        writer.add_expert_count(config.num_local_experts if oss else config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size if oss else config.moe_intermediate_size)
    if oss:
        writer.add_sliding_window(config.sliding_window)

    def add_tensor(name: str, tensor: torch.Tensor, mxfp4: Any = None) -> None:
        if mxfp4:
            kind = mxfp4.GGMLQuantizationType.MXFP4
            writer.add_tensor(name, mxfp4.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
        elif tensor.ndim == 1 or tensor.dtype == torch.float32:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        end = ".bias" if name.endswith(".bias") else ".weight"
        parts = name.removesuffix(end).split(".")
        layer = next((part for part in parts if part.isdigit()), "")
        if oss and "experts" in parts:
            add_experts(f"blk.{layer}.ffn_", name, tensor, add_tensor, folder.name.endswith("-mxfp4") and gguf)
            continue
        if parts[-1] == "gate_up_proj":
            for part, half_of_it in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", half_of_it)
            continue
        target_name = GGUF_NAMES[".".join("{}" if part == layer else part for part in parts)].format(layer)
        if name.endswith(end):
            target_name += end
        if hybrid or oss:
            target_name = target_name.replace("ffn_norm", "post_attention_norm")
        if hybrid and tensor.ndim == 1 and name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor.float() + 1
        if parts[-1] == "A_log":
            tensor = -tensor.float().exp()
        if parts[-1] == "conv1d":
            tensor = tensor.float().squeeze(1)
        if config.model_type == "llama" and parts[-1] in ("q_proj", "k_proj"):
            # llama.cpp rotates neighbouring pairs, transformers the two halves of a head
            tensor = tensor.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
        if parts[-2:] in (["mlp", "gate"], ["mlp", "router"]):
            tensor = tensor.float()
        add_tensor(target_name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    half.rename(target)


def add_experts(prefix: str, name: str, tensor: torch.Tensor, add: Callable[..., None], mxfp4: Any) -> None:
    """Weights or biases of gpt-oss' experts, whose gate and up are interleaved. mxfp4: the gguf package, if wanted."""
    bias = name.endswith("_bias")
    halves = {"gate": tensor[..., ::2], "up": tensor[..., 1::2]} if "gate_up" in name else {"down": tensor}
    for half, values in halves.items():
        target = f"{prefix}{half}_exps.{'bias' if bias else 'weight'}"
        add(target, values.float() if bias else values.mT, None if bias or not mxfp4 else mxfp4)


def add_states(writer: Any, arch: str, config: Any) -> None:
    """What llama.cpp needs to know of layers with a state."""
    heads, dim = config.linear_num_value_heads, config.linear_value_head_dim
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_inner_size(heads * dim)
    writer.add_ssm_state_size(dim)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_uint32(f"{arch}.full_attention_interval", 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SHAPES)}, gpt-oss-0.7b-mxfp4; none: all")
    parser.add_argument("--forms", nargs="*", default=[], choices=["openvino", "gguf"], help="forms for peers")
    args = parser.parse_args()
    for name in args.names or SHAPES:
        folder = save(name)
        if "openvino" in args.forms:
            save_openvino(folder)
        if "gguf" in args.forms:
            save_gguf(folder)


if __name__ == "__main__":
    main()
