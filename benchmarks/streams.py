"""Streams of every kind from several frontend processes, each compared with the result of an undisturbed core.

A stream is checked twice: while it runs, each output must continue where the one before ended; at its end, tokens, text
and finish reason must equal those of a core in another process for the same prompt, parameters and seed.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, Self

from mainspring import LLM, AsyncLLMEngine, LLMEngine, SamplingParams
from mainspring.engine.request.input_processor import EngineCoreRequest
from mainspring.engine.request.outputs import RequestOutput
from mainspring.ipc.params import RequestOutputKind

FINISH_SECONDS = 30.0
_SPAWN = multiprocessing.get_context("spawn")
_ANIMALS = "fox owl bear mouse frog rabbit duck goat".split()
_DEEDS = "found a red ball, lost a hat, met a friend, saw the sea, planted a seed, made a cake".split(", ")


class Spec(NamedTuple):
    """The specification of a stream. If it is sampled without a seed, its frontend draws one each time."""

    prompt: str | list[int]
    params: SamplingParams

    @property
    def draws_seed(self) -> bool:
        return self.params.temperature > 0 and self.params.seed is None


class Completed(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


class Record(NamedTuple):
    """A stream that has ended."""

    spec: int
    seed: int | None  # drawn by the frontend
    began: float  # time.monotonic, as all times here
    ended: float
    completions: list[Completed]
    parts: int  # connections over which tokens came
    trouble: str  # an error, or an output that did not continue the one before it


def make_specs(count: int, rng: random.Random, tokens: tuple[int, int] = (100, 500)) -> list[Spec]:
    """Prompts of text and of token ids; greedy, sampled with and without a seed, n=2, stop strings; with complete
    outputs or deltas. `tokens`: minimum and maximum length of a stream."""
    return [_spec(index, rng, rng.randint(*tokens)) for index in range(count)]


def long_specs(count: int, rng: random.Random, prompt_tokens: int = 3500) -> list[Spec]:
    """Long prompts without common prefixes."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [Spec(_ids(rng, prompt_tokens), params) for _ in range(count)]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, 1000) for _ in range(count)]  # no special tokens


def _spec(index: int, rng: random.Random, max_tokens: int) -> Spec:
    prompt: str | list[int] = _ids(rng, rng.randint(4, 200))
    if rng.random() < 0.4:
        prompt = f"Once upon a time, a {rng.choice(_ANIMALS)} {rng.choice(_DEEDS)} and said {rng.randrange(1000)}."
    kind = rng.choice((RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA))
    seed = rng.randrange(-(2**63), 2**63)
    options: dict[str, Any] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.95, "seed": seed},
        {"temperature": 0.8, "top_k": 40},
        {"temperature": 0.9, "seed": seed, "n": 2, "max_tokens": max(2, max_tokens // 2)},
        {"temperature": 1.1, "seed": seed, "stop": [" happy again", " friends", "?"], "min_tokens": max_tokens // 4},
    ][index % 5]
    return Spec(
        prompt, SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, "output_kind": kind, **options})
    )


# ---------------------------------------------------------------------- what they should bring


