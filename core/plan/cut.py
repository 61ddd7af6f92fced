"""Where prompts are cut: the tokens that a step computes may have to end where the layers' memory says so."""

from __future__ import annotations

import numpy as np

from ..memory.cache_manager import CacheManager
from .budget import Budget
from .request import Request
from .running import Running


class Cut:
    def __init__(self, running: Running, kv: CacheManager, budget: Budget) -> None:
        self._running, self._kv, self._budget = running, kv, budget

    @property
    def is_needed(self) -> bool:
        """Whether prompts may not be cut anywhere. A budget below the smallest piece cuts them anywhere all the same:
        with so little memory, the bits of a result may differ."""
        return self._budget.chunked and self._kv.state is not None and self._budget.chunk >= self._kv.least_cut

    def of(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """How many of the next `counts` tokens the requests at `slots` compute (int64 ``[n]`` each)."""
        rows = self._running.rows
        if self.is_needed:
            starts = rows.num_computed[slots]
            for i in np.flatnonzero((counts > 0) & (starts < rows.prompt_len[slots])).tolist():
                counts[i] = self._kv.cut(self._running.requests[int(slots[i])], int(starts[i]), int(counts[i]))
        return counts

    def first(self, request: Request, start: int, count: int) -> int:
        """As `of`, for a waiting request whose first `start` tokens are cached."""
        return self._kv.cut(request, start, count) if self.is_needed else count
