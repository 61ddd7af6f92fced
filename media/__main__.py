"""The process of a media worker, started by `MediaWorkers` as ``python -P -m mainspring.media``."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading

import msgspec

from ..ipc import logs
from ..ipc.media_messages import MediaLaunch
from ..ipc.time_slices import take_short_slices
from ..ipc.transport import wait_for_parent
from .server import MediaServer

logger = logging.getLogger(__name__)

NICENESS = 10  # the core's steps hardly wait for it, and beside many streams it still gets a tenth of a processor


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend decides what Ctrl-C means
    os.nice(NICENESS)
    take_short_slices()
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


def _end_with_parent(pid: int) -> None:
    wait_for_parent(pid)
    os._exit(0)


if __name__ == "__main__":
    main()
