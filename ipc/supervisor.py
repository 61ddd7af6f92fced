"""The supervisor: it starts a core, watches it, and starts the next one when it dies.

A group of cores has one for each, see core_group.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO

import msgspec

from .config import EngineConfig
from .errors import EngineDeadError, EngineStartError, from_wire
from .journal import Journal, Phase
from .messages import DesiredState, StartReport
from .siblings import Sibling, Siblings
from .transport import CoreLaunch, Endpoints, Waker, describe_exit, process_fd, readable

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
_LENGTH = struct.Struct(">I")
_LOOK_SECONDS = 0.5  # interval between two checks of a core


class Supervisor:
    """Runs one core after another at the same endpoints.

    One thread calls `start` and `run`. `stop` may be called in any thread, and in signal handlers.

    Args:
        config: of the first core. The values that this core fills in (block count, lengths) are kept for the next ones.
        endpoints: where the cores listen.
        runtime_dir: a folder that a core removes if this process dies.
        drain_timeout: seconds that a core has after `stop` to finish its requests.
        number: of the core in its group.
        siblings: what it shares with the supervisors of the other cores; None: there are none.
        environment: variables of the core's process, beside this one's.
        on_state: called with the state that users have set, after a change.
    """

    def __init__(
        self,
        config: EngineConfig,
        endpoints: Endpoints,
        runtime_dir: str = "",
        drain_timeout: float = 0.0,
        number: int = 0,
        siblings: Siblings | None = None,
        environment: Mapping[str, str] | None = None,
        on_state: Callable[[DesiredState], None] | None = None,
    ) -> None:
        self._service = config.service_config
        ranks = config.parallel_config.num_local_ranks
        self._journal = Journal.create(config.scheduler_config.max_num_seqs, ranks)
        self.siblings = siblings or Siblings()
        self._sibling: Sibling | None = None  # the present core, as the others know it
        self._environment, self._on_state = environment or {}, on_state
        self._waker = Waker()
        self._crash_file = tempfile.TemporaryFile(prefix="mainspring-crash-", buffering=0)  # noqa: SIM115
        self.launch = CoreLaunch(  # kept up to date for the next core
            config,
            endpoints,
            instance_id=self.siblings.instance_id,
            parent_pid=os.getpid(),
            journal_fd=self._journal.fd,
            crash_fd=self._crash_file.fileno(),
            runtime_dir=runtime_dir,
            drain_timeout=drain_timeout,
            import_path=[os.path.abspath(p) for p in sys.path] if config.model_config.logits_processors else [],
            number=number,
            epoch=self.siblings.last_epoch(number),
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._reports: int | None = None  # from the core; None when it has closed its end
        self._hung, self._behind = False, ""  # whether the watchdog killed the core; which rank held it up
        self._stops = 0
        self._restarted_at: deque[float] = deque()
        self.ready = False
        self.media: list[str] = []  # what the model takes beside text; known when the first core has started
        self.dead_error: EngineDeadError | None = None

    @property
    def core_pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def phase(self) -> Phase:
        return self._journal.phase

    def start(self) -> None:
        """Start the first core, and wait until it serves.

        Raises:
            MainspringError: the core did not start; this is the core's error, with its type.
        """
        try:
            self._start_core()
        except BaseException:
            self.end()
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
                    self._start_core()
                except Exception as error:  # the next start may succeed
                    trouble = f" while it started: {error}"
        except EngineDeadError as error:
            self.dead_error = error
            raise
        except BaseException as error:
            self.dead_error = EngineDeadError(f"the supervisor failed: {error!r}")
            raise
        finally:
            self.end()

    def stop(self) -> None:
        """Let the core finish its requests, for at most `drain_timeout` seconds, and let `run` return. A second call
        kills the core."""
        self._stops += 1
        self._journal.set_phase(Phase.DRAINING)  # tells the core that the supervisor sends the signal
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM if self._stops == 1 else signal.SIGKILL)
        self._waker.wake()

    def stop_once(self) -> None:
        """`stop`, unless it was called before."""
        if not self._stops:
            self.stop()

    # ------------------------------------------------------------------ starting

    def _start_core(self) -> None:
        launch = self.launch
        launch.epoch += 1
        self._hung = False
        self._sibling = self.siblings.starts(launch, self._journal)
        self._crash_file.seek(0)
        self._crash_file.truncate()
        self._close_reports()
        self._reports, launch.report_fd = os.pipe()
        try:
            with _file_with(msgspec.msgpack.encode(launch)) as message:
                process = self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "mainspring.core"],
                    stdin=message,
                    stdout=2,  # the code of a model may print; keep that out of our standard output
                    pass_fds=[launch.report_fd, launch.journal_fd, launch.crash_fd, launch.news_fd],
                    process_group=0,  # so that Ctrl-C reaches only the frontend
                    env={**CORE_ENVIRONMENT, **os.environ, **self._environment},
                )
        finally:
            os.close(launch.report_fd)
            os.close(launch.news_fd)
        if self._stops:  # `stop` was called before there was a process
            process.terminate()
        data = self._first_report(process, self._reports)
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
            launch.config = repeatable(report.config)
            launch.decisions = msgspec.Raw(bytes(report.decisions))
        self.media = report.media
        self.ready = True
        logger.info("core %d (pid %d) serves, epoch %d", launch.number, process.pid, launch.epoch)

    def _first_report(self, process: subprocess.Popen[bytes], reports: int) -> bytes | None:
        """The core's first report; None if the core ended without one, or had to be killed."""
        give_up_at: float | None = None
        while not readable([reports], _LOOK_SECONDS):
            if self._stops:
                give_up_at = give_up_at or time.monotonic() + END_SECONDS
                if time.monotonic() > give_up_at:
                    process.kill()
        return _read(reports)

    # ------------------------------------------------------------------ watching

    def _watch(self) -> None:
        """Wait for the core to end, and read its reports meanwhile."""
        process = self._process
        assert process is not None
        ended_fd = process_fd(process.pid)
        give_up_at: float | None = None
        looks = 0  # in a row at which the core was silent; if both processes were frozen, this one may wake first
        try:
            while process.poll() is None:
                fds = (self._waker.fd, ended_fd, self._reports)
                readable([fd for fd in fds if fd is not None], _LOOK_SECONDS)
                self._waker.clear()
                self._read_states()
                if self._sibling is not None:
                    self.siblings.flush(self._sibling)
                if self._stops:
                    give_up_at = give_up_at or time.monotonic() + self.launch.drain_timeout + END_SECONDS
                    if time.monotonic() > give_up_at:
                        process.kill()
                looks = looks + 1 if self._is_silent() else 0
                if not self._hung and looks > 1:
                    self._hung = True
                    silent_s, behind = self._journal.silent_s, self._journal.behind()
                    self._behind = f" ({behind})" if behind else ""
                    text = "the core (pid %d) has made no progress for %.0f s%s: killed"
                    logger.error(text, process.pid, silent_s, self._behind)
                    end_process(process, signal.SIGABRT, ABORT_SECONDS)  # faulthandler writes down where it hangs
        finally:
            self.ready = False
            if ended_fd is not None:
                os.close(ended_fd)
        self._read_states()

    def _read_states(self) -> None:
        """Read the reports that have arrived."""
        while self._reports is not None and readable([self._reports], 0):
            if (data := _read(self._reports)) is not None:
                self.launch.state = msgspec.msgpack.decode(data, type=DesiredState)
                if self._on_state is not None:
                    self._on_state(self.launch.state)
            else:  # the core has closed its end
                self._close_reports()

    def _is_silent(self) -> bool:
        limit = self._service.watchdog_timeout
        return bool(limit) and self.phase in (Phase.SERVING, Phase.DRAINING) and self._journal.silent_s > limit

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
        trace = self._trace()
        cause = self._tell_end(trouble)
        self.launch.last_crash = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {cause}"
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
        self.launch.restarts += 1

    def _tell_end(self, trouble: str = "") -> str:
        """Let the siblings know how the core ended, and of which requests. Returns how, after "the core ended"."""
        assert self._process is not None
        code = self._process.returncode or 0
        killed = code == -signal.SIGKILL and not self._hung
        cause = "by hanging" + self._behind if self._hung else describe_exit(code) + trouble
        if (rank := re.search(r"^rank \d+ ended .*", self._trace(), re.MULTILINE)) and not self._hung:
            cause += f" ({rank[0]})"
        crashed = bool(code) and not (killed and self._stops)  # 0: it was told to end
        if self.siblings.ended(self.launch, cause, crashed, killed):
            self._restarted_at.clear()  # crashes with a quarantined cause do not count towards the limit
        return cause

    def _trace(self) -> str:
        """What the core wrote down of its end."""
        return os.pread(self.launch.crash_fd, 100_000, 0).decode(errors="replace").strip()

    def _wait_to_restart(self, seconds: float) -> bool:
        """Wait before the next start. False if `stop` was called."""
        if seconds and not self._stops:
            readable([self._waker.fd], seconds)
            self._waker.clear()
        return not self._stops

    def end(self) -> None:
        """End the core, and close what belongs to it. `run` does this by itself. A second call does nothing."""
        if self._crash_file.closed:
            return
        self.ready = False
        if self._process is not None and self._process.poll() is None:
            self._journal.set_phase(Phase.DRAINING)  # as in `stop`
            end_process(self._process, signal.SIGTERM, END_SECONDS)
        self._on_state = None  # a reference to the owner of this object
        if self._process is not None:
            self._tell_end()
        self._close_reports()
        self._crash_file.close()
        self._journal.close()

    def _close_reports(self) -> None:
        if self._reports is not None:
            os.close(self._reports)
            self._reports = None


def _file_with(data: bytes) -> IO[bytes]:
    """An open file without a name, to be read from its start. Unlike a pipe, it has its data before a process reads it,
    and keeps it if this one dies."""
    file = tempfile.TemporaryFile(prefix="mainspring-launch-")  # noqa: SIM115
    file.write(data)
    file.seek(0)
    return file


def repeatable(config: EngineConfig) -> EngineConfig:
    """The configuration of the next core, with the block count of this one, so that both serve the same."""
    cache = config.cache_config
    blocks = msgspec.structs.replace(cache, num_gpu_blocks_override=cache.num_gpu_blocks)
    return msgspec.structs.replace(config, cache_config=blocks)


def write_message(fd: int, message: msgspec.Struct) -> None:
    """Write a message to a pipe, with its length before it."""
    data = msgspec.msgpack.encode(message)
    with open(fd, "wb", closefd=False) as pipe:
        pipe.write(_LENGTH.pack(len(data)) + data)


def _read(fd: int) -> bytes | None:
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


def end_process(process: subprocess.Popen[bytes], signum: int, seconds: float) -> None:
    """Send a signal, and kill the process if it has not ended `seconds` later."""
    process.send_signal(signum)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
