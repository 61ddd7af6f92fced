"""From logits to tokens: masks, then the keyed Gumbel choice.

The parameters lie in columns by slot, set once when a request gets its slot.
"""

from __future__ import annotations

import numpy as np
import torch

from ..kernels.gumbel import keyed_choice
from ..kernels.sampling import mask_top_k_top_p_min_p
from .request import Request


class Sampler:
    """Chooses one token for each row of logits. A row's choice depends on its logits, parameters and position alone."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.int64)
        self._unstoppable_until = np.zeros(max_num_seqs, np.int64)  # position of the first token that may be a stop
        self._stop_tokens: dict[int, torch.Tensor] = {}  # by slot, where min_tokens is set

    def admit(self, request: Request) -> None:
        slot, sampling = request.slot, request.sampling
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = sampling.seed
        self._unstoppable_until[slot] = request.prompt_len + sampling.min_tokens if request.stop_tokens else 0
        self._stop_tokens.pop(slot, None)
        if request.stop_tokens and sampling.min_tokens:
            self._stop_tokens[slot] = torch.tensor(sorted(request.stop_tokens), device=self._device)

    def choose(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """`logits` ``[rows, vocab]``, for the tokens at `positions` of the requests at `slots` (both ``[rows]``) →
        int64 ``[rows]`` on the device. Changes `logits`."""
        for row in np.flatnonzero(positions < self._unstoppable_until[slots]).tolist():
            logits[row, self._stop_tokens[int(slots[row])]] = -torch.inf
        temperature = self._temperature[slots]
        sampled = np.flatnonzero(temperature > 0)
        if sampled.size == 0:
            return logits.argmax(dim=-1)
        tokens = logits.argmax(dim=-1) if sampled.size < len(slots) else None
        rows, slots = self._put(sampled), slots[sampled]
        scaled = logits[rows].float() / self._put(temperature[sampled]).unsqueeze(1)
        limits = self._top_k[slots], self._top_p[slots], self._min_p[slots]
        if limits[0].any() or (limits[1] < 1).any() or limits[2].any():
            scaled = mask_top_k_top_p_min_p(scaled, *map(self._put, limits))
        chosen = keyed_choice(scaled, self._put(self._seed[slots]), self._put(positions[sampled]))
        if tokens is None:
            return chosen
        tokens[rows] = chosen
        return tokens

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
