"""The ranks that compute one model together, and what they exchange: sums and parts of tensors, minima, small messages.

Every rank makes the same calls in the same order. A sum adds the ranks' parts in a fixed order, in fp32, so that a row
has the same bits wherever it stands in a batch and however large the batch is. The reductions of gloo (of three and
more ranks) and NCCL promise neither, and move fewer bytes; with `ordered_sums=False` they add.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from ...ipc.errors import NotSupportedError
from ...ipc.transport import address_towards

if TYPE_CHECKING:
    from ...kernels.flashinfer.shared_sums import SharedSums

logger = logging.getLogger(__name__)
c10d: Any = distributed  # torch's stubs do not export its names
GATHER_BYTES = 32 << 10  # up to so many bytes of one rank, one exchange of everything is faster than two of parts


class RankGroup:
    """The group as one of its ranks sees it. It is beside torch's default group, which the user's code may have.

    Args:
        rank: of this process. Rank 0 leads: what is decided by measurements is decided there.
        size: number of ranks, at least 2.
        store: where the ranks find each other: ``file://PATH`` on one machine, else ``tcp://HOST:PORT``, where rank 0
            listens.
        device: of the tensors.
        timeout_s: the longest wait for another rank, in seconds.
        ordered: whether sums are added in the fixed order.
        within: the group that this one is a part of, whose store it uses. `store` is then the name of the part.

    Raises:
        NotSupportedError: torch was built without gloo, or without NCCL for a GPU.
        RuntimeError: the ranks did not come together in time.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: str,
        device: torch.device,
        timeout_s: float = 600.0,
        ordered: bool = True,
        within: RankGroup | None = None,
    ) -> None:
        self.rank, self.size, self.device, self.ordered = rank, size, device, ordered
        self.quiet = False
        wait: timedelta = timedelta(seconds=timeout_s) if within is None else within._wait
        self._wait: timedelta = wait
        self._store: Any = _store(store, rank, size, wait) if within is None else within._store
        name = "" if within is None else store
        self._host: Any = _gloo(self._store, name, rank, size, wait)
        self._tensors = _nccl(self._store, name, rank, size, wait) if device.type == "cuda" else self._host
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()  # and the tensors, which are read until they have come
        self._shared: SharedSums | None = None
        self._in_turn = False  # whether sums are added in the order of ranks, not of pairs

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @contextmanager
    def silence(self) -> Iterator[None]:
        """In this context nothing is sent: a rank's part stands for the sum, and its columns for those of all."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors of one shape and dtype, see `added`."""
        if self.quiet:
            return x
        x = x.contiguous()
        if not self.ordered:
            total = x.clone()
            self._for(x).allreduce([total]).wait()
            return total
        if self._shared is not None and x.is_cuda and self._shared.takes(x):
            return self._shared.sum(x)
        if self.size == 2 or x.numel() * x.element_size() <= GATHER_BYTES:
            return self._added(self._all(x)).to(x.dtype)
        each = -(-x.numel() // self.size)
        flat = torch.nn.functional.pad(x.flatten(), (0, each * self.size - x.numel()))
        parts = torch.empty_like(flat)
        self._for(x).alltoall_base(parts, flat, [], []).wait()
        mine = self._added(parts.chunk(self.size)).to(x.dtype)
        return torch.cat(self._all(mine))[: x.numel()].view_as(x)

    def share_memory(self, pairs: bool = False) -> bool:
        """Let sums of small tensors read the other ranks' memory, where GPUs can and the sums are found to be right.
        `pairs`: sums have to be of pairs. Returns whether they will."""
        from ...kernels.flashinfer.shared_sums import SharedSums, usable

        machine = f"{socket.gethostname()} {_boot()}"
        mine = f"{machine}/{torch.cuda.get_device_properties(self.device).uuid}"
        places = [place.decode().rpartition("/") for place in self.from_all(mine.encode())]
        found, links, shared = False, False, None
        with suppress(Exception):  # whatever is missing, the sums are made without
            found, links = usable(self.size, [uuid for *_, uuid in places])
        together = len({machine for machine, *_ in places}) == 1 and not (pairs and self.size > 2)
        if not self.least([found and together])[0]:
            return False
        try:
            shared = SharedSums(self.rank, self.size, self.device, self.from_all, links)
            right = self._agrees(shared)
        except Exception as error:
            logger.warning("sums don't read the memory of other GPUs: %s", error)
            right = False
        if self.least([right])[0]:
            self._shared, self._in_turn = shared, True
            logger.info("sums of small tensors read the memory of the other GPUs")
        return self._shared is not None

    def _agrees(self, shared: SharedSums) -> bool:
        """Whether shared sums of tensors of several sizes have the bits of those made here."""
        generator = torch.Generator().manual_seed(self.rank)
        for count in (64, 4096, shared.largest // 32 * 8):
            x = torch.randn(count, generator=generator).to(self.device, torch.bfloat16)
            if not torch.equal(shared.sum(x), _in_turn(self._all(x)).to(x.dtype)):
                return False
        return True

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' columns side by side: ``[..., n]`` → ``[..., size * n]``."""
        return torch.cat([x] * self.size if self.quiet else self._all(x.contiguous()), -1)

    def gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The rows of all ranks, of which each has ``counts[rank]``: ``[n, ...]`` → ``[sum of counts, ...]``."""
        parts = self._all(_with_rows(x, max(counts)))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def sum_own_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """This rank's rows of the sum of all ranks' tensors, each with the rows of all: ``[sum of counts, n]`` →
        ``[counts[rank], n]``."""
        flat = torch.cat([_with_rows(part, max(counts)) for part in x.split(list(counts))])
        parts = torch.empty_like(flat)
        self._for(x).alltoall_base(parts, flat, [], []).wait()
        return self._added(parts.chunk(self.size)).to(x.dtype)[: counts[self.rank]]

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of the ranks' numbers, for each place in the list."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        parts = torch.empty((self.size, len(mine)), dtype=torch.int64)
        self._host.allgather([list(parts)], [mine]).wait()
        return [int(number) for number in parts.amin(0)]

    def from_leader(self, data: bytes | None) -> bytes:
        """The leader's `data`, on every rank. The others give None."""
        length = torch.tensor([len(data or b"")], dtype=torch.int64)
        self._host.broadcast(length, 0).wait()
        body = torch.zeros(int(length), dtype=torch.uint8)
        if self.leads and data:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if len(body):
            self._host.broadcast(body, 0).wait()
        return body.numpy().tobytes()

    def from_all(self, data: bytes) -> list[bytes]:
        """What each rank gives, in the order of ranks."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._host.allgather([lengths], [torch.tensor([len(data)])]).wait()
        mine = torch.frombuffer(bytearray(data.ljust(int(max(lengths)), b"\0")), dtype=torch.uint8)
        bodies = [torch.empty_like(mine) for _ in range(self.size)]
        self._host.allgather([bodies], [mine]).wait()
        return [body.numpy().tobytes()[: int(length)] for body, length in zip(bodies, lengths, strict=True)]

    def copy_of_leader(self, x: torch.Tensor) -> None:
        """Overwrite `x`, a contiguous tensor on the group's device, with the leader's."""
        self._for(x).broadcast(x, 0).wait()

    def send(self, x: torch.Tensor, to: int, most: int) -> None:
        """Send `x`, which must not change any more, to one rank. Waits only while more than `most` have not come."""
        x = x.contiguous()
        self._sent.append((self._for(x).send([x], to, 0), x))
        while len(self._sent) > most:
            self._sent.popleft()[0].wait()

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrite `x`, which is contiguous, with what rank `source` sends."""
        self._for(x).recv([x], source, 0).wait()
        return x

    def leave(self) -> None:
        """Close the connections. The other ranks' calls fail from then on."""
        self._sent.clear()
        self._tensors = self._host = None

    def _added(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return _in_turn(parts) if self._in_turn else added(parts)

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._for(x).allgather([parts], [x]).wait()
        return parts

    def _for(self, x: torch.Tensor) -> Any:
        return self._host if x.device.type == "cpu" else self._tensors


class OneRank:
    """What `RankGroup` is for a model that one process computes alone."""

    rank, size, leads, ordered = 0, 1, True, True

    def silence(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def least(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def from_leader(self, data: bytes | None) -> bytes:
        return data or b""


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in fp32: of neighbours, then of neighbouring sums, and so on. So the sum of eight parts is also that of
    two sums of four."""
    sums = [part.float() for part in parts]
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [*(one + other for one, other in pairs), *(sums[-1:] if len(sums) % 2 else [])]
    return sums[0]


def _in_turn(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in fp32, in the order of ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def _with_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """`x` with so many rows, zeros behind its own."""
    return x.contiguous() if len(x) == count else torch.cat([x, x.new_zeros(count - len(x), *x.shape[1:])])


def _boot() -> str:
    """Identifies this machine, also where several have one name."""
    place = Path("/proc/sys/kernel/random/boot_id")
    return place.read_text().strip() if place.is_file() else ""


def _store(address: str, rank: int, size: int, wait: timedelta) -> Any:
    kind, _, place = address.partition("://")
    if kind == "file":
        return c10d.FileStore(place, size)
    host, _, port = place.rpartition(":")
    # left to itself, torch would listen at all addresses of the machine
    listens = socket.create_server((host, int(port))).detach() if rank == 0 else None
    return c10d.TCPStore(host, int(port), size, is_master=rank == 0, timeout=wait, master_listen_fd=listens)


def _gloo(store: Any, name: str, rank: int, size: int, wait: timedelta) -> Any:
    if not (distributed.is_available() and distributed.is_gloo_available()):
        raise NotSupportedError("several ranks need gloo, which this build of torch does not have")
    options = c10d.ProcessGroupGloo._Options()
    # Of one machine's ranks nothing is to be reached from elsewhere, of several machines' only from their network.
    here = "127.0.0.1" if isinstance(store, c10d.FileStore) else address_towards(store.host)
    network = os.environ.get("GLOO_SOCKET_IFNAME")
    make = c10d.ProcessGroupGloo.create_device
    options._devices = [make(interface=network) if network else make(hostname=here)]
    options._timeout = wait
    return c10d.ProcessGroupGloo(c10d.PrefixStore(f"mainspring ranks {name}", store), rank, size, options)


def _nccl(store: Any, name: str, rank: int, size: int, wait: timedelta) -> Any:
    if not distributed.is_nccl_available():
        raise NotSupportedError("several ranks with a GPU each need NCCL, which this build of torch does not have")
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = wait
    return c10d.ProcessGroupNCCL(c10d.PrefixStore(f"mainspring tensors {name}", store), rank, size, options)
