"""A request waits for a prefix that another request is computing, unless that prefix may never be completed."""

from __future__ import annotations

from typing import Any

import pytest

from harness import VOCAB, Engine, Key, count_look_ups
from mainspring.core.plan.fair_share import Frontend
from mainspring.core.plan.transitions import preempt

depths = pytest.mark.parametrize("depth", [1, 2, 3])


def tokens(n: int, start: int = 0) -> list[int]:
    """A prompt; prompts with different `start` have no token in common."""
    return [(start * 7 + i * i * i + i) % VOCAB for i in range(n)]


def roomy(**more: Any) -> Engine:
    """An engine with slots and blocks for all requests, and a budget for several prompts of 32 tokens and more."""
    limits = {"max_model_len": 128, "num_blocks": 600, "max_num_seqs": 16, "max_num_batched_tokens": 256, **more}
    return Engine(**limits)


def add_sharing(engine: Engine, count: int, shared: int = 32, max_tokens: int = 4, **more: Any) -> list[Key]:
    """Add requests with the same first `shared` tokens and 3 more tokens of their own."""
    return [engine.add([*tokens(shared), i, 1, 2], max_tokens, **more) for i in range(count)]


def computed(engine: Engine, key: Key) -> list[int]:
    """Tokens computed for a request in each step."""
    return [step.requests.get(key, 0) for step in engine.steps]


# ---------------------------------------------------------------------- it is computed once


@depths
@pytest.mark.parametrize("budget", [2048, 700, 200, 100])
def test_a_prefix_of_concurrent_requests_is_computed_once(depth: int, budget: int) -> None:
    engine = Engine(
        block_size=16,
        max_model_len=600,
        num_blocks=1500,
        max_num_seqs=32,
        max_num_batched_tokens=budget,
        depth=depth,
    )
    add_sharing(engine, 32, shared=512)
    engine.run()
    engine.check_outputs()
    assert engine.stats.prompt_tokens == 512 + 32 * 3
    assert engine.stats.prefix_hits == 31 * 512


@depths
def test_prefixes_that_go_on_from_a_shared_one_are_each_computed_once(depth: int) -> None:
    engine = roomy(depth=depth)
    for branch in range(3):
        for i in range(4):
            engine.add([*tokens(16), *tokens(16, 1 + branch), i], 3)
    engine.run()
    engine.check_outputs()
    assert engine.stats.prompt_tokens == 16 + 3 * 16 + 12


def test_without_chunked_prefill_a_shared_prefix_is_computed_once() -> None:
    engine = roomy(enable_chunked_prefill=False)
    add_sharing(engine, 8)
    engine.run()
    engine.check_outputs()
    assert engine.stats.prompt_tokens == 32 + 8 * 3


@depths
def test_frontends_that_share_a_prefix_compute_it_once(depth: int) -> None:
    engine = roomy(depth=depth, weights=(1, 1))
    for i in range(8):
        engine.add([*tokens(32), i], 3, frontend=i % 2)
    engine.run()
    engine.check_outputs()
    assert engine.stats.prompt_tokens == 32 + 8


@depths
@pytest.mark.parametrize("windows", [(None, 7), (5,), (16, 2)])
def test_with_windows_a_shared_prefix_is_waited_for_once(depth: int, windows: tuple[int | None, ...]) -> None:
    engine = roomy(depth=depth, windows=windows, max_num_batched_tokens=512)
    add_sharing(engine, 8)
    engine.run()
    engine.check_outputs()
    if depth < 3:
        assert engine.stats.prompt_tokens == 32 + 8 * 3
    # Otherwise blocks behind the window are freed before they are published: then all requests compute them, but not
    # one after another.
    assert len(engine.steps) <= 4 + depth


def test_without_prefix_caching_no_request_waits_for_another() -> None:
    engine = roomy(prefix_caching=False)
    keys = add_sharing(engine, 6)
    engine.step()
    assert engine.steps[0].requests == dict.fromkeys(keys, 35)


def test_without_prefix_caching_preempted_requests_do_not_wait_for_each_other_either() -> None:
    engine = roomy(prefix_caching=False)
    keys = add_sharing(engine, 2)
    engine.step()
    for request in list(engine.scheduler.state.running.requests.values()):
        preempt(engine.scheduler.state, request)
    engine.step()
    assert engine.steps[1].requests == dict.fromkeys(keys, 36)


def test_requests_of_another_salt_do_not_wait_for_each_other() -> None:
    engine = roomy()
    keys = [engine.add(tokens(32), 2, salt=salt) for salt in "abc"]
    engine.step()
    assert engine.steps[0].requests == dict.fromkeys(keys, 32)


# ---------------------------------------------------------------------- others pass by, and take nothing from it


