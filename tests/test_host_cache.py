"""Host memory behind the block pool: a loaded block equals the saved one, with any operations in between."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import PreTrainedConfig

from harness import VOCAB, Engine, Windows, blocks_for
from invariants import check_host
from mainspring.core.memory.block_pool import BlockPool, Key
from mainspring.core.memory.host_cache import HostCache
from mainspring.core.memory.updates import NO_COPIES, Copies, LayerGroup
from mainspring.core.model.run.recurrent import StateKey, StateSpec, StepStates
from mainspring.core.worker.block_count import count_slots, offloading_bytes
from mainspring.core.worker.device import Device
from mainspring.core.worker.runner import copy_blocks
from mainspring.ipc.config import CacheConfig
from mainspring.ipc.errors import InvalidArgumentError, OutOfMemoryError
from mainspring.kernels import host_memory, prefault
from tiers import examples

GIB = 2**30
STATES = LayerGroup("recurrent", slots=8, snapshots=3, host_snapshots=50)


def key(number: int) -> Key:
    return number % 2, number.to_bytes(4, "little")


class TwoTiers(RuleBasedStateMachine):
    """Random sequences of a scheduler's operations on pool and host memory, checked against the content of each block
    and slot. Prefixes are numbers, and the content of a block is the number of the prefix computed there."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.host = BlockPool(6), HostCache(3)
        self.pool.on_evict = self.host.evicted
        self.blocks, self.slots = [-1] * 6, [-1] * 3  # content
        self.to_compute: dict[int, int] = {}  # block → prefix, written by the next step
        self.held: list[int] = []

    @precondition(lambda self: self.pool.num_free)
    @rule(number=st.integers(0, 7))
    def ask_for(self, number: int) -> None:
        """A request for one prefix, which is found in the pool or in host memory, or is computed."""
        block = self.pool.find(key(number))
        if block is not None:
            self.pool.touch([block])
        elif key(number) in self.host:
            slot = self.host.pin(key(number))
            (block,) = self.pool.take(1)
            self.host.load(slot, block)
            self.pool.publish(block, key(number))
            self.to_compute.pop(block, None)
        else:
            (block,) = self.pool.take(1)
            self.to_compute[block] = number
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release([self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))])

    @rule()
    def step(self) -> None:
        copies = self.host.take_copies()
        for block, slot in copies.saves:
            self.slots[slot] = self.blocks[block]
        for block, slot in copies.loads:
            self.blocks[block] = self.slots[slot]
        for block, number in self.to_compute.items():
            self.blocks[block] = number
            self.pool.publish(block, key(number))
        self.to_compute.clear()
        for number in range(8):
            found = self.pool.find(key(number))
            assert found is None or self.blocks[found] == number, "a block has not what its name says"
            if key(number) in self.host:
                assert self.slots[self.host.pin(key(number))] == number, "a slot has not what its name says"
        assert self.host.take_copies() is NO_COPIES

    @precondition(lambda self: not self.host._loads)
    @rule()
    def reset(self) -> None:
        self.host.reset()
        assert not any(key(number) in self.host for number in range(8))

    @invariant()
    def nothing_is_lost(self) -> None:
        check_host(self.host)


TestTwoTiers = TwoTiers.TestCase
TestTwoTiers.settings = settings(max_examples=examples(300), stateful_step_count=40)


def test_the_least_recently_used_goes_first() -> None:
    host = HostCache(2)
    host.evicted(5, key(1))
    host.evicted(6, key(2))
    assert host.take_copies() == Copies([(5, 0), (6, 1)], [])
    host.pin(key(1))
    host.take_copies()
    host.evicted(7, key(3))
    assert key(1) in host
    assert key(2) not in host
    assert host.take_copies() == Copies([(7, 1)], [])


def test_a_block_in_host_memory_is_not_saved_again() -> None:
    host = HostCache(2)
    host.evicted(5, key(1))
    host.take_copies()
    host.load(host.pin(key(1)), 8)
    assert host.take_copies() == Copies([], [(8, 0)])
    host.evicted(8, key(1))
    assert host.take_copies() is NO_COPIES


def test_a_slot_is_not_taken_before_it_is_loaded() -> None:
    host = HostCache(1)
    host.evicted(5, key(1))
    host.take_copies()
    host.load(host.pin(key(1)), 8)
    host.evicted(6, key(2))
    assert key(2) not in host, "there is no slot for it"
    assert host.take_copies() == Copies([], [(8, 0)])


def test_a_block_evicted_before_it_was_loaded_is_neither_loaded_nor_saved() -> None:
    host = HostCache(2)
    host.evicted(5, key(1))
    host.take_copies()
    host.load(host.pin(key(1)), 8)
    host.evicted(8, key(1))
    assert host.take_copies() is NO_COPIES
    assert key(1) in host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_blocks_keep_their_bits(dtype: torch.dtype) -> None:
    elements = 24
    host = Device(torch.device("cpu")).host_blocks((8, elements), dtype)
    pool = torch.randint(0, 255, (9, elements * dtype.itemsize), dtype=torch.uint8).view(dtype)
    before = pool.clone()
    copy_blocks(Copies([(i, i) for i in range(8)], []), pool, host)
    pool.view(torch.uint8).zero_()
    copy_blocks(Copies([(8, 0)], [(8, 0), *((i, 7 - i) for i in range(1, 7))]), pool, host)
    assert not pool.view(torch.uint8)[8].any(), "saved before it is loaded"
    assert torch.equal(pool.view(torch.uint8)[1:7], before.view(torch.uint8)[1:7].flip(0))


