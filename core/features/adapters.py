"""Adapters as frontends name them: whose number stands for which folder, and what was read of it.

A frontend's numbers are its own; what they stand for is known by content, so that two frontends share one copy. Folders
are read in a thread, while their requests are counted but not queued. What a frontend asked to be kept is told the
supervisor, so that it is there again under the next core; all else comes with the requests.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ...ipc.adapters import LoRARequest, PromptAdapterRequest
from ...ipc.config import LoRAConfig
from ...ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError, OverloadedError
from ...ipc.messages import Adapter, AddRequest, HeldAdapter
from ..model.run.lora import LoRA
from ..plan.request import Request
from ..plan.scheduler import Scheduler
from ..work.adapter_files import LoRALimits, PromptAdapter, read_lora, read_prompt_adapter
from .adapter_slots import LoRAName, LoRAs

logger = logging.getLogger(__name__)

MAX_BOUND = 4096  # numbers that are remembered, of all frontends

Wait = tuple[Future[Any], Callable[[Any], None]]  # what a request waits for, and what is done with it


@dataclass(slots=True)
class _Bound:
    """What a frontend's number stands for."""

    adapter: Adapter
    digest: bytes
    held: bool = False  # the frontend asked for it to be kept
    pinned: bool = False
    gone: bool = False  # the frontend is not connected


