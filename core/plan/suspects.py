"""Requests that may have killed a core: each shows, in steps of its own, that it is harmless."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from .request import Request


class Suspects:
    """Who is to be tried. One at a time is on trial: it has a seat, and each of its steps computes nothing else, until
    it has got past the token that was being computed when the core died. Its steps alternate with those of all others.

    Args:
        keys: of the suspects, each with that token's output position; most of them are not here yet, for frontends come
            back one by one.
        on_change: told the keys that are left.
    """

    def __init__(self, keys: Mapping[int, int], on_change: Callable[[Collection[int]], None]) -> None:
        self.keys = dict(keys)
        self.on_trial: Request | None = None
        self.step: int | None = None  # of a trial, in flight
        self.have_turn = True  # the next step is theirs, if one can be tried
        self._waiting: list[Request] = []
        self._on_change = on_change

    def push(self, request: Request) -> None:
        self._waiting.append(request)

    def next(self, may_run: Callable[[Request], bool]) -> Request | None:
        """Whom to try in the next step of theirs."""
        return self.on_trial or next((r for r in self._waiting if may_run(r)), None)

    def begin(self, request: Request) -> None:
        self._waiting.remove(request)
        self.on_trial = request

    def leave(self, request: Request) -> None:
        """It runs no more, or will not: preempted, or ended."""
        if request is self.on_trial:
            self.on_trial = None
        elif request in self._waiting:
            self._waiting.remove(request)

    def clear(self, request: Request) -> None:
        """It is harmless, or nobody wants it any more."""
        if request is self.on_trial:
            self.on_trial = None
        if request.key in self.keys:
            del self.keys[request.key]
            self._on_change(self.keys)
