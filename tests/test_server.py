"""The core's server: access, malformed frames, frontends that disappear or do not read; none of these affects other
frontends."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from mainspring.ipc import codec, inbox, intake, server
from mainspring.ipc.config import ServiceConfig
from mainspring.ipc.connection import Connection, ask_status
from mainspring.ipc.errors import ConnectError, NotPermittedError, ProtocolError
from mainspring.ipc.inbox import Credit, Inbox
from mainspring.ipc.messages import (
    KINDS,
    Abort,
    AddRequest,
    Bye,
    CoreStatus,
    Fault,
    Hello,
    ModelFacts,
    Outputs,
    Probe,
    Ready,
    Refused,
    Status,
    StatusCall,
    UtilityCall,
    UtilityResult,
)
from mainspring.ipc.server import CoreServer
from mainspring.ipc.sync_client import SyncClient
from mainspring.ipc.transport import Endpoints, bind_router
from stand_in_core import EPOCH, StandInOwner, open_descriptors, stand_in
from wire import PROMPTLY, Deaf, Raw, collect, eventually, request

LONG = 1_000_000
CHUNK = Outputs(list(range(3000)), [70000] * 3000)  # about 24 kB
MANY = 400  # messages: more than the pipe and the kernel hold


@pytest.fixture
def owner() -> Iterator[StandInOwner]:
    with stand_in() as owner:
        yield owner


@pytest.fixture
def raw(owner: StandInOwner) -> Iterator[Raw]:
    with contextlib.closing(Raw(owner)) as raw:
        yield raw


@pytest.fixture
def client(owner: StandInOwner) -> Iterator[SyncClient]:
    client = SyncClient(Connection(owner))
    yield client
    client.close()


# ---------------------------------------------------------------------- the socket file


def test_a_deleted_socket_file_is_made_again_and_connections_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = tmp_path / "core.sock", tmp_path / "admin.sock"
    with stand_in(address=f"ipc://{paths[0]}", admin_address=f"ipc://{paths[1]}") as owner:
        client = SyncClient(Connection(owner.address))
        for path in paths:
            path.unlink()
            assert eventually(path.is_socket)
            assert path.stat().st_mode & 0o777 == 0o600
            assert eventually(lambda: f"the socket file of ipc://{path} was deleted" in caplog.text)  # noqa: B023
        client.add_request(request(0))
        assert collect(client, 1) == {0: [100, 101, 102]}
        assert client._connection.reconnections == 0
        for path in paths:
            with contextlib.closing(SyncClient(Connection(f"ipc://{path}"))) as another:
                another.add_request(request(0))
                assert collect(another, 1) == {0: [100, 101, 102]}
        client.close()


def test_a_socket_file_whose_folder_is_gone_is_made_again_when_the_folder_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_SOCKET_FILES_S", 0.01)
    folder = tmp_path / "run"
    folder.mkdir()
    with stand_in(address=f"ipc://{folder}/core.sock") as owner:
        folder.rename(tmp_path / "gone")
        assert eventually(lambda: "can't be made again" in caplog.text)
        for _ in range(3):
            assert tells_status_at(owner.address) is False
        assert caplog.text.count("can't be made again") == 1, "it is logged once"
        folder.mkdir()
        assert eventually((folder / "core.sock").is_socket)
        assert tells_status_at(owner.address)


def tells_status_at(address: str) -> bool:
    try:
        return bool(ask_status(address, 0.2).core.core_pid)
    except ConnectError:
        return False


# ---------------------------------------------------------------------- the handshake


@pytest.mark.parametrize(
    ("hello", "error", "says"),
    [
        (Hello(1, b"wrong", "x"), "ConnectError", "token is wrong"),
        (Hello(2, b"", "x"), "ProtocolError", "protocol version 1, the frontend 2: install the same version"),
        (Hello(1, b"", "x", 0.0), "ProtocolError", "weight is 0.0"),
        (Hello(1, b"", "x", -1.0), "ProtocolError", "weight is -1.0"),
        (Hello(1, b"", "x", float("nan")), "ProtocolError", "weight is nan"),
        (Hello(1, b"", "x", float("inf")), "ProtocolError", "weight is inf"),
    ],
)
def test_a_hello_that_cannot_be_accepted_is_refused_with_the_reason(
    raw: Raw, hello: Hello, error: str, says: str
) -> None:
    raw.send(hello if hello.token else msgspec.structs.replace(hello, token=raw.owner.token), codec.NO_INSTANCE, 0)
    answer = raw.receive()
    assert isinstance(answer, Refused)
    assert answer.error == error
    assert says in answer.reason
    assert raw.owner.core.connected == []
    assert raw.owner.server._peers == {}


def test_a_client_whose_token_is_wrong_raises_and_leaves_nothing_open(owner: StandInOwner) -> None:
    owner.token = b"wrong"
    for attempt in range(6):
        if attempt == 1:
            before = open_descriptors()
        with pytest.raises(ConnectError, match="session token is wrong"):
            Connection(owner)
    assert eventually(lambda: open_descriptors() <= before + 1)


def test_a_frame_of_another_protocol_version_is_refused_with_both_versions(raw: Raw) -> None:
    header, body = codec.encode(Hello(1, raw.owner.token, "x"), codec.NO_INSTANCE, 0)
    raw.send_frames([header[:2] + b"\x09" + header[3:], body])
    answer = raw.receive()
    assert isinstance(answer, Refused)
    assert "version 9 is not spoken here, only 1" in answer.reason


def test_a_client_of_a_core_with_another_protocol_version_raises(owner: StandInOwner) -> None:
    owner.kill()
    with zmq.Context() as context:
        router = bind_router(context, owner.address)

        def answer() -> None:
            identity, header, _ = router.recv_multipart()
            router.send_multipart([identity, header[:2] + b"\x09\x02" + header[4:], b"\x90"])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match="protocol version 9 is not spoken here, only 1"):
            Connection(owner)
        thread.join()
        router.close()


def test_a_frontend_gets_its_number_its_weight_up_to_a_limit_and_its_name_up_to_a_length(owner: StandInOwner) -> None:
    with contextlib.ExitStack() as stack:
        for weight, name in ((2.5, "one\n\x1b[2Jtwo\u2028"), (1e9, "x" * 5000)):
            stack.enter_context(contextlib.closing(Raw(owner))).greet(weight=weight, name=name)
        assert eventually(lambda: owner.core.connected == [(0, 2.5), (1, server.MAX_WEIGHT)])
        assert [name for _, name, _ in owner.core.sessions] == ["one??[2Jtwo?", "x" * 100]


def test_a_core_of_ones_own_grants_admin(owner: StandInOwner, raw: Raw) -> None:
    assert raw.greet().capabilities == ["admin"]
    assert eventually(lambda: [admin for _, _, admin in owner.core.sessions] == [True])


def test_a_daemon_grants_admin_over_its_admin_address_only(tmp_path: Path) -> None:
    admin_address = f"ipc://{tmp_path}/admin.sock"
    with stand_in(address=f"ipc://{tmp_path}/core.sock", admin_address=admin_address) as owner:
        plain, admin = Raw(owner), Raw(owner, admin_address)
        assert plain.greet().capabilities == []
        assert admin.greet().capabilities == ["admin"]
        assert eventually(lambda: [admin for _, _, admin in owner.core.sessions] == [False, True])
        for raw in (plain, admin):
            raw.send(request(0, max_tokens=1))
            assert raw.receive().token_ids == [100]
            raw.close()


class OfUser:
    """A frame that came from a process of this user."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    def get(self, name: str) -> str:
        return f"localhost:{self._uid}:100:4242"


