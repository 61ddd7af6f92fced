"""examples/node-client, which was written from docs/protocol.md alone, against a real daemon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mainspring import LLM, SamplingParams
from mainspring.ipc.connection import ask_status

CLIENT = Path(__file__).resolve().parent.parent / "examples" / "node-client"
INSTALL_S, RUN_S = 180, 200  # guards against hanging
PROMPT = [5, 6, 7, 300]
Stream = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with its packages, outside the tree."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node.js and npm are not installed")
    if int(subprocess.check_output([node, "--version"], text=True).lstrip("v").split(".")[0]) < 20:
        pytest.skip("Node.js is older than 20")
    folder = tmp_path_factory.mktemp("node-client")
    for name in ("package.json", "package-lock.json", "client.mjs", "stream.mjs"):
        shutil.copy(CLIENT / name, folder)
    install = [npm, "ci", "--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund"]
    try:
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm does not get an answer from its registry")
    if done.returncode:
        pytest.skip(f"npm can't install the packages: {done.stderr.strip()[-200:]}")
    if subprocess.run([node, "-e", "require('zeromq')"], cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip("the zeromq package has no library for this machine")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a daemon with the embedded model; not started if the client can't run."""
    address = f"ipc://{tmp_path_factory.mktemp('daemon')}/core.sock"
    command = [sys.executable, "-P", "-m", "mainspring.cli.main", "daemon", "--listen", address, "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            assert address in daemon.stdout.readline()
            yield address
        finally:
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(RUN_S) == 0


@pytest.fixture
def stream(folder: Path, address: str) -> Iterator[Stream]:
    """Starts `stream.mjs` with options."""
    started = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = ["node", "stream.mjs", *options, address, *map(str, PROMPT)]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[list[int], dict[str, Any]]:
    """The tokens, one on each line, and the object on the last line."""
    assert process.stdout is not None
    assert process.stderr is not None
    *tokens, last = process.stdout.read().splitlines()  # `communicate` omits data that `readline` has read ahead
    assert (process.wait(RUN_S), process.stderr.read()) == (0, "")
    return [int(token) for token in tokens], json.loads(last)


@pytest.fixture(scope="module")
def python(address: str) -> Iterator[Callable[..., Any]]:
    """The completion from the Python client with these sampling parameters."""
    with LLM(connect=address, skip_tokenizer_init=True) as llm:
        yield lambda **params: llm.generate(
            [{"prompt_token_ids": PROMPT}], SamplingParams(detokenize=False, **params), use_tqdm=False
        )[0].outputs[0]


@pytest.mark.parametrize(
    ("options", "params"),
    [
        (["--temperature=0"], {"temperature": 0.0}),
        (["--temperature=0.9", f"--seed={1 - 2**63}"], {"temperature": 0.9, "seed": 1 - 2**63}),
        (["--temperature=2.5", f"--seed={2**53 + 1}"], {"temperature": 2.5, "seed": 2**53 + 1}),
    ],
)
def test_it_streams_the_tokens_that_the_python_client_gets(
    stream: Stream, python: Callable[..., Any], options: list[str], params: dict[str, Any]
) -> None:
    expected = python(max_tokens=60, **params)
    tokens, end = finish(stream("--max-tokens=60", *options))
    assert tokens == end["token_ids"] == expected.token_ids
    assert end["reason"] == expected.finish_reason


def test_a_stop_token_ends_the_stream_and_is_named(stream: Stream, python: Callable[..., Any]) -> None:
    stop = python(max_tokens=10, temperature=0.0, ignore_eos=True).token_ids[5]
    expected = python(max_tokens=10, temperature=0.0, ignore_eos=True, stop_token_ids=[stop])
    tokens, end = finish(stream("--max-tokens=10", "--ignore-eos", f"--stop={stop}"))
    assert (end["reason"], end["stop_token"]) == ("stop", stop)
    assert tokens == expected.token_ids


@pytest.mark.slow
def test_an_abort_ends_the_stream_by_the_cores_word(stream: Stream, address: str) -> None:
    tokens, end = finish(stream("--max-tokens=3000", "--ignore-eos", "--abort-after=3"))
    assert 3 <= len(tokens) < 3000
    epochs = [ask_status(address).core.epoch]
    said = {"reason": "abort", "stop_token": None, "error": "", "error_text": "", "epochs": epochs}
    assert end == {"token_ids": tokens, **said}


@pytest.mark.slow
def test_a_request_that_is_refused_says_why(stream: Stream) -> None:
    process = stream("--max-tokens=5", "--stop=99999999")
    out, _ = process.communicate(timeout=RUN_S)
    end = json.loads(out)
    assert (process.returncode, end["reason"], end["error"]) == (1, "error", "InvalidRequestError")
    assert "99999999" in end["error_text"]


@pytest.mark.slow
def test_streams_go_on_with_the_same_tokens_when_the_core_is_killed(stream: Stream, address: str) -> None:
    asks = [("--max-tokens=1200", "--ignore-eos", *more) for more in ((), ("--temperature=1", "--seed=-5"))]
    undisturbed = [finish(process)[0] for process in [stream(*ask) for ask in asks]]
    before = ask_status(address).core
    streams = [stream(*ask) for ask in asks]
    begun = [[int(process.stdout.readline()) for _ in range(20)] for process in streams if process.stdout]
    os.kill(before.core_pid, signal.SIGKILL)
    for process, first, expected in zip(streams, begun, undisturbed, strict=True):
        rest, end = finish(process)
        assert end["epochs"] == [before.epoch, before.epoch + 1], "the stream did not span the kill"
        assert first + rest == end["token_ids"] == expected
        assert end["reason"] == "length"
