"""The scheduler's guarantees, one in each test."""

from __future__ import annotations

from typing import Any

import pytest

from harness import VOCAB, Engine, expected_output

# ---------------------------------------------------------------------- the budget


def tokens(n: int, start: int = 0) -> list[int]:
    """A prompt; prompts with different `start` have no token in common."""
    return [(start * 7 + i * i + i) % VOCAB for i in range(n)]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = Engine(max_num_batched_tokens=10)
    engine.add(tokens(25), 2)
    engine.run()
    assert [step.num_tokens for step in engine.steps] == [10, 10, 5, 1]
    assert engine.stats.chunked_prefills == 2
    engine.check_outputs()


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    engine = Engine(max_num_batched_tokens=10)
    short = engine.add(tokens(3), 20)
    engine.step()
    long = engine.add(tokens(40, 1), 2)
    engine.step()
    engine.step()
    assert [step.requests for step in engine.steps[1:3]] == [{short: 1, long: 9}] * 2
    assert engine.stats.mixed_steps == 2
    engine.run()
    engine.check_outputs()


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    engine = Engine(max_num_batched_tokens=64, enable_chunked_prefill=False, long_prefill_token_threshold=4)
    first, second = engine.add(tokens(40), 3), engine.add(tokens(30, 1), 3)
    engine.run()
    assert [step.requests for step in engine.steps[:2]] == [{first: 40}, {first: 1, second: 30}]
    assert engine.stats.chunked_prefills == 0
    engine.check_outputs()


def test_without_chunked_prefill_two_frontends_whose_prompts_exceed_half_a_budget_are_both_served() -> None:
    engine = Engine(max_num_batched_tokens=64, enable_chunked_prefill=False, weights=(1, 1))
    for i in range(4):
        engine.add(tokens(50, i), 3, frontend=i % 2)
    engine.run()
    engine.check_outputs()


def test_without_chunked_prefill_a_prompt_of_the_whole_budget_is_not_passed_for_ever_by_small_ones() -> None:
    engine = Engine(
        max_num_batched_tokens=64, max_num_seqs=64, num_blocks=600, enable_chunked_prefill=False, weights=(1, 1)
    )
    for i in range(3):
        engine.add(tokens(2, i), 30, frontend=0)
    engine.step()
    large = engine.add(tokens(63), 1, frontend=1)
    for i in range(40):
        engine.add(tokens(2, i), 30, frontend=0)
        engine.step()
    assert large in engine.finished


def test_no_more_than_the_threshold_of_one_prompt_is_computed_in_a_step() -> None:
    engine = Engine(max_num_batched_tokens=32, long_prefill_token_threshold=6)
    long, other = engine.add(tokens(20), 2), engine.add(tokens(20, 1), 2)
    engine.run()
    assert [step.requests for step in engine.steps[:3]] == [{long: 6, other: 6}] * 3
    engine.check_outputs()


def test_more_decodes_than_budget_are_served_in_order_of_arrival() -> None:
    engine = Engine(max_num_batched_tokens=2, max_num_seqs=4)
    keys = [engine.add([i], 5) for i in range(4)]
    engine.run()
    assert list(engine.finished) == keys
    engine.check_outputs()


def test_the_cached_part_of_a_prompt_is_not_computed_again() -> None:
    engine = Engine(block_size=4)
    engine.add(tokens(18), 1)
    engine.run()
    hit = engine.add([*tokens(17), 49, 48, 47], 1)
    engine.run()
    assert engine.steps[-1].requests == {hit: 20 - 16}
    assert engine.started[hit].num_cached_tokens == 16
    assert (engine.stats.prefix_queries, engine.stats.prefix_hits) == (18 + 20, 16)
    engine.check_outputs()


@pytest.mark.parametrize(("length", "computed"), [(16, 4), (17, 1), (18, 2)])
def test_a_prompt_cached_whole_still_has_its_last_token_computed(length: int, computed: int) -> None:
    engine = Engine(block_size=4)
    engine.add(tokens(20), 1)
    engine.run()
    hit = engine.add(tokens(length), 1)
    engine.run()
    assert engine.steps[-1].requests == {hit: computed}
    engine.check_outputs()


