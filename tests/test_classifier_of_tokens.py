"""Generating models as classifiers (`classifier_from_token`): the same numbers as from the whole output layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import pooled
import tiny
from mainspring import LLM
from mainspring.ipc.errors import UnsupportedModelError
from plain import make_engine

ARCHITECTURES = {"architectures": ["Qwen3ForSequenceClassification"]}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.make("qwen3", tmp_path_factory.mktemp("model"), tie_word_embeddings=request.param)
    tiny.make_tokenizer(folder)
    return folder


@torch.inference_mode()
def logits_of(folder: Path, tokens: list[str], prompt: list[int]) -> np.ndarray:
    from tokenizers import Tokenizer

    ids = [Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token) for token in tokens]
    return AutoModelForCausalLM.from_pretrained(folder).eval()(torch.tensor([prompt])).logits[0, -1, ids].numpy()


def found(folder: Path, overrides: dict[str, Any], prompts: list[list[int]]) -> list[np.ndarray]:
    settings: dict[str, Any] = {"runner": "pooling", "hf_overrides": {**ARCHITECTURES, **overrides}}
    with make_engine(folder, max_model_len=None, skip_tokenizer_init=True, **settings) as engine:
        assert "classify" in engine.get_supported_tasks()
        return pooled.vectors(engine, prompts)


@pytest.mark.parametrize("named", [{"is_original_qwen3_reranker": True}, {"method": "from_2_way_softmax"}])
def test_a_score_is_the_softmax_over_two_tokens(named: dict[str, Any], checkpoint: Path) -> None:
    prompts = pooled.prompts(7, 30)
    for prompt, score in zip(
        prompts, found(checkpoint, {"classifier_from_token": ["a", "e"], **named}, prompts), strict=True
    ):
        no, yes = np.exp(logits_of(checkpoint, ["a", "e"], prompt).astype(np.float64))
        np.testing.assert_allclose(score, [yes / (no + yes)], atol=1e-5)


def test_labels_are_the_softmax_over_their_tokens(checkpoint: Path) -> None:
    prompts, tokens = pooled.prompts(12), ["a", "e", "i"]
    (scores,) = found(checkpoint, {"classifier_from_token": tokens, "method": "no_post_processing"}, prompts)
    expected = np.exp(logits_of(checkpoint, tokens, prompts[0]).astype(np.float64))
    np.testing.assert_allclose(scores, expected / expected.sum(), atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"classifier_from_token": ["a", "e"]}, "method None"),
        ({"classifier_from_token": ["a"], "method": "from_2_way_softmax"}, "two tokens"),
        ({"classifier_from_token": ["a", "no token"], "method": "from_2_way_softmax"}, "names 'no token'"),
    ],
)
def test_what_can_not_be_converted_is_refused(overrides: dict[str, Any], message: str, checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        found(checkpoint, overrides, [])


def test_the_config_is_that_of_transformers(checkpoint: Path) -> None:
    with LLM(str(checkpoint), hf_overrides={"some_field": 3}, max_model_len=64) as llm:
        config = llm.model_config.hf_config
        assert (config.some_field, config.model_type) == (3, "qwen3")
        assert config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
        assert llm.model_config.hf_text_config.hidden_size == config.hidden_size
