"""Weights that arrive between `start_weight_update` and `finish_weight_update`: from a frontend, or from a trainer.

Requests go on with the present weights meanwhile. The new ones are held in host memory, and replace the present ones
all at once when the update is finished. An update that ends in another way changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from ...ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError
from ..plan.control import JoinTrainer, LeaveTrainer, ParameterRows, ReceiveParameters, SetParameters, Worker

DTYPES = ("float32", "float16", "bfloat16")

Later = Callable[[Future[Any], Callable[[Future[Any]], None]], None]


class InitInfo(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How weights will come: from the trainer's group at an address, or else from frontends. The names are vLLM's."""

    master_address: str | None = None
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    rank_offset: Annotated[int, msgspec.Meta(ge=1)] = 1  # the worker's rank; the trainer is 0
    world_size: Annotated[int, msgspec.Meta(ge=2)] = 2
    places: Annotated[int, msgspec.Meta(ge=1)] | None = None  # for this core; None: all from rank_offset on
    packed: bool = False  # whether several tensors come as one
    packed_buffer_size_bytes: int = 0  # without effect
    packed_num_buffers: int = 0  # without effect


@dataclass(slots=True)
class _Started:
    """An update that is not finished."""

    frontend: int
    rows: list[ParameterRows]
    receiving: bool = False  # whether the trainer is sending


class HeldWeights:
    """The unfinished update of a core, if there is one.

    Args:
        later: as for `Adapters`.
    """

    def __init__(self, worker: Worker, later: Later) -> None:
        self._worker, self._later = worker, later
        self._started: _Started | None = None
        self._era = 0  # how many updates and groups were given up; an answer of an earlier era is for nobody
        self._last = ReceiveParameters([], [], [])  # what was last received

    def join(self, info: Any) -> Future[None] | None:
        """Join the trainer's group that `info` names, an `InitInfo` as a dict. The future is done when all its ranks
        have joined. An unfinished update is dropped.

        Raises:
            InvalidArgumentError: `info` is none.
            NotSupportedError: the trainer would pack several tensors into one.
        """
        try:
            wanted = msgspec.convert(info, InitInfo)
        except msgspec.ValidationError as error:
            raise InvalidArgumentError(f"init_info: {error}") from None
        if wanted.packed:
            raise NotSupportedError("init_info has packed=True, but tensors come one by one here; set packed=False")
        if (wanted.master_address is None) != (wanted.master_port is None):
            raise InvalidArgumentError("init_info has one of master_address and master_port; give both or none")
        if wanted.rank_offset >= wanted.world_size:
            raise InvalidArgumentError(
                f"init_info has rank_offset {wanted.rank_offset}, which is no rank of {wanted.world_size}"
            )
        self.end()
        self._last = ReceiveParameters([], [], [])
        if wanted.master_address is None or wanted.master_port is None:
            return None
        places = wanted.places or wanted.world_size - wanted.rank_offset
        place = wanted.master_address, wanted.master_port, wanted.rank_offset, wanted.world_size, places
        return self._answer(self._worker.control(JoinTrainer(*place)), lambda _: None)

    def start(self, frontend: int) -> None:
        """Begin an update.

        Raises:
            InvalidRequestError: another one is not finished, or the weights sleep or are quantized.
        """
        if self._started is not None:
            raise InvalidRequestError("a weight update is active already: call finish_weight_update first")
        self._worker.control(SetParameters([]))  # raises if the weights can't be replaced
        self._started = _Started(frontend, [])

    def hold(self, frontend: int, names: list[str], starts: list[int], arrays: Sequence[np.ndarray]) -> None:
        """Hold rows of parameters.

        Raises:
            InvalidRequestError: no update was started, or the lists are not of one length.
        """
        self._of(frontend).rows.extend(rows_of(names, starts, arrays))

    def receive(self, frontend: int, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> Future[None]:
        """Receive parameters that the trainer broadcasts in this order; without names, those of the last time. After an
        error the update is dropped and the trainer's group is closed.

        Raises:
            InvalidArgumentError: the lists are not of one length, or have another dtype or a negative size.
            InvalidRequestError: no update was started, the trainer is sending already, or there is no trainer.
        """
        started = self._of(frontend)
        if started.receiving:
            raise InvalidRequestError("the trainer is sending weights already: wait for the answer")
        record = ReceiveParameters(names, dtypes, shapes) if names else self._last
        try:
            _check(record)
            received = self._worker.control(record)
        except Exception:
            self.end()
            raise
        self._last = record
        started.receiving = True

        def take(rows: list[ParameterRows]) -> None:
            started.receiving = False
            started.rows.extend(rows)

        return self._answer(received, take)

    def take(self, frontend: int) -> list[ParameterRows]:
        """End the update, and return what was held.

        Raises:
            InvalidRequestError: no update was started, nothing has come, or the trainer is still sending.
        """
        started = self._of(frontend)
        if started.receiving or not started.rows:
            why = "the trainer is still sending them" if started.receiving else "none were sent"
            raise InvalidRequestError(f"the weights can't be set: {why}")
        self._started = None
        return started.rows

    def end(self) -> None:
        """Drop an unfinished update, and leave the trainer's group."""
        self._started = None
        self._era += 1
        self._worker.control(LeaveTrainer())

    def forget(self, frontend: int) -> None:
        """A frontend has left: its unfinished update is dropped."""
        if self._started is not None and self._started.frontend == frontend:
            self.end()

    def _of(self, frontend: int) -> _Started:
        if self._started is None or self._started.frontend != frontend:
            whose = "" if self._started is None else "; that of another frontend is active"
            raise InvalidRequestError(f"no weight update was started{whose}: call start_weight_update first")
        return self._started

    def _answer(self, future: Future[Any], take: Callable[[Any], None]) -> Future[None]:
        """A future that is done in the core's thread, once `take` has got the result of the other one."""
        answer, era = Future[None](), self._era

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if self._era != era:
                error = InvalidRequestError("the weight update was dropped while the core waited for the trainer")
            elif error is None:
                take(done.result())
            else:
                self.end()
            if answer.set_running_or_notify_cancel():
                answer.set_result(None) if error is None else answer.set_exception(error)

        self._later(future, settle)
        return answer


def rows_of(names: list[str], starts: list[int], arrays: Sequence[np.ndarray]) -> list[ParameterRows]:
    """Raises `InvalidRequestError` if these are not of one length."""
    if not len(names) == len(starts) == len(arrays):
        raise InvalidRequestError(f"{len(names)} names, {len(starts)} places and {len(arrays)} arrays")
    return [ParameterRows(*one) for one in zip(names, starts, arrays, strict=True)]


def _check(record: ReceiveParameters) -> None:
    if not len(record.names) == len(record.dtypes) == len(record.shapes):
        raise InvalidArgumentError(
            f"{len(record.names)} names, {len(record.dtypes)} dtype_names and {len(record.shapes)} shapes"
        )
    for name, dtype, shape in zip(record.names, record.dtypes, record.shapes, strict=True):
        if dtype not in DTYPES:
            raise InvalidArgumentError(f"{name} has dtype {dtype!r:.80}; it must be one of {', '.join(DTYPES)}")
        if any(size < 0 for size in shape):
            raise InvalidArgumentError(f"{name} has shape {shape}, with a negative size")
