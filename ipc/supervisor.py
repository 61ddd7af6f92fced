"""The supervisor: it starts a core, watches it, and starts the next one when it dies.

In a daemon the main thread runs it, in an engine with its own core a background thread.
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
    # Let OpenMP's threads sleep between two loops. If they spin while the machine has other work, a step takes many
    # times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
    # torch caches oneDNN's compiled primitives for the last 1000 shapes by default, and every number of rows is a
    # shape: hundreds of MB within hours.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
}
END_SECONDS = 5.0  # time that a core has to end after SIGTERM, before SIGKILL
ABORT_SECONDS = 2.0  # time that a hung core has to write its stacks after SIGABRT
SETTLED_SECONDS = 2.0  # if a core dies before it has served that long, the next start is delayed
MAX_WAIT_SECONDS = 5.0  # longest delay of a start after several early crashes
_LOOK_SECONDS = 0.5  # interval between two checks of a core
_LENGTH = struct.Struct(">I")


class Supervisor:
    """Runs one core after another at the same endpoints.

    One thread calls `start` and `run`. `stop` may be called in any thread, and in signal handlers.

    Args:
        config: of the first core. The values that this core fills in (block count, lengths) are kept for the next ones.
        endpoints: where the cores listen.
        runtime_dir: a folder that a core removes if this process dies.
        drain_timeout: seconds that a core has after `stop` to finish its requests.
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
        """Requests that cores refuse because they have crashed earlier ones."""
        return len(self._suspects.quarantined)

    def start(self) -> None:
        """Start the first core, and wait until it serves.

        Raises:
            MainspringError: the core did not start; this is the core's error, with its type.
        """
        try:
            self._launch()
        except BaseException:
            self._end_core()
            raise

    def run(self) -> None:
        """Watch the core, and start it again whenever it dies, until `stop`.

        Raises:
            EngineDeadError: the core died too often.
        """
        quick, trouble = 0, ""  # early crashes in a row; why the last start failed
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
                except Exception as error:  # the next start may succeed
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
        """Let the core finish its requests, for at most `drain_timeout` seconds, and let `run` return. A second call
        kills the core."""
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
                stdout=2,  # the code of a model may print; keep that out of our standard output
                pass_fds=[write, self._journal.fd, self._crash_fd],
                process_group=0,  # so that Ctrl-C reaches only the frontend
                env={**CORE_ENVIRONMENT, **os.environ},
            )
        finally:
            os.close(write)
        if self._stops:  # `stop` was called before there was a process
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
        """The core's first report; None if the core ended without one, or had to be killed."""
        give_up_at: float | None = None
        while not readable([self._reports], _LOOK_SECONDS):
            if self._stops and give_up_at is None:
                give_up_at = time.monotonic() + END_SECONDS
            if give_up_at is not None and time.monotonic() > give_up_at:
                process.kill()
        return _read_message(self._reports)

    # ------------------------------------------------------------------ watching

    def _watch(self) -> None:
        """Wait for the core to end, and read its reports meanwhile."""
        process = self._process
        assert process is not None
        watch = ProcessWatch(process.pid, lambda: process.poll() is not None)
        give_up_at: float | None = None
        looks = (
            0  # consecutive looks at which the core was silent: if both processes were frozen, this one may wake first
        )
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

    # ------------------------------------------------------------------ after a crash

    def _account(self, trouble: str) -> None:
        """Record how the core died, and which requests are suspects. trouble: the error of a failed start, or empty.

        Raises:
            EngineDeadError: the limit of restarts is reached.
        """
        process = self._process
        assert process is not None
        if process.returncode is None:  # it lives, but its start failed
            process.kill()
            process.wait()
        cause = "by hanging" if self._hung else describe_exit(process.returncode) + trouble
        if process.returncode:  # 0: it was told to end, which is no crash
            killed = process.returncode == -signal.SIGKILL and not self._hung
            if self._suspects.crashed(self._journal, cause, killed):
                self._restarted_at.clear()  # crashes with a quarantined cause do not count towards the limit
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
        """Wait before the next start. False if `stop` was called."""
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
    """A core that belongs to this process, with a supervisor in a thread. It ends with this process, however that ends.

    The core is a fresh interpreter, so scripts and notebooks need no ``__main__`` guard. Its configuration comes over
    standard input. It watches this process and exits when this one has ended.

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
        """End the core and remove its socket. A second call does nothing."""
        self._end()


def _run(supervisor: Supervisor) -> None:
    with contextlib.suppress(EngineDeadError):  # kept in `dead_error`
        supervisor.run()


def _end(supervisor: Supervisor, thread: threading.Thread, folder: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # in a forked child: the core belongs to its parent
    supervisor.stop()
    thread.join()
    remove_runtime_dir(folder)


def _repeatable(config: EngineConfig) -> EngineConfig:
    """The configuration of the next core, with the block count of this one, so that both serve the same."""
    cache = config.cache_config
    blocks = msgspec.structs.replace(cache, num_gpu_blocks_override=cache.num_gpu_blocks)
    return msgspec.structs.replace(config, cache_config=blocks)


def _temporary_file() -> int:
    with tempfile.TemporaryFile(prefix="mainspring-crash-") as file:
        return os.dup(file.fileno())


def write_message(fd: int, message: msgspec.Struct) -> None:
    """Write a message to a pipe, with its length before it."""
    data = msgspec.msgpack.encode(message)
    view = memoryview(_LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]


def _read_message(fd: int) -> bytes | None:
    """The next message from a pipe; None at its end."""
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
