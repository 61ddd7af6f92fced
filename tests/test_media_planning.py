"""The planner with media in prompts, over the stand-in model: what is encoded when, how long it is kept, and that no
span is cut."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import VOCAB, Engine, Key, blocks_for, expected_output, media_item
from mainspring.core.features import media_store
from mainspring.core.plan.control import MediaFacts
from mainspring.core.plan.step import Encoded, StepPlan
from mainspring.ipc.errors import InvalidRequestError
from mainspring.ipc.messages import AddRequest, MediaItem, Sampling
from tiers import examples

ROW = 4  # bytes of an encoded token, at most; the stand-in takes half of that


def engine_with_media(spans: str = "", **options: Any) -> Engine:
    engine = Engine(media=MediaFacts(["image"], ROW, spans), **options)

    def encodes(number: int) -> Encoded:
        assert engine.media is not None
        return Encoded(
            number, engine.media._numbers[number].length * ROW // 2 if number in engine.media._numbers else 0
        )

    engine.encodes = encodes
    return engine


# ---------------------------------------------------------------------- any schedule


class Job(NamedTuple):
    """A request with media, an abort of an earlier one, or another event."""

    after: int  # rounds of the loop before this job
    pieces: list[tuple[int, int]]  # of the prompt: a seed and a length; seed 0: text
    max_tokens: int
    frontend: int
    suspect: bool
    resumed: float
    bring: bool  # the arrays of the first request that waits for some come
    event: str


jobs = st.builds(
    Job,
    after=st.sampled_from([0, 0, 0, 1, 2, 5]),
    pieces=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=5),
    max_tokens=st.integers(1, 12),
    frontend=st.integers(0, 2),
    suspect=st.sampled_from([False, False, False, True]),
    resumed=st.sampled_from([0.0, 0.0]) | st.floats(0, 1),
    bring=st.booleans(),
    event=st.sampled_from(
        [""] * 16 + ["abort", "abort", "no credit", "credit", "pause", "wait", "resume", "stale", "reset"]
    ),
)


class Schedule(NamedTuple):
    engine: dict[str, Any]
    spans: str
    jobs: list[Job]
    launch_first: list[bool]
    lack: list[bool]
    lack_encoding: list[bool]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    windows = draw(st.sampled_from([(None,), (None,), (None, 7), (5,)]))
    spans = draw(st.sampled_from(["", "item", "item", "prompt"]))
    longest = draw(st.integers(24, 64))
    budget = longest if spans == "prompt" else draw(st.integers(9, 40))
    chunked = draw(st.sampled_from([True, True, True, False]))
    budget = budget if chunked else longest + draw(st.integers(0, 10))
    one = blocks_for(windows, block_size, longest, budget)
    engine = {
        "block_size": block_size,
        "windows": windows,
        "max_model_len": longest,
        "num_blocks": one + draw(st.sampled_from([0, 0, one // 4, one])),
        "depth": draw(st.integers(1, 3)),
        "weights": draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=3)),
        "prefix_caching": draw(st.sampled_from([True, True, True, False])),
        "host_blocks": draw(st.sampled_from([0, 0, one])),
        "max_num_batched_tokens": budget,
        "max_num_seqs": draw(st.integers(1, 8)),
        "suspects": 24,
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3])),
        "guesses": draw(st.sampled_from([0, 0, 4])),
        "media_bytes": ROW * draw(st.sampled_from([1, 10, 30, 1000])),
        "most_steps": (1, 4, 32)[budget % 3],
    }
    lack = st.lists(st.sampled_from([False, False, True]), max_size=12)
    return Schedule(
        engine,
        spans,
        draw(st.lists(jobs, min_size=1, max_size=20)),
        draw(st.lists(st.booleans(), max_size=8)),
        draw(lack),
        draw(lack),
    )


def prompt_of(pieces: list[tuple[int, int]], longest: int) -> tuple[list[int], list[MediaItem]]:
    """A prompt, in which the content of an item follows from its seed, and so does its length."""
    token_ids: list[int] = []
    media: list[MediaItem] = []
    for seed, length in pieces:
        length = length if seed == 0 else 2 * seed + 3
        if len(token_ids) + length > longest:
            break
        if seed:
            media.append(media_item(seed, len(token_ids), length))
        token_ids += [0 if seed else (len(token_ids) + i) % VOCAB for i in range(length)]
    return (token_ids, media) if token_ids else ([1], [])


def run(schedule: Schedule) -> Engine:
    engine = engine_with_media(schedule.spans, **schedule.engine)
    launch_first, lack, chunked = (
        list(schedule.launch_first),
        list(schedule.lack),
        engine.scheduler.state.budget.chunked,
    )
    keys: list[Key] = []
    whole: dict[Key, list[int]] = {}
    assert engine.media is not None

    def lacks_memory(step: StepPlan) -> bool:
        """Not where the lack would end a request."""
        wanted = bool(lack) and lack.pop()
        one = len(step.slots) == 1 and (not chunked or step.num_tokens == 1 or step.num_tokens <= 9 or schedule.spans)
        lacking = wanted and not one and not (len(step.encodes) and not len(step.slots))
        engine.num_lacking += lacking
        return lacking

    engine.lacks_memory = lacks_memory
    encodes, lacked = engine.encodes, list(schedule.lack_encoding)

    def lacks_or_encodes(number: int) -> Encoded:
        """Never twice in succession, which would end the requests."""
        assert engine.media is not None
        item = engine.media._numbers.get(number)
        if (item is not None and item.lacked) or not lacked or not lacked.pop():
            return encodes(number)
        return Encoded(number, 0, "OutOfMemoryError", "as ordered")

    engine.encodes = lacks_or_encodes

    def round_() -> None:
        early = launch_first.pop() if launch_first else True
        engine.retire() if engine.in_flight and not early else engine.step()

    for job in schedule.jobs:
        for _ in range(job.after):
            round_()
        if job.bring and engine.coming:
            engine.bring()
        frontend = job.frontend % len(schedule.engine["weights"])
        match job.event:
            case "abort" if keys:
                engine.abort(keys[-1 - job.max_tokens % len(keys)])
            case "no credit" | "credit":
                engine.set_credit(frontend, job.event == "credit")
            case "pause" | "wait":
                engine.pause("keep" if job.event == "pause" else "wait")
            case "resume":
                engine.scheduler.resume()
            case "stale":
                engine.scheduler.reset_prefix_cache(True)
                engine.media.reset_encoded()
            case "reset":
                engine.media.reset()
        if job.event:
            continue
        prompt, media = prompt_of(job.pieces, engine.max_model_len - 1)
        sampling = Sampling(job.max_tokens)
        output, _ = expected_output(
            AddRequest(0, "", prompt, sampling, media=media), engine.windows, engine.max_model_len
        )
        key = engine.add(
            prompt,
            job.max_tokens,
            frontend=frontend,
            output=output[: int(job.resumed * (len(output) - 1))],
            suspect=job.suspect,
            media=media,
        )
        keys.append(key)
        whole[key] = output
    engine.run()
    engine.scheduler.resume()
    for frontend in range(len(schedule.engine["weights"])):
        engine.set_credit(frontend, True)
    engine.run()
    engine.check_outputs()
    return engine


def run_any_schedules(max_examples: int) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=max_examples, deadline=None)
    @given(schedules())
    def any_schedule_gives_every_request_its_tokens(schedule: Schedule) -> None:
        engine = run(schedule)
        stats = engine.stats
        seen.update(
            preemptions=stats.num_preemptions,
            prefix_hits=stats.prefix_hits,
            chunked_prefills=stats.chunked_prefills,
            encoded=stats.encoded_items,
            encoder_hits=stats.encoder_hits,
            out_of_memory=engine.num_lacking,
            accepted=stats.accepted_tokens,
        )

    any_schedule_gives_every_request_its_tokens()
    assert max_examples < 300 or min(seen.values()) > 5, seen


def test_any_schedule_encodes_before_use_and_cuts_no_span() -> None:
    run_any_schedules(examples(400))


# ---------------------------------------------------------------------- one case at a time


def prompt_with(*seeds: int, text: int = 3, length: int = 8) -> dict[str, Any]:
    """A text, and an item of `length` tokens for each seed."""
    media = [media_item(seed, text + number * length, length) for number, seed in enumerate(seeds)]
    return {"prompt": list(range(1, text + 1)) + [0] * (length * len(seeds)), "media": media}


def serve(engine: Engine) -> None:
    engine.run()
    engine.check_outputs()


def encodes_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A list that gets the lengths of the items that each step encodes."""
    found: list[list[int]] = []
    check = engine._check_media

    def noted(plan: StepPlan) -> None:
        assert engine.media is not None
        found.append([engine.media._numbers[number].length for number in plan.encodes.tolist()])
        check(plan)

    monkeypatch.setattr(engine, "_check_media", noted)
    return found