class Adapters:
    """All of a core's.

    Args:
        limits: what a LoRA adapter must fit; None: requests may have none.
        later: called with a future and with what is to be called with that, in the core's thread, once it is done.
    """

    def __init__(
        self,
        config: LoRAConfig,
        limits: LoRALimits | None,
        hidden_size: int,
        scheduler: Scheduler,
        later: Callable[[Future[Any], Callable[[Future[Any]], None]], None],
    ) -> None:
        self.on_held: Callable[[], None] = lambda: None  # told when `held` changes
        self._config, self._limits, self._hidden_size = config, limits, hidden_size
        self._scheduler, self._later = scheduler, later
        self._kept = config.max_loras if config.max_cpu_loras is None else config.max_cpu_loras
        self._thread = ThreadPoolExecutor(1, "mainspring-adapters")
        self._bound: OrderedDict[tuple[bytes, int], _Bound] = OrderedDict()
        self._reading: dict[tuple[bytes, Adapter], Future[Any]] = {}
        self._rereading = False
        self._prompt_adapters: OrderedDict[tuple[bytes, Adapter], PromptAdapter] = OrderedDict()
        self._slots: LoRAs | None = None
        if limits is not None:
            self._slots = LoRAs(config.max_loras, self._kept, self._is_pinned, self._read_again)
            scheduler.attach(self._slots)

    @property
    def _loras(self) -> LoRAs:
        if self._slots is None:
            raise NotSupportedError("this core serves no LoRA adapters: start it with enable_lora=True")
        return self._slots

    # ------------------------------------------------------------------ requests

    def prepare(self, request: Request, message: AddRequest, owner: bytes) -> list[Wait]:
        """Give a request of a frontend called `owner` its adapters, as far as they are known. Returns what it has to
        wait for.

        Raises:
            MainspringError: it can't have them.
        """
        waits: list[Wait] = []
        if (lora := message.lora) is not None:
            _check_lora(lora)
            known = self._loras and self._find(owner, lora)
            if known:
                request.use_lora(LoRAName(known.digest, lora))
            else:
                waits.append((self._read(owner, lora), partial(self._give_lora, request, owner, lora)))
        if (prompt := message.prompt_adapter) is not None:
            if (found := self._prompt_adapters.get((owner, prompt))) is not None:
                self._prompt_adapters.move_to_end((owner, prompt))
                request.use_virtual_tokens(found.embeddings, found.digest)
            else:
                waits.append((self._read(owner, prompt), partial(self._give_virtual_tokens, request, owner, prompt)))
        return waits

    def check_prompt_adapter(self, adapter: Adapter) -> None:
        """Before a request is made of it.

        Raises:
            MainspringError: it can't be served, whatever is in its folder.
        """
        if not self._config.enable_prompt_adapter:
            raise NotSupportedError("this core serves no prompt adapters: start it with enable_prompt_adapter=True")
        PromptAdapterRequest(adapter.name, adapter.number, adapter.path, adapter.num_virtual_tokens)
        most = self._config.max_prompt_adapter_token
        if most and adapter.num_virtual_tokens > most:
            raise InvalidRequestError(
                f"a prompt adapter has {adapter.num_virtual_tokens} virtual tokens; max_prompt_adapter_token is {most}"
            )

    def _give_lora(self, request: Request, owner: bytes, adapter: Adapter, lora: LoRA) -> None:
        self._keep(owner, adapter, lora)
        request.use_lora(LoRAName(lora.digest, adapter))

    def _give_virtual_tokens(self, request: Request, owner: bytes, adapter: Adapter, found: PromptAdapter) -> None:
        self._prompt_adapters[owner, adapter] = found
        if len(self._prompt_adapters) > self._config.max_prompt_adapters:
            self._prompt_adapters.popitem(last=False)
        request.use_virtual_tokens(found.embeddings, found.digest)

    def _read(self, owner: bytes, adapter: Adapter) -> Future[Any]:
        """Who waits for the same one shares it."""
        if (shared := self._reading.get((owner, adapter))) is not None:
            return shared
        if adapter.num_virtual_tokens:
            future: Future[Any] = self._thread.submit(read_prompt_adapter, adapter, self._hidden_size)
        else:
            assert self._limits is not None
            future = self._thread.submit(read_lora, adapter, self._limits)
        self._reading[owner, adapter] = future
        self._later(future, partial(self._end_reading, owner, adapter))
        return future

    def _end_reading(self, owner: bytes, adapter: Adapter, _: Future[Any]) -> None:
        del self._reading[owner, adapter]

    def _read_again(self, request: Request) -> None:
        """Its adapter gave way to others while it waited."""
        if not self._rereading:
            self._rereading = True
            assert request.lora is not None
            assert self._limits is not None
            future = self._thread.submit(read_lora, request.lora.adapter, self._limits)
            self._later(future, partial(self._take_again, request))

    def _take_again(self, request: Request, done: Future[LoRA]) -> None:
        self._rereading = False
        self._scheduler.wake()
        error, lora = done.exception(), request.lora
        assert lora is not None
        if error is None and done.result().digest == lora.digest:
            self._loras.put(done.result())
        elif request.slot < 0:
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

    def _keep(self, owner: bytes, adapter: Adapter, lora: LoRA) -> tuple[_Bound, bool]:
        """Let the frontend's number stand for it; and whether it is in memory."""
        bound = self._find(owner, adapter)
        if bound is None:
            bound = self._bound[owner, adapter.number] = _Bound(adapter, lora.digest)
            if len(self._bound) > MAX_BOUND:
                self._bound.popitem(last=False)
        bound.digest = lora.digest
        return bound, self._loras.put(lora)

    def _is_pinned(self, digest: bytes) -> bool:
        return digest in self._pinned()[: self._kept - 1]  # frontends that come back may have pinned more together

    def _pinned(self) -> list[bytes]:
        return list(dict.fromkeys(one.digest for one in self._bound.values() if one.pinned and not one.gone))

    def set_gone(self, owner: bytes, gone: bool) -> None:
        """Whether a frontend is away. What it pinned meanwhile may give way."""
        for (name, _), bound in self._bound.items():
            if name == owner:
                bound.gone = gone

    # ------------------------------------------------------------------ what frontends call

    def add(self, owner: bytes, values: Any) -> Future[bool]:
        """Bring a LoRA adapter, as in `Adapter`, into memory. True, once it is there.

        Raises:
            MainspringError: it can't be served, at once or in the future: or there is no room.
        """
        adapter, loras = msgspec.convert(values, Adapter), self._loras
        _check_lora(adapter)
        bound, added = self._find(owner, adapter), Future[bool]()
        if bound is not None and bound.digest in loras:
            added.set_result(self._hold(bound))
        else:
            self._later(self._read(owner, adapter), partial(self._take_added, owner, adapter, added))
        return added

    def _take_added(self, owner: bytes, adapter: Adapter, added: Future[bool], done: Future[LoRA]) -> None:
        if not added.set_running_or_notify_cancel():
            return  # who asked for it has left
        try:
            bound, is_there = self._keep(owner, adapter, done.result())
            if not is_there:
                raise OverloadedError(f"all adapters in memory are in use; max_cpu_loras is {self._kept}: try again")
            added.set_result(self._hold(bound))
        except Exception as error:
            added.set_exception(error)

    def _hold(self, bound: _Bound) -> bool:
        """Let it be there under the next core too."""
        if not bound.held:
            bound.held = True
            self.on_held()
        return True

    def remove(self, owner: bytes, number: Any) -> bool:
        """Forget what a number stands for; what runs with it goes on. False: nothing."""
        loras, bound = self._loras, self._bound.pop((owner, number), None)
        if bound is None:
            return False
        if all(other.digest != bound.digest for other in self._bound.values()):
            loras.drop(bound.digest)
        if bound.held:
            self.on_held()
        return True

    def numbers(self, owner: bytes) -> list[int]:
        """A frontend's, that stand for what is in memory."""
        loras = self._loras
        return sorted(number for (name, number), one in self._bound.items() if name == owner and one.digest in loras)

    def pin(self, owner: bytes, number: Any) -> bool:
        """Let an adapter stay in memory.

        Raises:
            InvalidArgumentError: it is not there, or would leave no room for others.
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
        """What frontends asked to be kept."""
        return [HeldAdapter(owner, one.adapter, one.pinned) for (owner, _), one in self._bound.items() if one.held]

    def restore(self, held: Iterable[HeldAdapter]) -> None:
        """What they had asked the core before this one."""
        for owner, adapter, pinned in ((one.owner, one.adapter, one.pinned) for one in held):
            assert self._limits is not None
            try:
                bound, _ = self._keep(owner, adapter, read_lora(adapter, self._limits))
                bound.held, bound.pinned = True, pinned
            except Exception as error:
                logger.warning("the LoRA adapter %r of an earlier core is gone: %s", adapter.path, error)


def _check_lora(adapter: Adapter) -> None:
    LoRARequest(adapter.name, adapter.number, adapter.path)
    if adapter.num_virtual_tokens:
        raise InvalidRequestError(f"a LoRA adapter has {adapter.num_virtual_tokens} virtual tokens; it must have none")
