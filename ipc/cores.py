"""The connections of one frontend to all cores of a daemon.

Each core has a connection and a part of the requests. If a core is lost, its requests go on at the others, with the
tokens that have come so far.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from .codec import Array, decode_value, encode_value
from .config import EngineConfig
from .connection import LOST_POLL_SECONDS, Connection
from .errors import EngineDeadError, MainspringError
from .ledger import Entry
from .media_remote import Failed, RemoteMedia
from .messages import AddRequest, CorePlace, MediaItem, ModelFacts, UtilityResult
from .routing import check_rank, choose, prefix_of
from .transport import address_at, ipc_path, readable

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

# Seconds that a core has to answer again before its requests go elsewhere. If only the connection is lost, it answers
# at once.
MOVE_SECONDS, MOVE_SECONDS_TCP = 0.1, 1.0
# calls that any core can answer for all; the others go to each
ONE_ANSWERS = frozenset({"ping", "check_request", "explain_model", "tokenizer_files", "scale"})
JOIN_TRAINER = "init_weight_transfer_engine"


@dataclass(slots=True)
class _Asked:
    """A call that was sent to all cores."""

    method: str
    args: Sequence[Any]
    arrays: Sequence[Array]
    parts: dict[int, int] = field(default_factory=dict)  # number of a core that has not answered → id of its call
    answers: dict[int, UtilityResult] = field(default_factory=dict)  # by the number of the core


class Cores:
    """Has the interface of a `Connection`, and is used like one.

    Args:
        first: the connection that was made first. It told of the other cores.
    """

    def __init__(self, first: Connection) -> None:
        self._first = first
        self._address = first.address
        self.outputs, self.results = first.outputs, first.results
        self._all = {first.number: first}
        self._leaving: set[int] = set()
        self._asked = {
            call_id: _Asked(method, args, arrays, {first.number: call_id})
            for call_id, method, args, arrays in first.unanswered()
            if not _is_for_one(method, args)
        }
        self._patience = MOVE_SECONDS if ipc_path(self._address) else MOVE_SECONDS_TCP
        self._sockets_before = 0  # of connections that were closed
        self._unseen = False  # changes since the caller has called `receive`
        self.closed = False
        self.num_moved = 0  # requests that have gone on at another core
        self._follow()

    def wait(self, seconds: float) -> None:
        """Wait until all cores answer, for at most so many seconds: some may be dead just now."""
        deadline = time.monotonic() + seconds
        while any(one.ready_at is None for one in self._all.values()) and time.monotonic() < deadline:
            readable(self.fds, LOST_POLL_SECONDS)
            self._update()

    # ------------------------------------------------------------------ as of one connection

    @property
    def model(self) -> ModelFacts:
        return self._first.model

    @property
    def config(self) -> EngineConfig:
        return self._first.config

    @property
    def error(self) -> EngineDeadError | None:
        errors = [one.error for one in self._all.values()]
        return errors[0] if all(errors) else None

    @property
    def cores(self) -> list[CorePlace] | None:
        """None: this object follows the list itself."""
        return None

    @property
    def lost_since(self) -> float | None:
        """Since when no core answers; None: one does."""
        since = [one.lost_since for one in self._all.values()]
        return None if None in since else max(filter(None, since))

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(fd for one in self._all.values() for fd in one.fds)

    @property
    def num_sockets(self) -> int:
        return self._sockets_before + sum(one.num_sockets for one in self._all.values())

    @property
    def poll_seconds(self) -> float | None:
        return min((one.poll_seconds for one in self._all.values() if one.poll_seconds is not None), default=None)

    @property
    def reconnections(self) -> int:
        return self.num_moved + sum(one.reconnections for one in self._all.values())

    @property
    def dropped_frames(self) -> int:
        return sum(one.dropped_frames for one in self._all.values())

    @property
    def is_mine(self) -> bool:
        return self._first.is_mine

    def check_process(self) -> None:
        self._first.check_process()

    # ------------------------------------------------------------------ sending

    def open_media(self, failed: Failed) -> RemoteMedia:
        media = self._first.open_media(failed)
        for one in self._all.values():
            one.media = media
        return media

    def fail_media(self, media: Sequence[MediaItem], error: MainspringError) -> None:
        for one in self._all.values():
            one.fail_media(media, error)

    def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = (), rank: int | None = None) -> None:
        self._update()  # the list of cores may have changed
        present = [number for number in self._all if number not in self._leaving]
        check_rank(rank, present)
        self._choose(request, rank).add_request(request, tensors)

    def abort(self, handles: Sequence[int]) -> None:
        for one in self._all.values():
            if one.error is None:
                one.abort(handles)

    def _choose(self, request: AddRequest, rank: int | None = None) -> Connection:
        if rank is not None:
            return self._all[rank]
        usable = {number: one for number, one in self._all.items() if number not in self._leaving and not one.error}
        serving = {number: one for number, one in usable.items() if one.ready_at is not None}
        able = {number: one for number, one in serving.items() if not one.model.weights_lost}
        among = able or serving or usable or self._all
        cost = len(request.prompt_token_ids) + request.sampling.max_tokens
        return among[choose(prefix_of(request), cost, {number: one.load for number, one in among.items()})]

    def start_call(self, method: str, args: Sequence[Any], arrays: Sequence[Array] = ()) -> int:
        """As of a connection. The result is that of all cores together, see `_joined`."""
        present = {number: one for number, one in self._all.items() if number not in self._leaving and not one.error}
        if _is_for_one(method, args) or not present:
            ready = (one for one in present.values() if one.ready_at is not None)
            any_one = next(ready, next(iter(present.values()), self._first))
            return any_one.start_call(method, args, arrays)
        asked, own = _Asked(method, args, arrays), args
        for number, one in present.items():
            if method == JOIN_TRAINER:
                own = _placed(args, number, 1 + max(present), self.config.parallel_config.num_ranks)
            asked.parts[number] = one.start_call(method, own, arrays)
        call_id = next(self._first.call_ids)
        self._asked[call_id] = asked
        return call_id

    def end_call(self, call_id: int) -> None:
        asked = self._asked.pop(call_id, None)
        for one in self._all.values():
            for part in [call_id] if asked is None else asked.parts.values():
                one.end_call(part)
        self.results.pop(call_id, None)

    # ------------------------------------------------------------------ receiving

    def receive(self) -> bool:
        self._update()
        changed, self._unseen = self._unseen, False
        return changed

    def _update(self) -> None:
        changed = [one.receive() for one in self._all.values()]
        if any(changed) or self._leaving or any(one.ready_at is None for one in self._all.values()):
            followed, moved = self._follow(), self._move()
            if moved:  # requests were sent, and each send is followed by this
                changed += [one.receive() for one in self._all.values()]
            self._join()
            self._unseen = self._unseen or any(changed) or followed or moved

    def _follow(self) -> bool:
        """Connect to cores that are new, and leave those that take no more requests."""
        followed = False
        for one in list(self._all.values()):
            told, one.cores = one.cores, None
            if told is None:
                continue
            where = {core.number: core.place for core in told} or {one.number: ""}
            for number in where.keys() - self._all.keys():
                self._all[number] = new = self._first.beside(number, address_at(self._address, where[number]))
                for asked in self._asked.values():  # calls that the other cores have not all answered yet
                    if asked.method != JOIN_TRAINER:  # its group has no place for a further core
                        asked.parts[number] = new.start_call(asked.method, asked.args, asked.arrays)
            if one.number in where:  # else it has just started, or it leaves; others know more
                self._leaving = self._all.keys() - where.keys()
            followed = True
        return followed

    def _move(self) -> bool:
        """Let the requests of lost cores go on at others, and forget cores that have left."""
        now, moved = time.monotonic(), False
        for number, one in list(self._all.items()):
            leaving = number in self._leaving or one.error is not None
            others = [
                other.ready_at
                for at, other in self._all.items()
                if at != number and at not in self._leaving and other.ready_at is not None
            ]
            lost = one.ready_at is None and bool(others)
            if lost and (leaving or now - max(one.lost_at, min(others)) > self._patience):
                moved = self._hand_over(one.give_up()) or moved
            if leaving and (lost or one.is_idle) and len(self._all) > 1:
                self._forget(number)
                moved = True
        return moved

    def _hand_over(self, entries: list[Entry]) -> bool:
        for entry in entries:
            self._choose(entry.request).take_over(entry)
        if entries:
            self.num_moved += len(entries)
            logger.info("%d requests go on at other cores", len(entries))
        return bool(entries)

    def _forget(self, number: int) -> None:
        one = self._all.pop(number)
        self._leaving.discard(number)
        self._sockets_before += one.num_sockets + 1
        parts = {asked.parts.pop(number, None) for asked in self._asked.values()}
        if alone := one.open_calls - parts:  # they were asked of this core only
            among = [other for other in self._all.values() if other.error is None] or list(self._all.values())
            next((other for other in among if other.ready_at is not None), among[0]).take_over_calls(one, alone)
        one.leave()

    def _join(self) -> None:
        """Make one result of the results of all cores."""
        for call_id, asked in list(self._asked.items()):
            for number in [number for number, part in asked.parts.items() if part in self.results]:
                asked.answers[number] = self.results.pop(asked.parts.pop(number))
            if not asked.parts:
                del self._asked[call_id]
                answers = [asked.answers[number] for number in sorted(asked.answers)]
                failed = next((answer for answer in answers if answer.error), None)
                values = [decode_value(answer.result) for answer in answers if not answer.error]
                joined = _joined(asked.method, values) if values and not failed else None
                self.results[call_id] = replace(failed or UtilityResult(0, encode_value(joined)), call_id=call_id)

    def close(self) -> None:
        if self.closed or not self.is_mine:
            return
        self.closed = True
        for one in self._all.values():
            one.leave()
        self._first.end_core()


def _is_for_one(method: str, args: Sequence[Any]) -> bool:
    return method in ONE_ANSWERS or (method == "collective_rpc" and "save_sharded_state" in args[:1])


def _joined(method: str, values: list[Any]) -> Any:
    """The result of a call to all cores: lists one after another, of truth values whether all are true, of different
    texts one in each line, and otherwise the first."""
    first = values[0]
    if method == "stats":
        return values
    if isinstance(first, list):
        return [item for value in values for item in value]
    if isinstance(first, bool):
        return all(values)
    if isinstance(first, str):
        return "\n".join(dict.fromkeys(values))
    return first


def _placed(args: Sequence[Any], number: int, cores: int, ranks: int) -> list[Any]:
    """The arguments of `init_weight_transfer_engine` for core `number`, which has places of its own in the trainer's
    group: one for each of its ranks, or one if there are no more."""
    info = {"rank_offset": 1, "world_size": 2, **args[0]}
    first, size = info["rank_offset"], info["world_size"]
    if not (info.get("master_address") and isinstance(first, int) and isinstance(size, int)):
        return list(args)  # there is no group, or the core says what is wrong
    places = max(1, min(ranks, (size - first) // cores))
    return [{**info, "rank_offset": first + number * places, "places": places}]
