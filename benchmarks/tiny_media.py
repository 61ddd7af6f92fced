"""Tiny random models of transformers that take media, and inputs for their encoders as a processor would give them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForMultimodalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mainspring.benchmarks.architectures import _BLOCK_INDEX, _DELTA
from mainspring.core.parallel.twin import _ALSO_UNSET, _SMALL, HEAD_DIM, HEADS, KV_HEADS, LAYERS

HIDDEN = HEADS * HEAD_DIM
IMAGE, VIDEO, AUDIO, START, END = 300, 301, 302, 303, 304  # token ids
SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "hidden": HIDDEN, "inner": 24 * HEADS, "experts": 8, "layers": LAYERS}
_TOKENS = {
    r"image_token_(id|index)": IMAGE,
    r"video_token_(id|index)": VIDEO,
    r"audio_token_(id|index)": AUDIO,
    r"vision_start_token_id": START,
    r"vision_end_token_id": END,
    r"pad_token_id": 0,
    r"(bos|eos)_token_id": 1,
    r".*_token_(id|index)": 305,
}
_ENCODER = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_hidden_layers": 2,
    "depth": 2,
    "intermediate_size": 48,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": HIDDEN,
    "embed_dim": 32,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "projection_dim": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "num_mel_bins": 16,
}

Inputs = dict[str, torch.Tensor]
Make = Callable[[int], Inputs]  # by a seed


class Tiny(NamedTuple):
    fields: dict[str, Any]
    make: Make
    modality: str = "image"
    axis: int = 0  # along which the pixels of several images are joined


def shrink(config_class: Any, given: dict[str, Any]) -> Any:
    """A config of this class with small sizes and the token ids above. given: fields, those of parts as dicts."""
    default = config_class()
    parts = {name: getattr(default, name, None) for name in default.sub_configs}
    fields: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        if name in parts or isinstance(getattr(config_class, name, None), property):
            continue
        token = next((token for pattern, token in _TOKENS.items() if re.fullmatch(pattern, name)), None)
        if token is not None:
            fields[name] = None if value is None and not name.startswith(("image", "video", "audio")) else token
        elif name in {"layer_types", "mlp_layer_types"} and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            fields[name] = [kinds[i % len(kinds)] for i in range(LAYERS)]
        elif (isinstance(value, int | float) and not isinstance(value, bool)) or re.fullmatch(_ALSO_UNSET, name):
            small = next((small for pattern, small in _SMALL if re.fullmatch(pattern, name)), None)
            if small is not None:
                fields[name] = SIZES.get(small, small) if value is None or value else value
    for name, part in parts.items():
        if part is None:
            if name in given:
                fields[name] = given[name]
            continue
        wanted = given.get(name) or {}
        encodes = "vision" in name or "audio" in name or "encoder" in name or "qformer" in name
        fields[name] = _encoder(part, wanted) if encodes else shrink(type(part), wanted)
    return config_class(**{**fields, **{k: v for k, v in given.items() if k not in parts}})


def _encoder(default: Any, given: dict[str, Any]) -> Any:
    kind, have = type(default), default.to_dict()
    fields = {k: v for k, v in _ENCODER.items() if k in have and not isinstance(getattr(kind, k, None), property)}
    fields |= {k: [v, v] for k, v in fields.items() if k in ("image_size", "patch_size") and isinstance(have[k], list)}
    fields |= given
    try:
        return kind(**{**{k: v for k, v in have.items() if k not in ("model_type", "transformers_version")}, **fields})
    except Exception:  # what it derives from sizes does not fit them
        return kind(**fields)


def build(model_type: str, gains: tuple[float, float] = (0.3, 1.5)) -> tuple[PreTrainedModel, Tiny]:
    """A tiny random fp32 model. gains: of embeddings, and of other matrices."""
    tiny = TINY.get(model_type, NONE)
    config = shrink(CONFIG_MAPPING[model_type], tiny.fields)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    return draw(model, gains).eval(), tiny


def draw(model: PreTrainedModel, gains: tuple[float, float]) -> PreTrainedModel:
    """The model, with random matrices. gains: see `build`."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, gains[parameter not in embeddings] * parameter[0].numel() ** -0.5)
    return model


# --- Inputs ---------------------------------------------------------------------------------------


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squares(seed: int, size: int = 28, count: int = 1) -> Inputs:
    return {"pixel_values": _normal(seed, count, 3, size, size)}


def tiles(seed: int) -> Inputs:
    return {"pixel_values": squares(seed, count=3)["pixel_values"][None], "image_sizes": torch.tensor([[50, 28]])}


