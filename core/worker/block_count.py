"""The number of KV blocks: from the configuration, from a profile on a GPU, or from free memory on a CPU.

Also the slots in host memory, for the blocks and snapshots that are evicted.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ...ipc.config import CacheConfig, EngineConfig
from ...ipc.errors import InvalidArgumentError, OutOfMemoryError
from ...kernels.contract import ROW_MULTIPLE, Backend
from ..memory.recurrent_state import num_states
from ..memory.updates import LayerGroup
from ..model.run.paged_model import PagedModel
from ..model.run.positions import longest_sequence
from ..plan.step import PROMPT_LOGITS
from .kv_layout import KVLayout
from .runner import ModelRunner

logger = logging.getLogger(__name__)

CPU_SHARE = 0.4  # share of host memory free after loading; the rest is for activations and other programs
CPU_DEFAULT_BYTES = 4 << 30  # largest KV cache on a CPU, unless the user sets a size
GRAPH_BYTES = 8 << 20  # memory of one captured graph, besides the pool that all graphs share
SNAPSHOT_SHARE = 0.25  # of the memory for blocks and states, or on the host: the most that snapshots of states take
ENCODING_BYTES = 1 << 30  # activations of an encoder for one item: an image of some ten thousand patches
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container, as it sees that
CHOICE_BYTES = 24  # memory per logit while tokens are chosen: the logit and its masked copies in fp32


def count_blocks(
    config: EngineConfig,
    layout: KVLayout,
    model: PagedModel,
    backend: Backend,
    graph_sizes: Sequence[int] = (),
    beside: int = 0,
    recurrent: LayerGroup | None = None,
) -> tuple[int, int]:
    """The number of blocks in the pool (the null block included), and the length of the longest request.

    Without `max_model_len` the longest request is the model's limit, or what the cache can hold if that is less. There
    are never more blocks than `max_num_seqs` requests can fill.

    Args:
        beside: bytes that a draft model needs for each block.
        recurrent: the layers with recurrent state, for whose states memory is left, snapshots included.

    Raises:
        OutOfMemoryError: a single request of `max_model_len` tokens does not fit.
    """
    cache, scheduler = config.cache_config, config.scheduler_config
    budget = scheduler.max_num_batched_tokens
    wanted = config.model_config.max_model_len
    limit = wanted or model.max_position or 4096
    most = longest_sequence(model.config, asked=True)
    if wanted and most and wanted > most:
        raise InvalidArgumentError(f"max_model_len is {wanted}; the model's own limit is {most}")
    available = cache.num_gpu_blocks_override
    if available is None:
        available = 1 + scheduler.max_num_seqs * layout.blocks_for(limit, budget)
        if cache.kv_cache_memory_bytes is not None:
            memory = cache.kv_cache_memory_bytes
        elif model.device.type == "cuda":
            memory = _profile_cuda(config, layout, model, backend, graph_sizes) - _media_bytes(config, model)
        else:
            states = 0 if recurrent is None else num_states(recurrent) * recurrent.token_bytes
            ranks = config.parallel_config.num_ranks  # they share the memory
            free = max(0, free_host_bytes() - _media_bytes(config, model))
            memory = min(CPU_DEFAULT_BYTES // ranks + states, int(free * CPU_SHARE) // ranks)
        if recurrent is not None:
            memory = _without_states(config, memory, recurrent)
        if layout.groups:
            available = min(available, memory // (layout.block_bytes + beside))
    needed = 1 + layout.blocks_for(limit, budget)
    if needed > available and wanted is None:
        # Binary search: a longer request never needs fewer blocks.
        low = bisect_left(range(limit), available, key=lambda length: layout.blocks_for(length + 1, budget))
        if low > 1:
            logger.warning("max_model_len cut from %d to %d: that is what the KV cache holds", limit, low)
            return available, low
    if needed > available or limit < 2:
        raise OutOfMemoryError(
            f"one request of max_model_len {limit} needs {needed} KV blocks of {layout.block_bytes + beside} bytes, "
            f"but the cache has {max(0, available)}: set a smaller max_model_len or a larger kv_cache_memory_bytes"
        )
    return available, limit


def _media_bytes(config: EngineConfig, model: PagedModel) -> int:
    """Memory for encoded media, and for what encoding an item takes."""
    return 0 if model.merger is None else int(config.multimodal_config.mm_encoder_cache_gb * 2**30) + ENCODING_BYTES


def _without_states(config: EngineConfig, memory: int, group: LayerGroup) -> int:
    """What is left of `memory` bytes for blocks, beside the states of running requests and snapshots.

    Raises:
        OutOfMemoryError: the states of running requests do not fit.
    """
    states = num_states(group) * group.token_bytes
    if states > memory:
        raise OutOfMemoryError(
            f"the recurrent state of max_num_seqs {group.slots} requests takes {states / 2**20:.0f} MiB, and there are "
            f"{memory / 2**20:.0f}: set a smaller max_num_seqs or a larger kv_cache_memory_bytes"
        )
    caching = config.cache_config.enable_prefix_caching
    return memory - states - (int(memory * SNAPSHOT_SHARE) if caching else 0)


def count_snapshots(config: EngineConfig, layout: KVLayout, num_blocks: int, group: LayerGroup) -> int:
    """The number of snapshots of recurrent state: as many as fit in their share of the memory."""
    if not config.cache_config.enable_prefix_caching:
        return 0
    beside = num_states(group) * group.token_bytes + num_blocks * layout.block_bytes
    return int(beside * SNAPSHOT_SHARE / (1 - SNAPSHOT_SHARE)) // group.token_bytes


def free_host_bytes() -> int:
    """Host memory that is available without swapping, and that a container may use. If the system does not report it:
    half of the total."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    with suppress(OSError, KeyError, ValueError):
        free = int(_fields(Path("/proc/meminfo"))["MemAvailable:"]) * 1024
    with suppress(OSError, KeyError, ValueError):  # ValueError: the limit is "max"
        limit, used = (int((CONTROL_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = _fields(CONTROL_GROUP / "memory.stat")
        free = min(free, limit - used + int(stat["active_file"]) + int(stat["inactive_file"]))
    return max(0, free)


def _fields(file: Path) -> dict[str, str]:
    return {name: value for name, value, *_ in map(str.split, file.read_text().splitlines())}


def offloading_bytes(cache: CacheConfig) -> int:
    """Bytes of host memory for evicted blocks and snapshots, from the configuration.

    Raises:
        InvalidArgumentError: the two names of the option contradict each other, or the prefix cache is disabled.
    """
    size, older = cache.kv_offloading_size, cache.swap_space
    if size is not None and older is not None and size != older:
        raise InvalidArgumentError(
            f"kv_offloading_size is {size} and swap_space, its older name, is {older}: give one of them"
        )
    num_bytes = int((size or older or 0) * 2**30)
    if num_bytes and not cache.enable_prefix_caching:
        name = "kv_offloading_size" if size else "swap_space"
        raise InvalidArgumentError(f"{name} is {size or older}, but without enable_prefix_caching nothing is cached")
    return num_bytes


class HostSlots(NamedTuple):
    """Numbers of slots in host memory."""

    blocks: int
    states: int


def count_slots(num_bytes: int, block_bytes: int, free_bytes: int, state_bytes: int = 0) -> HostSlots:
    """The numbers of blocks of `block_bytes` and snapshots of `state_bytes` that fit in `num_bytes`. Snapshots get at
    most their share, or everything if there are no blocks. free_bytes: free host memory.

    Raises:
        InvalidArgumentError: `num_bytes` is less than one block, or there is nothing to keep.
        OutOfMemoryError: `num_bytes` is more than `free_bytes`.
    """
    if num_bytes > free_bytes:
        raise OutOfMemoryError(
            f"kv_offloading_size is {num_bytes / 2**30:.2f} GiB; {free_bytes / 2**30:.2f} GiB of host memory are free"
        )
    if not num_bytes:
        return HostSlots(0, 0)
    least, name = (block_bytes, "KV block") if block_bytes else (state_bytes, "snapshot of recurrent state")
    if not least:
        raise InvalidArgumentError("kv_offloading_size is set, and this model's cache keeps nothing: unset it")
    if num_bytes < least:
        raise InvalidArgumentError(f"kv_offloading_size is {num_bytes} bytes; one {name} takes {least}")
    most = min(int(num_bytes * SNAPSHOT_SHARE), num_bytes - block_bytes) if block_bytes else num_bytes
    states = most // state_bytes if state_bytes else 0
    return HostSlots((num_bytes - states * state_bytes) // block_bytes if block_bytes else 0, states)


def _profile_cuda(
    config: EngineConfig, layout: KVLayout, model: PagedModel, backend: Backend, graph_sizes: Sequence[int]
) -> int:
    """Bytes of GPU memory for the cache: the configured share of the GPU, minus the peak of a step (weights included),
    the graphs, and the memory of other programs. The peak is that of the largest forward pass, or of choosing tokens
    for `max_num_seqs` requests if that is higher."""
    cache, scheduler, device = config.cache_config, config.scheduler_config, model.device
    budget = scheduler.max_num_batched_tokens
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step(model, layout, backend, budget)
    choosing = min(scheduler.max_num_seqs + PROMPT_LOGITS, budget) * model.vocab_size * CHOICE_BYTES
    peak = max(torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device) + choosing)
    if graph_sizes:  # all graphs share one pool, as large as the largest graph needs
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run_largest_step(model, layout, backend, max(graph_sizes), requests=max(graph_sizes))
        peak += torch.cuda.max_memory_allocated(device) - before + GRAPH_BYTES * len(graph_sizes)
        # Each graph keeps its own output buffer for the logits.
        peak += (sum(graph_sizes) - max(graph_sizes)) * model.vocab_size * model.dtype.itemsize
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    logger.info(
        "a step takes up to %.2f GB of the GPU, weights included; other programs take %.2f GB", peak / 1e9, others / 1e9
    )
    return max(0, int(total * cache.gpu_memory_utilization) - peak - others)


def run_largest_step(
    model: PagedModel,
    layout: KVLayout,
    backend: Backend,
    budget: int,
    requests: int = 0,
) -> torch.Tensor:
    """Run a step that fills the whole token budget, and return logits ``[8, vocab]``, or one row per request if there
    are more. All block tables name one block of a pool of two blocks, so that no KV cache is needed.

    Args:
        requests: number of requests in the step; 0: as few as possible.
    """
    longest = budget // requests if requests else min(budget, model.max_position or budget)
    starts = np.arange(0, budget, longest)
    runner = ModelRunner(model, layout, backend, 2, len(starts), longest, budget)
    runner.tables[:] = 1
    counts = np.minimum(longest, budget - starts)
    ids, rows = np.zeros(budget, np.int64), np.zeros(max(requests, ROW_MULTIPLE), np.int64)
    return runner.forward(np.arange(len(starts)), np.zeros_like(starts), counts, ids, rows)
