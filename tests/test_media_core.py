"""Media items in a core over the stand-in model: they are awaited, brought, kept and dropped; who may bring them; and
what stands in the journal."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from harness import Key, StepPlan, expected_output, make_core, media_item, message, run_core
from mainspring.core.features import media_store
from mainspring.core.loop import EngineCore
from mainspring.core.plan.control import DropGrammar, DropMedia, KeepMedia, MediaFacts
from mainspring.ipc.codec import decode_value, encode_value
from mainspring.ipc.config import MultiModalConfig
from mainspring.ipc.crash_suspects import CrashSuspects
from mainspring.ipc.errors import InvalidRequestError, NotPermittedError, NotSupportedError
from mainspring.ipc.journal import Accused, Journal, request_key
from mainspring.ipc.messages import AddRequest, MediaItem

SESSION = b"0123456789abcdef"
FACTS = MediaFacts(["image"], 4)


def core_with_media(**options: Any) -> EngineCore:
    core = make_core(options.pop("launched", lambda plan: None), **{"media": FACTS, **options})
    core.connect(0, session=SESSION)
    return core


def request(handle: int, *seeds: int, **fields: Any) -> AddRequest:
    """Three tokens of text, and an item of 4 tokens for each seed."""
    media = [media_item(seed, 3 + 4 * number, 4) for number, seed in enumerate(seeds)]
    return message(handle, [1, 2, 3] + [0] * (4 * len(seeds)), media=media, **fields)


def offer(core: EngineCore, *seeds: int) -> list[int]:
    digests = [seed.to_bytes(16, "little") for seed in seeds]
    lacking = decode_value(core.call("offer_media", encode_value([digests])))
    return [int.from_bytes(digest, "little") for digest in lacking]


def put(core: EngineCore, seed: int, size: int = 1, frontend: int = 0) -> Any:
    args, values = [seed.to_bytes(16, "little"), "image", ["pixel_values"]], np.full(size, seed, np.float32)
    return core.call("put_media", encode_value(args), frontend, [values])


def tokens_of(ended: dict[Key, Any], handle: int, sent: AddRequest) -> bool:
    return ended[0, handle][0] == expected_output(sent, (None,), 64)[0]


# ---------------------------------------------------------------------- arrays


@pytest.mark.parametrize("first", ["arrays", "request"])
def test_arrays_may_come_before_the_request_or_after_it(first: str) -> None:
    core, sent = core_with_media(), request(0, 1, 2)
    if first == "request":
        core.add_request(0, sent)
        core.step()
        assert core.stats().num_running == 0
    assert offer(core, 1, 2) == [1, 2]
    put(core, 1)
    put(core, 2)
    assert offer(core, 1, 2) == []
    if first == "arrays":
        core.add_request(0, sent)
    assert tokens_of(run_core(core), 0, sent)


def test_a_request_without_media_waits_for_no_item() -> None:
    core = core_with_media()
    core.add_request(0, request(0, 1))
    core.add_request(0, message(1))
    assert set(run_core(core, until=bool)) == {(0, 1)}


def test_a_request_whose_arrays_do_not_come_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_store, "WAIT_S", 0.05)
    core = core_with_media()
    core.add_request(0, request(0, 1, 2))
    put(core, 1)
    ended = run_core(core)[0, 0][1]
    assert ended.error == "RequestFailedError"
    assert "its media have not come within" in ended.error_text


def test_steps_that_take_long_do_not_end_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Media workers can bring nothing while a step encodes what came before."""
    core, sent, hours = core_with_media(), request(0, 1), itertools.count(0, 3600)
    monkeypatch.setattr(media_store.time, "monotonic", lambda: float(next(hours)))
    core.add_request(0, sent)
    for _ in range(20):
        core.step()
    put(core, 1)
    assert tokens_of(run_core(core), 0, sent)


def test_nothing_is_left_of_a_request_that_is_aborted_while_it_waits() -> None:
    core = core_with_media()
    core.add_request(0, request(0, 1))
    core.step()
    core.abort(0, [0])
    assert run_core(core)[0, 0][1].reason == "abort"
    assert core.media is not None
    assert not list(core.media.items)
    core.add_request(0, request(1, 1))
    core.disconnect(0)
    run_core(core)
    assert not list(core.media.items)


