"""The HTTP server while things die: the core, a worker, the daemon; and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import psutil
import pytest

from daemons import PATIENCE_S, Daemon, short_folder, until
from http_servers import HttpServer, certificate
from mainspring.ipc.connection import ask_status

pytestmark = pytest.mark.slow

STREAMS = 64
KILLS = 3


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def calm() -> Iterator[Daemon]:
    """A daemon of which nothing dies."""
    with short_folder() as place:
        started = Daemon(place)
        started.ready_line()
        yield started
        started.end()


async def stream(client: openai.AsyncOpenAI, number: int, got: list[int] | None = None, **more: Any) -> list[Any]:
    """The texts and token ids of a stream; `got` counts its chunks."""
    messages: Any = [{"role": "user", "content": f"Tell me a long story about a {('cat', 'fox', 'owl')[number % 3]}."}]
    extra = {"return_token_ids": True, "ignore_eos": True}
    options = {"max_tokens": 120, "temperature": 0.9, "seed": number, "extra_body": extra, **more}
    text, ids = "", []
    async for chunk in await client.chat.completions.create(model="", messages=messages, stream=True, **options):  # type: ignore[call-overload]
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ids += getattr(choice, "token_ids", None) or []
        if got is not None:
            got[0] += 1
    return [text, ids]


async def all_streams(server: HttpServer, got: list[int]) -> list[Any]:
    async with server.async_client() as client:
        return await asyncio.gather(*(stream(client, number, got) for number in range(STREAMS)))


def test_64_streams_end_with_the_same_tokens_though_the_core_is_killed(folder: Path) -> None:
    daemon = Daemon(folder)
    daemon.ready_line()
    server = HttpServer(folder, "--connect", daemon.address).wait_ready()

    async def disturbed() -> tuple[list[Any], int]:
        got, kills = [0], 0
        task = asyncio.ensure_future(all_streams(server, got))
        for part in range(1, KILLS + 1):
            while got[0] < part * STREAMS * 120 // (KILLS + 2) and not task.done():
                await asyncio.sleep(0.01)
            if task.done():
                break
            core = (await asyncio.to_thread(ask_status, daemon.address, PATIENCE_S)).core
            os.kill(core.core_pid, signal.SIGKILL)
            kills += 1
            while True:  # until the next core answers
                await asyncio.sleep(0.05)
                try:
                    now = (await asyncio.to_thread(ask_status, daemon.address, PATIENCE_S)).core
                except Exception:
                    continue
                if now.epoch > core.epoch:
                    break
        return await task, kills

    try:
        expected = asyncio.run(all_streams(server, [0]))
        assert all(len(ids) == 120 for _, ids in expected)
        found, kills = asyncio.run(asyncio.wait_for(disturbed(), PATIENCE_S))
        assert kills == KILLS
        assert found == expected
    finally:
        server.end()
        daemon.end()


def test_new_requests_wait_for_a_core_for_a_time_and_are_then_refused(folder: Path) -> None:
    daemon = Daemon(folder)
    daemon.ready_line()
    server = HttpServer(folder, "--connect", daemon.address, "--restart-wait", "1").wait_ready()
    try:
        client = server.client()
        assert client.models.list().data
        daemon.process.send_signal(signal.SIGSTOP)  # so that no core follows
        os.kill(ask_status(daemon.address, PATIENCE_S).core.core_pid, signal.SIGKILL)
        time.sleep(0.3)
        with pytest.raises(openai.APITimeoutError):  # it waits
            client.chat.completions.create(model="", messages=[{"role": "user", "content": "x"}], timeout=0.3)
        time.sleep(1.5)
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="", messages=[{"role": "user", "content": "x"}])
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert httpx.get(f"{server.url}/health").status_code == 503
        daemon.process.send_signal(signal.SIGCONT)
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        assert client.chat.completions.create(model="", messages=[{"role": "user", "content": "x"}], max_tokens=2)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
        server.end()
        daemon.end()


def workers_of(server: HttpServer) -> list[psutil.Process]:
    found = []
    for one in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a process that has just ended has no command line
            if "mainspring.web.worker" in one.cmdline():
                found.append(one)
    return found


def test_a_killed_worker_ends_only_its_own_connections(folder: Path) -> None:
    server = HttpServer(folder, "--workers", "2", "--max-num-seqs", "32").wait_ready()

    async def streams() -> tuple[list[Any], set[int]]:
        async def one(number: int) -> Any:
            async with server.async_client() as client:
                messages: Any = [{"role": "user", "content": "Tell me a long story about a fox."}]
                more: Any = {"max_tokens": 600, "extra_body": {"ignore_eos": True}, "stream": True}
                chunks = await client.chat.completions.create(model="", messages=messages, **more)
                try:
                    async for _ in chunks:
                        started.add(number)
                except (openai.APIError, httpx.TransportError):
                    return "broken"
                return "whole"

        started: set[int] = set()
        tasks = [asyncio.ensure_future(one(number)) for number in range(24)]
        while len(started) < 24:
            await asyncio.sleep(0.02)
        victim, _ = workers_of(server)
        mine = {
            connection.raddr.port
            for connection in victim.net_connections("tcp")
            if connection.raddr and connection.laddr.port == server.port
        }
        victim.kill()
        return await asyncio.gather(*tasks), mine

    try:
        before = {one.pid for one in workers_of(server)}
        results, mine = asyncio.run(asyncio.wait_for(streams(), PATIENCE_S))
        assert results.count("broken") == len(mine)
        assert results.count("whole") == 24 - len(mine)
        until(lambda: len(workers_of(server)) == 2 and {one.pid for one in workers_of(server)} != before)
        assert httpx.get(f"{server.url}/health").status_code == 200
        until(lambda: httpx.get(f"{server.url}/load").json() == {"server_load": 0})
    finally:
        assert server.stop() == 0


def test_an_own_core_and_workers_end_in_order_and_streams_are_completed(folder: Path) -> None:
    server = HttpServer(folder, "--workers", "2").wait_ready()
    core = next(one for one in psutil.Process(server.process.pid).children() if "mainspring.core" in one.cmdline())

    async def main() -> list[Any]:
        got = [0]
        async with server.async_client() as client:
            tasks = [asyncio.ensure_future(stream(client, number, got, max_tokens=300)) for number in range(8)]
            while got[0] < 50:
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*tasks)

    found = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert [len(ids) for _, ids in found] == [300] * 8
    assert server.process.wait(PATIENCE_S) == 0, server.log
    assert not core.is_running()
    with pytest.raises(ConnectionError):
        server.connect()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("own", [True, False])
def test_nobody_can_connect_while_streams_end(folder: Path, calm: Daemon, workers: int, own: bool) -> None:
    place = [] if own else ["--connect", calm.address]
    server = HttpServer(folder, "--workers", str(workers), *place).wait_ready()

    def refused() -> bool:
        try:
            server.connect().close()
        except ConnectionRefusedError:
            return True
        return False

    async def main() -> None:
        got = [0]
        async with server.async_client() as client:
            task = asyncio.ensure_future(stream(client, 1, got, max_tokens=3000))
            while got[0] < 5:
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            while not refused():
                assert not task.done(), "the port was open to the end"
                await asyncio.sleep(0.01)
            assert server.process.poll() is None
            assert not task.done()
            task.cancel()

    try:
        asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
        assert server.process.wait(PATIENCE_S) == 0, server.log
        assert "Traceback" not in server.log, server.log
    finally:
        server.end()


def test_streams_that_do_not_end_in_time_are_told(folder: Path) -> None:
    server = HttpServer(folder, "--drain-timeout", "1").wait_ready()

    async def main() -> None:
        got = [0]
        async with server.async_client() as client:
            task = asyncio.ensure_future(stream(client, 1, got, max_tokens=4000))
            while got[0] < 5:
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="shuts down"):
                await task

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert server.process.wait(PATIENCE_S) == 0, server.log


def test_workers_end_with_the_process_that_started_them_and_leave_no_folder(folder: Path, calm: Daemon) -> None:
    base = folder / "run"
    base.mkdir(mode=0o700)
    server = HttpServer(folder, "--workers", "2", "--connect", calm.address, XDG_RUNTIME_DIR=str(base)).wait_ready()
    workers = workers_of(server)
    assert len(workers) == 2
    assert len(list(base.iterdir())) == 1
    server.end()
    _, alive = psutil.wait_procs(workers, PATIENCE_S)
    assert not alive
    assert not list(base.iterdir())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_server_with_its_own_core_leaves_no_folder(workers: int, folder: Path) -> None:
    base = folder / "run"
    base.mkdir(mode=0o700)
    server = HttpServer(folder, "--workers", str(workers), XDG_RUNTIME_DIR=str(base)).wait_ready()
    assert [place.name.startswith("mainspring-") for place in base.iterdir()] == [True]
    server.end()
    until(lambda: not list(base.iterdir()), lambda: str(list(base.rglob("*"))))


def test_a_server_on_a_daemon_that_is_not_there_says_so(folder: Path) -> None:
    server = HttpServer(folder, "--connect", f"ipc://{folder}/none")
    assert server.process.wait(PATIENCE_S) == 1
    assert "no daemon answers" in server.log


def test_a_port_that_is_taken_and_an_address_for_others(folder: Path, calm: Daemon) -> None:
    first = HttpServer(folder, "--port", "0", "--connect", calm.address).wait_ready()
    try:
        second = HttpServer(folder, "--port", str(first.port))
        assert second.process.wait(PATIENCE_S) == 4
        assert f"port is {first.port}" in second.log
        third = HttpServer(folder, "--host", "0.0.0.0")
        assert third.process.wait(PATIENCE_S) == 2
        assert "--api-key-file" in third.log
    finally:
        first.end()


def test_tls(folder: Path, calm: Daemon, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    server = HttpServer(folder, "--tls-cert", cert, "--tls-key", key, "--connect", calm.address).wait_ready()
    try:
        context = ssl.create_default_context(cafile=cert)
        assert server.url.startswith("https://")
        assert httpx.get(f"{server.url}/v1/models", verify=context).json()["object"] == "list"
        found = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True}, verify=context
        )
        assert found.text.endswith("data: [DONE]\n\n")
        assert json.loads(found.text.splitlines()[0][6:])["object"] == "text_completion"
    finally:
        server.end()


def test_readiness_is_told_once_and_logs_are_lines_of_json(folder: Path) -> None:
    server = HttpServer(folder, "--log-format", "json").wait_ready()
    try:
        assert httpx.get(f"{server.url}/version").status_code == 200
        until(lambda: "/version" in server.out)
        lines = server.out.splitlines()
        assert lines[0].startswith("ready at ")
        assert json.loads(lines[1])["path"] == "/version"
        assert all(json.loads(line)["level"] for line in server.log.splitlines())
    finally:
        assert server.stop(signal.SIGINT) == 0


@pytest.mark.parametrize("own", [True, False])
def test_systemd_is_told_when_requests_are_taken(folder: Path, calm: Daemon, own: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(folder / "notify"))
        systemd.settimeout(PATIENCE_S)
        options = () if own else ("--connect", calm.address)
        server = HttpServer(folder, *options, NOTIFY_SOCKET=str(folder / "notify"))
        try:
            while not systemd.recv(4096).startswith(b"READY=1"):
                pass
            server.wait_ready()
            assert httpx.get(f"{server.url}/health").status_code == 200
        finally:
            server.end()


def test_a_core_that_ends_while_workers_start_ends_the_server(folder: Path) -> None:
    server = HttpServer(folder)
    until(lambda: " serves, epoch 1" in server.log, lambda: server.log)
    (pid,) = re.findall(r"core 0 \(pid (\d+)\) serves", server.log)
    os.kill(int(pid), signal.SIGKILL)
    assert server.process.wait(PATIENCE_S) == 1, server.log
    assert "the core has ended while the server's workers started" in server.log
    assert not server.out
