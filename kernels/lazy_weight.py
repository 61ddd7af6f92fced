"""Weights whose values are made when torch needs them: those of quantized checkpoints, which are held as integers,
experts that are joined, those that are widened for a while, and those that a backend has packed.

A model is learned, fused and verified as if its weights were plain, but values are made for one operation at a time and
dropped after it. What turns, joins, stacks or cuts such weights gives others of their kind, so that a backend finds
the integers of whatever a model made of a checkpoint's tensors, and nothing is in memory twice.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from . import host_memory
from .decoder_contract import Packed, QuantizedWeight

Pack = Callable[[QuantizedWeight, torch.dtype], Packed]
"""See `Backend.pack`."""
SHORTEST = 32  # inputs of a group that kernels take
SHORTEST_CODED = 16  # the same where numbers stand for others, in a codebook
_SAMPLED = 8  # weights of a stack


class UnlikeError(ValueError):
    """Weights that a model's kernels join are quantized in different ways."""


class Matrix(ABC):
    """A weight ``[out, in]``."""

    shape: tuple[int, int]
    has_integers = True

    def read(self) -> QuantizedWeight:
        """All of it, if it `has_integers`. It is not kept."""
        raise ValueError("the weight has no integers")

    @abstractmethod
    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """``[out, in]``. They may be those of the checkpoint's file, and are not to be written to."""

    @abstractmethod
    def leaves(self) -> Iterator[Plain | Leaf]:
        """What it is made of."""


class Plain(Matrix):
    """A weight of a plain checkpoint, in the memory of its file."""

    has_integers = False

    def __init__(self, tensor: torch.Tensor) -> None:
        out, inputs = tensor.shape
        self.shape, self.tensors = (out, inputs), [tensor]

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return self.tensors[0].to(dtype)

    def forget(self) -> None:
        """Nothing: it holds nothing."""

    def leaves(self) -> Iterator[Plain | Leaf]:
        yield self


class Leaf(Matrix):
    """A weight of a quantized checkpoint. It is packed by `pack` when its values are first asked for."""

    def __init__(
        self, shape: tuple[int, int], tensors: Sequence[torch.Tensor], read: Callable[[], QuantizedWeight], pack: Pack
    ) -> None:
        """tensors: which `read` reads."""
        self.shape, self.tensors = shape, tensors
        self._read, self.pack = read, pack
        self._packed: dict[torch.dtype, Packed] = {}

    def read(self) -> QuantizedWeight:
        return self._read()

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        packed = next(iter(self._packed.values()), None) or self.packed(dtype)
        return packed.unpack().to(dtype)

    def packed(self, dtype: torch.dtype) -> Packed:
        """For rows of this dtype. It is kept until `forget`."""
        if dtype not in self._packed:
            self._packed[dtype] = self.pack(self.read(), dtype)
        return self._packed[dtype]

    def take(self, dtype: torch.dtype) -> Packed:
        """The same, for the caller to keep."""
        self.packed(dtype)
        return self._packed.pop(dtype)

    def forget(self) -> None:
        """Return the memory of what is packed to the system."""
        for packed in self._packed.values():
            packed.give_back()
        self._packed = {}

    def leaves(self) -> Iterator[Plain | Leaf]:
        yield self


class Unpacked(Matrix):
    """A weight that a backend has packed, without its integers."""

    has_integers = False

    def __init__(self, shape: tuple[int, int], packed: Packed) -> None:
        self.shape, self._packed = shape, packed

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return self._packed.unpack().to(dtype)

    def leaves(self) -> Iterator[Plain | Leaf]:
        return iter(())


class Joined(Matrix):
    """Rows of several, one after another."""

    def __init__(self, parts: Sequence[Matrix]) -> None:
        self._parts = parts
        self.shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self.has_integers = all(part.has_integers for part in parts)

    def read(self) -> QuantizedWeight:
        """Raises `UnlikeError`."""
        read = [part.read() for part in self._parts]
        codes = {None if x.codebook is None else tuple(x.codebook.tolist()) for x in read}
        if len({(x.scales.shape[1], x.zeros is None) for x in read}) > 1 or len(codes) > 1:
            raise UnlikeError("weights that a model's kernels join are quantized in different ways")
        numbers, scales, zeros, codebooks = zip(*read, strict=True)
        joint = None if zeros[0] is None else torch.cat(zeros)
        return QuantizedWeight(torch.cat(numbers), torch.cat(scales), joint, codebooks[0])

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return host_memory.joined([part.values(dtype) for part in self._parts])

    def leaves(self) -> Iterator[Plain | Leaf]:
        for part in self._parts:
            yield from part.leaves()


