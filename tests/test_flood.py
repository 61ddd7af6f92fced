"""One frontend fills all slots and the pool with long requests and keeps a thousand waiting. The single requests of
another frontend still get their first token within a bound: the number of steps for its prompt at half the budget, plus
twice the steps in flight."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from harness import VOCAB, Engine, count_look_ups, message, result_of
from mainspring.core.features.adapter_slots import LoRAs
from mainspring.core.plan.request import Request
from mainspring.core.plan.step import Step
from mainspring.ipc.messages import Adapter
from tiers import fast_only


def tokens(n: int, start: int) -> list[int]:
    return [(start * 31 + i * i + i * start) % VOCAB for i in range(n)]


def flooded(waiting: int = 1000, **options: Any) -> Engine:
    """An engine in which frontend 0 has filled slots and pool and has `waiting` more requests. Their lengths differ, so
    some need a block in every step."""
    options = {"max_model_len": 256, "max_num_batched_tokens": 64, "prefix_caching": False, **options}
    engine = Engine(weights=(1, 1, 1), **options)
    for i in range(waiting):
        engine.add(tokens(20 + i % 7, i), 200, frontend=0)
    for _ in range(60):
        engine.step()
    assert engine.stats.num_waiting > waiting - 100
    assert engine.stats.num_preemptions or not engine.scheduler.state.running.free_slots, (
        "neither seats nor blocks are short"
    )
    return engine


def steps_to_first_token(engine: Engine, frontend: int, prompt: int) -> int:
    key = engine.add(tokens(prompt, len(engine.messages)), 3, frontend=frontend)
    for steps in range(1, 500):
        engine.step()
        if engine.outputs.get(key):
            return steps
    raise AssertionError("starved")


SHORT = {
    "seats": {"max_num_seqs": 8, "num_blocks": 1000},
    "blocks": {"max_num_seqs": 64, "num_blocks": 150},
    "both": {"max_num_seqs": 12, "num_blocks": 150},
}


@pytest.mark.parametrize("depth", fast_only([2], [1, 2, 3]))
@pytest.mark.parametrize("short", SHORT)
def test_every_single_request_beside_a_flood_gets_its_first_token_within_the_bound(short: str, depth: int) -> None:
    engine = flooded(depth=depth, **SHORT[short])
    for i in range(60):
        prompt = 5 + 13 * i % 90
        assert steps_to_first_token(engine, 1, prompt) <= 2 * depth + -(-prompt // 32)
        for _ in range(i % 4):
            engine.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_so_do_those_of_two_frontends_beside_the_flood(depth: int) -> None:
    engine = flooded(depth=depth, **SHORT["both"])
    for i in range(60):
        assert steps_to_first_token(engine, 1 + i % 2, 20) <= 2 * depth + 1


def test_the_flood_goes_on_beside_single_requests() -> None:
    engine = flooded(**SHORT["both"])
    first = len(engine.steps)
    for _ in range(60):
        steps_to_first_token(engine, 1, 20)
    computed = sum(step.by_frontend[0] for step in engine.steps[first:])
    assert computed > 5 * (len(engine.steps) - first), "of 12 seats the flood keeps at least half"


def test_a_burst_gets_about_its_share_of_seats_and_blocks() -> None:
    engine = flooded(**SHORT["both"])
    for i in range(100):
        engine.add(tokens(20, i), 100, frontend=1)
    for _ in range(5):
        engine.step()
    running = [engine.scheduler.fair.of(frontend).num_running for frontend in (0, 1)]
    assert 5 <= running[1] <= 7
    assert engine.kv.blocks_used[1] <= engine.kv.blocks_used[0]


def test_one_long_request_that_holds_most_blocks_gives_way_though_its_frontend_has_few_seats() -> None:
    engine = Engine(weights=(1, 1), max_model_len=128, num_blocks=48, max_num_seqs=16, prefix_caching=False)
    long = [engine.add(tokens(80, i), 40, frontend=0) for i in range(2)]
    while engine.stats.num_running < 2:
        engine.step()
    for i in range(5):  # more slots than the other frontend uses
        engine.add(tokens(8, i), 20, frontend=1)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.fair.of(1).num_running == 5
    engine.run()
    assert engine.finished[long[1]].num_preemptions > 0
    engine.check_outputs()


def test_the_only_request_of_a_frontend_is_not_preempted_for_another_that_would_then_hold_more() -> None:
    engine = Engine(weights=(1, 1), max_model_len=128, num_blocks=32, max_num_seqs=16, prefix_caching=False)
    long = engine.add(tokens(100, 1), 20, frontend=0)
    for _ in range(6):
        engine.step()
    small = engine.add(tokens(40, 2), 4, frontend=1)
    engine.run()
    assert list(engine.finished) == [long, small]
    assert engine.stats.num_preemptions == 0
    engine.check_outputs()


# ---------------------------------------------------------------------- what a step costs


def work(call: Callable[[], object]) -> int:
    """Number of Python instructions of a call, a measure without noise."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.collect()  # what other tests have left may run code when it is collected
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def step_work(waiting: int, seats: int) -> int:
    """Instructions of the cheapest of some steps, in which no request is added, ends, or needs a block."""
    engine = Engine(
        weights=(1, 1), max_model_len=1024, max_num_batched_tokens=2048, max_num_seqs=seats, num_blocks=20 * seats
    )
    for i in range(seats + waiting):
        engine.add(tokens(6, i), 1000, frontend=0)
    slow = engine.add(tokens(6, 0), 1000, frontend=1)
    engine.set_credit(1, False)
    for _ in range(3):
        engine.step()
    assert slow not in engine.started
    costs = []
    for _ in range(5):
        steps: list[Step | None] = []
        cost = work(lambda into=steps: into.append(engine.scheduler.schedule()))
        step = steps[0]
        assert step is not None
        assert len(step.plan.slots) == seats
        result = result_of(step.plan, engine.model.execute(step.plan))
        engine.model.retire(step.plan)
        costs.append(cost + work(partial(engine.scheduler.update, step, result)))
    return min(costs)


