"""A step that the device lacks memory for is cut; a request that does not fit alone fails, and no other."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from harness import VOCAB, NewSequence, StepPlan, expected_output, make_core, message, run_core
from mainspring.core.loop import EngineCore
from mainspring.core.plan.budget import GROW_AFTER_STEPS
from mainspring.ipc.journal import Journal


def core_of(fits: Callable[[StepPlan], bool], depth: int = 1, **config: object) -> tuple[EngineCore, list[int]]:
    """A core whose steps have enough memory if `fits` is true for their size, and the sizes of these steps."""
    sizes: list[int] = []

    def launched(plan: StepPlan) -> str | None:
        if not fits(plan):
            return "CUDA out of memory. Tried to allocate 2.00 GiB."
        sizes.append(plan.num_tokens)
        return None

    core = make_core(launched, async_scheduling=depth == 2, **config)
    core.connect(0)
    return core, sizes


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("most", [1, 5, 9, 40])
def test_large_steps_are_cut_until_they_fit_and_every_token_is_as_ever(most: int, depth: int) -> None:
    core, sizes = core_of(lambda step: step.num_tokens <= most, depth, max_num_batched_tokens=64, max_num_seqs=8)
    numbers = random.Random(most)
    messages = [
        message(i, [numbers.randrange(VOCAB) for _ in range(numbers.randint(1, 30))], numbers.randint(1, 20))
        for i in range(12)
    ]
    for one in messages:
        core.add_request(0, one)
    ended = run_core(core)
    for i, one in enumerate(messages):
        tokens, finished = ended[0, i]
        assert (tokens, finished.reason) == expected_output(one, (None,), core.worker.facts.max_model_len)
    assert max(sizes) <= most
    assert core.scheduler.state.kv.pool.num_in_use == 0


@pytest.mark.parametrize("chunked", [True, False])
def test_a_request_that_does_not_fit_alone_fails_alone_and_says_why(chunked: bool) -> None:
    sequences: dict[int, NewSequence] = {}

    def fits(plan: StepPlan) -> bool:
        sequences.update({sequence.slot: sequence for sequence in plan.admitted})
        rows = zip(plan.slots.tolist(), plan.starts.tolist(), strict=True)
        return all(sequences[slot].tokens[0] != 3 or start < 6 for slot, start in rows)

    core, _ = core_of(fits, max_num_batched_tokens=64, enable_chunked_prefill=chunked)
    for i in range(5):
        core.add_request(0, message(i, [i, *range(2, 9)], 10))
    ended = run_core(core)
    tokens, finished = ended[0, 3]
    assert (finished.reason, finished.error) == ("error", "OutOfMemoryError")
    assert finished.error_text == (
        "the device lacks memory for this request alone: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert len(tokens) < 10
    for i in (0, 1, 2, 4):
        assert ended[0, i][1].reason == "length"
        assert len(ended[0, i][0]) == 10


def test_the_budget_grows_back() -> None:
    left = [True]
    core, sizes = core_of(lambda step: step.num_tokens < 32 or not left or not left.pop(), max_num_batched_tokens=32)
    core.add_request(0, message(0, range(1, 41), 5))
    run_core(core)
    assert max(sizes) == 16
    for i in range(1, 2 + GROW_AFTER_STEPS // 20):
        core.add_request(0, message(i, [i], 40))
        run_core(core)
    core.scheduler.reset_prefix_cache()
    core.add_request(0, message(99, range(50), 2))
    run_core(core)
    assert max(sizes) == 32


def test_a_step_that_was_cut_blames_no_request() -> None:
    journal = Journal.create(256)
    left = [True]
    core, _ = core_of(lambda step: not left or not left.pop(), journal=journal)
    core.add_request(0, message(0, range(1, 9), 3))
    run_core(core)
    assert journal.accused() == []
    journal.close()
