"""The process of a media worker, started by `MediaWorkers` as ``python -P -m mainspring.media``."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import resource
import signal
import struct
import sys
import threading

import msgspec

from ..ipc import logs
from ..ipc.media_messages import MediaLaunch
from ..ipc.transport import wait_for_parent
from .server import MediaServer

logger = logging.getLogger(__name__)

NICENESS = 10  # the core's steps hardly wait for it, and beside many streams it still gets a tenth of a processor
SLICE_NS = 100_000  # the shortest that Linux takes
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the system call, which Python does not have


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend decides what Ctrl-C means
    os.nice(NICENESS)
    _take_short_slices()
    logs.set_up("media")
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=MediaLaunch)
    threading.Thread(target=_end_with_parent, args=(launch.parent_pid,), name="mainspring-parent", daemon=True).start()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # libzmq ends the process when a connection finds none left
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        MediaServer(launch).run()
    except BaseException:
        logger.critical("the media worker failed", exc_info=True)
        os._exit(1)  # other threads may wait for what does not come any more


def _take_short_slices() -> None:
    """Linux lets a running thread finish its slice of some milliseconds, since version 6.6, even if a thread of higher
    priority wakes up. A core's threads wake up often in a step. Since version 6.12 a process may choose its slice; an
    earlier version refuses or ignores this."""
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        # struct sched_attr: size, policy, flags, nice, priority, then runtime, deadline and period in ns
        words = struct.pack("=IIQiIQQQ", 48, 0, 0, NICENESS, 0, SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, words, 0)


def _end_with_parent(pid: int) -> None:
    wait_for_parent(pid)
    os._exit(0)


if __name__ == "__main__":
    main()
