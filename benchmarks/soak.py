"""A long run with mixed load: streams, aborts, cancelled tasks, frontends that connect and disconnect, and a crash a
minute.

    python benchmarks/soak.py --minutes 30 --seed 1

Two frontends, one synchronous and one of asyncio, stay all the time; a third process repeatedly connects, sends
requests and disconnects. Bars: memory and descriptors of the supervisor and of all three processes stay flat, those of
the cores too (each between the middle and the end of its life), and every request ends exactly once, with the right
tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import psutil

from bars import Bar, add_arguments, conclude
from daemon import Daemon, wait_for
from mainspring import AsyncLLMEngine, LLMEngine
from mainspring.engine.request.outputs import RequestOutput
from mainspring.ipc.messages import Outputs
from mainspring.ipc.params import RequestOutputKind
from streams import Completed, Reference, Spec, make_specs

MB = 1_000_000
MEMORY_LIMIT = 5 * MB
DESCRIPTORS_LIMIT = 2
IN_FLIGHT = 8
ABORTED = 0.2  # share of all requests
CORE_AGES = (0.5, 0.95)  # shares of a core's lifetime at which it is sampled
# A small pool and a small budget, so that in half of its lifetime a core has touched every block and seen every shape
# of a step.
SMALL = ["--num-gpu-blocks-override=1024", "--max-num-batched-tokens=128", "--max-restarts=1000000"]
_SPAWN = multiprocessing.get_context("spawn")
COUNTS = ["begun", "ended", "left", "aborted", "wrong", "twice", "connects"]
Expected = dict[int, list[Completed]]


class Asked(NamedTuple):
    """A request of a worker."""

    spec: int
    abort_at: int  # tokens after which it is aborted; 0: never
    output: list[RequestOutput]  # the last request


class Worker:
    """Common code of the three processes: drawing requests, and counting their results in shared memory."""

    def __init__(self, seed: str, specs: Sequence[Spec], expected: Expected, counts: Any, stop: Any) -> None:
        self.rng = random.Random(seed)
        self._specs, self._expected = specs, expected
        self._counts, self._stop = counts, stop
        self._ids = itertools.count()

    @property
    def stopping(self) -> bool:
        return bool(self._stop.value)

    def count(self, name: str, number: int = 1) -> None:
        self._counts[COUNTS.index(name)] += number

    def draw(self, engine: LLMEngine | AsyncLLMEngine) -> tuple[Any, Asked]:
        """A request ready to be added, and whether it is to be aborted."""
        spec = self.rng.choice(list(self._expected))
        prompt = self._specs[spec].prompt
        prepared = engine.input_processor.process_inputs(
            f"{os.getpid()}-{next(self._ids)}",
            prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt},
            self._specs[spec].params,
        )
        self.count("begun")
        abort_at = self.rng.randint(1, 40) if self.rng.random() < ABORTED else 0
        return prepared, Asked(spec, abort_at, [])

    def took(self, asked: Asked, output: RequestOutput) -> bool:
        """Whether to abort the request now."""
        asked.output[:] = [output]
        tokens = sum(len(one.token_ids) for one in output.outputs)
        return bool(asked.abort_at) and tokens >= asked.abort_at and not output.finished

    def end(self, asked: Asked) -> None:
        """A request has ended: its tokens must be right, or a prefix of the right ones."""
        self.count("ended")
        got, right = asked.output[0].outputs, self._expected[asked.spec]
        aborted = any(one.finish_reason == "abort" for one in got)
        self.count("aborted", aborted)
        for one, whole in zip(got, right, strict=True):
            cut = whole.token_ids[: len(one.token_ids)] if one.finish_reason == "abort" else whole.token_ids
            self.count("wrong", one.token_ids != cut or one.finish_reason not in ("abort", whole.finish_reason))

    def watch(self, engine: LLMEngine | AsyncLLMEngine) -> None:
        """Count results for a handle after its end; there must be none."""
        self.count("connects")
        process = engine.output_processor.process
        ended: set[int] = set()
        all_up_to = 0

        def watched(outputs: Outputs, now: float) -> Any:
            nonlocal all_up_to
            late = [*outputs.handles, *(one.handle for one in outputs.started)]
            self.count("twice", sum(handle <= all_up_to or handle in ended for handle in late))
            for one in outputs.finished:
                self.count("twice", one.handle <= all_up_to or one.handle in ended)
                ended.add(one.handle)
            while all_up_to + 1 in ended:  # so that it does not grow; handles are numbered in order
                all_up_to += 1
                ended.remove(all_up_to)
            return process(outputs, now)

        engine.output_processor.process = watched  # type: ignore[method-assign]


def run_sync(worker: Worker, engine: LLMEngine, done: Callable[[], bool]) -> dict[str, Asked]:
    """Keep requests running until `done`; returns those that still run."""
    worker.watch(engine)
    running: dict[str, Asked] = {}
    while not done():
        while len(running) < IN_FLIGHT:
            prepared, asked = worker.draw(engine)
            running[prepared.request_id] = asked
            engine.add_request(prepared.request_id, prepared)
        step_sync(worker, engine, running)
    return running


def step_sync(worker: Worker, engine: LLMEngine, running: dict[str, Asked]) -> None:
    for output in engine.step():
        asked = running[output.request_id]
        if worker.took(asked, output):
            engine.abort_request(output.request_id)
        if output.finished:
            worker.end(running.pop(output.request_id))


async def run_async(worker: Worker, engine: AsyncLLMEngine, done: Callable[[], bool]) -> None:
    """The same with tasks. A request to be aborted is aborted, left in mid-stream, or has its task cancelled."""
    worker.watch(engine)

    async def one(prepared: Any, asked: Asked, way: str) -> None:
        finished = False
        try:
            async with contextlib.aclosing(_stream(engine, prepared)) as stream:
                async for output in stream:
                    if worker.took(asked, output):
                        if way == "leave":
                            return
                        if way == "cancel":
                            asyncio.current_task().cancel()  # type: ignore[union-attr]
                        else:
                            await engine.abort(prepared.request_id)
                    finished = output.finished
        finally:
            if finished:
                worker.end(asked)
            else:
                worker.count("left")

    tasks: set[asyncio.Task[None]] = set()
    while not done():
        while len(tasks) < IN_FLIGHT:
            prepared, asked = worker.draw(engine)
            tasks.add(asyncio.create_task(one(prepared, asked, worker.rng.choice(("leave", "cancel", "abort")))))
        ended, tasks = await asyncio.wait(tasks, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            if not task.cancelled():
                task.result()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _stream(engine: AsyncLLMEngine, prepared: Any) -> Any:
    stream = engine.generate(prepared, None, prepared.request_id)
    try:
        async for output in stream:
            yield output
    finally:
        await stream.aclose()


def stay_sync(address: str, worker: Worker) -> None:
    with LLMEngine.connect(address, name="soak sync") as engine:
        running = run_sync(worker, engine, lambda: worker.stopping)
        while running:
            step_sync(worker, engine, running)


def stay_async(address: str, worker: Worker) -> None:
    async def stay() -> None:
        async with AsyncLLMEngine.connect(address, name="soak async") as engine:
            await run_async(worker, engine, lambda: worker.stopping)

    asyncio.run(stay())


def come_and_go(address: str, worker: Worker) -> None:
    """Repeatedly connect, run requests for a moment, and disconnect in the middle."""
    while not worker.stopping:
        until = time.monotonic() + worker.rng.uniform(0.0, 2.0)

        def done(until: float = until) -> bool:
            return worker.stopping or time.monotonic() > until

        if worker.rng.random() < 0.5:
            with LLMEngine.connect(address, name="soak guest") as engine:
                worker.count("left", len(run_sync(worker, engine, done)))
        else:
            asyncio.run(_visit(address, worker, done))


async def _visit(address: str, worker: Worker, done: Callable[[], bool]) -> None:
    async with AsyncLLMEngine.connect(address, name="soak guest") as engine:
        await run_async(worker, engine, done)


WORKERS = {"sync frontend": stay_sync, "async frontend": stay_async, "coming and going": come_and_go}


def _work(
    name: str, address: str, seed: int, specs: Sequence[Spec], expected: Expected, counts: Any, stop: Any
) -> None:
    WORKERS[name](address, Worker(f"{seed} {name}", specs, expected, counts, stop))


# ---------------------------------------------------------------------- what is measured


class Sample(NamedTuple):
    at: float  # seconds from the start
    memory: int  # resident bytes
    descriptors: int


class Watch:
    """Memory and descriptors of processes, once a second; of each core twice, at the same ages."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self.samples: dict[str, list[Sample]] = {name: [] for name in pids}
        self.cores: list[list[Sample]] = []
        self.began = time.monotonic()

    def look(self) -> None:
        for name, process in self._processes.items():
            self.samples[name].append(self._sample(process))

    def look_at_core(self, pid: int, first: bool) -> None:
        if first:
            self.cores.append([])
        self.cores[-1].append(self._sample(psutil.Process(pid)))

    def _sample(self, process: psutil.Process) -> Sample:
        with process.oneshot():
            return Sample(time.monotonic() - self.began, process.memory_info().rss, process.num_fds())

    def bars(self) -> list[Bar]:
        """For processes that stay, compare the last quarter with the second one, because caches fill before that."""
        found = []
        for name, samples in self.samples.items():
            end = samples[-1].at
            early = [one for one in samples if end / 4 <= one.at < end / 2]
            late = [one for one in samples if one.at >= end * 3 / 4]
            found += _flat(name, early, late)
        lives = [life for life in self.cores if len(life) == len(CORE_AGES)]
        return found + _flat("core", [life[0] for life in lives], [life[1] for life in lives])


