"""The results of a worker's start-up measurements, as plain values."""

from __future__ import annotations

import msgspec

from ..model.learn.fuse import Decision


class Decisions(msgspec.Struct, kw_only=True):
    """Decisions that another worker reuses instead of measuring again: the worker started after a crash, or another
    rank of the same model. Ranks with different fused modules or block counts would compute different steps."""

    fusing: dict[str, Decision] = {}  # which modules `fuse_model` fused, by their names
    num_blocks: int = 0  # in the pool, the null block included; 0: not measured yet
    max_model_len: int = 0  # tokens of the longest request that the blocks and the model allow
    device_bytes: int = 0  # GPU memory that the worker occupies
