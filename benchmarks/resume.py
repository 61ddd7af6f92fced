"""A log from which a long measurement continues where it stopped: one JSON line for each measurement.

Measurements with other sources of the package, or on a processor with other features, do not count.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import ROOT


def hash_sources(*programs: str) -> hashlib.blake2b:
    """The digest of the package and of these programs of this folder."""
    hashed = hashlib.blake2b(digest_size=8)
    rooms = ("cli", "compat", "core", "engine", "ipc", "kernels", "serve", "tools")
    files = [file for room in rooms for file in (ROOT / room).rglob("*")]
    files += [ROOT / "benchmarks" / name for name in programs]
    for file in sorted(file for file in files if file.suffix in (".py", ".h", ".cpp")):
        hashed.update(file.read_bytes())
    return hashed


def source() -> str:
    """A digest of the package, the benchmark programs, and the processor's features."""
    hashed = hash_sources("driver.py", "workloads.py")
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"^(flags|Features)\s*:.*$", info.read_text(), re.MULTILINE)):
        hashed.update(found[0].encode())
    return hashed.hexdigest()


class Log:
    """Values by key. Without a path nothing is kept after the process ends."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._source = path, source()
        self._known: dict[str, Any] = {}
        for line in path.read_text().splitlines() if path and path.exists() else []:
            if (record := json.loads(line))["source"] == self._source:
                self._known[record["key"]] = record["value"]

    def get(self, key: str) -> Any:
        """The value, or None if it was not measured."""
        return self._known.get(key)

    def keep(self, key: str, value: Any) -> None:
        self._known[key] = value
        if self._path:
            record = {"key": key, "source": self._source, "at": f"{datetime.datetime.now():%F %T}", "value": value}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                print(json.dumps(record), file=file)

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        """The earlier measurement, or a new one."""
        if key not in self._known:
            self.keep(key, measure())
        return self._known[key]
