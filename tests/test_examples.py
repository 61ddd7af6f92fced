"""Every program in examples/ runs and prints the expected output."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"
GUARD = 180.0  # seconds
SHOWS = {
    "chat": r"> What is the capital of France\?\nParis",
    "embeddings": r"1\.00 .*capital of France\?\n(.|\n)*first four dimensions: \[(.|\n)*for each token: \(10, 256\)",
    "logprobs": r"' P' \d+%(.|\n)*the whole answer: \d+(.|\n)*Once upon a time there was(.|\n)*without foxes: ",
    "lora": r"adapter none: (.*)\nadapter random: (?!\1).*\nin memory: \{1\}",
    "many_frontends": r"program \d: (.|\n)*were served by the core of one daemon",
    "metrics": r"generation_tokens",
    "offline_batch": r"What is 1 plus 6\? -> ",
    "prefix_caching": r"\n +640 of 652 prompt tokens were cached(.|\n)*after a reset: 0",
    "priority": r"urgent was number 1\n",
    "profiling": r"execute +\d+\.\d ms\n(.|\n)*the whole trace: ",
    "streaming": r"bear: .* \(abort\)",
    "training_loop": r"step 0: Lima \| 5\n(.|\n)*step 2: .*\nasleep: False",
    "structured_output": r"its country: (France|Japan|Peru)\n(.|\n)*-> \+\d\d \d{3} \d{4}\n(.|\n)*-> (yes|no)\n",
}


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*SHOWS, "async_service"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWS)
def test_an_example_prints_the_expected_output(name: str) -> None:
    command = [sys.executable, "-P", str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(SHOWS[name], done.stdout), done.stdout


@pytest.mark.slow
def test_the_service_answers_line_by_line() -> None:
    command = [sys.executable, "-P", str(FOLDER / "async_service.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            assert "listening" in service.stdout.readline()
            with socket.create_connection(("localhost", 8765), timeout=GUARD) as user, user.makefile("rw") as lines:
                lines.write("What is the capital of France?\n")
                lines.flush()
                assert "Paris" in lines.readline()
        finally:
            service.terminate()
            deadline = time.monotonic() + GUARD
            while service.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
