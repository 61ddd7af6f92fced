"""Non-blank lines of the package's Python, room by room, without tests, benchmarks and examples (`make size`)."""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from pathlib import Path

LIMIT = 21_010  # what the package may have now
ROOT = Path(__file__).resolve().parent.parent


def count(path: Path) -> int:
    return sum(bool(line.strip()) for line in path.read_text().splitlines())


def main() -> int:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    longest: list[tuple[int, str]] = []
    for package in packages:
        parts = package.split(".")[1:]
        room = parts[0] + "/" if parts else "__init__.py"
        for path in ROOT.joinpath(*parts).glob("*.py"):
            lines[room] += count(path)
            files[room] += 1
            longest.append((count(path), str(path.relative_to(ROOT))))
    for room in sorted(lines):
        print(f"{room:14}{files[room]:4} files {lines[room]:6,} lines")
    total = sum(lines.values())
    print(f"{'all':14}{sum(files.values()):4} files {total:6,} lines; the limit is {LIMIT:,}")
    print("longest: " + ", ".join(f"{name} {n}" for n, name in sorted(longest, reverse=True)[:5]))
    if total > LIMIT:
        print(f"{total - LIMIT:,} lines too many", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