def _flat(name: str, early: Sequence[Sample], late: Sequence[Sample]) -> list[Bar]:
    memory, descriptors = median(one.memory for one in early), median(one.descriptors for one in early)
    grown = median(one.memory for one in late) - memory
    more = median(one.descriptors for one in late) - descriptors
    return [
        Bar(f"{name}: memory (+5 MB)", f"{memory / MB:.1f} MB, then {grown / MB:+.1f} MB", grown <= MEMORY_LIMIT),
        Bar(f"{name}: descriptors (+2)", f"{descriptors:.0f}, then {more:+.0f}", more <= DESCRIPTORS_LIMIT),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--crash-every", type=float, default=60.0, help="seconds (default: 60)")
    parser.add_argument("--seed", type=int, help="default: a new one, printed")
    add_arguments(parser)
    args = parser.parse_args()
    args.seed = int.from_bytes(os.urandom(4), "big") if args.seed is None else args.seed
    print(f"seed {args.seed}", flush=True)
    rng = random.Random(args.seed)
    specs = [spec._replace(params=_cumulative(spec)) for spec in make_specs(80, rng, (20, 200)) if not spec.draws_seed]
    reference = Reference(specs)
    reference.learn_all()
    expected = {index: reference.of(index) for index in range(len(specs))}
    reference.close()
    stop = _SPAWN.RawValue("i", 0)
    counts = {name: _SPAWN.RawArray("q", len(COUNTS)) for name in WORKERS}
    with Daemon(*SMALL, threads=args.threads) as daemon:
        processes = {
            name: _SPAWN.Process(
                target=_work, args=(name, daemon.address, args.seed, specs, expected, counts[name], stop), daemon=True
            )
            for name in WORKERS
        }
        for process in processes.values():
            process.start()
        wait_for(lambda: all(array[1] for array in counts.values()), "every worker has ended a request")
        watch = Watch({"supervisor": daemon.pid, **{name: int(one.pid or 0) for name, one in processes.items()}})
        crashes = _soak(daemon, args, rng, watch, counts, processes)
        stop.value = 1
        for process in processes.values():
            process.join(120)
        hung = [name for name, process in processes.items() if process.exitcode != 0]
        for process in processes.values():
            process.kill()
        wait_for(lambda: not daemon.status().frontends, "the core knows no frontend any more", 30)
        wait_for(lambda: not daemon.status().stats.num_running, "nothing runs any more", 30)
        status = daemon.status()
    total = Counter[str]()
    for array in counts.values():
        total.update(dict(zip(COUNTS, array, strict=True)))
    kinds = Counter(crashes)
    open_requests = total["begun"] - total["ended"] - total["left"]
    bars = [
        Bar("minutes", f"{args.minutes:g}", None),
        Bar("crashes", ", ".join(f"{count} {kind}" for kind, count in kinds.items()), status.restarts == len(crashes)),
        Bar("connections made", f"{total['connects']:,}", None),
        Bar("requests", f"{total['begun']:,}, {total['aborted']:,} aborted, {total['left']:,} left", None),
        Bar("… that did not end (0)", f"{open_requests}", not open_requests and not hung),
        Bar("… that ended twice, or went on after their end (0)", f"{total['twice']}", not total["twice"]),
        Bar("… with wrong tokens or finish reason (0)", f"{total['wrong']}", not total["wrong"]),
        Bar("blocks in use at the end (0)", f"{status.stats.kv_cache_usage:.0%}", not status.stats.kv_cache_usage),
        *watch.bars(),
    ]
    return conclude(bars, {"seed": args.seed, "hung": hung, "samples": watch.samples, "cores": watch.cores}, args)


def _cumulative(spec: Spec) -> Any:
    """With cumulative outputs, so that an aborted request can be compared."""
    params = spec.params.clone()
    params.output_kind = RequestOutputKind.CUMULATIVE
    return params


def _soak(
    daemon: Daemon, args: argparse.Namespace, rng: random.Random, watch: Watch, counts: Any, processes: Any
) -> list[str]:
    """Sample, and crash the core from time to time; → the kinds of crashes."""
    crashes: list[str] = []
    end = watch.began + args.minutes * 60
    born, looks = watch.began, 0
    shown = 0
    while (now := time.monotonic()) < end:
        watch.look()
        if looks < len(CORE_AGES) and now - born > args.crash_every * CORE_AGES[looks]:
            watch.look_at_core(daemon.status().core_pid, first=not looks)
            looks += 1
        if now - born > args.crash_every:
            before = daemon.status()
            kind = rng.choice((signal.SIGKILL, signal.SIGSEGV))
            os.kill(before.core_pid, kind)
            crashes.append(kind.name)
            daemon.served_again(before.epoch)
            born, looks = time.monotonic(), 0
        if (now - watch.began) / (end - watch.began) * 10 > shown:
            ended = sum(array[COUNTS.index("ended")] for array in counts.values())
            sizes = ", ".join(
                f"{name} {samples[-1].memory / MB:.0f}" for name, samples in watch.samples.items() if samples
            )
            print(f"{shown * 10}%: {ended:,} requests ended, {len(crashes)} crashes; MB: {sizes}", flush=True)
            shown += 1
        for name, process in processes.items():
            if not process.is_alive():
                raise SystemExit(f"{name} has ended: see above")
        time.sleep(1.0)
    return crashes


if __name__ == "__main__":
    sys.exit(main())
