"""Profiles the steps of a core with torch's profiler, and writes a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

import os
import re
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...ipc.errors import InvalidRequestError

FOLDER = "MAINSPRING_PROFILE_DIR"  # environment variable: folder for traces; if unset, the system's temporary folder
MAX_SECONDS = 600.0  # longest profile; a longer one is dropped, because each step adds to its memory


class Profiler:
    """Records one profile at a time. Only the thread that drives the core may use it."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._prefix = ""
        self._began = 0.0

    def start(self, prefix: str | None = None) -> None:
        """Start a profile. If one is being recorded, nothing happens.

        Args:
            prefix: start of the file name: letters, digits, ``_``, ``-`` and ``.``.

        Raises:
            InvalidRequestError: the prefix has other characters.
        """
        prefix = "mainspring" if prefix is None else prefix
        if not isinstance(prefix, str) or not re.fullmatch(r"[\w.-]{1,100}", prefix):
            raise InvalidRequestError(
                f"profile_prefix is {prefix!r:.120}; it must be a name: letters, digits, _, - and ."
            )
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile, self._prefix, self._began = profile(activities=activities), prefix, time.monotonic()
            self._profile.start()

    def stop(self) -> str:
        """End the profile and write the trace.

        Returns:
            The path of the trace, on the core's machine.

        Raises:
            InvalidRequestError: no profile is being recorded.
        """
        if self._profile is None:
            raise InvalidRequestError("no profile is under way: call start_profile first")
        done, self._profile = self._profile, None
        done.stop()
        folder = Path(os.environ.get(FOLDER) or tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._prefix}-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        done.export_chrome_trace(str(path))
        return str(path)

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A context whose operations appear under `name` in the trace."""
        if self._profile is None:
            return nullcontext()
        if time.monotonic() - self._began > MAX_SECONDS:
            self._profile.stop()
            self._profile = None
        return record_function(name)
