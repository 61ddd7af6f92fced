"""What planner and worker tell each other of memory, as plain data."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class KVGroup(NamedTuple):
    """Layers that share a block table."""

    window: int | None  # tokens a query sees, itself included; None: all
    layers: tuple[int, ...]  # indices into the model's attention calls


class TableUpdate(NamedTuple):
    """Entries of the block tables that changed: all int32, of one length."""

    group: np.ndarray
    slot: np.ndarray
    column: np.ndarray
    block: np.ndarray


class Copies(NamedTuple):
    """Whole blocks to copy before a step computes anything, all saves first. Each is (block of the pool, host slot)."""

    saves: list[tuple[int, int]]
    loads: list[tuple[int, int]]


NO_COPIES = Copies([], [])
