"""Runs vLLM's offline examples of images, sounds and encoder-decoder models through `python -m mainspring.compat.vllm`.

    python -P benchmarks/vllm_media_examples.py vllm-0.11.0    # an unpacked source distribution, as for moves_over.py
    python -P benchmarks/vllm_media_examples.py vllm-0.11.0 --only vision_language.py:qwen2_vl --keep FOLDER

Each function of a script's `model_example_map` is an example. It runs as it is, but for three things: names on the hub
mean tiny checkpoints with random weights and real processors, which are made here; pictures, sounds and videos are
those of `vllm_assets.py`; and `tensor_parallel_size` becomes 1. An example runs if it ends with exit code 0 and has
printed something. Some processors need `pip install "mainspring[video]" num2words`.
The table of docs/migrating.md is what `--table` prints.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]
BYTES = 256  # the first token ids, see media_folders.py
LIMIT_S = 240  # seconds for one example
LONGEST = 32_768  # tokens: the largest `max_model_len` of an example
NOTHING: Mapping[str, Any] = MappingProxyType({})

SCRIPTS = [
    "vision_language.py",
    "vision_language_multi_image.py",
    "vision_language_pooling.py",
    "audio_language.py",
    "encoder_decoder_multimodal.py",
    "mistral-small.py",
    "qwen2_5_omni/only_thinker.py",
]
# names of scripts that have no `model_example_map` -> their arguments
MODES = {
    "mistral-small.py": {"simple": "simple --format hf", "advanced": "advanced --format hf"},
    "qwen2_5_omni/only_thinker.py": {
        name: f"--query-type {name}" for name in ("mixed_modalities", "use_audio_in_video", "multi_audios")
    },
}
ARGUMENTS = {"vision_language_pooling.py": "--model-name {name}", "": "--model-type {name}"}
MORE_ARGUMENTS = {
    "vision_language.py:llava-next-video": "--modality video",
    "vision_language_pooling.py:jinavl_reranker": "--task scoring --modality text+images",
}
# what replaces names of vLLM's package that stand for downloads
ASSETS = {
    r"from vllm\.assets\.\w+ import": "from vllm_assets import",
    r"from vllm\.multimodal\.utils import": "from vllm_assets import",
    r"tensor_parallel_size=\d+": "tensor_parallel_size=1",
    r', revision="refs/pr/\d+"': "",
}

OWN_CODE = "its checkpoint is for code of its own, not for a class of transformers"
# name of an example, or on the hub -> why no checkpoint of its kind is made
NOT_MADE = {
    "phi4_mm": OWN_CODE,
    "google/gemma-3n-E2B-it": "its class needs timm",
    "ibm-granite/granite-speech-3.3-8b": "its processor needs torchaudio",
    "mistralai/Voxtral-Mini-3B-2507": "it is in Mistral's own form, which is read for text models only",
}


class Model(NamedTuple):
    """How a tiny checkpoint is made. A field of a config whose value is a special text gets the id of this token."""

    model_type: str
    names: str  # on the hub
    processor: Callable[[Any], Any]  # of a tokenizer
    special: str  # texts that are tokens
    fields: Mapping[str, Any]  # of the config
    placeholder: str = "<image>"  # in prompts
    named: Mapping[str, str] = NOTHING  # attributes of the tokenizer
    vocab_size: int = 0  # if an example names tokens that the tokenizer does not have


def images_of(module: str, name: str, **options: Any) -> Any:
    """The image processor of transformers that needs no torchvision, if there is one."""
    import transformers

    try:
        home: Any = import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    except ImportError:
        return getattr(transformers, f"{name}ImageProcessor")(**options)
    return getattr(home, f"{name}ImageProcessorPil")(**options)


def processor(name: str, *parts: Any, videos: str = "", **options: Any) -> Any:
    """A processor of transformers. videos: its part for them, without which it is made if torchvision is missing."""
    import transformers

    import media_folders

    if videos:
        try:
            parts = (*parts, getattr(transformers, f"{videos}VideoProcessor")())
        except ImportError:
            parts = (*parts, media_folders._NoVideo())
    loose = {"check_argument_for_proper_class": media_folders._any}
    return type(name, (getattr(transformers, name),), loose)(*parts, **options)


_TILES = [[28, 56], [56, 28], [56, 56]]
_CLASS_TOKEN = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def llava(tokenizer: Any) -> Any:
    images = images_of("clip", "CLIP", size={"shortest_edge": 56}, crop_size=56)
    return processor("LlavaProcessor", images, tokenizer, **_CLASS_TOKEN)


def llava_next(tokenizer: Any) -> Any:
    sizes = {"size": {"shortest_edge": 28}, "crop_size": 28, "image_grid_pinpoints": _TILES}
    return processor("LlavaNextProcessor", images_of("llava_next", "LlavaNext", **sizes), tokenizer, **_CLASS_TOKEN)


def llava_next_video(tokenizer: Any) -> Any:
    import transformers

    sizes = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    images = images_of("llava_next", "LlavaNext", image_grid_pinpoints=_TILES, **sizes)
    videos = transformers.LlavaNextVideoVideoProcessor(**sizes)
    return transformers.LlavaNextVideoProcessor(videos, images, tokenizer, **_CLASS_TOKEN)


def llava_onevision(tokenizer: Any) -> Any:
    sizes = {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": _TILES}
    images = images_of("llava_onevision", "LlavaOnevision", **sizes)
    rows = {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}
    return processor("LlavaOnevisionProcessor", images, tokenizer, videos="LlavaOnevision", **rows)


def aria(tokenizer: Any) -> Any:
    return processor("AriaProcessor", images_of("aria", "Aria"), tokenizer)


def aya_vision(tokenizer: Any) -> Any:
    images = images_of("got_ocr2", "GotOcr2", size={"height": 28, "width": 28}, crop_to_patches=True)
    return processor("AyaVisionProcessor", images, tokenizer, patch_size=7, downsample_factor=2, img_size=28)


def cohere2_vision(tokenizer: Any) -> Any:
    images = images_of("cohere2_vision", "Cohere2Vision", size={"height": 28, "width": 28}, patch_size=2)
    return processor("Cohere2VisionProcessor", images, tokenizer)


def fuyu(tokenizer: Any) -> Any:
    return processor("FuyuProcessor", images_of("fuyu", "Fuyu", size={"height": 120, "width": 120}), tokenizer)


def gemma3(tokenizer: Any) -> Any:
    images = images_of("gemma3", "Gemma3", size={"height": 56, "width": 56})
    return processor("Gemma3Processor", images, tokenizer, image_seq_length=4)


def glm4v(tokenizer: Any) -> Any:
    images = images_of("glm4v", "Glm4v", size={"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 64})
    return processor("Glm4vProcessor", images, tokenizer, videos="Glm4v")


def idefics3(tokenizer: Any) -> Any:
    sizes = {"size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}}
    return processor("Idefics3Processor", images_of("idefics3", "Idefics3", **sizes), tokenizer, image_seq_len=169)


def llama4(tokenizer: Any) -> Any:
    images = images_of("llama4", "Llama4", size={"height": 56, "width": 56}, max_patches=4)
    return processor("Llama4Processor", images, tokenizer, patch_size=14, pixel_shuffle_ratio=0.5)


def smolvlm(tokenizer: Any) -> Any:
    sizes = {"size": {"longest_edge": 4 * 384}, "max_image_size": {"longest_edge": 384}}
    images = images_of("smolvlm", "SmolVLM", **sizes)
    return processor("SmolVLMProcessor", images, tokenizer, videos="SmolVLM", image_seq_len=81)


def pixtral(merge: int) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        sizes = {"size": {"longest_edge": 112}, "patch_size": {"height": 14 * merge, "width": 14 * merge}}
        images = images_of("pixtral", "Pixtral", **sizes)
        return processor("PixtralProcessor", images, tokenizer, patch_size=14, spatial_merge_size=merge)

    return make


def paligemma(tokenizer: Any) -> Any:
    images = images_of("siglip", "Siglip", size={"height": 28, "width": 28})
    images.image_seq_length = 4
    return processor("PaliGemmaProcessor", images, tokenizer)


def qwen(name: str, videos: str = "Qwen2VL", patch: int = 14) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}
        images = images_of("qwen2_vl", "Qwen2VL", size=size, patch_size=patch)
        return processor(f"{name}Processor", images, tokenizer, videos=videos)

    return make


def omni(tokenizer: Any) -> Any:
    import transformers

    images = images_of("qwen2_vl", "Qwen2VL", size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64})
    sounds = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    made = processor("Qwen2_5OmniProcessor", images, None, sounds, tokenizer)
    made.video_processor = transformers.Qwen2VLVideoProcessor()
    return made


def hears(name: str) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        import transformers

        sounds = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
        return processor(f"{name}Processor", sounds, tokenizer)

    return make


_QWEN = "<|image_pad|> <|video_pad|> <|vision_start|> <|vision_end|> <|im_start|> <|im_end|>"
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
_GLM_PLACE = "<|begin_of_image|><|image|><|end_of_image|>"
_GLM = "<|image|> <|video|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> [gMASK] <sop>"
_GLM_IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
_IMAGE = {"image_token_id": "<image>", "image_token_index": "<image>"}
_PIXTRAL = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_PIXTRAL |= {"num_attention_heads": 2, "image_size": 112, "patch_size": 14}
_ROWS = " ".join(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_IDEFICS = f"<image> <fake_token_around_image> <global-img> <end_of_utterance> <|im_start|> {_ROWS}"
_AYA = "<image> <|START_OF_IMG|> <|END_OF_IMG|> <|IMG_PATCH|> <|IMG_LINE_BREAK|> TILE TILE_GLOBAL"
_GEMMA = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
_OMNI = {
    f"{kind}_token": f"<|{text}|>"
    for kind, text in {
        "image": "IMAGE",
        "audio": "AUDIO",
        "video": "VIDEO",
        "vision_bos": "vision_bos",
        "vision_eos": "vision_eos",
        "audio_bos": "audio_bos",
        "audio_eos": "audio_eos",
    }.items()
}
_COMMAND = {"boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>", "image_token": "<|IMG_PATCH|>"}
_COMMAND |= {"img_line_break_token": "<|IMG_LINE_BREAK|>"}
_CLIP = {"vision_config": {"image_size": 56}, "vision_feature_layer": -1}

MODELS = [
    Model("llava", "llava-hf/llava-1.5-7b-hf omni-research/Tarsier-7b", llava, "<image>", {**_IMAGE, **_CLIP}),
    Model(
        "llava",
        "TIGER-Lab/Mantis-8B-siglip-llama3",
        llava,
        "<image>",
        {**_IMAGE, **_CLIP},
        vocab_size=128_256,
    ),
    Model("llava_next", "llava-hf/llava-v1.6-mistral-7b-hf royokong/e5-v", llava_next, "<image>", _IMAGE),
    Model(
        "llava_onevision",
        "llava-hf/llava-onevision-qwen2-7b-ov-hf",
        llava_onevision,
        "<image> <video>",
        {**_IMAGE, "video_token_id": "<video>", "video_token_index": "<video>", "vision_feature_layer": -1},
    ),
    Model(
        "llava",
        "mistral-community/pixtral-12b",
        pixtral(1),
        "[IMG] [IMG_BREAK] [IMG_END] [INST] [/INST]",
        {
            "image_token_id": "[IMG]",
            "image_token_index": "[IMG]",
            "vision_config": _PIXTRAL,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        "[IMG]",
    ),
    Model(
        "mistral3",
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        pixtral(2),
        "[IMG] [IMG_BREAK] [IMG_END] [INST] [/INST]",
        {"image_token_id": "[IMG]", "image_token_index": "[IMG]"},
        "[IMG]",
    ),
    Model(
        "aria",
        "rhymes-ai/Aria",
        aria,
        "<|img|> <fim_prefix> <fim_suffix>",
        {
            "image_token_id": "<|img|>",
            "image_token_index": "<|img|>",
            "vision_config": {"image_size": 980},
            "projector_patch_to_query_dict": {"1225": 128, "4900": 256},
        },
        "<|img|>",
        {"image_token": "<|img|>"},
        vocab_size=100_352,
    ),
    Model(
        "aya_vision",
        "CohereForAI/aya-vision-8b",
        aya_vision,
        _AYA,
        {"image_token_id": "<|IMG_PATCH|>", "image_token_index": "<|IMG_PATCH|>"},
    ),
    Model("fuyu", "adept/fuyu-8b", fuyu, "|SPEAKER| |NEWLINE|", {"image_token_id": "|SPEAKER|"}),
    Model(
        "gemma3",
        "google/gemma-3-4b-it",
        gemma3,
        "<image_soft_token> <start_of_image> <end_of_image>",
        {
            "image_token_id": "<image_soft_token>",
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        "<start_of_image>",
        _GEMMA,
    ),
    Model("glm4v", "zai-org/GLM-4.1V-9B-Thinking", glm4v, _GLM, _GLM_IDS, _GLM_PLACE),
    Model("glm4v_moe", "zai-org/GLM-4.5V zai-org/GLM-4.5V-FP8", glm4v, _GLM, _GLM_IDS, _GLM_PLACE),
    Model(
        "idefics3",
        "HuggingFaceM4/Idefics3-8B-Llama3",
        idefics3,
        _IDEFICS,
        {**_IMAGE, "scale_factor": 2, "vision_config": {"image_size": 364}},
    ),
    Model(
        "smolvlm",
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
        smolvlm,
        _IDEFICS + " <video>",
        {**_IMAGE, "scale_factor": 3, "vision_config": {"image_size": 384}},
    ),
    Model(
        "paligemma",
        "google/paligemma-3b-mix-224 google/paligemma2-3b-ft-docci-448",
        paligemma,
        "<image>",
        _IMAGE,
    ),
    Model(
        "qwen2_vl",
        "Qwen/Qwen2-VL-7B-Instruct omni-research/Tarsier2-Recap-7b",
        qwen("Qwen2VL"),
        _QWEN,
        _QWEN_IDS,
        _QWEN_PLACE,
    ),
    Model("qwen2_5_vl", "Qwen/Qwen2.5-VL-3B-Instruct", qwen("Qwen2_5_VL"), _QWEN, _QWEN_IDS, _QWEN_PLACE),
    Model("qwen3_vl", "Qwen/Qwen3-VL-4B-Instruct", qwen("Qwen3VL", "Qwen3VL", 16), _QWEN, _QWEN_IDS, _QWEN_PLACE),
    Model(
        "qwen3_vl_moe", "Qwen/Qwen3-VL-30B-A3B-Instruct", qwen("Qwen3VL", "Qwen3VL", 16), _QWEN, _QWEN_IDS, _QWEN_PLACE
    ),
    Model(
        "qwen2_audio",
        "Qwen/Qwen2-Audio-7B-Instruct",
        hears("Qwen2Audio"),
        "<|AUDIO|> <|audio_bos|> <|audio_eos|>",
        {
            "audio_token_id": "<|AUDIO|>",
            "audio_token_index": "<|AUDIO|>",
            "audio_config": {"max_source_positions": 100},  # for the two seconds of its processor
        },
        "<|AUDIO|>",
    ),
    Model(
        "qwen2_5_omni",
        "Qwen/Qwen2.5-Omni-7B",
        omni,
        " ".join(_OMNI.values()),
        {f"{kind}_token_id": _OMNI[f"{kind}_token"] for kind in ("image", "video", "audio")}
        | {"vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>"}
        | {"audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>"},
        "<|vision_bos|><|IMAGE|><|vision_eos|>",
        _OMNI,
    ),
    Model(
        "cohere2_vision",
        "CohereLabs/command-a-vision-07-2025",
        cohere2_vision,
        " ".join(_COMMAND.values()),
        {"image_token_id": "<|IMG_PATCH|>"},
        "<|IMG_PATCH|>",
        _COMMAND,
    ),
    Model(
        "llama4",
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        llama4,
        "<|image|> <|image_start|> <|image_end|> <|patch|> <|tile_x_separator|> <|tile_y_separator|>",
        {"image_token_id": "<|patch|>", "image_token_index": "<|patch|>"},
        "<|image|>",
    ),
    Model(
        "llava_next_video",
        "llava-hf/LLaVA-NeXT-Video-7B-hf",
        llava_next_video,
        "<image> <video>",
        {**_IMAGE, "video_token_id": "<video>", "video_token_index": "<video>"},
    ),
    Model(
        "whisper",
        "openai/whisper-large-v3-turbo",
        hears("Whisper"),
        "<|startoftranscript|>",
        {
            "decoder_start_token_id": "<|startoftranscript|>",
            "max_source_positions": 100,
            "max_target_positions": 448,
            "num_mel_bins": 16,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    Model("blip-2", "Salesforce/blip2-opt-2.7b", llava, "<image>", {}),
    Model("chameleon", "facebook/chameleon-7b", llava, "<image>", {}),
    Model("phi4_multimodal", "microsoft/Phi-4-multimodal-instruct", llava, "<image>", {}),
]

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type != 'text' %}PLACEHOLDER{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def make(model: Model, folder: Path) -> Path:
    """The checkpoint, in a folder that does not exist yet."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import media_folders
    from mainspring.benchmarks.tiny_media import NONE, TINY, draw, shrink

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    special = model.special.split()
    tokenizer = media_folders.byte_tokenizer(special, **model.named)
    tiny = TINY.get(model.model_type, NONE).fields
    if model.model_type == "qwen2_5_omni":
        tiny = {"thinker_config": TINY["qwen2_5_omni_thinker"].fields}
    merged: dict[str, Any] = {**tiny}
    for name, value in model.fields.items():
        merged[name] = {**tiny.get(name, {}), **value} if isinstance(value, dict) else value
    tokens = {name: text for name, text in model.fields.items() if isinstance(text, str) and text in special}
    config = shrink(CONFIG_MAPPING[model.model_type], {n: v for n, v in merged.items() if n not in tokens})
    for name, value in model.fields.items():
        if isinstance(value, dict) and "model_type" in value:  # a part of another class than usual
            setattr(config, name, CONFIG_MAPPING[value["model_type"]](**value))
    parts = [config, config.get_text_config(), getattr(config, "thinker_config", config)]
    for part in parts:
        for name, value in {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}.items():
            setattr(part, name, value)
        for name, text in tokens.items():
            if hasattr(part, name):
                setattr(part, name, tokenizer.convert_tokens_to_ids(text))
        if hasattr(part, "vocab_size"):
            part.vocab_size = max(model.vocab_size, -(-len(tokenizer) // 64) * 64)
        if hasattr(part, "max_position_embeddings"):
            part.max_position_embeddings = LONGEST
    auto: Any = transformers.AutoModelForMultimodalLM
    if model.model_type == "whisper":
        auto = transformers.AutoModelForSpeechSeq2Seq
    torch.manual_seed(0)
    made = draw(auto.from_config(config, dtype=torch.float32), (1.0, 1.5))
    for module in made.modules():  # then only bytes are chosen
        if isinstance(module, torch.nn.Linear) and module.out_features == config.get_text_config().vocab_size:
            module.weight.data[BYTES:] = 0
    made.generation_config.do_sample = False
    made.save_pretrained(folder)
    torch.save({}, folder / "spk_dict.pt")  # of Qwen2.5-Omni; no other class reads it
    used = model.processor(tokenizer)
    tokenizer.save_pretrained(folder)
    for name in ("image_processor", "feature_extractor", "video_processor"):
        if hasattr(getattr(used, name, None), "save_pretrained"):
            getattr(used, name).save_pretrained(folder)
    if isinstance(getattr(used, "video_processor", None), media_folders._NoVideo):  # then it can't be saved whole
        kept = ("image_seq_len", "num_image_tokens", "vision_feature_select_strategy")
        fields = {"processor_class": type(used).__name__, **{name: getattr(used, name, None) for name in kept}}
        fields = {name: value for name, value in fields.items() if value is not None}
        (folder / "processor_config.json").write_text(json.dumps(fields))
    else:
        used.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("PLACEHOLDER", model.placeholder))
    return folder


# --- Examples -------------------------------------------------------------------------------------


class Example(NamedTuple):
    script: str
    name: str  # of the example, as the script's argument names it
    code: str
    arguments: str

    @property
    def hub_name(self) -> str:
        """Of its model."""
        named = re.search(r"""(?:model(?:_name)?=|model_name = |_download\(\s*)["']([\w.-]+/[\w.-]+)["']""", self.code)
        if named is None:  # it calls a function that is given the name
            named = re.search(r"""["']([\w.-]+/[\w.-]+)["']\)""", self.code)
        return named[1] if named else ""

    @property
    def title(self) -> str:
        return f"{self.script}:{self.name}"


def examples_of(folder: Path, script: str) -> list[Example]:
    text = (folder / script).read_text()
    if script in MODES:
        return [Example(script, name, text, arguments) for name, arguments in MODES[script].items()]
    body = ast.parse(text).body
    functions = {
        node.name: ast.get_source_segment(text, node) or "" for node in body if isinstance(node, ast.FunctionDef)
    }
    table = next(
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "model_example_map"
    )
    assert isinstance(table, ast.Dict)
    found = []
    for key, value in zip(table.keys, table.values, strict=True):
        name = ast.literal_eval(key) if key else ""
        given = f"{ARGUMENTS.get(script, ARGUMENTS[''])} {MORE_ARGUMENTS.get(f'{script}:{name}', '')}"
        found.append(Example(script, name, functions[ast.unparse(value)], given.format(name=name)))
    return found


class Result(NamedTuple):
    example: Example
    outcome: str  # runs, fails, not run
    reason: str


def run(example: Example, folder: Path, models: Path, work: Path) -> Result:
    import vllm_assets

    out = work / re.sub(r"\W+", "_", example.title)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    text = (folder / example.script).read_text()
    for pattern, ours in ASSETS.items():
        text = re.sub(pattern, ours, text)
    text = re.sub(r'(url_\d = )"(https:[^"]+)"', lambda found: f'{found[1]}"{vllm_assets.data_url(found[2])}"', text)
    script = out / Path(example.script).name
    script.write_text(text)
    command = [sys.executable, "-P", "-m", "mainspring.compat.vllm", "--models", str(models), str(script)]
    paths = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(
            [*command, *example.arguments.split()],
            cwd=out,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Result(example, "fails", f"not done after {LIMIT_S} s")
    (out / "stdout.txt").write_text(done.stdout)
    (out / "stderr.txt").write_text(done.stderr)
    if done.returncode:
        errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*", done.stderr, re.MULTILINE)
        reason = (errors or done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
        return Result(example, "fails", re.sub(r"^([a-z_]\w*\.)+|prompt \d+: ", "", reason)[:300])
    if not re.sub(r"[-\s]", "", done.stdout):
        return Result(example, "fails", "it printed nothing")
    several = re.search(r"tensor_parallel_size=(\d+)", example.code)
    return Result(example, "runs", f"on one device; the example asks for {several[1]}" if several else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with an unpacked source distribution")
    parser.add_argument("--only", default="", metavar="REGEX", help="examples whose title matches")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep checkpoints and outputs here")
    parser.add_argument("--table", action="store_true", help="print rows of Markdown")
    args = parser.parse_args()
    folder = args.source.resolve() / "examples" / "offline_inference"
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    examples = [one for script in SCRIPTS for one in examples_of(folder, script) if re.search(args.only, one.title)]
    results = []
    with tempfile.TemporaryDirectory(prefix="media-examples-") as temporary:
        work = (args.keep or Path(temporary)).resolve()
        (work / "models").mkdir(parents=True, exist_ok=True)
        made: dict[str, str] = {}
        unmade = dict(NOT_MADE)
        for model in MODELS:
            if not {one.hub_name for one in examples} & set(model.names.split()):
                continue
            place = work / "models" / model.names.split()[0].replace("/", "--")
            try:
                made |= dict.fromkeys(model.names.split(), str(place if place.exists() else make(model, place)))
            except ImportError as error:
                shutil.rmtree(place, ignore_errors=True)
                needs = re.search(r"\w+ requires the \w+ library|Package `\w+` is required", str(error))
                unmade |= dict.fromkeys(model.names.split(), needs[0] if needs else str(error))
        names = work / "models.json"
        names.write_text(json.dumps(made))
        for one in examples:
            started = time.monotonic()
            if one.hub_name in made and one.name not in unmade:
                results.append(run(one, folder, names, work / "out"))
            else:
                why = unmade.get(one.name) or unmade.get(one.hub_name, OWN_CODE)
                results.append(Result(one, "not run", why))
            _, outcome, reason = results[-1]
            seconds = time.monotonic() - started
            print(f"{outcome:8} {seconds:5.1f} s  {one.title} ({one.hub_name})  {reason}", flush=True)
    counts = {outcome: sum(one.outcome == outcome for one in results) for outcome in ("runs", "fails", "not run")}
    print(", ".join(f"{outcome}: {count}" for outcome, count in counts.items()))
    if args.table:
        print_table(results)
    return 0


def print_table(results: list[Result]) -> None:
    """One row for each script and reason."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for one in results:
        rows.setdefault((one.example.script, one.outcome, one.reason), []).append(one.example.name)
    print("\n| script | examples | result |\n| --- | --- | --- |")
    for (script, outcome, reason), names in rows.items():
        shown, reason = ", ".join(f"`{name}`" for name in names), reason.replace("|", "\\|")
        print(f"| `{script.removesuffix('.py')}` | {shown} | {outcome}{': ' if reason else ''}{reason} |")


if __name__ == "__main__":
    sys.exit(main())
