"""A backend over several ranks. All is the backend's own, but that products of row-wise layers are added up.

Every linear layer computes through `Backend.linear`, so this is the one place where ranks exchange what belongs to
linear layers. Which products are partial sums, or columns of which all are wanted, is known by the weight's identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from ...ipc.errors import UnsupportedModelError
from ...kernels.contract import Backend
from ...kernels.decoder_contract import Decoder, LayeredDecoder
from ..model.run.lora import AdaptedBackend
from .group import OneRank, RankGroup, added
from .homes import Homes


class ParallelBackend:
    """See above. It also stands for the group's ranks where a model is loaded.

    Args:
        parts: if not 0, of how many products in fp32 a sum is made, whatever the number of ranks: a power of 2, and a
            multiple of that number. Then any number of ranks gives the same bits.
        homes: if each rank has requests of its own, and some of the experts.
    """

    knows_ids = True

    def __init__(
        self,
        backend: Backend | AdaptedBackend,
        group: RankGroup | OneRank,
        parts: int = 0,
        homes: Homes | None = None,
    ) -> None:
        self.backend, self.group = backend, group
        self.parts, self.homes = parts, homes
        self.pieces: dict[int, tuple[tuple[int, int], list[torch.Tensor]]] = {}  # of weights, see `_pieces_of`
        self.summed: dict[int, bool] = {}  # id of a weight of partial sums → whether its input comes whole
        self.gathered: set[int] = set()
        self.output: int | None = None  # id of the output layer's weight, where ranks have rows of their own
        self._held: list[torch.Tensor] = []  # so that an id means one tensor
        self._inside = False  # in a product: while a model loads, torch sends inner products here once more

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def forget(self) -> None:
        """The next model's weights are other ones."""
        self.summed, self.gathered, self.output, self._held, self.pieces = {}, set(), None, [], {}

    def move(self, weights: Mapping[int, torch.Tensor]) -> None:
        """Other tensors have taken the places of weights: `weights` has the new tensor by the `id` of the old."""
        ids = {key: id(tensor) for key, tensor in weights.items()}
        self.summed = {ids.get(key, key): whole_input for key, whole_input in self.summed.items()}
        self.gathered = {ids.get(key, key) for key in self.gathered}
        self.output = None if self.output is None else ids.get(self.output, self.output)
        self._held = [weights.get(id(tensor), tensor) for tensor in self._held]
        self.pieces = {key: pieces for key, pieces in self.pieces.items() if key not in weights}

    def add_up(self, weight: torch.Tensor, whole_input: bool) -> None:
        """Products of this weight are partial sums from now on. whole_input: its rows come with all columns, of which
        this rank takes its own."""
        self.summed[id(weight)] = whole_input
        self._held.append(weight)

    def gather(self, weight: torch.Tensor) -> None:
        """Products of this weight are some columns of what is wanted."""
        self.gathered.add(id(weight))
        self._held.append(weight)

    def collect(self, weight: torch.Tensor) -> None:
        """Products of this weight, the output layer's, are of the rows of all ranks."""
        self.output = id(weight)
        self._held.append(weight)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Backend.linear`."""
        if self._inside:
            return self.backend.linear(x, weight, bias)
        self._inside = True
        try:
            return self.together(self.backend.linear, x, weight, bias)
        finally:
            self._inside = False

    def together(self, linear: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product of all ranks, of which `linear` computes this one's part."""
        if self.homes is not None and id(weight) == self.output:
            x = self.homes.collect(x)
        whole_input = self.summed.get(id(weight))
        if whole_input is None:
            out = linear(x, weight, bias)
            return self.group.gather(out) if id(weight) in self.gathered else out
        if whole_input:
            x = x.chunk(self.group.size, -1)[self.group.rank].contiguous()
        if self.parts:
            out = self.group.sum(self._in_parts(x, weight)).to(x.dtype)
        else:
            out = self.group.sum(linear(x, weight, None))
        return out if bias is None else out + bias

    def _in_parts(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """This rank's product as a sum of several ones, in fp32."""
        count = self.parts // self.group.size
        if weight.shape[1] % count:
            raise UnsupportedModelError(f"sum_parts is {self.parts}, but a layer has {weight.shape[1]} inputs a rank")
        pieces = self._pieces_of(weight, count) if count > 1 else [weight]
        columns = x.chunk(count, -1)
        return added([self.backend.linear(c.contiguous(), w) for c, w in zip(columns, pieces, strict=True)])

    @torch.inference_mode()
    def _pieces_of(self, weight: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Copies of parts of a weight. When it has changed they are written anew, in place: CUDA graphs read them."""
        state, (before, pieces) = (weight.data_ptr(), weight._version), self.pieces.get(id(weight), (None, []))
        if before != state:
            chunks = weight.detach().chunk(count, 1)
            if not pieces or pieces[0].dtype != weight.dtype:  # in fp32 while it is compared with its own code
                pieces = [torch.empty_like(chunk, memory_format=torch.contiguous_format) for chunk in chunks]
            for piece, chunk in zip(pieces, chunks, strict=True):
                piece.copy_(chunk)
            self.pieces[id(weight)] = state, pieces
        return pieces

    def renew(self, unseen: bool = False) -> None:
        """Weights have changed: renew the copies of their parts, which CUDA graphs read without a product here. unseen:
        also through their ``data``, which does not count as a change."""
        if unseen:
            torch.autograd.graph.increment_version(self._held)
        for weight in self._held:
            if (kept := self.pieces.get(id(weight))) is not None:
                self._pieces_of(weight, len(kept[1]))

    def decoder(self, *args: Any, **kwargs: Any) -> Decoder | None:
        """See `Backend.decoder`."""
        decoder = None if self.parts else self.backend.decoder(*args, **kwargs)
        return None if decoder is None else cast(Decoder, ParallelDecoder(decoder, self))


def adapters_of(backend: Backend) -> AdaptedBackend | None:
    """The backend with adapters, if `backend` is one, of one rank or of several."""
    inner: Any = backend.backend if isinstance(backend, ParallelBackend) else backend
    return inner if isinstance(inner, AdaptedBackend) else None


class ParallelDecoder(LayeredDecoder):
    """A backend's decoder, which runs layer by layer, because ranks exchange sums in each layer."""

    def __init__(self, decoder: Decoder, parallel: ParallelBackend) -> None:
        super().__init__(decoder)
        self._parallel = parallel

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Decoder.linear`."""
        return self._parallel.together(self._decoder.linear, x, weight, bias)
