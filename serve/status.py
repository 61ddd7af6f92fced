"""The status of a core: the output of `mainspring status`, as text or JSON, and the screen of `mainspring top`."""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from ..ipc.connection import ask_status
from ..ipc.errors import ConnectError, printable
from ..ipc.messages import CoreStatus, FrontendStatus, Latency
from ..ipc.transport import address_at, ipc_path, lock_holder, readable

if TYPE_CHECKING:
    from rich.console import Group

_READY = {"serving", "calling", "paused"}
_BARS = "▁▂▃▄▅▆▇█"
_INTERVAL = 1.0  # seconds
_SPEEDS = 60  # kept for the bars
_COUNTS = ("num_running", "num_waiting", "tokens_in_flight", "generation_tokens")


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


def others(found: CoreStatus | int, address: str, **options: Any) -> list[CoreStatus]:
    """The other cores of the daemon. One that does not answer has the phase ``unreachable``."""
    cores = [] if isinstance(found, int) else [one for one in found.cores if one.number != found.core]
    looked = []
    for one in cores:
        try:
            looked.append(ask_status(address_at(address, one.place), **options).core)
        except ConnectError:
            looked.append(CoreStatus(0, 0, 0, "unreachable", core=one.number))
    return looked


def is_ready(found: CoreStatus | int) -> bool:
    return isinstance(found, CoreStatus) and found.phase in _READY


def document(found: CoreStatus | int, siblings: Sequence[CoreStatus] = ()) -> dict[str, Any]:
    """One flat object: the fields of `CoreStatus`, and of `Stats` in place of `stats`. With siblings, `cores` has such
    an object for each core."""
    if isinstance(found, int):
        return {"phase": "starting", "supervisor_pid": found}
    core: dict[str, Any] = msgspec.to_builtins(found)
    del core["stats"]
    core["cores"] = [document(one) for one in (found, *siblings)] if siblings else []
    return {**msgspec.structs.asdict(found.stats), **core}


def frame(
    found: CoreStatus | int, speeds: Sequence[float] = (), trouble: str = "", siblings: Sequence[CoreStatus] = ()
) -> Group:
    """The status for a terminal: facts, the latest `speeds` (tokens/s) as bars, a table of cores if there are several,
    and one of frontends."""
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
    cores = Table("core", box=None, padding=(0, 1), header_style="bold")
    for title in ("phase", "process", "epoch", "running", "waiting", "KV cache", "tokens/s"):
        cores.add_column(title, justify="right")
    for core in (found, *siblings):
        stats = core.stats
        load = f"{stats.num_running:,}", f"{stats.num_waiting:,}", f"{stats.kv_cache_usage:.0%}"
        which = str(core.core), core.phase, str(core.core_pid), str(core.epoch)
        cores.add_row(*which, *load, f"{core.tokens_per_s:,.0f}")
    table = Table("frontend", box=None, padding=(0, 1), header_style="bold")
    for title in ("weight", "running", "waiting", "in flight", "generated"):
        table.add_column(title, justify="right")
    table.add_column("")
    for one in sorted(_together([found, *siblings]), key=lambda one: -one.tokens_in_flight):
        counts = (one.num_running, one.num_waiting, one.tokens_in_flight, one.generation_tokens)
        slow = Text("slow", "yellow") if one.slow else ""
        table.add_row(Text(printable(one.name)), f"{one.weight:g}", *(f"{count:,}" for count in counts), slow)
    return Group(facts, bars, *([cores] if siblings else []), table, *([Text(trouble, "red")] if trouble else []))


def _together(cores: Sequence[CoreStatus]) -> list[FrontendStatus]:
    """The frontends of all cores. Those of one name and weight at different cores are shown as one."""
    if len(cores) == 1:
        return cores[0].frontends
    found: dict[tuple[str, float, int], FrontendStatus] = {}
    for core in cores:
        seen = Counter[tuple[str, float]]()
        for one in core.frontends:
            seen[one.name, one.weight] += 1
            key = one.name, one.weight, seen[one.name, one.weight]
            before = found.get(key, FrontendStatus(one.id, one.name, one.weight))
            sums = {name: getattr(before, name) + getattr(one, name) for name in _COUNTS}
            found[key] = msgspec.structs.replace(before, slow=before.slow or one.slow, **sums)
    return list(found.values())


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
        *(
            [("media", f"{stats.encoded_items:,} encoded, {stats.encoder_hits:,} found")]
            if stats.encoder_queries
            else []
        ),
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
    siblings = others(found, address, **options)
    speeds: deque[float] = deque(maxlen=_SPEEDS)
    trouble = ""
    with suppress(KeyboardInterrupt), _keys() as pressed, Live(screen=True, auto_refresh=False) as live:
        while True:
            if isinstance(found, CoreStatus) and not trouble:  # while there is no core, the last frame stays
                shown = found
                speeds.append(found.tokens_per_s + sum(one.tokens_per_s for one in siblings))
            live.update(frame(shown, speeds, trouble, siblings), refresh=True)
            if pressed(_INTERVAL) == "q":
                return
            try:
                found = look(address, **options)
                siblings = others(found, address, **options)
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
