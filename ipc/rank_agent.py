"""Offers a rank of this machine to a core elsewhere, and runs its process while the core wants it."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from .. import __version__
from .errors import ConnectError
from .keys import KeyPair
from .link import Link
from .rank_gate import DATA, END, OFFER, REFUSED, Offer, Stream
from .supervisor import CORE_ENVIRONMENT
from .transport import RECEIVE_QUEUE, Waker

logger = logging.getLogger(__name__)

FAILURES = 3  # failed handshakes in a row after which there is a warning
RECONNECT_SECONDS = 0.1  # between two attempts to reach a core
LOOK_SECONDS = 1.0  # interval of checks of a link, beside its events
END_SECONDS = 5.0  # that a rank has to end after it has closed its link
COMMAND = [sys.executable, "-P", "-m", "mainspring.core.rank"]  # of a rank; the descriptor of its link follows


class RankAgent:
    """One rank. When the core dies, its process ends, and the next core at the same address gets another one.

    Args:
        address: of the core, ``tcp://HOST:PORT``.
        keys: which all machines of the engine share.
        index, of: the rank's number among those of this machine, and how many there are.
        machine: name of this machine; ranks of one name are neighbours in the group.
        environment: of the process, beside this one's.
    """

    def __init__(
        self,
        address: str,
        keys: KeyPair,
        index: int = 0,
        of: int = 1,
        machine: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._link = Link(address, (keys.public, keys.secret, keys.public), RECEIVE_QUEUE)
        self._offer = Offer(__version__, machine or platform.node(), index, of)
        self._environment = {**CORE_ENVIRONMENT, **os.environ, **(environment or {})}
        self._address = address
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: Stream | None = None
        self._waker = Waker()
        self._stop_at: float | None = None  # when to end at the latest

    def run(self) -> None:
        """Until `stop`. It must stay in one thread, because the kernel kills the process when that thread ends.

        Raises:
            ConnectError: the core is of another version.
        """
        offered, failures = False, 0  # handshakes in a row that failed; one may, while a core ends
        try:
            while self._stop_at is None or (self._process is not None and time.monotonic() < self._stop_at):
                self._link.read_events()
                if self._link.lost:
                    failures = failures + 1 if self._link.trouble else 0
                    if failures == FAILURES:
                        logger.warning("%s does not let us in; is it a core with the same key file?", self._address)
                    if offered and self._stop_at is None:
                        logger.warning("the core at %s is gone; waiting for the next one", self._address)
                    self._kill()
                    time.sleep(max(0.0, self._link.opened_at + RECONNECT_SECONDS - time.monotonic()))
                    self._link.open()
                    offered = False
                elif self._link.reached and not offered:
                    offered, failures = True, 0
                    self._make_offer()
                self._receive()
                self._wait()
        finally:
            self._kill()
            self._link.close(0)

    def stop(self, patience_s: float = 0.0) -> None:
        """Let `run` return: when the core has ended the process, and in so many seconds in any case. For any thread."""
        self._stop_at = time.monotonic() + patience_s
        self._waker.wake()

    def _receive(self) -> None:
        while not (self._stream is not None and self._stream.is_full):
            frames = self._link.receive()
            if frames is None:
                return
            kind = bytes(frames[0])
            if kind == DATA:
                if self._stream is None:
                    self._start()
                assert self._stream is not None
                self._stream.write(frames[1])
            elif kind == END and self._process is not None:
                self._process.kill()
                self._tell_end()
            elif kind == REFUSED:
                raise ConnectError(str(frames[1], "utf-8", "replace"))

    def _wait(self) -> None:
        """Wait for the core or the process, and carry up what the process has written."""
        poll = select.poll()
        for fd in (*self._link.fds, self._waker.fd):
            poll.register(fd, select.POLLIN)
        stream = self._stream
        if stream is not None:
            poll.register(stream.fileno(), select.POLLIN | (select.POLLOUT if stream.pending_bytes else 0))
        found = dict(poll.poll(LOOK_SECONDS * 1000))
        self._waker.clear()
        if stream is None:
            return
        events = found.get(stream.fileno(), 0)
        if events & select.POLLOUT:
            stream.write()
        if events & ~select.POLLOUT and (data := stream.read()) is not None:
            if data:
                self._link.send([DATA, data])
            else:
                self._tell_end()

    def _tell_end(self) -> None:
        self._link.send([END, msgspec.msgpack.encode(self._reap())])
        self._make_offer()

    def _make_offer(self) -> None:
        self._link.send([OFFER, msgspec.msgpack.encode(self._offer)])

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._stream = Stream(ours)
            self._process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=self._environment,
            )
        logger.info("rank process %d has begun", self._process.pid)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._reap()

    def _reap(self) -> int:
        """Wait for the end of the process; its exit code."""
        process, stream = self._process, self._stream
        assert process is not None
        assert stream is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        process.kill()
        self._process = self._stream = None
        stream.close()
        return process.wait()


def num_gpus() -> int:
    """GPUs of this machine that this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if chosen is None else len(chosen.split(","))


def run_agents(address: str, keys: KeyPair, count: int) -> None:
    """Offer `count` ranks until this process is told to end, or one of them can't be offered.

    Raises:
        ConnectError: see `RankAgent.run`.
    """
    agents = [RankAgent(address, keys, index, count) for index in range(count)]
    errors: list[ConnectError] = []

    def run(agent: RankAgent) -> None:
        try:
            agent.run()
        except ConnectError as error:
            errors.append(error)
            for other in agents:
                other.stop()

    threads = [threading.Thread(target=partial(run, agent), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        for agent in agents:
            agent.stop()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