def sized(seed: int) -> Inputs:
    return {**squares(seed, 56), "image_sizes": torch.tensor([[56, 56]])}


def masked(seed: int, size: int, count: int) -> Inputs:
    mask = torch.ones(1, count, size, size, dtype=torch.bool)
    return {"pixel_values": squares(seed, size, count)["pixel_values"][None], "pixel_attention_mask": mask}


def grid(patch: int, temporal: int = 2, square: bool = False, flat: bool = True) -> Make:
    """Patches in a grid, whose height depends on the seed unless `square`."""

    def make(seed: int) -> Inputs:
        height, width = 4 if square else 4 + 2 * (seed % 2), 6
        shape = (3 * temporal * patch * patch,) if flat else (3, patch, patch)
        size = torch.tensor([[1, height, width]])
        return {"pixel_values": _normal(seed, height * width, *shape), "image_grid_thw": size}

    return make


def sound(bins: int, frames: int, mask: str = "") -> Make:
    more = {mask: torch.ones(1, frames, dtype=torch.long)} if mask else {}
    return lambda seed: {"input_features": _normal(seed, 1, bins, frames), **more}


def _gemma_4(seed: int, size: int = 48) -> Inputs:
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
    return {"pixel_values": _normal(seed, 1, 16, size).sigmoid(), "image_position_ids": places}


def _with_merge_sizes(seed: int) -> Inputs:
    return {**grid(14, temporal=1)(seed), "image_merge_sizes": torch.tensor([2])}


def _lfm_2(seed: int) -> Inputs:
    mask = torch.ones(1, 16, dtype=torch.long)
    return {
        "pixel_values": _normal(seed, 1, 16, 588),
        "spatial_shapes": torch.tensor([[4, 4]]),
        "pixel_attention_mask": mask,
    }


def _two_sizes(seed: int) -> Inputs:
    return {**squares(seed), "high_res_pixel_values": squares(seed + 100)["pixel_values"]}


def _strips(seed: int) -> Inputs:
    """One image of 4 x 8 patches in a row."""
    return {"pixel_values": _normal(seed, 1, 3, 14, 32 * 14), "target_sizes": torch.tensor([[4, 8]])}


def _asked(seed: int, frames: int = 0) -> Inputs:
    """With a question for the part that looks at the image."""
    shape = (1, frames, 3, 28, 28) if frames else (1, 3, 28, 28)
    ids = torch.tensor([[3, 4, 5]])
    return {"pixel_values": _normal(seed, *shape), "qformer_input_ids": ids, "qformer_attention_mask": ids * 0 + 1}


def _moss(seed: int) -> Inputs:
    return {**sound(16, 64, "input_features_mask")(seed), "padding_mask": torch.ones(1, 64, dtype=torch.long)}


def _stacked(seed: int) -> Inputs:
    """Frames of a sound, stacked by seven."""
    return {"input_features": _normal(seed, 1, 9, 7 * 16), "input_features_mask": torch.ones(1, 9, dtype=torch.long)}


