"""A recorded run: an engine records the plans of random steps and their results; a worker in another process, which is
given only that file, returns the same results.

    python benchmarks/recorded_run.py --steps 1000
    python benchmarks/recorded_run.py --replay FILE
"""

from __future__ import annotations

import argparse
import random
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from mainspring import EngineArgs
from mainspring.core.loop import EngineCore
from mainspring.core.plan.codec import decode, encode
from mainspring.core.plan.control import Control, PendingStep, Worker
from mainspring.core.plan.step import StepPlan, StepResult
from mainspring.core.worker.make_worker import make_worker
from mainspring.ipc.config import EngineConfig
from mainspring.ipc.messages import AddRequest, Sampling

CONFIG, CONTROL, PLAN, RESULT = range(4)  # kinds of records
_HEAD = struct.Struct("<BQ")  # kind, bytes
GRAMMARS = [["choice", '["red","blue"]'], ["regex", "[a-z]{1,12}"], ["json", '{"type":"object"}']]


class Recorder(Worker):
    """A worker that records its calls and results. Calls that a file can't hold are refused."""

    def __init__(self, worker: Worker, config: EngineConfig, file: BinaryIO) -> None:
        self._worker, self._file = worker, file
        self.facts, self.decisions, self.interrupt = worker.facts, worker.decisions, worker.interrupt
        self._write(CONFIG, msgspec.json.encode(config))

    def _write(self, kind: int, data: bytes) -> None:
        self._file.write(_HEAD.pack(kind, len(data)) + data)

    def warm_up(self) -> None:
        self._worker.warm_up()

    def control(self, record: Control) -> Any:
        self._write(CONTROL, encode(record))
        return self._worker.control(record)

    def launch(self, plan: StepPlan) -> PendingStep:
        self._write(PLAN, encode(plan))
        return _Recorded(self._worker.launch(plan), self._write)

    def lend_functions(self, functions: Sequence[Callable[..., Any]]) -> tuple[int, ...]:
        raise NotImplementedError("functions can't be recorded")

    def run_method(self, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        raise NotImplementedError("method calls are not recorded")

    def span(self, name: str) -> AbstractContextManager[Any]:
        return self._worker.span(name)


class _Recorded:
    def __init__(self, pending: PendingStep, write: Callable[[int, bytes], None]) -> None:
        self._pending, self._write = pending, write

    @property
    def lacks_memory(self) -> bool:
        return self._pending.lacks_memory

    def wait(self) -> StepResult:
        result = self._pending.wait()
        self._write(RESULT, encode(result))
        return result


def read(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    while head := file.read(_HEAD.size):
        kind, size = _HEAD.unpack(head)
        yield kind, file.read(size)


def random_request(r: random.Random, handle: int, vocab: int, common: list[int]) -> AddRequest:
    def maybe(value: Any, otherwise: Any, chance: float = 0.25) -> Any:
        return value if r.random() < chance else otherwise

    prompt = common[: r.choice([0, 16, 40])] + [r.randrange(3, vocab) for _ in range(r.randint(1, 60))]
    if r.random() < 0.3:
        prompt += prompt[-8:]  # repetitive prompts, so that n-gram lookup finds matches
    sampling = Sampling(
        r.randint(1, 40),
        seed=r.getrandbits(40),
        temperature=r.choice([0.0, 0.0, 0.7, 1.2]),
        top_p=maybe(0.8, 1.0),
        top_k=maybe(20, 0),
        min_p=maybe(0.05, 0.0),
        min_tokens=maybe(3, 0),
        stop_token_ids=r.sample(range(vocab), r.randint(0, 3)),
        presence_penalty=maybe(0.5, 0.0),
        repetition_penalty=maybe(1.2, 1.0),
        logprobs=maybe(r.randint(0, 4), -1),
        prompt_logprobs=maybe(2, -1, 0.1),
        logit_bias=maybe({r.randrange(vocab): 2.0}, {}),
        bad_words=maybe([[r.randrange(vocab), r.randrange(vocab)]], []),
        grammar=maybe(r.choice(GRAMMARS), [], 0.15),
    )
    return AddRequest(handle, str(handle), prompt, sampling)


def record(path: Path, steps: int, seed: int = 1) -> Counter[str]:
    """Write a run of `steps` steps of the embedded model to `path`. Returns counts of its tokens, steps, preemptions
    and so on."""
    r, seen = random.Random(seed), Counter[str]()
    args = EngineArgs(
        max_num_seqs=6,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=28,
        max_model_len=160,
        kv_offloading_size=0.001,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    )
    with path.open("wb") as file:
        core = EngineCore(args.create_engine_config(), lambda config: Recorder(make_worker(config), config, file))
        core.connect(0)
        common, handle = [r.randrange(3, core.model.vocab_size) for _ in range(40)], 0
        while core.stats().num_steps < steps:
            while r.random() < 0.3 or not core.has_work:
                core.add_request(0, random_request(r, handle, core.model.vocab_size, common))
                handle += 1
            if r.random() < 0.02:
                core.abort(0, [r.randrange(handle)])
            for out in core.step().values():
                seen["tokens"] += len(out.token_ids)
                seen.update(f"ended: {one.reason}" for one in out.finished)
        stats = core.stats()
    for name in ("num_steps", "num_preemptions", "prefix_hits", "accepted_tokens", "host_hits"):
        seen[name] = getattr(stats, name)
    return seen


def replay(path: Path) -> int:
    """Run a recorded run's plans on a worker in this process. Returns the number of equal results.

    Raises:
        AssertionError: one differed.
    """
    worker: Worker | None = None
    launched: list[PendingStep] = []
    same = 0
    with path.open("rb") as file:
        for kind, data in read(file):
            if kind == CONFIG:
                worker = make_worker(msgspec.json.decode(data, type=EngineConfig))
                worker.warm_up()
                continue
            assert worker is not None, "the file does not begin with a configuration"
            if kind == CONTROL:
                answer = worker.control(decode(data, Control))
                if isinstance(answer, Future):
                    answer.exception()  # wait; a preparation that failed is used by no plan
            elif kind == PLAN:
                launched.append(worker.launch(decode(data, StepPlan)))
            else:
                result = launched[0].wait()
                if not result.more:
                    del launched[0]
                assert encode(result) == data, f"result {same} is another one"
                same += 1
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, help="run the plans of this file, and compare")
    options = parser.parse_args()
    if options.replay:
        print(f"{replay(options.replay)} results are the same")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        seen = record(path, options.steps, options.seed)
        print(f"recorded {path.stat().st_size:,} bytes: " + ", ".join(f"{n} {name}" for name, n in seen.items()))
        return subprocess.run([sys.executable, "-P", __file__, "--replay", path], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
