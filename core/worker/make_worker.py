"""Make the worker that a checkpoint needs. Importing this file imports all that a worker needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidArgumentError
from ..model.load.kept_decisions import KeptDecisions
from ..model.run.pooling import wants_pooling
from .generation_worker import GenerationWorker
from .pooling_worker import PoolingWorker
from .worker import Decisions, LocalWorker


def make_worker(
    config: EngineConfig, decisions: Decisions | Mapping[str, Any] | None = None, kept: KeptDecisions | None = None
) -> LocalWorker:
    """The worker in this process for the checkpoint of `config`: one that generates tokens, or one that pools.

    Args:
        decisions: those of the core before, as they are or decoded from a message.
        kept: for a first core: decisions of fusing from an earlier start.
    """
    kind = PoolingWorker if wants_pooling(config.model_config, config.load_config) else GenerationWorker
    if kind is PoolingWorker and config.model_config.logits_processors:
        raise InvalidArgumentError("logits_processors are given, but a pooling model has no logits to choose from")
    return kind(config, None if decisions is None else msgspec.convert(decisions, Decisions), kept)
