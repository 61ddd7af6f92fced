"""The journal: memory shared by supervisor and core, with the requests of the steps in flight and the core's phase.

It is an anonymous file that both processes map; the supervisor owns it, so it outlives the core. The core writes a
step's requests before it launches the step, so that the supervisor knows them however the core dies.

A request keeps its key across cores: `request_key` of its frontend's session and its handle.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Collection, Iterable
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from .errors import InvalidArgumentError

STEPS = 4  # slots for steps, at least as many as can be in flight
MAX_SUSPECTS = 4096  # slots for suspects; further ones are not recorded

_HEAD = np.dtype([("phase", "<i8"), ("num_suspects", "<i8")])
_STEP = np.dtype([("in_flight", "<i8"), ("solo", "<i8"), ("rows", "<i8")])


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
        size = _size(max_num_seqs, workers)
        if os.fstat(fd).st_size < size:
            raise InvalidArgumentError(f"the journal has {os.fstat(fd).st_size} bytes; {size} are needed")
        self._map = mmap.mmap(fd, size)
        at = 0

        def column(dtype: np.dtype | str, *shape: int) -> np.ndarray:
            nonlocal at
            array = np.ndarray(shape, dtype, self._map, at)
            at += array.nbytes
            return array

        self._head = column(_HEAD, 1)
        self._beats = column("<f8", workers)
        self._steps = column(_STEP, STEPS)
        self._keys = column("<u8", STEPS, max_num_seqs)
        self._positions = column("<i8", STEPS, max_num_seqs)
        self._suspects = column("<u8", MAX_SUSPECTS)

    @classmethod
    def create(cls, max_num_seqs: int, workers: int = 1) -> Journal:
        with tempfile.TemporaryFile(prefix="mainspring-journal-") as file:
            file.truncate(_size(max_num_seqs, workers))
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
        self.beat()

    def retired(self, step: int) -> None:
        """Remove step number `step`, which has succeeded."""
        self._steps["in_flight"][step % STEPS] = 0
        self.beat()

    def set_suspects(self, keys: Collection[int]) -> None:
        """Set the requests that still have to be computed in steps of their own."""
        kept = sorted(keys)[:MAX_SUSPECTS]
        self._head["num_suspects"] = 0
        self._suspects[: len(kept)] = kept
        self._head["num_suspects"] = len(kept)

    # ------------------------------------------------------------------ the supervisor reads

    @property
    def phase(self) -> Phase:
        return Phase(int(self._head["phase"][0]))

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat of the worker that has been silent longest."""
        return time.monotonic() - float(self._beats.min())

    def accused(self) -> list[Accused]:
        """The requests of all steps that were in flight."""
        found = []
        for slot, (in_flight, solo, rows) in enumerate(self._steps.tolist()):
            if in_flight:
                rows = zip(self._keys[slot, :rows].tolist(), self._positions[slot, :rows].tolist(), strict=True)
                found += [Accused(key, position, bool(solo)) for key, position in rows]
        return found

    def suspects(self) -> list[int]:
        return list(map(int, self._suspects[: int(self._head["num_suspects"][0])]))

    def clear(self, suspects: Iterable[int]) -> None:
        """Reset for the next core, which starts with these suspects."""
        self._steps["in_flight"] = 0
        self.set_suspects(set(suspects))
        self._beats[:] = time.monotonic()
        self.set_phase(Phase.STARTING)


def _size(max_num_seqs: int, workers: int) -> int:
    return _HEAD.itemsize + 8 * workers + STEPS * (_STEP.itemsize + 16 * max_num_seqs) + 8 * MAX_SUSPECTS
