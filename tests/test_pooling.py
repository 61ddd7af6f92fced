"""Vectors of pooling models equal those of transformers and sentence-transformers, with the same bits on any
schedule."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import pooled
import tiny
from mainspring import LLM, EngineArgs, LLMEngine, PoolingParams, SamplingParams
from mainspring.core.model.run.pooling import PoolingModel
from mainspring.core.plan.outbox import Outbox
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, UnsupportedModelError
from mainspring.ipc.messages import AddRequest, Finished, Pooled, Pooling, Sampling
from plain import make_engine
from sentences import CASES, CROSS, LONG, TEXTS

ATOL = 3e-6

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The checkpoint of a kind, made once."""
    made: dict[str, Path] = {}

    def make(architecture: str, auto: Any = AutoModel, **fields: Any) -> Path:
        name = f"{architecture} {auto.__name__} {fields}"
        if name not in made:
            made[name] = pooled.make(architecture, tmp_path_factory.mktemp("checkpoint"), auto, **fields)
        return made[name]

    return make


def engine_of(path: Path, **settings: Any) -> LLMEngine:
    return make_engine(path, **{"max_model_len": None, **settings})


@torch.inference_mode()
def hidden_states(path: Path, prompt: Sequence[int]) -> np.ndarray:
    """fp32 ``[tokens, hidden]`` of transformers."""
    return AutoModel.from_pretrained(path).eval()(torch.tensor([prompt])).last_hidden_state[0].numpy()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector, axis=-1, keepdims=True)


