"""The layout of the layers' keys and values in a block: nothing overlaps, all elements are reachable, little memory is
wasted."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.core.memory.updates import LayerGroup
from mainspring.core.worker.kv_layout import KVLayout, plan_layout
from mainspring.kernels.contract import AttentionSpec
from tiers import examples

BLOCK = 8


def spec(window: int | None = None, kv_heads: int = 2, key_dim: int = 4, value_dim: int | None = None) -> AttentionSpec:
    return AttentionSpec(4, kv_heads, key_dim, value_dim or key_dim, 1.0, window)


def plan(calls: list[AttentionSpec], sources: list[int] | None = None) -> KVLayout:
    return plan_layout(calls, sources or list(range(len(calls))), BLOCK, torch.float32)


def assert_every_element_has_one_owner(layout: KVLayout) -> None:
    """Write a unique number to each key and value of every layer and block, and read all of them back."""
    blocks = 3
    pool = torch.zeros(blocks, layout.block_elements)
    caches, index_keys = layout.caches(pool), layout.index_keys(pool)
    for group in layout.groups:  # groups use different blocks; only the layers of one share a block
        pool.zero_()
        views = [view for layer in group.layers for view in (*caches[layer], index_keys[layer]) if view is not None]
        for number, view in enumerate(views, 1):
            view.fill_(number)
        assert all((view == number).all() for number, view in enumerate(views, 1)), "two views overlap"
        assert int((pool != 0).sum()) == sum(view.numel() for view in views)


def test_layers_of_one_kind_are_one_group_with_one_block_for_all() -> None:
    layout = plan([spec()] * 12)
    assert [(group.kind, group.layers) for group in layout.groups] == [("full", tuple(range(12)))]
    assert layout.groups[0].token_bytes * BLOCK == layout.block_bytes
    assert layout.block_elements == 12 * BLOCK * 2 * (4 + 4)
    assert layout.block_bytes == layout.block_elements * 4
    assert_every_element_has_one_owner(layout)


def test_layers_of_different_windows_are_groups_of_their_own() -> None:
    layout = plan([spec(16), spec(), spec(16), spec()])
    assert [(g.kind, g.window, g.layers) for g in layout.groups] == [("windowed", 16, (0, 2)), ("full", None, (1, 3))]
    assert_every_element_has_one_owner(layout)


def test_22_windowed_and_4_full_layers_are_split_so_that_little_of_a_block_is_wasted() -> None:
    layout = plan([spec(None if i % 7 == 6 or i == 25 else 16) for i in range(26)])
    kinds = [{(group.window) for _ in group.layers} for group in layout.groups]
    assert all(len(kind) == 1 for kind in kinds)
    assert sorted(itertools.chain.from_iterable(g.layers for g in layout.groups)) == list(range(26))
    used = sum(g.token_bytes for g in layout.groups) * BLOCK
    assert used == 26 * BLOCK * 2 * 8 * 4
    assert used / (len(layout.groups) * layout.block_bytes) > 0.9
    assert len(layout.groups) <= 8
    assert_every_element_has_one_owner(layout)


def test_layers_of_different_sizes_share_a_pool_whose_blocks_are_as_large_as_the_largest_needs() -> None:
    layout = plan([spec(kv_heads=4, key_dim=6, value_dim=4), spec(16, kv_heads=1, key_dim=10, value_dim=3)])
    assert len(layout.groups) == 2
    assert layout.block_elements >= BLOCK * 4 * 10
    assert all(layout.block_elements % dim == 0 for dim in (6, 4, 10, 3)), "the pool must read as rows of one head"
    assert_every_element_has_one_owner(layout)


def test_latents_are_a_full_kind_of_fewer_bytes_per_token() -> None:
    layout = plan([spec(), spec(kv_heads=1, key_dim=6, value_dim=2)])
    assert {(g.kind, g.token_bytes) for g in layout.groups} == {("full", 2 * 8 * 4), ("full", 8 * 4)}
    assert_every_element_has_one_owner(layout)


@pytest.mark.parametrize("heads_first", [False, True])
def test_index_keys_lie_beside_the_keys_of_their_layer(heads_first: bool) -> None:
    calls = [spec()._replace(index_dim=3), spec()._replace(index_dim=3), spec(16), spec(16)]
    layout = plan_layout(calls, [0, 1, 2, 3], BLOCK, torch.float32, heads_first=heads_first)
    assert [group.layers for group in layout.groups] == [(0, 1), (2, 3)]
    assert layout.groups[0].token_bytes == 2 * (2 * 8 + 3) * 4
    index_keys = layout.index_keys(torch.zeros(1, layout.block_elements))
    assert [None if keys is None else keys.shape[3] for keys in index_keys] == [3, 3, None, None]
    assert_every_element_has_one_owner(layout)


def test_a_group_can_be_written_to_a_pipe() -> None:
    groups = plan([spec(16), spec()]).groups
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(groups), type=tuple[LayerGroup, ...]) == groups


def test_a_call_that_reads_anothers_keys_has_no_cache_of_its_own() -> None:
    layout = plan([spec(), spec(16), spec(), spec(16)], sources=[0, 1, 0, 1])
    assert layout.layer_of_call == (0, 1, 0, 1)
    assert len(layout.specs) == len(layout.offsets) == 2
    assert sorted(layer for group in layout.groups for layer in group.layers) == [0, 1]
    assert_every_element_has_one_owner(layout)


@pytest.mark.parametrize(("reader", "kept"), [(64, 64), (None, None), (4, 16)])
def test_a_layers_blocks_are_kept_for_the_widest_window_that_reads_them(reader: int | None, kept: int | None) -> None:
    layout = plan([spec(16), spec(reader)], sources=[0, 0])
    assert [group.window for group in layout.groups] == [kept]


def test_views_have_the_shapes_that_kernels_are_promised() -> None:
    layout = plan([spec(kv_heads=3, key_dim=4, value_dim=6)])
    pool = torch.zeros(5, layout.block_elements)
    keys, values = layout.caches(pool)[0]
    assert keys.shape == (5, BLOCK, 3, 4)
    assert values.shape == (5, BLOCK, 3, 6)
    assert keys[2, 1, 0].is_contiguous()


def test_views_into_a_part_of_a_larger_pool_stay_in_that_part() -> None:
    layout = plan([spec()])
    whole = torch.zeros(4, layout.block_elements)
    layout.caches(whole[2:])[0].keys.fill_(1)
    assert not whole[:2].any()


def test_heads_that_a_backend_pads_lie_padded_and_share_a_group_with_those_of_that_size() -> None:
    calls = [spec(key_dim=6), spec(key_dim=8), spec(key_dim=8, value_dim=3)]
    layout = plan_layout(
        calls, [0, 1, 2], BLOCK, torch.float32, lambda s: (-(-s.key_dim // 8) * 8, -(-s.value_dim // 8) * 8)
    )
    assert [group.layers for group in layout.groups] == [(0, 1, 2)]
    assert layout.specs == tuple(calls)
    for keys, values in layout.caches(torch.zeros(3, layout.block_elements)):
        assert keys.shape == values.shape == (3, BLOCK, 2, 8)
    assert layout.block_elements == 3 * BLOCK * 2 * (8 + 8)
    assert_every_element_has_one_owner(layout)


@pytest.mark.parametrize("window", [None, 1, 5, 8, 9, 40])
@pytest.mark.parametrize("budget", [1, 7, 8, 33])
def test_blocks_for_is_the_most_that_a_request_holds_at_any_chunking(window: int | None, budget: int) -> None:
    layout = plan([spec(window)])
    length = 60
    most = 0
    for computed in range(length):
        for end in range(computed + 1, min(computed + budget, length) + 1):
            first = 0 if window is None else max(0, computed - window + 1) // BLOCK
            most = max(most, -(-end // BLOCK) - first)
    assert most <= layout.blocks_for(length, budget) <= most + 1


kinds = st.builds(
    spec, st.sampled_from([None, 8, 16]), st.integers(1, 3), st.sampled_from([2, 3, 4, 6]), st.sampled_from([2, 3, 5])
)


@settings(max_examples=examples(60))
@given(st.data())
def test_any_mix_of_layers_lies_in_blocks_without_overlap(data: st.DataObject) -> None:
    palette = data.draw(st.lists(kinds, min_size=1, max_size=3, unique=True))
    calls, sources = [], []
    for call in range(data.draw(st.integers(1, 14))):
        source = data.draw(st.sampled_from([call, *sorted(set(sources))]))
        sources.append(source)
        calls.append(calls[source] if source < call else data.draw(st.sampled_from(palette)))
    layout = plan(calls, sources)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(layout.specs)))
    for call, source in enumerate(sources):
        assert layout.specs[layout.layer_of_call[call]] == calls[source]
    for group in layout.groups:
        members = [layout.specs[layer] for layer in group.layers]
        assert len({(s.num_kv_heads, s.key_dim, s.value_dim, s.window) for s in members}) == 1
        assert members[0].window == group.window
    assert_every_element_has_one_owner(layout)


def test_heads_first_changes_where_a_head_lies_and_nothing_else() -> None:
    calls = [spec(kv_heads=3, key_dim=4, value_dim=6), spec(16, kv_heads=2), spec(kv_heads=3, key_dim=4, value_dim=6)]
    tokens_first = plan(calls)
    layout = plan_layout(calls, [0, 1, 2], BLOCK, torch.float32, heads_first=True)
    assert layout._replace(heads_first=False, offsets=tokens_first.offsets) == tokens_first
    assert_every_element_has_one_owner(layout)
    pool = torch.zeros(5, layout.block_elements)
    for (keys, values), others in zip(layout.caches(pool), tokens_first.caches(pool), strict=True):
        assert [keys.shape, values.shape] == [other.shape for other in others]
        head = [keys[3, :, 1], values[3, :, 1], keys[3, :, -1]]
        assert all(part.is_contiguous() for part in head), "a head's tokens follow each other"
        assert head[1].data_ptr() == head[0].data_ptr() + head[0].nbytes, "and its values its keys"
        assert all(other[3].is_contiguous() for other in others)
