"""A real daemon at a temporary address, for programs that disturb it. Linux only, because it reads /proc."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from mainspring.ipc.connection import ask_status
from mainspring.ipc.errors import ConnectError, InvalidArgumentError
from mainspring.ipc.journal import Journal
from mainspring.ipc.messages import CoreStatus
from mainspring.ipc.transport import address_at

START_SECONDS = 120.0
LOOK_SECONDS = 0.01


def wait_for(condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> float:
    """Wait until `condition` holds; → the seconds. The program ends if it does not within `seconds`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise SystemExit(f"waited {seconds:.0f} s in vain: {what}")
        time.sleep(LOOK_SECONDS)
    return time.monotonic() - began


class Daemon:
    """`mainspring daemon` with these flags, from its start until the context ends. Its output is kept in `log`.

    Args:
        threads: of the core; 0: the core chooses.
        env: additional environment variables.
        descriptors: limit of open files of each of its processes; 0: as it is.
    """

    def __init__(self, *flags: str, threads: int = 0, env: dict[str, str] | None = None, descriptors: int = 0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mainspring-bench-"))
        self.address = f"ipc://{self.folder}/core.sock"
        self.log = self.folder / "log"
        self._flags = flags
        self._env = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {}), **(env or {})}
        self._descriptors = descriptors
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, again if it has ended, and wait until it serves."""
        command = [sys.executable, "-P", "-m", "mainspring.cli.main", "daemon", "--listen", self.address]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self._flags], stdout=log, stderr=log, env=self._env, preexec_fn=self._limit_descriptors
            )
        try:
            wait_for(self._serves, "the daemon serves")
        except BaseException:
            self.stop()
            raise

    def _limit_descriptors(self) -> None:
        if self._descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._descriptors, self._descriptors))

    def _serves(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise SystemExit(f"the daemon did not start:\n{self.tail()}")
        return (found := self.status_or_none()) is not None and found.phase == "serving"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def status(self, timeout: float = 10.0) -> CoreStatus:
        return ask_status(self.address, timeout).core

    def status_or_none(self) -> CoreStatus | None:
        with contextlib.suppress(ConnectError):
            return ask_status(self.address, 0.5).core
        return None

    def served_again(self, epoch: int) -> CoreStatus:
        """Wait until a core with a later epoch serves."""
        found: CoreStatus | None = None

        def serves() -> bool:
            nonlocal found
            found = self.status_or_none()
            return found is not None and found.epoch > epoch and found.phase == "serving"

        wait_for(serves, f"a core after epoch {epoch} serves")
        assert found is not None
        return found

    def cores(self) -> list[CoreStatus]:
        """The cores that serve."""
        first = self.status()
        places = [address_at(self.address, one.place) for one in first.cores]
        found = [first, *(ask_status(place, 10.0).core for place in places if place != self.address)]
        return [one for one in found if one.phase == "serving"]

    def journal(self, max_num_seqs: int, pid: int = 0, ranks: int = 1) -> Journal:
        """The journal, which records what a core is computing: of the core `pid`, or of the only one."""
        folder = Path(f"/proc/{pid or self.pid}/fd")
        for link in folder.iterdir():
            with contextlib.suppress(OSError, InvalidArgumentError):
                if os.readlink(link).endswith("(deleted)"):
                    return Journal(os.open(link, os.O_RDWR), max_num_seqs, ranks)
        raise SystemExit(f"no journal is among the open files of the daemon, {folder}")

    def deaths(self, lines: int = 1) -> list[str]:
        """The first `lines` lines of the supervisor's log for each death of a core."""
        log = self.log.read_text(errors="replace").splitlines()
        ends = [number for number, line in enumerate(log) if re.search(r"the core \(pid \d+\) ended ", line)]
        return ["\n".join(log[number : number + lines]) for number in ends]

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """Send SIGKILL to the supervisor; its core ends by itself."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)
                    break

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop()
        if kind is not None:
            print(f"the daemon's log ends:\n{self.tail()}", file=sys.stderr)
        shutil.rmtree(self.folder, ignore_errors=True)
