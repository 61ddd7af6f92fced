"""Output of programs with bars: each bar and its measured value, as a table, as JSON, and on a page of docs/.

    python benchmarks/bars.py .bench/chaos.json .bench/fuzz.json

writes the tables of earlier runs to the page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

from report import CACHE, DOCS, fill, machine, table


class Bar(NamedTuple):
    """One measured value, with a limit or without."""

    name: str
    measured: str
    passed: bool | None  # None: no limit, for information only


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of all these programs."""
    parser.add_argument("--threads", type=int, default=0, help="threads of each core; 0: as many as torch likes")
    parser.add_argument("--json", type=Path, help="default: .bench/PROGRAM.json")
    parser.add_argument("--write", action="store_true", help="put the table into its place in docs/")


def conclude(
    bars: list[Bar], details: dict[str, Any], args: argparse.Namespace, page: str = "reliability.md", more: str = ""
) -> int:
    """Print the table and write the JSON, and the page if asked to, with `more` below. → the program's exit code."""
    program = Path(sys.argv[0]).stem
    words = iter(sys.argv[1:])
    given = [word for word in words if word != "--write" and not (word == "--json" and next(words))]
    command = shlex.join(["python", f"benchmarks/{program}.py", *given])
    result = {
        "program": program,
        "page": page,
        "command": command,
        "date": str(datetime.date.today()),
        "machine": machine(),
        "bars": [bar._asdict() for bar in bars],
        "more": more,
        **details,
    }
    path = args.json or CACHE / f"{program}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{_text(result)}\n\n{path}", flush=True)
    if args.write:
        put_on_page(result)
    return int(any(bar.passed is False for bar in bars))


def put_on_page(result: dict[str, Any]) -> None:
    """Write a result to its section of the page."""
    stamp = f"`{result['command']}`, {result['date']}, {result['machine']}."
    page, section = DOCS / result.get("page", "reliability.md"), result.get("section", result["program"])
    fill(page, section, f"{_text(result)}\n\n{stamp}")


def _text(result: dict[str, Any]) -> str:
    verdict = {True: "pass", False: "**FAIL**", None: ""}
    rows = [[bar["name"], bar["measured"], verdict[bar["passed"]]] for bar in result["bars"]]
    return "\n\n".join(filter(None, [table(["bar", "measured", ""], rows), result.get("more")]))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        put_on_page(json.loads(Path(name).read_text()))
