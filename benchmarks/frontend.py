"""The cost of a frontend: import time, time to the embedded model's first token, resident memory, and imported
packages.

python benchmarks/frontend.py --runs 5
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import median

from report import publish, table

PROBE = """
import time
began = time.perf_counter()
from mainspring import LLM, LLMEngine, SamplingParams, EngineArgs
imported = time.perf_counter() - began
import json, psutil, sys
rss = lambda: psutil.Process().memory_info().rss / 2**20
after_import = rss()
began = time.perf_counter()
llm = LLM()
ready = time.perf_counter() - began
llm.generate(["17 + 25 ="], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
first = time.perf_counter() - began
heavy = [name for name in ("torch", "transformers") if name in sys.modules]
print(json.dumps([imported, after_import, ready, first, rss(), heavy]))
"""
BARE = "import psutil; print(psutil.Process().memory_info().rss / 2**20)"


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args()
    runs = [json.loads(python(PROBE).splitlines()[-1]) for _ in range(args.runs)]
    imported, after_import, ready, first, in_use = (median(values) for values in list(zip(*runs, strict=True))[:5])
    heavy = sorted({name for run in runs for name in run[5]})
    rows = [
        ["import of the public names", f"{imported:.3f} s"],
        ["`LLM()`, embedded model: ready", f"{ready:.2f} s"],
        ["… and the first token", f"{first:.2f} s"],
        ["resident memory of a bare Python", f"{float(python(BARE)):.0f} MiB"],
        ["… after the import", f"{after_import:.0f} MiB"],
        ["… after a request", f"{in_use:.0f} MiB"],
        ["of torch and transformers, loaded in the frontend", ", ".join(heavy) or "neither"],
    ]
    publish("frontend", table(["a frontend, median of fresh processes", ""], rows), args.write)
    if heavy:
        raise SystemExit("a frontend must stay thin")


if __name__ == "__main__":
    main()
