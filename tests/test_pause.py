"""No request runs during a pause, and no request of a frontend that does not read its messages."""

from __future__ import annotations

import pytest

from harness import VOCAB, Engine


def tokens(n: int, start: int = 0) -> list[int]:
    return [(start * 7 + i * i + i) % VOCAB for i in range(n)]


# ---------------------------------------------------------------------- pauses


@pytest.mark.parametrize("depth", [1, 2])
def test_kept_requests_stand_still_with_all_they_hold_and_go_on_after_the_pause(depth: int) -> None:
    engine = Engine(depth=depth, max_num_seqs=2)
    keys = [engine.add(tokens(5, i), 10) for i in range(3)]
    for _ in range(3):
        engine.step()
    engine.pause("keep")
    engine.run()
    told, held = sum(map(len, engine.outputs.values())), engine.kv.pool.num_in_use
    assert engine.stats.num_running == 2
    assert held
    engine.add(tokens(5, 9), 3)
    engine.run()
    assert (sum(map(len, engine.outputs.values())), engine.kv.pool.num_in_use) == (told, held)
    engine.scheduler.resume()
    engine.run()
    assert all(engine.finished[key].num_preemptions == 0 for key in keys)
    engine.check_outputs()


def test_a_pause_by_abort_ends_all_requests_at_once_and_later_ones_wait() -> None:
    engine = Engine(max_num_seqs=2)
    before = [engine.add(tokens(5, i), 10) for i in range(4)]
    engine.step()
    engine.pause("abort")
    engine.step()
    assert [engine.finished[key].reason for key in before] == ["abort"] * 4
    assert engine.kv.pool.num_in_use == 0
    later = engine.add(tokens(5), 3)
    engine.run()
    assert later not in engine.finished
    engine.scheduler.resume()
    engine.run()
    assert engine.finished[later].reason == "length"
    engine.check_outputs()


def test_a_pause_that_waits_lets_begun_requests_end_even_if_preempted_and_starts_none() -> None:
    engine = Engine(block_size=4, num_blocks=18, max_num_seqs=3, max_num_batched_tokens=64)
    running = [engine.add(tokens(12, i), 40) for i in range(3)]
    while not engine.stats.num_preemptions:
        engine.step()
    waiting = engine.add(tokens(5, 9), 3)
    engine.pause("wait")
    later = engine.add(tokens(5, 8), 3)
    engine.run()
    assert set(engine.finished) == set(running)
    engine.abort(later)
    engine.scheduler.resume()
    engine.run()
    assert engine.finished[waiting].reason == "length"
    engine.check_outputs()


def test_a_pause_may_change_its_mode() -> None:
    engine = Engine()
    running = engine.add(tokens(5), 10)
    engine.step()
    engine.pause("wait")
    waiting = engine.add(tokens(5, 1), 3)
    engine.pause("keep")
    engine.run()
    assert running not in engine.finished
    engine.pause("wait")
    engine.run()
    assert running in engine.finished
    assert waiting not in engine.finished
    engine.scheduler.resume()
    engine.run()
    engine.check_outputs()


def test_a_pause_clears_the_prefix_cache_if_told_to() -> None:
    hits = []
    for clear in (False, True):
        engine = Engine()
        for _ in range(2):
            engine.add(tokens(18), 1)
            engine.run()
            engine.pause("keep", clear_cache=clear)
            engine.scheduler.resume()
        hits.append(engine.stats.prefix_hits)
    assert hits == [16, 0]


# ---------------------------------------------------------------------- credit


@pytest.mark.parametrize("depth", [1, 3])
def test_nothing_is_computed_for_a_frontend_without_credit_and_it_keeps_what_it_has(depth: int) -> None:
    engine = Engine(weights=(1, 1), depth=depth)
    slow, waits = engine.add(tokens(9), 10, frontend=0), engine.add(tokens(9, 1), 10, frontend=1)
    for _ in range(4):
        engine.step()
    engine.set_credit(0, False)
    engine.run()
    assert waits in engine.finished
    assert slow not in engine.finished
    assert engine.stats.num_running == 1
    engine.set_credit(0, True)
    engine.run()
    assert engine.finished[slow].num_preemptions == 0
    engine.check_outputs()


@pytest.mark.parametrize("short", [{"max_num_seqs": 1}, {"num_blocks": 16}], ids=["seats", "blocks"])
def test_the_request_of_a_frontend_without_credit_is_the_first_to_give_way(short: dict[str, int]) -> None:
    engine = Engine(weights=(1, 100), prefix_caching=False, **short)
    slow = engine.add(tokens(40), 20, frontend=1)
    engine.step()
    engine.step()
    engine.set_credit(1, False)
    for i in range(3):
        engine.add(tokens(30, i), 20)
    engine.run()
    assert len(engine.finished) == 3
    engine.set_credit(1, True)
    engine.run()
    assert engine.finished[slow].num_preemptions > 0
    engine.check_outputs()


def test_a_frontend_gets_no_share_of_the_budget_for_the_time_it_had_no_credit() -> None:
    engine = Engine(weights=(1, 1), prefix_caching=False, max_num_batched_tokens=20, max_num_seqs=16, num_blocks=400)
    for i in range(60):
        engine.add(tokens(40, i), 1, frontend=i % 2)
    engine.set_credit(0, False)
    for _ in range(20):
        engine.step()
    engine.set_credit(0, True)
    for _ in range(20):
        engine.step()
    since = [sum(step.by_frontend[f] for step in engine.steps[20:]) for f in (0, 1)]
    assert 0.8 < since[0] / since[1] < 1.25


# ---------------------------------------------------------------------- no work


def test_a_scheduler_that_can_compute_nothing_has_no_work_until_something_changes() -> None:
    engine = Engine(weights=(1, 1))
    scheduler = engine.scheduler
    slow = engine.add(tokens(5), 10)
    engine.step()
    engine.set_credit(0, False)
    assert scheduler.has_work
    assert not engine.step()
    assert not scheduler.has_work
    other = engine.add(tokens(5, 1), 2, frontend=1)
    assert scheduler.has_work
    engine.run()
    assert other in engine.finished
    assert not scheduler.has_work
    engine.abort(slow)
    assert scheduler.has_work, "its end is to be told"
    engine.run()
    engine.pause("keep")
    last = engine.add(tokens(5, 2), 2, frontend=1)
    engine.run()
    assert not scheduler.has_work
    scheduler.resume()
    assert scheduler.has_work
    engine.run()
    assert last in engine.finished
    engine.check_outputs()
