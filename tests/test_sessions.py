"""A connection is lost, and the next core continues the requests in flight, one case in each test. Random schedules are
in test_recovery.py."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mainspring.ipc import codec, connection
from mainspring.ipc.async_client import AsyncClient
from mainspring.ipc.connection import Connection
from mainspring.ipc.errors import ConnectError, EngineDeadError
from mainspring.ipc.messages import AddRequest, Bye, Hello, Outputs, UtilityCall
from mainspring.ipc.sync_client import SyncClient
from mainspring.ipc.transport import Endpoints
from stand_in_core import StandInOwner, open_descriptors, stand_in
from wire import PROMPTLY, Raw, collect, eventually, request, sees_the_loss, take

LONG = 1_000_000  # tokens; never reached


@pytest.fixture
def owner() -> Iterator[StandInOwner]:
    with stand_in() as owner:
        yield owner


@pytest.fixture
def client(owner: StandInOwner) -> Iterator[SyncClient]:
    client = SyncClient(Connection(owner))
    yield client
    client.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StandInOwner]:
    """A core of another owner: no message says that it will not come back."""
    with stand_in(address=f"ipc://{tmp_path}/core.sock") as owner:
        yield owner


def in_flight(client: SyncClient) -> set[int]:
    return set(client._connection._ledger)


def read_on(client: SyncClient) -> None:
    while client.get_outputs(PROMPTLY) is not None:
        pass


def take_in(client: SyncClient, handles: set[int]) -> None:
    """Read messages until all requests but these have ended; outputs wait for `get_outputs`."""

    def pump() -> bool:
        client.abort([])
        return in_flight(client) == handles

    assert eventually(pump)


# ---------------------------------------------------------------------- what goes on


def test_requests_in_flight_go_on_under_the_next_core_with_no_token_lost_or_twice(
    client: SyncClient, owner: StandInOwner
) -> None:
    for handle in range(8):
        client.add_request(request(handle, max_tokens=3000, first=10 * handle))
    tokens: dict[int, list[int]] = defaultdict(list)
    for _ in range(5):
        take(client.get_outputs(PROMPTLY), tokens)  # type: ignore[arg-type]
    owner.kill()
    owner.restart()
    for handle, rest in collect(client, 8).items():
        tokens[handle] += rest
    assert tokens == {handle: list(range(10 * handle, 10 * handle + 3000)) for handle in range(8)}
    assert client.get_outputs(timeout=0.05) is None


def test_a_request_that_was_sent_comes_again_with_its_tokens_and_age_and_the_mark_of_it(
    client: SyncClient, owner: StandInOwner
) -> None:
    began = time.monotonic()
    client.add_request(request(0, max_tokens=LONG, first=7))
    assert client.get_outputs(PROMPTLY) is not None
    owner.kill()
    age = time.monotonic() - began
    assert sees_the_loss(client)  # and all outputs received before
    received = [7, *(t for outputs in client._connection.outputs for t in outputs.token_ids)]
    owner.restart()
    assert eventually(lambda: client.abort([]) or owner.core.added)
    (sent,) = owner.core.added
    assert sent.resumed
    assert sent.output_token_ids == received
    assert age <= sent.age_s <= time.monotonic() - began
    unchanged = {"resumed": False, "output_token_ids": [], "age_s": 0.0}
    assert msgspec.structs.replace(sent, **unchanged) == request(0, max_tokens=LONG, first=7)


def test_a_request_that_was_sent_but_brought_nothing_yet_comes_again_as_resumed(
    client: SyncClient, owner: StandInOwner
) -> None:
    owner.busy = True
    client.add_request(request(0, max_tokens=2))
    owner.kill()
    owner.busy = False
    owner.restart()
    assert collect(client, 1) == {0: [100, 101]}
    (sent,) = owner.core.added
    assert sent.resumed
    assert sent.output_token_ids == []


def test_a_request_that_was_resumed_already_keeps_its_tokens_and_age(client: SyncClient, owner: StandInOwner) -> None:
    owner.core.paused.set()
    first = msgspec.structs.replace(request(0, max_tokens=5), resumed=True, output_token_ids=[100, 101], age_s=50.0)
    client.add_request(first)
    owner.kill()
    owner.restart()
    assert collect(client, 1) == {0: [102, 103, 104]}
    (sent,) = owner.core.added
    assert sent.output_token_ids == [100, 101]
    assert sent.age_s >= 50.0


def test_a_request_added_while_the_connection_is_lost_is_new_to_the_next_core(
    client: SyncClient, owner: StandInOwner
) -> None:
    owner.kill()
    assert sees_the_loss(client)
    client.add_request(request(0, max_tokens=2))
    owner.restart()
    assert collect(client, 1) == {0: [100, 101]}
    assert owner.core.added == [request(0, max_tokens=2)]


def test_arrays_come_again_with_their_request(client: SyncClient, owner: StandInOwner) -> None:
    array = np.arange(300_000, dtype=np.float32)
    owner.core.paused.set()
    client.add_request(request(0), [array])
    owner.kill()
    owner.restart()
    collect(client, 1)
    assert owner.core.tensors == [array.tobytes()]


def test_tokens_received_but_not_yet_read_are_returned_once_and_not_requested_again(
    client: SyncClient, owner: StandInOwner
) -> None:
    for handle in range(5):
        client.add_request(request(handle, max_tokens=50))
    take_in(client, set())
    owner.kill()
    owner.restart()
    assert collect(client, 5) == {handle: list(range(100, 150)) for handle in range(5)}
    assert eventually(lambda: client.abort([]) or owner.core.connected)
    assert owner.core.added == []


def test_tokens_sent_before_a_bye_are_not_computed_again(client: SyncClient, owner: StandInOwner) -> None:
    for handle in range(5):
        client.add_request(request(handle, max_tokens=200))
    assert eventually(lambda: owner.core.num_ended == 5)
    owner.stop("drained")
    owner.restart()
    assert collect(client, 5) == {handle: list(range(100, 300)) for handle in range(5)}
    assert owner.core.added == []


def test_a_call_in_flight_is_answered_by_the_next_core(client: SyncClient, owner: StandInOwner) -> None:
    owner.busy = True
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(client.call, "echo", i) for i in range(3)]
        assert eventually(lambda: len(client._connection._calls) == 3)
        owner.kill()
        owner.busy = False
        owner.restart()
        assert [answer.result(PROMPTLY) for answer in answers] == [[0], [1], [2]]


def test_requests_and_calls_come_again_in_the_order_in_which_they_were_made(
    client: SyncClient, owner: StandInOwner
) -> None:
    owner.busy = True
    with ThreadPoolExecutor() as pool:
        client.add_request(request(0))
        paused = pool.submit(client.call, "echo", "abort")
        assert eventually(lambda: len(client._connection._calls) == 1)
        client.add_request(request(1))
        owner.kill()
        owner.events.clear()
        owner.busy = False
        owner.restart()
        assert paused.result(PROMPTLY) == ["abort"]
    assert set(collect(client, 2)) == {0, 1}
    kinds = [type(event.message) for event in owner.events]
    assert [kind for kind in kinds if kind in (AddRequest, UtilityCall)] == [AddRequest, UtilityCall, AddRequest]


def test_a_call_that_has_timed_out_is_not_sent_again(client: SyncClient, owner: StandInOwner) -> None:
    owner.kill()
    with pytest.raises(TimeoutError):
        client.call("echo", "late", timeout=0.05)
    owner.restart()
    assert client.call("echo", 1) == [1]
    assert [event.message.method for event in owner.events if hasattr(event.message, "method")] == ["echo"]


def test_with_nothing_in_flight_a_loss_is_not_noticed(client: SyncClient, owner: StandInOwner) -> None:
    for handle in range(3):
        owner.kill()
        owner.restart()
        client.add_request(request(handle))
        assert collect(client, 1) == {handle: [100, 101, 102]}


# ---------------------------------------------------------------------- aborts


def test_requests_added_and_aborted_while_the_connection_is_lost_are_never_sent(
    client: SyncClient, owner: StandInOwner
) -> None:
    owner.kill()
    assert sees_the_loss(client)
    client.add_request(request(0))
    client.add_request(request(1))
    client.abort([0])
    outputs = client.get_outputs(PROMPTLY)
    assert outputs is not None
    assert [(finished.handle, finished.reason) for finished in outputs.finished] == [(0, "abort")]
    owner.restart()
    assert collect(client, 1) == {1: [100, 101, 102]}
    assert [sent.handle for sent in owner.core.added] == [1]


def test_an_abort_that_died_with_its_core_still_ends_the_request_once(client: SyncClient, owner: StandInOwner) -> None:
    client.add_request(request(0, max_tokens=LONG))
    client.add_request(request(1, max_tokens=2000))
    assert client.get_outputs(PROMPTLY) is not None
    owner.busy = True
    client.abort([0])
    owner.kill()
    owner.busy = False
    owner.restart()
    ended = []
    while len(ended) < 2:
        outputs = client.get_outputs(PROMPTLY)
        assert outputs is not None
        ended += [(finished.handle, finished.reason) for finished in outputs.finished]
    assert sorted(ended) == [(0, "abort"), (1, "length")]
    assert [sent.handle for sent in owner.core.added] == [1]


def test_aborting_an_ended_or_unknown_request_does_nothing(client: SyncClient, owner: StandInOwner) -> None:
    client.add_request(request(0))
    collect(client, 1)
    owner.kill()
    client.abort([0, 55])
    owner.restart()
    client.abort([0, 55])
    assert client.get_outputs(timeout=0.2) is None


# ---------------------------------------------------------------------- who waits


def test_a_thread_that_waited_before_the_loss_gets_what_comes_after_it(client: SyncClient, owner: StandInOwner) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get_outputs)
        assert eventually(lambda: client._has_reader)
        owner.kill()
        owner.restart()
        client.add_request(request(0, max_tokens=1))
        outputs = waiting.result(PROMPTLY)
        assert outputs is not None
        assert outputs.token_ids == [100]


def test_a_thread_is_woken_by_the_next_core_though_nobody_else_uses_the_client(
    client: SyncClient, owner: StandInOwner
) -> None:
    owner.core.paused.set()
    client.add_request(request(0, max_tokens=1))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get_outputs)
        assert eventually(lambda: client._has_reader)
        owner.kill()
        owner.restart()
        outputs = waiting.result(PROMPTLY)
        assert outputs is not None
        assert outputs.token_ids == [100]


def test_a_task_is_woken_by_the_next_core_though_nobody_else_uses_the_client(owner: StandInOwner) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(owner))
        for handle in range(4):
            owner.core.paused.set()
            await client.add_request(request(handle, max_tokens=1))
            waiting = asyncio.create_task(client.get_outputs())
            await asyncio.sleep(0)
            await asyncio.to_thread(owner.kill)
            await asyncio.to_thread(owner.restart)
            assert (await asyncio.wait_for(waiting, PROMPTLY)).token_ids == [100]
        client.close()

    asyncio.run(main())


def test_a_loop_looks_at_the_new_socket_though_its_descriptors_have_the_numbers_of_the_old_ones(
    owner: StandInOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = os.dup(0), os.dup(0)
    real = Connection.fds.fget
    assert real is not None
    shown = 0

    def same_numbers(self: Connection) -> tuple[int, ...]:
        nonlocal shown
        if not self.closed and self.num_sockets != shown:
            shown = self.num_sockets
            for fd, number in zip(real(self), numbers, strict=True):
                os.dup2(fd, number)
        return () if self.closed else numbers

    monkeypatch.setattr(Connection, "fds", property(same_numbers))

    async def main() -> None:
        client = AsyncClient(Connection(owner))
        assert await client.call("echo", 1) == [1]
        owner.kill()
        owner.restart()
        assert await asyncio.wait_for(client.call("echo", 2), PROMPTLY) == [2]
        for handle in range(20):  # no other event wakes the loop when an answer comes
            await client.add_request(request(handle, max_tokens=1))
            assert (await asyncio.wait_for(client.get_outputs(), PROMPTLY)).handles == [handle]
        client.close()

    asyncio.run(main())
    for number in numbers:
        os.close(number)


def test_closing_while_the_connection_is_lost_ends_pending_calls(client: SyncClient, owner: StandInOwner) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get_outputs)
        owner.kill()
        assert eventually(lambda: client._connection._ready is None)
        client.close()
        with pytest.raises(EngineDeadError, match="shut down"):
            waiting.result(PROMPTLY)


def test_an_async_client_is_closed_while_the_connection_is_lost(owner: StandInOwner) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(owner))
        owner.busy = True
        waiting = asyncio.create_task(client.get_outputs())
        call = asyncio.create_task(client.call("echo"))
        await asyncio.sleep(0)
        owner.kill()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.15)
        client.close()
        for task in (waiting, call):
            with pytest.raises(EngineDeadError, match="shut down"):
                await asyncio.wait_for(task, PROMPTLY)

    asyncio.run(main())


def test_an_abort_while_the_connection_is_lost_wakes_the_task_that_waits_for_outputs(owner: StandInOwner) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(owner))
        owner.busy = True
        await client.add_request(request(0))
        waiting = asyncio.create_task(client.get_outputs())
        await asyncio.sleep(0)
        owner.kill()
        while client._connection._ready is not None:
            await asyncio.sleep(0.01)
        await client.abort([0])
        finished = (await asyncio.wait_for(waiting, PROMPTLY)).finished
        assert [(end.handle, end.reason) for end in finished] == [(0, "abort")]
        client.close()

    asyncio.run(main())


# ---------------------------------------------------------------------- no further core


def test_when_its_owner_gives_up_all_waiting_threads_get_the_reason(client: SyncClient, owner: StandInOwner) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = [
            pool.submit(client.get_outputs),
            pool.submit(client.get_outputs),
            pool.submit(client.call, "sleep", 0),
        ]
        owner.kill()
        owner.give_up("the core died 11 times")
        for wait in waiting[:2]:
            with pytest.raises(EngineDeadError, match="died 11 times"):
                wait.result(PROMPTLY)
    for use in (lambda: client.add_request(request(0)), client.get_outputs, lambda: client.call("echo")):
        with pytest.raises(EngineDeadError, match="died 11 times"):
            use()
    assert "died 11 times" in str(client.error)


def test_when_its_owner_gives_up_all_waiting_tasks_get_the_reason(owner: StandInOwner) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(owner))
        owner.busy = True
        waits = [asyncio.create_task(client.get_outputs()), asyncio.create_task(client.call("echo"))]
        await asyncio.sleep(0)
        owner.kill()
        owner.give_up("the core died 11 times")
        for wait in waits:
            with pytest.raises(EngineDeadError, match="died 11 times"):
                await asyncio.wait_for(wait, PROMPTLY)
        for use in (client.get_outputs, lambda: client.call("echo"), lambda: client.add_request(request(0))):
            with pytest.raises(EngineDeadError, match="died 11 times"):
                await use()
        client.close()

    asyncio.run(main())


def test_received_tokens_are_returned_before_the_end(client: SyncClient, owner: StandInOwner) -> None:
    client.add_request(request(0))
    take_in(client, set())
    owner.kill()
    owner.give_up("over")
    with pytest.raises(EngineDeadError):
        client.call("echo")
    assert collect(client, 1) == {0: [100, 101, 102]}
    with pytest.raises(EngineDeadError):
        client.get_outputs()


def test_a_daemon_that_does_not_come_back_within_reconnect_timeout_is_dead(daemon: StandInOwner) -> None:
    client = SyncClient(Connection(daemon.address, reconnect_timeout=0.3))
    client.add_request(request(0, max_tokens=LONG))
    daemon.stop("the daemon was stopped")
    with pytest.raises(EngineDeadError, match=r"has not answered for 0 s \(the daemon was stopped\)"):
        read_on(client)
    client.close()


def test_a_daemon_that_comes_back_within_reconnect_timeout_is_only_a_pause(daemon: StandInOwner) -> None:
    client = SyncClient(Connection(daemon.address))
    client.add_request(request(0, max_tokens=1500))
    assert client.get_outputs(PROMPTLY) is not None
    daemon.stop("the daemon was stopped")
    daemon.instance_id = bytes(8)  # an instance id of another supervisor
    daemon.epoch = 0
    daemon.restart()
    assert collect(client, 1)[0][-1] == 100 + 1499
    client.close()


def test_a_core_that_loads_is_waited_for_past_reconnect_timeout(daemon: StandInOwner) -> None:
    client = SyncClient(Connection(daemon.address))
    daemon.kill()
    daemon.load()
    link = client._connection
    assert eventually(lambda: client.abort([]) or (link._ready is None and link._link.reached))
    link._reconnect_timeout = 0.0
    assert client.get_outputs(timeout=0.3) is None
    daemon.announce()
    client.add_request(request(0))
    assert collect(client, 1) == {0: [100, 101, 102]}
    client.close()


def test_a_core_with_another_model_is_not_gone_on_with(client: SyncClient, owner: StandInOwner) -> None:
    client.add_request(request(0, max_tokens=LONG))
    owner.kill()
    owner.instance_id = bytes(8)
    owner.restart(fingerprint="another")
    with pytest.raises(EngineDeadError, match="came back with another model"):
        read_on(client)
    assert owner.core.added == []


def test_a_core_that_refuses_us_from_now_on_is_dead_to_us(client: SyncClient, owner: StandInOwner) -> None:
    owner.kill()
    owner.endpoints = Endpoints(owner.address, token=b"of another program")
    owner.restart()
    with pytest.raises(EngineDeadError, match="does not take us back: the session token is wrong"):
        client.get_outputs(PROMPTLY)


# ---------------------------------------------------------------------- the same session twice


def test_a_second_connection_of_a_session_ends_the_first(owner: StandInOwner) -> None:
    first, second = Raw(owner), Raw(owner)
    first.greet(session=b"s" * 16)
    first.send(request(0, max_tokens=LONG))
    assert first.receive().handles == [0]
    second.greet(session=b"s" * 16)
    assert eventually(lambda: owner.core.disconnected == [0])
    assert eventually(lambda: not owner.core.has_work and len(owner.events) == 4)
    kinds = [(event.frontend, type(event.message).__name__) for event in owner.events]
    assert kinds == [(0, "Hello"), (0, "AddRequest"), (0, "Bye"), (1, "Hello")]
    while isinstance(farewell := first.receive(), Outputs):
        pass
    assert farewell == Bye("this frontend was disconnected: another connection took over its session")
    second.send(request(0, max_tokens=1))
    assert second.receive().token_ids == [100]
    first.close()
    second.close()


def test_connections_of_different_sessions_or_none_leave_each_other_alone(owner: StandInOwner) -> None:
    raws = [Raw(owner) for _ in range(4)]
    for raw, session in zip(raws, (b"a" * 16, b"b" * 16, b"", b""), strict=True):
        raw.greet(session)
    for raw in raws:
        raw.send(request(0, max_tokens=1))
        assert raw.receive().token_ids == [100]
    assert owner.core.disconnected == []
    sessions = [session for session, _, _ in owner.core.sessions]
    assert len(set(sessions)) == 4, "one that has no session is told from others by a session of its own"
    assert all(len(session) == 16 for session in sessions)
    for raw in raws:
        raw.close()


def test_a_client_that_the_core_does_not_know_any_more_introduces_itself_again(
    client: SyncClient, owner: StandInOwner
) -> None:
    client.add_request(request(0, max_tokens=LONG))
    assert client.get_outputs(PROMPTLY) is not None
    raw = Raw(owner)
    raw.greet(client._connection._hello.session)  # the core forgets the client
    client.add_request(request(1, max_tokens=2))  # a frame from no session: Refused
    tokens: dict[int, list[int]] = defaultdict(list)
    while len(tokens[1]) < 2:
        take(client.get_outputs(PROMPTLY), tokens)  # type: ignore[arg-type]
    assert tokens[1] == [100, 101]
    assert client._connection.reconnections == 1
    assert tokens[0] == list(range(tokens[0][0], tokens[0][0] + len(tokens[0])))
    raw.close()


# ---------------------------------------------------------------------- finding a core


def test_a_client_may_come_while_its_core_loads(daemon: StandInOwner) -> None:
    daemon.kill()
    daemon.load()
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(Connection, daemon.address, connect_timeout=0.1)
        assert eventually(lambda: daemon.server._early)
        assert not coming.done()
        daemon.announce()
        client = SyncClient(coming.result(PROMPTLY))
    assert client.call("echo", 1) == [1]
    client.close()


def test_a_client_that_comes_while_a_core_dies_meets_the_next(daemon: StandInOwner) -> None:
    daemon.kill()
    daemon.load()
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(Connection, daemon.address)
        assert eventually(lambda: daemon.server._early)
        daemon.kill()
        daemon.restart()
        client = SyncClient(coming.result(PROMPTLY))
    assert client.call("echo", 1) == [1]
    client.close()


def test_connecting_to_an_address_without_a_core_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/nobody.sock"
    before = open_descriptors()
    with pytest.raises(ConnectError, match=f"no daemon answers at {address}: start one with mainspring daemon"):
        SyncClient(Connection(address, connect_timeout=0.1))
    assert eventually(lambda: open_descriptors() <= before)


def test_a_peer_that_is_no_daemon_is_an_error_within_connect_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConnectError, match=f"no daemon answers at {address}"):
            SyncClient(Connection(address, connect_timeout=0.2))


def test_a_client_pauses_before_it_reconnects_to_a_core_that_closes_connections(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        visits = 0

        def turn_away() -> None:
            nonlocal visits
            while True:
                try:
                    other.accept()[0].close()
                except OSError:
                    return
                visits += 1

        thread = threading.Thread(target=turn_away)
        thread.start()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConnectError, match="the handshake failed"):
            SyncClient(Connection(address, connect_timeout=1.0))
        other.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert 2 <= visits <= 40


def test_a_client_that_nobody_closed_can_be_collected(owner: StandInOwner) -> None:
    client: Any = SyncClient(Connection(owner))
    client._connection.itself = client  # as the traceback of an error would do
    gone = weakref.ref(client._connection)
    del client
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(PROMPTLY)
    assert not collecting.is_alive(), "it waits for sockets that nobody closes"
    assert gone() is None


def test_connections_lost_and_found_leave_no_descriptor(client: SyncClient, owner: StandInOwner) -> None:
    def lose_and_find(handle: int) -> None:
        owner.kill()
        owner.restart()
        client.add_request(request(handle, max_tokens=1))
        collect(client, 1)

    lose_and_find(0)
    before = open_descriptors()
    for handle in range(1, 11):
        lose_and_find(handle)
    assert eventually(lambda: open_descriptors() <= before + 2)
    assert client._connection.reconnections == 11


def test_frames_of_the_core_before_are_dropped(
    client: SyncClient, owner: StandInOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames with another epoch, and then with another instance id, than the core's."""
    server, frontend, encode = owner.server, 0, codec.encode
    stale = [(bytes(8), owner.epoch), (server._instance_id, owner.epoch - 1)]

    def encode_some_wrongly(message: Any, instance_id: bytes, epoch: int, *rest: Any) -> Any:
        if isinstance(message, Outputs) and message.token_ids == [666]:
            instance_id, epoch = stale.pop()
        return encode(message, instance_id, epoch, *rest)

    monkeypatch.setattr(codec, "encode", encode_some_wrongly)
    for dropped in (1, 2):
        server.send(frontend, Outputs([0], [666]))
        assert eventually(lambda n=dropped: client.abort([]) or client._connection.dropped_frames == n)  # type: ignore[misc]
    server.send(frontend, Outputs([0], [1]))
    outputs = client.get_outputs(PROMPTLY)
    assert outputs is not None
    assert outputs.token_ids == [1]


def test_a_client_says_the_same_session_on_every_connection(client: SyncClient, owner: StandInOwner) -> None:
    client.call("echo")
    owner.kill()
    owner.restart()
    client.call("echo")
    other = SyncClient(Connection(owner))
    other.call("echo")
    said = [event.message.session for event in owner.events if isinstance(event.message, Hello)]
    assert len(said) == 3
    assert said[0] == said[1] != said[2]
    assert {len(session) for session in said} == {16}
    other.close()


def test_silence_is_not_a_loss(client: SyncClient, owner: StandInOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LOST_POLL_SECONDS", 0.01)
    owner.busy = True
    client.add_request(request(0))
    assert client.get_outputs(timeout=0.5) is None
    owner.busy = False
    assert collect(client, 1) == {0: [100, 101, 102]}
    assert client._connection.reconnections == 0
    assert [type(event.message) for event in owner.events] == [Hello, AddRequest]
