"""What the reliability programs say: bars with what was measured, as a table, as JSON, and on docs/reliability.md.

    python benchmarks/bars.py .bench/chaos.json .bench/fuzz.json

puts the tables of earlier runs on the page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

from report import CACHE, ROOT, machine, table

PAGE = ROOT / "docs" / "reliability.md"


class Bar(NamedTuple):
    """One thing to show."""

    name: str
    measured: str
    passed: bool | None  # None: no bar, a number to know


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every program takes."""
    parser.add_argument("--threads", type=int, default=0, help="threads of each core; 0: as many as torch likes")
    parser.add_argument("--json", type=Path, help="default: .bench/PROGRAM.json")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md")


def conclude(bars: list[Bar], details: dict[str, Any], args: argparse.Namespace) -> int:
    """Print the table and write the JSON, and the page if asked to. → the program's exit code."""
    program = Path(sys.argv[0]).stem
    words = iter(sys.argv[1:])
    given = [word for word in words if word != "--write" and not (word == "--json" and next(words))]
    command = shlex.join(["python", f"benchmarks/{program}.py", *given])
    result = {
        "program": program,
        "command": command,
        "date": str(datetime.date.today()),
        "machine": machine(),
        "bars": [bar._asdict() for bar in bars],
        **details,
    }
    path = args.json or CACHE / f"{program}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{_table(result)}\n\n{path}", flush=True)
    if args.write:
        fill(result)
    return int(any(bar.passed is False for bar in bars))


def fill(result: dict[str, Any]) -> None:
    """Put a result into its place on the page."""
    begin, end = f"<!-- begin {result['program']} -->", f"<!-- end {result['program']} -->"
    page = PAGE.read_text()
    if begin not in page or end not in page:
        raise SystemExit(f"{PAGE.name} has no place for {result['program']!r}: it needs {begin} and {end}")
    stamp = f"`{result['command']}`, {result['date']}, {result['machine']}."
    head, rest = page.split(begin)
    PAGE.write_text(f"{head}{begin}\n{_table(result)}\n\n{stamp}\n{end}{rest.split(end)[1]}")


def _table(result: dict[str, Any]) -> str:
    verdict = {True: "pass", False: "**FAIL**", None: ""}
    rows = [[bar["name"], bar["measured"], verdict[bar["passed"]]] for bar in result["bars"]]
    return table(["bar", "measured", ""], rows)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        fill(json.loads(Path(name).read_text()))
