"""Tiny random checkpoints with transformers' own processors of images and videos, and what transformers makes of them.

It needs torchvision.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import transformers

from mainspring import EngineArgs, LLMEngine
from mainspring.benchmarks import vllm_media_examples as checkpoints
from mainspring.benchmarks.vllm_media_examples import images_of
from media_models import COUNT

SIZES = {
    "max_model_len": 4096,
    "dtype": "float32",
    "kv_cache_memory_bytes": 256 << 20,
    "block_size": 16,
    "max_num_seqs": 8,
}
RATE = 8  # frames per second
QWEN_SIZE = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16}, "cap_pixels_per_frame": False}
SQUARE = {"size": {"height": 28, "width": 28}}


ALL = ("image", "images", "video", "videos", "both")
IMAGES = ("image", "images")


class Kind:
    """Of checkpoints: how prompts name a video and an image, which prompts transformers and we can serve, the smallest
    steps, and the arguments of their video processor."""

    def __init__(self, video: str, image: str, cases: tuple[str, ...] = ALL, steps: int = 64, **arguments: Any) -> None:
        self.video, self.image, self.cases, self.steps, self.arguments = video, image, cases, steps, arguments


QWEN = "<|vision_start|><|video_pad|><|vision_end|>", "<|vision_start|><|image_pad|><|vision_end|>"
GLM = "<|begin_of_video|><|video|><|end_of_video|>", "<|begin_of_image|><|image|><|end_of_image|>"
CROPPED = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
GLM_SIZE = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}}
SMALL = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16}}
GEMMA_SIZE = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
KINDS = {
    "llava_onevision": Kind("<video>", "<image>", **SQUARE),
    "llava_next_video": Kind("<video>", "<image>", **CROPPED),
    "qwen2_vl": Kind(*QWEN, **QWEN_SIZE),
    "qwen2_5_vl": Kind(*QWEN, do_sample_frames=True, fps=4, **QWEN_SIZE),
    "qwen3_vl": Kind(*QWEN, size={"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 64}, cap_pixels_per_frame=False),
    "qwen2_5_omni": Kind("<|vision_bos|><|VIDEO|><|vision_eos|>", "<|vision_bos|><|IMAGE|><|vision_eos|>", **QWEN_SIZE),
    "glm4v": Kind(*GLM, (*IMAGES, "video", "videos"), **GLM_SIZE),
    "glm46v": Kind(*GLM, (*IMAGES, "video", "videos"), **GLM_SIZE),
    "internvl": Kind("<video>", "<IMG_CONTEXT>", **SQUARE),
    "video_llava": Kind("<video>", "<image>", **CROPPED),
    "video_llama_3": Kind(
        "<|video_pad|>", "<|image_pad|>", size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
    ),
    "smolvlm": Kind(
        "<video>",
        "<image>",
        (*IMAGES, "video", "videos"),
        size={"longest_edge": 384},
        max_image_size={"longest_edge": 384},
    ),
    "gemma4": Kind("<|video|>", "<img>", steps=640, num_frames=8, **GEMMA_SIZE),
    "ernie4_5_vl_moe": Kind("<v><V></v>", "<i><I></i>", draw_on_frames=False, **SMALL),
    "minicpmv4_6": Kind("<V>", "<I>", ("image", "video"), scale_resolution=56, max_slice_nums=1),
    "molmo2": Kind("", "<|image|>", ("image",)),
    "kimi_k25": Kind("", "<|media_pad|>", IMAGES),
    "llama4": Kind("", "<|image|>", IMAGES),
    "lfm2_vl": Kind("", "<image>", IMAGES),
    "paddleocr_vl": Kind("", "<i><I></i>", IMAGES),
}
WIDE, HIGH = (16, 84, 56), (16, 56, 84)  # frames, width, height


def file_of_frames(count: int, width: int, height: int) -> bytes:
    """An MP4 file with squares that move."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(count):
            pixels = np.full((height, width, 3), (number * 9, 40, 200 - number * 5), np.uint8)
            pixels[number : number + 20, 2 * number : 2 * number + 20] = 255
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


