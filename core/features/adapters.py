"""The adapters that frontends use: maps each frontend's adapter numbers to the adapters that were read.

Each frontend has its own numbers. Adapters are identified by the digest of their content, so that two frontends share
one copy. A thread reads an adapter's folder; meanwhile the requests that need it are registered but not queued. If all
of them end before its turn comes, the folder is not read. The supervisor gets a list of the adapters that frontends
added or pinned, and the next core loads them again. Other adapters come with the requests.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ...ipc.adapters import LoRARequest
from ...ipc.config import LoRAConfig
from ...ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError, OverloadedError
from ...ipc.messages import Adapter, AddRequest, HeldAdapter
from ..calls import Caller
from ..plan.control import AdapterFacts, DropAdapter, PrepareAdapter, Worker
from ..plan.request import LoRAName, Request
from ..plan.scheduler import Scheduler
from .adapter_slots import LoRAs

logger = logging.getLogger(__name__)

MAX_BOUND = 4096  # numbers of all frontends together, to limit memory; the least recently used one is forgotten

Wait = tuple[Future[Any], Callable[[Any], None]]  # a result that a request waits for, and its consumer


@dataclass(slots=True)
class _Bound:
    """The adapter that a frontend's number stands for."""

    adapter: Adapter
    digest: bytes
    held: bool = False  # added by `add` or `pin`: the next core loads it again
    pinned: bool = False
    gone: bool = False  # whether the frontend is disconnected


@dataclass(slots=True, eq=False)
class _Read:
    """An adapter that the worker reads, or is to read when it is the frontend's turn."""

    number: int
    future: Future[AdapterFacts]
    waiting: int = 0  # requests and calls that need it; if there are none any more, it is dropped