def test_equal_placeholders_of_other_items_are_no_prefix() -> None:
    engine = engine_with_media()
    engine.add(**prompt_with(1))
    engine.run()
    engine.add(**prompt_with(2))
    engine.run()
    assert engine.stats.prefix_hits == 0
    engine.add(**prompt_with(1))
    engine.run()
    assert engine.stats.prefix_hits == 8
    assert (engine.stats.encoder_queries, engine.stats.encoder_hits, engine.stats.encoded_items) == (3, 1, 2)


def test_a_prefix_ends_before_a_span_that_it_does_not_cover() -> None:
    engine = engine_with_media("item")
    engine.add(**prompt_with(1, text=6))  # blocks of 4 tokens: the second and third hold the item's first 6
    serve(engine)
    engine.add(**prompt_with(1, text=6))
    serve(engine)
    assert engine.stats.prefix_hits == 4


def test_a_prompt_that_is_one_span_takes_nothing_from_the_prefix_cache() -> None:
    engine = engine_with_media("prompt")
    for _ in range(2):
        engine.add(**prompt_with(1))
        serve(engine)
    assert engine.stats.prefix_hits == 0


def test_a_flood_of_items_is_encoded_in_bounded_steps_beside_the_decodes_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_with_media(weights=[1.0, 1.0], max_num_batched_tokens=20)
    found = encodes_of(engine, monkeypatch)
    text = engine.add([1, 2, 3], 30, frontend=0)
    engine.step()
    for seed in range(1, 12):
        engine.add(**prompt_with(seed), frontend=1)
        engine.bring()
    serve(engine)
    assert max(map(sum, found)) == 16, "two items of 8 tokens fit"
    assert all(text in step.requests for step in engine.steps[:30]), "a decode was put off"


