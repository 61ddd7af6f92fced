"""Sums over GPUs that read each other's memory, by FlashInfer's all-reduce: one kernel, where NCCL exchanges parts.

Of its two algorithms only the first adds in the order of ranks wherever an element lies; the second begins at another
rank in each part of the tensor, so that a row's bits would depend on its place in the batch. Which one runs depends on
the size, so larger tensors are not for this class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .prebuilt import require_flashinfer

LARGEST = {2: 8 << 20, 4: (512 << 10) - 1, 8: (256 << 10) - 1}  # ranks → bytes up to which the first algorithm runs
ALIGNED = 16  # bytes that a thread reads at once
CTAS = 36
POINTERS_BYTES = 8 << 20  # for the kernels' own tables of addresses

Exchange = Callable[[bytes], list[bytes]]
"""What each rank gives, in the order of ranks."""


class SharedSums:
    """The memory that a rank shares with the others, all on one machine.

    Attributes:
        largest: bytes of a tensor that can be added.

    Args:
        links: whether NVLink connects all of these GPUs.

    Raises:
        RuntimeError: the GPUs can't read each other's memory.
    """

    def __init__(self, rank: int, size: int, device: torch.device, exchange: Exchange, links: bool) -> None:
        require_flashinfer()
        from flashinfer import comm

        self._comm: Any = comm
        self._rank, self._exchange = rank, exchange
        self.largest = LARGEST[size]
        with torch.cuda.device(device):
            signals = self._shared(comm.vllm_meta_size() + self.largest)
            self._buffers = self._shared(self.largest)
            self._pointers = torch.empty(POINTERS_BYTES, dtype=torch.uint8, device=device)
            self._sums = comm.vllm_init_custom_ar(signals, self._pointers, rank, links)
            comm.vllm_register_buffer(self._sums, self._buffers)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether `sum` may be called. A tensor's shape and dtype decide."""
        size = x.numel() * x.element_size()
        return 0 < size <= self.largest and not size % ALIGNED and x.dtype in (torch.float32, *_HALVES)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, added in fp32 in the order of ranks. `x` is contiguous."""
        total = torch.empty_like(x)
        self._comm.vllm_all_reduce(self._sums, x, total, self._buffers[self._rank], self.largest, CTAS)
        return total

    def _shared(self, size: int) -> list[int]:
        """The addresses, in this process, of `size` zeroed bytes on each rank's GPU."""
        from flashinfer.comm.cuda_ipc import cudaIpcMemHandle_t, cudart

        mine = cudart.cudaMalloc(size)
        cudart.cudaMemset(mine, 0, size)
        torch.cuda.synchronize()
        handles = self._exchange(bytes(cudart.cudaIpcGetMemHandle(mine)))
        others = (cudaIpcMemHandle_t.from_buffer_copy(handle) for handle in handles)
        return [
            mine.value if rank == self._rank else cudart.cudaIpcOpenMemHandle(other).value
            for rank, other in enumerate(others)
        ]


_HALVES = (torch.float16, torch.bfloat16)


def usable(size: int, uuids: list[str]) -> tuple[bool, bool]:
    """Whether this class can serve ranks on the GPUs of these ids, all of this machine, and whether NVLink connects
    them all. More than two need NVLink."""
    if size not in LARGEST or len(set(uuids)) != size:
        return False, False
    import pynvml

    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
    pairs = [(one, other) for one in gpus for other in gpus if one is not other]

    def connected(kind: int) -> bool:
        return all(pynvml.nvmlDeviceGetP2PStatus(*pair, kind) == pynvml.NVML_P2P_STATUS_OK for pair in pairs)

    links = connected(pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return links or (size == 2 and connected(pynvml.NVML_P2P_CAPS_INDEX_READ)), links
