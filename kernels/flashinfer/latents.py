"""FlashInfer's attention over latents: which it knows, and its wrapper with the methods of the others.

Its kernels (`BatchMLAPagedAttentionWrapper`) read latents of `DIM` numbers and shared dimensions of `SHARED`, each from
a tensor with strides of its own. In our cache a latent and its shared dimensions lie one after the other, so both
tensors are views of one row. Where a latent is shorter than `DIM`, its view reaches over the shared dimensions and the
padding: the query has zeros there, and that part of the result is dropped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..contract import AttentionSpec

DIM, SHARED = 512, 64

INT_WORKSPACE = 1 << 20
"""Bytes. Nine lists of `MOST_WORKS` numbers, and five of a number for each multiprocessor."""

MOST_WORKS = 16384
"""Pairs of a tile of queries and a share of keys that a plan's lists have room for, which FlashInfer does not check."""

TILE = 64
"""Pairs of a query row and a head in its smallest tile of queries."""


def row_dim(spec: AttentionSpec) -> int:
    """The numbers of a token in the cache: both views end in them."""
    return max(DIM, spec.value_dim + SHARED)


def refusal(spec: AttentionSpec, itemsize: int) -> str | None:
    """The reason why the kernels do not serve latents of this shape, in words that complete "attention with … "."""
    shared, aligned = spec.key_dim - spec.value_dim, 16 // itemsize
    if spec.value_dim > DIM or shared > SHARED or not shared:
        return (
            f"latents of {spec.value_dim} numbers and {shared} shared dimensions: FlashInfer's kernels take {DIM} and "
            f"{SHARED} at most"
        )
    if spec.value_dim % aligned:
        return f"latents of {spec.value_dim} numbers: FlashInfer's kernels take multiples of {aligned}"
    if spec.window is not None or spec.softcap is not None:
        return "latents and a window or a soft cap: FlashInfer's kernels have none"
    return None


def views(rows: torch.Tensor, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of padded rows ``[..., row_dim]`` the latents ``[..., DIM]`` and the shared dimensions ``[..., SHARED]``."""
    return rows[..., :DIM], rows[..., value_dim : value_dim + SHARED]


def works(rows: np.ndarray, heads: int) -> np.ndarray:
    """For each request of so many query rows the most tiles that it is cut into, each with one share of keys. Further
    shares are fewer than the GPU has multiprocessors."""
    return -(-rows * heads // TILE)


class LatentWrapper:
    """A `BatchMLAPagedAttentionWrapper` as a lane uses it, for the layers of `spec`."""

    def __init__(self, inner: Any, spec: AttentionSpec) -> None:
        self.inner, self._spec = inner, spec

    def reset_workspace_buffer(self, float_workspace: torch.Tensor, int_workspace: torch.Tensor) -> None:
        """FlashInfer's has no such method."""
        self.inner._float_workspace_buffer, self.inner._int_workspace_buffer = float_workspace, int_workspace

    @property
    def _pin_memory_int_workspace_buffer(self) -> torch.Tensor:
        return self.inner._pin_memory_int_workspace_buffer  # type: ignore[no-any-return]

    @_pin_memory_int_workspace_buffer.setter
    def _pin_memory_int_workspace_buffer(self, pages: torch.Tensor) -> None:
        self.inner._pin_memory_int_workspace_buffer = pages

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_lens: torch.Tensor,
        page_size: int,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        """All int32; `kv_indices` on the device, and the others on the host. dtypes: of queries and of the cache."""
        heads, scale = self._spec.num_q_heads, self._spec.scale
        lists = qo_indptr, kv_indptr, kv_indices, kv_lens
        self.inner.plan(*lists, heads, DIM, SHARED, page_size, True, scale, *dtypes)

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], **options: Any) -> None:
        """query ``[rows, q_heads, key_dim]``; options: ``out`` ``[rows, q_heads, DIM]``, ``lse`` and ``return_lse``."""
        value_dim = self._spec.value_dim
        latent, shared = query[..., :value_dim], query[..., value_dim:]
        latents, others = views(cache[0][:, :, 0], value_dim)
        if latents.dtype != query.dtype:  # fp8, which is stored without scales
            options |= {"ckv_scale": 1.0, "kpe_scale": 1.0}
        self.inner.run(_padded(latent, DIM), _padded(shared, SHARED), latents, others, **options)


def _padded(x: torch.Tensor, dim: int) -> torch.Tensor:
    return F.pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x
