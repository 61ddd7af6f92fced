"""What every kernel backend offers, and the shapes it is called with.

The idea is FlashInfer's: ``plan`` computes once a step what is the same for all layers, and each layer then calls
``run`` with its own query and its own part of the cache. A plan belongs to one `AttentionSpec`, because window, soft
cap, scale and head counts shape it.

The KV cache is paged. A layer's share is two strided views, keys ``[blocks, block_size, kv_heads, key_dim]`` and values
``[blocks, block_size, kv_heads, value_dim]`` ("NHD"). Token ``p`` of a request lies in block ``table[p // block_size]``
at row ``p % block_size``. Block 0 is the null block: padding rows write there, and the table of a windowed request
names it in place of blocks that the request gave back. A kernel must mask whatever it reads there.

Two numbers belong to a token. Its *index* in its sequence addresses the cache: its block, its row there, which keys it
sees. Its *positions*, one for each axis, go into rotary embedding alone; most models have one axis, and there the
position is the index.

Determinism: the bits of a query row's result depend on that row's query and on the keys and values that it sees, and
on nothing else: not on the other rows, and not on how a prompt was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from .decoder_contract import (
        Decoder,
        Experts,
        LayerTensors,
        Linear,
        Norm,
        Packed,
        QuantizedWeight,
        RecurrenceTensors,
        Routing,
    )

CLAMPED = "clamped"
"""The activation of gpt-oss, ``(up + 1) * gate * sigmoid(1.702 * gate)``: gate is at most 7, up from -7 to 7."""

ROW_MULTIPLE = 8
"""Rows of a forward pass are padded to a multiple of this: torch's matrix products on a CPU then give a row the same
bits whatever the number of rows is (tests/test_clockwork.py checks it)."""


IN_PROMPT = 1 << 30
"""`Choice.penalties` have this added to the count of a token that the prompt has; an output is far shorter."""


class SlopeBias(NamedTuple):
    """ALiBi (Press et al. 2022): ``-slope * |query index - key index|`` is added to a score."""

    slopes: tuple[float, ...]  # [q_heads]


class TableBias(NamedTuple):
    """``table[head][min(|query index - key index|, last)]`` is added to a score."""

    table: tuple[tuple[float, ...], ...]  # [q_heads][distances]


class AttentionSpec(NamedTuple):
    """The parameters of one attention layer, as the model's own calls give them."""

    num_q_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None  # a query at index p sees keys from p - window + 1 on; None: from 0 on
    softcap: float | None = None  # scores become cap * tanh(score / cap)
    bias: SlopeBias | TableBias | None = None  # is added to the scaled and capped scores
    latent: bool = False  # a value is the first value_dim numbers of its key, and the cache has both in one place
    selects: bool = False  # a query sees only those of its keys that an indexer selected (`Backend.run_selected`)
    index_dim: int = 0  # numbers of a token's index key, which the cache holds beside its key; 0: it has none


class LayerCache(NamedTuple):
    """One layer's views into the block pool.

    The last dimension is contiguous, and the other strides are the pool's. `Backend.heads_first` chooses between blocks
    that hold one head after the other and blocks that hold one token after the other.
    """

    keys: torch.Tensor  # [blocks, block_size, kv_heads, key_dim], strided over blocks
    values: torch.Tensor  # [blocks, block_size, kv_heads, value_dim]; of latents, a part of `keys`


