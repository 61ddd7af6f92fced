"""How long Linux lets a thread of this process run before another thread that waits for the processor has its turn."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

SLICE_NS = 100_000  # the shortest that Linux takes
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the system call, which Python does not have


def take_short_slices() -> None:
    """Let the calling thread, and those that it starts from now on, run in short slices. Since version 6.6, Linux lets
    a running thread finish its slice of some milliseconds, even if one of higher priority wakes up, and threads of a
    core wait for each other many times in a step. Since version 6.12 a thread may choose its slice, and interrupts
    those with longer ones when it wakes up. Its share stays the same. Earlier versions refuse or ignore this."""
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        # struct sched_attr: size, policy, flags, nice, priority, then runtime, deadline and period in ns
        words = struct.pack("=IIQiIQQQ", 48, 0, 0, nice, 0, SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, words, 0)
