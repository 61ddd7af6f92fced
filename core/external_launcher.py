"""An engine whose ranks are processes that a launcher such as torchrun has started (`external_launcher`).

Each of them constructs the engine and makes the same calls. The first process of those that compute one
model leads: it has the core. Each other one offers a rank to this core, and is told the outputs (ipc/shared_client.py).
"""

from __future__ import annotations

import os
import platform
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import distributed

from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidArgumentError
from ..ipc.keys import KeyPair, new_keypair
from ..ipc.rank_agent import RankAgent
from ..ipc.shared_client import FollowingClient, LeadingClient
from ..ipc.transport import address_towards, free_port, make_runtime_dir
from .parallel.group import RankGroup

END_SECONDS = 10.0  # that the process which leads has to end its core, when another one has shut down
IDLE_SECONDS = 7 * 24 * 3600.0  # that a process may let the others wait between two calls of the engine


class Meeting(NamedTuple):
    """What the process that leads tells the others of its group."""

    host: str
    port: int  # where ranks join
    store: str  # of the group of the processes; see `RankGroup`
    keys: KeyPair


class LaunchedRanks:
    """A `Placement` of the engine in one of the launched processes.

    Attributes:
        config: with this process's `data_parallel_rank`.

    Raises:
        InvalidArgumentError: no launcher has started this process, or another number of processes than ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise InvalidArgumentError(
                f'distributed_executor_backend is "external_launcher", but {missing[0]} is not set: use torchrun'
            )
        parallel = config.parallel_config
        size, copies = parallel.num_ranks, parallel.num_copies
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world != size * copies:
            raise InvalidArgumentError(
                f"{world} processes were launched for {size} ranks and data_parallel_size {copies}; there must be "
                f"{size * copies}"
            )
        if not distributed.is_initialized():
            distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        self._copies, self._place, first = copies, rank % size, rank - rank % size
        self._folder = make_runtime_dir()
        self._agent: RankAgent | None = None
        self._group: RankGroup | None = None
        keys = new_keypair(Path(self._folder, "engine.key"))
        host = address_towards(os.environ["MASTER_ADDR"])
        mine = Meeting(host, free_port(host), f"tcp://{host}:{free_port(host)}", keys)
        meetings: list[Any] = [None] * world
        distributed.all_gather_object(meetings, mine)
        self._meeting: Meeting = meetings[first]
        parallel = replace(
            parallel,
            data_parallel_size=parallel.homes,  # other copies are cores of other processes
            data_parallel_rank=rank // size,
            master_addr=host,
            master_port=mine.port,
            rank_key_file=str(Path(self._folder, "engine.key")),
            device_ids=_own_gpus(),
        )
        self.config = replace(config, parallel_config=parallel)
        if size > 1:
            cpu = torch.device("cpu")
            self._group = RankGroup(self._place, size, self._meeting.store, cpu, IDLE_SECONDS)

    def client(self, launch: Callable[[EngineConfig], Any], connect: Callable[[Any], Any]) -> Any:
        """See `Placement`."""
        if self._group is None:
            client = launch(self.config)
        elif self._place == 0:
            client = LeadingClient(lambda: launch(self.config), self._group.from_leader)
        else:
            gpus = {"CUDA_VISIBLE_DEVICES": ",".join(self.config.parallel_config.device_ids)}
            meeting, neighbours = self._meeting, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            address = f"tcp://{meeting.host}:{meeting.port}"
            self._agent = RankAgent(address, meeting.keys, 0, neighbours, platform.node(), gpus)
            self._thread = threading.Thread(target=self._agent.run, name="mainspring-rank-agent", daemon=True)
            self._thread.start()
            client = FollowingClient(self._group.from_leader)
        parallel = replace(client.config.parallel_config, data_parallel_size=self._copies)
        client.config = replace(client.config, parallel_config=parallel)
        return client

    def close(self) -> None:
        """See `Placement`."""
        if self._agent is not None:
            self._agent.stop(END_SECONDS)  # else the core would take it for a death
            self._thread.join()
        if self._group is not None:
            self._group.leave()
        shutil.rmtree(self._folder, ignore_errors=True)


def _own_gpus() -> list[str]:
    """The GPU of this process, as the launcher numbers the processes of a machine; none without GPUs."""
    local, visible = int(os.environ.get("LOCAL_RANK", "0")), os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    return listed[local : local + 1] if len(listed) > 1 else listed