def _pooled(seed: int) -> Inputs:
    """One crop of 4 x 4 patches; each token is pooled of four of them."""
    corners = torch.arange(16).reshape(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    return {
        "pixel_values": _normal(seed, 1, 16, 588),
        "image_token_pooling": corners,
        "image_grids": torch.tensor([[2, 2, 0, 0]]),
    }


def _frames_first(seed: int) -> Inputs:
    return {"input_features": _normal(seed, 1, 30, 16)}


def _mllama(seed: int) -> Inputs:
    one = torch.tensor([[1]])
    pixels = squares(seed)["pixel_values"][None, None]
    return {"pixel_values": pixels, "aspect_ratio_ids": one, "aspect_ratio_mask": one[None]}


_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_AXES_HALF = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
    }
}
_AXES_ERNIE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]}}
_AXES_4 = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2, 2]}}
_QWEN_3 = {
    "text_config": _AXES,
    "vision_config": {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, "patch_size": 16},
}
_QWEN_2_5 = {"text_config": _AXES, "vision_config": {"fullatt_block_indexes": [1], "window_size": 56}}
_GLM = {"text_config": _AXES, "vision_config": {"image_size": 56}}
_OMNI = {
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "audio_start_token_id": 306,
    "audio_end_token_id": 307,
    "audio_config": {"output_dim": HIDDEN},
}
_PINPOINTS = {"image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]]}
_SMALL_PATCHES = {"vision_config": {"image_size": 28, "patch_size": 7}}

_GEMMA_3 = {"mm_tokens_per_image": 4, "vision_config": {"image_size": 56, "patch_size": 14}}
_GEMMA_4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
_GOT = {
    "vision_config": {
        "image_size": 256,
        "patch_size": 16,
        "output_channels": 16,
        "global_attn_indexes": [1],
        "window_size": 4,
        "mlp_dim": 48,
    }
}
_QUERIES = {
    "num_query_tokens": 4,
    "image_text_hidden_size": 32,
    "text_config": {"word_embed_proj_dim": HIDDEN},
    "qformer_config": {"encoder_hidden_size": 32},
}
_SMALL_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NONE = Tiny({}, squares)  # of a class that has no method for features, or is refused before it gets some

TINY: dict[str, Tiny] = {
    "shieldgemma2": Tiny(_GEMMA_3, lambda s: squares(s, 56)),
    "pp_chart2table": Tiny(_GOT, lambda s: squares(s, 256)),
    "blip-2": Tiny(_QUERIES, squares),
    "instructblip": Tiny(_QUERIES, _asked),
    "instructblipvideo": Tiny(_QUERIES, lambda s: _asked(s, 2), "video"),
    "cosmos3_omni": Tiny({}, grid(14)),
    "cosmos3_edge": Tiny({"text_config": _AXES}, grid(14, 1)),
    "hyperclovax_vision_v2": Tiny({}, grid(14)),
    "lfm3_vl": Tiny({}, grid(14)),
    "minimax_m3_vl": Tiny({}, grid(14)),
    "mistral_large4": Tiny({"text_config": {"num_key_value_heads": 4}}, sized),
    "janus": Tiny({"vision_config": {"projection_dim": HIDDEN}}, squares),
    "deepseek_vl_hybrid": Tiny(
        {"high_res_vision_config": {"global_attn_indexes": [0], "output_channels": 16, "mlp_dim": 48}}, _two_sizes
    ),
    "deepseek_ocr2": Tiny(
        {
            "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
            "vision_config": {
                "sam_config": {
                    **_SMALL_ENCODER,
                    "image_size": 128,
                    "patch_size": 16,
                    "output_channels": 16,
                    "window_size": 4,
                    "global_attn_indexes": [1],
                    "mlp_dim": 48,
                    "downsample_channels": [24, 32],
                },
                "encoder_config": {**_SMALL_ENCODER, "num_key_value_heads": 2},
            },
        },
        lambda s: squares(s, 128),
    ),
    "emu3": Tiny(
        {
            "vocabulary_map": {
                "<image>": IMAGE,
                "<|extra_200|>": 306,
                **{f"<|visual token {code:06d}|>": 307 + code for code in range(8)},
            },
            "vq_config": {
                "codebook_size": 8,
                "embed_dim": 4,
                "base_channels": 32,
                "channel_multiplier": [1, 1, 2],
                "num_res_blocks": 1,
                "attn_resolutions": [2],
                "num_attention_heads": 1,
            },
        },
        lambda s: {**squares(s, 16), "image_sizes": torch.tensor([[16, 16]])},
    ),
    "chameleon": Tiny(
        {
            "vocabulary_map": {"<image>": IMAGE, **{f"IMGIMG{'ABCDEFGH'[code]}Z": 307 + code for code in range(8)}},
            "vq_config": {
                "num_embeddings": 8,
                "embed_dim": 8,
                "latent_channels": 8,
                "resolution": 16,
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1],
                "num_res_blocks": 1,
            },
        },
        lambda s: squares(s, 16),
    ),
    **dict.fromkeys(
        ("granite_speech", "granite_speech_plus"),
        Tiny(
            {
                "has_lora_adapter": False,
                "encoder_config": {
                    "hidden_dim": 32,
                    "num_layers": 2,
                    "input_dim": 16,
                    "dim_head": 16,
                    "output_dim": 8,
                    "context_size": 16,
                    "max_pos_emb": 32,
                },
                "projector_config": {"encoder_hidden_size": 32},
            },
            _frames_first,
            "audio",
        ),
    ),
    "qwen4_exp": Tiny({"text_config": {**_DELTA, **_BLOCK_INDEX}}, grid(16)),
    "muse_glimmer": Tiny({"out_hidden_size": 128}, grid(14)),
    "muse_spark": Tiny(
        {
            "out_hidden_size": 128,
            "text_config": {"moe_hidden_size": HIDDEN},
            "audio_config": {"num_hidden_layers": 4, "out_hidden_size": HIDDEN},
        },
        grid(14),
    ),
    "inkling2": Tiny({"vision_config": {"text_hidden_size": HIDDEN, "projection_hidden_dim": 32}}, grid(20, 1)),
    "molmo2": Tiny(
        {
            "image_patch_id": IMAGE,
            "adapter_config": {
                "vision_feature_layer": [1, 0],
                "hidden_size": 32,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "intermediate_size": 48,
                "text_hidden_size": HIDDEN,
            },
            "vision_config": {"image_size": [56, 56], "num_position_embeddings": 16},
            "text_config": {"additional_vocab_size": 16},
        },
        _pooled,
    ),
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), Tiny({"insert_layer_id": 0}, _strips, axis=3)),
    "moss_transcribe_diarize": Tiny({"audio_config": {"max_source_positions": 32}}, _moss, "audio"),
    "voxtral_realtime": Tiny({}, sound(16, 64), "audio"),
    "glm5_next": Tiny({"text_config": {"num_key_value_heads": 4, "index_kpool": 4}}, grid(14)),
    "dots3_note": Tiny(
        {
            "text_config": {"num_key_value_heads": 4, "head_dim": 32, "per_layer_config": {}},
            "vision_config": {
                "adapter_in_dim": 32,
                "adapter_out_dim": HIDDEN,
                "mlp_layer_types": ["dense", "sparse"],
                "num_local_experts": 4,
                "per_layer_config": {},
            },
            "audio_config": {"adapter_input_size": 32, "adapter_out_dim": HIDDEN},
        },
        grid(14, temporal=1),
    ),
    "gemma4_unified": Tiny({"vision_config": _GEMMA_4_VISION}, lambda s: _gemma_4(s, 192)),
    "fuyu": Tiny({}, lambda s: {"pixel_values": _normal(s, 1, 4, 2700)}),
    "cohere_compass": Tiny(
        {"text_config": {"rope_parameters": {"full_attention": _AXES["rope_parameters"]}}}, grid(14)
    ),
    "fun_asr_nano": Tiny({"adaptor_config": {"intermediate_size": 16}}, _stacked, "audio"),
    **dict.fromkeys(("blip", "git", "idefics", "kosmos-2", "kosmos-2.5", "mistral4", "pi0", "phi4_multimodal"), NONE),
    "llava": Tiny({}, squares),
    "vipllava": Tiny({"vision_feature_layers": [-1, -2]}, squares),
    "fast_vlm": Tiny({}, squares),
    "aya_vision": Tiny(_SMALL_PATCHES, squares),
    "cohere2_vision": Tiny(_SMALL_PATCHES, squares),
    "internvl": Tiny({}, squares),
    "qianfan_ocr": Tiny({}, squares),
    "llava_next": Tiny(_PINPOINTS, tiles),
    "llava_next_video": Tiny(_PINPOINTS, tiles),
    "llava_onevision": Tiny(_PINPOINTS, tiles),
    "granite4_vision": Tiny(
        {
            "deepstack_layer_map": [[-1, 0]],
            "use_spatial_sampling": False,
            "downsample_rate": "1/2",
            "vision_config": {"hidden_size": 128, "num_attention_heads": 4},
            **_PINPOINTS,
        },
        tiles,
    ),
    "qwen2_vl": Tiny({"text_config": _AXES, "vision_config": {"hidden_size": HIDDEN, "embed_dim": 32}}, grid(14)),
    "qwen2_5_vl": Tiny(_QWEN_2_5, grid(14)),
    "qwen3_vl": Tiny(_QWEN_3, grid(16)),
    "qwen3_vl_moe": Tiny(_QWEN_3, grid(16)),
    "qwen3_5": Tiny({"vision_config": {"patch_size": 16, "num_position_embeddings": 64}}, grid(16)),
    "qwen3_5_moe": Tiny({"vision_config": {"patch_size": 16, "num_position_embeddings": 64}}, grid(16)),
    "video_llama_3": Tiny({}, _with_merge_sizes),
    "glm4v": Tiny(_GLM, grid(14)),
    "glm46v": Tiny(_GLM, grid(14)),
    "glmga": Tiny(_GLM, grid(14)),
    "glm4v_moe": Tiny({"text_config": _AXES_HALF, "vision_config": {"image_size": 56}}, grid(14)),
    "glm_ocr": Tiny(_GLM, grid(14)),
    "ernie4_5_vl_moe": Tiny({"text_config": _AXES_ERNIE}, grid(14, temporal=1)),
    "paddleocr_vl": Tiny({"text_config": _AXES}, grid(14, 1, square=True, flat=False)),
    "exaone4_5": Tiny({}, grid(14)),
    "gemma3": Tiny(_GEMMA_3, lambda s: squares(s, 56)),
    "paligemma": Tiny({"projection_dim": HIDDEN, "vision_config": {"projection_dim": HIDDEN}}, squares),
    "idefics2": Tiny(
        {
            "perceiver_config": {
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "hidden_size": HIDDEN,
                "num_key_value_heads": 2,
                "resampler_n_heads": 4,
                "resampler_head_dim": 16,
            }
        },
        lambda s: masked(s, 28, 1),
    ),
    "idefics3": Tiny({"scale_factor": 2, "vision_config": {"image_size": 56}}, lambda s: masked(s, 56, 2)),
    "smolvlm": Tiny({"scale_factor": 2, "vision_config": {"image_size": 56}}, lambda s: masked(s, 56, 2)),
    "mistral3": Tiny({"vision_config": {"image_size": 112}}, sized),
    "lighton_ocr": Tiny({"vision_config": {"image_size": 112}}, sized),
    "llama4": Tiny(
        {
            "vision_config": {
                "image_size": 56,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
                "pixel_shuffle_ratio": 0.5,
                "intermediate_size": 128,
            }
        },
        lambda s: squares(s, 56),
    ),
    "ovis2": Tiny(
        {
            "vision_config": {
                "image_size": 56,
                "vocab_size": 64,
                "num_visual_indicator_tokens": 5,
                "hidden_stride": 2,
            },
            "visual_indicator_token_ids": [306, 307, 308, 309, 310],
        },
        lambda s: squares(s, 56),
    ),
    "perception_lm": Tiny({}, squares),
    "got_ocr2": Tiny(_GOT, lambda s: squares(s, 256)),
    "deepseek_vl": Tiny({}, squares),
    "aria": Tiny({"projector_patch_to_query_dict": {"4": 4, "16": 4}}, squares),
    "kimi_k25": Tiny(
        {
            "projection_hidden_size": 32,
            "text_config": {"num_key_value_heads": 4},
            "vision_config": {"pos_emb_height": 8, "pos_emb_width": 8},
        },
        grid(14, 1, square=True, flat=False),
    ),
    "lfm2_vl": Tiny({"downsample_factor": 2, "vision_config": {"num_patches": 16, "patch_size": 14}}, _lfm_2),
    "gemma4": Tiny(
        {"text_config": {"use_bidirectional_attention": "vision"}, "vision_config": _GEMMA_4_VISION}, _gemma_4
    ),
    "mllama": Tiny(
        {
            "text_config": {"cross_attention_layers": [1]},
            "vision_config": {
                "attention_heads": 2,
                "num_global_layers": 1,
                "intermediate_layers_indices": [0, 1],
                "vision_output_dim": 96,
                "max_num_tiles": 1,
                "supported_aspect_ratios": [[1, 1]],
            },
        },
        _mllama,
    ),
    "video_llava": Tiny({}, squares),
    "hunyuan_vl": Tiny(
        {"text_config": _AXES_4, "vision_config": {"text_hidden_size": HIDDEN, "max_image_size": 64, "patch_size": 16}},
        grid(16, 1, square=True),
    ),
    "step3p7": Tiny({"text_config": {"sliding_window": 20}}, squares),
    "granite_docling": Tiny(
        {
            "vision_config": {
                "image_size": 56,
                "patch_size": 14,
                "out_hidden_size": HIDDEN,
                "scale_factor": 2,
                "deepstack_visual_indexes": [0, 1],
            }
        },
        lambda s: {
            "pixel_values": squares(s, 56)["pixel_values"][None],
            "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
        },
    ),
    "qwen2_audio": Tiny(
        {"audio_config": {"max_source_positions": 32}}, sound(16, 64, "feature_attention_mask"), "audio"
    ),
    "voxtral": Tiny({"audio_config": {"max_source_positions": 32, "intermediate_size": 128}}, sound(16, 64), "audio"),
    "glmasr": Tiny(
        {"audio_config": {"max_position_embeddings": 32, "intermediate_size": 128}},
        sound(16, 64, "input_features_mask"),
        "audio",
    ),
    "qwen3_asr": Tiny(
        {
            "audio_config": {
                "output_dim": HIDDEN,
                "n_window": 50,
                "n_window_infer": 400,
                "downsample_hidden_size": 8,
            }
        },
        sound(16, 100, "input_features_mask"),
        "audio",
    ),
    "gemma3n": Tiny(  # the encoder is timm's
        {
            "vision_soft_tokens_per_image": 4,
            "vision_config": {"architecture": "mobilenetv3_small_050", "hidden_size": 288, "model_args": None},
        },
        lambda s: squares(s, 64),
    ),
    "qwen2_5_omni_thinker": Tiny({**_OMNI, **_QWEN_2_5}, grid(14)),
    "qwen3_omni_moe_thinker": Tiny({**_OMNI, **_QWEN_3}, grid(16)),
}