def test_an_item_longer_than_the_budget_is_encoded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with_media(max_num_batched_tokens=8)
    found = encodes_of(engine, monkeypatch)
    engine.add(**prompt_with(1, 2, length=12))
    serve(engine)
    assert [lengths for lengths in found if lengths] == [[12], [12]]


def test_encoding_counts_against_the_frontend() -> None:
    engine = engine_with_media(weights=[1.0, 2.0])
    engine.add(**prompt_with(1), max_tokens=1, frontend=1)
    engine.bring()
    serve(engine)
    assert engine.scheduler.fair.of(1).served == (8 + 11) / 2


def test_a_span_gets_a_step_of_its_own_when_decodes_leave_too_little() -> None:
    engine = engine_with_media("item", max_num_batched_tokens=10)
    decoding = [engine.add([1 + i, 2], 20) for i in range(3)]
    engine.step()
    key = engine.add(**prompt_with(1, 2, length=8))
    serve(engine)
    alone = [step.requests for step in engine.steps if key in step.requests and step.requests[key] == 8]
    assert alone == [{key: 8}, {key: 8}]
    both = [{*step.requests} == {*decoding} for step in engine.steps if key not in step.requests]
    assert sum(both) > 3, "the others decode in between"


def test_a_span_that_no_step_can_hold_is_refused() -> None:
    engine = engine_with_media("item", max_num_batched_tokens=10)
    with pytest.raises(InvalidRequestError, match="12 tokens of the prompt have to be computed in one step"):
        engine.add(**prompt_with(1, length=12))


