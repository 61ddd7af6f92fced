"""Make the worker that a checkpoint needs. Importing this file imports all that a worker needs."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidArgumentError
from ..model.load.kept_decisions import KeptDecisions
from ..model.run.pooling import wants_pooling
from ..parallel.group import RankGroup
from ..plan.control import Worker
from .backends import pick_device
from .generation_worker import GenerationWorker
from .pooling_worker import PoolingWorker
from .ranked_worker import RankedWorker
from .ranks import Ranks
from .worker import Decisions, LocalWorker


def start_worker(
    config: EngineConfig,
    decisions: Decisions | Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Worker:
    """The worker for the checkpoint of `config`, which keeps its decisions of fusing for later starts. If several ranks
    compute it, this process is the first.

    Args:
        decisions: see `make_worker`.
        ranks: the others; None: they are started here.
    """
    if config.parallel_config.num_ranks == 1:
        return make_worker(config, decisions, KeptDecisions())
    device = device_of(config, 0, config.parallel_config.num_local_ranks)
    ranks = ranks or Ranks(config, decisions)
    try:
        with ranks.explains():
            ranks.wait_loaded()
            group = RankGroup(0, ranks.size, ranks.store, device, ordered=config.parallel_config.ordered_sums)
            local = make_worker(config, decisions, group=group)
            return RankedWorker(local, ranks, config.parallel_config.pipeline_parallel_size)
    except BaseException:
        ranks.close()
        raise


def make_worker(
    config: EngineConfig,
    decisions: Decisions | Mapping[str, Any] | None = None,
    kept: KeptDecisions | None = None,
    group: RankGroup | None = None,
) -> LocalWorker:
    """The worker in this process for the checkpoint of `config`: one that generates tokens, or one that pools.

    Args:
        decisions: those of the core before, as they are or decoded from a message.
        kept: for a first core: decisions of fusing from an earlier start.
        group: see `LocalWorker`.
    """
    kind = PoolingWorker if wants_pooling(config.model_config, config.load_config) else GenerationWorker
    if kind is PoolingWorker and config.model_config.logits_processors:
        raise InvalidArgumentError("logits_processors are given, but a pooling model has no logits to choose from")
    return kind(config, None if decisions is None else msgspec.convert(decisions, Decisions), kept, group)


def make_follower(config: EngineConfig, decisions: Any, group: RankGroup) -> LocalWorker:
    """The worker of a rank that chooses no tokens."""
    model = replace(config.model_config, logits_processors=[])
    return make_worker(replace(config, model_config=model), decisions, group=group)


def device_of(config: EngineConfig, rank: int, num_local: int) -> torch.device:
    """The device of one of this machine's `num_local` ranks. On a CPU they share the threads that this process has for
    itself, unless the user has set their number.

    Raises:
        InvalidArgumentError: see `pick_device`.
    """
    device = pick_device(config.device_config.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _all_threads() // num_local))
    return device


@functools.cache
def _all_threads() -> int:
    return torch.get_num_threads()