def test_other_users_are_refused_and_told_how_they_may_come_in(owner: StandInOwner) -> None:
    with pytest.raises(
        NotPermittedError, match=r"user 54321 may not use this core, which belongs to user \d+: connect"
    ):
        owner.server._access.admit(OfUser(54321), owner.token)  # type: ignore[arg-type]
    for uid in (os.getuid(), 0):
        assert owner.server._access.admit(OfUser(uid), owner.token) is None  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="libzmq tells the user on Linux only")
def test_a_frame_over_a_unix_socket_says_whose_process_sent_it(
    owner: StandInOwner, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    admit = owner.server._access.admit
    monkeypatch.setattr(
        owner.server._access,
        "admit",
        lambda frame, token: said.append(frame.get("Peer-Address")) or admit(frame, token),
    )
    raw.greet()
    assert said == [f"localhost:{os.getuid()}:{os.getgid()}:{os.getpid()}"]


# ---------------------------------------------------------------------- while the model loads


def test_a_hello_that_comes_while_the_model_loads_is_answered_when_it_is_there(owner: StandInOwner) -> None:
    owner.kill()
    owner.load()
    raw = Raw(owner)
    raw.say_hello()
    assert not raw.socket.poll(100)
    owner.announce()
    assert isinstance(raw.receive(), Ready)
    raw.send(request(0, max_tokens=1))
    assert raw.receive().token_ids == [100]
    raw.close()


def test_a_client_that_leaves_while_the_model_loads_is_no_frontend(owner: StandInOwner) -> None:
    owner.kill()
    owner.load()
    gone = Raw(owner)
    gone.say_hello()
    assert eventually(lambda: owner.server._early)
    gone.close()
    owner.announce()
    assert eventually(lambda: owner.core.disconnected == [0])
    assert eventually(lambda: not owner.server._numbers)


def test_hellos_kept_while_the_model_loads_are_counted(owner: StandInOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_EARLY", 3)
    owner.kill()
    owner.load()
    with contextlib.ExitStack() as stack:
        raws = [stack.enter_context(contextlib.closing(Raw(owner))) for _ in range(4)]
        for raw in raws[:3]:
            raw.say_hello()
            raw.send(StatusCall(owner.token))
            assert isinstance(raw.receive(), Status)
        raws[3].say_hello()
        assert raws[3].receive().error == "OverloadedError"
        owner.announce()
        assert [type(raw.receive()) for raw in raws[:3]] == [Ready] * 3


def test_the_status_is_sent_before_and_after_loading_to_permitted_clients(owner: StandInOwner) -> None:
    owner.kill()
    owner.load()
    raw = Raw(owner)
    raw.send(StatusCall(owner.token), codec.NO_INSTANCE, 0)
    first = raw.receive().core
    assert (first.epoch, first.phase, first.malformed_frames) == (EPOCH + 1, "loading", 0)
    owner.announce()
    raw.send(StatusCall(b"wrong"), codec.NO_INSTANCE, 0)
    assert isinstance(raw.receive(), Refused)
    owner.server.publish(CoreStatus(owner.epoch, 1, 2, "serving", model="m"))
    raw.send(StatusCall(owner.token), codec.NO_INSTANCE, 0)
    second = raw.receive().core
    assert (second.phase, second.model, second.malformed_frames) == ("serving", "m", 1)
    assert owner.server._peers == {}
    raw.close()


def test_ask_status_asks_a_daemon_and_says_where_there_is_none(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core.sock"
    with stand_in(address=address):
        assert ask_status(address).core.phase == "loading"
    with pytest.raises(ConnectError, match=address):
        ask_status(address, timeout=0.1)


# ---------------------------------------------------------------------- frames that are wrong


def test_a_frame_without_a_session_is_refused_and_counted(raw: Raw) -> None:
    raw.send(request(0))
    answer = raw.receive()
    assert isinstance(answer, Refused)
    assert "a frame from no session of this core" in answer.reason
    assert raw.owner.server.malformed_frames == 1
    assert list(raw.owner.events) == []


def test_a_second_hello_is_a_fault_and_changes_nothing(raw: Raw) -> None:
    raw.greet(session=b"a" * 16)
    for session in (b"a" * 16, b"b" * 16):
        raw.say_hello(session)
        assert raw.receive() == Fault("ProtocolError", "a second Hello on one connection")
    assert raw.owner.server.malformed_frames == 2
    raw.send(request(0, max_tokens=1))
    assert raw.receive().token_ids == [100]
    assert raw.owner.core.connected == [(0, 1.0)]


@pytest.mark.parametrize(("instance", "epoch"), [(None, EPOCH - 1), (None, EPOCH + 1), (bytes(8), EPOCH)])
def test_frames_of_another_epoch_or_instance_are_faults_and_counted(
    raw: Raw, instance: bytes | None, epoch: int
) -> None:
    raw.greet()
    raw.send(request(0, max_tokens=1), instance, epoch)
    raw.send(Abort([5]), instance, epoch)
    raw.send(request(1, max_tokens=1))
    assert [type(raw.receive()) for _ in range(2)] == [Fault, Fault]
    assert raw.receive().handles == [1]
    assert raw.owner.server.malformed_frames == 2
    assert [type(event.message) for event in raw.owner.events] == [Hello, AddRequest]


@pytest.mark.parametrize(
    "message",
    [
        Outputs([1], [2]),
        Refused("E", "x"),
        Ready(b"", 0, ModelFacts(1, 1, 1, ""), b""),
        UtilityResult(1),
        Fault("E", "x"),
        Probe(),
        Status(CoreStatus(1, 2, 3, "serving")),
    ],
)
def test_messages_that_only_a_core_may_send_are_a_fault(raw: Raw, message: Any) -> None:
    raw.greet()
    raw.send(message)
    assert raw.receive() == Fault("ProtocolError", f"{type(message).__name__} is not for a core")
    raw.send(request(0, max_tokens=1))
    assert raw.receive().token_ids == [100]
    assert [type(event.message) for event in raw.owner.events] == [Hello, AddRequest]


@pytest.mark.parametrize(
    "quoted", ["of length <= [9999]", "of length <= [3]", "Expected `array` of length <= 1 - at `$[99]`"]
)
def test_an_error_that_quotes_a_peer_is_not_read_as_one_about_a_list(raw: Raw, quoted: str) -> None:
    header, _ = codec.encode(Outputs([], []), codec.NO_INSTANCE, 0)
    raw.send_frames([header, msgspec.msgpack.encode([[], [], [], [[1, quoted]]])])
    answer = raw.receive()
    assert isinstance(answer, Refused)
    assert f"Invalid enum value '{quoted}'" in answer.reason


def test_malformed_frames_are_counted_and_disturb_neither_their_sender_nor_others(raw: Raw, client: SyncClient) -> None:
    raw.greet()
    header, body = codec.encode(request(0), raw.owner.instance_id, EPOCH)
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
    while isinstance(answer := raw.receive(), Fault):  # one for each message that fitted the pipe
        pass
    assert answer.handles == [9]
    assert raw.owner.server.malformed_frames == 20 * len(wrong)
    assert collect(client, 1) == {3: list(range(2000))}


def tells_status(raw: Raw) -> bool:
    """One attempt; an answer is lost if the pipe is full."""
    raw.send(StatusCall(raw.owner.token))
    while raw.socket.poll(200):
        if isinstance(raw.receive(), Status):
            return True
    return False


def test_whatever_frames_come_the_core_serves_and_keeps_nothing_of_them(
    owner: StandInOwner, client: SyncClient
) -> None:
    seed = 20
    numbers = random.Random(seed)
    good = [
        codec.encode(message, owner.instance_id, EPOCH)
        for message in (request(5), Abort([1]), UtilityCall(1, "echo"), StatusCall(), Hello(1, b"", "x"), Probe())
    ]

    def frames() -> list[bytes]:
        kind = numbers.randrange(5)
        header, body = map(bytearray, numbers.choice(good))
        if kind == 0:  # another kind with the same body
            header[3] = numbers.choice([*KINDS, 0, 77])
        elif kind == 1:  # changed bytes
            for _ in range(numbers.randrange(1, 4)):
                part = numbers.choice([header, body])
                if part:
                    part[numbers.randrange(len(part))] = numbers.randrange(256)
        elif kind == 2:  # truncated
            del body[numbers.randrange(len(body) + 1) :]
        elif kind == 3:  # nested
            body = bytearray(numbers.choice([b"\x91", b"\x81\xa1k", b"\xdd\xff\xff\xff\xff"]) * numbers.randrange(2000))
        else:  # random bytes
            return [numbers.randbytes(numbers.randrange(40)) for _ in range(numbers.randrange(1, 20))]
        return [bytes(header), bytes(body)]

    client.add_request(request(0, max_tokens=3000, first=0))
    known, stranger = Raw(owner), Raw(owner)
    known.greet()
    for _ in range(3000):
        numbers.choice([known, stranger]).send_frames(frames())
    for raw in (known, stranger):
        assert eventually(lambda raw=raw: tells_status(raw))  # type: ignore[misc]
    assert collect(client, 1) == {0: list(range(3000))}, f"seed {seed}"
    assert owner.server.malformed_frames > 1000
    assert len(owner.server._by_origin) == len(owner.server._peers) <= 2
    assert owner.server._numbers <= {0, 1}
    assert not owner.server._early
    assert not owner.server._dropped
    known.close()
    stranger.close()


def test_a_frame_larger_than_the_limit_ends_its_senders_connection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (server, intake):
        monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", 100_000)
    with stand_in() as owner:
        client, raw = SyncClient(Connection(owner)), Raw(owner)
        raw.greet()
        raw.send_frames([*codec.encode(request(0), owner.instance_id, EPOCH), bytes(200_000)])
        assert eventually(lambda: owner.core.disconnected == [1])
        assert client.call("echo", 1) == [1]
        client.close()
        raw.close()


# ---------------------------------------------------------------------- who is gone


def test_a_frontend_that_vanishes_without_a_word_is_noticed_and_its_number_given_to_another(
    owner: StandInOwner,
) -> None:
    stays, gone = Raw(owner), Raw(owner)
    stays.greet()
    gone.greet()
    gone.send(request(0, max_tokens=LONG))
    assert gone.receive().handles == [0]
    gone.close()
    assert eventually(lambda: owner.core.disconnected == [1])
    assert eventually(lambda: owner.server._numbers == {0})
    with contextlib.closing(Raw(owner)) as next_one:
        next_one.greet()
        assert eventually(lambda: owner.core.connected[-1] == (1, 1.0))
    stays.send(request(0, max_tokens=1))
    assert stays.receive().token_ids == [100]
    stays.close()


def test_an_idle_frontend_that_vanishes_is_noticed_too(owner: StandInOwner) -> None:
    for number in range(5):
        raw = Raw(owner)
        raw.greet()
        raw.close()
        assert eventually(lambda number=number: len(owner.core.disconnected) == number + 1)  # type: ignore[misc]
    assert owner.server._peers == {}


def test_a_frontends_number_is_not_given_to_another_before_the_core_has_let_go_of_it(owner: StandInOwner) -> None:
    released = owner.server.release
    owner.server.release = lambda frontend: None  # type: ignore[method-assign]  # the core is slow to let go
    with contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(contextlib.closing(Raw(owner))) for _ in range(3))
        first.greet()
        first.send(Bye())
        assert eventually(lambda: owner.core.disconnected == [0])
        second.greet()
        assert eventually(lambda: owner.core.connected == [(0, 1.0), (1, 1.0)])
        released(0)
        assert eventually(lambda: 0 not in owner.server._numbers)
        third.greet()
        assert eventually(lambda: owner.core.connected[-1] == (0, 1.0))


def test_a_core_whose_io_thread_fails_does_not_live_on_deaf(
    owner: StandInOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(server.os, "_exit", codes.append)
    monkeypatch.setattr(owner.server, "_watch_connections", lambda: 1 / 0)
    owner.server._waker.wake()
    assert eventually(lambda: codes == [1])
    owner.server._context.destroy(linger=0)  # its sockets are open, and collecting it would wait for them


# ---------------------------------------------------------------------- who does not read


def fill(owner: StandInOwner, frontend: int, many: int = MANY) -> None:
    for _ in range(many):
        owner.server.send(frontend, CHUNK)


def credits(owner: StandInOwner) -> list[tuple[int, bool]]:
    return [(event.frontend, event.message.given) for event in owner.events if isinstance(event.message, Credit)]


def test_a_frontend_that_does_not_read_loses_its_credit_and_has_it_back_when_it_reads(owner: StandInOwner) -> None:
    deaf = Deaf(owner)
    deaf.greet()
    fill(owner, 0)
    owner.server.send(0, Outputs([1], [2]))
    assert eventually(lambda: credits(owner) == [(0, False)])
    received = [deaf.receive() for _ in range(MANY + 1)]
    assert received == [CHUNK] * MANY + [Outputs([1], [2])]
    assert eventually(lambda: credits(owner) == [(0, False), (0, True)])
    assert owner.server._peers[0].backlog_bytes == 0
    deaf.close()


def test_a_frontend_that_does_not_read_does_not_slow_others(owner: StandInOwner, client: SyncClient) -> None:
    deaf = Deaf(owner)
    deaf.greet()
    fill(owner, 1)
    assert eventually(lambda: credits(owner) == [(1, False)])
    for handle in range(20):
        client.add_request(request(handle, max_tokens=20))
        assert collect(client, 1) == {handle: list(range(100, 120))}
    assert client.call("echo", 1, timeout=PROMPTLY) == [1]
    assert owner.server._peers[1].backlog
    deaf.close()


def test_a_frontend_that_vanishes_while_much_waits_for_it_is_forgotten_with_all_of_it(
    owner: StandInOwner, client: SyncClient
) -> None:
    deaf = Deaf(owner)
    deaf.greet()
    fill(owner, 1)
    assert eventually(lambda: credits(owner) == [(1, False)])
    deaf.close()
    assert eventually(lambda: owner.core.disconnected == [1])
    assert client.call("echo", 1, timeout=PROMPTLY) == [1]
    assert set(owner.server._peers) == {0}


def test_a_frontend_that_does_not_read_for_too_long_is_disconnected_and_logged_and_gets_a_bye(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_FAREWELL_S", 0.02)
    with stand_in(service=ServiceConfig(slow_frontend_timeout=0.2)) as owner, caplog.at_level(logging.WARNING):
        deaf = Deaf(owner)
        deaf.greet(name="laptop")
        deaf.send(request(0, max_tokens=LONG))
        fill(owner, 0)
        assert eventually(lambda: owner.core.disconnected == [0])
        assert not owner.core.has_work
        assert "dropped the frontend 'laptop', which left " in caplog.text
        while not isinstance(answer := deaf.receive(), Bye):
            assert isinstance(answer, Outputs)
        assert answer.reason.startswith("this frontend was disconnected: it left ")
        assert eventually(lambda: not owner.server._dropped)
        deaf.close()


def test_a_frontend_with_too_many_unread_bytes_is_disconnected_at_once(
    owner: StandInOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_BACKLOG_BYTES", 1_000_000)
    deaf = Deaf(owner)
    deaf.greet()
    fill(owner, 0)
    assert eventually(lambda: owner.core.disconnected == [0])
    fill(owner, 0)  # has no receiver
    assert eventually(owner.server._outbox.empty)
    assert owner.server._peers == {}
    deaf.close()
    assert eventually(lambda: not owner.server._dropped), "nobody is left to be told"


# ---------------------------------------------------------------------- floods


def taken(owner: StandInOwner) -> int:
    return sum(not isinstance(event.message, Hello) for event in owner.events)


@pytest.mark.parametrize(
    ("limit", "value", "size"), [("MAX_MESSAGES", 50, 0), ("MAX_BYTES", 500_000, 50_000)], ids=["messages", "bytes"]
)
def test_a_flood_waits_outside_while_the_core_computes_and_none_of_it_is_lost(
    owner: StandInOwner, raw: Raw, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, size: int
) -> None:
    monkeypatch.setattr(inbox, limit, value)
    raw.greet()
    assert eventually(lambda: owner.core.connected)
    owner.busy = True
    frames = codec.encode(Abort([1]), owner.instance_id, EPOCH)
    for _ in range(1000):
        raw.send_frames([*frames, bytes(size)])
    inside = owner.server._inbox
    assert eventually(lambda: not inside.has_room)
    assert inside._queue.qsize() <= 50
    assert inside._put_bytes - inside._taken_bytes <= 500_000 + size + 1000
    owner.busy = False
    assert eventually(lambda: taken(owner) == 1000, 30)


def test_room_made_in_the_instant_in_which_none_was_found_is_used(
    owner: StandInOwner, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, full = Inbox.has_room.fget, threading.Event()  # type: ignore[attr-defined]

    def has_room(self: Inbox) -> bool:
        found = bool(room(self))
        if not found and not full.is_set() and sys._getframe(1).f_code.co_name == "_serve":
            full.set()
            owner.events += owner.server.receive(wait=False)  # as the main thread may at this moment
        return found

    monkeypatch.setattr(inbox, "MAX_MESSAGES", 2)
    raw.greet()
    assert eventually(lambda: owner.core.connected)
    owner.busy = True
    monkeypatch.setattr(Inbox, "has_room", property(has_room))
    for _ in range(5):  # the core may still take one or two before it is busy
        raw.send(Abort([1]))
    assert full.wait(PROMPTLY)
    owner.busy = False
    assert eventually(lambda: taken(owner) == 5)


def test_a_flood_does_not_delay_other_frontends_for_long(owner: StandInOwner, client: SyncClient) -> None:
    flood = Raw(owner)
    flood.greet()
    owner.busy = True
    for _ in range(20_000):
        flood.send(Abort([1]))
    assert eventually(lambda: not owner.server._inbox.has_room)
    call = client._connection.start_call("echo", [1])
    owner.busy = False
    assert eventually(lambda: client.abort([]) or call in client._connection.results)
    assert taken(owner) < 20_000
    flood.close()


def test_each_turn_reads_from_both_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FRAMES_A_TURN", 1)
    turns: list[set[int]] = []
    receive, handle = CoreServer._receive_some, CoreServer._take

    def one_turn(self: CoreServer) -> bool:
        if not all(router.getsockopt(zmq.EVENTS) & zmq.POLLIN for router in self._routers):
            return not turns  # no message is taken before both addresses have one
        turns.append(set())
        return receive(self)

    def take(self: CoreServer, origin: server.Origin, frames: list[zmq.Frame], size: int) -> int:
        turns[-1].add(origin[0])
        return handle(self, origin, frames, size)

    monkeypatch.setattr(CoreServer, "_receive_some", one_turn)
    monkeypatch.setattr(CoreServer, "_take", take)
    admin_address = f"ipc://{tmp_path}/admin.sock"
    with stand_in(address=f"ipc://{tmp_path}/core.sock", admin_address=admin_address) as owner:
        raws = [Raw(owner), Raw(owner, admin_address)]
        for raw in raws:
            for _ in range(3):
                raw.send(StatusCall())
        assert eventually(lambda: turns and turns[0] == {0, 1}), turns
        for raw in raws:
            raw.close()


# ---------------------------------------------------------------------- the end


def test_a_core_that_ends_sends_what_it_has_and_says_why(owner: StandInOwner, raw: Raw) -> None:
    raw.greet()
    assert eventually(lambda: owner.core.connected)
    for token in range(50):
        owner.server.send(0, Outputs([0], [token]))
    owner.stop("the daemon was stopped")
    assert [raw.receive().token_ids for _ in range(50)] == [[token] for token in range(50)]
    assert raw.receive() == Bye("the daemon was stopped")


def test_a_server_that_has_ended_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    def start_and_end(reason: str | None) -> None:
        core = CoreServer(
            Endpoints(f"ipc://{tmp_path}/x.sock", f"ipc://{tmp_path}/y.sock"),
            bytes(8),
            1,
            CoreStatus(1, 1, 1, ""),
            ServiceConfig(),
        )
        core.stop(reason)
        assert not core._thread.is_alive()

    start_and_end("over")
    before = open_descriptors()
    for reason in (None, "over", None):
        start_and_end(reason)
    assert open_descriptors() <= before


def test_what_is_sent_to_frontends_goes_to_each_in_order(owner: StandInOwner) -> None:
    raws = [Raw(owner) for _ in range(3)]
    for raw in raws:
        raw.greet()
    assert eventually(lambda: len(owner.core.connected) == 3)
    for token in range(300):
        owner.server.send(token % 3, Outputs([0], [token]))
    received: dict[int, list[int]] = defaultdict(list)
    for i, raw in enumerate(raws):
        for _ in range(100):
            received[i] += raw.receive().token_ids
        raw.close()
    assert received == {i: list(range(i, 300, 3)) for i in range(3)}
