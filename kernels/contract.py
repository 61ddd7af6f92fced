"""What every kernel backend offers, and the shapes it is called with.

The idea is FlashInfer's: everything that is the same for all layers of a step is worked out once, in ``plan``; each
layer then calls ``run`` with its own query and its own part of the cache. A plan belongs to one `AttentionSpec`,
because window, soft cap, scale and head counts shape it.

The KV cache is paged. A layer's share is two strided views, keys ``[blocks, block_size, kv_heads, key_dim]`` and values
``[blocks, block_size, kv_heads, value_dim]`` ("NHD"). Token ``p`` of a request lies in block ``table[p // block_size]``
at row ``p % block_size``. Block 0 is the null block: padding rows write there, windowed requests list it in place of
blocks they gave back, and nothing ever reads it unmasked.

Two numbers belong to a token. Its *index* in its sequence addresses the cache: its block, its row there, which keys it
sees. Its *positions*, one for each axis, go into rotary embedding alone; most models have one axis, and there the
position is the index.

Clockwork: for each query row the result depends only on that row's query and on the keys and values that it sees, bit
for bit. Not on the other rows, nor on how a prompt was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from .decoder_contract import Decoder, LayerTensors, Linear, Norm, QuantizedWeight

ROW_MULTIPLE = 8
"""Rows of a forward pass are padded to a multiple of this: matrix products on a CPU then give each row the same bits
however many rows there are (checked by the clockwork tests, not assumed)."""


class SlopeBias(NamedTuple):
    """ALiBi (Press et al. 2022): ``-slope * |query index - key index|`` is added to a score."""

    slopes: tuple[float, ...]  # [q_heads]


class TableBias(NamedTuple):
    """``table[head][min(|query index - key index|, last)]`` is added to a score."""

    table: tuple[tuple[float, ...], ...]  # [q_heads][distances]


class AttentionSpec(NamedTuple):
    """What one attention layer asks for. Learned from the model's own calls, not from its config."""

    num_q_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None  # a query at index p sees keys from p - window + 1 on; None: from 0 on
    softcap: float | None = None  # scores become cap * tanh(score / cap)
    bias: SlopeBias | TableBias | None = None  # is added to the scaled and capped scores


class LayerCache(NamedTuple):
    """One layer's views into the block pool.

    The last dimension is contiguous, the other strides are the pool's own. A backend may ask for blocks that hold
    one head after the other (`Backend.heads_first`), which it reads faster than token after token.
    """

    keys: torch.Tensor  # [blocks, block_size, kv_heads, key_dim], strided over blocks
    values: torch.Tensor  # [blocks, block_size, kv_heads, value_dim]


