"""The native backend: C++ kernels for x86 and aarch64 processors, compiled on first use (see build.py).

Each method packs addresses, sizes and strides into one array of 64-bit words, which native.cpp unpacks, and makes one
call. A call takes one or two microseconds and releases the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from ..contract import AttentionSpec, Backend, Choice, LayerCache, PagedBatch, RowScores, SlopeBias, TableBias
from ..decoder_contract import Decoder, LayerTensors, Linear, Norm, QuantizedWeight
from ..lazy_weight import LazyWeight
from ..reference.reference_backend import ReferenceBackend
from .build import function, load
from .choice import choice_words, scoring
from .decoder import ACTIVATIONS, DTYPES, NativeDecoder, cache_view
from .native_scans import NativeScans
from .weights import DTYPES as PLAIN
from .weights import PanelWeight, linear, pack_quantized, readable

_NO_HEADS = (0, 0, 0, 0)
_NO_CACHE = (0,) * 11


class NativePlan:
    """A step's attention for one spec, as C++ holds it."""

    def __init__(self, library: ctypes.CDLL, spec: AttentionSpec, handle: int) -> None:
        self.spec = spec
        self.handle = handle
        self._forget = library.mainspring_attention_forget

    def __del__(self) -> None:
        self._forget(self.handle)


