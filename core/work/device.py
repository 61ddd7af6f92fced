"""Memory on a device, and the order of work on it.

On a GPU nothing is waited for but sampled tokens. What the host writes for a step lies in page-locked memory and is
copied from there while the host goes on, so it must not be written again before that copy is done: each array has one
copy for each of two *turns*, and `Mark` tells when a turn's copies are behind. On a CPU everything is done at once and
the host writes where the model reads.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ...kernels import host_memory

TURNS = 2  # steps in flight


class Mark(NamedTuple):
    """A place in the order of work."""

    wait: Callable[[], object]  # until all before it is done


_NOW = Mark(lambda: None)


class Tokens(NamedTuple):
    """Numbers on their way to the host."""

    wait: Callable[[], np.ndarray]  # until they are there: the array, its own


class Device:
    """A CPU."""

    asynchronous = False

    def __init__(self, device: torch.device) -> None:
        self.torch = device

    def page_locked(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Of the device's own memory; what nothing is written to costs nothing on a CPU."""
        return host_memory.zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def host_blocks(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Of host memory, for the device's own copies there."""
        return self.zeros(shape, dtype)

    def twin(self, host: torch.Tensor) -> torch.Tensor:
        """Where the device reads what `upload` brings from `host`."""
        return host

    def upload(self, twin: torch.Tensor, host: torch.Tensor) -> None:
        """Copy, without waiting."""

    def bring(self, host: torch.Tensor) -> torch.Tensor:
        """Its own copy on the device, without waiting; for what comes now and then."""
        return host

    def download(self, numbers: torch.Tensor) -> Tokens:
        """Begin to copy."""
        host = numbers.numpy()
        return Tokens(lambda: host)

    def mark(self) -> Mark:
        """After all work so far."""
        return _NOW

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """Launch copies that begin when all work so far is done, and go on beside what is launched next; → what makes
        work launched after it wait for them."""
        work()
        return lambda: None

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """`run` as something to be replayed over the same memory, and where its result then lies. A CPU has no such
        thing."""
        raise NotImplementedError

    def release_memory(self) -> None:
        """Give back to the system what nothing uses."""


class CudaDevice(Device):
    """An NVIDIA GPU. All work goes to the current stream."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pool: object | None = None  # of the memory that graphs share: one runs at a time
        self._beside: torch.cuda.Stream | None = None  # one for all captures: cuBLAS takes memory for each there is
        self._copies: torch.cuda.Stream | None = None

    def page_locked(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch)

    def host_blocks(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Page-locked where it lies: what torch page-locks itself is rounded up to a power of two, and never given
        back. It is let go with the tensor itself, not with the last view of it."""
        memory = Device.zeros(self, shape, dtype)
        if memory.nbytes:
            runtime, address = torch.cuda.cudart(), memory.data_ptr()
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, memory.nbytes, 0)))
            weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return memory

    def twin(self, host: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(host, device=self.torch, pin_memory=False)

    def upload(self, twin: torch.Tensor, host: torch.Tensor) -> None:
        twin.copy_(host, non_blocking=True)

    def bring(self, host: torch.Tensor) -> torch.Tensor:
        # torch hands page-locked memory out again only when copies out of it are done
        return host.pin_memory().to(self.torch, non_blocking=True)

    def download(self, numbers: torch.Tensor) -> Tokens:
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        mark = self.mark()

        def wait() -> np.ndarray:
            mark.wait()
            return host.numpy()

        return Tokens(wait)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record()
        return Mark(event.synchronize)

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        if self._copies is None:
            self._copies = torch.cuda.Stream()
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            work()
            done = torch.cuda.Event()
            done.record()
        return done.wait

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Runs it twice first, on a stream beside, so that libraries have set themselves up. Raises RuntimeError where
        it waits for the device."""
        if self._beside is None:
            self._beside, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream()
        self._beside.wait_stream(current)
        try:
            with torch.cuda.stream(self._beside):
                run()
                # seen here, not in a capture: torch's allocator does not recover from one that fails
                torch.cuda.set_sync_debug_mode("error")
                run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            current.wait_stream(self._beside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._beside):  # type: ignore[arg-type]
                result = run()
        finally:
            torch.cuda.set_stream(current)  # which torch leaves undone where a capture fails
        return graph.replay, result

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


def device_for(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else Device(device)


class Staged:
    """An array that the host fills, in each step, and the device reads.

    ``host[turn]`` is a numpy array, ``device`` the tensor that has its contents after ``send``.
    """

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._device = device
        self.pages = [device.page_locked(shape, dtype) for _ in range(TURNS if device.asynchronous else 1)]
        if not device.asynchronous:
            self.pages *= TURNS
        self.host = [pages.numpy() for pages in self.pages]
        self.device = device.twin(self.pages[0])

    def send(self, turn: int, n: int) -> torch.Tensor:
        """Copy the first `n` entries to the device; → them there."""
        self._device.upload(self.device[:n], self.pages[turn][:n])
        return self.device[:n]
