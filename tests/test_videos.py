"""Videos from a file to the tokens, with the video processors of transformers: frames, prompts and tokens are those of
transformers.

`make test-video` installs torchvision beside the environment and runs these tests. Without it they are skipped.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

av = pytest.importorskip("av", reason="the extra `video` is not installed")
pytest.importorskip("torchvision", reason="torchvision is not installed; make test-video installs it")

from mainspring import EngineArgs, LLMEngine  # noqa: E402
from mainspring.benchmarks import vllm_media_examples as checkpoints  # noqa: E402
from media_folders import file_of, picture  # noqa: E402
from media_models import COUNT, ids, run  # noqa: E402

SIZES = {"max_model_len": 4096, "dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "block_size": 16}
RATE = 8  # frames per second
QWEN_SIZE = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16}, "cap_pixels_per_frame": False}
SQUARE = {"size": {"height": 28, "width": 28}}


class Kind:
    """Of checkpoints: their video processor's arguments, and how prompts name a video and an image."""

    def __init__(self, video: str, image: str, **arguments: Any) -> None:
        self.video, self.image, self.arguments = video, image, arguments


QWEN = "<|vision_start|><|video_pad|><|vision_end|>", "<|vision_start|><|image_pad|><|vision_end|>"
KINDS = {
    "llava_onevision": Kind("<video>", "<image>", **SQUARE),
    "llava_next_video": Kind("<video>", "<image>", size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
    "qwen2_vl": Kind(*QWEN, **QWEN_SIZE),
    "qwen2_5_vl": Kind(*QWEN, do_sample_frames=True, fps=4, **QWEN_SIZE),
    "qwen3_vl": Kind(*QWEN, size={"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 64}, cap_pixels_per_frame=False),
    "glm4v": Kind(
        "<|begin_of_video|><|video|><|end_of_video|>",
        "<|begin_of_image|><|image|><|end_of_image|>",
        size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64},
    ),
    "internvl": Kind("<video>", "<IMG_CONTEXT>", **SQUARE),
    "video_llava": Kind("<video>", "<image>", size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
    "video_llama_3": Kind(
        "<|video_pad|>", "<|image_pad|>", size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
    ),
    "smolvlm": Kind("<video>", "<image>", size={"longest_edge": 384}, max_image_size={"longest_edge": 384}),
    "qwen2_5_omni": Kind("<|vision_bos|><|VIDEO|><|vision_eos|>", "<|vision_bos|><|IMAGE|><|vision_eos|>", **QWEN_SIZE),
}
WIDE, HIGH = (16, 84, 56), (16, 56, 84)  # frames, width, height
NOT_BOTH = ("glm4v", "smolvlm")  # transformers can't have images and videos in one of their prompts


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
    images = checkpoints.images_of("got_ocr2", "GotOcr2", size={"height": 28, "width": 28})
    return transformers.InternVLProcessor(images, tokenizer, transformers.InternVLVideoProcessor(), image_seq_length=1)


def video_llava(tokenizer: Any) -> Any:
    sizes = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    images = checkpoints.images_of("video_llava", "VideoLlava", **sizes)
    return transformers.VideoLlavaProcessor(images, transformers.VideoLlavaVideoProcessor(), tokenizer)


def video_llama_3(tokenizer: Any) -> Any:
    images = checkpoints.images_of("video_llama_3", "VideoLlama3", min_pixels=28 * 28, max_pixels=28 * 28 * 16)
    return transformers.VideoLlama3Processor(images, tokenizer, transformers.VideoLlama3VideoProcessor())


_PADS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
_TOKENS = {f"{kind}_token_{how}": f"<{kind}>" for kind in ("image", "video") for how in ("id", "index")}
_INTERN = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
_INTERN |= {"video_token": "<video>"}
MORE = [  # that vLLM's examples do not name
    checkpoints.Model(
        "internvl",
        "",
        internvl,
        "<img> </img> <IMG_CONTEXT> <video>",
        {"image_token_id": "<IMG_CONTEXT>"},
        named=_INTERN,
    ),
    checkpoints.Model("video_llava", "", video_llava, "<image> <video>", _TOKENS),
    checkpoints.Model("video_llama_3", "", video_llama_3, "<|image_pad|> <|video_pad|>", _PADS),
]


class Model:
    """A checkpoint, and what transformers makes of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.kind = name, folder, KINDS[name]
        [recipe] = [one for one in [*checkpoints.MODELS, *MORE] if one.model_type == name]
        checkpoints.make(recipe._replace(processor=self._with_small_videos(recipe.processor)), folder)

    def _with_small_videos(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def changed(tokenizer: Any) -> Any:
            made = make(tokenizer)
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
        inputs = self.processor(text=[prompt], return_tensors="pt", **given)
        with torch.inference_mode():
            found = self.transformers.generate(
                **inputs, max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False, eos_token_id=None
            )
        asked = [int(token) for token in inputs["input_ids"][0]]
        return asked, [int(token) for token in found[0][len(asked) :]]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("models") / request.param)


def engine_of(model: Model, **options: Any) -> LLMEngine:
    args = EngineArgs(str(model.folder), **{**SIZES, **options})
    return LLMEngine.from_engine_args(args, enable_multiprocessing=False)


@pytest.mark.parametrize("budget", [4096, 24], ids=["whole", "chunked"])
def test_prompts_with_videos_have_the_tokens_of_transformers(model: Model, budget: int) -> None:
    wide, high = file_of_frames(*WIDE), file_of_frames(*HIGH)
    video, image, cat = model.kind.video, model.kind.image, picture(1)
    cases: dict[str, tuple[str, list[bytes], list[Any]]] = {
        "text": ("nothing", [], []),
        "one": (f"{video}what moves?", [wide], []),
        "two": (f"first {video} then {video} which is longer?", [wide, high], []),
        "both": (f"{image} or {video}?", [high], [cat]),
    }
    if model.name in NOT_BOTH:
        del cases["both"]
    with engine_of(model, max_num_batched_tokens=budget) as engine:
        assert "video" in engine.get_tokenizer().media
        prompts = {
            name: {"prompt": prompt, "multi_modal_data": {"video": videos, "image": [file_of(one) for one in images]}}
            for name, (prompt, videos, images) in cases.items()
        }
        found = run(engine, prompts)
        for name, case in cases.items():
            asked, tokens = model.expected(*case)
            assert found[name].prompt_token_ids == asked, name
            assert ids(found[name]) == tokens, name


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_are_chosen_as_the_checkpoints_processor_chooses(name: str, tmp_path: Path) -> None:
    model, wide = Model(name, tmp_path / name), file_of_frames(*WIDE)
    prompt = f"{model.kind.video}what moves?"
    with engine_of(model) as engine:
        for kwargs in ({}, {"fps": 2}):
            given = {"prompt": prompt, "multi_modal_data": {"video": wide}, "mm_processor_kwargs": kwargs}
            found = run(engine, {"one": given})["one"]
            asked, tokens = model.expected(prompt, [wide], [], **kwargs)
            assert found.prompt_token_ids == asked, kwargs
            assert ids(found) == tokens, kwargs


def test_each_form_of_a_video(tmp_path: Path) -> None:
    model, wide = Model("llava_onevision", tmp_path / "model"), file_of_frames(*WIDE)
    frames = frames_of(wide)
    pictures = [Image.fromarray(frame) for frame in frames]
    url = "data:video/mp4;base64," + base64.b64encode(wide).decode()
    forms = [wide, url, frames, (frames, {"fps": float(RATE)}), pictures, torch.from_numpy(frames).permute(0, 3, 1, 2)]
    animated = file_of(pictures[0], "PNG", save_all=True, append_images=pictures[1:], duration=1000 // RATE)
    prompt = f"{model.kind.video}what moves?"
    expected = model.expected(prompt, [wide], [])
    with engine_of(model) as engine:
        for at, form in enumerate([*forms, animated]):
            found = run(engine, {str(at): {"prompt": prompt, "multi_modal_data": {"video": form}}})[str(at)]
            assert (found.prompt_token_ids, ids(found)) == expected, at


def test_videos_go_through_media_workers_and_a_second_question_finds_the_first(tmp_path: Path) -> None:
    model, wide = Model("qwen2_vl", tmp_path / "model"), file_of_frames(*WIDE)
    prompts = [f"{model.kind.video}{question}" for question in ("what moves?", "what moves now?")]
    with LLMEngine.from_engine_args(EngineArgs(str(model.folder), **SIZES)) as engine:
        for at, prompt in enumerate(prompts):
            found = run(engine, {str(at): {"prompt": prompt, "multi_modal_data": {"video": wide}}})[str(at)]
            assert (found.prompt_token_ids, ids(found)) == model.expected(prompt, [wide], [])
        assert found.num_cached_tokens >= 16
