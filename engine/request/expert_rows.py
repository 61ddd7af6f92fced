"""The experts that computed the tokens of a completion, put together as they come."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...ipc.messages import Routed

if TYPE_CHECKING:
    import numpy as np


class ExpertRows:
    """Rows of consecutive tokens, from the first one of the prompt on."""

    def __init__(self, form: Routed) -> None:
        """form: any message of the core; all have rows of the same shape and dtype."""
        self._shape, self._dtype = form.shape, form.dtype
        self._row_bytes = row_bytes(form)
        self._rows = bytearray()
        self._array: np.ndarray | None = None

    def add(self, start: int, rows: memoryview) -> None:
        """Add those of the tokens from index `start` on. Rows that are there already, which a core sends that computes
        the request again, are the same."""
        there = len(self._rows) - start * self._row_bytes
        if 0 <= there < len(rows):
            self._rows += rows[there:]

    def array(self, num_tokens: int) -> np.ndarray:
        """Those of the first `num_tokens` tokens, or as many as there are: ``[tokens, layers, experts of a token]``. No
        more can be added then."""
        if self._array is None:
            import numpy as np

            rows, self._rows = self._rows[: num_tokens * self._row_bytes], bytearray()
            self._array = np.frombuffer(rows, np.dtype(self._dtype).newbyteorder("<")).reshape(-1, *self._shape)
        return self._array


def row_bytes(form: Routed) -> int:
    return math.prod(form.shape) * (2 if form.dtype == "uint16" else 1)
