"""Cores die at random times, and every request ends exactly once, with exactly its tokens. The cores have no model;
test_supervisor.py has real core processes."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mainspring.ipc.async_client import AsyncClient
from mainspring.ipc.connection import Connection
from mainspring.ipc.messages import Outputs
from mainspring.ipc.sync_client import SyncClient
from stand_in_core import StandInOwner, stand_in
from wire import request

GUARD = 120.0  # seconds
STEPS = 120
SPACING = 1000  # difference between the first tokens of two requests


class Log:
    """The requests and their results."""

    def __init__(self) -> None:
        self.asked: dict[int, int] = {}  # handle → max_tokens
        self.aborted: set[int] = set()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ended: dict[int, str] = {}

    def take(self, outputs: Outputs | None) -> None:
        if outputs is None:
            return
        for handle, token in zip(outputs.handles, outputs.token_ids, strict=True):
            assert handle not in self.ended, f"a token of request {handle} after its end"
            self.tokens[handle].append(token)
        for finished in outputs.finished:
            assert finished.handle not in self.ended, f"request {finished.handle} ended twice"
            self.ended[finished.handle] = finished.reason

    @property
    def over(self) -> bool:
        return len(self.ended) == len(self.asked)

    def check(self) -> None:
        assert set(self.ended) == set(self.asked)
        for handle, max_tokens in self.asked.items():
            whole = list(range(handle * SPACING, handle * SPACING + max_tokens))
            if self.ended[handle] == "abort":
                assert handle in self.aborted
                assert self.tokens[handle] == whole[: len(self.tokens[handle])]
            else:
                assert (self.ended[handle], self.tokens[handle]) == ("length", whole)


class Fate:
    """Random events of a core: it dies, restarts at once or late, and may die while it loads."""

    def __init__(self, owner: StandInOwner, numbers: random.Random) -> None:
        self._owner, self._numbers = owner, numbers
        self._state = "serving"

    def act(self) -> None:
        owner = self._owner
        if self._state == "serving":
            (owner.kill if self._numbers.random() < 0.7 else lambda: owner.stop("over"))()
            self._state = "dead"
        elif self._state == "dead":
            owner.load()
            self._state = "loading"
        elif self._numbers.random() < 0.2:
            owner.kill()
            self._state = "dead"
        else:
            owner.announce()
            self._state = "serving"

    def settle(self) -> None:
        while self._state != "serving":
            self.act()


@pytest.fixture
def owner() -> Iterator[StandInOwner]:
    with stand_in() as owner:
        yield owner


@pytest.mark.parametrize("seed", range(6))
def test_a_client_loses_and_repeats_nothing_whatever_happens_to_its_cores(owner: StandInOwner, seed: int) -> None:
    numbers = random.Random(seed)
    log, fate, client = Log(), Fate(owner, numbers), SyncClient(Connection(owner))
    for step in range(STEPS):
        match numbers.choice(["add"] * 5 + ["abort", "call", "look", "look", "wait", "fate", "fate"]):
            case "add":
                log.asked[step] = numbers.randrange(1, 300)
                client.add_request(request(step, log.asked[step], step * SPACING))
            case "abort" if log.asked:
                chosen = numbers.sample(sorted(log.asked), min(3, len(log.asked)))
                log.aborted |= set(chosen)
                client.abort(chosen)
            case "call" if fate._state == "serving":
                assert client.call("echo", step) == [step]
            case "look":
                log.take(client.get_outputs(timeout=0))
            case "wait":
                log.take(client.get_outputs(timeout=numbers.random() * 0.1))
            case "fate":
                fate.act()
    fate.settle()
    deadline = time.monotonic() + GUARD
    while not log.over:
        assert time.monotonic() < deadline, f"{len(log.asked) - len(log.ended)} requests did not end"
        log.take(client.get_outputs(timeout=1.0))
    assert client.get_outputs(timeout=0.02) is None
    log.check()
    client.close()


@pytest.mark.parametrize("seed", range(6))
def test_an_async_client_loses_and_repeats_nothing_whatever_happens_to_its_cores(
    owner: StandInOwner, seed: int
) -> None:
    numbers = random.Random(seed)
    log, fate = Log(), Fate(owner, numbers)

    async def main() -> None:
        client = AsyncClient(Connection(owner))

        async def read() -> None:
            while True:
                log.take(await client.get_outputs())

        reader = asyncio.create_task(read())
        calls: list[tuple[int, asyncio.Task[list[int]]]] = []
        for step in range(STEPS):
            match numbers.choice(["add"] * 5 + ["abort", "call", "call", "wait", "wait", "fate", "fate"]):
                case "add":
                    log.asked[step] = numbers.randrange(1, 300)
                    await client.add_request(request(step, log.asked[step], step * SPACING))
                case "abort" if log.asked:
                    chosen = numbers.sample(sorted(log.asked), min(3, len(log.asked)))
                    log.aborted |= set(chosen)
                    await client.abort(chosen)
                case "call":
                    calls.append((step, asyncio.create_task(client.call("echo", step))))
                case "wait":
                    await asyncio.sleep(numbers.random() * 0.05)
                case "fate":
                    await asyncio.to_thread(fate.act)
        await asyncio.to_thread(fate.settle)
        for step, call in calls:
            assert await asyncio.wait_for(call, GUARD) == [step]
        deadline = time.monotonic() + GUARD
        while not log.over and not reader.done():
            assert time.monotonic() < deadline, f"{len(log.asked) - len(log.ended)} requests did not end"
            await asyncio.sleep(0.01)
        reader.cancel()
        client.close()

    asyncio.run(main())
    log.check()


def test_threads_that_add_call_and_read_lose_and_repeat_nothing_while_cores_die(owner: StandInOwner) -> None:
    numbers = random.Random(7)
    log, fate, client = Log(), Fate(owner, numbers), SyncClient(Connection(owner))
    adding, guard = threading.Event(), threading.Lock()
    adding.set()

    def add(thread: int) -> None:
        for i in range(150):
            handle = 1000 * thread + i
            log.asked[handle] = 1 + handle % 40
            client.add_request(request(handle, 1 + handle % 40, handle * SPACING))
            time.sleep(0.002)

    def call(thread: int) -> None:
        i = 0
        while adding.is_set():
            assert client.call("echo", thread, i, timeout=GUARD) == [thread, i]
            i += 1
            time.sleep(0.001)

    def read() -> None:
        while adding.is_set() or not log.over:
            with guard:  # keeps the order of outputs
                log.take(client.get_outputs(timeout=0.1))

    with ThreadPoolExecutor(8) as pool:
        adders = [pool.submit(add, thread) for thread in range(3)]
        others = [pool.submit(call, thread) for thread in range(3)] + [pool.submit(read) for _ in range(2)]
        while not all(adder.done() for adder in adders):
            time.sleep(numbers.random() * 0.05)
            fate.act()
        fate.settle()
        adding.clear()
        for job in (*adders, *others):
            job.result(GUARD)
    log.check()
    assert client._connection.reconnections >= 2
    client.close()
