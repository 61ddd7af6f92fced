"""What a worker found out at its start, in plain values."""

from __future__ import annotations

import msgspec

from ..model.learn.fuse import Decision


class Decisions(msgspec.Struct, kw_only=True):
    """Findings that another worker repeats instead of its own: the next one after a crash, or another rank of the same
    model. Ranks that fused different modules, or had other numbers of blocks, would compute different steps."""

    fusing: dict[str, Decision] = {}  # of what `fuse_model` did
    num_blocks: int = 0  # in the pool, the null block among them; 0: still to be measured
    max_model_len: int = 0  # tokens of the longest request that they and the model allow
    device_bytes: int = 0  # of a GPU's memory, that the worker has taken
