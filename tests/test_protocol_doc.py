"""docs/protocol.md agrees with the code: every message, field, type and default, and example bytes that decode."""

from __future__ import annotations

import contextlib
import json
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

import mainspring
from mainspring import EngineArgs
from mainspring.core import calls, lifecycle, loop
from mainspring.core.loop import EngineCore
from mainspring.core.worker import grammar_text
from mainspring.core.worker.grammar import GrammarCompiler
from mainspring.ipc import (
    adapters,
    codec,
    connection_limits,
    intake,
    messages,
    params,
    processor_names,
    server,
    structured,
    transport,
)
from mainspring.ipc.config import SchedulerConfig
from mainspring.ipc.errors import BY_NAME, NotSupportedError
from mainspring.ipc.journal import Phase
from mainspring.ipc.params import CORE_RANGES, MAX_BAD_WORDS, MAX_BIAS
from mainspring.ipc.structured import MAX_SPEC_BYTES, Kind
from stand_in_core import stand_in
from wire import Raw

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "protocol.md").read_text()
DEMO = Path(mainspring.__path__[0]) / "demo" / "model"
SECTIONS = dict(re.findall(r"^##+ (.+)\n((?:(?!##+ ).*\n)*)", TEXT, re.MULTILINE))
PLAIN = {int: "int", float: "float", str: "str", bytes: "bin", bool: "bool", msgspec.Raw: "any"}


def on_the_wire() -> dict[str, type[msgspec.Struct]]:
    """All messages, and all structs inside them."""
    found: dict[str, type[msgspec.Struct]] = {}

    def walk(hint: Any) -> None:
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint.__name__ not in found:
            found[hint.__name__] = hint
            for inner in get_type_hints(hint, include_extras=True).values():
                walk(inner)
        for inner in get_args(hint):
            walk(inner)

    for cls in messages.KINDS.values():
        walk(cls)
    return found


