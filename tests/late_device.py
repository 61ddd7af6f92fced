"""A stand-in for a GPU: a CPU device that behaves as if its copies and kernels ran asynchronously.

A copy out of page-locked memory is in progress until the host has waited for a mark set after it. Writing or sending
that memory before then fails. A graph runs the recorded function again over the same memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mainspring.core.worker.device import Device, Mark, Tokens


class _Mark:
    def __init__(self, device: LateDevice, number: int) -> None:
        self._device, self._number = device, number

    def wait(self) -> None:
        self._device.done(self._number)


class _Tokens:
    def __init__(self, numbers: np.ndarray, mark: Mark) -> None:
        self._numbers, self._mark = numbers, mark

    def wait(self) -> np.ndarray:
        self._mark.wait()
        return self._numbers


class LateDevice(Device):
    """Counts marks; with `num_replays` and `num_copies` tests check that the device was used."""

    asynchronous = True

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        super().__init__(device)
        self.num_replays = self.num_copies = 0
        self.hasty = False
        self._marks = 0
        self._beside: list[list[Callable[[], None]]] = []  # not done yet
        self._under_way: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # (next mark, memory, its content)

    def twin(self, host: torch.Tensor) -> torch.Tensor:
        return torch.full_like(host, 77)  # memory that was never sent holds a wrong value

    def upload(self, twin: torch.Tensor, host: torch.Tensor) -> None:
        self._check()
        if not host.numel():  # such views have no address
            return
        assert all(host.data_ptr() != memory.data_ptr() for _, memory, _ in self._under_way), "sent twice, too early"
        twin.copy_(host)
        self.num_copies += 1
        self._under_way.append((self._marks, host, host.clone()))

    def download(self, numbers: torch.Tensor) -> Tokens:
        return _Tokens(numbers.clone().numpy(), self.mark())

    def mark(self) -> Mark:
        self._check()
        self._marks += 1
        return _Mark(self, self._marks)

    def done(self, number: int) -> None:
        """Complete all work before mark `number`."""
        self._check()
        self._under_way = [entry for entry in self._under_way if entry[0] >= number]

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` as late as possible, when it is waited for, or at once if `hasty`; only once."""
        if self.hasty:
            work()
            return lambda: None
        left = [work]
        self._beside.append(left)

        def wait() -> None:
            while left:
                left.pop()()
            self._beside = [one for one in self._beside if one]

        return wait

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        result = run().clone()
        assert not self._beside, "a graph ends with work beside that it has not waited for"

        def replay() -> None:
            with torch.inference_mode():
                result.copy_(run())
            self.num_replays += 1

        return replay, result

    def _check(self) -> None:
        for _, memory, before in self._under_way:
            assert torch.equal(memory, before), "page-locked memory was written before its copy was done"