class DeviceBatch(NamedTuple):
    """Copies of a `PagedBatch`'s arrays on the GPU, int32."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor


class Choice(NamedTuple):
    """How `Backend.draw` chooses tokens, by tensors on the scores' device. None: no row asks for it.

    Masks act first, then penalties, temperature, top-k, top-p and min-p. In rows that are not sampled, the temperature
    is 1, and no limit is set.
    """

    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # seeds, positions, sampled of `Backend.choose`
    temperature: torch.Tensor | None = None  # fp32 [rows]
    top_k: torch.Tensor | None = None  # as for `Backend.mask`, like the next two
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    masks: tuple[torch.Tensor, torch.Tensor] | None = None
    """Rows, int64 ``[n]``, and the bits of the tokens that they may choose from, int32 ``[n, ceil(vocab / 32)]``: bit
    ``t % 32`` of word ``t // 32`` for token t."""
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """Rows, int64 ``[n]``; occurrences of each token, int32 ``[any, vocab]``; the row of these that belongs to each
    row, int64 ``[n]``; repetition, frequency and presence penalty of each row, fp32 ``[n, 3]``. An occurrence in the
    output counts 1, and `IN_PROMPT` is added for a token of the prompt. For each token that occurs, a positive score is
    divided by the repetition penalty, and any other is multiplied by it. Then ``frequency * c + presence`` is
    subtracted where a token occurs c > 0 times in the output."""

    def amend(self, scores: torch.Tensor) -> torch.Tensor:
        """New fp32 scores ``[rows, vocab]`` with masks and penalties; `scores` if there are none."""
        if self.masks is None and self.penalties is None:
            return scores
        scores = scores.to(torch.float32, copy=True)
        if self.masks is not None:
            rows, bits = self.masks
            shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
            allowed = ((bits.unsqueeze(2) >> shifts) & 1).bool().flatten(1)[:, : scores.shape[1]]
            scores[rows] = scores[rows].masked_fill(~allowed, -torch.inf)
        if self.penalties is not None:
            rows, counts, indices, factors = self.penalties
            repetition, frequency, presence = (factors[:, i : i + 1] for i in range(3))
            mine, seen = scores[rows], counts[indices]
            times = seen & (IN_PROMPT - 1)
            repeated = torch.where(mine > 0, mine / repetition, mine * repetition)
            mine = torch.where(seen > 0, repeated, mine)
            scores[rows] = mine - frequency * times - presence * (times > 0)
        return scores


class RowScores(NamedTuple):
    """Log probabilities of the tokens of rows, and of each row's likeliest tokens."""

    token_ids: torch.Tensor  # int32 [rows, 1 + count]: the row's own token first
    logprobs: torch.Tensor  # fp32 [rows, 1 + count]
    ranks: torch.Tensor  # int32 [rows]: 1 + the number of tokens that are likelier than the row's own


class SequenceOffsets(NamedTuple):
    """Where the sequences of a step begin and end in its flattened rows. All int32, on the CPU.

    Each forward pass has one, also of a model without a KV cache: layers that mix the tokens of a sequence by other
    means than paged attention read it. Rows from ``cu_seqlens[-1]`` on are padding.
    """

    cu_seqlens: torch.Tensor  # [sequences + 1]: rows cu_seqlens[s]:cu_seqlens[s + 1] are those of sequence s
    slots: torch.Tensor  # [sequences]: the slot of each sequence's request; -1: a sequence of padding
    starts: torch.Tensor  # [sequences]: tokens computed in earlier steps
    prompt_lens: torch.Tensor  # [sequences]: tokens of the prompt, which a sequence may not have reached yet
    on_device: SequenceOffsets | None = None  # copies on a GPU, for layers with recurrent state

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        slots: Sequence[int],
        starts: Sequence[int] | None = None,
        prompt_lens: Sequence[int] | None = None,
    ) -> SequenceOffsets:
        """Of sequences of so many rows, one after another. Without `starts` they begin here, and without `prompt_lens`
        all of their tokens are prompt."""
        starts = [0] * len(lengths) if starts is None else starts
        if prompt_lens is None:
            prompt_lens = [start + length for start, length in zip(starts, lengths, strict=True)]
        ends = torch.tensor([0, *lengths]).cumsum(0)
        others = (torch.tensor(x, dtype=torch.int32) for x in (slots, starts, prompt_lens))
        return cls._make([ends.int(), *others, None])


