"""Requests whose next token can only be chosen when the host knows the token before: those with grammars, bad words and
functions of the user. They compute nothing while a token of theirs is in flight."""

from __future__ import annotations

import numpy as np

from ..plan.feature import Feature


class LookBack(Feature):
    def cap(self, slots: np.ndarray, need: np.ndarray) -> None:
        waits = self._rows.looks_back[slots]
        if waits.any():
            need[waits & self._rows.last_in_flight(slots)] = 0