# ---------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("architecture", [*pooled.ENCODERS, "qwen3"])
def test_embeddings_and_token_embeddings_are_those_of_transformers(architecture: str, checkpoint: Make) -> None:
    path, prompts = checkpoint(architecture), pooled.prompts(1, 7, 30, 100)
    with engine_of(path, skip_tokenizer_init=True) as engine:
        assert engine.get_supported_tasks() == ("embed", "token_embed", "score")
        found = pooled.vectors(engine, prompts)
        tokens = pooled.vectors(engine, prompts, PoolingParams(task="token_embed", normalize=False))
    for prompt, vector, rows in zip(prompts, found, tokens, strict=True):
        expected = hidden_states(path, prompt)
        np.testing.assert_allclose(rows, expected, atol=20 * ATOL)
        np.testing.assert_allclose(vector, unit(expected[-1 if architecture == "qwen3" else 0]), atol=ATOL)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders of sentence-transformers, and its vectors of TEXTS."""
    folder = tmp_path_factory.mktemp("sentences")
    program = Path(__file__).with_name("sentences.py")
    done = subprocess.run([sys.executable, str(program), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_folder_of_sentence_transformers_is_followed(name: str, sentences: Path) -> None:
    theirs = np.load(sentences / f"{name}.npz")
    with engine_of(sentences / name) as engine:
        assert engine.model_config.max_model_len == 200, "as its files say"
        np.testing.assert_allclose(pooled.vectors(engine, TEXTS), theirs["whole"], atol=5 * ATOL)
        found = pooled.vectors(engine, TEXTS, PoolingParams(dimensions=16, normalize=True))
        np.testing.assert_allclose(found, theirs["cut"], atol=ATOL)
        found = pooled.vectors(engine, [LONG], PoolingParams(truncate_prompt_tokens=-1))
        np.testing.assert_allclose(found, theirs["long"], atol=5 * ATOL)


@pytest.mark.parametrize("architecture", [*pooled.ENCODERS, "qwen3"])
@pytest.mark.parametrize("labels", [1, 3])
def test_classes_are_those_of_the_models_own_head(architecture: str, labels: int, checkpoint: Make) -> None:
    path = checkpoint(architecture, AutoModelForSequenceClassification, num_labels=labels)
    prompts = pooled.prompts(1, 9, 60)
    prompts.append([*prompts[1], 2, 2])  # a decoder uses the last token that is not padding
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with engine_of(path, skip_tokenizer_init=True) as engine:
        found = pooled.vectors(engine, prompts)
        raw = pooled.vectors(engine, prompts, PoolingParams(use_activation=False))
    for prompt, probs, logits in zip(prompts, found, raw, strict=True):
        with torch.inference_mode():
            own = model(torch.tensor([prompt])).logits[0]
        if architecture == "roberta" and 2 in prompt:
            continue  # it gives padding inside a text no position of its own
        np.testing.assert_allclose(logits, own, atol=10 * ATOL)
        np.testing.assert_allclose(probs, own.sigmoid() if labels == 1 else own.softmax(-1), atol=ATOL)


def test_labels_of_each_token(checkpoint: Make) -> None:
    path = checkpoint("bert", AutoModelForTokenClassification, num_labels=5)
    [prompt] = pooled.prompts(40)
    with engine_of(path, skip_tokenizer_init=True) as engine:
        assert engine.get_supported_tasks() == ("token_classify",)
        [found] = pooled.vectors(engine, [prompt])
    model = AutoModelForTokenClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        np.testing.assert_allclose(found, model(torch.tensor([prompt])).logits[0].softmax(-1), atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CROSS)
def test_a_cross_encoder_scores_pairs_as_sentence_transformers_does(architecture: str, sentences: Path) -> None:
    theirs = np.load(sentences / f"{architecture} cross.npz")
    with LLM(str(sentences / f"{architecture} cross")) as llm:
        assert llm.llm_engine.get_supported_tasks() == ("classify", "score")
        found = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
        np.testing.assert_allclose([one.outputs.score for one in found], theirs["one_and_many"], atol=ATOL)
        found = llm.score(TEXTS[:2], TEXTS[2:], use_tqdm=False)
        np.testing.assert_allclose([one.outputs.score for one in found], theirs["pairs"], atol=ATOL)
        with pytest.raises(InvalidRequestError, match=r"task is embed, and this model can classify, score"):
            llm.embed("hello", use_tqdm=False)


@pytest.mark.slow
def test_an_embedding_model_scores_by_the_cosine(sentences: Path) -> None:
    theirs = np.load(sentences / "bert cls.npz")
    with LLM(str(sentences / "bert cls")) as llm:
        found = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        embedded = llm.embed(TEXTS, use_tqdm=False)
        with pytest.raises(InvalidArgumentError, match="text_1 has 2 entries and text_2 4"):
            llm.score(TEXTS[:2], TEXTS)
        with pytest.raises(InvalidRequestError, match="task is classify, and this model can embed, token_embed"):
            llm.classify("hello", use_tqdm=False)
    np.testing.assert_allclose([one.outputs.score for one in found], theirs["similarity"], atol=ATOL)
    np.testing.assert_allclose([one.outputs.embedding for one in embedded], theirs["whole"], atol=5 * ATOL)


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("task", ["embed", "token_embed", "classify", "mean"])
def test_a_decoders_vectors_have_the_same_bits_on_any_schedule(
    task: str, checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = AutoModelForSequenceClassification if task == "classify" else AutoModel
    path = checkpoint("qwen3", auto)
    if task == "mean":
        keep = PoolingModel.__init__

        def by_mean(self: Any, model: Any, trunk: Any, tasks: Any, recipe: Any) -> None:
            keep(self, model, trunk, tasks, recipe._replace(mode="mean"))

        monkeypatch.setattr(PoolingModel, "__init__", by_mean)
    cached, task = 80 if task == "embed" else 0, "embed" if task == "mean" else task
    prompts, params = pooled.prompts(90, 33, 64, 1, 120, 17), PoolingParams(task=task)  # type: ignore[arg-type]
    prompts += [prompts[0][:40] + prompts[1], prompts[0]]
    more: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}
    with engine_of(path, **more) as engine:
        alone = [pooled.vectors(engine, [prompt], params)[0] for prompt in prompts]
        assert pooled.run(engine, prompts[:1], params)[0].num_cached_tokens == cached
    for settings in (
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 50, "max_num_seqs": 3, "block_size": 8, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 40, "async_scheduling": True},
    ):
        with engine_of(path, **more, **settings) as engine:
            found = pooled.vectors(engine, prompts, params, after_two_steps=lambda: engine.reset_prefix_cache(True))
            preempted = engine.engine_core.core.scheduler.stats().num_preemptions  # type: ignore[attr-defined]
        assert preempted
        assert all(np.array_equal(one, other) for one, other in zip(alone, found, strict=True)), settings


@pytest.mark.parametrize("architecture", pooled.ENCODERS)
def test_an_encoders_vectors_have_the_same_bits_among_any_neighbours(architecture: str, checkpoint: Make) -> None:
    path, prompts = checkpoint(architecture), pooled.prompts(90, 33, 64, 1, 120, 17, 2, 55)
    params = PoolingParams(task="token_embed")
    with engine_of(path, skip_tokenizer_init=True) as engine:
        alone = [pooled.vectors(engine, [prompt], params)[0] for prompt in prompts]
    for settings in ({}, {"max_num_batched_tokens": 256, "max_num_seqs": 3, "async_scheduling": True}):
        with engine_of(path, skip_tokenizer_init=True, **settings) as engine:
            found = pooled.vectors(engine, prompts, params)
            assert not engine.vllm_config.scheduler_config.enable_chunked_prefill
        assert all(np.array_equal(one, other) for one, other in zip(alone, found, strict=True)), settings


# ---------------------------------------------------------------------- what can't be done


def test_a_request_for_an_unsupported_task_is_refused_with_the_supported_ones(checkpoint: Make, tmp_path: Path) -> None:
    with make_engine(tiny.make("llama", tmp_path), skip_tokenizer_init=True) as engine:
        with pytest.raises(InvalidRequestError, match=r"to embed, and this model can generate: load it with runner='p"):
            engine.add_request("a", [5, 6], PoolingParams(task="embed"))
        engine.engine_core.add_request(AddRequest(1, "a", [5], Sampling(1), pooling=Pooling("embed")))
        refused = engine.engine_core.get_outputs()
        assert refused is not None
        assert "to embed, and this model can generate" in refused.finished[0].error_text
    with engine_of(checkpoint("bert"), skip_tokenizer_init=True, max_model_len=100) as engine:
        with pytest.raises(InvalidRequestError, match=r"to generate tokens, and this model can embed, token_embed"):
            engine.add_request("a", [5, 6], SamplingParams())
        with pytest.raises(InvalidRequestError, match="the prompt has 101 tokens; max_model_len is 100"):
            engine.add_request("a", [5] * 101, PoolingParams())
        engine.engine_core.add_request(AddRequest(1, "a", [5], Sampling(1)))
        refused = engine.engine_core.get_outputs()
        assert refused is not None
        assert "to generate tokens, and this model can embed" in refused.finished[0].error_text
        kept, cut = pooled.vectors(engine, [[5] * 100, [5] * 300], PoolingParams(truncate_prompt_tokens=-1))
        assert np.array_equal(kept, cut)
        [wide] = pooled.run(engine, [[5, 6]], PoolingParams(dimensions=65))
        assert "dimensions is 65; the model's vectors have 64" in str(wide.error)
        assert (wide.finish_reason, wide.outputs.data.size) == ("error", 0)
        with pytest.raises(InvalidRequestError, match="token_type_ids"):
            engine.add_request("a", {"prompt_token_ids": [5, 6], "token_type_ids": [1, 0]}, PoolingParams())
    for fields, words in (
        ({"dimensions": 0}, "dimensions is 0; it must be at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2"),
        ({"task": "sing"}, "task is 'sing'; it must be one of embed"),
        ({"normalize": True, "use_activation": False}, "give one of them"),
        ({"normalize": 2}, "normalize is 2; it must be True or False"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            PoolingParams(**fields)  # type: ignore[arg-type]


def test_a_prompt_of_an_encoder_fits_in_one_step(checkpoint: Make, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint("roberta")
    with pytest.raises(InvalidArgumentError, match="max_num_batched_tokens is 64, less than max_model_len, 100"):
        engine_of(path, skip_tokenizer_init=True, max_num_batched_tokens=64, max_model_len=100)
    with (
        caplog.at_level(logging.WARNING),
        engine_of(path, skip_tokenizer_init=True, max_num_batched_tokens=64) as engine,
    ):
        assert engine.model_config.max_model_len == 64
        assert "max_model_len is cut" in caplog.text
        pooled.vectors(engine, pooled.prompts(64, 64, 1))
    with engine_of(path, skip_tokenizer_init=True) as engine:  # up to the last valid position
        assert engine.model_config.max_model_len == 256
        [prompt] = pooled.prompts(256)
        np.testing.assert_allclose(pooled.vectors(engine, [prompt])[0], unit(hidden_states(path, prompt)[0]), atol=ATOL)


def test_runner_and_task_decide_what_a_decoder_is(tmp_path: Path, checkpoint: Make) -> None:
    path = tiny.make("llama", tmp_path)
    [prompt] = pooled.prompts(20)
    for settings in ({"runner": "pooling"}, {"task": "embed"}):
        with engine_of(path, skip_tokenizer_init=True, **settings) as engine:
            [found] = pooled.vectors(engine, [prompt])
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        with torch.inference_mode():
            expected = model.model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(found, unit(expected), atol=ATOL)
    with pytest.raises(InvalidArgumentError, match="runner is 'generate' and task is 'embed'"):
        engine_of(path, skip_tokenizer_init=True, runner="generate", task="embed")
    with pytest.raises(UnsupportedModelError, match="not a causal language model"):
        engine_of(checkpoint("bert"), skip_tokenizer_init=True, runner="generate")


def test_a_request_whose_vector_fails_fails_alone(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = PoolingModel.finish

    def failing(self: PoolingModel, pooling: Pooling, token_ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if len(token_ids) == 7:
            raise ValueError("seven")
        return finish(self, pooling, token_ids, rows)

    monkeypatch.setattr(PoolingModel, "finish", failing)
    with engine_of(checkpoint("bert"), skip_tokenizer_init=True) as engine:
        outputs = pooled.run(engine, pooled.prompts(6, 7, 8))
    assert [str(output.error or "") for output in outputs] == ["", "ValueError: seven", ""]
    assert [output.outputs.data.size for output in outputs] == [64, 0, 64]


def test_more_vectors_than_a_message_may_carry_go_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainspring.core.plan.outbox.MOST_POOLED", 100)
    outbox = Outbox()
    sizes = {1: 60, 2: 40, 3: 1, 4: 500, 5: 500, 6: 0}
    for handle, size in sizes.items():
        if size:
            outbox.put_pooled(7, Pooled(handle, [size], bytes(size)))
        outbox.put(7, Finished(handle, "stop" if size else "abort"))
    told = []
    while outbox:
        out = outbox.take(None)[7]
        assert [one.handle for one in out.pooled] == [one.handle for one in out.finished if sizes[one.handle]]
        told.append([one.handle for one in out.finished])
    assert told == [[1, 2], [3], [4], [5, 6]]


def test_an_aborted_request_ends_without_a_vector(checkpoint: Make) -> None:
    with engine_of(checkpoint("qwen3"), skip_tokenizer_init=True, max_num_batched_tokens=16) as engine:
        engine.add_request("a", [5] * 100, PoolingParams())
        engine.step()
        engine.abort_request("a")
        [output] = engine.step()
        assert (output.finished, output.finish_reason) == (True, "abort")  # type: ignore[attr-defined]
        assert output.outputs.data.size == 0  # type: ignore[attr-defined]
        pooled.vectors(engine, pooled.prompts(30))
        worker = engine.engine_core.core.worker  # type: ignore[attr-defined]
        assert len(worker._sequences) <= 1, "it keeps what the slots of ended requests had"


def test_embeddings_as_prompts_are_computed_as_their_tokens(checkpoint: Make) -> None:
    path = checkpoint("qwen3")
    [prompt] = pooled.prompts(30)
    table = AutoModel.from_pretrained(path).get_input_embeddings().weight.detach()
    with engine_of(path, skip_tokenizer_init=True) as engine:
        tokens, embeds = pooled.vectors(engine, [prompt, {"prompt_embeds": table[prompt].numpy()}])
        assert np.array_equal(tokens, embeds)


def test_engine_args_take_runner_and_task() -> None:
    assert EngineArgs(runner="pooling", task="classify").create_engine_config().model_config.runner == "pooling"
