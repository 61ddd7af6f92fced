"""AsyncLLMEngine: streams in an asyncio program, their ends, and the effects of a slow reader, a cancelled task or a
dead core.

Most tests use a `ScriptedClient` in place of a core, whose outputs a test controls. After them come tests of many
streams over real sockets with a core without a model, and of the embedded model.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import subprocess
import sys
import traceback
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import uvloop

from mainspring import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from mainspring.ipc.async_client import AsyncClient
from mainspring.ipc.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
    NotSupportedError,
    OverloadedError,
    RequestFailedError,
    UnknownArgumentError,
    WrongEventLoopError,
    WrongProcessError,
)
from mainspring.ipc.messages import AddRequest, Finished, Logprobs, ModelFacts, Outputs, Started
from stand_in_core import StandInOwner, stand_in
from wire import eventually

EOS = 2
PATIENCE = 60.0  # seconds; a guard against hanging
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
DELTAS = SamplingParams(temperature=0.0, max_tokens=32, output_kind=DELTA)

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class ScriptedClient:
    """An `AsyncClient` whose outputs the test provides."""

    num_outputs = 0

    def __init__(self, config: Any) -> None:
        self.config = config
        self.model = ModelFacts(vocab_size=1024, hidden_size=4, max_model_len=64, dtype="float32", eos_token_ids=[EOS])
        self.added: list[AddRequest] = []
        self.ranks: list[int | None] = []
        self.aborted: list[int] = []
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, deque[Any]] = {}
        self.closed = 0
        self.error: EngineDeadError | None = None
        self._said: deque[Outputs] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._delivers = False
        self._take: Callable[[Outputs], None]
        self._lost: Callable[[EngineDeadError], None] | None = None

    def send_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = (), rank: int | None = None) -> None:
        if self.error is not None:
            raise self.error
        self.added.append(request)
        self.ranks.append(rank)

    def send_abort(self, handles: Sequence[int]) -> None:
        if self.error is not None:
            raise self.error
        self.aborted += handles

    def deliver_to(self, take: Callable[[Outputs], None], lost: Callable[[EngineDeadError], None]) -> None:
        self._loop, self._take, self._lost = asyncio.get_running_loop(), take, lost
        self._deliver_soon()

    def _deliver_soon(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and not self._delivers:
            self._delivers = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivers = False
        if self._said:
            self._take(self._said.popleft())
            self._deliver_soon()
        elif self.error is not None and self._lost is not None:
            lost, self._lost = self._lost, None
            lost(self.error)

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        self.calls.append((method, *args))
        return self.answers[method].popleft() if method in self.answers else True

    def close(self) -> None:
        self.closed += 1
        self.die("the engine was shut down")

    def say(self, *tokens: tuple[int, int], finished: Sequence[Finished] = (), started: Sequence[Started] = ()) -> None:
        handles, token_ids = [handle for handle, _ in tokens], [token for _, token in tokens]
        self._said.append(Outputs(handles, token_ids, finished=[*finished], started=[*started]))
        self._deliver_soon()

    def die(self, reason: str = "the core is gone") -> None:
        self.error = EngineDeadError(reason)
        self._deliver_soon()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine on a new event loop, with a guard against hanging."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def on_a_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(coroutine, PATIENCE))

    return on_a_loop


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLMEngine]:
    """An engine created while no event loop runs."""
    monkeypatch.setattr(AsyncClient, "launch", ScriptedClient)
    made = AsyncLLMEngine.from_engine_args(EngineArgs())
    yield made
    made.shutdown()


def core(engine: AsyncLLMEngine) -> ScriptedClient:
    client: Any = engine.engine_core
    assert isinstance(client, ScriptedClient)
    return client


async def settled(holds: Callable[[], Any]) -> None:
    """Let all other tasks run until the condition holds. No task sleeps, so iterations of the loop are enough."""
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come to hold")


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def collected(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def begun(engine: AsyncLLMEngine, awaited: Awaitable[Any], requests: int = 1) -> asyncio.Task[Any]:
    """Start a task and return it once its requests have been sent."""
    before = len(core(engine).added)
    task = asyncio.ensure_future(awaited)
    await settled(lambda: len(core(engine).added) == before + requests)
    return task


# ------------------------------------------------------------------ streams


def test_a_stream_gives_outputs_until_the_request_has_ended(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        stream = engine.generate("hello", GREEDY, "a")
        assert core(engine).added == [], "nothing is sent before the first output is asked for"
        first = await begun(engine, anext(stream))
        (sent,) = core(engine).added
        tokenizer = await engine.get_tokenizer()
        assert (sent.request_id, sent.prompt_token_ids) == ("a", tokenizer.encode("hello"))
        core(engine).say((sent.handle, 50))
        output = await first
        assert (output.request_id, output.finished, output.outputs[0].token_ids) == ("a", False, [50])
        core(engine).say((sent.handle, EOS), finished=[Finished(sent.handle, "stop", EOS)])
        output = await anext(stream)
        assert (output.finished, output.outputs[0].token_ids) == (True, [50, EOS])
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert core(engine).aborted == []

    run(main())


def test_streams_of_several_kinds_at_once_each_get_their_own(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        kinds = {name: SamplingParams(max_tokens=32, output_kind=kind) for name, kind in
                 (("cumulative", CUMULATIVE), ("delta", DELTA), ("final", FINAL_ONLY))}  # fmt: skip
        tasks = {name: await begun(engine, collected(engine.generate([5], p, name))) for name, p in kinds.items()}
        handles = [message.handle for message in core(engine).added]
        for step in range(3):
            core(engine).say(*((handle, 10 * handle + step) for handle in handles))
            await turns()
        core(engine).say(finished=[Finished(handle, "length") for handle in handles])
        found = {name: [o.outputs[0].token_ids for o in await task] for name, task in tasks.items()}
        assert found == {
            "cumulative": [[10], [10, 11], [10, 11, 12], [10, 11, 12]],
            "delta": [[20], [21], [22], []],
            "final": [[30, 31, 32]],
        }

    run(main())


def test_several_completions_come_in_one_stream(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        params = SamplingParams(n=3, max_tokens=32, seed=1)
        task = await begun(engine, collected(engine.generate([5], params, "a")), requests=3)
        handles = [message.handle for message in core(engine).added]
        assert len({message.sampling.seed for message in core(engine).added}) == 3
        core(engine).say((handles[2], 52), (handles[0], 50))
        await turns()
        core(engine).say((handles[1], 51), finished=[Finished(handle, "length") for handle in handles])
        first, last = await task
        assert [c.token_ids for c in first.outputs] == [[50], [], [52]]
        assert [(c.token_ids, c.finish_reason) for c in last.outputs] == [
            ([50], "length"), ([51], "length"), ([52], "length")
        ]  # fmt: skip
        assert (first.finished, last.finished) == (False, True)

    run(main())


def test_each_round_of_a_beam_search_goes_to_the_core_of_the_first(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        params = SamplingParams(n=1, best_of=2, use_beam_search=True, temperature=0.0, max_tokens=2)
        first = await begun(engine, collected(engine.generate([5], params, "a", data_parallel_rank=1)))
        (sent,) = core(engine).added
        ids, values = np.array([[50, 50, 51]], "<i4"), np.array([[-1, -1, -2]], "<f4")
        likeliest = Logprobs(3, ids.tobytes(), values.tobytes(), np.array([1], "<i4").tobytes(), rows=[0])
        ended = [Finished(sent.handle, "length")]
        core(engine)._said.append(Outputs([sent.handle], [50], finished=ended, logprobs=[likeliest]))
        core(engine)._deliver_soon()
        await settled(lambda: len(core(engine).added) == 3)
        assert core(engine).ranks == [1, 1, 1]
        await engine.abort("a")
        await first

    run(main())


def test_a_slow_reader_gets_outputs_merged_into_one(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        streams = {kind: engine.generate([5], SamplingParams(max_tokens=32, output_kind=kind), str(kind))
                   for kind in (DELTA, CUMULATIVE)}  # fmt: skip
        for stream in streams.values():
            task = await begun(engine, anext(stream))
            core(engine).say((core(engine).added[-1].handle, 40))
            await task
        delta, cumulative = (message.handle for message in core(engine).added)
        for token in range(50, 60):  # no output is read meanwhile
            core(engine).say((delta, token), (cumulative, token))
        await settled(lambda: not core(engine)._said)
        news = [(await anext(stream)).outputs[0].token_ids for stream in streams.values()]
        assert news == [[*range(50, 60)], [40, *range(50, 60)]]
        core(engine).say((delta, 60), (cumulative, 60))
        core(engine).say(finished=[Finished(delta, "length"), Finished(cumulative, "length")])
        await settled(lambda: not core(engine)._said)
        for stream in streams.values():
            (last,) = await collected(stream)
            assert (last.finished, last.outputs[0].token_ids[-1]) == (True, 60)

    run(main())


def test_text_alone_passes_while_the_stream_is_waited_for(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        passed: list[tuple[str, list[int]]] = []
        takes = True

        def take(text: str, token_ids: list[int]) -> bool:
            if takes:
                passed.append((text, token_ids))
            return takes

        stream = engine.generate([5], DELTAS, "a")
        await stream.begin()
        stream.pass_text(take)
        handle, found = core(engine).added[0].handle, []
        core(engine).say((handle, 40))  # nobody waits
        await turns()
        found.append(await anext(stream))
        reading = asyncio.ensure_future(anext(stream))
        await turns()
        core(engine).say((handle, 41), (handle, 42))
        core(engine).say((handle, 43))
        await turns()
        assert not reading.done()
        takes = False
        core(engine).say((handle, 44))
        found.append(await reading)
        takes = True
        reading = asyncio.ensure_future(anext(stream))
        await turns()
        core(engine).say((handle, 45))
        core(engine).say((handle, 46), finished=[Finished(handle, "length")])
        found.append(await reading)
        assert [ids for _, ids in passed] == [[41, 42], [43], [45]]
        assert [one.outputs[0].token_ids for one in found] == [[40], [44], [46]]
        decode = (await engine.get_tokenizer()).decode
        assert [text for text, _ in passed] == [decode(ids) for _, ids in passed]
        assert found[-1].finished

    run(main())


def test_what_a_taker_of_text_raises_comes_out_of_its_stream(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        def take(text: str, token_ids: list[int]) -> bool:
            raise ValueError("broken")

        other = await begun(engine, collected(engine.generate([5], DELTAS, "other")))
        stream = engine.generate([5], DELTAS, "a")
        await stream.begin()
        stream.pass_text(take)
        reading = asyncio.ensure_future(anext(stream))
        await turns()
        handles = [one.handle for one in core(engine).added]
        core(engine).say(*((handle, 40) for handle in handles))
        with pytest.raises(ValueError, match="broken"):
            await reading
        assert core(engine).aborted == handles[1:]
        core(engine).say((handles[0], 41), finished=[Finished(handles[0], "length")])
        assert [one.outputs[0].token_ids for one in await other] == [[40], [41]]

    run(main())


def test_a_stop_string_ends_the_stream_and_aborts_in_the_core(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        tokenizer = await engine.get_tokenizer()
        task = await begun(engine, collected(engine.generate("x", SamplingParams(stop="b"), "a")))
        handle = core(engine).added[0].handle
        core(engine).say((handle, tokenizer.encode("b", add_special_tokens=False)[0]))
        core(engine).say((handle, 51), finished=[Finished(handle, "abort")])
        (output,) = await task
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "b")
        assert core(engine).aborted == [handle]

    run(main())


# ------------------------------------------------------------------ ends before the end


def test_an_abort_yields_one_last_output_also_before_the_first_token(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        tasks = [await begun(engine, collected(engine.generate([5], GREEDY, name))) for name in ("a", "b", "7")]
        first = core(engine).added[0].handle
        core(engine).say((first, 50))
        await turns()
        await engine.abort("a")
        await engine.abort(["b", "nobody", 7])  # type: ignore[list-item]
        outputs = [await task for task in tasks]
        assert [[o.outputs[0].finish_reason for o in found] for found in outputs] == [
            [None, "abort"],
            ["abort"],
            ["abort"],
        ]
        assert outputs[0][-1].outputs[0].token_ids == [50]
        assert all(found[-1].finished for found in outputs)
        assert core(engine).aborted == [message.handle for message in core(engine).added]

    run(main())


async def leave_the_loop(engine: AsyncLLMEngine) -> None:
    async for _ in engine.generate([5], GREEDY, "a"):
        break


async def close_the_stream(engine: AsyncLLMEngine) -> None:
    stream = engine.generate([5], GREEDY, "a")
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert [output async for output in stream] == []


async def be_cancelled_while_waiting(engine: AsyncLLMEngine) -> None:
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(asyncio.CancelledError):
        async for _ in engine.generate([5], GREEDY, "a"):
            asyncio.get_running_loop().call_soon(task.cancel)
    task.uncancel()


async def be_cancelled_at_something_else(engine: AsyncLLMEngine) -> None:
    async def reader() -> None:
        async for _ in engine.generate([5], GREEDY, "a"):
            reached.set()
            await asyncio.Event().wait()

    reached = asyncio.Event()
    task = asyncio.create_task(reader())
    await reached.wait()
    task.cancel()
    await asyncio.wait([task])


async def time_out(engine: AsyncLLMEngine) -> None:
    stream = engine.generate([5], GREEDY, "a")
    await anext(stream)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)


async def drop_a_stream_never_read(engine: AsyncLLMEngine) -> None:
    await engine.add_request("a", [5], GREEDY)


@pytest.mark.parametrize(
    "leave",
    [
        leave_the_loop,
        close_the_stream,
        be_cancelled_while_waiting,
        be_cancelled_at_something_else,
        time_out,
        drop_a_stream_never_read,
    ],
)
def test_leaving_a_stream_aborts_the_request_in_the_core(
    engine: AsyncLLMEngine, run: Run, leave: Callable[[AsyncLLMEngine], Awaitable[None]]
) -> None:
    async def main() -> None:
        task = await begun(engine, leave(engine))
        handle = core(engine).added[0].handle
        core(engine).say((handle, 50))
        await task
        gc.collect()
        await settled(lambda: core(engine).aborted == [handle])
        await engine.wait_for_requests_to_drain()
        assert len(engine.output_processor) == 0

    run(main())


@pytest.mark.parametrize("leave", ["read to the end", "never read", "given up", "dropped"])
def test_a_stream_that_has_ended_does_not_abort_a_new_request_with_its_id(
    engine: AsyncLLMEngine, run: Run, leave: str
) -> None:
    async def main() -> None:
        stream = await engine.add_request("a", [5], GREEDY)
        core(engine).say((1, 50), finished=[Finished(1, "length")])
        await engine.wait_for_requests_to_drain()
        if leave == "read to the end":
            await collected(stream)
        again = await begun(engine, collected(engine.generate([5], GREEDY, "a")))
        if leave != "dropped":
            await stream.aclose()
        if leave == "never read":
            assert await collected(stream) == []
        del stream
        gc.collect()
        await turns()
        assert core(engine).aborted == []
        assert not again.done()
        await engine.abort("a")
        await again

    run(main())


def test_a_dropped_stream_does_not_abort_a_request_that_got_its_id_before_the_loop_ran(
    engine: AsyncLLMEngine, run: Run
) -> None:
    async def main() -> None:
        stream = await engine.add_request("a", [5], GREEDY)
        del stream
        gc.collect()
        await engine.abort("a")
        again = await engine.add_request("a", [5], GREEDY)
        await turns()
        assert core(engine).aborted == [core(engine).added[0].handle]
        await again.aclose()

    run(main())


def test_a_prepared_request_is_taken_under_its_own_id(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        prepared = engine.input_processor.process_inputs("own", "hello", GREEDY)
        stream = await engine.add_request("other", prepared)
        assert stream.request_id == core(engine).added[0].request_id == "own"
        await stream.aclose()
        assert core(engine).aborted == [1]

    run(main())


# ------------------------------------------------------------------ errors


def test_a_refused_request_raises_and_leaves_nothing_behind(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        for prompt, params in (("", GREEDY), ([5000], GREEDY), ([1] * 64, GREEDY), ("x", None)):
            stream = engine.generate(prompt, params, "a")
            with pytest.raises(InvalidRequestError):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        with pytest.raises(InvalidRequestError):
            await engine.add_request("a", "", GREEDY)
        await engine.wait_for_requests_to_drain()
        assert core(engine).added == []

    run(main())


def test_an_id_in_use_is_refused_and_its_owner_goes_on(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        task = await begun(engine, collected(engine.generate([5], GREEDY, "a")))
        with pytest.raises(DuplicateRequestError, match="'a' is still running"):
            await anext(engine.generate([5], GREEDY, "a"))
        core(engine).say((1, 50), finished=[Finished(1, "length")])
        assert [output.outputs[0].token_ids for output in await task] == [[50]]
        assert core(engine).aborted == []

    run(main())


def test_a_request_of_which_only_a_part_could_be_sent_is_aborted(
    engine: AsyncLLMEngine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = core(engine)

    def send_request(request: AddRequest, tensors: Sequence[np.ndarray] = (), rank: int | None = None) -> None:
        if len(client.added) == 2:
            raise OSError("no more")
        client.added.append(request)

    async def main() -> None:
        monkeypatch.setattr(client, "send_request", send_request)
        with pytest.raises(OSError, match="no more"):
            await anext(engine.generate([5], SamplingParams(n=3), "a"))
        assert client.aborted == [1, 2, 3]
        await engine.wait_for_requests_to_drain()

    run(main())


@pytest.mark.parametrize("error", [OverloadedError, RequestFailedError, InvalidRequestError])
def test_a_request_that_ends_in_an_error_raises_it_and_others_go_on(
    engine: AsyncLLMEngine, run: Run, error: type[Exception]
) -> None:
    async def main() -> None:
        failing = await begun(engine, anext(engine.generate([5], GREEDY, "a")))
        other = await begun(engine, collected(engine.generate([5], GREEDY, "b")))
        core(engine).say((2, 50), finished=[Finished(1, "error", error=error.__name__, error_text="it says why")])
        with pytest.raises(error, match="it says why"):
            await failing
        core(engine).say(finished=[Finished(2, "length")])
        assert (await other)[-1].outputs[0].token_ids == [50]
        assert core(engine).aborted == []

    run(main())


def test_outputs_of_a_failed_request_come_before_its_error(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        stream = engine.generate([5], DELTAS, "a")
        task = await begun(engine, anext(stream))
        ended = Finished(1, "error", error="RequestFailedError", error_text="it died three times")
        core(engine).say((1, 50), (1, 51), finished=[ended])
        output = await task
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([50, 51], "error")
        with pytest.raises(RequestFailedError, match="three times"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(main())


def test_one_completion_that_fails_ends_the_request_and_aborts_the_others(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        task = await begun(engine, collected(engine.generate([5], SamplingParams(n=3), "a")), requests=3)
        core(engine).say(finished=[Finished(2, "error", error="OverloadedError", error_text="too many")])
        with pytest.raises(OverloadedError):
            await task
        assert core(engine).aborted == [1, 3]

    run(main())


def test_a_core_that_is_gone_for_good_is_an_error_in_every_stream(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        tasks = [await begun(engine, collected(engine.generate([5], GREEDY, name))) for name in ("a", "b")]
        await engine.check_health()
        assert (engine.errored, engine.is_running, engine.dead_error) == (False, True, None)
        core(engine).die()
        for task in tasks:
            with pytest.raises(EngineDeadError, match="the core is gone"):
                await task
        await engine.wait_for_requests_to_drain()
        assert (engine.errored, engine.is_running) == (True, False)
        assert isinstance(engine.dead_error, EngineDeadError)
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await anext(engine.generate([5], GREEDY, "c"))

    run(main())


def test_an_error_in_the_reader_ends_all_streams_and_the_engine_goes_on(
    engine: AsyncLLMEngine, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        stream = await engine.add_request("a", [5], GREEDY)
        core(engine)._said.append(Outputs([1, 1], [50]))  # an invalid message that no core sends
        core(engine).say()
        with pytest.raises(ValueError, match="argument 2 is shorter"):
            await anext(stream)
        assert "reading outputs failed" in caplog.text
        task = await begun(engine, collected(engine.generate([5], GREEDY, "a")))
        await stream.aclose()
        del stream
        await turns()
        assert core(engine).aborted == [], "the id is another's now"
        core(engine).say((2, 50), finished=[Finished(2, "length")])
        assert len(await task) == 1

    run(main())


def test_a_second_event_loop_is_refused_and_the_first_goes_on(engine: AsyncLLMEngine) -> None:
    async def main() -> None:
        task = await begun(engine, collected(engine.generate([5], GREEDY, "a")))

        async def elsewhere() -> None:
            uses: list[Callable[[], Awaitable[Any]]] = [
                lambda: anext(engine.generate([5], GREEDY, "b")),
                lambda: engine.add_request("b", [5], GREEDY),
                lambda: engine.abort("a"),
                engine.check_health,
                engine.reset_prefix_cache,
                engine.wait_for_requests_to_drain,
                engine.pause_generation,
                engine.resume_generation,
                engine.is_paused,
                engine.start_profile,
                engine.stop_profile,
            ]
            for use in uses:
                with pytest.raises(WrongEventLoopError, match="another event loop"):
                    await use()

        await asyncio.to_thread(asyncio.run, elsewhere())
        core(engine).say((1, 50), finished=[Finished(1, "length")])
        assert len(await task) == 1

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_forked_child_may_not_use_it_and_takes_nothing_away(engine: AsyncLLMEngine) -> None:
    async def main() -> None:
        stream = await engine.add_request("a", [5], GREEDY)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = "nothing"
            try:
                await engine.check_health()
            except WrongProcessError:
                said = "WrongProcessError"
            finally:
                del stream
                engine.shutdown()
                os.write(write, f"{said} {core(engine).closed}".encode())
                os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 100).decode() == "WrongProcessError 0"
        os.close(read)
        os.close(write)
        core(engine).say((1, 50), finished=[Finished(1, "length")])
        assert len(await collected(stream)) == 1
        assert core(engine).aborted == []

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


# ------------------------------------------------------------------ calls


def test_older_forms_of_generate_reach_the_same_request(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        streams = [
            engine.generate([3, 4], GREEDY, "0"),
            engine.generate(None, GREEDY, "1", [3, 4]),
            engine.generate("shown", GREEDY, "2", [3, 4], None, 7),
            engine.generate(prompt=None, sampling_params=GREEDY, request_id="3", prompt_token_ids=[3, 4]),
            engine.generate(inputs={"prompt_token_ids": [3, 4]}, sampling_params=GREEDY, request_id="4"),
            engine.generate({"prompt_token_ids": [3, 4]}, GREEDY, 5, None, None, None, 9),  # type: ignore[arg-type]
            engine.generate([3, 4], GREEDY, "6", None, None, 9),
            engine.generate([3, 4], GREEDY, "7", priority=9, prompt_text="shown"),
        ]
        tasks = [await begun(engine, anext(stream)) for stream in streams]
        sent = core(engine).added
        assert [message.prompt_token_ids for message in sent] == [[3, 4]] * 8
        assert [message.request_id for message in sent] == [str(at) for at in range(8)]
        assert [message.priority for message in sent] == [0] * 5 + [9] * 3
        core(engine).say(*((message.handle, 50) for message in sent))
        outputs = await asyncio.gather(*tasks)
        assert [output.prompt for output in outputs] == [None, None, "shown", None, None, None, None, "shown"]

    run(main())


def test_calls_that_no_form_has_are_refused_at_once(engine: AsyncLLMEngine) -> None:
    with pytest.raises(UnknownArgumentError, match="generate has no argument 'priorty'"):
        engine.generate("x", GREEDY, "a", priorty=1)
    with pytest.raises(InvalidRequestError, match="request_id is None"):
        engine.generate("x", GREEDY)
    with pytest.raises(InvalidRequestError, match="there is no prompt"):
        engine.generate(None, GREEDY, "a")
    with pytest.raises(InvalidArgumentError, match="at most 7"):
        engine.generate("x", GREEDY, "a", None, None, None, 0, 1)
    with pytest.raises(InvalidRequestError, match="request_id is None"):
        engine.encode("x")


def test_add_request_sends_at_once_and_gives_a_stream(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        stream = await engine.add_request("a", None, GREEDY, [3, 4], 12.5)  # an older form
        assert [message.prompt_token_ids for message in core(engine).added] == [[3, 4]]
        assert stream.request_id == "a"
        core(engine).say((1, 50), finished=[Finished(1, "length")])
        (output,) = await collected(stream)
        assert output.metrics is not None
        assert output.metrics.arrival_time == 12.5

    run(main())


def test_a_pause_is_sent_to_the_core_with_its_mode(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        await engine.pause_generation()
        await engine.pause_generation(mode="keep")
        await engine.resume_generation()
        core(engine).answers["is_paused"] = deque([True, False])
        assert [await engine.is_paused(), await engine.is_paused()] == [True, False]
        assert core(engine).calls == [
            ("pause_generation", "abort", True), ("pause_generation", "keep", False), ("resume_generation",),
            ("is_paused",), ("is_paused",),
        ]  # fmt: skip
        core(engine).calls.clear()
        await engine.pause_generation(wait_for_inflight_requests=True)
        assert core(engine).calls == [("pause_generation", "wait", True)]

    run(main())


def test_no_stream_yields_anything_after_a_pause() -> None:
    async def main() -> None:
        async with AsyncLLMEngine.from_engine_args(AsyncEngineArgs()) as engine:
            times: list[float] = []

            async def read() -> None:
                async for _ in engine.generate("Once", SamplingParams(max_tokens=1900, ignore_eos=True), "a"):
                    times.append(asyncio.get_running_loop().time())  # noqa: PERF401  # read while it grows

            reading = asyncio.create_task(read())
            for _ in range(15):
                before = len(times)
                while len(times) < before + 3:
                    await asyncio.sleep(0.001)
                await engine.pause_generation(mode="keep")
                seen = len(times)
                await asyncio.sleep(0.02)
                assert len(times) == seen
                await engine.resume_generation()
            assert not reading.done()
            reading.cancel()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_draining_waits_for_the_last_request_or_says_how_many_are_left(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        await engine.wait_for_requests_to_drain()
        tasks = [await begun(engine, collected(engine.generate([5], GREEDY, name))) for name in ("a", "b")]
        with pytest.raises(TimeoutError, match=r"2 requests .* drain_timeout=0\.01"):
            await engine.wait_for_requests_to_drain(0.01)
        drained = asyncio.create_task(engine.wait_for_requests_to_drain())
        core(engine).say(finished=[Finished(1, "length")])
        await tasks[0]
        await turns()
        assert not drained.done()
        core(engine).say(finished=[Finished(2, "length")])
        await asyncio.gather(drained, tasks[1])

    run(main())


def test_facts_of_the_engine_are_available_as_coroutines(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        config = core(engine).config
        assert engine.vllm_config is config
        assert await engine.get_model_config() is engine.model_config is config.model_config
        assert await engine.get_cache_config() is config.cache_config
        assert await engine.get_scheduler_config() is config.scheduler_config
        assert await engine.get_parallel_config() is config.parallel_config
        assert await engine.get_vllm_config() is config
        assert await engine.is_tracing_enabled() is False
        assert engine.is_stopped is False
        assert await engine.get_supported_tasks() == ("generate",)
        assert await engine.reset_prefix_cache() is True

    run(main())


def test_requests_and_prompt_tokens_in_flight_are_counted(engine: AsyncLLMEngine, run: Run) -> None:
    async def main() -> None:
        assert (engine.get_num_unfinished_requests(), engine.get_num_queued_tokens()) == (0, 0)
        tasks = [
            await begun(engine, collected(engine.generate(ids, GREEDY, name)))
            for name, ids in {"a": [5, 6], "b": [7]}.items()
        ]
        assert (engine.get_num_unfinished_requests(), engine.get_num_queued_tokens()) == (2, 3)
        first = core(engine).added[0].handle
        core(engine).say((first, 50), started=[Started(first, 0.0, 0.0, 0)])
        await settled(lambda: not core(engine)._said)
        assert (engine.get_num_unfinished_requests(), engine.get_num_queued_tokens()) == (2, 1)
        await engine.abort(["a", "b"])
        await asyncio.gather(*tasks)
        assert (engine.get_num_unfinished_requests(), engine.get_num_queued_tokens()) == (0, 0)

    run(main())


# ------------------------------------------------------------------ making and ending one


def test_every_generation_of_the_constructor_makes_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncClient, "launch", ScriptedClient)
    config = EngineArgs(max_num_seqs=3).create_engine_config()
    parts = (config.model_config, config.cache_config, config.parallel_config, config.scheduler_config)
    makers: list[Callable[[], AsyncLLMEngine]] = [
        lambda: AsyncLLMEngine(config),
        lambda: AsyncLLMEngine(config, None, False, log_requests=False),
        lambda: AsyncLLMEngine(vllm_config=config, executor_class=None, log_stats=False, start_engine_loop=True),
        lambda: AsyncLLMEngine(False, False, config, log_stats=False),
        lambda: AsyncLLMEngine(False, False, *parts, None, log_stats=False, max_log_len=10),
        lambda: AsyncLLMEngine(
            worker_use_ray=False,
            engine_use_ray=False,
            model_config=parts[0],
            scheduler_config=parts[3],
            log_stats=False,
        ),
        lambda: AsyncLLMEngine.from_vllm_config(config, disable_log_stats=True),
        lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(max_num_seqs=3, disable_log_stats=True)),
    ]
    for at, make in enumerate(makers):
        engine = make()
        assert engine.vllm_config.scheduler_config.max_num_seqs == 3
        assert engine.log_stats is (at == 0)
        engine.shutdown()
    monkeypatch.setitem(sys.modules, "ray", None)  # not installed
    for flags in (True, False), (False, True):  # worker_use_ray and engine_use_ray
        with pytest.raises(NotSupportedError, match="Ray is asked for, but not installed"):
            AsyncLLMEngine(*flags, config)
    with pytest.raises(NotSupportedError, match="executor_class"):
        AsyncLLMEngine(config, object)
    with pytest.raises(InvalidArgumentError, match="no vllm_config"):
        AsyncLLMEngine()
    with pytest.raises(UnknownArgumentError, match="did you mean 'log_stats'"):
        AsyncLLMEngine(config, log_stat=True)


def test_requests_are_logged_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, run: Run
) -> None:
    monkeypatch.setattr(AsyncClient, "launch", ScriptedClient)
    caplog.set_level(logging.INFO)

    async def logged(engine: AsyncLLMEngine) -> str:
        caplog.clear()
        await engine.add_request("the-id", "hello world", GREEDY)
        engine.shutdown()
        return caplog.text

    async def main() -> None:
        config = EngineArgs().create_engine_config()
        text = await logged(AsyncLLMEngine(config, log_requests=True, max_log_len=5))
        assert "the-id" in text
        assert "'hello'" in text
        assert "the-id" in await logged(AsyncLLM.from_engine_args(AsyncEngineArgs(enable_log_requests=True)))
        both = AsyncEngineArgs(enable_log_requests=True, disable_log_requests=True)
        for quiet in (AsyncLLM.from_engine_args(both), AsyncLLM(config), AsyncLLM.from_vllm_config(config)):
            assert "the-id" not in await logged(quiet)

    run(main())


def test_shutdown_is_done_once_however_it_comes_and_ends_every_stream(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(AsyncClient, "launch", ScriptedClient)

    async def main() -> None:
        async with AsyncLLMEngine.from_engine_args(EngineArgs()) as engine:
            client = core(engine)
            task = await begun(engine, collected(engine.generate([5], GREEDY, "a")))
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        engine.shutdown()
        assert client.closed == 1
        assert engine._reader is not None
        assert not engine._reader._reads
        engine = AsyncLLMEngine.from_engine_args(EngineArgs())
        client, gone = core(engine), weakref.ref(engine)
        await engine.check_health()
        await turns()  # its reader is waiting now
        del engine
        gc.collect()
        assert gone() is None
        assert client.closed == 1

    run(main())


def test_a_shutdown_ends_streams_that_are_traced(engine: AsyncLLMEngine, run: Run) -> None:
    traced: list[str] = []

    def ended(state: Any, now: float, error: Exception | None = None) -> None:
        traced.append(state.source.request_id)

    async def main() -> None:
        engine.output_processor.tracer = cast(Any, SimpleNamespace(ended=ended))
        task = await begun(engine, collected(engine.generate([5], GREEDY, "a")))
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task

    run(main())
    assert traced == ["a"]


def test_signatures_begin_as_vllms_do() -> None:
    assert [*inspect.signature(AsyncLLMEngine.generate).parameters][1:4] == ["prompt", "sampling_params", "request_id"]
    assert [*inspect.signature(AsyncLLMEngine.add_request).parameters][1:10] == [
        "request_id", "prompt", "params", "arrival_time", "lora_request", "tokenization_kwargs", "trace_headers",
        "priority", "prompt_text",
    ]  # fmt: skip
    assert [*inspect.signature(AsyncLLMEngine.from_engine_args).parameters] == [
        "engine_args", "start_engine_loop", "usage_context", "stat_loggers"
    ]  # fmt: skip
    assert AsyncLLM is AsyncLLMEngine


# ------------------------------------------------------------------ over real sockets, with a core that has no model


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StandInOwner]:
    with stand_in(address=f"ipc://{tmp_path}/core.sock") as owner:
        yield owner


def connected(daemon: StandInOwner, **options: Any) -> AsyncLLMEngine:
    """An engine without a tokenizer, because this core has none to send."""
    return AsyncLLMEngine.connect(daemon.address, skip_tokenizer_init=True, **options)


def numbers(first: int, count: int) -> list[int]:
    """The output tokens of this core for a prompt."""
    return [*range(first, first + count)]


def test_hundreds_of_streams_at_once_each_get_their_own_tokens(daemon: StandInOwner, run: Run) -> None:
    async def main() -> None:
        async with connected(daemon) as engine:

            async def one(at: int) -> list[int]:
                params = SamplingParams(max_tokens=1 + at % 17, output_kind=tuple(RequestOutputKind)[at % 3])
                tokens: list[int] = []
                async for output in engine.generate([at], params, str(at)):
                    new = output.outputs[0].token_ids
                    tokens = tokens + new if params.output_kind == DELTA else new
                return tokens

            found = await asyncio.gather(*map(one, range(500)))
            assert found == [numbers(at, 1 + at % 17) for at in range(500)]
            assert len(engine.output_processor) == 0

    run(main())


def test_several_completions_of_one_request_come_whole(daemon: StandInOwner, run: Run) -> None:
    async def main() -> None:
        async with connected(daemon) as engine:
            *_, last = await collected(engine.generate([7], SamplingParams(n=5, max_tokens=9), "a"))
            assert [completion.token_ids for completion in last.outputs] == [numbers(7, 9)] * 5

    run(main())


def test_a_cancelled_task_frees_the_core_of_its_request(daemon: StandInOwner, run: Run) -> None:
    async def main() -> None:
        async with connected(daemon) as engine:
            endless = SamplingParams(max_tokens=10**6)
            going = asyncio.create_task(collected(engine.generate([1], endless, "a")))
            kept = engine.generate([2], endless, "b")
            await anext(kept)
            going.cancel()
            with pytest.raises(asyncio.CancelledError):
                await going
            await anext(kept)  # everything sent before it has arrived
            while len(daemon.core._requests) > 1:
                await anext(kept)
            assert [request.request_id for request, _ in daemon.core._requests.values()] == ["b"]

    run(main())


def test_a_core_that_dies_and_comes_back_is_not_noticed(daemon: StandInOwner, run: Run) -> None:
    async def main() -> None:
        async with connected(daemon) as engine:
            params = SamplingParams(max_tokens=400, output_kind=DELTA)
            streams = [engine.generate([at], params, str(at)) for at in range(8)]
            tokens = [list((await anext(stream)).outputs[0].token_ids) for stream in streams]
            daemon.kill()
            daemon.restart()
            for at, stream in enumerate(streams):
                async for output in stream:
                    tokens[at] += output.outputs[0].token_ids
            assert tokens == [numbers(at, 400) for at in range(8)]
            assert any(request.resumed for request in daemon.core.added)
            await engine.check_health()

    run(main())


def test_connecting_needs_no_loop_and_sends_the_client_name(daemon: StandInOwner, run: Run) -> None:
    engine = connected(daemon, name="a service", weight=2.5)
    assert eventually(lambda: daemon.core.sessions)  # the core is told after the frontend
    assert daemon.core.sessions[-1][1] == "a service"
    assert daemon.core.connected[-1][1] == 2.5

    async def main() -> None:
        async with engine:
            assert (await collected(engine.generate([5], GREEDY, "a")))[-1].finished

    run(main())


def test_an_error_that_is_raised_again_keeps_no_frames(daemon: StandInOwner, run: Run) -> None:
    async def main() -> None:
        engine = connected(daemon)
        engine.shutdown()
        for _ in range(20):
            with pytest.raises(EngineDeadError):
                await collected(engine.generate([5], GREEDY, "a"))
            with pytest.raises(EngineDeadError):
                await engine.check_health()
            with pytest.raises(EngineDeadError):
                await engine.is_sleeping()
        error = engine.dead_error
        assert error is not None
        assert len(traceback.extract_tb(error.__traceback__)) < 20

    run(main())


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_engine_may_be_shut_down_after_its_loop(daemon: StandInOwner, make_loop: Any) -> None:
    engine, loop = connected(daemon), make_loop()
    assert loop.run_until_complete(collected(engine.generate([5], GREEDY, "a")))[-1].finished
    loop.close()  # the task that reads outputs still waits
    engine.shutdown()
    assert engine.errored


# ------------------------------------------------------------------ with the embedded model

PROMPTS = [f"What is {at} plus {at + 1}?" for at in range(12)]


def test_the_embedded_model_gives_streams_the_same_text_as_a_batch() -> None:
    with LLM() as llm:
        expected = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    async def main() -> None:
        async with AsyncLLMEngine.from_engine_args(AsyncEngineArgs()) as engine:

            async def one(at: int) -> str:
                kind = tuple(RequestOutputKind)[at % 3]
                params = SamplingParams(temperature=0.0, max_tokens=32, output_kind=kind)
                text = ""
                async for output in engine.generate(PROMPTS[at], params, str(at)):
                    text = text + output.outputs[0].text if kind == DELTA else output.outputs[0].text
                return text

            assert await asyncio.gather(*map(one, range(len(PROMPTS)))) == expected
            endless = SamplingParams(max_tokens=4000, ignore_eos=True)
            async for _ in engine.generate("Tell me a long story.", endless, "left"):
                break
            await engine.wait_for_requests_to_drain()
            await engine.pause_generation()
            assert await engine.is_paused()
            waiting = asyncio.create_task(collected(engine.generate(PROMPTS[0], GREEDY, "waiting")))
            await engine.check_health()
            await engine.resume_generation()
            assert (await waiting)[-1].outputs[0].text == expected[0]
            assert not await engine.is_paused()

    asyncio.run(asyncio.wait_for(main(), 4 * PATIENCE))


LEAVES = """
import asyncio
from mainspring import AsyncLLMEngine, EngineArgs, SamplingParams
engine = AsyncLLMEngine.from_engine_args(EngineArgs())
async def main():
    async for output in engine.generate("Tell me a long story.", SamplingParams(max_tokens=3000, ignore_eos=True), "a"):
        core = engine.engine_core._connection._core
        print(core.supervisor.core_pid, core.address.removeprefix("ipc://"))
        return
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_program_that_ends_without_a_shutdown_leaves_nothing_behind() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    pid, socket = done.stdout.split()
    assert not psutil.pid_exists(int(pid))
    assert not Path(socket).parent.exists()
