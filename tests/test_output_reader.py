"""How the streams of the async engine are woken."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from mainspring.engine.request.output_processor import Processed
from mainspring.engine.request.output_reader import WOKEN, OutputReader
from mainspring.ipc.errors import EngineDeadError


class Client:
    """A client that has one message of the core, and then the core is gone."""

    num_outputs = 1

    async def get_outputs(self) -> None:
        if not self.num_outputs:
            await asyncio.sleep(0.01)
            raise EngineDeadError("gone")
        self.num_outputs = 0


class Processor:
    def __init__(self, states: list[Any]) -> None:
        self.states = states

    def process(self, outputs: None, now: float) -> Processed:
        return Processed(self.states, [], [])

    def forget(self, error: Exception, now: float) -> list[Any]:
        return []

    def __len__(self) -> int:
        return 0


def test_streams_of_one_message_are_woken_some_in_each_round_of_the_loop_and_pauses_wait_for_all() -> None:
    count = 3 * WOKEN + 1

    async def run() -> tuple[list[int], int]:
        states = [SimpleNamespace(output_ready=asyncio.Event()) for _ in range(count)]
        reader = OutputReader(cast(Any, Client()), cast(Any, Processor(states)))
        turn, woken = 0, list[int]()

        async def follow(state: Any) -> None:
            await state.output_ready.wait()
            woken.append(turn)

        async def turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        streams = [asyncio.ensure_future(follow(state)) for state in states]
        ticking = asyncio.ensure_future(turns())
        await asyncio.sleep(0)
        reader.enter()
        await reader.caught_up()
        at_pause = len(woken)
        await asyncio.gather(*streams)
        ticking.cancel()
        await reader.ended()
        return woken, at_pause

    woken, at_pause = asyncio.run(asyncio.wait_for(run(), 20))
    assert at_pause == count
    assert [woken.count(turn) for turn in sorted(set(woken))] == [WOKEN, WOKEN, WOKEN, 1]
