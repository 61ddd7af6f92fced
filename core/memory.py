"""How many KV blocks there are: from explicit sizes, from a profile on a GPU, from free memory on a CPU."""

from __future__ import annotations

import logging
import os
from bisect import bisect_left

import numpy as np
import torch

from ..ipc.config import CacheConfig, EngineConfig
from ..ipc.errors import InvalidArgumentError, OutOfMemoryError
from ..kernels.interface import ROW_MULTIPLE, Backend
from .kv_layout import KVLayout
from .model.paged_model import PagedModel
from .model_runner import ModelRunner

logger = logging.getLogger(__name__)

CPU_SHARE = 0.4  # of the memory that is free once the weights are loaded
CPU_DEFAULT_BYTES = 4 << 30


def count_blocks(config: EngineConfig, layout: KVLayout, model: PagedModel, backend: Backend) -> tuple[int, int]:
    """Blocks in the pool (the null block among them), and the longest request they and the model allow.

    Without `max_model_len` the model's own limit holds, cut to what the cache can hold. There are never more blocks
    than all seats could fill.

    Raises:
        OutOfMemoryError: not one request of `max_model_len` tokens would fit.
    """
    cache, scheduler = config.cache_config, config.scheduler_config
    budget = scheduler.max_num_batched_tokens
    wanted = config.model_config.max_model_len
    limit = wanted or model.max_position or 4096
    if wanted and model.max_position and wanted > model.max_position:
        raise InvalidArgumentError(f"max_model_len is {wanted}; the model's own limit is {model.max_position}")
    available = cache.num_gpu_blocks_override
    if available is None:
        available = _cache_bytes(cache, layout, model, backend, budget) // layout.block_bytes
        available = min(available, 1 + scheduler.max_num_seqs * layout.blocks_for(limit, budget))
    needed = 1 + layout.blocks_for(limit, budget)
    if needed > available and wanted is None:
        # blocks needed grow with the length
        low = bisect_left(range(limit), available, key=lambda length: layout.blocks_for(length + 1, budget))
        if low > 1:
            logger.warning("max_model_len cut from %d to %d: that is what the KV cache holds", limit, low)
            return available, low
    if needed > available or limit < 2:
        raise OutOfMemoryError(
            f"one request of max_model_len {limit} needs {needed} KV blocks of {layout.block_bytes} bytes, "
            f"but the cache has {max(0, available)}: set a smaller max_model_len or a larger kv_cache_memory_bytes"
        )
    return available, limit


def _cache_bytes(cache: CacheConfig, layout: KVLayout, model: PagedModel, backend: Backend, budget: int) -> int:
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    if model.device.type == "cuda":
        return _profile_cuda(model, layout, backend, cache.gpu_memory_utilization, budget)
    return min(CPU_DEFAULT_BYTES, int(free_host_bytes() * CPU_SHARE))


def free_host_bytes() -> int:
    """Memory that can be taken without swapping; where the system does not tell, half of what it has."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _profile_cuda(model: PagedModel, layout: KVLayout, backend: Backend, share: float, budget: int) -> int:
    """What the cache may take of a GPU: its share, less weights, the peak of the largest step and other programs."""
    torch.cuda.reset_peak_memory_stats(model.device)
    run_largest_step(model, layout, backend, budget)
    torch.cuda.synchronize(model.device)
    free, total = torch.cuda.mem_get_info(model.device)
    others = total - free - torch.cuda.memory_reserved(model.device)
    return max(0, int(total * share) - torch.cuda.max_memory_allocated(model.device) - others)


def run_largest_step(model: PagedModel, layout: KVLayout, backend: Backend, budget: int) -> torch.Tensor:
    """Requests that fill the whole budget, over a pool of two blocks that are named again and again: takes the memory
    of such a step without the cache's. Returns logits ``[8, vocab]``."""
    longest = min(budget, model.max_position or budget)
    starts = np.arange(0, budget, longest)
    runner = ModelRunner(model, layout, backend, 2, len(starts), longest, budget)
    runner.tables[:] = 1
    counts = np.minimum(longest, budget - starts)
    ids, rows = np.zeros(budget, np.int64), np.zeros(ROW_MULTIPLE, np.int64)
    return runner.forward(np.arange(len(starts)), np.zeros_like(starts), counts, ids, rows)
