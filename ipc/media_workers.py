"""Supervises the media workers of a daemon or an engine.

The supervisor listens for them: a worker starts when the first frontend connects, and inherits the listening socket.
When it dies, frontends that connect again wait in the queue of that socket for the next worker. A worker marks the
content that it prepares, so the supervisor knows of what it died. The next workers refuse such content.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass

import msgspec

from .config import EngineConfig
from .errors import InvalidArgumentError
from .media_messages import MediaLaunch
from .supervisor import end_process
from .transport import Endpoints, Waker, address_at, describe_exit, ipc_path, place_of, process_fd, readable

logger = logging.getLogger(__name__)

COMMAND = [sys.executable, "-P", "-m", "mainspring.media"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
BACKLOG = 256  # connections that wait for a worker that starts
DIGEST_BYTES = 16
TIMED_OUT = 3  # exit code of a worker that an item took too long
# a content is refused when its deaths count so much; a SIGKILL may come from elsewhere
REFUSED_AT, STRIKE, STRIKE_BY_KILL = 4, 2, 1
MAX_REFUSED = 1000  # contents that are remembered
SETTLED_SECONDS = 2.0  # if a worker dies earlier, and not of an item, the next start is delayed
MAX_WAIT_SECONDS = 10.0  # longest such delay
_LOOK_SECONDS = 0.5
_END_SECONDS = 2.0  # time that a worker has to end after SIGTERM


@dataclass(eq=False)
class _Worker:
    """A place for a worker, with or without a process."""

    address: str
    listener: socket.socket
    mark: int  # descriptor of its file
    process: subprocess.Popen[bytes] | None = None
    process_fd: int | None = None
    started_at: float = 0.0
    starts_at: float = 0.0  # not before
    quick: int = 0  # early deaths in a row


class MediaWorkers:
    """Args:
    config: of the engine.
    endpoints: of its first core. The workers listen beside it.
    item_seconds: longest time that an item may take.
    """

    def __init__(self, config: EngineConfig, endpoints: Endpoints, item_seconds: float = 60.0) -> None:
        self.config, self._endpoints, self._item_seconds = config, endpoints, item_seconds
        self._strikes: Counter[bytes] = Counter()
        self._waker, self._closed = Waker(), False
        self._workers: list[_Worker] = []
        self._thread: threading.Thread | None = None
        for number in range(config.multimodal_config.media_workers):
            try:
                address, listener = _listen(endpoints.address, number)
            except (OSError, InvalidArgumentError) as error:
                logger.warning("there will be no media worker %d: %s", number, error)
            else:
                self._workers.append(_Worker(address, listener, _mark_file()))

    @property
    def places(self) -> list[str]:
        """Where they listen, see `CorePlace`."""
        return [place_of(one.address) for one in self._workers]

    @property
    def pids(self) -> list[int]:
        """Of the workers that run."""
        return [one.process.pid for one in self._workers if one.process is not None]

    def start(self) -> None:
        """Start workers when frontends connect, in a thread."""
        self._thread = threading.Thread(target=self._run, name="mainspring-media-workers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        self._closed = True
        self._waker.wake()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        workers, self._workers = self._workers, []
        for one in workers:
            if one.process is not None:
                end_process(one.process, signal.SIGTERM, _END_SECONDS)
            if one.process_fd is not None:
                os.close(one.process_fd)
            one.listener.close()
            os.close(one.mark)
            if (path := ipc_path(one.address)) is not None:
                path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closed:
            now = time.monotonic()
            fds = [self._waker.fd]
            for one in self._workers:
                if one.process is not None:
                    fds += [] if one.process_fd is None else [one.process_fd]
                elif now >= one.starts_at:
                    fds.append(one.listener.fileno())
            polls = any(one.process_fd is None and (one.process or one.quick) for one in self._workers)
            ready = readable(fds, _LOOK_SECONDS if polls else None)
            self._waker.clear()
            for one in self._workers:
                if one.process is None:
                    if one.listener.fileno() in ready and not self._closed:
                        self._start(one)
                elif one.process.poll() is not None:
                    self._account(one, one.process)

    def _start(self, one: _Worker) -> None:
        launch = MediaLaunch(
            self.config,
            self._endpoints,
            os.getpid(),
            one.listener.fileno(),
            one.mark,
            one.address,
            [digest for digest, strikes in self._strikes.items() if strikes >= REFUSED_AT],
            self._item_seconds,
        )
        try:
            os.pwrite(one.mark, bytes(DIGEST_BYTES), 0)
            with tempfile.TemporaryFile(prefix="mainspring-media-") as message:
                message.write(msgspec.msgpack.encode(launch))
                message.seek(0)
                one.process = subprocess.Popen(
                    COMMAND,
                    stdin=message,
                    stdout=2,
                    pass_fds=[one.listener.fileno(), one.mark],
                    process_group=0,
                    env={**os.environ, **ENVIRONMENT},
                )
        except OSError as error:  # also of a full disk
            logger.error("no media worker can be started: %s", error)
            one.starts_at, one.quick = time.monotonic() + MAX_WAIT_SECONDS, one.quick + 1
            return
        one.started_at, one.process_fd = time.monotonic(), process_fd(one.process.pid)
        logger.info("a media worker (pid %d) starts at %s", one.process.pid, one.address)

    def _account(self, one: _Worker, process: subprocess.Popen[bytes]) -> None:
        """Record of what a worker died."""
        code, now = process.returncode, time.monotonic()
        digest = os.pread(one.mark, DIGEST_BYTES, 0)
        one.process = None
        if one.process_fd is not None:
            os.close(one.process_fd)
            one.process_fd = None
        how = "by a time limit" if code == TIMED_OUT else describe_exit(code)
        if blamed := any(digest):
            timed_out = code in (TIMED_OUT, -signal.SIGALRM)
            self._strikes[digest] += REFUSED_AT if timed_out else STRIKE_BY_KILL if code == -signal.SIGKILL else STRIKE
            if len(self._strikes) > MAX_REFUSED:
                del self._strikes[next(iter(self._strikes))]
        one.quick = one.quick + 1 if not blamed and now - one.started_at < SETTLED_SECONDS else 0
        one.starts_at = now + (min(MAX_WAIT_SECONDS, 0.1 * 2 ** min(one.quick, 8)) if one.quick > 1 else 0.0)
        at = f" while it prepared the item {digest.hex()}" if blamed else ""
        logger.error("the media worker (pid %d) ended %s%s", process.pid, how, at)


def _listen(core: str, number: int) -> tuple[str, socket.socket]:
    """A listening socket beside that of a core: a file in its folder, or any free port."""
    path = ipc_path(core)
    if path is None:
        host, _, _ = core.removeprefix("tcp://").rpartition(":")
        host = {"*": "0.0.0.0"}.get(host, host.strip("[]"))
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.listen(BACKLOG)
        return address_at(core, str(listener.getsockname()[1])), listener
    address = address_at(core, f"{path.name}.media{number or ''}")
    file = ipc_path(address)
    assert file is not None
    file.unlink(missing_ok=True)  # left over from a crash: who has the lock of the core's address owns this one, too
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)  # only the owner may open the socket file
    try:
        listener.bind(str(file))
    finally:
        os.umask(old)
    listener.listen(BACKLOG)
    return address, listener


def _mark_file() -> int:
    """A file without a name, which outlives the workers that write to it."""
    with tempfile.TemporaryFile(prefix="mainspring-mark-", buffering=0) as file:
        return os.dup(file.fileno())