def test_states_keep_their_bits() -> None:
    specs = {
        StateKey(0, "conv"): StateSpec((3, 5), torch.bfloat16, True),
        StateKey(0, "recurrent"): StateSpec((2, 3), torch.float32, False),
        StateKey(1, "conv"): StateSpec((7,), torch.bfloat16, True),
    }
    states = StepStates(PreTrainedConfig(num_hidden_layers=2), specs)
    states.allocate(5, torch.bfloat16, lambda shape, dtype: torch.randn(shape).to(dtype))
    before = {key: tensor.clone() for key, tensor in states.pool.items()}
    host = Device(torch.device("cpu")).host_blocks((2, states.slot_bytes), torch.uint8)
    states.copy_host(Copies([(1, 1), (2, 0)], [(2, 1), (3, 0), (4, 1)]), host)
    assert states.slot_bytes == 2 * 15 + 4 * 6 + 2 * 7
    for key, tensor in states.pool.items():
        assert torch.equal(tensor, before[key][[0, 1, 1, 2, 1]])


# ---------------------------------------------------------------------- in the scheduler


def prompts(count: int, length: int) -> list[list[int]]:
    return [[(7 * i + j * j) % VOCAB for j in range(length)] for i in range(count)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("windows", "num_blocks"), [((None,), 20), ((None, 7), 30), ((5,), 12), ((None, STATES), 20), ((STATES,), 1)]
)
def test_prefixes_that_the_pool_forgot_come_back(depth: int, windows: Windows, num_blocks: int) -> None:
    engine = Engine(windows=windows, num_blocks=num_blocks, host_blocks=200, depth=depth, max_num_seqs=1)
    for _ in range(2):
        for prompt in prompts(6, 33):
            engine.add(prompt, 3)
        engine.run()
    engine.check_outputs()
    stats = engine.stats
    assert stats.prefix_hits == 6 * 32, "every prompt of the second round but for its last token"
    assert 0 < stats.host_hits <= stats.prefix_hits


def test_requests_for_one_prefix_load_it_once() -> None:
    engine = Engine(num_blocks=40, host_blocks=200, max_num_seqs=8)
    (first, *others) = prompts(6, 33)
    for prompt in (first, *others):
        engine.add(prompt, 1)
        engine.run()
    assert engine.kv.pool.find((0, engine_digest(engine, first))) is None, "the pool has forgotten it"
    for _ in range(4):
        engine.add([*first[:32], 1], 1)
    copies = engine.launch().plan.copies  # type: ignore[union-attr]
    assert len(copies.loads) == 8
    engine.run()
    engine.check_outputs()
    assert engine.stats.host_hits == 32
    assert engine.stats.prefix_hits == 4 * 32


