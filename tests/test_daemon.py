"""A real daemon on the embedded model, started and used from outside."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import tempfile
import termios
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from daemons import COMMAND, PATIENCE_S, Daemon, run, short_folder, until
from mainspring import LLM, SamplingParams
from mainspring.ipc.errors import NotPermittedError
from mainspring.ipc.keys import AllowedKey, append_allowed, new_keypair

GREEDY = SamplingParams(temperature=0, max_tokens=24)
QUESTION = "What is two plus three?"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon for all tests that do not change it, or only kill its core."""
    with short_folder() as place:
        one = Daemon(place, "--http-port=0")
        try:
            one.ready = one.ready_line()  # type: ignore[attr-defined]
            yield one
            assert one.stop() == 0, one.log
            assert one.process.stdout is not None
            assert one.process.stdout.read() == "", "one line when it is ready, and no more"
        finally:
            one.end()


@pytest.fixture
def start() -> Iterator[Callable[..., Daemon]]:
    """Starts a separate daemon for one test."""
    started: list[Daemon] = []

    def make(*arguments: str, **more: str) -> Daemon:
        started.append(Daemon(folder, *arguments, **more))
        return started[-1]

    with short_folder() as folder:
        yield make
        for one in started:
            one.end()


def test_the_line_when_it_is_ready_tells_how_to_connect(daemon: Daemon) -> None:
    line: str = daemon.ready  # type: ignore[attr-defined]
    assert line.count(daemon.address) == 2
    assert f"mainspring generate --connect {daemon.address} " in line


def test_a_frontend_gets_the_tokens_that_a_core_of_its_own_would_give(daemon: Daemon) -> None:
    with LLM(enable_prefix_caching=False) as own:
        expected = own.generate(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text
    done = run("generate", "--connect", daemon.address, "--temperature=0", "--max-tokens=24", QUESTION)
    assert (done.returncode, done.stdout.strip()) == (0, expected.strip()), done.stderr
    done = run("generate", "--connect", daemon.address, "--temperature=0", "--max-tokens=24", QUESTION, "Hello")
    assert done.stdout.startswith(f"> {QUESTION}\n{expected.strip()}\n")


def test_a_conversation_goes_over_the_daemon_too(daemon: Daemon) -> None:
    done = run("chat", "--connect", daemon.address, "--temperature=0", said="What is the capital of France?\n")
    assert "Paris" in done.stdout, done.stderr


@pytest.mark.slow
def test_status_tells_what_the_issue_asks_for(daemon: Daemon) -> None:
    with LLM(connect=daemon.address, name="me", weight=2.0) as llm:
        llm.generate(QUESTION, GREEDY, use_tqdm=False)
        until(lambda: any(one["name"] == "me" and one["generation_tokens"] for one in daemon.status()[1]["frontends"]))
        code, found = daemon.status()
    assert code == 0
    assert found["phase"] == "serving"
    assert found["supervisor_pid"] == daemon.process.pid
    assert psutil.Process(found["core_pid"]).ppid() == daemon.process.pid
    assert found["model"].endswith("model")
    assert found["epoch"] == found["restarts"] + 1
    assert {"last_crash", "num_running", "num_waiting", "num_blocks", "kv_cache_usage", "tokens_per_s"} <= found.keys()
    (mine,) = [one for one in found["frontends"] if one["name"] == "me"]
    assert mine["weight"] == 2.0
    done = run("status", daemon.address)
    assert done.returncode == 0
    assert done.stdout.startswith("serving")
    assert "KV cache" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("way", ["q", "Ctrl-C"])
def test_top_stays_until_q_or_ctrl_c_and_leaves_the_terminal_as_it_was(daemon: Daemon, way: str) -> None:
    controller, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    process = subprocess.Popen([*COMMAND, "top", daemon.address], stdin=terminal, stdout=terminal)
    try:
        shown = b""
        while shown.count(b"KV cache") < 2:
            shown += os.read(controller, 4096)
        if way == "q":
            os.write(controller, b"q")
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        assert termios.tcgetattr(terminal) == before
    finally:
        process.kill()
        os.close(controller)
        os.close(terminal)


def test_a_second_daemon_is_refused_and_the_first_goes_on(daemon: Daemon) -> None:
    done = run("daemon", "--listen", daemon.address)
    assert done.returncode == 4
    assert done.stderr.startswith(f"mainspring: error: {daemon.address} is in use by process {daemon.process.pid}")
    assert done.stderr.count("\n") == 1
    assert daemon.status()[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--max-num-seqs=3"], 2, "max_num_seqs is given beside connect"),
        (["--model=/no/such"], 2, "model mismatch"),
    ],
)
def test_engine_options_are_the_daemons_to_set(daemon: Daemon, arguments: list[str], code: int, words: str) -> None:
    done = run("generate", "--connect", daemon.address, *arguments, "hi")
    assert done.returncode == code
    assert words in done.stderr


