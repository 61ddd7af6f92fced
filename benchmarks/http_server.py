"""A real `mainspring serve` beside a daemon, for programs that disturb it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

START_SECONDS = 120.0


class HttpServer:
    """`mainspring serve` with these flags at a free port, from its start until the context ends.

    Args:
        folder: for its log and its standard output, which are files because a pipe that is not read would fill up.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self._log, self._out = folder / "serve-log", folder / "serve-out"
        command = [sys.executable, "-P", "-m", "mainspring.cli.main", "serve", "--port", "0", *flags]
        with self._log.open("wb") as log, self._out.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while (found := re.search(r"ready at (https?://[\d.]+:(\d+));", self._out.read_text())) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise SystemExit(f"the server did not start:\n{self.log}")
            time.sleep(0.02)
        self.url, self.port = found[1], int(found[2])

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if kind is not None:
            print(f"the server's log ends:\n{self.log[-4000:]}", file=sys.stderr)
