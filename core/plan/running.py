"""The requests that have a slot, and the steps in flight."""

from __future__ import annotations

import numpy as np

from .request import Request


class Running:
    """Running requests by slot, and the free slots.

    A slot that a request leaves while steps are in flight is free again when the last of these steps has retired,
    because the steps still name it.
    """

    def __init__(self, num_slots: int) -> None:
        self.requests: dict[int, Request] = {}  # by slot, in order of admission
        self.order = np.zeros(0, np.int64)  # the keys of `requests`
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.admitted: list[Request] = []  # since the last step was launched
        self.next_step = 0
        self.in_flight: list[int] = []  # numbers of the steps that were launched and have not retired
        self._released: list[int] = []  # slots that became free since the last launch; some may be taken again
        self.coming_slots: list[tuple[int, int]] = []  # (step to wait for, slot that is free when it has retired)

    def add(self, request: Request) -> None:
        """Give a request a free slot."""
        request.slot = self.free_slots.pop()
        self.requests[request.slot] = request
        self.order = np.fromiter(self.requests, np.int64, len(self.requests))
        self.admitted.append(request)

    def remove(self, request: Request) -> None:
        """Take back a request's slot."""
        del self.requests[request.slot]
        self.order = np.fromiter(self.requests, np.int64, len(self.requests))
        if request in self.admitted:
            self.admitted.remove(request)
        if self.in_flight:
            self.coming_slots.append((self.in_flight[-1], request.slot))
        else:
            self._free(request.slot)
        request.slot = -1

    def launch(self) -> tuple[int, list[Request], list[int]]:
        """A step is launched: its number, the requests that got slots since the last one, and the slots that became
        free since then and that no request has now."""
        number, admitted = self.next_step, self.admitted
        released = [slot for slot in self._released if slot in self.free_slots]
        self.admitted, self._released = [], []
        self.next_step += 1
        self.in_flight.append(number)
        return number, admitted, released

    def retire(self, step: int) -> None:
        """The oldest step in flight is taken in, or taken back."""
        assert self.in_flight[0] == step, "steps are taken in in the order they were launched"
        self.in_flight.pop(0)
        while self.coming_slots and self.coming_slots[0][0] <= step:
            self._free(self.coming_slots.pop(0)[1])

    def _free(self, slot: int) -> None:
        self.free_slots.append(slot)
        self._released.append(slot)
