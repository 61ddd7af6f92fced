"""The ledger of a frontend: its requests in flight, with all that another core needs to go on with them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from .messages import AddRequest, Finished, Outputs


@dataclass(slots=True)
class Entry:
    """A request in flight."""

    request: AddRequest
    tensors: list[np.ndarray]
    tokens: list[int]  # all output tokens so far
    began: float
    sent: bool
    aborted: bool = False

    def message(self) -> AddRequest:
        """The request as it is sent now. After the first time it has the tokens that have come, and its age."""
        is_first, self.sent = not (self.sent or self.tokens), True
        if is_first:
            return self.request
        age = time.monotonic() - self.began
        return msgspec.structs.replace(self.request, output_token_ids=self.tokens, age_s=age, resumed=True)


class Ledger(dict[int, Entry]):
    """Entries by handle, in the order in which the requests were added."""

    def add(self, request: AddRequest, tensors: Sequence[np.ndarray]) -> Entry:
        copies = [tensor.copy() for tensor in tensors]  # because the caller may change the arrays
        began = time.monotonic() - request.age_s
        entry = self[request.handle] = Entry(
            request, copies, list(request.output_token_ids), began, sent=request.resumed
        )
        return entry

    def take(self, outputs: Outputs) -> None:
        for handle, token in zip(outputs.handles, outputs.token_ids, strict=True):
            if (entry := self.get(handle)) is not None:
                entry.tokens.append(token)
        for finished in outputs.finished:
            self.pop(finished.handle, None)

    def end_aborted(self) -> list[Finished]:
        """Remove the aborted requests, which are not sent again, and return their ends."""
        ended = [handle for handle, entry in self.items() if entry.aborted]
        for handle in ended:
            del self[handle]
        return [Finished(handle, "abort") for handle in ended]
