"""The other ranks of a core as the first one sees them: processes that it starts, asks and watches. Those of other
machines are offered to its gate (ipc/rank_gate.py).

The death of a rank is the death of its core, because the others wait for it in the middle of a step. A thread notices
it at once, by the end of the rank's link. In a core process that thread ends the process; in a user's process, calls
raise `EngineDeadError` from then on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ...ipc.config import EngineConfig
from ...ipc.errors import EngineDeadError, EngineStartError, MainspringError, from_wire, shown
from ...ipc.keys import DEFAULT_KEY, config_folder, load_keypair
from ...ipc.rank_gate import RankGate, RemoteRank
from ...ipc.supervisor import CORE_ENVIRONMENT
from ...ipc.transport import describe_exit, free_port, readable
from ..parallel.numbering import rank_of
from .rank_link import (
    FIRST_QUESTION,
    LOADED,
    READY,
    Answer,
    Failure,
    Kind,
    RankLaunch,
    RankLink,
    answer_of,
    unpacked,
)

logger = logging.getLogger(__name__)

END_SECONDS = 2.0  # time that a rank has to end once its link is closed
NOTICE_SECONDS = 2.0  # time in which the end of a rank is noticed after a collective has failed
ANSWER_SECONDS = 60.0  # time that ranks have to finish what has failed on another one


class Death(NamedTuple):
    """How a rank ended."""

    rank: int
    text: str  # a sentence that names the rank
    trace: str  # its traceback, if an exception ended it
    killed: bool  # by SIGKILL, which may have come from outside
    serving: bool  # whether all ranks were ready before
    error: MainspringError  # for the user


class Host(NamedTuple):
    """What the first rank's process gives to the others."""

    folder: str | None = None  # where only this user can enter; None: the system's place for temporary files
    journal_fd: int = -1
    crash_fd: int = -1
    on_death: Callable[[Death], None] = lambda death: None


