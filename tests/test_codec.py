"""Encoding and decoding of frames: arrays are not copied, and malformed frames raise only `ProtocolError`."""

from __future__ import annotations

import contextlib
import random
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mainspring.ipc import codec
from mainspring.ipc.errors import ProtocolError
from mainspring.ipc.messages import KINDS, AddRequest, Bye, Hello, Outputs, Sampling, Stats, Tensor
from tiers import examples

INSTANCE = b"instance"


def header(magic: bytes = b"ms", version: int = 1, kind: int = 9, instance: bytes = INSTANCE, epoch: int = 1) -> bytes:
    return struct.pack(">2sBB8sI", magic, version, kind, instance, epoch)


def described(array: np.ndarray) -> Tensor:
    return Tensor(0, array.dtype.name, list(array.shape))


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


# ---------------------------------------------------------------------- tensor frames


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64"])
def test_an_array_is_encoded_and_read_without_a_copy(dtype: str) -> None:
    array = np.arange(12).astype(dtype).reshape(3, 4)
    tensor = described(array)
    request = AddRequest(0, "", [1, 2, 3], Sampling(1), prompt_embeds=tensor)
    frames = codec.encode(request, INSTANCE, 1, [array])
    envelope = codec.decode(frames)
    read = codec.read_tensor(envelope.message.prompt_embeds, envelope.tensors)
    assert address(np.frombuffer(frames[2], np.uint8)) == address(array) == address(read)
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


def test_bfloat16_travels_as_uint16_under_its_own_name() -> None:
    bits = np.array([[0x3F80, 0x4000]], np.uint16)  # 1.0, 2.0
    read = codec.read_tensor(Tensor(0, "bfloat16", [1, 2]), [bits.data])
    assert read.dtype == np.uint16
    assert address(read) == address(bits)
    np.testing.assert_array_equal(read, bits)


def test_an_array_that_came_through_a_socket_is_a_read_only_view_that_keeps_its_frame_alive() -> None:
    array = np.arange(100_000, dtype=np.float32)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://tensors")
        right.connect("inproc://tensors")
        left.send_multipart(codec.encode(Bye(), INSTANCE, 1, [array]), copy=False)
        envelope = codec.decode([frame.buffer for frame in right.recv_multipart(copy=False)])
        read = codec.read_tensor(described(array), envelope.tensors)
        del envelope
        assert not read.flags.writeable
        np.testing.assert_array_equal(read, array)


def test_an_array_that_is_not_contiguous_is_sent_in_order() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    frames = codec.encode(Bye(), INSTANCE, 1, [array])
    np.testing.assert_array_equal(codec.read_tensor(described(array), frames[2:]), array)


