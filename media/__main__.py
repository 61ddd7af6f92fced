"""The process of a media worker, started by `MediaWorkers` as ``python -P -m mainspring.media``."""

from __future__ import annotations

import os
import signal
import sys
import threading

import msgspec

from ..ipc import logs
from ..ipc.media_messages import MediaLaunch
from ..ipc.transport import wait_for_parent
from .server import MediaServer

NICENESS = 19  # so that the core's steps do not wait for it


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend decides what Ctrl-C means
    os.nice(NICENESS)
    logs.set_up("media")
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=MediaLaunch)
    threading.Thread(target=_end_with_parent, args=(launch.parent_pid,), name="mainspring-parent", daemon=True).start()
    MediaServer(launch).run()


def _end_with_parent(pid: int) -> None:
    wait_for_parent(pid)
    os._exit(0)


if __name__ == "__main__":
    main()
