"""The classes of `architectures.py` on several ranks, which stay up from class to class: `make architectures-ranks`.

Each is *exact* (every rank has the greedy tokens of ``model.generate``), *refused* with a reason, or *wrong*.

    python benchmarks/architectures_ranks.py --write                    # all on 2 ranks, into docs/scaling.md
    python benchmarks/architectures_ranks.py --ranks 4 llama qwen3      # some
    python benchmarks/architectures_ranks.py --whole-experts mixtral    # each expert on one rank
    python benchmarks/architectures_ranks.py --ranks 1 --stages 2       # a pipeline; each stage has that many ranks
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import multiprocessing
import os
import re
import shlex
import sys
import tempfile
import time
from collections import Counter, defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from architectures import (
    _VARIANTS,
    MAX_TOKENS,
    Result,
    _diverse,
    _refused_unbuilt,
    be_quiet,
    compared,
    drive,
    one_line,
)
from mainspring.core.model.load.loader import load_model
from mainspring.core.model.run.paged_model import PagedModel
from mainspring.core.parallel.group import RankGroup
from mainspring.core.parallel.parallel_backend import ParallelBackend
from mainspring.core.parallel.stages import Stages
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.ipc.errors import UnsupportedModelError
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from report import DOCS, fill, table

ENOUGH = 91
PAGE = DOCS / "scaling.md"
TIMEOUT_S = 120
CPU = torch.device("cpu")


class Task(NamedTuple):
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    whole_experts: bool


class Ranks:
    """Processes that load one model after another together: `size` ranks for each of `stages` stages."""

    def __init__(self, size: int, stages: int = 1) -> None:
        self._size, self._stages = size, stages
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def judge(self, task: Task) -> list[Result]:
        """What each rank found. After an error that others may not have had, the group is a new one."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(task)
        end = time.monotonic() + TIMEOUT_S
        found = [_answer(pipe, max(0.0, end - time.monotonic())) for pipe in self._pipes]
        if any(one.outcome == "wrong" for one in found):
            self.stop()
        return found

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        store = tempfile.mktemp(prefix="ms-ranks-")
        for number in range(self._size * self._stages):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(number, self._size, self._stages, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)


def _answer(pipe: Connection, seconds: float) -> Result:
    try:
        return pipe.recv() if pipe.poll(seconds) else Result("wrong", f"no answer in {TIMEOUT_S} s")
    except EOFError:
        return Result("wrong", "a rank died")


def _rank(number: int, size: int, count: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    be_quiet()
    world = RankGroup(number, size * count, f"file://{store}", CPU, TIMEOUT_S)
    stages = Stages(world, count, size) if count > 1 else None
    group = world if stages is None else stages.group_of_stage()
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            os._exit(0)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            found = _judge(task, group, stages)
        pipe.send(found)


def _judge(task: Task, group: RankGroup | None, stages: Stages | None) -> Result:
    try:
        backend: Any = ReferenceBackend() if group is None else ParallelBackend(ReferenceBackend(), group)
        config, how = ModelConfig(model=str(task.folder)), {"whole_experts": task.whole_experts, "stages": stages}
        model = load_model(config, LoadConfig(), CPU, None, backend, **how)
        if stages is not None:
            agree_on_tokens(model, stages)
        tokens = drive(model, task.prompts, MAX_TOKENS)
    except UnsupportedModelError as error:
        return Result("refused", str(error).replace(str(task.folder), "the checkpoint"))
    except Exception as error:
        return Result("wrong", "raised " + one_line(error))
    held = sum(model.parameters.shape(name).numel() for name in model.parameters.names())
    everywhere = (*model.parameters.names(), *model.parameters.others)
    whole = sum(model.parameters.whole_shape(name).numel() for name in everywhere)
    how = "; ".join(note for note in model.notes if note.startswith(("stage ", "one of ")))
    return compared(tokens, task.expected, f"{how}; a rank holds {held / whole:.0%} of the weights")


def agree_on_tokens(model: PagedModel, stages: Stages) -> None:
    """From now on all stages choose the tokens that the first rank of the last one chooses."""
    forward, vocab = model.forward, model.vocab_size

    def chosen(*args: Any, **kwargs: Any) -> torch.Tensor:
        tokens = forward(*args, **kwargs).argmax(-1)
        stages.world.copy_of_leader(tokens)
        return torch.nn.functional.one_hot(tokens, vocab)

    model.forward = chosen  # type: ignore[method-assign]


def judge(model_type: str, ranks: Ranks, whole_experts: bool) -> Result:
    """Build the class, generate with transformers, and let the ranks compare."""
    reason = ""
    for variant in _VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                    prompts, expected = _diverse(model_type, Path(folder), variant)
            except Exception as error:
                reason = one_line(error)
                continue
            found = ranks.judge(Task(Path(folder), prompts, expected, whole_experts))
            return next((one for one in found if one.outcome != "exact"), found[0])
    return _refused_unbuilt(model_type) or Result("not constructible", reason)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; none: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--whole-experts", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the lists into docs/scaling.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    be_quiet()
    ranks, results = Ranks(args.ranks, args.stages), {}
    for model_type in args.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        began = time.monotonic()
        results[model_type] = found = judge(model_type, ranks, args.whole_experts)
        print(f"{model_type:26} {found.outcome:10} {time.monotonic() - began:5.1f} s  {found.reason[:230]}", flush=True)
    ranks.stop()
    if args.write:
        _write(results, args.ranks, args.stages)
    counts = Counter(found.outcome for found in results.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["wrong"] or (not args.types and counts["exact"] < ENOUGH) else 0


def _write(results: dict[str, Result], ranks: int, stages: int) -> None:
    exact: defaultdict[str, list[str]] = defaultdict(list)
    for name, found in results.items():
        if found.outcome == "exact":
            how, _, held = found.reason.partition("; a rank holds ")
            how = how.partition("ranks, by ")[2] if stages == 1 else how.rpartition(", ")[2]
            exact[how].append(f"{name} ({held.partition('%')[0]}%)")
    refused: defaultdict[str, list[str]] = defaultdict(list)
    for name, found in results.items():
        if found.outcome == "refused":
            reason = re.sub(r" differ by [-.0-9e+]+", " differ", found.reason).replace("the checkpoint: ", "")
            refused[reason].append(name)
    counts = Counter(found.outcome for found in results.values())
    kind, where = ("ranks", f"{ranks} ranks") if stages == 1 else ("stages", f"{stages} stages of {ranks} ranks")
    lines = [
        f"On {where}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}. In brackets: how "
        "much of the weights of the tiny model a rank holds.",
        *(
            f"- *{'By' if stages == 1 else 'With'} {how}* ({len(names)}): {', '.join(names)}"
            for how, names in exact.items()
        ),
        "",
        table(["refused", "why"], [[", ".join(names), reason] for reason, names in refused.items()]),
    ]
    stamp = f"`{shlex.join(['python', 'benchmarks/architectures_ranks.py', *sys.argv[1:]])}`, {datetime.date.today()}."
    fill(PAGE, f"architectures-{kind}", "\n".join([*lines, "", stamp]))


if __name__ == "__main__":
    sys.exit(main())
