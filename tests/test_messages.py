"""The wire, byte for byte. Another language's client is written against these bytes: a changed literal is a broken
protocol, not a test to update. New fields are appended, with defaults, and the literals here stay as they are."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.ipc import codec
from mainspring.ipc.errors import ProtocolError
from mainspring.ipc.messages import (
    KINDS,
    Abort,
    Adapter,
    AddRequest,
    Bye,
    CorePlace,
    CoreStatus,
    DesiredState,
    Distribution,
    Fault,
    Finished,
    FrontendStatus,
    Hello,
    Latency,
    Logprobs,
    Measured,
    MediaItem,
    ModelFacts,
    Outputs,
    Pooled,
    Pooling,
    Probe,
    Ready,
    Refused,
    Routed,
    Sampling,
    Started,
    StartReport,
    Stats,
    Status,
    StatusCall,
    Tensor,
    UtilityCall,
    UtilityResult,
)

INSTANCE = bytes(range(8))

# kind → (a message with every field set, its body in hex)
GOLDEN: dict[int, tuple[msgspec.Struct, str]] = {
    1: (
        Hello(1, b"\xaa\xbb", "pid 7", 2.5, bytes(range(16))),
        "9501c402aabba57069642037cb4004000000000000c410000102030405060708090a0b0c0d0e0f",
    ),
    2: (
        Ready(
            INSTANCE,
            3,
            ModelFacts(512, 64, 2048, "bfloat16", [1, 2], "f00d", "beef", ["embed"], ["image"], True, True),
            b"{}",
            ["admin"],
            1 << 20,
            1,
            [CorePlace(0, "a"), CorePlace(1, "a.1")],
            ["a.media"],
        ),
        "99c4080001020304050607039bcd020040cd0800a862666c6f61743136920102a466303064a46265656691a5656d626564"
        "91a5696d616765c3c3c4027b7d91a561646d696ece0010000001929200a1619201a3612e3191a7612e6d65646961",
    ),
    3: (Refused("ProtocolError", "no"), "92ad50726f746f636f6c4572726f72a26e6f"),
    4: (
        AddRequest(
            300,
            "r-1",
            [5, 70000],
            Sampling(
                *(16, -2, 0.5, 0.25, 40, 0.125, 4, [1, 2], 0.5, -0.5, 1.5, 5, 0, {7: 2.0}, [7, 8], [[3, 4]]),
                ["re", "a"],
                b"\x81\xa1a\x01",
            ),
            -1,
            [9],
            "salt",
            Tensor(0, "bfloat16", [2, 64]),
            1.5,
            True,
            Pooling("embed", 8, False, 2),
            Adapter(1, "a", "/a"),
            Adapter(2, "b", "/b", 4),
            True,
            [1, 3],
            [MediaItem(b"\xaa\xbb", "image", 1, 300)],
        ),
        "dc0010cd012ca3722d319205ce00011170"
        "dc001210fecb3fe0000000000000cb3fd000000000000028cb3fc000000000000004920102"
        "cb3fe0000000000000cbbfe0000000000000cb3ff800000000000005008107cb40000000000000009207089192030492a27265a161"
        "c40481a16101"
        "ff9109a473616c749300a862666c6f61743136920240cb3ff8000000000000c3"
        "94a5656d62656408c2029401a161a22f61009402a162a22f6204c39201039194c402aabba5696d61676501cd012c",
    ),
    5: (Abort([1, 300]), "919201cd012c"),
    6: (
        UtilityCall(7, "ping", msgspec.Raw(b"\x91\x01"), [Tensor(0, "float32", [1])]),
        "9407a470696e679101919300a7666c6f617433329101",
    ),
    7: (UtilityResult(7, msgspec.Raw(b"\xa2ok"), "E", "why"), "9407a26f6ba145a3776879"),
    8: (
        Outputs(
            [3, 300],
            [65536, 7],
            [Started(3, 0.5, 0.25, 16)],
            [Finished(300, "stop", 7, 2, "E", "why")],
            Stats(
                *(1, 2, 0.5, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 0, 0, 0, 11, 12, 1, 13, ["a"], ["b"], 2),
                *(3, 2, 1, 0.5, 512),
            ),
            [Logprobs(1, b"\7\0\0\0", b"\0\0\x80\xbf", b"\1\0\0\0", [1], 3, 2)],
            [Pooled(3, [1], b"\0\0\x80\x3f")],
            Routed([3, 300], [0, 9], [1, 2], [1, 2], "uint8", b"\1\2\3\4\5\6"),
        ),
        "989203cd012c92ce0001000007"
        "919403cb3fe0000000000000cb3fd000000000000010"
        "9196cd012ca473746f700702a145a3776879"
        "dc001c0102cb3fe0000000000000030405060708090a00010000000b0c010d91a16191a16202030201cb3fe0000000000000cd0200"
        "919701c40407000000c404000080bfc4040100000091010302"
        "9193039101c4040000803f"
        "969203cd012c920009920102920102a575696e7438c406010203040506",
    ),
    9: (Bye("over"), "91a46f766572"),
    10: (Fault("E", "why"), "92a145a3776879"),
    11: (Probe(), "90"),
    12: (StatusCall(b"\xaa"), "91c401aa"),
    13: (
        Status(
            CoreStatus(
                3,
                11,
                10,
                "serving",
                "m",
                2,
                "why",
                1.5,
                100,
                2.5,
                Latency(0.5, 0.25, 0.125),
                Latency(1.0, 2.0, 4.0),
                Stats(1, 2, 0.5, 3, 4, 5, 6, 7, 8, 9, 10),
                [FrontendStatus(1, "a", 2.5, 3, 4, 5, 6, True)],
                7,
                1,
                [CorePlace(1, "a.1")],
                "why",
            ),
            Measured(5, 6, [1, 2, 3, 4], [Distribution("x", [0.5], [7, 8], 2.5)]),
        ),
        "92de0012a565706f636803a8636f72655f7069640bae73757065727669736f725f7069640aa57068617365a773657276696e67"
        "a56d6f64656ca16da8726573746172747302aa6c6173745f6372617368a3776879a8757074696d655f73cb3ff8000000000000"
        "aa6e756d5f626c6f636b7364ac746f6b656e735f7065725f73cb4004000000000000"
        "b374696d655f746f5f66697273745f746f6b656e"
        "83a3703530cb3fe0000000000000a3703935cb3fd0000000000000a3703939cb3fc0000000000000"
        "b3696e7465725f746f6b656e5f6c6174656e6379"
        "83a3703530cb3ff0000000000000a3703935cb4000000000000000a3703939cb4010000000000000"
        "a57374617473dc001c0102cb3fe0000000000000030405060708090a000100000000000000909000000000cb000000000000000000"
        "a966726f6e74656e64739188a2696401a46e616d65a161a6776569676874cb4004000000000000ab6e756d5f72756e6e696e6703"
        "ab6e756d5f77616974696e6704b0746f6b656e735f696e5f666c6967687405b167656e65726174696f6e5f746f6b656e7306"
        "a4736c6f77c3b06d616c666f726d65645f6672616d657307a4636f726501a5636f726573919201a3612e31"
        "ac6661696c65645f7374617274a3776879"
        "94050694010203049194a17891cb3fe0000000000000920708cb4004000000000000",
    ),
}

NO_MEDIA: dict[str, Any] = {"media": []}
NOT_MOVED: dict[str, Any] = {"moved_from": []} | NO_MEDIA
WITHOUT_LOSS = msgspec.structs.replace(GOLDEN[2][0].model, weights_lost=False)  # type: ignore[attr-defined]
WITHOUT_ENCODER = msgspec.structs.replace(WITHOUT_LOSS, encoder_input=False)
TEXT_ONLY = msgspec.structs.replace(WITHOUT_ENCODER, media=[])
NOT_PATIENT: dict[str, Any] = {"patient": False} | NOT_MOVED
ALONE: dict[str, Any] = {"number": 0, "cores": [], "media": []}
NO_ADAPTERS: dict[str, Any] = {"pooling": None, "lora": None, "prompt_adapter": None} | NOT_PATIENT
# of a core without logits processors
PLAIN = Sampling(
    *(16, -2, 0.5, 0.25, 40, 0.125, 4, [1, 2], 0.5, -0.5, 1.5, 5, 0, {7: 2.0}, [7, 8], [[3, 4]]), ["re", "a"]
)
# Messages of earlier versions, with fewer fields: (kind, body, the missing fields)
EARLIER: list[tuple[int, str, dict[str, Any]]] = [
    (1, "9401c402aabba57069642037cb4004000000000000", {"session": b""}),
    (
        2,
        "95c40800010203040506070396cd020040cd0800a862666c6f61743136920102a466303064c4027b7d91a561646d696e",
        {"model": ModelFacts(512, 64, 2048, "bfloat16", [1, 2], "f00d"), "max_frame_bytes": 256 << 20} | ALONE,
    ),
    (
        2,
        "95c40800010203040506070398cd020040cd0800a862666c6f61743136920102a466303064a46265656691a5656d626564"
        "c4027b7d91a561646d696e",
        {"model": TEXT_ONLY, "max_frame_bytes": 256 << 20} | ALONE,
    ),
    (
        2,
        "96c40800010203040506070398cd020040cd0800a862666c6f61743136920102a466303064a46265656691a5656d626564"
        "c4027b7d91a561646d696ece00100000",
        {"model": TEXT_ONLY} | ALONE,
    ),
    (
        2,
        "98c40800010203040506070398cd020040cd0800a862666c6f61743136920102a466303064a46265656691a5656d626564"
        "c4027b7d91a561646d696ece0010000001929200a1619201a3612e31",
        {"model": TEXT_ONLY, "media": []},
    ),
    (
        2,
        "99c40800010203040506070399cd020040cd0800a862666c6f61743136920102a466303064a46265656691a5656d626564"
        "91a5696d616765c4027b7d91a561646d696ece0010000001929200a1619201a3612e3191a7612e6d65646961",
        {"model": WITHOUT_ENCODER},
    ),
    (
        2,
        "99c4080001020304050607039acd020040cd0800a862666c6f61743136920102a466303064a46265656691a5656d626564"
        "91a5696d616765c3c4027b7d91a561646d696ece0010000001929200a1619201a3612e3191a7612e6d65646961",
        {"model": WITHOUT_LOSS},
    ),
    (
        4,
        "98cd012ca3722d319205ce00011170"
        "9810fecb3fe0000000000000cb3fd000000000000028cb3fc000000000000004920102"
        "ff9109a473616c749300a862666c6f61743136920240",
        {"age_s": 0.0, "resumed": False, "sampling": Sampling(16, -2, 0.5, 0.25, 40, 0.125, 4, [1, 2])} | NO_ADAPTERS,
    ),
    (
        4,
        "9acd012ca3722d319205ce00011170"
        "dc001110fecb3fe0000000000000cb3fd000000000000028cb3fc000000000000004920102"
        "cb3fe0000000000000cbbfe0000000000000cb3ff800000000000005008107cb40000000000000009207089192030492a27265a161"
        "ff9109a473616c749300a862666c6f61743136920240cb3ff8000000000000c3",
        {"sampling": PLAIN} | NO_ADAPTERS,
    ),
    (
        4,
        "9dcd012ca3722d319205ce00011170"
        "dc001110fecb3fe0000000000000cb3fd000000000000028cb3fc000000000000004920102"
        "cb3fe0000000000000cbbfe0000000000000cb3ff800000000000005008107cb40000000000000009207089192030492a27265a161"
        "ff9109a473616c749300a862666c6f61743136920240cb3ff8000000000000c3"
        "94a5656d62656408c2029401a161a22f61009402a162a22f6204",
        {"sampling": PLAIN} | NOT_PATIENT,
    ),
    (
        4,
        "9ecd012ca3722d319205ce00011170"
        "dc001110fecb3fe0000000000000cb3fd000000000000028cb3fc000000000000004920102"
        "cb3fe0000000000000cbbfe0000000000000cb3ff800000000000005008107cb40000000000000009207089192030492a27265a161"
        "ff9109a473616c749300a862666c6f61743136920240cb3ff8000000000000c3"
        "94a5656d62656408c2029401a161a22f61009402a162a22f6204c3",
        {"sampling": PLAIN} | NOT_MOVED,
    ),
    (
        4,
        "9ecd012ca3722d319205ce00011170"
        "dc001210fecb3fe0000000000000cb3fd000000000000028cb3fc000000000000004920102"
        "cb3fe0000000000000cbbfe0000000000000cb3ff800000000000005008107cb40000000000000009207089192030492a27265a161"
        "c40481a16101"
        "ff9109a473616c749300a862666c6f61743136920240cb3ff8000000000000c3"
        "94a5656d62656408c2029401a161a22f61009402a162a22f6204c3",
        NOT_MOVED,
    ),
    (
        4,
        "9fcd012ca3722d319205ce00011170"
        "dc001210fecb3fe0000000000000cb3fd000000000000028cb3fc000000000000004920102"
        "cb3fe0000000000000cbbfe0000000000000cb3ff800000000000005008107cb40000000000000009207089192030492a27265a161"
        "c40481a16101"
        "ff9109a473616c749300a862666c6f61743136920240cb3ff8000000000000c3"
        "94a5656d62656408c2029401a161a22f61009402a162a22f6204c3920103",
        NO_MEDIA,
    ),
    (6, "9307a470696e679101", {"tensors": []}),
    (
        8,
        "959203cd012c92ce0001000007919403cb3fe0000000000000cb3fd000000000000010"
        "9196cd012ca473746f700702a145a37768799b0102cb3fe0000000000000030405060708090a",
        {"logprobs": [], "pooled": [], "routed": None, "stats": Stats(1, 2, 0.5, 3, 4, 5, 6, 7, 8, 9, 10)},
    ),
    (
        8,
        "979203cd012c92ce0001000007"
        "919403cb3fe0000000000000cb3fd000000000000010"
        "9196cd012ca473746f700702a145a3776879"
        "dc00160102cb3fe0000000000000030405060708090a00010000000b0c010d91a16191a162"
        "919701c40407000000c404000080bfc4040100000091010302"
        "9193039101c4040000803f",
        {
            "routed": None,
            "stats": Stats(1, 2, 0.5, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 0, 0, 0, 11, 12, 1, 13, ["a"], ["b"]),
        },
    ),
    (
        8,
        "989203cd012c92ce0001000007"
        "919403cb3fe0000000000000cb3fd000000000000010"
        "9196cd012ca473746f700702a145a3776879"
        "dc00170102cb3fe0000000000000030405060708090a00010000000b0c010d91a16191a16202"
        "919701c40407000000c404000080bfc4040100000091010302"
        "9193039101c4040000803f"
        "969203cd012c920009920102920102a575696e7438c406010203040506",
        {"stats": Stats(1, 2, 0.5, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 0, 0, 0, 11, 12, 1, 13, ["a"], ["b"], 2)},
    ),
    (
        13,
        "918fa565706f636803a8636f72655f7069640bae73757065727669736f725f7069640aa57068617365a773657276696e67"
        "a56d6f64656ca16da8726573746172747302aa6c6173745f6372617368a3776879a8757074696d655f73cb3ff8000000000000"
        "aa6e756d5f626c6f636b7364ac746f6b656e735f7065725f73cb4004000000000000"
        "b374696d655f746f5f66697273745f746f6b656e"
        "83a3703530cb3fe0000000000000a3703935cb3fd0000000000000a3703939cb3fc0000000000000"
        "b3696e7465725f746f6b656e5f6c6174656e6379"
        "83a3703530cb3ff0000000000000a3703935cb4000000000000000a3703939cb4010000000000000"
        "a573746174739b0102cb3fe0000000000000030405060708090a"
        "a966726f6e74656e64739188a2696401a46e616d65a161a6776569676874cb4004000000000000ab6e756d5f72756e6e696e6703"
        "ab6e756d5f77616974696e6704b0746f6b656e735f696e5f666c6967687405b167656e65726174696f6e5f746f6b656e7306"
        "a4736c6f77c3b06d616c666f726d65645f6672616d657307",
        {
            "measured": Measured(),
            "core": msgspec.structs.replace(GOLDEN[13][0].core, core=0, cores=[], failed_start=""),  # type: ignore[attr-defined]
        },
    ),
]
PARTS = (
    *(Tensor, CorePlace, Sampling, Started, Finished, Stats, Logprobs, ModelFacts, Pooling, Adapter, Pooled, Routed),
    MediaItem,
)
MAPS = (CoreStatus, FrontendStatus, Latency)  # for people and scripts


@pytest.mark.parametrize("kind", sorted(GOLDEN))
def test_each_message_has_these_bytes(kind: int) -> None:
    message, body = GOLDEN[kind]
    header, encoded = codec.encode(message, INSTANCE, 3)
    assert encoded.hex() == body
    assert header.hex() == f"6d7301{kind:02x}000102030405060700000003"
    assert codec.decode([header, encoded]) == (INSTANCE, 3, message, [])


def test_every_kind_of_message_has_golden_bytes_and_its_number_for_ever() -> None:
    assert {kind: type(message) for kind, (message, _) in GOLDEN.items()} == KINDS


@pytest.mark.parametrize(("kind", "body", "missing"), EARLIER, ids=[KINDS[kind].__name__ for kind, _, _ in EARLIER])
def test_messages_of_earlier_versions_still_decode(kind: int, body: str, missing: dict[str, Any]) -> None:
    message = GOLDEN[kind][0]
    header = codec.encode(message, INSTANCE, 3)[0]
    assert codec.decode([header, bytes.fromhex(body)]).message == msgspec.structs.replace(message, **missing)


def test_reports_of_a_core_over_its_pipe_have_these_bytes() -> None:
    assert msgspec.msgpack.encode(StartReport("E", "why")).hex() == "95a145a3776879c0c090"
    state = DesiredState(True, ["weights"], 1, "v", "f")
    assert msgspec.msgpack.encode(state).hex() == "98c391a77765696768747301a176a16690a764656661756c74c0"


def test_in_a_status_unknown_keys_are_passed_over_and_missing_ones_have_defaults() -> None:
    header = codec.encode(Status(CoreStatus(1, 2, 3, "")), INSTANCE, 3)[0]
    few = {"epoch": 1, "core_pid": 2, "supervisor_pid": 3, "phase": "loading"}
    body = msgspec.msgpack.encode([{**few, "what a later version added": [1]}])
    assert codec.decode([header, body]).message == Status(CoreStatus(**few))


@pytest.mark.parametrize("kind", sorted(GOLDEN))
def test_a_newer_peers_appended_fields_are_passed_over(kind: int) -> None:
    message, body = GOLDEN[kind]
    header = codec.encode(message, INSTANCE, 3)[0]
    fields = msgspec.msgpack.decode(bytes.fromhex(body), type=list[msgspec.Raw])
    longer = msgspec.msgpack.encode([*fields, "what a later version appended"])
    assert codec.decode([header, longer]).message == message


@pytest.mark.parametrize("kind", sorted(GOLDEN))
def test_an_older_peers_message_without_the_optional_fields_is_whole(kind: int) -> None:
    message, body = GOLDEN[kind]
    required = sum(field.required for field in msgspec.structs.fields(message))
    header = codec.encode(message, INSTANCE, 3)[0]
    fields = msgspec.msgpack.decode(bytes.fromhex(body), type=list[msgspec.Raw])
    shortest = codec.decode([header, msgspec.msgpack.encode(fields[:required])]).message
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(shortest), type=list[msgspec.Raw])[:required] == fields[:required]
    )
    if required:
        with pytest.raises(ProtocolError):
            codec.decode([header, msgspec.msgpack.encode(fields[: required - 1])])


@pytest.mark.parametrize(
    "cls",
    [*KINDS.values(), *PARTS, Distribution, Measured, *MAPS],
)
def test_required_fields_stand_before_optional_ones_and_nothing_is_inherited(cls: type[msgspec.Struct]) -> None:
    required = [field.required for field in msgspec.structs.fields(cls)]
    assert required == sorted(required, reverse=True)
    assert cls.__bases__ == (msgspec.Struct,)
    assert cls.__struct_config__.array_like == (cls not in MAPS)
    assert cls.__struct_config__.frozen


# ---------------------------------------------------------------------- round trips

_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    type(None): st.none(),
    msgspec.Raw: st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ).map(codec.encode_value),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a wire type."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if get_origin(hint) is typing.Annotated:
        return values_of(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is list:
        return st.lists(values_of(get_args(hint)[0]), max_size=4)
    if get_origin(hint) is dict:
        return st.dictionaries(*map(values_of, get_args(hint)), max_size=4)
    if get_origin(hint) in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, get_args(hint)))
    hints = typing.get_type_hints(hint, include_extras=True)
    return st.builds(hint, **{field.name: values_of(hints[field.name]) for field in msgspec.structs.fields(hint)})


@given(st.one_of(*map(values_of, KINDS.values())), st.binary(min_size=8, max_size=8), st.integers(0, 2**32 - 1))
def test_whatever_is_encoded_comes_back(message: msgspec.Struct, instance_id: bytes, epoch: int) -> None:
    frames = codec.encode(message, instance_id, epoch)
    envelope = codec.decode(frames)
    assert type(envelope.message) is type(message)
    assert (envelope.instance_id, envelope.epoch, envelope.tensors) == (instance_id, epoch, [])
    assert codec.encode(envelope.message, instance_id, epoch) == frames
