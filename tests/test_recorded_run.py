"""A worker needs only plans: a recorded run gives the same results in another process, and a plan of several steps
gives the results of as many single plans."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from mainspring import EngineArgs
from mainspring.benchmarks import recorded_run
from mainspring.core.memory.updates import TableUpdate
from mainspring.core.plan.codec import decode, encode
from mainspring.core.plan.step import IN_FLIGHT, NewSequence, StepPlan
from mainspring.core.worker.make_worker import make_worker
from mainspring.core.worker.worker import LocalWorker
from mainspring.ipc.messages import Sampling


@pytest.mark.slow
def test_a_worker_in_another_process_gives_the_results_of_a_recorded_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    seen = recorded_run.record(path, 300)
    assert min(seen[name] for name in ("num_preemptions", "prefix_hits", "accepted_tokens", "ended: abort")) > 0
    command = [sys.executable, "-P", recorded_run.__file__, "--replay", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout) == (0, "300 results are the same\n"), done.stderr


@pytest.mark.slow
def test_a_replay_sees_another_result(tmp_path: Path) -> None:
    path = tmp_path / "run"
    recorded_run.record(path, 10)
    with path.open("rb") as file:
        records = list(recorded_run.read(file))
    at = next(i for i, (kind, _) in enumerate(records) if kind == recorded_run.PLAN)
    plan = decode(records[at][1], StepPlan)
    records[at] = recorded_run.PLAN, encode(replace(plan, token_ids=plan.token_ids[::-1].copy()))
    with path.open("wb") as file:
        for kind, data in records:
            file.write(recorded_run._HEAD.pack(kind, len(data)) + data)
    with pytest.raises(AssertionError, match="is another one"):
        recorded_run.replay(path)


def plan_of(slots: list[int], starts: list[int], token_ids: list[list[int]], **fields: Any) -> StepPlan:
    base: dict[str, Any] = {"admitted": [], "tables": TableUpdate(*np.zeros((4, 0), np.int32))}
    return StepPlan(
        0,
        np.array(slots, np.int32),
        np.array(starts, np.int32),
        np.array([len(ids) for ids in token_ids], np.int32),
        np.array([token for ids in token_ids for token in ids], np.int32),
        np.ones(len(slots), bool),
        np.zeros(len(slots), np.int32),
        released=np.zeros(0, np.int32),
        scored=[],
        **(base | fields),
    )


def begin(worker: LocalWorker) -> list[int]:
    """Compute two prompts, in blocks 1 and 2; → the sampled tokens."""
    prompts, seeds = [[5, 6, 7, 8], [9, 10]], [11, 12]
    sequences = [
        NewSequence(slot, np.array(ids, np.int32), len(ids), Sampling(20, seed=seeds[slot], temperature=1.0))
        for slot, ids in enumerate(prompts)
    ]
    columns = TableUpdate(*np.array([[0, 0], [0, 1], [0, 0], [1, 2]], np.int32))
    plan = plan_of([0, 1], [0, 0], prompts, admitted=sequences, tables=columns)
    tokens: list[int] = worker.launch(plan).wait().tokens.tolist()
    return tokens


def test_a_plan_of_several_decode_steps_brings_the_results_of_as_many_plans() -> None:
    worker = make_worker(
        EngineArgs(num_gpu_blocks_override=20, max_model_len=64, max_num_seqs=2).create_engine_config()
    )
    begin(worker)
    starts = [4, 2]
    one_by_one = []
    for step in range(5):
        plan = plan_of([0, 1], [start + step for start in starts], [[IN_FLIGHT], [IN_FLIGHT]])
        one_by_one.append(worker.launch(plan).wait().tokens.tolist())
    begin(worker)
    several = plan_of([0, 1], starts, [[IN_FLIGHT], [IN_FLIGHT]], num_steps=5)
    result = worker.launch(several).wait()
    assert (result.num_steps, result.first, result.more) == (5, 0, False)
    together = result.tokens.reshape(5, 2).tolist()
    assert together == one_by_one
    assert len({tuple(tokens) for tokens in together}) > 1, "sampled tokens differ from step to step"
