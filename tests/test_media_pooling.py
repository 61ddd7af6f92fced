"""Vectors of images and texts from dual encoders are those of transformers, with the same bits whatever the steps are,
and whatever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
import transformers
from tokenizers import processors

from mainspring import LLM, EngineArgs, LLMEngine, PoolingParams
from mainspring.core.model.media.dual_encoder import DualEncoder
from mainspring.ipc.errors import InvalidRequestError, NotSupportedError, UnsupportedModelError
from mainspring.ipc.messages import Stats
from media_folders import byte_tokenizer, file_of, picture
from pooled import run, vectors

ATOL = 3e-6
LONGEST = 48  # tokens
TEXTS = ["a cat", "two dogs that sleep", "", "a cat on a mat, far away", "x"]
IMAGES = [picture(1), picture(2, 64, 100), picture(3, 30, 30)]
SIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
PADDED = {"padding": "max_length", "max_length": LONGEST}


def _image_processor(name: str) -> Any:
    if name == "clip":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        return CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": 28, "width": 28})


class Model:
    """A tiny checkpoint with random weights, and what transformers makes of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.tokenizer = byte_tokenizer([])
        ends = [(token, self.tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
        self.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, ends)
        self.images = _image_processor(name)
        kind = transformers.CLIPProcessor if name == "clip" else transformers.SiglipProcessor
        kind(self.images, self.tokenizer).save_pretrained(folder)
        ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
        text = {**SIDE, **ids, "vocab_size": len(self.tokenizer), "max_position_embeddings": LONGEST}
        more = {"projection_dim": 24} if name == "clip" else {}
        text |= {"projection_size": 32} if name == "siglip" else {}
        config = transformers.CONFIG_MAPPING[name](
            text_config=text, vision_config={**SIDE, "image_size": 28, "patch_size": 14}, **more
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model: Any = transformers.AutoModel.from_config(config).eval()
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    parameter.data.normal_(0, 0.3)
        self.model.save_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text)["input_ids"]
        return found

    @torch.inference_mode()
    def text(self, ids: list[int]) -> np.ndarray:
        return _unit(self.model.get_text_features(input_ids=torch.tensor([ids])))

    @torch.inference_mode()
    def image(self, image: Any) -> np.ndarray:
        pixels = self.images(images=[image], return_tensors="pt")["pixel_values"]
        return _unit(self.model.get_image_features(pixel_values=pixels))


def _unit(output: Any) -> np.ndarray:
    found: np.ndarray = torch.nn.functional.normalize(output.pooler_output, dim=-1)[0].numpy()
    return found


def of(image: Any) -> dict[str, Any]:
    return {"prompt": "", "multi_modal_data": {"image": image}}


@pytest.fixture(scope="module", params=["clip", "siglip"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("clip", tmp_path_factory.mktemp("clip"))


def engine_of(model: Model, **options: Any) -> LLMEngine:
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
def test_a_core_of_its_own_that_dies_costs_no_vector(model: Model) -> None:
    prompts = mixed() * 10
    with LLM(str(model.folder), dtype="float32") as llm:
        llm.embed(prompts[:2], use_tqdm=False)
        (core,) = (one for one in psutil.Process().children(recursive=True) if "mainspring.core" in one.cmdline())
        for prompt in prompts:
            llm.enqueue(prompt, PoolingParams())
        os.kill(core.pid, signal.SIGKILL)
        found = [one.outputs.data for one in llm.wait_for_completion(use_tqdm=False)]
    for ours, own in zip(found, expected(model, prompts), strict=True):
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
