"""Frontends share a core by weight: its token budget, its slots and its blocks. No frontend starves, and none
accumulates unused share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import VOCAB, Engine
from mainspring.core.memory.updates import LayerGroup
from mainspring.core.plan.fair_share import FairShare
from mainspring.core.plan.request import Request
from mainspring.ipc.messages import AddRequest, Sampling


def tokens(n: int, start: int) -> list[int]:
    return [(start * 31 + i * i + i * start) % VOCAB for i in range(n)]


def flood(engine: Engine, frontend: int, n: int, prompt: int, max_tokens: int) -> None:
    for _ in range(n):
        engine.add(tokens(prompt, len(engine.messages)), max_tokens, frontend=frontend)


def served(engine: Engine, steps: int, skip: int = 0) -> Counter[int]:
    """Tokens computed for each frontend in `steps` steps, after `skip` others."""
    for _ in range(skip):
        engine.step()
    first = len(engine.steps)
    while len(engine.steps) < first + steps:
        engine.step()
    return sum((step.by_frontend for step in engine.steps[first:]), Counter())


# ---------------------------------------------------------------------- shares, through the scheduler


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limits"),
    [
        (60, 1, {"max_num_batched_tokens": 30, "max_num_seqs": 16}),  # the budget is the bottleneck
        (2, 40, {"max_num_batched_tokens": 64, "max_num_seqs": 6}),  # slots are the bottleneck
        (30, 30, {"max_num_batched_tokens": 64, "max_num_seqs": 32, "num_blocks": 96}),  # blocks are the bottleneck
        (2, 40, {"max_num_batched_tokens": 6, "max_num_seqs": 32, "num_blocks": 400}),  # more decodes than budget
    ],
    ids=["budget", "seats", "blocks", "decodes"],
)
def test_a_frontend_of_weight_2_gets_about_twice_what_one_of_weight_1_gets(
    prompt: int, max_tokens: int, limits: dict[str, int]
) -> None:
    engine = Engine(weights=(2, 1), prefix_caching=False, **limits)
    for frontend in (0, 1):
        flood(engine, frontend, 150, prompt, max_tokens)
    shares = served(engine, steps=120, skip=20)
    assert 1.6 < shares[0] / shares[1] < 2.5


def test_frontends_of_equal_weight_get_equal_shares_whatever_the_lengths_of_their_requests() -> None:
    engine = Engine(weights=(1, 1), prefix_caching=False, max_num_batched_tokens=30, max_num_seqs=16)
    flood(engine, 0, 100, prompt=60, max_tokens=1)
    flood(engine, 1, 600, prompt=5, max_tokens=2)
    shares = served(engine, steps=100, skip=10)
    assert 0.8 < shares[0] / shares[1] < 1.25


def test_a_frontend_alone_gets_everything() -> None:
    engine = Engine(weights=(1, 1, 1), prefix_caching=False, max_num_batched_tokens=30, max_num_seqs=16)
    flood(engine, 1, 50, prompt=60, max_tokens=1)
    assert served(engine, steps=40) == {1: 40 * 30}


def test_two_frontends_with_many_short_requests_fill_all_seats_at_once() -> None:
    engine = Engine(weights=(1, 1), max_num_batched_tokens=256, max_num_seqs=24, num_blocks=400)
    for frontend in (0, 1):
        flood(engine, frontend, 40, prompt=4, max_tokens=30)
    engine.step()
    assert engine.stats.num_running == 24
    engine.run()
    engine.check_outputs()


def test_budget_kept_for_a_request_that_finds_no_room_is_not_wasted() -> None:
    engine = Engine(weights=(1, 1), max_num_batched_tokens=20, max_num_seqs=1, prefix_caching=False)
    flood(engine, 0, 1, prompt=60, max_tokens=1)
    engine.step()
    flood(engine, 1, 1, prompt=60, max_tokens=1)
    engine.step()
    assert engine.steps[-1].num_tokens == 20
    engine.run()
    engine.check_outputs()


# ---------------------------------------------------------------------- newcomers


def first_token_after(engine: Engine, frontend: int, prompt: int) -> int:
    """Steps until a new request of `frontend` gets its first token."""
    key = engine.add(tokens(prompt, 1), 2, frontend=frontend)
    for steps in range(1, 200):
        engine.step()
        if engine.outputs.get(key):
            return steps
    raise AssertionError("starved")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_newcomer_is_seated_though_another_holds_every_seat(depth: int) -> None:
    engine = Engine(weights=(1, 1), max_num_seqs=4, num_blocks=200, depth=depth)
    flood(engine, 0, 30, prompt=8, max_tokens=50)
    for _ in range(5):
        engine.step()
    assert engine.stats.num_running == 4
    assert first_token_after(engine, 1, prompt=8) <= 2 * depth
    engine.run()
    engine.check_outputs()


def test_a_newcomer_gets_blocks_though_another_holds_them_all() -> None:
    engine = Engine(weights=(1, 1), max_num_seqs=16, num_blocks=32, prefix_caching=False)
    flood(engine, 0, 30, prompt=20, max_tokens=40)
    for _ in range(5):
        engine.step()
    assert engine.kv.pool.num_free < 5
    assert first_token_after(engine, 1, prompt=20) <= 2
    engine.run()
    engine.check_outputs()


def test_a_newcomer_gets_budget_though_another_has_long_prompts_waiting_and_running() -> None:
    engine = Engine(weights=(1, 1), max_num_seqs=16, max_num_batched_tokens=16, num_blocks=300, prefix_caching=False)
    flood(engine, 0, 50, prompt=60, max_tokens=4)
    for _ in range(10):
        engine.step()
    assert first_token_after(engine, 1, prompt=8) <= 2
    engine.run()
    engine.check_outputs()


def test_the_newest_request_of_the_flooding_frontend_is_preempted() -> None:
    engine = Engine(weights=(1, 1), max_num_seqs=3, num_blocks=200)
    keys = [engine.add(tokens(8, i), 30) for i in range(3)]
    for _ in range(3):
        engine.step()
    engine.add(tokens(8, 9), 2, frontend=1)
    engine.run()
    assert [engine.finished[key].num_preemptions for key in keys] == [0, 0, 1]
    engine.check_outputs()


def test_where_blocks_run_out_a_newcomer_is_not_thrown_out_before_the_frontend_that_holds_more() -> None:
    engine = Engine(weights=(1, 1), num_blocks=24, prefix_caching=False)
    old, newer = (engine.add(tokens(8, i), 50) for i in range(2))
    newest = engine.add(tokens(8, 5), 50, frontend=1)
    while not engine.stats.num_preemptions:
        engine.step()
    assert {r.handle for r in engine.scheduler.state.running.requests.values()} == {old[1], newest[1]}
    engine.run()
    assert engine.finished[newer].num_preemptions > 0
    engine.check_outputs()


def test_seats_are_not_taken_back_and_forth_between_two_that_have_their_share() -> None:
    engine = Engine(weights=(1, 1), max_num_seqs=4, num_blocks=400)
    for frontend in (0, 1):
        flood(engine, frontend, 20, prompt=6, max_tokens=30)
    engine.run()
    assert engine.stats.num_preemptions == 0
    engine.check_outputs()


@pytest.mark.parametrize("seats", [1, 2, 3])
def test_more_frontends_than_seats_are_all_served(seats: int) -> None:
    engine = Engine(weights=(1,) * 5, max_num_seqs=seats, num_blocks=200)
    for frontend in range(5):
        flood(engine, frontend, 4, prompt=6, max_tokens=8)
    engine.run(2_000)
    engine.check_outputs()


# ---------------------------------------------------------------------- the order itself


def share(by_priority: bool = False) -> FairShare:
    return FairShare(by_priority, slots=8, blocks=64, blocks_used=Counter())


def enter(fair: FairShare, new: Request) -> None:
    fair.add(new)
    fair.push(new)


def request(handle: int, frontend: int = 0, prompt: int = 4, priority: int = 0, arrival: float = 0.0) -> Request:
    message = AddRequest(handle, "", [1] * prompt, Sampling(4), priority)
    return Request(message, frontend, arrival, 1024)


def order(fair: FairShare, charge: Callable[[Request], int] = lambda r: len(r.tokens)) -> list[tuple[int, int]]:
    """(frontend, handle) in the order of admission; each is charged when it is admitted."""
    names = []
    while (frontend := fair.next_waiting(set())) is not None:
        admitted = frontend.peek()
        assert admitted is not None
        frontend.pop()
        names.append((frontend.id, admitted.handle))
        fair.charge(np.bincount([frontend.id], weights=[charge(admitted)]))
    return names


def test_the_least_served_frontend_goes_first() -> None:
    fair = share()
    for frontend in (0, 1):
        fair.register(frontend)
        for handle in range(3):
            enter(fair, request(handle, frontend, prompt=10 if frontend else 20))
    assert order(fair) == [(0, 0), (1, 0), (1, 1), (0, 1), (1, 2), (0, 2)]


def test_service_counts_by_weight() -> None:
    fair = share()
    for frontend, weight in ((0, 3.0), (1, 1.0)):
        fair.register(frontend, weight)
        for handle in range(6):
            enter(fair, request(handle, frontend))
    assert [frontend for frontend, _ in order(fair)[:8]].count(0) == 6


def test_inside_a_frontend_the_order_is_arrival() -> None:
    fair = share()
    fair.register(0)
    for handle, arrival in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 1.0)):
        enter(fair, request(handle, priority=-handle, arrival=arrival))
    assert [handle for _, handle in order(fair)] == [2, 4, 3, 1]


def test_inside_a_frontend_priority_goes_before_arrival_where_it_counts() -> None:
    fair = share(by_priority=True)
    fair.register(0)
    for handle, priority in ((1, 5), (2, 0), (3, -1), (4, 0)):
        enter(fair, request(handle, priority=priority, arrival=float(handle)))
    assert [handle for _, handle in order(fair)] == [3, 2, 4, 1]


def test_a_preempted_request_keeps_its_place() -> None:
    fair = share()
    fair.register(0)
    first, second = request(1), request(2)
    enter(fair, first)
    enter(fair, second)
    assert fair.of(0).pop() is first
    fair.push(first)
    assert [handle for _, handle in order(fair)] == [1, 2]


def test_one_that_was_idle_starts_level_with_the_least_served_and_has_saved_nothing() -> None:
    fair = share()
    for frontend in range(3):
        fair.register(frontend)
    for frontend in (0, 1):
        enter(fair, request(0, frontend))
    for frontend, so_far in ((0, 1000), (1, 600)):
        fair.charge(np.bincount([frontend], weights=[so_far]))
    enter(fair, request(0, 2))
    assert fair.of(2).served == 600


def test_one_that_had_no_credit_starts_level_with_the_least_served_and_has_saved_nothing() -> None:
    fair = share()
    for frontend in (0, 1):
        fair.register(frontend)
        enter(fair, request(0, frontend))
    fair.set_credit(0, False)
    fair.charge(np.bincount([1], weights=[600]))
    assert fair.next_waiting(set()) is fair.of(1)
    fair.set_credit(0, True)
    assert fair.of(0).served == 600


def test_a_frontend_keeps_its_charged_share_over_a_pause() -> None:
    fair = share()
    fair.register(0)
    fair.register(1)
    fair.of(0).served = 500.0
    enter(fair, request(0, 1))
    enter(fair, request(0, 0))
    assert fair.of(0).served == 500.0


def test_one_that_is_alone_starts_level_with_those_that_were_served_before() -> None:
    fair = share()
    for frontend in (0, 1):
        fair.register(frontend)
    last = request(0, 0)
    enter(fair, last)
    fair.charge(np.bincount([0], weights=[900]))
    fair.end(last)
    for handle in range(3):
        enter(fair, request(handle, 1))
    enter(fair, request(1, 0))
    assert (fair.of(0).served, fair.of(1).served) == (900, 900)
    assert 0 in [frontend for frontend, _ in order(fair)[:2]]


def test_a_finished_request_is_passed_over() -> None:
    fair = share()
    fair.register(0)
    gone, stays = request(1), request(2)
    enter(fair, gone)
    enter(fair, stays)
    fair.end(gone)
    assert fair.of(0).waiting_tokens == len(stays.tokens)
    assert order(fair) == [(0, 2)]


@given(
    budget=st.integers(0, 200),
    wants=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.sampled_from([0.5, 1.0, 3.0])), max_size=5),
)
def test_quotas_divide_the_whole_budget_while_a_frontend_wants_more(
    budget: int, wants: list[tuple[int, int, float]]
) -> None:
    fair = share()
    running, wanted = {}, {}
    for frontend, (runs, waits, weight) in enumerate(wants):
        fair.register(frontend, weight)
        if runs:
            running[frontend] = runs
        if waits:
            enter(fair, request(0, frontend, prompt=waits))
        wanted[frontend] = runs + waits
    quotas = fair.quotas(budget, running)
    assert sum(quotas.values()) <= budget
    assert all(quota >= 0 for quota in quotas.values())
    given_useful = sum(min(quota, wanted[f]) for f, quota in quotas.items())
    assert given_useful == min(budget, sum(wanted.values()))
    for f, quota in quotas.items():
        if quota < wanted[f]:  # a frontend that wants more gets its share, to within a token for each frontend
            total = sum(wants[other][2] for other in quotas)
            assert quota >= int(budget * wants[f][2] / total) - len(quotas)


def test_requests_that_need_most_of_the_pool_do_not_take_it_from_one_another_for_ever() -> None:
    recurrent = LayerGroup("recurrent", slots=8, snapshots=6, snapshot_every=16)
    engine = Engine(
        weights=(1, 1),
        windows=(None, recurrent),
        block_size=8,
        max_model_len=12,
        num_blocks=2,  # those of one request of full length
        depth=2,
        max_num_batched_tokens=40,
        max_num_seqs=8,
        scheduling_policy="priority",
        long_prefill_token_threshold=5,
        prefix_caching=False,
    )
    for length, max_tokens, frontend, priority, steps in (
        (2, 9, 1, 2, 4),
        (2, 9, 0, 1, 4),
        (1, 10, 0, 0, 3),
        (1, 3, 1, 1, 0),
        (8, 4, 0, 1, 4),
        (3, 8, 1, 1, 4),
        (7, 2, 0, 2, 0),
        (7, 3, 1, 2, 3),
        (6, 6, 1, 2, 4),
    ):
        engine.add(tokens(length, len(engine.messages)), max_tokens, frontend=frontend, priority=priority)
        for _ in range(steps):
            engine.step()
    engine.run(2_000)
    engine.check_outputs()


def test_a_request_with_an_adapter_leaves_its_slot_when_its_frontend_has_no_credit() -> None:
    """Others may wait for the adapter's place."""
    engine = Engine(weights=(1, 1), max_num_seqs=4)
    engine.add(tokens(5, 1), 8, frontend=1)
    engine.add(tokens(6, 2), 8, frontend=1)
    engine.step()
    one, two = engine.scheduler.fair.of(1).running.values()
    one.lora = cast(Any, object())
    engine.set_credit(1, False)
    assert (one.slot, two.slot >= 0) == (-1, True)
    one.lora = None
    engine.set_credit(1, True)
    engine.run()
    engine.check_outputs()
