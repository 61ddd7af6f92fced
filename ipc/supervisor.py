"""Keeping a core running: starting it, watching it, starting it again when it dies.

The same for a daemon, whose main thread runs it, and for an engine with a core of its own, where a thread does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque

import msgspec

from .config import EngineConfig
from .crash_suspects import CrashSuspects
from .errors import EngineDeadError, EngineStartError, from_wire
from .journal import Journal, Phase
from .messages import DesiredState, StartReport
from .transport import (
    CoreLaunch,
    Endpoints,
    ProcessWatch,
    Waker,
    describe_exit,
    ipc_address,
    make_runtime_dir,
    readable,
    remove_runtime_dir,
)

logger = logging.getLogger(__name__)

CORE_ENVIRONMENT = {
    # OpenMP's threads sleep between two loops: where they spin and the machine has other work, a step takes many times
    # as long.
    "OMP_WAIT_POLICY": "PASSIVE",
    # torch keeps what oneDNN has compiled for each of the last shapes, a thousand by default, and every number of rows
    # is a shape: hundreds of MB over the first hours.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
}
END_SECONDS = 5.0  # for a core that was told to end
ABORT_SECONDS = 2.0  # for one that hangs to write down where
SETTLED_SECONDS = 2.0  # one that served for less died at once: the next waits a little
MAX_WAIT_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_LENGTH = struct.Struct(">I")


class Supervisor:
    """One core after the other at the same endpoints.

    `start` and `run` are for one thread, `stop` for any, and for signal handlers.

    Args:
        config: of the first core; what that one fills in (block count, lengths) holds for the others.
        endpoints: where they listen.
        runtime_dir: a folder that a core removes if this process dies.
        drain_timeout: seconds that `stop` leaves a core to finish what it has begun.
    """

    def __init__(
        self, config: EngineConfig, endpoints: Endpoints, runtime_dir: str = "", drain_timeout: float = 0.0
    ) -> None:
        self._config, self._endpoints = config, endpoints
        self._runtime_dir, self._drain_timeout = runtime_dir, drain_timeout
        self._service = config.service_config
        self._instance_id = secrets.token_bytes(8)
        self._journal = Journal.create(config.scheduler_config.max_num_seqs)
        self._suspects = CrashSuspects()
        self._waker = Waker()
        self._state = DesiredState()
        self._decisions = msgspec.Raw(b"\xc0")
        self._process: subprocess.Popen[bytes] | None = None
        self._reports = -1
        self._crash_fd = -1
        self._hung = False
        self._stops = 0
        self._restarted_at: deque[float] = deque()
        self.epoch = 0
        self.restarts = 0
        self.last_crash = ""
        self.ready = False
        self.dead_error: EngineDeadError | None = None

    @property
    def core_pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def phase(self) -> Phase:
        return self._journal.phase

    @property
    def num_quarantined(self) -> int:
        """Requests that cores refuse, for others died of them."""
        return len(self._suspects.quarantined)

    def start(self) -> None:
        """Start the first core, and wait until it serves.

        Raises:
            MainspringError: it did not start; the error it raised, under its own type.
        """
        try:
            self._launch()
        except BaseException:
            self._end_core()
            raise

    def run(self) -> None:
        """Watch the core, and start it again whenever it dies, until `stop`.

        Raises:
            EngineDeadError: it died too often.
        """
        quick, trouble = 0, ""  # deaths in a row, each soon after the start; what kept the last core from starting
        try:
            while True:
                began = time.monotonic()
                if self.ready:
                    self._watch()
                if self._stops:
                    return
                quick = quick + 1 if time.monotonic() - began < SETTLED_SECONDS else 0
                self._account(trouble)
                if not self._wait_to_restart(min(MAX_WAIT_SECONDS, 0.1 * 2 ** min(quick, 6)) if quick > 1 else 0.0):
                    return
                trouble = ""
                try:
                    self._launch()
                except Exception as error:  # whatever it was, the next may do better
                    trouble = f" while it started: {error}"
        except EngineDeadError as error:
            self.dead_error = error
            raise
        except BaseException as error:
            self.dead_error = EngineDeadError(f"the supervisor failed: {error!r}")
            raise
        finally:
            self._end_core()

    def stop(self) -> None:
        """Let the core finish what it has begun, for `drain_timeout` seconds at most, and let `run` return. A second
        call ends it at once."""
        self._stops += 1
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM if self._stops == 1 else signal.SIGKILL)
        self._waker.wake()

    # ------------------------------------------------------------------ starting

    def _launch(self) -> None:
        self.epoch += 1
        self._hung = False
        self._close_files()
        self._journal.clear(self._suspects.suspects)
        self._crash_fd = _temporary_file()
        self._reports, write = os.pipe()
        try:
            launch = CoreLaunch(
                self._config,
                self._endpoints,
                self._instance_id,
                self.epoch,
                os.getpid(),
                write,
                self._journal.fd,
                self._crash_fd,
                self._runtime_dir,
                self._drain_timeout,
                self._suspects.suspects,
                self._suspects.quarantined,
                self._decisions,
                self._state,
                self.restarts,
                self.last_crash,
            )
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mainspring.core"],
                stdin=subprocess.PIPE,
                stdout=2,  # what a model's code prints is not our output
                pass_fds=[write, self._journal.fd, self._crash_fd],
                process_group=0,  # Ctrl-C is the frontend's to handle
                env={**CORE_ENVIRONMENT, **os.environ},
            )
        finally:
            os.close(write)
        if self._stops:  # it was not there to be told
            process.terminate()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(launch))
        data = self._first_report(process)
        if data is None:
            process.wait()
            raise EngineStartError(
                f"the core ended {describe_exit(process.returncode)} while it started; what it wrote to stderr may say "
                "why"
            )
        report = msgspec.msgpack.decode(data, type=StartReport)
        if report.error:
            process.wait()
            raise from_wire(report.error, report.error_text)
        if report.config is not None:
            self._config = _repeatable(report.config)
            self._decisions = msgspec.Raw(bytes(report.decisions))
        self.ready = True
        logger.info("the core (pid %d) serves, epoch %d", process.pid, self.epoch)

    def _first_report(self, process: subprocess.Popen[bytes]) -> bytes | None:
        """None if the core ended before it made one, or did not end though it was told to."""
        give_up_at: float | None = None
        while not readable([self._reports], _LOOK_SECONDS):
            if self._stops and give_up_at is None:
                give_up_at = time.monotonic() + END_SECONDS
            if give_up_at is not None and time.monotonic() > give_up_at:
                process.kill()
        return _read_message(self._reports)

    # ------------------------------------------------------------------ watching

    def _watch(self) -> None:
        """Wait for the core's end; read what it reports meanwhile."""
        process = self._process
        assert process is not None
        watch = ProcessWatch(process.pid, lambda: process.poll() is not None)
        give_up_at: float | None = None
        looks = 0  # in a row at which it was silent: after a freeze of both, we may wake first
        try:
            while not watch.ended():
                fds = (self._waker.fd, watch.fd, self._reports)
                found = readable([fd for fd in fds if fd is not None and fd >= 0], _LOOK_SECONDS)
                self._waker.clear()
                if self._reports in found:
                    self._read_state()
                now = time.monotonic()
                if self._stops and give_up_at is None:
                    give_up_at = now + self._drain_timeout + END_SECONDS
                if give_up_at is not None and now > give_up_at:
                    process.kill()
                looks = looks + 1 if self._is_silent() else 0
                if not self._hung and looks > 1:
                    self._hung = True
                    self._end_hung_core(process)
        finally:
            watch.close()
            self.ready = False
        process.wait()
        while self._reports >= 0 and readable([self._reports], 0):
            self._read_state()

    def _read_state(self) -> None:
        data = _read_message(self._reports)
        if data is None:  # the core has closed its end
            os.close(self._reports)
            self._reports = -1
        else:
            self._state = msgspec.msgpack.decode(data, type=DesiredState)

    def _is_silent(self) -> bool:
        limit = self._service.watchdog_timeout
        return bool(limit) and self.phase in (Phase.SERVING, Phase.DRAINING) and self._journal.silent_s > limit

    def _end_hung_core(self, process: subprocess.Popen[bytes]) -> None:
        logger.error("the core (pid %d) has made no progress for %.0f s: killed", process.pid, self._journal.silent_s)
        process.send_signal(signal.SIGABRT)  # faulthandler writes down where it hangs
        try:
            process.wait(ABORT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()

    # ------------------------------------------------------------------ after a death

    def _account(self, trouble: str) -> None:
        """Note how the core died and whose doing it may be. `trouble`: what its end was beside that, if it is known.

        Raises:
            EngineDeadError: it was once too often.
        """
        process = self._process
        assert process is not None
        if process.returncode is None:  # it is alive, but did not start
            process.kill()
            process.wait()
        cause = "by hanging" if self._hung else describe_exit(process.returncode) + trouble
        if process.returncode:  # else somebody told it to end
            killed = process.returncode == -signal.SIGKILL and not self._hung
            if self._suspects.crashed(self._journal, cause, killed):
                self._restarted_at.clear()  # these deaths have found their cause: they do not count towards the limit
        self.last_crash = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {cause}"
        trace = os.pread(self._crash_fd, 100_000, 0).decode(errors="replace").strip() if self._crash_fd >= 0 else ""
        logger.error("the core (pid %d) ended %s%s", process.pid, cause, f"\n{trace}" if trace else "")
        now = time.monotonic()
        window, most = self._service.restart_window, self._service.max_restarts
        while self._restarted_at and now - self._restarted_at[0] > window:
            self._restarted_at.popleft()
        if len(self._restarted_at) >= most:
            raise EngineDeadError(
                f"the core ended {cause}, after {len(self._restarted_at)} restarts within {window:.0f} s; the limit is "
                f"max_restarts, {most}"
            )
        self._restarted_at.append(now)
        self.restarts += 1

    def _wait_to_restart(self, seconds: float) -> bool:
        """Whether there is to be a next core."""
        if seconds and not self._stops:
            readable([self._waker.fd], seconds)
            self._waker.clear()
        return not self._stops

    def _end_core(self) -> None:
        self.ready = False
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._close_files()
        self._journal.close()

    def _close_files(self) -> None:
        for fd in (self._reports, self._crash_fd):
            if fd >= 0:
                os.close(fd)
        self._reports = self._crash_fd = -1


class EmbeddedCore:
    """A core that belongs to this process, supervised by a thread: it ends with the process, however that ends.

    The core is a fresh interpreter, so scripts and notebooks need no ``__main__`` guard; its configuration comes over
    stdin. It watches this process and goes when it is gone.

    Raises:
        MainspringError: the core did not start; the error it raised, under its own type.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.token = secrets.token_bytes(16)
        folder = make_runtime_dir()
        try:
            self.address = ipc_address(folder)
            self.supervisor = Supervisor(config, Endpoints(self.address, token=self.token), folder)
            self.supervisor.start()
        except BaseException:
            remove_runtime_dir(folder)
            raise
        self._thread = threading.Thread(target=_run, args=(self.supervisor,), name="mainspring-supervisor", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self.supervisor, self._thread, folder, os.getpid())

    def dead_error(self) -> EngineDeadError | None:
        return self.supervisor.dead_error

    def close(self) -> None:
        """End the core and remove its socket. Twice is once."""
        self._end()


def _run(supervisor: Supervisor) -> None:
    with contextlib.suppress(EngineDeadError):  # `dead_error` says it
        supervisor.run()


def _end(supervisor: Supervisor, thread: threading.Thread, folder: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child; the core is its parent's
    supervisor.stop()
    thread.join()
    remove_runtime_dir(folder)


def _repeatable(config: EngineConfig) -> EngineConfig:
    """What a core has found out, as the next one's configuration: it is not to be found out otherwise."""
    cache = config.cache_config
    blocks = msgspec.structs.replace(cache, num_gpu_blocks_override=cache.num_gpu_blocks)
    return msgspec.structs.replace(config, cache_config=blocks)


def _temporary_file() -> int:
    with tempfile.TemporaryFile(prefix="mainspring-crash-") as file:
        return os.dup(file.fileno())


def write_message(fd: int, message: msgspec.Struct) -> None:
    """One message down a pipe, with its length before it."""
    data = msgspec.msgpack.encode(message)
    view = memoryview(_LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]


def _read_message(fd: int) -> bytes | None:
    """The next message of a pipe; None at its end."""
    head = _read_exactly(fd, _LENGTH.size)
    return None if head is None else _read_exactly(fd, _LENGTH.unpack(head)[0])


def _read_exactly(fd: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return None
        data += chunk
    return data
