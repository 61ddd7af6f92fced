"""Processes that are the ranks of one group, and run functions of tests together."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 120


class RankPool:
    """`size` processes with a `RankGroup`. A function that all run gets the group as its first argument."""

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, str(folder / "store"), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of all ranks. An error of one is raised here."""
        for pipe in self._pipes:
            pipe.send((function, args))
        found = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} does not answer"
            found.append(pipe.recv())
        failed = [text for text, _ in found if text]
        assert not failed, failed[0]
        return [result for _, result in found]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _work(rank: int, size: int, store: str, pipe: Connection) -> None:
    import torch

    from mainspring.core.parallel.group import RankGroup

    torch.set_num_threads(1)
    group = RankGroup(rank, size, f"file://{store}", torch.device("cpu"), TIMEOUT_S)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(("", function(group, *args)))
        except Exception:
            pipe.send((f"rank {rank}: {traceback.format_exc()}", None))
