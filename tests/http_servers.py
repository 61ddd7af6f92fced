"""A real `mainspring serve`, for tests that use it over HTTP."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import openai

from daemons import COMMAND, PATIENCE_S, Daemon
from mainspring.ipc.connection import ask_status


def running(daemon: Daemon) -> int:
    """Requests that the daemon's core computes, or that wait."""
    stats = ask_status(daemon.address, PATIENCE_S).core.stats
    return stats.num_running + stats.num_waiting


async def cancel_when_running(daemon: Daemon, calls: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Make these requests at once, and cancel all of them when the core has them."""
    tasks = [asyncio.create_task(call) for call in calls]
    while running(daemon) < len(tasks):
        await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def certificate(folder: Path) -> tuple[str, str]:
    """The files of a certificate of 127.0.0.1 and its key."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    options = "-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1".split()
    subprocess.run(["openssl", "req", *options, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


class HttpServer:
    """The process. Its log goes to a file, because a pipe that is not read would fill up."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self._log, self._out = (folder / f"{name}-{time.monotonic_ns()}" for name in ("log", "out"))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAINSPRING_LOG")}
        with self._log.open("w") as log, self._out.open("w") as out:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", "--port", "0", *arguments], stdout=out, stderr=log, env={**inherited, **environment}
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def out(self) -> str:
        """The line that says it is ready, and the access log."""
        return self._out.read_text()

    def wait_ready(self) -> HttpServer:
        deadline = time.monotonic() + PATIENCE_S
        while (found := re.search(r"ready at (https?)://([\d.]+):(\d+);", self.out)) is None:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        self.url, self.host, self.port = f"{found[1]}://{found[2]}:{found[3]}", found[2], int(found[3])
        return self

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            **{
                "base_url": f"{self.url}/v1",
                "api_key": key,
                "max_retries": 0,
                "timeout": PATIENCE_S,
                "_strict_response_validation": True,
                **options,
            }
        )

    def async_client(self, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            **{
                "base_url": f"{self.url}/v1",
                "api_key": key,
                "max_retries": 0,
                "timeout": PATIENCE_S,
                "_strict_response_validation": True,
                **options,
            }
        )

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=PATIENCE_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