def test_what_was_offered_stays_until_its_request_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_store, "ARRAY_BYTES", 100)
    core = core_with_media()
    put(core, 1, 20)
    assert offer(core, 1) == []
    waits = put(core, 2, 20)
    assert isinstance(waits, Future)
    assert not waits.done()
    sent = request(0, 1, max_tokens=2)
    core.add_request(0, sent)
    assert tokens_of(run_core(core), 0, sent)
    assert waits.result() is None
    assert offer(core, 2) == []


def test_a_request_that_has_some_arrays_gets_the_others_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_store, "ARRAY_BYTES", 100)
    core, sent = core_with_media(), request(0, 1, 2)
    core.add_request(0, sent)
    put(core, 1, 20)
    other = put(core, 3, 20)
    assert not other.done()
    assert decode_value(put(core, 2, 20)) is None
    assert tokens_of(run_core(core, until=bool), 0, sent)


def test_a_media_worker_that_leaves_takes_what_waits_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_store, "ARRAY_BYTES", 100)
    core = core_with_media()
    put(core, 1, 20)
    waits = put(core, 2, 20)
    core.disconnect(0)
    assert waits.cancelled()
    core.connect(1)
    assert offer(core, 1, 2) == [2]


def test_an_item_that_two_media_workers_bring_comes_though_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_store, "ARRAY_BYTES", 100)
    core, sent = core_with_media(), request(0, 2, max_tokens=2)
    core.connect(1)
    put(core, 1, 20)
    put(core, 2, 20, frontend=1)
    core.add_request(0, sent)
    assert offer(core, 2) == [2], "it has no room so far"
    waits = put(core, 2, 20)
    core.disconnect(1)
    assert not waits.done()
    core.add_request(0, request(1, 1, max_tokens=2))
    assert tokens_of(run_core(core), 0, sent)
    assert waits.result() is None


def test_a_request_waits_while_other_items_of_its_frontend_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend has many items delivered, one after the other: after the death of a core, for example."""
    core, now = core_with_media(), 0.0
    monkeypatch.setattr(media_store.time, "monotonic", lambda: now)
    core.connect(1)
    core.add_request(1, request(0, 90))
    sent = {seed: request(seed, seed, max_tokens=2) for seed in range(1, 9)}
    for one in sent.values():
        core.add_request(0, one)
    ended: dict[Key, Any] = {}
    for seed in sent:
        for _ in range(25):  # of half a second each
            now += 0.5
            ended |= collected(core)
        put(core, seed)
    ended |= {key: one for key, (_, one) in run_core(core).items()}
    assert ended[1, 0].error == "RequestFailedError"
    assert {handle: ended[0, handle].reason for handle in sent} == dict.fromkeys(sent, "length")


def test_a_request_whose_other_items_never_come_does_not_keep_its_arrays_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even if its frontend has others that get arrays, and arrays that wait for room."""
    core, now = core_with_media(), 0.0
    monkeypatch.setattr(media_store, "ARRAY_BYTES", 2 * (media_store.ITEM_BYTES + 80))
    monkeypatch.setattr(media_store.time, "monotonic", lambda: now)
    core.connect(1)
    for handle, seeds in enumerate(([1, 99], range(2, 12), [20])):
        core.add_request(0, request(handle, *seeds))
        put(core, seeds[0], 20)
    core.add_request(1, request(3, 21, max_tokens=2))
    waits = put(core, 21, 20)
    assert not waits.done()
    ended: dict[Key, Any] = {}
    for seed in range(3, 11):
        for _ in range(25):  # of half a second each
            now += 0.5
            ended |= collected(core)
        put(core, seed, 20)
    assert {key: one.reason for key, one in ended.items()} == {(0, 0): "error"}
    for _ in range(125):
        now += 0.5
        ended |= collected(core)
    assert ended.pop((0, 1)).reason == "error"
    assert {key: one.reason for key, one in ended.items()} == {(0, 0): "error", (0, 2): "length", (1, 3): "length"}


