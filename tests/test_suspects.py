"""Requests that may have killed a core run alone until they have a new token; other requests run in between."""

from __future__ import annotations

import pytest

from harness import VOCAB, Engine


def tokens(n: int, start: int = 0) -> list[int]:
    return [(start * 7 + i * i + i) % VOCAB for i in range(n)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_suspect_runs_alone_until_its_first_token_and_then_with_the_others(depth: int) -> None:
    engine = Engine(suspects=1, depth=depth)
    others = [engine.add(tokens(5, i), 10) for i in range(2)]
    suspect = engine.add(tokens(6, 5), 4, suspect=True)
    engine.run()
    alone = [step.requests for step in engine.steps if suspect in step.requests][:2]
    assert alone[0] == {suspect: 6}
    assert set(alone[1]) == {*others, suspect}
    engine.check_outputs()


def test_a_suspect_runs_alone_until_it_is_past_the_token_it_was_accused_at() -> None:
    engine = Engine(suspects=1, accused_at=2)  # two tokens had come; the core died while computing the third
    other = engine.add(tokens(5), 10)
    suspect = engine.add(tokens(6, 5), 6, suspect=True)
    engine.run()
    steps = [step.requests for step in engine.steps if suspect in step.requests]
    assert steps[:4] == [{suspect: 6}, {suspect: 1}, {suspect: 1}, {suspect: 1, other: 1}]
    engine.check_outputs()


def test_a_suspect_waits_until_no_step_is_in_flight() -> None:
    engine = Engine(suspects=1, depth=2)
    engine.add(tokens(5), 10)
    engine.launch()
    suspect = engine.add(tokens(6, 1), 4, suspect=True)
    assert engine.launch() is None
    engine.retire()
    engine.launch()
    assert engine.steps[-1].requests == {suspect: 6}
    engine.run()
    engine.check_outputs()


def test_steps_of_suspects_alternate_with_those_of_the_others() -> None:
    engine = Engine(suspects=3)
    other = engine.add(tokens(5), 10)
    suspects = [engine.add(tokens(6, i + 1), 4, suspect=True) for i in range(3)]
    engine.run()
    alone = [next(iter(step.requests)) if len(step.requests) == 1 else None for step in engine.steps[:4]]
    assert alone == [suspects[0], None, suspects[1], None]
    assert all(other in step.requests for step in engine.steps[1:4:2])
    engine.check_outputs()


def test_the_chunks_of_a_suspects_prompt_are_steps_of_its_own_and_others_decode_between_them() -> None:
    engine = Engine(suspects=1, max_num_batched_tokens=8)
    other = engine.add(tokens(5), 12)
    engine.step()
    suspect = engine.add(tokens(20, 1), 2, suspect=True)
    engine.run()
    assert [step.requests for step in engine.steps[1:6]] == [
        {suspect: 8},
        {other: 1},
        {suspect: 8},
        {other: 1},
        {suspect: 4},
    ]
    engine.check_outputs()


@pytest.mark.parametrize(
    "short", [{"max_num_seqs": 1}, {"num_blocks": 10, "max_model_len": 40}], ids=["seats", "blocks"]
)
def test_a_suspect_is_seated_though_others_hold_everything(short: dict[str, int]) -> None:
    engine = Engine(suspects=1, prefix_caching=False, **short)
    engine.add(tokens(16), 20)
    engine.add(tokens(16, 1), 20)
    for _ in range(3):
        engine.step()
    suspect = engine.add(tokens(16, 2), 3, suspect=True)
    engine.step()
    assert engine.outputs[suspect]
    engine.run()
    engine.check_outputs()


def test_a_suspect_on_trial_is_not_preempted_for_others() -> None:
    engine = Engine(suspects=1, num_blocks=16, prefix_caching=False, max_num_batched_tokens=8)
    for i in range(3):
        engine.add(tokens(8, i), 40)
    suspect = engine.add(tokens(40, 9), 3, suspect=True)
    engine.run()
    chunks = [step.requests[suspect] for step in engine.steps if suspect in step.requests]
    assert chunks[:5] == [8] * 5
    engine.check_outputs()


def test_a_cleared_suspect_is_told_and_those_who_have_not_come_back_stay() -> None:
    engine = Engine(suspects=3)
    engine.add(tokens(6), 4, suspect=True)
    aborted = engine.add(tokens(6, 1), 4, suspect=True)
    engine.abort(aborted)
    assert engine.told_suspects == {0, 2}
    engine.run()
    assert engine.told_suspects == {2}
    engine.check_outputs()


def test_a_suspect_whose_frontend_leaves_stays_one_and_is_tried_when_it_comes_back() -> None:
    engine = Engine(suspects=1, depth=2)
    engine.add(tokens(6), 4, suspect=True)
    engine.launch()
    engine.scheduler.remove_frontend(0)
    while engine.in_flight:
        engine.retire()
    assert engine.told_suspects == {0}
    engine.scheduler.fair.register(0)
    engine.messages.clear()
    engine._suspect_keys = iter([0])
    engine.add(tokens(6), 4, suspect=True)
    engine.run()
    assert engine.told_suspects == set()
    engine.check_outputs()


def test_a_suspect_without_credit_gives_its_turn_to_the_next() -> None:
    engine = Engine(suspects=2, weights=(1, 1), max_num_batched_tokens=8)
    first = engine.add(tokens(20), 2, suspect=True)
    second = engine.add(tokens(6, 1), 2, frontend=1, suspect=True)
    engine.step()
    engine.set_credit(0, False)
    engine.step()
    assert engine.outputs[second]
    engine.run()
    assert not engine.outputs[first]
    engine.set_credit(0, True)
    engine.run()
    engine.check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_suspect_in_flight_blocks_no_other_request(depth: int) -> None:
    engine = Engine(suspects=1, depth=depth)
    other = engine.add(tokens(5), 5)
    suspect = engine.add(tokens(6, 1), 4, suspect=True)
    engine.launch()
    engine.abort(suspect)
    engine.run()
    assert engine.finished[other].reason == "length"
    assert not engine.outputs[suspect]
    engine.check_outputs()


def test_a_resumed_suspect_with_output_is_cleared_by_its_next_token() -> None:
    engine = Engine(suspects=1)
    whole = engine.add(tokens(9), 12)
    engine.run()
    resumed = engine.add(tokens(9), 12, output=engine.outputs[whole][:5], suspect=True)
    engine.step()
    assert engine.told_suspects == set()
    assert len(engine.outputs[resumed]) == 1
    engine.run()
    engine.check_outputs()
