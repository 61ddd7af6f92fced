"""Folders of the benchmarks, and the code that writes their tables to docs/performance.md."""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".bench"  # virtual environments of peers in peers/NAME/
MODELS = CACHE / "models"
DOCS = ROOT / "docs"
PAGE = DOCS / "performance.md"


def machine() -> str:
    """Processor, cores and versions, in one line."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"model name\s*: (.+)", info.read_text())):
        name = found[1]
    ours = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers"))
    return f"{name}, {os.cpu_count()} cores; Python {platform.python_version()}, {ours}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def publish(section: str, text: str, write: bool, where: Path = PAGE) -> None:
    """Print a section; with `write`, also write it to its place in docs/performance.md, or in another page."""
    print(text, flush=True)
    if not write:
        return
    command = " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])
    stamp = f"`{command}`, {datetime.date.today()}, {machine()}."
    fill(where, section, f"{text}\n\n{stamp}")


def fill(where: Path, section: str, text: str) -> None:
    """Write `text` to the place of a section in a page."""
    begin, end = f"<!-- begin {section} -->", f"<!-- end {section} -->"
    page = where.read_text()
    if begin not in page or end not in page:
        raise SystemExit(f"{where.name} has no place for {section!r}: it needs {begin} and {end}")
    head, rest = page.split(begin)
    where.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}")
