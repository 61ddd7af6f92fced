"""Images in requests for vectors and scores: as `LLM` answers them, and with the limits of chats."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

import retrieval_models
from daemons import short_folder
from dual_encoders import LONGEST, Model
from http_servers import HttpServer
from media_folders import file_of, picture

pytestmark = pytest.mark.slow

ATOL = 3e-6
IMAGES = [picture(1), picture(2, 64, 100)]
TEXTS = ["a cat", "two dogs that sleep"]


def part(image: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(file_of(image)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("clip", tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def server(clip: Model) -> Iterator[HttpServer]:
    with short_folder() as folder:
        options = ("--model", str(clip.folder), "--dtype", "float32", "--trust-request-chat-template")
        found = HttpServer(folder, *options).wait_ready()
        yield found
        found.end()


def post(server: HttpServer, path: str, **body: Any) -> Any:
    found = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    return found.json() if found.status_code == 200 else (found.status_code, found.json()["error"]["message"])


def said(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def test_a_conversation_of_an_image_or_a_text_has_its_vector(server: HttpServer, clip: Model) -> None:
    for image in IMAGES:
        for path, field in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
            (found,) = post(server, path, messages=said(part(image)))["data"]
            np.testing.assert_allclose(found[field], clip.image(image), atol=ATOL)
    (found,) = post(server, "/v1/embeddings", messages=said(text_part(TEXTS[0])))["data"]
    np.testing.assert_allclose(found["embedding"], clip.text(clip.ids(TEXTS[0])), atol=ATOL)
    (found,) = post(server, "/v1/embeddings", messages=said(text_part(TEXTS[0])), add_special_tokens=False)["data"]
    np.testing.assert_allclose(found["embedding"], clip.text(clip.ids(TEXTS[0])[1:-1]), atol=ATOL)
    template = "{% for m in messages %}<s>{{ m.role }}</s>{% endfor %}"
    (found,) = post(server, "/v1/embeddings", messages=said(text_part("x")), chat_template=template)["data"]
    np.testing.assert_allclose(found["embedding"], clip.text(clip.ids("user")), atol=ATOL)
    padded = clip.ids(TEXTS[0]) + [258] * (LONGEST - len(clip.ids(TEXTS[0])))
    (found,) = post(server, "/v1/embeddings", input=TEXTS[0], padding="max_length")["data"]
    np.testing.assert_allclose(found["embedding"], clip.text(padded), atol=ATOL)


def test_scores_of_images_and_texts_are_their_cosines(server: HttpServer, clip: Model) -> None:
    images = [clip.image(one) for one in IMAGES]
    text = clip.text(clip.ids(TEXTS[0]))
    content = {"content": [part(one) for one in IMAGES]}
    listed = [{"content": [part(one)]} for one in IMAGES]
    own = [float(text @ one) for one in images]
    fields = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
    for first, second in fields:
        for documents in (content, listed):
            found = post(server, "/v1/score", **{first: TEXTS[0], second: documents})
            np.testing.assert_allclose([one["score"] for one in found["data"]], own, atol=ATOL)
    found = post(server, "/score", queries=listed[0], documents=[{"content": [text_part(TEXTS[0])]}, listed[1]])
    both = [float(images[0] @ text), float(images[0] @ images[1])]
    np.testing.assert_allclose([one["score"] for one in found["data"]], both, atol=ATOL)
    order = sorted(range(2), key=lambda at: -both[at])
    found = post(server, "/rerank", query=listed[0], documents=[TEXTS[0], listed[1]])
    assert [one["index"] for one in found["results"]] == order
    np.testing.assert_allclose(
        [one["relevance_score"] for one in found["results"]], [both[at] for at in order], atol=ATOL
    )
    shown = [{"text": TEXTS[0]}, {"multi_modal": listed[1]["content"]}]
    assert [one["document"] for one in found["results"]] == [shown[at] for at in order]


def test_more_images_than_are_prepared_at_once_have_their_own_scores(server: HttpServer, clip: Model) -> None:
    images = [picture(seed, 30, 30) for seed in range(20)]
    found = post(server, "/v1/score", queries=TEXTS[0], documents={"content": [part(one) for one in images]})
    text = clip.text(clip.ids(TEXTS[0]))
    own = [float(text @ clip.image(one)) for one in images]
    np.testing.assert_allclose([one["score"] for one in found["data"]], own, atol=ATOL)


def url(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def test_urls_and_forms_that_chats_refuse_are_refused(server: HttpServer) -> None:
    refused: list[tuple[Any, str]] = [
        (url("file:///etc/passwd"), "allowed_local_media_path"),
        (url("http://127.0.0.1/x.png"), "allowed_media_domains"),
        (url("/etc/passwd"), "must be a URL"),
        (url("data:image/png;base64,AAAA"), "image 0"),
        ({"type": "image", "image": [[1, 2], [3, 4]]}, "image"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "takes: text, image"),
        ({"type": "video_url", "video_url": {"url": "data:,x"}}, "takes: text, image"),
        ({"type": "image_url", "image_url": {}}, "without content"),
        ({"type": "text", "text": 5}, "takes: text, image"),
    ]
    for wrong, words in refused:
        for path, body in (
            ("/v1/embeddings", {"messages": said(wrong)}),
            ("/pooling", {"messages": said(wrong)}),
            ("/v1/score", {"queries": "x", "documents": [{"content": [wrong]}]}),
            ("/v1/score", {"data_1": {"content": [wrong]}, "data_2": ["x"]}),
            ("/rerank", {"query": {"content": [wrong]}, "documents": ["x"]}),
        ):
            status, message = post(server, path, **body)
            assert (status, words in message) == (400, True), (wrong, path, message)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"messages": said(part(IMAGES[0]), text_part("a cat"))}, "not both"),
        ("/v1/embeddings", {"messages": said(*[part(IMAGES[0])] * 40)}, "limit_mm_per_prompt allows 32"),
        ("/v1/embeddings", {"messages": said(text_part("x")), "input": "x"}, "give input or messages"),
        ("/v1/embeddings", {}, "give input or messages"),
        ("/v1/embeddings", {"messages": ["x"]}, "object"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": 5}]}, "must be a text or a list"),
        (
            "/v1/embeddings",
            {"messages": said(text_part("x")), "chat_template": "x", "chat_template_kwargs": {"tokenize": True}},
            "tokenize",
        ),
        ("/v1/score", {"queries": "x", "documents": [{}]}, "neither text nor content"),
        (
            "/v1/score",
            {"queries": "x", "documents": {"prompt": "", "multi_modal_data": {}}},
            "neither text nor content",
        ),
        ("/v1/score", {"queries": "x", "documents": {"content": []}}, "one and many"),
        ("/rerank", {"query": "x", "documents": {"content": []}}, "documents is empty"),
        ("/v1/score", {"queries": "x", "documents": [{"content": [part(IMAGES[0])] * 40}]}, "allows 32"),
    ],
)
def test_bodies_that_ask_for_nothing_sensible_are_refused(
    server: HttpServer, path: str, body: dict[str, Any], words: str
) -> None:
    status, message = post(server, path, **body)
    assert (status, words in message) == (400, True), message
    assert "Traceback" not in server.log


def test_a_refused_image_leaves_the_other_requests_alone(server: HttpServer, clip: Model) -> None:
    broken = [{"content": [part(IMAGES[0])]}, {"content": [url("data:image/png;base64,AAAA")]}]
    status, message = post(server, "/v1/score", queries="x", documents=broken)
    assert (status, "image 0" in message) == (400, True), message
    (found,) = post(server, "/v1/embeddings", messages=said(part(IMAGES[0])))["data"]
    np.testing.assert_allclose(found["embedding"], clip.image(IMAGES[0]), atol=ATOL)


def test_a_retrieval_model_gives_vectors_of_tokens_and_scores_them_late(tmp_path: Path) -> None:
    model = retrieval_models.Model("colqwen2", tmp_path)
    query, (_, words) = model.query("a cat"), model.text("a cat")
    images = [model.image(one)[1] for one in IMAGES]
    with short_folder() as folder:
        server = HttpServer(folder, "--model", str(tmp_path), "--dtype", "float32").wait_ready()
        try:
            (found,) = post(server, "/v1/embeddings", messages=said(part(IMAGES[0])))["data"]
            (pooled,) = post(server, "/pooling", messages=said(text_part(query)))["data"]
            scores = post(server, "/v1/score", queries=query, documents={"content": [part(one) for one in IMAGES]})
        finally:
            server.end()
    np.testing.assert_allclose(found["embedding"], images[0], atol=ATOL)
    np.testing.assert_allclose(pooled["data"], words, atol=ATOL)
    own = [float((words @ one.T).max(1).sum()) for one in images]
    np.testing.assert_allclose([one["score"] for one in scores["data"]], own, atol=100 * ATOL)


def test_files_of_an_allowed_folder_are_read(clip: Model, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(file_of(IMAGES[0]))
    options = ("--model", str(clip.folder), "--dtype", "float32", "--allowed-local-media-path", str(tmp_path))
    with short_folder() as folder:
        server = HttpServer(folder, *options).wait_ready()
        try:
            address = f"file://{tmp_path}/a.png"
            (found,) = post(server, "/v1/embeddings", messages=said(url(address)))["data"]
            status, _ = post(server, "/v1/embeddings", messages=said(url("file:///etc/passwd")))
        finally:
            server.end()
    np.testing.assert_allclose(found["embedding"], clip.image(IMAGES[0]), atol=ATOL)
    assert status == 400
