"""Images and videos from a file to the tokens, with transformers' own processors: frames, prompts and tokens are those
of transformers.

`make test-video` installs torchvision beside the environment and runs these tests. Without it they are skipped.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("av", reason="the extra `video` is not installed")
pytest.importorskip("torchvision", reason="torchvision is not installed; make test-video installs it")

from mainspring import EngineArgs, LLMEngine
from media_folders import file_of, picture
from media_models import ids, run
from processor_models import (
    HIGH,
    KINDS,
    RATE,
    SIZES,
    WIDE,
    Model,
    engine_of,
    file_of_frames,
    frames_of,
)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_prompts_and_tokens_are_those_of_transformers(model: Model, chunked: bool) -> None:
    wide, high = file_of_frames(*WIDE), file_of_frames(*HIGH)
    video, image, cat, dog = model.kind.video, model.kind.image, picture(1), picture(2, 64, 100)
    cases: dict[str, tuple[str, list[bytes], list[Any]]] = {
        "text": ("nothing", [], []),
        "image": (f"{image}what is it?", [], [cat]),
        "images": (f"{image} or {image}?", [], [cat, dog]),
        "video": (f"{video}what moves?", [wide], []),
        "videos": (f"first {video} then {video} which is longer?", [wide, high], []),
        "both": (f"{image} or {video}?", [high], [cat]),  # the text ends before the last frame does
    }
    cases = {name: case for name, case in cases.items() if name in ("text", *model.kind.cases)}
    with engine_of(model, max_num_batched_tokens=model.kind.steps if chunked else 4096) as engine:
        prompts = {}
        for name, (prompt, videos, images) in cases.items():
            media = {"video": videos, "image": [file_of(one) for one in images]}
            prompts[name] = {"prompt": prompt, "multi_modal_data": {kind: some for kind, some in media.items() if some}}
        found = run(engine, prompts)
        for name, case in cases.items():
            asked, tokens = model.expected(*case)
            if name != "text":  # a frontend adds the tokenizer's special tokens, some processors do not
                assert found[name].prompt_token_ids == asked, name
            if found[name].prompt_token_ids == asked:
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
