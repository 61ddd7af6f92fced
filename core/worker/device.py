"""Device memory, and synchronisation between host and device.

On a GPU the host waits only for sampled tokens. It writes the inputs of a step to page-locked memory, and the device
copies them while the host goes on. The host must not overwrite an input before that copy has finished. So each input
array exists twice, for two alternating *turns*, and a `Mark` tells when the copies of a turn have finished. On a CPU
all work is synchronous, and the model reads the arrays that the host writes.
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
    """A point in the device's order of work."""

    wait: Callable[[], object]  # blocks until all work launched before the mark has finished


_NOW = Mark(lambda: None)


class Tokens(NamedTuple):
    """An array that is being copied to the host."""

    wait: Callable[[], np.ndarray]  # blocks until the copy has finished, and returns the array


class Device:
    """A CPU."""

    asynchronous = False

    def __init__(self, device: torch.device) -> None:
        self.torch = device

    def page_locked(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed device memory. On a CPU, pages that are never written take no physical memory."""
        return host_memory.zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def host_blocks(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that only device copies read and write."""
        return self.zeros(shape, dtype)

    def twin(self, host: torch.Tensor) -> torch.Tensor:
        """The device tensor that `upload` fills from `host`; on a CPU `host` itself."""
        return host

    def upload(self, twin: torch.Tensor, host: torch.Tensor) -> None:
        """Copy `host` to `twin`, without waiting."""

    def bring(self, host: torch.Tensor) -> torch.Tensor:
        """A new copy on the device, without waiting. For occasional uploads: it allocates memory."""
        return host

    def download(self, numbers: torch.Tensor) -> Tokens:
        """Start to copy a tensor to the host."""
        host = numbers.numpy()
        return Tokens(lambda: host)

    def mark(self) -> Mark:
        """A mark after all work launched so far."""
        return _NOW

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """Launch copies that start after all work so far and overlap with the work launched next. Returns a function:
        work launched after its call waits for the copies."""
        work()
        return lambda: None

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Capture `run` as a graph. Returns a function that replays the graph on the same memory, and the tensor that
        gets its result. A CPU has no graphs."""
        raise NotImplementedError

    def release_memory(self) -> None:
        """Return unused memory to the system."""


class CudaDevice(Device):
    """An NVIDIA GPU. All work goes to the current stream."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pool: object | None = None  # memory pool shared by all graphs, because only one runs at a time
        self._beside: torch.cuda.Stream | None = None  # one for all captures: cuBLAS allocates a workspace per stream
        self._copies: torch.cuda.Stream | None = None

    def page_locked(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch)

    def host_blocks(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory, page-locked in place. torch's own page-locked memory is rounded up to a power of two and never
        returned. The lock ends with this tensor, not with the last view of it: keep the tensor."""
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
        # torch reuses page-locked memory only after the copies from it have finished.
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
        """Runs `run` twice on a side stream before the capture, so that libraries have allocated their workspaces.
        Raises RuntimeError if `run` waits for the device."""
        if self._beside is None:
            self._beside, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream()
        self._beside.wait_stream(current)
        try:
            with torch.cuda.stream(self._beside):
                run()
                # Detect waits in this run: torch's allocator does not recover from a capture that fails.
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
            torch.cuda.set_stream(current)  # torch does not restore the stream if a capture fails
        return graph.replay, result

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


def device_for(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else Device(device)


def tensor_of(values: np.ndarray) -> torch.Tensor:
    """A copy of an array of a plan or record, in host memory; uint16 stands for bfloat16."""
    tensor = torch.from_numpy(values.copy())
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The array that shares memory with a tensor in host memory, for a record; uint16 stands for bfloat16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class Staged:
    """An array that the host fills in each step, and that the device reads.

    ``host[turn]`` is the numpy array to fill. ``device`` is the tensor that has its contents after ``send``.
    """

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._device = device
        self.pages = [device.page_locked(shape, dtype) for _ in range(TURNS if device.asynchronous else 1)]
        if not device.asynchronous:
            self.pages *= TURNS
        self.host = [pages.numpy() for pages in self.pages]
        self.device = device.twin(self.pages[0])

    def send(self, turn: int, n: int) -> torch.Tensor:
        """Copy the first `n` entries to the device, and return them as a device tensor."""
        self._device.upload(self.device[:n], self.pages[turn][:n])
        return self.device[:n]
