"""What a worker gets from a trainer's process group. Threads wait for the trainer, so that steps go on meanwhile."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from ...ipc.errors import InvalidRequestError, OutOfMemoryError
from ..plan.control import JoinTrainer, ParameterRows, ReceiveParameters
from .device import array_of
from .trainer_group import TrainerGroup, in_thread


class WeightReceiver:
    """The worker's place in a trainer's group, if it has one.

    Args:
        keeps: whether it wants what it receives. Of several ranks one passes it on to all.
    """

    def __init__(self, keeps: bool = True) -> None:
        self._keeps = keeps
        self._groups: list[TrainerGroup] = []  # none, or one, which the thread of `join` adds

    def join(self, record: JoinTrainer) -> Future[None]:
        """See `control.JoinTrainer`."""
        groups: list[TrainerGroup] = []
        self._groups = groups
        return in_thread(_join, record, groups)

    def leave(self) -> None:
        """See `control.LeaveTrainer`."""
        self._groups = []

    def receive(self, record: ReceiveParameters) -> Future[list[ParameterRows]]:
        """See `control.ReceiveParameters`."""
        if not self._groups:
            raise InvalidRequestError("no trainer is connected: call init_weight_transfer_engine first")
        return in_thread(_receive, self._groups[0], record, self._keeps)


def _join(record: JoinTrainer, groups: list[TrainerGroup]) -> None:
    groups.append(TrainerGroup(record.address, record.port, record.rank, record.world_size))


def _receive(group: TrainerGroup, record: ReceiveParameters, keeps: bool) -> list[ParameterRows]:
    rows = []
    try:
        for name, dtype, shape in zip(record.names, record.dtypes, record.shapes, strict=True):
            try:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            except RuntimeError as error:
                raise OutOfMemoryError(f"the weights that arrive do not fit in host memory: {error}") from None
            group.broadcast(tensor)
            if keeps:
                rows.append(ParameterRows(name, 0, array_of(tensor)))
    except BaseException:
        group.close()  # the trainer waits no longer
        raise
    return rows
