"""Vectors of the tokens of images and texts from retrieval models are those of transformers, whatever the steps are."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch

from mainspring import LLM, EngineArgs, LLMEngine, PoolingParams
from mainspring.core.model.media.retrieval import RetrievalMerger
from mainspring.ipc.errors import InvalidRequestError, NotSupportedError, UnsupportedModelError
from mainspring.ipc.messages import Stats
from media_folders import file_of, picture
from pooled import run, vectors
from retrieval_models import KINDS, LONGEST, Model
from test_media_pooling import engine_of, of

ATOL = 3e-6
TEXTS = ["a cat", "two dogs that sleep", "x"]
IMAGES = [picture(1), picture(2, 64, 100), picture(3, 30, 30)]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def colpali(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("colpali", tmp_path_factory.mktemp("colpali"))


def mixed(model: Model) -> list[Any]:
    """Texts and images in turn."""
    prompts: list[Any] = []
    for text, image in zip(TEXTS, IMAGES, strict=True):
        prompts += [{"prompt_token_ids": model.text(text)[0]}, of(image)]
    return [*prompts, of(file_of(IMAGES[0]))]


def expected(model: Model) -> list[np.ndarray]:
    """Of `mixed`."""
    found = []
    for text, image in zip(TEXTS, IMAGES, strict=True):
        found += [model.text(text)[1], model.image(image)[1]]
    return [*found, found[1]]


def assert_close(found: Sequence[Any], theirs: Sequence[np.ndarray]) -> None:
    for ours, own in zip(found, theirs, strict=True):
        np.testing.assert_allclose(np.array(ours), own, atol=ATOL)


def late(one: np.ndarray, two: np.ndarray) -> float:
    return float((one @ two.T).max(1).sum())


def encoded_items(engine: LLMEngine) -> int:
    return msgspec.convert(engine.engine_core.call("stats"), Stats).encoded_items


def test_vectors_are_those_of_transformers(model: Model) -> None:
    theirs = expected(model)
    with engine_of(model) as engine:
        assert engine.get_supported_tasks() == ("token_embed", "score")
        outputs = run(engine, mixed(model))
        assert_close([one.outputs.data for one in outputs], theirs)
        for output, image in zip(outputs[1::2], IMAGES, strict=True):
            assert output.prompt_token_ids == model.image(image)[0]
        assert np.abs(theirs[1][-3:] - theirs[3][-3:]).max() > 100 * ATOL, "other images have other vectors"
        (short,) = vectors(engine, [of(IMAGES[0])], PoolingParams(dimensions=8))
        cut = torch.nn.functional.normalize(torch.from_numpy(theirs[1][:, :8]), dim=-1)
        np.testing.assert_allclose(short, cut.numpy(), atol=ATOL)
        explained = engine.engine_core.call("explain_model")
    for kind in ("image", "text") if model.name == "colpali" else ("image",):
        assert any(f"verified: logits of a prompt with {kind} within" in line for line in explained)


def test_vectors_have_the_same_bits_alone_in_a_batch_and_after_a_cache_hit(model: Model) -> None:
    prompts = mixed(model)
    with engine_of(model) as engine:
        alone = [vectors(engine, [prompt])[0] for prompt in prompts]
        encoded = encoded_items(engine)
        assert encoded == len(IMAGES) + 1, "the last image is a file, and has a digest of its own"
        again = vectors(engine, prompts)
        assert encoded_items(engine) == encoded, "items are kept"
        engine.reset_mm_cache()
        engine.reset_encoder_cache()
        once_more = vectors(engine, prompts)
    # texts of ColPali see both ways, so they are not cut; prompts of ColQwen2 are
    most = 44 if model.name == "colpali" else 24
    with engine_of(model, max_num_batched_tokens=most, max_num_seqs=3, async_scheduling=True) as engine:
        other = vectors(engine, prompts)
    for found in (again, once_more, other):
        assert all(np.array_equal(one, two) for one, two in zip(alone, found, strict=True))


def test_an_llm_gives_vectors_of_tokens_and_scores_them_late(model: Model) -> None:
    ids, words = model.text(TEXTS[0])
    parts = {"content": [{"type": "image", "image": image} for image in IMAGES]}
    with LLM(str(model.folder), dtype="float32") as llm:
        (text,) = llm.encode(model.query(TEXTS[0]), pooling_task="token_embed", use_tqdm=False)
        (image,) = llm.embed(of(IMAGES[0]), use_tqdm=False)
        scores = llm.score({"prompt_token_ids": ids}, [of(one) for one in IMAGES], use_tqdm=False)
        as_parts = llm.score({"prompt_token_ids": ids}, parts, use_tqdm=False)
    assert text.prompt_token_ids == ids
    assert_close([text.outputs.data, image.outputs.data], [words, model.image(IMAGES[0])[1]])  # type: ignore[union-attr]
    own = [late(words, model.image(one)[1]) for one in IMAGES]
    for found in (scores, as_parts):
        np.testing.assert_allclose([one.outputs.score for one in found], own, atol=100 * ATOL)
    theirs = model.processor.score_retrieval(
        [torch.from_numpy(words)], [torch.from_numpy(model.image(one)[1]) for one in IMAGES]
    )
    np.testing.assert_allclose(own, theirs[0].numpy(), atol=100 * ATOL)


def test_what_can_not_be_computed_is_refused_and_others_go_on(model: Model) -> None:
    image = {"multi_modal_data": {"image": IMAGES[0]}}
    wrong: list[tuple[Any, Any, str]] = [
        ({"prompt": "a cat", **image}, PoolingParams(), "not both"),
        ({"prompt": "", "multi_modal_data": {"image": IMAGES}}, PoolingParams(), "one item for each prompt"),
        ({"prompt": "", "multi_modal_data": {"image": b"no image"}}, PoolingParams(), "image 0"),
        (of(IMAGES[0]), PoolingParams(task="embed"), "this model can token_embed, score"),
        (of(IMAGES[0]), PoolingParams(dimensions=25), "the model's vectors have 24"),
        ([5] * (LONGEST + 1), PoolingParams(), f"max_model_len is {LONGEST}"),
        ({"prompt_embeds": np.zeros((3, 64), np.float32)}, PoolingParams(), "prompt_embeds|embeddings"),
        (
            {"prompt": "", "multi_modal_data": {"video": np.zeros((2, 28, 28, 3), np.uint8)}},
            PoolingParams(),
            "takes: text, image",
        ),
    ]
    with engine_of(model) as engine:
        for prompt, params, words in wrong:
            engine.add_request("good", of(IMAGES[0]), PoolingParams())
            said = ""
            try:
                engine.add_request("bad", prompt, params)
            except (InvalidRequestError, NotSupportedError) as error:  # seen by the frontend
                said = str(error)
            found = {one.request_id: one for _ in range(3) for one in engine.step() if one.finished}
            assert re.search(words, said or str(found["bad"].error)), prompt
            assert_close([found["good"].outputs.data], [model.image(IMAGES[0])[1]])  # type: ignore[union-attr]


def test_a_text_that_sees_both_ways_must_fit_into_a_step(colpali: Model) -> None:
    with engine_of(colpali, max_num_batched_tokens=26) as engine:
        text, image = run(engine, [{"prompt_token_ids": colpali.text("a cat")[0]}, of(IMAGES[0])])
    assert isinstance(text.error, InvalidRequestError)
    assert "27 tokens of the prompt have to be computed in one step" in str(text.error)
    assert_close([image.outputs.data], [colpali.image(IMAGES[0])[1]])


def test_an_item_that_can_not_be_merged_ends_its_request_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    own, failed = RetrievalMerger.merge, []

    def failing(self: RetrievalMerger, ids: Any, items: Any) -> Any:
        if items and not failed:
            failed.append(True)
            raise ValueError("of the model's own code")
        return own(self, ids, items)

    monkeypatch.setattr(RetrievalMerger, "merge", failing)
    with engine_of(model) as engine:
        first, second, text = run(engine, [of(IMAGES[0]), of(IMAGES[1]), {"prompt_token_ids": model.text("a")[0]}])
    assert "of the model's own code" in str(first.error)
    assert_close([second.outputs.data, text.outputs.data], [model.image(IMAGES[1])[1], model.text("a")[1]])


def test_prompts_that_the_paged_path_computes_in_another_way_are_refused(
    colpali: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = RetrievalMerger.merge
    monkeypatch.setattr(RetrievalMerger, "merge", lambda *args: own(*args)._replace(reach=(None, None)))
    with engine_of(colpali) as engine:
        image, text = run(engine, [of(IMAGES[0]), {"prompt_token_ids": colpali.text("a cat")[0]}])
    for output in (image, text):
        assert isinstance(output.error, UnsupportedModelError)
        assert "so such prompts are not served" in str(output.error)


def test_weights_that_slept_give_the_same_vectors(model: Model) -> None:
    with engine_of(model) as engine:
        before = vectors(engine, mixed(model))
        engine.sleep(level=2)
        engine.wake_up()
        after = vectors(engine, mixed(model))
    assert all(np.array_equal(one, two) for one, two in zip(before, after, strict=True))


def test_half_precision_gives_nearly_the_same_vectors(model: Model) -> None:
    args = EngineArgs(str(model.folder), dtype="bfloat16")
    with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
        for ours, own in zip(vectors(engine, mixed(model)), expected(model), strict=True):
            assert np.median((ours * own).sum(-1)) > 0.98


def test_adapters_and_ranks_are_refused(colpali: Model) -> None:
    with pytest.raises(NotSupportedError, match="enable_lora"):
        engine_of(colpali, enable_lora=True)


@pytest.mark.slow
def test_a_core_of_its_own_that_dies_costs_no_vector(colpali: Model) -> None:
    prompts = mixed(colpali) * 5
    with LLM(str(colpali.folder), dtype="float32") as llm:
        llm.embed(prompts[:2], use_tqdm=False)
        (core,) = (one for one in psutil.Process().children(recursive=True) if "mainspring.core" in one.cmdline())
        for prompt in prompts:
            llm.enqueue(prompt, PoolingParams())
        os.kill(core.pid, signal.SIGKILL)
        found = [one.outputs.data for one in llm.wait_for_completion(use_tqdm=False)]
    assert_close(found, expected(colpali) * 5)


def test_an_encoder_that_retrieves_is_refused(tmp_path: Path) -> None:
    """ColModernVBert."""
    import transformers

    side = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**side, "vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text |= {"cls_token_id": 1, "sep_token_id": 2, "model_type": "modernbert"}
    vlm = transformers.ModernVBertConfig(
        text_config=text, vision_config={**side, "image_size": 28, "patch_size": 14}, image_token_id=299
    )
    config = transformers.ColModernVBertConfig(vlm_config=vlm, embedding_dim=8)
    transformers.AutoModelForPreTraining.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="is an encoder that takes images"):
        LLMEngine.from_engine_args(
            EngineArgs(str(tmp_path), dtype="float32", skip_tokenizer_init=True), enable_multiprocessing=False
        )
