"""The async client over a real server and socket, with a core without a model. Lost connections are tested in
test_sessions.py and test_recovery.py."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeAlias

import pytest

from mainspring.ipc import async_client
from mainspring.ipc.async_client import AsyncClient
from mainspring.ipc.connection import Connection
from mainspring.ipc.errors import EngineDeadError, InvalidRequestError, WrongEventLoopError
from mainspring.ipc.messages import Outputs
from stand_in_core import StandInOwner, stand_in
from wire import PROMPTLY, request, take

Run: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """`asyncio.run`, on each installed event loop."""
    if request.param == "asyncio":
        return asyncio.run
    uvloop = pytest.importorskip("uvloop")
    return uvloop.run  # type: ignore[no-any-return]


@pytest.fixture
def owner() -> Iterator[StandInOwner]:
    with stand_in() as owner:
        yield owner


def test_the_async_client_streams_calls_and_aborts(owner: StandInOwner, run: Run) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(owner))
        tokens: dict[int, list[int]] = defaultdict(list)
        ended: dict[int, str] = {}

        async def read() -> None:
            while len(ended) < 31:
                outputs = await client.get_outputs()
                take(outputs, tokens)
                ended.update((finished.handle, finished.reason) for finished in outputs.finished)

        reader = asyncio.create_task(read())
        await client.add_request(request(30, max_tokens=10**9))
        for handle in range(30):
            await client.add_request(request(handle, max_tokens=20, first=handle))
        answers = await asyncio.gather(*(client.call("echo", i) for i in range(50)))
        assert answers == [[i] for i in range(50)]
        with pytest.raises(InvalidRequestError):
            await client.call("refuse")
        await client.abort([30])
        await asyncio.wait_for(reader, 30)
        assert {handle: tokens[handle] for handle in range(30)} == {h: list(range(h, h + 20)) for h in range(30)}
        assert ended[30] == "abort"
        client.close()

    run(main())


def test_what_is_sent_in_a_round_of_the_loop_goes_together(owner: StandInOwner, run: Run) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(owner))
        link = client._connection._link  # type: ignore[union-attr]
        tokens: dict[int, list[int]] = defaultdict(list)
        ended: dict[int, str] = {}

        async def read(count: int) -> None:
            while len(ended) < count:
                outputs = await asyncio.wait_for(client.get_outputs(), PROMPTLY)
                take(outputs, tokens)
                ended.update((finished.handle, finished.reason) for finished in outputs.finished)

        for handle in range(3):
            client.send_request(request(handle, max_tokens=10**9 if handle == 1 else 4, first=handle))
        client.send_abort([1])
        assert len(link._gathered) == 4
        await asyncio.sleep(0)
        assert not link._gathered
        await read(3)
        assert ended == {0: "length", 1: "abort", 2: "length"}
        assert tokens[0] == [0, 1, 2, 3]

        client.send_request(request(3, max_tokens=4, first=3))
        assert await client.call("echo", 1) == [1]  # after the request, and at once
        assert not link._gathered
        client.send_request(request(4, max_tokens=4, first=4))
        client._connection._reconnect()  # type: ignore[union-attr]  # before it is sent: then it goes to the next core
        assert not link._gathered
        await read(5)
        assert (tokens[3], tokens[4]) == ([3, 4, 5, 6], [4, 5, 6, 7])
        client.close()

    run(main())


def test_an_async_call_that_takes_too_long_is_a_timeout(owner: StandInOwner, run: Run) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(owner))
        with pytest.raises(TimeoutError):
            await client.call("sleep", 0.3, timeout=0.05)
        assert await client.call("echo", 1) == [1]
        assert client._connection.results == {}
        client.close()

    run(main())


def test_a_cancelled_wait_loses_no_outputs(owner: StandInOwner, run: Run) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(owner))
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.get_outputs(), 0.001)
        await client.add_request(request(0, max_tokens=1))
        outputs = await asyncio.wait_for(client.get_outputs(), PROMPTLY)
        assert outputs.token_ids == [100]
        client.close()

    run(main())


def test_outputs_are_delivered_one_in_a_round_and_then_the_end(owner: StandInOwner, run: Run) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(owner))
        tokens: dict[int, list[int]] = defaultdict(list)
        rounds: list[int] = []
        ended, lost, number = asyncio.Event(), asyncio.Event(), 0

        async def count_rounds() -> None:
            nonlocal number
            while True:
                number += 1
                await asyncio.sleep(0)

        def taken(outputs: Outputs) -> None:
            take(outputs, tokens)
            rounds.append(number)
            if outputs.finished:
                client.send_abort([1])  # a client may send while it takes
            if any(one.handle == 1 for one in outputs.finished):
                ended.set()

        errors: list[EngineDeadError] = []
        client.deliver_to(taken, lambda error: (errors.append(error), lost.set())[1])
        client.send_request(request(0, max_tokens=20))
        client.send_request(request(1, max_tokens=10**9))
        counting = asyncio.create_task(count_rounds())
        assert await client.call("echo", 5) == [5]
        await asyncio.wait_for(ended.wait(), 30)
        assert tokens[0] == list(range(100, 120))
        shared = len(rounds) - len(set(rounds))
        assert shared <= 3, "each has its own round, but for those that come beside the call and the two aborts"
        client.close()
        await asyncio.wait_for(lost.wait(), PROMPTLY)
        assert len(errors) == 1
        counting.cancel()

    run(main())


def test_an_async_client_belongs_to_its_first_loop(owner: StandInOwner, run: Run) -> None:
    client = AsyncClient(Connection(owner))
    assert run(client.call("echo", 1)) == [1]
    for use in (lambda: client.call("echo"), client.get_outputs, lambda: client.abort([0])):
        with pytest.raises(WrongEventLoopError, match="another event loop"):
            run(use())
    client.close()
    client.close()


def test_closing_an_async_client_ends_pending_calls(owner: StandInOwner, run: Run) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(owner))
        wait = asyncio.create_task(client.get_outputs())
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(EngineDeadError, match="shut down"):
            await asyncio.wait_for(wait, PROMPTLY)

    run(main())


def test_calls_that_wait_when_the_client_is_closed_end(owner: StandInOwner, run: Run) -> None:
    async def main() -> None:
        client = AsyncClient(Connection(owner))
        owner.busy = True
        calls = [asyncio.create_task(client.call("echo", i)) for i in range(3)]
        await asyncio.sleep(0)
        client.close()
        for call in calls:
            with pytest.raises(EngineDeadError, match="shut down"):
                await asyncio.wait_for(call, PROMPTLY)

    run(main())


def test_a_client_that_was_made_and_closed_with_no_loop_running_is_as_good(owner: StandInOwner, run: Run) -> None:
    client = AsyncClient(Connection(owner))

    async def main() -> None:
        await client.add_request(request(0, max_tokens=1))
        assert (await client.get_outputs()).token_ids == [100]

    run(main())
    client.close()
    assert client.error is not None


def test_a_client_that_another_thread_closes_is_closed_by_its_loop(
    owner: StandInOwner, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, closed_by = AsyncClient(Connection(owner)), []
    close = client._connection.close
    monkeypatch.setattr(client._connection, "close", lambda: (closed_by.append(threading.get_ident()), close()))

    async def main() -> None:
        wait = asyncio.create_task(client.get_outputs())
        await asyncio.sleep(0)
        await asyncio.to_thread(client.close)
        assert client.error is not None
        assert closed_by == [threading.get_ident()]
        with pytest.raises(EngineDeadError, match="shut down"):
            await asyncio.wait_for(wait, PROMPTLY)

    run(main())


def test_a_client_is_closed_though_its_loop_is_blocked(
    owner: StandInOwner, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_client, "_LOOP_SECONDS", 0.05)

    async def main() -> None:
        client = AsyncClient(Connection(owner))
        await client.call("echo", 1)
        thread = threading.Thread(target=client.close)
        thread.start()
        thread.join()
        assert client.error is not None
        await asyncio.sleep(0)  # what was to be done by the loop changes nothing

    run(main())
