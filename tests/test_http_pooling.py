"""The routes of pooling models, with OpenAI's client and compared with `LLM`."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx2 as httpx
import numpy as np
import openai
import pytest
from transformers import AutoModelForSequenceClassification

import pooled
from daemons import short_folder
from http_servers import HttpServer
from mainspring import LLM, AsyncEngineArgs, AsyncLLMEngine
from mainspring.web import pooling
from mainspring.web.exchange import Request
from mainspring.web.failures import HttpError
from mainspring.web.service import Service
from mainspring.web.tenants import Tenant

pytestmark = pytest.mark.slow

TEXTS = ["the fox jumps", "a bear sleeps in the long winter", "one two three"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pooled.make("qwen3", tmp_path_factory.mktemp("embedder"), tokenizer=True)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    return pooled.make("bert", folder, AutoModelForSequenceClassification, tokenizer=True, id2label={0: "relevant"})


def serve(model: Path, *options: str) -> Iterator[HttpServer]:
    with short_folder() as folder:
        server = HttpServer(folder, "--model", str(model), "--runner", "pooling", *options).wait_ready()
        yield server
        server.end()


@pytest.fixture(scope="module")
def server(embedder: Path) -> Iterator[HttpServer]:
    yield from serve(embedder, "--served-model-name", "spring")


@pytest.fixture(scope="module")
def scorer(classifier: Path) -> Iterator[HttpServer]:
    yield from serve(classifier)


def post(server: HttpServer, path: str, **body: Any) -> Any:
    found = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    return found.json() if found.status_code == 200 else found.status_code


def test_embeddings_are_those_of_the_engine(server: HttpServer, embedder: Path) -> None:
    with LLM(str(embedder), runner="pooling") as llm:
        expected = [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]  # type: ignore[union-attr]
        ids = [list(one.prompt_token_ids) for one in llm.embed(TEXTS, use_tqdm=False)]
    client = server.client()
    found = client.embeddings.create(model="spring", input=TEXTS, encoding_format="float")
    assert [one.index for one in found.data] == [0, 1, 2]
    assert np.array_equal([one.embedding for one in found.data], expected)
    assert found.usage.prompt_tokens == sum(map(len, ids))
    # by default the client asks for base64, which it decodes only after a strict validation would have refused it
    lenient = server.client(_strict_response_validation=False)
    by_default = lenient.embeddings.create(model="spring", input=TEXTS)
    assert np.allclose([one.embedding for one in by_default.data], expected)
    raw = post(server, "/v1/embeddings", input=TEXTS[0], encoding_format="base64")["data"][0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(raw), "<f4"), expected[0])
    of_ids = client.embeddings.create(model="spring", input=ids[0], encoding_format="float")
    assert np.array_equal(of_ids.data[0].embedding, expected[0])
    of_many = client.embeddings.create(model="spring", input=ids, encoding_format="float")
    assert np.array_equal([one.embedding for one in of_many.data], expected)


def test_scores_and_ranks_are_cosines(server: HttpServer, embedder: Path) -> None:
    with LLM(str(embedder), runner="pooling") as llm:
        expected = [one.outputs.score for one in llm.score("a fox", TEXTS, use_tqdm=False)]
    for path in ("/score", "/v1/score"):
        found = post(server, path, text_1="a fox", text_2=TEXTS)
        assert np.allclose([one["score"] for one in found["data"]], expected)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = post(server, path, query="a fox", documents=TEXTS, top_n=2)
        order = sorted(range(3), key=lambda at: -expected[at])[:2]
        assert [one["index"] for one in found["results"]] == order
        assert [one["document"]["text"] for one in found["results"]] == [TEXTS[at] for at in order]
    assert len(post(server, "/rerank", query="x", documents=[{"text": "a"}, "b"])["results"]) == 2


def test_pooling_gives_what_the_task_gives(server: HttpServer) -> None:
    (one,) = post(server, "/pooling", input=TEXTS[0])["data"]
    assert len(one["data"]) == 64
    (one,) = post(server, "/pooling", input=TEXTS[0], task="token_embed")["data"]
    assert len(one["data"][0]) == 64
    assert len(one["data"]) == post(server, "/tokenize", prompt=TEXTS[0])["count"]


def api_of(engine: AsyncLLMEngine) -> tuple[pooling.PoolingApi, Request]:
    """The handlers in this process, and a request with a small body."""
    tenant = Tenant("one", 1.0, False, lambda _: engine)
    scope = {"method": "POST", "path": "/", "query_string": b"", "headers": []}
    return pooling.PoolingApi(Service(*cast(Any, (None, None, "m", {}, None)))), Request(scope, tenant, {}, 100)


def test_many_vectors_are_worked_on_beside_the_loop(embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of a request with many short texts is small, but its vectors are not."""
    threads: list[threading.Thread] = []

    def watched(work: Callable[..., Any], *given: Any) -> Any:
        threads.append(threading.current_thread())
        return work(*given)

    for name in ("_encoded", "cosine"):
        monkeypatch.setattr(pooling, name, partial(watched, getattr(pooling, name)))

    async def threads_of(api: pooling.PoolingApi, request: Request, count: int) -> list[bool]:
        texts: list[Any] = ["a"] * count
        in_loop = []
        for asked in (
            api.embeddings(request, pooling.InputBody(input=texts)),
            api.pooling(request, pooling.InputBody(input=texts)),
            api.score(request, pooling.ScoreBody(text_1="a", text_2=texts)),
        ):
            threads.clear()
            await asked
            assert len(threads) == count
            in_loop.append(threading.current_thread() in threads)
        return in_loop

    async def run() -> None:
        async with AsyncLLMEngine.from_engine_args(AsyncEngineArgs(str(embedder), runner="pooling")) as engine:
            api, request = api_of(engine)
            assert await threads_of(api, request, 3) == [True, True, True]
            assert await threads_of(api, request, pooling.LARGE_DATA // 64 + 1) == [False, False, False]

    asyncio.run(run())


def test_what_a_pooling_model_can_not_do(server: HttpServer) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="spring", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="spring", prompt="x")
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="spring", input="x", dimensions=10_000)
    for wrong in ([], "", ["a", 1], [["a"]], [-1], "x " * 999):
        assert post(server, "/v1/embeddings", input=wrong) == 400
    for path, body in (
        ("/classify", {"input": "x"}),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
        ("/score", {"text_1": "a"}),
        ("/rerank", {"query": "a", "documents": []}),
        ("/pooling", {"input": "x", "task": "dance"}),
    ):
        assert post(server, path, **body) == 400


