"""The status of a core as lines, as JSON, and as a frame of `top`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from mainspring.cli.main import main
from mainspring.ipc.errors import ConnectError
from mainspring.ipc.messages import CoreStatus, FrontendStatus, Latency, Stats
from mainspring.ipc.transport import lock_address
from mainspring.serve.status import document, frame, is_ready, look
from tiers import fast_only

CORE = CoreStatus(
    epoch=3,
    core_pid=11,
    supervisor_pid=10,
    phase="serving",
    model="/models/one",
    restarts=2,
    last_crash="2026-01-01 00:00:00 by signal SIGSEGV",
    uptime_s=90.0,
    num_blocks=2000,
    tokens_per_s=1234.5,
    time_to_first_token=Latency(0.0125, 0.5, 2.0),
    inter_token_latency=Latency(0.001, 0.002, 0.003),
    stats=Stats(num_running=5, num_waiting=7, kv_cache_usage=0.25, prefix_queries=1000, prefix_hits=400),
    frontends=[
        FrontendStatus(0, "small", 1.0, 1, 0, 100, 50),
        FrontendStatus(1, "\x1b[2Jbad[red]", 2.5, 4, 7, 90_000, 12_345, slow=True),
    ],
)


@pytest.fixture(autouse=True)
def put_back_what_main_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_LOG_LEVEL", "WARNING")


def drawn(core: CoreStatus | int, speeds: Sequence[float] = (), trouble: str = "") -> str:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  # as long as the test
    console.print(frame(core, speeds, trouble))
    return console.export_text()


def test_json_is_one_flat_object_of_all_that_is_known() -> None:
    found = document(CORE)
    assert json.loads(json.dumps(found)) == found
    assert {name: found[name] for name in ("epoch", "core_pid", "supervisor_pid", "model", "phase", "restarts")} == {
        "epoch": 3,
        "core_pid": 11,
        "supervisor_pid": 10,
        "model": "/models/one",
        "phase": "serving",
        "restarts": 2,
    }
    assert found["last_crash"].endswith("SIGSEGV")
    assert (found["num_running"], found["num_waiting"], found["kv_cache_usage"]) == (5, 7, 0.25)
    assert (found["num_blocks"], found["tokens_per_s"]) == (2000, 1234.5)
    assert found["time_to_first_token"] == {"p50": 0.0125, "p95": 0.5, "p99": 2.0}
    assert found["frontends"][0]["name"] == "small"
    assert found["frontends"][1]["num_waiting"] == 7


def test_the_text_for_people_has_no_terminal_control_characters() -> None:
    text = drawn(CORE)
    assert text.startswith("serving")
    for words in ("/models/one", "5 running", "1,234 tokens/s", "12.5 ms", "2.00 s", "25% of 2,000", "40%", "SIGSEGV"):
        assert words in text
    for words in ("11 of daemon 10", "up 90 s", "3, 2 restarts", "2.5", "12,345", "90,000", "slow"):
        assert words in text
    assert "?[2Jbad[red]" in text
    assert "\x1b" not in text


def test_a_frame_has_a_bar_for_each_speed_and_the_busiest_frontend_first() -> None:
    text = drawn(CORE, [0.0, 50.0, 100.0], "no answer")
    assert "▁▅█" in text
    assert text.index("bad") < text.index("small")
    assert text.rstrip().endswith("no answer")
    assert "▁▁" in drawn(CORE, [0.0, 0.0])


def test_no_prompt_looked_up_is_no_division_by_zero() -> None:
    idle = CoreStatus(1, 11, 10, "loading")
    assert "0%" in drawn(idle)


@pytest.mark.parametrize(
    ("phase", "ready"),
    [("serving", True), ("calling", True), ("paused", True), ("loading", False), ("draining", False)],
)
def test_ready_is_a_core_that_takes_requests(phase: str, ready: bool) -> None:
    assert is_ready(CoreStatus(1, 11, 10, phase)) is ready


def test_an_address_that_a_daemon_holds_without_a_core_is_starting(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core.sock"
    with pytest.raises(ConnectError, match="start one with mainspring daemon"):
        look(address, timeout=0.1)
    lock = lock_address(address)
    assert lock is not None
    found = look(address, timeout=0.1)
    assert found == os.getpid()
    assert not is_ready(found)
    assert drawn(found).startswith(f"starting: daemon {os.getpid()} ")
    assert drawn(found, trouble="no answer").startswith("no answer")
    assert document(found) == {"phase": "starting", "supervisor_pid": os.getpid()}
    os.close(lock)
    with pytest.raises(ConnectError):
        look(address, timeout=0.1)


@pytest.mark.parametrize(
    "address", fast_only(["nonsense"], ["ipc:///no/such/folder/core.sock", "tcp://127.0.0.1:9", "nonsense"])
)
def test_no_daemon_gives_exit_code_2_and_a_phase(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", address]) == 2
    said = capsys.readouterr().out
    assert said.startswith("unreachable: ")
    assert ("check --key and --server-key" in said) is address.startswith("tcp"), "who needs keys seems not to be there"
    assert main(["status", address, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["phase"] == "unreachable"
    assert main(["top", address]) in (1, 2)
    assert capsys.readouterr().err.startswith("mainspring: error: ")