def test_a_prefix_is_not_found_before_the_step_that_computes_it_has_succeeded() -> None:
    engine = Engine(depth=2)
    engine.add(tokens(17), 8)
    engine.launch()
    second = engine.add(tokens(17), 8)
    engine.launch()
    assert second not in engine.steps[-1].requests, "it waits for what is in flight"
    engine.retire()
    engine.launch()
    assert engine.steps[-1].requests[second] == 1
    engine.run()
    engine.check_outputs()


def test_generated_tokens_are_cached_too() -> None:
    engine = Engine(block_size=4)
    first = engine.add(tokens(6), 11)
    engine.run()
    turn = engine.add([*tokens(6), *engine.outputs[first], 1, 2], 1)
    engine.run()
    assert engine.started[turn].num_cached_tokens == 16  # 17 are known; the last was sampled but not computed
    engine.check_outputs()


def test_requests_of_another_salt_share_nothing() -> None:
    engine = Engine(block_size=4)
    for salt in ("", "a", "b"):
        engine.add(tokens(18), 1, salt=salt)
        engine.run()
    assert engine.stats.prefix_hits == 0
    engine.add(tokens(18), 1, salt="a")
    engine.run()
    assert engine.stats.prefix_hits == 16


def test_after_a_reset_no_prefix_is_found() -> None:
    engine = Engine(block_size=4)
    for _ in range(2):
        engine.add(tokens(18), 1)
        engine.run()
        engine.scheduler.reset_prefix_cache()
    assert engine.stats.prefix_hits == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("running", [False, True])
def test_a_reset_may_have_running_requests_compute_all_anew(running: bool, depth: int) -> None:
    engine = Engine(block_size=4, num_blocks=100, depth=depth)
    for start in range(3):
        engine.add(tokens(30, start), 12)
    for _ in range(4):
        engine.step()
    computed = engine.stats.prompt_tokens
    engine.scheduler.reset_prefix_cache(running)
    engine.run()
    engine.check_outputs()
    assert engine.stats.num_preemptions == (3 if running else 0)
    assert (engine.stats.prompt_tokens - computed >= 90) == running


# ---------------------------------------------------------------------- windows


def test_a_windowed_group_frees_the_blocks_behind_its_window() -> None:
    engine = Engine(block_size=4, windows=(8,), max_model_len=256, num_blocks=20, max_num_batched_tokens=8)
    engine.add(tokens(150), 100)
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        most = max(most, engine.kv.pool.num_in_use)
    assert most == 4  # 8 new tokens and the 7 tokens before them
    engine.check_outputs()


def test_a_full_group_keeps_its_blocks_beside_a_windowed_one() -> None:
    engine = Engine(block_size=4, windows=(None, 8), max_model_len=64, max_num_batched_tokens=8)
    engine.add(tokens(40), 9)
    while engine.stats.generation_tokens < 8:
        engine.step()
    (request,) = engine.scheduler.state.running.requests.values()
    full, windowed = ([b for b in table if b] for table in request.tables)
    assert len(full) == 12
    assert len(windowed) <= 4
    engine.run()
    engine.check_outputs()


def test_several_windowed_requests_run_beside_each_other_where_their_full_lengths_would_not_fit() -> None:
    engine = Engine(block_size=4, windows=(8,), max_model_len=128, num_blocks=12, max_num_batched_tokens=8)
    keys = [engine.add(tokens(100, i), 20) for i in range(2)]
    while not engine.outputs[keys[0]]:
        engine.step()
    for _ in range(15):
        engine.step()
    assert engine.stats.num_running == 2
    engine.run()
    assert engine.stats.num_preemptions == 0
    engine.check_outputs()


def test_a_prefix_hit_needs_of_a_windowed_group_only_what_its_window_sees() -> None:
    engine = Engine(block_size=4, windows=(None, 8), max_model_len=64, num_blocks=64, max_num_batched_tokens=64)
    engine.add(tokens(33), 1)
    engine.run()
    cached = [engine.kv.pool.find((1, digest)) for digest in digests(engine, tokens(33))]
    assert len(cached) == 8
    for block in cached[:5]:  # no query after position 32 sees these: 32 - 8 + 1 = 25, in block 6
        assert block is not None
        engine.kv.pool._forget(block)
    hit = engine.add([*tokens(32), 1, 2], 1)
    engine.run()
    assert engine.started[hit].num_cached_tokens == 32
    engine.check_outputs()


