"""`pooler_config`, vectors of tokens and of chunks, and late interaction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModel

import pooled
from mainspring import LLM, PoolingParams
from mainspring.ipc.config import PoolerConfig
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError
from mainspring.ipc.pooling_params import LateChunkingParams
from tiers import fast_only

TEXT = "A first sentence. Then a second one, which is longer."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pooled.make("bert", tmp_path_factory.mktemp("model"), AutoModel, tokenizer=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), pooler_config=PoolerConfig(task="token_embed")) as llm:
        yield llm


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def test_embed_gives_the_vectors_of_tokens(llm: LLM) -> None:
    (found,) = llm.embed(TEXT, use_tqdm=False)
    assert found.outputs.data.shape == (len(found.prompt_token_ids), 64)
    assert found.late_chunking is None


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_the_vector_of_a_chunk_is_the_mean_of_its_tokens(size: int, llm: LLM) -> None:
    (raw,) = llm.embed(TEXT, use_tqdm=False, pooling_params=PoolingParams(use_activation=False, dimensions=48))
    late = PoolingParams(late_chunking_params=LateChunkingParams(size), dimensions=48)
    (found,) = llm.embed(TEXT, use_tqdm=False, pooling_params=late)
    rows, total = raw.outputs.data, len(raw.prompt_token_ids)
    expected = np.stack([rows[at : at + size].mean(0) for at in range(0, total, size)])
    np.testing.assert_allclose(found.outputs.data, unit(expected), atol=1e-6)
    chunking = found.late_chunking
    assert chunking is not None
    assert (chunking.chunk_size, chunking.input_tokens) == (size, total)
    assert [one.token_range for one in chunking.chunks] == [(at, min(at + size, total)) for at in range(0, total, size)]
    ranges = [one.char_range for one in chunking.chunks if one.char_range is not None]
    assert (ranges[0][0], ranges[-1][1]) == (0, len(TEXT))
    if size == 1:
        assert chunking.chunks[0].char_range is None, "the special token before the text"


def test_late_chunking_that_can_not_be_done_is_refused(llm: LLM) -> None:
    late = LateChunkingParams(4)
    for prompt, params, message in (
        ([5, 6, 7], PoolingParams(late_chunking_params=late), "a prompt that is text"),
        (TEXT, PoolingParams(late_chunking_params=late, truncate_prompt_tokens=3), "truncate_prompt_tokens"),
        (TEXT, PoolingParams(late_chunking_params=late, task="embed"), "is for token_embed"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            llm.encode(prompt, params, use_tqdm=False)
    with pytest.raises(InvalidArgumentError, match="chunk_size is 0"):
        LateChunkingParams(0)


def test_a_score_is_the_late_interaction(llm: LLM) -> None:
    query, documents = "a query", ["one", TEXT]
    found = llm.score(query, documents, use_tqdm=False)
    rows = [one.outputs.data for one in llm.embed([query, *documents], use_tqdm=False)]
    for score, document in zip(found, rows[1:], strict=True):
        expected = sum(max(float(token @ other) for other in document) for token in rows[0])
        assert score.outputs.score == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", fast_only(("seq_pooling_type",), ["seq_pooling_type", "pooling_type"]))
def test_the_way_of_pooling_can_be_chosen(name: str, checkpoint: Path) -> None:
    with LLM(str(checkpoint), pooler_config={name: "MEAN"}) as llm:
        (rows,) = llm.encode(TEXT, PoolingParams(task="token_embed", use_activation=False), use_tqdm=False)
        (found,) = llm.embed(TEXT, use_tqdm=False)
    np.testing.assert_allclose(found.outputs.embedding, unit(rows.outputs.data.mean(0)), atol=1e-6)


def test_a_task_that_the_model_lacks_is_refused(checkpoint: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="the task is classify; the model can"):
        LLM(str(checkpoint), pooler_config=PoolerConfig(task="classify"))
