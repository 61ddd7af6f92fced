"""What planner and worker tell each other of memory, as plain data."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import numpy as np


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers of one kind that share a block table or a state slot: what the worker tells the planner about them."""

    kind: Literal["full", "windowed", "fixed", "recurrent"]
    layers: tuple[int, ...] = ()  # indices into the worker's list of layers that own memory
    token_bytes: int = 0  # memory of one token in all these layers; recurrent: memory of one state
    window: int | None = None  # windowed: tokens that a query sees, itself included
    length: int = 0  # fixed: tokens of this memory that each request has
    slots: int = 0  # recurrent: states of running requests, one for each slot of the scheduler
    snapshots: int = 0  # recurrent: further states, for the prefix cache
    backups: bool = True  # recurrent: as many further states, for steps that verify guesses
    prompts_only: bool = False  # recurrent: a generated token leaves another state than the same token of a prompt
    chunk: int = 1  # recurrent: tokens; a prompt is cut at multiples of it
    snapshot_every: int = 1024  # recurrent: tokens of a prompt from one snapshot to the next
    host_snapshots: int = 0  # recurrent: states in host memory, for snapshots that were evicted


class TableUpdate(NamedTuple):
    """Entries of the block tables that changed: all int32, of one length."""

    group: np.ndarray
    slot: np.ndarray
    column: np.ndarray
    block: np.ndarray


NO_TABLES = TableUpdate(*np.zeros((4, 0), np.int32))


class Copies(NamedTuple):
    """Whole blocks, or states, to copy before a step computes anything, all saves first. Each is (block of the pool or
    state slot, host slot)."""

    saves: list[tuple[int, int]]
    loads: list[tuple[int, int]]


NO_COPIES = Copies([], [])


class StateCopies(NamedTuple):
    """Copies between state slots that belong to a step. Each is int32 ``[2, copies]``: from, to."""

    restores: np.ndarray  # made first, but for `host`
    backups: np.ndarray  # made next, before anything is computed
    snapshots: np.ndarray  # made when the step has been computed
    host: Copies = NO_COPIES  # between state slots and host memory, before all others


NO_STATE_COPIES = StateCopies(*np.empty((3, 2, 0), np.int32))
