"""Core processes that die in every way, under the real supervisor: streams continue, the request to blame is found, and
requests that can't continue end with a reason. The processes are those of stand_in_process.py, which start fast;
test_engine_recovery.py has real models."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import stand_in_process
from mainspring.ipc.async_client import AsyncClient
from mainspring.ipc.config import EngineConfig, ModelConfig, ServiceConfig
from mainspring.ipc.connection import Connection
from mainspring.ipc.core_group import EmbeddedCores
from mainspring.ipc.errors import EngineDeadError, EngineStartError, InvalidArgumentError
from mainspring.ipc.journal import Phase
from mainspring.ipc.messages import AddRequest, Finished, Sampling
from mainspring.ipc.supervisor import Supervisor
from mainspring.ipc.sync_client import SyncClient
from mainspring.ipc.transport import Endpoints, ipc_address, make_runtime_dir, remove_runtime_dir
from stand_in_process import EXIT, HANG, HARMLESS, KILL, RAISE, SEGV
from wire import collect, eventually, take

GUARD = 120.0  # seconds
LONG = 1_000_000


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = children()  # another module's tests may have left some
    yield
    assert children() <= before


@pytest.fixture(autouse=True)
def fast_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_process.replace_cores(tmp_path, monkeypatch)


def config(model: str | None = None, **service: Any) -> EngineConfig:
    return EngineConfig(model_config=ModelConfig(model=model), service_config=ServiceConfig(**service))


class Supervised:
    """A client, and the supervisor of its cores."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = EmbeddedCores(config)
        self.supervisor = self.core.supervisor
        self.client = SyncClient(Connection(self.core))

    def order(self, method: str, *args: Any) -> None:
        """Send a call without waiting for its answer."""
        self.client._with_socket(lambda: self.client._connection.start_call(method, args))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill the core once it runs, and wait until the supervisor has recorded its death."""
        assert eventually(lambda: self.supervisor.ready, GUARD)
        restarts = self.supervisor.launch.restarts
        os.kill(self.supervisor.core_pid or 0, number)
        assert eventually(lambda: self.supervisor.launch.restarts > restarts or self.supervisor.dead_error, GUARD)

    def clear_suspects(self) -> None:
        """Wait until no suspect is left: a request with two deaths alone would have failed."""
        assert eventually(lambda: self.client.call("suspects", timeout=GUARD) == 0, GUARD)


@pytest.fixture
def start() -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def make(**options: Any) -> Supervised:
        started.append(Supervised(config(**options)))
        return started[-1]

    yield make
    for one in started:
        one.client.close()


def poisoned(handle: int, how: int, at: int = 0, max_tokens: int = 20) -> AddRequest:
    return AddRequest(handle, "", [handle * 1000, how, at], Sampling(max_tokens))


def harmless(handle: int, max_tokens: int = 200) -> AddRequest:
    return poisoned(handle, HARMLESS, 0, max_tokens)


def finish(client: SyncClient, count: int) -> tuple[dict[int, list[int]], dict[int, Finished]]:
    """Tokens and ends of all requests; checks that each ends once."""
    tokens: dict[int, list[int]] = {handle: [] for handle in range(count)}
    ended: dict[int, Finished] = {}
    while len(ended) < count:
        outputs = client.get_outputs(GUARD)
        assert outputs is not None, f"{count - len(ended)} requests did not end"
        take(outputs, tokens)
        assert not {f.handle for f in outputs.finished} & set(ended)
        ended.update({f.handle: f for f in outputs.finished})
    return tokens, ended


def whole(handle: int, max_tokens: int = 200) -> list[int]:
    return list(range(handle * 1000, handle * 1000 + max_tokens))


# ---------------------------------------------------------------------- a core dies, the next goes on


@pytest.mark.slow
def test_streams_go_on_however_their_core_dies_and_the_log_says_how(
    start: Callable[..., Supervised], caplog: pytest.LogCaptureFixture
) -> None:
    one = start()
    for handle in range(8):
        one.client.add_request(harmless(handle, 3000))
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(finish, one.client, 8)
        assert eventually(lambda: one.client._has_reader)
        first = one.supervisor.core_pid
        one.kill(signal.SIGKILL)
        assert one.supervisor.launch.last_crash.endswith(" by signal SIGKILL")
        assert f"the core (pid {first}) ended by signal SIGKILL" in caplog.text
        one.clear_suspects()
        one.kill(signal.SIGSEGV)
        assert one.supervisor.launch.last_crash.endswith(" by signal SIGSEGV")
        assert "Fatal Python error: Segmentation fault" in caplog.text
        assert "(most recent call first)" in caplog.text, "the stack"
        one.clear_suspects()
        one.order("die_in_step", RAISE)
        tokens, ended = reading.result(GUARD)
    assert one.supervisor.launch.last_crash.endswith(" with exit code 1")
    assert "RuntimeError: this step fails" in caplog.text
    assert tokens == {handle: whole(handle, 3000) for handle in range(8)}
    assert {f.reason for f in ended.values()} == {"length"}
    assert (one.supervisor.launch.restarts, one.supervisor.launch.epoch) == (3, 4)
    assert one.client._connection.reconnections >= 1


@pytest.mark.slow
def test_a_death_outside_a_step_blames_no_request(start: Callable[..., Supervised]) -> None:
    one = start()
    for _ in range(2):
        one.kill()
    one.client.add_request(harmless(0))
    assert collect(one.client, 1, GUARD) == {0: whole(0)}
    assert not one.supervisor.siblings._suspects.suspects


@pytest.mark.slow
def test_the_next_core_repeats_what_the_first_found_out(start: Callable[..., Supervised]) -> None:
    one = start()
    facts = one.client.call("facts")
    one.kill()
    assert one.client.call("facts", timeout=GUARD) == facts
    one.kill()
    assert one.client.call("facts", timeout=GUARD) == facts


@pytest.mark.slow
def test_state_set_by_users_outlives_the_core(start: Callable[..., Supervised]) -> None:
    one = start()
    one.client.call("pause_generation", "keep", False)
    one.kill()
    one.client.add_request(harmless(0))
    assert one.client.get_outputs(timeout=1.0) is None
    one.client.call("resume_generation", timeout=GUARD)
    one.kill()
    assert collect(one.client, 1, GUARD)[0][-1] == 199


@pytest.mark.slow
def test_an_async_client_has_a_supervised_core_too() -> None:
    import asyncio

    client = AsyncClient.launch(config())

    async def main() -> None:
        for handle in range(2):
            await client.add_request(harmless(handle, 500))
        await client.get_outputs()
        os.kill(client._connection._core.supervisor.core_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        ended = 0
        while ended < 2:
            ended += len((await asyncio.wait_for(client.get_outputs(), GUARD)).finished)
        client.close()

    asyncio.run(main())


# ---------------------------------------------------------------------- whoever is to blame


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "crashes", "cause"),
    [
        (SEGV, 3, "by signal SIGSEGV"),
        (RAISE, 3, "with exit code 1"),
        (EXIT, 3, "with exit code 7"),
        (KILL, 4, "by signal SIGKILL"),
    ],
    ids=["segv", "exception", "exit", "kill"],
)
def test_a_request_that_kills_its_core_fails_alone_and_soon_and_all_others_finish(
    start: Callable[..., Supervised], how: int, crashes: int, cause: str
) -> None:
    one = start()
    one.client.add_request(poisoned(0, how))
    for handle in range(1, 6):
        one.client.add_request(harmless(handle))
    tokens, ended = finish(one.client, 6)
    assert (ended[0].reason, ended[0].error) == ("error", "RequestFailedError")
    assert ended[0].error_text == (
        f"the core died {crashes - 1} times while it computed this request alone, at output token 0; "
        f"the last time {cause}"
    )
    assert tokens == {0: [], **{handle: whole(handle) for handle in range(1, 6)}}
    assert one.supervisor.launch.restarts == crashes


@pytest.mark.slow
def test_one_that_kills_in_the_middle_of_its_output_keeps_what_it_has_and_fails(
    start: Callable[..., Supervised],
) -> None:
    one = start()
    one.client.add_request(poisoned(0, SEGV, at=7))
    one.client.add_request(harmless(1, 1000))
    tokens, ended = finish(one.client, 2)
    assert "at output token 7" in ended[0].error_text
    assert tokens[1] == whole(1, 1000)
    kept = len(tokens[0])  # the core may die before its last outputs have left it
    assert 0 < kept <= 7
    assert tokens[0] == whole(0, kept)


@pytest.mark.slow
def test_two_that_kill_are_both_found(start: Callable[..., Supervised]) -> None:
    one = start()
    for handle, how in enumerate((SEGV, HARMLESS, RAISE, HARMLESS)):
        one.client.add_request(poisoned(handle, how))
    tokens, ended = finish(one.client, 4)
    assert {handle: f.reason for handle, f in ended.items()} == {0: "error", 1: "length", 2: "error", 3: "length"}
    assert tokens[1] == whole(1, 20)
    assert one.supervisor.launch.restarts <= 3 + 3


@pytest.mark.slow
def test_a_frontend_that_comes_back_hears_of_its_quarantined_request_only(start: Callable[..., Supervised]) -> None:
    """A request with the same handle in another session is a different request."""
    one = start()
    other = SyncClient(Connection(one.core))
    one.client.add_request(poisoned(0, SEGV))
    other.add_request(harmless(0))
    assert finish(other, 1)[0] == {0: whole(0)}
    assert finish(one.client, 1)[1][0].reason == "error"
    other._connection._core = type("Shared", (), {"close": lambda self: None})()  # only the first may end the core
    other.close()


# ---------------------------------------------------------------------- hangs


@pytest.mark.slow
def test_a_core_that_hangs_is_killed_and_the_log_says_where_it_hung(
    start: Callable[..., Supervised], caplog: pytest.LogCaptureFixture
) -> None:
    one = start(watchdog_timeout=2.0)
    one.client.add_request(harmless(0))
    one.order("die_in_step", HANG)
    assert collect(one.client, 1, GUARD) == {0: whole(0)}
    assert one.supervisor.launch.last_crash.endswith(" by hanging")
    assert "has made no progress for" in caplog.text
    assert "in die\n" in caplog.text


@pytest.mark.slow
def test_a_core_that_is_stopped_is_killed_too(
    start: Callable[..., Supervised], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.ipc.supervisor.ABORT_SECONDS", 0.1)
    one = start(watchdog_timeout=2.0)
    one.kill(signal.SIGSTOP)
    assert one.supervisor.launch.last_crash.endswith(" by hanging")
    assert one.client.call("echo", 1, timeout=GUARD) == [1]


@pytest.mark.slow
def test_a_call_may_take_what_it_takes_and_loading_as_well(
    start: Callable[..., Supervised], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.ipc.supervisor._LOOK_SECONDS", 0.01)
    one = start(watchdog_timeout=2.0)
    assert one.client.call("sleep", 3.0, timeout=GUARD) == [3.0]
    one.supervisor._journal.set_phase(Phase.LOADING)
    one.supervisor._journal._beats[:] = 0.0
    assert not one.supervisor._is_silent()
    assert one.supervisor.launch.restarts == 0


@pytest.mark.slow
def test_an_idle_core_is_not_taken_for_hanging(start: Callable[..., Supervised]) -> None:
    one = start(watchdog_timeout=3.0)  # its loop runs once a second
    time.sleep(4.0)  # nothing must happen in this time
    assert one.supervisor.launch.restarts == 0
    assert one.client.call("echo", 1) == [1]


# ---------------------------------------------------------------------- too often


@pytest.mark.slow
def test_past_max_restarts_it_stays_down_and_all_hear_why(start: Callable[..., Supervised]) -> None:
    one = start(max_restarts=2)
    one.client.add_request(harmless(0, LONG))
    for _ in range(3):
        one.kill()
    says = r"the core ended by signal SIGKILL, after 2 restarts within 600 s; the limit is max_restarts, 2"
    with pytest.raises(EngineDeadError, match=says):
        collect(one.client, 1, GUARD)
    assert one.client.error is not None


@pytest.mark.slow
def test_deaths_that_end_in_a_quarantine_do_not_count(start: Callable[..., Supervised]) -> None:
    one = start(max_restarts=4)
    for handle in range(2):
        one.client.add_request(poisoned(handle, SEGV))
    one.client.add_request(harmless(2))
    tokens, ended = finish(one.client, 3)
    assert [ended[handle].reason for handle in range(3)] == ["error", "error", "length"]
    assert tokens[2] == whole(2)
    assert one.supervisor.launch.restarts > 4


@pytest.mark.slow
def test_restarts_longer_ago_than_the_window_do_not_count(start: Callable[..., Supervised]) -> None:
    one = start(max_restarts=1, restart_window=0.0)
    for _ in range(3):
        one.kill()
    assert one.client.call("echo", 1, timeout=GUARD) == [1]


@pytest.mark.slow
def test_a_core_that_does_not_start_again_is_tried_again_and_named_with_its_own_error(
    start: Callable[..., Supervised], tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text("")
    one = start(model=str(script), max_restarts=3)
    script.write_text("the disk is full")
    one.kill()
    assert eventually(lambda: one.supervisor.launch.restarts >= 2, GUARD)
    assert one.supervisor.launch.last_crash.endswith(" with exit code 1 while it started: the disk is full")
    script.write_text("")
    assert one.client.call("echo", 1, timeout=GUARD) == [1]
    script.write_text("the disk is full again")
    with pytest.raises(EngineDeadError, match=r"while it started: the disk is full again, after 3 restarts"):
        one.client.call("die_now", KILL, timeout=GUARD)


# ---------------------------------------------------------------------- starting and stopping


def test_what_keeps_the_first_core_from_starting_is_raised_under_its_own_type(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("this is wrong with it")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidArgumentError, match="this is wrong with it"):
        EmbeddedCores(config(str(script)))
    assert set(os.listdir("/proc/self/fd")) <= before


class Alone:
    """A supervisor as in a daemon, and a thread that runs it."""

    def __init__(self, config: EngineConfig, drain_timeout: float = 0.0) -> None:
        self.folder = make_runtime_dir()
        self.address = ipc_address(self.folder)
        self.supervisor = Supervisor(config, Endpoints(self.address), drain_timeout=drain_timeout)
        self.thread = threading.Thread(target=self.supervisor.run)

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.stop()
        self.supervisor.stop()
        if self.thread.is_alive():
            self.thread.join()
        remove_runtime_dir(self.folder)


def test_a_core_that_loads_can_be_stopped(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("wait")
    with Alone(config(str(script))) as one, ThreadPoolExecutor() as pool:
        starting = pool.submit(one.supervisor.start)
        assert eventually(lambda: one.supervisor.phase is Phase.LOADING, GUARD)
        one.supervisor.stop()
        with pytest.raises(EngineStartError, match="while it started"):
            starting.result(GUARD)


@pytest.mark.slow
def test_a_core_that_loads_again_can_be_stopped(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("")
    with Alone(config(str(script))) as one:
        one.supervisor.start()
        one.thread.start()
        script.write_text("wait")
        os.kill(one.supervisor.core_pid or 0, signal.SIGKILL)
        assert eventually(lambda: one.supervisor.launch.epoch == 2 and one.supervisor.phase is Phase.LOADING, GUARD)
        one.supervisor.stop()
        one.thread.join(GUARD)
        assert not one.thread.is_alive()


@pytest.mark.slow
def test_a_supervisor_that_waits_before_the_next_start_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.ipc.supervisor.SETTLED_SECONDS", 600.0)
    waits: list[float] = []
    wait = Supervisor._wait_to_restart
    monkeypatch.setattr(
        Supervisor, "_wait_to_restart", lambda self, seconds: waits.append(seconds) or wait(self, 600 if seconds else 0)
    )
    with Alone(config()) as one:
        one.supervisor.start()
        one.thread.start()
        os.kill(one.supervisor.core_pid or 0, signal.SIGKILL)
        assert eventually(lambda: one.supervisor.ready and one.supervisor.launch.epoch == 2, GUARD)
        os.kill(one.supervisor.core_pid or 0, signal.SIGKILL)
        assert eventually(lambda: len(waits) == 2, GUARD)
        assert waits[0] == 0.0 < waits[1], "the first at once, one that follows soon a little later"
        one.supervisor.stop()
        one.thread.join(GUARD)
        assert not one.thread.is_alive()


def test_stopping_lets_the_core_finish_what_it_has_accepted_and_leaves_the_rest_to_the_next() -> None:
    with Alone(config(), drain_timeout=GUARD) as one:
        one.supervisor.start()
        one.thread.start()
        client = SyncClient(Connection(one.address))
        client.add_request(harmless(0, 500))
        assert client.get_outputs(GUARD) is not None
        one.supervisor.stop()
        assert eventually(lambda: one.supervisor.phase is Phase.DRAINING, GUARD)
        client.add_request(harmless(1))
        one.thread.join(GUARD)
        assert not one.thread.is_alive()
        assert one.supervisor._process is not None
        assert one.supervisor._process.returncode == 0
        assert one.supervisor.dead_error is None
        assert collect(client, 1, GUARD)[0][-1] == 499
        assert set(client._connection._ledger) == {1}
        client.close()


@pytest.mark.slow
@pytest.mark.parametrize(("stops", "drain_timeout"), [(2, GUARD), (1, 0.2)], ids=["stopped twice", "past the limit"])
def test_draining_ends_by_a_second_stop_or_the_limit(stops: int, drain_timeout: float) -> None:
    with Alone(config(), drain_timeout=drain_timeout) as one:
        one.supervisor.start()
        one.thread.start()
        client = SyncClient(Connection(one.address))
        client.add_request(harmless(0, LONG))
        assert client.get_outputs(GUARD) is not None
        one.supervisor.stop()
        assert eventually(lambda: one.supervisor.phase is Phase.DRAINING or not one.thread.is_alive(), GUARD)
        if stops == 2:
            one.supervisor.stop()
        one.thread.join(GUARD)
        assert not one.thread.is_alive()
        client.close()


@pytest.mark.slow
def test_a_core_that_does_not_end_when_it_is_told_to_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainspring.ipc.supervisor.END_SECONDS", 0.2)
    with Alone(config(watchdog_timeout=0.0)) as one:
        one.supervisor.start()
        one.thread.start()
        os.kill(one.supervisor.core_pid or 0, signal.SIGSTOP)
        one.supervisor.stop()
        one.thread.join(GUARD)
        assert not one.thread.is_alive()


@pytest.mark.slow
def test_restarts_leave_no_descriptor_and_no_file(start: Callable[..., Supervised]) -> None:
    one = start()
    one.kill()
    assert one.client.call("echo", 1, timeout=GUARD) == [1]
    before, files = len(os.listdir("/proc/self/fd")), set(os.listdir(os.path.dirname(one.core.address[6:])))
    for _ in range(3):
        one.kill()
        assert one.client.call("echo", 1, timeout=GUARD) == [1]
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)
    assert set(os.listdir(os.path.dirname(one.core.address[6:]))) == files == {"core.sock"}