class Adapters:
    """All adapters of a core.

    Args:
        worker: reads the folders, and keeps LoRA adapters under numbers that this class assigns.
        later: takes a future and a callback, and calls the callback in the core's thread once the future is done.
    """

    def __init__(
        self,
        config: LoRAConfig,
        worker: Worker,
        scheduler: Scheduler,
        later: Callable[[Future[Any], Callable[[Future[Any]], None]], None],
    ) -> None:
        self.on_held: Callable[[], None] = lambda: None  # called after each change of `held`
        self._config, self._worker = config, worker
        self._scheduler, self._later = scheduler, later
        self._kept = config.max_loras if config.max_cpu_loras is None else config.max_cpu_loras
        self._next_number = 1
        self._bound: OrderedDict[tuple[bytes, int], _Bound] = OrderedDict()
        self._reading: dict[tuple[bytes, Adapter], _Read] = {}
        self._waiting: defaultdict[Request | Future[bool], list[tuple[bytes, Adapter, _Read]]] = defaultdict(list)
        self._rereading = False
        self._prompt_adapters: OrderedDict[tuple[bytes, Adapter], AdapterFacts] = OrderedDict()
        self._slots: LoRAs | None = None
        if worker.facts.has_adapters:
            self._slots = LoRAs(config.max_loras, self._kept, self._protected, self._read_again, self._unload)
            self._slots.has_credit = lambda request: scheduler.fair.of(request.frontend).credit
            scheduler.attach(self._slots)

    def _unload(self, number: int) -> None:
        self._worker.control(DropAdapter(number))

    @property
    def _loras(self) -> LoRAs:
        if self._slots is None:
            raise NotSupportedError("this core serves no LoRA adapters: start it with enable_lora=True")
        return self._slots

    # ------------------------------------------------------------------ requests

    def prepare(self, request: Request, message: AddRequest, owner: bytes) -> list[Wait]:
        """Set the adapters of a request of the frontend `owner`, if they have been read. Returns the reads that the
        request has to wait for.

        Raises:
            MainspringError: the request can't use these adapters.
        """
        waits: list[Wait] = []
        if (lora := message.lora) is not None:
            _check_lora(lora)
            known = self._loras and self._find(owner, lora)
            if known:
                request.use_lora(LoRAName(known.digest, lora))
            else:
                read = self._read(owner, lora, request.frontend, request)
                waits.append((read.future, partial(self._give_lora, request, owner, lora, read)))
        if (prompt := message.prompt_adapter) is not None:
            if (found := self._prompt_adapters.get((owner, prompt))) is not None:
                self._prompt_adapters.move_to_end((owner, prompt))
                request.use_embeds(_embeddings(found), b"virtual", found.digest)
            else:
                read = self._read(owner, prompt, request.frontend, request)
                waits.append((read.future, partial(self._give_virtual_tokens, request, owner, prompt)))
        return waits

    def leave(self, waiter: Request | Future[bool]) -> None:
        """A request or a call of `add` has ended. Drop what was to be read for it alone."""
        for owner, adapter, read in self._waiting.pop(waiter, ()):
            read.waiting -= 1
            if not read.waiting and self._reading.get((owner, adapter)) is read:
                del self._reading[owner, adapter]
                self._unload(read.number)

    def _give_lora(self, request: Request, owner: bytes, adapter: Adapter, read: _Read, found: AdapterFacts) -> None:
        if read.waiting:
            self._keep(owner, adapter, found.digest, read.number)
            request.use_lora(LoRAName(found.digest, adapter))

    def _give_virtual_tokens(self, request: Request, owner: bytes, adapter: Adapter, found: AdapterFacts) -> None:
        self._prompt_adapters[owner, adapter] = found
        if len(self._prompt_adapters) > self._config.max_prompt_adapters:
            self._prompt_adapters.popitem(last=False)
        request.use_embeds(_embeddings(found), b"virtual", found.digest)

    def _load(self, adapter: Adapter, frontend: int = 0) -> tuple[int, Future[AdapterFacts]]:
        """Let the worker read an adapter. Returns its new number, and the future of the read."""
        number = self._next_number
        self._next_number += 1
        return number, self._worker.control(PrepareAdapter(number, adapter, frontend))

    def _read(self, owner: bytes, adapter: Adapter, frontend: int, waiter: Request | Future[bool]) -> _Read:
        """Like `_load`, but requests that wait for the same adapter share one read. It is dropped if they `leave`."""
        if (read := self._reading.get((owner, adapter))) is None:
            read = self._reading[owner, adapter] = _Read(*self._load(adapter, frontend))
            self._later(read.future, partial(self._end_reading, owner, adapter, read))
        read.waiting += 1
        self._waiting[waiter].append((owner, adapter, read))
        return read

    def _end_reading(self, owner: bytes, adapter: Adapter, read: _Read, done: Future[AdapterFacts]) -> None:
        if not read.waiting:  # it was dropped
            return
        del self._reading[owner, adapter]
        if adapter.num_virtual_tokens or done.exception() is not None:  # one of several ranks may have read it
            self._unload(read.number)
        else:
            self._loras.put(done.result().digest, read.number)  # some who waited for it may have gone

    def _read_again(self, request: Request) -> None:
        """Load the adapter of a request again, because it was evicted while the request waited."""
        if not self._rereading:
            self._rereading = True
            assert request.lora is not None
            number, future = self._load(request.lora.adapter)
            self._later(future, partial(self._take_again, request, number))

    def _take_again(self, request: Request, number: int, done: Future[AdapterFacts]) -> None:
        self._rereading = False
        self._scheduler.wake()
        error, lora = done.exception(), request.lora
        assert lora is not None
        if error is None and done.result().digest == lora.digest:
            self._loras.put(lora.digest, number)
            return
        self._unload(number)
        if request.slot < 0:
            changed = f"the LoRA adapter {lora.adapter.path!r} was changed while it was in use; give it another number"
            self._scheduler.fail(request, error if isinstance(error, Exception) else InvalidRequestError(changed))

    # ------------------------------------------------------------------ numbers

    def _find(self, owner: bytes, adapter: Adapter) -> _Bound | None:
        bound = self._bound.get((owner, adapter.number))
        if bound is not None:
            if bound.adapter.path != adapter.path:
                raise InvalidRequestError(
                    f"lora_int_id {adapter.number} is the adapter {bound.adapter.path!r} already, not "
                    f"{adapter.path!r}: give that another one, or remove_lora({adapter.number}) first"
                )
            self._bound.move_to_end((owner, adapter.number))
        return bound

    def _keep(self, owner: bytes, adapter: Adapter, digest: bytes, number: int) -> tuple[_Bound, bool]:
        """Bind the frontend's number to the adapter that the worker has read under `number`. Returns the binding, and
        whether the adapter is in memory."""
        is_there = self._loras.put(digest, number)
        bound = self._find(owner, adapter)
        if bound is None:
            bound = self._bound[owner, adapter.number] = _Bound(adapter, digest)
            if len(self._bound) > MAX_BOUND:
                self._bound.popitem(last=False)
        bound.digest = digest
        return bound, is_there

    def _protected(self) -> set[bytes]:
        return {*self._pinned()[: self._kept - 1]}  # reconnected frontends may have pinned more in total

    def _pinned(self) -> list[bytes]:
        return list(dict.fromkeys(one.digest for one in self._bound.values() if one.pinned and not one.gone))

    def set_gone(self, owner: bytes, gone: bool) -> None:
        """Note whether a frontend is disconnected. Adapters pinned by a disconnected frontend may be evicted."""
        for (name, _), bound in self._bound.items():
            if name == owner:
                bound.gone = gone

    # ------------------------------------------------------------------ what frontends call

    def add(self, caller: Caller, values: Any) -> Future[bool]:
        """Load a LoRA adapter into memory. values: the fields of `Adapter`. The future gets True once it is loaded.

        Raises:
            MainspringError: the adapter can't be served, or there is no room. Raised here or set in the future.
        """
        loras = self._loras
        try:
            adapter = msgspec.convert(values, Adapter)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"a LoRA adapter is given wrongly: {error}") from None
        _check_lora(adapter)
        owner, added = caller.owner, Future[bool]()
        bound = self._find(owner, adapter)
        if bound is not None and bound.digest in loras:
            added.set_result(self._hold(bound))
        else:
            read = self._read(owner, adapter, caller.frontend, added)
            added.add_done_callback(self.leave)
            self._later(read.future, partial(self._take_added, owner, adapter, read.number, added))
        return added

    def _take_added(
        self, owner: bytes, adapter: Adapter, number: int, added: Future[bool], done: Future[AdapterFacts]
    ) -> None:
        if not added.set_running_or_notify_cancel():  # the frontend that asked for it has left
            return
        try:
            bound, is_there = self._keep(owner, adapter, done.result().digest, number)
            if not is_there:
                raise OverloadedError(f"all adapters in memory are in use; max_cpu_loras is {self._kept}: try again")
            added.set_result(self._hold(bound))
        except Exception as error:
            added.set_exception(error)

    def _hold(self, bound: _Bound) -> bool:
        """Let the next core load this adapter again."""
        if not bound.held:
            bound.held = True
            self.on_held()
        return True

    def remove(self, owner: bytes, number: Any) -> bool:
        """Forget a number. Requests that run with its adapter go on. Returns False if the number is unknown."""
        loras, bound = self._loras, self._bound.pop((owner, number), None)
        if bound is None:
            return False
        if all(other.digest != bound.digest for other in self._bound.values()):
            loras.drop(bound.digest)
        if bound.held:
            self.on_held()
        return True

    def numbers(self, owner: bytes) -> list[int]:
        """The numbers of a frontend whose adapters are in memory."""
        loras = self._loras
        return sorted(number for (name, number), one in self._bound.items() if name == owner and one.digest in loras)

    def pin(self, owner: bytes, number: Any) -> bool:
        """Protect an adapter from eviction.

        Raises:
            InvalidArgumentError: the adapter is not loaded, or no room would be left for other adapters.
        """
        loras, bound = self._loras, self._bound.get((owner, number))
        if bound is None or bound.digest not in loras:
            raise InvalidArgumentError(f"lora_int_id {number!r:.80} is not loaded; add_lora loads it")
        pinned = {*self._pinned(), bound.digest}
        if len(pinned) >= self._kept:
            raise InvalidArgumentError(
                f"with lora_int_id {number} {len(pinned)} adapters would be pinned; max_cpu_loras is {self._kept}, and "
                "one place must stay free for others: raise it"
            )
        bound.pinned = bound.held = True
        self.on_held()
        return True

    # ------------------------------------------------------------------ the next core

    def held(self) -> list[HeldAdapter]:
        """The adapters that the next core loads again."""
        return [HeldAdapter(owner, one.adapter, one.pinned) for (owner, _), one in self._bound.items() if one.held]

    def restore(self, held: Iterable[HeldAdapter]) -> None:
        """Load the adapters that the previous core held for its frontends, as many as fit in memory."""
        for one in sorted(held, key=lambda one: one.pinned)[-self._kept :]:
            try:
                number, reading = self._load(one.adapter)
                bound, _ = self._keep(one.owner, one.adapter, reading.result().digest, number)
                bound.held, bound.pinned, bound.gone = True, one.pinned, True  # until its frontend is back
            except Exception as error:
                path = one.adapter.path
                logger.warning("the LoRA adapter %r of the previous core can't be reloaded: %s", path, error)


def _embeddings(found: AdapterFacts) -> np.ndarray:
    assert found.embeddings is not None, "a prompt adapter without virtual tokens"
    return found.embeddings


def _check_lora(adapter: Adapter) -> None:
    LoRARequest(adapter.name, adapter.number, adapter.path)
    if adapter.num_virtual_tokens:
        raise InvalidRequestError(f"a LoRA adapter has {adapter.num_virtual_tokens} virtual tokens; it must have none")