@depths
def test_one_with_another_prompt_is_admitted_in_the_same_step(depth: int) -> None:
    engine = roomy(depth=depth)
    first, second = add_sharing(engine, 2)
    other = engine.add(tokens(20, 1), 4)
    engine.launch()
    assert engine.steps[0].requests == {first: 35, other: 20}
    engine.run()
    engine.check_outputs()
    assert sum(computed(engine, second)[:-3]) == 3


def test_overtaking_requests_leave_a_slot_to_each_waiting_one() -> None:
    engine = roomy(max_num_seqs=3)
    first, second = add_sharing(engine, 2, max_tokens=20)
    others = [engine.add(tokens(20, 1 + i), 50) for i in range(3)]
    engine.step()
    assert engine.steps[0].requests == {first: 35, others[0]: 20}
    engine.step()
    assert engine.steps[1].requests == {first: 1, others[0]: 1, second: 3}
    engine.run()
    engine.check_outputs()


def test_overtaking_requests_leave_the_waiting_one_its_blocks() -> None:
    engine = roomy(num_blocks=9 + 9 + 3)  # blocks for the first and the second request, and for 12 tokens
    first, second = add_sharing(engine, 2)
    large, small = engine.add(tokens(20, 1), 50), engine.add(tokens(8, 2), 4)
    engine.step()
    assert engine.steps[0].requests == {first: 35}, "large finds no room, and small does not pass it"
    engine.step()
    assert engine.steps[1].requests[second] == 3
    engine.run()
    engine.check_outputs()
    assert large in engine.finished
    assert small in engine.finished


def test_no_more_than_so_many_are_passed_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainspring.core.plan.admit.MOST_DEFERRED", 2)
    engine = roomy()
    keys = add_sharing(engine, 3)
    other = engine.add(tokens(5, 1), 2)
    engine.step()
    assert engine.steps[0].requests == {keys[0]: 35}
    engine.step()
    assert other in engine.steps[1].requests
    engine.run()
    engine.check_outputs()


def test_no_request_is_preempted_for_a_waiting_one() -> None:
    engine = roomy(weights=(1, 1), max_num_seqs=4)
    for i in range(4):
        engine.add(tokens(8, 3 + i), 40)
    engine.step()
    first, second = add_sharing(engine, 2, frontend=1)
    engine.step()
    assert engine.steps[-1].requests[first] == 35
    assert engine.stats.num_preemptions == 1, "for the first"
    engine.step()
    assert engine.steps[-1].requests[second] == 3
    engine.run()
    engine.check_outputs()


def test_no_request_is_preempted_for_an_overtaking_one() -> None:
    engine = roomy(weights=(1, 1), num_blocks=4 * 11 + 2 * 9 + 3)
    for i in range(4):
        engine.add(tokens(40, 3 + i), 4)
    engine.step()
    first, _ = add_sharing(engine, 2, frontend=1)
    passing = engine.add(tokens(20, 1), 4, frontend=1)
    engine.step()
    assert first in engine.steps[-1].requests
    assert passing not in engine.steps[-1].requests
    assert engine.stats.num_preemptions == 0
    engine.run()
    engine.check_outputs()


def test_a_frontend_with_larger_share_may_go_on_while_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainspring.core.plan.admit.MOST_DEFERRED", 1)
    engine = roomy(weights=(1, 1))
    for i in range(2):
        engine.add(tokens(8, 3 + i), 40, frontend=1)
    engine.step()
    first, _ = add_sharing(engine, 2)
    passing = engine.add(tokens(20, 1), 4)
    other = engine.add(tokens(20, 2), 4, frontend=1)
    engine.step()
    sent = engine.steps[-1].requests
    assert first in sent
    assert other in sent
    assert passing not in sent
    engine.run()
    engine.check_outputs()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_those_that_waited_are_admitted_in_their_order(policy: str) -> None:
    engine = roomy(max_num_seqs=2, scheduling_policy=policy)
    keys = [engine.add([*tokens(32), i], 2, priority=-i) for i in range(5)]
    engine.run()
    assert list(engine.finished) == (keys if policy == "fcfs" else keys[::-1])
    engine.check_outputs()


# ---------------------------------------------------------------------- it waits for nothing that may not come


@depths
@pytest.mark.parametrize("early", [1, 2, 3])
@pytest.mark.parametrize("how", ["abort", "preempt", "credit"])
def test_requests_stop_waiting_if_the_one_that_computes_the_prefix_stops(depth: int, early: int, how: str) -> None:
    engine = roomy(depth=depth, weights=(1, 1), max_num_batched_tokens=30)
    first = engine.add([*tokens(96), 7], 4)
    others = [engine.add([*tokens(96), i], 4, frontend=1) for i in range(3)]
    for _ in range(early):
        engine.step()
    assert not engine.outputs[first]
    before = engine.stats.prompt_tokens
    if how == "abort":
        engine.abort(first)
    elif how == "credit":
        engine.set_credit(0, False)
    else:
        preempt(engine.scheduler.state, engine.scheduler.fair.of(0).requests[first[1]])
    engine.run()
    assert all(key in engine.finished for key in others)
    engine.set_credit(0, True)
    engine.run()
    engine.check_outputs()
    assert engine.stats.prompt_tokens - before <= 2 * 96 + 4, "and of them, too, one computes it for all"