def type_text(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return type_text(args[0])
    if origin is Literal:
        return "str"
    if origin is list:
        return f"{type_text(args[0])}[]"
    if origin is dict:
        return "map of {} to {}".format(*map(type_text, args))
    if origin in (Union, types.UnionType):
        return f"{type_text(args[0])}?"
    return PLAIN.get(hint) or str(hint.__name__)


def default_text(field: Any) -> str:
    if field.required:
        return "required"
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if isinstance(default, msgspec.Raw):
        default = msgspec.msgpack.decode(default)
    if isinstance(default, msgspec.Struct):
        return "all defaults"
    return "nil" if default is None else "empty" if default == b"" else f"`{json.dumps(default)}`"


def rows(section: str) -> list[list[str]]:
    """The cells of the section's tables, without headers and links."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    cells = [[re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell).strip() for cell in row] for row in cells]
    return [row for row, after in zip(cells, [*cells[1:], [""]], strict=False) if "---" not in row[0] + after[0]]


def named(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


class Example(NamedTuple):
    section: str
    frames: list[bytes]
    body: Any


def examples() -> list[Example]:
    found = []
    for section, text in SECTIONS.items():
        for frames, body in re.findall(r"```hex\n(.*?)```\n\n```json\n(.*?)```", text, re.DOTALL):
            lines = frames.replace("\n  ", "").split()
            found.append(Example(section, [bytes.fromhex(line) for line in lines], json.loads(body)))
    return found


def as_json(value: Any) -> Any:
    match value:
        case bytes():
            return {"bin": value.hex()}
        case list():
            return [as_json(item) for item in value]
        case dict():
            return {str(key): as_json(item) for key, item in value.items()}
    return value


def test_every_kind_of_message_stands_in_the_table() -> None:
    table = {int(kind): message for kind, message, _ in rows("Messages")}
    assert table == {kind: cls.__name__ for kind, cls in messages.KINDS.items()}


@pytest.mark.parametrize("name", on_the_wire())
def test_every_field_stands_in_order_with_its_type_and_default(name: str) -> None:
    cls = on_the_wire()[name]
    hints = get_type_hints(cls, include_extras=True)
    expected = [(f.name, type_text(hints[f.name]), default_text(f)) for f in msgspec.structs.fields(cls)]
    table = rows(name)
    if cls.__struct_config__.array_like:
        assert [row.pop(0) for row in table] == [str(number) for number in range(len(expected))]
    else:
        assert "A map." in SECTIONS[name]
    assert [(named(field)[0], kind, default) for field, kind, default, _ in table] == expected
    assert all(meaning for *_, meaning in table)


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.section)
def test_an_example_decodes_to_what_stands_below_it(example: Example) -> None:
    envelope = codec.decode(example.frames)
    assert type(envelope.message).__name__ == example.section
    introduction = example.section in ("Hello", "StatusCall")
    assert envelope[:2] == ((codec.NO_INSTANCE, 0) if introduction else (bytes(range(8)), 3))
    assert as_json(msgspec.msgpack.decode(example.frames[1])) == example.body
    assert codec.encode(envelope.message, *envelope[:2]) == example.frames[:2]
    assert len(example.body) == len(msgspec.structs.fields(envelope.message)), "a field is not shown"


def test_every_kind_of_message_has_an_example() -> None:
    assert {example.section for example in examples()} == {cls.__name__ for cls in messages.KINDS.values()}


def test_the_example_of_a_tensor_reads() -> None:
    envelope = next(e for e in map(codec.decode, (example.frames for example in examples())) if e.tensors)
    array = codec.read_tensor(envelope.message.prompt_embeds, envelope.tensors)
    np.testing.assert_array_equal(array, np.array([[1, 2], [-1, 0.5]], np.float32))


def test_the_header_is_described_byte_for_byte() -> None:
    table = [row for row in rows("Frames") if len(row) == 3 and row[0].isdigit()]
    header = codec.encode(messages.Bye(), b"instance", 0x01020304)[0]
    pieces = [header[int(at) : int(at) + int(size)] for at, size, _ in table]
    assert pieces == [b"ms", b"\x01", b"\x09", b"instance", b"\x01\x02\x03\x04"]
    assert b"".join(pieces) == header
    assert "`6d 73`" in table[0][2]


def test_the_limits_are_those_of_the_code() -> None:
    limits = {row[0]: row[1] for row in rows("Limits")}
    assert limits["one frame"] == f"{transport.MAX_MESSAGE_BYTES >> 20} MiB"
    assert limits["a body from the core"] == f"{codec.MAX_BODY_BYTES >> 20} MiB"
    assert limits["a body of `UtilityCall` with `admin`"] == f"{intake.ADMIN_BODY_BYTES >> 20} MiB"
    small, abort = intake.SMALL_BODY_BYTES >> 10, 9 * messages.MAX_ABORTED >> 10
    assert limits["any other body from a client"] == f"{small} KiB; of `Abort` {abort} KiB"
    assert limits["`handles` of an `Abort`"] == f"{messages.MAX_ABORTED:,}"
    words, tokens = params.MAX_BAD_WORDS, params.MAX_BAD_WORD_TOKENS
    assert limits["`bad_words`"] == f"{words:,} sequences, {tokens:,} tokens together"
    assert limits["text of a `grammar`"] == f"{structured.MAX_SPEC_BYTES >> 10} KiB"
    assert limits["`extra_args`"] == f"{processor_names.MAX_EXTRA_ARGS_BYTES >> 10} KiB"
    less = connection_limits.OWN_DESCRIPTORS + connection_limits.SPARE
    assert limits["connections of all clients"] == f"¾ of the core's limit of open files, less {less}"
    model = messages.ModelFacts(150_000, 64, 100_000, "float32")
    largest = 9 * (100_000 + 300_000 + tokens) + 18 * 150_000 + 393_216
    assert intake.BodyLimits(model).of(messages.KIND_OF[messages.AddRequest], admin=False) == largest
    assert intake.BodyLimits(model).frame_bytes == 4 * 100_000 * 64
    model = msgspec.structs.replace(model, media=["image"])
    assert intake.BodyLimits(model).of(messages.KIND_OF[messages.AddRequest], admin=False) == largest + 262_144
    assert "393,216\nbytes, and 262,144 more if `ModelFacts.media` names any" in SECTIONS["Limits"]
    assert limits["`media`"].startswith(f"{messages.MAX_MEDIA_ITEMS:,} items")
    assert intake.BodyLimits(messages.ModelFacts(5, 5, 5, "float32")).frame_bytes == 1 << 20
    assert intake.BodyLimits(messages.ModelFacts(5, 1 << 20, 1 << 20, "float32")).frame_bytes == 256 << 20
    assert (
        "the largest of 1 MiB, the limit of the body of an `AddRequest`, and 4 × `max_model_len` × `hidden_size`"
        in (SECTIONS["Limits"].replace("\n", " "))
    )
    assert "9 × (`max_model_len` + 2 × `vocab_size` + 65,536) + 18 × `vocab_size` + 393,216" in SECTIONS["Limits"]
    assert limits["`args` of a utility call"] == f"{calls.MAX_ARGUMENT_BYTES >> 10} KiB"
    assert limits["`session`"] == f"0 or {server.SESSION_BYTES} bytes"
    assert limits["`client_name`"] == f"{server.MAX_NAME} characters"
    assert limits["`weight`, least"] == str(server.MIN_WEIGHT)
    assert limits["`weight`, most"].startswith(f"{server.MAX_WEIGHT:g};")
    assert limits["`age_s`"].startswith(f"{loop.MAX_AGE_S:g} s;")
    assert limits["Hellos that wait while the model loads"] == str(server.MAX_EARLY)
    assert limits["frames of a message"] == str(codec.MAX_FRAMES)
    assert limits["an ipc path"] == f"{transport.MAX_PATH_BYTES} bytes"
    in_flight = [named(cell)[0] for cell in limits.values() if named(cell) and named(cell)[0].startswith("max_")]
    assert in_flight == [
        name
        for name in SchedulerConfig.__struct_fields__
        if "in_flight" in name or "per_front" in name or "queued" in name
    ]


def number(cell: str) -> float | None:
    """The number that a cell begins with: 5, −2^63, 2^63 − 1, 1e-30."""
    cell = cell.replace("−", "-").partition(":")[0]
    if found := re.match(r"(-?)2\^(\d+)( - 1)?", cell):
        return int(f"{found[1]}1") * 2 ** int(found[2]) - bool(found[3])
    found = re.match(r"-?[\d.]+(e-?\d+)?$", cell)
    return float(found[0]) if found else None


def test_the_range_of_every_field_is_that_of_the_code() -> None:
    table = {name: row for row in rows("Requests") for name in re.findall(r"`([\w.]+)`", row[0])}
    fields = {*messages.Sampling.__struct_fields__, "Pooling.dimensions", "Pooling.second", "handle", "priority"}
    assert fields | {f"Adapter.{name}" for name in messages.Adapter.__struct_fields__} <= set(table)
    for name, (least, most) in CORE_RANGES.items():
        has = [number(cell) for cell in table[name][1:3]]
        assert has[0] == pytest.approx(least), name
        assert has[1] == (None if "logprobs" in name else pytest.approx(most)), name
    assert table["handle"][1:3] == ["0", "2^63 − 1"]
    assert table["logit_bias"][1:3] == [f"−{MAX_BIAS:g}".replace("+", ""), f"{MAX_BIAS:g}".replace("+", "")]
    assert table["bad_words"][3].startswith(f"{MAX_BAD_WORDS} entries")
    assert table["Adapter.name"][3] == f"1 to {adapters.MAX_NAME} characters"
    assert table["Adapter.path"][3] == f"1 to {adapters.MAX_PATH} characters"


def test_every_kind_of_grammar_has_its_limit_and_an_example_that_the_core_accepts() -> None:
    table = {named(row[0])[0]: row for row in rows("Grammars")}
    assert list(table) == list(get_args(Kind))
    for kind, row in table.items():
        assert row[2].startswith(f"{grammar_text._MAX_BYTES.get(kind, MAX_SPEC_BYTES) >> 10} KiB")
    given = re.findall(r"^\[.*\]$", SECTIONS["Grammars"], re.MULTILINE)
    tokenizer = (DEMO / "tokenizer.json").read_text()
    compiler = GrammarCompiler(tokenizer, Tokenizer.from_str(tokenizer).get_vocab_size(), [0])
    assert [kind for kind, _ in map(json.loads, given)] == sorted([*table, "grammar"], key=[*table].index)
    for kind, text in map(json.loads, given):
        assert compiler.compile(kind, text).num_bytes > 0


def test_modes_levels_and_tags_are_those_of_the_code() -> None:
    modes, levels = rows("Administration")[:3], rows("Administration")[3:]
    assert [named(row[0])[0] for row in modes] == list(lifecycle.MODES)
    assert [row[0] for row in levels] == ["0", "1", "2"]
    assert "`scheduling`, `weights` and `kv_cache`" in SECTIONS["Administration"]
    assert lifecycle.TAGS == ("scheduling", "weights", "kv_cache")
    admin = [named(row[0])[0] for row in rows("Utility calls") if row[3] == "yes"]
    assert set(admin) <= set(named(SECTIONS["Administration"])), "a method is not explained"


def test_an_unknown_kind_is_answered_as_the_page_says() -> None:
    with stand_in() as owner, contextlib.closing(Raw(owner)) as raw:
        for answer in (messages.Refused, messages.Fault):
            header, body = codec.encode(messages.Probe(), owner.instance_id, owner.epoch)
            raw.send_frames([header[:3] + b"\x4d" + header[4:], body])
            said = raw.receive()
            assert isinstance(said, answer)
            assert said.error == "ProtocolError"
            if answer is messages.Refused:
                raw.greet()


def test_every_error_is_said_to_travel_or_not_to() -> None:
    table, rest = SECTIONS["Errors"].split("never travel")
    travelling = [named(row[0])[0] for row in rows("Errors")]
    assert sorted([*travelling, *named(rest)]) == sorted(BY_NAME)
    assert table.count("yes") == 1
    assert "yes" in next(row for row in rows("Errors") if named(row[0]) == ["OverloadedError"])[3]


def test_every_reason_to_finish_is_explained() -> None:
    reasons = [named(row[0])[0] for row in rows("Results")]
    assert reasons == list(get_args(messages.FinishReason))


def test_the_utility_calls_are_those_of_the_core() -> None:
    table = {named(row[0])[0]: row for row in rows("Utility calls")}
    core = EngineCore(EngineArgs(device="cpu", num_gpu_blocks_override=300).create_engine_config())
    core.connect(0)
    with pytest.raises(NotSupportedError) as error:
        core.call("?", codec.encode_value([]))
    assert sorted(table) == str(error.value).split("it has ")[1].split(", ")
    assert {method for method, row in table.items() if row[3] == "yes"} == {
        name for name, method in core.methods.items() if method.admin
    }


def test_every_phase_is_named() -> None:
    assert {"asleep", *(phase.name.lower() for phase in Phase)} <= set(named(SECTIONS["Status call"]))
    shown = next(example.body[0]["phase"] for example in examples() if example.section == "Status")
    assert shown in {phase.name.lower() for phase in Phase}


def test_links_within_the_page_lead_somewhere() -> None:
    titles = re.findall(r"^##+ (.+)$", TEXT, re.MULTILINE)
    anchors = {title.lower().replace(",", "").replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= anchors