class Reference:
    """An undisturbed core in another process."""

    def __init__(self, specs: Sequence[Spec], **engine: Any) -> None:
        self._specs = specs
        self._llm = LLM(**engine)
        self._known: dict[tuple[int, int | None], list[Completed]] = {}

    def learn(self, cases: Iterable[tuple[int, int | None]]) -> None:
        """Compute these specs, each with the seed that was drawn for it."""
        new = [case for case in dict.fromkeys(cases) if case not in self._known]
        prompts, params = [], []
        for spec, seed in new:
            prompt = self._specs[spec].prompt
            prompts.append(prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt})
            params.append(self._specs[spec].params.clone())
            params[-1].seed = params[-1].seed if seed is None else seed
        for case, output in zip(new, self._llm.generate(prompts, params, use_tqdm=False) if new else [], strict=True):
            self._known[case] = [
                Completed(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs
            ]

    def learn_all(self) -> None:
        """Compute every spec that draws no seed."""
        self.learn((index, None) for index, spec in enumerate(self._specs) if not spec.draws_seed)

    def of(self, spec: int, seed: int | None = None) -> list[Completed]:
        return self._known[spec, seed]

    def close(self) -> None:
        self._llm.llm_engine.shutdown()


class Tally(NamedTuple):
    """Counts of the results of streams."""

    streams: int = 0
    tokens: int = 0
    failed: int = 0  # streams that ended in an error or in another wrong way
    tokens_lost: int = 0
    tokens_repeated: int = 0  # more tokens than expected
    tokens_different: int = 0
    ends_different: int = 0  # text, finish reason or stop reason
    examples: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return not any(
            (self.failed, self.tokens_lost, self.tokens_repeated, self.tokens_different, self.ends_different)
        )

    def describe(self) -> str:
        if self.exact:
            return f"{self.streams:,} streams, {self.tokens:,} tokens, all exact"
        return (
            f"{self.streams:,} streams: {self.failed} failed, {self.tokens_lost} tokens lost, {self.tokens_repeated} "
            f"repeated, {self.tokens_different} different, {self.ends_different} other ends; {'; '.join(self.examples)}"
        )


def compare(records: Sequence[Record], reference: Reference) -> Tally:
    """Compare every stream with the reference, which computes missing results."""
    reference.learn((record.spec, record.seed) for record in records)
    tokens = failed = lost = repeated = different = ends = 0
    examples: list[str] = []
    for record in records:
        expected = reference.of(record.spec, record.seed)
        faults = [record.trouble] if record.trouble else []
        failed += bool(record.trouble)
        for index, (got, right) in enumerate(zip(record.completions, expected, strict=True)):
            tokens += len(got.token_ids)
            pairs = zip(got.token_ids, right.token_ids, strict=False)
            where = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
            if got.token_ids != right.token_ids:
                lost += max(0, len(right.token_ids) - len(got.token_ids))
                repeated += max(0, len(got.token_ids) - len(right.token_ids))
                different += sum(a != b for a, b in zip(got.token_ids, right.token_ids, strict=False))
                faults.append(f"[{index}] {len(got.token_ids)} of {len(right.token_ids)} tokens, other from {where}")
            elif got != right:
                ends += 1
                faults.append(f"[{index}] ended {got[1:]!r:.200} and not {right[1:]!r:.200}")
        if faults:
            examples.append(f"spec {record.spec}: {', '.join(faults)}")
    return Tally(len(records), tokens, failed, lost, repeated, different, ends, tuple(examples[:5]))


# ---------------------------------------------------------------------- frontends


class Board:
    """Memory shared by the frontends and the program that controls them."""

    def __init__(self, frontends: int) -> None:
        self.begun = _SPAWN.RawArray("q", frontends)
        self.unfinished = _SPAWN.RawArray("i", frontends)
        self.tokens = _SPAWN.RawArray("q", frontends)
        self.resumed = _SPAWN.RawArray("d", frontends)  # time of the first tokens after the latest reconnection
        self.bursts = _SPAWN.RawValue("i", 0)
        self.stop = _SPAWN.RawValue("i", 0)  # set: start no more streams


class Load:
    """Frontends that keep streams running until `finish`.

    Args:
        specs: their streams, in random order.
        kinds: "sync" or "async", one for each frontend.
        streams: number that each keeps running.
        extra: specs of which each frontend adds one whenever `burst` is called.
    """

    def __init__(
        self,
        address: str,
        specs: Sequence[Spec],
        kinds: Sequence[str] = ("sync", "async", "sync", "async"),
        streams: int = 16,
        seed: int = 0,
        extra: range = range(0),
        lead: float = 60.0,
    ) -> None:
        self.board = Board(len(kinds))
        self._pipes: list[Pipe] = []
        self.processes: list[SpawnProcess] = []
        for number, kind in enumerate(kinds):
            ours, theirs = _SPAWN.Pipe()
            plan = _Plan(address, specs, number, len(kinds), streams, seed, extra, kind)
            process = _SPAWN.Process(target=_frontend, args=(plan, self.board, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:
            if not pipe.poll(lead):
                raise SystemExit("a frontend did not connect")
            pipe.recv()

    def unfinished(self) -> int:
        return sum(self.board.unfinished)

    def begun(self) -> int:
        return sum(self.board.begun)

    def tokens(self) -> int:
        return sum(self.board.tokens)

    def burst(self) -> None:
        self.board.bursts.value += 1

    def finish(self, seconds: float = FINISH_SECONDS, without: Sequence[int] = ()) -> tuple[list[Record], int]:
        """Let the running streams end; → the streams that ended, and the number that did not.

        Args:
            without: frontends that were killed.
        """
        self.board.stop.value = 1
        deadline = time.monotonic() + seconds
        records: list[Record] = []
        unfinished = 0
        for number, (pipe, process) in enumerate(zip(self._pipes, self.processes, strict=True)):
            if number in without:
                continue
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError
                records += pipe.recv()
            except EOFError:
                unfinished += max(1, self.board.unfinished[number])
                print(f"frontend {number} still has {self.board.unfinished[number]} streams", flush=True)
            process.join(10)
        self.close()
        return records, unfinished

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Plan(NamedTuple):
    """The work of one frontend."""

    address: str
    specs: Sequence[Spec]
    number: int
    frontends: int
    streams: int
    seed: int
    extra: range
    kind: str

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"

    def order(self) -> Iterator[int]:
        """An endless sequence of specs, in a different order for each frontend."""
        rng = random.Random(f"{self.seed} {self.number}")
        usual = [index for index in range(len(self.specs)) if index not in self.extra]
        while True:
            yield from rng.sample(usual, len(usual))

    def extras(self) -> Iterator[int]:
        """Extra specs; no two frontends take the same one at a time."""
        return itertools.cycle(self.extra[self.number :: self.frontends])


class _Stream:
    """One stream as its frontend sees it."""

    def __init__(self, spec: int, request: EngineCoreRequest, draws_seed: bool) -> None:
        self.spec, self.request = spec, request
        self.seed = request.params.seed if draws_seed else None
        self.began = time.monotonic()
        self.ended = 0.0
        self.completions = [Completed([], "", None, None)] * request.params.n
        self.connections: set[int] = set()
        self.trouble = ""

    def take(self, output: RequestOutput, connection: int) -> int:
        """Take an output; → the number of new tokens."""
        delta = self.request.params.output_kind == RequestOutputKind.DELTA
        before = sum(len(one.token_ids) for one in self.completions)
        for one in output.outputs:
            had, ids, text = self.completions[one.index], one.token_ids, one.text
            if delta:
                ids, text = had.token_ids + ids, had.text + text
            elif ids[: len(had.token_ids)] != had.token_ids or not text.startswith(had.text):
                self.trouble = f"output after {len(had.token_ids)} tokens does not go on where the last one ended"
            if had.finish_reason is not None and delta:
                self.trouble = "ended twice"
            if one.finish_reason in ("error", "abort"):
                self.trouble = f"{one.finish_reason}: {one.stop_reason}"
            self.completions[one.index] = Completed(ids, text, one.finish_reason, one.stop_reason)
        if output.finished:
            self.ended = time.monotonic()
        new = sum(len(one.token_ids) for one in self.completions) - before
        if new:
            self.connections.add(connection)
        return new

    def record(self) -> Record:
        return Record(
            self.spec, self.seed, self.began, self.ended, self.completions, len(self.connections), self.trouble
        )


class _Desk:
    """Common code of the loops of both kinds of frontend."""

    def __init__(self, engine: LLMEngine | AsyncLLMEngine, plan: _Plan, board: Board) -> None:
        self._engine, self._plan, self._board = engine, plan, board
        self._order, self._extras = plan.order(), plan.extras()
        self._ids = itertools.count()
        self._bursts = board.bursts.value
        self._reconnections = 0
        self.records: list[Record] = []

    def next(self) -> _Stream | None:
        """The next stream to begin; None: no more."""
        return None if self._board.stop.value else self._make(next(self._order))

    def extra(self) -> _Stream | None:
        """The next extra stream, if one was requested."""
        if self._board.stop.value or self._bursts == self._board.bursts.value:
            return None
        self._bursts = self._board.bursts.value
        return self._make(next(self._extras))

    def _make(self, index: int) -> _Stream:
        spec = self._plan.specs[index]
        prompt = spec.prompt if isinstance(spec.prompt, str) else {"prompt_token_ids": spec.prompt}
        request = self._engine.input_processor.process_inputs(
            f"{self._plan.name}-{next(self._ids)}", prompt, spec.params
        )
        self._board.begun[self._plan.number] += 1
        self._board.unfinished[self._plan.number] += 1
        return _Stream(index, request, spec.draws_seed)

    def took(self, stream: _Stream, output: RequestOutput) -> None:
        number = self._plan.number
        connection: int = self._engine.engine_core._connection.reconnections  # type: ignore[union-attr]
        new = stream.take(output, connection)
        self._board.tokens[number] += new
        if new and connection != self._reconnections:
            self._reconnections = connection
            self._board.resumed[number] = time.monotonic()

    def end(self, stream: _Stream) -> None:
        self.records.append(stream.record())
        self._board.unfinished[self._plan.number] -= 1


def _frontend(plan: _Plan, board: Board, pipe: Pipe) -> None:
    if plan.kind == "async":
        asyncio.run(_run_async(plan, board, pipe))
    else:
        _run_sync(plan, board, pipe)


def _run_sync(plan: _Plan, board: Board, pipe: Pipe) -> None:
    with LLMEngine.connect(plan.address, name=plan.name) as engine:
        pipe.send(os.getpid())
        desk = _Desk(engine, plan, board)
        running: dict[str, _Stream] = {}

        def begin(stream: _Stream) -> None:
            running[stream.request.request_id] = stream
            engine.add_request(stream.request.request_id, stream.request)

        while True:
            while len(running) < plan.streams and (stream := desk.next()) is not None:
                begin(stream)
            if (stream := desk.extra()) is not None:
                begin(stream)
            if not running:
                break
            for output in engine.step():
                stream = running[output.request_id]
                desk.took(stream, output)
                if output.finished:
                    desk.end(running.pop(output.request_id))
        pipe.send(desk.records)


async def _run_async(plan: _Plan, board: Board, pipe: Pipe) -> None:
    async with AsyncLLMEngine.connect(plan.address, name=plan.name) as engine:
        pipe.send(os.getpid())
        desk = _Desk(engine, plan, board)

        async def run(stream: _Stream) -> None:
            try:
                async for output in engine.generate(stream.request, None, stream.request.request_id):
                    desk.took(stream, output)
            except Exception as error:  # any error is recorded as the result of the stream
                stream.trouble = f"{type(error).__name__}: {error}"
            desk.end(stream)

        async def lane() -> None:
            while (stream := desk.next()) is not None:
                await run(stream)

        async def watch() -> None:
            while not board.stop.value:
                if (stream := desk.extra()) is not None:
                    extras.append(asyncio.create_task(run(stream)))
                await asyncio.sleep(0.005)

        extras: list[asyncio.Task[None]] = []
        await asyncio.gather(watch(), *(lane() for _ in range(plan.streams)))
        await asyncio.gather(*extras)
        pipe.send(desk.records)