@pytest.mark.parametrize(
    ("tensor", "frames"),
    [
        (Tensor(0, "float32", [1]), []),
        (Tensor(1, "float32", [1]), [bytes(4)]),
        (Tensor(-1, "float32", [1]), [bytes(4)]),
        (Tensor(0, "float64", [1]), [bytes(8)]),
        (Tensor(0, "object", [1]), [bytes(8)]),
        (Tensor(0, "float32", [-1, -1]), [bytes(4)]),
        (Tensor(0, "float32", [2]), [bytes(4)]),
        (Tensor(0, "float32", [1]), [bytes(5)]),
        (Tensor(0, "float32", [1] * 100), [bytes(4)]),
        (Tensor(0, "float32", [127] * 1_000_000), [bytes(4)]),
        (Tensor(0, "float32", [0, 2**62]), [b""]),
        (Tensor(0, "float32", [0, 2**64 - 1]), [b""]),
        (Tensor(0, "float32", [2**62, 2**62]), [bytes(4)]),
    ],
)
def test_a_tensor_that_its_frames_do_not_hold_is_a_protocol_error(tensor: Tensor, frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        codec.read_tensor(tensor, frames)


@given(
    st.builds(
        Tensor,
        st.integers(-2, 2),
        st.sampled_from(["float32", "bfloat16", "int64", "float64", ""]),
        st.lists(st.integers(-1, 4) | st.integers(0, 2**64 - 1), max_size=70),
    ),
    st.lists(st.binary(max_size=32), max_size=2),
)
def test_any_tensor_over_any_frames_reads_or_is_a_protocol_error(tensor: Tensor, frames: list[bytes]) -> None:
    try:
        read = codec.read_tensor(tensor, frames)
    except ProtocolError:
        return
    assert list(read.shape) == tensor.shape
    assert read.nbytes == len(frames[tensor.frame])


# ---------------------------------------------------------------------- malformed frames


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([], "frames"),
        ([header()], "frames"),
        ([header(), b"\x90", *[b""] * 15], "frames"),
        ([b"", b"\x90"], "header"),
        ([header()[:-1], b"\x90"], "header"),
        ([header() + b"\0", b"\x90"], "header"),
        ([header(magic=b"MS"), b"\x90"], "not a Mainspring frame"),
        ([header(version=0), b"\x90"], "protocol version 0"),
        ([header(version=2), b"\x90"], "protocol version 2"),
        ([header(kind=0), b"\x90"], "kind 0"),
        ([header(kind=255), b"\x90"], "kind 255"),
        ([header(), b""], "Bye"),
        ([header(), b"\x91"], "Bye"),
        ([header(), b"\x91\xa5abc"], "Bye"),
        ([header(), b"\x91\xa1\xff"], "Bye"),  # not UTF-8
        ([header(), b"\x91\x01"], "Bye"),  # a number where text belongs
        ([header(), b"\x90\x90"], "Bye"),  # bytes after the message
        ([header(), b"\x80"], "Bye"),  # a map
        ([header(), b"\xc1"], "Bye"),  # never used in msgpack
        ([header(kind=4), msgspec.msgpack.encode([2**63, "", [1], [1]])], "AddRequest"),  # valid handles
        ([header(kind=4), msgspec.msgpack.encode([-1, "", [1], [1]])], "AddRequest"),
        ([header(kind=5), b"\x91\xdd\xff\xff\xff\xff"], "Abort"),  # 4 billion handles, announced
        ([header(kind=5), b"\x91" * 100_000], "Abort"),
        ([header(kind=6), b"\x93\x01\xa1m" + b"\x91" * 100_000], "UtilityCall"),
        ([header(kind=6), b"\x93\x01\xa1m" + b"\xdd\xff\xff\xff\xff" * 10_000], "UtilityCall"),
        ([header(kind=6), b"\x93\x01\xa1m" + b"\x81\xa1k" * 100_000], "UtilityCall"),
    ],
)
def test_malformed_frames_are_a_protocol_error_with_the_reason(frames: list[bytes], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        codec.decode(frames)


def test_a_body_over_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_BODY_BYTES", 4)
    with pytest.raises(ProtocolError, match="5 bytes; the limit is 4"):
        codec.decode([header(), b"\x91\xa3abc"])


@given(st.lists(st.binary(max_size=64), max_size=20))
def test_random_frames_are_messages_or_protocol_errors(frames: list[bytes]) -> None:
    decodes_or_refuses(frames)


@settings(max_examples=examples(500))
@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=256))
@example(kind=6, body=b"\x93\x01\xa1m\xc7\xff")
def test_random_bodies_behind_a_good_header_are_messages_or_protocol_errors(kind: int, body: bytes) -> None:
    decodes_or_refuses([header(kind=kind), body])


def test_every_cut_and_every_changed_byte_of_a_message_is_a_message_or_a_protocol_error() -> None:
    tensor = Tensor(0, "float32", [1, 2])
    request = AddRequest(7, "r", [1, 2, 3], Sampling(5, 9, 0.5, 0.5, 3, 0.1, 1, [4]), 1, [5], "salt", tensor)
    head, body = codec.encode(request, INSTANCE, 1)
    for frame in (0, 1):
        whole = (head, body)[frame]
        for at in range(len(whole)):
            for wrong in (whole[:at], *(whole[:at] + bytes([b]) + whole[at + 1 :] for b in range(256))):
                decodes_or_refuses([wrong, body] if frame == 0 else [head, wrong])


@given(st.binary(max_size=64), st.sampled_from([Any, list, int, dict[str, int]]))
def test_a_value_that_does_not_decode_is_a_protocol_error(raw: bytes, kind: Any) -> None:
    with contextlib.suppress(ProtocolError):
        codec.decode_value(msgspec.Raw(raw), kind)


def test_a_deeply_nested_value_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="recursion"):
        codec.decode_value(msgspec.Raw(b"\x91" * 100_000))


def decodes_or_refuses(frames: list[bytes]) -> None:
    try:
        envelope = codec.decode(frames)
    except ProtocolError:
        return
    assert type(envelope.message) in KINDS.values()


def test_every_kind_is_decoded_as_its_own_type_and_nothing_extends_that() -> None:
    assert {kind: decoder.type for kind, decoder in codec._decoders.items()} == KINDS
    assert not [d for d in codec._decoders.values() if d.ext_hook or d.dec_hook]
    for kind in KINDS:
        with pytest.raises(ProtocolError):
            codec.decode([header(kind=kind), b"\xc7\x01\x05x"])  # an extension type


# ---------------------------------------------------------------------- cost


def test_256_one_token_outputs_cost_about_ten_bytes_a_token() -> None:
    numbers = random.Random(1)
    handles = list(range(100_000, 100_256))  # handles of a frontend that has sent many requests
    tokens = [numbers.randrange(152_000) for _ in handles]
    frames = codec.encode(Outputs(handles, tokens, stats=Stats(256, 10, 0.9, *[10**6] * 8)), INSTANCE, 1)
    assert sum(map(len, frames)) / 256 <= 10.5


def test_a_hello_is_one_header_and_one_small_body() -> None:
    frames = codec.encode(Hello(1, bytes(16), "pid 1", session=bytes(16)), codec.NO_INSTANCE, 0)
    assert [len(frame) for frame in frames] == [16, 53]
