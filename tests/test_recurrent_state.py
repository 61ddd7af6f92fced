"""Recurrent layers: the scheduler serves a stand-in model whose state each token updates, in order.

The stand-in (harness.py) fails if a row does not begin at the token that its state expects, and gives other tokens if a
state belongs to another prefix.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from harness import VOCAB, Engine, Windows, blocks_for, expected_output
from mainspring.core.features import speculation
from mainspring.core.memory.recurrent_state import INITIAL_STATE
from mainspring.core.memory.updates import LayerGroup
from mainspring.core.plan.request import Request
from mainspring.core.plan.step import StepPlan
from mainspring.ipc.messages import AddRequest, Sampling
from tiers import examples

SEATS = 4


def recurrent(snapshots: int = 16, **more: Any) -> LayerGroup:
    return LayerGroup("recurrent", **{"slots": SEATS, "snapshots": snapshots, "snapshot_every": 16, **more})


def hybrid(group: LayerGroup | None = None, **more: Any) -> Engine:
    """An engine with full attention and recurrent layers, and blocks of 4 tokens."""
    return Engine(**{"windows": (None, group or recurrent()), "max_num_seqs": SEATS, **more})


def tokens(count: int, start: int = 0) -> list[int]:
    return [(start * 7 + i * i * i + i) % VOCAB for i in range(count)]


def ends(engine: Engine) -> list[int]:
    """Run to the end; → the positions at which the rows of all steps end."""
    found = []
    while engine.scheduler.has_work or engine.in_flight:
        step = engine.launch()
        if step is not None:
            found += (step.plan.starts + step.plan.counts).tolist()
        engine.retire()
    return found


# ---------------------------------------------------------------------- where a request begins


def test_a_request_without_a_cached_prefix_begins_with_the_initial_state() -> None:
    engine = hybrid()
    engine.add(tokens(3))
    step = engine.launch()
    assert step is not None
    assert step.plan.states.restores.tolist() == [[INITIAL_STATE], [1 + int(step.plan.slots[0])]]


def test_a_prefix_is_hit_where_a_snapshot_was_taken_and_not_behind_it() -> None:
    engine = hybrid()
    engine.add(tokens(31), 1)  # snapshots at 16 and, its last full block, at 28
    engine.run()
    hits = [engine.add([*tokens(n), 49, 48, 47], 1) for n in (15, 16, 23, 28, 30)]
    engine.run()
    engine.check_outputs()
    assert [engine.started[key].num_cached_tokens for key in hits[:2]] == [0, 16]
    assert [engine.started[key].num_cached_tokens for key in hits[3:]] == [28, 28]


def test_the_same_prompt_is_hit_at_its_last_full_block_even_if_it_fills_it() -> None:
    engine = hybrid()
    engine.add(tokens(24), 1)
    engine.run()
    again = engine.add(tokens(24), 1)
    longer = engine.add(tokens(30), 1)
    engine.run()
    assert engine.started[again].num_cached_tokens == 20
    assert engine.started[longer].num_cached_tokens == 24
    engine.check_outputs()


@pytest.mark.parametrize("group", [recurrent(), recurrent(prompts_only=True)], ids=["all", "prompts"])
def test_several_steps_in_one_plan_keep_the_states_that_single_steps_keep(group: LayerGroup) -> None:
    hits = []
    for most_steps in (1, 8):
        engine = hybrid(group, most_steps=most_steps, num_blocks=200)
        engine._luck.choice = lambda options: options[-1]  # type: ignore[method-assign]  # no plan is interrupted
        first = [engine.add(tokens(6 + 3 * i, i), 40) for i in range(2)]
        engine.run()
        assert bool(engine.num_several) == (most_steps > 1)
        again = [engine.add([*tokens(6 + 3 * i, i), *engine.outputs[key], 1], 1) for i, key in enumerate(first)]
        engine.run()
        engine.check_outputs()
        hits.append([engine.started[key].num_cached_tokens for key in again])
    assert hits[0] == hits[1]
    assert all(hit > 12 for hit in hits[0]) == (not group.prompts_only), "answers are kept, or prompts alone"


def test_a_request_that_is_resumed_takes_no_state_of_a_prompt_for_its_output() -> None:
    hits = []
    for group in (recurrent(), recurrent(prompts_only=True)):
        engine = hybrid(group)
        first = engine.add(tokens(6), 40)
        engine.run()
        answer = engine.outputs[first]
        engine.scheduler.reset_prefix_cache()
        engine.add([*tokens(6), *answer[:25]], 1)  # snapshots at 16 and 28
        engine.run()
        engine.add(tokens(6), 40, output=answer[:35])
        step = engine.launch()
        assert step is not None
        hits += step.plan.starts.tolist()
        engine.retire(), engine.run()
        engine.check_outputs()
    assert hits == [28, 0]


def test_where_a_cached_prefix_branches_a_snapshot_is_taken() -> None:
    engine = hybrid(recurrent(snapshot_every=1000))
    shared = tokens(12)
    hits = []
    for branch in range(3):
        hits.append(engine.add([*shared, *tokens(9, 1 + branch)], 1))
        engine.run()
    assert [engine.started[key].num_cached_tokens for key in hits] == [0, 0, 12]
    engine.check_outputs()


def test_without_prefix_caching_there_are_no_snapshots() -> None:
    engine = hybrid(prefix_caching=False)
    engine.add(tokens(30), 8)
    while engine.scheduler.has_work:
        step = engine.launch()
        assert step is not None
        assert not step.plan.states.snapshots.size
        engine.retire()
    engine.check_outputs()


def test_a_conversation_goes_on_from_the_newest_snapshot_of_what_was_decoded() -> None:
    engine = hybrid()
    first = engine.add(tokens(10), 20)
    engine.run()
    conversation = [*tokens(10), *engine.outputs[first]]
    then = engine.add([*conversation, 1, 2, 3], 2)
    engine.run()
    assert engine.started[then].num_cached_tokens == 28, "of 29 tokens computed"
    engine.check_outputs()


def test_decoding_keeps_its_newest_snapshot_only() -> None:
    engine = hybrid()
    engine.add(tokens(3), 50)
    while engine.scheduler.has_work:
        engine.step()
        assert engine.kv.recurrent is not None
        assert engine.kv.recurrent.snapshots.num_in_use <= 1
    assert len(engine.kv.recurrent.snapshots._cached) == 1


# ---------------------------------------------------------------------- where a prompt is cut


def test_a_prompt_is_cut_where_a_snapshot_is_due() -> None:
    engine = hybrid(max_num_batched_tokens=64)
    engine.add(tokens(43), 1)
    assert ends(engine) == [16, 32, 40, 43]


def test_a_prompt_is_cut_at_multiples_of_a_chunk() -> None:
    engine = hybrid(recurrent(chunk=8, snapshot_every=1000), max_num_batched_tokens=13)
    engine.add(tokens(43), 3)
    assert ends(engine) == [8, 16, 24, 32, 40, 43, 44, 45]


def test_a_prompt_that_may_not_be_cut_in_what_is_left_of_a_step_waits_for_the_next() -> None:
    engine = hybrid(recurrent(chunk=8, snapshot_every=1000), max_num_batched_tokens=10)
    engine.add(tokens(5), 4)
    engine.add(tokens(20, 1), 1)
    first = engine.launch()
    assert first is not None
    assert first.plan.counts.tolist() == [5]
    engine.run()
    engine.check_outputs()


# ---------------------------------------------------------------------- guesses and preemption


def test_a_rejected_guess_takes_the_request_back_to_its_backup() -> None:
    engine = hybrid(guesses=4, guessed_right=0.0)
    engine.add(tokens(6), 20)
    backups = 0
    while engine.scheduler.has_work:
        step = engine.launch()
        assert step is not None
        slot = 1 + int(step.plan.slots[0])
        if step.plan.guessed.any():
            assert step.plan.states.backups.tolist() == [[slot], [SEATS + slot]]
            backups += 1
            engine.retire()
            if not engine.scheduler.has_work or engine.finished:
                continue
            after = engine.launch()
            assert after is not None
            assert after.plan.starts.tolist() == step.plan.starts.tolist(), "all its tokens are computed again"
            assert after.plan.states.restores.tolist() == [[SEATS + slot], [slot]]
        engine.retire()
    engine.run()
    assert backups > 2
    engine.check_outputs()


def test_accepted_guesses_restore_nothing() -> None:
    engine = hybrid(guesses=4, guessed_right=1.0)
    engine.add(tokens(6), 20)
    restores = 0
    while engine.scheduler.has_work:
        step = engine.launch()
        assert step is not None
        restores += step.plan.states.restores.shape[1]
        engine.retire()
    assert restores == 1
    assert engine.stats.accepted_tokens == engine.stats.draft_tokens > 8
    engine.check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_requests_go_on_from_a_snapshot(depth: int) -> None:
    engine = hybrid(num_blocks=24, depth=depth)
    for i in range(SEATS):
        engine.add(tokens(12, i), 40)
    engine.run()
    engine.check_outputs()
    assert engine.stats.num_preemptions > 0
    computed = sum(step.num_tokens for step in engine.steps)
    without = hybrid(recurrent(snapshots=0), num_blocks=24, depth=depth)
    for i in range(SEATS):
        without.add(tokens(12, i), 40)
    without.run()
    without.check_outputs()
    assert computed < sum(step.num_tokens for step in without.steps)


def test_a_forgotten_snapshot_is_not_hit() -> None:
    engine = hybrid()
    engine.add(tokens(31), 1)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    again = engine.add(tokens(31), 1)
    engine.run()
    assert engine.started[again].num_cached_tokens == 0
    engine.check_outputs()


# ---------------------------------------------------------------------- host memory


def evicted(snapshots: int = 2, **more: Any) -> Engine:
    """An engine whose one prompt, `tokens(31)`, has its snapshots in host memory alone."""
    engine = hybrid(recurrent(snapshots, snapshot_every=1000, host_snapshots=9), num_blocks=200, **more)
    for start in range(1 + snapshots):
        engine.add(tokens(31, start), 1)
        engine.run()
    return engine


def test_requests_for_one_state_in_host_memory_load_it_once() -> None:
    engine = evicted()
    for i in range(SEATS):
        engine.add([*tokens(28), i], 1)
    step = engine.launch()
    assert step is not None
    states = step.plan.states
    ((snapshot, _),) = states.host.loads
    assert len(step.plan.slots) == SEATS
    assert states.restores.tolist() == [[snapshot] * SEATS, (1 + step.plan.slots).tolist()]
    engine.run()
    again = engine.add([*tokens(28), 9], 1)
    step = engine.launch()
    assert step is not None
    assert not step.plan.states.host.loads, "it is a snapshot again"
    engine.run()
    engine.check_outputs()
    assert engine.started[again].num_cached_tokens == 28
    assert engine.stats.prefix_hits == 28 * (SEATS + 1)
    assert engine.stats.host_hits == 28


def test_a_state_is_loaded_though_no_snapshot_is_free() -> None:
    engine = evicted(1, depth=2)
    taking = engine.add(tokens(31, 5), 1)
    first = engine.launch()
    assert first is not None
    assert first.plan.states.snapshots.size, "the only one is taken"
    hit = engine.add([*tokens(28), 1], 1)
    step = engine.launch()
    assert step is not None
    row = step.keys.tolist().index(engine.keys[hit])
    assert [target for target, _ in step.plan.states.host.loads] == [1 + int(step.plan.slots[row])]
    assert not step.plan.states.restores.size
    engine.run()
    engine.check_outputs()
    assert engine.started[hit].num_cached_tokens == 28
    assert engine.started[taking].num_cached_tokens == 0


def test_a_backup_of_the_request_before_does_not_follow_a_loaded_state() -> None:
    engine = evicted(1)
    state, none = engine.kv.recurrent, np.zeros(0, np.int64)
    assert state is not None
    request = Request(AddRequest(0, "", tokens(29), Sampling(1)), 0, 0.0, 64)
    assert engine.kv.find_prefix(request) == 28
    state.snapshots.take(1)
    state.roll_back(np.array([2]), np.array([5]), np.array([6]))
    request.slot = 2
    state.begin(request, 7)
    copies = state.take_copies({}, none, none, none, True)
    assert [target for target, _ in copies.host.loads] == [3]
    assert not copies.restores.size


def test_several_steps_end_where_a_state_is_kept_though_one_is_being_loaded() -> None:
    engine = evicted(2, most_steps=8)
    known, _ = expected_output(AddRequest(0, "", tokens(28), Sampling(1)), engine.windows, 64)
    engine.add(tokens(28), 20, output=known)  # resumed: one token is to be computed, and it is no first one
    step = engine.launch()
    assert step is not None
    assert step.plan.states.host.loads
    assert (step.plan.starts.tolist(), step.plan.num_steps) == ([28], 3)
    engine.run()
    engine.check_outputs()


def test_a_request_that_waits_is_looked_up_again_if_its_state_is_in_host_memory() -> None:
    engine = evicted()
    assert engine.kv.recurrent is not None
    request = Request(AddRequest(0, "", tokens(31), Sampling(1)), 0, 0.0, 64)
    engine.kv.find_prefix(request)
    request.num_cached_blocks = 0
    assert engine.kv.prefix_grew(request)
    engine.scheduler.reset_prefix_cache(tier="cpu")
    assert not engine.kv.prefix_grew(request)


# ---------------------------------------------------------------------- any schedule


def run_any(seed: int) -> Engine:
    r = random.Random(seed)
    size, chunk = r.choice([1, 2, 4]), r.choice([1, 1, 1, 2, 6])
    budget, length = r.choice([SEATS + chunk, 12, 40, 60]), 48
    on_host = r.choice([0, 1, 4, 20])
    few = [1, 2, 3] if on_host else [0, 1, 3, 8, 30]
    group = recurrent(r.choice(few), chunk=chunk, snapshot_every=r.choice([5, 12, 1000]), host_snapshots=on_host)
    windows: Windows = r.choice([(None, group), (None, group), (None, 7, group), (5, group), (group,)])
    one = blocks_for(windows, size, length, budget)
    engine = Engine(
        windows=windows,
        block_size=size,
        max_model_len=length,
        num_blocks=one + r.randrange(one + 1),
        host_blocks=r.choice([0, one, 4 * one] if on_host else [0, 0, one]),
        depth=r.randint(1, 3),
        weights=r.choice([(1.0,), (1.0, 2.0)]),
        suspects=4,
        guesses=r.choice([0, 3, 6]),
        guessed_right=r.choice([0.0, 0.6, 0.9]),
        most_steps=r.choice([1, 8]),
        prefix_caching=r.random() < 0.9,
        max_num_batched_tokens=budget,
        max_num_seqs=SEATS,
        enable_chunked_prefill=budget < length or r.random() < 0.8,
        long_prefill_token_threshold=r.choice([0, 0, chunk + 1]),
    )

    def lacks_memory(plan: StepPlan) -> bool:
        can_be_cut = plan.num_tokens > 1 if engine.scheduler.state.budget.chunked else len(plan.slots) > 1
        lacking = can_be_cut and r.random() < 0.04
        engine.num_lacking += lacking
        return lacking

    engine.lacks_memory = lacks_memory
    prefixes = [[r.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
    keys = []
    for i in range(16):
        before = r.choice(prefixes)[: r.choice([0, 12, 24, 30])]
        if keys and r.random() < 0.3:  # the next turn of a conversation
            last = r.choice(keys)
            before = [*engine.messages[last].prompt_token_ids, *engine.outputs[last]][:36]
        prompt = before + [r.randrange(VOCAB) for _ in range(1 + r.randrange(8))]
        frontend = r.randrange(len(engine.scheduler.fair))
        keys.append(engine.add(prompt, r.randint(1, 16), frontend=frontend, suspect=i % 8 == 5))
        for _ in range(r.choice([0, 0, 1, 4])):
            engine.step()
        if r.random() < 0.1:
            engine.abort(r.choice(keys))
        if r.random() < 0.05:
            engine.scheduler.reset_prefix_cache(r.random() < 0.5, r.choice(["", "gpu", "cpu"]))
    engine.run()
    engine.check_outputs()
    return engine


def run_many(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MOST_GUESS_ROWS", 8)
    hits = preemptions = rejected = accepted = lacking = host_hits = 0
    for seed in seeds:
        engine = run_any(seed)
        stats = engine.stats
        hits, preemptions = hits + stats.prefix_hits, preemptions + stats.num_preemptions
        accepted, lacking = accepted + stats.accepted_tokens, lacking + engine.num_lacking
        rejected += stats.draft_tokens - stats.accepted_tokens
        host_hits += stats.host_hits
    found = np.array([hits, preemptions, rejected, accepted, lacking, host_hits])
    assert (found > len(seeds) / 4).all(), found


@pytest.mark.slow
def test_any_schedule_gives_every_request_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    run_many(range(20), monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_schedules_give_every_request_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    run_many(range(20, 20 + examples(300)), monkeypatch)