class DeviceBatch(NamedTuple):
    """Twins of a `PagedBatch`'s arrays on the GPU, int32."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor


class SequenceOffsets(NamedTuple):
    """Where the sequences of a step begin and end in its flattened rows. Both int32, on the CPU.

    Each forward pass has one, also of a model without a KV cache: layers that mix the tokens of a sequence by other
    means than paged attention read it. Rows from ``cu_seqlens[-1]`` on are padding.
    """

    cu_seqlens: torch.Tensor  # [sequences + 1]: rows cu_seqlens[s]:cu_seqlens[s + 1] are those of sequence s
    slots: torch.Tensor  # [sequences]: the slot of each sequence's request; -1: a sequence of padding

    @classmethod
    def of(cls, lengths: Sequence[int], slots: Sequence[int]) -> SequenceOffsets:
        """Of sequences of so many rows, one after another."""
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return cls(ends.int(), torch.tensor(slots, dtype=torch.int32))


class PagedBatch(NamedTuple):
    """One step's rows for one KV group, in FlashInfer's CSR form. All int32, on the CPU.

    Request ``r`` owns query rows ``qo_indptr[r]:qo_indptr[r+1]``: the last of its tokens, ending at its KV length
    ``(kv_indptr[r+1] - kv_indptr[r] - 1) * block_size + last_page_len[r]``. Its keys (those of the query rows included,
    appended before ``run``) lie in blocks ``kv_indices[kv_indptr[r]:kv_indptr[r+1]]``, in order of index. Requests
    with a single query row come first.

    Attention is causal: a query row sees keys up to its own index. With `reach` it sees keys up to ``reach[row]``: its
    own index, or that of a later key of its request (a span of tokens that see each other both ways).
    """

    qo_indptr: torch.Tensor  # [requests + 1]
    kv_indptr: torch.Tensor  # [requests + 1]
    kv_indices: torch.Tensor  # [kv_indptr[-1]]
    last_page_len: torch.Tensor  # [requests], 1..block_size
    block_size: int
    num_single: int = 0  # how many requests have a single query row
    group: int = 0  # which KV group; a step has one batch for each, and plans of all are in use at once
    on_device: DeviceBatch | None = None  # where the device is a GPU
    reach: torch.Tensor | None = None  # [qo_indptr[-1]]


class Backend(Protocol):
    """A kernel backend. Stateless between steps but for workspaces it owns. What it does not say is plain torch's."""

    name: str
    deterministic: bool  # a row's bits depend on its request alone
    graph_max_kv_len: int | None  # longest request a step planned with `graph` may have; None: any; 0: no graphs
    heads_first: bool  # whether a block is to hold one head after the other, its keys and then its values

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """Why this attention, with queries of `dtype` and a cache of `kv_dtype`, is not for this backend, in words that
        complete "attention with … "; None: it is."""
        return None

    def takes(self, batch: PagedBatch) -> bool:
        """Whether `plan` and `run` serve this step. The reference kernels run a step that is not taken, over the cache
        as this backend lays it out; `append` is still this backend's."""
        return batch.reach is None

    def prepare(self, specs: Sequence[AttentionSpec], dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        """Compile what attention with these specs will need and nobody has built, before the first request waits for
        it. Raises `BackendUnavailableError` where that fails."""
        return

    def cache_dim(self, dim: int) -> int:
        """How many elements a head of `dim` takes in the cache; those beyond `dim` are zero."""
        return dim

    def append(
        self, cache: LayerCache, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Write keys ``[tokens, kv_heads, key_dim]`` and values ``[tokens, kv_heads, value_dim]`` of token ``t`` to
        row ``rows[t]`` of block ``blocks[t]`` (both int32 ``[tokens]``, on the cache's device) in the cache's dtype."""

    def plan(
        self, spec: AttentionSpec, batch: PagedBatch, device: torch.device, turn: int = 0, graph: bool = False
    ) -> Any:
        """Everything about this step's attention that does not depend on the layer. Opaque to the caller.

        `turn` is 0 or 1: two steps may be in flight, each with page-locked memory of its own; the caller waits until
        the copies out of a turn's are done before it takes that turn again. `graph`: all requests have one row, and
        what a captured `run` reads lies where it lay in the last plan with this spec, group and number of requests.
        """

    def run(self, plan: Any, query: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of ``query`` ``[rows, q_heads, key_dim]`` over the cache → ``[rows, q_heads, value_dim]``.

        ``rows`` may exceed ``qo_indptr[-1]`` (padding); the rows beyond it come back as zeros. ``sinks`` ``[q_heads]``
        are logits that take part in the softmax and carry no value.
        """

    def forget_graphs(self) -> None:
        """None that was captured so far will be replayed: what the next ones read may lie elsewhere."""
        return

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        """``x / rms(x) * (offset + weight)`` over the last dimension, computed in fp32, returned in x's dtype. Gemma's
        norm has offset 1."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``rms_norm(x + residual)`` and ``x + residual``, rounded to x's dtype, of contiguous ``[rows, n]``. May
        overwrite both arguments."""

    def rotate(self, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False) -> None:
        """Rotary position embedding, in place, of query ``[rows, q_heads, key_dim]`` and key ``[rows, kv_heads,
        key_dim]``, strided views. ``cos_sin`` is fp32 ``[rows, rotary_dim]``: the cosines of each row's position, then
        the sines. Of a head the first ``rotary_dim`` elements are rotated, element i with i + rotary_dim / 2, or, where
        interleaved, 2i with 2i + 1."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``: ``[..., in]``, ``[out, in]``, ``[out]`` → ``[..., out]``. torch's own gives a row
        the same bits as long as their number is a multiple of `ROW_MULTIPLE`."""
        return F.linear(x, weight, bias)

    def decoder(
        self,
        layers: Sequence[LayerTensors],
        norm: Norm,
        head: Linear,
        bits: int | None = None,
        quantized: Mapping[int, QuantizedWeight] | None = None,
    ) -> Decoder | None:
        """Layers with gated MLPs, the final norm and the output layer as a whole; None: this backend has no such thing.
        The memory of the linear layers' weights is taken over: the tensors are empty afterwards.

        bits: 8 or 4, of weights that are to be quantized. quantized: weights that are already, by the ``id`` of the
        tensor that holds their values.
        """
        return None

    def mask(
        self,
        scores: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        min_p: torch.Tensor | None,
    ) -> torch.Tensor:
        """fp32 scores ``[rows, vocab]`` with -inf where a row's top-k, top-p or min-p drops a token. The limits are
        ``[rows]``, int64, fp32 and fp32, on the scores' device; off are 0, 1 and 0, and None where no row has one."""

    def largest(self, scores: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]`` → the first of the largest in each row, int64 ``[rows]``."""
        return scores.argmax(dim=-1)

    def choose(
        self, scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """The keyed Gumbel choice (see gumbel.py) of rows ``sampled`` (bool ``[rows]``), the largest score of the
        others → int64 ``[rows]``. scores ``[rows, vocab]``, fp32 where any row is sampled; seeds and positions int64
        ``[rows]``."""

    def act_and_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """``act(gate) * up`` of ``[rows, 2 * n]``, gate first → ``[rows, n]``, computed in fp32; activation is
        ``silu``, ``gelu`` or ``gelu_tanh``. Raises ValueError for another."""
