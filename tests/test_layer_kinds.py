"""Each kind of layer: its memory, the prefixes it can use, the positions where a prompt may be cut, and the roll-back
after a rejection."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.core.memory.block_pool import NULL_BLOCK
from mainspring.core.memory.cache_manager import CacheManager
from mainspring.core.memory.layer_kinds import FixedLength, FullAttention, WindowedAttention, kind_of
from mainspring.core.memory.layer_rules import LayerKind
from mainspring.core.memory.recurrent_state import NO_STATE_COPIES, SNAPSHOT, RecurrentState, num_states
from mainspring.core.memory.updates import LayerGroup
from mainspring.core.plan.request import Request
from mainspring.ipc.messages import AddRequest, Sampling

SIZE = 4  # tokens in a block
FULL = LayerGroup("full")


def windowed(window: int) -> LayerGroup:
    return LayerGroup("windowed", window=window)


def fixed(length: int) -> LayerGroup:
    return LayerGroup("fixed", length=length)


def recurrent(**more: int) -> LayerGroup:
    return LayerGroup("recurrent", **{"slots": 2, "snapshots": 8, **more})  # type: ignore[arg-type]


def kind(group: LayerGroup) -> LayerKind:
    return kind_of(group, SIZE)


def request(prompt_len: int, salt: str = "") -> Request:
    made = Request(AddRequest(0, "", list(range(prompt_len)), Sampling(8), cache_salt=salt), 0, 0.0, 256)
    made.extend_digests(made.tokens, prompt_len, SIZE)
    return made


def manager(*groups: LayerGroup, num_blocks: int = 40) -> CacheManager:
    return CacheManager(groups, SIZE, num_blocks, prefix_caching=True)


def run(cache: CacheManager, prompt_len: int, salt: str = "", slot: int = 0) -> tuple[Request, int]:
    """Admit a request, compute its prompt and publish its blocks; the request, and its cached tokens."""
    made = Request(AddRequest(0, "", list(range(prompt_len)), Sampling(8), cache_salt=salt), 0, 0.0, 256)
    cached = cache.find_prefix(made)
    made.slot = slot
    cache.take_prefix(made)
    cache.show(made)
    start = cached
    while start < prompt_len:
        count = cache.cut(made, start, prompt_len - start)
        assert count, "the prompt can't be computed"
        start += count
        assert cache.extend(made, start - count, start)
        end = np.array([start])
        cache.take_state_copies({slot: made}, np.array([slot]), end, np.zeros(1, np.int64))
        made.extend_digests(made.tokens, start, SIZE)
        cache.publish(made, (start - count) // SIZE, start // SIZE)
    return made, cached


# ---------------------------------------------------------------------- allocation


@pytest.mark.parametrize("group", [FULL, windowed(6)], ids=lambda g: g.kind)
@pytest.mark.parametrize(("tokens", "columns"), [(0, 0), (1, 1), (4, 1), (5, 2), (17, 5)])
def test_a_token_lies_in_the_column_of_its_block(group: LayerGroup, tokens: int, columns: int) -> None:
    assert kind(group).num_columns(tokens) == columns


def test_blocks_are_taken_early_where_they_stay_and_not_behind_a_window() -> None:
    assert kind(FULL).num_columns(5, ahead=20) == 5
    assert kind(windowed(6)).num_columns(5, ahead=20) == 2


def test_full_attention_gives_nothing_back() -> None:
    assert [len(kind(FULL).unread(n)) for n in (0, 40, 1000)] == [0, 0, 0]


@given(st.integers(1, 30), st.integers(0, 60))
def test_a_window_gives_back_what_the_next_query_does_not_see(window: int, position: int) -> None:
    seen = range(max(0, position - window + 1), position + 1)
    assert kind(windowed(window)).unread(position) == range(seen[0] // SIZE)


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 60))
def test_a_window_counts_the_blocks_held_at_one_time(window: int, per_step: int, tokens: int) -> None:
    rules = kind(windowed(window))
    starts = itertools.chain(range(0, tokens, per_step), [tokens - 1])
    most = max(rules.num_columns(min(start + per_step, tokens)) - rules.unread(start).stop for start in starts)
    assert most <= rules.new_blocks(0, tokens, per_step) <= -(-tokens // SIZE)


def test_memory_of_fixed_length_is_taken_whole_and_never_grows() -> None:
    rules = kind(fixed(10))
    assert [rules.num_columns(n) for n in (0, 1, 500)] == [3, 3, 3]
    assert (rules.new_blocks(0, 1, 1), rules.new_blocks(3, 500, 500), rules.unread(500)) == (3, 0, range(0))


def test_recurrent_state_takes_no_blocks() -> None:
    rules = kind(recurrent())
    assert (rules.num_columns(500), rules.new_blocks(0, 500, 500), rules.table([None, 3], 2)) == (0, 0, [])


# ---------------------------------------------------------------------- which prefixes are usable


def usable(group: LayerGroup, cached: str, most: int = 99) -> int:
    """Blocks of the longest usable prefix, where `x` is a cached block and `.` one that is not."""
    blocks = [7 if mark == "x" else None for mark in cached]
    return kind(group).usable(blocks, min(most, len(blocks)))


@pytest.mark.parametrize(("cached", "blocks"), [("", 0), ("xxx", 3)])
def test_full_attention_needs_every_block(cached: str, blocks: int) -> None:
    assert usable(FULL, cached) == blocks


def test_full_attention_looks_up_no_block_behind_a_gap() -> None:
    asked = request(4 * SIZE)
    cached = {asked.digests[0]: 5, asked.digests[2]: 6}
    assert kind(FULL).look_up(asked, 4, cached.get) == [5]
    assert kind(windowed(6)).look_up(asked, 4, cached.get) == [5, None, 6, None]


@pytest.mark.parametrize(
    ("cached", "blocks"),
    # with a window of 6, the query behind n blocks reaches 5 tokens back: the last two blocks
    [("..xx", 4), ("xx.x", 2), ("..x.", 0), ("x...", 1), (".xxx.x", 4), ("......", 0)],
)
def test_a_window_needs_the_blocks_that_the_next_query_reaches(cached: str, blocks: int) -> None:
    assert usable(windowed(6), cached) == blocks


@given(st.integers(1, 14), st.text("x.", max_size=12), st.integers(0, 12))
def test_a_window_finds_the_longest_usable_prefix(window: int, cached: str, most: int) -> None:
    unread = kind(windowed(window)).unread
    lengths = range(min(most, len(cached)), 0, -1)
    longest = next((n for n in lengths if "." not in cached[unread(n * SIZE).stop : n]), 0)
    assert usable(windowed(window), cached, most) == longest


def test_recurrent_state_needs_a_snapshot_at_the_end_of_the_prefix_and_nothing_before() -> None:
    assert [usable(recurrent(), marks) for marks in ("...x", ".x..", "....", "xx.x.")] == [4, 2, 0, 4]
    assert usable(recurrent(), "xx.x.", most=3) == 2


def test_fixed_memory_is_usable_for_any_prefix_and_found_whole_by_its_content() -> None:
    rules, asked = kind(fixed(6)), request(8)
    names = rules.names(asked)
    assert len(set(names)) == 2
    assert rules.names(request(20)) == names, "the tokens of the sequence do not matter"
    assert not set(rules.names(request(8, salt="other"))) & set(names)
    assert rules.look_up(asked, 0, dict(zip(names, (3, 4), strict=True)).get) == [3, 4]
    assert rules.look_up(asked, 2, {names[0]: 3}.get) == []
    assert [rules.usable([], most) for most in (0, 9)] == [0, 9]
    assert rules.table([3, 4], 1) == [3, 4]


def test_the_block_table_of_a_hit_has_null_blocks_behind_the_window() -> None:
    assert kind(FULL).table([5, 6, 7], 2) == [5, 6]
    assert kind(windowed(3)).table([5, 6, 7], 3) == [NULL_BLOCK, NULL_BLOCK, 7]


# ---------------------------------------------------------------------- cuts and rejections


@pytest.mark.parametrize("group", [FULL, windowed(6), fixed(10)], ids=lambda g: g.kind)
def test_keys_and_values_may_be_cut_anywhere_and_are_overwritten_after_a_rejection(group: LayerGroup) -> None:
    assert [kind(group).cut(request(30), 5, count) for count in (1, 7, 25)] == [1, 7, 25]
    slots, starts, ends = np.array([0, 1]), np.array([8, 20]), np.array([10, 21])
    assert kind(group).roll_back(slots, starts, ends).tolist() == [10, 21]


@pytest.mark.parametrize(
    ("start", "count", "expected"),
    [
        (0, 30, 16),  # up to the next snapshot
        (16, 30, 12),  # up to the last full block, at 28
        (28, 30, 30),  # up to the end of the prompt and behind it
        (0, 7, 7),  # fewer tokens are allowed
        (31, 5, 5),  # after the prompt any cut is allowed
    ],
)
def test_recurrent_state_stops_a_step_where_a_snapshot_is_due(start: int, count: int, expected: int) -> None:
    assert kind(recurrent(snapshot_every=16)).cut(request(31), start, count) == expected


def test_recurrent_state_stops_a_step_where_a_cached_prefix_branches() -> None:
    asked = request(31)
    asked.branch = 12
    assert kind(recurrent(snapshot_every=16)).cut(asked, 0, 30) == 12


@pytest.mark.parametrize(("start", "count", "expected"), [(0, 7, 0), (0, 8, 8), (8, 23, 16), (24, 6, 0), (24, 7, 7)])
def test_a_chunked_kernel_computes_whole_chunks_of_a_prompt_or_its_end(start: int, count: int, expected: int) -> None:
    assert kind(recurrent(chunk=8)).cut(request(31), start, count) == expected


def test_a_rejection_takes_recurrent_state_back_to_before_the_step() -> None:
    cache = manager(FULL, recurrent())
    slots, starts, ends = np.array([1]), np.array([8]), np.array([10])
    assert cache.roll_back(slots, starts, ends).tolist() == [8]
    none = np.zeros(0, np.int64)
    copies = cache.take_state_copies({}, none, none, none)
    assert copies.restores.tolist() == [[4], [2]], "from the backup of slot 1 to its running state"
    assert cache.take_state_copies({}, none, none, none) is NO_STATE_COPIES, "once"


@pytest.mark.parametrize(("backups", "source"), [(True, 6), (False, 3)])
def test_snapshots_lie_behind_the_running_states_and_their_backups(backups: bool, source: int) -> None:
    group = recurrent(backups=backups, slots=3, snapshot_every=16)
    cache = manager(FULL, group)
    first, _ = run(cache, 17)
    assert num_states(group) == source + 1 + 8
    cache.free(first)
    again = request(17)
    assert cache.find_prefix(again) == 16
    again.slot = 1
    cache.take_prefix(again)
    none = np.zeros(0, np.int64)
    assert cache.recurrent is not None
    snapshot = cache.recurrent.snapshots.find((SNAPSHOT, first.digests[3]))
    assert snapshot is not None
    assert cache.take_state_copies({}, none, none, none).restores.tolist() == [[source + snapshot], [2]]


def test_a_model_that_tells_prompts_caches_nothing_behind_them() -> None:
    for prompts_only, expected in ((False, 24), (True, 12)):
        cache = manager(FULL, recurrent(prompts_only=prompts_only))
        first, _ = run(cache, 14)
        generated = np.array([0]), np.array([24]), np.array([0])
        cache.take_state_copies({0: first}, *generated)
        first.extend_digests(np.arange(24, dtype=np.int32), 24, SIZE)
        assert cache.extend(first, 14, 24)
        cache.publish(first, 3, 6)
        cache.free(first)
        assert cache.find_prefix(request(30)) == expected


# ---------------------------------------------------------------------- kinds beside each other


def test_a_description_of_each_kind_has_its_rules() -> None:
    groups = [FULL, windowed(3), fixed(5), recurrent()]
    assert [type(rules) for rules in manager(*groups).kinds] == [
        FullAttention,
        WindowedAttention,
        FixedLength,
        RecurrentState,
    ]


def test_a_hit_is_the_longest_prefix_that_every_kind_can_use() -> None:
    cache = manager(FULL, windowed(6), recurrent(snapshot_every=16))
    first, _ = run(cache, 31)
    cache.free(first)
    assert run(cache, 31, slot=1)[1] == 28
    assert run(cache, 28, slot=1)[1] == 16, "full attention alone could use 24"


def test_where_one_kind_shortens_a_hit_the_others_are_asked_again() -> None:
    cache = manager(FULL, windowed(6))
    first, _ = run(cache, 25)
    cache.free(first)
    for group, block in ((0, 4), (1, 3)):  # 4 blocks of the first group; 6 of the second, or up to 3
        found = cache.pool.find((group, first.digests[block]))
        assert found is not None
        cache.pool._forget(found)
    assert run(cache, 25)[1] == 3 * SIZE


def test_a_request_without_a_snapshot_notes_where_the_keys_and_values_are_cached() -> None:
    cache = manager(FULL, recurrent(snapshot_every=1000))
    first, _ = run(cache, 31)
    shared = Request(AddRequest(0, "", [*range(14), 99, 99, 99], Sampling(8)), 0, 0.0, 256)
    assert cache.find_prefix(shared) == 0
    assert shared.branch == 12
    assert first.branch == 0


def test_blocks_of_fixed_memory_are_shared_by_content_and_never_grow() -> None:
    cache = manager(FULL, fixed(6))
    first, _ = run(cache, 9, salt="a")
    assert [len(table) for table in first.tables] == [3, 2]
    assert cache.extend(first, 9, 33)
    assert [len(table) for table in first.tables] == [9, 2]
    again, cached = run(cache, 5, salt="a", slot=1)
    assert (cached, again.tables[1]) == (4, first.tables[1])
    other, _ = run(cache, 5, salt="b", slot=1)
    assert not set(other.tables[1]) & set(first.tables[1])
    for one in (first, again, other):
        cache.free(one)
    assert (cache.pool.num_in_use, +cache.blocks_used) == (0, {})
    waiting = request(3, salt="a")
    assert cache.find_prefix(waiting) == 0
    assert cache.room_needed(waiting, 3, 8) == (3, 3), "one new block, and two cached ones that no request uses"


def test_the_planners_memory_needs_no_torch() -> None:
    code = "import sys, mainspring.core.memory.cache_manager; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_the_smallest_piece_of_a_prompt_is_the_largest_chunk() -> None:
    assert manager(FULL).least_cut == 1
    assert manager(FULL, recurrent(chunk=64)).least_cut == 64
