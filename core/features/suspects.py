"""Requests that may have killed a core: each shows, in steps of its own, that it is harmless."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..plan.feature import Feature
from ..plan.request import Request


class Suspects(Feature):
    """Suspects wait in a queue of their own and are tried one at a time.

    The suspect on trial has a slot, and each of its steps computes nothing else, until it has got past the token that
    was being computed when the core died. Its steps (plan/trial.py) alternate with the steps of all others.

    Args:
        keys: of the suspects, each with the output position of that token. Most of these requests come later, because
            frontends reconnect one by one.
        on_change: called with the keys that are left.
    """

    def __init__(self, keys: Mapping[int, int], on_change: Callable[[Collection[int]], None]) -> None:
        self.keys = dict(keys)
        self.on_trial: Request | None = None
        self.step: int | None = None  # number of the trial step in flight
        self.have_turn = True  # the next step is a suspect's, if one may run
        self._waiting: list[Request] = []
        self._on_change = on_change

    def add(self, keys: Mapping[int, int], harmless: Collection[int]) -> None:
        """Add suspects of which another core died, and remove some that have shown elsewhere that they are harmless."""
        self.keys.update(keys)
        on_trial = self.on_trial.key if self.on_trial else None
        for key in harmless:
            if key != on_trial and not any(request.key == key for request in self._waiting):
                self.keys.pop(key, None)
        self._on_change(self.keys)

    def next(self, may_run: Callable[[Request], bool]) -> Request | None:
        """The suspect of the next trial step."""
        return self.on_trial or next((r for r in self._waiting if may_run(r)), None)

    def begin(self, request: Request) -> None:
        """Put a waiting suspect on trial."""
        self._waiting.remove(request)
        self.on_trial = request

    def clear(self, request: Request) -> None:
        """The request is harmless, or is no longer wanted: it is no suspect any more."""
        if request is self.on_trial:
            self.on_trial = None
        if request.key in self.keys:
            del self.keys[request.key]
            self._on_change(self.keys)

    def token_came(self, output_index: int) -> None:
        """A trial step brought the token at this position of the output."""
        if self.on_trial is not None and output_index >= self.keys.get(self.on_trial.key, 0):
            self._rows.excluded[self.on_trial.slot] = False
            self.clear(self.on_trial)

    # ------------------------------------------------------------------ hooks

    def keeps(self, request: Request) -> bool:
        if request.key not in self.keys:
            return False
        self._waiting.append(request)
        return True

    def got_slot(self, request: Request) -> None:
        self._rows.excluded[request.slot] = request is self.on_trial

    def left_slot(self, request: Request) -> None:
        if request is self.on_trial:
            self.on_trial = None

    def ended(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
