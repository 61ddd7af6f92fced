"""Requests suspected of crashing the core, and the quarantine of requests that crashed it repeatedly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .journal import Journal

STRIKES = 2  # crashes in a step of the request alone, at one output position, that lead to quarantine
STRIKES_BY_KILL = 3  # the same if all crashes were by SIGKILL, which may have another cause


class _Strikes(NamedTuple):
    position: int
    deaths: int
    kills: int  # of these, by SIGKILL


class CrashSuspects:
    """The supervisor keeps this object across restarts of its core; those of several cores share it.

    After a crash during a step, all requests of that step are suspects. The next core computes each suspect alone until
    the suspect has produced the token that it was computing. A suspect is quarantined after `STRIKES` crashes at the
    same output position while it was computed alone (`STRIKES_BY_KILL` if all were by SIGKILL). Cores refuse a
    quarantined request.
    """

    def __init__(self) -> None:
        self.suspects: dict[int, int] = {}  # key → position of the output token that clears it
        self.quarantined: dict[int, str] = {}  # key → reason
        self._strikes: dict[int, _Strikes] = {}

    def settle(self, journal: Journal, told: dict[int, int]) -> list[int]:
        """The suspects that a core has found harmless or that have ended there. They are removed, also from `told`.

        Args:
            told: those that the core was told of: key → number of the message that named it.
        """
        heard, left = journal.heard, set(journal.suspects())
        found = [key for key, number in told.items() if number <= heard and key not in left]
        for key in found:
            del told[key]
            self.suspects.pop(key, None)
        return found

    def crashed(self, journal: Journal, cause: str, killed: bool, told: Mapping[int, int] | None = None) -> bool:
        """Record a crash. Returns whether a request is quarantined because of it.

        Args:
            cause: completes the sentence "the core died …".
            killed: whether the crash was by a SIGKILL that the supervisor did not send.
            told: as for `settle`; None: the core knew all suspects.
        """
        accused = journal.accused()
        self.settle(journal, dict.fromkeys(self.suspects, 0) if told is None else dict(told))
        for one in accused:  # twice, if it was in two steps
            self.suspects[one.key] = max(one.position, self.suspects.get(one.key, 0))
        strikes = {}
        for key, position, solo in accused:
            if not solo:
                continue
            before = self._strikes.get(key)
            deaths, kills = (before.deaths, before.kills) if before and before.position == position else (0, 0)
            now = strikes[key] = _Strikes(position, deaths + 1, kills + killed)
            if now.deaths >= (STRIKES_BY_KILL if now.deaths == now.kills else STRIKES):
                self.quarantined[key] = (
                    f"the core died {now.deaths} times while it computed this request alone, at output token "
                    f"{position}; the last time {cause}"
                )
                del self.suspects[key]
        # A request that stopped being a suspect has produced a token since its last strike: drop its strikes.
        kept = {key: strike for key, strike in self._strikes.items() if key in self.suspects}
        self._strikes = {**kept, **{key: strike for key, strike in strikes.items() if key in self.suspects}}
        return any(key in self.quarantined for key in strikes)
