"""Logging of every process to stderr, as text or as JSON lines.

`MAINSPRING_LOG_LEVEL` and `MAINSPRING_LOG_FORMAT` set level and form. A core inherits both from its parent process.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

from .errors import InvalidArgumentError


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, process, pid, logger, message, and exception where there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(process: str) -> None:
    """Configure logging by the environment. Each line holds the name `process`.

    Raises:
        InvalidArgumentError: there is no such level.
    """
    if os.environ.get("MAINSPRING_LOG_FORMAT") == "json":
        formatter: logging.Formatter = JsonLines(process)
    else:
        formatter = logging.Formatter(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    level = os.environ.get("MAINSPRING_LOG_LEVEL", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise InvalidArgumentError(f"MAINSPRING_LOG_LEVEL is {level!r}; it must be DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(level=level, handlers=[handler])
