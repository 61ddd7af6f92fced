"""What a core decodes of its frontends' messages: nothing that its model can't accept, a bounded amount between two
steps, and in turns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mainspring.ipc import codec, intake
from mainspring.ipc.connection import Connection
from mainspring.ipc.errors import InvalidRequestError, ProtocolError
from mainspring.ipc.intake import (
    ADMIN_BODY_BYTES,
    FIRST_FRAME_BYTES,
    LARGE_BYTES,
    REFUSED_FACTOR,
    SMALL_BODY_BYTES,
    TURN_BYTES,
    BodyLimits,
    Turns,
)
from mainspring.ipc.messages import (
    KIND_OF,
    MAX_ABORTED,
    MAX_MEDIA_ITEMS,
    Abort,
    AddRequest,
    Fault,
    Hello,
    MediaItem,
    ModelFacts,
    Refused,
    Sampling,
    UtilityCall,
)
from mainspring.ipc.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from mainspring.ipc.processor_names import MAX_EXTRA_ARGS_BYTES
from mainspring.ipc.request_check import RequestCheck
from mainspring.ipc.structured import MAX_SPEC_BYTES
from mainspring.ipc.sync_client import SyncClient
from mainspring.ipc.transport import MAX_MESSAGE_BYTES
from stand_in_core import StandInOwner, stand_in
from wire import Raw, collect, eventually, request, sees_the_loss

ADD = KIND_OF[AddRequest]
LONGEST, VOCABULARY = 20_000, 30_000
MODEL = ModelFacts(VOCABULARY, 64, LONGEST, "float32")
LIMITS = BodyLimits(MODEL)


def body(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


@pytest.fixture
def owner() -> Iterator[StandInOwner]:
    with stand_in() as owner:
        yield owner


@pytest.fixture
def raw(owner: StandInOwner) -> Iterator[Raw]:
    with contextlib.closing(Raw(owner)) as raw:
        raw.greet()
        yield raw


def the_largest() -> AddRequest:
    """The largest request that a model can accept."""
    last = VOCABULARY - 1
    words = [[last] * (MAX_BAD_WORD_TOKENS // MAX_BAD_WORDS)] * MAX_BAD_WORDS
    sampling = Sampling(
        1,
        stop_token_ids=[last] * VOCABULARY,
        logit_bias=dict.fromkeys(range(VOCABULARY), 0.1),
        allowed_token_ids=[last] * VOCABULARY,
        bad_words=words,
        grammar=["regex", "x" * MAX_SPEC_BYTES],
        extra_args=b"x" * MAX_EXTRA_ARGS_BYTES,
    )
    return AddRequest(2**63 - 1, "r", [last] * (LONGEST - 2), sampling, output_token_ids=[])


def test_the_largest_request_of_a_model_is_decoded_as_it_was_sent() -> None:
    sent = the_largest()
    encoded = body(sent)
    decoder = LIMITS.decoder(ADD, len(encoded))
    assert decoder is not None
    assert len(encoded) <= LIMITS.of(ADD, False)
    decoded = codec.read_body(ADD, encoded, decoder)
    assert isinstance(decoded, AddRequest)
    assert msgspec.structs.astuple(decoded)[:3] == msgspec.structs.astuple(sent)[:3]
    assert body(decoded) == encoded


def test_the_limit_of_a_request_holds_with_the_longest_integers() -> None:
    sampling = Sampling(1, stop_token_ids=[2**62] * VOCABULARY, allowed_token_ids=[2**62] * VOCABULARY)
    message = AddRequest(1, "r", [2**62] * LONGEST, sampling)
    assert len(body(message)) < LIMITS.of(ADD, False)


LISTS = {
    "prompt_token_ids": (LONGEST, lambda n: AddRequest(1, "", [5] * n, Sampling(1))),
    "output_token_ids": (LONGEST, lambda n: AddRequest(1, "", [5], Sampling(1), output_token_ids=[5] * n)),
    "stop_token_ids": (VOCABULARY, lambda n: AddRequest(1, "", [5], Sampling(1, stop_token_ids=[5] * n))),
    "allowed_token_ids": (VOCABULARY, lambda n: AddRequest(1, "", [5], Sampling(1, allowed_token_ids=[5] * n))),
    "logit_bias": (VOCABULARY, lambda n: AddRequest(1, "", [5], Sampling(1, logit_bias=dict.fromkeys(range(n), 1.0)))),
    "bad_words": (MAX_BAD_WORDS, lambda n: AddRequest(1, "", [5], Sampling(1, bad_words=[[5] * 4] * n))),
    "grammar": (2, lambda n: AddRequest(1, "", [5], Sampling(1, grammar=["x" * 10_000] * n))),
    "media": (MAX_MEDIA_ITEMS, lambda n: AddRequest(1, "", [5], Sampling(1), media=[MediaItem(b"", "", 0, 1)] * n)),
    "moved_from": (2, lambda n: AddRequest(1, "", [5] * LONGEST, Sampling(1), moved_from=[1] * n)),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_refused_at_its_length(name: str) -> None:
    longest, make = LISTS[name]
    for length in (longest, longest + 1):
        encoded = body(make(length))
        assert len(encoded) > LARGE_BYTES
        try:
            codec.read_body(ADD, encoded, LIMITS.decoder(ADD, len(encoded)))
            refused = None
        except ProtocolError as error:
            refused = intake.name_of_list(str(error))
        assert refused == (name if length > longest else None)


def test_every_list_of_a_request_has_a_limit() -> None:
    fields = [*msgspec.structs.fields(AddRequest), *msgspec.structs.fields(Sampling)]
    lists = [field.name for field in fields if getattr(field.type, "__origin__", None) in (list, dict)]
    assert sorted(lists) == sorted(LISTS)


def test_tokens_of_bad_words_are_limited_together() -> None:
    sampling = Sampling(1, bad_words=[[5] * 1000] * 66)
    with pytest.raises(Exception, match=f"bad_words has 66000 tokens; the limit is {MAX_BAD_WORD_TOKENS}"):
        RequestCheck(MODEL).check(AddRequest(1, "", [5], sampling))


@pytest.mark.parametrize("handle", [0, 1, 127, 128, 255, 256, 70_000, 2**32, 2**63 - 1])
def test_the_handle_of_a_request_is_read_without_the_rest(handle: int) -> None:
    encoded = body(AddRequest(handle, "", [5] * 100, Sampling(1)))
    assert intake.first_integer(encoded) == handle
    assert encoded[:3] == b"\xdc\x00\x10"
    assert intake.first_integer(b"\x9f" + encoded[3:]) == handle  # other headers of the array
    assert intake.first_integer(b"\xdd\x00\x00\x00\x10" + encoded[3:]) == handle


@pytest.mark.parametrize("wrong", [b"", b"\x9e", b"\x9e" + b"\xff" * 20, b"\x9e" + b"\xc0" * 20, b"\x9e\xa3" * 20])
def test_what_has_no_handle_gives_none(wrong: bytes) -> None:
    assert intake.first_integer(wrong) is None


# ---------------------------------------------------------------------- over the wire


def test_a_request_too_large_for_the_model_ends_with_an_error_and_is_not_decoded(
    owner: StandInOwner, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Any] = []
    monkeypatch.setattr(type(owner.core), "refuse", lambda _, *given: refused.append(given), raising=False)
    monkeypatch.setattr(owner.server, "_limits", LIMITS)
    raw.send(AddRequest(7, "", [5] * 3_000_000, Sampling(1)))
    assert eventually(lambda: refused)
    [(frontend, handle, error)] = refused
    assert (frontend, handle, type(error).__name__) == (0, 7, "InvalidRequestError")
    assert "the request is larger than this model can accept: a body of 3000" in str(error)
    assert owner.server.malformed_frames == 0
    raw.send(request(8, max_tokens=1))
    assert raw.receive().handles == [8]


def test_a_large_request_of_another_epoch_is_a_fault(owner: StandInOwner, raw: Raw) -> None:
    raw.send(AddRequest(7, "", [5] * 3_000_000, Sampling(1)), epoch=owner.epoch + 1)
    assert isinstance(raw.receive(), Fault)


def test_a_stranger_may_send_little(owner: StandInOwner) -> None:
    with contextlib.closing(Raw(owner)) as stranger:
        stranger.send(Hello(1, owner.token, "x" * SMALL_BODY_BYTES), codec.NO_INSTANCE, 0)
        answer = stranger.receive()
        assert isinstance(answer, Refused)
        assert f"the limit is {SMALL_BODY_BYTES}" in answer.reason


def test_an_abort_has_a_limited_number_of_handles(owner: StandInOwner, raw: Raw) -> None:
    raw.send(Abort([2**62] * MAX_ABORTED))
    raw.send(Abort([1] * (MAX_ABORTED + 1)))
    answer = raw.receive()
    assert isinstance(answer, Fault)
    assert f"length <= {MAX_ABORTED}" in answer.error_text
    assert owner.server.malformed_frames == 1


def test_arguments_of_a_call_are_larger_for_an_administrator_only() -> None:
    kind = KIND_OF[UtilityCall]
    assert (LIMITS.of(kind, True), LIMITS.of(kind, False)) == (ADMIN_BODY_BYTES, SMALL_BODY_BYTES)


def test_a_call_with_too_many_arguments_gets_an_error(
    owner: StandInOwner, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner.server._peers[0], "admin", False)
    raw.send(UtilityCall(9, "ping", codec.encode_value(["x" * SMALL_BODY_BYTES])))
    answer = raw.receive()
    assert (answer.call_id, answer.error) == (9, "InvalidRequestError")
    assert f"the limit is {SMALL_BODY_BYTES}" in answer.error_text


def test_all_requests_arrive_in_order_and_small_ones_of_others_pass_large_ones(
    owner: StandInOwner, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "TURN_S", 0.3)
    taken: list[tuple[int, int]] = []
    add = lambda frontend, message, *_: taken.append((frontend, message.handle))  # noqa: E731
    monkeypatch.setattr(owner.core, "add_request", add)
    large = AddRequest(0, "", [70_000] * 40_000, Sampling(1))
    owner.busy = True
    for handle in range(8):
        raw.send(msgspec.structs.replace(large, handle=handle))
    raw.send(request(8))
    with contextlib.closing(Raw(owner)) as other:
        other.greet()
        other.send(request(0))
        time.sleep(0.1)
        owner.busy = False
        assert eventually(lambda: len(taken) == 10)
    assert [handle for frontend, handle in taken if frontend == 0] == list(range(9))
    assert taken.index((1, 0)) < taken.index((0, 7))


def test_a_body_that_waits_for_a_turn_ends_plans_of_several_steps(
    owner: StandInOwner, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "TURN_S", 1000.0)
    assert eventually(lambda: owner.events), "the Hello is taken"
    owner._end_loop()
    server = owner.server
    raw.send(AddRequest(0, "", [70_000] * (4 * TURN_BYTES // 5), Sampling(1)))
    assert eventually(lambda: server._inbox._queue.qsize() == 1)
    raw.send(AddRequest(1, "", [70_000] * LARGE_BYTES, Sampling(1)))
    assert eventually(lambda: server._turns._waiting)
    taken = server.receive(wait=False)
    assert eventually(lambda: server.messages_wait[0]), "a plan would go on, and with it the turn"
    while len(taken) < 2:
        taken += server.receive(wait=False)
    assert [event.message.handle for event in taken] == [0, 1]
    assert eventually(lambda: server.receive(wait=False) == [] and not server.messages_wait[0])


# ---------------------------------------------------------------------- frames


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StandInOwner]:
    """A core for other programs: only connections over its admin address have `admin`."""
    with stand_in(address=f"ipc://{tmp_path}/core.sock", admin_address=f"ipc://{tmp_path}/admin.sock") as owner:
        yield owner


def with_frame(owner: StandInOwner, handle: int, size: int) -> list[Any]:
    return [*codec.encode(request(handle, max_tokens=1), owner.instance_id, owner.epoch), bytes(size)]


def test_a_frame_that_no_request_can_have_ends_its_senders_connection_only(daemon: StandInOwner) -> None:
    limit = BodyLimits(daemon.core.model).frame_bytes
    assert FIRST_FRAME_BYTES < limit < MAX_MESSAGE_BYTES
    with contextlib.closing(SyncClient(Connection(daemon.address))) as client, contextlib.closing(Raw(daemon)) as raw:
        assert raw.greet().max_frame_bytes == limit
        raw.send_frames(with_frame(daemon, 0, limit))
        assert raw.receive().handles == [0]
        raw.send_frames(with_frame(daemon, 1, limit + 1))
        assert eventually(lambda: daemon.core.disconnected == [1])
        client.add_request(request(0))
        assert collect(client, 1) == {0: [100, 101, 102]}
        assert client._connection.reconnections == 0
        assert [one.handle for one in daemon.core.added] == [0, 0]


def test_a_client_does_not_send_a_frame_that_would_end_its_connection(daemon: StandInOwner) -> None:
    with contextlib.closing(SyncClient(Connection(daemon.address))) as client:
        limit = client._connection._last_ready.max_frame_bytes  # type: ignore[union-attr]
        too_long, array = "x" * limit, np.zeros(limit + 1, np.uint8)
        for send in (
            lambda: client.add_request(AddRequest(1, too_long, [5], Sampling(1))),
            lambda: client.add_request(request(2), [array]),
            lambda: client.call("echo", too_long),
            lambda: client.call("echo", arrays=[codec.Array(array, "int32")]),
        ):
            with pytest.raises(InvalidRequestError, match=f"a frame over this connection may have {limit}"):
                send()
        client.add_request(request(3))
        assert collect(client, 1) == {3: [100, 101, 102]}
        assert client._connection.reconnections == 0


def test_administrators_may_send_weights(daemon: StandInOwner) -> None:
    assert daemon.endpoints.admin_address
    with contextlib.closing(Raw(daemon, daemon.endpoints.admin_address)) as raw:
        assert raw.greet().max_frame_bytes == MAX_MESSAGE_BYTES


def test_a_connection_from_before_the_model_was_loaded_sends_a_large_request_over_the_next_one(
    daemon: StandInOwner,
) -> None:
    with contextlib.closing(SyncClient(Connection(daemon.address))) as client:
        daemon.kill()
        assert sees_the_loss(client)
        daemon.load()
        assert eventually(lambda: client.abort([]) or daemon.server._early)
        daemon.announce()
        assert eventually(lambda: client.abort([]) or client._connection.reconnections == 1)
        large = AddRequest(1, "", [70_000] * (FIRST_FRAME_BYTES // 4), Sampling(1))
        client.add_request(large)
        assert collect(client, 1) == {1: [70_000]}
        assert client._connection.reconnections == 2
        assert [len(one.prompt_token_ids) for one in daemon.core.added] == [FIRST_FRAME_BYTES // 4]


# ---------------------------------------------------------------------- turns


def turns() -> Turns[str]:
    made: Turns[str] = Turns()
    made.begin(idle=False)
    made.renew()
    return made


def test_frontends_take_turns_and_their_messages_stay_in_order() -> None:
    made = turns()
    for frontend, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2")):
        made.put(frontend, LARGE_BYTES + 1, LARGE_BYTES + 1, item)
    assert made.must_wait("a", 1)
    assert not made.must_wait("c", LARGE_BYTES)
    taken = [found[2] for _ in range(6) if (found := made.take())]
    assert taken == ["a1", "b1", "a2", "b2", "a3"]
    assert not made.must_wait("a", 1)


def test_messages_of_a_frontend_that_waits_for_its_turn_do_not_keep_others_from_being_received() -> None:
    made = turns()
    made.charge("greedy", 4 * TURN_BYTES)
    number = 0
    while made.may_receive:
        made.put("greedy", LARGE_BYTES, LARGE_BYTES, str(number))
        number += 1
    taken = made.take()
    assert taken == ("greedy", LARGE_BYTES, "0")
    assert made.may_receive
    assert made.take() is None, "there is room again, so its next message waits"


def test_a_turn_decodes_a_bounded_amount_and_a_large_body_costs_the_next_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "TURN_S", 1000.0)
    made = turns()
    for number in range(3):
        made.put(number, 2 * TURN_BYTES, 1, "x")
    assert made.take()
    made.spend_large(2 * TURN_BYTES)
    counts = []
    for _ in range(4):
        counts.append(0)
        made.begin(idle=False)
        made.renew()
        made.renew()  # the same turn
        while made.take():
            made.spend_large(2 * TURN_BYTES)
            counts[-1] += 1
    assert counts == [0, 1, 0, 1]


def test_a_frontend_waits_after_a_body_above_a_turn_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "TURN_S", 1000.0)
    made = turns()
    for item in ("a1", "a2"):
        made.put("a", 3 * TURN_BYTES, 0, item)  # refused: nothing is decoded
    taken = []
    for number in range(4):
        made.put("b", LARGE_BYTES + 1, 1, f"b{number}")
        while found := made.take():
            taken.append(found[2])
        made.begin(idle=False)
        made.renew()
    assert taken == ["a1", "b0", "b1", "a2", "b2", "b3"]


def test_a_refused_body_delays_the_next_large_one_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "TURN_S", 1000.0)
    waits = {}
    for size, refused in ((3 * TURN_BYTES, True), (3 * TURN_BYTES, False), (TURN_BYTES, True)):
        made = turns()
        made.put("a", size, 0, "first")
        made.put("a", LARGE_BYTES + 1, 0, "second")
        assert made.take()
        if refused:
            made.charge("a", size)
        number = 0
        while not made.take():
            made.begin(idle=False)
            made.renew()
            number += 1
        waits[size, refused] = number
    assert waits == {
        (3 * TURN_BYTES, True): 3 * REFUSED_FACTOR,
        (3 * TURN_BYTES, False): 2,
        (TURN_BYTES, True): 0,
    }


def test_a_request_that_is_refused_at_a_list_is_charged(
    owner: StandInOwner, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []
    monkeypatch.setattr(type(owner.core), "refuse", lambda *_: None, raising=False)
    monkeypatch.setattr(Turns, "charge", lambda _, __, size: charged.append(size))
    for message in (AddRequest(1, "", [5] * 1_500_000, Sampling(1)), AddRequest(2, "", [5] * 20_000, Sampling(1))):
        raw.send(message)
    assert eventually(lambda: len(owner.core.added) == 1)
    assert [one.handle for one in owner.core.added] == [2]
    assert [size > 1_500_000 for size in charged] == [True]


def test_small_bodies_are_bounded_in_each_turn_and_an_idle_core_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "TURN_S", 1000.0)
    made = turns()
    made.spend(TURN_BYTES)
    assert not made.may_receive
    made.renew()
    assert not made.may_receive
    made.begin(idle=False)
    made.renew()
    assert made.may_receive
    made.spend(TURN_BYTES)
    made.idle = True
    made.renew()
    assert made.may_receive


def test_the_number_of_small_messages_is_bounded_in_each_turn() -> None:
    made, taken = turns(), 0
    while made.may_receive and taken < 1000:
        made.spend(0)
        taken += 1
    assert taken == 256


def test_a_long_step_does_not_stop_the_intake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "TURN_S", 0.01)
    made = turns()
    made.spend(TURN_BYTES)
    assert made.next_turn is not None
    assert eventually(lambda: made.renew() or made.may_receive)


def test_large_bodies_that_wait_are_bounded_and_forgotten_with_their_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "WAITING_BYTES", 100)
    made = turns()
    made.put("a", 100, 100, "x")
    assert not made.may_receive
    made.forget("a")
    assert made.may_receive
    assert made.take() is None


def test_arrays_of_messages_that_wait_are_bounded_too(
    owner: StandInOwner, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner.server._turns, "take", lambda: None)  # nothing may be decoded now
    message = AddRequest(1, "", [5] * LARGE_BYTES, Sampling(1))
    raw.send_frames([*codec.encode(message, owner.instance_id, owner.epoch), bytes(intake.WAITING_BYTES)])
    assert eventually(lambda: not owner.server._turns.may_receive)
