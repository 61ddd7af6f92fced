"""Percentiles of what was observed lately."""

from __future__ import annotations

import numpy as np

from ..ipc.messages import Latency


class Latest:
    """The latest `size` observations, in seconds."""

    def __init__(self, size: int = 1000) -> None:
        self._values = np.zeros(size)
        self._count = 0

    def add(self, seconds: float) -> None:
        self._values[self._count % len(self._values)] = seconds
        self._count += 1

    def percentiles(self) -> Latency:
        values = self._values[: self._count]
        return Latency(*np.percentile(values, (50, 95, 99)).tolist()) if values.size else Latency()
