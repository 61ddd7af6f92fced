"""`mainspring serve` as OpenAI's client for Node.js sees it: openai_client.mjs asks, and the tests judge what it found.

`make test-node` installs the package `openai` and runs these tests. They are skipped unless MAINSPRING_NODE_MODULES is
the folder `node_modules` with the package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import numpy as np
import pytest

import pooled
import tool_models
from daemons import PATIENCE_S, short_folder, until
from http_servers import HttpServer
from tool_models import CALL, WEATHER, says

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("openai_client.mjs")
TEXT = f"<think>\nRain?\n</think>\n\nLet me look.\n{CALL}\n{CALL}"
QUESTION: Any = [{"role": "user", "content": "Rain in Oslo?"}]


@pytest.fixture(scope="module")
def modules() -> Path:
    given = os.environ.get("MAINSPRING_NODE_MODULES")
    if shutil.which("node") is None:
        pytest.skip("Node.js is not installed")
    if not given or not (Path(given) / "openai").is_dir():
        pytest.skip("MAINSPRING_NODE_MODULES has no package openai; make test-node installs it")
    return Path(given).resolve()


@pytest.fixture(scope="module")
def server(modules: Path) -> Iterator[HttpServer]:
    with short_folder() as folder:
        model = tool_models.make(folder / "model")
        started = HttpServer(folder, "--model", str(model), "--served-model-name", "tiny").wait_ready()
        yield started
        started.end()


@pytest.fixture(scope="module")
def found(modules: Path, server: HttpServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the client has found, by the name of the check."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "node_modules").symlink_to(modules)
    shutil.copy(PROGRAM, folder)
    embedder = pooled.make("qwen3", folder / "embedder", tokenizer=True)
    with short_folder() as short:
        options = ("--model", str(embedder), "--runner", "pooling", "--served-model-name", "spring")
        other = HttpServer(short, *options).wait_ready()
        order = {"url": server.url, "embeddings": other.url, "says": says(TEXT), "tool": WEATHER}
        command = ["node", str(folder / PROGRAM.name), json.dumps(order)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        other.end()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_models(found: Any) -> None:
    assert found["models"] == ["tiny"]


def test_a_chat_and_its_stream_are_what_the_python_client_gets(found: Any, server: HttpServer) -> None:
    expected = server.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=24, temperature=0)
    assert found["chat"]["text"] == expected.choices[0].message.content
    assert found["chat"]["role"] == "assistant"
    assert found["chat"]["finish_reason"] == expected.choices[0].finish_reason
    assert found["streaming"]["text"] == found["chat"]["text"] == found["runner"]
    assert found["streaming"]["chunks"] > 5
    assert found["streaming"]["finish_reason"] == found["chat"]["finish_reason"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["streaming"]["usage"][name] == found["chat"]["usage"][name] == getattr(expected.usage, name)


def test_tools(found: Any) -> None:
    assert found["tools"]["content"] == "Let me look."
    assert found["tools"]["reasoning"] == "Rain?"
    for check in ("tools", "streamedTools"):
        assert found[check]["finish_reason"] == "tool_calls"
        functions = [one["function"] for one in found[check]["calls"]]
        assert [one["name"] for one in functions] == ["weather", "weather"]
        assert [json.loads(one["arguments"]) for one in functions] == [{"city": "Oslo", "days": 2}] * 2
        assert len({one["id"] for one in found[check]["calls"]}) == 2


def test_a_call_that_is_required_fits_its_schema(found: Any) -> None:
    (call,) = found["required"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["parameters"])


def test_structured_outputs_are_parsed(found: Any) -> None:
    assert found["structured"].keys() == {"answer", "city"}
    assert isinstance(found["structured"]["answer"], bool)
    assert found["structured"]["city"] in ("Oslo", "Rome")


def test_responses(found: Any) -> None:
    response = found["response"]
    assert response["stored"]
    assert {"response.created", "response.output_item.added"} <= set(response["kinds"])
    assert response["kinds"][-1] in ("response.completed", "response.incomplete")
    texts = [part["text"] for item in response["output"] for part in item.get("content", ()) if "text" in part]
    assert response["text"] in ("", *texts)  # reasoning that the limit of tokens cut has no text of an answer


def test_embeddings(found: Any) -> None:
    by_default, floats = (np.array(found["embeddings"][name]) for name in ("byDefault", "floats"))
    assert by_default.shape == floats.shape
    assert np.allclose(by_default, floats, atol=1e-6)
    assert not np.allclose(floats[0], floats[1])


def test_errors_are_the_clients_own_exceptions(found: Any) -> None:
    errors = found["errors"]
    assert (errors["badRequest"]["kind"], errors["badRequest"]["status"]) == ("BadRequestError", 400)
    assert "temperature" in errors["badRequest"]["message"]
    assert (errors["notFound"]["kind"], errors["notFound"]["code"]) == ("NotFoundError", "model_not_found")
    assert errors["timeout"]["kind"] == "APIConnectionTimeoutError"
    assert errors["connection"]["kind"] == "APIConnectionError"


def test_cancelling_ends_requests_in_the_core(found: Any, server: HttpServer) -> None:
    assert found["cancelling"]["chunks"] == 5
    assert found["cancelling"]["aborted"]["kind"] == "APIUserAbortError"
    until(lambda: httpx.get(f"{server.url}/load").json() == {"server_load": 0})
    running = next(
        float(line.rpartition(" ")[2])
        for line in httpx.get(f"{server.url}/metrics").text.splitlines()
        if line.startswith("vllm:num_requests_running")
    )
    assert running == 0