class PagedBatch(NamedTuple):
    """One step's rows for one KV group, in FlashInfer's CSR form. All int32, on the CPU.

    Request ``r`` has query rows ``qo_indptr[r]:qo_indptr[r+1]``. They are its last tokens: the last row is the last of
    its ``(kv_indptr[r+1] - kv_indptr[r] - 1) * block_size + last_page_len[r]`` keys. The keys lie in blocks
    ``kv_indices[kv_indptr[r]:kv_indptr[r+1]]``, in order of index; those of the query rows are among them, because
    ``append`` comes before ``run``. Requests with a single query row come first.

    Attention is causal: a query row sees keys up to its own index. With `reach` it sees keys up to ``reach[row]``: its
    own index, or that of a later key of its request (a span of tokens that see each other both ways).
    """

    qo_indptr: torch.Tensor  # [requests + 1]
    kv_indptr: torch.Tensor  # [requests + 1]
    kv_indices: torch.Tensor  # [kv_indptr[-1]]
    last_page_len: torch.Tensor  # [requests], 1..block_size
    block_size: int
    num_single: int = 0  # requests with a single query row
    group: int = 0  # the KV group; a step has one batch for each group, and all their plans are in use at once
    on_device: DeviceBatch | None = None  # on a GPU
    reach: torch.Tensor | None = None  # [qo_indptr[-1]]


class Scans(Protocol):
    """Causal convolutions and recurrent scans over the rows of several sequences.

    Rows ``starts[s] : starts[s + 1]`` (int32 ``[sequences + 1]``) belong to a sequence whose state is
    ``state[slots[s]]`` (int32 ``[sequences]``), or zeros where ``fresh[s]`` (bool); the states are overwritten. States
    are fp32, and rows have any dtype, which the result has, too; rows that belong to no sequence give zeros. All is on
    one device. The recurrent form always: a row's bits depend neither on how its text was cut nor on other sequences.
    """

    def conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: bool,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        fresh: torch.Tensor,
    ) -> torch.Tensor:
        """x ``[rows, channels]``, weight ``[channels, width]``, bias ``[channels]``, state ``[slots, width - 1,
        channels]``, the oldest input first → like x. activation: SiLU of the sums, rounded to x's dtype before."""

    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        fresh: torch.Tensor,
        scale: float,
        l2norm: bool,
    ) -> torch.Tensor:
        """The gated delta rule (Yang et al., "Gated Delta Networks", 2024), or Kimi delta attention, whose decay each
        key has its own: q and k ``[rows, key heads, K]``, v ``[rows, heads, V]``, g, the logarithms of the decay,
        ``[rows, heads]`` or ``[rows, heads, K]``, beta ``[rows, heads]``, state ``[slots, heads, K, V]`` → like v.
        l2norm: of q and k; `scale` of q comes after it."""

    def mamba2(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        fresh: torch.Tensor,
    ) -> torch.Tensor:
        """Mamba 2 (Dao and Gu, 2024): x ``[rows, heads, P]``, dt ``[rows, heads]`` with bias, softplus and limits, A
        and D ``[heads]``, B and C ``[rows, groups, N]``, state ``[slots, heads, P, N]`` → like x."""

    def mamba1(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        Dskip: torch.Tensor,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        fresh: torch.Tensor,
    ) -> torch.Tensor:
        """Mamba (Gu and Dao, 2023): x and dt ``[rows, D]``, A ``[D, N]``, B and C ``[rows, N]``, Dskip ``[D]``, state
        ``[slots, D, N]`` → like x."""

    def mix(
        self,
        mixer: RecurrenceTensors,
        product: torch.Tensor,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        fresh: torch.Tensor,
    ) -> torch.Tensor:
        """A whole mixer between its projection's product ``[rows, n]`` and its output layer → ``[rows, heads *
        value_dim]``, in fp32 but for what comes in and goes out.

        In the order of `RecurrentMixer.columns` the product has the convolution's channels, of which come q, k and v of
        the gated delta rule, or x, B and C of Mamba 2; the gate ``[heads * value_dim]``; a number for the decay of each
        head; of the gated delta rule, one for beta, which is its sigmoid.
        """
        m, rows = mixer, len(product)
        x = torch.cat([product[:, first : first + n] for first, n in m.columns], dim=1).float()
        keys, inner = m.groups * m.key_dim, m.heads * m.value_dim
        sizes = [2 * keys + inner, inner, m.heads]
        channels, z, number, beta = x.split([*sizes, x.shape[1] - sum(sizes)], 1)
        weight, bias = m.conv
        mixed = self.conv(
            channels.contiguous(), weight.float().squeeze(1), bias, m.silu, conv_state, starts, slots, fresh
        )
        number, rate = number + m.decay_bias.float(), -m.decay.float().exp()
        soft = torch.where(number > 20, number, torch.log1p(torch.exp(number)))
        where = state, starts, slots, fresh
        if m.form == "gated_delta":
            q, k, v = (t.contiguous() for t in mixed.split([keys, keys, inner], 1))
            q, k = (t.view(rows, m.groups, m.key_dim) for t in (q, k))
            strength = 1 / (1 + torch.exp(-beta))
            out = self.gated_delta(q, k, v.view(rows, m.heads, -1), rate * soft, strength, *where, m.scale, m.l2norm)
        else:
            v, B, C = (t.contiguous() for t in mixed.split([inner, keys, keys], 1))
            B, C = (t.view(rows, m.groups, m.key_dim) for t in (B, C))
            skip = None if m.skip is None else m.skip.float()
            out = self.mamba2(v.view(rows, m.heads, -1), soft.contiguous(), rate, B, C, skip, *where)
        gate = 1 / (1 + torch.exp(-z))
        gate = gate * z if m.gate == "silu" else gate
        out = out.reshape(rows, inner)
        parts = (out * gate if m.gate_first else out).view(rows, -1, m.norm_size)
        normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + m.norm.eps)
        normed = (normed.view(rows, -1, len(m.norm.weight)) * m.norm.weight.float()).view(rows, inner)
        return (normed if m.gate_first else normed * gate).to(product.dtype)


