"""The pool of KV blocks: reference counts, eviction order, and cache hits."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from invariants import check_pool
from mainspring.core.memory.block_pool import NULL_BLOCK, BlockPool
from tiers import examples


def key(name: str, group: int = 0) -> tuple[int, bytes]:
    return group, name.encode()


# ---------------------------------------------------------------------- invariant 1, on the real class


class PoolMachine(RuleBasedStateMachine):
    """Random sequences of the engine's operations, compared with a model in plain lists.

    `free` holds the free blocks in allocation order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.free = list(range(1, 9))
        self.held: list[list[int]] = []  # the blocks of each holder
        self.cached: dict[tuple[int, bytes], int] = {}

    def references(self) -> Counter[int]:
        return Counter(block for blocks in self.held for block in blocks)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, len(self.free)))
        blocks = self.pool.take(n)
        assert blocks == self.free[:n], "not the ones to be taken next"
        del self.free[:n]
        self.cached = {k: b for k, b in self.cached.items() if b not in blocks}
        self.held.append(blocks)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def touch_what_is_found(self, data: st.DataObject) -> None:
        k = data.draw(st.sampled_from(sorted(self.cached)))
        block = self.pool.find(k)
        assert block == self.cached[k]
        assert self.pool.is_free(block) == (block in self.free)
        self.pool.touch([block])
        if block in self.free:
            self.free.remove(block)
        self.held.append([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), nulls=st.booleans())
    def release(self, data: st.DataObject, nulls: bool) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release([NULL_BLOCK, *blocks] if nulls else blocks)
        still = self.references()
        for block in blocks:
            if not still[block]:
                if block in self.cached.values():
                    self.free.append(block)
                else:
                    self.free.insert(0, block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from("abcdef"), group=st.integers(0, 1))
    def publish(self, data: st.DataObject, name: str, group: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.references())))
        self.pool.publish(block, key(name, group))
        if key(name, group) not in self.cached and block not in self.cached.values():
            self.cached[key(name, group)] = block

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()
        self.cached = {}

    @invariant()
    def free_cached_and_in_use_are_all_blocks_and_references_are_those_listed(self) -> None:
        check_pool(self.pool, self.references())
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_in_use == len(self.references())

    @invariant()
    def what_is_cached_is_found_and_nothing_else(self) -> None:
        for name in "abcdef":
            for group in (0, 1):
                assert self.pool.find(key(name, group)) == self.cached.get(key(name, group))


TestPoolAgainstItsModel = PoolMachine.TestCase
TestPoolAgainstItsModel.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("broken", ["references", "free", "hash"])
def test_check_finds_a_broken_pool(broken: str) -> None:
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.publish(block, key("a"))
    check_pool(pool, {block: 1})
    if broken == "references":
        references = {block: 2}
    elif broken == "free":
        pool._free.popitem()
        references = {block: 1}
    else:
        pool._key[block] = None
        references = {block: 1}
    with pytest.raises(AssertionError):
        check_pool(pool, references)


# ---------------------------------------------------------------------- one claim each


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(AssertionError):
        pool.take(1)


def test_cached_blocks_are_taken_in_the_order_of_their_last_use() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block, name in zip(blocks, "abc", strict=True):
        pool.publish(block, key(name))
    pool.release(blocks)  # a, b, c
    pool.touch([blocks[0]])
    pool.release([blocks[0]])  # b, c, a
    assert [pool.take(1)[0] for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_blocks_that_cache_nothing_are_taken_before_those_that_do() -> None:
    pool = BlockPool(4)
    a, b, c = pool.take(3)
    pool.publish(a, key("a"))
    pool.release([a])
    pool.release([b])
    pool.release([c])
    assert sorted(pool.take(2)) == [b, c]
    assert pool.find(key("a")) == a


def test_taking_a_block_forgets_what_it_cached() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish(block, key("a"))
    pool.release([block])
    assert pool.find(key("a")) == block
    assert pool.take(1) == [block]
    assert pool.find(key("a")) is None


def test_a_prefix_that_two_blocks_hold_is_found_at_the_first_that_published_it() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.publish(first, key("a"))
    pool.publish(second, key("a"))
    assert pool.find(key("a")) == first
    pool.release([second])
    assert pool.take(1) == [second], "the duplicate caches nothing, so it goes first"
    assert pool.find(key("a")) == first


def test_equal_prefixes_of_different_groups_are_different_blocks() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.publish(first, key("a", 0))
    pool.publish(second, key("a", 1))
    assert (pool.find(key("a", 0)), pool.find(key("a", 1))) == (first, second)


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.touch([block])
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.is_free(block)
    with pytest.raises(AssertionError):
        pool.release([block])


def test_after_a_reset_nothing_is_found_and_blocks_in_use_stay_in_use() -> None:
    pool = BlockPool(3)
    block, other = pool.take(2)
    pool.publish(block, key("a"))
    pool.release([other])
    pool.reset_cache()
    assert pool.find(key("a")) is None
    assert not pool.is_free(block)
    pool.publish(block, key("b"))
    assert pool.find(key("b")) == block