def test_a_step_costs_the_same_however_many_wait() -> None:
    assert step_work(waiting=1000, seats=8) == step_work(waiting=10, seats=8)


def test_a_step_in_which_everybody_decodes_touches_no_request() -> None:
    assert abs(step_work(waiting=10, seats=64) - step_work(waiting=10, seats=8)) < 64 - 8


def test_names_of_adapters_cost_the_same_however_many_wait() -> None:
    def with_adapter(number: int) -> Request:
        return Request(message(number, lora=Adapter(1, f"name {number}", "/folder")), 0, 0.0, 64)

    def waiting(count: int) -> LoRAs:
        loras = LoRAs(1, 1, tuple, lambda request: None, lambda number: None)
        for number in range(count):
            loras.added(with_adapter(number))
        return loras

    few, many = waiting(100), waiting(1000)
    assert len(many.stats()["waiting_loras"]) == 64
    assert work(many.stats) == work(few.stats)
    assert work(partial(many.ended, with_adapter(0))) == work(partial(few.ended, with_adapter(0)))
    assert (len(many.live), len(few.live)) == (999, 99)


def test_a_blocked_request_is_looked_up_again_only_when_that_can_help(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(block_size=4, num_blocks=16, max_model_len=64, max_num_seqs=8)
    engine.add(tokens(20, 1), 40)
    engine.step()
    engine.add(tokens(50, 2), 4)
    looks = count_look_ups(engine, monkeypatch)
    for _ in range(20):
        engine.step()
    assert len(looks) == 1
    engine.run()
    engine.check_outputs()


def test_a_blocked_request_is_admitted_as_soon_as_enough_of_its_prefix_is_cached() -> None:
    engine = Engine(block_size=4, num_blocks=20, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)
    first, second = engine.add(tokens(48, 1), 10), engine.add(tokens(48, 1), 4)
    engine.step()
    assert engine.stats.num_running == 1
    engine.step()
    assert engine.outputs[second]
    assert first not in engine.finished
    engine.run()
    engine.check_outputs()