class Backend(Protocol):
    """A kernel backend. Between steps it keeps nothing but workspaces. A method with a body here is optional."""

    name: str
    deterministic: bool  # a row's bits depend on its request alone
    graph_max_kv_len: int | None  # tokens of the longest request in a step with `graph`; None: any; 0: no graphs
    heads_first: bool  # a block holds one head after the other, of each the keys and then the values
    scans: Scans
    packs_integers: bool = False  # of quantized checkpoints; else these are loaded as plain ones
    knows_ids: bool = False  # what it makes of a weight goes by its ``id``, so that none may be replaced unnoticed

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """The reason why this backend does not serve such attention with queries of `dtype` and a cache of `kv_dtype`,
        in words that complete "attention with … "; None: it serves it. The reference kernels run what is refused."""
        return None

    def caches_latents(self, spec: AttentionSpec, dtype: torch.dtype) -> bool:
        """Whether a model of `dtype` with such attention over latents caches these; else it caches the keys and values
        that it makes of them. Where an indexer selects the keys, the reference kernels have a single head to gather."""
        return spec.selects or self.refuses(spec, dtype, dtype) is None

    def takes(self, batch: PagedBatch) -> bool:
        """Whether `plan` and `run` serve this step. The reference kernels run a step that is not taken, over the cache
        as this backend lays it out; `append` is still this backend's."""
        return batch.reach is None

    def prepare(self, specs: Sequence[AttentionSpec], dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        """Compile what attention with these specs will need and nobody has built, before the first request waits for
        it. Raises `BackendUnavailableError` where that fails."""
        return

    def cache_dims(self, spec: AttentionSpec) -> tuple[int, int]:
        """The number of elements that a key head and a value head take in the cache; those beyond its own are zero."""
        return spec.key_dim, spec.value_dim

    def append(
        self, cache: LayerCache, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Write keys ``[tokens, kv_heads, key_dim]`` and values ``[tokens, kv_heads, value_dim]`` of token ``t`` to
        row ``rows[t]`` of block ``blocks[t]`` (both int32 ``[tokens]``, on the cache's device) in the cache's dtype."""

    def plan(
        self, spec: AttentionSpec, batch: PagedBatch, device: torch.device, turn: int = 0, graph: bool = False
    ) -> Any:
        """What this step's attention needs and what does not depend on the layer. Only the backend looks inside.

        turn: 0 or 1. Two steps may be in flight, and each has page-locked memory of its own; the caller takes a turn
        again when the copies out of its memory are done. graph: all requests have one row, and the memory that a
        captured `run` reads has the addresses of the last plan with this spec, group and number of requests.
        """

    def run(self, plan: Any, query: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of ``query`` ``[rows, q_heads, key_dim]`` over the cache → ``[rows, q_heads, value_dim]``.

        ``rows`` may exceed ``qo_indptr[-1]``: the rows from there on are padding, and their results are zeros.
        ``sinks`` ``[q_heads]`` are logits that take part in the softmax and have no value.
        """

    def run_selected(
        self,
        plan: Any,
        query: torch.Tensor,
        cache: LayerCache,
        selected: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`run` with a plan of a spec that selects. ``selected`` ``[rows, n]`` has for each row the indices of the keys
        that it sees, ascending. Those behind the row's own index stand for none; a row has at least one other."""
        raise ValueError(f"{self.name} has no kernel for selected keys")

    def forget_graphs(self) -> None:
        """No graph that was captured so far will be replayed; the next ones may read other addresses."""
        return

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        """``x / rms(x) * (offset + weight)`` over the last dimension, computed in fp32, in the dtype of `x`. The
        offset is 0, and 1 in Gemma's norm."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``rms_norm(x + residual)`` and ``x + residual``, rounded to x's dtype, of contiguous ``[rows, n]``. May
        overwrite both arguments."""

    def rotate(self, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False) -> None:
        """Rotary position embedding, in place, of query ``[rows, q_heads, key_dim]`` and key ``[rows, kv_heads,
        key_dim]``, strided views. ``cos_sin`` is fp32 ``[rows, rotary_dim]``: the cosines of each row's position, then
        the sines. The first ``rotary_dim`` elements of a head are rotated: element i with i + rotary_dim / 2, or, if
        `interleaved`, 2i with 2i + 1."""

    def norm_and_rotate(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        norms: tuple[Norm, Norm],
        cos_sin: torch.Tensor,
        interleaved: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rms_norm` of each head of query and key, and then `rotate`. May overwrite both. → query and key"""
        query, key = (self.rms_norm(x, *norm) for x, norm in zip((query, key), norms, strict=True))
        self.rotate(query, key, cos_sin, interleaved)
        return query, key

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``: ``[..., in]``, ``[out, in]``, ``[out]`` → ``[..., out]``. torch's product gives a
        row the same bits if the number of rows is a multiple of `ROW_MULTIPLE`."""
        return F.linear(x, weight, bias)

    def route(
        self, logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts of each row by a router's logits ``[rows, experts]`` → their numbers, int64 ``[rows, top_k]``, those
        of the highest scores first, of equal ones the first, and their shares, fp32. correction: ``[experts]``, see
        `Routing`."""
        scores = logits.float().sigmoid() if routing.sigmoid else logits.float().softmax(1)
        places = scores if correction is None else scores + correction
        if routing.groups > 1:
            parts = places.unflatten(1, (routing.groups, -1))
            left_out = parts.topk(2)[0].sum(2).argsort(dim=1, descending=True, stable=True)[:, routing.kept :]
            gone = torch.zeros_like(parts[..., 0], dtype=torch.bool).scatter_(1, left_out, True)
            places = parts.masked_fill(gone.unsqueeze(2), -torch.inf).flatten(1)
        chosen = places.argsort(dim=1, descending=True, stable=True)[:, : routing.top_k]
        shares = scores.gather(1, chosen)
        if routing.normalise:
            shares = shares / (shares.sum(1, keepdim=True) + 1e-20)
        return chosen, shares * routing.scale

    def experts(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, experts: Experts) -> torch.Tensor:
        """The experts of a mixture, of which each row of x ``[rows, hidden]`` goes through a few.

        chosen: their numbers, int ``[rows, n]``. shares: what their outputs are multiplied by, ``[rows, n]``.
        → ``[rows, hidden]``: the sum of each row's outputs, in fp32, rounded once.
        """

        def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
            gate_up, down = experts.layers(expert)
            return self.linear(self.act_and_mul(self.linear(rows, *gate_up), experts.activation), *down)

        return each_expert(x, chosen, shares, len(experts.down), compute)

    def decoder(
        self,
        layers: Sequence[LayerTensors],
        norm: Norm,
        head: Linear,
        bits: int | None = None,
    ) -> Decoder | None:
        """Layers with gated MLPs, the final norm and the output layer as one object; None: this backend runs a model
        layer by layer. The decoder takes the memory of the linear layers' weights: the tensors are empty afterwards.

        bits: 8, 4, `NF4` or `INT8_ROWS`: quantize the weights. A `LazyWeight` keeps its integers.
        """
        return None

    def pack(self, weight: QuantizedWeight, dtype: torch.dtype) -> Packed:
        """A weight ``[out, in]`` in the form in which a decoder reads it, for rows of this dtype. Raises ValueError
        for groups that kernels don't take, and unless the backend `packs_integers`."""
        raise ValueError(f"the {self.name} backend packs no integers")

    def mask(
        self,
        scores: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        min_p: torch.Tensor | None,
    ) -> torch.Tensor:
        """fp32 scores ``[rows, vocab]`` with -inf where a row's top-k, top-p or min-p drops a token. The limits are
        ``[rows]``, int64, fp32 and fp32, on the scores' device; 0, 1 and 0 drop nothing, and None stands for a limit
        that no row has."""

    def largest(self, scores: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]`` → the index of each row's largest score, the first of equal ones, int64 ``[rows]``."""
        return scores.argmax(dim=-1)

    def choose(
        self, scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """The keyed Gumbel choice (see gumbel.py) in rows where ``sampled`` (bool ``[rows]``) is set, and the largest
        score in the others → int64 ``[rows]``. scores ``[rows, vocab]``, fp32 if any row is sampled; seeds and
        positions int64 ``[rows]``, where a position is the index of the new token in its sequence."""

    def draw(self, scores: torch.Tensor, choice: Choice) -> torch.Tensor:
        """The token of each row of scores ``[rows, vocab]``, of any dtype → int64 ``[rows]``."""
        scores = choice.amend(scores)
        if choice.keys is None:
            return self.largest(scores)
        scores = scores.float()
        if choice.temperature is not None:
            scores = scores / choice.temperature.unsqueeze(1)
        limits = choice.top_k, choice.top_p, choice.min_p
        if any(limit is not None for limit in limits):
            scores = self.mask(scores, *limits)
        return self.choose(scores, *choice.keys)

    def draw_and_score(
        self,
        scores: torch.Tensor,
        choice: Choice,
        logits: torch.Tensor,
        groups: Sequence[tuple[torch.Tensor | None, int]],
    ) -> tuple[torch.Tensor, list[RowScores]]:
        """`draw`, and `score` of the tokens drawn by the model's logits ``[rows, vocab]``: for each group of
        rows, int64 ``[n]`` (None: all rows), with its count. Groups have no row in common."""
        tokens, found = self.draw(scores, choice), []
        for rows, count in groups:
            mine, own = (logits, tokens) if rows is None else (logits[rows], tokens[rows])
            found.append(self.score(mine, own, count))
        return tokens, found

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> RowScores:
        """Log probabilities by logits ``[rows, vocab]`` of the row's token (int64 ``[rows]``), and of the `count`
        likeliest tokens of the row, or of all if the vocabulary is smaller."""
        logprobs = logits.float().log_softmax(1)
        own = logprobs.gather(1, tokens.unsqueeze(1))
        ranks = (logprobs > own).sum(1, dtype=torch.int32) + 1
        largest, ids = logprobs.topk(min(count, logprobs.shape[1]))
        return RowScores(torch.cat([tokens.unsqueeze(1), ids], 1).int(), torch.cat([own, largest], 1), ranks)

    def act_and_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """``act(gate) * up`` of ``[rows, 2 * n]``, gate first → ``[rows, n]``, computed in fp32; activation is
        ``silu``, ``gelu``, ``gelu_tanh``, or `CLAMPED` with both interleaved. Raises ValueError for another."""


def each_expert(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    num_experts: int,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`Backend.experts` by `compute`, which is called with the number of each expert that is chosen, and its rows."""
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    ends = torch.bincount(pairs, minlength=num_experts).cumsum(0).tolist()
    outputs = x.new_empty(len(pairs), x.shape[1])
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > start:
            mine = order[start:end]
            outputs[mine] = compute(expert, x[mine // chosen.shape[1]])
    return (outputs.view(*chosen.shape, x.shape[1]).float() * shares.float().unsqueeze(2)).sum(1).to(x.dtype)
