"""A real daemon on the embedded model, for tests that use it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-P", "-m", "mainspring.cli.main"]
PATIENCE_S = 120.0  # seconds; a guard against hanging


class Daemon:
    """A daemon process. Its log goes to a file, because a pipe that is not read would fill up."""

    def __init__(self, folder: Path, *arguments: str, listen: str = "", **environment: str) -> None:
        self.address = listen or f"ipc://{folder}/core.sock"
        self._log = folder / f"log-{time.monotonic_ns()}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAINSPRING_LOG")}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "daemon", "--listen", self.address, "--max-num-seqs=16", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**inherited, **environment},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ready_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        return line

    def status(self, *options: str) -> tuple[int, dict[str, Any]]:
        done = run("status", self.address, "--json", *options)
        return done.returncode, json.loads(done.stdout)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder with a short name, because the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ms-") as folder:
        yield Path(folder)


def run(*arguments: str, said: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does; `said` is its standard input."""
    return subprocess.run(
        [*COMMAND, *arguments], input=said, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def until(what: Callable[[], bool], log: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, log()
        time.sleep(0.05)
