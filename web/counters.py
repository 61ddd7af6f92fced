"""Counters of requests, in memory that all workers share: any of them can tell the sums."""

from __future__ import annotations

import mmap
import tempfile
from typing import Any

STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 429, 499, 500, 503, 504)
BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)  # seconds
_IN_FLIGHT, _SECONDS, _STATUS = 0, 1, 2
_BOUND = _STATUS + len(STATUSES) + 1
_WIDTH = 64


class Counters:
    """A row of 64-bit floats for each worker. A worker writes its own row only.

    Args:
        fd: a file that `shared_file` has made.
        row: the worker's number.
    """

    def __init__(self, fd: int, rows: int, row: int) -> None:
        cells = memoryview(mmap.mmap(fd, rows * _WIDTH * 8)).cast("d")
        self._rows = [cells[at * _WIDTH : (at + 1) * _WIDTH] for at in range(rows)]
        self._mine = self._rows[row]
        self._mine[_IN_FLIGHT] = 0  # those of a worker that died here

    def began(self) -> None:
        self._mine[_IN_FLIGHT] += 1

    def ended(self, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        mine = self._mine
        mine[_IN_FLIGHT] -= 1
        mine[_SECONDS] += seconds
        mine[_STATUS + (STATUSES.index(status) if status in STATUSES else len(STATUSES))] += 1
        mine[_BOUND + next((at for at, bound in enumerate(BOUNDS) if seconds <= bound), len(BOUNDS))] += 1

    @property
    def in_flight(self) -> int:
        """Requests that are being answered, in all workers."""
        return int(sum(row[_IN_FLIGHT] for row in self._rows))

    def lines(self) -> list[str]:
        """The counters in Prometheus' form."""
        total = [sum(column) for column in zip(*self._rows, strict=True)]
        lines = ["# TYPE http_requests_total counter"]
        for at, status in enumerate((*STATUSES, "other")):
            if count := total[_STATUS + at]:
                lines.append(f'http_requests_total{{status="{status}"}} {int(count)}')
        lines.append("# TYPE http_requests_in_flight gauge")
        lines.append(f"http_requests_in_flight {int(total[_IN_FLIGHT])}")
        lines.append("# TYPE http_request_duration_seconds histogram")
        below = 0
        for at, bound in enumerate((*BOUNDS, "+Inf")):
            below += int(total[_BOUND + at])
            lines.append(f'http_request_duration_seconds_bucket{{le="{bound}"}} {below}')
        lines.append(f"http_request_duration_seconds_count {below}")
        lines.append(f"http_request_duration_seconds_sum {total[_SECONDS]:.6f}")
        return lines


def shared_file(rows: int) -> Any:
    """A file without a name, for the counters of so many workers."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  # its descriptor goes to the workers
    file.truncate(rows * _WIDTH * 8)
    return file