def test_what_changes_the_engine_for_everyone_needs_the_admin_socket(daemon: Daemon) -> None:
    with LLM(connect=daemon.address) as llm, pytest.raises(NotPermittedError, match="admin"):
        llm.reset_prefix_cache()
    with LLM(connect=f"{daemon.address}.admin") as llm:
        assert llm.reset_prefix_cache()


def http_code(daemon: Daemon, path: str) -> int:
    port = re.findall(r"http://127\.0\.0\.1:(\d+)/healthz", daemon.log)[0]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".admin"])
def test_a_daemon_is_not_ready_while_a_socket_file_is_missing(daemon: Daemon, suffix: str) -> None:
    pid = daemon.status()[1]["core_pid"]
    path = Path(daemon.address.removeprefix("ipc://") + suffix)
    os.kill(pid, signal.SIGSTOP)  # so that the core makes it again only when it is told to go on
    try:
        path.unlink()
        assert (http_code(daemon, "/healthz"), http_code(daemon, "/readyz")) == (200, 503)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: http_code(daemon, "/readyz") == 200)
    assert path.is_socket()
    until(lambda: f"the socket file of ipc://{path} was deleted: it is made again" in daemon.log)
    with LLM(connect=f"ipc://{path}") as llm:
        assert llm.generate("Hi", SamplingParams(max_tokens=1))
    assert daemon.status()[1]["core_pid"] == pid


@pytest.mark.slow
def test_a_core_that_dies_is_started_again_and_the_daemon_is_well_meanwhile(daemon: Daemon) -> None:
    get = partial(http_code, daemon)
    before = daemon.status()[1]
    assert (get("/healthz"), get("/readyz")) == (200, 200)
    os.kill(before["core_pid"], signal.SIGKILL)
    until(lambda: get("/readyz") == 503)
    assert get("/healthz") == 200
    until(lambda: get("/readyz") == 200)
    code, after = daemon.status()
    assert code == 0
    assert (after["epoch"], after["restarts"]) == (before["epoch"] + 1, before["restarts"] + 1)
    assert "SIGKILL" in after["last_crash"]
    assert after["core_pid"] != before["core_pid"]


def _said(systemd: socket.socket) -> bytes:
    """The daemon's next message to systemd that is not a watchdog ping."""
    while (said := systemd.recv(1000)).startswith(b"WATCHDOG=1"):
        pass
    return said