def collected(core: EngineCore) -> dict[Key, Any]:
    """The requests that end in a step."""
    return {(frontend, one.handle): one for frontend, outputs in core.step().items() for one in outputs.finished}


def test_another_kind_of_the_same_digest_is_another_item() -> None:
    """So no frontend can keep others from an item by naming it wrongly."""
    core = core_with_media(media=MediaFacts(["image", "video"], 4))
    core.connect(1)
    wrong = [MediaItem(one.digest, "video", one.offset, one.length) for one in request(0, 1).media]
    core.add_request(1, replace(request(0, 1), media=wrong))
    assert offer(core, 1) == [1]
    assert decode_value(put(core, 1)) is None
    sent = request(0, 1, max_tokens=2)
    core.add_request(0, sent)
    assert tokens_of(run_core(core, until=bool), 0, sent)


def test_items_of_few_bytes_are_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_store, "ARRAY_BYTES", 10 * (media_store.ITEM_BYTES + 4))
    core = core_with_media()
    for seed in range(30):
        core.add_request(0, request(seed, seed, max_tokens=1))
        put(core, seed)
        run_core(core)
    assert core.media is not None
    assert sum(item.arrays is not None for item in core.media.items) == 10


def test_to_reset_the_cache_takes_no_account_of_arrays_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_store, "ARRAY_BYTES", 100)
    monkeypatch.setattr(media_store, "WAIT_S", 0.0)
    core = core_with_media()
    core.add_request(0, request(0, 1))
    put(core, 1, 20)
    assert not put(core, 2, 20).done()
    core.call("reset_encoder_cache", encode_value([]))
    assert core.media is not None
    assert core.media.items._array_bytes == sum(item.array_bytes for item in core.media.items if item.arrays)


@pytest.mark.parametrize(
    ("args", "arrays", "why"),
    [
        ([b"short", "image", ["x"]], [np.ones(1)], "digest has 16 bytes"),
        ([b"d" * 16, "video", ["x"]], [np.ones(1, np.float32)], "the modality is 'video'; this model takes image"),
        ([b"d" * 16, "image", ["x", "y"]], [np.ones(1, np.float32)], "one array for each name"),
        ([b"d" * 16, "image", ["x", "x"]], [np.ones(1, np.float32)] * 2, "one array for each name"),
        ([b"d" * 16, "image", []], [], "one array for each name"),
        ([b"d" * 16, "image", "x"], [np.ones(1, np.float32)], "a list of strings"),
        ([b"d" * 16, "image", ["a.b"]], [np.ones(1, np.float32)], "no name of an array"),
        ([b"d" * 16, "image", ["x"]], [np.ones(1, np.complex64)], "which no processor makes"),
        ([b"d" * 16, "image", ["x"]], [np.full(1, 7, np.uint8).view(bool)], "no booleans"),
        ([b"d" * 16, "image", ["x"]], [np.ones(400, np.float32)], "the limit is 960: see max_media_pixels"),
        ([b"d" * 16, "image", ["x"], {"x": "2"}], [np.ones(2)], "with shapes of some"),
        ([b"d" * 16, "image", ["x"], {"y": [1]}], [np.ones(1)], "the parts of 'y' are not those of"),
        ([b"d" * 16, "image", ["x", "x"], {"x": [3]}], [np.ones(1)] * 2, "the parts of 'x' are not those of"),
        ([b"d" * 16, "image", ["x", "x"], {"x": [2]}], [np.ones(1), np.ones(1, np.int32)], "the parts of 'x'"),
    ],
)
def test_what_can_be_no_item_is_refused(args: list[Any], arrays: list[np.ndarray], why: str) -> None:
    core = core_with_media(multimodal=MultiModalConfig(max_media_pixels=30))
    with pytest.raises(InvalidRequestError, match=why):
        core.call("put_media", encode_value(args), 0, arrays)
    assert core.media is not None
    assert not list(core.media.items)


