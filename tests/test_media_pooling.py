"""Vectors of images and texts from dual encoders are those of transformers, with the same bits whatever the steps are,
and whatever dies."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from dual_encoders import LONGEST, Model
from mainspring import LLM, EngineArgs, LLMEngine, PoolingParams
from mainspring.core.model.media.dual_encoder import DualEncoder
from mainspring.ipc.errors import InvalidRequestError, NotSupportedError, UnsupportedModelError
from mainspring.ipc.messages import Stats
from media_folders import byte_tokenizer, file_of, picture
from pooled import run, vectors

ATOL = 3e-6
TEXTS = ["a cat", "two dogs that sleep", "", "a cat on a mat, far away", "x"]
IMAGES = [picture(1), picture(2, 64, 100), picture(3, 30, 30)]
PADDED = {"padding": "max_length", "max_length": LONGEST}


def of(image: Any) -> dict[str, Any]:
    return {"prompt": "", "multi_modal_data": {"image": image}}


@pytest.fixture(scope="module", params=["clip", "siglip"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("clip", tmp_path_factory.mktemp("clip"))


def engine_of(model: Any, **options: Any) -> LLMEngine:
    args = EngineArgs(str(model.folder), dtype="float32", **options)
    return LLMEngine.from_engine_args(args, enable_multiprocessing=False)


def mixed() -> list[Any]:
    """Texts and images in turn."""
    prompts: list[Any] = []
    for at, text in enumerate(TEXTS):
        prompts += [model_text(text), *map(of, IMAGES[at : at + 1])]
    return [*prompts, of(file_of(IMAGES[0]))]


def model_text(text: str) -> Any:
    return text or {"prompt_token_ids": [256, 257]}


def expected(model: Model, prompts: Sequence[Any]) -> list[np.ndarray]:
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            found.append(model.text(model.ids(prompt)))
        elif "prompt_token_ids" in prompt:
            found.append(model.text(prompt["prompt_token_ids"]))
        else:
            image = prompt["multi_modal_data"]["image"]
            found.append(model.image(IMAGES[0] if isinstance(image, bytes) else image))
    return found


def encoded_items(engine: LLMEngine) -> int:
    return msgspec.convert(engine.engine_core.call("stats"), Stats).encoded_items


def test_vectors_are_those_of_transformers(model: Model) -> None:
    prompts = mixed()
    theirs = expected(model, prompts)
    with engine_of(model) as engine:
        assert engine.get_supported_tasks() == ("embed", "score")
        assert engine.model_config.max_model_len == LONGEST
        found = vectors(engine, prompts)
        for ours, own in zip(found, theirs, strict=True):
            np.testing.assert_allclose(ours, own, atol=ATOL)
        assert np.abs(np.subtract(*theirs[1:5:2])).max() > 100 * ATOL, "other images have other vectors"
        short = vectors(engine, [prompts[0], prompts[1]], PoolingParams(dimensions=8, normalize=False))
        assert [one.shape for one in short] == [(8,), (8,)]
        explained = engine.engine_core.call("explain_model")
    assert any("verified: vectors of texts in a row" in line for line in explained)


def test_vectors_have_the_same_bits_alone_in_a_batch_and_after_a_cache_hit(model: Model) -> None:
    prompts = mixed()
    with engine_of(model) as engine:
        alone = [vectors(engine, [prompt])[0] for prompt in prompts]
        encoded = encoded_items(engine)
        assert encoded == len(IMAGES) + 1, "the last image is a file, and has a digest of its own"
        again = vectors(engine, prompts)
        assert encoded_items(engine) == encoded, "items are kept"
        engine.reset_mm_cache()
        engine.reset_encoder_cache()
        once_more = vectors(engine, prompts)
    settings: dict[str, Any] = {"max_num_batched_tokens": LONGEST, "max_num_seqs": 3, "async_scheduling": True}
    with engine_of(model, **settings) as engine:
        other = vectors(engine, prompts)
    for found in (again, once_more, other):
        assert all(np.array_equal(one, two) for one, two in zip(alone, found, strict=True))


def test_an_llm_embeds_and_scores_pairs_of_image_and_text(model: Model) -> None:
    with LLM(str(model.folder), dtype="float32") as llm:
        (text,) = llm.embed(TEXTS[0], use_tqdm=False)
        (image,) = llm.embed(of(IMAGES[0]), use_tqdm=False)
        (raw,) = llm.encode(of(IMAGES[0]), pooling_task="embed", use_tqdm=False)
        scores = llm.score(TEXTS[0], [of(one) for one in IMAGES], use_tqdm=False)
        (padded,) = llm.embed(TEXTS[0], tokenization_kwargs=PADDED, use_tqdm=False)
        ids = model.ids(TEXTS[0]) + [258] * (LONGEST - len(model.ids(TEXTS[0])))
        assert padded.prompt_token_ids == ids
    words = model.text(model.ids(TEXTS[0]))
    np.testing.assert_allclose(text.outputs.embedding, words, atol=ATOL)
    np.testing.assert_allclose(image.outputs.embedding, model.image(IMAGES[0]), atol=ATOL)
    assert image.outputs.embedding == raw.outputs.data.tolist()
    own = [float(words @ model.image(one)) for one in IMAGES]
    np.testing.assert_allclose([one.outputs.score for one in scores], own, atol=ATOL)
    np.testing.assert_allclose(padded.outputs.embedding, model.text(ids), atol=ATOL)


def test_parts_of_messages_are_entries_of_a_score(clip: Model) -> None:
    urls = [f"data:image/png;base64,{base64.b64encode(file_of(one)).decode()}" for one in IMAGES[:2]]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    words = {"content": [{"type": "text", "text": TEXTS[0]}]}
    with LLM(str(clip.folder), dtype="float32") as llm:
        alone = llm.score(words, {"content": parts}, use_tqdm=False)
        listed = llm.score(TEXTS[0], [{"content": [part]} for part in parts], use_tqdm=False)
        for wrong in ({"content": 5}, [{"content": [5]}], {"content": [{"type": "video_url", "video_url": urls[0]}]}):
            with pytest.raises((InvalidRequestError, NotSupportedError), match=r"content of a message|part of type"):
                llm.score("x", wrong, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="not both"):
            llm.score("x", [{"content": [*words["content"], parts[0]]}], use_tqdm=False)
    text = clip.text(clip.ids(TEXTS[0]))
    own = [float(text @ clip.image(one)) for one in IMAGES[:2]]
    for found in (alone, listed):
        np.testing.assert_allclose([one.outputs.score for one in found], own, atol=ATOL)


def test_prompts_of_text_and_image_are_refused_and_others_go_on(clip: Model) -> None:
    image = {"multi_modal_data": {"image": IMAGES[0]}}
    wrong: list[tuple[Any, str]] = [
        ({"prompt": "a cat", **image}, "not both"),
        ({"prompt_token_ids": [5], **image}, "not both"),
        ({"prompt": "", "multi_modal_data": {"image": IMAGES}}, "one item for each prompt"),
        ({"prompt": "", "multi_modal_data": {"audio": np.zeros(100, np.float32)}}, "this model takes: text, image"),
        ({"prompt": "", "multi_modal_data": {"image": b"no image"}}, "image 0"),
        ([5] * (LONGEST + 1), f"max_model_len is {LONGEST}"),
    ]
    with engine_of(clip) as engine:
        engine.add_request("good", of(IMAGES[0]), PoolingParams())
        for prompt, words in wrong:
            with pytest.raises((InvalidRequestError, NotSupportedError), match=words):
                engine.add_request("bad", prompt, PoolingParams())
        for kwargs in ({"padding": True}, {"padding": "max_length", "max_length": LONGEST + 1}):
            with pytest.raises(InvalidRequestError, match="padding is"):
                engine.add_request("bad", "a cat", PoolingParams(), tokenization_kwargs=kwargs)
        (output,) = [one for one in engine.step() + engine.step() if one.finished]
        np.testing.assert_allclose(output.outputs.data, clip.image(IMAGES[0]), atol=ATOL)  # type: ignore[union-attr]


def test_an_item_that_can_not_be_encoded_ends_its_request_alone(clip: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, failed = DualEncoder.encode, []

    def failing(self: DualEncoder, *args: Any) -> Any:
        if not failed:
            failed.append(True)
            raise ValueError("of the model's own code")
        return encode(self, *args)

    monkeypatch.setattr(DualEncoder, "encode", failing)
    with engine_of(clip) as engine:
        first, second, text = run(engine, [of(IMAGES[0]), of(IMAGES[1]), "a cat"])
    assert "of the model's own code" in str(first.error)
    np.testing.assert_allclose(second.outputs.data, clip.image(IMAGES[1]), atol=ATOL)
    np.testing.assert_allclose(text.outputs.data, clip.text(clip.ids("a cat")), atol=ATOL)


def test_a_model_whose_texts_differ_in_a_row_is_refused(clip: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = DualEncoder.forward
    monkeypatch.setattr(DualEncoder, "forward", lambda self, *args: forward(self, *args).roll(1, 0))
    with pytest.raises(UnsupportedModelError, match="gives other vectors for several texts in a row"):
        engine_of(clip)


def test_weights_that_slept_give_the_same_vectors(clip: Model) -> None:
    with engine_of(clip) as engine:
        before = vectors(engine, mixed())
        engine.sleep(level=2)
        engine.wake_up()
        after = vectors(engine, mixed())
    assert all(np.array_equal(one, two) for one, two in zip(before, after, strict=True))


def test_options_that_a_dual_encoder_can_not_have_are_refused(clip: Model) -> None:
    with pytest.raises(NotSupportedError, match="pools by its own code"):
        engine_of(clip, pooler_config={"pooling_type": "MEAN"})


@pytest.mark.slow
def test_a_core_of_its_own_that_dies_costs_no_vector(clip: Model) -> None:
    prompts = mixed() * 10
    with LLM(str(clip.folder), dtype="float32") as llm:
        llm.embed(prompts[:2], use_tqdm=False)
        (core,) = (one for one in psutil.Process().children(recursive=True) if "mainspring.core" in one.cmdline())
        for prompt in prompts:
            llm.enqueue(prompt, PoolingParams())
        os.kill(core.pid, signal.SIGKILL)
        found = [one.outputs.data for one in llm.wait_for_completion(use_tqdm=False)]
    for ours, own in zip(found, expected(clip, prompts), strict=True):
        np.testing.assert_allclose(ours, own, atol=ATOL)


def test_a_checkpoint_without_a_processor_embeds_texts(clip: Model, tmp_path: Path) -> None:
    clip.model.save_pretrained(tmp_path)
    byte_tokenizer([]).save_pretrained(tmp_path)
    args = EngineArgs(str(tmp_path), dtype="float32")
    with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
        (text,) = vectors(engine, [{"prompt_token_ids": clip.ids("a cat")}])
        with pytest.raises((InvalidRequestError, UnsupportedModelError), match="processor"):
            engine.add_request("bad", of(IMAGES[0]), PoolingParams())
    np.testing.assert_allclose(text, clip.text(clip.ids("a cat")), atol=ATOL)