class NativeBackend(Backend):
    """C++ on a CPU. See `contract.Backend` for what the methods promise.

    Raises:
        BackendUnavailableError: it can't be built here, or the processor is not one it is written for.
    """

    name = "native"
    deterministic = True
    graph_max_kv_len: int | None = 0
    heads_first = True
    packs_integers = True

    def __init__(self, level: str | None = None) -> None:
        """`level` names an instruction set of build.py; None: the best one of this processor."""
        self._library = library = load(level)
        self._plan_attention = function(library, "attention_plan", "5q2d10q", ctypes.c_void_p)
        self._attention = function(library, "attention", "18q")
        self._rotate_and_append = function(library, "rotate_and_append", "32q")
        self._rms_norm = function(library, "rms_norm", "9q2d2q")
        self._add_rms_norm = function(library, "add_rms_norm", "7q2dq")
        self._act_and_mul = function(library, "act_and_mul", "8q")
        self._choose = function(library, "choose", "27q")
        self._score = function(library, "score", "8q")
        library.mainspring_attention_forget.argtypes = [ctypes.c_void_p]
        library.mainspring_attention_forget.restype = None
        self.scans = NativeScans(library)
        self._biases: dict[int, tuple[SlopeBias | TableBias, torch.Tensor]] = {}  # by id
        self._reference = ReferenceBackend()  # for dtypes and strides that the C++ code does not know

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """Dtypes that no native kernel knows."""
        if spec.selects:
            return "keys that an indexer selects: no kernel here gathers them"
        if dtype not in DTYPES or kv_dtype not in DTYPES:
            return f"queries of {dtype} and a cache of {kv_dtype}, where native kernels know 32, 16 and 8 bits"
        return None

    def append(
        self, cache: LayerCache, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Write the keys and values of this step's tokens to their rows of the cache, in its dtype."""
        if keys.dtype not in DTYPES or values.dtype != keys.dtype:
            return self._reference.append(cache, keys, values, blocks, rows)
        keys, values = readable(keys), readable(values)
        blocks, rows = blocks.int().contiguous(), rows.int().contiguous()
        self._rotate_and_append(
            len(keys), DTYPES[keys.dtype], *_NO_HEADS, *_heads(keys), *_heads(values),
            keys.shape[2], values.shape[2], 0, 0, 0, 0,
            *cache_view(cache.keys), *cache_view(cache.values), DTYPES[cache.keys.dtype],
            blocks.data_ptr(), rows.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip

    def takes(self, batch: PagedBatch) -> bool:
        return True

    def plan(
        self, spec: AttentionSpec, batch: PagedBatch, device: torch.device, turn: int = 0, graph: bool = False
    ) -> NativePlan:
        """Cut the step into units of work for as many threads as torch uses. Layers may run with a plan one after
        another, not at once. Raises ValueError for a block size that is not a multiple of 8."""
        if batch.block_size < 1 or batch.block_size % 8:
            raise ValueError(f"block_size is {batch.block_size}; it must be a multiple of 8")
        requests = len(batch.last_page_len)
        bias, columns = self._bias(spec.bias)
        arrays = [x.contiguous() for x in (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.last_page_len)]
        reach = None if batch.reach is None else batch.reach.int().contiguous()
        handle = self._plan_attention(
            *spec[:4], spec.window or 0, spec.scale, spec.softcap or 0.0, requests,
            *(x.data_ptr() for x in arrays), batch.block_size, torch.get_num_threads(), bias, columns,
            0 if reach is None else reach.data_ptr(),
        )  # fmt: skip
        return NativePlan(self._library, spec, handle)

    def _bias(self, bias: SlopeBias | TableBias | None) -> tuple[int, int]:
        """Address and columns of the bias in fp32, which is kept."""
        if bias is None:
            return 0, 0
        if id(bias) not in self._biases:
            self._biases[id(bias)] = (
                bias,
                torch.tensor(bias[0], dtype=torch.float32).view(len(bias[0]), -1).contiguous(),
            )
        values = self._biases[id(bias)][1]
        return values.data_ptr(), values.shape[1]

    def run(
        self, plan: NativePlan, query: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of every row of the step → ``[rows, q_heads, value_dim]``; padding rows are zero."""
        query = readable(query)
        out = torch.empty(len(query), plan.spec.num_q_heads, plan.spec.value_dim, dtype=query.dtype)
        if sinks is not None:
            sinks = sinks.float().contiguous()
        self._attention(
            plan.handle, query.data_ptr(), query.stride(0), query.stride(1),
            DTYPES[query.dtype], DTYPES[cache.keys.dtype], *cache_view(cache.keys), *cache_view(cache.values),
            0 if sinks is None else sinks.data_ptr(), out.data_ptr(), len(query), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        """RMSNorm over the last dimension, in fp32."""
        if x.dtype not in DTYPES or weight.dtype not in DTYPES:
            return self._reference.rms_norm(x, weight, eps, offset)
        out = torch.empty(x.shape, dtype=x.dtype)
        x, view = _row_view(x)
        self._rms_norm(
            x.data_ptr(), *view, DTYPES[x.dtype], weight.data_ptr(), DTYPES[weight.dtype], x.shape[-1],
            eps, offset, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the rounded sum, in the memory of `x`, and the sum, in that of `residual`."""
        if not (x.dtype == residual.dtype in DTYPES and x.is_contiguous() and residual.is_contiguous()):
            return self._reference.add_rms_norm(x, residual, weight, eps, offset)
        width = x.shape[-1]
        self._add_rms_norm(
            x.data_ptr(), residual.data_ptr(), DTYPES[x.dtype], weight.data_ptr(), DTYPES[weight.dtype],
            x.numel() // width, width, eps, offset, torch.get_num_threads(),
        )  # fmt: skip
        return x, residual

    def rotate(self, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False) -> None:
        """RoPE, in fp32."""
        if not (query.dtype == key.dtype in DTYPES and query.stride(2) == key.stride(2) == 1):
            return self._reference.rotate(query, key, cos_sin, interleaved)
        self._rotate_and_append(
            len(query), DTYPES[query.dtype], *_heads(query), *_heads(key), *_NO_HEADS, query.shape[2], 0,
            cos_sin.data_ptr(), cos_sin.stride(0), cos_sin.shape[1], interleaved, *_NO_CACHE, torch.get_num_threads(),
        )  # fmt: skip

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """A native product: bits of torch's own depend on the number of rows, and on a processor without bf16
        instructions it is slow in half precision."""
        if isinstance(weight, LazyWeight):
            weight = weight.values()
        if x.dtype != weight.dtype or x.dtype not in PLAIN or (bias is not None and bias.dtype != x.dtype):
            return F.linear(x, weight, bias)
        return linear(self._library, x, weight, bias)

    def decoder(
        self,
        layers: Sequence[LayerTensors],
        norm: Norm,
        head: Linear,
        bits: int | None = None,
    ) -> Decoder:
        """One call runs a step."""
        return NativeDecoder(self._library, layers, norm, head, bits)

    def pack(self, weight: QuantizedWeight, dtype: torch.dtype) -> PanelWeight:
        return pack_quantized(self._library, weight, dtype)

    def mask(
        self,
        scores: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        min_p: torch.Tensor | None,
    ) -> torch.Tensor:
        """The reference's: `draw` does not need a masked copy of the scores."""
        return self._reference.mask(scores, top_k, top_p, min_p)

    def largest(self, scores: torch.Tensor) -> torch.Tensor:
        """`draw` of rows that ask for nothing."""
        return self.draw(scores, Choice())

    def choose(
        self, scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """`draw` without limits."""
        return self.draw(scores, Choice((seeds, positions, sampled)))

    def draw(self, scores: torch.Tensor, choice: Choice) -> torch.Tensor:
        """`draw_and_score` without log probabilities."""
        return self.draw_and_score(scores, choice, scores, ())[0]

    def draw_and_score(
        self,
        scores: torch.Tensor,
        choice: Choice,
        logits: torch.Tensor,
        groups: Sequence[tuple[torch.Tensor | None, int]],
    ) -> tuple[torch.Tensor, list[RowScores]]:
        """One call. Scores are not copied, except one row at a time to memory of the thread that chooses its token."""
        scores, logits, chosen = readable(scores), readable(logits), torch.empty(len(scores), dtype=torch.int64)
        words = choice_words(choice)
        every, vocab = np.arange(len(scores)), logits.shape[1]
        found, scored = scoring([(every if at is None else at.numpy(), min(count, vocab)) for at, count in groups])
        self._choose(
            scores.data_ptr(), DTYPES[scores.dtype], *scores.shape, scores.stride(0),
            *words.words,
            logits.data_ptr(), DTYPES[logits.dtype], logits.stride(0), len(scored), scored.ctypes.data,
            chosen.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return chosen, found

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> RowScores:
        """Of equally likely tokens the lowest ids are taken."""
        logits, tokens = readable(logits), tokens.contiguous()
        (found,), table = scoring([(np.arange(len(logits)), min(count, logits.shape[1]))])
        self._score(
            logits.data_ptr(), DTYPES[logits.dtype], *logits.shape, logits.stride(0), tokens.data_ptr(),
            table.ctypes.data, torch.get_num_threads(),
        )  # fmt: skip
        return found

    def act_and_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """See `Backend.act_and_mul`."""
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; the native backend knows {', '.join(ACTIVATIONS)}")
        if gate_up.dtype not in DTYPES:
            return self._reference.act_and_mul(gate_up, activation)
        gate_up = readable(gate_up)
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype)
        self._act_and_mul(
            gate_up.data_ptr(), gate_up.stride(0), DTYPES[gate_up.dtype], ACTIVATIONS[activation], rows, width,
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


def _heads(x: torch.Tensor) -> tuple[int, ...]:
    """HeadView of ``[tokens, heads, dim]``."""
    return x.data_ptr(), x.shape[1], x.stride(0), x.stride(1)


def _row_view(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int, int]]:
    """`x`, copied if its last dimension is not contiguous or its rows have more than two strides, and RowView's numbers
    for it: rows, and of an inner and an outer dimension of them inner size, outer stride and inner stride."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    dims = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    joined: list[tuple[int, int]] = []
    for size, stride in dims:
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    if len(joined) > 2:
        return _row_view(x.contiguous())
    (outer, outer_stride), (inner, inner_stride) = [(1, 0), (1, 0), *joined][-2:]
    return x, (outer * inner, inner, outer_stride, inner_stride)
