"""Requests suspected of crashing the core, and the quarantine of those that did it repeatedly."""

from __future__ import annotations

from typing import NamedTuple

from .journal import Journal

STRIKES = 2  # crashes in a step of the request alone, at one output position, that lead to quarantine
STRIKES_BY_KILL = 3  # the same if all crashes were by SIGKILL, which may have another cause


class _Strikes(NamedTuple):
    position: int
    deaths: int
    kills: int  # of these, by SIGKILL


class CrashSuspects:
    """Kept by the supervisor across restarts of its core.

    After a crash during a step the requests of that step are suspects. The next core computes each of them in steps of
    its own until it has produced the token that it was computing. A suspect is quarantined after `STRIKES` crashes in a
    step of its own at the same output position (`STRIKES_BY_KILL`, if all by SIGKILL): cores refuse it from then on.
    """

    def __init__(self) -> None:
        self.suspects: dict[int, int] = {}  # key → output position that it must get past
        self.quarantined: dict[int, str] = {}  # key → why
        self._strikes: dict[int, _Strikes] = {}

    def crashed(self, journal: Journal, cause: str, killed: bool) -> bool:
        """Record a crash. `cause` completes "the core died …"; `killed`: by a SIGKILL that the supervisor did not send.
        Whether a request is quarantined because of it."""
        accused = journal.accused()
        untried = {key: self.suspects[key] for key in journal.suspects() if key in self.suspects}
        self.suspects = {**untried, **{one.key: one.position for one in accused}}
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
        # A request that is no suspect any more has produced a token since its last strike.
        kept = {key: strike for key, strike in self._strikes.items() if key in self.suspects}
        self._strikes = {**kept, **{key: strike for key, strike in strikes.items() if key in self.suspects}}
        return any(key in self.quarantined for key in strikes)