@pytest.mark.parametrize("wrong", [b"d" * 16, [b"d"], ["d" * 16], [b"d" * 16] * 5000])
def test_what_can_be_no_offer_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError):
        core_with_media().call("offer_media", encode_value([wrong]))


def test_media_are_for_administrators_and_for_models_that_take_some() -> None:
    core = core_with_media()
    core.connect(1, admin=False)
    for method, args in (("offer_media", [[]]), ("put_media", [b"", "", []]), ("reset_encoder_cache", [])):
        with pytest.raises(NotPermittedError):
            core.call(method, encode_value(args), 1)
    with pytest.raises(NotSupportedError, match="takes text only"):
        make_core().call("offer_media", encode_value([[]]))
    assert core.model.media == ["image"]


# ---------------------------------------------------------------------- which requests are refused


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"media": [MediaItem(b"d", "image", 0, 1)]}, "digest has 1 bytes"),
        ({"media": [MediaItem(b"d" * 16, "video", 0, 1)]}, "the prompt has video; this model takes image"),
        ({"media": [media_item(1, 2, 2)]}, "2 tokens from 2 on; the prompt has 3"),
        ({"media": [media_item(1, -1, 2)]}, "2 tokens from -1 on"),
        ({"media": [media_item(1, 0, 0)]}, "0 tokens from 0 on"),
        ({"media": [media_item(1, 0, 2), media_item(2, 1, 1)]}, "the item before ends at 2"),
        ({"media": [media_item(1, i, 1) for i in range(3)]}, "limit_mm_per_prompt allows 2"),
        ({"media": [media_item(1, 0, 1)], "prompt_embeds": None}, ""),
    ],
)
def test_items_must_lie_in_the_prompt_in_order(fields: Any, why: str) -> None:
    core = core_with_media(multimodal=MultiModalConfig(limit_mm_per_prompt={"image": 2}))
    put(core, 1)
    core.add_request(0, message(0, **fields))
    ended = run_core(core)[0, 0][1]
    assert (ended.error == "InvalidRequestError") == bool(why)
    assert why in ended.error_text


def test_a_model_of_text_refuses_media() -> None:
    core = make_core()
    core.connect(0)
    core.add_request(0, request(0, 1))
    assert "takes text only" in run_core(core)[0, 0][1].error_text


def test_prompt_logprobs_are_refused_where_spans_are_computed_at_once() -> None:
    core = core_with_media(media=MediaFacts(["image"], 4, "item"))
    sent = request(0, 1)
    core.add_request(0, replace(sent, sampling=replace(sent.sampling, prompt_logprobs=0)))
    assert run_core(core)[0, 0][1].error == "NotSupportedError"


def test_the_grammar_of_a_request_that_is_refused_for_its_media_is_dropped() -> None:
    core = core_with_media(media=MediaFacts(["image"], 4, "item"))
    sent = request(0, 1)
    core.add_request(0, replace(sent, sampling=replace(sent.sampling, prompt_logprobs=0, grammar=["regex", "a"])))
    assert run_core(core)[0, 0][1].error == "NotSupportedError"
    assert DropGrammar(1) in core.worker.controls  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- the journal


def test_the_requests_whose_items_a_step_encodes_stand_in_the_journal() -> None:
    seen: list[tuple[int, list[Accused]]] = []
    journal = Journal.create(256)
    core = core_with_media(launched=lambda plan: seen.append((plan.encodes.size, journal.accused())), journal=journal)
    put(core, 1)
    output = expected_output(request(0, 1, max_tokens=8), (None,), 64)[0]
    core.add_request(0, request(0, 1, max_tokens=8, output_token_ids=output[:5], resumed=True))
    core.add_request(0, request(1, 1))
    run_core(core)
    assert seen[0] == (1, [Accused(request_key(SESSION, 0), 5, False), Accused(request_key(SESSION, 1), 0, False)])
    assert [encoded for encoded, _ in seen[1:]] == [0] * (len(seen) - 1)
    journal.close()


