"""A process group in which a trainer sends weights to workers: gloo over TCP, beside torch's default group.

The trainer is rank 0. It listens on one address only, but whoever reaches that address may join.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
from torch import distributed

from ...ipc.errors import ConnectError, NotSupportedError
from ...ipc.transport import address_towards

TIMEOUT = timedelta(minutes=5)  # longest wait for the other ranks to join, and for one tensor
POLL_SECONDS = 0.0005  # interval at which a broadcast's end is looked for

P = ParamSpec("P")
R = TypeVar("R")


class TrainerGroup:
    """Made by each rank; waits until all have joined. It is used by one thread at a time.

    Args:
        address, port: where rank 0 listens.
        rank: of this process; 0 is the trainer.

    Raises:
        ConnectError: the address can't be opened, or a rank did not join in time.
        NotSupportedError: torch was built without gloo.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        if not (distributed.is_available() and distributed.is_gloo_available()):
            raise NotSupportedError("weights come over gloo, which this build of torch does not have")
        self._group: Any = None  # a ProcessGroupGloo; torch's stubs do not list its methods
        try:
            self._group = _connect(address, port, rank, world_size)
        except (RuntimeError, OSError) as error:
            raise ConnectError(f"the trainer's group at {address}:{port} did not come together: {error}") from None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor from rank 0 to all others, in place. It is contiguous, in host memory, and of the same dtype
        and shape in each rank.

        Raises:
            ConnectError: a rank has left or did not answer in time. The group is closed then.
        """
        work: Any = None
        group, flat = self._group, tensor.detach().reshape(-1).view(torch.uint8)
        if group is None:
            raise ConnectError("the trainer's group is closed")
        try:
            if flat.numel():
                work = group.broadcast(flat, 0)
                while not work.is_completed():  # a thread inside torch's wait would abort the process when that exits
                    time.sleep(POLL_SECONDS)
                work.wait()
        except RuntimeError as error:
            self.close()
            raise ConnectError(f"the connection in the trainer's group is lost: {error}") from None
        finally:
            group = work = None  # an error's traceback would keep the connections open

    def close(self) -> None:
        """Close the connections, which ends the waiting of other ranks. If another thread is in `broadcast`, they are
        closed once that returns."""
        self._group = None


def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Call a function in a thread of its own. Unlike those of an executor, it does not delay the end of the process."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="mainspring-weights", daemon=True).start()
    return future


def _connect(address: str, port: int, rank: int, world_size: int) -> Any:
    c10d: Any = distributed  # torch's stubs do not export these names
    listens = None
    if rank == 0:  # torch's own socket would listen on every address of the machine
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listens = socket.create_server((address, port), family=family).detach()
    store = c10d.TCPStore(
        address,
        port,
        world_size,
        is_master=rank == 0,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listens,
        use_libuv=False,  # libuv's server ignores the socket
    )
    options = c10d.ProcessGroupGloo._Options()
    # gloo would take an address by this machine's name, which another one may not reach.
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address_towards(address))]
    options._timeout = TIMEOUT
    named = c10d.PrefixStore("mainspring weights", store)
    return c10d.ProcessGroupGloo(named, rank, world_size, options)
