"""The blocking and the in-process client over a real server and socket, with a core without a model: nothing is lost,
no call hangs, and each failure is one clear error. Lost connections are tested in test_sessions.py and
test_recovery.py."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zmq

from mainspring.ipc import sync_client
from mainspring.ipc.connection import Connection
from mainspring.ipc.errors import EngineDeadError, InvalidRequestError, MainspringError, WrongProcessError
from mainspring.ipc.inproc_client import InprocClient
from mainspring.ipc.messages import Outputs
from mainspring.ipc.sync_client import SyncClient
from mainspring.ipc.transport import make_dealer, process_fd, readable
from stand_in_core import StandInCore, StandInOwner, open_descriptors, stand_in
from wire import PROMPTLY, collect, eventually, request, take


@pytest.fixture
def owner() -> Iterator[StandInOwner]:
    with stand_in() as owner:
        yield owner


@pytest.fixture
def client(owner: StandInOwner) -> Iterator[SyncClient]:
    client = SyncClient(Connection(owner))
    yield client
    client.close()


def test_tokens_come_in_order_and_every_request_ends_once(client: SyncClient) -> None:
    for handle in range(20):
        client.add_request(request(handle, max_tokens=1 + handle % 5, first=10 * handle))
    tokens = collect(client, 20)
    assert tokens == {handle: [10 * handle + i for i in range(1 + handle % 5)] for handle in range(20)}
    assert client.get_outputs(timeout=0.05) is None


def test_a_client_knows_model_and_config_as_the_core_has_them(client: SyncClient, owner: StandInOwner) -> None:
    assert client.model == owner.core.model
    assert client.config == owner.core.config


def test_an_abort_ends_a_request(client: SyncClient) -> None:
    client.add_request(request(0, max_tokens=10**9))
    client.add_request(request(1, max_tokens=10**9))
    client.get_outputs(PROMPTLY)
    client.abort([0, 1, 77])
    ended = []
    while len(ended) < 2:
        outputs = client.get_outputs(PROMPTLY)
        assert outputs is not None
        ended += [(finished.handle, finished.reason) for finished in outputs.finished]
    assert ended == [(0, "abort"), (1, "abort")]


def test_arrays_reach_the_core_as_they_are(client: SyncClient, owner: StandInOwner) -> None:
    arrays = [np.arange(300_000, dtype=np.float32), np.arange(5, dtype=np.int64)]
    client.add_request(request(0), arrays)
    collect(client, 1)
    assert owner.core.tensors == [array.tobytes() for array in arrays]


def test_a_call_returns_the_cores_value_or_raises_its_error(client: SyncClient) -> None:
    assert client.call("echo", 1, "two", [3.0, None], {"k": b"v"}) == [1, "two", [3.0, None], {"k": b"v"}]
    with pytest.raises(InvalidRequestError, match="this is refused"):
        client.call("refuse")
    with pytest.raises(MainspringError, match="KeyError: 'missing'"):
        client.call("fail")
    assert client.call("echo") == []


def test_waiting_has_a_limit(client: SyncClient) -> None:
    started = time.monotonic()
    assert client.get_outputs(timeout=0) is None
    assert client.get_outputs(timeout=0.1) is None
    assert 0.1 <= time.monotonic() - started < PROMPTLY


def test_a_call_that_takes_too_long_is_a_timeout_and_its_late_answer_is_dropped(client: SyncClient) -> None:
    with pytest.raises(TimeoutError, match=r"'sleep' within 0\.05 s"):
        client.call("sleep", 0.3, timeout=0.05)
    assert client.call("echo", 5) == [5]
    assert client._connection.results == {}


def test_a_call_returns_though_another_thread_waits_for_outputs(client: SyncClient) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get_outputs)
        assert eventually(lambda: client._has_reader)
        for i in range(50):
            assert client.call("echo", i, timeout=PROMPTLY) == [i]
        assert not waiting.done()
        client.add_request(request(0, max_tokens=1))
        outputs = waiting.result(PROMPTLY)
        assert outputs is not None
        assert outputs.token_ids == [100]


def test_threads_that_call_side_by_side_each_get_their_own_answer(client: SyncClient) -> None:
    def ask(thread: int) -> None:
        for i in range(100):
            assert client.call("echo", thread, i, timeout=30) == [thread, i]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))


def test_many_threads_that_add_step_and_call_at_once_lose_nothing(client: SyncClient) -> None:
    tokens: dict[int, list[int]] = defaultdict(list)
    ended: list[int] = []
    guard = threading.Lock()

    def add(thread: int) -> None:
        for i in range(60):
            client.add_request(request(thread * 1000 + i, max_tokens=3, first=thread * 1000 + i))
            if i % 10 == 0:
                assert client.call("echo", i, timeout=30) == [i]

    def step() -> None:
        while len(ended) < 240:
            with guard:  # keeps the order of outputs; another thread waits in `call` meanwhile
                outputs = client.get_outputs(timeout=0.2)
                if outputs is not None:
                    take(outputs, tokens)
                    ended.extend(finished.handle for finished in outputs.finished)

    with ThreadPoolExecutor(7) as pool:
        jobs = [pool.submit(add, thread) for thread in range(4)] + [pool.submit(step) for _ in range(3)]
        for job in jobs:
            job.result(60)
    assert len(ended) == len(set(ended)) == 240
    assert tokens == {handle: [handle, handle + 1, handle + 2] for handle in ended}


def test_a_waiting_thread_wakes_when_another_thread_receives_its_answer_while_sending(client: SyncClient) -> None:
    with ThreadPoolExecutor() as pool:
        for handle in range(150):
            waiting = pool.submit(client.get_outputs)
            client.add_request(request(handle, max_tokens=1))
            deadline = time.monotonic() + PROMPTLY
            while not waiting.done() and time.monotonic() < deadline:
                client.abort([])
            if not waiting.done():
                client.close()
            assert waiting.result().handles == [handle]


def test_a_thread_that_receives_the_answer_of_another_thread_wakes_it(
    client: SyncClient, owner: StandInOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread asleep in poll() may miss a descriptor that another reads in the same instant: here it always does."""
    monkeypatch.setattr(sync_client, "readable", lambda fds, timeout: readable([client._waker.fd], timeout))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get_outputs)
        assert eventually(lambda: client._has_reader)
        owner.server.send(0, Outputs([0], [1]))
        try:
            assert eventually(lambda: client._wait_for(lambda: None, 0) or waiting.done())
        finally:
            client.close()


