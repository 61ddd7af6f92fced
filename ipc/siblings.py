"""What the supervisors of one daemon's cores have in common: the suspects, and which cores take requests.

A core that dies leaves its requests to its siblings. A sibling keeps such a request back until it has been told which
requests the dead core was computing, so that a request that kills cores is computed alone wherever it goes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import threading
from dataclasses import dataclass, field

import msgspec

from .crash_suspects import CrashSuspects
from .journal import Journal
from .messages import Listening, News
from .transport import CoreLaunch

_LENGTH = struct.Struct(">I")
_PIPE_BYTES = 64 << 10  # written at once; what a pipe holds


class NewsPipe:
    """The supervisor's end of the pipe to a core. Nothing here waits for the core, which may be stopped."""

    def __init__(self) -> None:
        self.read_fd, self._fd = os.pipe()
        os.set_blocking(self._fd, False)
        self._unsent = bytearray()

    def put(self, news: News) -> None:
        data = msgspec.msgpack.encode(news)
        self._unsent += _LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full, or the core is gone
            while self._unsent:
                del self._unsent[: os.write(self._fd, self._unsent[:_PIPE_BYTES])]

    def close(self) -> None:
        os.close(self._fd)


class NewsReader:
    """The core's end."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd, self._data = fd, bytearray()

    def read(self) -> list[News] | None:
        """The messages that have arrived; None if the supervisor has closed its end."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._fd, _PIPE_BYTES):
                self._data += chunk
            return None
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            found.append(msgspec.msgpack.decode(bytes(self._data[_LENGTH.size : end]), type=News))
            del self._data[:end]
        return found


@dataclass(eq=False, slots=True)
class Sibling:
    """A running core."""

    journal: Journal
    told: dict[int, int]  # suspects that it knows: key → number of the message that named it
    pipe: NewsPipe = field(default_factory=NewsPipe)
    number: int = 0  # of the last message to it


class Siblings:
    """Thread-safe."""

    def __init__(self) -> None:
        self.instance_id = secrets.token_bytes(8)
        self._lock = threading.Lock()
        self._suspects = CrashSuspects()
        self._over: dict[int, int] = {}
        self._listening: dict[int, Listening] = {}
        self._failed_start = ""
        self._running: dict[int, Sibling] = {}

    @property
    def num_quarantined(self) -> int:
        """Requests that cores refuse because they have crashed earlier ones."""
        return len(self._suspects.quarantined)

    def last_epoch(self, number: int) -> int:
        """The last epoch of core `number` that has ended; 0: there was none."""
        return self._over.get(number, 0)

    def starts(self, launch: CoreLaunch, journal: Journal) -> Sibling:
        """A core is about to start. Fills in what it has to know."""
        with self._lock:
            launch.suspects, launch.quarantined = dict(self._suspects.suspects), dict(self._suspects.quarantined)
            launch.over, launch.cores = dict(self._over), list(self._listening.values())
            journal.clear(launch.suspects)
            if (before := self._running.pop(launch.number, None)) is not None:  # no process was made
                before.pipe.close()
            found = self._running[launch.number] = Sibling(journal, dict.fromkeys(launch.suspects, 0))
            launch.news_fd = found.pipe.read_fd
            return found

    def flush(self, sibling: Sibling) -> None:
        with self._lock:
            sibling.pipe.flush()

    def ended(self, launch: CoreLaunch, cause: str, crashed: bool, killed: bool) -> bool:
        """The core of this launch has ended: record it, and tell the others. A second call does nothing.

        Args:
            cause, killed: as for `CrashSuspects.crashed`.
            crashed: False: it was told to end.

        Returns:
            whether a request is quarantined because of it.
        """
        with self._lock:
            if (dead := self._running.pop(launch.number, None)) is None:
                return False
            dead.pipe.close()
            suspects, blamed = self._suspects, False
            harmless = {
                key for one in (dead, *self._running.values()) for key in suspects.settle(one.journal, one.told)
            }
            before, refused = dict(suspects.suspects), dict(suspects.quarantined)
            if crashed:
                blamed = suspects.crashed(dead.journal, cause, killed, told={})
            self._over[launch.number] = launch.epoch
            accused = {key: at for key, at in suspects.suspects.items() if before.get(key) != at}
            quarantined = {key: why for key, why in suspects.quarantined.items() if key not in refused}
            self._tell(
                over={launch.number: launch.epoch},
                suspects=accused,
                harmless=[key for key in harmless if key not in suspects.suspects] + list(quarantined),
                quarantined=quarantined,
            )
            return blamed

    def listen(self, cores: dict[int, Listening | None]) -> None:
        """From now on these cores take requests, or, with None, take no more of them."""
        with self._lock:
            self._listening = {
                number: one for number, one in sorted({**self._listening, **cores}.items()) if one is not None
            }
            self._tell()

    def failed(self, text: str) -> None:
        """A further core did not start: when, and why."""
        with self._lock:
            self._failed_start = text
            self._tell()

    def _tell(
        self,
        over: dict[int, int] | None = None,
        suspects: dict[int, int] | None = None,
        harmless: list[int] | None = None,
        quarantined: dict[int, str] | None = None,
    ) -> None:
        cores = list(self._listening.values())
        for one in self._running.values():
            one.number += 1
            one.told.update(dict.fromkeys(suspects or (), one.number))
            for key in harmless or ():
                one.told.pop(key, None)
            more = over or {}, suspects or {}, harmless or [], quarantined or {}
            one.pipe.put(News(one.number, cores, *more, self._failed_start))