def test_a_cross_encoder_scores_pairs(scorer: HttpServer, classifier: Path) -> None:
    with LLM(str(classifier), runner="pooling") as llm:
        expected = [one.outputs.score for one in llm.score("a fox", TEXTS, use_tqdm=False)]
        probs = [one.outputs.probs for one in llm.classify(TEXTS, use_tqdm=False)]
    found = post(scorer, "/v1/score", text_1="a fox", text_2=TEXTS)
    assert np.allclose([one["score"] for one in found["data"]], expected)
    parts = {"content": [{"type": "text", "text": text} for text in TEXTS]}
    found = post(scorer, "/v1/score", queries="a fox", documents=parts)
    assert np.allclose([one["score"] for one in found["data"]], expected)
    image = {"content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
    assert post(scorer, "/v1/score", queries="a fox", documents=image) == 400
    found = post(scorer, "/classify", input=TEXTS)
    assert np.allclose([one["probs"] for one in found["data"]], probs)
    assert [one["num_classes"] for one in found["data"]] == [1, 1, 1]
    assert [one["label"] for one in found["data"]] == ["relevant"] * 3
    found = post(scorer, "/v2/rerank", query="a fox", documents=TEXTS)
    assert [one["index"] for one in found["results"]] == sorted(range(3), key=lambda at: -expected[at])


def test_pairs_are_limited_in_number_and_in_tokens(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with AsyncLLMEngine.from_engine_args(AsyncEngineArgs(str(classifier), runner="pooling")) as engine:
            api, request = api_of(engine)
            tokenizer = await engine.get_tokenizer()
            encoded: list[int] = []  # tokens of each pair

            def encode_pair(one: str, two: str, encode: Any = tokenizer.encode_pair) -> Any:
                found = encode(one, two)
                encoded.append(len(found[0]))
                return found

            monkeypatch.setattr(tokenizer, "encode_pair", encode_pair)
            body = pooling.ScoreBody(text_1="a fox", text_2=[*TEXTS])
            await api.score(request, body)
            first, second, _ = encoded
            encoded.clear()
            monkeypatch.setattr(pooling, "MAX_TOKENS", first + second - 1)
            with pytest.raises(HttpError, match="tokens together"):
                await api.score(request, body)
            assert encoded == [first, second], "no more are encoded"
            many: list[Any] = ["a"] * (pooling.MAX_INPUTS + 1)
            with pytest.raises(HttpError, match="there are 2049 inputs; the limit is 2048"):
                await api.score(request, pooling.ScoreBody(text_1=many, text_2=many))

    asyncio.run(run())