class Ranks:
    """The processes of ranks 1 and up. (In a pipeline the first process has another rank, see numbering.py, and "rank"
    is the number of a process here.)

    Args:
        decisions: those of the core before, as they are reported.
    """

    def __init__(self, config: EngineConfig, decisions: Any, host: Host = Host()) -> None:  # noqa: B008  # immutable
        parallel = config.parallel_config
        self.size = parallel.num_ranks
        stages = parallel.pipeline_parallel_size
        self.rank_of = partial(rank_of, stages=stages, tensor=self.size // stages)
        self.death: Death | None = None
        self._host, self._owner = host, os.getpid()
        self._gate: RankGate | None = None
        self._num_local = parallel.num_local_ranks
        remote = self._num_local < self.size
        if remote:
            keys = load_keypair(parallel.rank_key_file or config_folder() / DEFAULT_KEY)
            port = free_port(parallel.master_addr)
            self._gate = RankGate(parallel.rank_address, keys.secret)
        self._folder = tempfile.mkdtemp(prefix="mainspring-ranks-", dir=host.folder)
        self.store = f"tcp://{parallel.master_addr}:{port}" if remote else f"file://{self._folder}/store"
        self._launch = RankLaunch(
            config,
            0,
            self.size,
            0,
            self._num_local,
            self.store,
            os.getpid(),
            host.journal_fd,
            host.crash_fd,
            [os.path.abspath(folder) for folder in sys.path],
            msgspec.Raw(msgspec.msgpack.encode(decisions)),
        )
        self._processes: dict[int, subprocess.Popen[bytes] | RemoteRank] = {}  # by rank
        self._links: dict[int, RankLink] = {}
        self._lock = threading.Lock()
        self._asked: dict[tuple[int, int], Future[Any]] = {}  # by rank and number
        self._next = FIRST_QUESTION
        self._died = threading.Event()
        self._closing = self._serving = False
        others = range(1, self.size)
        self._loaded, self._ready = self._expect(LOADED, others), self._expect(READY, others)
        self._started: Future[None] = Future()
        # It lives as long as the ranks, which the kernel kills when the thread that started them ends.
        self._thread = threading.Thread(target=self._run, name="mainspring-ranks", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the first rank asks

    def wait_loaded(self) -> None:
        """Wait until all ranks can come together. Raises the error of one that failed."""
        self._started.result()
        for future in self._loaded.values():
            future.result()

    def wait_ready(self, agreed: Any) -> None:
        """Wait until all ranks have loaded the model. Raises the error of one that failed, or an EngineStartError if
        one has other numbers of blocks or other groups of layers than `agreed`."""
        for rank, future in self._ready.items():
            if (found := future.result()) != agreed:
                raise EngineStartError(f"rank {rank} has loaded {found}, but rank 0 {agreed}")
        self._serving = True
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def error(self) -> EngineDeadError | None:
        """Why nothing can be computed any more."""
        return None if self.death is None else EngineDeadError(self.death.text)

    def compute(self, body: bytes) -> None:
        """Let the ranks compute the step of a plan, beside this one. body: see `for_rank`."""
        for link in self._links.values():
            self._send(link, Kind.PLAN, body)

    def ask(self, kind: Kind, body_for: Callable[[int], bytes | None]) -> dict[int, Future[Any]]:
        """Ask the ranks. Returns their answers, by rank. body_for: a rank's question without its number; None: the rank
        is not asked."""
        number, self._next = self._next, self._next + 1
        bodies = {rank: body for rank in self._links if (body := body_for(rank)) is not None}
        asked = self._expect(number, list(bodies))
        for rank, body in bodies.items():
            self._send(self._links[rank], kind, number.to_bytes(8, "little") + body)
        return asked

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()

    @contextlib.contextmanager
    def explains(self) -> Iterator[None]:
        """In this context an error that the death of a rank has caused is replaced by the error that says so."""
        if self.death is not None:
            raise self.death.error
        try:
            yield
        except MainspringError:
            raise
        except (RuntimeError, OSError) as error:
            if self._died.wait(NOTICE_SECONDS) and self.death is not None:
                raise self.death.error from error
            raise

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """As `explains`. After any other error nothing can be computed, because ranks wait for this one in the middle
        of a step: they are killed."""
        try:
            with self.explains():
                yield
        except Exception as error:
            if self.death is None:
                text = f"rank {self.rank_of(0)} failed in a step: {shown(error)}"
                self.death = Death(0, text, traceback.format_exc(), False, True, EngineDeadError(text))
                self.close(kill=True)
            raise

    def close(self, kill: bool = False) -> None:
        """End the ranks. A second call does nothing. kill: do not give them time."""
        if self._closing or os.getpid() != self._owner:
            return
        self._closing = True
        for process in self._processes.values() if kill else ():
            process.kill()
        if self._gate is not None and not self._links.keys() >= {self.size - 1}:
            self._gate.close()  # nobody waits for ranks any more
        for link in self._links.values():
            link.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            for rank in range(1, self._num_local):
                self._start(rank)
            if self._gate is not None:
                for rank, remote in enumerate(self._gate.take(self.size - self._num_local), self._num_local):
                    self._links[rank], self._processes[rank] = RankLink(remote.end), remote
            for rank, link in self._links.items():
                message = self._launch_of(rank)
                with contextlib.suppress(OSError):  # its end is noticed below
                    link.send(Kind.LAUNCH, msgspec.msgpack.encode(message))
        except BaseException as error:
            self._started.set_exception(error)
        else:
            self._started.set_result(None)
            self._watch()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS if self._closing else 0.0)
            process.kill()
            process.wait()
        if self._gate is not None:
            self._gate.close()
        for link in self._links.values():
            link.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _launch_of(self, rank: int) -> RankLaunch:
        process, replace = self._processes[rank], msgspec.structs.replace
        if not isinstance(process, RemoteRank):
            return replace(self._launch, rank=rank, local_rank=rank)
        index, of = process.offer.index, process.offer.of
        here = {"parent_pid": 0, "journal_fd": -1, "crash_fd": -1}  # what it can't have of this machine
        return replace(self._launch, rank=rank, local_rank=index, num_local=of, **here)

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        fds = [fd for fd in (theirs.fileno(), self._host.journal_fd, self._host.crash_fd) if fd >= 0]
        with theirs:
            self._links[rank] = RankLink(ours)
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-P", "-m", "mainspring.core.rank", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # as of a core
                pass_fds=fds,
                env={**CORE_ENVIRONMENT, **os.environ},
            )

    def _watch(self) -> None:
        """Take in answers until a rank ends."""
        failures: dict[int, Failure] = {}
        rank_of = {link.fileno(): rank for rank, link in self._links.items()}
        while True:
            for fd in readable(rank_of, None):
                rank = rank_of[fd]
                frame = self._links[rank].receive()
                if frame is None:
                    return None if self._closing else self._bury(rank, failures.get(rank))
                if frame[0] is Kind.FAILED:
                    failures[rank] = Failure(*unpacked(frame[1])[1])
                else:
                    self._settle(rank, answer_of(frame[1]))

    def _settle(self, rank: int, answer: Answer) -> None:
        with self._lock:
            future = self._asked.pop((rank, answer.number))
        if answer.error:
            future.set_exception(from_wire(answer.error, f"rank {self.rank_of(rank)}: {answer.text}"))
        else:
            future.set_result(answer.value)

    def _bury(self, rank: int, failure: Failure | None) -> None:
        process = self._processes[rank]
        try:
            code = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it has closed its link, and hangs
            process.kill()
            code = process.wait()
        why = f": {failure.text}" if failure else ""
        how = isinstance(process, RemoteRank) and process.trouble
        text = f"rank {self.rank_of(rank)} ended {how or describe_exit(code)}{why}"
        if self._serving:
            error: MainspringError = EngineDeadError(text)
        elif failure:
            error = from_wire(failure.error, f"rank {self.rank_of(rank)}: {failure.text}")
        else:
            error = EngineStartError(f"{text}, while it started")
        self.death = Death(rank, text, failure.trace if failure else "", code == -signal.SIGKILL, self._serving, error)
        self._died.set()
        with self._lock:
            asked, self._asked = self._asked, {}
        for future in asked.values():
            future.set_exception(error)
        if not self._closing:
            logger.error("%s", text)
            self._host.on_death(self.death)

    # ------------------------------------------------------------------ inside

    def _expect(self, number: int, ranks: Sequence[int]) -> dict[int, Future[Any]]:
        """The answers to come to question `number`."""
        made: dict[int, Future[Any]] = {rank: Future() for rank in ranks}
        with self._lock:
            if self.death is not None:
                raise self.death.error
            self._asked |= {(rank, number): future for rank, future in made.items()}
        return made

    def _send(self, link: RankLink, kind: Kind, body: bytes) -> None:
        try:
            link.send(kind, body)
        except OSError as error:
            raise ConnectionError(f"a rank's link is closed: {error}") from error
