"""A further rank of a core, started by the first one as ``python -P -m mainspring.core.rank FD``. It computes its part
of the steps that the first one plans, and chooses no tokens."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from ..ipc import logs
from ..ipc.errors import wire_name, wire_text
from ..ipc.journal import Journal
from ..ipc.time_slices import take_short_slices
from ..ipc.transport import readable, wait_for_parent
from .plan.codec import decode
from .plan.control import Control
from .plan.step import StepPlan
from .worker.rank_link import LOADED, READY, Answer, Failure, Kind, RankLaunch, RankLink, packed, unpacked

if TYPE_CHECKING:
    from .worker.worker import LocalWorker

BEAT_SECONDS = 1.0  # interval between two signs of life of a rank without work
PR_SET_PDEATHSIG = 1  # see prctl(2): the signal that this process gets when the thread that started it ends


def main() -> None:
    """Never returns: threads of the user's code may wait for what does not come."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the first rank decides when the group ends
        signal.signal(ignored, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # also if it is stopped
    take_short_slices()
    link = RankLink(socket.socket(fileno=int(sys.argv[1])))
    try:
        frame = link.receive()
        if frame is not None:
            _serve(link, msgspec.msgpack.decode(frame[1], type=RankLaunch))
    except BaseException as error:
        failure = Failure(wire_name(error), wire_text(error), traceback.format_exc())
        with contextlib.suppress(OSError):
            link.send(Kind.FAILED, packed(0, failure))
        os._exit(1)
    os._exit(0)


def _serve(link: RankLink, launch: RankLaunch) -> None:
    """Load this rank's part of the model, and take part in steps until the first rank closes its end."""
    logs.set_up(f"rank {launch.rank}")
    threading.Thread(
        target=_end_with, args=(launch.parent_pid or os.getppid(),), name="mainspring-parent", daemon=True
    ).start()
    if launch.crash_fd >= 0:
        faulthandler.enable(launch.crash_fd)
    seqs = launch.config.scheduler_config.max_num_seqs
    # a core in a user's process has none, because nobody watches it
    journal = (
        Journal(launch.journal_fd, seqs, launch.num_local)
        if launch.journal_fd >= 0
        else Journal.create(seqs, launch.size)
    )
    journal.set_pid(launch.rank)
    os.environ["LOCAL_RANK"] = str(launch.local_rank)
    sys.path += [folder for folder in launch.import_path if folder not in sys.path]
    gc.disable()  # as in a core
    from .parallel.group import RankGroup
    from .worker.make_worker import device_of, make_follower

    gc.freeze()
    gc.enable()
    decisions = msgspec.msgpack.decode(launch.decisions)
    device = device_of(launch.config, launch.local_rank, launch.num_local)
    _answer(link, LOADED, lambda: None)
    ordered = launch.config.parallel_config.ordered_sums
    group = RankGroup(launch.rank, launch.size, launch.store, device, ordered=ordered)
    worker = make_follower(launch.config, decisions, group)
    worker.warm_up()
    journal.beat(launch.rank)
    _answer(link, READY, worker.agreed)
    while True:
        journal.beat(launch.rank)
        if not readable([link.fileno()], BEAT_SECONDS):
            continue
        frame = link.receive()
        if frame is None:
            return
        kind, body = frame
        if kind is Kind.PLAN:
            plan = decode(body, StepPlan)
            journal.begun(launch.rank, plan.id)
            worker.follow(plan)
        else:
            _take(link, worker, kind, body)


def _take(link: RankLink, worker: LocalWorker, kind: Kind, body: bytearray) -> None:
    """Answer a question."""
    number = int.from_bytes(body[:8], "little")
    if kind is Kind.CALL:
        return _answer(link, number, lambda: worker.run_method(*unpacked(body)[1])[0])
    record = decode(memoryview(body)[8:], Control)
    _answer(link, number, lambda: worker.control(record))


def _answer(link: RankLink, number: int, ask: Callable[[], Any]) -> None:
    """Send what `ask` returns, or its error. A future's result is sent when it is there."""

    def send(answer: Answer) -> None:
        with contextlib.suppress(OSError):  # the first rank has ended
            link.send(Kind.ANSWER, packed(number, answer))

    def fail(error: BaseException) -> None:
        send(Answer(number, wire_name(error), wire_text(error), None))

    def settle(done: Future[Any]) -> None:
        try:
            send(Answer(number, "", "", done.result()))
        except Exception as error:
            fail(error)

    try:
        value = ask()
        if isinstance(value, Future):
            value.add_done_callback(settle)
        else:
            send(Answer(number, "", "", value))
    except Exception as error:
        fail(error)


def _end_with(parent_pid: int) -> None:
    wait_for_parent(parent_pid)
    os._exit(0)


if __name__ == "__main__":
    main()
