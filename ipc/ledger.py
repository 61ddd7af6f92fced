"""The ledger of a frontend: its requests in flight, with all that another core needs to go on with them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from .messages import AddRequest, Finished, Outputs

if TYPE_CHECKING:
    import numpy as np

Epoch = tuple[bytes, int, int]  # of a core: instance, number, epoch


@dataclass(slots=True)
class Entry:
    """A request in flight."""

    request: AddRequest
    tensors: list[np.ndarray]
    tokens: list[int]  # all output tokens so far
    began: float
    sent: bool
    aborted: bool = False
    sent_to: Epoch | None = None  # the core that has it
    moved_from: Epoch | None = None  # the core that had it before, if another connection was lost

    @property
    def since(self) -> float:
        """When it was added, on the monotonic clock."""
        return self.began + self.request.age_s

    @property
    def cost(self) -> int:
        """Tokens that the request may take, prompt and output."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens

    def message(self, instance_id: bytes) -> AddRequest:
        """The request as it is sent now, to a core of this instance. After the first time it has the tokens that have
        come, and its age."""
        is_first, self.sent = not (self.sent or self.tokens), True
        if is_first:
            return self.request
        age, moved = time.monotonic() - self.began, self.moved_from
        return msgspec.structs.replace(
            self.request,
            output_token_ids=self.tokens,
            age_s=age,
            resumed=True,
            moved_from=[*moved[1:]] if moved and moved[0] == instance_id else [],
        )


class Ledger(dict[int, Entry]):
    """Entries by handle, in the order in which the requests were added."""

    cost = 0  # of all of them

    def put(self, entry: Entry) -> None:
        self[entry.request.handle] = entry
        self.cost += entry.cost

    def end(self, handle: int) -> None:
        if (entry := self.pop(handle, None)) is not None:
            self.cost -= entry.cost

    def add(self, request: AddRequest, tensors: Sequence[np.ndarray]) -> Entry:
        copies = [tensor.copy() for tensor in tensors]  # because the caller may change the arrays
        began = time.monotonic() - request.age_s
        entry = Entry(request, copies, list(request.output_token_ids), began, sent=request.resumed)
        self.put(entry)
        return entry

    def take(self, outputs: Outputs) -> None:
        for handle, token in zip(outputs.handles, outputs.token_ids, strict=True):
            if (entry := self.get(handle)) is not None:
                entry.tokens.append(token)
        for finished in outputs.finished:
            self.end(finished.handle)

    def end_aborted(self) -> list[Finished]:
        """Remove the aborted requests, which are not sent again, and return their ends."""
        ended = [handle for handle, entry in self.items() if entry.aborted]
        for handle in ended:
            self.end(handle)
        return [Finished(handle, "abort") for handle in ended]