def test_outputs_that_two_threads_wait_for_go_to_exactly_one(client: SyncClient) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.get_outputs, 0.5) for _ in range(2)]
        assert eventually(lambda: client._has_reader)
        client.add_request(request(0, max_tokens=1))
        got = [w.result(PROMPTLY) for w in waiting]
    assert sum(outputs is not None for outputs in got) == 1


# ---------------------------------------------------------------------- ends


def test_a_closed_client_says_so_and_closing_twice_is_closing_once(owner: StandInOwner) -> None:
    client = SyncClient(Connection(owner))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get_outputs)
        assert eventually(lambda: client._has_reader)
        client.close()
        client.close()
        with pytest.raises(EngineDeadError, match="shut down"):
            waiting.result(PROMPTLY)
    for use in (lambda: client.add_request(request(0)), client.get_outputs, lambda: client.call("echo")):
        with pytest.raises(EngineDeadError, match="shut down"):
            use()


def test_a_process_is_watched_though_its_descriptor_is_beyond_what_select_knows() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("no descriptors above 1023 here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.dup(0) for _ in range(1100 - open_descriptors())]
    try:
        fd = process_fd(os.getpid())
        if fd is None:
            pytest.skip("no pidfd here")
        assert fd > 1023
        assert not readable([fd], 0)
        os.close(fd)
    finally:
        for fd in held:
            os.close(fd)


@pytest.mark.slow
def test_twenty_clients_that_come_and_go_leave_no_descriptor_and_no_thread(owner: StandInOwner) -> None:
    def come_and_go() -> None:
        client = SyncClient(Connection(owner))
        client.add_request(request(0, max_tokens=1))
        collect(client, 1)
        client.close()

    come_and_go()
    before, threads = open_descriptors(), len(os.listdir("/proc/self/task"))
    for _ in range(20):
        come_and_go()
    assert eventually(lambda: open_descriptors() <= before + 1)  # the server closes its last end later
    assert len(os.listdir("/proc/self/task")) <= threads


def test_a_connection_waits_for_a_socket_that_can_not_be_made_now(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes, connection = iter([errno.EMFILE, errno.EMFILE]), client._connection

    def scarce(*given: Any) -> Any:
        if (error := next(outcomes, None)) is not None:
            raise zmq.ZMQError(error)
        return make_dealer(*given)

    monkeypatch.setattr("mainspring.ipc.link.make_dealer", scarce)
    connection._link.lost = True
    assert client.call("echo", 7) == [7]  # the answer may come before the loss is noticed
    assert client.call("echo", 8) == [8]
    assert connection.reconnections == 1
    assert next(outcomes, None) is None


# ---------------------------------------------------------------------- fork


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_told_to_make_its_own_and_does_not_disturb_its_parent(client: SyncClient) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for use in (
            lambda: client.add_request(request(0)),
            client.get_outputs,
            lambda: client.call("echo"),
            lambda: client.abort([0]),
            client.close,
        ):
            try:
                use()
                said.append("nothing")
            except BaseException as error:
                said.append(type(error).__name__)
        os.write(write, " ".join(said).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    assert os.read(read, 1000).decode().split() == ["WrongProcessError"] * 4 + ["nothing"]
    os.close(read)
    client.add_request(request(1))
    assert collect(client, 1) == {1: [100, 101, 102]}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_error_of_a_forked_child_names_both_processes(client: SyncClient) -> None:
    pid = os.getpid()
    client._connection._pid = pid + 1
    with pytest.raises(WrongProcessError, match=rf"belongs to process {pid + 1}; process {pid}, forked from it"):
        client.get_outputs()
    client._connection._pid = pid


# ---------------------------------------------------------------------- several frontends


def test_frontends_see_only_their_own_outputs_though_their_handles_are_equal(owner: StandInOwner) -> None:
    clients = [SyncClient(Connection(owner)) for _ in range(3)]
    for i, client in enumerate(clients):
        client.add_request(request(7, max_tokens=5, first=100 * i))
    for i, client in enumerate(clients):
        assert collect(client, 1) == {7: list(range(100 * i, 100 * i + 5))}
        client.close()


def test_a_frontends_weight_reaches_the_core(owner: StandInOwner) -> None:
    Connection(owner, weight=2.5).close()
    assert eventually(lambda: owner.core.connected == [(0, 2.5)])


def test_when_a_frontend_is_gone_its_requests_are_forgotten_and_the_others_go_on(owner: StandInOwner) -> None:
    gone, stays = SyncClient(Connection(owner)), SyncClient(Connection(owner))
    stays.add_request(request(0, max_tokens=3000, first=0))
    gone.add_request(request(0, max_tokens=10**9))
    assert gone.get_outputs(PROMPTLY) is not None
    gone.close()
    assert eventually(lambda: owner.core.disconnected == [0])
    assert collect(stays, 1) == {0: list(range(3000))}
    stays.close()


# ---------------------------------------------------------------------- in this process


def test_the_in_process_client_runs_a_step_a_call() -> None:
    client = InprocClient(StandInCore())
    assert client.get_outputs() is None
    client.add_request(request(0, max_tokens=2), [np.zeros((2, 3), np.float32)])
    first, second = client.get_outputs(), client.get_outputs()
    assert first is not None
    assert second is not None
    assert (first.token_ids, second.token_ids) == ([100], [101])
    assert client.get_outputs() is None
    assert client.core.tensors == [bytes(24)]  # type: ignore[attr-defined]
    assert client.call("echo", 1, [2]) == [1, [2]]
    with pytest.raises(InvalidRequestError):
        client.call("refuse")


def test_a_closed_in_process_client_says_so() -> None:
    core = StandInCore()
    client = InprocClient(core)
    client.close()
    client.close()
    assert core.disconnected == [0]
    with pytest.raises(EngineDeadError, match="shut down"):
        client.get_outputs()


def test_an_in_process_client_is_closed_between_two_steps() -> None:
    core = StandInCore()
    client = InprocClient(core)
    closing = threading.Thread(target=client.close)
    step, seen = core.step, []

    def slow_step() -> dict[int, Outputs]:
        closing.start()
        closing.join(0.1)  # it has to wait for the end of the step
        seen.append(list(core.disconnected))
        return step()

    core.step = slow_step  # type: ignore[method-assign]
    client.add_request(request(0, max_tokens=9))
    assert client.get_outputs() is not None
    closing.join()
    assert (seen, core.disconnected) == ([[]], [0])
    with pytest.raises(EngineDeadError, match="shut down"):
        client.abort([0])


def test_the_in_process_client_lets_other_threads_resume_a_paused_core(monkeypatch: pytest.MonkeyPatch) -> None:
    core = StandInCore()
    client = InprocClient(core)
    client.add_request(request(0, max_tokens=1))
    core.paused.set()
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(client.call, "echo", 5).result(PROMPTLY) == [5]
        core.paused.clear()

    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", nap)
        assert client.get_outputs() is None
    assert len(naps) == 1
    assert client.get_outputs() is not None
