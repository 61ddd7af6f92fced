"""schemathesis against every route of `mainspring serve`: requests made from its /openapi.json, right and wrong ones.

    python -m venv /tmp/schemathesis && /tmp/schemathesis/bin/pip install schemathesis
    python benchmarks/http_schema.py --schemathesis /tmp/schemathesis/bin/schemathesis

schemathesis has an environment of its own, because it wants other versions of packages than our tests. A daemon with
the embedded model is started, and a server beside it. Routes that stop the engine for others (sleep, pause) are asked
in a second run. Checked: no status 5xx, errors of the documented form, status 405 with `Allow` for other methods, no
answer without a key, at least 2,000 requests, no traceback in the server's log, and an answer at the end.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from bars import Bar, add_arguments, conclude
from daemon import Daemon
from http_server import HttpServer

LEAST_REQUESTS = 2000
KEY = "sk-schema"
STOPPING = "/(sleep|wake_up|pause|resume)$"
CHECKS = (
    "not_a_server_error",
    "unsupported_method",
    "ignored_auth",
    "response_schema_conformance",
    "content_type_conformance",
)


def explore(program: str, folder: Path, url: str, examples: int, seed: int, *selection: str) -> tuple[int, str]:
    """One run of schemathesis, which keeps its findings in `folder`: the number of its requests, and what it has found;
    nothing if all is well."""
    command = [program, "run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {KEY}", "--no-color"]
    command += [word for check in CHECKS for word in ("--checks", check)]
    command += ["--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--request-timeout", "60"]
    command += ["--max-examples", str(examples), "--seed", str(seed), *selection]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    count = re.search(r"(\d+) generated", done.stdout)
    if count is None:
        raise SystemExit(f"schemathesis did not run:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return int(count[1]), done.stdout if done.returncode else ""


def answers(url: str) -> bool:
    """Whether the server still completes a prompt."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    body = json.dumps({"prompt": "A fox", "max_tokens": 2}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=60) as found:
        return bool(json.load(found)["choices"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", default="schemathesis", help="the program (default: the one in PATH)")
    parser.add_argument("--examples", type=int, default=100, help="most random requests for each route")
    parser.add_argument("--seed", type=int, default=1)
    add_arguments(parser)
    args = parser.parse_args()
    if (program := shutil.which(args.schemathesis)) is None:
        raise SystemExit(f"{args.schemathesis} is not there; the first lines of this file say how to install it")
    program = str(Path(program).absolute())  # schemathesis runs in a folder of its own, where it keeps its findings
    with Daemon("--max-num-seqs=16", threads=args.threads) as daemon:
        keys = Path(daemon.folder) / "keys"
        keys.write_text(f"{KEY} schema admin\n")
        flags = ("--connect", daemon.address, "--api-key-file", str(keys), "--no-access-log")
        with HttpServer(daemon.folder, *flags) as server:
            given = (program, daemon.folder, server.url, args.examples, args.seed)
            runs = [
                explore(*given, "--exclude-path-regex", STOPPING),
                explore(*given, "--include-path-regex", STOPPING),
            ]
            for path in ("wake_up", "resume"):
                headers = {"authorization": f"Bearer {KEY}"}
                urllib.request.urlopen(urllib.request.Request(f"{server.url}/{path}", b"", headers), timeout=60).close()
            alive, traced = answers(server.url), "Traceback" in server.log
            deaths = len(daemon.deaths())
    for _, text in runs:
        print(text, end="", file=sys.stderr)
    requests = sum(count for count, _ in runs)
    bars = [
        Bar(f"requests, at least {LEAST_REQUESTS:,}", f"{requests:,}", requests >= LEAST_REQUESTS),
        Bar("runs with a finding", str(sum(bool(text) for _, text in runs)), not any(text for _, text in runs)),
        Bar("tracebacks in the server's log", "yes" if traced else "none", not traced),
        Bar("deaths of the core", str(deaths), not deaths),
        Bar("answers at the end", "yes" if alive else "no", alive),
    ]
    return conclude(bars, {"requests": requests}, args, "serving.md")


if __name__ == "__main__":
    sys.exit(main())
