"""A media worker that dies of some pictures: the real program, with a decoder that does what the first pixel says."""

from __future__ import annotations

import signal
import time
from typing import Any

from mainspring.media import __main__ as program
from mainspring.media import preparer

SEGV, HANG, HOLD, GREEDY, SLOW = range(1, 6)  # red of the first pixel, if its green and blue are 7
decode = preparer.decode_image


def decode_or_die(what: str, data: bytes, limits: Any) -> Any:
    found = decode(what, data, limits)
    red, green, blue = found.getpixel((0, 0))
    if (green, blue) == (7, 7):
        if red == SEGV:
            signal.raise_signal(signal.SIGSEGV)  # in this thread, as a library's fault is: it does not go on
        elif red == HANG:
            time.sleep(600)
        elif red == HOLD:  # a library that keeps the interpreter's lock
            import ctypes

            ctypes.PyDLL(None).sleep(600)
        elif red == GREEDY:
            bytearray(64 << 30)
        elif red == SLOW:
            time.sleep(0.5)
    return found


def run() -> None:
    preparer.decode_image = decode_or_die
    program.NICENESS = 0  # beside busy processes a nice one gets so little time that good pictures reach their limit
    program.main()