def test_a_prefix_that_misses_a_block_inside_the_window_is_not_hit() -> None:
    engine = Engine(block_size=4, windows=(None, 8), max_model_len=64, num_blocks=64, max_num_batched_tokens=64)
    engine.add(tokens(33), 1)
    engine.run()
    block = engine.kv.pool.find((1, digests(engine, tokens(33))[6]))
    assert block is not None
    engine.kv.pool._forget(block)
    hit = engine.add([*tokens(32), 1, 2], 1)
    engine.run()
    assert engine.started[hit].num_cached_tokens == 24
    engine.check_outputs()


def digests(engine: Engine, prompt: list[int]) -> list[bytes]:
    from mainspring.core.plan.request import Request
    from mainspring.ipc.messages import AddRequest, Sampling

    request = Request(AddRequest(0, "", prompt, Sampling(1)), 0, 0.0, 64)
    request.extend_digests(request.tokens, len(prompt), engine.kv.block_size)
    return request.digests


# ---------------------------------------------------------------------- preemption and order


def crowded(**more: Any) -> Engine:
    """An engine with slots for three requests and blocks for about one and a half."""
    return Engine(block_size=4, max_model_len=64, num_blocks=18, max_num_seqs=3, max_num_batched_tokens=64, **more)


def test_a_preempted_request_catches_up_and_none_of_its_tokens_is_sent_again() -> None:
    engine = crowded()
    keys = [engine.add(tokens(12, i), 40) for i in range(3)]
    engine.run()
    assert engine.stats.num_preemptions > 0
    assert sum(engine.finished[key].num_preemptions for key in keys) == engine.stats.num_preemptions
    engine.check_outputs()


def test_the_latest_request_is_preempted_first() -> None:
    engine = crowded()
    keys = [engine.add(tokens(12, i), 40) for i in range(3)]
    engine.run()
    assert engine.finished[keys[0]].num_preemptions == 0
    assert list(engine.finished) == keys


def test_by_priority_the_lowest_value_goes_first_and_the_highest_is_preempted() -> None:
    engine = crowded(scheduling_policy="priority")
    last, middle, first = (engine.add(tokens(12, p), 40, priority=p) for p in (5, 1, -3))
    engine.run()
    assert list(engine.finished) == [first, middle, last]
    assert engine.finished[first].num_preemptions == 0
    engine.check_outputs()


def test_with_fcfs_priority_is_ignored() -> None:
    engine = Engine(max_num_seqs=1)
    keys = [engine.add(tokens(5, p), 2, priority=p) for p in (5, 1, -3)]
    engine.run()
    assert list(engine.finished) == keys


def test_started_is_sent_once_though_a_request_is_preempted() -> None:
    engine = crowded()
    for i in range(3):
        engine.add(tokens(12, i), 40)
    engine.run()
    assert engine.stats.num_preemptions > 0
    assert set(engine.started) == set(engine.messages)


# ---------------------------------------------------------------------- steps in flight


