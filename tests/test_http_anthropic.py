"""`mainspring serve` as Anthropic's own client sees it when something goes wrong or is given up; test_http_tools.py has
its messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from daemons import PATIENCE_S, Daemon, short_folder, until
from http_servers import HttpServer, cancel_when_running, running

pytestmark = pytest.mark.slow

ENDLESS: dict[str, Any] = {
    "model": "spring",
    "messages": [{"role": "user", "content": "Tell me a long story about a fox."}],
    "max_tokens": 3000,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    started = Daemon(folder, "--max-requests-in-flight", "2")
    started.ready_line()
    yield started
    started.end()


@pytest.fixture(scope="module")
def server(folder: Path, daemon: Daemon) -> Iterator[HttpServer]:
    (folder / "keys").write_text("sk-first first\n")
    options = ("--api-key-file", str(folder / "keys"), "--served-model-name", "spring")
    started = HttpServer(folder, "--connect", daemon.address, *options).wait_ready()
    yield started
    started.end()


def given(server: HttpServer, key: str = "sk-first", **options: Any) -> dict[str, Any]:
    more = {"timeout": PATIENCE_S, "max_retries": 0, "_strict_response_validation": True, **options}
    return {"base_url": server.url, "api_key": key, **more}


def test_a_wrong_key_is_an_authentication_error(server: HttpServer) -> None:
    with pytest.raises(anthropic.AuthenticationError) as caught:
        anthropic.Anthropic(**given(server, "sk-wrong")).messages.create(**ENDLESS)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")


def test_a_client_that_leaves_or_waits_no_longer_ends_its_request(server: HttpServer, daemon: Daemon) -> None:
    client = anthropic.Anthropic(**given(server))
    with client.messages.stream(**ENDLESS) as stream:
        next(iter(stream))
        until(lambda: running(daemon) == 1)
    until(lambda: running(daemon) == 0)
    with pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.3).messages.create(**ENDLESS)
    until(lambda: running(daemon) == 0)


def test_cancelled_tasks_of_the_async_client(server: HttpServer, daemon: Daemon) -> None:
    async def main() -> None:
        async with anthropic.AsyncAnthropic(**given(server)) as client:
            await cancel_when_running(daemon, [client.messages.create(**ENDLESS) for _ in range(2)])

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    until(lambda: running(daemon) == 0)


def test_a_full_queue_is_a_rate_limit(server: HttpServer, daemon: Daemon) -> None:
    client = anthropic.Anthropic(**given(server))
    streams = [client.messages.create(**ENDLESS, stream=True) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    for streamed in (False, True):
        with pytest.raises(anthropic.RateLimitError) as caught:
            client.messages.create(**ENDLESS, stream=streamed)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        body: Any = caught.value.body
        assert body["error"]["type"] == "rate_limit_error"
    for stream in streams:
        stream.close()
    until(lambda: running(daemon) == 0)
