"""The journal: memory shared by supervisor and core, with the requests of the steps in flight and the core's phase.

It is an anonymous file that both processes map; the supervisor owns it, so it outlives the core. The core writes a
step's requests before it launches the step, so that the supervisor knows them however the core dies.

A request keeps its key across cores: `request_key` of its frontend's session and its handle.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Collection, Iterable
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .errors import InvalidArgumentError

STEPS = 16  # slots for steps, at least as many as can be in flight
LAG_SECONDS = 2.5  # a worker whose last heartbeat is so much older than another one's is silent; all beat each second
MAX_SUSPECTS = 4096  # slots for suspects; further ones are not recorded


class Phase(IntEnum):
    """What a core is doing. The watchdog acts only in the phases SERVING and DRAINING."""

    STARTING = 0
    LOADING = 1
    CAPTURING = 2  # CUDA graphs
    SERVING = 3
    CALLING = 4  # a utility call, which may take any time
    DRAINING = 5  # finishing the last requests before the end


class Accused(NamedTuple):
    """A request that a core was computing when it died."""

    key: int
    position: int  # output position of the token being computed
    solo: bool  # whether the step computed this request alone, as a suspect


def request_key(session: bytes, handle: int) -> int:
    """The 64-bit key of a request, the same under every core: BLAKE2b of the session and the big-endian handle."""
    return int.from_bytes(blake2b(session + handle.to_bytes(8, "big"), digest_size=8).digest(), "big")


class Journal:
    """One mapped file. `create` makes it, in the supervisor; the core maps it by its descriptor.

    Args:
        workers: processes of the core that run the model, each with its own heartbeat; the planner writes the rest.
    """

    def __init__(self, fd: int, max_num_seqs: int, workers: int = 1) -> None:
        self.fd = fd
        layout = _layout(max_num_seqs, workers)
        if (size := os.fstat(fd).st_size) < layout.itemsize:
            raise InvalidArgumentError(f"the journal has {size} bytes; {layout.itemsize} are needed")
        memory = np.ndarray((), layout, mmap.mmap(fd, layout.itemsize))
        self._head, self._beats, self._steps = memory["head"], memory["beats"], memory["steps"]
        self._keys, self._positions, self._suspects = memory["keys"], memory["positions"], memory["suspects"]
        self._ranks = memory["ranks"]
        self._counts = memory["num_suspects"]

    @classmethod
    def create(cls, max_num_seqs: int, workers: int = 1) -> Journal:
        with tempfile.TemporaryFile(prefix="mainspring-journal-") as file:
            file.truncate(_layout(max_num_seqs, workers).itemsize)
            return cls(os.dup(file.fileno()), max_num_seqs, workers)

    def close(self) -> None:
        """Close the file. The mapping ends with the object."""
        os.close(self.fd)

    # ------------------------------------------------------------------ the core writes

    def set_phase(self, phase: Phase) -> None:
        self.beat()
        self._head["phase"] = phase

    def beat(self, worker: int = 0) -> None:
        """The main loop of a worker process is alive. Worker 0 is in the planner's process."""
        self._beats[worker] = time.monotonic()

    def set_pid(self, worker: int) -> None:
        """This process is that worker's."""
        self._ranks["pid"][worker] = os.getpid()

    def begun(self, worker: int, step: int) -> None:
        """A worker has begun to compute this step."""
        self._ranks["step"][worker] = step
        self.beat(worker)

    def launched(self, step: int, keys: np.ndarray, positions: np.ndarray, solo: bool) -> None:
        """Record a step, before it is launched.

        Args:
            step: number of the step.
            keys: of its requests, uint64 ``[requests]``.
            positions: output positions of the tokens being computed, int64 ``[requests]``.
            solo: whether the step computes a single suspect.
        """
        slot, rows = step % STEPS, len(keys)
        self._keys[slot, :rows] = keys
        self._positions[slot, :rows] = positions
        self._steps[slot] = (1, solo, rows)
        self.begun(0, step)

    def retired(self, step: int) -> None:
        """Remove step number `step`, which has succeeded."""
        self._steps["in_flight"][step % STEPS] = 0
        self.beat()

    def set_suspects(self, keys: Collection[int]) -> None:
        """Set the requests that still have to be computed in steps of their own. The list before it stays whole until
        this one is, because the supervisor reads at any time."""
        kept, version = sorted(keys)[:MAX_SUSPECTS], int(self._head["version"]) + 1
        self._suspects[version % 2, : len(kept)] = kept
        self._counts[version % 2] = len(kept)
        self._head["version"] = version

    def set_heard(self, number: int) -> None:
        """Record, after `set_suspects`, up to which message the core has taken in what its supervisor tells it."""
        self._head["heard"] = number

    # ------------------------------------------------------------------ the supervisor reads

    @property
    def phase(self) -> Phase:
        return Phase(int(self._head["phase"]))

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat of the worker that has been silent longest."""
        return time.monotonic() - float(self._beats.min())

    def behind(self) -> str:
        """Which of several workers, here called ranks, holds the others up. Empty if none stands out."""
        pids, steps, beats = self._ranks["pid"].tolist(), self._ranks["step"].tolist(), self._beats.tolist()
        found = []
        for rank, (pid, step, beat) in enumerate(zip(pids, steps, beats, strict=True)):
            if len(pids) > 1 and _is_stopped(pid):
                found.append(f"rank {rank} (pid {pid}) is stopped")
            elif step < max(steps):
                found.append(f"rank {rank} (pid {pid}) is at step {step}, others at {max(steps)}")
            elif beat < max(beats) - LAG_SECONDS:
                found.append(f"rank {rank} (pid {pid}) is silent")
        return "; ".join(found)

    def accused(self) -> list[Accused]:
        """The requests of all steps that were in flight."""
        found = []
        for slot, (in_flight, solo, rows) in enumerate(self._steps.tolist()):
            if in_flight:
                rows = zip(self._keys[slot, :rows].tolist(), self._positions[slot, :rows].tolist(), strict=True)
                found += [Accused(key, position, bool(solo)) for key, position in rows]
        return found

    def suspects(self) -> list[int]:
        while True:
            version = int(self._head["version"])
            found = list(map(int, self._suspects[version % 2, : int(self._counts[version % 2])]))
            if version == self._head["version"]:
                return found

    @property
    def heard(self) -> int:
        """The number of the last message of the supervisor that the core has taken in."""
        return int(self._head["heard"])

    def clear(self, suspects: Iterable[int]) -> None:
        """Reset for the next core, which starts with these suspects."""
        self._steps["in_flight"] = 0
        self.set_suspects(set(suspects))
        self.set_heard(0)
        self._beats[:] = time.monotonic()
        self._ranks[:] = 0
        self.set_phase(Phase.STARTING)


def _layout(max_num_seqs: int, workers: int) -> np.dtype:
    return np.dtype(
        [
            ("head", [("phase", "<i8"), ("version", "<i8"), ("heard", "<i8")]),
            ("beats", "<f8", (workers,)),  # time of each worker's last heartbeat
            ("steps", [("in_flight", "<i8"), ("solo", "<i8"), ("rows", "<i8")], STEPS),
            ("keys", "<u8", (STEPS, 2 * max_num_seqs)),  # those that run, and as many that wait for media it encodes
            ("positions", "<i8", (STEPS, 2 * max_num_seqs)),
            ("num_suspects", "<i8", 2),
            ("suspects", "<u8", (2, MAX_SUSPECTS)),  # the list of this version, and the one before
            ("ranks", [("pid", "<i8"), ("step", "<i8")], (workers,)),
        ]
    )


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal. Known on Linux only."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
