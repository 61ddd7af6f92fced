"""A shorter run of `make chaos`: the same program, the same bars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parent.parent / "benchmarks" / "chaos.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_streams_outlive_cores_daemons_and_other_frontends(tmp_path: Path) -> None:
    result = tmp_path / "chaos.json"
    command = [sys.executable, str(CHAOS), "--kills", "5", "--threads", "1", "--json", str(result)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)  # the seed is there
    assert done.returncode == 0
    kinds = {kill["kind"] for kill in json.loads(result.read_text())["kills"]["kills"]}
    assert kinds == {"SIGKILL", "SIGSEGV", "SIGSTOP", "exception", "allocation"}