def test_two_steps_in_flight_give_the_same_tokens_as_one() -> None:
    engine = Engine(depth=2)
    key = engine.add(tokens(9), 20)
    assert engine.launch() is not None
    assert engine.launch() is not None
    assert engine.outputs[key] == []
    engine.run()
    engine.check_outputs()


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_get_steps_of_different_requests_and_of_equal_size(stages: int) -> None:
    engine = Engine(depth=stages, stages=stages, max_num_seqs=8)
    for i in range(7):
        engine.add(tokens(3, i), 12)
    engine.run()
    engine.check_outputs()
    share = -(-7 // stages)
    middle = [set(step.requests) for step in engine.steps[stages : stages * 10]]
    assert all(len(step) in (share, 7 - (stages - 1) * share) for step in middle)
    for i in range(len(middle) - stages + 1):
        assert len(set.union(*middle[i : i + stages])) == 7, "all requests are under way in one turn of the stages"


def test_a_long_prompt_leaves_the_other_stage_a_place_for_decodes() -> None:
    engine = Engine(depth=2, stages=2, max_num_batched_tokens=8, max_model_len=128)
    long = engine.add(tokens(80, 1), 2)
    short = engine.add(tokens(2), 20)
    engine.run()
    engine.check_outputs()
    chunks = [i for i, step in enumerate(engine.steps) if step.requests.get(long, 0) > 1]
    between = [step.requests for step in engine.steps[chunks[0] : chunks[-1]]]
    assert len(chunks) == 10
    assert sum(short in requests for requests in between) >= 9


def test_when_a_stages_requests_have_ended_it_gets_some_of_the_others() -> None:
    engine = Engine(depth=2, stages=2, max_num_seqs=8)
    keys = [engine.add(tokens(3, i), 20 if i < 4 else 2) for i in range(8)]
    engine.run()
    engine.check_outputs()
    late = [set(step.requests) for step in engine.steps[8:-2]]
    assert all(len(step) == 2 for step in late)
    assert set(keys[:4]) == late[0] | late[1]


def test_a_block_used_by_a_step_in_flight_is_not_free_before_the_step_retires() -> None:
    engine = Engine(depth=2, num_blocks=8, block_size=4, max_model_len=32, max_num_seqs=1)
    first = engine.add(tokens(20), 10)
    engine.launch()
    engine.abort(first)
    assert engine.kv.pool.num_in_use == 5
    assert engine.kv.num_on_the_way == 5
    engine.add(tokens(20, 1), 2)
    assert engine.launch() is None, "neither its slot nor its blocks are there yet"
    engine.retire()
    assert engine.kv.num_on_the_way == 0
    assert engine.launch() is not None
    engine.run()
    engine.check_outputs()


def test_a_token_of_a_request_aborted_in_flight_is_not_sent() -> None:
    engine = Engine(depth=2)
    key = engine.add(tokens(5), 10)
    engine.launch()
    engine.launch()
    engine.abort(key)
    engine.run()
    assert engine.outputs[key] == []
    assert engine.finished[key].reason == "abort"


# ---------------------------------------------------------------------- nothing stands still (each once did)


def test_one_slot_and_a_budget_of_one_serve_two_frontends() -> None:
    engine = Engine(max_num_batched_tokens=1, max_num_seqs=1, weights=(0.5, 0.5))
    for frontend in (0, 0, 0, 1):
        engine.add([1], 2, frontend=frontend)
    engine.run(100)
    engine.check_outputs()


def test_a_preempted_request_does_not_come_back_for_the_blocks_that_another_waits_for() -> None:
    engine = Engine(block_size=1, max_model_len=41, num_blocks=41, depth=2, long_prefill_token_threshold=3)
    engine.add(tokens(36), 3)
    for _ in range(5):
        engine.step()
    engine.add(tokens(4, 1), 5)
    engine.run(100)
    assert engine.stats.num_preemptions <= 2
    engine.check_outputs()


def test_a_request_is_not_preempted_in_the_step_that_admitted_it() -> None:
    engine = Engine(weights=(2, 1), prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=6, num_blocks=32)
    for i in range(60):
        engine.add(tokens(2, i), 40, frontend=i % 2)
    requests = [r for f in (0, 1) for r in engine.scheduler.fair.of(f).requests.values()]
    while engine.scheduler.has_work:
        waiting = {request: request.num_preemptions for request in requests if request.slot < 0}
        engine.step()
        assert all(request.num_preemptions == before for request, before in waiting.items())
    assert engine.stats.num_preemptions > 0
    engine.check_outputs()


# ---------------------------------------------------------------------- how a request ends


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_a_request_ends_by_length_at_max_tokens(max_tokens: int) -> None:
    engine = Engine()
    key = engine.add(tokens(5), max_tokens)
    engine.run()
    assert len(engine.outputs[key]) == max_tokens
    assert engine.finished[key].reason == "length"


def test_a_request_ends_by_length_at_max_model_len() -> None:
    engine = Engine(max_model_len=20)
    key = engine.add(tokens(15), 100)
    engine.run()
    assert len(engine.outputs[key]) == 5
    assert engine.finished[key].reason == "length"


@pytest.mark.parametrize("others", [[], [99]])
def test_a_stop_token_ends_a_request_and_is_told(others: list[int]) -> None:
    engine = Engine()
    free = engine.add(tokens(5), 10)
    engine.run()
    stop = engine.outputs[free][4]
    key = engine.add(tokens(5), 10, stop=[stop, *others])
    engine.run()
    first = engine.outputs[free].index(stop)
    assert engine.outputs[key] == engine.outputs[free][: first + 1]
    assert (engine.finished[key].reason, engine.finished[key].stop_token) == ("stop", stop)


def test_a_stop_token_as_the_last_allowed_token_is_a_stop() -> None:
    engine = Engine()
    free = engine.add(tokens(5), 1)
    engine.run()
    key = engine.add(tokens(5), 1, stop=engine.outputs[free])
    engine.run()
    assert engine.finished[key].reason == "stop"


def test_resumed_with_its_output_a_request_goes_on_where_it_was() -> None:
    engine = Engine()
    whole = engine.add(tokens(9), 12)
    engine.run()
    output = engine.outputs[whole]
    resumed = engine.add(tokens(9), 12, output=output[:5])
    engine.run()
    assert engine.outputs[resumed] == output[5:]
    assert engine.finished[resumed].reason == "length"


def test_resumed_a_request_counts_its_minimum_from_the_prompt() -> None:
    engine = Engine()
    stops = list(range(0, VOCAB, 2))
    whole = engine.add(tokens(9), 12, stop=stops, min_tokens=8)
    engine.run()
    assert len(engine.outputs[whole]) >= 9
    resumed = engine.add(tokens(9), 12, stop=stops, min_tokens=8, output=engine.outputs[whole][:5])
    engine.run()
    assert engine.outputs[resumed] == engine.outputs[whole][5:]
    assert engine.finished[resumed].reason == engine.finished[whole].reason


@pytest.mark.parametrize("depth", [1, 2])
def test_aborted_while_it_waits_or_runs_a_request_ends_with_abort(depth: int) -> None:
    engine = Engine(max_num_seqs=1, depth=depth)
    runs, waits, other = (engine.add(tokens(5, i), 10) for i in range(3))
    for _ in range(3):
        engine.step()
    sent = list(engine.outputs[runs])
    assert sent
    engine.abort(runs, waits)
    engine.run()
    assert engine.outputs[runs] == sent
    assert engine.outputs[waits] == []
    assert waits not in engine.started
    assert [engine.finished[k].reason for k in (runs, waits, other)] == ["abort", "abort", "length"]
    engine.check_outputs()


def test_an_abort_of_an_unknown_ended_or_foreign_request_changes_nothing() -> None:
    engine = Engine(weights=(1, 1))
    ended = engine.add(tokens(5), 1)
    engine.run()
    key = engine.add(tokens(5), 3)
    engine.abort(ended, (0, 999), (1, key[1]))
    engine.run()
    engine.check_outputs()


def test_a_removed_frontend_leaves_no_block_slot_or_message_behind() -> None:
    engine = Engine(weights=(1, 1), max_num_seqs=2, depth=2)
    stays = engine.add(tokens(5), 12, frontend=0)
    gone = [engine.add(tokens(20, i), 30, frontend=1) for i in range(3)]
    for _ in range(3):
        engine.step()
    sent = {key: len(engine.outputs[key]) for key in gone}
    engine.scheduler.remove_frontend(1)
    for key in gone:
        del engine.messages[key]
    engine.run()
    assert {key: len(engine.outputs[key]) for key in gone} == sent
    assert not set(gone) & set(engine.finished)
    assert 1 not in engine.scheduler.fair
    assert set(engine.finished) == {stays}
    engine.check_outputs()
    assert len(engine.scheduler.state.running.free_slots) == 2


def test_a_refused_request_ends_once_with_its_error_though_nothing_runs() -> None:
    from mainspring.ipc.errors import InvalidRequestError

    engine = Engine()
    engine.scheduler.refuse(0, 7, InvalidRequestError("the prompt is empty"))
    engine.run()
    finished = engine.finished[0, 7]
    assert (finished.reason, finished.error) == ("error", "InvalidRequestError")
    assert finished.error_text == "the prompt is empty"


def test_an_idle_scheduler_has_nothing_to_do() -> None:
    engine = Engine()
    assert not engine.scheduler.has_work
    assert engine.launch() is None
    engine.add(tokens(3), 1)
    assert engine.scheduler.has_work
    engine.run()
    assert not engine.scheduler.has_work


def test_the_stand_in_sees_a_wrong_block_table() -> None:
    """A test of the harness itself: tokens read through a wrong block table change the output."""
    engine = Engine(block_size=4)
    key = engine.add(tokens(10), 8)
    engine.step()
    engine.model._tables[0, :, 1] = engine.model._tables[0, :, 0]
    with pytest.raises(AssertionError):
        engine.run()
    assert expected_output(engine.messages[key], (None,), 64)[1] == "length"
