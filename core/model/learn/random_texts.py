"""Texts that models are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig


def random_texts(config: PreTrainedConfig, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Fixed random token ids, int64 on the CPU, of these numbers of tokens. Never the padding token."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, config.vocab_size, (length,), generator=generator) for length in lengths]
    for ids in texts:
        ids[ids == getattr(config, "pad_token_id", None)] = 1
    return texts