class Piece(Leaf):
    """Rows (dim 0) or columns (dim 1) of another one, packed by itself. Where groups of inputs are cut, they become
    shorter."""

    def __init__(self, whole: Matrix, dim: int, start: int, end: int) -> None:
        """whole: one that `has_integers`."""
        leaves = [leaf for leaf in whole.leaves() if isinstance(leaf, Leaf)]
        shape = (end - start, whole.shape[1]) if dim == 0 else (whole.shape[0], end - start)
        super().__init__(shape, [x for leaf in leaves for x in leaf.tensors], self._read_piece, leaves[0].pack)
        self._whole, self._dim, self._start, self._end = whole, dim, start, end

    def _read_piece(self) -> QuantizedWeight:
        """Raises ValueError if groups would be too short for kernels."""
        numbers, scales, zeros, codebook = self._whole.read()
        start, end, group, short = self._start, self._end, numbers.shape[1] // scales.shape[1], 0
        if self._dim == 1:
            short = math.gcd(group, start, end)
            if short < (SHORTEST if codebook is None else SHORTEST_CODED):
                raise ValueError(f"a part of a quantized weight would have groups of {short} inputs")

        def part(x: torch.Tensor) -> torch.Tensor:
            if self._dim == 0:
                return x[start:end]
            return x.repeat_interleave(group // short, 1)[:, start // short : end // short]

        numbers = numbers[start:end] if self._dim == 0 else numbers[:, start:end]
        return QuantizedWeight(numbers, part(scales), None if zeros is None else part(zeros), codebook)


class LazyWeight(torch.Tensor):
    """A weight ``[out, in]``, or those of experts ``[experts, out, in]``. Where it is turned, its last two dimensions
    are the other way round. It can't be written to."""

    matrices: list[Matrix]  # of each expert, or one
    stacked: bool
    turned: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, matrices: Sequence[Matrix], dtype: torch.dtype, stacked: bool = False, turned: bool = False
    ) -> LazyWeight:
        shape = matrices[0].shape[::-1] if turned else matrices[0].shape
        whole = (len(matrices), *shape) if stacked else shape
        with torch.inference_mode(False):  # as weights are, of which a module may take views
            made: Any = torch.Tensor._make_wrapper_subclass(cls, whole, dtype=dtype)
        made.matrices, made.stacked, made.turned = list(matrices), stacked, turned
        return made  # type: ignore[no-any-return]

    @classmethod
    def of(cls, weight: torch.Tensor, dtype: torch.dtype) -> LazyWeight:
        """A weight ``[out, in]`` or ``[experts, out, in]``, plain or lazy, with this dtype when it is used."""
        if isinstance(weight, LazyWeight):
            return cls(weight.matrices, dtype, weight.stacked, weight.turned)
        weight, stacked = weight.detach(), weight.dim() == 3
        return cls([Plain(each) for each in (weight if stacked else [weight])], dtype, stacked)

    @property
    def has_integers(self) -> bool:
        """Whether it is quantized."""
        return bool(self.matrices) and all(matrix.has_integers for matrix in self.matrices)

    def values(self) -> torch.Tensor:
        """A usual tensor, contiguous unless it is turned. It is not to be written to."""
        made = [matrix.values(self.dtype) for matrix in self.matrices]
        values = torch.stack(made) if self.stacked else made[0]
        return values.mT if self.turned else values

    def forget(self) -> None:
        """Let go of what it is made of. It has no values any more."""
        for matrix in self.matrices:
            for leaf in matrix.leaves():
                leaf.forget()
        self.matrices = []

    def sample(self) -> list[torch.Tensor]:
        """Tensors of the checkpoint that make up some of it, from beginning to end."""
        every = -(-len(self.matrices) // _SAMPLED)
        return [tensor for matrix in self.matrices[::every] for leaf in matrix.leaves() for tensor in leaf.tensors]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if (take := _OPERATIONS.get(func)) is not None and (made := take(*args, **kwargs)) is not None:
            return made
        if func._schema.is_mutable and isinstance(args[0], LazyWeight):
            raise TypeError(f"{func} would write to a weight that is made when it is used")
        if func.is_view:
            # views of what was made outside of inference mode must be made there, too; and they may be of a kind that
            # is known, once they are taken apart
            with torch.inference_mode(False):
                if (made := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return made
                return func(args[0].values().contiguous(), *args[1:], **kwargs)
        args, kwargs = tree_map_only(LazyWeight, LazyWeight.values, (args, kwargs))
        return func(*args, **kwargs)


def _like(x: LazyWeight, matrices: Sequence[Matrix], turned: bool | None = None) -> LazyWeight:
    return LazyWeight(matrices, x.dtype, x.stacked, x.turned if turned is None else turned)


def _same(x: LazyWeight, *_: Any, **__: Any) -> LazyWeight:
    return _like(x, x.matrices)


def _convert(x: LazyWeight, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> LazyWeight | None:
    dtype = dtype or x.dtype
    fits = dtype.is_floating_point and torch.device(device or "cpu").type == "cpu"
    return LazyWeight.of(x, dtype) if fits else None


def _turn(x: LazyWeight, first: int = 0, second: int = 1) -> LazyWeight | None:
    last = {first % x.dim(), second % x.dim()} == {x.dim() - 2, x.dim() - 1}
    return _like(x, x.matrices, not x.turned) if last else None


def _permute(x: LazyWeight, dims: Sequence[int]) -> LazyWeight | None:
    return _turn(x, -2, -1) if list(dims) == [*range(x.dim() - 2), x.dim() - 1, x.dim() - 2] else None


def _select(x: LazyWeight, dim: int, index: int) -> LazyWeight | None:
    fits = x.stacked and dim % 3 == 0
    return LazyWeight([x.matrices[index]], x.dtype, turned=x.turned) if fits else None


def _slice(
    x: LazyWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyWeight | None:
    start, end, _ = slice(start, end).indices(x.shape[dim])
    if step != 1 or end <= start:
        return None
    at = dim % x.dim() - (x.dim() - 2)  # of the last two dimensions
    if at < 0:
        return _like(x, x.matrices[start:end])
    if not x.has_integers:
        return None
    return _like(x, [Piece(matrix, at ^ x.turned, start, end) for matrix in x.matrices])


def _cat(tensors: Sequence[Any], dim: int = 0) -> LazyWeight | None:
    """Rows of each matrix, one after another."""
    first = tensors[0]
    if not _are_alike(tensors) or dim % first.dim() != first.dim() - 2 + first.turned:
        return None
    return _like(first, [Joined(parts) for parts in zip(*(x.matrices for x in tensors), strict=True)])


def _stack(tensors: Sequence[Any], dim: int = 0) -> LazyWeight | None:
    if not _are_alike(tensors) or dim or tensors[0].dim() != 2 or len({x.shape for x in tensors}) > 1:
        return None
    return LazyWeight([x.matrices[0] for x in tensors], tensors[0].dtype, True, tensors[0].turned)


def _grouped_mm(
    rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor | None = None, *more: Any, **kwargs: Any
) -> torch.Tensor | None:
    """Rows ``[n, in]`` times ``[experts, in, out]``: by one expert after the other, of those that have rows."""
    if not isinstance(weights, LazyWeight) or rows.dim() != 2 or offs is None or more or kwargs:
        return None
    ends: list[int] = offs.tolist()
    spans = [(i, start, end) for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start]
    products = [rows[start:end] @ weights[i].values() for i, start, end in spans]
    return torch.cat(products) if products else None


def _embedding(weight: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor | None:
    if not isinstance(weight, LazyWeight) or weight.turned or not isinstance(table := weight.matrices[0], Plain):
        return None
    return torch.embedding(table.tensors[0], indices).to(weight.dtype)


def _are_alike(tensors: Sequence[Any]) -> bool:
    if not all(isinstance(x, LazyWeight) for x in tensors):
        return False
    return len({(x.dtype, x.dim(), x.turned, len(x.matrices)) for x in tensors}) == 1


_aten = torch.ops.aten
_OPERATIONS: dict[Any, Callable[..., torch.Tensor | None]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.clone.default: _same,
    _aten._to_copy.default: _convert,
    _aten.t.default: _turn,
    _aten.transpose.int: _turn,
    _aten.permute.default: _permute,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.embedding.default: _embedding,
    _aten._grouped_mm.default: _grouped_mm,
}
"""What gives lazy weights, or needs the values of some of them only; None: not of these arguments."""
