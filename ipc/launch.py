"""Starting a core process for this process alone, and ending it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import weakref

import msgspec

from .config import EngineConfig
from .errors import EngineStartError, from_wire
from .messages import StartReport
from .transport import (
    CoreLaunch,
    ProcessWatch,
    describe_exit,
    ipc_address,
    make_runtime_dir,
    remove_runtime_dir,
)

_STOP_SECONDS = 5.0


class CoreProcess:
    """A core that belongs to this process: it ends with it, however it ends.

    The core is a fresh interpreter, so scripts and notebooks need no ``__main__`` guard; its configuration comes over
    stdin. It watches this process and goes when it is gone.

    Raises:
        MainspringError: the core did not start; the error it raised, under its own type.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.token = secrets.token_bytes(16)
        folder = make_runtime_dir()
        report = write = -1
        try:
            self.address = ipc_address(folder)
            report, write = os.pipe()
            launch = CoreLaunch(config, self.address, self.token, secrets.token_bytes(8), 1, os.getpid(), write, folder)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mainspring.core"],
                stdin=subprocess.PIPE,
                stdout=2,  # what a model's code prints is not our output
                pass_fds=[write],
                process_group=0,  # Ctrl-C is the frontend's to handle
                # OpenMP's threads sleep between two loops: where they spin and the machine has other work, a step takes
                # many times as long.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            )
        except BaseException:
            for fd in (report, write):
                if fd >= 0:
                    os.close(fd)
            remove_runtime_dir(folder)
            raise
        self._end = weakref.finalize(self, _end, self._process, folder, os.getpid())
        os.close(write)
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(msgspec.msgpack.encode(launch))
            self._await_report(report)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(report)
        process = self._process
        self.watch = ProcessWatch(process.pid, lambda: process.poll() is not None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_text(self) -> str | None:
        """How it ended, or None while it runs."""
        code = self._process.poll()
        return None if code is None else describe_exit(code)

    def close(self) -> None:
        """End the core and remove its socket. Twice is once."""
        self._end()
        if hasattr(self, "watch"):
            self.watch.close()

    def _await_report(self, fd: int) -> None:
        data = b""
        while chunk := os.read(fd, 65536):
            data += chunk
        if not data:
            self._process.wait()
            raise EngineStartError(
                f"the core ended {self.exit_text()} while it started; what it wrote to stderr may say why"
            )
        report = msgspec.msgpack.decode(data, type=StartReport)
        if report.error:
            raise from_wire(report.error, report.error_text)


def _end(process: subprocess.Popen[bytes], folder: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child; the core is its parent's
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    remove_runtime_dir(folder)