def frames_of(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


def internvl(tokenizer: Any) -> Any:
    images = images_of("got_ocr2", "GotOcr2", **SQUARE)
    return transformers.InternVLProcessor(images, tokenizer, transformers.InternVLVideoProcessor(), image_seq_length=1)


def video_llava(tokenizer: Any) -> Any:
    images = images_of("video_llava", "VideoLlava", **CROPPED)
    return transformers.VideoLlavaProcessor(images, transformers.VideoLlavaVideoProcessor(), tokenizer)


def video_llama_3(tokenizer: Any) -> Any:
    images = images_of("video_llama_3", "VideoLlama3", min_pixels=28 * 28, max_pixels=28 * 28 * 16)
    return transformers.VideoLlama3Processor(images, tokenizer, transformers.VideoLlama3VideoProcessor())


def glm46v(tokenizer: Any) -> Any:
    return transformers.Glm46VProcessor(
        images_of("glm46v", "Glm46V", **GLM_SIZE), tokenizer, transformers.Glm46VVideoProcessor()
    )


def gemma4(tokenizer: Any) -> Any:
    images, sounds = images_of("gemma4", "Gemma4", **GEMMA_SIZE), transformers.Gemma4AudioFeatureExtractor()
    return transformers.Gemma4Processor(sounds, images, tokenizer, transformers.Gemma4VideoProcessor())


def ernie(tokenizer: Any) -> Any:
    images = images_of("ernie4_5_vl_moe", "Ernie4_5_VLMoe", **SMALL)
    return transformers.Ernie4_5_VLMoeProcessor(images, tokenizer, transformers.Ernie4_5_VLMoeVideoProcessor())


def minicpm(tokenizer: Any) -> Any:
    images = images_of("minicpmv4_6", "MiniCPMV4_6", scale_resolution=56, max_slice_nums=1)
    return transformers.MiniCPMV4_6Processor(images, transformers.MiniCPMV4_6VideoProcessor(), tokenizer)


def molmo2(tokenizer: Any) -> Any:
    sizes = {"size": {"height": 56, "width": 56}, "patch_size": 14, "pooling_size": [2, 2]}
    images = images_of("molmo2", "Molmo2", max_crops=1, overlap_margins=[0, 0], **sizes)
    return transformers.Molmo2Processor(images, transformers.Molmo2VideoProcessor(**sizes), tokenizer)


def kimi(tokenizer: Any) -> Any:
    images = images_of("kimi_k25", "Kimi_K25")
    return transformers.Kimi_K25Processor(images, tokenizer, transformers.Kimi_K25VideoProcessor())


def lfm2(tokenizer: Any) -> Any:
    sizes = {"encoder_patch_size": 14, "min_image_tokens": 4, "max_image_tokens": 16, "max_num_patches": 64}
    images = images_of("lfm2_vl", "Lfm2Vl", do_image_splitting=False, **sizes)
    return transformers.Lfm2VlProcessor(images, tokenizer)


def paddle(tokenizer: Any) -> Any:
    return transformers.PaddleOCRVLProcessor(images_of("paddleocr_vl", "PaddleOCRVL", **SMALL), tokenizer)


def recipe(name: str, processor: Any, named: dict[str, str], fields: dict[str, str], others: str = "") -> Any:
    """A checkpoint's recipe. named: tokens by their names in the tokenizer. fields: of the config → token. others: more
    tokens."""
    special = " ".join(dict.fromkeys([*named.values(), *fields.values(), *others.split()]))
    return checkpoints.Model(name, "", processor, special, fields, named=named)


_TOKENS = {f"{kind}_token_{how}": f"<{kind}>" for kind in ("image", "video") for how in ("id", "index")}
_INTERN = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
_GEMMA = {"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
_GEMMA_HEARS = {"audio_token": "<aud>", "boa_token": "<boa>", "eoa_token": "<eoa>"}
_ERNIE = {"image_token": "<I>", "image_start_token": "<i>", "image_end_token": "</i>"}
_ERNIE |= {"video_token": "<V>", "video_start_token": "<v>", "video_end_token": "</v>"}
_MINICPM = {"image_token": "<I>", "video_token": "<V>", "image_start_token": "<image>", "image_end_token": "</image>"}
_MINICPM |= {"slice_start_token": "<slice>", "slice_end_token": "</slice>"}
_MINICPM |= {"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"}
_KIMI = {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"}
_MOLMO = "<im_patch> <im_col> <im_start> <low_res_im_start> <frame_start> <im_end> <frame_end> <im_low>"
MORE = [  # that vLLM's examples do not name
    recipe("internvl", internvl, {**_INTERN, "video_token": "<video>"}, {"image_token_id": "<IMG_CONTEXT>"}),
    recipe("video_llava", video_llava, {}, _TOKENS),
    recipe("video_llama_3", video_llama_3, {}, {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}),
    checkpoints.Model("glm46v", "", glm46v, checkpoints._GLM, checkpoints._GLM_IDS),
    recipe(
        "gemma4",
        gemma4,
        {**_GEMMA, **_GEMMA_HEARS},
        {"video_token_id": "<|video|>"}
        | {f"{name}_id": text for name, text in {**_GEMMA, "audio_token": "<aud>"}.items()},
    ),
    recipe("ernie4_5_vl_moe", ernie, _ERNIE, {f"{name}_id": text for name, text in _ERNIE.items()}),
    recipe("minicpmv4_6", minicpm, _MINICPM, {"image_token_id": "<I>", "video_token_id": "<V>"}),
    recipe(
        "molmo2",
        molmo2,
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        {"image_patch_id": "<im_patch>", "image_token_id": "<im_patch>"},
        _MOLMO,
    ),
    recipe(
        "kimi_k25",
        kimi,
        _KIMI,
        {f"{name}_id": text for name, text in _KIMI.items()},
        "<|media_begin|> <|media_content|> <|media_end|>",
    ),
    recipe("lfm2_vl", lfm2, {"image_token": "<image>"}, {"image_token_id": "<image>"}, "<|image_start|> <|image_end|>"),
    recipe(
        "paddleocr_vl",
        paddle,
        {"image_token": "<I>"},
        {"image_token_id": "<I>", "vision_start_token_id": "<i>", "vision_end_token_id": "</i>"},
    ),
]


class Model:
    """A checkpoint, and what transformers makes of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.kind = name, folder, KINDS[name]
        made = next(one for one in [*MORE, *checkpoints.MODELS] if one.model_type == name)
        checkpoints.make(made._replace(processor=self._with_small_videos(made.processor)), folder)

    def _with_small_videos(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def changed(tokenizer: Any) -> Any:
            made = make(tokenizer)
            if self.kind.arguments:
                made.video_processor = type(made.video_processor)(**self.kind.arguments)
            return made

        return changed

    @cached_property
    def processor(self) -> Any:
        found = transformers.AutoProcessor.from_pretrained(self.folder)
        found.image_processor = transformers.AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        return found

    @cached_property
    def transformers(self) -> Any:
        auto: Any = transformers.AutoModelForMultimodalLM
        found = auto.from_pretrained(self.folder, dtype=torch.float32).eval()
        return getattr(found, "thinker", found)

    def expected(
        self, prompt: str, videos: list[bytes], images: list[Any], **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """The ids of the expanded prompt and of the output."""
        given = dict(kwargs)
        if videos:
            frames = [frames_of(data) for data in videos]
            given["videos"] = frames
            given["video_metadata"] = [
                {
                    "total_num_frames": len(one),
                    "fps": float(RATE),
                    "duration": len(one) / RATE,
                    "frames_indices": list(range(len(one))),  # if it chooses none
                    "height": one.shape[1],
                    "width": one.shape[2],
                }
                for one in frames
            ]
        if images:
            given["images"] = images
        inputs = self.processor(text=[prompt], return_tensors="pt", **given).to(torch.float32)
        with torch.inference_mode():
            found = self.transformers.generate(
                **inputs, max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False, eos_token_id=None
            )
        asked = [int(token) for token in inputs["input_ids"][0]]
        return asked, [int(token) for token in found[0][len(asked) :]]


def engine_of(model: Model, **options: Any) -> LLMEngine:
    args = EngineArgs(str(model.folder), **{**SIZES, **options})
    return LLMEngine.from_engine_args(args, enable_multiprocessing=False)
