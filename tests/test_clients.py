"""The clients over a real server and socket, with a core that has no model: nothing is lost, nobody waits for ever, and
what goes wrong is one clear error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from mainspring.ipc import codec, connection
from mainspring.ipc.async_client import AsyncClient
from mainspring.ipc.connection import Connection
from mainspring.ipc.errors import (
    EngineDeadError,
    EngineStartError,
    InvalidRequestError,
    MainspringError,
    ProtocolError,
    WrongEventLoopError,
    WrongProcessError,
)
from mainspring.ipc.inproc_client import InprocClient
from mainspring.ipc.messages import Abort, AddRequest, Bye, Hello, ModelFacts, Outputs, Ready, Refused, Sampling
from mainspring.ipc.sync_client import SyncClient
from mainspring.ipc.transport import ProcessWatch, bind_router, connect_dealer
from stand_in_core import EPOCH, StandInCore, StandInProcess, open_descriptors, stand_in

PROMPTLY = 3.0  # seconds; on an idle machine it takes milliseconds


@pytest.fixture
def process() -> Iterator[StandInProcess]:
    with stand_in() as process:
        yield process


@pytest.fixture
def client(process: StandInProcess) -> Iterator[SyncClient]:
    client = SyncClient(Connection(process))
    yield client
    client.close()


def request(handle: int, max_tokens: int = 3, first: int = 100) -> AddRequest:
    return AddRequest(handle, str(handle), [first], Sampling(max_tokens))


def collect(client: SyncClient, count: int, timeout: float = 30.0) -> dict[int, list[int]]:
    """Tokens by handle, until `count` requests have ended."""
    tokens: dict[int, list[int]] = defaultdict(list)
    ended = 0
    deadline = time.monotonic() + timeout
    while ended < count:
        outputs = client.get_outputs(timeout=max(0.0, deadline - time.monotonic()))
        assert outputs is not None, f"{count - ended} requests did not end"
        take(outputs, tokens)
        ended += len(outputs.finished)
    return tokens


def take(outputs: Outputs, tokens: dict[int, list[int]]) -> None:
    for handle, token in zip(outputs.handles, outputs.token_ids, strict=True):
        tokens[handle].append(token)


def eventually(holds: Callable[[], bool], timeout: float = PROMPTLY) -> bool:
    deadline = time.monotonic() + timeout
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.005)
    return holds()


# ---------------------------------------------------------------------- the sync client


def test_tokens_come_in_order_and_every_request_ends_once(client: SyncClient) -> None:
    for handle in range(20):
        client.add_request(request(handle, max_tokens=1 + handle % 5, first=10 * handle))
    tokens = collect(client, 20)
    assert tokens == {handle: [10 * handle + i for i in range(1 + handle % 5)] for handle in range(20)}
    assert client.get_outputs(timeout=0.05) is None


def test_a_client_knows_model_and_config_as_the_core_has_them(client: SyncClient, process: StandInProcess) -> None:
    assert client.model == process.core.model
    assert client.config == process.core.config


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


def test_arrays_reach_the_core_as_they_are(client: SyncClient, process: StandInProcess) -> None:
    arrays = [np.arange(300_000, dtype=np.float32), np.arange(5, dtype=np.int64)]
    client.add_request(request(0), arrays)
    collect(client, 1)
    assert process.core.tensors == [array.tobytes() for array in arrays]


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


def test_a_call_that_takes_too_long_is_a_timeout_and_its_late_answer_is_nobodys(client: SyncClient) -> None:
    with pytest.raises(TimeoutError, match=r"'sleep' within 0\.05 s"):
        client.call("sleep", 0.3, timeout=0.05)
    assert client.call("echo", 5) == [5]
    assert client._connection.results == {}


def test_a_call_returns_though_another_thread_waits_for_outputs(client: SyncClient) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get_outputs)
        time.sleep(0.05)
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


def test_who_waits_is_woken_by_what_another_thread_took_in_while_it_sent(client: SyncClient) -> None:
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


def test_outputs_that_two_threads_wait_for_go_to_exactly_one(client: SyncClient) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.get_outputs, 0.5) for _ in range(2)]
        time.sleep(0.05)
        client.add_request(request(0, max_tokens=1))
        got = [w.result(PROMPTLY) for w in waiting]
    assert sum(outputs is not None for outputs in got) == 1


# ---------------------------------------------------------------------- ends


def test_a_closed_client_says_so_and_closing_twice_is_closing_once(process: StandInProcess) -> None:
    client = SyncClient(Connection(process))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get_outputs)
        time.sleep(0.05)
        client.close()
        client.close()
        with pytest.raises(EngineDeadError, match="shut down"):
            waiting.result(PROMPTLY)
    for use in (lambda: client.add_request(request(0)), client.get_outputs, lambda: client.call("echo")):
        with pytest.raises(EngineDeadError, match="shut down"):
            use()


def test_when_the_core_dies_all_who_wait_hear_of_it_at_once(client: SyncClient, process: StandInProcess) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(client.get_outputs), pool.submit(client.get_outputs)]
        time.sleep(0.05)
        threading.Timer(0.1, process.kill).start()
        for wait in waiting:
            with pytest.raises(EngineDeadError, match=rf"core \(pid {process.pid}\) ended by signal SIGKILL"):
                wait.result(PROMPTLY)
    for use in (lambda: client.add_request(request(0)), client.get_outputs, lambda: client.call("echo")):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            use()


def test_what_a_core_sent_before_it_died_still_arrives(client: SyncClient, process: StandInProcess) -> None:
    for handle in range(5):
        client.add_request(request(handle, max_tokens=200))
    assert eventually(lambda: process.core.num_ended == 5)
    process.kill()
    tokens: dict[int, list[int]] = defaultdict(list)
    with contextlib.suppress(EngineDeadError):
        while (outputs := client.get_outputs(PROMPTLY)) is not None:
            take(outputs, tokens)
    assert tokens == {handle: list(range(100, 300)) for handle in range(5)}


def test_a_core_that_fails_tells_its_reason(client: SyncClient, process: StandInProcess) -> None:
    client.add_request(request(0, max_tokens=1))
    collect(client, 1)
    process.fail("IndexError: the step went wrong")
    with pytest.raises(EngineDeadError, match="ended by signal SIGKILL: IndexError: the step went wrong"):
        client.get_outputs(PROMPTLY)


def test_a_cores_death_is_seen_where_the_kernel_has_no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(connection, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr("mainspring.ipc.sync_client.WATCH_SECONDS", 0.05)
    monkeypatch.setattr("mainspring.ipc.async_client.WATCH_SECONDS", 0.05)
    with stand_in() as process:
        assert process.watch.fd is None
        client = SyncClient(Connection(process))
        other = AsyncClient(Connection(process))

        async def wait() -> None:
            threading.Timer(0.1, process.kill).start()
            await asyncio.wait_for(other.get_outputs(), PROMPTLY)

        with pytest.raises(EngineDeadError, match="SIGKILL"):
            asyncio.run(wait())
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.get_outputs(PROMPTLY)
        client.close()
        other.close()


def test_a_process_is_watched_though_its_descriptor_is_beyond_what_select_knows() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("no descriptors above 1023 here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.dup(0) for _ in range(1100 - open_descriptors())]
    try:
        watch = ProcessWatch(os.getpid(), lambda: False)
        assert not watch.ended()
        watch.close()
    finally:
        for fd in held:
            os.close(fd)


def test_twenty_clients_that_come_and_go_leave_no_descriptor_and_no_thread(process: StandInProcess) -> None:
    def come_and_go() -> None:
        client = SyncClient(Connection(process))
        client.add_request(request(0, max_tokens=1))
        collect(client, 1)
        client.close()

    come_and_go()
    before, threads = open_descriptors(), len(os.listdir("/proc/self/task"))
    for _ in range(20):
        come_and_go()
    assert eventually(lambda: open_descriptors() <= before + 1)  # the server drops its end of the last in its own time
    assert len(os.listdir("/proc/self/task")) <= threads


# ---------------------------------------------------------------------- fork, loops


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


def test_the_async_client_streams_calls_and_aborts(process: StandInProcess) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(process))
        tokens: dict[int, list[int]] = defaultdict(list)
        ended: dict[int, str] = {}

        async def read() -> None:
            while len(ended) < 31:
                outputs = await client.get_outputs()
                take(outputs, tokens)
                ended.update((finished.handle, finished.reason) for finished in outputs.finished)

        reader = asyncio.create_task(read())
        await client.add_request(request(30, max_tokens=10**9))
        for handle in range(30):
            await client.add_request(request(handle, max_tokens=20, first=handle))
        answers = await asyncio.gather(*(client.call("echo", i) for i in range(50)))
        assert answers == [[i] for i in range(50)]
        with pytest.raises(InvalidRequestError):
            await client.call("refuse")
        await client.abort([30])
        await asyncio.wait_for(reader, 30)
        assert {handle: tokens[handle] for handle in range(30)} == {h: list(range(h, h + 20)) for h in range(30)}
        assert ended[30] == "abort"
        client.close()

    asyncio.run(main())


def test_an_async_call_that_takes_too_long_is_a_timeout(process: StandInProcess) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(process))
        with pytest.raises(TimeoutError):
            await client.call("sleep", 0.3, timeout=0.05)
        assert await client.call("echo", 1) == [1]
        assert client._connection.results == {}
        client.close()

    asyncio.run(main())


def test_a_cancelled_wait_loses_no_outputs(process: StandInProcess) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(process))
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.get_outputs(), 0.001)
        await client.add_request(request(0, max_tokens=1))
        outputs = await asyncio.wait_for(client.get_outputs(), PROMPTLY)
        assert outputs.token_ids == [100]
        client.close()

    asyncio.run(main())


def test_an_async_client_belongs_to_its_first_loop(process: StandInProcess) -> None:
    client = AsyncClient(Connection(process))
    assert asyncio.run(client.call("echo", 1)) == [1]
    for use in (lambda: client.call("echo"), client.get_outputs, lambda: client.abort([0])):
        with pytest.raises(WrongEventLoopError, match="another event loop"):
            asyncio.run(use())
    client.close()
    client.close()


def test_when_the_core_dies_all_who_await_hear_of_it_at_once(process: StandInProcess) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(process))
        await client.call("echo")
        process.core.paused.set()
        waits = [asyncio.create_task(client.get_outputs())]
        await asyncio.sleep(0.05)
        process.kill()
        for wait in waits:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await asyncio.wait_for(wait, PROMPTLY)
        for use in (client.get_outputs, lambda: client.call("echo"), lambda: client.add_request(request(0))):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await use()
        client.close()

    asyncio.run(main())


def test_an_async_call_that_waits_when_the_core_dies_raises(process: StandInProcess) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(process))
        call = asyncio.create_task(client.call("sleep", 0.5))
        await asyncio.sleep(0.05)
        process._child.kill()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(call, PROMPTLY)
        client.close()

    asyncio.run(main())


def test_closing_an_async_client_ends_those_who_wait(process: StandInProcess) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(process))
        wait = asyncio.create_task(client.get_outputs())
        await asyncio.sleep(0.05)
        client.close()
        with pytest.raises(EngineDeadError, match="shut down"):
            await asyncio.wait_for(wait, PROMPTLY)

    asyncio.run(main())


# ---------------------------------------------------------------------- several frontends


def test_frontends_see_only_their_own_outputs_though_their_handles_are_equal(process: StandInProcess) -> None:
    clients = [SyncClient(Connection(process)) for _ in range(3)]
    for i, client in enumerate(clients):
        client.add_request(request(7, max_tokens=5, first=100 * i))
    for i, client in enumerate(clients):
        assert collect(client, 1) == {7: list(range(100 * i, 100 * i + 5))}
        client.close()


def test_a_frontends_weight_reaches_the_core(process: StandInProcess) -> None:
    Connection(process, weight=2.5).close()
    assert eventually(lambda: process.core.connected == [(0, 2.5)])


def test_a_frontend_that_does_not_read_holds_up_nobody_and_loses_nothing(process: StandInProcess) -> None:
    lazy, keen = SyncClient(Connection(process)), SyncClient(Connection(process))
    for handle in range(40):
        lazy.add_request(request(handle, max_tokens=4000, first=handle))
    assert eventually(lambda: any(peer.backlog for peer in process.server._peers.values()), 30), "no pipe is full"
    for handle in range(20):
        keen.add_request(request(handle, max_tokens=20))
        assert collect(keen, 1, timeout=PROMPTLY) == {handle: list(range(100, 120))}
    assert keen.call("echo", 1, timeout=PROMPTLY) == [1]
    assert collect(lazy, 40) == {handle: list(range(handle, handle + 4000)) for handle in range(40)}
    lazy.close()
    keen.close()


def test_when_a_frontend_is_gone_its_requests_are_forgotten_and_the_others_go_on(process: StandInProcess) -> None:
    gone, stays = SyncClient(Connection(process)), SyncClient(Connection(process))
    stays.add_request(request(0, max_tokens=3000, first=0))
    gone.add_request(request(0, max_tokens=10**9))
    assert gone.get_outputs(PROMPTLY) is not None
    gone.close()
    assert eventually(lambda: process.core.disconnected == [0])
    assert collect(stays, 1) == {0: list(range(3000))}
    stays.close()


def test_a_frontends_number_is_not_given_to_another_before_the_core_has_let_go_of_it(process: StandInProcess) -> None:
    released = process.server.release
    process.server.release = lambda frontend: None  # type: ignore[method-assign]  # the core is slow to let go
    with contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(contextlib.closing(Raw(process))) for _ in range(3))
        first.greet()
        first.send(Bye())
        assert eventually(lambda: process.core.disconnected == [0])
        second.greet()
        assert eventually(lambda: process.core.connected == [(0, 1.0), (1, 1.0)])
        released(0)
        assert eventually(lambda: 0 not in process.server._numbers)
        third.greet()
        assert eventually(lambda: process.core.connected[-1] == (0, 1.0))


# ---------------------------------------------------------------------- the handshake, and frames that are wrong


class Raw:
    """A frontend that sends what it likes."""

    def __init__(self, process: StandInProcess) -> None:
        self.process = process
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = connect_dealer(self._context, process.address)

    def send(self, message: Any, instance: bytes | None = None, epoch: int = EPOCH) -> None:
        self.send_frames(codec.encode(message, self.process.instance_id if instance is None else instance, epoch))

    def send_frames(self, frames: list[Any]) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> Any:
        assert self.socket.poll(int(PROMPTLY * 1000)), "no answer"
        return codec.decode(self.socket.recv_multipart()).message

    def greet(self) -> None:
        self.send(Hello(1, self.process.token, "raw"), codec.NO_INSTANCE, 0)
        assert isinstance(self.receive(), Ready)

    def close(self) -> None:
        self.socket.close(linger=0)
        self._context.term()


@pytest.fixture
def raw(process: StandInProcess) -> Iterator[Raw]:
    raw = Raw(process)
    yield raw
    raw.close()


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (Hello(1, b"wrong", "x"), "token is wrong"),
        (Hello(2, b"", "x"), "protocol version 1, the frontend 2"),
        (Hello(1, b"", "x", 0.0), "weight is 0.0"),
        (Hello(1, b"", "x", -1.0), "weight is -1.0"),
        (Hello(1, b"", "x", float("nan")), "weight is nan"),
        (Hello(1, b"", "x", float("inf")), "weight is inf"),
    ],
)
def test_a_hello_that_cannot_be_accepted_is_refused_with_the_reason(raw: Raw, hello: Hello, says: str) -> None:
    raw.send(hello if hello.token else msgspec.structs.replace(hello, token=raw.process.token), codec.NO_INSTANCE, 0)
    answer = raw.receive()
    assert isinstance(answer, Refused)
    assert answer.error == "ProtocolError"
    assert says in answer.reason
    assert raw.process.core.connected == []


def test_a_client_whose_token_is_wrong_raises_and_leaves_nothing_open(process: StandInProcess) -> None:
    process.token = b"wrong"
    for attempt in range(6):
        if attempt == 1:
            before = open_descriptors()
        with pytest.raises(ProtocolError, match="session token is wrong"):
            Connection(process)
    assert eventually(lambda: open_descriptors() <= before + 1)


def test_a_frame_of_another_protocol_version_is_refused_with_both_versions(raw: Raw) -> None:
    header, body = codec.encode(Hello(1, raw.process.token, "x"), codec.NO_INSTANCE, 0)
    raw.send_frames([header[:2] + b"\x09" + header[3:], body])
    answer = raw.receive()
    assert isinstance(answer, Refused)
    assert "version 9 is not spoken here, only 1" in answer.reason


def test_a_client_of_a_core_with_another_protocol_version_raises() -> None:
    answer = [struct.pack(">2sBB8sI", b"ms", 9, 2, bytes(8), 1), b"\x90"]
    with foreign_core(answer) as core, pytest.raises(ProtocolError, match="version 9"):
        Connection(core)


def test_a_core_that_never_answers_is_an_error_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 0.2)
    with foreign_core(None) as core, pytest.raises(EngineStartError, match="did not answer"):
        Connection(core)


def test_a_core_that_ends_before_it_answers_is_an_error_at_once() -> None:
    with foreign_core(None) as core:
        core._child.kill()
        with pytest.raises(EngineStartError, match="ended by signal SIGKILL before it answered"):
            Connection(core)


def test_a_second_hello_and_frames_without_a_session_are_dropped_and_counted(raw: Raw) -> None:
    server = raw.process.server
    raw.send(request(0))
    assert isinstance(raw.receive(), Refused)
    assert server.malformed_frames == 1
    raw.greet()
    raw.send(Hello(1, raw.process.token, "again"), codec.NO_INSTANCE, 0)
    assert eventually(lambda: server.malformed_frames == 2)
    assert eventually(lambda: raw.process.core.connected == [(0, 1.0)])


@pytest.mark.parametrize(("instance", "epoch"), [(None, EPOCH - 1), (None, EPOCH + 1), (bytes(8), EPOCH)])
def test_a_core_drops_and_counts_frames_of_another_epoch_or_instance(
    raw: Raw, instance: bytes | None, epoch: int
) -> None:
    raw.greet()
    raw.send(request(0, max_tokens=1), instance, epoch)
    raw.send(Abort([5]), instance, epoch)
    raw.send(request(1, max_tokens=1))
    outputs = raw.receive()
    assert outputs.handles == [1]
    assert raw.process.server.malformed_frames == 2
    assert [type(event.message) for event in raw.process.events] == [Hello, AddRequest]


def test_a_client_drops_and_counts_frames_of_another_epoch_or_instance(process: StandInProcess) -> None:
    client = SyncClient(Connection(process))
    server = process.server
    for instance, epoch in ((server._instance_id, EPOCH - 1), (bytes(8), EPOCH)):
        good = server._instance_id, server._epoch
        server._instance_id, server._epoch = instance, epoch
        server.send(0, Outputs([0], [666]))
        assert eventually(server._outbox.empty)
        time.sleep(0.05)
        server._instance_id, server._epoch = good
    server.send(0, Outputs([0], [1]))
    outputs = client.get_outputs(PROMPTLY)
    assert outputs is not None
    assert outputs.token_ids == [1]
    assert client._connection.dropped_frames == 2
    client.close()


def test_malformed_frames_are_counted_and_disturb_neither_their_sender_nor_others(raw: Raw, client: SyncClient) -> None:
    raw.greet()
    header, body = codec.encode(request(0), raw.process.instance_id, EPOCH)
    wrong = [
        [b""],
        [b"", b""],
        [header],
        [header[:-1], body],
        [header, body[:-1]],
        [header, b"\x91" * 50_000],
        [header, body, *[b"x"] * 20],
        [header[:3] + b"\xff" + header[4:], body],
    ]
    client.add_request(request(3, max_tokens=2000, first=0))
    for frames in wrong * 20:
        raw.send_frames(frames)
    raw.send(request(9, max_tokens=2))
    assert raw.receive().handles == [9]
    assert raw.process.server.malformed_frames == 20 * len(wrong)
    assert collect(client, 1) == {3: list(range(2000))}


def test_messages_that_only_a_core_may_send_change_nothing(raw: Raw) -> None:
    raw.greet()
    raw.send(Outputs([1], [2]))
    raw.send(Refused("E", "x"))
    raw.send(Ready(b"", 0, ModelFacts(1, 1, 1, ""), b""))
    raw.send(request(0, max_tokens=1))
    assert raw.receive().handles == [0]


class ForeignCore(StandInProcess):
    """Something at a core's address that gives one answer to all, or none."""

    def __init__(self, answer: list[bytes] | None) -> None:
        super().__init__()
        self._stop_serving("")
        self.address += ".other"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = bind_router(self._context, self.address)
        self._answer = answer
        self._over = False
        self._answers = threading.Thread(target=self._reply)
        self._answers.start()

    def _reply(self) -> None:
        while not self._over:
            if self._router.poll(20):
                identity, *_ = self._router.recv_multipart()
                if self._answer is not None:
                    self._router.send_multipart([identity, *self._answer])

    def end(self) -> None:
        self._over = True
        self._answers.join()
        self._router.close(linger=0)
        self._context.term()
        super().end()


@contextlib.contextmanager
def foreign_core(answer: list[bytes] | None) -> Iterator[ForeignCore]:
    core = ForeignCore(answer)
    try:
        yield core
    finally:
        core.end()


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
