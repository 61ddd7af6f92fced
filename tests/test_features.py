"""The scheduler's hooks, tested with features that exist only in this file."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from harness import VOCAB, Engine, Key, result_of
from mainspring.core.plan.feature import Feature
from mainspring.core.plan.request import Request

IMAGE = VOCAB + 1  # a prompt token that an encoder has to compute; the stand-in model never samples it


class Encoder(Feature):
    """A second budget: a limit on the number of images (`IMAGE` tokens) computed in a step."""

    def __init__(self, images: int) -> None:
        self._images = images

    def cap(self, slots: np.ndarray, need: np.ndarray) -> None:
        left = self._images
        for i, (slot, count) in enumerate(zip(slots.tolist(), need.tolist(), strict=True)):
            start = int(self._rows.num_computed[slot])
            need[i] = min(count, _reach(self._rows.tokens[slot, start : start + count], left))
            left -= _images(self._rows.tokens[slot, start : start + int(need[i])])

    def most(self, request: Request, start: int) -> int:
        rows, spent = self._rows, 0
        for slot in np.flatnonzero(rows.alive & (rows.granted > 0)).tolist():
            first = int(rows.num_computed[slot])
            spent += _images(rows.tokens[slot, first : first + int(rows.granted[slot])])
        tokens = request.tokens if request.slot < 0 else rows.tokens[request.slot, : rows.num_tokens[request.slot]]
        return _reach(tokens[start:], self._images - spent)


def _images(tokens: np.ndarray) -> int:
    return int((tokens == IMAGE).sum())


def _reach(tokens: np.ndarray, images: int) -> int:
    """How many of `tokens` fit before the budget of images is exceeded."""
    places = np.flatnonzero(tokens == IMAGE)
    return len(tokens) if len(places) <= images else int(places[images])


def images_of_steps(images: int | None, seed: int) -> tuple[Engine, list[int]]:
    """Serve random prompts with images, in an engine with an encoder for `images` images a step, or with an unlimited
    one."""
    r = random.Random(seed)
    engine = Engine(
        max_num_batched_tokens=r.choice([8, 24, 40]),
        max_num_seqs=r.randint(2, 6),
        num_blocks=r.choice([20, 30, 80]),
        depth=r.randint(1, 3),
        weights=r.choice([[1.0], [1.0, 2.0]]),
        guesses=r.choice([0, 3]),
    )
    if images is not None:
        engine.scheduler.attach(Encoder(images))
    found: list[int] = []
    schedule = engine.scheduler.schedule

    def counted() -> Any:
        step = schedule()
        if step is not None:
            found.append(_images(step.plan.token_ids))
        return step

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    common = [r.choice([IMAGE, r.randrange(VOCAB)]) for _ in range(20)]
    for _ in range(12):
        for _ in range(r.choice([0, 0, 1, 3])):
            engine.step()
        prompt = common[: r.choice([0, 12, 20])]
        prompt = prompt + [r.choice([IMAGE, r.randrange(VOCAB), r.randrange(VOCAB)]) for _ in range(r.randint(1, 20))]
        engine.add(prompt, r.randint(1, 20), frontend=r.randrange(len(engine.scheduler.fair)))
    engine.run()
    engine.check_outputs()
    return engine, found


@pytest.mark.parametrize("seed", range(30))
def test_no_step_exceeds_a_second_budget_and_every_request_ends(seed: int) -> None:
    images = 1 + seed % 3
    _, found = images_of_steps(images, seed)
    assert max(found) == images, "the budget is exceeded, or not used"
    assert max(images_of_steps(None, seed)[1]) > images, "the schedule does not need the budget"


class Places(Feature):
    """Requests with odd handles need one of a few places. Also records the hooks called for each request."""

    def __init__(self, places: int) -> None:
        self.free = places
        self.steps: list[int] = []
        self.went: defaultdict[Key, list[str]] = defaultdict(list)

    def _note(self, request: Request, what: str) -> None:
        self.went[request.frontend, request.handle].append(what)

    def added(self, request: Request) -> None:
        self._note(request, "added")

    def may_run(self, request: Request, step: int, fetch: bool) -> bool:
        self.steps.append(step)
        return request.handle % 2 == 0 or self.free > 0

    def got_slot(self, request: Request) -> None:
        self._note(request, "got slot")
        assert self._rows.alive[request.slot], "its columns are there"
        self.free -= request.handle % 2
        assert self.free >= 0, "a request runs that was refused"

    def left_slot(self, request: Request) -> None:
        self._note(request, "left slot")
        self.free += request.handle % 2

    def ended(self, request: Request) -> None:
        self._note(request, "ended")
        assert request.finished
        assert request.slot < 0, "it has left its slot before"


@pytest.mark.parametrize("seed", range(20))
def test_each_request_goes_through_the_hooks_in_order_whatever_happens_to_it(seed: int) -> None:
    r = random.Random(seed)
    engine = Engine(num_blocks=20, depth=r.randint(1, 3), weights=[1.0, 1.0], suspects=3, max_num_seqs=4)
    places = Places(1)
    engine.scheduler.attach(places)
    keys = []
    for i in range(16):
        for _ in range(r.choice([0, 1, 3])):
            engine.step()
        prompt = [r.randrange(VOCAB) for _ in range(r.randint(1, 30))]
        keys.append(engine.add(prompt, r.randint(1, 30), frontend=r.randrange(2), suspect=i % 6 == 5))
        if r.random() < 0.2:
            engine.abort(r.choice(keys))
        if r.random() < 0.2:
            engine.pause(r.choice(["keep", "wait"]))
            engine.step()
            engine.scheduler.resume()
    engine.run()
    engine.check_outputs()
    assert places.free == 1
    assert places.steps == sorted(places.steps), "the number of the step is told"
    assert set(places.went) == set(keys)
    for went in places.went.values():
        runs = went[1:-1]
        assert (went[0], went[-1]) == ("added", "ended")
        assert runs == ["got slot", "left slot"] * (len(runs) // 2)
    for key in set(keys) - engine.aborted:
        assert places.went[key].count("got slot") == 1 + engine.finished[key].num_preemptions


def test_requests_that_need_no_place_overtake_one_that_waits_for_a_place() -> None:
    engine = Engine()
    places = Places(1)
    engine.scheduler.attach(places)
    even, first, overtaking, second, last = [engine.add([i, 2, 3], 12) for i in range(5)]
    engine.step()
    assert set(engine.steps[-1].requests) == {even, first, overtaking, last}
    while first not in engine.finished:
        assert second not in engine.steps[-1].requests
        engine.step()
    engine.run()
    engine.check_outputs()


class Refusal(Feature):
    """Lets no request of priority 1 run."""

    def may_run(self, request: Request, step: int, fetch: bool) -> bool:
        return request.priority == 0


def test_requests_that_may_not_run_hold_up_no_other_frontend() -> None:
    engine = Engine(weights=[1.0, 1.0])
    engine.scheduler.attach(Refusal())
    for i in range(40):
        engine.add([i, 1, 2], priority=1, frontend=0)
    engine.add([1, 2, 3], priority=1, frontend=1)
    behind = engine.add([4, 5, 6], 2, frontend=1)
    for _ in range(4):
        engine.step()
    assert behind in engine.finished


class Untouchable:
    """Stands for a request that no stage may access."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"a request's {name} was read")


@pytest.mark.parametrize("guesses", [0, 2])
def test_a_step_in_which_every_request_decodes_touches_no_request(guesses: int) -> None:
    engine = Engine(block_size=64, num_blocks=99, max_num_seqs=40, max_num_batched_tokens=200, guesses=guesses)
    for i in range(40):  # more rows than speculation fills a step to
        engine.add([i, 1, 2, 3], 30)
    for _ in range(3):
        engine.step()
    running, scheduler = engine.scheduler.state.running.requests, engine.scheduler
    assert len(running) == 40
    kept = dict(running)
    for slot in running:
        running[slot] = Untouchable()  # type: ignore[assignment]
    plans = []
    for _ in range(5):
        step = scheduler.schedule()
        assert step is not None
        plans.append(step.plan)
        scheduler.update(step, result_of(step.plan, engine.model.execute(step.plan)))
        engine.model.retire(step.plan)
    assert all((plan.counts == 1).all() and len(plan.slots) == len(kept) for plan in plans)
    running.update(kept)