@pytest.mark.slow
def test_the_first_sigterm_lets_a_stream_end_and_tells_systemd(start: Callable[..., Daemon], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, tempfile.TemporaryDirectory() as folder:
        systemd.bind(f"{folder}/notify")
        systemd.settimeout(PATIENCE_S)
        daemon = start("--log-format=json", NOTIFY_SOCKET=f"{folder}/notify")
        daemon.ready_line()
        assert _said(systemd).startswith(b"READY=1\nSTATUS=serving at ipc://")
        stream = subprocess.Popen(
            [*COMMAND, "generate", "--connect", daemon.address, "--ignore-eos", "--max-tokens=400", "Tell me a story."],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert stream.stdout is not None
        assert stream.stdout.read(1)
        assert daemon.stop() == 0, daemon.log
        assert _said(systemd) == b"STOPPING=1"
    rest = stream.communicate(timeout=PATIENCE_S)[0]
    assert stream.returncode == 0
    assert len(rest.split()) > 60
    for line in daemon.log.splitlines():
        assert {"level", "message", "process"} <= json.loads(line).keys()


@pytest.mark.slow
def test_the_second_sigterm_ends_everything_at_once(start: Callable[..., Daemon]) -> None:
    daemon = start("--drain-timeout=3600")
    daemon.ready_line()
    with LLM(connect=daemon.address, reconnect_timeout=0.1) as llm:
        llm.llm_engine.add_request("a", "Tell me a story.", SamplingParams(max_tokens=3900, ignore_eos=True))
        llm.llm_engine.step()
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: daemon.status()[1]["phase"] == "draining")
        assert daemon.status()[0] == 1
        assert daemon.stop() == 0, daemon.log


@pytest.mark.slow
def test_a_daemon_that_was_killed_leaves_nothing_in_the_way_of_the_next(start: Callable[..., Daemon]) -> None:
    first = start()
    until(lambda: first.status()[0] == 1, lambda: first.log)  # it holds the address, but its core does not serve yet
    first.ready_line()
    core = psutil.Process(first.status()[1]["core_pid"])
    assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    core.wait(PATIENCE_S)
    Path(first.address.removeprefix("ipc://")).touch()
    assert first.status()[0] == 2
    second = start()
    second.ready_line()
    assert second.status()[0] == 0
    assert second.stop(signal.SIGINT) == 0


@pytest.mark.slow
def test_a_signal_while_it_starts_is_no_failure(start: Callable[..., Daemon]) -> None:
    daemon = start()
    until(lambda: daemon.status()[0] == 1, lambda: daemon.log)
    assert daemon.stop() == 0, daemon.log
    assert "Traceback" not in daemon.log


@pytest.mark.slow
def test_a_core_that_dies_too_often_is_exit_code_3(start: Callable[..., Daemon]) -> None:
    daemon = start("--max-restarts=0")
    daemon.ready_line()
    os.kill(daemon.status()[1]["core_pid"], signal.SIGSEGV)
    assert daemon.process.wait(PATIENCE_S) == 3
    assert "the limit is max_restarts, 0" in daemon.log.splitlines()[-1]
    assert "Segmentation fault" in daemon.log, "the core's last traceback"


@pytest.mark.slow
def test_a_core_that_does_not_start_is_exit_code_1_and_its_own_error(start: Callable[..., Daemon]) -> None:
    daemon = start("--num-gpu-blocks-override=1")
    assert daemon.process.wait(PATIENCE_S) == 1, daemon.log
    assert daemon.log.splitlines()[-1].startswith("mainspring: error: ")


@pytest.mark.slow
def test_over_tcp_only_listed_keys_are_let_in(start: Callable[..., Daemon], tmp_path: Path) -> None:
    server, laptop = new_keypair(tmp_path / "server.key"), new_keypair(tmp_path / "laptop.key")
    new_keypair(tmp_path / "stranger.key")
    append_allowed(tmp_path / "allowed", laptop.public, AllowedKey("laptop", weight=2.0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    daemon = start(
        f"--key={tmp_path}/server.key",
        f"--allowed-keys={tmp_path}/allowed",
        listen=f"tcp://127.0.0.1:{port}",
    )
    assert f"--server-key '{server.public}'" in daemon.ready_line()
    connect = ["--connect", daemon.address, f"--server-key={tmp_path}/server.pub"]
    done = run("generate", *connect, f"--key={tmp_path}/laptop.key", QUESTION)
    assert done.returncode == 0, done.stderr
    assert daemon.status(f"--key={tmp_path}/laptop.key", f"--server-key={server.public}")[0] == 0
    done = run("generate", *connect, f"--key={tmp_path}/stranger.key", QUESTION)
    assert done.returncode == 1
    assert "mainspring keys allow" in done.stderr
    assert done.stderr.count("\n") == 1
    assert daemon.status()[0] == 2
    assert run("daemon", "--insecure", "--listen", daemon.address).returncode == 4
