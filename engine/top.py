"""`mainspring top`: how a core is, again and again, until q or Ctrl-C."""

from __future__ import annotations

import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.live import Live

from ..ipc.errors import ConnectError
from ..ipc.messages import CoreStatus
from .status import frame, look, starting

_INTERVAL = 1.0  # seconds
_SPEEDS = 60  # kept for the bars


def show(address: str, **options: Any) -> None:
    """Draw frames.

    Raises:
        ConnectError: nobody is there at the beginning. What goes away later is waited for.
    """
    found = shown = look(address, **options)
    speeds: deque[float] = deque(maxlen=_SPEEDS)
    trouble = ""
    with suppress(KeyboardInterrupt), _keys() as pressed, Live(screen=True, auto_refresh=False) as live:
        while True:
            if isinstance(found, CoreStatus) and not trouble:  # between two cores the last frame stays
                shown = found
                speeds.append(found.tokens_per_s)
            live.update(frame(shown, speeds, trouble), refresh=True)
            if pressed(_INTERVAL) == "q":
                return
            try:
                found = look(address, **options)
                trouble = starting(found) if isinstance(found, int) else ""
            except ConnectError as error:
                trouble = str(error)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for a key, for so many seconds, and returns it, or "" without one."""
    import termios
    import tty

    fd = sys.stdin.fileno() if sys.stdin.isatty() else -1
    before = termios.tcgetattr(fd) if fd >= 0 else None

    def pressed(seconds: float) -> str:
        there = select.select([fd] if fd >= 0 else [], [], [], seconds)[0]
        return os.read(fd, 1).decode(errors="replace") if there else ""

    if before is not None:
        tty.setcbreak(fd)
    try:
        yield pressed
    finally:
        if before is not None:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
