"""The status of a core: the output of `mainspring status`, as text or JSON, and the screen of `mainspring top`."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from ..ipc.connection import ask_status
from ..ipc.errors import ConnectError, printable
from ..ipc.messages import CoreStatus, Latency
from ..ipc.transport import ipc_path, lock_holder, readable

if TYPE_CHECKING:
    from rich.console import Group

_READY = {"serving", "calling", "paused"}
_BARS = "▁▂▃▄▅▆▇█"
_INTERVAL = 1.0  # seconds
_SPEEDS = 60  # kept for the bars


def look(address: str, **options: Any) -> CoreStatus | int:
    """The core at `address`; or the pid of a daemon that holds it while no core answers yet.

    Args:
        options: of `ask_status`.

    Raises:
        ConnectError: neither is there.
    """
    try:
        return ask_status(address, **options).core
    except ConnectError as error:
        holder = lock_holder(address) if ipc_path(address) else None
        if holder is None:
            keys = "" if ipc_path(address) else ", and check --key and --server-key"
            raise ConnectError(f"{error}: start one with mainspring daemon --listen {address}{keys}") from None
        return holder


def is_ready(found: CoreStatus | int) -> bool:
    return isinstance(found, CoreStatus) and found.phase in _READY


def document(found: CoreStatus | int) -> dict[str, Any]:
    """One flat object: the fields of `CoreStatus`, and of `Stats` in place of `stats`."""
    if isinstance(found, int):
        return {"phase": "starting", "supervisor_pid": found}
    core: dict[str, Any] = msgspec.to_builtins(found)
    del core["stats"]
    return {**msgspec.structs.asdict(found.stats), **core}


def frame(found: CoreStatus | int, speeds: Sequence[float] = (), trouble: str = "") -> Group:
    """The status for a terminal: facts, the latest `speeds` (tokens/s) as bars, and a table of frontends."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if isinstance(found, int):
        return Group(Text(trouble or starting(found)))
    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(found):
        facts.add_row(name, Text(printable(text)))
    highest = max(speeds, default=0.0) or 1.0
    bars = Text("".join(_BARS[round(speed / highest * (len(_BARS) - 1))] for speed in speeds), "green")
    table = Table("frontend", box=None, padding=(0, 1), header_style="bold")
    for title in ("weight", "running", "waiting", "in flight", "generated"):
        table.add_column(title, justify="right")
    table.add_column("")
    for one in sorted(found.frontends, key=lambda one: -one.tokens_in_flight):
        counts = (one.num_running, one.num_waiting, one.tokens_in_flight, one.generation_tokens)
        slow = Text("slow", "yellow") if one.slow else ""
        table.add_row(Text(printable(one.name)), f"{one.weight:g}", *(f"{count:,}" for count in counts), slow)
    return Group(facts, bars, table, *([Text(trouble, "red")] if trouble else []))


def starting(supervisor_pid: int) -> str:
    return f"starting: daemon {supervisor_pid} has no core yet that serves"


def _facts(core: CoreStatus) -> list[tuple[str, str]]:
    stats = core.stats
    hits = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
    crash = f", the last {core.last_crash}" if core.last_crash else ""
    return [
        (core.phase, core.model),
        ("process", f"{core.core_pid} of daemon {core.supervisor_pid}, up {core.uptime_s:.0f} s"),
        ("epoch", f"{core.epoch}, {core.restarts} restarts{crash}"),
        ("requests", f"{stats.num_running} running, {stats.num_waiting} waiting, {stats.num_preemptions} preemptions"),
        ("speed", f"{core.tokens_per_s:,.0f} tokens/s"),
        ("first token", _latency(core.time_to_first_token)),
        ("next token", _latency(core.inter_token_latency)),
        ("KV cache", f"{stats.kv_cache_usage:.0%} of {core.num_blocks:,} blocks"),
        ("prefix cache", f"{hits:.0%} of {stats.prefix_queries:,} prompt tokens found"),
    ]


def _latency(latency: Latency) -> str:
    return ", ".join(f"p{name[1:]} {_seconds(getattr(latency, name))}" for name in latency.__struct_fields__)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def show(address: str, **options: Any) -> None:
    """Show the status of a core, updated once a second, until q or Ctrl-C.

    Raises:
        ConnectError: no daemon answers at the start. If it goes away later, wait for it.
    """
    from rich.live import Live

    found = shown = look(address, **options)
    speeds: deque[float] = deque(maxlen=_SPEEDS)
    trouble = ""
    with suppress(KeyboardInterrupt), _keys() as pressed, Live(screen=True, auto_refresh=False) as live:
        while True:
            if isinstance(found, CoreStatus) and not trouble:  # while there is no core, the last frame stays
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
    """A function that waits so many seconds for a key, and returns it, or "" if none was pressed."""
    import termios
    import tty

    fd = sys.stdin.fileno() if sys.stdin.isatty() else -1
    before = termios.tcgetattr(fd) if fd >= 0 else None

    def pressed(seconds: float) -> str:
        return os.read(fd, 1).decode(errors="replace") if readable([fd] if fd >= 0 else [], seconds) else ""

    if before is not None:
        tty.setcbreak(fd)
    try:
        yield pressed
    finally:
        if before is not None:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