def run_many_prefixes(seed: int) -> Engine:
    """Requests for more prefixes than the pool holds, with random aborts, resets and lack of memory."""
    r = random.Random(seed)
    windows: Windows = r.choice([(None,), (None,), (None, 7), (5,), (None, 3, 9)])
    size, budget = r.choice([1, 2, 4]), r.choice([3, 8, 40])
    one = blocks_for(windows, size, 40, budget)
    engine = Engine(
        windows=windows,
        block_size=size,
        max_model_len=40,
        num_blocks=one + r.randrange(one),
        host_blocks=r.choice([1, one // 2 + 1, 2 * one, 8 * one]),
        depth=r.randint(1, 3),
        weights=(1.0, 2.0),
        suspects=4,
        max_num_batched_tokens=budget,
        max_num_seqs=r.randint(1, 6),
    )
    engine.lacks_memory = lambda step: step.num_tokens > 1 and r.random() < 0.05
    prefixes = [[r.randrange(VOCAB) for _ in range(30)] for _ in range(5)]
    keys = []
    for i in range(30):
        prompt = r.choice(prefixes)[: r.choice([12, 30, 30])] + [r.randrange(VOCAB) for _ in range(r.randrange(8))]
        keys.append(engine.add(prompt, r.randint(1, 6), frontend=r.randrange(2), suspect=i % 10 == 5))
        for _ in range(r.choice([0, 0, 1, 4])):
            engine.step()
        if r.random() < 0.1:
            engine.abort(r.choice(keys))
        if r.random() < 0.03:
            engine.scheduler.reset_prefix_cache(r.random() < 0.5, r.choice(["", "gpu", "cpu"]))  # type: ignore[arg-type]
    engine.run()
    engine.check_outputs()
    return engine


@pytest.mark.slow
def test_many_prefixes_in_any_order_give_every_request_its_tokens() -> None:
    assert sum(run_many_prefixes(seed).stats.host_hits for seed in range(25)) > 800


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thousands_of_orders_give_every_request_its_tokens() -> None:
    number = examples(60)
    assert sum(run_many_prefixes(seed).stats.host_hits for seed in range(25, 25 + number)) > 50 * number


def engine_digest(engine: Engine, prompt: list[int]) -> bytes:
    """The name of the first block."""
    from mainspring.core.plan.request import Request
    from mainspring.ipc.messages import AddRequest, Sampling

    request = Request(AddRequest(0, "", prompt, Sampling(1)), 0, 0.0, 64)
    request.extend_digests(request.tokens, 4, 4)
    return request.digests[0]


@pytest.mark.parametrize(("tier", "cached"), [("", 0), ("gpu", 32), ("cpu", 0)])
@pytest.mark.parametrize("windows", [(None,), (None, STATES), (STATES,)], ids=["blocks", "both", "states"])
def test_each_tier_is_forgotten_alone_or_both(windows: Windows, tier: str, cached: int) -> None:
    engine = Engine(windows=windows, num_blocks=40, host_blocks=200)
    first, *others = prompts(6, 33)
    for prompt in (first, *others):
        engine.add(prompt, 1)
        engine.run()
    engine.scheduler.reset_prefix_cache(False, tier)  # type: ignore[arg-type]
    latest, early = engine.add(others[-1], 1), engine.add(first, 1)
    engine.run()
    assert engine.started[early].num_cached_tokens == cached
    assert engine.started[latest].num_cached_tokens == (32 if tier == "cpu" else 0)
    engine.check_outputs()


def test_a_tier_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="tier is 'disk'; it must be one of '', 'gpu', 'cpu'"):
        Engine().scheduler.reset_prefix_cache(False, "disk")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0),
        ({"kv_offloading_size": 0.0}, 0),
        ({"kv_offloading_size": 1.5}, 3 * GIB // 2),
        ({"swap_space": 2.0}, 2 * GIB),
        ({"kv_offloading_size": 2.0, "swap_space": 2.0}, 2 * GIB),
    ],
)
def test_the_older_name_means_the_same(fields: dict[str, float], expected: int) -> None:
    assert offloading_bytes(CacheConfig(**fields)) == expected  # type: ignore[arg-type]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"kv_offloading_size is 1.0 and swap_space, its older name, is 2.0"):
        offloading_bytes(CacheConfig(kv_offloading_size=1.0, swap_space=2.0))
    with pytest.raises(InvalidArgumentError, match=r"swap_space is 2.0, but without enable_prefix_caching"):
        offloading_bytes(CacheConfig(swap_space=2.0, enable_prefix_caching=False))
    with pytest.raises(OutOfMemoryError, match=r"is 4.00 GiB; 3.00 GiB of host memory are free"):
        count_slots(4 * GIB, 1024, 3 * GIB)
    with pytest.raises(InvalidArgumentError, match="is 1000 bytes; one KV block takes 1024"):
        count_slots(1000, 1024, GIB)
    with pytest.raises(InvalidArgumentError, match="is 90 bytes; one snapshot of recurrent state takes 100"):
        count_slots(90, 0, GIB, 100)
    with pytest.raises(InvalidArgumentError, match="cache keeps nothing"):
        count_slots(90, 0, GIB)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2050, 1024, GIB), (2, 0)),
        ((0, 1024, GIB, 100), (0, 0)),
        ((0, 0, 0), (0, 0)),
        ((1000, 10, GIB, 100), (80, 2)),  # a quarter
        ((1000, 10, GIB, 300), (100, 0)),
        ((1000, 900, GIB, 40), (1, 2)),  # no more than leaves room for a block
        ((1050, 0, GIB, 100), (0, 10)),  # there are no blocks
    ],
)
def test_snapshots_get_a_share_of_host_memory_and_blocks_the_rest(sizes: tuple[int, ...], expected: object) -> None:
    assert count_slots(*sizes) == expected


def test_host_memory_begins_where_its_storage_does() -> None:
    """Torch uses this address to tell whether memory is page-locked."""
    assert host_memory.zeros(0).shape == (0,)
    for size in (1, 5 << 20):
        memory = host_memory.zeros(size)
        assert memory.shape == (size,)
        assert not memory.any()
        assert memory.untyped_storage().data_ptr() == memory.data_ptr()
        assert memory.data_ptr() % host_memory.HUGE_PAGE == 0


def test_memory_that_was_begun_is_taken_once_for_a_chunk_and_else_given_back() -> None:
    before = len(prefault._begun)
    prefault.begin(1 << 20)
    assert host_memory.zeros(1 << 20).shape == (1 << 20,)
    assert len(prefault._begun) == 1, "something smaller took a chunk"
    memory = host_memory.zeros(prefault.CHUNK_BYTES)
    assert (memory.shape, before, len(prefault._begun)) == ((prefault.CHUNK_BYTES,), 0, 0)
    assert not memory[: 4 << 20].any()
    assert memory.data_ptr() % host_memory.HUGE_PAGE == 0
    prefault.begin(1 << 20)
    prefault.drop()
    assert not prefault._begun
