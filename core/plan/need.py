"""First stage of a step: how many tokens each running request could compute."""

from __future__ import annotations

import numpy as np

from .budget import Budget
from .columns import Columns
from .feature import Features


class Need:
    def __init__(self, rows: Columns, budget: Budget, features: Features) -> None:
        self._rows, self._budget, self._features = rows, budget, features

    def of(self, slots: np.ndarray) -> np.ndarray:
        """Tokens that the requests at `slots` (int64 ``[n]``) could compute in one step (int64 ``[n]``): those that
        they have not computed yet, up to the length of a chunk, and as far as features allow."""
        rows = self._rows
        need: np.ndarray = np.minimum(rows.num_computable(slots) - rows.num_computed[slots], self._budget.chunk)
        need[rows.held_up[slots]] = 0
        self._features.cap(slots, need)
        return need