@depths
def test_one_that_ends_with_its_first_token_leaves_its_prefix_behind(depth: int) -> None:
    engine = roomy(depth=depth)
    add_sharing(engine, 5, max_tokens=1)
    engine.run()
    engine.check_outputs()
    assert engine.stats.prompt_tokens == 32 + 5 * 3
    assert len(engine.steps) == 2


def test_a_slower_request_is_not_waited_for() -> None:
    engine = roomy(weights=(1, 8), max_num_batched_tokens=45)
    slow = engine.add(tokens(90), 2, frontend=0)
    fast = engine.add([*tokens(89), 1], 2, frontend=1)
    engine.step()
    assert engine.steps[0].requests == {slow: 5, fast: 40}
    third = engine.add([*tokens(89), 2], 2, frontend=1)
    engine.abort(slow)
    while third not in engine.started:
        engine.step()
    assert sum(computed(engine, third)) == 90 - 88, "it waits for the faster one"
    engine.run()
    engine.check_outputs()


def test_a_request_that_stopped_inside_a_block_is_not_waited_for() -> None:
    engine = roomy(weights=(1, 1), max_num_batched_tokens=1)
    engine.add(tokens(8), 2)
    engine.step()
    engine.step()
    engine.set_credit(0, False)
    other = engine.add(tokens(9), 2, frontend=1)
    engine.run()
    assert other in engine.finished
    engine.set_credit(0, True)
    engine.run()
    engine.check_outputs()


def test_unpublished_blocks_behind_a_window_are_not_waited_for() -> None:
    engine = roomy(depth=3, windows=(None, 7), long_prefill_token_threshold=16)
    first, second = add_sharing(engine, 2, shared=120, max_tokens=2)
    while first not in engine.started:
        engine.step()
    assert sum(computed(engine, second)) > 60, "it computes it beside the first"
    engine.run()
    engine.check_outputs()


@depths
def test_a_prefix_removed_by_a_reset_is_not_waited_for(depth: int) -> None:
    engine = roomy(depth=depth, max_num_batched_tokens=20)
    first = engine.add(tokens(60), 4)
    engine.step()
    engine.scheduler.reset_prefix_cache()
    second = engine.add(tokens(61), 4)
    while first not in engine.finished:
        engine.step()
    assert second in engine.steps[-1].requests, "it began when there was budget for it"
    engine.run()
    engine.check_outputs()
    assert sum(computed(engine, second)[:-3]) == 61


@depths
def test_a_suspect_is_not_waited_for(depth: int) -> None:
    engine = roomy(suspects=1, depth=depth, max_num_batched_tokens=20)
    other = engine.add(tokens(5, 1), 20)
    engine.step()
    suspect = engine.add(tokens(80), 4, suspect=True)
    while suspect not in engine.steps[-1].requests:
        engine.step()
    sharing = engine.add([*tokens(80), 1], 4)
    while suspect not in engine.started:
        engine.step()
    assert sum(computed(engine, sharing)) > 0
    engine.run()
    engine.check_outputs()
    assert other in engine.finished


@depths
def test_a_waiting_request_keeps_its_place_during_a_pause(depth: int) -> None:
    engine = roomy(depth=depth, max_num_batched_tokens=10)
    first, second = add_sharing(engine, 2)
    engine.step()
    engine.pause("wait")
    engine.run()
    assert list(engine.finished) == [first]
    engine.scheduler.resume()
    engine.run()
    engine.check_outputs()
    assert sum(computed(engine, second)[:-3]) == 3


# ---------------------------------------------------------------------- it costs little


def test_while_it_waits_it_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = roomy(long_prefill_token_threshold=8)
    looks = count_look_ups(engine, monkeypatch)
    keys = add_sharing(engine, 5, shared=96)
    engine.run()
    engine.check_outputs()
    assert len(engine.steps) > 12
    assert len(looks) <= 1 + 4 * 2
    assert engine.stats.prompt_tokens == 96 + 5 * 3
    assert len(engine.finished) == len(keys)


def test_no_request_waits_if_no_prefix_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frontend, "defer", lambda frontend: pytest.fail("it waits for nobody"))
    engine = roomy(max_num_batched_tokens=40)
    for i in range(12):
        engine.add(tokens(30, i), 5)
    engine.run()
    engine.check_outputs()


def test_nothing_is_remembered_of_those_that_ended() -> None:
    engine = roomy(num_blocks=30, max_num_seqs=3, weights=(1, 1))
    for i in range(9):
        engine.add([*tokens(8 * (i % 4)), i], 30, frontend=i % 2)
    engine.run()
    assert engine.kv._coming == {}
