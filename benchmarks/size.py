"""Non-blank lines of the package's Python, room by room, without tests, benchmarks and examples (`make size`)."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

LIMIT = 51_350
ROOT = Path(__file__).resolve().parent.parent


class Sized(NamedTuple):
    size: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} {self.size:,}"


class File(NamedTuple):
    """Counts of one file."""

    path: str
    lines: int
    methods: list[Sized]  # lines of each class
    class_lines: list[Sized]


def non_blank(lines: list[str]) -> int:
    return sum(bool(line.strip()) for line in lines)


def count(path: Path) -> File:
    text = path.read_text()
    lines = text.splitlines()
    methods, class_lines = [], []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            defined = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            methods.append(Sized(len(defined), node.name))
            class_lines.append(Sized(non_blank(lines[node.lineno - 1 : node.end_lineno]), node.name))
    return File(str(path.relative_to(ROOT)), non_blank(lines), methods, class_lines)


def files_by_room() -> dict[str, list[File]]:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found: dict[str, list[File]] = defaultdict(list)
    for package in packages:
        parts = package.split(".")[1:]
        room = parts[0] + "/" if parts else "__init__.py"
        found[room] += map(count, ROOT.joinpath(*parts).glob("*.py"))
    return dict(sorted(found.items()))


def row(room: str, files: list[File]) -> tuple[str, ...]:
    longest = max(Sized(file.lines, file.path.removeprefix(room)) for file in files)
    methods = max((one for file in files for one in file.methods), default="")
    classes = max((one for file in files for one in file.class_lines), default="")
    total = sum(file.lines for file in files)
    return room, str(len(files)), f"{total:,}", str(longest), str(methods), str(classes)


def main() -> int:
    rooms = files_by_room()
    everything = [file for files in rooms.values() for file in files]
    table: list[tuple[str, ...]] = [("room", "files", "lines", "longest file", "most methods", "longest class")]
    table += [row(room, files) for room, files in rooms.items()]
    table.append(row("all", everything))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for room, *numbers, file, methods, cls in table:
        counts = (f"{number:>{width}}" for number, width in zip(numbers, widths[1:3], strict=True))
        print(f"{room:{widths[0]}}", *counts, f"{file:{widths[3]}}", f"{methods:{widths[4]}}", cls, sep="  ")
    total = sum(file.lines for file in everything)
    print(f"the limit is {LIMIT:,}")
    if total > LIMIT:
        print(f"{total - LIMIT:,} lines too many", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