def test_an_item_that_kills_cores_is_encoded_alone_and_its_requests_are_quarantined() -> None:
    """As over three cores of one supervisor: each dies when it encodes item 1."""
    keys = {handle: request_key(SESSION, handle) for handle in range(3)}
    supervisor, journal = CrashSuspects(), Journal.create(256)

    def die(plan: StepPlan) -> None:
        if any(digest == (1).to_bytes(16, "little") for digest in encoding(core, plan)):
            raise KeyboardInterrupt

    for life in range(3):
        core = core_with_media(
            launched=die, journal=journal, suspects=supervisor.suspects, quarantined=supervisor.quarantined
        )
        core.add_request(0, request(0, 1))
        core.add_request(0, request(1, 2))
        core.add_request(0, message(2))
        put(core, 1)
        put(core, 2)
        if life < 2:
            with pytest.raises(KeyboardInterrupt):
                run_core(core)
            accused = {one.key: one.solo for one in journal.accused()}
            assert accused[keys[0]] == (life > 0)
            supervisor.crashed(journal, "by a signal", killed=False)
            journal.clear(supervisor.suspects)
            continue
        with pytest.raises(KeyboardInterrupt):
            run_core(core)
        assert [one.key for one in journal.accused()] == [keys[0]]
        supervisor.crashed(journal, "by a signal", killed=False)
    assert list(supervisor.quarantined) == [keys[0]]
    journal.clear(())
    core = core_with_media(journal=journal, suspects=supervisor.suspects, quarantined=supervisor.quarantined)
    for handle, seeds in ((0, [1]), (1, [2])):
        core.add_request(0, request(handle, *seeds))
    put(core, 1)
    put(core, 2)
    ended = run_core(core)
    assert (ended[0, 0][1].error, ended[0, 1][1].reason) == ("RequestFailedError", "length")
    journal.close()


def encoding(core: EngineCore, plan: StepPlan) -> list[bytes]:
    assert core.media is not None
    return [core.media._numbers[number].digest for number in plan.encodes.tolist()]


# ---------------------------------------------------------------------- weights and sleep


def some_steps(core: EngineCore) -> None:
    while not core.stats().encoded_items or not core.stats().num_running:
        core.step()


@pytest.mark.parametrize("kept", [True, False])
def test_new_weights_let_items_be_encoded_again_if_their_arrays_are_kept(kept: bool) -> None:
    core, sent = core_with_media(), request(0, 1, max_tokens=20)
    put(core, 1)
    core.add_request(0, sent)
    some_steps(core)
    assert core.media is not None
    [item] = core.media.items
    if not kept:
        core.media.items.drop_arrays(item)
    core.call("update_weights", encode_value(["v", 0, [], [], True]))
    assert [type(record) for record in core.worker.controls if isinstance(record, KeepMedia | DropMedia)] == [
        KeepMedia,
        DropMedia,
    ]
    ended = run_core(core)[0, 0][1]
    assert ended.error == ("" if kept else "RequestFailedError")
    assert core.stats().encoded_items == 1 + kept


@pytest.mark.parametrize("level", [1, 2])
def test_nothing_encoded_is_kept_in_sleep(level: int) -> None:
    core, sent = core_with_media(), request(0, 1, max_tokens=20)
    put(core, 1)
    core.add_request(0, sent)
    some_steps(core)
    asleep = core.call("sleep", encode_value([level, "keep"]))
    while isinstance(asleep, Future) and not asleep.done():
        core.step()
    assert core.stats().encoder_bytes == 0
    core.call("wake_up", encode_value([]))
    ended = run_core(core)
    assert ended[0, 0][1].reason == "length"
    assert core.stats().encoded_items == 2


def test_the_statistics_name_queries_hits_and_bytes() -> None:
    core = core_with_media()
    put(core, 1)
    for handle in range(2):
        core.add_request(0, request(handle, 1))
        run_core(core)
    stats = core.stats()
    assert (stats.encoder_queries, stats.encoder_hits, stats.encoded_items, stats.encoder_bytes) == (2, 1, 1, 10)
    core.call("reset_encoder_cache", encode_value([]))
    assert core.stats().encoder_bytes == 0
