"""Sums over GPUs that read each other's memory. There are no GPUs here: threads are the ranks, and a stand-in for
FlashInfer's functions adds what they put into buffers of the host. What the real ones are is in
test_flashinfer_contract.py."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mainspring.core.parallel.group import RankGroup
from mainspring.kernels.flashinfer import shared_sums
from mainspring.kernels.flashinfer.shared_sums import LARGEST, SharedSums

CPU = torch.device("cpu")


class Handle(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64)]


class Runtime:
    """The CUDA runtime over memory of this process, which all threads share."""

    def __init__(self) -> None:
        self.memory: dict[int, ctypes.Array[ctypes.c_char]] = {}

    def cudaMalloc(self, size: int) -> Any:
        block = ctypes.create_string_buffer(b"\xff" * size, size)
        address = ctypes.addressof(block)
        self.memory[address] = block
        return SimpleNamespace(value=address)

    def cudaMemset(self, pointer: Any, value: int, count: int) -> None:
        ctypes.memset(pointer.value, value, count)

    def cudaIpcGetMemHandle(self, pointer: Any) -> Handle:
        return Handle(pointer.value)

    def cudaIpcOpenMemHandle(self, handle: Handle) -> Any:
        return SimpleNamespace(value=handle.address)


class Comm(ModuleType):
    """`flashinfer.comm`, as far as it is used."""

    SIGNALS = 256

    def __init__(self, size: int, off: float = 0.0) -> None:
        super().__init__("flashinfer.comm")
        self.runtime, self.barrier, self.off = Runtime(), threading.Barrier(size, timeout=30), off
        self.buffers: dict[int, list[int]] = {}
        cuda_ipc: Any = ModuleType("flashinfer.comm.cuda_ipc")
        cuda_ipc.cudart, cuda_ipc.cudaIpcMemHandle_t = self.runtime, Handle
        self.cuda_ipc = cuda_ipc

    def vllm_meta_size(self) -> int:
        return self.SIGNALS

    def vllm_init_custom_ar(self, ipc_tensors: list[int], rank_data: torch.Tensor, rank: int, full_nvlink: bool) -> int:
        for address in ipc_tensors:
            assert ctypes.string_at(address, self.SIGNALS) == bytes(self.SIGNALS), "signals start at zero"
        return rank

    def vllm_register_buffer(self, fa: int, fake_ipc_ptrs: list[int]) -> None:
        self.buffers[fa] = list(fake_ipc_ptrs)

    def vllm_all_reduce(
        self, fa: int, inp: torch.Tensor, out: torch.Tensor, reg_buffer: int, reg_buffer_sz_bytes: int, num_ctas: int
    ) -> None:
        size = inp.numel() * inp.element_size()
        assert size <= reg_buffer_sz_bytes
        assert size % 16 == 0
        assert reg_buffer == self.buffers[fa][fa]
        ctypes.memmove(reg_buffer, inp.data_ptr(), size)
        self.barrier.wait()
        total = torch.zeros(inp.numel())
        for address in self.buffers[fa]:
            block = bytearray(ctypes.string_at(address, size))
            total = total + torch.frombuffer(block, dtype=inp.dtype).float()
        self.barrier.wait()
        out.copy_((total + self.off).to(out.dtype).view_as(out))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Comm]:
    def put(size: int, **options: Any) -> Comm:
        comm = Comm(size, **options)
        package: Any = ModuleType("flashinfer")
        package.comm = comm
        monkeypatch.setitem(sys.modules, "flashinfer", package)
        monkeypatch.setitem(sys.modules, "flashinfer.comm", comm)
        monkeypatch.setitem(sys.modules, "flashinfer.comm.cuda_ipc", comm.cuda_ipc)
        monkeypatch.setattr(shared_sums, "require_flashinfer", lambda: package)
        monkeypatch.setattr(shared_sums, "usable", lambda size, uuids: (len(uuids) == size, True))
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a-gpu"))
        return comm

    return put


@pytest.fixture
def ranks(tmp_path: Any) -> Iterator[Callable[..., list[Any]]]:
    """Runs a function in threads, one for each rank of a group of so many."""
    pools = []

    def run(size: int, function: Callable[[RankGroup], Any]) -> list[Any]:
        pool = ThreadPoolExecutor(size)
        pools.append(pool)
        store = f"file://{tmp_path / f'store-{len(pools)}'}"
        return list(pool.map(lambda rank: function(RankGroup(rank, size, store, CPU, 60.0)), range(size)))

    yield run
    for pool in pools:
        pool.shutdown()


@pytest.mark.parametrize("size", LARGEST)
def test_each_rank_gets_the_sum_in_the_order_of_ranks(
    size: int, install: Callable[..., Comm], ranks: Callable[..., list[Any]]
) -> None:
    install(size)
    torch.manual_seed(0)
    values = torch.randn(size, 3, 64).bfloat16()

    def add(group: RankGroup) -> torch.Tensor:
        shared = SharedSums(group.rank, size, CPU, group.from_all, True)
        return shared.sum(values[group.rank])

    expected = values[0].float()
    for part in values[1:]:
        expected = expected + part.float()
    for found in ranks(size, add):
        assert torch.equal(found, expected.bfloat16())


def test_only_tensors_of_the_first_algorithm_are_taken(
    install: Callable[..., Comm], ranks: Callable[..., list[Any]]
) -> None:
    install(4)

    def taken(group: RankGroup) -> list[bool]:
        shared = SharedSums(group.rank, 4, CPU, group.from_all, True)
        sizes = [torch.zeros(n, dtype=torch.bfloat16) for n in (8, 0, 7, (512 << 9) - 8, 512 << 9)]
        return [shared.takes(x) for x in [*sizes, torch.zeros(4, dtype=torch.float64)]]

    assert ranks(4, taken) == [[True, False, False, True, False, False]] * 4


@pytest.mark.parametrize("off", [0.0, 0.5])
def test_sums_are_shared_only_if_they_are_right(
    off: float, install: Callable[..., Comm], ranks: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    install(2, off=off)

    def share(group: RankGroup) -> tuple[bool, list[float]]:
        return group.share_memory(), group.sum(torch.full((4,), 1.0 + group.rank)).tolist()

    assert ranks(2, share) == [(off == 0.0, [3.0] * 4)] * 2


@pytest.mark.parametrize(("size", "pairs", "shares"), [(2, True, True), (4, True, False), (4, False, True)])
def test_sums_of_pairs_are_shared_by_two_ranks_alone(
    size: int, pairs: bool, shares: bool, install: Callable[..., Comm], ranks: Callable[..., list[Any]]
) -> None:
    install(size)
    assert ranks(size, lambda group: group.share_memory(pairs)) == [shares] * size


def test_large_and_small_sums_have_one_order(install: Callable[..., Comm], ranks: Callable[..., list[Any]]) -> None:
    """Else a row's bits would depend on how many rows a step has. Tensors of the host are not shared, so this sum is
    made of parts that ranks exchange."""
    install(4)
    torch.manual_seed(1)
    values = torch.randn(4, 4096)

    def add(group: RankGroup) -> torch.Tensor:
        assert group.share_memory()
        return group.sum(values[group.rank].repeat(16, 1))[3]

    in_turn = values[0] + values[1] + values[2] + values[3]
    assert not torch.equal(in_turn, (values[0] + values[1]) + (values[2] + values[3]))
    for found in ranks(4, add):
        assert torch.equal(found, in_turn)


def test_gpus_of_two_machines_share_nothing(
    install: Callable[..., Comm], ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(2)
    boots = iter(["one", "other"])
    monkeypatch.setattr("mainspring.core.parallel.group._boot", lambda: next(boots))
    assert ranks(2, lambda group: group.share_memory()) == [False, False]
