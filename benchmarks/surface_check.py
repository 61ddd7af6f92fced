"""Runs the test of every row of the public surface in each mode, with the row's member and without it (`make
surface-check`); writes docs/surface.md.

It fails if a row has no test, a member of the list does not exist, a test fails, or a test still passes when its member
returns None. Rows and tests are in tests/surface/. `--check` also fails if the page is out of date, and writes nothing;
`--only TEXT` runs the rows whose names contain TEXT and does not write the page. `--results FILE` keeps results with
their commits: rows that are not run now count with their kept result, so modes may be run separately.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # rows that need a hub provide its cache
ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from surface import harness, page  # noqa: E402  # it is in tests/
from surface.harness import MODES, Place, Result, check  # noqa: E402


def run_mode(mode: str, only: list[str], take_away: bool) -> list[Result]:
    """All rows of one mode, in this process."""
    found = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that daemons end with this process
    with tempfile.TemporaryDirectory(prefix="ms-") as folder:
        os.environ["MAINSPRING_PROFILE_DIR"] = os.environ["XDG_CACHE_HOME"] = folder
        place = Place(mode, Path(folder))
        try:
            for table in (harness.ROWS, harness.NEXT):
                for one in table.values():
                    asked = not only or any(text in one.name for text in only)
                    if asked and mode in one.modes and (table is harness.NEXT or page.exists(one)):
                        found.append(check(one, place, take_away and table is harness.ROWS))
                        print(
                            f"\n{one.name} ({mode}): {wrong}" if (wrong := found[-1].wrong) else ".",
                            end="",
                            file=sys.stderr,
                            flush=True,
                        )
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            place.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page would change")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="rows whose names hold this")
    parser.add_argument("--mode", choices=MODES, action="append", help="only this mode")
    parser.add_argument("--keep", action="store_true", help="do not take members away")
    parser.add_argument("--results", type=Path, metavar="FILE", help="remember results there; write the page of all")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # in a child process: the file for results
    args = parser.parse_args()
    page.load_rows()
    if args.into:
        args.into.write_text(json.dumps(run_mode(args.mode[0], args.only, not args.keep)))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    commit = _commit()
    results = run_all(args.mode or MODES, args.only, args.keep)
    if args.results:
        results = remembered(args.results, commit, results)
    wrong = [f"{one.row} ({one.mode}): {one.wrong}" for one in results if one.wrong]
    if args.results:
        ran = {(one.row, one.mode) for one in results}
        wrong += [f"{one.row} ({one.mode}): not run" for one in page.expected() if (one.row, one.mode) not in ran]
    if not args.only or args.results:
        wrong += page.incomplete()
    slowest = sorted(results, key=lambda one: -one.seconds)[:5]
    print(
        f"\n{len(results)} tests of {len({one.row for one in results})} rows in {time.monotonic() - began:.0f} s;",
        end=" ",
    )
    print("slowest: " + ", ".join(f"{one.row} ({one.mode}) {one.seconds:.0f} s" for one in slowest))
    print(page.table(results))
    if args.results or not (args.only or args.mode):
        text = page.text(results)
        if not args.check:
            page.PATH.write_text(text)
        elif not page.PATH.exists() or page.PATH.read_text() != text:
            wrong.append("docs/surface.md is out of date; run `make surface-check`")
    print(*wrong, sep="\n")
    print(f"{len(wrong)} things are wrong" if wrong else "every row works, and every test can fail")
    return 1 if wrong else 0


def _commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def remembered(path: Path, commit: str, new: list[Result]) -> list[Result]:
    """Merge these results with the earlier ones in the file, for rows that still exist, and write the file."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found |= {f"{one.row} | {one.mode}": [commit, one] for one in new}
    kept = {f"{one.row} | {one.mode}" for one in page.expected()}
    found = {name: entry for name, entry in found.items() if name in kept}
    path.write_text(json.dumps(found, indent=1))
    for (mode, commit), count in sorted(Counter((one[1], commit) for commit, one in found.values()).items()):
        print(f"{mode}: {count} rows at {commit}")
    return [Result(*one) for _, one in found.values()]


def run_all(modes: Sequence[str], only: list[str], keep: bool) -> list[Result]:
    """Run each mode in a separate process, in parallel."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for mode in modes:
            into = Path(folder) / mode
            command = [
                sys.executable,
                "-P",
                __file__,
                f"--mode={mode}",
                *(f"--only={one}" for one in only),
                f"--into={into}",
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            environment["PYTHONPATH"] = str(ROOT / "tests")  # cores find worker extensions there
            children[mode] = subprocess.Popen([*command, *(["--keep"] if keep else [])], env=environment)
        try:
            for mode, child in children.items():
                if child.wait() != 0:
                    raise SystemExit(f"{mode}: the checker itself failed")
                found += [Result(*one) for one in json.loads((Path(folder) / mode).read_text())]
        finally:
            for child in children.values():
                if child.poll() is None:
                    child.terminate()
                    child.wait()
    return found


if __name__ == "__main__":
    sys.exit(main())
