"""torch's profiler around the steps of a core, written as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

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

FOLDER = "MAINSPRING_PROFILE_DIR"  # environment variable: where traces go; else into the system's place for such files
MAX_SECONDS = 600.0  # a profile that nobody stops is dropped then, for every step takes memory of it


class Profiler:
    """One profile at a time. For the thread that drives the core."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._prefix = ""
        self._began = 0.0

    def start(self, prefix: str | None = None) -> None:
        """Begin to record; with one under way, nothing happens.

        Args:
            prefix: of the file's name: letters, digits, ``_``, ``-`` and ``.``.

        Raises:
            InvalidRequestError: the prefix is something else.
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
        """End it and write the trace.

        Returns:
            The file, on the core's machine.

        Raises:
            InvalidRequestError: none is under way.
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
        """What is done in it stands under this name in the trace."""
        if self._profile is None:
            return nullcontext()
        if time.monotonic() - self._began > MAX_SECONDS:
            self._profile.stop()
            self._profile = None
        return record_function(name)
