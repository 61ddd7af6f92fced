"""Kill the core under an engine's streams."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

COUNTED_WITHIN_S = 60


def kill_core(supervisor: Any) -> None:
    """Kill the core, and return when the supervisor has counted its death. A test whose last tokens were on their way
    already could end before that otherwise."""
    before, deadline = supervisor.launch.restarts, time.monotonic() + COUNTED_WITHIN_S
    os.kill(supervisor.core_pid, signal.SIGKILL)
    while supervisor.launch.restarts == before:
        assert time.monotonic() < deadline, "the supervisor has not noticed that its core died"
        time.sleep(0.01)