def test_what_nobody_holds_is_dropped_for_others_the_least_recently_used_first() -> None:
    engine = engine_with_media(media_bytes=ROW * 8 * 3 // 2)  # a reservation, and one encoded item of half its size
    for seed in (1, 2, 3):
        engine.add(**prompt_with(seed))
        serve_one(engine)
    assert engine.media is not None
    assert [int.from_bytes(item.digest, "little") for item in engine.media.items if item.encoded] == [2, 3]
    engine.add(**prompt_with(2))
    serve_one(engine)
    assert engine.stats.encoded_items == 3


def serve_one(engine: Engine) -> None:
    engine.run()
    assert engine.media is not None
    for item in engine.media.items:
        item.offers = 0


def test_room_for_a_request_is_not_made_of_its_own_items() -> None:
    engine = engine_with_media(media_bytes=ROW * 8 * 3 // 2)
    for seeds in ([1], [2], [1, 3]):
        engine.add(**prompt_with(*seeds))
        serve_one(engine)
    assert engine.stats.encoded_items == 3
    assert engine.media is not None
    assert [int.from_bytes(item.digest, "little") for item in engine.media.items if item.encoded] == [1, 3]


def test_requests_wait_for_room_in_the_encoders_cache() -> None:
    engine = engine_with_media(media_bytes=ROW * 8)
    for seed in (1, 2):
        engine.add(**prompt_with(seed), max_tokens=5)
    serve(engine)
    steps = [{*step.requests} for step in engine.steps if step.requests]
    assert all(len(requests) == 1 for requests in steps), "the second ran while the first held the cache"


@pytest.mark.parametrize("reads", [True, False])
def test_a_request_that_needs_much_room_is_not_overtaken_for_ever(reads: bool) -> None:
    engine, seeds = engine_with_media(weights=[1.0, 1.0], media_bytes=ROW * 8 * 4), itertools.count(1)

    def add(items: int, frontend: int) -> Key:
        length = 3 + 2 * (len(others) % 3)  # so that they do not end at the same time
        key = engine.add(**prompt_with(*itertools.islice(seeds, items)), max_tokens=length, frontend=frontend)
        engine.bring()
        return key

    def step() -> None:
        while sum(key not in engine.finished for key in others) < 3:
            others.append(add(1, frontend=0))
        engine.step()

    others: list[Key] = []
    step()
    large = add(4, frontend=1)
    for _ in range(20):
        step()
    assert large not in engine.finished, "others may overtake it for some time"
    engine.set_credit(1, reads)
    ended = len(engine.finished)
    for _ in range(200):
        step()
    assert (large in engine.finished) == reads
    assert len(engine.finished) > ended + 30, "nor does it keep out others"
    engine.set_credit(1, True)
    serve(engine)


def test_a_frontend_that_does_not_read_gives_way() -> None:
    engine = engine_with_media(weights=[1.0, 1.0], media_bytes=ROW * 8)
    slow = engine.add(**prompt_with(1), max_tokens=20, frontend=0)
    engine.bring()
    for _ in range(4):
        engine.step()
    engine.set_credit(0, False)
    other = engine.add(**prompt_with(2), frontend=1)
    engine.run()
    assert other in engine.finished
    assert slow not in engine.finished
    engine.set_credit(0, True)
    serve(engine)


def test_no_more_requests_give_way_than_have_to() -> None:
    engine = engine_with_media(weights=[1.0, 1.0], media_bytes=ROW * 8 * 2)
    for seed in (1, 2, 3):
        engine.add(**prompt_with(seed), max_tokens=20, frontend=0)
        engine.bring()
        for _ in range(3):
            engine.step()
    engine.set_credit(0, False)
    other = engine.add(**prompt_with(4), frontend=1)
    engine.run()
    assert other in engine.finished
    assert engine.stats.num_preemptions == 1
    engine.set_credit(0, True)
    serve(engine)


def test_a_request_with_items_gets_a_slot_beside_a_flood_that_has_all() -> None:
    engine = engine_with_media(weights=[1.0, 1.0], max_num_seqs=2)
    flood = [engine.add([1 + i, 2], 60, frontend=0) for i in range(6)]
    for _ in range(4):
        engine.step()
    key = engine.add(**prompt_with(1), max_tokens=3, frontend=1)
    engine.bring()
    for _ in range(12):
        engine.step()
    assert key in engine.finished
    assert not engine.finished.keys() & set(flood)
    serve(engine)


def test_nobody_waits_behind_a_request_that_lost_its_turn_when_nothing_is_computed() -> None:
    engine = engine_with_media(weights=[1.0, 1.0], media_bytes=ROW * 8 * 4, max_model_len=128)
    first = engine.add(**prompt_with(1), max_tokens=72, frontend=0)
    engine.bring()
    engine.step()
    engine.add(**prompt_with(2, 3, 4, 5), frontend=1)  # it waits for all of the cache
    engine.bring()
    for _ in range(68):
        engine.step()
    assert first not in engine.finished
    engine.set_credit(1, False)
    other = engine.add(**prompt_with(6), frontend=0)
    engine.run()
    assert other in engine.finished
    engine.set_credit(1, True)
    serve(engine)


def test_items_that_take_more_memory_than_was_told_are_reserved_as_much() -> None:
    limit = ROW * 40 * 6
    engine = engine_with_media(media_bytes=limit, max_num_batched_tokens=64, max_model_len=128, num_blocks=200)
    assert engine.media is not None
    engine.encodes = lambda number: Encoded(number, 3 * ROW * 40)
    engine.add(**prompt_with(1, length=40))
    serve(engine)
    for seed in range(2, 8):
        engine.add(**prompt_with(seed, length=40), max_tokens=12)
        engine.bring()
    for _ in range(40):
        engine.step()
        assert engine.media._num_bytes <= limit
    serve(engine)


def test_an_item_that_cannot_be_encoded_ends_the_requests_that_name_it_and_no_other() -> None:
    engine = engine_with_media()
    works = engine.encodes
    engine.encodes = lambda number: works(number) if number > 1 else Encoded(1, 0, "UnsupportedModelError", "why")
    bad = [engine.add(**prompt_with(1)), engine.add(**prompt_with(1, 2))]
    good = [engine.add(**prompt_with(2)), engine.add([1, 2, 3])]
    for _ in range(3):
        engine.bring()
    engine.run()
    assert [engine.finished[key].error for key in (*bad, *good)] == ["UnsupportedModelError"] * 2 + [""] * 2
    assert all(engine.outputs[key] for key in good)
    assert engine.media is not None
    assert [int.from_bytes(item.digest, "little") for item in engine.media.items] == [2]


def test_an_item_that_lacks_memory_twice_ends_its_requests() -> None:
    engine = engine_with_media()
    attempts: list[int] = []

    def lacks(number: int) -> Encoded:
        attempts.append(number)
        return Encoded(number, 0, "OutOfMemoryError", "why")

    engine.encodes = lacks
    key = engine.add(**prompt_with(1))
    engine.run()
    assert len(attempts) == 2
    assert engine.finished[key].error == "OutOfMemoryError"


def test_an_item_of_a_suspect_is_encoded_in_a_step_with_the_keys_of_all_that_name_it() -> None:
    engine = engine_with_media(suspects=1)
    engine.add([1, 2], 12)
    engine.step()
    innocent = engine.add(**prompt_with(1))
    suspect = engine.add(**prompt_with(1), suspect=True)
    engine.bring()
    engine.bring()
    steps = []
    while engine.scheduler.has_work or engine.in_flight:
        if (step := engine.launch()) is not None:
            steps.append(step)
        if engine.in_flight:
            engine.retire()
        engine._tell(engine.scheduler.take_notices())
    encoding = [step for step in steps if step.plan.encodes.size]
    assert len(encoding) == 1
    assert encoding[0].solo
    assert not encoding[0].plan.slots.size
    assert encoding[0].keys.tolist() == [engine.keys[suspect], engine.keys[innocent]]
    assert encoding[0].output_index.tolist() == [0, 0]
    engine.check_outputs()


def test_the_call_that_resets_the_cache_leaves_what_requests_use() -> None:
    engine = engine_with_media()
    engine.add(**prompt_with(1), max_tokens=1)
    serve_one(engine)
    engine.add(**prompt_with(2), max_tokens=9)
    engine.bring()
    for _ in range(4):
        engine.step()
    assert engine.media is not None
    engine.media.reset()
    assert [int.from_bytes(item.digest, "little") for item in engine.media.items] == [2]
    serve(engine)


def test_what_was_encoded_of_requests_that_have_ended_leaves_the_cache_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if it can't be encoded again: the arrays that were offered came for these requests."""
    monkeypatch.setattr(media_store, "ARRAY_BYTES", 1)
    engine = engine_with_media(media_bytes=ROW * 8 * 2)
    for seed in range(1, 9):
        engine.add(**prompt_with(seed), max_tokens=2)
        engine.run()
    assert engine.media is not None
    assert engine.media._num_bytes <= ROW * 8 * 2
    serve(engine)
